"""The CPU tree of a host: /sys/devices/system/cpu and the files that give core kinds.

Source: Documentation/ABI/stable/sysfs-devices-system-cpu, admin-guide/cputopology.rst.
"""

from collections.abc import Iterable

from homenode.cpuset import CpuSet
from homenode.description.masks import mask
from homenode.description.model import CacheSizes
from homenode.topology import Core, CoreKind, Host, Llc
from homenode.units import KIB

CPU = "/sys/devices/system/cpu"

_PMU_OF_KIND = {CoreKind.PERFORMANCE: "cpu_core", CoreKind.EFFICIENCY: "cpu_atom"}


def render_cpus(host: Host, caches: CacheSizes) -> dict[str, str]:
    """Files by path. An offline PU has a folder with nothing but `online` in it, as on x86."""
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
        # The boot PU cannot be switched off and has no such file.
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
        files |= _private_caches(core, caches, width, _last_level(host.llcs))
    for llc in host.llcs:
        files |= _cache(llc.pus, 3, llc.level, "Unified", llc.size_bytes, width)
    for kind, pmu in _PMU_OF_KIND.items():
        pus = CpuSet(pu for core in host.cores if core.kind is kind for pu in core.pus)
        if pus:
            files[f"/sys/devices/{pmu}/cpus"] = f"{pus}\n"
    return files


def render_policy_links(host: Host) -> dict[str, str]:
    """Targets by link: the frequency policy of each online PU, where the host gives governors."""
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
    """Sets of PUs by the names of their files, the older name second."""
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
    return min((llc.level for llc in llcs), default=4)


def _private_caches(core: Core, caches: CacheSizes, width: int, last_level: int) -> dict[str, str]:
    files: dict[str, str] = {}
    for index, level, kind, size in (
        (0, 1, "Data", caches.l1_data_bytes),
        (1, 1, "Instruction", caches.l1_instruction_bytes),
        (2, 2, "Unified", caches.l2_bytes),
    ):
        if size is not None and level < last_level:
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
