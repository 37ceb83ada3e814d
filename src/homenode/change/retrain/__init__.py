"""Retraining a link: planned, journaled, carried out, restored where it fails."""
