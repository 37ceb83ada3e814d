"""TargetFile: a hypervisor's file, read back, against the plan that it was written for."""

from collections import Counter
from collections.abc import Iterator

from homenode.cpuset import CpuSet
from homenode.findings import Finding, Findings, Severity, in_order
from homenode.plan.model import Plan, PlannedCell
from homenode.targets import incus
from homenode.targets.script import pins_in
from homenode.targets.target import (
    FEATURE_WORDS,
    CellFact,
    Feature,
    Level,
    Rendering,
    VmFacts,
    features_of,
    target_named,
)
from homenode.targets.vm_file import VmFile, on_host
from homenode.topology import Host
from homenode.units import format_bytes
from homenode.vm.layout import GuestCells
from homenode.wording import printable

_AGAIN = "write the file again: homenode plan --target, with the same options"


def verify_target(
    content: bytes,
    source: str,
    target: str,
    plan: Plan,
    *,
    host: Host | None = None,
    hook: bytes | None = None,
) -> Findings:
    """What in the file differs from the plan, the worst first.

    host: without it, what only follows on a host is not compared. hook: of Proxmox, the script that
    pins. What the target cannot express is given of, and not compared. Raises ParseError.
    """
    module = target_named(target)
    facts = module.read_facts(content, source)
    if target == "incus" and host is not None:
        facts = incus.with_host(facts, host)
    support = module.SUPPORT
    asked = features_of(plan)
    lost = {feature for feature in asked if support[feature].level is Level.LOST}
    found = list(_differences(facts, plan, lost, target, source, host))
    written = _written_again(content, source, target, plan, host)
    if target == "proxmox":
        found += _hook(hook, plan, source, written)
    if not found and written is not None:
        found += _missing_lines(content, written.document, source)
    found += [
        Finding(
            id="target-lost",
            severity=Severity.INFO,
            subject=FEATURE_WORDS[feature],
            expected=f"{module.TITLE} to say it",
            observed=support[feature].how,
            cost=support[feature].loses,
            source=source,
        )
        for feature in Feature
        if feature in lost
    ]
    return Findings(
        (f"{source}: {module.TITLE} against plan of layout {plan.layout.name}",), in_order(found)
    )


def _written_again(
    content: bytes, source: str, target: str, plan: Plan, host: Host | None
) -> Rendering | None:
    """The file with the plan in it; None where what is written depends on a host that is not known,
    or where the plan came with another document's PCI addresses."""
    if host is None and target in ("openstack", "incus"):
        return None
    module = target_named(target)
    vm = VmFile(target, module.read_guest(content, source), content, source)
    vm = vm if host is None else on_host(vm, host)
    own = {controller.index for controller in plan.controllers}
    elsewhere = [d for d in plan.devices if d.address is not None and d.address.bus not in own]
    if elsewhere:
        return None
    return module.render(plan, vm.guest, host, content, source)


def _missing_lines(content: bytes, written: bytes, source: str) -> Iterator[Finding]:
    """Lines that the plan would write and the file does not have. Other lines are the user's."""
    there = Counter(line.strip() for line in content.splitlines())
    wanted = [line.strip() for line in written.splitlines()]
    for line in wanted:
        if line and not line.startswith(b"#") and not there[line]:
            text = printable(line.decode("utf-8", "replace"))
            yield _differs("line of the plan", text, "no such line", source)
        there[line] -= 1


def _differs(subject: str, expected: object, observed: object, source: str) -> Finding:
    return Finding(
        id="plan-target",
        severity=Severity.CRITICAL,
        subject=subject,
        expected=str(expected),
        observed=str(observed),
        fix=_AGAIN,
        source=source,
    )


