"""DomainFacts: what a domain document says of threads, memory and places, for the checks."""

from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.domain.cells import cell_bytes, read_cells
from homenode.domain.cputune import read_pins
from homenode.domain.document import Document, Element
from homenode.domain.features import has_acpi
from homenode.domain.fields import decimal, needed, pu_set, size_bytes
from homenode.domain.memory import memory_devices
from homenode.domain.memory_backing import page_bytes
from homenode.domain.metadata import LayoutRecord, read_record
from homenode.domain.numatune import read_binding, read_memnodes
from homenode.domain.read import guest_of
from homenode.plan.guest import Guest

_FROM_HOST_MEMORY = ("dimm", "virtio-mem")
"""Models of memory devices that are not a file of their own."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """One <cell>. distances: by cell id, () where it gives none.

    mode, host_nodes: how its memory is bound, by its <memnode> or by <memory>; (None, empty) where
    nothing binds it. page_bytes: None = ordinary pages, 0 = the default huge page size.
    """

    id: int
    vcpus: CpuSet
    memory_bytes: int
    distances: tuple[int, ...]
    mode: str | None
    host_nodes: CpuSet
    page_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryDeviceFacts:
    """One <memory model=...> that takes memory of the host: a DIMM or virtio-mem.

    number: among such devices, from 0. alias: libvirt's, None where it has given none. size_bytes:
    the most that it holds; plugged_bytes: what the guest gets of it at the start. mode, host_nodes,
    page_bytes: as CellFacts has them; libvirt takes the cell's where the device has none.
    """

    number: int
    model: str
    alias: str | None
    cell: int
    size_bytes: int
    plugged_bytes: int
    mode: str | None
    host_nodes: CpuSet
    page_bytes: int | None


@dataclass(frozen=True, slots=True)
class DomainFacts:
    """A document's facts. cells: () for a flat guest.

    vcpu_pins: by vCPU, None where it floats. iothread_pins: (IOThread, PUs), ascending.
    binding: mode and nodes of <numatune><memory>. page_bytes: of a flat guest, as CellFacts has it.
    hard_limit_bytes: of <memtune>. record: of the layout that homenode put on it.
    memory_devices: those that take memory of the host.
    """

    guest: Guest
    source: str
    vcpu_pins: tuple[CpuSet | None, ...]
    emulator_pus: CpuSet | None
    iothread_pins: tuple[tuple[int, CpuSet], ...]
    cells: tuple[CellFacts, ...]
    binding: tuple[str, CpuSet] | None
    page_bytes: int | None
    hard_limit_bytes: int | None
    record: LayoutRecord | None
    memory_devices: tuple[MemoryDeviceFacts, ...] = ()
    has_acpi: bool = True

    @property
    def pinned_pus(self) -> CpuSet:
        """Every PU that some vCPU is pinned to."""
        return CpuSet.union(self.vcpu_pins)

    @property
    def is_pinned(self) -> bool:
        return any(pin is not None for pin in self.vcpu_pins)


def vcpus_text(vcpus: CpuSet) -> str:
    """ "vCPU 3" or "vCPUs 0-3"."""
    return f"vCPU{'s' if len(vcpus) > 1 else ''} {vcpus}"


def domain_facts(document: Document) -> DomainFacts:
    """The facts of a document. Raises ParseError or InputError where it cannot be read."""
    guest = guest_of(document)
    pins = read_pins(document)
    vcpu = document.root.child("vcpu")
    everywhere = None if vcpu is None else pu_set(document, vcpu, "cpuset")
    limit = document.root.at("memtune", "hard_limit")
    return DomainFacts(
        guest=guest,
        source=document.source,
        vcpu_pins=tuple(pins.get(("vcpupin", i), everywhere) for i in range(guest.vcpus)),
        emulator_pus=pins.get(("emulatorpin", 0), everywhere),
        iothread_pins=tuple(
            sorted((number, pus) for (name, number), pus in pins.items() if name == "iothreadpin")
        ),
        cells=_cells(document, guest),
        binding=read_binding(document),
        page_bytes=guest.page_bytes,
        hard_limit_bytes=None
        if limit is None
        else size_bytes(document, limit, limit.text, limit.get("unit")),
        record=read_record(document),
        memory_devices=_memory_devices(document, guest),
        has_acpi=has_acpi(document),
    )


def _memory_devices(document: Document, guest: Guest) -> tuple[MemoryDeviceFacts, ...]:
    memnodes, binding = read_memnodes(document), read_binding(document)
    unbound: tuple[str | None, CpuSet] = (None, CpuSet())
    found: list[MemoryDeviceFacts] = []
    for device in memory_devices(document):
        target, source = device.child("target"), device.child("source")
        size = None if target is None else target.child("size")
        model = device.get("model") or ""
        if target is None or size is None or model not in _FROM_HOST_MEMORY:
            continue
        node, requested = target.child("node"), target.child("requested")
        cell = 0 if node is None else decimal(document, node, node.text, "a cell")
        plugged = size if requested is None else requested
        mode, nodes = memnodes.get(cell) or binding or unbound
        mask = None if source is None else source.child("nodemask")
        page = None if source is None else source.child("pagesize")
        alias = device.child("alias")
        found.append(
            MemoryDeviceFacts(
                len(found),
                model,
                None if alias is None else alias.get("name"),
                cell,
                size_bytes(document, size, size.text, size.get("unit")),
                size_bytes(document, plugged, plugged.text, plugged.get("unit")),
                mode,
                nodes if mask is None else CpuSet.parse(mask.text.strip(), document.source),
                _page_bytes(document, cell, guest.page_bytes)
                if page is None
                else size_bytes(document, page, page.text, page.get("unit")),
            )
        )
    return tuple(found)


def _cells(document: Document, guest: Guest) -> tuple[CellFacts, ...]:
    memnodes = read_memnodes(document)
    binding = read_binding(document)
    unbound: tuple[str | None, CpuSet] = (None, CpuSet())
    cells = []
    for i, (element, vcpus) in enumerate(read_cells(document)):
        mode, nodes = memnodes.get(i) or binding or unbound
        cells.append(
            CellFacts(
                i,
                vcpus,
                cell_bytes(document, element),
                _distances(document, element),
                mode,
                nodes,
                _page_bytes(document, i, guest.page_bytes),
            )
        )
    return tuple(cells)


def _distances(document: Document, cell: Element) -> tuple[int, ...]:
    distances = cell.child("distances")
    stated = {
        decimal(document, e, needed(document, e, "id"), "a cell id"): decimal(
            document, e, needed(document, e, "value"), "a distance"
        )
        for e in (() if distances is None else distances.all("sibling"))
    }
    return tuple(stated[i] for i in sorted(stated))


def _page_bytes(document: Document, cell: int, default: int | None) -> int | None:
    """The page of a cell: that whose nodeset names it, else that without a nodeset."""
    hugepages = document.root.at("memoryBacking", "hugepages")
    pages = () if hugepages is None else hugepages.all("page")
    if not pages:
        return default
    for page in pages:
        named = pu_set(document, page, "nodeset")
        if named is not None and cell in named:
            return page_bytes(document, page)
    general = next((page for page in pages if page.get("nodeset") is None), None)
    return None if general is None else page_bytes(document, general)
