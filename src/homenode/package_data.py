"""Package data: the texts that come with homenode. [I/O]"""

from importlib.resources import files

_PACKAGE = "homenode"


def package_names(*directory: str, package: str = _PACKAGE) -> tuple[str, ...]:
    """The names in a directory of the package, sorted; none where there is no such directory."""
    top = files(package).joinpath(*directory)
    entries = top.iterdir() if top.is_dir() else ()
    return tuple(sorted(entry.name for entry in entries))


def package_text(*path: str, package: str = _PACKAGE) -> str:
    """A text of the package. Raises OSError where there is none."""
    return files(package).joinpath(*path).read_text(encoding="utf-8")
