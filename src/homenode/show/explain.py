"""Explain: a plan in full: reasons for the placement, rejections, and changes for guest and host;
lines that a change of a domain's definition adds and removes, by section.

Text only: reasons come from the cost tuple and the rejections.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.doc import Commands, Doc, Part, Section, Table, Text
from homenode.findings import Rejection, format_gaps
from homenode.machine.topology import Host
from homenode.show.plan_text import format_finding_lines, format_plan
from homenode.text import format_cpus, format_nodes, format_subjects, number_list, plural
from homenode.units import KIB, MIB, format_bytes, format_limit
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.hostdevs import list_hostdev_elements
from homenode.vm.domain.merge import normalize
from homenode.vm.domain.read import open_domain
from homenode.vm.layout import Pinning
from homenode.vm.model import GuestCache
from homenode.vm.plan import CostTerm, Plan
from homenode.vm.targets.registry import runs_qemu

_PLACES = ("2nd", "3rd", "4th", "5th")
_MAX_REJECTIONS = 4  # of one constraint; further ones are counted


def explain(
    plan: Plan, host: Host | None, *, reasons: Sequence[str] = (), step: str = "", full: bool = True
) -> Doc:
    """Return the answer with all reasons; without a host (manual mode) those of the plan alone.
    reasons, step: as in plan_text. full: False = the answer alone."""
    answer = format_plan(plan, host, reasons, step)
    if not full:
        return answer
    return Doc(answer.title, (*answer.parts, *explain_sections(plan, host)))


def explain_sections(plan: Plan, host: Host | None) -> tuple[Section, ...]:
    """Return all sections behind the answer."""
    sections = (
        _format_placement(plan, host),
        _format_choice(plan, host),
        _make_section("Rejected", format_rejections(plan.rejections)),
        _format_topology(plan),
        _format_devices(plan, host),
        _format_pages(plan, host),
        _build_kernel_parameters(plan, host),
        _format_apertures(plan),
        _make_section("Changes in the guest", plan.consequences),
        _make_section(
            "Findings", [f"{f.severity}: {format_finding_lines((f,))[0]}" for f in plan.findings]
        ),
        _make_section("Unknown", format_gaps(plan.gaps)),
    )
    return tuple(part for part in sections if part.parts)


def _format_placement(plan: Plan, host: Host | None) -> Section:
    lines = [f"Placement: {plan.fallback} (policy {plan.policy})."] if plan.fallback else []
    used = CpuSet.union(plan.vcpu_pins)
    rows: list[tuple[str, ...]] = []
    if plan.layout.pinning is Pinning.NODE and plan.vcpu_pins:
        lines.append("Each vCPU may run on any CPU of its nodes, and moves among them.")
    if not plan.vcpu_pins:
        lines.append("The vCPUs are not pinned: the host's scheduler may run them anywhere.")
    elif host is not None:
        rows = [
            row for node in dict.fromkeys(plan.nodes) for row in _build_node_rows(host, node, used)
        ]
    if plan.layout.pinning is Pinning.ONE_PER_CORE and plan.vcpu_pins and host is not None:
        idle = host.whole_cores(used) - used - (plan.vm.emulator_pus or CpuSet())
        if idle:
            lines.append(f"Siblings kept idle: each vCPU gets a whole core ({format_cpus(idle)}).")
    if plan.vm.emulator_pus is not None and (shared_pus := plan.vm.emulator_pus & used):
        lines.append(f"QEMU shares {format_cpus(shared_pus)} with vCPUs and may delay them.")
    table = Table(heads=("node", "LLC", "cores used", "cores", "vCPU CPUs"), rows=tuple(rows))
    return _make_section("Where it runs", tuple(lines), table if rows else None)


def _build_node_rows(host: Host, index: NodeIndex, used: CpuSet) -> list[tuple[str, ...]]:
    node = host.find_node(index)
    if node is None:
        return []
    cores_of_llc: dict[int | None, list[CpuSet]] = {}
    for core in host.cores:
        first = core.pus.first()
        if first is not None and not core.pus.isdisjoint(node.pus):
            pu = host.pu_at.get(first)
            cores_of_llc.setdefault(None if pu is None else pu.llc, []).append(core.pus)
    rows: list[tuple[str, ...]] = []
    for llc, cores in cores_of_llc.items():
        pus = CpuSet(pu for core in cores for pu in core & used)
        if pus:
            in_use = sum(not core.isdisjoint(used) for core in cores)
            name = "unknown" if llc is None else str(llc)
            rows.append((str(index), name, str(in_use), str(len(cores)), str(pus)))
    return rows


def _format_choice(plan: Plan, host: Host | None) -> Section:
    """List the cost terms in order: the first that differs between two placements decides."""
    if not plan.cost:
        return _make_section("Why there")
    costs = [(plan.nodes, plan.cost), *((other.nodes, other.cost) for other in plan.runners_up)]
    lines = []
    for place, other in zip(_PLACES, plan.runners_up, strict=False):
        devices = sorted(set(other.devices) - {device.bdf for device in plan.vm.hostdevs})
        having = f" with {format_subjects([str(bdf) for bdf in devices])}" if devices else ""
        term_text = format_term(other.decided_by)
        lines.append(f"{place}: {format_nodes(other.nodes)}{having}; decided by {term_text}.")
    rows = []
    for term in plan.cost:
        row = tuple(_format_cost(plan, nodes, cost, term.name) for nodes, cost in costs)
        if set(row) != {"0"}:
            rows.append((format_term(term.name), *row))
    if plan.optimal is None:
        lines.insert(0, "Whether this is the best placement is unknown: not all were compared.")
    elif plan.optimal and (host is None or sum(bool(node.pus) for node in host.nodes) != 1):
        lines.insert(0, "This is the best placement (proved).")
    return _make_section(
        "Why there",
        lines,
        Table(heads=("concern", "plan", *_PLACES[: len(costs) - 1]), rows=tuple(rows)),
    )


def _format_cost(
    plan: Plan, nodes: Sequence[NodeIndex], cost: Sequence[CostTerm], name: str
) -> str:
    if name in _unknown_terms(plan, nodes):
        return "unknown"
    return term_value(name, next((term.value for term in cost if term.name == name), None))


def _unknown_terms(plan: Plan, nodes: Sequence[NodeIndex]) -> set[str]:
    """Return cost terms without data: the host does not report them for these nodes."""
    gaps = {gap.subject for gap in plan.gaps}
    names = {"llcs_spanned"} if "LLCs" in gaps else set()
    if any(f"node {node} memory" in gaps for node in nodes):
        names.add("balance_memory")
    return names


def format_rejections(rejections: Sequence[Rejection]) -> tuple[str, ...]:
    """List rejections by constraint, the most frequent first: a count and examples."""
    by_constraint: dict[str, list[Rejection]] = {}
    for rejection in rejections:
        by_constraint.setdefault(rejection.constraint, []).append(rejection)
    lines: list[str] = []
    for constraint, group in sorted(by_constraint.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(group)} rejected by {constraint.replace('-', ' ')}:")
        for rejection in group[:_MAX_REJECTIONS]:
            nodes = f"{format_nodes(rejection.nodes)}: " if rejection.nodes else ""
            lines.append(f"  {nodes}{rejection.detail}")
        if len(group) > _MAX_REJECTIONS:
            lines.append(f"  and {len(group) - _MAX_REJECTIONS} more (--json lists them)")
    return tuple(lines)


def _format_topology(plan: Plan) -> Section:
    lines: list[str] = []
    if plan.vm.cpu_topology is not None:
        shape = plan.vm.cpu_topology
        levels = zip(shape, ("socket", "die", "core", "thread"), strict=True)
        product = " x ".join(plural(count, noun) for count, noun in levels)
        lines.append(f"The guest sees {product} = {plural(shape.vcpus, 'vCPU')}.")
    caches: dict[str | None, str] = {
        GuestCache.PASSTHROUGH: "Its caches are the host's: they match its threads and LLCs.",
        GuestCache.EMULATED: "Its L3 is emulated, one for each die.",
        GuestCache.DISABLED: "The guest gets no L3, because no L3 topology would match its vCPUs.",
        None: "The layout sets no caches.",
    }
    lines.append(caches[plan.vm.cpu_cache])
    if plan.vm.topoext:
        sees = plan.vm.threads_per_core > 1
        lines.append(
            "The CPU feature topoext is required, or an AMD guest does not see threads."
            if sees
            else "The CPU feature topoext is required: an AMD guest reads its topology with it."
        )
    if plan.vm.has_iommu:
        lines.append("A vIOMMU is needed: more than 255 vCPUs, or the definition had one.")
    lines += [
        f"Distances of guest node {cell.id}: {' '.join(map(str, cell.distances))}."
        for cell in plan.cells
        if cell.distances
    ]
    lines += [
        f"Guest nodes {number_list(tuple(device.initiator_cells))} are for the memory of GPU "
        f"{device.bdf}: the guest's driver brings that memory online."
        for device in plan.vm.hostdevs
        if device.initiator_cells
    ]
    return _make_section("CPU topology and caches of the guest", tuple(lines))


def _format_devices(plan: Plan, host: Host | None) -> Section:
    names = {} if host is None else {d.bdf: d.kind.value for d in host.pci_devices}
    rows = tuple(
        (
            str(device.bdf),
            names.get(device.bdf, "unknown"),
            "unknown" if device.host_node is None else str(device.host_node),
            "none" if device.cell is None else str(device.cell),
            "not planned" if device.address is None else str(device.address),
        )
        for device in plan.vm.hostdevs
    )
    columns = ("host BDF", "kind", "node", "guest node", "guest address")
    lines = (
        "`lspci` in the guest shows other bus numbers: guest addresses have the index of a "
        "controller as bus.",
    )
    has_address = any(device.address is not None for device in plan.vm.hostdevs)
    return _make_section("Devices", lines if has_address else (), Table(heads=columns, rows=rows))


def _format_pages(plan: Plan, host: Host | None) -> Section:
    commands: list[str] = []
    rows: list[tuple[str, ...]] = []
    for node, page_bytes, pages, free in plan.page_reservations:
        rows.append(
            (
                str(node),
                format_bytes(page_bytes),
                str(pages),
                "unknown" if free is None else str(free),
            )
        )
        if free is not None and free >= pages:
            continue
        directory = f"/sys/devices/system/node/node{node}/hugepages/hugepages-{page_bytes // KIB}kB"
        file = f"{directory}/nr_hugepages"
        missing = pages if free is None else pages - free
        total = _count_pool_pages(host, node, page_bytes)
        count_text = f"$(( $(cat {file}) + {missing} ))" if total is None else str(total + missing)
        commands.append(f"echo {count_text} > {file}")
    lines: tuple[str, ...] = ()
    if commands:
        lines = (
            "Reserve before the VM starts, as root, and check: the kernel reserves fewer if "
            "memory is fragmented, without an error. A reboot ends it: the kernel parameters below "
            "reserve them at every boot.",
        )
    elif rows:
        lines = ("Enough huge pages are free; nothing to reserve.",)
    table = Table(heads=("node", "page size", "pages needed", "free now"), rows=tuple(rows))
    return _make_section("Huge pages", lines, table if rows else None, tuple(commands))


def _build_kernel_parameters(plan: Plan, host: Host | None) -> Section:
    """Kernel parameters for what the plan needs from every boot on: huge pages, and CPUs without
    the host's own work.

    Source: Linux Documentation/admin-guide/kernel-parameters.txt (hugepages=NODE:COUNT since 5.16,
    isolcpus=, nohz_full=, rcu_nocbs=, irqaffinity=).
    """
    pools: dict[int, list[str]] = {}
    for node, page_bytes, pages, free in plan.page_reservations:
        total = _count_pool_pages(host, node, page_bytes)
        if total is not None:
            pages = total + max(0, pages - (free or 0))
        pools.setdefault(page_bytes, []).append(f"{node}:{pages}")
    parameters = [
        f"hugepagesz={page_bytes // KIB}K hugepages={','.join(pools[page_bytes])}"
        for page_bytes in sorted(pools, reverse=True)  # small pages fragment memory
    ]
    pus = CpuSet.union(plan.vcpu_pins)
    has_kernel = runs_qemu(plan.kept_of)
    if host is not None and pus and plan.layout.pinning is not Pinning.NODE and has_kernel:
        # Whatever runs on an idle sibling slows the vCPU of that core.
        siblings = CpuSet.union(host.core_at[pu].pus for pu in pus if pu in host.core_at)
        threads = CpuSet.union([plan.vm.emulator_pus or CpuSet(), *plan.iothread_pus])
        pus |= siblings - threads
        pus |= CpuSet(pu.index for pu in host.pus if pu.isolated)
        host_pus = CpuSet(pu.index for pu in host.pus if pu.online) - pus
        isolated = f"isolcpus=managed_irq,domain,{pus} nohz_full={pus} rcu_nocbs={pus}"
        parameters += [f"{isolated} irqaffinity={host_pus}"] if host_pus else []
    lines = (
        "For the bootloader's kernel command line, if the VM keeps these CPUs; "
        "hugepages= by node needs Linux 5.16:",
    )
    return _make_section("Kernel parameters", lines if parameters else (), commands=parameters)


def _count_pool_pages(host: Host | None, index: NodeIndex, page_bytes: int) -> int | None:
    """Return the pages of that size in the node's pool; None if unknown."""
    node = None if host is None else host.find_node(index)
    if node is None:
        return None
    return next((p.total_pages for p in node.page_pools if p.page_bytes == page_bytes), None)


