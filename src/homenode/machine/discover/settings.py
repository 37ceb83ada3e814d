"""Settings: the host's CPU model, architecture and running system, from /proc and /sys."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.discover.readings import read_lines, read_number, read_word
from homenode.machine.discover.states import CPU
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools.versions import Version, parse_qemu_version, parse_virsh_version
from homenode.machine.topology import CpuModel, HostSettings

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
    """(libvirt, QEMU): of the daemon where it answers, else of what is installed."""
    libvirt = qemu = None
    gaps: list[Gap] = []
    try:
        text = snapshot.command_output("virsh-version")
        if text is not None:
            found = parse_virsh_version(text)
            libvirt = found.daemon or found.libvirt
            qemu = found.hypervisor if found.hypervisor_name == "QEMU" else None
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
    """The first value of each key in /proc/cpuinfo; the PUs of a hybrid host differ in a few."""
    fields: dict[str, str] = {}
    for line in read_lines(snapshot, "/proc/cpuinfo"):
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def cpu_model(fields: Mapping[str, str]) -> CpuModel:
    """The CPU model of /proc/cpuinfo's fields: x86, arm64 and POWER spell them differently."""
    if "vendor_id" in fields:
        return CpuModel(
            vendor=fields["vendor_id"] or None,
            name=fields.get("model name") or None,
            family=_number(fields.get("cpu family")),
            model=_number(fields.get("model")),
        )
    if "CPU implementer" in fields:
        implementer = fields["CPU implementer"].lower()
        return CpuModel(_ARM_IMPLEMENTERS.get(implementer, implementer), fields.get("model name"))
    if fields.get("cpu", "").startswith("POWER"):
        return CpuModel("IBM", fields["cpu"].partition(",")[0])
    return CpuModel(None, fields.get("model name"))


def read_architecture(snapshot: Snapshot, fields: Mapping[str, str]) -> str | None:
    """The machine's name as `uname -m` prints it; None where nothing gives.

    /proc/hwloc-nofile-info is in trees that hwloc-gather-topology made.
    """
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
    """The settings of the running system; None where the source does not say."""
    release = read_word(snapshot, "/proc/sys/kernel/osrelease")
    if release is None:
        words = (snapshot.read_text("/proc/version") or "").split()
        release = words[2] if words[:2] == ["Linux", "version"] and len(words) > 2 else None
    pages = read_word(snapshot, "/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = None if pages is None else _CHOSEN.search(pages)
    return HostSettings(
        kernel_release=release,
        kernel_command_line=read_word(snapshot, "/proc/cmdline"),
        smt_control=read_word(snapshot, f"{CPU}/smt/control"),
        governors=_cpufreq(snapshot, online, "scaling_governor"),
        transparent_hugepages=None if chosen is None else chosen[1],
        numa_balancing=read_number(snapshot, "/proc/sys/kernel/numa_balancing"),
        scaling_drivers=_cpufreq(snapshot, online, "scaling_driver"),
        ksm_run=read_number(snapshot, "/sys/kernel/mm/ksm/run"),
        iommus=snapshot.list("/sys/class/iommu"),
        idle_exit_latency_us=_idle_exit_latency_us(snapshot, 0),
        pus_of_governor=_pus_of(
            online, lambda pu: read_word(snapshot, f"{CPU}/cpu{pu}/cpufreq/scaling_governor")
        ),
        pus_of_idle_latency_us=_pus_of(online, lambda pu: _idle_exit_latency_us(snapshot, pu)),
        irqbalance=True if any(snapshot.list(path) is not None for path in IRQBALANCE) else None,
        dma_entry_limit=read_number(
            snapshot, "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
        ),
        libvirt_version=libvirt,
        qemu_version=qemu,
    )


def _cpufreq(snapshot: Snapshot, online: CpuSet, file: str) -> tuple[str, ...] | None:
    """The different words in a file of every frequency policy, sorted; None without any."""
    policies = snapshot.list(f"{CPU}/cpufreq") or ()
    found = {
        read_word(snapshot, f"{CPU}/cpufreq/{policy}/{file}")
        for policy in policies
        if policy.startswith("policy")
    } - {None}
    if not found:
        found = {read_word(snapshot, f"{CPU}/cpu{pu}/cpufreq/{file}") for pu in online} - {None}
    return tuple(sorted(name for name in found if name is not None)) or None


def _pus_of(
    online: CpuSet, value_of: Callable[[int], _Value | None]
) -> tuple[tuple[_Value, CpuSet], ...] | None:
    """The PUs by what each of them has, ascending; None where none gives."""
    found: dict[_Value, list[int]] = {}
    for pu in online:
        value = value_of(pu)
        if value is not None:
            found.setdefault(value, []).append(pu)
    return tuple((value, CpuSet(found[value])) for value in sorted(found)) or None


def _idle_exit_latency_us(snapshot: Snapshot, pu: int) -> int | None:
    folder = f"{CPU}/cpu{pu}/cpuidle"
    latencies = [
        read_number(snapshot, f"{folder}/{state}/latency")
        for state in snapshot.list(folder) or ()
        if read_number(snapshot, f"{folder}/{state}/disable") != 1
    ]
    return max((latency for latency in latencies if latency is not None), default=None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
