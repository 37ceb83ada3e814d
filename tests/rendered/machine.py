"""From a HostDescription to the files and tool outputs of such a machine. Pure.

Source: Documentation/ABI/stable/sysfs-devices-system-cpu, admin-guide/cputopology.rst.
"""

from collections.abc import Iterable

from homenode.cpuset import CpuSet
from homenode.machine.description.tables import HostDescription
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.topology import Core, CoreKind, Host, Llc, MemoryKind, NumaNode, PagePool, Pu
from homenode.units import KIB
from tests.rendered.devices import PCI, mask, render_devices, render_tools

CPU = "/sys/devices/system/cpu"

_PMU_OF_KIND = {CoreKind.PERFORMANCE: "cpu_core", CoreKind.EFFICIENCY: "cpu_atom"}


def render_cpus(host: Host) -> dict[str, str]:
    """Files by path. An offline CPU has a directory with nothing but `online` in it, as on x86."""
    every = CpuSet(pu.index for pu in host.pus)
    online = CpuSet(pu.index for pu in host.pus if pu.online)
    width = max(every) + 1
    files = {
        f"{CPU}/online": f"{online}\n",
        f"{CPU}/offline": f"{every - online}\n",
        f"{CPU}/possible": f"{every}\n",
        f"{CPU}/present": f"{every}\n",
        f"{CPU}/kernel_max": "8191\n",
        f"{CPU}/isolated": f"{CpuSet(pu.index for pu in host.pus if pu.isolated)}\n",
        f"{CPU}/nohz_full": f"{CpuSet(pu.index for pu in host.pus if pu.nohz_full)}\n",
    }
    if host.settings.smt_control is not None:
        active = int(any(len(core.pus) > 1 for core in host.cores))
        files[f"{CPU}/smt/control"] = f"{host.settings.smt_control}\n"
        files[f"{CPU}/smt/active"] = f"{active}\n"
    governor = (host.settings.governors or (None,))[0]
    for pu in host.pus:
        # The boot CPU cannot be switched off and has no such file.
        if pu.index or not pu.online:
            files[f"{CPU}/cpu{pu.index}/online"] = f"{int(pu.online)}\n"
        if pu.online and governor is not None:
            files[f"{CPU}/cpufreq/policy{pu.index}/scaling_governor"] = f"{governor}\n"
    for name, number_of_pu in _numbers(host).items():
        for pu_index, number in number_of_pu.items():
            files[f"{CPU}/cpu{pu_index}/topology/{name}"] = f"{number}\n"
    for names, sets in _sets(host).items():
        for pus in sets:
            spellings = (("", f"{mask(pus, width)}\n"), ("_list", f"{pus}\n"))
            for pu_index in pus:
                for name in names:
                    for suffix, text in spellings:
                        files[f"{CPU}/cpu{pu_index}/topology/{name}{suffix}"] = text
    for core in host.cores:
        files |= _private_caches(core, width, _last_level(host.llcs))
    for llc in host.llcs:
        files |= _cache(llc.pus, 3, llc.level, "Unified", llc.size_bytes, width)
    for kind, pmu in _PMU_OF_KIND.items():
        pus = CpuSet(pu for core in host.cores if core.kind is kind for pu in core.pus)
        if pus:
            files[f"/sys/devices/{pmu}/cpus"] = f"{pus}\n"
    return files


def render_policy_links(host: Host) -> dict[str, str]:
    """Targets by link: the frequency policy of each online CPU, where the host gives governors."""
    if host.settings.governors is None:
        return {}
    return {
        f"{CPU}/cpu{pu.index}/cpufreq": f"../cpufreq/policy{pu.index}"
        for pu in host.pus
        if pu.online
    }


def _numbers(host: Host) -> dict[str, dict[int, int]]:
    return {
        "physical_package_id": {p.index: p.package for p in host.pus if p.package is not None},
        "die_id": {p.index: p.die for p in host.pus if p.die is not None},
        "core_id": {pu: core.id.core for core in host.cores for pu in core.pus},
    }


def _sets(host: Host) -> dict[tuple[str, ...], Iterable[CpuSet]]:
    """Sets of CPUs by the names of their files, the older name second."""
    dies: dict[tuple[int, int], list[int]] = {}
    for pu in host.pus:
        if pu.package is not None and pu.die is not None:
            dies.setdefault((pu.package, pu.die), []).append(pu.index)
    return {
        ("core_cpus", "thread_siblings"): [core.pus for core in host.cores],
        ("die_cpus",): [CpuSet(pus) for pus in dies.values()],
        ("package_cpus", "core_siblings"): [package.pus for package in host.packages],
    }


def _last_level(llcs: Iterable[Llc]) -> int:
    return min((llc.level for llc in llcs), default=0)


