"""Environment: the conditions of a run, read before and after. A change marks the run.

Faults that would spoil a run are found before it begins. Whether a machine is emulated (QEMU's TCG,
so that results are meaningless): homenode-probe detects more, see native/src/emulation.hpp. Source:
QEMU, target/arm/tcg/cpu64.c (the identification of "max") and hw/arm/virt.c (the product's name);
seen on Debian 12 in QEMU 7.2.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Gap, Severity, finding, sort_findings
from homenode.machine.discover.readings import read_word
from homenode.machine.discover.system import read_cpu_fields
from homenode.machine.pci import DeviceKind
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools.proc_stat import PATH as PROC_STAT
from homenode.machine.tools.proc_stat import PuTimes, parse
from homenode.machine.topology import Host
from homenode.measure.results.model import Condition
from homenode.text import format_cpus, plural
from homenode.units import MIB, format_bytes, parse_whole
from homenode.vm.plan import Plan

STOLEN_SHARE = 0.02
"""If other guests get more than this share of CPU time, the run is marked."""

_REVISION = re.compile(r"0x[0-9a-f]{1,8}", re.ASCII)
_INVENTED_REVISIONS = frozenset({"0x1", "0x1000065", "0xffffffff"})
_THROTTLE_FILES = ("core_throttle_count", "package_throttle_count")


class LinkState(Struct, frozen=True):
    """A GPU's link as the driver shows it. Idle GPUs slow their links down: compare like states."""

    device: Bdf
    gt_per_s: float | None
    width: int | None
    performance_state: str | None


class Environment(Struct, frozen=True):
    """The conditions at one time. None if the machine does not show them."""

    online: CpuSet
    memory_bytes: int | None  # all nodes together; a balloon moves it
    huge_pages: tuple[tuple[int, int], ...]  # (page size, pages) over nodes
    governors: tuple[str, ...] | None
    smt_control: str | None
    transparent_hugepages: str | None
    numa_balancing: int | None
    kernel_release: str | None
    turbo: str | None  # "on" or "off"
    throttles: tuple[tuple[str, int], ...]  # counts since boot over CPUs, by file
    links: tuple[LinkState, ...]
    times: tuple[PuTimes, ...]  # CPU times of each CPU; () if unknown
    gaps: tuple[Gap, ...] = ()
    microcode: tuple[str, ...] | None = None  # revisions of the CPUs ("0x2b000590"), sorted
    # the highest clocks that CPUs may take by cpufreq, ascending
    clock_limits_hz: tuple[int, ...] | None = None
    emulated: bool | None = None  # see is_emulated


class CpuShare(Struct, frozen=True):
    """Shares of the time of some CPUs between two readings, from 0 to 1."""

    busy: float
    stolen: float


def read_environment(snapshot: Snapshot, host: Host) -> Environment:
    """Read the conditions of a machine. host: discovered from the same snapshot."""
    gaps: list[Gap] = []
    times: tuple[PuTimes, ...] = ()
    try:
        times = parse(snapshot.read_text(PROC_STAT) or "")
    except ParseError as error:
        gaps.append(Gap("time of CPUs", error.message))
    online = host.online_pus
    sizes = [node.memory_bytes for node in host.nodes]
    pools: dict[int, int] = {}
    for pool in (pool for node in host.nodes for pool in node.page_pools):
        pools[pool.page_bytes] = pools.get(pool.page_bytes, 0) + pool.total_pages
    settings = host.settings
    limits = settings.frequency_limits or ()
    return Environment(
        online=online,
        memory_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        huge_pages=tuple(sorted(pools.items())),
        governors=settings.governors,
        smt_control=settings.smt_control,
        transparent_hugepages=settings.transparent_hugepages,
        numa_balancing=settings.numa_balancing,
        kernel_release=settings.kernel_release,
        turbo=settings.turbo,
        throttles=tuple(_throttle_counts(snapshot, online)),
        links=tuple(
            LinkState(
                device.bdf,
                None if device.link is None else device.link.current_gt_per_s,
                None if device.link is None else device.link.current_width,
                device.performance_state,
            )
            for device in host.devices_of_kind(DeviceKind.GPU)
        ),
        times=times,
        gaps=tuple(gaps),
        microcode=_read_microcode(snapshot),
        clock_limits_hz=tuple(sorted({limit.limit_khz * 1000 for limit in limits})) or None,
        emulated=is_emulated(snapshot, host),
    )


