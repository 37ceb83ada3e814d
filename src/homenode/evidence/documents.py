"""Documents: the publications that come with homenode, read once. [I/O]"""

from functools import cache
from importlib.resources import files

from homenode.evidence.model import Publication
from homenode.evidence.parse import parse_publications

_SUFFIX = ".toml"
_ORDER = ("study", "study-scripts", "ibm", "sdumont", "xapi")
"""In which they explain one another; whatever else comes after them, by name."""


@cache
def publications() -> tuple[Publication, ...]:
    """Every document: the study first, then what explains it."""
    folder = files("homenode") / "evidence"
    entries = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)),
        key=lambda entry: entry.name,
    )
    found = parse_publications({entry.name: entry.read_text(encoding="utf-8") for entry in entries})
    return tuple(sorted(found, key=lambda one: _place(one.id)))


def _place(id: str) -> int:
    return _ORDER.index(id) if id in _ORDER else len(_ORDER)
