"""Where published captures of real machines lie, for tests that read them in place."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
"""Next to the checkout. Third-party data: tests skip where it is absent, nothing is copied."""

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"published captures are not here: {SHARED}"
)
"""Marks a test that reads them."""


def shared(path: str) -> Path:
    """One of them, by its path below the directory."""
    return SHARED / path
