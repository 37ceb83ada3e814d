"""Derived run: a run's samples, marks and findings, from its records and raw outputs alone.

It is derived on every request: results are stored in one place only, so that they are never lost or
counted twice, however often a run was interrupted.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Gap, finding, sort_findings
from homenode.machine.topology import Host
from homenode.measure.environment import Environment, find_changes, list_conditions
from homenode.measure.experiment import Schedule, find_moved_rounds, schedule
from homenode.measure.model import BenchTest, Reader, number_samples, sample
from homenode.measure.probe_samples import StepReading
from homenode.measure.results.model import UNSETTLED, Condition, Origin, Run, Sample
from homenode.measure.results.placement_states import Bracket, PlacementStates, classify_brackets
from homenode.measure.run_directory import EnvironmentRecord, RunRecord, StepRecord, StepStatus
from homenode.measure.step_reading import REPLAYED, mark_disturbed, read_app, read_step
from homenode.metrics import POWER, find_metric
from homenode.text import plural

_SHOWN = 6
"""Placement states that a finding names."""

_SPREAD_FROM = 3
"""Samples from which on a control shows its own spread."""

MARKING = frozenset({"bench-busy", "bench-stolen"})
"""Findings of the preflight that mark the run: its results include other programs' load."""

TEST_FAILED = "bench-test-failed"
"""Id of the finding for a test without a result in any round."""

_EMULATION_UNKNOWN = Gap(
    "whether QEMU emulates this machine's processor (TCG)",
    "unknown; results of an emulated machine are meaningless",
)


class DerivedRun(Struct, frozen=True):
    """The present state of a run, with its findings."""

    run: Run
    findings: tuple[Finding, ...]
    gaps: tuple[Gap, ...]


class _ReadStep(Struct, frozen=True):
    step: StepRecord
    reading: StepReading


def schedule_of(record: RunRecord) -> Schedule:
    """Return the steps of a run, from its orders alone."""
    tests = [test.id for test in record.tests if test.id not in record.controls]
    return schedule(tests, record.controls, record.repeats, record.seed)


def derive_run(
    record: RunRecord,
    steps: Sequence[tuple[StepRecord, str]],
    environments: Sequence[EnvironmentRecord],
    host: Host,
    readings: Mapping[int, StepReading] | None = None,
) -> DerivedRun:
    """Return the run of these records. host: the measured host, confined to the CPUs of the run.
    readings: of steps whose outputs were read already, by number."""
    gaps = list(record.omitted)
    read = list(_read(record, steps, host, gaps, readings or {}))
    samples, states = _collect_samples(record, read)
    gaps += [gap for step in read for gap in step.reading.gaps]
    findings = [
        *(finding for look in environments for finding in look.findings),
        *_drop_repeated(finding for step in read for finding in step.reading.findings),
    ]
    marks = [*record.head.unusable, *record.marks]
    marks += [str(finding) for finding in findings if finding.id in MARKING]
    for extra in (
        _check_failed_tests(steps),
        _check_controls(record, read),
        _check_settings(environments, host.usable_pus),
        _find_noise(record, read, marks),
        _check_placement(states),
    ):
        findings += extra
    marks += [
        f"{finding.subject}: {finding.observed}"
        for finding in findings
        if finding.id in ("bench-control-moved", "bench-changed")
    ]
    if not samples:
        marks.append("nothing was measured")
    conditions = dict.fromkeys(_list_conditions(record, environments, read))
    origin = _find_origin(record, environments, read)
    if origin is None:
        gaps.append(_EMULATION_UNKNOWN)
    head = replace(
        record.head,
        origin=origin or record.head.origin,
        conditions=tuple(conditions),
        started_s=min(_list_times(steps, ended=False), default=None),
        ended_s=max(_list_times(steps, ended=True), default=None),
        unusable=tuple(dict.fromkeys(marks)),
    )
    unique = tuple(dict.fromkeys(gaps))
    return DerivedRun(Run(head, samples), sort_findings(findings), unique)


def _list_times(steps: Sequence[tuple[StepRecord, str]], *, ended: bool) -> Iterator[float]:
    for step, _ in steps:
        if step.started_s is not None:
            yield step.started_s + (step.seconds if ended else 0.0)


