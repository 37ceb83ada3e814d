"""Capture a running VM from /proc and /sys of its host. [I/O]

Thread affinities need no privilege. Mappings need root or the user that QEMU runs as; unreadable
values become gaps. QEMU and the guest are not queried.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.check.domain.verification import check_transfers
from homenode.check.verify.live.checks import verify_live
from homenode.check.verify.live.procfs import (
    GROUP_FILES,
    KERNEL_THREAD,
    BackendObject,
    DeviceInterrupt,
    GroupLimit,
    HostCpus,
    MappedMemory,
    Neighbour,
    ProcessMapping,
    RamArea,
    RunningVm,
    TaskTimes,
    ThreadKind,
    ThreadLimit,
    VmThread,
    classify_thread,
    find_domain_name,
    list_cgroups,
    parse_backends,
    parse_maps,
    parse_numa_maps,
    parse_stat,
    parse_vfio_interrupts,
    read_status_field,
)
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import HostError, ParseError, UsageError
from homenode.findings import Findings, Gap, sort_findings
from homenode.process import find_arguments
from homenode.safe.input_files import read_kernel_file
from homenode.text import command_line
from homenode.units import KIB, parse_whole
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.hypervisor.connection import is_local
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.model import Vm
from homenode.vm.plan import Plan, vm_as_it_runs

_ALWAYS_TOGETHER = 1 << 16
"""Bytes by which a mapping may exceed the memory in it: it is rounded up to pages."""


class _Task(Struct, frozen=True):
    process: int
    thread: VmThread
    times: TaskTimes

    @property
    def is_vcpu(self) -> bool:
        return self.thread.kind in (ThreadKind.VCPU, ThreadKind.ALL_VCPUS)


def capture_running_vm(
    uuid: str, expected_vm: Vm, files: "ProcFiles | None" = None, *, watched_s: float = 0.5
) -> RunningVm:
    """Return the VM whose QEMU runs with that UUID. watched_s: time for watching other processes on
    its expected CPUs. files: None = this machine's.

    Raises HostError if no process, or several, match that VM.
    """
    proc = ProcFiles() if files is None else files
    process, argv = _process_of(proc, uuid)
    gaps: list[Gap] = []
    host = proc.places
    objects = parse_backends(argv)
    status = proc.read(f"/proc/{process}/status") or ""
    devices = tuple(hostdev.bdf for hostdev in expected_vm.hostdevs)
    nodes = ((bdf, proc.read(f"/sys/bus/pci/devices/{bdf}/numa_node")) for bdf in devices)
    return RunningVm(
        name=find_domain_name(argv) or uuid,
        uuid=uuid,
        process=process,
        threads=tuple(_list_threads(proc, process)),
        backends=objects,
        areas=_read_areas(proc, process, objects, expected_vm, gaps),
        swapped_bytes=_parse_bytes(status, "VmSwap"),
        default_huge_bytes=_parse_bytes(proc.read("/proc/meminfo") or "", "Hugepagesize"),
        interrupts=tuple(_list_interrupts(proc, devices, gaps)),
        node_of_device=tuple(
            (bdf, NodeIndex(node))
            for bdf, text in nodes
            if text is not None and (node := parse_whole(text.strip())) is not None
        ),
        neighbours=_find_neighbours(proc, process, expected_vm.pinned_pus, watched_s),
        watched_s=watched_s,
        host=host,
        gaps=tuple(gaps),
        limits=tuple(_list_limits(proc, process)),
        group_limits=tuple(dict.fromkeys(_group_limits(proc, process))),
    )


class ProcFiles:
    """Files of /proc and /sys, each read once. root: directory of both."""

    def __init__(self, root: str = "/") -> None:
        self._root = root.rstrip("/")
        self._texts: dict[str, str | None] = {}

    def read(self, path: str) -> str | None:
        """Return the text, or None if the file is absent or not readable: processes come and go."""
        if path not in self._texts:
            self._texts[path] = self.text_now(path)
        return self._texts[path]

    def text_now(self, path: str) -> str | None:
        content = read_kernel_file(self._root + path)
        return None if content is None else content.decode("utf-8", "replace")

    def list_numbers(self, path: str, prefix: str = "") -> tuple[int, ...]:
        """Return the numbers N of names prefixN in a directory, ascending."""
        try:
            names = [entry.name for entry in Path(self._root + path).iterdir()]
        except OSError:
            return ()
        ends = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        numbers = map(parse_whole, ends)
        return tuple(sorted(number for number in numbers if number is not None))

    def find_own_processes(self) -> tuple[int, ...]:
        """Return our own process; () below another root, where the number may be another."""
        return () if self._root else (os.getpid(),)

    @cached_property
    def places(self) -> HostCpus:
        return _read_places(self)

    @cached_property
    def tasks(self) -> "tuple[_Task, ...]":
        """Threads of every process except the kernel's and homenode's."""
        own_processes = self.find_own_processes()
        return tuple(
            task
            for process in self.list_numbers("/proc")
            if process not in own_processes
            for task in _list_tasks(self, process)
        )

    def read_argv(self, process: int) -> tuple[str, ...]:
        text = self.read(f"/proc/{process}/cmdline")
        return () if not text else tuple(text.rstrip("\0").split("\0"))


def _process_of(proc: ProcFiles, uuid: str) -> tuple[int, tuple[str, ...]]:
    candidates = []
    for process in proc.list_numbers("/proc"):
        argv = proc.read_argv(process)
        if uuid in find_arguments(argv, "-uuid"):
            # A process can set any name; QEMU also has vCPU threads.
            kinds = {thread.kind for thread in _list_threads(proc, process)}
            candidates.append((bool(kinds - {ThreadKind.EMULATOR}), process, argv))
    best = [(process, argv) for is_vm, process, argv in candidates if is_vm] or [
        (process, argv) for _, process, argv in candidates
    ]
    if len(best) == 1:
        return best[0]
    raise HostError(
        f"domain {uuid}: several QEMU processes have this UUID: "
        f"{', '.join(str(process) for process, _ in best)}"
        if best
        else f"domain {uuid}: no QEMU process has this UUID",
        hint="run homenode as root on the VM's own host, outside of containers that hide its "
        "processes (so does /proc mounted with hidepid=)",
    )


def _list_threads(proc: ProcFiles, process: int) -> Iterator[VmThread]:
    for task in proc.list_numbers(f"/proc/{process}/task"):
        if (thread := _read_thread(proc, process, task, with_cgroup=True)) is not None:
            yield thread


def _read_thread(proc: ProcFiles, process: int, task: int, *, with_cgroup: bool) -> VmThread | None:
    directory = f"/proc/{process}/task/{task}"
    cpu_list = read_status_field(proc.read(f"{directory}/status") or "", "Cpus_allowed_list")
    if cpu_list is None:
        return None
    allowed_cpus = CpuSet.parse(cpu_list, f"{directory}/status")
    name = (proc.read(f"{directory}/comm") or "").rstrip("\n")
    cgroup = proc.read(f"{directory}/cgroup") if with_cgroup else None
    kind, number = classify_thread(name, cgroup or "")
    return VmThread(task, name, kind, number, allowed_cpus)


def _list_limits(proc: ProcFiles, process: int) -> Iterator[ThreadLimit]:
    """Yield scheduler and cgroup quotas of the vCPUs, IOThreads and the main thread."""
    quota_of: dict[str, float | None] = {}
    main = _read_times(proc.read, process, process)
    for thread in _list_threads(proc, process):
        if thread.kind is ThreadKind.EMULATOR and thread.id != process:
            continue
        times = _read_times(proc.read, process, thread.id)
        if times is None or main is None:
            continue  # it ended meanwhile
        cgroup = proc.read(f"/proc/{process}/task/{thread.id}/cgroup") or ""
        quotas = []
        for directory in list_cgroups(cgroup):
            if directory not in quota_of:
                quota_of[directory] = _read_quota(proc, directory)
            if (share := quota_of[directory]) is not None:
                quotas.append((directory, share))
        yield ThreadLimit(
            kind=thread.kind,
            number=thread.number,
            policy=times.policy,
            nice=times.nice - main.nice,
            quotas=tuple(quotas),
        )


_CGROUPS = "/sys/fs/cgroup"


_QUOTA = ("quota", "period")


def _read_quota(proc: ProcFiles, directory: str) -> float | None:
    """A cgroup's share of CPUs, 1.0 = one; None if nothing limits it. Of version 2, then 1."""
    for root in (_CGROUPS, f"{_CGROUPS}/unified"):
        words = (proc.read(f"{root}{directory}/cpu.max") or "").split()
        match [parse_whole(word) for word in words]:
            case [int(quota), int(period)]:
                return quota / max(1, period)
    for root in (f"{_CGROUPS}/cpu", f"{_CGROUPS}/cpu,cpuacct"):
        texts = (proc.read(f"{root}{directory}/cpu.cfs_{name}_us") or "" for name in _QUOTA)
        match [parse_whole(text.strip()) for text in texts]:
            case [int(quota), int(period)]:
                return quota / max(1, period)
    return None


