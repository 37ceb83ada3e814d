"""Comparisons: what makes one better, worse, the same, or a thing that it is unknown."""

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.decide.alternative import group_runs
from homenode.decide.compare import compare, is_whole
from homenode.decide.comparison import (
    FEW_BOOTS,
    PRINTED,
    Comparison,
    Effect,
    EvidenceLevel,
    MetricTest,
    Outcome,
    UnjudgedEffect,
    adjust_p_values,
    is_large,
    judge_effects,
)
from homenode.decide.distributions import f_upper_p, two_sided_p
from homenode.decide.intervals import Interval
from homenode.decide.ranking import MetricRank, _find_position, make_ranking
from homenode.decide.summary import collect_series, find_unused_results
from homenode.decide.switch_effects import file_effects
from homenode.errors import InputError
from homenode.measure.results.model import Condition, Origin, Run, Sample, Statistic
from homenode.measure.results.vantage import Vantage
from homenode.metrics import METRICS, find_metric, list_primaries
from homenode.objective import Objective
from homenode.show.results_text import build_power_table, file_text
from tests.simulated_runs import simulated_run

TRIAD = {"memory-bandwidth": ("bytes_per_s", 100e9)}
LATENCY = {"memory-latency": ("ns", 100.0)}
GPU = Bdf.parse("0000:19:00.0")


def compared(*runs: Run, objective: Objective | None = None, bare: bool = False) -> Comparison:
    return compare(group_runs(runs), objective, bare=bare)


def only(comparison: Comparison, metric: str = "memory-bandwidth") -> Effect:
    (found,) = [one for one in comparison.effects if one.metric == metric]
    return found


def pair(
    rng: random.Random, effect: float = 0.0, metric: str = "memory-bandwidth"
) -> tuple[Run, Run]:
    unit, value = {**TRIAD, **LATENCY}[metric]
    return (
        simulated_run("pin", {metric: (unit, value)}, rng),
        simulated_run("pin-numa", {metric: (unit, value * (1 + effect))}, rng),
    )


def test_power_is_shown_by_test_and_layout_and_decides_nothing() -> None:
    rng = random.Random(5)
    quiet, loud = pair(rng)
    watts = [
        Sample("gpu-power", "watts", value, device=gpu, boot=boot, variant="matmul")
        for gpu, value in ((GPU, 300.0), (Bdf.parse("0000:3b:00.0"), 500.0))
        for boot in range(3)
    ]
    found = compared(quiet, replace(loud, samples=(*loud.samples, *watts)))
    assert found.power == {"pin-numa": {"matmul": 400.0}}
    copies = [
        Sample("h2d-bandwidth", "bytes_per_s", 50e9, device=gpu, boot=boot)
        for gpu in (GPU, Bdf.parse("0000:3b:00.0"))
        for boot in range(3)
    ]
    events = [Sample("app-rate:x", "units_per_s", 4.0, boot=boot) for boot in range(3)]
    of_tests = [
        msgspec.structs.replace(one, variant=test)
        for one in watts
        for test in ("gpu-bandwidth", "gpu-bandwidth from node 1", "app")
    ]
    run = replace(loud, samples=(*loud.samples, *copies, *events, *of_tests))
    assert compared(quiet, run).power["pin-numa"] == {
        "gpu-bandwidth": 400.0,
        "gpu-bandwidth, J/GB": pytest.approx(8.0),
        "gpu-bandwidth from node 1": 400.0,  # from which no copies are known
        "app": 400.0,
        "app, J/event": pytest.approx(200.0, rel=0.05),
    }
    assert {one.metric for one in found.effects} == {"memory-bandwidth"}
    loud = replace(loud, samples=(*loud.samples, *watts))
    both = compared(replace(quiet, samples=(*quiet.samples, *watts)), loud)
    assert not [one for one in (*found.caveats, *both.caveats) if one.id == "unknown-metric"]
    (table,) = build_power_table({"pin": {}, **found.power})
    assert (table.heads[1:], table.rows) == (("pin", "pin-numa"), (("matmul", "-", "400 W"),))
    assert build_power_table({}) == ()


