"""AsPlanned: whether a document says what its plan says."""

from collections.abc import Iterable, Iterator, Sequence

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.plan.model import GuestTopology, Plan
from homenode.units import format_bytes
from homenode.vm.layout import GuestCells, MemoryBinding
from homenode.vm.model import GuestHostdev, GuestMediated, Vm, vcpus_text

_REWRITE = "write the document again: homenode plan -o, or homenode restore and plan"
_SHOWN = 6


def as_planned(facts: Vm, plan: Plan) -> Iterator[Finding]:
    """A finding for each thing that differs, pins of many vCPUs in one."""
    yield from _counts(facts, plan)
    yield from _kept(facts, plan)
    yield from _pins(facts, plan)
    yield from _cells(facts, plan)
    yield from _binding(facts, plan)
    yield from _controllers(facts, plan)
    yield from _devices(facts, plan)


def differs(
    id: str,
    subject: str,
    expected: str,
    observed: str,
    source: str,
    *,
    cost: str | None = None,
    severity: Severity = Severity.CRITICAL,
) -> Finding:
    """A finding that something is not as planned."""
    return Finding(
        id=f"plan-{id}",
        severity=severity,
        subject=subject,
        expected=expected,
        observed=observed,
        cost=cost,
        fix=_REWRITE,
        source=source,
    )


def _counts(facts: Vm, plan: Plan) -> Iterator[Finding]:
    guest = facts
    if guest.vcpus != plan.vcpus:
        yield differs("vcpus", "<vcpu>", str(plan.vcpus), str(guest.vcpus), facts.source)
    if guest.memory_bytes != plan.memory_bytes:
        wanted, found = format_bytes(plan.memory_bytes), format_bytes(guest.memory_bytes)
        yield differs("memory", "<memory>", wanted, found, facts.source)
    if guest.memory_device_bytes != plan.memory_device_bytes:
        wanted = format_bytes(plan.memory_device_bytes)
        found = format_bytes(guest.memory_device_bytes)
        yield differs("memory-devices", "memory devices", wanted, found, facts.source)
    if plan.page_bytes is not None and guest.page_bytes != plan.page_bytes:
        yield differs(
            "pages", "<hugepages>", _size(plan.page_bytes), _size(guest.page_bytes), facts.source
        )
    found_topology = guest.cpu_topology
    if plan.topology is not None and found_topology != tuple(plan.topology):
        yield differs(
            "topology",
            "<topology>",
            _shape(plan.topology),
            "none" if found_topology is None else _shape(GuestTopology(*found_topology)),
            facts.source,
            cost="the guest's scheduler takes siblings for cores, or cores for siblings",
        )


def _kept(facts: Vm, plan: Plan) -> Iterator[Finding]:
    """What the plan left as the document had it, and relies on."""
    guest, kept = facts, plan.kept
    if kept is None:
        return
    if guest.domain_type != kept.domain_type:
        yield differs(
            "domain-type",
            "<domain>",
            f"type {kept.domain_type}",
            f"type {guest.domain_type}",
            facts.source,
            cost="another accelerator: the guest's CPUs are emulated, or missing",
        )
    if not _same_machine(kept.machine, guest.machine):
        yield differs(
            "machine",
            "<os><type>",
            kept.machine or "the default machine",
            guest.machine or "the default machine",
            facts.source,
            cost="the guest has another chipset, and may not boot",
        )
    firmware = "bios" if guest.firmware in (None, "bios") else "efi"
    if firmware != kept.firmware:
        yield differs(
            "firmware",
            "<os>",
            kept.firmware,
            firmware,
            facts.source,
            cost="the disk may not boot, and BARs are placed otherwise",
        )
    # A document without a model gets the default one's name from libvirt.
    if kept.cpu_mode is not None and (
        (guest.cpu_mode, guest.cpu_model) != (kept.cpu_mode, kept.cpu_model)
    ):
        yield differs(
            "cpu",
            "<cpu>",
            _cpu(kept.cpu_mode, kept.cpu_model),
            _cpu(guest.cpu_mode, guest.cpu_model),
            facts.source,
            cost="other models give no siblings on AMD, and 40 address bits, which lose GPUs with "
            "large BARs",
        )
    if guest.offline_vcpus != kept.offline_vcpus:
        yield differs(
            "vcpus-online",
            "<vcpu>",
            _offline(kept.offline_vcpus),
            _offline(guest.offline_vcpus),
            facts.source,
        )
    if guest.ballooned_bytes != kept.ballooned_bytes:
        yield differs(
            "current-memory",
            "<currentMemory>",
            f"{format_bytes(kept.ballooned_bytes)} in the balloon",
            f"{format_bytes(guest.ballooned_bytes)} in the balloon",
            facts.source,
            cost="the guest gives memory back from whichever cell, and may end without any",
        )