def list_conditions(environment: Environment) -> tuple[Condition, ...]:
    """Return the conditions that must be equal in comparable runs. Unknown settings are omitted."""
    settings = _list_settings(environment)
    return tuple(
        Condition(name, value)
        for name, value in settings.items()
        if value is not None and name not in _OF_THE_MACHINE
    )


_OF_THE_MACHINE = frozenset({"online CPUs", "memory", "huge pages"})
"""Settings whose change marks a run; they are not conditions, because layouts differ in them."""


def _list_settings(now: Environment) -> dict[str, str | None]:
    """Return settings that must not change during a run, as text; None if unknown."""
    return {
        "online CPUs": str(now.online),
        "memory": None if now.memory_bytes is None else f"{now.memory_bytes / MIB:,.0f} MiB",
        "huge pages": ", ".join(f"{n} of {format_bytes(size)}" for size, n in now.huge_pages),
        "governor": None if now.governors is None else ",".join(now.governors),
        "smt": now.smt_control,
        "turbo": now.turbo,
        "clock limit": None
        if now.clock_limits_hz is None
        else ", ".join(f"{limit / 1e6:g} MHz" for limit in now.clock_limits_hz),
        "microcode": None if now.microcode is None else ", ".join(now.microcode),
        "kernel": now.kernel_release,
        "transparent huge pages": now.transparent_hugepages,
        "numa balancing": None if now.numa_balancing is None else str(now.numa_balancing),
    }


def find_changes(
    before: Environment, after: Environment, pus: CpuSet | None = None
) -> tuple[str, ...]:
    """Return reasons against conclusions from results in between; () if nothing changed. pus:
    measured CPUs; None = all."""
    return tuple(_find_changed_settings(before, after)) + tuple(
        _find_events(before, after, pus or after.online)
    )


def share_between(before: Environment, after: Environment, pus: CpuSet) -> CpuShare | None:
    """The use of these CPUs between two readings; None if no time passed or it is not counted."""
    first = {times.pu: times for times in before.times}
    busy = idle = stolen = 0
    for times in after.times:
        if times.pu in pus and times.pu in first:
            busy += times.busy - first[times.pu].busy
            idle += times.idle - first[times.pu].idle
            stolen += times.stolen - first[times.pu].stolen
    total = busy + idle + stolen
    # A CPU that was unplugged in between counts from zero again.
    if total <= 0 or min(busy, idle, stolen) < 0:
        return None
    return CpuShare(busy / total, stolen / total)


def _find_changed_settings(before: Environment, after: Environment) -> Iterator[str]:
    now = _list_settings(after)
    for name, was in _list_settings(before).items():
        if None not in (was, now[name]) and was != now[name]:
            is_now = now[name] or "none"
            yield f"{name} changed while it was measured: {was or 'none'} before, {is_now} now"


def _find_events(before: Environment, after: Environment, pus: CpuSet) -> Iterator[str]:
    counts = dict(before.throttles)
    for name, now in after.throttles:
        if name in counts and now > counts[name]:
            yield f"CPUs were throttled while it was measured: {name} rose by {now - counts[name]}"
    links = {link.device: link for link in before.links}
    for link in after.links:
        was = links.pop(link.device, None)
        if was is None:
            yield f"GPU {link.device} appeared while it was measured"
        elif was.performance_state == link.performance_state and (
            _link(was) != _link(link) and None not in (*_link(was), *_link(link))
        ):
            yield (
                f"link {link.device} changed while it was measured: {was.gt_per_s:g} GT/s "
                f"x{was.width} before, {link.gt_per_s:g} GT/s x{link.width} after"
            )
    for device in links:
        yield f"GPU {device} went away while it was measured"
    share = share_between(before, after, pus)
    if share is not None and share.stolen > STOLEN_SHARE:
        yield f"the hypervisor took {share.stolen:.1%} of the CPUs' time for other guests"


def _link(link: LinkState) -> tuple[float | None, int | None]:
    return link.gt_per_s, link.width


def _throttle_counts(snapshot: Snapshot, online: CpuSet) -> Iterator[tuple[str, int]]:
    """Sums over CPUs. Source: Documentation/admin-guide/thermal of Linux; x86 Intel only."""
    for name in _THROTTLE_FILES:
        words = (
            read_word(snapshot, f"/sys/devices/system/cpu/cpu{pu}/thermal_throttle/{name}")
            for pu in online
        )
        counts = [count for count in map(parse_whole, words) if count is not None]
        if counts:
            yield name, sum(counts)


