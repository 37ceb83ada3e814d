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
            yield Broken("pin-twice", what, "one", str(count))
        if name == "vcpupin" and number >= vcpus:
            yield Broken("pin-of-no-vcpu", what, f"a vCPU below {vcpus}", str(number))
        if name == "iothreadpin" and number not in threads:
            yield Broken("pin-of-no-iothread", what, f"one of {list(threads)}", str(number))
    topology = document.root.at("cpu", "topology")
    if topology is not None:
        sockets, dies, cores, per_core = read_topology(document, topology)
        product = sockets * dies * cores * per_core
        if product != vcpus:
            shape = f"{sockets} x {dies} x {cores} x {per_core} = {product}"
            yield Broken("topology-product", "<topology>", f"{vcpus} vCPUs", shape)


def _cells(document: Document) -> Iterator[Broken]:
    vcpus, _ = read_vcpus(document)
    cells = read_cells(document)
    everything = CpuSet(range(vcpus))
    seen = CpuSet()
    for i, (element, inside) in enumerate(cells):
        number = decimal(document, element, element.get("id") or str(i), "a cell id")
        if number != i:
            yield Broken("cell-ids", "<cell> ids", "0, 1, 2, ... without gaps", str(number))
        if not inside.isdisjoint(seen):
            yield Broken("cells-overlap", f"cell {i}", "vCPUs of its own", str(inside & seen))
        if not inside <= everything:
            yield Broken("cell-of-no-vcpu", f"cell {i}", f"vCPUs below {vcpus}",
                         str(inside - everything))  # fmt: skip
        seen |= inside
    if cells and seen & everything != everything:
        missing = str(everything - seen)
        yield Broken("vcpu-in-no-cell", "<numa>", "every vCPU in a cell", f"{missing} in none")
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
            yield Broken("distance-of-no-cell", f"distances of cell {id}", f"a cell below {cells}",
                         str(other))  # fmt: skip
        if other in seen:
            yield Broken("distance-twice", f"distances of cell {id}", f"one to cell {other}", "two")
        seen.add(other)


def _names_of_cells(document: Document, cells: int) -> Iterator[Broken]:
    """Whatever names a guest cell from elsewhere in the document."""
    there = f"a cell below {cells}" if cells else "no cell: the guest is flat"
    for cell in read_memnodes(document):
        if cell >= cells:
            yield Broken("memnode-of-no-cell", "<memnode>", there, str(cell))
    pages = document.root.at("memoryBacking", "hugepages")
    for page in () if pages is None else pages.all("page"):
        named = pu_set(document, page, "nodeset")
        if named is not None and not named <= CpuSet(range(cells)):
            yield Broken("page-of-no-cell", "<page>", there, str(named))
    devices = document.root.child("devices")
    for element in () if devices is None else devices.children:
        node = element.at("target", "node")
        if node is not None and any_base(document, node, node.text, "a guest cell") >= cells:
            yield Broken("device-of-no-cell", f"<{element.tag}>", there, node.text.strip())
        acpi = element.child("acpi")
        named = None if acpi is None else pu_set(document, acpi, "nodeset")
        if named is not None and not named <= CpuSet(range(cells)):
            yield Broken("device-of-no-cell", f"<{element.tag}><acpi>", there, str(named))


def _memory(document: Document) -> Iterator[Broken]:
    cells = read_cells(document)
    if cells:
        total = sum(cell_bytes(document, element) for element, _ in cells)
        expected = read_memory(document) - memory_device_bytes(document)
        if total != expected:
            yield Broken("memory-sum", "the memory of all cells", f"{expected} bytes, as <memory>",
                         f"{total} bytes")  # fmt: skip


def _command_line(document: Document) -> Iterator[Broken]:
    """-fw_cfg and its value, one behind the other: QEMU takes either alone for something else."""
    commandline = document.root.child(f"{{{QEMU_NAMESPACE}}}commandline")
    words = [e.get("value") or "" for e in (() if commandline is None else commandline.children)]
    for before, word in zip(("", *words), (*words, ""), strict=True):
        is_value = "opt/ovmf/X-PciMmio64Mb" in word
        if before == "-fw_cfg" and (not word or word.startswith("-")):
            yield Broken(
                "fw-cfg-broken", "<qemu:arg> -fw_cfg", "its value behind it", word or "none"
            )
        if is_value and before != "-fw_cfg":
            yield Broken(
                "fw-cfg-broken", f"<qemu:arg> {word}", "-fw_cfg before it", before or "none"
            )
