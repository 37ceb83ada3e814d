"""Recommendation: the layout to run for an objective on a machine, with its evidence.

A critical finding about a link blocks the objectives that use it. Then the strongest results that
distinguish layouts decide, of this machine before others of its kind, then the rule of plan/auto.
Every answer binds memory to the chosen nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.decide.alternative import CONSERVATIVE, Alternative, find_preset, group_runs
from homenode.decide.caveats import find_own_caveats
from homenode.decide.comparison import Comparison, EvidenceLevel, join_subjects, make_caveat
from homenode.decide.health import check_results, find_blocking
from homenode.decide.machine_facts import (
    MachineFacts,
    check_unassigned_runs,
    find_machines,
    select_guest_runs,
    select_own_runs,
    select_runs_of_kind,
)
from homenode.decide.ranking import MetricRank, RankedResult, Ranking, is_like_best, make_ranking
from homenode.findings import Caveat, Finding, Severity
from homenode.machine.topology import Host
from homenode.measure.results.model import CPU_ONLY, UNKNOWN_SWITCHES, Origin, Run
from homenode.metrics import list_primaries
from homenode.objective import Objective
from homenode.plan.planner import LAYOUTS, LayoutInputs, choose_layout, find_needed_layout
from homenode.text import plural
from homenode.vm.layout import PRESETS, GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings


class ReasonId(StrEnum):
    BEST = "best"  # the others are worse by a relevant amount
    RULE = "rule"  # of plan/auto, among layouts that results cannot tell apart, or without results
    NO_LAYOUT = "no-layout"  # the choice is not a layout: the layout is the rule's
    BOUND = "bound"  # the guest is the choice's, and the layout binds its memory as well
    FLOATING = "floating"  # pins are worse: vCPUs float over the nodes of their memory
    PIN_REGRESSION = "pin-regression"  # pinning lost throughput: the pins are wrong
    PASSED = "passed"  # stronger evidence that cannot tell
    HEALTH = "health"  # a critical finding about a link that the objective uses
    UNUSABLE = "unusable"  # emulated or synthesised, or marked by the user
    IMPOSSIBLE = "impossible"  # zeroes
    NO_RESULTS = "no-results"  # of the objective, or of one layout only
    CANNOT_TELL = "cannot-tell"  # the caveats have the reasons


class Reason(Struct, frozen=True, kw_only=True):
    id: ReasonId
    alternative: str | None = None
    metric: str | None = None
    ratio: float | None = None  # to the best, or to the compared alternative
    detail: str = ""  # for people only


class Recommendation(Struct, frozen=True, kw_only=True):
    """The answer for one objective on one machine."""

    objective: Objective
    system: str
    level: EvidenceLevel | None = None  # None: there is no answer; `reasons` explain it
    this_machine: bool = False  # the evidence is of this very machine
    choice: str | None = None  # the alternative that the evidence favours
    layout: str | None = None  # the preset to run: the choice's guest, with bound memory
    avoid: tuple[str, ...] = ()  # layouts that are worse than the best
    results: tuple[RankedResult, ...] = ()  # by metric, best first
    boots: tuple[int, int] | None = None  # fewest and most of an alternative; None: printed values
    reasons: tuple[Reason, ...] = ()
    findings: tuple[Finding, ...] = ()  # that block the objective
    caveats: tuple[Caveat, ...] = ()
    measure_next: str | None = None  # the layout without results that could change the answer
    sources: tuple[str, ...] = ()

    def find_reason(self, id: ReasonId) -> Reason | None:
        return next((reason for reason in self.reasons if reason.id is id), None)

    @property
    def keeps_vcpus(self) -> bool:
        """Whether siblings take half the cores rather than double the vCPUs."""
        exposes = self.layout is not None and PRESETS[self.layout].siblings is Siblings.EXPOSED
        return exposes and self.objective is Objective.DENSITY

    @property
    def floats(self) -> bool:
        """Whether the layout is default, with vCPUs that float over the nodes of their memory."""
        return self.find_reason(ReasonId.FLOATING) is not None

    @property
    def also(self) -> tuple[str, ...]:
        """Alternatives that are close to the choice; others, except avoid, are unknown."""
        if self.choice is None:
            return ()
        out = {self.choice, *self.avoid}
        out |= {
            result.alternative
            for result in self.results
            if result.position is not MetricRank.WORSE and not is_like_best(result)
        }
        names = dict.fromkeys(result.alternative for result in self.results)
        return tuple(name for name in names if name not in out)

    @property
    def words(self) -> tuple[str, ...]:
        """The options of a command that plans it; empty if nothing is recommended."""
        if self.layout is None:
            return ()
        floating = ("--pinning", Pinning.NODE, "--memory-binding", MemoryBinding.BOUND)
        return (
            "--layout",
            self.layout,
            *(("--keep-vcpus",) if self.keeps_vcpus else ()),
            *(map(str, floating) if self.floats else ()),
        )

    @property
    def is_blocked(self) -> bool:
        """Whether a repair, or a real measurement, is needed before results count."""
        return any(reason.id in (ReasonId.HEALTH, ReasonId.UNUSABLE) for reason in self.reasons)

    @property
    def tells(self) -> bool:
        """Whether results decide: they show that layouts differ, or that they do not."""
        return self.level not in (None, EvidenceLevel.RULE)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics with results."""
        return tuple(dict.fromkeys(result.metric for result in self.results))

    def list_results(self, metric: str) -> tuple[RankedResult, ...]:
        """Return the results on one metric, best first."""
        return tuple(result for result in self.results if result.metric == metric)

    def split_results(self, metric: str) -> tuple[RankedResult, tuple[RankedResult, ...]] | None:
        """Return the choice's result and the others, best first; None without two results."""
        results = self.list_results(metric)
        for result in results:
            if result.alternative == self.choice and len(results) > 1:
                return result, tuple(other for other in results if other is not result)
        return None