def _find_origin(
    record: RunRecord, environments: Sequence[EnvironmentRecord], read: Sequence[_ReadStep]
) -> Origin | None:
    """Return the origin; None if it is unknown whether the machine is emulated."""
    answers = {look.environment.emulated for look in environments}
    answers |= {read_step.reading.emulated for read_step in read}
    if any(c.name == REPLAYED for read_step in read for c in read_step.reading.conditions):
        return Origin.SYNTHESISED
    if record.head.origin is Origin.EMULATED or True in answers:
        return Origin.EMULATED
    return record.head.origin if False in answers else None


def _read(
    record: RunRecord,
    steps: Sequence[tuple[StepRecord, str]],
    host: Host,
    gaps: list[Gap],
    readings: Mapping[int, StepReading],
) -> Iterator[_ReadStep]:
    attempts = {attempt.id: attempt for test in record.tests for attempt in test.attempts}
    for step, output in steps:
        gaps += [Gap(f"{step.test}, round {step.round + 1}", reason) for reason in step.messages]
        test = attempts.get(step.attempt)
        if step.result is not StepStatus.DONE or test is None:
            continue
        try:
            stored = readings.get(step.number)
            reading = stored or read_bench_step(record, test, step, output, host)
        except ParseError as error:
            gaps.append(Gap(f"{step.test}, round {step.round + 1}", error.message))
            continue
        yield _ReadStep(step, mark_disturbed(reading) if reading.busy else reading)


def read_bench_step(
    record: RunRecord, test: BenchTest, step: StepRecord, output: str, host: Host
) -> StepReading:
    """Return the results of a step. Raises ParseError."""
    if test.reads is Reader.APP:
        assert record.app is not None, "a test of the user's program comes with its order"
        if step.value is None:
            raise ParseError("--metric", "a number")
        return read_app(record.app, step.value)
    return read_step(test, output, host)


def _collect_samples(
    record: RunRecord, read: Sequence[_ReadStep]
) -> tuple[tuple[Sample, ...], PlacementStates]:
    brackets: list[Bracket] = []
    place_of: dict[tuple[int, int, Bracket], int] = {}
    for number, step in enumerate(read):
        for placed_sample in step.reading.placed:
            if placed_sample.bracket is not None:
                key = (number, placed_sample.at_ns, placed_sample.bracket)
                if key not in place_of:
                    place_of[key] = len(brackets)
                    brackets.append(placed_sample.bracket)
    states = classify_brackets(brackets)
    on_host = dict(record.bus_ids)
    samples = []
    for number, step in enumerate(read):
        for placed_sample in step.reading.placed:
            state = None
            if placed_sample.bracket is not None:
                state = states.labels[place_of[number, placed_sample.at_ns, placed_sample.bracket]]
            samples.append(
                replace(
                    placed_sample.sample,
                    state=state,
                    device=_find_host_device(placed_sample.sample.device, on_host),
                    peer=_find_host_device(placed_sample.sample.peer, on_host),
                )
            )
        samples += [
            sample(
                POWER,
                "watts",
                power.watts,
                device=_find_host_device(power.device, on_host),
                index=power.index,
                variant=step.step.test,
            )
            for power in step.step.power
        ]
    return number_samples(samples), states


def _find_host_device(device: Bdf | None, on_host: dict[Bdf, Bdf]) -> Bdf | None:
    return None if device is None else on_host.get(device, device)


