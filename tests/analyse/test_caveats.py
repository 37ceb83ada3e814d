"""What stands against comparing two alternatives, and copies of near and far memory."""

import math
import random
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.decide.alternative import Alternative, group_runs
from homenode.decide.caveats import find_caveats, find_own_caveats
from homenode.decide.compare import compare
from homenode.decide.comparison import Outcome, make_caveat
from homenode.decide.health import _find_slow_gpus, check_results, fit_sweeps
from homenode.decide.machine_facts import assign_runs
from homenode.decide.matrices import (
    Axis,
    CopyLocality,
    MatrixKey,
    build_matrices,
    compare_localities,
    find_far_copies,
)
from homenode.decide.recommendation import decide_for_machines
from homenode.decide.sentences import format_answer
from homenode.decide.summary import collect_series, headline_series
from homenode.findings import Caveat, Severity
from homenode.measure.results.model import (
    COLLECTIVE_GPUS,
    Condition,
    GpuPlace,
    Origin,
    Run,
    RunHead,
    Sample,
    Switches,
)
from homenode.measure.results.vantage import Vantage
from homenode.metrics import METRICS
from homenode.objective import Objective
from homenode.package_data import read_package_text
from homenode.vm.layout import PRESETS, Siblings
from homenode.vm.sources import load_host
from tests.simulated_runs import simulated_run

FIGURES = {"triad": ("bytes_per_s", 1e10)}


def caveats(first: Run, second: Run) -> dict[str, Caveat]:
    one, other = group_runs([first, second])
    return {caveat.id: caveat for caveat in find_caveats(one, other)}


def run_of(layout: str, *, origin: Origin = Origin.MEASURED, host: str | None = "a") -> Run:
    made = simulated_run(layout, FIGURES, random.Random(1), host=host)
    return replace(made, head=replace(made.head, origin=origin))


def test_runs_without_a_host_are_named() -> None:
    nameless = caveats(run_of("default", origin=Origin.IMPORTED), run_of("pin", host=None))
    assert nameless["host-unknown"].fix
    assert "host-unknown" not in caveats(run_of("default"), run_of("pin"))


def test_every_caveat_has_a_cause_a_fix_and_a_line_in_the_documents() -> None:
    page = Path("docs/reference/formats/comparison.md").read_text()
    for name in tomllib.loads(read_package_text("decide", "caveats.toml")):
        made = make_caveat(name, "x", "y")
        assert made.cause and made.fix and f"`{name}`" in page, name


@pytest.mark.parametrize(
    ("metric", "good", "bad", "named"),
    [
        ("h2d-bandwidth", [54e9] * 4, [54e9, 54e9, 5.1e9, 54e9], "GPU 2 copies 5.1 GB/s host to"),
        ("d2h-bandwidth", [54e9] * 2, [54e9, 5.1e9], "GPU 1 copies 5.1 GB/s device to host in pin"),
        ("h2d-bandwidth", [54e9] * 4, [54e9, 9e9, 54e9, 6e9], "GPU 3 copies 6 GB/s"),
        ("h2d-bandwidth", [54e9] * 3, [54e9, 54e9, 30e9], "GPU 2 copies 30 GB/s"),
        ("h2d-bandwidth", [54e9] * 2, [54e9, 30e9], ""),  # which of two is slow is not known
        ("h2d-bandwidth", [54e9] * 4, [30e9, 30e9, 54e9, 54e9], ""),  # two are far: no sick link
        ("allreduce-busbw", [2e10] * 17, [0.53e9] * 17, "allreduce-busbw passes 0.53 GB/s in pin,"),
        ("allreduce-busbw", [0.53e9] * 17, [0.53e9] * 17, ""),
    ],
)
def test_a_link_that_is_slow_in_one_layout_only_is_named_and_blocks_nothing(
    metric: str, good: list[float], bad: list[float], named: str
) -> None:
    def measured(layout: str, rates: list[float]) -> Run:
        is_sweep = metric == "allreduce-busbw"
        samples = [
            Sample(
                metric, "bytes_per_s", rate, size_bytes=1 << 14 + n if is_sweep else None, index=n
            )
            for n, rate in enumerate(rates)
        ]
        peak = Sample("allreduce-busbw-peak", "bytes_per_s", max(rates))
        return replace(run_of(layout), samples=(*samples, peak))

    found = [caveats(measured("default", good), measured("pin", bad))]
    found.append(caveats(measured("pin", bad), measured("default", good)))
    for each in found:
        detail = each["slow-in-one-layout"].detail if "slow-in-one-layout" in each else ""
        assert (
            (named in detail and "in pin" in detail and "default" in detail)
            if named
            else not detail
        )
        assert not detail or not each["slow-in-one-layout"].blocks
    (answer,) = decide_for_machines(
        [measured("default", good), measured("pin", bad)], (Objective.MULTI_GPU,)
    )
    assert ("slow-in-one-layout" in {caveat.id for caveat in answer.caveats}) == bool(named)