class RecommendedComparison(Comparison, frozen=True, kw_only=True):
    """The `comparison` format with the answers, one for each machine and objective."""

    recommendations: tuple[Recommendation, ...]


def decide(
    runs: Sequence[Run],
    machine: MachineFacts,
    objective: Objective,
    inputs: LayoutInputs | None = None,
) -> Recommendation:
    """Return the answer for an objective on a machine. inputs: of the machine and the VM."""
    return decide_all(runs, machine, (objective,), inputs)[0]


def decide_all(
    runs: Sequence[Run],
    machine: MachineFacts,
    objectives: Sequence[Objective] = tuple(Objective),
    inputs: LayoutInputs | None = None,
    *,
    alternatives: Sequence[Alternative] = (),
) -> tuple[Recommendation, ...]:
    """Return the answers for several objectives. alternatives: those made already."""
    inputs = inputs or machine.inputs
    machine_runs = select_guest_runs(select_own_runs(runs, machine))
    is_prepared = _are_of(alternatives, machine_runs)
    machine_alternatives = alternatives if is_prepared else group_runs(machine_runs)
    like = {host: group_runs(group) for host, group in select_runs_of_kind(runs, machine).items()}
    strangers = check_unassigned_runs(runs, machine)
    about_links = (*machine.findings, *check_results(machine_runs))
    answers = []
    for objective in objectives:
        findings = find_blocking(about_links, objective)
        gpus, least = machine.gpus, MIN_GPUS.get(objective, 0)
        if gpus is not None and gpus < least:
            reason = Reason(id=ReasonId.NO_RESULTS, detail=f"it takes {plural(least, 'GPU')}")
            answer = Recommendation(objective=objective, system=machine.name, reasons=(reason,))
        elif findings:
            reason = Reason(id=ReasonId.HEALTH)
            answer = Recommendation(
                objective=objective, system=machine.name, reasons=(reason,), findings=findings
            )
        else:
            answer = _choose_answer(machine, objective, machine_alternatives, like, inputs)
            answer = _bind_memory(_apply_needs(answer, inputs))
        answers.append(replace(answer, caveats=(*answer.caveats, *strangers)))
    return tuple(answers)