def _read_microcode(snapshot: Snapshot) -> tuple[str, ...] | None:
    """Return the revisions by /proc/cpuinfo; None if none is given, on aarch64 always.

    KVM and TCG show these values to a guest unless its CPU model passes the machine's own on: they
    are not a microcode. Source: Linux, kvm_arch_vcpu_create; QEMU, x86_cpu_realizefn.
    """
    lines = (snapshot.read_text("/proc/cpuinfo") or "").splitlines()
    fields = [line.partition(":") for line in lines if line.startswith("microcode")]
    words = {value.strip() for _, _, value in fields}
    revisions = {word for word in words if _REVISION.fullmatch(word)} - _INVENTED_REVISIONS
    return tuple(sorted(revisions)) or None


_PRODUCT = "/sys/devices/virtual/dmi/id/product_name"
_TREE = "/proc/device-tree/compatible"
_OF_QEMU = frozenset({0x1B36, 0x1AF4, 0x1234})
"""PCI vendors: Red Hat (QEMU's own devices, virtio), Bochs."""

_NO_MAKER = "0x00"


def is_emulated(snapshot: Snapshot, host: Host) -> bool | None:
    """Return whether an emulator runs the machine; None if unknown: an aarch64 guest of QEMU with a
    real CPU's model and no firmware tables, or anything that is neither x86 nor aarch64."""
    if is_emulated_cpu(host):
        return True
    if host.architecture in ("x86_64", "i686"):
        # A virtual machine's CPU may have any name; The probe reads CPUID, which has the answer.
        return None if is_virtual(snapshot) else False
    if host.architecture != "aarch64":
        return None
    if host.cpu.vendor == _NO_MAKER:
        return True
    product = (snapshot.read_text(_PRODUCT) or "").strip()
    if product in ("QEMU Virtual Machine", "KVM Virtual Machine"):
        return product == "QEMU Virtual Machine"
    has_devices_of_qemu = any(device.vendor_id in _OF_QEMU for device in host.pci_devices)
    return False if host.pci_devices and not has_devices_of_qemu else None


def is_emulated_cpu(host: Host) -> bool:
    """Return whether the CPU model name is that of an emulated CPU: "QEMU TCG CPU version 2.5+"."""
    return "TCG" in (host.cpu.name or "").split()


def is_virtual(snapshot: Snapshot) -> bool:
    """Return whether the machine shows that it is a virtual one. aarch64 names no hypervisor: a
    virtual machine there may show nothing."""
    if "hypervisor" in read_cpu_fields(snapshot).get("flags", "").split():
        return True
    product = (snapshot.read_text(_PRODUCT) or "").strip()
    tree = (snapshot.read_text(_TREE) or "").replace("\0", " ").split()
    return product.endswith("Virtual Machine") or "linux,dummy-virt" in tree


BUSY_SHARE = 0.05
"""Share of CPU time that other programs may take before a run without marking it."""

ONE_PU_SHARE = 0.5
"""Likewise of any single CPU: among 448 CPUs a neighbour on one of them is 0.2 % of their time. So
high because a second holds the burst of some daemon on every large machine."""

MEMORY_KEPT = 0.90
"""A guest's kernel keeps some of its memory for itself; less than this is a balloon's doing."""

_BUSY_STATES = ("P0", "P1", "P2")


class IdleReadings(Struct, frozen=True):
    """Two readings of an idle machine, and the CPUs to measure."""

    first: Environment
    second: Environment
    pus: CpuSet


def preflight(host: Host, readings: IdleReadings, plan: Plan | None = None) -> tuple[Finding, ...]:
    """Return the findings, worst first. plan: of this guest, if the machine is a guest."""
    findings = [
        *_load(readings),
        *_check_settings(readings.second),
        *_check_links(host),
        *_check_neighbours(host, readings.pus),
    ]
    if plan is not None:
        findings += _check_guest(plan, readings.second)
    return sort_findings(findings)


def _load(readings: IdleReadings) -> Iterator[Finding]:
    share = share_between(readings.first, readings.second, readings.pus)
    if share is None:
        yield finding(
            "bench-load-unknown",
            format_cpus(readings.pus),
            expected="to be idle",
            observed="/proc/stat does not count their time",
            source="/proc/stat",
        )
        return
    findings = tuple(_check_cpu_time(readings.pus, share))
    yield from findings or _check_busy_cpus(readings)


