"""Package data: the texts that come with homenode. [I/O]"""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def list_package_names(*directory: str) -> tuple[str, ...]:
    """Return the sorted names in a directory of the package; () if it does not exist."""
    top = _PACKAGE.joinpath(*directory)
    return tuple(sorted(entry.name for entry in top.iterdir())) if top.is_dir() else ()


def read_package_text(*path: str) -> str:
    """Return a text of the package. Raises OSError if it does not exist."""
    return _PACKAGE.joinpath(*path).read_text(encoding="utf-8")
