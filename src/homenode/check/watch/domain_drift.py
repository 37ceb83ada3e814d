"""DomainDrift: what a running VM's document says, against the one that was planned for it."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.vm.facts import diff
from homenode.vm.hypervisor.domain_state import LivePin, domain_argument
from homenode.vm.model import Vm
from homenode.wording import command_line

_NOT_PLACED = (
    "topology",
    "domain-type",
    "machine",
    "firmware",
    "cpu",
    "vcpus-online",
    "current-memory",
    "distances",
    "controller",
    "device-address",
)
"""Facts that libvirt fills in at the start, that guests change, or that no running VM changes."""


def domain_drift(planned: Vm, running: Vm, moved: Sequence[LivePin] = ()) -> Iterator[Finding]:
    """Differences of pins, memory and devices, as by `virsh vcpupin --live` or `virsh edit`.

    planned: of the document that homenode defined, or of the persistent definition. moved: threads
    of this run that homenode itself moved since.
    """
    name, uuid = running.name, running.uuid
    for one in diff(_with_moved(planned, moved), running, _NOT_PLACED):
        yield finding(
            "drift-domain",
            f"{name}: {one.subject}",
            expected=one.expected,
            observed=one.observed,
            values={"domain": command_line(domain_argument(name, uuid or name))},
            source=planned.source,
        )


def _with_moved(planned: Vm, moved: Sequence[LivePin]) -> Vm:
    pus = {(pin.kind, pin.number): pin.pus for pin in moved}
    iothreads = {n: found for (kind, n), found in pus.items() if kind == "iothread"}
    return replace(
        planned,
        vcpu_pins=tuple(pus.get(("vcpu", i), pin) for i, pin in enumerate(planned.vcpu_pins)),
        emulator_pus=pus.get(("emulator", 0), planned.emulator_pus),
        iothread_pins=tuple(sorted((dict(planned.iothread_pins) | iothreads).items())),
    )
