"""States: which PUs there are, and which are online, allowed, isolated or without a tick."""

from msgspec import Struct

from homenode.cpuset import MAX_PU_INDEX, CpuSet
from homenode.errors import InputError, ParseError
from homenode.gap import Gap
from homenode.machine.discover.readings import (
    PADDING,
    list_readable,
    numbered,
    read_lines,
    read_pus,
    read_word,
)
from homenode.machine.snapshot.protocol import Snapshot

CPU = "/sys/devices/system/cpu"

# Where VMs of libvirt run under systemd. A PU outside is one that no pin can name.
_MACHINES = "/sys/fs/cgroup/machine.slice/cpuset.cpus.effective"

# In this order: cgroup v2; cgroup v1 as systemd mounts it; the cpuset file system of old kernels,
# with and without noprefix. Where /proc/mounts names other places, these come first.
_MOUNTS = (
    ("cgroup2", "/sys/fs/cgroup"),
    ("cgroup", "/sys/fs/cgroup/cpuset"),
    ("cpuset", "/dev/cpuset"),
)
_FILES_OF_TYPE = {
    "cgroup2": ("cpuset.cpus.effective",),
    "cgroup": ("cpuset.cpus", "cpuset.effective_cpus"),
    "cpuset": ("cpuset.cpus", "cpus"),
}
_EXPECTED_FOLDERS = f"folders cpu0 to cpu{MAX_PU_INDEX}"
_ISOLCPUS_FLAGS = {"nohz", "domain", "managed_irq"}


class PuStates(Struct, frozen=True):
    """PUs by state; `online` and `offline` are disjoint and hold all that are present."""

    online: CpuSet
    offline: CpuSet
    allowed: CpuSet
    isolated: CpuSet
    nohz_full: CpuSet
    gaps: tuple[Gap, ...]


def read_states(snapshot: Snapshot) -> PuStates:
    """The PUs of a snapshot.

    Raises InputError where there is no CPU tree, or where a PU that is said to be online has no
    folder: a host with PUs missing must not pass for a smaller one. Raises HostError where the CPU
    tree cannot be read.
    """
    numbers = numbered(list_readable(snapshot, CPU), "cpu")
    if numbers and numbers[-1] > MAX_PU_INDEX:
        raise ParseError(f"{snapshot.name}: {CPU}", _EXPECTED_FOLDERS, f"cpu{numbers[-1]}")
    folders = CpuSet(numbers)
    if not folders:
        raise InputError(
            f"{snapshot.name}: expected folders {CPU}/cpuN, found none",
            hint="mount /sys, or name a host with --host: a capture, or a shipped host",
        )
    gaps: list[Gap] = []
    online = read_pus(snapshot, f"{CPU}/online")
    if online is None:
        online = CpuSet(pu for pu in folders if read_word(snapshot, f"{CPU}/cpu{pu}/online") != "0")
        gaps.append(Gap("online PUs", f"{CPU}/online is absent; taken from cpuN/online"))
    if online - folders:
        raise InputError(
            f"{snapshot.name}: {CPU}/online lists PUs {online}, but PUs {online - folders} have "
            "no folder there",
            hint="the tree is incomplete: capture the host again",
        )
    if not online:
        raise InputError(f"{snapshot.name}: {CPU}/online: expected at least one PU, found none")
    present = read_pus(snapshot, f"{CPU}/present") or CpuSet()
    allowed, allowed_gaps = _read_allowed(snapshot, online)
    isolated = read_pus(snapshot, f"{CPU}/isolated")
    nohz_full = read_pus(snapshot, f"{CPU}/nohz_full")
    if isolated is None or nohz_full is None:
        command_line = (snapshot.read_text("/proc/cmdline") or "").rstrip(PADDING)
        source = f"{snapshot.name}: /proc/cmdline"
        if isolated is None:
            isolated = _from_command_line(command_line, "isolcpus", source)
        if nohz_full is None:
            nohz_full = _from_command_line(command_line, "nohz_full", source)
    return PuStates(
        online=online,
        offline=(folders | present) - online,
        allowed=allowed,
        isolated=isolated & online,
        nohz_full=nohz_full & online,
        gaps=(*gaps, *allowed_gaps),
    )