def test_of_a_gpus_slow_copies_the_slowest_are_named() -> None:
    def measured(layout: str, to_gpu: float, from_gpu: float) -> Run:
        rates = {"h2d-bandwidth": to_gpu, "d2h-bandwidth": from_gpu}
        samples = [
            Sample(metric, "bytes_per_s", slow_rate if gpu == 2 else 54e9, index=gpu)
            for metric, slow_rate in rates.items()
            for gpu in range(4)
        ]
        return replace(run_of(layout), samples=tuple(samples))

    found = caveats(measured("default", 54e9, 54e9), measured("pin", 30e9, 6e9))
    assert "GPU 2 copies 6 GB/s device to host" in found["slow-in-one-layout"].detail


@pytest.mark.parametrize(
    ("first", "second", "detail"),
    [
        (("NVIDIA H200",), ("NVIDIA L40S",), "NVIDIA H200 against NVIDIA L40S"),
        (("Xeon 8558", "NVIDIA H200"), ("EPYC 9575F",), "Xeon 8558 against EPYC 9575F"),
        (("Xeon 8558", "NVIDIA H200"), ("NVIDIA H200",), ""),
        (("Xeon 8558",), ("NVIDIA H200",), ""),
        (("NVIDIA H200",), ("NVIDIA GRID H200-20C",), ""),
        (("Intel Xeon E312xx (Sandy Bridge)",), ("Xeon 8558",), ""),
        (("RTX 4080",), ("RTX 4080 SUPER",), "RTX 4080 against RTX 4080 SUPER"),
    ],
)
def test_runs_of_one_directory_that_name_other_hardware_are_of_other_hosts(
    first: tuple[str, ...], second: tuple[str, ...], detail: str
) -> None:
    default, pin = (
        replace(run, head=replace(run.head, hardware=hardware))
        for run, hardware in ((run_of("default"), first), (run_of("pin"), second))
    )
    found = caveats(default, pin)
    assert (found["other-host"].detail if "other-host" in found else "") == detail


EXPOSED = replace(Switches.from_layout(PRESETS["pin-bound"]), siblings=Siblings.EXPOSED)


def _conditions(name: str, *values: str) -> list[dict[str, object]]:
    return [{"conditions": (Condition(name, value),)} for value in values]


