"""Guest caches: a guest is shown its real L3, or no L3.

How Linux reads the caches that QEMU lists. Intel, leaf 4: the emulated L3 is shared by the APIC ids
of a die; without it there is no L3. AMD with topoext, leaf 0x8000001D: shared by the threads of a
die; QEMU lists an L3 there even with l3-cache=off, and Linux then takes the socket for it. AMD
without topoext, leaf 0x80000006: shared by the socket; with l3-cache=off, no L3. Zen 1 and Hygon:
eight APIC ids, whatever the leaf's value is. With host-cache-info the host's leaf: its number of
the guest's APIC ids, on Intel at most a socket. Without <cache>, the emulated L3.

Source: cpu_x86_cpuid in QEMU's target/i386/cpu.c (7.2, 10.0); cacheinfo_amd_init_llc_id,
amd_detect_cmp and __cache_cpumap_setup in Linux 6.1 and 6.12; each booted, AMD's topoext forced on
an emulated CPU (tests/verify/test_caches_boot.py).
"""

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import CpuSet, LlcIndex
from homenode.findings import Finding, Gap, Severity, finding
from homenode.machine.topology import Host, Llc
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.shape.guest_topology import AMD_VENDORS, INTEL_MODELS, INTEL_VENDOR
from homenode.vm.model import GuestCache, GuestTopology, Vm

PASSTHROUGH_MODES = frozenset({"host-passthrough", "maximum"})
"""CPU modes with which libvirt takes <cache mode='passthrough'/>."""

_WITH_TOPOEXT = ("EPYC", "Dhyana")
"""CPU models that include the feature. Source: builtin_x86_defs in QEMU's target/i386/cpu.c."""

_OF_ZEN_1 = frozenset({"EPYC", "EPYC-IBPB", "Dhyana"})
_ZEN_FAMILY, _LAST_ZEN_1_MODEL, _ZEN_1_BITS = 0x17, 0x1F, 3

Groups = tuple[CpuSet, ...]
"""Sets of vCPUs that share a cache, by their first vCPU."""


class GuestCpu(Struct, frozen=True):
    """The CPU facts that decide how a Linux guest reads its L3."""

    is_amd: bool | None  # by its CPUID vendor; None = not known
    has_topoext: bool  # the feature is on
    llc_bits: int | None  # APIC id bits of an LLC, if the kernel reads no leaf for it


class CacheChoice(Struct, frozen=True):
    """The L3 that the guest is shown, with findings."""

    cache: GuestCache | None
    # True = the guest needs the feature; False = it must not have it; None = unchanged
    topoext: bool | None
    findings: tuple[Finding, ...] = ()
    gaps: tuple[Gap, ...] = ()


class SharedLlcs(Struct, frozen=True):
    """The LLCs under the vCPUs."""

    groups: Groups  # vCPUs of each
    llcs: tuple[LlcIndex, ...]  # their indices, in the same order

    @property
    def run_vcpus(self) -> int:
        """Return the vCPUs per LLC if all have the same number of consecutive vCPUs; else 0."""
        sizes = {len(group) for group in self.groups}
        runs = all(group == CpuSet(range(min(group), max(group) + 1)) for group in self.groups)
        return sizes.pop() if runs and len(sizes) == 1 else 0

    def cross(self, cells: tuple[CpuSet, ...]) -> bool:
        """Return whether an LLC has vCPUs of several cells."""
        return any(
            not group.isdisjoint(cell) and group - cell for group in self.groups for cell in cells
        )


def find_shared_llcs(host: Host | None, pins: tuple[CpuSet | None, ...]) -> SharedLlcs | None:
    """Return the LLCs of pinned vCPUs; None if an LLC is unknown, or a vCPU may use several."""
    if host is None:
        return None
    vcpus_of_llc: dict[LlcIndex, list[int]] = {}
    for vcpu, pin in enumerate(pins):
        llcs_of_pin = {pu.llc if (pu := host.pu_at.get(index)) else None for index in pin or ()}
        llc = llcs_of_pin.pop() if len(llcs_of_pin) == 1 else None
        if llc is None:
            return None
        vcpus_of_llc.setdefault(llc, []).append(vcpu)
    return SharedLlcs(tuple(map(CpuSet, vcpus_of_llc.values())), tuple(vcpus_of_llc))


