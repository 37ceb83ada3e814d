"""Firmware: the nodes that a hypervisor gave a guest, before its kernel made its own of them."""

from collections.abc import Iterator

from msgspec import Struct

from homenode.check.verify.guest.checks import Check, check
from homenode.check.verify.guest.expectation import Expectation
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools.acpi_tables import ProximityDomain, parse_slit, parse_srat

_TABLES = "/sys/firmware/acpi/tables"


class FirmwareNodes(Struct, frozen=True):
    """What a guest's ACPI tables say. distances: [from][to] by the domains' numbers, None = they
    say none."""

    domains: tuple[ProximityDomain, ...]
    distances: tuple[tuple[int, ...], ...] | None


def firmware_nodes(snapshot: Snapshot) -> FirmwareNodes | None:
    """None where the guest has no such tables, or its kernel showed them to root alone.

    Raises ParseError for tables that are none.
    """
    srat, slit = (snapshot.read_text(f"{_TABLES}/{name}") for name in ("SRAT", "SLIT"))
    if srat is None:
        return None
    domains = parse_srat(srat.encode("utf-8", "surrogateescape"), f"{snapshot.name}: SRAT")
    if slit is None:
        return FirmwareNodes(domains, None)
    table = slit.encode("utf-8", "surrogateescape")
    return FirmwareNodes(domains, parse_slit(table, f"{snapshot.name}: SLIT"))


def firmware_checks(expected: Expectation, found: FirmwareNodes, source: str) -> Iterator[Check]:
    """Cells in the order of their numbers are domains in the order of theirs. Sizes are left to the
    kernel's view: every hypervisor keeps some memory for itself."""
    cells, domains = expected.cells, found.domains
    agree = len(cells) == len(domains)
    wanted, there = str(len(cells)), str(len(domains))
    yield check("firmware-nodes", "SRAT: nodes", wanted, there, agree, source)
    if not agree:
        return
    for cell, domain in zip(cells, domains, strict=True):
        yield check(
            "firmware-nodes",
            f"SRAT: cell {cell.id}",
            f"{len(cell.vcpus)} vCPUs",
            f"{domain.cpus} vCPUs",
            len(cell.vcpus) == domain.cpus,
            source,
        )
    numbers = [domain.number for domain in domains]
    if expected.distances is None or found.distances is None:
        return
    for cell, row, number in zip(cells, expected.distances, numbers, strict=True):
        whole = found.distances[number] if number < len(found.distances) else ()
        given = tuple(whole[other] for other in numbers if other < len(whole))
        yield check(
            "firmware-nodes",
            f"SLIT: distances from cell {cell.id}",
            " ".join(map(str, row)),
            " ".join(map(str, given)) or "none",
            given == row,
            source,
        )
