"""GuestView: a guest's own discovery compared with what was expected of it, line by line."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from homenode.check.verify.boot.stand_in import StandInGuest
from homenode.check.verify.guest.checks import Check, GuestComparison, check
from homenode.check.verify.guest.expectation import Expectation, without_vcpus
from homenode.findings import Finding, add_source, finding
from homenode.machine.topology import Host
from homenode.units import MIB, format_bytes
from homenode.vm.guest_observation import (
    Observation,
    observation_of,
    path_of_address,
)

STAND_IN_KERNEL_BYTES = 96 * MIB
"""What the kernel and its files take of a test guest's first node, and of the last one."""


class GuestView(Struct, frozen=True):
    """The guest compared with its plan."""

    title: str
    checks: tuple[Check, ...]  # every line, with and without finding
    observation: Observation  # what the guest reports

    @property
    def findings(self) -> tuple[Finding, ...]:
        findings = (line.finding for line in self.checks if line.finding is not None)
        return add_source(findings, self.observation.source)


def view_of_stand_in(expected: Expectation, stand_in: StandInGuest, guest: Host) -> GuestView:
    """Compare a booted test guest: memory is scaled, links are not compared."""
    observation = observation_of(guest)
    if stand_in.vm.offline_vcpus:
        expected = without_vcpus(expected, stand_in.vm.offline_vcpus)
    scaled = of_stand_in(expected, stand_in)
    both = GuestComparison(scaled, observation, STAND_IN_KERNEL_BYTES, stand_in.cpu.substituted)
    return GuestView("the test guest", (*both.lines(), *both.devices()), observation)


def view_of_guest(expected: Expectation, guest: Host, host: Host | None) -> GuestView:
    """The real guest: its links and huge pages too. host: for the devices' own links.

    vCPUs that were offline and memory that was in the balloon may have come to the guest since.
    """
    observation = observation_of(guest)
    offline = expected.vm.offline_vcpus
    if offline and len(observation.vcpus) == expected.vm.vcpus_online:
        expected = without_vcpus(expected, offline)
    both = GuestComparison(expected, observation)
    lines = (*both.lines(), *_huge_pages(observation), *both.devices(host))
    return GuestView("the guest", lines, observation)


def not_in_stand_in(stand_in: StandInGuest, source: str) -> Iterator[Finding]:
    """What of the document no test guest gives, each by name."""
    for part in stand_in.left_out:
        yield finding("not-in-stand-in", part, "the test guest to have it", "omitted", source)


def of_stand_in(expected: Expectation, stand_in: StandInGuest) -> Expectation:
    """The same, for a test guest: less memory, and other devices in the devices' places."""
    address_of = {bdf: address for address, bdf in stand_in.devices if bdf is not None}
    cells = tuple(
        replace(cell, memory_bytes=stand_in.scale(cell.memory_bytes)) for cell in expected.cells
    )
    return replace(
        expected,
        vm=replace(expected.vm, cells=cells, memory_devices=(), ballooned_bytes=0),
        devices=tuple(
            replace(
                device,
                path=path_of_address(address_of[device.bdf], stand_in.vm.controllers)
                if device.bdf in address_of
                else None,
                vendor_id=None,
                device_id=None,
            )
            for device in expected.devices
        ),
    )


def _huge_pages(observed: Observation) -> Iterator[Check]:
    """The guest's own huge pages: a node without any starves programs that are bound to it."""
    sizes = sorted({pool.page_bytes for node in observed.nodes for pool in node.page_pools})
    for size in sizes:
        counts = [
            sum(pool.total_pages for pool in node.page_pools if pool.page_bytes == size)
            for node in observed.nodes
        ]
        if any(counts) and len(counts) > 1:
            pairs = zip(observed.nodes, counts, strict=True)
            yield check(
                "huge-pages",
                f"the guest's huge pages of {format_bytes(size)}",
                "some on every node, or none",
                ", ".join(f"node {node.index}: {count}" for node, count in pairs),
                agree=all(counts),
            )