def _check_busy_cpus(readings: IdleReadings) -> Iterator[Finding]:
    """Find single CPUs used by other programs if the total hardly shows it."""
    shares = [
        (pu, share_between(readings.first, readings.second, CpuSet((pu,)))) for pu in readings.pus
    ]
    busy = CpuSet(pu for pu, share in shares if share is not None and share.busy > ONE_PU_SHARE)
    cpus = CpuSet(pu for pu, share in shares if share is not None and share.stolen > ONE_PU_SHARE)
    expected = f"no CPU more than {ONE_PU_SHARE:.0%}"
    if busy:
        yield _usage_finding(
            "bench-busy", readings.pus, f"{expected} busy", f"{format_cpus(busy)} busy"
        )
    if cpus:
        observed = f"{format_cpus(cpus)} used by other guests"
        yield _usage_finding("bench-stolen", readings.pus, f"{expected} stolen", observed)


def _check_cpu_time(pus: CpuSet, share: CpuShare) -> Iterator[Finding]:
    if share.busy > BUSY_SHARE:
        expected = f"at most {BUSY_SHARE:.0%} busy"
        yield _usage_finding("bench-busy", pus, expected, f"{share.busy:.0%} busy")
    if share.stolen > STOLEN_SHARE:
        expected = f"at most {STOLEN_SHARE:.0%} stolen"
        yield _usage_finding(
            "bench-stolen", pus, expected, f"{share.stolen:.1%} used by other guests"
        )


def _usage_finding(id: str, pus: CpuSet, expected: str, observed: str) -> Finding:
    return finding(id, format_cpus(pus), expected=expected, observed=observed, source="/proc/stat")


def _check_settings(now: Environment) -> Iterator[Finding]:
    slow = [name for name in now.governors or () if name not in ("performance", "schedutil")]
    if slow:
        yield finding(
            "bench-governor",
            "frequency governor",
            expected="performance",
            observed=", ".join(slow),
            source="cpufreq/scaling_governor",
        )
    throttle_texts = [f"{name} {count}" for name, count in now.throttles if count]
    if throttle_texts:
        yield finding(
            "bench-throttled",
            "CPUs",
            expected="no throttling since boot",
            observed=", ".join(throttle_texts),
            source="thermal_throttle",
        )
    if now.transparent_hugepages == "never":
        yield finding(
            "bench-no-huge-pages",
            "transparent huge pages",
            expected="madvise or always",
            observed="never",
            source="/sys/kernel/mm/transparent_hugepage/enabled",
        )


def _check_links(host: Host) -> Iterator[Finding]:
    for device in host.devices_of_kind(DeviceKind.GPU):
        link = device.link
        if link is None or link.current_gt_per_s is None or link.max_gt_per_s is None:
            continue
        slow = link.current_gt_per_s < link.max_gt_per_s
        narrow = None not in (link.current_width, link.max_width) and (
            (link.current_width or 0) < (link.max_width or 0)
        )
        if not slow and not narrow:
            continue
        # A GPU that rests slows its link down, and a card may sit in a narrower slot by design.
        is_busy = device.performance_state in _BUSY_STATES
        yield finding(
            "bench-link",
            f"GPU {device.bdf}",
            expected=_format_link(link.max_gt_per_s, link.max_width),
            observed=_format_link(link.current_gt_per_s, link.current_width)
            + ("" if is_busy else ", perhaps at rest"),
            severity=Severity.WARNING if is_busy else Severity.INCONCLUSIVE,
            source="link state of the function",
        )


def _format_link(gt_per_s: float, width: int | None) -> str:
    return f"{gt_per_s:g} GT/s" + ("" if width is None else f" x{width}")


def _check_neighbours(host: Host, pus: CpuSet) -> Iterator[Finding]:
    for domain in host.domains:
        if not domain.running:
            continue
        shared = CpuSet.union(domain.vcpu_pins) & pus
        floats = any(pins is None for pins in domain.vcpu_pins)
        if shared or floats:
            yield finding(
                "bench-neighbour",
                f"domain {domain.name}",
                expected=f"no vCPU on {format_cpus(pus)}",
                observed=f"vCPUs pinned to {shared}" if shared else "vCPUs that run anywhere",
                source="running domains",
            )


def _check_guest(plan: Plan, now: Environment) -> Iterator[Finding]:
    if len(now.online) != plan.vm.vcpus:
        yield finding(
            "bench-vcpus",
            "guest",
            expected=f"{plural(plan.vm.vcpus, 'vCPU')}, as planned",
            observed=f"{len(now.online)} online",
            source="/sys/devices/system/cpu/online",
        )
    planned_bytes = plan.vm.memory_bytes
    if now.memory_bytes is not None and now.memory_bytes < planned_bytes * MEMORY_KEPT:
        yield finding(
            "bench-balloon",
            "guest",
            expected=f"{format_bytes(planned_bytes)}, as planned",
            observed=format_bytes(now.memory_bytes),
            source="meminfo of all nodes",
        )
