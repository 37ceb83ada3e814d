"""Documents: the publications that come with homenode, read once. [I/O]"""

from functools import cache

from homenode.decide.evidence.model import Publication
from homenode.decide.evidence.parse import parse_publications
from homenode.input_files import package_names, package_text

_FOLDER, _SUFFIX = ("decide", "evidence"), ".toml"
_ORDER = ("study", "study-scripts", "ibm", "sdumont", "xapi")
"""In which they explain one another; whatever else comes after them, by name."""


@cache
def publications() -> tuple[Publication, ...]:
    """Every document: the study first, then what explains it."""
    names = [name for name in package_names(*_FOLDER) if name.endswith(_SUFFIX)]
    found = parse_publications({name: package_text(*_FOLDER, name) for name in names})
    return tuple(sorted(found, key=lambda one: _place(one.id)))


def _place(id: str) -> int:
    return _ORDER.index(id) if id in _ORDER else len(_ORDER)
