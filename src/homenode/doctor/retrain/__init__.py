"""Retraining a link: planned, journaled, carried out, put back where it fails."""
