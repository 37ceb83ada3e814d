"""Cross-check: broken references in domain XML that libvirt accepts, or rejects only at start.

The schema does not cover references. libvirt 9.0 defines and starts a domain with a <vcpupin> for a
vCPU that is not there, or with an expander bus whose window has no bus for its root ports, and the
guest then finds its devices broken.

Limits go beyond the planner's: features and measurements of encrypted guests (SEV, SEV-SNP, TDX),
the maximum vCPUs of a machine type, and elements that libvirt adds by itself.
Source: Linux Documentation/virt/kvm/api.rst, KVM_CREATE_GUEST_MEMFD; QEMU docs/system/i386
amd-memory-encryption.rst and tdx.rst; AMD 56860 (SEV-SNP firmware ABI), launch digest. max_cpus in
QEMU's hw/i386/pc_q35.c, hw/i386/pc.c and hw/arm/virt.c, by the version in the machine type's name.
A vendor's own machine types ("pc-q35-rhel9.4.0") have limits of their own.
"""

import re
from collections import Counter
from collections.abc import Iterator
from math import prod

from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import Finding, Severity, Subject, finding
from homenode.text import plural
from homenode.units import KIB
from homenode.vm.domain.cells import cells_bytes, read_cells
from homenode.vm.domain.controllers import (
    pci_controllers,
    qemu_arguments,
    read_chassis,
    read_controllers,
)
from homenode.vm.domain.cpu import (
    list_iothread_ids,
    needs_acpi,
    pin_counts,
    read_topology,
    read_vcpus,
)
from homenode.vm.domain.document import (
    Document,
    Element,
    parse_any_base,
    parse_decimal,
    pu_set,
    read_size,
)
from homenode.vm.domain.hostdevs import list_addressed
from homenode.vm.domain.memory import read_memnodes, read_memory
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import EXPANDER, PORTS, QEMU_DEVICE, GuestPciController, PortModel, Vm
from homenode.vm.plan import Plan


def _make_finding(id: str, subject: str | Subject, expected: str, observed: object) -> Finding:
    return finding(id, subject, expected, str(observed))


def check_references(document: Document) -> tuple[Finding, ...]:
    """Return every broken reference and sum of a domain document, in a fixed order. Raises
    ParseError or InputError."""
    contradictions = {
        *_check_threads(document),
        *_check_cells(document),
        *_check_memory(document),
        *_check_command_line(document),
        *check_pci(document),
    }
    return tuple(sorted(contradictions, key=lambda each: (each.id, each.subject, each.comparison)))


def _check_threads(document: Document) -> Iterator[Finding]:
    vcpus, _ = read_vcpus(document)
    threads = list_iothread_ids(document)
    for (name, number), count in pin_counts(document).items():
        has_number = name != "emulatorpin"
        subject = Subject(f"<{name}> for {number}", name, number) if has_number else f"<{name}>"
        if count > 1:
            yield _make_finding("pin-twice", subject, "one", count)
        if name == "vcpupin" and number >= vcpus:
            yield _make_finding("pin-unknown-vcpu", subject, f"a vCPU below {vcpus}", number)
        if name == "iothreadpin" and number not in threads:
            yield _make_finding("pin-unknown-iothread", subject, f"one of {list(threads)}", number)
    for element in document.root.all("devices/*"):
        driver, iothread = element.child("driver"), element.value("driver/@iothread")
        if driver is not None and iothread is not None:
            number = parse_decimal(driver, iothread, "an IOThread")
            if number not in threads:
                yield _make_finding(
                    "iothread-unknown",
                    f"<{element.tag}>",
                    f"iothread= of its driver to be one of {list(threads)}",
                    iothread,
                )
    topology = read_topology(document)
    if topology is not None and prod(topology) != vcpus:
        shape = f"{' x '.join(map(str, topology))} = {prod(topology)}"
        yield _make_finding("topology-product", "<topology>", plural(vcpus, "vCPU"), shape)


