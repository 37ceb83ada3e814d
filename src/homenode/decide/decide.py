"""Decide: the one answer to "which layout": results, a machine's health and an objective in, a
verdict out.

Health first: a critical finding about links or pins stops any recommendation. Then the strongest
results that can tell: measured, provisional, published; of this machine before others of its kind.
Then the table of plan/auto. What stronger results could not tell is said with the answer. Memory is
bound to the chosen nodes in every answer.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from homenode.decide.alternative import Alternative, alternatives
from homenode.decide.comparison import EvidenceLevel
from homenode.decide.health import figure_findings
from homenode.decide.machine_facts import (
    MachineFacts,
    facts_of_host,
    machines_in,
    of_host,
    of_no_machine,
)
from homenode.decide.statement import ground_of, sentence_of
from homenode.decide.summary import headline, part_in, series_of
from homenode.decide.verdict import (
    Reason,
    ReasonId,
    Verdict,
    memory_mode_of,
    verdict,
    with_memory_bound,
)
from homenode.findings import Doubt, Finding, Severity
from homenode.machine.topology import Host
from homenode.measure.results.model import UNKNOWN_SWITCHES, Origin, Run
from homenode.measure.results.vantage import Vantage
from homenode.metrics import METRICS
from homenode.objective import Objective
from homenode.plan.auto import Choose, LayoutChoice, LayoutInputs, layout_for, needed_layout
from homenode.vm.layout import PRESETS, GuestPcie, Siblings


def decide(
    runs: Sequence[Run],
    machine: MachineFacts,
    objective: Objective,
    inputs: LayoutInputs | None = None,
) -> Verdict:
    """The answer for an objective on a machine. inputs: the machine's, with those of the VM."""
    (found,) = decide_all(runs, machine, (objective,), inputs)
    return found


def decide_all(
    runs: Sequence[Run],
    machine: MachineFacts,
    objectives: Sequence[Objective] = tuple(Objective),
    inputs: LayoutInputs | None = None,
    *,
    known: Sequence[Alternative] = (),
) -> tuple[Verdict, ...]:
    """The answers for several objectives.

    known: alternatives that the caller has made of the machine's runs; their series are most of the
    work.
    """
    inputs = inputs or machine.inputs
    own = _of_guests(_own(runs, machine))
    here = known if _are_of(known, own) else alternatives(own)
    like = {host: alternatives(those) for host, those in _like(runs, machine).items()}
    findings = (*machine.findings, *figure_findings(own))
    critical = tuple(one for one in findings if one.severity is Severity.CRITICAL)
    strangers = of_no_machine(runs, machine)
    found = []
    for objective in objectives:
        made = _decided(machine, objective, (here, like), critical, inputs)
        made = _with_needs(made, inputs)
        made = replace(made, doubts=(*made.doubts, *strangers))
        found.append(_with_answer(_with_unseen_links(made, machine)))
    return tuple(found)


def _with_unseen_links(found: Verdict, machine: MachineFacts) -> Verdict:
    """Figures of GPUs of a machine whose links no one has looked at may be those of a sick one."""
    if machine.nodes is not None or found.objective not in _OF_GPUS or found.choice is None:
        return found
    doubt = Doubt(
        id="links-unseen",
        subject=machine.name,
        detail="the links of its GPUs were not looked at",
        blocks=False,
        cause="the runs do not bring their host along",
        remedy="give --host: a link that trained low makes every layout slow",
    )
    return replace(found, doubts=(*found.doubts, doubt))


def _decided(
    machine: MachineFacts,
    objective: Objective,
    measured: tuple[Sequence[Alternative], Mapping[str, Sequence[Alternative]]],
    critical: tuple[Finding, ...],
    inputs: LayoutInputs,
) -> Verdict:
    """measured: alternatives of this machine, and of each other machine of its kind."""
    if critical:
        reason = Reason(id=ReasonId.HEALTH)
        found = Verdict(
            objective=objective, system=machine.name, reasons=(reason,), findings=critical
        )
    else:
        found = _strongest(machine, objective, *measured, inputs)
        if found.layout is None and found.choice is not None:
            found = _with_layout(found, machine, inputs)
    return found


