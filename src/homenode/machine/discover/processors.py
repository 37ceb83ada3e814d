"""Processors: packages, dies, cores with their kinds, and last-level caches of the online CPUs.

Cores are the sets of core_cpus_list, caches those of shared_cpu_list. The ids next to them are
labels: core_id repeats, and cache ids are not unique on every machine.

Source: Documentation/admin-guide/cputopology.rst and
Documentation/ABI/testing/sysfs-devices-system-cpu of the Linux kernel.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from msgspec import Struct

from homenode.cpuset import CoreIndex, CpuSet, LlcIndex, PackageIndex, PuIndex
from homenode.errors import InputError, ParseError
from homenode.findings import Gap
from homenode.machine.discover.readings import (
    list_numbers,
    list_readable,
    read_lines,
    read_mask,
    read_number,
    read_pus,
    read_word,
)
from homenode.machine.discover.system import CPU, PuStates, parse_cpu_model, read_cpu_fields
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import Core, CoreId, CoreKind, CpuModel, Llc, Package
from homenode.text import format_cpus
from homenode.units import parse_bytes

STEP_RATIO = 1.2
"""Maximum difference in top speed between cores of one kind.

Favoured cores of one kind: i7-1370P 5.0 and 5.2 GHz, amd-pstate up to 1.14 times. Two kinds:
i7-1370P 5.0 to 3.9 GHz (1.28), GB10 997 to 731 units of capacity (1.36).
"""


def read_core_kinds(snapshot: Snapshot, cores: Sequence[CpuSet]) -> tuple[CoreKind | None, ...]:
    """Return the kind of each core, in the order given; all None if the cores are identical.

    In this order of trust: the PMUs that Linux registers for each kind on x86 (cpu_core,
    cpu_atom), arm64's cpu_capacity, top frequency. Base frequency counts only if no top frequency
    is known: Xeons with SST-BF raise it for some of a set of equal cores.
    Source: Documentation/ABI/testing/sysfs-bus-event_source-devices, sysfs-devices-system-cpu.
    """
    performance = read_pus(snapshot, "/sys/devices/cpu_core/cpus")
    if performance and read_pus(snapshot, "/sys/devices/cpu_atom/cpus"):
        return tuple(
            CoreKind.EFFICIENCY if pus.isdisjoint(performance) else CoreKind.PERFORMANCE
            for pus in cores
        )
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq", "cpufreq/base_frequency"):
        speeds: list[int] = []
        for pus in cores:
            speed = read_number(snapshot, f"{CPU}/cpu{pus.first()}/{file}")
            if speed is None or speed <= 0:
                break
            speeds.append(speed)
        if speeds and len(speeds) == len(cores):
            return classify_speeds(speeds)
    return (None,) * len(cores)


def explain_core_kinds(
    snapshot: Snapshot, cores: Sequence[CpuSet], packages: Sequence[CpuSet], offline: CpuSet
) -> str | None:
    """Return the difference of cores of unknown kind as text; None if they are equal. Compared are
    cache sizes, the model on arm64, and the number of SMT siblings within a package without offline
    CPUs, because SMT may be off in another package."""
    package_of_pu = {pu: number for number, pus in enumerate(packages) for pu in pus}
    sizes_of_package: dict[int | None, set[int]] = {}
    for pus in () if offline else cores:
        (package, *other_packages) = {package_of_pu.get(pu) for pu in pus} or {None}
        if package is not None and not other_packages:
            sizes_of_package.setdefault(package, set()).add(len(pus))
    if any(len(sizes) > 1 for sizes in sizes_of_package.values()):
        return "cores have different numbers of SMT siblings"
    for index in ("index0", "index2"):  # level 1 data and level 2 on x86 and most of arm64
        sizes = {read_word(snapshot, f"{CPU}/cpu{pus.first()}/cache/{index}/size") for pus in cores}
        if len(sizes - {None}) > 1:
            return "cores have caches of different sizes"
    parts = {
        line.partition(":")[2].strip()
        for line in read_lines(snapshot, "/proc/cpuinfo")
        if line.startswith("CPU part")
    }
    return "cores are of different models" if len(parts) > 1 else None


def classify_speeds(speeds: Sequence[int]) -> tuple[CoreKind | None, ...]:
    """Return kinds of cores by a measure of top speed: cores above the highest step are P cores.

    >>> [kind and kind.value for kind in classify_speeds([5000, 5200, 3900, 3900])]
    ['performance', 'performance', 'efficiency', 'efficiency']
    >>> classify_speeds([3000, 3100])
    (None, None)
    """
    ladder = sorted(set(speeds))
    for base, step in reversed(list(pairwise(ladder))):
        if step >= base * STEP_RATIO:
            return tuple(
                CoreKind.PERFORMANCE if speed >= step else CoreKind.EFFICIENCY for speed in speeds
            )
    return (None,) * len(speeds)


_FAMILIES_OF_MODULES = (0x15, 0x16)
"""AMD's Bulldozer to Excavator, whose modules have two cores, and Jaguar, as in hwloc."""

