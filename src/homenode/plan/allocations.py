"""Allocations: the host's resources that other domains use, and gaps for floating domains.

A pinned vCPU takes its whole core: VMs do not share cores. A core that runs only emulator threads
or IOThreads of other domains may serve further emulators. A domain that is shut off keeps its
resources if homenode has placed it. The domain being planned, found by name or UUID, holds nothing,
nor do the domains that it replaces: a VM that is planned again gets its resources back. In a
redacted capture no domain can be found by name.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, list_members
from homenode.findings import Gap
from homenode.machine.pci import normalize_uuid
from homenode.machine.topology import DomainMark, Host, RunningDomain
from homenode.plan.request import GuestRequest
from homenode.text import command_line, plural, shorten_list
from homenode.vm.gpu_parts import list_free_parts

MAX_NAMED = 8
"""Number of domains or jobs that a message names; the rest are counted."""


class DomainCores(Struct, frozen=True):
    """The whole cores that the pins of one domain take: vCPU cores and all cores."""

    domain: str
    vcpu_cores: CpuSet
    cores: CpuSet


class Allocations(Struct, frozen=True):
    """The resources of other domains."""

    vcpu_cores: CpuSet  # CPUs of cores with pinned vCPUs
    service_cores: CpuSet  # CPUs of cores with emulators or IOThreads only
    by_domain: tuple[DomainCores, ...]
    devices: tuple[tuple[Bdf, str], ...]  # (function, domain), ascending
    gaps: tuple[Gap, ...]
    mediated: tuple[tuple[str, str], ...] = ()  # (UUID, domain)
    shut_off: frozenset[str] = frozenset()  # names of the domains that are shut off

    def label(self, domain: str) -> str:
        """A domain's name in messages; if it is shut off, with the option that frees its share."""
        if domain not in self.shut_off:
            return repr(domain)
        return f"{domain!r} (shut off; {command_line('--ignore-domain', domain)})"

    def find_holder(self, device: Bdf | str) -> str | None:
        """The domain that has the function, or the mediated device of that UUID; None if free."""
        return next(
            (name for part, name in (*self.devices, *self.mediated) if part == device), None
        )


def other_domains(host: Host, request: GuestRequest) -> Iterator[RunningDomain]:
    """Yield the domains that hold resources: running, planned or placed by homenode; with
    reserve_defined also every domain that is shut off."""
    for domain in host.domains:
        counts = domain.has_claim or request.options.reserve_defined
        if counts and not _is_own(domain, request):
            yield domain


def list_held_uuids(host: Host | None, request: GuestRequest) -> frozenset[str]:
    """Return the mediated devices that other domains have."""
    domains = () if host is None else other_domains(host, request)
    return frozenset(uuid for domain in domains for uuid in domain.mediated)


def find_device_uuid(host: Host | None, request: GuestRequest, function: Bdf) -> str | None:
    """Return the mediated device that the VM gets at a function: the named one, else the first free
    one of its profile; None if it gets the function itself."""
    if function in request.devices or host is None:
        return dict(request.mediated).get(function)
    in_use = list_held_uuids(host, request)
    parts = list_free_parts(host.device_at, function, in_use, request.options.gpu_profile)
    return next((part.uuid for part in parts), None)


def own_domains(host: Host, request: GuestRequest) -> tuple[RunningDomain, ...]:
    """Return the domain being planned, if it exists already, and the domains that it replaces."""
    return tuple(domain for domain in host.domains if domain.running and _is_own(domain, request))


def _is_own(domain: RunningDomain, request: GuestRequest) -> bool:
    guest = request.guest
    is_named = domain.name == guest.name and not domain.has_pseudonym
    is_same = domain.uuid is not None and domain.uuid == normalize_uuid(guest.uuid or "")
    return is_named or is_same or domain.name in request.options.replaces


def own_is_unknown(host: Host, request: GuestRequest) -> Gap | None:
    """Return a gap if names are redacted: another domain may be the one being planned."""
    strangers = [domain.name for domain in other_domains(host, request) if domain.has_pseudonym]
    if not strangers or request.options.replaces:
        return None
    return Gap(
        f"whether domain {request.guest.name!r} is on the host already",
        f"the domains' names are redacted, so all of them count as other VMs; if it is one of "
        f"{shorten_list(strangers, MAX_NAMED)}, name it with --ignore-domain NAME",
    )


