"""Explain: a plan in sentences and tables: why there, why not elsewhere, and what to do next.

Nothing is decided here: the cost tuple answers "why there", the rejections "why not".
"""

from collections.abc import Sequence

from homenode.cpuset import CpuSet
from homenode.doc import Doc, Section, Table, Text
from homenode.findings import Rejection, gap_lines, unread_vms
from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.show.cost_words import span_lines, term_lines, term_value, term_words
from homenode.show.explain_guest import (
    apertures_section,
    cells_section,
    devices_section,
    kernel_section,
    line_text,
    pages_section,
    section,
    topology_section,
)
from homenode.text import command_line, nodes_text, plural, pus_text, subjects_text
from homenode.units import format_bytes
from homenode.vm.layout import Pinning, layout_text
from homenode.vm.plan import Plan, Unplannable

_MOST_REJECTIONS = 4  # of one constraint; the rest are counted


def explain(
    plan: Plan,
    host: Host | None,
    *,
    whole: bool = False,
    why: Sequence[str] = (),
) -> Doc:
    """The explanation of a plan; without its host (manual mode) what the plan alone gives.

    whole: with every term that was compared and every runner-up, not only the ones that people ask
    about first. why: of a layout that `auto` took.
    """
    sections = (
        section("Critical", finding_lines(plan, ("critical",))),
        _placement(plan, host),
        _choice(plan, host, whole=whole),
        section("What was rejected", rejection_lines(plan.rejections, with_hints=False)),
        cells_section(plan),
        topology_section(plan),
        devices_section(plan, host),
        _host_threads(plan),
        pages_section(plan, host),
        *((kernel_section(plan, host),) if whole else ()),
        apertures_section(plan),
        section("What changes in the guest", plan.consequences),
        section("Findings", (*unread_lines(plan), *finding_lines(plan, ("warning", "info")))),
        section(
            "Kept for VMs that are shut off", () if host is None else kept_lines(host, plan.vm.name)
        ),
        section("Not known", gap_lines(plan.gaps)),
        section("Why this layout", tuple(why)),
    )
    return Doc(
        f"VM {plan.vm.name}{f' on host {plan.host_name}' if plan.host_name else ''}: "
        f"layout {layout_text(plan.layout)}",
        (Text(_summary(plan)), *(one for one in sections if one.parts)),
    )


def _summary(plan: Plan) -> str:
    where = nodes_text(plan.nodes) if plan.nodes else "no particular node"
    return (
        f"{plural(plan.vm.vcpus, 'vCPU')} and {_memory(plan)} on {where}, "
        f"{plural(len(plan.cells), 'guest cell')}, {plural(len(plan.vm.hostdevs), 'device')}."
    )


def _memory(plan: Plan) -> str:
    text = format_bytes(plan.vm.memory_bytes)
    if not plan.vm.memory_device_bytes:
        return text
    return f"{text} and {format_bytes(plan.vm.memory_device_bytes)} in memory devices"


def _placement(plan: Plan, host: Host | None) -> Section:
    lines: list[str] = []
    if plan.fallback:
        lines += placement_lines(plan, host)
    used = CpuSet.union(plan.vcpu_pins)
    rows: list[tuple[str, ...]] = []
    if plan.layout.pinning is Pinning.NODE and plan.vcpu_pins:
        lines.append("Each vCPU may run on any of the PUs of its nodes, and moves among them.")
    if not plan.vcpu_pins:
        lines.append("The vCPUs are not pinned: the host's scheduler may run them anywhere.")
    elif host is not None:
        rows = [row for node in dict.fromkeys(plan.nodes) for row in _node_rows(host, node, used)]
    else:
        lines.append(f"vCPUs on {pus_text(used)}.")
    if plan.layout.pinning is Pinning.ONE_PER_CORE and plan.vcpu_pins and host is not None:
        idle = CpuSet(
            pu for core in host.cores if not core.pus.isdisjoint(used) for pu in core.pus - used
        )
        idle -= plan.vm.emulator_pus or CpuSet()
        if idle:
            lines.append(
                f"Hyper-threads kept idle: each vCPU gets a whole core ({pus_text(idle)})."
            )
    table = Table(heads=("node", "LLC", "cores used", "of", "vCPU PUs"), rows=tuple(rows))
    return section("Where it runs", tuple(lines), table if rows else None)


