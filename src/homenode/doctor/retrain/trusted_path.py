"""Trusted path: whether only root can change what a unit or hook of root's would run. [I/O]"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

_LINKS = 40


def changeable(paths: Iterable[Path]) -> str | None:
    """Who else could change what one of these paths leads to, for a message; None = no one.

    Looked at are the file itself, every folder above it, and the same of every link on the way.
    """
    for path in paths:
        for part in _on_the_way(path):
            try:
                known = part.lstat()
            except OSError as error:
                return f"{part}: {error.strerror}"
            if known.st_uid != 0:
                return f"{part} belongs to user {known.st_uid}"
            if stat.S_ISLNK(known.st_mode):
                continue  # its mode says nothing; its folder's does
            if known.st_mode & stat.S_IWOTH:
                return f"{part} can be written by everybody"
            if known.st_mode & stat.S_IWGRP and known.st_gid != 0:
                return f"{part} can be written by group {known.st_gid}"
    return None


def _on_the_way(path: Path) -> list[Path]:
    """The path, its folders, and those that links among them lead to."""
    found: list[Path] = []
    left = [path.absolute()]
    links = 0
    while left:
        one = left.pop()
        for part in (*reversed(one.parents), one):
            if part in found:
                continue
            found.append(part)
            if part.is_symlink() and (links := links + 1) <= _LINKS:
                target = Path(os.path.normpath(part.parent / part.readlink()))
                left += [target, target / one.relative_to(part)]
    return found