def test_all_reduce_with_the_topology_file_is_compared_within_its_layout() -> None:
    rng = random.Random(8)
    peak = "allreduce-busbw-peak"
    runs = [simulated_run(one, {peak: ("bytes_per_s", 8e9)}, rng) for one in ("pin", "pin-numa")]
    with_file = tuple(
        msgspec.structs.replace(one, variant="topology file", value=2.1 * one.value)
        for one in runs[1].samples
    )
    both = replace(runs[1], samples=(*runs[1].samples, *with_file))
    (effect,) = file_effects(group_runs([runs[0], both]))
    assert (effect.alternative, effect.outcome) == ("pin-numa, topology file", Outcome.BETTER)
    assert file_text(effect).startswith("pin-numa is 2.1x without it (2.")
    assert not any(map(file_text, compared(*runs).effects))


def test_one_boot_of_a_layout_is_provisional_at_most_however_many_samples_it_has() -> None:
    rng = random.Random(2)
    one = simulated_run(
        "pin-numa", {"memory-bandwidth": ("bytes_per_s", 500e9)}, rng, boots=1, samples=500
    )
    comparison = compared(simulated_run("pin", TRIAD, rng), one)
    effect = only(comparison)
    assert (effect.outcome, effect.low, effect.caveats) == (Outcome.BETTER, None, (FEW_BOOTS,))
    assert effect.level is EvidenceLevel.PROVISIONAL
    near = simulated_run("pin-numa", {"memory-bandwidth": ("bytes_per_s", 150e9)}, rng, boots=1)
    assert only(compared(simulated_run("pin", TRIAD, rng), near)).outcome is Outcome.CANNOT_TELL
    (caveat,) = comparison.caveats
    assert "and 1 boot" in caveat.detail
    assert "three times" in caveat.fix


def test_two_runs_of_one_boot_are_one_replicate() -> None:
    rng = random.Random(3)
    twice = [
        Run(replace(run.head, name=name, boots=("same",)), run.samples)
        for name in ("a", "b")
        for run in [simulated_run("pin-numa", TRIAD, rng, boots=1)]
    ]
    effect = only(compared(simulated_run("pin", TRIAD, rng), *twice))
    assert effect.boots == (3, 1)
    assert effect.outcome is Outcome.CANNOT_TELL


def _with(run: Run, **changes: object) -> Run:
    return Run(replace(run.head, **changes), run.samples)


@pytest.mark.parametrize(
    ("changes", "caveat"),
    [
        ({"host": "host-2"}, "other-host"),
        ({"host_kind": "another machine"}, "other-host"),
        ({"host": None, "host_kind": None, "system": "another"}, "other-host"),
        ({"conditions": (Condition("governor", "powersave"),)}, "other-conditions"),
        ({"unusable": ("throttled to 1.2 GHz",)}, "unusable"),
        ({"origin": Origin.EMULATED}, "no-real-machine"),
        ({"origin": Origin.SYNTHESISED}, "no-real-machine"),
    ],
)
def test_runs_that_are_not_comparable_are_cannot_tell_with_cause_and_remedy(
    changes: dict[str, object], caveat: str
) -> None:
    first, second = pair(random.Random(5), 1.0)
    comparison = compared(first, _with(second, **changes))
    assert only(comparison).outcome is Outcome.CANNOT_TELL
    assert only(comparison).caveats == (caveat,)
    found = next(one for one in comparison.caveats if one.id == caveat)
    assert found.cause
    assert found.fix


MUST_AGREE = "governor,clock limit,turbo,throttling,driver,tool nvbandwidth,microcode,smt".split(
    ","
)
"""Conditions as docs/reference/formats/results.md has them."""


def test_a_link_that_trained_slower_blocks_and_another_kernel_is_only_mentioned() -> None:
    first, second = pair(random.Random(5), 1.0)
    for name, values, blocks in (
        (f"link {GPU}", ("32 GT/s x16", "2.5 GT/s x16"), True),
        *((name, ("a", "b"), True) for name in MUST_AGREE),
        *((name, ("6.1", "6.8"), False) for name in ("kernel", "libvirt", "qemu")),
    ):
        one, other = (
            _with(run, conditions=(Condition(name, value),))
            for run, value in zip((first, second), values, strict=True)
        )
        comparison = compared(one, other)
        (caveat,) = comparison.caveats
        assert (caveat.subject, caveat.blocks) == (name, blocks)
        assert (only(comparison).outcome is Outcome.CANNOT_TELL) is blocks