def _with_needs(found: Verdict, inputs: LayoutInputs) -> Verdict:
    """The verdict with the layout that the VM's memory or devices need. What was measured here has
    shown that its devices work."""
    layout = found.layout
    if layout is None or (found.here and not inputs.private_memory):
        return found
    if "pin-numa-pci" in found.avoid:
        inputs = replace(inputs, has_pairs=False)
    needed = needed_layout(layout, found.objective, inputs)
    if needed is None:
        return found
    rule = Reason(id=ReasonId.RULE, alternative=layout, detail=needed[1])
    reasons = (*found.reasons, rule)
    return replace(found, layout=needed[0], reasons=reasons, floating=False, measure_next=None)


def _with_answer(found: Verdict) -> Verdict:
    found = with_memory_bound(found)
    exposes = found.layout is not None and PRESETS[found.layout].siblings is Siblings.EXPOSED
    return replace(found, keep_vcpus=exposes and found.objective is Objective.DENSITY)


def by_results(runs: Sequence[Run]) -> Choose:
    """The choice of a layout by results of the host; by the table where they decide nothing."""

    def choose(host: Host, objective: Objective, inputs: LayoutInputs) -> LayoutChoice:
        made = decide(
            of_host(runs, host),
            facts_of_host(host),
            objective,
            inputs,
        )
        caveats = tuple(f"{doubt.detail}; {doubt.remedy}." for doubt in made.doubts)
        if made.layout is None or made.level is EvidenceLevel.REASONED:
            silent = made.passed if made.layout is not None else (sentence_of(made),)
            silent = tuple(f"The results do not decide: {one}." for one in silent)
            return replace(layout_for(objective, inputs), caveats=(*silent, *caveats))
        return LayoutChoice(
            layout=made.layout,
            reason=f"{ground_of(made)}: {sentence_of(made)}",
            keep_vcpus=made.keep_vcpus,
            floating=made.floating,
            caveats=caveats,
        )

    return choose


def decide_for_machines(
    runs: Sequence[Run], objectives: Sequence[Objective], here: Host | None = None
) -> tuple[Verdict, ...]:
    """The answers for every machine that runs are of.

    here: this machine. Left out are objectives that no figure is of, where the machine's topology
    is unknown as well.
    """
    return tuple(
        one
        for machine in machines_in(runs, here)
        for one in decide_all(runs, machine, objectives)
        if machine.nodes is not None or one.level is not EvidenceLevel.REASONED or one.passed
    )


def left_out(runs: Sequence[Run], objectives: Sequence[Objective]) -> Iterator[str]:
    """Runs of other tools without a layout, and figures that decide for none of these objectives,
    as they are of parts alone."""
    for run in runs:
        name = f"{run.head.system}/{run.head.name}"
        is_foreign = run.head.origin is Origin.IMPORTED and run.head.arrangement is None
        if is_foreign and run.head.switches == UNKNOWN_SWITCHES:
            yield f"{name}: its layout is not known (homenode import --layout NAME=PRESET)"
            continue
        series = series_of([run]) if run.head.origin is not Origin.PUBLISHED else {}
        for metric in METRICS.values():
            part = None if headline(series, metric) else part_in(series, metric)
            if part and not set(objectives).isdisjoint((*metric.primary, *metric.stands_in)):
                yield f"{name}: {metric.title}: {part} alone decides nothing"


def _are_of(known: Sequence[Alternative], runs: Sequence[Run]) -> bool:
    """Whether these are the very runs, not copies."""
    return {id(run) for one in known for run in one.runs} == {id(run) for run in runs}