_governors = partial(_conditions, "governor")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (_governors("a"), _governors("a"), set()),
        (_governors("a"), _governors("b"), {"other-conditions"}),
        (_governors("a", "b"), _governors("a", "b"), {"other-conditions"}),
        (_governors("a"), [{"conditions": ()}], set()),
        (_conditions("", "a"), _conditions("", "b"), {"other-conditions"}),
        ([{"system": "x"}], [{"system": "y"}], set()),  # of one host
        ([{"system": "x", "host": None}], [{"system": "y"}], {"other-host"}),
        ([{"host": "b", "host_kind": None}], [{}], {"other-host"}),
        ([{"host_kind": "b"}], [{}], {"other-host"}),
        ([{}, {"host": "b"}], [{}, {"host": "b"}], {"other-host"}),
        ([{"vcpus": 8}], [{"vcpus": 16}], {"other-vcpus"}),
        ([{"vcpus": 8}], [{"vcpus": 16, "vantage": Vantage.HOST}], set()),
        ([{"vcpus": 8}], [{"vcpus": 16, "switches": EXPOSED}], set()),  # siblings are vCPUs too
        ([{"place": 1}], [{"place": 2}], set()),  # two boots have no order
        ([{"place": 1}, {"place": 2}], [{"place": 3}], {"blocked-order"}),
        ([{"place": 1}, {"place": 3}], [{"place": 2}], set()),
    ],
)
def test_two_alternatives_have_the_caveats_of_how_their_runs_were_made(
    first: Sequence[dict[str, object]], second: Sequence[dict[str, object]], expected: set[str]
) -> None:
    sides = [
        [
            replace(run, head=replace(run.head, **({"conditions": ()} | changes)))
            for changes in heads
        ]
        for layout, heads in (("pin", first), ("pin-bound", second))
        for run in [simulated_run(layout, FIGURES, random.Random(1), boots=1)]
    ]
    one, other = (
        replace(made, runs=tuple(runs)) for runs in sides for made in group_runs(runs[:1])
    )
    assert {caveat.id for caveat in find_caveats(one, other)} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, True]),
        ({"host_kind": "other"}, [False, False]),
        ({"system": "other"}, [False, False]),
        ({"hardware": ("NVIDIA L40S",)}, [True, False]),
    ],
)
def test_nameless_runs_are_a_hosts_where_all_that_show_its_hardware_are_of_one_machine(
    changes: dict[str, object], expected: list[bool]
) -> None:
    host = load_host("h200-xeon8558")
    common = replace(run_of("pin").head, host=None, hardware=("NVIDIA H200",))
    runs = [Run(head, run_of("pin").samples) for head in (common, replace(common, **changes))]
    assert [run.head.host == host.fingerprint for run in assign_runs(runs, host)] == expected


def test_a_missing_gpu_of_a_collective_leaves_other_answers_and_is_named() -> None:
    busbw = {"allreduce-busbw-peak": ("bytes_per_s", 2e10)}
    runs = [
        simulated_run(
            layout,
            {"memory-bandwidth": ("bytes_per_s", rate), **busbw},
            random.Random(1),
            conditions=(Condition(COLLECTIVE_GPUS, count),),
        )
        for layout, rate, count in (("pin", 8e10, "3"), ("pin-numa", 5e11, "4"))
    ]
    found = {one.objective: one for one in decide_for_machines(runs, tuple(Objective))}
    answer = found[Objective.MEMORY_BANDWIDTH]
    assert (answer.layout, answer.tells) == ("pin-numa", True)
    line = format_answer("H200", [found[Objective.MULTI_GPU]])
    assert line.endswith("which layout is best: collective GPUs: 3 against 4")


def test_the_start_up_time_of_a_sweep_counts_the_gpus_of_its_tool() -> None:
    sizes = [8 << step for step in range(28)]
    # 4 GPUs move 1.5 bytes over the bus for a byte of all-reduce; a copy moves its own.
    samples = tuple(
        Sample(metric, "bytes_per_s", size / (size / 2e10 + 20e-6 / factor), size_bytes=size)
        for metric, factor in (("allreduce-busbw", 1.5), ("h2d-bandwidth", 1.0))
        for size in sizes
    )
    run = run_of("pin")
    head = replace(run.head, conditions=(Condition(COLLECTIVE_GPUS, "4"),))
    fits = fit_sweeps([replace(run, head=head, samples=samples)]).values()
    assert [fit.start_s for fit in fits] == [pytest.approx(20e-6, rel=0.01)] * 2


def test_caveats_of_some_metrics_leave_out_what_was_refused_of_others() -> None:
    run = run_of("pin")
    refused = Sample("memory-latency", "ns", 0.0)
    (one,) = group_runs([replace(run, samples=(*run.samples, refused))])
    for metric, number in (("memory-latency", 1), (run.samples[0].metric, 0)):
        found = [caveat.id for caveat in find_own_caveats(one, frozenset({metric}))]
        assert found.count("impossible-results") == number


def test_samples_of_thousands_of_positions_are_grouped_in_one_pass() -> None:
    samples = [Sample("h2d-bandwidth", "bytes_per_s", 1e9 + i, index=i) for i in range(2000)]
    (one,) = group_runs([replace(run_of("pin"), samples=tuple(samples))])
    found = one.series
    assert {(key.worst, series.medians) for key, series in found.items()} == {
        (False, (1e9 + 999.5,)),
        (True, (1e9,)),
    }


