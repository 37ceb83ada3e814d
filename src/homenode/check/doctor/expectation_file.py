"""ExpectationFile: a certified host as TOML that a person can read and edit.

format = 1
host = "node17"
memory_bytes = 2199023255552
distances = [[10, 21], [21, 10]]
[facts.host]
kernel = "6.8.0-45-generic"
[facts."0000:19:00.0"]
bars = "0 16 MiB, 2 128 GiB, 4 32 MiB"
[[accepted]]
id = "pcie-errors-corrected"
about = "0000:19:00.0"
count = 1200
[counts]
packages = 2
[floors]
h2d_gb_per_s = 50.0
[[device]]
bdf = "0000:19:00.0"
kind = "gpu"
ids = "10de:2330"
node = 0
link = "32GT/s x16"
[[huge_pages]]
node = 0
page_bytes = 1073741824
pages = 256
"""

import json
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, defstruct, field
from msgspec.structs import asdict

from homenode.bdf import Bdf
from homenode.check.doctor.expectation import (
    CERTIFIED_KINDS,
    COUNTS,
    FLOORS,
    Accepted,
    CertifiedDevice,
    CertifiedHost,
)
from homenode.machine.description.document import LinkText
from homenode.machine.link_path import LinkRate
from homenode.machine.pci import DeviceKind
from homenode.toml_text import Count, Line, TomlTable, decode_toml

VERSION = 2
_THIS_VERSION = f"{VERSION}, as homenode watch certify of this version writes it"
GigabytesPerSecond = Annotated[float, Meta(gt=0, lt=1e6, extra={"expected": "GB/s such as 50.0"})]


class FloorsTable(TomlTable):
    h2d_gb_per_s: GigabytesPerSecond | None = None


class DeviceTable(TomlTable):
    bdf: Bdf
    kind: DeviceKind = DeviceKind.GPU
    ids: Line | None = None
    node: Count | None = None
    link: LinkText | None = None


class HugePagesTable(TomlTable):
    node: Count
    page_bytes: Count
    pages: Count


CountsTable = defstruct(
    "CountsTable", [(n, Count | None, None) for n in COUNTS], bases=(TomlTable,)
)


class ExpectationTable(TomlTable):
    format: Annotated[int, Meta(ge=VERSION, le=VERSION, extra={"expected": _THIS_VERSION})]
    host: Line = ""
    memory_bytes: Count | None = None
    distances: tuple[tuple[Count, ...], ...] | None = None
    accepted: tuple[Accepted, ...] = ()
    counts: CountsTable = field(default_factory=CountsTable)  # type: ignore[valid-type]
    floors: FloorsTable = field(default_factory=FloorsTable)
    device: tuple[DeviceTable, ...] = ()
    huge_pages: tuple[HugePagesTable, ...] = ()
    facts: dict[Line, dict[Line, Line]] = field(default_factory=dict)


def render_expectation(expectation: CertifiedHost) -> str:
    """The text; parse_expectation gives the same value back."""
    lines = [
        "# homenode watch certify: a host as certified; homenode doctor --expect FILE compares",
        f"format = {VERSION}",
        f"host = {_quoted(expectation.host)}",
    ]
    if expectation.memory_bytes is not None:
        lines.append(f"memory_bytes = {expectation.memory_bytes}")
    if expectation.distances is not None:
        rows = ", ".join("[" + ", ".join(map(str, row)) + "]" for row in expectation.distances)
        lines.append(f"distances = [{rows}]")
    lines += _table("[counts]", expectation.counts)
    floors = {f"{n}_gb_per_s": round(value / 1e9, 6) for n, value in expectation.floors.items()}
    lines += _table("[floors]", floors) if floors else []
    for device in expectation.devices:
        link = f"{device.link.gt_per_s:g}GT/s x{device.link.width}" if device.link else None
        of = {"bdf": str(device.bdf), "kind": device.kind, "ids": device.ids, "node": device.node}
        lines += _table("[[device]]", {**of, "link": link})
    for (node, size), pages in expectation.huge_pages.items():
        lines += _table("[[huge_pages]]", {"node": node, "page_bytes": size, "pages": pages})
    for about, facts in expectation.facts.items():
        lines += _table(f"[facts.{_quoted(about)}]", facts)
    for one in expectation.accepted:
        lines += ["", "# The doctor found it: no alert."]
        lines += _table("[[accepted]]", asdict(one))[1:]
    return "\n".join(lines) + "\n"


def _table(heading: str, values: Mapping[str, str | float | None]) -> list[str]:
    """An empty line and the table's; None is left out."""
    lines = ["", heading]
    for name, value in values.items():
        if value is not None:
            is_bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
            text = _quoted(value) if isinstance(value, str) else value
            lines.append(f"{name if is_bare else _quoted(name)} = {text}")
    return lines


def parse_expectation(text: str, source: str) -> CertifiedHost:
    """The value of a site.toml. Raises InputError with file, key, expected and found."""
    file = decode_toml(text, ExpectationTable, source)
    rows = file.distances
    if rows is not None and any(len(row) != len(rows) for row in rows):
        raise file.refusal("distances", "as many columns as rows", [len(row) for row in rows])
    counts = {name: getattr(file.counts, name) for name in COUNTS}
    floors = {name: getattr(file.floors, f"{name}_gb_per_s") for name in FLOORS}
    return CertifiedHost(
        host=file.host,
        counts={name: count for name, count in counts.items() if count is not None},
        memory_bytes=file.memory_bytes,
        distances=rows,
        devices=tuple(map(_device, file.device)),
        floors={name: floor * 1e9 for name, floor in floors.items() if floor is not None},
        huge_pages={(one.node, one.page_bytes): one.pages for one in file.huge_pages},
        accepted=file.accepted,
        facts=file.facts,
    )


def _device(table: DeviceTable) -> CertifiedDevice:
    if table.kind not in CERTIFIED_KINDS:
        raise table.refusal("kind", f"one of {', '.join(CERTIFIED_KINDS)}", str(table.kind))
    link = None if table.link is None else table.link.link
    rate = None
    if link is not None and link.max_gt_per_s is not None and link.max_width is not None:
        rate = LinkRate(link.max_gt_per_s, link.max_width)
    return CertifiedDevice(
        bdf=table.bdf, kind=table.kind, ids=table.ids, node=table.node, link=rate
    )


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are a part of TOML's, but not those of surrogates."""
    sound = text.encode("utf-8", "replace").decode()
    written = json.dumps(sound, ensure_ascii=False)
    # The file is read on terminals: letters that could steer one are escapes, as JSON's others are.
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in written)