def _drop_repeated(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the first finding of each kind and subject: every round repeats it with other
    decimals."""
    first: dict[tuple[str, str], Finding] = {}
    for problem in findings:
        first.setdefault((problem.id, problem.subject), problem)
    yield from first.values()


def _check_failed_tests(steps: Sequence[tuple[StepRecord, str]]) -> Iterator[Finding]:
    """Find tests without a result in any round."""
    results: dict[str, list[StepRecord]] = {}
    for step, _ in steps:
        results.setdefault(step.test, []).append(step)
    for test, all_rounds in results.items():
        if any(step.result is StepStatus.DONE for step in all_rounds):
            continue
        last = all_rounds[-1]
        yield finding(
            "bench-test-failed",
            test,
            expected="results",
            observed=f"{last.result} in every round: {'; '.join(last.messages) or 'no message'}",
            values={"file": f"raw/{last.output}"},
            source="its exit and output",
        )


def _check_controls(record: RunRecord, read: Sequence[_ReadStep]) -> Iterator[Finding]:
    values: dict[tuple[str, str | None, Bdf | None], dict[tuple[int, str], list[float]]] = {}
    for step in read:
        if step.step.test not in record.controls:
            continue
        for placed in step.reading.placed:
            metric = find_metric(placed.sample.metric)
            if metric is not None and metric.control:
                key = (metric.title, placed.sample.variant, placed.sample.device)
                rounds = values.setdefault(key, {})
                rounds.setdefault((step.step.round, step.step.test), []).append(placed.sample.value)
    plan = schedule_of(record)
    for (title, variant, device), rounds in values.items():
        medians = {key: statistics.median(rates) for key, rates in rounds.items()}
        subject = " ".join(str(part) for part in (title, variant, device) if part is not None)
        for number, test, ratio in find_moved_rounds(plan, medians):
            if _overlaps(rounds[number - 1, test], rounds[number, test]):
                continue
            yield finding(
                "bench-control-moved",
                subject,
                expected="the same before and after a round, within 3 % or its own spread",
                observed=f"{ratio - 1:+.1%} over round {number + 1}",
                source="controls of the suite",
            )


def _overlaps(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the middle halves of both sides overlap: the medians' difference is noise then."""
    if min(len(before), len(after)) < _SPREAD_FROM:
        return False
    low, _, high = statistics.quantiles(before, n=4, method="inclusive")
    lowest, _, highest = statistics.quantiles(after, n=4, method="inclusive")
    return low <= highest and lowest <= high


def _check_settings(environments: Sequence[EnvironmentRecord], pus: CpuSet) -> Iterator[Finding]:
    for first, second in pairwise(environments):
        before, after = first.environment, second.environment
        if not first.is_before or second.is_before:  # nothing was measured in between
            before, after = _remove_times(before), _remove_times(after)
        for change in find_changes(before, after, pus):
            yield finding(
                "bench-changed",
                "the machine",
                expected="the same before and after",
                observed=change,
                source="settings, links and counters, twice",
            )


def _remove_times(environment: Environment) -> Environment:
    return replace(environment, times=())


def _find_noise(
    record: RunRecord, read: Sequence[_ReadStep], marks: list[str]
) -> Iterator[Finding]:
    """Find steps during which other programs ran; a test without an undisturbed round marks the
    run."""
    busy = [busy_step for busy_step in read if busy_step.reading.busy]
    if not busy:
        return
    calm = {busy_step.step.test for busy_step in read if not busy_step.reading.busy}
    never = sorted({busy_step.step.test for busy_step in busy} - calm)
    observed = f"other processes ran during {len(busy)} of {plural(len(read), 'step')}"
    marks += [f"{observed}; no calm round of {', '.join(never)}"] if never else []
    yield finding(
        "bench-disturbed",
        f"CPUs {record.head.pus or 'of this machine'}",
        expected="no other process on them",
        observed=f"{observed}; {busy[0].reading.busy}",
        source="the probe, which counts the time of other processes while it measures",
    )


def _check_placement(states: PlacementStates) -> Iterator[Finding]:
    moves = len(states.transitions)
    if not moves:
        return
    times = "once" if moves == 1 else f"{moves} times"
    names = list(dict.fromkeys(label for label in states.labels if label != UNSETTLED))
    hidden_count = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    yield finding(
        "bench-placement-moves",
        "vCPUs",
        expected="to keep their nodes",
        observed=f"{times} moved; from core to core it was "
        f"{', '.join(names[:_SHOWN]) or 'unknown'}{hidden_count}",
        source="core-to-core latency before and after each sample",
    )


def _list_conditions(
    record: RunRecord, environments: Sequence[EnvironmentRecord], read: Iterable[_ReadStep]
) -> Iterator[Condition]:
    yield from record.head.conditions
    if environments:
        yield from list_conditions(environments[0].environment)
    for step in read:
        yield from step.reading.conditions