def _format_apertures(plan: Plan) -> Section:
    aperture = plan.aperture
    if aperture is None:
        return _make_section("Address space and locked memory")
    lines: list[str] = []
    if aperture.pcihole64_bytes is not None:
        lines.append(f"64-bit PCI window (pcihole64): {format_bytes(aperture.pcihole64_bytes)}.")
    if aperture.physical_address_bits is not None:
        lines.append(f"Physical address bits in the guest: {aperture.physical_address_bits}.")
    if aperture.firmware_mmio64_mib is not None:
        window = aperture.firmware_mmio64_mib * MIB
        lines.append(f"OVMF's 64-bit MMIO window: {format_bytes(window)}.")
    lines.append(
        f"Locked memory (memlock) that QEMU needs: {format_limit(aperture.memlock_bytes)}."
    )
    if aperture.dma_map_entries:
        lines.append(
            f"Entries in the IOMMU's DMA map: at most {aperture.dma_map_entries:,}. The kernel "
            "makes them when the VM starts; larger pages need fewer."
        )
    return _make_section("Address space and locked memory", tuple(lines))


def _make_section(
    heading: str,
    lines: Sequence[str] = (),
    table: Table | None = None,
    commands: Sequence[str] = (),
) -> Section:
    """Return sentences, then a table, then commands to run as root; empty parts are omitted."""
    parts: list[Part] = [
        Text(line.lstrip(" "), indent=len(line) - len(line.lstrip(" "))) for line in lines
    ]
    if table is not None and table.rows:
        parts.append(table)
    if commands:
        parts.append(Commands(tuple(commands)))
    return Section(heading, tuple(parts))