def test_a_control_that_moved_takes_the_other_metrics_with_it() -> None:
    rng = random.Random(6)
    first = simulated_run("pin", {**TRIAD, "cpu-single": ("events_per_s", 3000.0)}, rng)
    second = simulated_run(
        "pin-numa",
        {"memory-bandwidth": ("bytes_per_s", 150e9), "cpu-single": ("events_per_s", 2500.0)},
        rng,
    )
    comparison = compared(first, second)
    assert only(comparison).outcome is Outcome.CANNOT_TELL
    assert only(comparison).caveats == ("control-moved",)
    assert only(comparison, "cpu-single").outcome is Outcome.WORSE
    (caveat,) = [one for one in comparison.caveats if one.id == "control-moved"]
    assert "idle" in caveat.fix
    ranking, _ = make_ranking(group_runs([first, second]), Objective.MEMORY_BANDWIDTH)
    assert [one.subject for one in ranking.caveats] == ["cpu-single"]


@pytest.mark.parametrize("later_s", [600_000.0, 1e308])
def test_boots_of_seconds_tell_no_drift_over_weeks(later_s: float) -> None:
    """As files have it that were copied one layout after the other: their line leads to e^3000."""
    rng = random.Random(6)
    runs = [
        _with(
            simulated_run(
                layout, {"memory-latency": ("ns", value)}, rng, boots=1, between=0.0, within=1e-5
            ),
            name=f"{layout} {number}",
            boots=(),
            place=None,
            started_s=1.7e9 + start_s + 2.0 * number,
        )
        for layout, start_s in (("pin", 0.0), ("pin-numa", later_s))
        for number, value in enumerate((100.0, 101.0, 102.0))
    ]
    effect = only(compared(*runs), "memory-latency")
    assert effect.outcome is Outcome.CANNOT_TELL
    assert 0 < effect.gain < math.inf


def test_runs_of_one_name_that_tell_no_boots_are_boots_of_their_own() -> None:
    rng = random.Random(64)
    first, again, other = (
        simulated_run(layout, TRIAD, rng) for layout in ("pin", "pin", "pin-numa")
    )
    assert (first.head, first.head.boots) == (again.head, ())
    assert only(compared(first, again, other)).boots == (6, 3)
    assert only(compared(first, first, other)).boots == (3, 3), "the same run given twice"
    more = Run(first.head, (*first.samples, *simulated_run("pin", LATENCY, rng).samples))
    assert only(compared(first, more, other)).boots == (3, 3), "imported twice"
    one_value = [
        Run(
            replace(first.head, name=name),
            (Sample("memory-bandwidth", "bytes_per_s", 1e11), Sample("memory-latency", "ns", ns)),
        )
        for name, ns in (("a", 100.0), ("b", 101.0))
    ]
    assert only(compared(*one_value, other)).boots == (2, 3), "few values agree by chance"
    known = [replace(one_value[0], head=replace(first.head, boots=(boot,))) for boot in "ab"]
    assert only(compared(*known, other)).boots == (2, 3), "boots that are known to differ"
    empty = [replace(run, samples=()) for run in (first, again)]
    assert [len(one.runs) for one in group_runs(empty)] == [2], "nothing is no copy of nothing"


def test_dozens_of_controls_do_not_block_equal_layouts_by_their_number() -> None:
    rng = random.Random(61)

    def run(layout: str) -> Run:
        base = simulated_run(layout, TRIAD, rng)
        controls = [
            sample
            for bus in range(1, 9)
            for sample in simulated_run(
                layout,
                {"matmul-time": ("ns", 2e7), "d2d-bandwidth": ("bytes_per_s", 2e12)},
                rng,
                between=0.02,
                samples=3,
                device=Bdf(0, bus, 0, 0),
            ).samples
        ]
        return Run(replace(base.head, host_addresses=True), (*base.samples, *controls))

    blocked = [
        any(one.id == "control-moved" for one in compared(run("pin"), run("pin-numa")).caveats)
        for _ in range(60)
    ]
    assert sum(blocked) <= 6


def test_single_gpus_do_not_hide_a_control_that_moved_over_all() -> None:
    rng = random.Random(66)

    def run(layout: str, rate: float) -> Run:
        base = simulated_run(layout, {"cpu-single": ("events_per_s", rate)}, rng, between=0.008)
        times = {"matmul-time": ("ns", 2e7)}
        of_gpus = (
            simulated_run(layout, times, rng, between=0.02, device=Bdf(0, bus, 0, 0))
            for bus in range(1, 17)
        )
        samples = (sample for each in (base, *of_gpus) for sample in each.samples)
        return Run(replace(base.head, host_addresses=True), tuple(samples))

    comparison = compared(run("pin", 3000.0), run("pin-numa", 2880.0))
    effect = only(comparison, "cpu-single")
    assert effect.p is not None and 0.05 / 16 < effect.p < 0.05
    assert [one.subject for one in comparison.caveats if one.id == "control-moved"] == [
        "cpu-single"
    ]