_MIN_LLC_LEVEL = 2
"""A level-1 cache that is listed alone is not the last: firmware often shows no other."""


class Processors(Struct, frozen=True):
    """Shared units of the online CPUs. die_of_pu has only CPUs whose die is known."""

    packages: tuple[Package, ...]
    cores: tuple[Core, ...]
    llcs: tuple[Llc, ...]
    die_of_pu: dict[PuIndex, int]
    gaps: tuple[Gap, ...]


def read_processors(snapshot: Snapshot, states: PuStates) -> Processors:
    """Return the packages, cores and LLCs of a snapshot. Raises InputError if only some online CPUs
    have a topology directory, HostError if one cannot be read."""
    online = states.online
    with_topology = CpuSet(
        pu for pu in online if list_readable(snapshot, f"{CPU}/cpu{pu}/topology") is not None
    )
    if with_topology and online - with_topology:
        raise InputError(
            f"{snapshot.name}: no {CPU}/cpuN/topology for online CPUs {online - with_topology}",
            hint="the tree is incomplete: capture the host again",
        )
    gaps: list[Gap] = []
    if not with_topology:
        gaps.append(Gap("cores and packages", f"{CPU}/cpuN/topology is absent"))
    groups = _group_cpus(with_topology, _make_core_reader(snapshot), "core", gaps)
    siblings_of_pu = {pu: pus for pus in groups for pu in pus}
    core_ids = _read_core_ids(snapshot, with_topology)
    fields = read_cpu_fields(snapshot)
    groups = _split_modules(groups, core_ids, parse_cpu_model(fields), gaps)
    package_of_pu = _read_package_of_pu(snapshot, with_topology, gaps)
    kinds = read_core_kinds(snapshot, tuple(groups))
    cores = tuple(
        Core(CoreIndex(i), _choose_core_id(pus, core_ids, package_of_pu), pus, kind)
        for i, (pus, kind) in enumerate(zip(groups, kinds, strict=True))
    )
    pus_of_number: dict[PackageIndex, list[PuIndex]] = {}
    for pu, number in package_of_pu.items():
        pus_of_number.setdefault(number, []).append(pu)
    packages = tuple(Package(n, CpuSet(pus)) for n, pus in sorted(pus_of_number.items()))
    pus_of_package = tuple(package.pus for package in packages)
    if not any(kinds) and (
        difference := explain_core_kinds(snapshot, tuple(groups), pus_of_package, states.offline)
    ):
        reason = f"{difference}, and nothing names the kinds or how fast they are"
        gaps.append(Gap("kinds of core", reason))
    llcs = _read_llcs(snapshot, online, siblings_of_pu, gaps)
    named_groups = {*groups, *pus_of_package, *(llc.pus for llc in llcs)}
    clusters = _read_clusters(snapshot, with_topology, named_groups)
    if clusters:
        reason = "no core, cache or package is a cluster of them: their clusters are not read"
        gaps.append(Gap(f"clusters of CPUs {clusters}", reason))
    return Processors(
        packages,
        cores,
        llcs,
        _read_die_of_pu(snapshot, with_topology, gaps),
        tuple(gaps),
    )


def _group_cpus(
    pus: CpuSet, group_of: Callable[[int], CpuSet | None], subject: str, gaps: list[Gap]
) -> list[CpuSet]:
    """Return the disjoint groups of CPUs, by lowest CPU. A CPU's own file decides unless it
    disagrees with that of the lowest CPU in its group: then the lowest CPU's file counts, as in
    hwloc, and there is a gap."""
    groups: list[CpuSet] = []
    group_of_pu: dict[int, CpuSet] = {}
    in_use = CpuSet()
    for pu in pus:
        group = group_of(pu)
        if group is None:
            gaps.append(Gap(f"{subject} of CPU {pu}", "no list of the CPUs that share it"))
            continue
        group = group & pus
        if pu not in group:
            gaps.append(Gap(f"{subject} of CPU {pu}", f"its list ({group}) does not hold itself"))
            continue
        if pu in in_use:
            if group != group_of_pu[pu]:
                reason = f"its list has {group}, the list of CPU {group_of_pu[pu].first()} says "
                gaps.append(Gap(f"{subject} of CPU {pu}", f"{reason}{group_of_pu[pu]}"))
            continue
        group = group - in_use
        groups.append(group)
        in_use = in_use | group
        group_of_pu |= dict.fromkeys(group, group)
    return groups