_WORDS = {
    "vcpus_beyond_cores": "vCPUs without a whole core",
    "device_class": "distance from the VM's packages to its GPUs and NICs",
    "nodes_spanned": "nodes",
    "minus_nodes_spanned": "nodes, the more the better",
    "node_distance": "distance between the chosen nodes",
    "distance_sum": "sum of the distances between the chosen nodes",
    "packages_spanned": "packages",
    "gpus_away_from_home": "GPUs away from their own node",
    "device_distance": "sum of the distances from the devices to the VM's cores",
    "gpu_sets_lost": "GPU sets that later VMs lose; without GPUs: nodes with GPUs",
    "unevenness": "evenness of the split over nodes, a sum of squares",
    "unisolated_cores": "cores outside isolcpus and nohz_full",
    "llcs_spanned": "LLCs",
    "pages_to_reserve": "huge pages to reserve",
    "guest_sockets": "sockets of the guest",
    "balance_cores": "free whole cores before this VM",
    "balance_memory": "free memory before this VM",
    "nodes": "node numbers, as a tie-break",
    "split": "cores on each node, as a tie-break",
    "gpus": "GPU numbers, as a tie-break",
}


def format_term(name: str) -> str:
    """Return the unit of a term; an unknown term by its own name."""
    return _WORDS.get(name) or name.replace("_", " ")


