"""Where published captures of real machines lie, for tests that read them in place."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
"""Beside the checkout. Third-party data: tests skip where it is absent, nothing is copied."""
