"""Taken: what other domains hold of a host, and the gaps that floating ones leave.

A pin takes the whole core: one VM shares no core with another. The domain being planned itself,
known by its name, holds nothing, and neither do those that the user says it replaces: planning a
running VM again gives it back what it has. Of a redacted capture no domain is known by its name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.plan.request import GuestRequest
from homenode.topology import Host, RunningDomain


@dataclass(frozen=True, slots=True)
class Holding:
    """The whole cores that the pins of one domain take."""

    domain: str
    pus: CpuSet


@dataclass(frozen=True, slots=True)
class Taken:
    """What others hold. devices: (function, domain), ascending."""

    pus: CpuSet
    holdings: tuple[Holding, ...]
    devices: tuple[tuple[Bdf, str], ...]
    gaps: tuple[Gap, ...]

    def holder(self, bdf: Bdf) -> str | None:
        """The domain that has the function, or None."""
        return next((domain for device, domain in self.devices if device == bdf), None)


def other_domains(host: Host, request: GuestRequest) -> Iterator[RunningDomain]:
    """Domains that count: the running ones, and with reserve_defined the shut-off ones."""
    for domain in host.domains:
        if not _is_own(domain, request) and (domain.running or request.reserve_defined):
            yield domain


def own_domains(host: Host, request: GuestRequest) -> tuple[RunningDomain, ...]:
    """The domain being planned, where it is running already, and those that it replaces."""
    return tuple(domain for domain in host.domains if domain.running and _is_own(domain, request))


def _is_own(domain: RunningDomain, request: GuestRequest) -> bool:
    named = domain.name == request.guest.name and not domain.has_pseudonym
    return named or domain.name in request.replaces


def own_is_unknown(host: Host, request: GuestRequest) -> Gap | None:
    """That one of the domains that count may be the one being planned, where names do not tell."""
    strangers = [domain.name for domain in other_domains(host, request) if domain.has_pseudonym]
    if not strangers or request.replaces:
        return None
    return Gap(
        f"whether domain {request.guest.name!r} is on the host already",
        f"its domains' names are redacted, so all of them count as others; if it is one of "
        f"{listed(strangers)}, say so with --replaces NAME",
    )


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a message: the first ones, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def taken_by_others(host: Host, request: GuestRequest) -> Taken:
    """What the other domains of the host hold."""
    online = 0
    for core in host.cores:
        online |= core.pus.bits
    gaps: list[Gap] = []
    holdings: list[Holding] = []
    devices: list[tuple[Bdf, str]] = []
    unknown = own_is_unknown(host, request)
    if unknown is not None:
        gaps.append(unknown)
    everything = 0
    for domain in other_domains(host, request):
        devices += [(bdf, domain.name) for bdf in domain.devices]
        pinned, floats = _pins(domain, online)
        cores = 0
        if pinned:
            for core in host.cores:
                if core.pus.bits & pinned:
                    cores |= core.pus.bits
            holdings.append(Holding(domain.name, CpuSet.from_bits(cores)))
            everything |= cores
        if floats:
            gaps.append(
                Gap(
                    f"load of domain {domain.name!r}",
                    f"{floats} of its vCPUs float, so they count as load on every node",
                )
            )
        if domain.memory_bytes and not domain.memory_bound:
            gaps.append(
                Gap(
                    f"memory of domain {domain.name!r}",
                    "it is bound to no node, so it may lie on any",
                )
            )
    return Taken(CpuSet.from_bits(everything), tuple(holdings), tuple(sorted(devices)), tuple(gaps))


def _pins(domain: RunningDomain, online: int) -> tuple[int, int]:
    """(PUs that the pins name, number of vCPUs that float). A pin to every PU is no pin."""
    pinned, floats = 0, 0
    for pin in domain.vcpu_pins:
        bits = 0 if pin is None else pin.bits
        if bits == 0 or online & ~bits == 0:
            floats += 1
        else:
            pinned |= bits
    for pin in (domain.emulator_pus, *domain.iothread_pus):
        if pin is not None and online & ~pin.bits:
            pinned |= pin.bits
    return pinned, floats
