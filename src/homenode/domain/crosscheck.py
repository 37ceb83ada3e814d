"""Cross-check: references inside a domain document that libvirt takes in silence or at start only.

The schema knows no references. libvirt 9.0 defines and starts a domain with a <vcpupin> for a vCPU
that is not there, or with an expander bus whose window has no bus for its root ports, and the
guest then finds its devices broken.
"""

from collections.abc import Iterator

from homenode.cpuset import CpuSet
from homenode.domain.aperture import QEMU_NAMESPACE
from homenode.domain.cells import cell_bytes, read_cells
from homenode.domain.cpu import read_topology
from homenode.domain.cputune import iothread_ids, pin_counts
from homenode.domain.document import Document, Element
from homenode.domain.fields import any_base, decimal, pu_set
from homenode.domain.memory import memory_device_bytes, read_memory
from homenode.domain.numatune import read_memnodes
from homenode.domain.pci_windows import check_pci
from homenode.domain.reference import Broken
from homenode.domain.vcpu import read_vcpus


def crosscheck(document: Document) -> tuple[Broken, ...]:
    """Every reference and sum of a domain document that does not hold, in a fixed order.

    Raises ParseError or InputError where the document cannot be read at all.
    """
    return tuple(
        sorted(
            {
                *_threads(document),
                *_cells(document),
                *_memory(document),
                *_command_line(document),
                *check_pci(document),
            }
        )
    )


def _threads(document: Document) -> Iterator[Broken]:
    vcpus, _ = read_vcpus(document)
    threads = iothread_ids(document)
    for (name, number), count in pin_counts(document).items():
        what = f"<{name}>" if name == "emulatorpin" else f"<{name}> for {number}"
        if count > 1:
            yield Broken(id="pin-twice", subject=what, expected="one", observed=str(count))
        if name == "vcpupin" and number >= vcpus:
            yield Broken(
                id="pin-of-no-vcpu",
                subject=what,
                expected=f"a vCPU below {vcpus}",
                observed=str(number),
            )
        if name == "iothreadpin" and number not in threads:
            yield Broken(
                id="pin-of-no-iothread",
                subject=what,
                expected=f"one of {list(threads)}",
                observed=str(number),
            )
    topology = document.root.at("cpu", "topology")
    if topology is not None:
        sockets, dies, cores, per_core = read_topology(document, topology)
        product = sockets * dies * cores * per_core
        if product != vcpus:
            shape = f"{sockets} x {dies} x {cores} x {per_core} = {product}"
            yield Broken(
                id="topology-product",
                subject="<topology>",
                expected=f"{vcpus} vCPUs",
                observed=shape,
            )


def _cells(document: Document) -> Iterator[Broken]:
    vcpus, _ = read_vcpus(document)
    cells = read_cells(document)
    everything = CpuSet(range(vcpus))
    seen = CpuSet()
    for i, (element, inside) in enumerate(cells):
        number = decimal(document, element, element.get("id") or str(i), "a cell id")
        if number != i:
            yield Broken(
                id="cell-ids",
                subject="<cell> ids",
                expected="0, 1, 2, ... without gaps",
                observed=str(number),
            )
        if not inside.isdisjoint(seen):
            yield Broken(
                id="cells-overlap",
                subject=f"cell {i}",
                expected="vCPUs of its own",
                observed=str(inside & seen),
            )
        if not inside <= everything:
            yield Broken(
                id="cell-of-no-vcpu",
                subject=f"cell {i}",
                expected=f"vCPUs below {vcpus}",
                observed=str(inside - everything),
            )
        seen |= inside
    if cells and seen & everything != everything:
        missing = str(everything - seen)
        yield Broken(
            id="vcpu-in-no-cell",
            subject="<numa>",
            expected="every vCPU in a cell",
            observed=f"{missing} in none",
        )
    for i, (element, _) in enumerate(cells):
        yield from _siblings(document, element, i, len(cells))
    yield from _names_of_cells(document, len(cells))


def _siblings(document: Document, cell: Element, id: int, cells: int) -> Iterator[Broken]:
    """Distances to cells that are there, one to each."""
    distances = cell.child("distances")
    seen: set[int] = set()
    for sibling in () if distances is None else distances.all("sibling"):
        other = decimal(document, sibling, sibling.get("id") or "", "a cell id")
        if other >= cells:
            yield Broken(
                id="distance-of-no-cell",
                subject=f"distances of cell {id}",
                expected=f"a cell below {cells}",
                observed=str(other),
            )
        if other in seen:
            yield Broken(
                id="distance-twice",
                subject=f"distances of cell {id}",
                expected=f"one to cell {other}",
                observed="two",
            )
        seen.add(other)


def _names_of_cells(document: Document, cells: int) -> Iterator[Broken]:
    """Whatever names a guest cell from elsewhere in the document."""
    there = f"a cell below {cells}" if cells else "no cell: the guest is flat"
    for cell in read_memnodes(document):
        if cell >= cells:
            yield Broken(
                id="memnode-of-no-cell", subject="<memnode>", expected=there, observed=str(cell)
            )
    pages = document.root.at("memoryBacking", "hugepages")
    for page in () if pages is None else pages.all("page"):
        named = pu_set(document, page, "nodeset")
        if named is not None and not named <= CpuSet(range(cells)):
            yield Broken(
                id="page-of-no-cell", subject="<page>", expected=there, observed=str(named)
            )
    devices = document.root.child("devices")
    for element in () if devices is None else devices.children:
        node = element.at("target", "node")
        if node is not None and any_base(document, node, node.text, "a guest cell") >= cells:
            yield Broken(
                id="device-of-no-cell",
                subject=f"<{element.tag}>",
                expected=there,
                observed=node.text.strip(),
            )
        acpi = element.child("acpi")
        named = None if acpi is None else pu_set(document, acpi, "nodeset")
        if named is not None and not named <= CpuSet(range(cells)):
            yield Broken(
                id="device-of-no-cell",
                subject=f"<{element.tag}><acpi>",
                expected=there,
                observed=str(named),
            )


def _memory(document: Document) -> Iterator[Broken]:
    cells = read_cells(document)
    if cells:
        total = sum(cell_bytes(document, element) for element, _ in cells)
        expected = read_memory(document) - memory_device_bytes(document)
        if total != expected:
            yield Broken(
                id="memory-sum",
                subject="the memory of all cells",
                expected=f"{expected} bytes, as <memory>",
                observed=f"{total} bytes",
            )


def _command_line(document: Document) -> Iterator[Broken]:
    """-fw_cfg and its value, one behind the other: QEMU takes either alone for something else."""
    commandline = document.root.child(f"{{{QEMU_NAMESPACE}}}commandline")
    words = [e.get("value") or "" for e in (() if commandline is None else commandline.children)]
    for before, word in zip(("", *words), (*words, ""), strict=True):
        is_value = "opt/ovmf/X-PciMmio64Mb" in word
        if before == "-fw_cfg" and (not word or word.startswith("-")):
            yield Broken(
                id="fw-cfg-broken",
                subject="<qemu:arg> -fw_cfg",
                expected="its value behind it",
                observed=word or "none",
            )
        if is_value and before != "-fw_cfg":
            yield Broken(
                id="fw-cfg-broken",
                subject=f"<qemu:arg> {word}",
                expected="-fw_cfg before it",
                observed=before or "none",
            )
