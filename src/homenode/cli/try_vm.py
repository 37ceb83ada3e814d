"""homenode try: what is wrong with a VM of libvirt, what a plan would change, and a trial. [I/O]

Nothing of its own: the findings are doctor's, the plan and the change apply's, the answer trial's.
"""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from homenode.change import journal
from homenode.change.apply.definition import preview_definition
from homenode.change.apply.obstacles import Obstacle
from homenode.check.doctor.diagnosis import diagnose
from homenode.cli.apply import tuned_together
from homenode.cli.arguments.measure import SequenceArguments, SuiteArguments, Until
from homenode.cli.arguments.trial import TrialArguments, TryArguments
from homenode.cli.bench_options import check as check_options
from homenode.cli.terminal import check_can_ask, confirm, console, note, print_json
from homenode.cli.trial import begin_trial
from homenode.doc import Doc, Text
from homenode.errors import FINDINGS, UsageError
from homenode.findings import Finding, Findings
from homenode.formats import encode
from homenode.machine.pci import DeviceKind
from homenode.objective import Objective
from homenode.plan.auto import suggested_objective
from homenode.show.explain import explain, finding_lines
from homenode.show.findings_text import findings_text
from homenode.show.trial_text import duration_text
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.hypervisor.connection import with_connection
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.layout import PRESETS, layout_text
from homenode.vm.plan_options import AUTO, PlanOptions
from homenode.vm.sources import load_host
from homenode.wording import command_line, plural

if TYPE_CHECKING:
    from homenode.machine.topology import Host
    from homenode.plan.tuning import Tuning
    from homenode.vm.domain.document import Document

MOST_FINDINGS = 5


class TryAnswer(Struct, frozen=True, kw_only=True):
    """Of try. findings: what is critical or a warning, the worst first. layout: that auto
    suggests. lines_added, lines_removed: of the VM's document under it. layouts, objective: of the
    trial."""

    domain: str
    running: bool
    findings: tuple[Finding, ...]
    layout: str
    lines_added: int
    lines_removed: int
    obstacles: tuple[Obstacle, ...]
    objective: Objective
    layouts: tuple[str, ...]


def try_vm(asked: TryArguments) -> None:
    """Show all of it, ask, and run the trial, whose last line is the answer."""
    if asked.json and not asked.dry_run:
        raise UsageError("--json: expected --dry-run as well: the trial prints for people")
    virsh = Virsh(asked.connect)
    state = virsh.domain(asked.name)
    check_can_ask(asked=not (asked.yes or asked.dry_run))
    if state.is_active and not asked.dry_run:
        raise UsageError(
            f"{state.name}: expected it shut off, found it {state.state}",
            hint="--dry-run looks at it as it runs; to measure, shut it down first",
        )
    original = virsh.definition(state.uuid)
    document = open_domain(original, state.name)
    host = load_host(asked.host)
    found = _wrong_with(host, document)
    if not asked.json:
        _print_findings(found, state.argument, asked.connect)
    options = PlanOptions(layout=AUTO, objective=asked.objective)
    (tuning,) = tuned_together({state.name: original}, options, host, (), (), quiet=True)
    would = preview_definition(virsh, state.uuid, tuning.document, original, journal.default_root())
    added, removed = _changed_lines(original, tuning.document)
    objective = asked.objective or suggested_objective(vm_of(document), options, host)
    layouts = _layouts(asked, document, host, tuning)
    trial = _trial(asked, objective, layouts)
    if asked.json:
        answer = TryAnswer(
            domain=state.name,
            running=state.is_active,
            findings=found,
            layout=layout_text(tuning.plan.layout),
            lines_added=added,
            lines_removed=removed,
            obstacles=would.obstacles,
            objective=objective,
            layouts=layouts,
        )
        print_json(encode("try", answer))
        return
    explained = explain(tuning.plan, tuning.host or host)
    warned = (Text(one) for one in finding_lines(tuning.plan, ("critical", "warning")))
    shows = command_line(*with_connection(asked.connect, "homenode", "apply", state.argument))
    change = f"It adds {plural(added, 'line')} to the definition and removes {removed}; all of it:"
    console().print(Doc(explained.title, (*explained.parts[:1], *warned, Text(change))))
    console().print(Doc("", (Text(f"  {shows} --dry-run"),)), soft_wrap=True)
    for obstacle in would.obstacles:
        note(f"apply would refuse: {obstacle}")
    if state.is_active:
        note(f"{state.name} runs: shut it down, then the same command without --dry-run measures")
        return
    begin_trial(trial, lambda: _agreed(asked, layouts))


def _wrong_with(host: "Host", document: "Document") -> tuple[Finding, ...]:
    return tuple(one for one in diagnose(host, document).findings if one.is_bad)


def _print_findings(found: Sequence[Finding], argument: str, connect: str) -> None:
    if not found:
        console().print(Doc("", (Text("Nothing is wrong with the host and the VM's document."),)))
        return
    shown = tuple(found[:MOST_FINDINGS])
    console().print(findings_text(Findings(checked=(), findings=shown), with_sources=False))
    if len(found) > len(shown):
        dump = command_line("virsh", "-c", connect, "dumpxml", "--inactive", argument)
        more = f"{len(found) - len(shown)} more: {dump} > vm.xml; homenode doctor vm.xml"
        console().print(Doc("", (Text(more),)), soft_wrap=True)


def _changed_lines(before: bytes, after: bytes) -> tuple[int, int]:
    """Added, removed."""
    first, second = (one.decode("utf-8", "replace").splitlines() for one in (before, after))
    signs = [line[:1] for line in list(difflib.unified_diff(first, second, n=0))[2:]]
    return signs.count("+"), signs.count("-")


def _layouts(
    asked: TryArguments, document: "Document", host: "Host", tuning: "Tuning"
) -> tuple[str, ...]:
    """As the user says; else as it is now, the plan's, and what shows the guest more."""
    if asked.layouts is not None:
        return tuple(asked.layouts.split(","))
    planned = (name for name, preset in PRESETS.items() if preset == tuning.plan.layout)
    names = ["default", *planned, "pin-bound"]
    vm = vm_of(document)
    if sum(bool(node.pus) for node in host.nodes) > 1:
        names.append("pin-numa")
        gpus = {gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)}
        if gpus & {one.bdf for one in vm.hostdevs} and (vm.is_q35 or vm.is_virt):
            names.append("pin-numa-pci")
    return tuple(dict.fromkeys(names))


def _trial(asked: TryArguments, objective: Objective, layouts: Sequence[str]) -> TrialArguments:
    made = TrialArguments(
        name=asked.name,
        suite=SuiteArguments(quick=not asked.long, tests=asked.tests),
        access=asked.access,
        layouts=",".join(layouts),
        as_copy=not asked.in_place,
        in_place=asked.in_place,
        results=asked.results,
        connect=asked.connect,
        host=asked.host,
        dry_run=asked.dry_run,
        sequence=SequenceArguments(until=Until.DECIDED, within=asked.within, objective=objective),
    )
    check_options(made)
    return made


def _agreed(asked: TryArguments, layouts: Sequence[str]) -> bool:
    itself = "the VM itself (what its guest writes stays)" if asked.in_place else "a copy of it"
    limit = duration_text(asked.within)
    question = f"Boot {itself} in {plural(len(layouts), 'layout')}, for at most {limit}?"
    if not asked.yes and not confirm(question):
        note("nothing was changed")
        raise SystemExit(FINDINGS)
    return True