def _check_cells(document: Document) -> Iterator[Finding]:
    vcpus, _ = read_vcpus(document)
    cells = read_cells(document)
    everything = CpuSet(range(vcpus))
    seen_vcpus = CpuSet()
    for i, (_, members) in enumerate(cells):
        subject = Subject(f"cell {i}", "cell", i)
        if not members.isdisjoint(seen_vcpus):
            yield _make_finding("cells-overlap", subject, "vCPUs of its own", members & seen_vcpus)
        if not members <= everything:
            yield _make_finding(
                "cell-unknown-vcpu", subject, f"vCPUs below {vcpus}", members - everything
            )
        seen_vcpus |= members
    if cells and seen_vcpus & everything != everything:
        missing = str(everything - seen_vcpus)
        yield _make_finding(
            "vcpu-without-cell", "<numa>", "every vCPU in a cell", f"{missing} in none"
        )
    for i, (element, _) in enumerate(cells):
        yield from _check_siblings(element, i, len(cells))
    yield from _check_cell_names(document, len(cells))


def _check_siblings(cell: Element, id: int, cells: int) -> Iterator[Finding]:
    """Yield the distances to cells that are there, one to each."""
    seen_ids: set[int] = set()
    subject = Subject(f"distances of cell {id}", "cell", id)
    for sibling in cell.all("distances/sibling"):
        other = parse_decimal(sibling, sibling.get("id") or "", "a cell id")
        if other >= cells:
            yield _make_finding("distance-unknown-cell", subject, f"a cell below {cells}", other)
        if other in seen_ids:
            yield _make_finding("distance-twice", subject, f"one to cell {other}", "two")
        seen_ids.add(other)


def _check_cell_names(document: Document, cells: int) -> Iterator[Finding]:
    """Yield the references to guest cells from other parts of the document."""
    expected = f"a cell below {cells}" if cells else "no cell: the guest is flat"
    for cell in read_memnodes(document):
        if cell >= cells:
            yield _make_finding("memnode-unknown-cell", "<memnode>", expected, cell)
    for page in document.root.all("memoryBacking/hugepages/page"):
        named_cells = pu_set(page, "nodeset")
        if named_cells is not None and not named_cells <= CpuSet(range(cells)):
            yield _make_finding("page-unknown-cell", "<page>", expected, named_cells)
    for element in document.root.all("devices/*"):
        node = element.find("target/node")
        if node is not None and parse_any_base(node, node.text, "a guest cell") >= cells:
            yield _make_finding(
                "device-unknown-cell", f"<{element.tag}>", expected, node.text.strip()
            )
        acpi = element.child("acpi")
        named_cells = None if acpi is None else pu_set(acpi, "nodeset")
        if named_cells is not None and not named_cells <= CpuSet(range(cells)):
            yield _make_finding(
                "device-unknown-cell", f"<{element.tag}>", expected, f"{named_cells} in <acpi>"
            )


def _check_memory(document: Document) -> Iterator[Finding]:
    """<memory> is that of all cells, with that of the memory devices or without."""
    element, cells = document.root.child("memory"), read_cells(document)
    if element is not None and cells:
        total, with_devices = cells_bytes(document), read_memory(document)
        size = read_size(element)
        # Each cell by itself is rounded up to whole KiB.
        if size and {total, with_devices}.isdisjoint(range(size, size + KIB * len(cells))):
            expected = f"{size} bytes, as <memory>"
            also = f", {with_devices} with memory devices" if with_devices != total else ""
            yield _make_finding(
                "memory-sum", "the memory of all cells", expected, f"{total} bytes{also}"
            )


def _check_command_line(document: Document) -> Iterator[Finding]:
    """-fw_cfg and its value, one behind the other: QEMU takes either alone for something else."""
    words = [e.get("value") or "" for e in qemu_arguments(document)]
    for before, word in zip(("", *words), (*words, ""), strict=True):
        is_value = "opt/ovmf/X-PciMmio64Mb" in word
        if before == "-fw_cfg" and (not word or word.startswith("-")):
            yield _make_finding(
                "fw-cfg-broken", "<qemu:arg> -fw_cfg", "its value behind it", word or "none"
            )
        if is_value and before != "-fw_cfg":
            yield _make_finding(
                "fw-cfg-broken", f"<qemu:arg> {word}", "-fw_cfg before it", before or "none"
            )


LAST_BUS = 255
_ON_EXPANDER = (
    "pcie-root-port",
    "pcie-switch-upstream-port",
    "dmi-to-pci-bridge",
    "pcie-to-pci-bridge",
)