def _differences(
    facts: VmFacts,
    plan: Plan,
    lost: set[Feature],
    target: str,
    source: str,
    host: Host | None,
) -> Iterator[Finding]:
    if facts.vcpus != plan.vcpus:
        yield _differs("vCPUs", plan.vcpus, facts.vcpus, source)
    if facts.memory_bytes != plan.memory_bytes:
        found = "none" if facts.memory_bytes is None else format_bytes(facts.memory_bytes)
        yield _differs("memory", format_bytes(plan.memory_bytes), found, source)
    if plan.topology is not None and Feature.TOPOLOGY not in lost and facts.topology is not None:
        wanted = tuple(plan.topology)
        if Feature.DIES in lost:
            wanted = (wanted[0], 1, wanted[1] * wanted[2], wanted[3])
        if facts.topology != wanted and target != "incus":
            yield _differs("sockets, dies, cores, threads", wanted, facts.topology, source)
    elif plan.topology is not None and Feature.TOPOLOGY not in lost and target != "incus":
        yield _differs("sockets, dies, cores, threads", tuple(plan.topology), "none", source)
    if plan.page_bytes is not None and Feature.HUGE_PAGES not in lost:
        same = facts.page_bytes == plan.page_bytes or (target == "incus" and facts.page_bytes == 0)
        if not same:
            yield _differs("huge pages", plan.page_bytes, facts.page_bytes, source)
    if target != "incus" or host is not None:
        yield from _cells(facts, plan, lost, target, source)
    yield from _pins(facts, plan, target, source)
    yield from _devices(facts, plan, lost, target, source)
    if plan.iommu_needed and Feature.IOMMU not in lost and not facts.has_iommu:
        yield _differs("guest IOMMU", "one", "none", source)


def _cells(
    facts: VmFacts, plan: Plan, lost: set[Feature], target: str, source: str
) -> Iterator[Finding]:
    if plan.layout.cells is GuestCells.FLAT:
        several = len([cell for cell in facts.cells if cell.vcpus]) > 1
        if several and target == "incus":
            yield Finding(
                id="target-cells-added",
                severity=Severity.WARNING,
                subject="guest cells",
                expected="a flat guest",
                observed=f"{len(facts.cells)} cells, which Incus makes of its PUs' nodes",
                cost="programs see nodes that the layout was to hide",
                fix="plan with --layout pin-numa, or --max-nodes 1",
                source=source,
            )
        elif several:
            yield _differs("guest cells", "a flat guest", len(facts.cells), source)
        if (
            plan.memory_mode is not None
            and not several
            and facts.cells
            and facts.cells[0].host_nodes is not None
        ):
            nodes = CpuSet(plan.memory_nodes)
            if facts.cells[0].host_nodes != nodes:
                yield _differs("host nodes", nodes, facts.cells[0].host_nodes, source)
        return
    planned = [c for c in plan.cells if c.vcpus or c.memory_bytes or Feature.INITIATORS not in lost]
    if len(facts.cells) != len(planned):
        yield _differs("guest cells", len(planned), len(facts.cells), source)
        return
    for cell, fact in zip(planned, facts.cells, strict=True):
        yield from _cell(cell, fact, plan, lost, target, source)


def _cell(
    cell: PlannedCell, fact: CellFact, plan: Plan, lost: set[Feature], target: str, source: str
) -> Iterator[Finding]:
    where = f"cell {cell.id}"
    if fact.vcpus != cell.vcpus:
        yield _differs(f"{where}: vCPUs", cell.vcpus or "none", fact.vcpus or "none", source)
    if (fact.memory_bytes or 0) != cell.memory_bytes:
        wanted = format_bytes(cell.memory_bytes)
        yield _differs(f"{where}: memory", wanted, format_bytes(fact.memory_bytes or 0), source)
    # OpenStack's nodes are Nova's choice, and a flavor does not name them.
    if plan.memory_mode is not None and target != "openstack" and cell.memory_bytes:
        if fact.host_nodes != CpuSet(cell.host_nodes):
            yield _differs(f"{where}: host nodes", CpuSet(cell.host_nodes), fact.host_nodes, source)
        if Feature.MEMORY_MODE not in lost and fact.mode not in (None, str(plan.memory_mode)):
            yield _differs(f"{where}: memory mode", plan.memory_mode, fact.mode, source)
    distances = cell.distances
    if Feature.INITIATORS in lost:
        distances = distances[: len(fact.distances)]
    if len(plan.cells) > 1 and Feature.DISTANCES not in lost and fact.distances != distances:
        yield _differs(f"{where}: distances", distances, fact.distances or "none", source)


