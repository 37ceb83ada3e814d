"""PlanText: a plan's placement, relaxations, steps before the start, and unknowns.

One line, one table of guest nodes, then labels; explain.py has everything else.
"""

from collections.abc import Iterator, Sequence

from homenode.cpuset import CpuSet
from homenode.doc import Doc, Part, Table, Text
from homenode.findings import NO_VMS, Finding, Severity, list_unread_vms
from homenode.machine.pci import KIND_NAMES, DeviceKind
from homenode.machine.topology import Host
from homenode.text import (
    command_line,
    format_cpus,
    format_nodes,
    format_subjects,
    number_list,
    plural,
    shorten_list,
)
from homenode.units import format_bytes, format_limit
from homenode.vm.layout import GuestCells, GuestPcie, Pinning, format_layout
from homenode.vm.model import GuestCache
from homenode.vm.plan import Plan, Relaxation, Unplannable
from homenode.vm.targets.registry import has_feature
from homenode.vm.targets.target import Feature

HEADS = ("guest node", "vCPUs", "host CPUs", "host node", "memory", "GPUs")
MAX_UNKNOWN = 4  # reasons that the label `unknown` holds; --explain has them all
_LOOKS = {"critical": "critical", "warning": "warn", "not read": "warn", "unknown": "warn"}

_RELAXED = {  # a relaxation: (the goal, what the VM gets, findings with the same content)
    Relaxation.HOST_MEMORY: ("memory for the host", "the VM takes its reserve", ()),
    Relaxation.SHARED_CORES: (
        "a whole core for each vCPU",
        "some vCPUs share a core",
        ("vcpus-share-cores", "siblings-not-exposed"),
    ),
    Relaxation.MIXED_KINDS: (
        "one kind of core",
        "P and E cores are mixed",
        ("mixed-kinds",),
    ),
    Relaxation.FEWER_SIBLINGS: ("all threads of each core", "the guest sees fewer", ()),
    Relaxation.SIBLINGS_NOT_EXPOSED: (
        "all threads of each core",
        "the guest sees one thread per core",
        ("siblings-not-exposed",),
    ),
    Relaxation.HOST_CORE: (
        "a core for the host",
        "none is left",
        ("host-core-taken", "emulator-on-siblings", "emulator-shares-vcpus"),
    ),
    Relaxation.EMULATOR_CORE: (
        "a core for QEMU's own threads of other VMs",
        "vCPUs share it",
        ("emulator-shares-vcpus",),
    ),
    Relaxation.UNEVEN_MEMORY: (
        "memory divided like the vCPUs",
        "each node provides its free memory",
        ("memory-uneven",),
    ),
    Relaxation.MEMORY_ELSEWHERE: (
        "memory next to the vCPUs",
        "some is on further nodes",
        ("memory-from-other-nodes",),
    ),
    Relaxation.UNEQUAL_CELLS: (
        "equal guest nodes",
        "they are unequal",
        (
            "unequal-cells",
            "sockets-exceed-cells",
            "cells-share-socket",
            "guest-l3-not-mirrored",
        ),
    ),
}
_SHARED = "vCPUs share a core with CPUs that are reserved or in use"
_COST_OF_SHARING = "vCPUs that share a core are 40 to 75 % slower under full load (XAPI)"


def format_plan(plan: Plan, host: Host | None, reasons: Sequence[str] = (), step: str = "") -> Doc:
    """Return the answer. host: None = manual mode. reasons: of the layout, if homenode chose it.
    step: the next step."""
    return Doc(answer_line(plan, host), plan_parts(plan, host, reasons, step))


def answer_line(plan: Plan, host: Host | None) -> str:
    """Return one line: whether the VM fits, and on which nodes."""
    head = f"{plan.vm.name} fits {plan.host_name or 'the given CPUs'}"
    if fallback := format_fallback(plan, host):
        return f"{head} {fallback}"
    place = f"on {format_nodes(plan.nodes)}" if plan.nodes else "on any node"
    memory = format_bytes(plan.vm.memory_bytes)
    if plan.vm.memory_device_bytes:
        memory += f" and {format_bytes(plan.vm.memory_device_bytes)} in memory devices"
    sizes = [plural(plan.vm.vcpus, "vCPU"), memory]
    devices, kind = _choose_counted(plan, host)
    nodes = {node for node in devices.values() if node is not None}
    if nodes and None not in devices.values() and nodes < set(plan.nodes):
        count_text = f"{plural(len(devices), kind)} on {format_nodes(nodes)}"
        return f"{head}: {', '.join(sizes)} {place}; {count_text}"
    sizes += [plural(len(devices), kind)] if devices else []
    local = format_locality(plan, host)
    return f"{head}: {', '.join(sizes)} {place}{local and f'; {local}'}"