def decide_for_machines(
    runs: Sequence[Run],
    objectives: Sequence[Objective],
    this_host: Host | None = None,
    prepared: Mapping[str, Sequence[Alternative]] | None = None,
) -> tuple[Recommendation, ...]:
    """Return the answers of every machine, without objectives that have no compared results, unless
    its topology is known. prepared: alternatives made already, by machine."""
    return tuple(
        answer
        for machine in find_machines(runs, this_host)
        for answer in decide_all(
            runs, machine, objectives, alternatives=(prepared or {}).get(machine.name, ())
        )
        if machine.nodes is not None or not rests_on_rule_alone(answer)
    )


ANY_MACHINE = "any machine"
"""System of results that a source prints for no machine: rules of thumb."""


def rests_on_rule_alone(answer: Recommendation) -> bool:
    """Return whether no result of the objective was compared or rejected."""
    is_silent = answer.level is EvidenceLevel.RULE and not answer.results
    return is_silent and answer.find_reason(ReasonId.PASSED) is None


def recommend(
    system: str,
    all_alternatives: Sequence[Alternative],
    objective: Objective,
    inputs: LayoutInputs | None = None,
) -> Recommendation:
    """Return the answer from one machine's results. inputs: of the rule; None: a common machine."""
    runs = [run for alternative in all_alternatives for run in alternative.runs]
    usable_runs = [run for run in runs if not run.head.unusable]
    if len(usable_runs) < len(runs) and len(usable := group_runs(usable_runs)) > 1:
        answer = recommend(system, usable, objective, inputs)
        all_caveats = (
            caveat for alternative in all_alternatives for caveat in find_own_caveats(alternative)
        )
        unused_caveats = (
            replace(caveat, blocks=False) for caveat in all_caveats if caveat.id == "unusable"
        )
        return replace(answer, caveats=join_subjects((*unused_caveats, *answer.caveats)))
    candidates = [
        alternative
        for alternative in all_alternatives
        if alternative.switches != UNKNOWN_SWITCHES or alternative.arrangement is not None
    ]
    ranking, used = make_ranking(candidates, objective)
    own_caveats = join_subjects(
        caveat for alternative in all_alternatives for caveat in find_own_caveats(alternative)
    )
    empty = Recommendation(
        objective=objective,
        system=system,
        results=ranking.results,
        boots=_count_boots(used, ranking),
        sources=tuple(dict.fromkeys(run.head.source for run in runs if run.head.source)),
    )
    if blocks := tuple(_find_blocking_reasons(runs)):
        marks = ("unusable", "no-real-machine")
        return replace(
            empty,
            reasons=blocks,
            caveats=tuple(caveat for caveat in own_caveats if caveat.id in marks),
        )
    impossible = {sample.metric for run in runs for sample in run.impossible_samples}
    impossible_metrics = [metric for metric in list_primaries(objective) if metric.id in impossible]
    of_objective = tuple(
        caveat
        for caveat in own_caveats
        if caveat.blocks or (caveat.id == "impossible-results" and impossible_metrics)
    )
    caveats = (*ranking.caveats, *of_objective)
    empty = replace(
        empty, caveats=join_subjects(caveat for caveat in caveats if _fits(caveat, objective, used))
    )
    if len(used) < 2:
        if impossible_metrics and not used:
            return replace(
                empty, reasons=(Reason(id=ReasonId.IMPOSSIBLE, metric=impossible_metrics[0].id),)
            )
        label = used[0].label if used else None
        return replace(empty, reasons=(Reason(id=ReasonId.NO_RESULTS, alternative=label),))
    return _choose(empty, ranking, used, _name_rule(objective, inputs))


