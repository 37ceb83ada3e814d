"""States: which PUs there are, and which are online, allowed, isolated or without a tick."""

from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.discover.readings import numbered, read_pus, read_word
from homenode.errors import InputError, ParseError
from homenode.gap import Gap
from homenode.snapshot.protocol import Snapshot

CPU = "/sys/devices/system/cpu"

# Where VMs of libvirt run under systemd. A PU outside is one that no pin can name.
_MACHINES = "/sys/fs/cgroup/machine.slice/cpuset.cpus.effective"

# In this order: cgroup v2; cgroup v1 as systemd mounts it; the cpuset file system of old kernels,
# with and without noprefix.
_ALLOWED_FILES = (
    ("", "/sys/fs/cgroup", "cpuset.cpus.effective"),
    ("cpuset", "/sys/fs/cgroup/cpuset", "cpuset.cpus"),
    ("cpuset", "/sys/fs/cgroup/cpuset", "cpuset.effective_cpus"),
    ("cpuset", "/dev/cpuset", "cpuset.cpus"),
    ("cpuset", "/dev/cpuset", "cpus"),
)
_ISOLCPUS_FLAGS = {"nohz", "domain", "managed_irq"}


@dataclass(frozen=True, slots=True)
class PuStates:
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
    folder: a host with PUs missing must not pass for a smaller one.
    """
    folders = CpuSet(numbered(snapshot.list(CPU), "cpu"))
    if not folders:
        raise InputError(
            f"{snapshot.name}: expected folders {CPU}/cpuN, found none",
            hint="a snapshot of `homenode capture`, or a folder or tar that holds /sys",
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
        command_line = snapshot.read_text("/proc/cmdline") or ""
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
    for controller, mount, file in _ALLOWED_FILES:
        folder = groups.get(controller)
        if folder is None or ".." in folder.split("/"):
            continue  # a cgroup outside our namespace has no readable place
        path = f"{mount}{folder.rstrip('/')}/{file}"
        pus = read_pus(snapshot, path)
        if pus:  # an empty set means "as the parent"; a cgroup without any PU runs nothing
            return pus & online, ()
    for line in (snapshot.read_text("/proc/self/status") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            return CpuSet.parse(value, f"{snapshot.name}: /proc/self/status") & online, ()
    everybody = read_pus(snapshot, "/sys/fs/cgroup/cpuset.cpus.effective")
    if everybody:
        return everybody & online, ()
    reason = "no cpuset cgroup and no /proc/self/status in the source; all count as allowed"
    return online, (Gap("PUs disallowed by a cgroup", reason),)


def _cgroups(snapshot: Snapshot) -> dict[str, str]:
    """Cgroup path of each controller, "" for v2. Lines such as "9:cpuset:/jobs" and "0::/user"."""
    groups: dict[str, str] = {}
    for line in (snapshot.read_text("/proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[2].startswith("/"):
            for controller in parts[1].split(","):
                groups.setdefault(controller, parts[2])
    old = read_word(snapshot, "/proc/self/cpuset")
    if "cpuset" not in groups and old is not None and old.startswith("/"):
        groups["cpuset"] = old
    return groups


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