def format_locality(plan: Plan, host: Host | None) -> str:
    """Count the VM's GPUs, or its NICs without a GPU, on its nodes and on unknown ones; "" for
    none."""
    devices, kind = _choose_counted(plan, host)
    if not devices or not plan.nodes:
        return ""
    local = sum(node in plan.nodes for node in devices.values())
    unknown = sum(node is None for node in devices.values())
    count = "all" if local == len(devices) else f"{local} of {len(devices)}"
    return f"{count} {kind}s local{f', {unknown} unknown' if unknown else ''}"


def _choose_counted(plan: Plan, host: Host | None) -> tuple[dict[int, int | None], str]:
    gpus = _map_device_nodes(plan, host, DeviceKind.GPU)
    return (gpus, "GPU") if gpus else (_map_device_nodes(plan, host, DeviceKind.NIC), "NIC")


def plan_parts(
    plan: Plan,
    host: Host | None,
    reasons: Sequence[str] = (),
    step: str = "",
    *,
    order: str = "",
    unknown: Sequence[str] = (),
) -> tuple[Part, ...]:
    """Return the table and the labels. order, unknown: of the hosts that were compared."""
    labels = list(_list_labels(plan, host, reasons, order))
    labels += [("unknown", line) for line in unknown]
    if step:
        labels.append(("next", step))
    width = max(len(label) for label, _ in labels) + 2
    texts, previous = [], ""
    for label, line in labels:
        shown_label = "" if label == previous and label != "warning" else label
        texts.append(Text(f"{shown_label:{width}}{line}", _LOOKS.get(label, ""), hang=width))
        previous = label
    return (_build_cells_table(plan, host), *texts)


def format_unread(plan: Plan) -> tuple[str, ...]:
    """Report VMs that were not read: the plan may use their resources."""
    return tuple(
        f"{gap.subject}: {gap.reason}; their CPUs, memory and devices may be assigned to this VM"
        for gap in list_unread_vms(plan.gaps)
    )


