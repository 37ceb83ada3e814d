"""A directory for trees of /sys: ten thousand tiny files, for which some disks take seconds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_ENOUGH_BYTES = 2 << 30
"""Free, since a file takes a page and tests run side by side: in a container there may be 64 MB."""


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A new directory, in memory where the machine has such a place with space; gone afterwards."""
    shm = Path("/dev/shm")
    there = os.access(shm, os.W_OK)
    if there:
        space = os.statvfs(shm)
        there = space.f_bavail * space.f_frsize >= _ENOUGH_BYTES
    with TemporaryDirectory(dir=shm if there else None) as directory:
        yield Path(directory)