def _private_caches(core: Core, width: int, last_level: int) -> dict[str, str]:
    files: dict[str, str] = {}
    for index, level, kind, size in (
        (0, 1, "Data", 32 * KIB),
        (1, 1, "Instruction", 32 * KIB),
        (2, 2, "Unified", 1024 * KIB),
    ):
        if level < last_level:
            files |= _cache(core.pus, index, level, kind, size, width)
    return files


def _cache(
    pus: CpuSet, index: int, level: int, kind: str, size_bytes: int | None, width: int
) -> dict[str, str]:
    texts = {
        "level": f"{level}\n",
        "type": f"{kind}\n",
        "shared_cpu_list": f"{pus}\n",
        "shared_cpu_map": f"{mask(pus, width)}\n",
    }
    if size_bytes is not None:
        texts["size"] = f"{size_bytes // KIB}K\n"
    return {
        f"{CPU}/cpu{pu}/cache/index{index}/{name}": text
        for pu in pus
        for name, text in texts.items()
    }


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
    """The paragraph of one CPU. Architectures other than x86 do not say of which package it is."""
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


NODE = "/sys/devices/system/node"


def render_memory(host: Host) -> dict[str, str]:
    """Files by path; no distance files where the host gives no distances."""
    width = max(pu.index for pu in host.pus) + 1
    files = {
        f"{NODE}/online": _nodes(host.nodes),
        f"{NODE}/possible": _nodes(host.nodes),
        f"{NODE}/has_cpu": _nodes(node for node in host.nodes if node.pus),
        f"{NODE}/has_memory": _nodes(node for node in host.nodes if node.memory_bytes),
        f"{NODE}/has_normal_memory": _nodes(node for node in host.nodes if node.memory_bytes),
        f"{NODE}/has_generic_initiator": _nodes(n for n in host.nodes if n.generic_initiator),
        "/proc/meminfo": _meminfo(
            "",
            sum(node.memory_bytes or 0 for node in host.nodes),
            sum(node.memory_free_bytes or 0 for node in host.nodes),
        ),
    }
    pools: dict[int, list[PagePool]] = {}
    for row, node in enumerate(host.nodes):
        directory = f"{NODE}/node{node.index}"
        files[f"{directory}/cpulist"] = f"{node.pus}\n"
        files[f"{directory}/cpumap"] = f"{mask(node.pus, width)}\n"
        if host.distances is not None:
            files[f"{directory}/distance"] = " ".join(map(str, host.distances[row])) + "\n"
        if node.memory_bytes is not None:
            files[f"{directory}/meminfo"] = _meminfo(
                f"Node {node.index} ", node.memory_bytes, node.memory_free_bytes
            )
        for pool in node.page_pools:
            files |= _pool(f"{directory}/hugepages", pool)
            pools.setdefault(pool.page_bytes, []).append(pool)
        files |= _kind(node)
    for page_bytes, same in pools.items():
        whole = PagePool(
            page_bytes, sum(p.total_pages for p in same), sum(p.free_pages for p in same)
        )
        files |= _pool("/sys/kernel/mm/hugepages", whole)
    return files


def _nodes(nodes: Iterable[NumaNode]) -> str:
    return f"{CpuSet(node.index for node in nodes)}\n"


def _meminfo(prefix: str, total_bytes: int, free_bytes: int | None) -> str:
    lines = [f"{prefix}MemTotal:       {total_bytes // KIB} kB"]
    if free_bytes is not None:
        lines.append(f"{prefix}MemFree:        {free_bytes // KIB} kB")
        lines.append(f"{prefix}MemUsed:        {(total_bytes - free_bytes) // KIB} kB")
    return "\n".join(lines) + "\n"


def _pool(directory: str, pool: PagePool) -> dict[str, str]:
    name = f"{directory}/hugepages-{pool.page_bytes // KIB}kB"
    return {
        f"{name}/nr_hugepages": f"{pool.total_pages}\n",
        f"{name}/free_hugepages": f"{pool.free_pages}\n",
        f"{name}/surplus_hugepages": "0\n",
    }


def _kind(node: NumaNode) -> dict[str, str]:
    """What shows that a node's memory is no plain DRAM: NVIDIA's driver, or a DAX device."""
    if node.memory_kind is MemoryKind.GPU and node.gpu is not None:
        return {
            f"/proc/driver/nvidia/gpus/{node.gpu}/numa_status": (
                f"Node:      {node.index}\nStatus:    online\n"
                f"Size:      {node.memory_bytes or 0:x}\n"
            )
        }
    if node.memory_kind is MemoryKind.OTHER:
        return {f"/sys/bus/dax/devices/dax{node.index}.0/target_node": f"{node.index}\n"}
    return {}


def render(description: HostDescription) -> MemorySnapshot:
    """A snapshot that discovery reads as it reads a captured machine."""
    host = description.host
    devices = render_devices(host)
    return MemorySnapshot(
        host.name,
        {
            **render_cpus(host),
            **render_memory(host),
            **render_system(host),
            **devices.files,
        },
        {**devices.links, **render_policy_links(host)},
        render_tools(host),
        directories=(f"{PCI}/devices",),
    )