def format_finding_lines(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return a line for each distinct finding with all its subjects: 16 GPUs may lack a node."""
    subjects: dict[tuple[str, str | None], list[str]] = {}
    for finding in findings:
        subjects.setdefault((finding.comparison, finding.fix), []).append(finding.subject)
    return tuple(
        f"{format_subjects(group)}: {detail}{f'; fix: {fix}' if fix else ''}"
        for (detail, fix), group in subjects.items()
    )


def select_findings(plan: Plan, severity: Severity) -> list[Finding]:
    """Return the findings of a severity, without those that a relaxation or `before` covers."""
    covered_ids = {id_ for relaxation in plan.relaxations for id_ in _RELAXED[relaxation][2]} | {
        "huge-pages-short"
    }
    return [f for f in plan.findings if f.severity is severity and f.id not in covered_ids]


def format_refusal(error: Unplannable, prefix: str = "") -> Doc:
    """Return why no placement fits: a line for each kind of rejection, equal nodes joined, and a
    hint."""
    quoted_detail = error.nearest.detail if error.nearest and error.quotes_nearest else None
    singles: dict[tuple[str, str], list[int]] = {}
    sets: dict[str, str] = {}  # the first for each set of nodes: the least relaxed
    for rejection in error.rejections:
        if len(rejection.nodes) == 1:
            key = (rejection.constraint, rejection.detail)
            singles.setdefault(key, []).append(rejection.nodes[0])
        elif rejection.detail != quoted_detail:
            sets.setdefault(
                format_nodes(rejection.nodes) if rejection.nodes else "host", rejection.detail
            )
    of_constraint = {
        name: (_format_nodes(nodes), detail) for (name, detail), nodes in singles.items()
    }
    rows = [*sets.items(), *of_constraint.values()]
    width = max((len(name) for name, _ in rows), default=0) + 4
    lines = [Text(f"{name:{width}}{detail}", indent=2, hang=width) for name, detail in rows]
    if error.hint:
        lines.append(Text(f"hint: {error.hint}", "hint", indent=2, hang=6))
    return Doc(f"{prefix}{error.message}", tuple(lines))


def _format_nodes(nodes: Sequence[int]) -> str:
    """Format rejected nodes: "node 0 or 1"."""
    if len(nodes) == 2:
        return f"node {nodes[0]} or {nodes[1]}"
    return f"each of {format_nodes(nodes)}" if len(nodes) > 1 else format_nodes(nodes)


def format_fallback(plan: Plan, host: Host | None) -> str:
    """Return the effect of the first relaxation, for the first line; "" without relaxations."""
    if not plan.relaxations:
        return ""
    return f"with a fallback: {_format_effect(plan.relaxations[0], plan, host)}"


def _format_effect(relaxation: Relaxation, plan: Plan, host: Host | None) -> str:
    shared_cores = _list_shared_cores(plan, host)
    if relaxation is Relaxation.SHARED_CORES and shared_cores is not None:
        shared_vcpus = sum(len(vcpus) for _, vcpus in shared_cores)
        return (
            f"{shared_vcpus} of {plural(plan.vm.vcpus, 'vCPU')} share a core"
            if shared_vcpus
            else _SHARED
        )
    if relaxation is Relaxation.UNEQUAL_CELLS:
        return f"guest nodes of {_format_cell_sizes(plan)}"
    if relaxation is Relaxation.HOST_CORE:
        return "no core remains for the host"
    if relaxation is Relaxation.EMULATOR_CORE:
        return "vCPUs share a core with QEMU's own threads of another VM"
    return _RELAXED[relaxation][1]


def _format_relaxed(relaxation: Relaxation, plan: Plan, host: Host | None) -> str:
    constraint, received_text, _ = _RELAXED[relaxation]
    shared_cores = _list_shared_cores(plan, host)
    if relaxation is Relaxation.SHARED_CORES and shared_cores is not None:
        received_text = (
            f"{len(shared_cores)} cores are used by several vCPUs" if shared_cores else _SHARED
        )
        if len(shared_cores) == 1:
            cpus, vcpus = shared_cores[0]
            received_text = f"CPUs {cpus} are one core, used by {len(vcpus)} vCPUs"
    if relaxation is Relaxation.HOST_CORE:
        shares = {finding.id: finding for finding in plan.findings}
        if "emulator-on-siblings" in shares:
            received_text += f"; QEMU shares CPU {plan.vm.emulator_pus} with a vCPU's core"
        elif "emulator-shares-vcpus" in shares:
            received_text += "; QEMU runs on the vCPUs' CPUs"
    if relaxation is Relaxation.UNEQUAL_CELLS:
        received_text, topology = _format_cell_sizes(plan), plan.vm.cpu_topology
        if topology is not None and topology.sockets > len(plan.cells):
            sockets = plural(topology.sockets, "socket")
            cores = plural(topology.dies * topology.cores, "core")
            received_text += f"; the guest sees {sockets} of {cores}"
        if plan.vm.cpu_cache == GuestCache.DISABLED:
            received_text += "; it sees no L3"
    return f"{constraint}: {received_text}"


def _format_cell_sizes(plan: Plan) -> str:
    sizes = [str(len(cell.vcpus)) for cell in plan.cells if cell.vcpus]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]} vCPUs"


def _list_shared_cores(plan: Plan, host: Host | None) -> list[tuple[CpuSet, list[int]]] | None:
    """Return (CPUs, vCPUs) of the cores on which several vCPUs are pinned; None without a host, and
    for vCPUs that float over their nodes."""
    if host is None or plan.layout.pinning is Pinning.NODE:
        return None
    vcpus_of_core: dict[CpuSet, list[int]] = {}
    for vcpu, pins in enumerate(plan.vcpu_pins):
        vcpus_of_core.setdefault(host.core_at[min(pins)].pus, []).append(vcpu)
    return [(pus, vcpus) for pus, vcpus in vcpus_of_core.items() if len(vcpus) > 1]


def _map_device_nodes(plan: Plan, host: Host | None, kind: DeviceKind) -> dict[int, int | None]:
    """Return the host node of each device of a kind that the VM has, by device number."""
    bdfs = {device.bdf for device in plan.vm.hostdevs}
    devices = () if host is None else host.devices_of_kind(kind)
    return {number: device.node for number, device in enumerate(devices) if device.bdf in bdfs}


def _format_other_devices(plan: Plan, host: Host | None) -> str:
    """Return the devices that the VM gets besides GPUs and their audio functions. A definition of
    another host may name an NVMe drive or a NIC where it means a GPU."""
    bdfs_of_kind: dict[str, list[str]] = {}
    for bdf in dict.fromkeys(device.bdf for device in plan.vm.hostdevs):
        device = None if host is None else host.device_at.get(bdf)
        if device is not None and device.kind not in (DeviceKind.GPU, DeviceKind.AUDIO):
            name = KIND_NAMES.get(device.kind, "device")
            bdfs_of_kind.setdefault(name, []).append(f"{name} {bdf}")
    return "; ".join(format_subjects(names) for names in bdfs_of_kind.values())


def _build_cells_table(plan: Plan, host: Host | None) -> Table:
    gpus = _map_device_nodes(plan, host, DeviceKind.GPU)
    is_flat = plan.layout.cells is GuestCells.SINGLE
    rows, homes = [], dict(gpus)
    for cell in plan.cells:
        # A flat guest without fixed nodes has its GPUs in its only row.
        local = [gpu for gpu, node in homes.items() if node in cell.host_nodes or not plan.nodes]
        homes = {gpu: node for gpu, node in homes.items() if gpu not in local}
        pins = CpuSet.union([plan.vcpu_pins[vcpu] for vcpu in cell.vcpus if plan.vcpu_pins])
        online = cell.vcpus - plan.vm.offline_vcpus
        count = f"{len(cell.vcpus)}"
        if online != cell.vcpus:
            count += f", online {online or 'none'}"
        rows.append(
            (
                "single" if is_flat else str(cell.id),
                f"{cell.vcpus} ({count})" if cell.vcpus else "-",
                str(pins) or ("any" if cell.vcpus else "-"),
                number_list(cell.host_nodes) or "any",
                format_bytes(cell.memory_bytes) if cell.memory_bytes else "-",
                f"gpu{number_list(local)}" if local else "-",
            )
        )
    for node in dict.fromkeys(homes.values()):
        numbers = number_list(gpu for gpu, home in homes.items() if home == node)
        rows.append(("-", "-", "-", "unknown" if node is None else str(node), "-", f"gpu{numbers}"))
    return Table(heads=HEADS, rows=tuple(rows), numeric=("memory",), cpu_sets=HEADS[1:3])


def _list_labels(
    plan: Plan, host: Host | None, reasons: Sequence[str], order: str
) -> Iterator[tuple[str, str]]:
    """Yield (label, line), in the order of every screen."""
    for line in format_finding_lines(select_findings(plan, Severity.CRITICAL)):
        yield "critical", line
    for line in reasons or (f"{format_layout(plan.layout)}, as requested",):
        yield "layout", line
    for relaxation in plan.relaxations:
        yield "relaxed", _format_relaxed(relaxation, plan, host)
    if others := _format_other_devices(plan, host):
        yield "devices", others
    if order:
        yield "order", order
    if host is not None and Relaxation.HOST_CORE not in plan.relaxations and plan.vcpu_pins:
        yield "host", _format_host(plan, host)
    for line in format_reserved(host, plan.vm.name):
        yield "host", f"keeps for {line}"
    if Relaxation.SHARED_CORES in plan.relaxations:
        yield "cost", _COST_OF_SHARING
    before = [*_format_reservations(plan)]
    if plan.aperture is not None:
        before.append(f"memlock {format_limit(plan.aperture.memlock_bytes)}")
    if before:
        yield "before", "; ".join(before)
    for line in format_finding_lines(select_findings(plan, Severity.WARNING)):
        yield "warning", line
    covered_ids = [id_ for relaxation in plan.relaxations for id_ in _RELAXED[relaxation][2]]
    fixes = [f for f in plan.findings if f.id in covered_ids and f.fix]
    fixes.sort(key=lambda finding: (finding.id != "host-core-taken", covered_ids.index(finding.id)))
    if fixes:
        yield "fix", str(fixes[0].fix)
    can_show = has_feature(plan.kept_of, Feature.DEVICE_CELLS)
    if can_show and plan.layout.pcie is GuestPcie.KEEP and len(plan.nodes) > 1:
        nodes = set(_map_device_nodes(plan, host, DeviceKind.GPU).values())
        if nodes - {None}:
            yield "caveat", "numa_node of the guest's GPUs is -1; --layout pin-numa-pci sets it"
    infos = dict.fromkeys(finding.id for finding in select_findings(plan, Severity.INFO))
    if infos:
        yield "info", f"{', '.join(infos)} (--explain)"
    for line in format_unread(plan):
        yield "not read", line
    unknown = [*_format_unknown(plan)]
    if unknown:
        yield "unknown", f"{shorten_list(unknown, MAX_UNKNOWN, '; ')}"


def _format_host(plan: Plan, host: Host) -> str:
    """Describe the cores of the VM's nodes without vCPUs, and the CPUs of QEMU's own threads."""
    nodes = [node for node in host.nodes if node.index in plan.nodes]
    is_whole = len(nodes) == sum(bool(node.pus) for node in host.nodes)
    pus = CpuSet.union(node.pus for node in nodes)
    cores = [core.pus for core in host.cores if core.pus <= pus]
    others = [domain for domain in host.domains if domain.name != plan.vm.name]
    pins = [domain.vcpu_pins for domain in others if domain.has_claim]
    used = CpuSet.union([*plan.vcpu_pins, *(pin for vm in pins for pin in vm if pin is not None)])
    idle = sum(core.isdisjoint(used) for core in cores)
    nodes_phrase = "" if is_whole else f" of {format_nodes(plan.nodes)}"
    parts = [f"{idle} of {plural(len(cores), 'core')}{nodes_phrase} run no vCPU"]
    if plan.vm.emulator_pus is not None:
        parts.append(f"QEMU on {format_cpus(plan.vm.emulator_pus)}")
    parts += [
        f"IOThread {thread} on {format_cpus(pins)}" for thread, pins in plan.vm.iothread_pins[:4]
    ]
    return "; ".join(parts)


def format_reserved(host: Host | None, name: str) -> tuple[str, ...]:
    """Return the resources that other VMs hold while they are shut off."""
    lines = []
    for domain in () if host is None else host.domains:
        if domain.is_kept and domain.name != name:
            pus = CpuSet.union(domain.vcpu_pins)
            parts = [format_cpus(pus)] if pus else []
            parts.append(format_bytes(domain.memory_bytes))
            parts += (
                [format_subjects([str(bdf) for bdf in domain.devices])] if domain.devices else []
            )
            option = command_line("--ignore-domain", domain.name)
            lines.append(f"{domain.name}: {', '.join(parts)} ({option} frees them)")
    return tuple(lines)


def _format_reservations(plan: Plan) -> Iterator[str]:
    """Describe huge pages to reserve, nodes with equal numbers together."""
    nodes_of: dict[tuple[int, int], list[int]] = {}
    for node, page_bytes, pages, free in plan.page_reservations:
        if free is None or free < pages:
            nodes_of.setdefault((pages - (free or 0), page_bytes), []).append(node)
    for (pages, page_bytes), nodes in nodes_of.items():
        prefix = "each of " if len(nodes) > 1 else ""
        pages_text = f"{plural(pages, 'huge page')} of {format_bytes(page_bytes)}"
        yield f"reserve {pages_text} on {prefix}{format_nodes(nodes)}"


def _format_unknown(plan: Plan) -> Iterator[str]:
    """Yield the facts that could have changed the plan, grouped by reason."""
    if any(free is None for *_, free in plan.page_reservations):
        yield "free huge pages"
    hidden_vms = set(list_unread_vms(plan.gaps))
    subjects: dict[str, list[str]] = {}
    for gap in dict.fromkeys(plan.gaps):
        if gap not in hidden_vms and gap.subject != NO_VMS:
            subjects.setdefault(gap.reason, []).append(gap.subject)
    for reason, group in subjects.items():
        yield f"{format_subjects(group)} ({reason})"