def find_allocations(host: Host, request: GuestRequest) -> Allocations:
    """Return the resources of the other domains of the host."""
    # Long because seven sums are taken in one pass over the VMs.
    cores = [pus for pus, *_ in host.core_places]
    online, widest = reduce(or_, cores, 0), max(map(int.bit_count, cores), default=1)
    gaps: list[Gap] = []
    by_domain: list[DomainCores] = []
    devices: list[tuple[Bdf, str]] = []
    mediated_devices: list[tuple[str, str]] = []
    unknown = own_is_unknown(host, request)
    if unknown is not None:
        gaps.append(unknown)
    counted_domains = list(other_domains(host, request))
    gaps += _find_copies(host, request, counted_domains)
    of_vcpus, of_threads, ranges = 0, 0, []
    for domain in counted_domains:
        devices += [(bdf, domain.name) for bdf in domain.devices]
        mediated_devices += [(uuid, domain.name) for uuid in domain.mediated]
        pinned_bits, floats, spans = _join_vcpu_pins(domain, widest, online)
        threads = 0
        for pin in (domain.emulator_pus, *domain.iothread_pus):
            if pin is not None and online & ~pin.bits:
                threads |= pin.bits
        if spans:
            # Threads of such domains that float over the same CPUs take no further core.
            threads &= ~reduce(or_, spans)
            ranges.append((domain.name, spans))
        pinned_cores = _count_cores(host, pinned_bits)
        all_cores = pinned_cores | _count_cores(host, threads)
        if all_cores:
            of_domain = CpuSet.from_bits(pinned_cores), CpuSet.from_bits(all_cores)
            by_domain.append(DomainCores(domain.name, *of_domain))
        of_vcpus |= pinned_cores
        of_threads |= all_cores
        if floats:
            gaps.append(
                Gap(
                    f"load of domain {domain.name!r}",
                    f"{floats} of its vCPUs float: they may run on every CPU, also of this VM",
                )
            )
        if domain.memory_bytes and not domain.memory_bound:
            gaps.append(
                Gap(
                    f"memory of domain {domain.name!r}",
                    "it is not bound, so it may be on any node",
                )
            )
    for name, spans in ranges:
        shares = _share_ranges(cores, of_vcpus | of_threads, spans)
        of_vcpus |= shares
        of_threads |= shares
        by_domain.append(DomainCores(name, CpuSet.from_bits(shares), CpuSet.from_bits(shares)))
        gaps.append(
            Gap(
                f"load of domain {name!r}",
                f"{plural(len(spans), 'vCPU')} may run on several cores, and as many cores count",
            )
        )
    return Allocations(
        CpuSet.from_bits(of_vcpus),
        CpuSet.from_bits(of_threads & ~of_vcpus),
        tuple(by_domain),
        tuple(sorted(devices)),
        tuple(gaps),
        tuple(sorted(mediated_devices)),
        shut_off=frozenset(vm.name for vm in counted_domains if not (vm.running or vm.planned)),
    )


def _find_copies(
    host: Host, request: GuestRequest, counted_domains: Sequence[RunningDomain]
) -> Iterator[Gap]:
    """Yield a gap for each copy of a placed domain; a copy holds nothing."""
    for domain in host.domains:
        is_copy = domain.mark is DomainMark.COPY
        if is_copy and domain not in counted_domains and not _is_own(domain, request):
            yield Gap(
                f"CPUs of domain {domain.name!r}",
                "it is a copy of a VM that homenode placed, so its CPUs count as free; "
                f"{command_line('homenode', 'apply', domain.name)} gives it separate CPUs",
            )


def _join_vcpu_pins(domain: RunningDomain, widest: int, online: int) -> tuple[int, int, list[int]]:
    """Return (pinned CPUs, number of vCPUs that float anywhere, CPUs of each vCPU that floats over
    a range that it shares with other vCPUs). A pin to every CPU is not a pin. widest: CPUs of the
    largest core."""
    pins = [0 if pin is None else pin.bits & online for pin in domain.vcpu_pins]
    pinned_bits, floats, spans = 0, 0, []
    for bits in pins:
        if bits in (0, online):
            floats += 1
        else:
            pinned_bits |= bits
            spans.append(bits)
    # vCPUs float over a range that has more cores than vCPUs.
    if pinned_bits.bit_count() > len(spans) and min([bits.bit_count() for bits in spans]) > widest:
        return 0, floats, spans
    return pinned_bits, floats, []


def _share_ranges(cores: Sequence[int], in_use: int, floating_ranges: Sequence[int]) -> int:
    """Take a free core for each floating vCPU, from the end of its range."""
    shares = 0
    for bits in floating_ranges:
        free = (c for c in reversed(cores) if c & bits and not c & (in_use | shares))
        shares |= next(free, 0)
    return shares


def _count_cores(host: Host, pus: int) -> int:
    """Return the whole cores of these CPUs (bits)."""
    used = [host.core_at[pu].pus.bits for pu in list_members(pus) if pu in host.core_at]
    return reduce(or_, used, 0)
