"""Bench: tests, their order and conditions; other tools' outputs."""