_OTHER_NAMES = {"pcie-root-port": "ioh3420"}
"""Names of models besides those of QEMU_DEVICE. Source: qemuDomainValidate of controllers, libvirt
9.0, which rejects all other names."""

_CHIPSET_SLOT = {"pcie-root": 0x1F, "pci-root": 1, "": 0x1F}
"""Slots whose function 0 is the chipset's: q35's LPC (and SATA), i440fx's ISA (and IDE and USB).
"""


def check_pci(document: Document) -> Iterator[Finding]:
    """Yield the broken controllers and addresses."""
    controllers = read_controllers(document)
    yield from _check_indices(controllers)
    yield from _check_addresses(document, controllers)
    yield from _check_windows(document, controllers)
    yield from _check_chassis(document)
    yield from _check_model_names(document)


def _check_indices(controllers: tuple[GuestPciController, ...]) -> Iterator[Finding]:
    for index, count in Counter(c.index for c in controllers).items():
        if count > 1:
            yield _make_finding("controller-twice", f"PCI controller {index}", "one", count)


def _check_addresses(
    document: Document, controllers: tuple[GuestPciController, ...]
) -> Iterator[Finding]:
    model_of = {controller.index: controller.model for controller in controllers}
    devices = list_addressed(document)
    for address, count in Counter(address for address, _ in devices).items():
        if count > 1:
            yield _make_finding("address-twice", f"guest address {address}", "one device", count)
    in_use = dict(devices)
    for address, element in devices:
        subject = f"<{element.tag}> at {address}"
        model = model_of.get(address.bus)
        if model in PORTS and address.device:
            yield _make_finding(
                "slot-of-port", subject, "slot 0: a port has one slot", address.device
            )
        if model == EXPANDER and element.get("model") not in _ON_EXPANDER:
            yield _make_finding(
                "endpoint-on-expander", subject, "a root port between", "an expander bus"
            )
        of_chipset = address.bus == 0 and address.device == _CHIPSET_SLOT.get(model or "")
        if address.function and not of_chipset:
            first = type(address)(address.domain, address.bus, address.device, 0)
            head = in_use.get(first)
            place = None if head is None else head.child("address")
            if place is None:
                # libvirt itself so places a lone USB companion controller.
                is_lone = element.tag != "hostdev"
                missing = _make_finding(
                    "function-without-0", subject, f"a device at {first}", "none"
                )
                yield replace(missing, severity=Severity.WARNING) if is_lone else missing
            elif place.get("multifunction") == "off":  # libvirt adds it if it is missing
                yield _make_finding(
                    "multifunction-off",
                    f"<{head.tag if head else ''}> at {first}",
                    "multifunction='on' next to other functions",
                    "it is not",
                )


def _check_windows(
    document: Document, controllers: tuple[GuestPciController, ...]
) -> Iterator[Finding]:
    """Check that each root has a bus for itself and for every controller below it. libvirt adds a
    port on the root bus for each index that is omitted below the highest one."""
    model_of = {controller.index: controller for controller in controllers}
    buses_below: Counter[int] = Counter()
    for controller in controllers:
        if controller.model == EXPANDER or controller.index == 0:
            continue
        root, steps = controller, 0
        while root.model != EXPANDER and root.index and steps <= len(controllers):
            parent = 0 if root.address is None else root.address.bus
            if parent not in model_of:
                break  # libvirt adds the controller, on the root bus
            root = model_of[parent]
            steps += 1
        if steps > len(controllers):
            yield _make_finding(
                "controller-loop",
                f"PCI controller {controller.index}",
                "a path to a root bus",
                "a loop",
            )
            return
        buses_below[root.index if root.model == EXPANDER else 0] += 1
    used_buses = {address.bus for address, _ in list_addressed(document) if not address.domain}
    last = max({*used_buses, *model_of}, default=0)
    buses_below[0] += last - sum(0 < index <= last for index in model_of)
    expanders = [c for c in controllers if c.model == EXPANDER and c.bus_nr is not None]
    for number, count in Counter(c.bus_nr for c in expanders).items():
        if count > 1:
            yield _make_finding("busnr-twice", f"busNr {number}", "one expander bus", count)
    starts = sorted({c.bus_nr for c in expanders if c.bus_nr is not None})
    for controller in expanders:
        start = controller.bus_nr
        assert start is not None, "only controllers with a busNr are here"
        end = next((other for other in starts if other > start), LAST_BUS + 1)
        need = 1 + buses_below[controller.index]
        if not 0 < start <= LAST_BUS or end - start < need:
            yield _make_finding(
                "bus-window",
                f"expander bus {controller.index} at busNr {start}",
                plural(need, "bus", "buses"),
                f"{max(0, end - start)}, up to {end - 1}",
            )
    if starts and starts[0] < 1 + buses_below[0]:
        yield _make_finding(
            "bus-window", "the root bus", plural(1 + buses_below[0], "bus", "buses"), starts[0]
        )