def _group_limits(proc: ProcFiles, process: int) -> Iterator[GroupLimit]:
    tasks = (f"/{process}/task/{task}" for task in proc.list_numbers(f"/proc/{process}/task"))
    cgroups = {proc.read(f"/proc{path}/cgroup") or "": None for path in (f"/{process}", *tasks)}
    for controller, files in GROUP_FILES:
        for directory in dict.fromkeys(
            path for text in cgroups for path in list_cgroups(text, controller)
        ):
            for root in (_CGROUPS, f"{_CGROUPS}/unified", f"{_CGROUPS}/{controller}"):
                for file in files:
                    if text := (proc.read(f"{root}{directory}/{file}") or "").strip():
                        yield GroupLimit(directory, file, text)


def _read_areas(
    proc: ProcFiles,
    process: int,
    objects: tuple[BackendObject, ...],
    expected_vm: Vm,
    gaps: list[Gap],
) -> tuple[RamArea, ...]:
    maps = proc.read(f"/proc/{process}/maps")
    numa_maps = proc.read(f"/proc/{process}/numa_maps")
    if not maps or not numa_maps:
        gaps.append(Gap("memory by node", f"/proc/{process}/maps and numa_maps cannot be read"))
        return ()
    sizes = {backend.size_bytes for backend in objects}
    # A QEMU whose command line names no backends.
    sizes = sizes or {piece.memory_bytes for piece in expected_vm.memory_pieces.values()}
    policies = {policy.start: policy for policy in parse_numa_maps(numa_maps)}
    areas = []
    for area in parse_maps(maps):
        policy = policies.get(area.start)
        if policy is not None and _is_memory(area, policy, sizes):
            areas.append(RamArea(area.end - area.start, policy))
    return tuple(areas)


