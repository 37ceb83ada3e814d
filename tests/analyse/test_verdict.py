"""Verdicts: what the published figures support, that noise does not overturn it, its strength."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.decide.alternative import group_by_argument, group_runs
from homenode.decide.compare import compare
from homenode.decide.comparison import EvidenceLevel
from homenode.decide.health import check_results
from homenode.decide.machine_facts import (
    MachineFacts,
    collect_host_facts,
    collect_run_facts,
    group_runs_by_machine,
    select_own_runs,
    select_runs_of_kind,
)
from homenode.decide.ranking import OTHER_NODE, OWN_NODE, MetricRank, Ranking, is_like_best
from homenode.decide.recommendation import (
    ReasonId,
    Recommendation,
    decide,
    decide_all,
    decide_for_machines,
    recommend,
)
from homenode.decide.sentences import (
    format_answer,
    format_basis,
    format_effect,
    format_sentence,
)
from homenode.decide.switch_effects import answer_of, conclude
from homenode.findings import Severity
from homenode.measure.results.model import (
    UNKNOWN_SWITCHES,
    Origin,
    Run,
    Sample,
    Statistic,
    Switches,
    host_kind,
)
from homenode.measure.results.vantage import Vantage
from homenode.measure.trial.journal import TrialHead
from homenode.objective import Objective
from homenode.vm.layout import PRESETS
from homenode.vm.sources import load_host
from tests.published_runs import PUBLISHED_RUNS, runs_of
from tests.simulated_runs import BOOTS, SAMPLES, simulated_run

MACHINES = {
    (one.system, one.objective): one
    for one in decide_for_machines(PUBLISHED_RUNS, tuple(Objective))
}
STREAM = {"default": 77e9, "pin": 75e9, "pin-numa": 561e9}


def published(system: str, objective: Objective) -> Recommendation:
    return MACHINES[system, objective]


def facts(name: str) -> MachineFacts:
    return collect_host_facts(load_host(name))


def measured(runs: Sequence[Run], objective: Objective) -> Recommendation:
    """The answer for a machine of which nothing is known but these runs."""
    evidence = tuple(runs)
    return decide(evidence, collect_run_facts("H200", runs), objective)


def runs_with(
    values: Mapping[str, float],
    seed: int | random.Random,
    metric: str = "memory-bandwidth",
    **options: Any,
) -> list[Run]:
    """A run of each layout with this value of a metric."""
    rng = random.Random(seed) if isinstance(seed, int) else seed
    return [
        simulated_run(layout, {metric: ("bytes_per_s", value)}, rng, **options)
        for layout, value in values.items()
    ]


@pytest.mark.parametrize("system", ["H200", "RTX PRO 6000", "MI350X"])
def test_gpus_without_a_node_make_collectives_a_caveat_with_the_layout_to_measure(
    system: str,
) -> None:
    made = published(system, Objective.MULTI_GPU)
    assert made.measure_next == "pin-numa-pci"
    assert any(caveat.id == "gpus-without-node" for caveat in made.caveats)


@pytest.mark.parametrize(("system", "gain"), [("H200", 1.0227), ("MI350X", 1.0263)])
def test_siblings_are_worth_two_to_three_percent_of_throughput_and_no_more(
    system: str, gain: float
) -> None:
    made = published(system, Objective.THROUGHPUT)
    assert (made.choice, made.layout, made.avoid) == ("pin", "pin-bound", ())
    assert made.results[0].alternative == "pin-numa-smt" and made.measure_next is None
    assert 1 / made.results[1].ratio == pytest.approx(gain, abs=1e-3)
    dense = published(system, Objective.DENSITY)
    assert (dense.layout, dense.keeps_vcpus) == ("pin-numa-smt", True)


def test_rtx_4080_pins_are_to_be_reviewed_with_candidates() -> None:
    made = published("RTX 4080", Objective.THROUGHPUT)
    assert (made.choice, made.layout, made.avoid) == ("default", "default", ("pin",))
    (caveat,) = [one for one in made.caveats if one.id == "pin-regression"]
    assert "homenode doctor" in caveat.fix
    assert caveat.detail.startswith("36 % below")
    answer = format_answer("RTX 4080", (made,))
    assert answer.startswith("RTX 4080: review first: check the pins") and "36 % slower" in answer


def test_a_measured_difference_may_be_smaller_than_one_that_may_be_none() -> None:
    result = replace(
        published("H200", Objective.THROUGHPUT).results[1],
        metric="memory-bandwidth",  # of which 5 % matter
        position=MetricRank.UNDECIDED,
        level=EvidenceLevel.MEASURED,
        low=0.9,
    )
    for high, nearest in ((0.99, 0.96), (1.01, 0.95)):
        for ratio in (nearest + 0.001, nearest - 0.001):
            compared = replace(result, high=high, ratio=ratio)
            assert is_like_best(compared) is (ratio > nearest)


def test_where_none_is_like_the_best_the_smallest_loss_not_shown_to_be_worse_is_chosen() -> None:
    first, *_ = published("H200", Objective.THROUGHPUT).results
    positions = {1.0: MetricRank.BEST, 0.94: MetricRank.WORSE}
    for losses, like in (
        ({"a": (1.0, 0.94), "b": (0.7, 1.0)}, "b"),
        ({"a": (1.0, 0.7), "b": (0.8, 0.8), "c": (0.6, 1.0)}, "b"),
    ):
        results = [
            replace(
                first,
                alternative=name,
                metric=metric,
                position=positions.get(ratio, MetricRank.UNDECIDED),
                ratio=ratio,
            )
            for name, ratios in losses.items()
            for metric, ratio in zip(("h2d-bandwidth", "d2h-bandwidth"), ratios, strict=True)
        ]
        assert Ranking(tuple(results), ()).like() == (like,)


def test_runs_of_a_directory_are_of_one_machine_unless_they_name_two_hosts_or_kinds() -> None:
    (run,) = runs_with({"pin": 1e11}, 1)
    for hosts, names in (
        ([(None, "one"), (None, "two")], [" on one", " on two"]),
        (
            [(None, None), ("a", None), ("b", None)],
            [" on a host that is not named", " on a", " on b"],
        ),
    ):
        runs = [
            replace(run, head=replace(run.head, host=host, host_kind=kind)) for host, kind in hosts
        ]
        assert list(group_runs_by_machine(runs)) == [run.head.system + name for name in names]


def test_runs_of_a_kind_are_those_of_other_machines_alone() -> None:
    machine = collect_host_facts(load_host("h200-xeon8558"))
    run = simulated_run("pin", {"memory-bandwidth": ("bytes_per_s", 1e11)}, random.Random(1))
    hosts = (machine.fingerprint, "other", None)
    runs = [
        replace(run, head=replace(run.head, host=host, host_kind=kind, vantage=Vantage.GUEST))
        for host in hosts
        for kind in (machine.kind, "another", None)
    ]
    assert select_runs_of_kind(runs, machine) == {"other": (runs[3],)}
    assert not select_runs_of_kind(runs, replace(machine, kind=None))


@pytest.mark.parametrize(("pinned", "layout"), [("pin", "default"), ("pin-numa", "pin-bound")])
def test_default_is_the_layout_only_where_pins_of_a_flat_guest_lost(
    pinned: str, layout: str
) -> None:
    made = measured(runs_with({"default": 5e11, pinned: 7e10}, 1), Objective.MEMORY_BANDWIDTH)
    assert (made.choice, made.layout, made.avoid) == ("default", layout, (pinned,))


@pytest.mark.parametrize("objective", Objective)
def test_nothing_is_recommended_for_the_rtx_5090_before_its_links_are_fixed(
    objective: Objective,
) -> None:
    made = published("RTX 5090", objective)
    assert (made.choice, made.layout, made.level) == (None, None, None)
    if objective in (Objective.MULTI_GPU, Objective.GPU_COPY):
        assert {one.id for one in made.findings} == {"h2d-low"}
    else:  # the source calls its whole set compromised
        assert made.find_reason(ReasonId.UNUSABLE)


def test_measured_zero_latencies_stop_the_answer_for_latency_alone() -> None:
    rng = random.Random(1)
    figures = {"memory-bandwidth": ("bytes_per_s", 1e11), "memory-latency": ("ns", 0.0001)}
    runs = [simulated_run(layout, figures, rng) for layout in ("pin", "pin-numa")]
    zeroed = [
        Run(
            run.head,
            tuple(
                msgspec.structs.replace(s, value=0.0) if s.unit == "ns" else s for s in run.samples
            ),
        )
        for run in runs
    ]
    made = measured(zeroed, Objective.LATENCY)
    assert (made.choice, made.find_reason(ReasonId.IMPOSSIBLE) is not None) == (None, True)
    assert format_basis(made) == "not ready"
    assert format_basis(replace(made, reasons=())) == "cannot tell"
    assert measured(zeroed, Objective.MEMORY_BANDWIDTH).choice is not None


def test_sdumont_wants_local_memory_and_says_which_queue_gives_it() -> None:
    memory_bound = published("GH200 x4", Objective.GPU_COPY)
    assert memory_bound.choice == "the GPU's own node"
    assert memory_bound.layout == "pin-numa-pci"
    assert memory_bound.find_reason(ReasonId.NO_LAYOUT)
    between = published("GH200 x4", Objective.MULTI_GPU)
    assert between.avoid == ()


def test_every_verdict_of_published_figures_says_so_and_names_its_source() -> None:
    levels = {made.level for made in MACHINES.values()}
    assert levels == {None, EvidenceLevel.PROVISIONAL, EvidenceLevel.RULE}
    for made in MACHINES.values():
        assert made.sources or made.level is not EvidenceLevel.PROVISIONAL


_CELLS = ("pin-numa", {"default", "pin"})
ARTICLE = {
    ("H200", Objective.MULTI_GPU): ("pin", {"pin-numa", "pin-numa-smt"}),
    ("H200", Objective.MEMORY_BANDWIDTH): _CELLS,
    ("MI350X", Objective.MULTI_GPU): ("pin", None),
    ("MI350X", Objective.MEMORY_BANDWIDTH): _CELLS,
    ("RTX PRO 6000", Objective.MULTI_GPU): ("pin", None),
    ("RTX PRO 6000", Objective.MEMORY_BANDWIDTH): _CELLS,
    ("RTX PRO 6000", Objective.LATENCY): (None, set()),  # zeroes
    ("RTX 4090", Objective.MEMORY_BANDWIDTH): _CELLS,
    ("RTX 4090", Objective.LATENCY): (None, set()),
    ("RTX 4080", Objective.THROUGHPUT): ("default", {"pin"}),
    ("RTX 4080", Objective.LATENCY): (None, set()),
    ("RTX 5090", Objective.MULTI_GPU): (None, set()),
    ("Xen, 2 nodes of 16 cores", Objective.THROUGHPUT): ("cores-first", {"memory-first"}),
}
"""What the sources recommend by their results, and what is worse; None: not looked at."""


@pytest.mark.parametrize(("system", "objective"), ARTICLE)
def test_our_answer_is_the_sources_where_its_results_are_behind_it(
    system: str, objective: Objective
) -> None:
    made = published(system, objective)
    choice, avoid = ARTICLE[system, objective]
    assert made.choice == choice and avoid in (None, set(made.avoid))
    if objective is Objective.LATENCY:
        assert made.find_reason(ReasonId.IMPOSSIBLE) is not None
    if choice == "cores-first":
        assert made.layout == "pin-bound"


def _repeated(run: Run, rng: random.Random) -> Run:
    """A published run as if it had been measured: three boots of ten samples, 1 % of noise each."""
    levels: dict[tuple[str, str, str | None, int | None], list[float]] = {}
    for one in run.samples:
        levels.setdefault((one.metric, one.unit, one.variant, one.index), []).append(one.value)
    samples = [
        Sample(
            metric,
            unit,
            middle * rng.lognormvariate(0, 0.01) * level,
            boot=boot,
            number=number,
            variant=variant,
            index=index,
        )
        for (metric, unit, variant, index), values in levels.items()
        for middle in [sum(values) / len(values)]
        for boot in range(BOOTS)
        for level in [rng.lognormvariate(0, 0.01)]
        for number in range(SAMPLES)
    ]
    head = structs.replace(run.head, origin=Origin.MEASURED, host="the host")
    return Run(head, tuple(samples))


HELD = [
    ("H200", Objective.MULTI_GPU),
    ("H200", Objective.MEMORY_BANDWIDTH),
    ("H200", Objective.THROUGHPUT),
    ("RTX PRO 6000", Objective.MULTI_GPU),
    ("RTX PRO 6000", Objective.LATENCY),
    ("MI350X", Objective.MULTI_GPU),
    ("MI350X", Objective.THROUGHPUT),
    ("RTX 4090", Objective.MEMORY_BANDWIDTH),
    ("RTX 4080", Objective.THROUGHPUT),
    ("RTX 5090", Objective.MULTI_GPU),
    ("HGX A100", Objective.GPU_COPY),
    ("GH200 x4", Objective.GPU_COPY),
    ("GH200 x4", Objective.MULTI_GPU),
    ("Xen, 2 nodes of 16 cores", Objective.THROUGHPUT),
]


@pytest.mark.parametrize(("system", "objective"), HELD)
def test_a_verdict_holds_over_simulated_repeats_around_its_figures(
    system: str, objective: Objective
) -> None:
    first = recommend(system, group_runs(runs_of(system)), objective)
    runs = runs_of(system)
    owned = 0
    for seed in range(20):
        rng = random.Random(seed)
        made = recommend(system, group_runs(_repeated(run, rng) for run in runs), objective)
        if objective is Objective.MULTI_GPU and system in ("H200", "MI350X"):
            owned += made.layout in ("pin", "default") and set(made.avoid) >= set(first.avoid)
        else:
            owned += (made.layout, made.avoid) == (first.layout, first.avoid)
    assert owned >= 19


def test_one_boot_of_each_tells_nothing_that_boots_of_one_layout_may_differ_by() -> None:
    runs = runs_with({"pin": 47e9, "pin-numa": 79e9}, 1, boots=1)
    made = measured(runs, Objective.MEMORY_BANDWIDTH)
    assert (made.level, made.avoid) == (EvidenceLevel.RULE, ())
    assert made.results[1].position is MetricRank.UNSHOWN


def test_a_boot_with_a_run_of_each_tool_counts_once() -> None:
    runs = runs_with({"pin": 47e9, "pin-numa": 79e9}, 1, boots=3)
    others = [
        replace(run, samples=tuple(replace(s, metric="cpu-throughput") for s in run.samples))
        for run in runs
    ]
    assert measured([*runs, *others], Objective.MEMORY_BANDWIDTH).boots == (3, 3)
    for run in runs:  # another variant was measured in the first boot alone
        more = (*run.samples, replace(run.samples[0], variant="copy"))
        others.append(replace(run, samples=more))
    assert measured(others[2:], Objective.MEMORY_BANDWIDTH).boots == (3, 3)


def test_the_strongest_evidence_that_can_tell_decides() -> None:
    machine = facts("h200-xeon8558")
    rng = random.Random(2)

    def runs(fingerprint: str, kind: str, boots: int = BOOTS) -> list[Run]:
        made = runs_with(STREAM, rng, host=fingerprint, boots=boots)
        return [Run(structs.replace(run.head, host_kind=kind), run.samples) for run in made]

    def level(*those: Run) -> tuple[EvidenceLevel | None, bool]:
        made = decide((those), machine, Objective.MEMORY_BANDWIDTH)
        assert made.layout == "pin-numa"
        return made.level, made.this_machine

    here, kind = machine.fingerprint or "", machine.kind or ""
    assert kind == host_kind(load_host("h200-xeon8558"))
    assert level(*runs(here, kind)) == (EvidenceLevel.MEASURED, True)
    assert level(*runs("another", kind)) == (EvidenceLevel.MEASURED, False)
    assert level(*runs(here, kind, 1), *runs("another", kind)) == (EvidenceLevel.MEASURED, False)
    assert level(*runs(here, kind, 1)) == (EvidenceLevel.PROVISIONAL, True)
    mixed = (*runs(here, kind, 1)[:1], *runs(here, kind)[1:])  # of default one boot
    assert level(*mixed) == (EvidenceLevel.PROVISIONAL, True)
    assert level(*runs("another", "another kind")) == (EvidenceLevel.RULE, False)
    assert level() == (EvidenceLevel.RULE, False)


def test_a_host_that_no_one_has_measured_is_reasoned_about_and_says_so() -> None:
    made = decide((), facts("hgx-h100"), Objective.MULTI_GPU)
    assert (made.level, made.measure_next) == (EvidenceLevel.RULE, "pin-numa-pci")
    flat = decide((), facts("x86-1p1n4c4t"), Objective.MEMORY_BANDWIDTH)
    assert (flat.level, flat.choice, flat.layout) == (
        EvidenceLevel.RULE,
        "pin-bound",
        "pin-bound",
    )


def test_a_machine_type_without_expander_buses_is_not_given_one() -> None:
    machine = facts("hgx-h100")
    inputs = replace(machine.inputs, expander_buses=False)
    made = decide((), machine, Objective.GPU_COPY, inputs)
    assert made.layout == "pin-bound"
    assert "expander bus" in format_sentence(made)


@pytest.mark.parametrize("nodes", [4, 1])
@pytest.mark.parametrize("objective", [Objective.MULTI_GPU, Objective.GPU_COPY])
def test_grace_gpus_get_a_layout_that_gives_their_memory_nodes(
    objective: Objective, nodes: int
) -> None:
    machine = facts("gh200x4")
    inputs = replace(machine.inputs, nodes=nodes)
    assert inputs.has_grace
    assert decide((), machine, objective, inputs).layout == "pin-numa-pci"
    flat = replace(inputs, expander_buses=False)
    assert decide((), machine, objective, flat).layout == "pin-bound"


def test_a_vm_without_gpus_on_a_grace_host_needs_no_expander_bus() -> None:
    machine = facts("gh200x4")
    without = decide((), machine, Objective.MULTI_GPU, replace(machine.inputs, has_gpus=False))
    assert without.layout == "pin-bound"
    with_gpus = replace(machine.inputs, has_gpus=True)
    given = decide((), machine, Objective.MEMORY_BANDWIDTH, with_gpus)
    assert given.layout == "pin-numa-pci"
    assert "Grace" in format_sentence(given)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("field", ["private_memory", "is_pv"])
def test_private_memory_and_pv_guests_of_xen_have_no_cells(
    objective: Objective, field: str
) -> None:
    machine = facts("hgx-h100")
    inputs = replace(machine.inputs, **{field: True})
    made = decide((), machine, objective, inputs)
    assert made.layout == "pin-bound"
    runs = runs_with(STREAM, 3, host=machine.fingerprint)
    made_here = decide(runs, machine, objective, inputs)
    assert made_here.layout == "pin-bound"
    is_changed = decide((), machine, objective).layout != "pin-bound"
    reason = "private memory" if field == "private_memory" else "PV guests"
    assert (reason in format_sentence(made)) is is_changed


def test_a_flat_guest_that_was_measured_on_this_grace_host_is_believed() -> None:
    machine = facts("gh200x4")
    values = {"pin-bound": 2e11, "pin-numa-pci": 1e11}
    runs = runs_with(values, 4, "allreduce-busbw-peak", host=machine.fingerprint)
    made = decide(runs, machine, Objective.MULTI_GPU)
    assert (made.this_machine, made.layout) == (True, "pin-bound")


def test_a_healthy_machine_of_an_excluded_kind_is_reasoned_about() -> None:
    sick = facts("rtx5090-epyc7702")
    made = decide((), replace(sick, findings=()), Objective.MULTI_GPU)
    assert made.level is EvidenceLevel.RULE


@pytest.mark.parametrize("objective", Objective)
def test_sick_links_block_the_objectives_that_use_them_however_good_the_results(
    objective: Objective,
) -> None:
    sick = facts("rtx5090-epyc7702")
    made = decide(runs_with(STREAM, 3, host=sick.fingerprint), sick, objective)
    if objective in (Objective.MULTI_GPU, Objective.GPU_COPY):
        assert (made.choice, made.layout, len(made.findings)) == (None, None, 8)
    else:
        assert (made.layout is not None, made.findings) == (True, ())


def test_a_machine_has_no_answer_for_what_it_has_too_few_gpus_for() -> None:
    answers = {one.objective: one for one in decide_all((), facts("rtx4080-i9-14900k"))}
    assert answers[Objective.MULTI_GPU].choice is None
    assert format_sentence(answers[Objective.MULTI_GPU]) == "it takes 2 GPUs"
    assert answers[Objective.GPU_COPY].choice is not None
    assert answers[Objective.GPU_COPY].measure_next is None  # it has one node


def test_measured_layouts_with_expander_buses_answer_the_open_question() -> None:
    values = {"pin": 18.4e9, "pin-numa": 8.6e9, "pin-numa-pci": 26e9}
    runs = runs_with(values, 3, "allreduce-busbw-peak")
    made = measured(runs, Objective.MULTI_GPU)
    assert (made.level, made.layout, made.measure_next) == (
        EvidenceLevel.MEASURED,
        "pin-numa-pci",
        None,
    )
    assert not [one for one in made.caveats if one.id == "gpus-without-node"]


@pytest.mark.parametrize("connect", ["qemu:///system", "qemu+ssh://node/system"])
def test_a_trial_names_the_command_for_each_layout_of_this_machine(connect: str) -> None:
    machine = facts("h200-xeon8558")
    runs = runs_with({"pin": 1e11, "pin-numa": 3e11}, 3, host=machine.fingerprint)
    at = "" if connect == "qemu:///system" else f" --connect {connect}"
    commands = conclude(runs, "vm", connect, ("--yes",), machine).commands
    answers = decide_all(runs, machine)
    assert commands[Objective.MEMORY_BANDWIDTH] == f"homenode apply vm{at} --yes --layout pin-numa"
    assert commands.keys() == {one.objective for one in answers if one.this_machine}


def test_a_trial_tells_the_part_of_bare_metal_on_the_metric_that_decides() -> None:
    machine, rng = facts("h200-xeon8558"), random.Random(3)
    rates = {"bare": (4e11, 100.0), "pin": (2e11, 200.0), "pin-numa": (3e11, 125.0)}
    runs = [
        simulated_run(
            "default" if name == "bare" else name,
            {"memory-bandwidth": ("bytes_per_s", rate), "memory-latency": ("ns", latency)},
            rng,
            host=machine.fingerprint,
            boots=5,
        )
        for name, (rate, latency) in rates.items()
    ]
    bare = replace(runs[0], head=replace(runs[0].head, vantage=Vantage.HOST))
    made = conclude([bare, *runs[1:]], "vm", "qemu:///system", (), machine)
    head = TrialHead("t", "", "vm", "u", "vm", (), 5, 1, "", objective=Objective.LATENCY)
    assert re.search(
        "run pin-numa for latency: .*; 12[3-7] % of bare metal$", answer_of(made, head, 5).sentence
    )
    triads = [
        [replace(one, variant="triad") for one in run.samples if one.unit != "ns"]
        for run in (bare, *runs[1:])
    ]
    adds = [replace(one, variant="add", value=1e11) for one in triads[0]]
    kernels = [
        replace(run, samples=(*triad, *adds))
        for run, triad in zip((bare, *runs[1:]), triads, strict=True)
    ]
    both = conclude(kernels, "vm", "qemu:///system", (), machine)
    head = replace(head, objective=Objective.MEMORY_BANDWIDTH)
    assert re.search("; 7[3-7] % of bare metal$", answer_of(both, head, 5).sentence)
    by_rule = tuple(replace(one, level=EvidenceLevel.RULE) for one in made.recommendations)
    unsure = answer_of(structs.replace(made, recommendations=by_rule), head, 5)
    assert unsure.is_open and "cannot tell" in unsure.sentence


def test_runs_without_a_host_are_a_machines_if_directory_and_kind_agree() -> None:
    (run,) = runs_with({"pin": 1e11}, 1)
    runs = [
        replace(run, head=replace(run.head, host=None, **changes))
        for changes in ({}, {"host_kind": "other"}, {"system": "other"}, {"host_kind": None})
    ]
    named = replace(run, head=replace(run.head, host="a" * 64))
    assert select_own_runs([*runs, named], collect_run_facts("H200", runs)) == (runs[0],)


def test_results_of_two_hosts_are_two_verdicts_and_never_mixed() -> None:
    rng = random.Random(4)
    runs = [run for host in ("a", "b") for run in runs_with(STREAM, rng, host=host)]
    found = decide_for_machines(runs, [Objective.MEMORY_BANDWIDTH, Objective.MULTI_GPU])
    assert [one.layout for one in found] == ["pin-numa", "pin-numa"]
    assert len({one.system for one in found}) == 2


@pytest.mark.parametrize(("tree", "layout"), [(1e11, "pin-bound"), (None, "pin-numa-pci")])
def test_pairs_of_gpus_and_nics_get_their_tree_unless_results_speak_against_it(
    tree: float | None, layout: str
) -> None:
    machine = facts("h200-xeon8558")
    values = {"pin": 3e11, "pin-numa": 2e11} | ({"pin-numa-pci": tree} if tree else {})
    runs = [
        Run(replace(run.head, host_kind=machine.kind), run.samples)
        for run in runs_with(values, 3, host="another")
    ]
    inputs = replace(machine.inputs, has_pairs=True)
    assert decide(runs, machine, Objective.MEMORY_BANDWIDTH, inputs).layout == layout


def test_the_layout_to_measure_next_is_what_others_of_the_kind_chose_and_this_one_lacks() -> None:
    machine = facts("h200-xeon8558")
    for own, layout, others, next_layout in (
        ("pin", "pin-bound", {"default": 1e11, "pin-numa": 3e11}, "pin-numa"),
        ("pin", "pin-bound", {"default": 1e11, "pin": 3e11}, None),
        ("pin", "pin-bound", {"default": 3e11, "pin": 1e11}, None),
        ("pin-numa", "pin-numa", {"default": 1e11, "pin": 3e11}, "pin-numa-pci"),
    ):
        runs = [
            *runs_with({"default": 1e11, own: 3e11}, 3, host=machine.fingerprint),
            *(
                Run(replace(run.head, host_kind=machine.kind), run.samples)
                for run in runs_with(others, 4, host="another")
            ),
        ]
        made = decide(runs, machine, Objective.MEMORY_BANDWIDTH)
        assert (made.layout, made.measure_next) == (layout, next_layout)


def test_emulated_figures_lead_to_no_verdict() -> None:
    runs = [
        Run(structs.replace(run.head, origin=Origin.EMULATED), run.samples)
        for run in runs_with(STREAM, 5)
    ]
    made = measured(runs, Objective.MEMORY_BANDWIDTH)
    assert made.choice is None
    assert made.find_reason(ReasonId.UNUSABLE)


def test_a_layout_that_is_better_one_way_and_worse_the_other_stays_in_the_choice() -> None:
    rng = random.Random(6)
    gpu = Bdf.parse("0000:19:00.0")
    runs = [
        simulated_run(
            layout,
            {"h2d-bandwidth": ("bytes_per_s", h2d), "d2h-bandwidth": ("bytes_per_s", d2h)},
            rng,
            device=gpu,
        )
        for layout, h2d, d2h in (("pin", 50e9, 30e9), ("pin-numa-pci", 30e9, 50e9))
    ]
    made = recommend("H200", group_runs(runs), Objective.GPU_COPY)
    assert (made.choice, made.also) == ("pin", ("pin-numa-pci",))
    assert format_effect(made) == "cannot tell it from pin-numa-pci"
    assert all(one.value > 0 and one.unit == "bytes_per_s" for one in made.results)
    assert not [run for run in runs if run.samples[0].statistic is not Statistic.SAMPLE]


def test_memory_modes_and_page_sizes_are_alternatives_of_their_own() -> None:
    rng = random.Random(7)
    runs = []
    for mode, pages, value in (
        ("strict", 4096, 100e9),
        ("interleave", 4096, 140e9),
        ("interleave", 2 << 20, 200e9),
    ):
        run = simulated_run("pin-bound", {"memory-bandwidth": ("bytes_per_s", value)}, rng)
        runs.append(Run(structs.replace(run.head, memory_mode=mode, page_bytes=pages), run.samples))
    made = recommend("H200", group_runs(runs), Objective.MEMORY_BANDWIDTH)
    assert made.choice == "pin-bound, interleave, 2 MiB pages"
    assert made.layout == "pin-bound"
    assert made.avoid == ("pin-bound, strict, 4 KiB pages", "pin-bound, interleave, 4 KiB pages")


@pytest.mark.parametrize(
    ("origin", "switches", "arrangement", "count"),
    [
        (Origin.MEASURED, UNKNOWN_SWITCHES, None, 2),
        (Origin.PUBLISHED, UNKNOWN_SWITCHES, None, 1),  # printed for every layout
        (Origin.PUBLISHED, UNKNOWN_SWITCHES, "local", 2),
        (Origin.PUBLISHED, Switches.from_layout(PRESETS["pin"]), None, 2),
    ],
)
def test_values_that_a_source_prints_for_every_layout_are_no_alternative(
    origin: Origin, switches: Switches, arrangement: str | None, count: int
) -> None:
    default, run = runs_with({"default": 1e11, "pin": 2e11}, 1)
    head = replace(run.head, origin=origin, switches=switches, arrangement=arrangement)
    chosen = group_by_argument([("a", [default, Run(head, run.samples)])])
    assert len(chosen) == count


@pytest.mark.parametrize(
    ("heads", "labels"),
    [
        (({"memory_mode": "strict"}, {"memory_mode": "preferred"}), ("strict", "preferred")),
        (({"page_bytes": 4096}, {"page_bytes": 2 << 20}), ("4 KiB pages", "2 MiB pages")),
    ],
)
def test_a_choice_is_named_by_what_differs_alone(
    heads: Sequence[Mapping[str, object]], labels: Sequence[str]
) -> None:
    (run,) = runs_with({"pin-bound": 1e11}, 1)
    common = replace(run.head, memory_mode="strict", page_bytes=4096)
    runs = [
        Run(replace(common, **head), tuple(replace(s, value=s.value + n) for s in run.samples))
        for n, head in enumerate(heads)
    ]
    assert [one.label for one in group_runs(runs)] == [f"pin-bound, {name}" for name in labels]


def test_a_flat_curve_of_any_collective_stops_the_machine() -> None:
    run = simulated_run("pin", {}, random.Random(9))
    samples = tuple(
        Sample("collective-busbw", "bytes_per_s", 0.53e9, size_bytes=1 << power)
        for power in range(14, 31)
    )
    (found,) = check_results([Run(run.head, samples)])
    assert (found.id, found.severity) == ("collective-flat-curve", Severity.CRITICAL)
    other = replace(run.head, switches=Switches.from_layout(PRESETS["default"]))
    fast = tuple(replace(sample, value=2 * sample.value) for sample in samples)
    for of_other, count in ((samples, 2), (fast, 0)):  # the faster layout refutes the ceiling
        runs = [Run(run.head, samples), Run(other, of_other)]
        assert len(check_results(runs)) == count
    assert len(check_results([Run(run.head, samples), Run(run.head, fast)])) == 1


def test_an_unusable_run_is_left_out_and_named_where_others_can_answer() -> None:
    runs = runs_with({"default": 1e11, "pin": 1.1e11, "pin-numa": 3e11}, 5)
    marked = Run(replace(runs[1].head, unusable=("siblings are shown",)), runs[1].samples)
    made = measured((runs[0], marked, runs[2]), Objective.MEMORY_BANDWIDTH)
    assert (made.choice, made.avoid) == ("pin-numa", ("default",))
    assert [caveat.blocks for caveat in made.caveats if caveat.id == "unusable"] == [False]
    alone = measured((runs[0], marked), Objective.MEMORY_BANDWIDTH)
    assert alone.choice is None and alone.find_reason(ReasonId.UNUSABLE)


def test_where_results_cannot_tell_the_layout_is_one_that_was_compared() -> None:
    figures = {"memory-bandwidth": ("bytes_per_s", 1e11)}
    runs = [simulated_run(name, figures, random.Random(6)) for name in ("default", "pin")]
    made = measured(runs, Objective.MEMORY_BANDWIDTH)
    assert (made.choice, made.layout) == ("pin", "pin-bound")  # not pin-numa, which nobody measured


def test_equal_values_are_ranked_alike_in_whatever_order_they_are_read() -> None:
    runs = runs_with(dict.fromkeys(("pin", "default", "pin-numa"), 1e11), 1, between=0, within=0)
    results = [measured(order, Objective.MEMORY_BANDWIDTH).results for order in (runs, runs[::-1])]
    names = [[result.alternative for result in ranked] for ranked in results]
    assert names == [["default", "pin", "pin-numa"]] * 2
    copies = runs_with({"pin": 5e10, "pin-numa": 5e10}, 1, "h2d-bandwidth", between=0, within=0)
    arranged = [
        replace(run, head=replace(run.head, switches=UNKNOWN_SWITCHES, arrangement=name))
        for run, name in zip(copies, (OTHER_NODE, OWN_NODE), strict=True)
    ]
    answers = [
        recommend("H200", group_runs(order), Objective.GPU_COPY)
        for order in (arranged, arranged[::-1])
    ]
    assert len({answer.choice for answer in answers}) == 1
    for answer in answers:
        assert [result.alternative for result in answer.results] == [OWN_NODE, OTHER_NODE]


def test_equal_layouts_lead_to_no_difference_and_nothing_to_avoid() -> None:
    rng = random.Random(8)
    for _ in range(60):
        layouts = ("default", "pin", "pin-numa", "pin-numa-pci")
        runs = runs_with(dict.fromkeys(layouts, 1e11), rng, vcpus=16)
        made = recommend("H200", group_runs(runs), Objective.MEMORY_BANDWIDTH)
        assert (made.layout, made.avoid) == ("pin-numa", ())
        assert made.find_reason(ReasonId.RULE)


def _simulated(noise: float, values: Mapping[str, float], seed: int) -> Recommendation:
    runs = runs_with(values, seed, between=noise)
    return recommend("H200", group_runs(runs), Objective.MEMORY_BANDWIDTH)


def test_a_pair_that_shows_nothing_weakens_no_other_and_each_has_the_word_of_compare() -> None:
    """Four boots are too few for 1.6 x, which states of boots explain, and enough for 2.4 x."""
    runs = runs_with(
        {"default": 8e10 * 1.0, "pin": 8e10 * 1.5, "pin-numa": 8e10 * 2.4}, 35, boots=4
    )
    made = recommend("x", group_runs(runs), Objective.MEMORY_BANDWIDTH)
    assert (made.avoid, made.level) == (("default",), EvidenceLevel.MEASURED)
    *_, best = group_runs(runs)
    pairs = compare([best, *group_runs(runs)[:2]]).effects
    words = {one.alternative: one.level for one in pairs if one.primary}
    assert words == {one.alternative: one.level for one in made.results if one.ratio < 1}
    assert words == {"default": EvidenceLevel.MEASURED, "pin": EvidenceLevel.PROVISIONAL}


def test_layouts_that_noise_hides_are_not_called_equal() -> None:
    made = _simulated(0.1, {"default": 1e11, "pin": 1e11, "pin-numa": 1e11}, 3)
    assert (made.level, made.avoid) == (EvidenceLevel.RULE, ())
    (caveat,) = made.caveats
    assert (caveat.id, caveat.blocks) == ("wide-interval", True)
    assert "boot each layout more often" in caveat.fix
    latencies = {layout: {"memory-latency": ("ns", 100.0)} for layout in ("pin", "pin-numa")}
    slow = [simulated_run(one, latencies[one], random.Random(7), between=0.2) for one in latencies]
    positions = [one.position for one in measured(slow, Objective.LATENCY).results]
    assert positions == [MetricRank.BEST, MetricRank.UNDECIDED]
    between = _simulated(0.025, {"default": 1e11, "pin": 1e11, "pin-numa": 1e11}, 1)
    assert MetricRank.UNSHOWN in {one.position for one in between.results}
    assert between.choice == "pin-numa"


def test_a_noisy_layout_is_neither_chosen_nor_avoided_among_clear_ones() -> None:
    rng = random.Random(5)
    runs = [
        simulated_run(layout, {"memory-bandwidth": ("bytes_per_s", value)}, rng, between=noise)
        for layout, value, noise in (
            ("default", 5.2e11, 0.25),
            ("pin", 1e11, 0.01),
            ("pin-numa", 5.6e11, 0.01),
        )
    ]
    made = recommend("H200", group_runs(runs), Objective.MEMORY_BANDWIDTH)
    assert (made.choice, made.also, made.avoid) == ("pin-numa", (), ("pin",))
    assert "cannot tell it from default" in format_sentence(made)


def test_every_objective_has_one_answer_and_the_same_twice() -> None:
    machine = facts("h200-xeon8558")
    assert decide_all(PUBLISHED_RUNS, machine) == decide_all(PUBLISHED_RUNS, machine)
    assert [one.objective for one in decide_all(PUBLISHED_RUNS, machine)] == list(Objective)


def test_a_machine_under_review_gives_no_advice_for_others_of_its_kind() -> None:
    machine, rng = facts("h200-xeon8558"), random.Random(12)

    def decided(pinned: float) -> Recommendation:
        rates = {"default": (77e9, 1e5), "pin": (300e9, pinned)}
        runs = [
            simulated_run(
                layout,
                {"memory-bandwidth": ("bytes_per_s", rate), "cpu-throughput": ("events", cpu)},
                rng,
                host="another",
            )
            for layout, (rate, cpu) in rates.items()
        ]
        known = [
            Run(structs.replace(run.head, host_kind=machine.kind), run.samples) for run in runs
        ]
        return decide(known, machine, Objective.MEMORY_BANDWIDTH)

    assert (decided(1e5).level, decided(1e5).choice) == (EvidenceLevel.MEASURED, "pin")
    reviewed = decided(0.6e5)
    passed = reviewed.find_reason(ReasonId.PASSED)
    assert reviewed.level is EvidenceLevel.RULE
    assert passed is not None and "recommends nothing for other machines" in passed.detail