def _of_guests(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Without runs on the host itself next to those of its guests: bare metal is no choice."""
    guests = tuple(run for run in runs if run.head.vantage is Vantage.GUEST)
    return guests or tuple(runs)


def _own(runs: Sequence[Run], machine: MachineFacts) -> tuple[Run, ...]:
    """Runs of the very machine; where no one named it, of the same folder and kind."""
    if machine.fingerprint is not None:
        return tuple(run for run in runs if run.head.host == machine.fingerprint)
    return tuple(
        run
        for run in runs
        if run.head.host is None
        and (run.head.system, run.head.host_kind) == (machine.results, machine.kind)
    )


def _like(runs: Sequence[Run], machine: MachineFacts) -> dict[str, tuple[Run, ...]]:
    """Runs of other machines of its kind, machine by machine: they are never mixed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        head = run.head
        is_own = machine.fingerprint is not None and head.host == machine.fingerprint
        if head.host_kind is None or head.host_kind != machine.kind or is_own:
            continue
        if head.host is not None:
            found.setdefault(head.host, []).append(run)
    return {host: _of_guests(those) for host, those in found.items()}


def _strongest(
    machine: MachineFacts,
    objective: Objective,
    here: Sequence[Alternative],
    like: Mapping[str, Sequence[Alternative]],
    inputs: LayoutInputs,
) -> Verdict:
    """The verdict of the strongest results that can tell, and what stronger could not."""
    made = [
        *(replace(verdict(machine.name, here, objective), here=True) for _ in here[:1]),
        *(verdict(machine.name, every, objective) for every in like.values()),
    ]
    made = [one for one in made if one.results or one.stopped or one.why(ReasonId.REFUSED)]
    stopped = [
        one for one in made if one.here and (one.stopped or one.why(ReasonId.REFUSED) is not None)
    ]
    if stopped:
        return stopped[0]
    made.sort(key=lambda one: EvidenceLevel.REASONED.rank if one.level is None else one.level.rank)
    stated = [one for one in made if one.choice is not None and _can(one, inputs)]
    silent = [one for one in made if one not in stated]
    best = stated[0] if stated else _reasoned(machine, objective, inputs)
    passed = tuple(f"{one.system}: {sentence_of(one)}" for one in silent)
    nexts = [one.layout for one in stated[1:] if one.layout is not None]
    measure_next = best.measure_next or next((one for one in nexts if _is_new(one, best)), None)
    return replace(best, passed=passed, measure_next=measure_next)


def _is_new(layout: str, best: Verdict) -> bool:
    """Whether weaker evidence names a layout that the stronger has no figures of."""
    return layout not in (best.layout, *best.also, *best.avoid)


def _can(found: Verdict, inputs: LayoutInputs) -> bool:
    layout = found.layout
    return layout is None or inputs.expander_buses or PRESETS[layout].pcie is GuestPcie.KEEP


def _with_layout(found: Verdict, machine: MachineFacts, inputs: LayoutInputs) -> Verdict:
    """A choice that is no layout, with the layout of the table."""
    reasoned = _reasoned(machine, found.objective, inputs)
    reasons = (
        *found.reasons,
        Reason(id=ReasonId.NO_LAYOUT, alternative=reasoned.layout),
        *reasoned.reasons,
    )
    return replace(found, layout=reasoned.layout, reasons=reasons)


_OF_GPUS = frozenset({Objective.MULTI_GPU, Objective.GPU_COPY})


def _reasoned(machine: MachineFacts, objective: Objective, inputs: LayoutInputs) -> Verdict:
    """What the table says where no results do."""
    made = layout_for(objective, inputs)
    measure = objective in _OF_GPUS and machine.nodes != 1 and (machine.gpus or 0) > 0
    measure = measure and inputs.expander_buses and made.layout != "pin-numa-pci"
    return Verdict(
        objective=objective,
        system=machine.name,
        reasons=(Reason(id=ReasonId.RULE, alternative=made.layout, detail=made.reason),),
        level=EvidenceLevel.REASONED,
        choice=made.layout,
        layout=made.layout,
        memory_mode=memory_mode_of(made.layout),
        measure_next="pin-numa-pci" if measure else None,
    )
