"""Shipped evidence: the files that come with homenode, read once. [I/O]"""

from functools import cache
from importlib.resources import files

from homenode.evidence.model import Evidence
from homenode.evidence.parse import parse_evidence

_SUFFIX = ".toml"


@cache
def published_evidence() -> tuple[Evidence, ...]:
    """Every document, in the order of its first file's name."""
    folder = files("homenode") / "evidence"
    entries = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)),
        key=lambda entry: entry.name,
    )
    return parse_evidence({entry.name: entry.read_text(encoding="utf-8") for entry in entries})
