"""/proc/stat: the times of each CPU since boot, in ticks.

    cpu0 2255 34 2290 22625563 6290 127 456 17 0 0

Fields: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice; guests are within
user and nice already. Idle is idle and iowait. Steal is what the hypervisor gave to others.
Source: Documentation/filesystems/proc.rst, 1.7, of Linux 6.6.
"""

import re

from msgspec import Struct

from homenode.cpuset import MAX_PU_INDEX, PuIndex
from homenode.errors import ParseError
from homenode.machine.tools.lines import Lines

PATH = "/proc/stat"

_LINE = re.compile(r"cpu(\d{1,6})((?: \d+){4,16})", re.ASCII)


class PuTimes(Struct, frozen=True):
    """Ticks since boot. busy does not hold stolen."""

    pu: PuIndex
    busy: int
    idle: int
    stolen: int


def parse(text: str) -> tuple[PuTimes, ...]:
    """Return the online CPUs, ascending. Raises ParseError."""
    times_of_pu: dict[int, PuTimes] = {}
    for line in Lines(text, PATH, stripped=False):
        match = _LINE.fullmatch(line.text)
        if match is None:
            continue  # the sum of all CPUs, interrupts, context switches, forks
        pu = int(match[1])
        if pu > MAX_PU_INDEX or pu in times_of_pu:
            raise line.make_error(f"each CPU once, up to {MAX_PU_INDEX}")
        ticks = [line.read_count(word, "ticks") for word in match[2].split()]
        user, nice, system, idle, *tail = ticks
        iowait, irq, softirq, stolen = (*tail, 0, 0, 0, 0)[:4]
        times_of_pu[pu] = PuTimes(
            PuIndex(pu), user + nice + system + irq + softirq, idle + iowait, stolen
        )
    if not times_of_pu:
        raise ParseError(PATH, "lines such as 'cpu0 2255 34 2290 22625563'", text[:80])
    return tuple(times_of_pu[pu] for pu in sorted(times_of_pu))