def _same_machine(planned: str | None, found: str | None) -> bool:
    """libvirt writes the newest version in the place of a name without one."""
    kinds = [
        next((k for k in ("q35", "virt") if k in (one or "")), "pc") for one in (planned, found)
    ]
    versioned = all(
        any(c.isdigit() for c in (one or "").replace("q35", "")) for one in (planned, found)
    )
    return planned == found or (kinds[0] == kinds[1] and not versioned)


def _cpu(mode: str | None, model: str | None) -> str:
    return " ".join(filter(None, (mode, model))) or "the default model"


def _offline(vcpus: CpuSet) -> str:
    return f"{vcpus_text(vcpus)} offline" if vcpus else "every vCPU there at the start"


def _size(size: int | None) -> str:
    if size is None:
        return "ordinary pages"
    return "the default huge page" if size == 0 else format_bytes(size)


def _shape(topology: GuestTopology) -> str:
    sockets, dies, cores, threads = topology
    return f"{sockets} sockets x {dies} dies x {cores} cores x {threads} threads"


def _pins(facts: Vm, plan: Plan) -> Iterator[Finding]:
    wanted: Sequence[CpuSet | None] = plan.vcpu_pins or (None,) * facts.vcpus
    pairs = [
        (i, want, found)
        for i, (want, found) in enumerate(zip(wanted, facts.vcpu_pins, strict=False))
        if want != found
    ]
    if pairs:
        yield differs(
            "pins",
            vcpus_text(CpuSet(i for i, _, _ in pairs)),
            "PU " + _some(f"{i} -> {_pus(want)}" for i, want, _ in pairs),
            "PU " + _some(f"{i} -> {_pus(found)}" for i, _, found in pairs),
            facts.source,
            cost="these vCPUs run away from their memory, or where others run",
        )
    if plan.emulator_pus != facts.emulator_pus:
        yield differs(
            "emulator",
            "<emulatorpin>",
            _pus(plan.emulator_pus),
            _pus(facts.emulator_pus),
            facts.source,
            severity=Severity.WARNING,
        )
    threads = tuple(pus for _, pus in facts.iothread_pins)
    pinned = {number: pus for number, pus in plan.pus_of_iothreads.items() if pus}
    is_same = tuple(pinned.values()) == threads
    if plan.iothread_ids:
        is_same = pinned == dict(facts.iothread_pins)
    if not is_same:
        wanted_text = _some(map(_pus, plan.iothread_pus)) or "no pins"
        yield differs(
            "iothreads",
            "<iothreadpin>",
            wanted_text,
            _some(map(_pus, threads)) or "no pins",
            facts.source,
            severity=Severity.WARNING,
        )


def _pus(pus: CpuSet | None) -> str:
    return "not pinned" if pus is None else str(pus)