def term_value(name: str, value: int | tuple[int, ...] | None) -> str:
    """Format the value of a term; node numbers as ranges, splits (stored negated) in parts.

    >>> term_value("balance_memory", -(1 << 30)), term_value("split", (-4, -2)), term_value("x", 3)
    ('1 GiB', '4, 2', '3')
    """
    if value is None:
        return "-"
    if isinstance(value, tuple):
        if min(value, default=0) >= 0:
            return str(CpuSet(value)) or "none"
        return ", ".join(str(abs(part)) for part in value)
    if name == "balance_memory":
        return format_bytes(abs(value))
    return str(abs(value) if name in ("balance_cores", "minus_nodes_spanned") else value)


_Key = tuple[Any, ...]
_Counts = Counter[tuple[str, ...]]
_OTHER = "other"
_SECTION_OF = {
    **{name: name for name in ("cputune", "cpu", "numatune")},
    **dict.fromkeys(("memoryBacking", "memory", "currentMemory"), "memory"),
    **{name: f"{name}s" for name in ("controller", "hostdev")},
}
_COUNTED = ("guest node", "GPU", "device")
_TAINTS = "qemu:commandline (libvirt marks it tainted)"
_PER_NODE = "for each guest node"
_HANG = 25  # behind section, lines added, lines removed


