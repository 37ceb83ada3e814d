"""DomainDrift: what a running VM's document says, against the one that was planned for it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.hypervisor.domain_state import LivePin, domain_argument
from homenode.units import format_bytes
from homenode.verify.live.expectation import LiveCell, LiveExpectation, live_expectation_of_document
from homenode.vm.model import Vm, vcpus_text
from homenode.wording import command_line


def domain_drift(planned: Vm, running: Vm, moved: Sequence[LivePin] = ()) -> Iterator[Finding]:
    """Differences of pins, memory and devices, as by `virsh vcpupin --live` or `virsh edit`.

    planned: of the document that homenode defined, or of the persistent definition. moved: threads
    of this run that homenode itself moved since.
    """
    before = _with_moved(live_expectation_of_document(planned), moved)
    now = live_expectation_of_document(running)
    differences = [*_differences(before, now)]
    # Cells have their own; the rest of QEMU's memory has this one.
    if planned.binding != running.binding and all(what != "memory" for what, *_ in differences):
        differences.append(
            ("memory of the whole VM", _binding(planned.binding), _binding(running.binding))
        )
    name, uuid = running.name, running.uuid
    for what, expected, observed in differences:
        yield finding(
            "drift-domain",
            f"{name}: {what}",
            expected=expected,
            observed=observed,
            fix="undo the change, or restart the VM where its definition is right; if it is meant: "
            + command_line("homenode", "replan", domain_argument(name, uuid or name)),
            source=planned.source,
        )


def _with_moved(expected: LiveExpectation, moved: Sequence[LivePin]) -> LiveExpectation:
    pus = {(pin.kind, pin.number): pin.pus for pin in moved}
    iothreads = {n: found for (kind, n), found in pus.items() if kind == "iothread"}
    return replace(
        expected,
        vcpu_pins=tuple(pus.get(("vcpu", i), pin) for i, pin in enumerate(expected.vcpu_pins)),
        emulator_pus=pus.get(("emulator", 0), expected.emulator_pus),
        iothread_pins=tuple(sorted((dict(expected.iothread_pins) | iothreads).items())),
    )


def _differences(before: LiveExpectation, now: LiveExpectation) -> Iterator[tuple[str, str, str]]:
    if len(before.vcpu_pins) != len(now.vcpu_pins):
        yield "vCPUs", str(len(before.vcpu_pins)), str(len(now.vcpu_pins))
    pins = list(zip(before.vcpu_pins, now.vcpu_pins, strict=False))
    moved = CpuSet(vcpu for vcpu, (was, is_now) in enumerate(pins) if was != is_now)
    if moved:
        yield (
            f"pins of {vcpus_text(moved)}",
            _pins([pins[vcpu][0] for vcpu in moved]),
            _pins([pins[vcpu][1] for vcpu in moved]),
        )
    if before.emulator_pus != now.emulator_pus:
        yield "emulator pin", _pins([before.emulator_pus]), _pins([now.emulator_pus])
    if before.iothread_pins != now.iothread_pins:
        yield "pins of IOThreads", _iothreads(before), _iothreads(now)
    cells, cells_now = _cells(before), _cells(now)
    if cells != cells_now:
        yield "memory", "; ".join(cells), "; ".join(cells_now)
    devices, devices_now = ({str(bdf) for bdf, _ in one.devices} for one in (before, now))
    if devices != devices_now:
        yield (
            "devices",
            ", ".join(sorted(devices)) or "none",
            ", ".join(sorted(devices_now)) or ("none"),
        )


def _pins(pins: Sequence[CpuSet | None]) -> str:
    return "PUs " + " ".join("any" if one is None else str(one) for one in pins)


def _iothreads(expected: LiveExpectation) -> str:
    return " ".join(f"{number}:{pus}" for number, pus in expected.iothread_pins) or "none"


def _cells(expected: LiveExpectation) -> list[str]:
    return [_cell(one) for one in expected.cells if one.device is None]


def _binding(binding: tuple[str, CpuSet] | None) -> str:
    return "not bound" if binding is None else f"{binding[0]} on nodes {binding[1]}"


def _cell(cell: LiveCell) -> str:
    bound = _binding((cell.mode or "bound", cell.nodes) if cell.nodes else None)
    size = format_bytes(cell.page_bytes) if cell.page_bytes else "the default size"
    pages = "" if cell.page_bytes is None else f", pages of {size}"
    return f"cell {cell.id}: {format_bytes(cell.memory_bytes)} {bound}{pages}"