BEFORE = (21.1, 21.0, 26.2, 26.1, 26.3, 26.2, 21.2, 20.9)
AFTER = (26.2, 26.3, 26.4, 26.1, 25.8, 25.9, 24.9, 26.0)


def alternative(
    layout: str,
    figures: Sequence[float],
    nodes: Sequence[int | None] = (None,) * 8,
    *,
    metric: str = "h2d-bandwidth",
    bound: int | None = None,
    gpus: Sequence[Bdf] = (),
) -> Alternative:
    head = RunHead(
        f"{layout}-1", "gpus", Origin.IMPORTED, Vantage.HOST, Switches.from_layout(PRESETS[layout])
    )
    unit, scale = ("ns", 1.0) if "latency" in metric else ("bytes_per_s", 1e9)
    samples = tuple(
        Sample(
            metric,
            unit,
            value * scale,
            device=gpus[index] if gpus else None,
            index=None if gpus else index,
            node=bound,
            peer_node=node,
        )
        for index, (value, node) in enumerate(zip(figures, nodes, strict=False))
    )
    (found,) = group_runs([Run(head, samples)])
    return found


def test_copies_in_two_groups_of_two_are_far_in_the_slower_one() -> None:
    ((metric, detail),) = find_far_copies(alternative("default", BEFORE, (1,) * 8))
    assert metric == "h2d-bandwidth" and "4 of 8 GPUs" in detail
    for metrics, number in ((None, 1), (frozenset({metric}), 1), (frozenset({"other"}), 0)):
        assert len([*find_own_caveats(alternative("default", BEFORE), metrics)]) == number
    latency = alternative("default", (700, 702, 1100, 1104), metric="h2d-latency")
    ((_, detail),) = find_far_copies(latency)
    assert detail == "h2d-latency: 2 of 4 GPUs 1,102 ns, the others 701 ns"
    assert not list(find_far_copies(alternative("default", BEFORE, bound=0)))


def test_gpus_that_differ_by_chance_or_one_slow_link_are_no_groups() -> None:
    rng = random.Random(5)
    for _ in range(300):
        figures = [25.0 * rng.gauss(1, 0.01) for _ in range(8)]
        assert not list(find_far_copies(alternative("default", figures)))
    assert not list(find_far_copies(alternative("default", (*AFTER[:7], 12.0))))
    near = alternative("default", AFTER)
    (run,) = near.runs  # and copies of 4 KiB in two groups
    small = alternative("default", BEFORE).runs[0].samples
    samples = (*run.samples, *(replace(sample, size_bytes=4096) for sample in small))
    assert not list(find_far_copies(replace(near, runs=(replace(run, samples=samples),))))
    assert not _find_slow_gpus({(gpu, 4096, None): (1e9, math.nan) for gpu in range(4)})


def test_copies_that_were_bound_to_the_other_node_are_remote() -> None:
    gpus = [Bdf.parse(f"0000:{bus:02x}:00.0") for bus in (7, 8, 0x47, 0x48)]
    bound = alternative("default", BEFORE[:2] + BEFORE[:2], bound=1, gpus=gpus)
    (found,) = compare_localities([bound], dict.fromkeys(gpus, 0))
    assert (found.local, found.cells) == (None, (0, 4))
    (found,) = compare_localities([bound], dict.fromkeys(gpus, 1))
    assert (found.remote, found.cells) == (None, (4, 0))
    assert found.local == pytest.approx(21.05e9)
    (matrix,) = build_matrices(alternative("default", BEFORE, bound=1))  # GPUs without address
    assert len(matrix.cells) == 8
    partly = alternative("default", AFTER, (0, 0, 1, None), gpus=gpus)  # the last has no place
    node_of = dict(zip(gpus, (0, 0, 1, 1), strict=True))
    (found,) = compare_localities([partly], node_of)
    assert found.cells == (3, 0)


def test_a_guests_nodes_are_not_the_hosts() -> None:
    gpus = [Bdf.parse(f"0000:{bus:02x}:00.0") for bus in (7, 8)]
    (run,) = alternative("pin-numa-pci", (25.0, 25.0), bound=1, gpus=gpus).runs
    places = tuple(GpuPlace(gpu, 1) for gpu in gpus)
    head = structs.replace(run.head, vantage=Vantage.GUEST, gpus=places)
    (found,) = compare_localities(group_runs([Run(head, run.samples)]), dict.fromkeys(gpus, 0))
    assert found.cells == (2, 0)