def _make_core_reader(snapshot: Snapshot) -> Callable[[int], CpuSet | None]:
    def core_of(pu: int) -> CpuSet | None:
        topology = f"{CPU}/cpu{pu}/topology"
        # core_cpus is the newer name of thread_siblings (Linux 5.3)
        return read_pus(snapshot, f"{topology}/core_cpus_list", f"{topology}/core_cpus") or (
            read_pus(snapshot, f"{topology}/thread_siblings_list", f"{topology}/thread_siblings")
        )

    return core_of


def _read_core_ids(snapshot: Snapshot, pus: CpuSet) -> dict[PuIndex, int]:
    """Return the core_id of each CPU for which the kernel has an id."""
    ids: dict[PuIndex, int] = {}
    for pu in pus:
        label = read_number(snapshot, f"{CPU}/cpu{pu}/topology/core_id")
        if label is not None and label >= 0:
            ids[pu] = label
    return ids


def _split_modules(
    groups: list[CpuSet], core_ids: dict[PuIndex, int], cpu: CpuModel, gaps: list[Gap]
) -> list[CpuSet]:
    """The groups, but on AMD's families 15h and 16h one whose CPUs all have core ids of their own
    is not one core: its modules are two cores that share a front end and an FPU. hwloc and the
    vendor count two. On other CPUs such ids are arbitrary labels of firmware or hypervisor."""
    has_modules = cpu.vendor == "AuthenticAMD" and cpu.family in _FAMILIES_OF_MODULES
    labelled_pus = CpuSet()
    cores: list[CpuSet] = []
    modules = CpuSet()
    for pus in groups:
        own_ids = {core_ids[pu] for pu in pus if pu in core_ids}
        has_own_ids = len(pus) > 1 and len(own_ids) == len(pus)
        if has_own_ids and not has_modules:
            labelled_pus = labelled_pus | pus
        if has_own_ids and has_modules:
            modules = modules | pus
            cores += [CpuSet((pu,)) for pu in pus]
        else:
            cores.append(pus)
    if modules:
        reason = "listed as siblings, but each has a core_id of its own: counted as cores"
        gaps.append(Gap(f"cores of CPUs {modules}", reason))
    if labelled_pus:
        reason = "each has a core_id of its own, but they are listed as siblings: used the lists"
        gaps.append(Gap(f"core ids of {format_cpus(labelled_pus)}", reason))
    return sorted(cores, key=lambda pus: pus.first() or 0)


def _choose_core_id(
    pus: CpuSet, core_ids: dict[PuIndex, int], package_of_pu: dict[PuIndex, PackageIndex]
) -> CoreId:
    first = pus.first()
    assert first is not None
    # The lowest CPU replaces a core_id that the kernel does not have.
    return CoreId(package_of_pu[first], core_ids.get(first, first))


def _read_package_of_pu(
    snapshot: Snapshot, pus: CpuSet, gaps: list[Gap]
) -> dict[PuIndex, PackageIndex]:
    """Return the package of each CPU by physical_package_id.

    If the kernel has no id (-1 on some arm64 and riscv), packages are the sets of
    package_cpus_list, numbered by lowest CPU. If that is missing too, all CPUs are in package 0.
    """
    numbers = {
        pu: read_number(snapshot, f"{CPU}/cpu{pu}/topology/physical_package_id") for pu in pus
    }
    if all(number is not None and number >= 0 for number in numbers.values()):
        return {pu: PackageIndex(number) for pu, number in numbers.items() if number is not None}

    def package_of(pu: int) -> CpuSet | None:
        topology = f"{CPU}/cpu{pu}/topology"
        return read_pus(snapshot, f"{topology}/package_cpus_list", f"{topology}/package_cpus") or (
            read_pus(snapshot, f"{topology}/core_siblings_list", f"{topology}/core_siblings")
        )

    unknown: list[Gap] = []
    groups = _group_cpus(pus, package_of, "package", unknown)
    if unknown or not groups:
        gaps.append(Gap("packages", "the kernel numbers none; all CPUs count as package 0"))
        return dict.fromkeys(pus, PackageIndex(0))
    gaps.append(Gap("package numbers", "the kernel reports none; numbered by their lowest CPU"))
    return {pu: PackageIndex(i) for i, group in enumerate(groups) for pu in group}


def _read_die_of_pu(snapshot: Snapshot, pus: CpuSet, gaps: list[Gap]) -> dict[PuIndex, int]:
    dies: dict[PuIndex, int] = {}
    for pu in pus:
        die = read_number(snapshot, f"{CPU}/cpu{pu}/topology/die_id")
        if die is not None and die >= 0:
            dies[pu] = die
    if len(dies) < len(pus):
        missing = pus - CpuSet(dies)
        gaps.append(
            Gap(f"die of {format_cpus(missing)}", "no die_id (Linux before 5.2, or not known)")
        )
    return dies


