"""Core kinds: performance or efficiency, on hosts whose cores are not all alike."""

from collections.abc import Sequence
from itertools import pairwise

from homenode.cpuset import CpuSet
from homenode.discover.readings import read_number, read_pus
from homenode.discover.states import CPU
from homenode.snapshot.protocol import Snapshot
from homenode.topology import CoreKind

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
