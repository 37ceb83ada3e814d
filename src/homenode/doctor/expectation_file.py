"""ExpectationFile: a certified host as TOML that a person can read and edit.

format = 1
host = "node17"
memory_bytes = 2199023255552
distances = [[10, 21], [21, 10]]
accepted = ["ksm-on"]
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
import tomllib

from homenode.description.models import parse_link
from homenode.description.table import Table
from homenode.doctor.expectation import (
    CERTIFIED_KINDS,
    COUNTS,
    FLOORS,
    CertifiedDevice,
    Expectation,
)
from homenode.doctor.links.rate import LinkRate
from homenode.errors import InputError
from homenode.pci import DeviceKind

VERSION = 1
_FLOOR_KEYS = tuple(f"{name}_gb_per_s" for name in FLOORS)


def render_expectation(expectation: Expectation) -> str:
    """The text; parse_expectation gives the same value back."""
    lines = [
        "# homenode expect: the host when it was certified; homenode doctor --expect FILE compares",
        f"format = {VERSION}",
        f"host = {_quoted(expectation.host)}",
    ]
    if expectation.memory_bytes is not None:
        lines.append(f"memory_bytes = {expectation.memory_bytes}")
    if expectation.distances is not None:
        rows = ", ".join("[" + ", ".join(map(str, row)) + "]" for row in expectation.distances)
        lines.append(f"distances = [{rows}]")
    if expectation.accepted:
        ids = ", ".join(map(_quoted, expectation.accepted))
        lines += ["# Findings of the doctor that were there: no alert.", f"accepted = [{ids}]"]
    lines += ["", "[counts]"]
    lines += [f"{name} = {count}" for name, count in expectation.counts.items()]
    if expectation.floors:
        lines += ["", "[floors]"]
        lines += [f"{n}_gb_per_s = {value / 1e9:.6f}" for n, value in expectation.floors.items()]
    for device in expectation.devices:
        lines += ["", "[[device]]", f'bdf = "{device.bdf}"', f'kind = "{device.kind}"']
        if device.ids is not None:
            lines.append(f'ids = "{device.ids}"')
        if device.node is not None:
            lines.append(f"node = {device.node}")
        if device.link is not None:
            lines.append(f'link = "{device.link.gt_per_s:g}GT/s x{device.link.width}"')
    for (node, size), pages in expectation.huge_pages.items():
        lines += ["", "[[huge_pages]]", f"node = {node}", f"page_bytes = {size}"]
        lines.append(f"pages = {pages}")
    return "\n".join(lines) + "\n"


def parse_expectation(text: str, source: str) -> Expectation:
    """The value of a site.toml. Raises InputError with file, key, expected and found."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{source}: expected TOML, found: {error}") from None
    file = Table.of(
        source,
        "",
        values,
        (
            "format",
            "host",
            "memory_bytes",
            "distances",
            "accepted",
            "counts",
            "floors",
            "device",
            "huge_pages",
        ),
    )
    version = file.integer("format", 0)
    if version != VERSION:
        raise file.refusal("format", f"{VERSION}, the version that this program reads", version)
    counts = file.table("counts", COUNTS)
    floors = file.table("floors", _FLOOR_KEYS)
    return Expectation(
        host=file.text("host"),
        counts={name: counts.integer(name, 0) for name in COUNTS if name in counts},
        memory_bytes=file.optional_integer("memory_bytes"),
        distances=_distances(file),
        devices=tuple(
            _device(table)
            for table in file.tables("device", ("bdf", "kind", "ids", "node", "link"))
        ),
        floors={
            name: _rate(floors, f"{name}_gb_per_s")
            for name in FLOORS
            if f"{name}_gb_per_s" in floors
        },
        huge_pages={
            (table.integer("node", 0), table.integer("page_bytes", 0)): table.integer("pages", 0)
            for table in file.tables("huge_pages", ("node", "page_bytes", "pages"))
        },
        accepted=_accepted(file),
    )


def _distances(file: Table) -> tuple[tuple[int, ...], ...] | None:
    if "distances" not in file:
        return None
    rows: list[tuple[int, ...]] = []
    for row in file.list("distances"):
        if not isinstance(row, list) or not all(type(each) is int for each in row):
            raise file.refusal("distances", "rows of whole numbers", row)
        rows.append(tuple(row))
    if any(len(row) != len(rows) for row in rows):
        raise file.refusal("distances", "as many columns as rows", [len(row) for row in rows])
    return tuple(rows)


def _accepted(file: Table) -> tuple[str, ...]:
    found = file.list("accepted") if "accepted" in file else []
    if not all(isinstance(one, str) for one in found):
        raise file.refusal("accepted", "ids of findings", found)
    return tuple(map(str, found))


def _device(table: Table) -> CertifiedDevice:
    bdf = table.bdf("bdf")
    if bdf is None:
        raise table.refusal("bdf", "an address such as 0000:19:00.0", None)
    link = parse_link(table, "link")
    rate = None
    if link is not None and link.max_gt_per_s is not None and link.max_width is not None:
        rate = LinkRate(link.max_gt_per_s, link.max_width)
    kind = table.choice("kind", tuple(CERTIFIED_KINDS), DeviceKind.GPU)
    return CertifiedDevice(
        bdf, DeviceKind(kind), table.optional_text("ids"), table.optional_integer("node"), rate
    )


def _rate(floors: Table, key: str) -> float:
    value = floors.values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise floors.refusal(key, "GB/s such as 50.0", value)
    return float(value) * 1e9


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are a part of TOML's, but not those of surrogates."""
    sound = text.encode("utf-8", "replace").decode()
    return json.dumps(sound, ensure_ascii=False).replace("\x7f", "\\u007f")