def _choose(
    empty: Recommendation, ranking: Ranking, used: tuple[Alternative, ...], rule: str
) -> Recommendation:
    """Choose the best alternative; among those close to the best, the rule's."""
    objective, level, losers = empty.objective, ranking.level(), ranking.worse()
    like = [alternative for alternative in used if alternative.label in ranking.like()]
    are_layouts = any(find_preset(alternative.switches) for alternative in like)
    is_open = any(result.position is MetricRank.UNDECIDED for result in ranking.results)
    if not like or (level is EvidenceLevel.RULE and is_open and not are_layouts):
        next_layout = _choose_next_layout(used, None, objective)
        reason = Reason(id=ReasonId.CANNOT_TELL)
        return replace(empty, reasons=(reason,), measure_next=next_layout)
    order = (rule, *CONSERVATIVE)
    choice = min(like, key=lambda one: (*_place(one, objective, order), one.label))
    reason = Reason(id=ReasonId.BEST, alternative=choice.label)
    if len(like) > 1 or level is EvidenceLevel.RULE:
        reason = Reason(id=ReasonId.RULE, alternative=choice.label)
    floating: tuple[Reason, ...] = ()
    if _pins_are_worse(choice, used, like):
        floating = (Reason(id=ReasonId.FLOATING, alternative=choice.label),)
    regressions = tuple(_pin_regressions(ranking, used))
    caveats = (
        make_caveat(
            "pin-regression",
            regression.alternative or "",
            f"{100 * (1 - (regression.ratio or 1.0)):.0f} % below the unpinned guest's throughput",
        )
        for regression in regressions
    )
    return replace(
        empty,
        level=level,
        choice=choice.label,
        layout=find_preset(choice.switches),
        avoid=tuple(alternative.label for alternative in used if alternative.label in losers),
        reasons=(reason, *floating, *regressions),
        caveats=(*empty.caveats, *caveats),
        measure_next=_choose_next_layout(used, choice, objective),
    )


def _name_rule(objective: Objective, inputs: LayoutInputs | None) -> str:
    return LAYOUTS[objective][0] if inputs is None else choose_layout(objective, inputs).layout


def _find_blocking_reasons(runs: Sequence[Run]) -> Iterator[Reason]:
    """Yield why no conclusion may be drawn from these runs."""
    unreal = {run.head.origin for run in runs} & {Origin.EMULATED, Origin.SYNTHESISED}
    marks = [f"its results are {origin}" for origin in sorted(unreal)]
    for text in dict.fromkeys((*marks, *(text for run in runs for text in run.head.unusable))):
        yield Reason(id=ReasonId.UNUSABLE, detail=text)


def _count_boots(used: Sequence[Alternative], ranking: Ranking) -> tuple[int, int] | None:
    """Fewest and most boots with results of a metric: each tool of a boot may have a run."""
    origins = {run.head.origin for alternative in used for run in alternative.runs}
    if not used or Origin.PUBLISHED in origins:
        return None
    metrics = {result.metric for result in ranking.results}
    counts = [
        max(len(s.medians) for key, s in alternative.series.items() if key.metric in metrics)
        for alternative in used
    ]
    return min(counts), max(counts)


def _pins_are_worse(
    choice: Alternative, used: Sequence[Alternative], like: Sequence[Alternative]
) -> bool:
    """Return whether the choice is `default` and no compared flat, pinned guest is close to it."""
    if find_preset(choice.switches) != "default":
        return False
    alternatives = [
        alternative
        for alternative in used
        if alternative.switches.pinning is Pinning.ONE_PER_CORE
        and alternative.switches.cells is GuestCells.SINGLE
    ]
    return bool(alternatives) and not any(alternative in like for alternative in alternatives)


def _fits(caveat: Caveat, objective: Objective, used: Sequence[Alternative]) -> bool:
    """Return whether GPUs without a node matter: GPUs communicate, and no layout gave them one."""
    if caveat.id != "gpus-without-node":
        return True
    tried = any(alternative.switches.pcie is GuestPcie.HOST for alternative in used)
    return not tried and objective in _OF_GPUS


