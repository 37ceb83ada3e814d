"""Retraining a link: planned, journaled, executed, and restored if it fails."""