@pytest.mark.parametrize("metric", ["memory-bandwidth", "memory-latency"])
def test_a_difference_is_large_from_what_matters_on(metric: str) -> None:
    effect = only(compared(*pair(random.Random(1), metric=metric)), metric)
    for ratio, expected in ((0.96, False), (0.94, True), (1 / 0.96, False), (1 / 0.94, True)):
        assert is_large(replace(effect, ratio=ratio)) is expected
    assert is_whole(effect)
    assert not is_whole(replace(effect, variant="CPU 3"))
    assert not is_whole(replace(effect, metric="core-to-core-latency"))
    low, high = {"memory-bandwidth": (0.94, 1.3), "memory-latency": (1 / 1.3, 1 / 0.94)}[metric]
    perhaps_worse = replace(effect, ratio=1.0, low=low, high=high, outcome=Outcome.CANNOT_TELL)
    assert _find_position(perhaps_worse, METRICS[metric]) is MetricRank.UNSHOWN
    for low, high, outcome in (
        (0.96, 1.04, Outcome.NO_DIFFERENCE),
        (0.96, 1.06, Outcome.CANNOT_TELL),
        (0.94, 1.04, Outcome.CANNOT_TELL),
    ):
        unclear = replace(effect, ratio=1.0, p=0.5, low=low, high=high)
        (judged,) = judge_effects([UnjudgedEffect(unclear, None, 0.0)])
        assert judged.outcome is outcome


@pytest.mark.parametrize(
    ("error", "freedoms", "left"),
    [(0.1, (4, 4), 6), (0.02, (10, 2), 9)],  # with the freedoms swapped 0.02 is like 0.01
)
def test_metrics_whose_errors_differ_keep_three_quarters_of_their_freedom(
    error: float, freedoms: tuple[float, float], left: float
) -> None:
    tested = [
        MetricTest(
            "pin",
            metric,
            Interval(ratio=math.exp(t * error), low=0, high=2, p=p, error=error, freedom=freedom),
            boots=2 + int(freedom),
        )
        for metric, t, error, freedom in zip(
            ("h2d-bandwidth", "d2h-bandwidth"), (4.0, 0.0), (0.01, error), freedoms, strict=True
        )
        for p in [two_sided_p(t, freedom)]
    ]
    assert adjust_p_values(tested, 1)[0] == pytest.approx(f_upper_p(8.0, 2, left))


def test_a_corrected_p_value_is_never_below_its_own() -> None:
    rng = random.Random(67)
    for _ in range(50):
        tested = [
            MetricTest(alternative, metric, made, 6)
            for alternative in ("pin", "pin-numa")
            for metric in ("h2d-bandwidth", "d2h-bandwidth")
            for ratio, error in [(rng.choice((0.5, 0.99, 1.3)), rng.choice((0.01, 0.1)))]
            for p in [two_sided_p(math.log(ratio) / error, 4)]
            for made in [Interval(ratio=ratio, low=0.4, high=2, p=p, error=error, freedom=4)]
        ]
        for some in (tested, tested[:2], tested[:1], tested[::2]):
            corrected = adjust_p_values(some, 3)
            assert all(test.interval.p <= p <= 1 for test, p in zip(some, corrected, strict=True))
        third = tested[0]._replace(metric="p2p-bandwidth")
        for added, factor in ((third, 3), (tested[0], 2)):
            corrected = adjust_p_values([*tested, added], 3)
            for test, p in zip([*tested, added], corrected, strict=True):
                assert p == min(1.0, factor * test.interval.p)


def test_a_gpu_that_fell_behind_by_itself_is_a_control_that_moved() -> None:
    rng = random.Random(62)
    slower = Bdf(0, 3, 0, 0)

    def run(layout: str) -> Run:
        base = simulated_run(layout, TRIAD, rng)
        controls = [
            sample
            for bus in range(1, 9)
            for device in [Bdf(0, bus, 0, 0)]
            for time_ns in [3e7 if layout == "pin-numa" and device == slower else 2e7]
            for sample in simulated_run(
                layout, {"matmul-time": ("ns", time_ns)}, rng, device=device
            ).samples
        ]
        return Run(replace(base.head, host_addresses=True), (*base.samples, *controls))

    comparison = compared(run("pin"), run("pin-numa"))
    assert only(comparison).caveats == ("control-moved",)