def count_line_changes(before: bytes, after: bytes) -> tuple[int, int]:
    """Return the lines that a change adds and removes, regardless of position."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return (new - old).total(), (old - new).total()


def build_change_doc(
    name: str, before: bytes, after: bytes, gpus: frozenset[Bdf] = frozenset()
) -> Doc:
    """Describe each section in a line: lines added and removed, elements. gpus: of the host."""
    old, new = (open_domain(xml, name) for xml in (before, after))
    added, removed = _count_changes(_list_lines(old), _list_lines(new), size=1)
    new_parts, old_parts = _count_changes(_list_parts(old, gpus), _list_parts(new, gpus), size=2)
    head = f"change: {plural(added.total(), 'line')} added, {removed.total()} removed"
    texts = [Text(f"{head} in the definition of {name} (all: --diff)", hang=2)]
    sections = {key for (key,) in (*added, *removed)}
    for section in sorted(sections, key=lambda s: (s == _OTHER, -added[(s,)], s)):
        # Removed elements are named only if nothing replaces them.
        counts = new_parts if any(s == section for s, _ in new_parts) else old_parts
        parts = [(label, count) for (s, label), count in counts.items() if s == section]
        parts.sort(key=lambda part: part[1] == 1 or part[0] == _PER_NODE)
        text = ", ".join(_format_part(*part) for part in parts)
        text += " removed" if counts is old_parts and text else ""
        plus, minus = added[(section,)], removed[(section,)]
        line = f"  {section:<12}{f'+{plus}' if plus else '':>5}{f'-{minus}' if minus else '':>4}"
        texts.append(Text(f"{line}  {text}".rstrip(), hang=_HANG))
    return Doc("", tuple(texts))


def _count_changes(
    old: Iterator[_Key], new: Iterator[_Key], *, size: int
) -> tuple[_Counts, _Counts]:
    """Count what each side has more than the other, by the first fields of the keys."""
    before, after = Counter(old), Counter(new)
    added, removed = _Counts(), _Counts()
    for counts, changes in ((after - before, added), (before - after, removed)):
        for key, count in counts.items():
            changes[key[:size]] += count
    return added, removed


def _list_sections(document: Document) -> Iterator[tuple[str, Element]]:
    """Yield (section, element) of each child of <domain>, and of each device."""
    for child in document.root.children:
        for element in child.children if child.name == "devices" else (child,):
            yield _SECTION_OF.get(element.name, _OTHER), element


def _list_lines(document: Document) -> Iterator[tuple[str, bytes]]:
    lines = document.text.split(b"\n")
    sections = [_OTHER] * len(lines)
    for section, element in _list_sections(document):
        count = document.text.count(b"\n", element.start, element.end) + 1
        sections[element.line - 1 : element.line - 1 + count] = [section] * count
    return zip(sections, lines, strict=True)


def _list_parts(document: Document, gpus: frozenset[Bdf]) -> Iterator[tuple[str, str, object]]:
    """Yield (section, label, content) of the elements that a change names."""
    of_gpus = {element.start for bdf, element in list_hostdev_elements(document) if bdf in gpus}
    for section, element in _list_sections(document):
        is_whole = section in ("controllers", "hostdevs", _OTHER) or not element.children
        for child in (element,) if is_whole else element.children:
            for part in child.children if child.name == "numa" else (child,):
                yield section, _label(section, part, part.start in of_gpus), normalize(part)


def _label(section: str, element: Element, is_gpu: bool) -> str:
    if section == "controllers":
        has_hole = element.child("pcihole64") is not None
        return "pcihole64" if has_hole else element.get("model") or element.get("type") or "pci"
    if section == "hostdevs":
        return "GPU" if is_gpu else "device"
    if section == "numatune":
        return _PER_NODE if element.name == "memnode" else element.get("mode") or "strict"
    if element.name == "cell":
        return "guest node"
    return _TAINTS if element.tag == "qemu:commandline" else element.tag


def _format_part(label: str, count: int) -> str:
    if label in _COUNTED:
        return plural(count, label)
    return label if count == 1 or label == _PER_NODE else f"{count} {label}"