def _is_memory(area: ProcessMapping, policy: MappedMemory, sizes: Iterable[int]) -> bool:
    if area.permissions[1] != "w":
        return False
    slack = max(_ALWAYS_TOGETHER, policy.page_bytes)
    return any(0 <= area.end - area.start - size < slack for size in sizes)


def _parse_bytes(text: str, label: str) -> int | None:
    kib = (read_status_field(text, label) or "").removesuffix(" kB").strip()
    number = parse_whole(kib)
    return None if number is None else number * KIB


def _list_interrupts(
    proc: ProcFiles, devices: tuple[Bdf, ...], gaps: list[Gap]
) -> Iterator[DeviceInterrupt]:
    table = proc.read("/proc/interrupts")
    if devices and table is None:
        gaps.append(Gap("interrupts", "/proc/interrupts: not there"))
    unread: dict[Bdf, int] = {}
    for bdf, irq, name in parse_vfio_interrupts(table or ""):
        if bdf in devices:
            lists = [
                proc.read(f"/proc/irq/{irq}/{file}")
                for file in ("smp_affinity_list", "effective_affinity_list")
            ]
            allowed_cpus, effective = (
                CpuSet.parse(text, f"/proc/irq/{irq}") if text and text.strip() else None
                for text in lists
            )
            if allowed_cpus is None and effective is None:
                unread.setdefault(bdf, irq)
            yield DeviceInterrupt(bdf, irq, name, allowed_cpus, effective)
    for bdf, irq in unread.items():
        gaps.append(
            Gap(f"interrupts of {bdf}", f"/proc/irq/{irq}/smp_affinity_list cannot be read")
        )


def _read_places(proc: ProcFiles) -> HostCpus:
    node_directory, cpu_directory = "/sys/devices/system/node", "/sys/devices/system/cpu"
    online = CpuSet.parse(proc.read(f"{cpu_directory}/online") or "")
    indices, pus = (
        proc.list_numbers(node_directory, "node"),
        proc.list_numbers(cpu_directory, "cpu"),
    )
    nodes = ((NodeIndex(n), proc.read(f"{node_directory}/node{n}/cpulist")) for n in indices)
    siblings = (proc.read(f"{cpu_directory}/cpu{pu}/topology/thread_siblings_list") for pu in pus)
    cores = {CpuSet.parse(text) for text in siblings if text}
    return HostCpus(
        online,
        tuple((node, CpuSet.parse(text)) for node, text in nodes if text is not None),
        tuple(sorted(cores, key=lambda core: core.first() or 0)),
    )


