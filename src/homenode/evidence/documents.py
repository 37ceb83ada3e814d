"""Documents: the publications that come with homenode, read once. [I/O]"""

from functools import cache
from importlib.resources import files

from homenode.evidence.model import Publication
from homenode.evidence.parse import parse_publications

_SUFFIX = ".toml"


@cache
def publications() -> tuple[Publication, ...]:
    """Every document, in the order of its first file's name."""
    folder = files("homenode") / "evidence"
    entries = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)),
        key=lambda entry: entry.name,
    )
    return parse_publications({entry.name: entry.read_text(encoding="utf-8") for entry in entries})