@pytest.mark.parametrize(
    ("unit", "local", "remote", "ratio"),
    [
        ("ns", 1.0, 2.0, 2.0),
        ("bytes_per_s", 1.0, 2.0, 0.5),
        ("ns", None, 2.0, None),
        ("ns", 1.0, None, None),
    ],
)
def test_a_ratio_above_1_is_in_favour_of_the_near_node(
    unit: str, local: float | None, remote: float | None, ratio: float | None
) -> None:
    key = MatrixKey("copies", unit, None, Axis.NODE, Axis.GPU)
    found = CopyLocality(
        alternative="a", key=key, local=local, remote=remote, cells=(1, 1), basis=""
    )
    assert found.ratio == ratio


@pytest.mark.parametrize("count", [6, 9])
def test_pairs_of_three_gpus_are_a_matrix_with_or_without_its_diagonal(count: int) -> None:
    indices = [i for i in range(9) if count == 9 or i % 4]
    (run,) = alternative("pin", [5.0] * count, [None] * count, metric="p2p-bandwidth").runs
    pairs = zip(run.samples, indices, strict=True)
    samples = tuple(replace(sample, index=index) for sample, index in pairs)
    (matrix,) = build_matrices(*group_runs([Run(run.head, samples)]))
    assert (len(matrix.rows), len(matrix.cells)) == (3, count)


@pytest.mark.parametrize(("metric", "count"), [("core-to-core-latency", 1), ("p2p-latency", 0)])
def test_pairs_of_cpus_are_a_matrix_of_their_metric_alone(metric: str, count: int) -> None:
    samples = tuple(Sample(metric, "ns", 60.0, variant=pair) for pair in ("0 to 1", "1 to 0"))
    assert len(build_matrices(*group_runs([replace(run_of("pin"), samples=samples)]))) == count


def test_gpus_that_copy_slowly_are_counted_and_a_healthy_layout_clears_them() -> None:
    gpus = [Bdf.parse(f"0000:{bus:02x}:00.0") for bus in (7, 8, 0x47, 0x48)]
    healthy = alternative("pin", (24, 24, 24, 24), gpus=gpus).runs
    slow = alternative("default", (24, 24, 24, 9), gpus=gpus).runs
    (finding,) = check_results(slow)
    assert (finding.id, finding.severity) == ("h2d-low", Severity.WARNING)
    assert "62 % below" in (finding.cost or "")
    assert not check_results([*healthy, *slow])
    assert len(check_results(alternative("default", (24, 24, 16, 16), gpus=gpus).runs)) == 2
    assert not check_results(alternative("pin", (24, 12), gpus=gpus).runs), "which is the usual?"
    low = check_results(alternative("default", (6, 24, 24, 7), gpus=gpus).runs)
    assert [one.observed for one in low if one.severity is Severity.CRITICAL] == [
        "6.0 GB/s (2 of 4 GPUs)"
    ]
    partly = alternative("pin", (24, 24, 24, 7), gpus=gpus).runs
    both = check_results([*alternative("default", (6, 24, 24, 7), gpus=gpus).runs, *partly])
    assert [one.severity for one in both].count(Severity.CRITICAL) == 2
    again = alternative("default", (24, 24, 24, 24), gpus=gpus).runs  # another run clears nothing
    assert "6.0 GB/s (2 of 4 GPUs)" in [
        one.observed
        for one in check_results([*alternative("default", (6, 24, 24, 7), gpus=gpus).runs, *again])
    ]


def test_the_slowest_of_five_gpus_is_compared_with_the_fastest_two() -> None:
    samples = [Sample("h2d-bandwidth", "bytes_per_s", n * 1e9, index=n) for n in range(1, 6)]
    made = collect_series([replace(run_of("pin"), samples=tuple(samples))])
    (slowest,) = [series for key, series in made.items() if key.worst]
    assert slowest.shares == pytest.approx((1 / math.sqrt(4 * 5),))


