"""A folder for trees of /sys: ten thousand tiny files, for which some disks take seconds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A new folder, in memory where the machine has such a place; gone afterwards."""
    shm = Path("/dev/shm")
    with TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)
