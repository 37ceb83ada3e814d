"""Package files: the texts that a package is shipped with, which may lie in a zip file. [I/O]"""

from importlib.resources import files

_PACKAGE = "homenode"


def package_names(*folder: str, package: str = _PACKAGE) -> tuple[str, ...]:
    """The names in a folder of the package, sorted; none where there is no such folder."""
    found = files(package).joinpath(*folder)
    return tuple(sorted(entry.name for entry in found.iterdir())) if found.is_dir() else ()


def package_text(*path: str, package: str = _PACKAGE) -> str:
    """A text of the package. Raises OSError where there is none."""
    return files(package).joinpath(*path).read_text(encoding="utf-8")