def _check_chassis(document: Document) -> Iterator[Finding]:
    numbers: Counter[int] = Counter()
    for index, element in pci_controllers(document):
        if element.get("model") in PORTS:
            numbers[read_chassis(index, element)] += 1
    for number, count in numbers.items():
        if count > 1:
            yield _make_finding("chassis-twice", f"chassis {number}", "one port", count)


def _check_model_names(document: Document) -> Iterator[Finding]:
    for index, element in pci_controllers(document):
        name = element.value("model/@name")
        model = element.get("model") or ""
        valid_names = [names[model] for names in (QEMU_DEVICE, _OTHER_NAMES) if model in names]
        if name is not None and model in tuple(PortModel) and name not in valid_names:
            yield _make_finding(
                "controller-model-name",
                f"PCI controller {index}",
                f"<model name> {' or '.join(valid_names)}",
                name,
            )


_MEASURED = frozenset({"sev", "sev-es", "sev-snp", "tdx"})


def reject_unsafe(guest: Vm, plan: Plan, source: str) -> None:
    """Raise InputError if the plan would break an encrypted guest, or not apply to it."""
    kind = guest.launch_security
    if kind is None:
        return
    if plan.vm.has_iommu and not guest.has_iommu:
        raise InputError(
            f"{source}: {plan.vm.vcpus} vCPUs need a guest IOMMU, which cannot read the encrypted "
            f"memory of launch security {kind!r}",
            hint="use at most 255 vCPUs",
        )
    if not guest.has_private_memory:
        return
    if plan.vm.page_bytes is not None and guest.page_bytes is None:
        raise InputError(
            f"{source}: the private memory of launch security {kind!r} comes from guest_memfd, "
            f"which has no huge pages of {plan.vm.page_bytes} bytes",
            hint="plan without --page-size",
        )
    cells = [cell for cell in plan.cells if cell.memory_bytes]
    if plan.layout.memory is MemoryBinding.BOUND_PER_CELL and len(cells) > 1:
        raise InputError(
            f"{source}: the private memory of launch security {kind!r} comes from guest_memfd, "
            f"which does not follow the bindings of {len(cells)} cells",
            hint="use --layout pin or pin-bound, or --max-nodes 1",
        )


def check_launch_security(guest: Vm, plan: Plan) -> Iterator[Finding]:
    """Yield findings on changes that affect the guest's attestation."""
    kind = guest.launch_security
    if kind is None:
        return
    changes = []
    if plan.vm.vcpus != guest.vcpus:
        changes.append(f"vCPUs {guest.vcpus} to {plan.vm.vcpus}")
    if plan.vm.cpu_topology is not None and tuple(plan.vm.cpu_topology) != guest.cpu_topology:
        changes.append("CPU topology")
    if any(not controller.existing for controller in plan.vm.controllers):
        changes.append("ACPI tables (PCI roots)")
    if plan.cells and len(plan.cells) != max(1, len(guest.cell_vcpus)):
        changes.append("ACPI tables (cells)")
    if changes:
        yield finding(
            "launch-measurement",
            f"launch security {kind}",
            observed="the plan changes the guest's launch measurement: " + ", ".join(changes),
            severity=Severity.WARNING if kind in _MEASURED else Severity.INFO,
        )


_SINCE: dict[str, tuple[tuple[tuple[int, int], int], ...]] = {
    "pc-q35": (((9, 0), 4096), ((8, 1), 1024), ((2, 8), 288), ((0, 0), 255)),
    "pc-i440fx": (((0, 0), 255),),
    "virt": (((3, 0), 512), ((0, 0), 255)),
}
"""Family -> (first version, most vCPUs), the newest first."""