def test_figures_of_other_nodes_are_said_not_to_pair() -> None:
    rng = random.Random(8)
    sides = []
    for layout, node in (("pin", 1), ("pin-numa", 0)):
        run = simulated_run(layout, TRIAD, rng)
        samples = tuple(replace(one, node=node) for one in run.samples)
        sides.append(Run(run.head, samples))
    comparison = compared(*sides)
    (caveat,) = [one for one in comparison.caveats if one.id == "series-without-pair"]
    assert not comparison.effects and caveat.detail == "memory bandwidth: node 1 against node 0"
    assert [gap.reason for gap in find_unused_results(sides, [Objective.MEMORY_BANDWIDTH])] == [
        f"node {node} alone is not enough for a decision" for node in (1, 0)
    ]


def test_gpu_figures_pair_by_address_and_never_by_index() -> None:
    rng = random.Random(7)
    copies = {"h2d-bandwidth": ("bytes_per_s", 50e9)}
    other = Bdf.parse("0000:9b:00.0")
    first = simulated_run("pin", copies, rng, device=GPU)
    same = simulated_run("pin-numa", copies, rng, device=GPU)
    moved = simulated_run("pin-numa", copies, rng, device=other)
    assert {one.device for one in compared(first, same).effects} == {GPU, None}
    comparison = compared(first, moved)
    assert {one.device for one in comparison.effects} == {None}
    assert [one.outcome for one in comparison.effects] == [Outcome.CANNOT_TELL]
    assert {"other-devices", "device-without-pair"} <= {one.id for one in comparison.caveats}


def test_guest_addresses_do_not_pair_single_gpus_across_two_pcie_trees() -> None:
    rng = random.Random(14)
    copies = {"h2d-bandwidth": ("bytes_per_s", 50e9)}
    flat, mirrored = (
        _with(simulated_run(layout, copies, rng, device=GPU), host_addresses=False)
        for layout in ("pin-numa", "pin-numa-pci")
    )
    by_device = {one.device: one for one in compared(flat, mirrored).effects}
    assert by_device[GPU].caveats == ("guest-addresses",)
    assert by_device[None].caveats == ()
    same_tree = _with(flat, switches=simulated_run("pin", {}, rng).head.switches)
    assert not any(one.caveats for one in compared(same_tree, flat).effects)


def test_the_slowest_gpu_of_each_boot_stands_for_all_of_them() -> None:
    def run(layout: str, slow: float, gpus: int = 2) -> Run:
        head = simulated_run(layout, {}, random.Random(1)).head
        samples = [
            Sample("h2d-bandwidth", "bytes_per_s", value, boot=boot, device=Bdf(0, bus, 0, 0))
            for boot in range(3)
            for bus in range(1, gpus + 1)
            for value in [slow + boot * 1e6 if bus == 2 else 50e9]
        ]
        return Run(head, tuple(samples))

    comparison = compared(run("pin", 10e9), run("pin-numa-pci", 45e9))
    slowest = next(one for one in comparison.effects if one.slowest_device)
    assert (slowest.primary, slowest.outcome) == (True, Outcome.BETTER)
    assert slowest.ratio == pytest.approx(4.5, rel=1e-3)
    for gpus, others in ((2, 4), (4, 2)):
        found = compared(run("pin", 10e9, gpus), run("pin-numa-pci", 45e9, others)).caveats
        assert {one.id for one in found} >= {"other-devices", "device-without-pair"}


def test_placement_states_are_never_pooled() -> None:
    def run(layout: str, states: Sequence[tuple[str, float]]) -> Run:
        head = simulated_run(layout, {}, random.Random(1)).head
        samples = [
            Sample("memory-bandwidth", "bytes_per_s", value + boot, boot=boot, state=state)
            for boot in range(3)
            for state, value in states
        ]
        return Run(head, tuple(samples))

    comparison = compared(
        run("default", [("near", 48e9), ("far", 79e9)]), run("pin", [("far", 79e9)])
    )
    assert {one.state for one in comparison.effects} == {"far"}
    assert "state-without-pair" in {one.id for one in comparison.caveats}


def test_zeroes_are_refused_and_said() -> None:
    rng = random.Random(8)
    first, second = pair(rng, 0.0, "memory-latency")
    zeroes = Run(
        second.head, tuple(msgspec.structs.replace(sample, value=0.0) for sample in second.samples)
    )
    comparison = compared(first, zeroes)
    assert not comparison.effects
    (caveat,) = comparison.caveats
    assert caveat.id == "impossible-results"
    assert "truncated" in caveat.cause


