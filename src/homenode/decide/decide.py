"""Decide: the one answer to "which layout": evidence, a machine's health and an objective in, a
verdict out.

Health first: a critical finding about links or pins stops any recommendation. Then the strongest
evidence that can tell: measured, provisional, published, reasoned; of this machine before others of
its kind. What stronger evidence could not tell is said with the answer. The evidence decides what
the guest sees; its memory is bound to the chosen nodes in every answer.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from homenode.decide.alternative import Alternative, alternatives
from homenode.decide.comparison import Doubt, EvidenceLevel
from homenode.decide.evidence.model import Derivation, Evidence, Publication, PublishedVerdict
from homenode.decide.health import figure_findings
from homenode.decide.machine_facts import (
    MachineFacts,
    facts_of_host,
    machines_in,
    of_host,
    of_no_machine,
)
from homenode.decide.statement import ground_of, huge_page_advice, sentence_of
from homenode.decide.summary import headline, part_in, series_of
from homenode.decide.verdict import (
    Reason,
    ReasonId,
    SourceVerdict,
    Verdict,
    VerdictDifference,
    memory_mode_of,
    verdict,
    with_memory_bound,
)
from homenode.findings import Finding, Severity
from homenode.machine.topology import Host
from homenode.measure.results.model import UNKNOWN_SWITCHES, Origin, Run
from homenode.measure.results.vantage import Vantage
from homenode.metrics import METRICS, primaries
from homenode.objective import Objective
from homenode.plan.auto import Choose, LayoutChoice, LayoutInputs, layout_for
from homenode.vm.layout import PRESETS, GuestCells, GuestPcie, Siblings


def decide(
    evidence: Evidence,
    machine: MachineFacts,
    objective: Objective,
    *,
    expander_buses: bool = True,
    has_gpus: bool | None = None,
    has_pairs: bool = False,
    private_memory: bool = False,
) -> Verdict:
    """The answer for an objective on a machine.

    expander_buses: the VM's machine type takes them. has_gpus: of the VM, None = as the objective
    suggests. has_pairs: a GPU of it shares a switch with an RDMA NIC of it. private_memory: its
    pages follow no cell's binding. Same input, same verdict.
    """
    (found,) = decide_all(
        evidence,
        machine,
        (objective,),
        expander_buses=expander_buses,
        has_gpus=has_gpus,
        has_pairs=has_pairs,
        private_memory=private_memory,
    )
    return found


def decide_all(
    evidence: Evidence,
    machine: MachineFacts,
    objectives: Sequence[Objective] = tuple(Objective),
    *,
    expander_buses: bool = True,
    has_gpus: bool | None = None,
    has_pairs: bool = False,
    private_memory: bool = False,
    known: Sequence[Alternative] = (),
) -> tuple[Verdict, ...]:
    """The answers for several objectives.

    known: alternatives that the caller has made of the machine's runs; their series are most of the
    work.
    """
    own = _of_guests(_own(evidence.runs, machine))
    here = known if _are_of(known, own) else alternatives(own)
    like = {host: alternatives(runs) for host, runs in _like(evidence.runs, machine).items()}
    findings = (*machine.findings, *figure_findings(own))
    critical = tuple(one for one in findings if one.severity is Severity.CRITICAL)
    found = [
        _decided(evidence, machine, one, (here, like), critical, expander_buses)
        for one in objectives
    ]
    if private_memory:
        found = [without_cells(one, ReasonId.PRIVATE_MEMORY) for one in found]
    elif expander_buses:
        found = [_with_tree(one, machine, has_gpus, has_pairs=has_pairs) for one in found]
    strangers = of_no_machine(evidence.runs, machine)
    found = [replace(one, doubts=(*one.doubts, *strangers)) for one in found]
    found = [_with_unseen_links(one, machine) for one in found]
    return tuple(_with_answer(evidence, machine, one) for one in found)


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
    evidence: Evidence,
    machine: MachineFacts,
    objective: Objective,
    measured: tuple[Sequence[Alternative], Mapping[str, Sequence[Alternative]]],
    critical: tuple[Finding, ...],
    expander_buses: bool,
) -> Verdict:
    """measured: alternatives of this machine, and of each other machine of its kind."""
    if critical:
        reason = Reason(id=ReasonId.HEALTH)
        found = Verdict(
            objective=objective, system=machine.name, reasons=(reason,), findings=critical
        )
    else:
        found = _strongest(evidence, machine, objective, *measured, expander_buses)
        if found.layout is None and found.choice is not None:
            found = _with_layout(found, evidence, machine, expander_buses)
    return found


def _with_tree(
    found: Verdict, machine: MachineFacts, has_gpus: bool | None, *, has_pairs: bool
) -> Verdict:
    """The verdict with a layout that shows the guest where its devices are, where it must know: the
    memory of Grace GPUs has its nodes in the guest, or the guest's driver cannot put it online; and
    NCCL uses a NIC by GPUDirect RDMA below the switch of its GPU. What was measured here has shown
    that it works."""
    layout = found.layout
    if layout is None or found.here or PRESETS[layout].pcie is GuestPcie.MIRRORED:
        return found
    has_gpus = found.objective in _OF_GPUS if has_gpus is None else has_gpus
    if machine.grace_gpus and has_gpus:
        why = ReasonId.INITIATORS
    elif has_pairs and "pin-numa-pci" not in found.avoid:
        why = ReasonId.PAIRS
    else:
        return found
    reasons = (*found.reasons, Reason(id=why, alternative=layout))
    return replace(found, layout="pin-numa-pci", reasons=reasons, floating=False, measure_next=None)


def without_cells(found: Verdict, why: ReasonId) -> Verdict:
    """The verdict with a flat layout, where cells would not be true or cannot be had."""
    layout = found.layout
    if layout is None or PRESETS[layout].cells is GuestCells.FLAT:
        return found
    reasons = (*found.reasons, Reason(id=why, alternative=layout))
    return with_memory_bound(replace(found, layout="pin", reasons=reasons, measure_next=None))


def _with_answer(evidence: Evidence, machine: MachineFacts, found: Verdict) -> Verdict:
    found = with_memory_bound(found)
    exposes = found.layout is not None and PRESETS[found.layout].siblings is Siblings.EXPOSED
    return replace(
        found,
        keep_vcpus=exposes and found.objective is Objective.DENSITY,
        published=tuple(_published_verdicts(evidence, machine, found)),
    )


def by_results(runs: Sequence[Run]) -> Choose:
    """The choice of a layout by results of the host; by the table where they decide nothing."""

    def choose(host: Host, objective: Objective, inputs: LayoutInputs) -> LayoutChoice:
        made = decide(
            Evidence((), of_host(runs, host)),
            facts_of_host(host, ()),
            objective,
            expander_buses=inputs.expander_buses,
            has_gpus=inputs.has_gpus,
            has_pairs=inputs.has_pairs,
            private_memory=inputs.private_memory,
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
    evidence: Evidence,
    hosts: Mapping[str, Host],
    objectives: Sequence[Objective],
    here: Host | None = None,
) -> tuple[Verdict, ...]:
    """The answers for every machine that the evidence's runs are of; without runs, for every
    machine that publications have figures of.

    hosts: descriptions of published machines, by name. here: this machine. Left out are objectives
    that no figure is of, where the machine's topology is unknown as well.
    """
    found = [
        one
        for machine in machines_in(evidence, hosts, here)
        for one in decide_all(evidence, machine, objectives)
        if machine.nodes is not None or one.level is not EvidenceLevel.REASONED or one.passed
    ]
    return tuple(found)


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
    measured = [run for run in runs if run.head.origin is not Origin.PUBLISHED]
    if machine.fingerprint is not None:
        return tuple(run for run in measured if run.head.host == machine.fingerprint)
    return tuple(
        run
        for run in measured
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
        if head.host is not None and head.origin is not Origin.PUBLISHED:
            found.setdefault(head.host, []).append(run)
    return {host: _of_guests(those) for host, those in found.items()}


def _strongest(
    evidence: Evidence,
    machine: MachineFacts,
    objective: Objective,
    here: Sequence[Alternative],
    like: Mapping[str, Sequence[Alternative]],
    expander_buses: bool,
) -> Verdict:
    """The verdict of the strongest evidence that can tell, and what stronger could not."""
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
    printed = list(_published(evidence, machine, objective))
    stated = [
        one for one in (*made, *printed) if one.choice is not None and _can(one, expander_buses)
    ]
    silent = [one for one in (*made, *printed) if one not in stated]
    best = stated[0] if stated else _reasoned(evidence, machine, objective, expander_buses)
    passed = tuple(f"{one.system}: {sentence_of(one)}" for one in silent)
    nexts = [one.layout for one in stated[1:] if one.layout is not None]
    measure_next = best.measure_next or next((one for one in nexts if _is_new(one, best)), None)
    named = {best.layout, measure_next}
    derived = [
        one
        for one in _derivations(evidence, machine, objective)
        if one.favours in named and not {one.favours, one.over} <= _known(best)
    ]
    best = replace(
        best,
        reasons=(
            *best.reasons,
            *(
                Reason(id=ReasonId.COMPUTED, alternative=one.favours, detail=one.text)
                for one in derived
            ),
        ),
        sources=(*best.sources, *(f"{one.id}: {one.method}" for one in derived)),
    )
    if best.huge_pages is None:
        best = replace(best, huge_pages=huge_page_advice(evidence.publications))
    return replace(best, passed=(*best.passed, *passed), measure_next=measure_next)


def _is_new(layout: str, best: Verdict) -> bool:
    """Whether weaker evidence names a layout that the stronger has no figures of."""
    return layout not in (best.layout, *best.also, *best.avoid)


def _known(found: Verdict) -> set[str]:
    """Alternatives that a verdict has figures of."""
    return {one.alternative for one in found.results}


def _can(found: Verdict, expander_buses: bool) -> bool:
    layout = found.layout
    return layout is None or expander_buses or PRESETS[layout].pcie is GuestPcie.AS_IT_WAS


def _with_layout(
    found: Verdict, evidence: Evidence, machine: MachineFacts, expander_buses: bool
) -> Verdict:
    """A choice that is no layout, with the layout that topology suggests."""
    reasoned = _reasoned(evidence, machine, found.objective, expander_buses)
    return replace(
        found,
        layout=reasoned.layout,
        reasons=(
            *found.reasons,
            Reason(id=ReasonId.NO_LAYOUT, alternative=reasoned.layout),
            *reasoned.reasons,
        ),
    )


_OF_GPUS = frozenset({Objective.COLLECTIVE, Objective.DEVICE_TRANSFER})

PRIOR = {
    Objective.COLLECTIVE: "pin",
    Objective.HOST_BANDWIDTH: "pin-numa",
    Objective.LATENCY: "pin-numa",
    Objective.DEVICE_TRANSFER: "pin-numa-pci",
    Objective.THROUGHPUT: "pin",
    Objective.DENSITY: "pin-numa-smt",
}
"""Where no one has measured a machine: what published figures chose on most others."""


def machines_with(evidence: Evidence, objective: Objective, layout: str) -> tuple[str, ...]:
    """Published machines on which the figures choose this layout, or find it no worse."""
    systems = [(one.runs, each.name) for one in evidence.publications for each in one.systems]
    found = [
        (
            name,
            verdict(name, alternatives(run for run in runs if run.head.system == name), objective),
        )
        for runs, name in systems
    ]
    return tuple(name for name, one in found if layout in (one.layout, *one.also))


def _derivations(
    evidence: Evidence, machine: MachineFacts, objective: Objective
) -> tuple[Derivation, ...]:
    """Those that bear on a machine: with one node or one GPU there is nothing to compute."""
    if machine.nodes == 1 or (machine.gpus or 2) < 2:
        return ()
    return tuple(
        one
        for publication in evidence.publications
        for one in publication.derivations
        if one.objective is objective and one.favours is not None
    )


def _reasoned(
    evidence: Evidence, machine: MachineFacts, objective: Objective, expander_buses: bool
) -> Verdict:
    """What topology, others' figures and derivations say: with one node there is nothing to
    mirror."""
    prior = layout = PRIOR[objective]
    orders = list(_derivations(evidence, machine, objective))
    while (order := next((one for one in orders if one.over == layout), None)) is not None:
        orders.remove(order)  # each once: two that contradict each other end here as well
        if order.favours is not None and (
            expander_buses or PRESETS[order.favours].pcie is GuestPcie.AS_IT_WAS
        ):
            layout = order.favours
    machines = ", ".join(machines_with(evidence, objective, layout))
    reasons = (
        [Reason(id=ReasonId.PRIOR, alternative=layout, detail=machines)] if layout == prior else []
    )
    one_node = machine.nodes == 1
    if objective is Objective.DENSITY and not machine.has_siblings:
        layout = "pin"
    elif objective is not Objective.DENSITY and one_node and layout != "pin":
        layout, reasons = "pin", [Reason(id=ReasonId.ONE_NODE)]
    elif PRESETS[layout].pcie is GuestPcie.MIRRORED and not expander_buses:
        layout, reasons = "pin", [Reason(id=ReasonId.NO_EXPANDER_BUS)]
    measure = objective in _OF_GPUS and not one_node and expander_buses and (machine.gpus or 0) > 0
    return Verdict(
        objective=objective,
        system=machine.name,
        reasons=tuple(reasons),
        level=EvidenceLevel.REASONED,
        choice=layout,
        layout=layout,
        memory_mode=memory_mode_of(layout),
        measure_next="pin-numa-pci" if measure and layout != "pin-numa-pci" else None,
    )


def _published(
    evidence: Evidence, machine: MachineFacts, objective: Objective
) -> Iterator[Verdict]:
    """What the figures of publications say of machines of this kind."""
    for publication, name in _systems(evidence, machine):
        every = alternatives(run for run in publication.runs if run.head.system == name)
        made = replace(verdict(name, every, objective), system=machine.name)
        if not (made.results or made.stopped or made.why(ReasonId.REFUSED)):
            continue
        metrics = frozenset(one.metric for one in made.results)
        metrics |= {metric.id for metric in primaries(objective)}
        notes = tuple(
            f"{note.certainty}: {note.text}" + "".join(f" [{line}]" for line in note.arithmetic)
            for note in publication.notes
            if note.metrics and note.is_about(name, metrics)
        )
        yield replace(made, notes=notes)


def _systems(evidence: Evidence, machine: MachineFacts) -> Iterator[tuple[Publication, str]]:
    """Published machines of this one's kind."""
    for publication in evidence.publications:
        for published, name in machine.systems:
            if published == publication.id:
                yield publication, name