def _read_clusters(snapshot: Snapshot, online: CpuSet, named_groups: set[CpuSet]) -> CpuSet:
    """Return CPUs in clusters (arm64's groups of cores, x86's with one L2) that are no set of CPUs
    with a name and have no cache: hwloc shows these as groups."""
    clusters = CpuSet()
    in_use = CpuSet()
    for pu in online:
        topology = f"{CPU}/cpu{pu}/topology"
        cluster = read_pus(snapshot, f"{topology}/cluster_cpus_list", f"{topology}/cluster_cpus")
        members = CpuSet() if cluster is None or pu in in_use else cluster & online
        in_use = in_use | members
        if len(members) < 2 or members in named_groups:
            continue
        directory = f"{CPU}/cpu{pu}/cache"
        caches = [
            f"{directory}/index{index}" for index in list_numbers(snapshot.list(directory), "index")
        ]
        if not any(
            read_pus(snapshot, f"{cache}/shared_cpu_list", f"{cache}/shared_cpu_map") == cluster
            for cache in caches
        ):
            clusters = clusters | members
    return clusters


def _read_llcs(
    snapshot: Snapshot, online: CpuSet, siblings_of_pu: dict[PuIndex, CpuSet], gaps: list[Gap]
) -> tuple[Llc, ...]:
    """Return the last-level cache of each CPU: the highest level that holds data. LLCs may differ
    in level: the low-power E cores of a Meteor Lake are outside the L3."""
    caches: list[tuple[CpuSet, int, int | None]] = []
    in_use = CpuSet()
    unknown = CpuSet()
    unlisted_pus = CpuSet()
    for pu in online:
        if pu in in_use:
            continue
        cache = _find_highest_cache(snapshot, pu)
        pus = CpuSet() if cache is None else cache[0] & online
        if cache is not None and not cache[0]:
            pus = siblings_of_pu.get(pu, CpuSet((pu,)))
            unlisted_pus = unlisted_pus | pus
        if cache is None or pu not in pus:
            unknown = unknown | CpuSet((pu,))
            continue
        if not pus.isdisjoint(in_use):
            reason = f"CPU {pu} shares its cache with CPUs {pus}, some of them in another cache"
            gaps.append(Gap(f"last-level cache of CPU {pu}", reason))
            pus = pus - in_use
        in_use = in_use | pus
        caches.append((pus, cache[1], cache[2]))
    if unlisted_pus:
        reason = "its list of CPUs is empty: counted as that of its SMT siblings, as hwloc does"
        gaps.append(Gap(f"last-level cache of {format_cpus(unlisted_pus)}", reason))
    if unknown:
        reason = f"no cache above level 1 in {CPU}/cpuN/cache with the CPUs that share it"
        gaps.append(Gap(f"last-level cache of {format_cpus(unknown)}", reason))
    llcs = tuple(Llc(LlcIndex(i), *fields) for i, fields in enumerate(caches))
    sizeless = [str(llc.index) for llc in llcs if llc.size_bytes is None]
    if sizeless:
        gaps.append(Gap(f"size of LLCs {', '.join(sizeless)}", "no size file"))
    return llcs


def _find_highest_cache(snapshot: Snapshot, pu: int) -> tuple[CpuSet, int, int | None] | None:
    """Return CPUs that share it (none if its list is empty), level and bytes of the highest data or
    unified cache of a CPU."""
    directory = f"{CPU}/cpu{pu}/cache"
    best: tuple[CpuSet, int, int | None] | None = None
    for index in reversed(list_numbers(snapshot.list(directory), "index")):
        cache = f"{directory}/index{index}"
        level = read_number(snapshot, f"{cache}/level")
        if level is None or level < _MIN_LLC_LEVEL or (best is not None and level <= best[1]):
            continue
        if read_word(snapshot, f"{cache}/type") not in ("Unified", "Data"):
            continue
        pus = read_pus(snapshot, f"{cache}/shared_cpu_list", f"{cache}/shared_cpu_map")
        if pus is not None and pu not in pus:  # a list that does not hold the CPU itself is wrong
            pus = read_mask(snapshot, f"{cache}/shared_cpu_map")
        if pus is not None:
            best = pus, level, _read_cache_bytes(snapshot, f"{cache}/size")
    return best


def _read_cache_bytes(snapshot: Snapshot, path: str) -> int | None:
    """Return bytes of a size such as "32768K"."""
    word = read_word(snapshot, path)
    if word is None:
        return None
    try:
        return parse_bytes(word)
    except InputError:
        raise ParseError(f"{snapshot.name}: {path}", "a size such as 32768K", word) from None