def _find_neighbours(
    proc: ProcFiles, vm_process: int, pus: CpuSet, watched_s: float
) -> tuple[Neighbour, ...]:
    """Return processes that may run on the VM's cores, except homenode's and the kernel's."""
    host = proc.places
    cores = host.add_siblings(pus)
    if not cores:
        return ()
    tasks = (task for task in proc.tasks if task.process != vm_process)
    before = [task for task in tasks if not task.thread.allowed.isdisjoint(cores)]
    time.sleep(watched_s)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    tasks_of: dict[tuple[int, bool, CpuSet], list[tuple[_Task, float]]] = {}
    for task in before:
        allowed_cpus = task.thread.allowed
        now = _read_times(proc.text_now, task.process, task.thread.id) if watched_s else None
        ticks = 0 if now is None or now.pu not in pus else now.ticks - task.times.ticks
        busy_ratio = ticks / ticks_per_s / watched_s if watched_s else 0.0
        if task.is_vcpu or allowed_cpus <= cores or busy_ratio > 0:
            # vCPUs of one VM are given together, unless some are pinned and some are not.
            pinned_vcpu = task.is_vcpu and not host.online <= allowed_cpus
            key = (task.process, task.is_vcpu, CpuSet() if pinned_vcpu else allowed_cpus)
            tasks_of.setdefault(key, []).append((task, busy_ratio))
    return tuple(
        Neighbour(
            process=process,
            name=members[0][0].thread.name,
            domain=find_domain_name(proc.read_argv(process))
            if "-uuid" in proc.read_argv(process)
            else None,
            threads=len(members),
            allowed=CpuSet.union(task.thread.allowed for task, _ in members),
            is_vcpu=is_vcpu,
            floats=host.online <= members[0][0].thread.allowed,
            busy_ratio=round(sum(busy for _, busy in members), 3),
        )
        for (process, is_vcpu, _), members in sorted(tasks_of.items(), key=lambda item: item[0][:2])
    )


def _list_tasks(proc: ProcFiles, process: int) -> Iterator[_Task]:
    for task in proc.list_numbers(f"/proc/{process}/task"):
        times = _read_times(proc.read, process, task)
        if times is None or times.flags & KERNEL_THREAD:
            return
        thread = _read_thread(proc, process, task, with_cgroup=False)
        if thread is not None:
            yield _Task(process, thread, times)


def _read_times(read: Callable[[str], str | None], process: int, task: int) -> TaskTimes | None:
    source = f"/proc/{process}/task/{task}/stat"
    text = read(source)
    try:
        return None if text is None else parse_stat(text, source)
    except ParseError:
        return None  # it ended while it was read


def verify_running_domain(name: str, connect: str, plan: Plan | None = None) -> Findings:
    """Findings on a running domain of this machine. plan: made for this host; None = its document.

    Raises UsageError for a domain that does not run, a plan for another domain, or a daemon on
    another machine; HostError and InputError as Virsh does.
    """
    expected_vm, running = observe_running_domain(name, connect, plan)
    live = verify_live(expected_vm, running)
    document = open_domain(
        Virsh(connect).live_definition(running.uuid), f"the definition of {name}"
    )
    findings = (*live.findings, *check_transfers(document))
    return Findings(checked=live.checked, findings=sort_findings(findings))


def observe_running_domain(
    name: str, connect: str, plan: Plan | None = None
) -> tuple[Vm, RunningVm]:
    """(expected state, state that the host's kernel shows) of a running domain. Raises as above."""
    if not is_local(connect):
        raise UsageError(
            f"--live with --connect {connect}: the daemon is on another machine",
            hint="run homenode on the VM's own host: /proc shows where its threads and pages are",
        )
    virsh = Virsh(connect)
    state = virsh.find_domain(name)
    if not state.is_active:
        raise UsageError(
            f"{state.name} is {state.state}: --live checks a running VM",
            hint=command_line("virsh", "-c", connect, "start", state.argument),
        )
    if plan is not None and plan.vm.name != state.name:
        raise UsageError(
            f"{state.name}: expected a plan for this VM, found a plan for {plan.vm.name}",
            hint="omit --plan to compare the VM with its own definition",
        )
    running = build_vm(
        open_domain(virsh.live_definition(state.uuid), f"the definition of {state.name}")
    )
    expected_vm = running if plan is None else vm_as_it_runs(plan, running)
    return expected_vm, capture_running_vm(state.uuid, expected_vm)