def _place(
    alternative: Alternative, objective: Objective, order: Sequence[str]
) -> tuple[bool, int]:
    """Sort key: for density, siblings first; then the order of presets."""
    is_exposed = alternative.switches.siblings is Siblings.EXPOSED
    preset = find_preset(alternative.switches)
    place = order.index(preset) if preset in order else len(order)
    return objective is Objective.DENSITY and not is_exposed, place


def _pin_regressions(ranking: Ranking, used: Sequence[Alternative]) -> Iterator[Reason]:
    """Yield the pinned layouts that lose processor throughput: their pins are wrong."""
    pinning = {alternative.label: alternative.switches.pinning for alternative in used}
    results = [result for result in ranking.results if result.metric == "cpu-throughput"]
    if not results or pinning[results[0].alternative] is not Pinning.NONE:
        return
    for result in results:
        is_pinned = pinning[result.alternative] is Pinning.ONE_PER_CORE
        if is_pinned and result.position is MetricRank.WORSE:
            yield Reason(
                id=ReasonId.PIN_REGRESSION,
                alternative=result.alternative,
                metric=result.metric,
                ratio=result.ratio,
            )


def _choose_next_layout(
    used: Sequence[Alternative], choice: Alternative | None, objective: Objective
) -> str | None:
    """Return the unmeasured layout that could change the answer: GPUs on their cells."""
    if objective not in (*_OF_GPUS, Objective.MEMORY_BANDWIDTH):
        return None
    cells = [alternative for alternative in used if alternative.switches.cells is GuestCells.HOST]
    if any(alternative.switches.pcie is GuestPcie.HOST for alternative in cells):
        return None
    runs = (run for alternative in used for run in alternative.runs)
    has_gpus = any(run.head.system != CPU_ONLY for run in runs)
    if choice is not None and objective is Objective.MEMORY_BANDWIDTH and choice not in cells:
        return None
    return "pin-numa-pci" if cells and has_gpus else None


def _apply_needs(answer: Recommendation, inputs: LayoutInputs) -> Recommendation:
    """Return the answer with the layout that the VM's memory or devices need."""
    layout = answer.layout
    if layout is None or (answer.this_machine and not (inputs.private_memory or inputs.is_pv)):
        return answer
    if "pin-numa-pci" in answer.avoid:
        inputs = replace(inputs, has_pairs=False)
    needed_layout = find_needed_layout(layout, answer.objective, inputs)
    if needed_layout is None:
        return answer
    rule = Reason(id=ReasonId.RULE, alternative=layout, detail=needed_layout[1])
    reasons = [reason for reason in answer.reasons if reason.id is not ReasonId.FLOATING]
    return replace(answer, layout=needed_layout[0], reasons=(*reasons, rule), measure_next=None)


def _bind_memory(answer: Recommendation) -> Recommendation:
    """Return the answer with a layout that binds memory: the guest does not see the binding, so the
    results and the evidence of the choice remain valid."""
    if answer.layout is None or PRESETS[answer.layout].memory is not MemoryBinding.KEEP:
        return answer
    reason = Reason(id=ReasonId.BOUND, alternative=answer.layout)
    layout = answer.layout if answer.floats else "pin-bound"
    return replace(answer, layout=layout, reasons=(*answer.reasons, reason))


def _are_of(candidates: Sequence[Alternative], runs: Sequence[Run]) -> bool:
    """Return whether these are the same run objects, and no choice is in two alternatives."""
    choices = {(c.switches, c.arrangement, c.memory_mode, c.page_bytes) for c in candidates}
    run_ids = {id(run) for candidate in candidates for run in candidate.runs}
    return run_ids == set(map(id, runs)) and len(choices) == len(candidates)


