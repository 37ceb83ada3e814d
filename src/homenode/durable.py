"""Durable: files that are whole or not there, and on the disk before anything goes on. [I/O]

What undoes a change must outlast a crash in the middle of it. All raise OSError.
"""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in place as a whole, for its owner alone. Only one writer at a time: it grows as
    .NAME.part beside its place."""
    part = path.with_name(f".{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    write_and_close(os.open(part, flags, 0o600), content)
    part.replace(path)
    sync_folder(path.parent)


def write_and_close(descriptor: int, content: bytes) -> None:
    """Write to an open file, and close it when that is on the disk."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have names that came or went in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
