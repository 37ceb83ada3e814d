"""System: CPUs and their states; CPU model, architecture, settings of a host."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct

from homenode.cpuset import MAX_PU_INDEX, CpuSet
from homenode.errors import InputError, ParseError
from homenode.findings import Gap
from homenode.machine.discover.readings import (
    PADDING,
    list_numbers,
    list_readable,
    read_lines,
    read_number,
    read_pus,
    read_word,
)
from homenode.machine.settings import FrequencyLimit, HostSettings
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools.versions import (
    Version,
    parse_qemu_version,
    parse_virsh_version,
)
from homenode.machine.topology import CpuModel
from homenode.units import parse_whole

CPU = "/sys/devices/system/cpu"

# The cgroup of libvirt's VMs under systemd. No pin can name a CPU outside it.
_MACHINES = "/sys/fs/cgroup/machine.slice/cpuset.cpus.effective"

# In this order: cgroup v2; cgroup v1 as systemd mounts it; the cpuset file system of old kernels,
# with and without noprefix. If /proc/mounts names other mount points, these are tried first.
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
_EXPECTED_DIRECTORIES = f"directories cpu0 to cpu{MAX_PU_INDEX}"
_ISOLCPUS_FLAGS = {"nohz", "domain", "managed_irq"}


class PuStates(Struct, frozen=True):
    """CPUs by state; `online` and `offline` are disjoint and hold all that are present."""

    online: CpuSet
    offline: CpuSet
    allowed: CpuSet
    isolated: CpuSet
    nohz_full: CpuSet
    gaps: tuple[Gap, ...]


def read_states(snapshot: Snapshot) -> PuStates:
    """Return the CPUs of a snapshot.

    Raises InputError if there is no CPU tree, or if an online CPU has no directory: a host with
    missing CPUs must not count as a smaller host. Raises HostError if the CPU tree cannot be read.
    """
    numbers = list_numbers(list_readable(snapshot, CPU), "cpu")
    if numbers and numbers[-1] > MAX_PU_INDEX:
        raise ParseError(f"{snapshot.name}: {CPU}", _EXPECTED_DIRECTORIES, f"cpu{numbers[-1]}")
    directories = CpuSet(numbers)
    if not directories:
        raise InputError(
            f"{snapshot.name}: no directory {CPU}/cpuN",
            hint="mount /sys, or name a host with --host: a capture, or a shipped host",
        )
    gaps: list[Gap] = []
    online = read_pus(snapshot, f"{CPU}/online")
    if online is None:
        online = CpuSet(
            pu for pu in directories if read_word(snapshot, f"{CPU}/cpu{pu}/online") != "0"
        )
        gaps.append(Gap("online CPUs", f"{CPU}/online is absent; taken from cpuN/online"))
    if online - directories:
        raise InputError(
            f"{snapshot.name}: {CPU}/online lists CPUs {online}, but CPUs {online - directories} "
            "have no directory there",
            hint="the tree is incomplete: capture the host again",
        )
    if not online:
        raise InputError(f"{snapshot.name}: {CPU}/online lists no CPU")
    present = read_pus(snapshot, f"{CPU}/present") or CpuSet()
    allowed_pus, allowed_gaps = _read_allowed(snapshot, online)
    isolated_pus = read_pus(snapshot, f"{CPU}/isolated")
    nohz_full = read_pus(snapshot, f"{CPU}/nohz_full")
    if isolated_pus is None or nohz_full is None:
        command_line = (snapshot.read_text("/proc/cmdline") or "").rstrip(PADDING)
        source = f"{snapshot.name}: /proc/cmdline"
        if isolated_pus is None:
            isolated_pus = _parse_command_line(command_line, "isolcpus", source)
        if nohz_full is None:
            nohz_full = _parse_command_line(command_line, "nohz_full", source)
    return PuStates(
        online=online,
        offline=(directories | present) - online,
        allowed=allowed_pus,
        isolated=isolated_pus & online,
        nohz_full=nohz_full & online,
        gaps=(*gaps, *allowed_gaps),
    )


def _read_allowed(snapshot: Snapshot, online: CpuSet) -> tuple[CpuSet, tuple[Gap, ...]]:
    """Return the online CPUs that homenode's cgroup allows. The cgroup comes first: taskset also
    narrows the affinity in /proc/self/status, but does not limit VMs. CPUs that systemd excludes
    for libvirt's machines are not allowed either."""
    machines = read_pus(snapshot, _MACHINES) or online
    allowed_pus, gaps = _read_own_allowed(snapshot, online)
    return allowed_pus & machines, gaps


