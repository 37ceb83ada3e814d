"""Comparison: a topology file against what the guest's devices and the host's tree ask for."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, finding, in_order
from homenode.nccl.strict_reader import ReadTopology, XmlNode, read_link_speed, read_number
from homenode.nccl.topology import NcclCpu, NcclPci, NcclTopology

_Link = tuple[float | None, int | None]


class _Place(Struct, frozen=True, kw_only=True):
    """Where a device hangs. next to: the devices below its lowest switch, itself included; only
    itself where there is none. links: (GT/s, lanes) of the switches above, from the CPU down, and
    of itself last; None where the file leaves it to the guest."""

    numa_id: str
    affinity: CpuSet | None
    neighbours: frozenset[str]
    links: tuple[_Link, ...]


def compare_topology(read: ReadTopology, expected: NcclTopology) -> tuple[Finding, ...]:
    """What of a file is not as the host and the guest have it, the worst first."""
    found = _of_file(read)
    wanted = _of_topology(expected)
    return in_order([*_differences(read.source, found, wanted), *_of_cpus(read, expected)])


def _of_cpus(read: ReadTopology, expected: NcclTopology) -> Iterator[Finding]:
    """What NCCL computes the bandwidth between CPUs from."""
    cpus = [node for system in read.systems for node in system.children if node.name == "cpu"]
    by_number = {read_number(cpu.get("numaid")): cpu for cpu in reversed(cpus)}
    for wanted in expected.cpus:
        cpu = by_number.get(wanted.numa_id)
        if cpu is None:
            continue
        for name, value in _identity(wanted):
            there = cpu.get(name)
            number = name in ("familyid", "modelid")
            same = read_number(there) == int(value) if number else (there or "").startswith(value)
            if there is not None and not same:
                yield finding(
                    "nccl-cpu-differs",
                    f"cpu {wanted.numa_id}",
                    expected=f'{name}="{value}"',
                    observed=f'{name}="{there}"',
                    source=read.source,
                )


def _identity(cpu: NcclCpu) -> Iterator[tuple[str, str]]:
    for name, value in (
        ("arch", cpu.architecture),
        ("vendor", cpu.vendor),
        ("familyid", cpu.family),
        ("modelid", cpu.model),
    ):
        if value is not None:
            yield name, str(value)


def _differences(
    source: str, found: dict[str, _Place], wanted: dict[str, _Place]
) -> Iterator[Finding]:
    for bus_id, place in wanted.items():
        there = found.get(bus_id)
        if there is None:
            yield finding(
                "nccl-device-missing",
                bus_id,
                expected=f"on cpu {place.numa_id}",
                observed="not in the file",
                source=source,
            )
            continue
        if there.numa_id != place.numa_id:
            yield finding(
                "nccl-device-on-other-cpu",
                bus_id,
                expected=f"on cpu {place.numa_id}",
                observed=f"on cpu {there.numa_id}",
                source=source,
            )
        elif there.affinity is not None and there.affinity != place.affinity:
            yield finding(
                "nccl-other-vcpus",
                f"cpu {place.numa_id}, of {bus_id}",
                expected=f"vCPUs {place.affinity}",
                observed=f"vCPUs {there.affinity}",
                source=source,
            )
        if _link_differs(there.links, place.links):
            yield finding(
                "nccl-link-differs",
                bus_id,
                expected=_links_text(place.links),
                observed=_links_text(there.links),
                source=source,
            )
        if there.neighbours & wanted.keys() != place.neighbours:
            yield finding(
                "nccl-switch-group",
                bus_id,
                expected=_group_text(place.neighbours),
                observed=_group_text(there.neighbours),
                source=source,
            )
    for bus_id in found.keys() - wanted.keys():
        yield finding(
            "nccl-busid-of-no-device",
            bus_id,
            expected="bus ids of the guest's GPUs and NICs",
            observed="none of them",
            source=source,
        )


def _link_differs(there: tuple[_Link, ...], wanted: tuple[_Link, ...]) -> bool:
    """True where a link that the host gives is another in the file, or is left to the guest."""
    if len(there) != len(wanted):
        return True
    return any(
        expected is not None and value != expected
        for ours, theirs in zip(wanted, there, strict=True)
        for expected, value in zip(ours, theirs, strict=True)
    )


def _links_text(links: tuple[_Link, ...]) -> str:
    texts = [
        f"{'?' if speed is None else f'{speed:g}'} GT/s x{'?' if width is None else width}"
        for speed, width in links
    ]
    return ", ".join([*(f"switch {text}" for text in texts[:-1]), texts[-1]])


def _group_text(neighbours: frozenset[str]) -> str:
    if len(neighbours) == 1:
        return "alone below its switch or root"
    return f"below one switch: {', '.join(sorted(neighbours))}"


def _of_topology(topology: NcclTopology) -> dict[str, _Place]:
    found: dict[str, _Place] = {}

    def visit(cpu: NcclCpu, pcis: Iterable[NcclPci], above: tuple[_Link, ...]) -> None:
        leaves = [pci.bus_id for pci in pcis if not pci.children]
        for pci in pcis:
            links = (*above, (pci.gt_per_s, pci.width))
            if pci.children:
                visit(cpu, pci.children, links)
            else:
                neighbours = frozenset(leaves if above else [pci.bus_id])
                found[pci.bus_id] = _Place(
                    numa_id=str(cpu.numa_id),
                    affinity=cpu.affinity,
                    neighbours=neighbours,
                    links=links,
                )

    for cpu in topology.cpus:
        visit(cpu, cpu.children, ())
    return found


def _of_file(read: ReadTopology) -> dict[str, _Place]:
    found: dict[str, _Place] = {}

    def visit(
        cpu: XmlNode, affinity: CpuSet | None, around: XmlNode, above: tuple[_Link, ...]
    ) -> None:
        pcis = [child for child in around.children if child.name == "pci"]
        leaves = [pci.get("busid") or "" for pci in pcis if not _is_switch(pci)]
        for pci in pcis:
            links = (*above, _link(pci))
            if _is_switch(pci):
                visit(cpu, affinity, pci, links)
            else:
                bus_id = pci.get("busid") or ""
                neighbours = leaves if around is not cpu else [bus_id]
                number = read_number(cpu.get("numaid"))
                numa_id = "" if number is None else str(number)
                found[bus_id] = _Place(
                    numa_id=numa_id,
                    affinity=affinity,
                    neighbours=frozenset(neighbours),
                    links=links,
                )

    for system in read.systems:
        for cpu in (node for node in system.children if node.name == "cpu"):
            visit(cpu, _affinity(cpu), cpu, ())
    return found


def _link(pci: XmlNode) -> _Link:
    """As NCCL reads it: an unknown speed is Gen3, 0 lanes are 16."""
    speed, width = pci.get("link_speed"), read_number(pci.get("link_width"))
    return None if speed is None else read_link_speed(speed) or 8.0, 16 if width == 0 else width


def _affinity(cpu: XmlNode) -> CpuSet | None:
    text = cpu.get("affinity")
    if text is None:
        return None
    try:
        return CpuSet.parse_mask(text)
    except ParseError:
        return CpuSet()


def _is_switch(pci: XmlNode) -> bool:
    return any(child.name == "pci" for child in pci.children)
