"""Core kinds: performance or efficiency, on hosts whose cores are not all alike."""

from collections.abc import Sequence
from itertools import pairwise

from homenode.cpuset import CpuSet
from homenode.machine.discover.readings import read_lines, read_number, read_pus, read_word
from homenode.machine.discover.states import CPU
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import CoreKind

STEP_RATIO = 1.2
"""Cores of one kind differ less than this in top speed, those of two kinds more.

Favoured cores of one kind: i7-1370P 5.0 and 5.2 GHz, amd-pstate up to 1.14 times. Two kinds:
i7-1370P 5.0 to 3.9 GHz (1.28), GB10 997 to 731 units of capacity (1.36).
"""


def read_core_kinds(snapshot: Snapshot, cores: Sequence[CpuSet]) -> tuple[CoreKind | None, ...]:
    """The kind of each core, in the order given; all None where the cores are alike.

    In this order of trust: the PMUs that Linux registers for each kind on x86 (cpu_core,
    cpu_atom), arm64's cpu_capacity, top frequency. Base frequency counts only where no top
    frequency is known: Xeons with SST-BF raise it for some of a set of equal cores.
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
            return kinds_by_speed(speeds)
    return (None,) * len(cores)


def cores_differ(
    snapshot: Snapshot, cores: Sequence[CpuSet], packages: Sequence[CpuSet], offline: CpuSet
) -> str | None:
    """How cores differ whose kinds are unknown, in words; None where they look alike.

    By what a kind of core always has: caches of one size, one model on arm64, and as many SMT
    siblings, which count only in a package, as SMT may be off in another, and where none is
    offline.
    """
    package_of_pu = {pu: number for number, pus in enumerate(packages) for pu in pus}
    sizes_of_package: dict[int | None, set[int]] = {}
    for pus in () if offline else cores:
        (package, *others) = {package_of_pu.get(pu) for pu in pus} or {None}
        if package is not None and not others:
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


def kinds_by_speed(speeds: Sequence[int]) -> tuple[CoreKind | None, ...]:
    """Kinds of cores by any measure of top speed: those above the topmost step are the P cores.

    >>> [kind and kind.value for kind in kinds_by_speed([5000, 5200, 3900, 3900])]
    ['performance', 'performance', 'efficiency', 'efficiency']
    >>> kinds_by_speed([3000, 3100])
    (None, None)
    """
    ladder = sorted(set(speeds))
    for below, above in reversed(list(pairwise(ladder))):
        if above >= below * STEP_RATIO:
            return tuple(
                CoreKind.PERFORMANCE if speed >= above else CoreKind.EFFICIENCY for speed in speeds
            )
    return (None,) * len(speeds)
