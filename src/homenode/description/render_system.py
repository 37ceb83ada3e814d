"""What the running system says of itself: /proc/cpuinfo, the command line, cgroup, settings.

Source: arch/x86/kernel/cpu/proc.c and arch/arm64/kernel/cpuinfo.c; Documentation/admin-guide.
"""

from homenode.cpuset import CpuSet
from homenode.topology import Host, Pu

_CGROUP = "/vms.slice"
# Source: arch/arm64/include/asm/cputype.h, MIDR_EL1 implementer codes.
_IMPLEMENTERS = {
    "ARM": 0x41,
    "Broadcom": 0x42,
    "Cavium": 0x43,
    "HiSilicon": 0x48,
    "NVIDIA": 0x4E,
    "APM": 0x50,
    "Qualcomm": 0x51,
    "Apple": 0x61,
    "Ampere": 0xC0,
}
_PAGE_MODES = ("always", "madvise", "never")


def render_system(host: Host) -> dict[str, str]:
    """Files by path; a setting that is None has no file."""
    online = [pu for pu in host.pus if pu.online]
    allowed = CpuSet(pu.index for pu in online if pu.allowed)
    settings = host.settings
    files = {
        "/proc/cpuinfo": "\n".join(_cpuinfo(host, pu) for pu in online),
        "/proc/self/cgroup": f"0::{_CGROUP}\n",
        "/proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime 0 0\n",
        "/proc/self/status": f"Cpus_allowed_list:\t{allowed}\n",
        f"/sys/fs/cgroup{_CGROUP}/cpuset.cpus.effective": f"{allowed}\n",
    }
    if host.architecture is not None:
        files["/proc/sys/kernel/arch"] = f"{host.architecture}\n"
    if settings.kernel_command_line is not None:
        files["/proc/cmdline"] = f"{settings.kernel_command_line}\n"
    if settings.kernel_release is not None:
        files["/proc/sys/kernel/osrelease"] = f"{settings.kernel_release}\n"
        files["/proc/version"] = f"Linux version {settings.kernel_release} (gcc) #1 SMP\n"
    if settings.transparent_hugepages is not None:
        files["/sys/kernel/mm/transparent_hugepage/enabled"] = (
            " ".join(
                f"[{mode}]" if mode == settings.transparent_hugepages else mode
                for mode in _PAGE_MODES
            )
            + "\n"
        )
    if settings.numa_balancing is not None:
        files["/proc/sys/kernel/numa_balancing"] = f"{settings.numa_balancing}\n"
    return files


def _cpuinfo(host: Host, pu: Pu) -> str:
    """The paragraph of one PU. Architectures other than x86 do not say of which package it is."""
    cpu = host.cpu
    fields: dict[str, object] = {"processor": pu.index}
    if host.architecture == "x86_64":
        fields["vendor_id"] = cpu.vendor
        fields["cpu family"] = cpu.family
        fields["model"] = cpu.model
        fields["model name"] = cpu.name
        fields["physical id"] = pu.package
        fields["core id"] = None if pu.core is None else host.cores[pu.core].id.core
    else:
        implementer = _IMPLEMENTERS.get(cpu.vendor or "")
        fields["CPU implementer"] = None if implementer is None else f"{implementer:#04x}"
        fields["CPU architecture"] = 8
    stated = (f"{key:<16}: {value}\n" for key, value in fields.items() if value is not None)
    return "".join(stated)