def test_absurd_figures_break_nothing() -> None:
    wild = (1e-11, 1e29, 1e308, 5e-324, -1.0, 1.0)
    runs = [
        Run(
            simulated_run(layout, {}, random.Random(1)).head,
            tuple(
                Sample("memory-bandwidth", "bytes_per_s", value, boot=boot)
                for boot, value in enumerate(values)
            ),
        )
        for layout, values in (("pin", wild), ("pin-numa", wild[::-1]))
    ]
    effect = only(compared(*runs))
    assert (effect.outcome, effect.boots) == (Outcome.CANNOT_TELL, (3, 3))


def test_disturbed_samples_are_left_out_while_others_are_there() -> None:
    rng = random.Random(9)
    first, second = pair(rng)
    noisy = Run(
        second.head,
        tuple(
            msgspec.structs.replace(one, value=one.value / 3, disturbed=True)
            if one.number < 7
            else one
            for one in second.samples
        ),
    )
    assert only(compared(first, noisy)).ratio == pytest.approx(1, abs=0.05)
    to_gpu = {"metric": "h2d-bandwidth", "device": Bdf.parse("0000:01:00.0")}
    copies = tuple(msgspec.structs.replace(one, **to_gpu) for one in noisy.samples)
    every, slowest = collect_series([Run(second.head, copies)]).values()
    assert (slowest.key.worst, slowest.low, slowest.high) == (True, every.low, every.high)


def test_published_figures_are_distinguished_far_beyond_any_boots_and_are_called_published() -> (
    None
):
    rng = random.Random(11)
    first, second = pair(rng, 1.0)
    printed = Run(
        second.head,
        (Sample("memory-bandwidth", "bytes_per_s", 561e9, statistic=Statistic.BEST, count=None),),
    )
    effect = only(compared(first, printed))
    assert effect.ratio == pytest.approx(5.61, rel=0.05)
    assert (effect.outcome, effect.caveats) == (Outcome.BETTER, (PRINTED,))
    assert effect.level is EvidenceLevel.PROVISIONAL


def test_bare_metal_is_compared_on_the_same_ground_only() -> None:
    rng = random.Random(12)
    ground = {"pus": CpuSet.parse("0-7"), "nodes": (0,)}
    host = _with(simulated_run("default", TRIAD, rng), vantage=Vantage.HOST, **ground)
    guest = _with(simulated_run("pin", {"memory-bandwidth": ("bytes_per_s", 90e9)}, rng), **ground)
    effect = only(compared(host, guest, bare=True))
    assert effect.ratio == pytest.approx(0.9, abs=0.03) and effect.caveats == ()
    elsewhere = _with(guest, pus=CpuSet.parse("8-15"))
    assert only(compared(host, elsewhere, bare=True)).caveats == ("other-ground",)
    unknown = [_with(run, pus=None) for run in (host, guest)]
    assert only(compared(*unknown, bare=True)).caveats == ("other-ground",)
    with pytest.raises(InputError, match="on the host itself"):
        compared(guest, host, bare=True)


def test_an_objective_has_at_most_six_primary_metrics_and_none_is_a_control() -> None:
    for objective in Objective:
        assert 1 <= len(list_primaries(objective)) <= 6
    assert not [one for one in METRICS.values() if one.control and one.primary]


def test_an_unknown_metric_is_named_and_not_compared() -> None:
    rng = random.Random(13)
    runs = [
        simulated_run(layout, {"frobs": ("units_per_s", 1.0), "app-rate:epochs": ("x", 2.0)}, rng)
        for layout in ("pin", "pin-numa")
    ]
    comparison = compared(*runs)
    assert [one.metric for one in comparison.effects] == ["app-rate:epochs"]
    assert "unknown-metric" in {one.id for one in comparison.caveats}
    on_one_side = compared(simulated_run("default", TRIAD, rng), runs[0])
    assert "unknown-metric" in {one.id for one in on_one_side.caveats}
    time = find_metric("app-time:epoch")
    assert time is not None
    assert time.lower_is_better


def test_what_the_suite_notes_as_well_is_neither_compared_nor_a_caveat() -> None:
    rng = random.Random(16)
    figures = {**TRIAD, "cache-capacity": ("bytes", 2.0**25), "smt-gain": ("ratio", 1.2)}
    comparison = compared(*(simulated_run(layout, figures, rng) for layout in ("pin", "default")))
    assert {one.metric for one in comparison.effects} == {"memory-bandwidth"}
    assert comparison.caveats == ()