def _some(texts: Iterable[str]) -> str:
    every = list(texts)
    more = len(every) - _SHOWN
    return ", ".join(every[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _cells(facts: Vm, plan: Plan) -> Iterator[Finding]:
    if plan.layout.cells is GuestCells.FLAT:
        if len(facts.cells) > 1:
            yield differs(
                "cells", "<numa>", "a flat guest", f"{len(facts.cells)} cells", facts.source
            )
        return
    if len(facts.cells) != len(plan.cells):
        yield differs(
            "cells",
            "<numa>",
            f"{len(plan.cells)} cells",
            f"{len(facts.cells) or 'no'} cells",
            facts.source,
        )
        return
    for want, found in zip(plan.cells, facts.cells, strict=True):
        subject = f"cell {want.id}"
        if want.vcpus != found.vcpus:
            yield differs(
                "cell-vcpus", subject, f"vCPUs {want.vcpus}", f"vCPUs {found.vcpus}", facts.source
            )
        if want.memory_bytes != found.memory_bytes:
            yield differs(
                "cell-memory",
                subject,
                format_bytes(want.memory_bytes),
                format_bytes(found.memory_bytes),
                facts.source,
            )
        if want.distances != found.distances:
            yield differs(
                "distances",
                subject,
                f"distances {_row(want.distances)}",
                f"distances {_row(found.distances)}",
                facts.source,
                cost="the guest's kernel prefers the wrong node when one is full",
            )


def _row(distances: tuple[int, ...]) -> str:
    return " ".join(map(str, distances)) or "none"


def _binding(facts: Vm, plan: Plan) -> Iterator[Finding]:
    if plan.memory_mode is None:
        return
    found = facts.binding
    nodes = CpuSet(plan.memory_nodes)
    if found is None or found != (str(plan.memory_mode), nodes):
        yield differs(
            "binding",
            "<numatune><memory>",
            f"{plan.memory_mode} on node {nodes}",
            "no binding" if found is None else f"{found[0]} on node {found[1]}",
            facts.source,
            cost="memory lands where the host's kernel likes",
        )
    if plan.layout.memory is not MemoryBinding.BOUND_PER_CELL:
        return
    for want, cell in zip(plan.cells, facts.cells, strict=False):
        homes = CpuSet(want.host_nodes)
        if homes and want.memory_bytes and cell.nodes != homes:
            yield differs(
                "cell-binding",
                f"cell {want.id}",
                f"memory on node {homes}",
                f"memory on node {cell.nodes}" if cell.nodes else "not bound",
                facts.source,
                cost="every access of the cell's vCPUs to its memory is remote",
            )


def _controllers(facts: Vm, plan: Plan) -> Iterator[Finding]:
    have = {controller.index: controller for controller in facts.controllers}
    for want in plan.controllers:
        there = have.get(want.index)
        subject = f"PCI controller {want.index}"
        if there is None or there.model != want.model or there.address != want.address:
            yield differs(
                "controller",
                subject,
                f"{want.model} at {want.address}",
                "none" if there is None else f"{there.model} at {there.address}",
                facts.source,
            )
        elif there.node != want.cell:
            yield differs(
                "expander-cell",
                subject,
                _on_cell(want.cell),
                _on_cell(there.node),
                facts.source,
                cost="the guest takes its devices for those of another node",
            )
        elif there.bus_nr != want.bus_nr:
            yield differs(
                "bus-nr", subject, f"busNr {want.bus_nr}", f"busNr {there.bus_nr}", facts.source
            )


def _on_cell(cell: int | None) -> str:
    return "on no cell" if cell is None else f"on cell {cell}"


def _devices(facts: Vm, plan: Plan) -> Iterator[Finding]:
    have: dict[Bdf | str, GuestHostdev | GuestMediated] = {
        **{hostdev.source: hostdev for hostdev in facts.hostdevs},
        **{one.uuid: one for one in facts.mediated},
    }
    for want in plan.devices:
        name = want.uuid or want.bdf
        found = have.pop(name, None)
        if found is None:
            yield differs(
                "device", str(name), "passed through", "not in the document", facts.source
            )
        elif want.address is not None and found.address != want.address:
            yield differs(
                "device-address",
                str(name),
                f"guest address {want.address}",
                f"guest address {found.address or 'not set'}",
                facts.source,
                cost="the guest sees the device at another place, and with it on another node",
            )
    for left in have:
        # A mediated device that the host did not show stays as the document has it.
        if isinstance(left, str) and left not in plan.mediated_removed:
            continue
        yield differs("device", str(left), "not passed through", "in the document", facts.source)