def test_samples_within_a_boot_say_how_sure_its_median_is() -> None:
    (run,) = alternative("pin", [math.exp(n) for n in range(3)], metric="memory-bandwidth").runs
    samples = tuple(replace(sample, index=None) for sample in run.samples)
    (series,) = collect_series([Run(run.head, samples)]).values()
    assert series.inner_variance == pytest.approx(math.pi / 2 / 3)
    disturbed = tuple(replace(sample, disturbed=True) for sample in samples)
    (series,) = collect_series([Run(replace(run.head, experiment="a"), disturbed)]).values()
    assert (series.samples, series.blocks) == (3, (None,))


def test_a_control_that_moved_by_less_than_matters_takes_no_metric_with_it() -> None:
    rng, triad = random.Random(6), {"memory-bandwidth": ("bytes_per_s", 1e11)}
    runs = [
        simulated_run(layout, triad | {"cpu-single": ("events_per_s", rate)}, rng, boots=8)
        for layout, rate in (("pin", 3000.0), ("pin-numa", 2940.0))
    ]
    found = compare(group_runs(runs))
    assert Outcome.WORSE in [one.outcome for one in found.effects if one.metric == "cpu-single"]
    assert not found.caveats


def test_of_several_states_the_one_with_the_most_samples_is_a_metrics_headline() -> None:
    (run,) = alternative("pin", [1.0, 2.0, 3.0], metric="memory-bandwidth").runs
    pairs = zip(run.samples, ("110 ns", "27 ns", "27 ns"), strict=True)
    samples = tuple(replace(sample, index=None, state=state) for sample, state in pairs)
    series = collect_series([Run(run.head, samples)])
    headline = headline_series(series, METRICS["memory-bandwidth"])
    assert headline is not None and headline.key.state == "27 ns"


def test_before_and_after_are_compared_whatever_node_the_threads_chose() -> None:
    before = alternative("default", BEFORE, (1,) * 8)
    after = alternative("pin-numa-pci", AFTER, (1, 1, 1, 1, 0, 0, 0, 0))
    found = compare([before, after])
    (effect,) = (one for one in found.effects if one.primary)
    assert effect.slowest_device
    assert effect.outcome is Outcome.BETTER
    assert [one.subject for one in found.caveats if one.id == "far-copies"] == ["default"]


def test_cells_that_bench_bound_to_the_other_node_are_no_far_copies() -> None:
    """A healthy guest of two nodes and four GPUs, as bench measures it: unbound, then bound to each
    node; then with a thread that stands away from GPUs whose node the guest knows."""
    gpus = [Bdf.parse(f"0000:{bus:02x}:00.0") for bus in (7, 8, 0x47, 0x48)]
    near, far = (55.3, 55.1, 55.4, 55.2), (41.2, 41.3, 41.0, 41.1)
    bound = (
        (near, None),
        ((*near[:2], *far[2:]), 0),
        ((*far[:2], *near[2:]), 1),
    )
    whole = [
        alternative("pin-numa-pci", figures, bound=node, gpus=gpus).runs[0]
        for figures, node in bound
    ]
    samples = tuple(sample for run in whole for sample in run.samples)
    head = structs.replace(
        whole[0].head,
        gpus=tuple(GpuPlace(gpu, place // 2) for place, gpu in enumerate(gpus)),
    )
    assert not list(find_own_caveats(group_runs([Run(head, samples)])[0]))
    (found,) = compare_localities(group_runs([Run(whole[0].head, samples)]), {})
    assert [found.local, found.remote] == pytest.approx([55.25e9, 41.15e9])
    astray = alternative("pin-numa-pci", (*far[:2], *near[2:]), (1,) * 4, gpus=gpus).runs[0]
    (caveat,) = find_own_caveats(group_runs([astray])[0])
    assert caveat.id == "far-copies" and "2 of 4 GPUs 41.2 GB/s" in caveat.detail
    unplaced = alternative("pin-numa-pci", (*far[:2], *near[2:]), gpus=gpus).runs[0]
    for run, ids in ((astray, []), (unplaced, ["far-copies"])):
        known = Run(structs.replace(run.head, gpus=head.gpus), run.samples)
        assert [caveat.id for caveat in find_own_caveats(group_runs([known])[0])] == ids