def _read_own_allowed(snapshot: Snapshot, online: CpuSet) -> tuple[CpuSet, tuple[Gap, ...]]:
    groups = _read_cgroups(snapshot)
    for kind, mount in (*_list_cpuset_mounts(snapshot), *_MOUNTS):
        directory = groups.get(kind)
        if directory is None or ".." in directory.split("/"):
            continue  # a cgroup outside the namespace has no readable path
        directory = directory.rstrip("/")
        while True:
            for file in _FILES_OF_TYPE[kind]:
                pus = read_pus(snapshot, f"{mount.rstrip('/')}{directory}/{file}")
                if pus:  # an empty set means "as the parent"; a cgroup without any CPU runs nothing
                    return pus & online, ()
            if kind != "cgroup2" or not directory:
                break
            # Version 2 has the file only in groups for which their parent turned cpusets on.
            directory = directory.rpartition("/")[0]
    for line in read_lines(snapshot, "/proc/self/status"):
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            return CpuSet.parse(value, f"{snapshot.name}: /proc/self/status") & online, ()
    everybody = read_pus(snapshot, "/sys/fs/cgroup/cpuset.cpus.effective")
    if everybody:
        return everybody & online, ()
    reason = "no cpuset cgroup and no /proc/self/status in the source; all count as allowed"
    return online, (Gap("CPUs disallowed by a cgroup", reason),)


def _read_cgroups(snapshot: Snapshot) -> dict[str, str]:
    """Return our cgroup by the type of the file system that it is in.

    /proc/self/cgroup has lines such as "9:cpuset:/jobs" (version 1) and "0::/user" (version 2);
    /proc/self/cpuset has the path that applies to CPUs in either version.
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


def _list_cpuset_mounts(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return (type, mount point) of file systems with cpusets, of lines such as "cgroup2
    /sys/fs/cgroup cgroup2 rw,nosuid 0 0". Source: man fstab; /proc/mounts."""
    mounts: list[tuple[str, str]] = []
    for line in read_lines(snapshot, "/proc/mounts"):
        fields = line.split()
        if len(fields) < 4 or not fields[1].startswith("/") or "\\" in fields[1]:
            continue  # "\040" is a space, which no cgroup mount has
        _, mount, kind, options = fields[:4]
        if kind in ("cgroup2", "cpuset") or (kind == "cgroup" and "cpuset" in options.split(",")):
            mounts.append((kind, mount))
    return mounts


def _parse_command_line(command_line: str, key: str, source: str) -> CpuSet:
    """Return CPUs of isolcpus= or nohz_full= for kernels without the files; empty if not given.
    Source: Documentation/admin-guide/kernel-parameters.txt: isolcpus=[flag-list,]<cpu-list>."""
    for word in command_line.split():
        name, _, value = word.partition("=")
        if name == key and value:
            items = [item for item in value.split(",") if item not in _ISOLCPUS_FLAGS]
            try:
                return CpuSet.parse(",".join(items), source)
            except ParseError:
                return CpuSet()  # "all", "N" and groups are resolved by the kernel only
    return CpuSet()


_Value = TypeVar("_Value", int, str)

IRQBALANCE = (
    "/sys/fs/cgroup/system.slice/irqbalance.service",
    "/sys/fs/cgroup/systemd/system.slice/irqbalance.service",  # cgroup version 1
)
"""There while the service runs."""