def _choose_answer(
    machine: MachineFacts,
    objective: Objective,
    machine_alternatives: Sequence[Alternative],
    like: Mapping[str, Sequence[Alternative]],
    inputs: LayoutInputs,
) -> Recommendation:
    """Return the answer of the strongest conclusive results, with stronger inconclusive ones."""
    machine_answers = [
        replace(recommend(machine.name, machine_alternatives, objective, inputs), this_machine=True)
        for _ in machine_alternatives[:1]
    ]
    for answer in machine_answers:
        if answer.is_blocked or answer.find_reason(ReasonId.IMPOSSIBLE) is not None:
            return answer
    reviewed_hosts = [host for host, group in like.items() if is_under_review(group)]
    advisers = [group for host, group in like.items() if host not in reviewed_hosts]
    answers = [
        *machine_answers,
        *(recommend(machine.name, group, objective, inputs) for group in advisers),
    ]
    answers = [answer for answer in answers if not answer.find_reason(ReasonId.NO_RESULTS)]
    answers.sort(key=lambda one: (EvidenceLevel.RULE if one.level is None else one.level).rank)
    usable_answers = [one for one in answers if one.choice is not None and _can_run(one, inputs)]
    silent = (answer for answer in answers if answer not in usable_answers)
    passed_reasons = [
        *(_make_passed_reason(machine.name, _find_obstacle(answer)) for answer in silent),
        *(
            _make_passed_reason(host, "under review: it recommends nothing for other machines")
            for host in reviewed_hosts
        ),
    ]
    rule = _recommend_by_rule(machine, objective, inputs)
    best = usable_answers[0] if usable_answers else rule
    if usable_answers and best.layout is None:
        detail = rule.reasons[0].detail
        reason = Reason(id=ReasonId.NO_LAYOUT, alternative=rule.layout, detail=detail)
        best = replace(best, layout=rule.layout, reasons=(*best.reasons, reason))
    layouts = [answer.layout for answer in usable_answers[1:] if answer.layout is not None]
    unknown = (layout for layout in layouts if layout not in (best.layout, *best.also, *best.avoid))
    measure_next = best.measure_next or next(unknown, None)
    return replace(best, reasons=(*best.reasons, *passed_reasons), measure_next=measure_next)


def is_under_review(group: Sequence[Alternative]) -> bool:
    """Return whether a machine's results show faults of its links or pins."""
    findings = check_results([run for alternative in group for run in alternative.runs])
    if any(finding.severity is Severity.CRITICAL for finding in findings):
        return True
    answer = recommend("", group, Objective.THROUGHPUT)
    return answer.is_blocked or answer.find_reason(ReasonId.PIN_REGRESSION) is not None


def _make_passed_reason(system: str, detail: str) -> Reason:
    return Reason(id=ReasonId.PASSED, detail=f"{system}: {detail}")


def _find_obstacle(answer: Recommendation) -> str:
    """Return why results that are stronger than the deciding ones are inconclusive."""
    details = dict.fromkeys(
        f"{caveat.subject.removeprefix('tool ')}: {caveat.detail}"
        if caveat.id == "other-conditions"
        else caveat.detail
        for caveat in answer.caveats
        if caveat.blocks
    )
    return "; ".join(details) or "the results recommend a layout that this VM does not support"


def _can_run(answer: Recommendation, inputs: LayoutInputs) -> bool:
    layout = answer.layout
    return layout is None or inputs.expander_buses or PRESETS[layout].pcie is GuestPcie.KEEP


MIN_GPUS = {Objective.MULTI_GPU: 2, Objective.GPU_COPY: 1}
"""Minimum number of GPUs for an objective; a machine with fewer GPUs gets no recommendation."""

_OF_GPUS = MIN_GPUS.keys()


def _recommend_by_rule(
    machine: MachineFacts, objective: Objective, inputs: LayoutInputs
) -> Recommendation:
    """Return the answer of the table in plan/auto, if no results decide."""
    rule = choose_layout(objective, inputs)
    measure = objective in _OF_GPUS and machine.nodes != 1 and (machine.gpus or 0) > 0
    measure = measure and inputs.expander_buses and rule.layout != "pin-numa-pci"
    return Recommendation(
        objective=objective,
        system=machine.name,
        reasons=(Reason(id=ReasonId.RULE, alternative=rule.layout, detail=rule.reason),),
        level=EvidenceLevel.RULE,
        choice=rule.layout,
        layout=rule.layout,
        measure_next="pin-numa-pci" if measure else None,
    )