def guest_cpu(host: Host, guest: Vm, topoext: bool | None = None) -> GuestCpu:
    """The CPU of a guest on this host. topoext: whether it is on; None = as in the definition."""
    vendor = host.cpu.vendor
    is_amd = None if vendor is None else vendor in AMD_VENDORS
    name = guest.cpu_model if guest.cpu_mode == "custom" else None
    if topoext is None:
        topoext = guest.topoext
    if topoext is None:
        topoext = guest.cpu_mode == "host-model" or (name or "").startswith(_WITH_TOPOEXT)
    family, model = host.cpu.family, host.cpu.model
    is_zen_1 = vendor == "HygonGenuine" or (
        family == _ZEN_FAMILY and model is not None and model <= _LAST_ZEN_1_MODEL
    )
    if name is not None:
        is_zen_1 = name in _OF_ZEN_1
    if guest.domain_type == "qemu":  # an emulated CPU: its model's vendor, and no topoext
        is_amd = name is None or name.startswith(("EPYC", "Dhyana", "Opteron", "phenom", "qemu"))
        topoext = False
    return GuestCpu(is_amd, topoext, _ZEN_1_BITS if is_zen_1 else None)


def guest_l3_groups(
    cache: str, topology: GuestTopology, cpu: GuestCpu, host_threads: int | None = None
) -> Groups | None:
    """Return the vCPUs that share each L3 as a Linux guest sees it; () without an L3, None if
    unknown. host_threads: CPUs of each host LLC, for passed-through caches.

    >>> zen = GuestCpu(is_amd=True, has_topoext=True, llc_bits=None)
    >>> guest_l3_groups(GuestCache.EMULATED, GuestTopology(1, 2, 2, 1), zen)
    (CpuSet('0-1'), CpuSet('2-3'))
    >>> guest_l3_groups(GuestCache.DISABLED, GuestTopology(1, 2, 2, 1), zen)
    (CpuSet('0-3'),)
    >>> old = replace(zen, has_topoext=False)
    >>> guest_l3_groups(GuestCache.DISABLED, GuestTopology(1, 2, 2, 1), old)
    ()
    """
    if cpu.is_amd is None:
        ways = {
            guest_l3_groups(cache, topology, replace(cpu, is_amd=is_amd), host_threads)
            for is_amd in (True, False)
        }
        return ways.pop() if len(ways) == 1 else None
    is_passed = cache == GuestCache.PASSTHROUGH
    if is_passed and host_threads is None:
        return None
    if cache == GuestCache.DISABLED and not (cpu.is_amd and cpu.has_topoext):
        return ()
    per_die = topology.cores * topology.threads
    per_socket = per_die * topology.dies
    if cpu.is_amd:
        if not cpu.has_topoext or cache == GuestCache.DISABLED:
            return _group_vcpus(topology, lambda vcpu: vcpu // per_socket)
        threads = host_threads if is_passed and host_threads else per_die
        bits = _count_bits(threads) if cpu.llc_bits is None else cpu.llc_bits
        return _group_vcpus(topology, lambda vcpu: _compute_apic_id(topology, vcpu) >> bits)
    if is_passed and host_threads is not None:
        if 1 << _count_bits(host_threads) > per_socket:
            return _group_vcpus(topology, lambda vcpu: vcpu // per_socket)
        return _group_vcpus(
            topology, lambda vcpu: _compute_apic_id(topology, vcpu) >> _count_bits(host_threads)
        )
    return _group_vcpus(topology, lambda vcpu: vcpu // per_die)


def read_topology(guest: Vm, vcpus: int) -> GuestTopology:
    """Return the definition's topology; without one libvirt makes each vCPU a socket."""
    topology = guest.cpu_topology
    return topology if topology and topology.vcpus == vcpus else GuestTopology(vcpus, 1, 1, 1)


def read_cache(guest: Vm) -> GuestCache:
    """Return the cache of the document's <cache>; without it, QEMU emulates an L3."""
    cache_of_name = {str(cache): cache for cache in GuestCache}
    return cache_of_name.get(guest.cpu_cache or "", GuestCache.EMULATED)


def choose_guest_cache(
    host: Host | None,
    request: GuestRequest,
    placement: Placement,
    topology: GuestTopology | None,
    llcs: SharedLlcs | None,
) -> CacheChoice:
    """Return the caches to show a guest with this topology (None = the definition's). Without pins,
    and on architectures without this setting, they stay unchanged."""
    guest, pins = request.guest, placement.vcpu_pins
    is_x86 = guest.architecture == "x86_64"
    vendor = None if host is None else host.cpu.vendor
    # Without siblings topoext is not needed, and libvirt accepts it only with a CPU model.
    can_say = guest.cpu_mode is not None or (topology is not None and topology.threads > 1)
    is_intel = guest.cpu_mode == "custom" and (guest.cpu_model or "").startswith(
        (*INTEL_MODELS, "Conroe", "Penryn", "core", "n270", "pentium")
    )
    needs_topoext = vendor in AMD_VENDORS and is_x86 and can_say and not is_intel
    topoext_needed = True if needs_topoext and topology else None
    if host is None or not is_x86 or not pins:
        return CacheChoice(None, topoext_needed)
    shape = topology or read_topology(guest, len(pins))
    threads = count_llc_threads(host, llcs)
    if topology is None:
        llcs_before = guest_l3_groups(read_cache(guest), shape, guest_cpu(host, guest), threads)
        if llcs_before == () or (llcs is not None and llcs_before == llcs.groups):
            return CacheChoice(None, None)
    cpu = guest_cpu(host, guest, topoext_needed)
    for cache in _list_caches(host, guest, placement, shape, llcs):
        if llcs is not None and guest_l3_groups(cache, shape, cpu, threads) == llcs.groups:
            return CacheChoice(cache, topoext_needed)
    topoext = False if shape.threads == 1 and vendor != INTEL_VENDOR else topoext_needed
    shown_groups = guest_l3_groups(GuestCache.DISABLED, shape, guest_cpu(host, guest, topoext))
    return CacheChoice(
        GuestCache.DISABLED, topoext, (_report_hidden_l3(llcs, is_told=shown_groups != ()),)
    )


def count_llc_threads(host: Host, shared_llcs: SharedLlcs | None) -> int | None:
    """Return the CPUs of each LLC under the vCPUs; None if they differ or are unknown."""
    used = () if shared_llcs is None else shared_llcs.llcs
    sizes = {len(llc.pus) for llc in host.llcs if llc.index in used}
    return sizes.pop() if len(sizes) == 1 else None


def _list_caches(
    host: Host,
    guest: Vm,
    placement: Placement,
    shape: GuestTopology,
    shared_llcs: SharedLlcs | None,
) -> Iterator[GuestCache]:
    """Yield possible caches, the best first: the host's caches if the VM has whole ones, else the
    emulated L3, else the host's CPUID leaf, with which the last LLC is partly filled."""
    pins = [pin for pin in placement.vcpu_pins if len(pin) == 1]
    used = CpuSet.union(pins)
    threads = {len(host.core_at[pu].pus) for pu in used}
    llcs = [llc for llc in host.llcs if shared_llcs is not None and llc.index in shared_llcs.llcs]
    can_pass = guest.cpu_mode in PASSTHROUGH_MODES and threads == {shape.threads}
    if host.cpu.vendor in AMD_VENDORS:
        can_pass = can_pass and all(_is_known_leaf(host, llc, shape.threads) for llc in llcs)
    is_whole = len(used) == sum(len(llc.pus) for llc in llcs)
    if can_pass and is_whole:
        yield GuestCache.PASSTHROUGH
    yield GuestCache.EMULATED
    if can_pass and host.cpu.vendor in AMD_VENDORS:
        yield GuestCache.PASSTHROUGH


def _is_known_leaf(host: Host, llc: Llc, threads: int) -> bool:
    """Return whether AMD's leaf is known to count the LLC's CPUs: with all cores of a core complex
    (4 on Zen 2, 8 or 16 since) and both threads of each. Otherwise it may count offline CPUs."""
    least = 4 if host.cpu.family == _ZEN_FAMILY else 8
    cores, remainder = divmod(len(llc.pus), 2)
    return threads == 2 and not remainder and cores >= least and not cores & (cores - 1)


def _count_bits(count: int) -> int:
    """Return the bits of an APIC id for `count` items."""
    return (count - 1).bit_length()


def _compute_apic_id(topology: GuestTopology, vcpu: int) -> int:
    """Return a vCPU's APIC id. Source: QEMU's include/hw/i386/topology.h."""
    apic_id, shift = 0, 0
    for count in (topology.threads, topology.cores, topology.dies):
        vcpu, number = divmod(vcpu, count)
        apic_id |= number << shift
        shift += _count_bits(count)
    return apic_id | vcpu << shift


def _group_vcpus(topology: GuestTopology, key: Callable[[int], int]) -> Groups:
    groups: dict[int, list[int]] = {}
    for vcpu in range(topology.vcpus):
        groups.setdefault(key(vcpu), []).append(vcpu)
    return tuple(map(CpuSet, groups.values()))


_SHOWN = 8  # LLCs that a finding names


def _report_hidden_l3(shared_llcs: SharedLlcs | None, *, is_told: bool) -> Finding:
    if shared_llcs is None:
        reason = "the LLCs under the vCPUs are not known, or a vCPU may run on several"
    else:
        pairs = zip(shared_llcs.groups, shared_llcs.llcs, strict=True)
        some = ", ".join(f"{len(group)} on LLC {llc}" for group, llc in list(pairs)[:_SHOWN])
        unlisted_count = len(shared_llcs.llcs) - _SHOWN
        reason = "no setting of QEMU shows the guest the LLCs under its vCPUs "
        reason += f"({some}{f' and {unlisted_count} more' if unlisted_count > 0 else ''})"
    text = "so it is shown no L3"
    if is_told:
        text = "and siblings of AMD need the feature topoext, with which Linux treats each guest "
        text += "socket for one L3"
    return finding(
        "guest-l3-not-mirrored",
        "guest L3",
        observed=f"{reason}, {text}",
        severity=Severity.WARNING if is_told else Severity.INFO,
    )