_CHOSEN = re.compile(r"\[(\w+)\]", re.ASCII)
_ARCHITECTURES = set(
    """
    x86_64 i686 aarch64 ppc64le ppc64 s390x riscv64 loongarch64
""".split()
)
# Source: Arm Architecture Reference Manual, MIDR_EL1.Implementer.
_ARM_IMPLEMENTERS = {
    "0x41": "ARM",
    "0x42": "Broadcom",
    "0x43": "Cavium",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x50": "APM",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}


def read_versions(
    snapshot: Snapshot,
) -> tuple[Version | None, Version | None, tuple[Gap, ...]]:
    """(libvirt, QEMU) versions: of the daemon if it answers, else of the installed programs."""
    libvirt = qemu = None
    gaps: list[Gap] = []
    try:
        text = snapshot.command_output("virsh-version")
        if text is not None:
            libvirt, qemu = parse_virsh_version(text)
    except ParseError as error:
        gaps.append(Gap("libvirt version", str(error)))
    try:
        text = snapshot.command_output("qemu-version") if qemu is None else None
        if text is not None:
            qemu = parse_qemu_version(text)
    except ParseError as error:
        gaps.append(Gap("QEMU version", str(error)))
    return libvirt, qemu, tuple(gaps)


def read_cpu_fields(snapshot: Snapshot) -> Mapping[str, str]:
    """Return the first value of each key in /proc/cpuinfo; hybrid hosts differ in a few."""
    fields: dict[str, str] = {}
    for line in read_lines(snapshot, "/proc/cpuinfo"):
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def parse_cpu_model(fields: Mapping[str, str]) -> CpuModel:
    """Return the CPU model in /proc/cpuinfo, which x86, arm64 and POWER spell differently."""
    if "vendor_id" in fields:
        return CpuModel(
            vendor=fields["vendor_id"] or None,
            name=fields.get("model name") or None,
            family=parse_whole(fields.get("cpu family")),
            model=parse_whole(fields.get("model")),
        )
    if "CPU implementer" in fields:
        implementer = fields["CPU implementer"].lower()
        return CpuModel(_ARM_IMPLEMENTERS.get(implementer, implementer), fields.get("model name"))
    if fields.get("cpu", "").startswith("POWER"):
        return CpuModel("IBM", fields["cpu"].partition(",")[0])
    return CpuModel(None, fields.get("model name"))


def read_architecture(snapshot: Snapshot, fields: Mapping[str, str]) -> str | None:
    """Return the machine's name as `uname -m` prints it; None if unknown. /proc/hwloc-nofile-info
    is in trees that hwloc-gather-topology made."""
    texts = (
        read_word(snapshot, "/proc/sys/kernel/arch"),
        snapshot.command_output("uname"),
        read_word(snapshot, "/proc/hwloc-nofile-info"),
    )
    for text in texts:
        for word in reversed((text or "").split()):
            if word in _ARCHITECTURES:
                return word
    if "vendor_id" in fields and "cpu family" in fields:
        is_64bit = "lm" in fields.get("flags", "lm").split()
        return "x86_64" if is_64bit else "i686"
    return "aarch64" if fields.get("CPU architecture") == "8" else None


def read_settings(
    snapshot: Snapshot, online: CpuSet, libvirt: Version | None, qemu: Version | None
) -> HostSettings:
    """Return the settings of the running system; None if the source does not report it."""
    release = read_word(snapshot, "/proc/sys/kernel/osrelease")
    if release is None:
        words = (snapshot.read_text("/proc/version") or "").split()
        release = words[2] if words[:2] == ["Linux", "version"] and len(words) > 2 else None
    pages = read_word(snapshot, "/sys/kernel/mm/transparent_hugepage/enabled")
    match = None if pages is None else _CHOSEN.search(pages)
    return HostSettings(
        kernel_release=release,
        kernel_command_line=read_word(snapshot, "/proc/cmdline"),
        smt_control=read_word(snapshot, f"{CPU}/smt/control"),
        transparent_hugepages=None if match is None else match[1],
        numa_balancing=read_number(snapshot, "/proc/sys/kernel/numa_balancing"),
        scaling_drivers=_read_scaling_drivers(snapshot, online),
        ksm_run=read_number(snapshot, "/sys/kernel/mm/ksm/run"),
        iommus=snapshot.list("/sys/class/iommu"),
        pus_of_governor=_group_by_value(
            online, lambda pu: read_word(snapshot, f"{CPU}/cpu{pu}/cpufreq/scaling_governor")
        ),
        pus_of_idle_latency_us=_group_by_value(online, lambda pu: _read_idle_exit_us(snapshot, pu)),
        irqbalance=True if any(snapshot.list(path) is not None for path in IRQBALANCE) else None,
        dma_entry_limit=read_number(
            snapshot, "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
        ),
        libvirt_version=libvirt,
        qemu_version=qemu,
        frequency_limits=_read_frequency_limits(snapshot, online),
        firmware=_read_firmware(snapshot),
        turbo=_read_turbo(snapshot),
    )


def _read_turbo(snapshot: Snapshot) -> str | None:
    """Return "on" or "off": Intel's driver has no_turbo, all others have boost."""
    for path, on in (("intel_pstate/no_turbo", "0"), ("cpufreq/boost", "1")):
        word = read_word(snapshot, f"{CPU}/{path}")
        if word in ("0", "1"):
            return "on" if word == on else "off"
    return None


_DMI = "/sys/devices/virtual/dmi/id"


def _read_firmware(snapshot: Snapshot) -> str | None:
    words = [read_word(snapshot, f"{_DMI}/bios_{name}") for name in ("vendor", "version", "date")]
    return " ".join(word for word in words if word) if words[1] else None


def _read_frequency_limits(snapshot: Snapshot, online: CpuSet) -> tuple[FrequencyLimit, ...] | None:
    pus_of_limit: dict[tuple[int, int | None], list[int]] = {}
    for pu in online:
        directory = f"{CPU}/cpu{pu}/cpufreq"
        limit = read_number(snapshot, f"{directory}/scaling_max_freq")
        if limit is not None:
            hardware = read_number(snapshot, f"{directory}/cpuinfo_max_freq")
            pus_of_limit.setdefault((limit, hardware), []).append(pu)
    limits = (
        FrequencyLimit(limit, hardware, CpuSet(pus))
        for (limit, hardware), pus in pus_of_limit.items()
    )
    return tuple(sorted(limits, key=lambda frequency_limit: frequency_limit.pus.bits)) or None


def _read_scaling_drivers(snapshot: Snapshot, online: CpuSet) -> tuple[str, ...] | None:
    """Return the different drivers of all frequency policies, sorted; None without any."""
    policies = snapshot.list(f"{CPU}/cpufreq") or ()
    words = {
        read_word(snapshot, f"{CPU}/cpufreq/{policy}/scaling_driver")
        for policy in policies
        if policy.startswith("policy")
    } - {None}
    if not words:
        words = {read_word(snapshot, f"{CPU}/cpu{pu}/cpufreq/scaling_driver") for pu in online} - {
            None
        }
    return tuple(sorted(name for name in words if name is not None)) or None


def _group_by_value(
    online: CpuSet, value_of: Callable[[int], _Value | None]
) -> tuple[tuple[_Value, CpuSet], ...] | None:
    """Return the CPUs by their value, ascending; None if no CPU has a value."""
    pus_of_value: dict[_Value, list[int]] = {}
    for pu in online:
        value = value_of(pu)
        if value is not None:
            pus_of_value.setdefault(value, []).append(pu)
    return tuple((value, CpuSet(pus_of_value[value])) for value in sorted(pus_of_value)) or None


def _read_idle_exit_us(snapshot: Snapshot, pu: int) -> int | None:
    directory = f"{CPU}/cpu{pu}/cpuidle"
    latencies = [
        read_number(snapshot, f"{directory}/{state}/latency")
        for state in snapshot.list(directory) or ()
        if read_number(snapshot, f"{directory}/{state}/disable") != 1
    ]
    return max((latency for latency in latencies if latency is not None), default=None)
