"""Comparison: a topology file against what the guest's devices and the host's tree ask for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Severity, in_order
from homenode.nccl.strict_reader import ReadTopology, XmlNode
from homenode.nccl.topology import NcclPci, NcclTopology

_REWRITE = "homenode nccl-topo --host H --domain VM.xml -o topo.xml"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a device hangs. next to: the devices below its lowest switch, itself included; only
    itself where there is none."""

    numa_id: str
    affinity: CpuSet | None
    beside: frozenset[str]


def compare_topology(read: ReadTopology, expected: NcclTopology) -> tuple[Finding, ...]:
    """What of a file is not as the host and the guest have it, the worst first."""
    found = _of_file(read)
    wanted = _of_topology(expected)
    return in_order([*_differences(read.source, found, wanted)])


def _differences(
    source: str, found: dict[str, _Place], wanted: dict[str, _Place]
) -> Iterator[Finding]:
    for bus_id, place in wanted.items():
        there = found.get(bus_id)
        if there is None:
            yield Finding(
                "nccl-device-missing", Severity.CRITICAL, bus_id, f"on cpu {place.numa_id}",
                "not in the file", "NCCL puts it where the guest's own kernel says", _REWRITE,
                source,
            )  # fmt: skip
            continue
        if there.numa_id != place.numa_id:
            yield Finding(
                "nccl-device-on-other-cpu", Severity.CRITICAL, bus_id, f"on cpu {place.numa_id}",
                f"on cpu {there.numa_id}", "NCCL takes a far device for a near one", _REWRITE,
                source,
            )  # fmt: skip
        elif there.affinity is not None and there.affinity != place.affinity:
            yield Finding(
                "nccl-other-vcpus", Severity.WARNING, f"cpu {place.numa_id}, of {bus_id}",
                f"vCPUs {place.affinity}", f"vCPUs {there.affinity}",
                "NCCL's threads run far from their GPU", _REWRITE, source,
            )  # fmt: skip
        if there.beside & wanted.keys() != place.beside:
            yield Finding(
                "nccl-switch-group", Severity.WARNING, bus_id, _group_text(place.beside),
                _group_text(there.beside), "NCCL pairs GPUs with NICs by it", _REWRITE, source,
            )  # fmt: skip
    for bus_id in found.keys() - wanted.keys():
        yield Finding(
            "nccl-busid-of-no-device", Severity.WARNING, bus_id, "bus ids of the guest's GPUs and "
            "NICs", "none of them", "NCCL leaves the branch out", _REWRITE, source,
        )  # fmt: skip


def _group_text(beside: frozenset[str]) -> str:
    if len(beside) == 1:
        return "alone below its switch or root"
    return f"below one switch: {', '.join(sorted(beside))}"


def _of_topology(topology: NcclTopology) -> dict[str, _Place]:
    found: dict[str, _Place] = {}

    def visit(numa_id: str, affinity: CpuSet, pcis: Iterable[NcclPci], in_switch: bool) -> None:
        leaves = [pci.bus_id for pci in pcis if not pci.children]
        for pci in pcis:
            if pci.children:
                visit(numa_id, affinity, pci.children, True)
            else:
                beside = leaves if in_switch else [pci.bus_id]
                found[pci.bus_id] = _Place(numa_id, affinity, frozenset(beside))

    for cpu in topology.cpus:
        visit(str(cpu.numa_id), cpu.affinity, cpu.children, False)
    return found


def _of_file(read: ReadTopology) -> dict[str, _Place]:
    found: dict[str, _Place] = {}

    def visit(cpu: XmlNode, affinity: CpuSet | None, around: XmlNode) -> None:
        pcis = [child for child in around.children if child.name == "pci"]
        leaves = [pci.get("busid") or "" for pci in pcis if not _is_switch(pci)]
        for pci in pcis:
            if _is_switch(pci):
                visit(cpu, affinity, pci)
            else:
                bus_id = pci.get("busid") or ""
                beside = leaves if around is not cpu else [bus_id]
                found[bus_id] = _Place(cpu.get("numaid") or "", affinity, frozenset(beside))

    for system in read.systems:
        for cpu in (node for node in system.children if node.name == "cpu"):
            visit(cpu, _affinity(cpu), cpu)
    return found


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