def placement_lines(plan: Plan, host: Host | None) -> list[str]:
    """The fallback in words: how far the VM spans, then what gave way for it to fit."""
    span, *given = plan.fallback.split(", ")
    words = _SPANS.get(span, span)
    if span == "across packages":
        count = _packages(plan, host)
        words = "spans both packages" if count == 2 else f"spans {count or 'several'} packages"
    lines = [f"Placement: {words} (policy {plan.policy})."]
    if given:
        lines.append(f"What gave way: {'; '.join(_GAVE_WAY.get(one, one) for one in given)}.")
    if "host's last core" in given and _has_idle_siblings(plan, host):
        half = -(-plan.vm.vcpus // 2)
        lines.append(
            f"To leave the host cores, use both threads of each: --vcpus {half} --pinning all-pus "
            f"--siblings exposed gives {2 * half} vCPUs on {plural(half, 'core')}."
        )
    return lines


_SPANS = {
    "one LLC": "inside one last-level cache",
    "one node": "inside one NUMA node",
    "one package": "inside one package",
    "all nodes": "on all nodes of the host",
    "manual": "the PUs that you gave",
    "not placed": "none, for this layout pins and binds nothing",
}
_GAVE_WAY = {
    "host's reserved memory": "the memory that the host keeps",
    "shared cores": "vCPUs share cores",
    # Of plans before the ladder was monotone.
    "any free PUs": "vCPUs share cores, on any free PUs",
    "siblings exposed": "vCPUs share cores, pinned to their hyper-threads",
    "mixed core kinds": "performance and efficiency cores are mixed",
    "fewer siblings": "the guest sees fewer hyper-threads of each core",
    "siblings not exposed": "the guest sees no hyper-threads",
    "host's last core": "no core is left without vCPUs",
    "uneven memory": "memory is not shared out as the vCPUs are",
    "memory from other nodes": "some memory is on other nodes than the vCPUs",
    "unequal cells": "the guest's cells are unequal",
}


def _has_idle_siblings(plan: Plan, host: Host | None) -> bool:
    if host is None or plan.layout.pinning is not Pinning.ONE_PER_CORE:
        return False
    used = CpuSet.union(plan.vcpu_pins)
    return any(not core.pus.isdisjoint(used) and len(core.pus) > 1 for core in host.cores)


def _packages(plan: Plan, host: Host | None) -> int | None:
    """Packages of the chosen nodes: as the cost counts them, else as the host has them."""
    value = next((term.value for term in plan.cost if term.name == "packages_spanned"), None)
    if isinstance(value, int):
        return value
    used = CpuSet.union(plan.vcpu_pins)
    return None if host is None else sum(not p.pus.isdisjoint(used) for p in host.packages)


def _node_rows(host: Host, index: NodeIndex, used: CpuSet) -> list[tuple[str, ...]]:
    node = host.node(index)
    if node is None:
        return []
    cores: dict[int | None, list[CpuSet]] = {}
    for core in host.cores:
        first = core.pus.first()
        if first is not None and not core.pus.isdisjoint(node.pus):
            pu = host.pu_at.get(first)
            cores.setdefault(None if pu is None else pu.llc, []).append(core.pus)
    rows: list[tuple[str, ...]] = []
    for llc, here in cores.items():
        mine = CpuSet(pu for pus in here for pu in pus & used)
        if mine:
            in_use = sum(not pus.isdisjoint(used) for pus in here)
            name = "unknown" if llc is None else str(llc)
            rows.append((str(index), name, str(in_use), str(len(here)), str(mine)))
    return rows


def _choice(plan: Plan, host: Host | None, *, whole: bool) -> Section:
    if not plan.cost:
        return section("Why there")
    decisive = {other.decided_by for other in plan.runners_up}
    lines = list(term_lines(plan.cost, decisive, _unknown(plan, plan.nodes)))
    every = len(lines)
    if not whole:
        lines = list(span_lines(plan.cost))
    if plan.optimal is None:
        lines.append("Whether this is the best placement is unknown: not all were compared.")
    elif plan.optimal and len(_nodes_with_pus(host)) != 1:
        lines.append(
            "No placement costs less without giving up more: the others were compared, or ruled "
            "out by bounds."
        )
    for place, other in enumerate(plan.runners_up if whole else plan.runners_up[:1]):
        who = "A runner-up" if place == 0 else "Another"
        mine = next((t.value for t in plan.cost if t.name == other.decided_by), None)
        theirs = next((t.value for t in other.cost if t.name == other.decided_by), None)
        here, there = (
            "unknown"
            if other.decided_by in _unknown(plan, nodes)
            else term_value(other.decided_by, value)
            for nodes, value in ((plan.nodes, mine), (other.nodes, theirs))
        )
        others = sorted(set(other.devices) - {device.bdf for device in plan.vm.hostdevs})
        having = f" with {subjects_text([str(bdf) for bdf in others])}" if others else ""
        lines.append(
            f"{who}, {nodes_text(other.nodes)}{having}: decided by {term_words(other.decided_by)}, "
            f"{here} here against {there} there."
        )
    if every > len(lines) and not whole:
        lines.append(f"{every} figures were compared: homenode plan --explain lists them.")
    return section("Why there", tuple(lines))


def _nodes_with_pus(host: Host | None) -> tuple[NodeIndex, ...]:
    return () if host is None else tuple(node.index for node in host.nodes if node.pus)


def _unknown(plan: Plan, nodes: Sequence[NodeIndex]) -> set[str]:
    """Terms of the cost that count nothing on these nodes, as the host says nothing to count."""
    gaps = {gap.subject for gap in plan.gaps}
    names = {"llcs_spanned"} if "LLCs" in gaps else set()
    if any(f"node {node} memory" in gaps for node in nodes):
        names.add("balance_memory")
    return names


def rejections_text(error: Unplannable) -> Doc:
    """Why no placement fits: each rejection, and what would make it fit."""
    lines = [*rejection_lines(error.rejections, error.hint)]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return Doc(error.message, tuple(map(line_text, lines)))


def rejection_lines(
    rejections: Sequence[Rejection], said_hint: str | None = None, *, with_hints: bool = True
) -> tuple[str, ...]:
    """Rejections by constraint, the most frequent first: a count, some of them, and their hints.

    said_hint: a hint that is said elsewhere. with_hints: without, where another placement works.
    """
    by_constraint: dict[str, list[Rejection]] = {}
    for rejection in rejections:
        by_constraint.setdefault(rejection.constraint, []).append(rejection)
    lines: list[str] = []
    for constraint, group in sorted(by_constraint.items(), key=lambda item: -len(item[1])):
        name = constraint.replace("_", " ").replace("-", " ")
        lines.append(f"{len(group)} rejected by {name}:")
        for rejection in group[:_MOST_REJECTIONS]:
            named = not rejection.nodes or rejection.detail.startswith(("node ", "nodes "))
            where = "" if named else f"{nodes_text(rejection.nodes)}: "
            lines.append(f"  {where}{rejection.detail}")
        if len(group) > _MOST_REJECTIONS:
            lines.append(f"  and {len(group) - _MOST_REJECTIONS} more (--json lists them)")
        hints = dict.fromkeys(
            r.hint for r in group if with_hints and r.hint and r.hint != said_hint
        )
        lines += [f"  hint: {hint}" for hint in list(hints)[:2]]
    return tuple(lines)


def _host_threads(plan: Plan) -> Section:
    lines: list[str] = []
    used = CpuSet.union(plan.vcpu_pins)
    if plan.vm.emulator_pus is None:
        lines.append("The emulator's threads are not pinned.")
    else:
        lines.append(f"The emulator runs on {pus_text(plan.vm.emulator_pus)}.")
        shared = plan.vm.emulator_pus & used
        if shared:
            lines.append(f"It shares {pus_text(shared)} with vCPUs and may delay them.")
    lines += [f"IOThread {i} runs on {pus_text(pus)}." for i, pus in plan.vm.iothread_pins]
    return section("Emulator and IOThreads", tuple(lines))


def finding_lines(plan: Plan, severities: Sequence[str]) -> tuple[str, ...]:
    """Findings of these severities, the gravest first; each thing once, with all that it is said
    of: a host may give 16 GPUs no node."""
    subjects: dict[tuple[str, str, str | None], list[str]] = {}
    found = [finding for finding in plan.findings if finding.severity in severities]
    for finding in sorted(found, key=lambda f: severities.index(f.severity)):
        said = (finding.severity, finding.comparison, finding.fix)
        subjects.setdefault(said, []).append(finding.subject)
    lines: list[str] = []
    for (severity, detail, fix), of in subjects.items():
        each = "each of " if len(of) > 1 else ""
        lines.append(f"{severity}: {each}{subjects_text(of)}: {detail}")
        if fix:
            lines.append(f"  fix: {fix}")
    return tuple(lines)


def kept_lines(host: Host | None, name: str) -> tuple[str, ...]:
    """What VMs other than the named one keep of the host while they are shut off."""
    lines = []
    for domain in () if host is None else host.domains:
        if domain.is_kept and domain.name != name:
            pus = CpuSet.union(domain.vcpu_pins)
            parts = [pus_text(pus)] if pus else []
            parts.append(format_bytes(domain.memory_bytes))
            parts += [subjects_text([str(bdf) for bdf in domain.devices])] if domain.devices else []
            option = command_line("--ignore-domain", domain.name)
            lines.append(f"{domain.name}: {', '.join(parts)} ({option} frees them)")
    return tuple(lines)


def unread_lines(plan: Plan) -> tuple[str, ...]:
    """Warn of VMs that were not read: the plan may give away what they have."""
    lines = gap_lines(unread_vms(plan.gaps))
    return tuple(f"warning: not read: {line}: {_GIVEN_AWAY}" for line in lines)


_GIVEN_AWAY = "CPUs, memory and devices of other VMs may be given to this one"