_ALIASES = {"q35": "pc-q35", "pc": "pc-i440fx", "virt": "virt"}
"""Names of the newest machine type of their family."""

_NAMED = re.compile(r"(pc-q35|pc-i440fx|virt)-(\d{1,3})\.(\d{1,3})(?:\.\d+)?", re.ASCII)
_EVERY_TYPE_TAKES = 255


def find_max_vcpus(machine: str | None, qemu: tuple[int, int, int] | None) -> int | None:
    """Return the maximum vCPUs of a machine type; None if unknown.

    qemu: version of the host's QEMU, which decides an alias such as q35.

    >>> find_max_vcpus("pc-q35-7.2", None), find_max_vcpus("q35", (8, 2, 0))
    (288, 1024)
    """
    match = _NAMED.fullmatch(machine or "")
    if match is not None:
        family, version = match[1], (int(match[2]), int(match[3]))
    else:
        family = _ALIASES.get(machine or "", "")
        limits = _SINCE.get(family, ())
        if qemu is None:
            return limits[0][1] if len(limits) == 1 else None
        version = qemu[:2]
    return next((limit for since, limit in _SINCE.get(family, ()) if version >= since), None)


def check_vcpus(
    guest: Vm, vcpus: int, qemu: tuple[int, int, int] | None, source: str = "domain"
) -> tuple[Finding, ...]:
    """Return a finding if the machine type's limit is unknown and may be exceeded. Raises
    InputError if they are too many."""
    if vcpus <= _EVERY_TYPE_TAKES:
        return ()
    limit = find_max_vcpus(guest.machine, qemu)
    machine = guest.machine or "none, which libvirt chooses"
    if limit is None:
        return (
            finding(
                "vcpu-limit-unknown",
                "<vcpu>",
                observed=f"{vcpus} vCPUs, and the maximum of machine type {machine} is unknown",
            ),
        )
    if vcpus <= limit:
        return ()
    match = _NAMED.fullmatch(machine)
    machine_text = (
        machine if match or qemu is None else f"{machine} of QEMU {'.'.join(map(str, qemu))}"
    )
    larger = "pc-q35-9.0 or newer (QEMU 9.0), which takes 4096"
    is_x86 = guest.architecture == "x86_64"
    raise InputError(
        f"{source}: expected at most {limit} vCPUs, which is what machine type "
        f"{machine_text} takes, found {vcpus}",
        hint=(f"use machine type {larger}, or " if is_x86 else "") + "give the VM fewer vCPUs",
    )


def check_document(
    before: bytes, tuned_xml: bytes, plan: Plan, source: str = "domain"
) -> tuple[Finding, ...]:
    """Return the findings of a definition before and after it was rewritten."""
    document = open_domain(before, source)
    after = open_domain(tuned_xml, source)
    guest = build_vm(document)
    return (
        *check_launch_security(guest, plan),
        *_check_taint(guest, build_vm(after)),
        *_check_acpi(document, after, plan),
    )


def _check_taint(before: Vm, after: Vm) -> Iterator[Finding]:
    if after.has_qemu_commandline and not before.has_qemu_commandline:
        yield finding(
            "qemu-commandline",
            "<qemu:commandline>",
            observed="OVMF's window for large BARs can be set in no other way; libvirt marks the "
            "domain as tainted (custom-argv)",
        )


def _check_acpi(before: Document, after: Document, plan: Plan) -> Iterator[Finding]:
    had, has_acpi = (
        document.root.find("features/acpi") is not None for document in (before, after)
    )
    expanders = any(c.model == PortModel.EXPANDER_BUS for c in plan.vm.controllers)
    if not had and has_acpi:
        yield finding(
            "acpi-added",
            "<acpi/>",
            "in <features>, from which the guest reads its NUMA nodes and the nodes of its devices",
            "none: it was added",
        )
    elif not has_acpi and needs_acpi(plan) and expanders:
        yield finding(
            "acpi-missing",
            "<acpi/>",
            "in <features>, by which the guest finds its expander buses",
            "none: the guest does not see the devices on them",
            case="of a plan",
        )
