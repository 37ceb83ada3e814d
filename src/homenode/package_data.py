"""Package data: the texts that come with homenode. [I/O]"""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def package_names(*directory: str) -> tuple[str, ...]:
    """The names in a directory of the package, sorted; none where there is no such directory."""
    top = _PACKAGE.joinpath(*directory)
    return tuple(sorted(entry.name for entry in top.iterdir())) if top.is_dir() else ()


def package_text(*path: str) -> str:
    """A text of the package. Raises OSError where there is none."""
    return _PACKAGE.joinpath(*path).read_text(encoding="utf-8")