def _published_verdicts(
    evidence: Evidence, machine: MachineFacts, ours: Verdict
) -> Iterator[SourceVerdict]:
    """What publications recommend, and why ours differs."""
    for publication, name in _systems(evidence, machine):
        one = _verdict_of(publication, name, ours.objective)
        if one is not None:
            yield _neighbours(publication, one, ours)


def _verdict_of(
    publication: Publication, system: str, objective: Objective
) -> PublishedVerdict | None:
    """The most particular one: of the objective and machine, the objective, the machine."""
    fitting = [
        one
        for one in publication.verdicts
        if one.system in (None, system) and one.objective in (None, objective)
    ]
    return min(fitting, key=lambda one: (one.objective is None, one.system is None), default=None)


def _neighbours(publication: Publication, theirs: PublishedVerdict, ours: Verdict) -> SourceVerdict:
    found = [publication.choice(name) for name in theirs.choices]
    labels = tuple(one.arrangement or one.switches.name for one in found if one is not None)
    agrees = (not labels) if ours.choice is None else bool({ours.choice, ours.layout} & {*labels})
    difference, metric, ratio = None, None, None
    if not agrees:
        difference, metric, ratio = _difference(labels, ours)
    return SourceVerdict(
        publication=publication.id,
        choices=labels,
        quote=theirs.source,
        agrees=agrees,
        difference=difference,
        metric=metric,
        ratio=ratio,
    )


def _difference(
    labels: Sequence[str], ours: Verdict
) -> tuple[VerdictDifference, str | None, float | None]:
    if ours.choice is None:
        return VerdictDifference.HEALTH, None, None
    if not labels or (ours.level is not None and ours.level.rank < EvidenceLevel.PUBLISHED.rank):
        return VerdictDifference.STRONGER, None, None
    for metric in dict.fromkeys(one.metric for one in ours.results):
        results = ours.on(metric)
        own = next((one for one in results if one.alternative == ours.choice), None)
        other = next((one for one in results if one.alternative in labels), None)
        if own is None or other is None:
            continue
        ratio = own.value / other.value
        ratio = 1 / ratio if METRICS[metric].lower_is_better else ratio
        worse = other.alternative in ours.avoid
        return (VerdictDifference.FIGURES if worse else VerdictDifference.NOT_SHOWN), metric, ratio
    return VerdictDifference.NO_FIGURES, None, None