def _pins(facts: VmFacts, plan: Plan, target: str, source: str) -> Iterator[Finding]:
    if target in ("proxmox", "openstack"):
        return  # a hook script, or Nova
    if len(plan.vcpu_pins) != len(facts.vcpu_pins):
        yield _differs("pinned vCPUs", len(plan.vcpu_pins), len(facts.vcpu_pins), source)
        return
    wrong = [
        f"vCPU {i}: {wanted} and {found}"
        for i, (wanted, found) in enumerate(zip(plan.vcpu_pins, facts.vcpu_pins, strict=True))
        if wanted != found
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        yield _differs("PUs of vCPUs", "those of the plan", f"{'; '.join(wrong[:3])}{more}", source)
    has_emulator = target == "qemu" or (
        target == "cloud-hypervisor" and facts.emulator_pus is not None
    )
    if has_emulator and facts.emulator_pus != plan.emulator_pus:
        yield _differs("emulator's PUs", plan.emulator_pus, facts.emulator_pus, source)


def _hook(
    hook: bytes | None, plan: Plan, source: str, written: Rendering | None
) -> Iterator[Finding]:
    """The hook script of Proxmox: it has the pins of single vCPUs, and binds devices."""
    if not plan.vcpu_pins:
        return
    if hook is None:
        yield Finding(
            id="target-hook-missing",
            severity=Severity.WARNING,
            subject="hook script",
            expected="the pins of single vCPUs",
            observed="no hook script",
            cost="vCPUs float over the VM's PUs",
            fix="keep the file *.hook.sh with the configuration",
            source=source,
        )
        return
    vcpus, emulator, _ = pins_in(hook.decode("utf-8", "replace"))
    if vcpus != plan.vcpu_pins:
        yield _differs("hook script: PUs of vCPUs", "those of the plan", "others", source)
    if emulator != plan.emulator_pus:
        yield _differs("hook script: emulator's PUs", plan.emulator_pus, emulator, source)
    planned = None if written is None else dict(written.companions).get(".hook.sh")
    if vcpus == plan.vcpu_pins and emulator == plan.emulator_pus and planned is not None:
        yield from _missing_lines(hook, planned, f"{source}: hook script")


def _devices(
    facts: VmFacts, plan: Plan, lost: set[Feature], target: str, source: str
) -> Iterator[Finding]:
    if target == "openstack":
        return  # a flavor names kinds of device
    found = dict(facts.devices)
    names = {device.bdf: device.uuid or device.bdf for device in plan.devices}
    for device in plan.devices:
        name = names[device.bdf]
        if name not in found:
            yield _differs(f"device {name}", "passed through", "not there", source)
        elif Feature.DEVICE_CELLS not in lost and found[name] != device.cell:
            shown = "none" if found[name] is None else f"cell {found[name]}"
            wanted = "none" if device.cell is None else f"cell {device.cell}"
            yield _differs(f"device {name}: guest cell", wanted, shown, source)
    surplus = set(found) - set(names.values())
    if surplus:
        more = ", ".join(sorted(map(str, surplus)))
        yield _differs("devices", "those of the plan alone", f"{more} as well", source)
    if Feature.INITIATORS not in lost:
        cells = dict(facts.initiators)
        for device in plan.devices:
            planned = CpuSet(device.initiator_cells)
            if planned and cells.get(device.bdf) != planned:
                there = cells.get(device.bdf, "none")
                yield _differs(f"device {device.bdf}: own memory", planned, there, source)