def _read_allowed(snapshot: Snapshot, online: CpuSet) -> tuple[CpuSet, tuple[Gap, ...]]:
    """The online PUs that the cgroup of whoever looked may run on.

    The cgroup comes first: the affinity in /proc/self/status is also narrowed by taskset, which
    says nothing of where a VM may run. Where systemd keeps libvirt's machines from some PUs, these
    are not allowed either.
    """
    machines = read_pus(snapshot, _MACHINES) or online
    allowed, gaps = _read_own_allowed(snapshot, online)
    return allowed & machines, gaps


def _read_own_allowed(snapshot: Snapshot, online: CpuSet) -> tuple[CpuSet, tuple[Gap, ...]]:
    groups = _cgroups(snapshot)
    for kind, mount in (*_cpuset_mounts(snapshot), *_MOUNTS):
        folder = groups.get(kind)
        if folder is None or ".." in folder.split("/"):
            continue  # a cgroup outside our namespace has no readable place
        folder = folder.rstrip("/")
        while True:
            for file in _FILES_OF_TYPE[kind]:
                pus = read_pus(snapshot, f"{mount.rstrip('/')}{folder}/{file}")
                if pus:  # an empty set means "as the parent"; a cgroup without any PU runs nothing
                    return pus & online, ()
            if kind != "cgroup2" or not folder:
                break
            # Version 2 has the file only in groups for which their parent turned cpusets on.
            folder = folder.rpartition("/")[0]
    for line in read_lines(snapshot, "/proc/self/status"):
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            return CpuSet.parse(value, f"{snapshot.name}: /proc/self/status") & online, ()
    everybody = read_pus(snapshot, "/sys/fs/cgroup/cpuset.cpus.effective")
    if everybody:
        return everybody & online, ()
    reason = "no cpuset cgroup and no /proc/self/status in the source; all count as allowed"
    return online, (Gap("PUs disallowed by a cgroup", reason),)


def _cgroups(snapshot: Snapshot) -> dict[str, str]:
    """Our cgroup by the type of the file system that it is in.

    /proc/self/cgroup has lines such as "9:cpuset:/jobs" (version 1) and "0::/user" (version 2);
    /proc/self/cpuset has the one of either version that decides on PUs.
    """
    groups: dict[str, str] = {}
    for line in read_lines(snapshot, "/proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[2].startswith("/"):
            if not parts[1]:
                groups.setdefault("cgroup2", parts[2])
            elif "cpuset" in parts[1].split(","):
                groups |= {"cgroup": parts[2], "cpuset": parts[2]}
    either = read_word(snapshot, "/proc/self/cpuset")
    if either is not None and either.startswith("/"):
        for kind in _FILES_OF_TYPE:
            groups.setdefault(kind, either)
    return groups


def _cpuset_mounts(snapshot: Snapshot) -> list[tuple[str, str]]:
    """(type, mount point) of file systems with cpusets, of lines such as
    "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0". Source: man fstab; /proc/mounts."""
    found: list[tuple[str, str]] = []
    for line in read_lines(snapshot, "/proc/mounts"):
        fields = line.split()
        if len(fields) < 4 or not fields[1].startswith("/") or "\\" in fields[1]:
            continue  # "\040" stands for a space, which no cgroup mount has
        _, mount, kind, options = fields[:4]
        if kind in ("cgroup2", "cpuset") or (kind == "cgroup" and "cpuset" in options.split(",")):
            found.append((kind, mount))
    return found


def _from_command_line(command_line: str, key: str, source: str) -> CpuSet:
    """PUs of isolcpus= or nohz_full= for kernels without the files; empty where not given.

    Source: Documentation/admin-guide/kernel-parameters.txt: isolcpus=[flag-list,]<cpu-list>.
    """
    for word in command_line.split():
        name, _, value = word.partition("=")
        if name == key and value:
            items = [item for item in value.split(",") if item not in _ISOLCPUS_FLAGS]
            try:
                return CpuSet.parse(",".join(items), source)
            except ParseError:
                return CpuSet()  # "all", "N" and groups are resolved by the kernel only
    return CpuSet()
