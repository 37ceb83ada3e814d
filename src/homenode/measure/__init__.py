"""Bench: what is measured, in which order and under which conditions; other tools' outputs."""
