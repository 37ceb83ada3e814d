"""The records that documents hold, the JSON path to each, and what pages say of their fields."""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from homenode.decide.comparison import Comparison
from homenode.decide.recommendation import RecommendedComparison
from homenode.findings import Findings
from homenode.machine.topology import Host
from homenode.measure.results.model import RunHead, Sample, Switches
from homenode.plan.stored import PlanRejection
from homenode.vm.plan import Plan
from tests.command_line import has_cluster
from tests.doc_pages import ROOT, Page

FORMATS = {
    "findings": Findings,
    "host": Host,
    "plan": Plan,
    "refusal": PlanRejection,
    "comparison": RecommendedComparison,
}
if has_cluster():
    from homenode.cluster.pool.fits import Pool

    FORMATS |= {"pool": Pool}


def parts(hint: object, path: str) -> Iterator[tuple[str, type]]:
    """The classes that a field's type is made of, with the JSON path to each."""
    if isinstance(hint, typing.NewType):
        return
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for one in arguments:
            yield from parts(one, path)
    elif typing.get_origin(hint) is tuple:
        for one in arguments:
            if one is not ...:
                yield from parts(one, f"{path}[]")
    elif isinstance(hint, type):
        yield path, hint


def stored_names(of: type) -> dict[str, str]:
    """The name of each field of a record, and how documents name it; empty for what is none."""
    if issubclass(of, msgspec.Struct):
        return {one.name: one.encode_name for one in msgspec.structs.fields(of)}
    if dataclasses.is_dataclass(of):
        return {one.name: one.metadata.get("name", one.name) for one in dataclasses.fields(of)}
    return {name: name for name in getattr(of, "_fields", ())}


def field_types(of: type) -> dict[str, object]:
    """Types of a record's fields, in order."""
    names = stored_names(of)
    hints = typing.get_type_hints(of) if names else {}
    return {name: hints[name] for name in names}


def below(of: type) -> dict[type, str]:
    """Every class that a stored value is made of, with the shortest JSON path to it."""
    found: dict[type, str] = {of: ""}
    queue = [of]
    while queue:
        record = queue.pop(0)
        for name, hint in field_types(record).items():
            prefix = f"{found[record]}." if found[record] else ""
            for path, kind in parts(hint, f"{prefix}{name}"):
                if kind not in found and not issubclass(kind, bool):
                    found[kind] = path
                    queue.append(kind)
    return found


_OF_RUNS = {RunHead: "Fields", Sample: "Samples", Switches: "switches"}
"""Records of lines, and the sections of the page of results that have their fields."""


def meanings() -> dict[tuple[type, str], str]:
    """What the format pages say of the fields of each record."""
    found: dict[tuple[type, str], str] = {}
    places = [
        (kind, record, path or "Fields")
        for kind, of in FORMATS.items()
        for record, path in below(of).items()
    ]
    places.append(("comparison", Comparison, "Fields"))
    places += [("results", record, heading) for record, heading in _OF_RUNS.items()]
    for kind, record, heading in places:
        stored = {name: field for field, name in stored_names(record).items()}
        path = Path(f"docs/reference/formats/{kind}.md")
        section = Page(path, (ROOT / path).read_text()).sections().get(heading, "")
        for row in section.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
            if len(cells) > 3 and cells[1].strip("`") in stored:
                found.setdefault((record, stored[cells[1].strip("`")]), cells[2])
    return found
