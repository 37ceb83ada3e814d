"""Import folder: reads the text files below a folder for import. [I/O]

Folders of others are untrusted: links are not followed, sizes and numbers are bounded.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from homenode.bench.imported import SourceFolder
from homenode.errors import InputError
from homenode.gap import Gap
from homenode.results.store import FILE

MAX_FILE_BYTES = 16 << 20
MAX_FILES = 5000
MAX_DEPTH = 6
MAX_LINE = 16384
"""Longest line of a text that is no JSON, in characters. The longest real ones list PUs."""


@dataclass(frozen=True, slots=True)
class FoundFolders:
    """Folders with texts, in the order of their paths, and what was left out."""

    folders: tuple[SourceFolder, ...]
    skipped: tuple[Gap, ...]


def find_folders(root: Path) -> FoundFolders:
    """The folders at and below a path; a file stands for itself alone.

    Raises InputError where nothing is there, or more than MAX_FILES.
    """
    if not root.exists():
        raise InputError(f"{root}: expected a folder or a file to import, found nothing")
    skipped: list[Gap] = []
    if root.is_file():
        texts = _texts([root], skipped, str(root.parent))
        folder = _folder(root.resolve().parent, root.resolve().parent, texts)
        return FoundFolders((folder,) if texts else (), tuple(skipped))
    folders: list[SourceFolder] = []
    seen = 0
    for here, below, names in os.walk(root, followlinks=False):
        below.sort()
        path = Path(here)
        depth = len(path.relative_to(root).parts)
        below[:] = [name for name in below if not name.startswith(".") and depth < MAX_DEPTH]
        if FILE in names:
            skipped.append(Gap(here, f"has a {FILE}: a run of homenode's already"))
            continue
        seen += len(names)
        if seen > MAX_FILES:
            raise InputError(
                f"{root}: expected at most {MAX_FILES} files, found more",
                hint="name the folders of the results themselves",
            )
        texts = _texts([path / name for name in sorted(names)], skipped, here)
        if texts:
            folders.append(_folder(root.resolve(), path.resolve(), texts))
    return FoundFolders(tuple(folders), tuple(skipped))


def _folder(root: Path, path: Path, texts: dict[str, str]) -> SourceFolder:
    """Called from the named folder on: results do not carry where a user keeps them."""
    inside = path.relative_to(root).parts
    return SourceFolder(
        "/".join(_printable(part) for part in (root.name, *inside)),
        _printable(path.name),
        _printable(path.parent.name),
        texts,
    )


def _texts(paths: list[Path], skipped: list[Gap], here: str) -> dict[str, str]:
    found = {}
    for path in paths:
        if path.name.startswith("."):
            continue
        if path.is_symlink() or not path.is_file():
            skipped.append(Gap(f"{here}/{path.name}", "not a plain file"))
            continue
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            skipped.append(Gap(f"{here}/{path.name}", error.strerror or str(error)))
            continue
        if len(data) > MAX_FILE_BYTES or b"\0" in data:
            reason = f"more than {MAX_FILE_BYTES >> 20} MiB" if b"\0" not in data else "binary"
            skipped.append(Gap(f"{here}/{path.name}", reason))
            continue
        text = data.decode("utf-8", "replace").replace("\r\n", "\n")
        is_json = text.lstrip().startswith("{")
        if not is_json and max(map(len, text.split("\n"))) > MAX_LINE:
            skipped.append(Gap(f"{here}/{path.name}", f"a line of more than {MAX_LINE} characters"))
            continue
        found[_printable(path.name)] = text
    return found


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)
