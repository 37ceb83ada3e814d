"""Verdicts: what the published figures support, that noise does not overturn it, and the ladder."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from homenode.analyse.recommend import (
    for_host,
    from_published,
    from_results,
    host_kind,
    huge_page_advice,
)
from homenode.analyse.standing import Position
from homenode.analyse.verdict import Rung, Verdict, verdict
from homenode.bdf import Bdf
from homenode.evidence.documents import published_evidence
from homenode.objective import Objective
from homenode.plan.fingerprint import host_fingerprint
from homenode.results.model import Origin, Run, Sample, Statistic
from homenode.sources import load_host
from tests.simulated_runs import BOOTS, SAMPLES, simulated_run

EVIDENCE = published_evidence()
PUBLISHED = {(one.system, one.objective): one for one in from_published(EVIDENCE, tuple(Objective))}
STREAM = {
    "default": ("memory-bandwidth", "bytes_per_s", 77e9),
    "pin": ("memory-bandwidth", "bytes_per_s", 75e9),
    "pin-numa": ("memory-bandwidth", "bytes_per_s", 561e9),
}


def published(system: str, objective: Objective) -> Verdict:
    return PUBLISHED[system, objective]


def test_h200_collectives_want_a_flat_guest_and_pin_over_default_rests_on_latency_only() -> None:
    made = published("H200", Objective.COLLECTIVE)
    assert (made.layout, made.also) == ("pin", ("default",))
    assert set(made.avoid) == {"pin-numa", "pin-numa-smt"}
    assert "pin over default rests on memory latency (112 ns against 140 ns) only" in made.statement


@pytest.mark.parametrize("system", ["H200", "RTX PRO 6000", "MI350X"])
def test_gpus_without_a_node_make_collectives_a_doubt_with_the_layout_to_measure(
    system: str,
) -> None:
    made = published(system, Objective.COLLECTIVE)
    assert made.measure_next == "pin-numa-pci"
    assert any("numa_node -1" in doubt.detail for doubt in made.doubts)
    assert any("bound" in note or "node 0" in note for note in made.notes)


@pytest.mark.parametrize("system", ["H200", "RTX PRO 6000", "MI350X", "RTX 4090"])
def test_processor_bandwidth_wants_cells(system: str) -> None:
    made = published(system, Objective.HOST_BANDWIDTH)
    assert (made.layout, made.memory_mode) == ("pin-numa", "strict, per cell")
    assert set(made.avoid) == {"default", "pin"}


def test_rtx_pro_6000_collectives_want_pinning() -> None:
    made = published("RTX PRO 6000", Objective.COLLECTIVE)
    assert (made.layout, made.also) == ("pin", ())
    assert set(made.avoid) == {"default", "pin-numa", "pin-numa-smt"}


def test_mi350x_collectives_do_not_differ_as_much_as_matters() -> None:
    made = published("MI350X", Objective.COLLECTIVE)
    assert made.avoid == ()
    assert made.statement.startswith("no difference that matters")


@pytest.mark.parametrize(("system", "gain"), [("H200", "+2.3 %"), ("MI350X", "+2.6 %")])
def test_siblings_are_worth_two_to_three_percent_of_throughput_and_no_more(
    system: str, gain: str
) -> None:
    made = published(system, Objective.THROUGHPUT)
    assert made.layout == "pin"
    assert made.avoid == ()
    assert f"siblings give {gain} of throughput for twice the vCPUs, and no more" in made.statement
    assert published(system, Objective.DENSITY).layout == "pin-numa-smt"


def test_rtx_4080_pins_are_to_be_reviewed_with_candidates() -> None:
    made = published("RTX 4080", Objective.THROUGHPUT)
    assert (made.layout, made.avoid) == ("default", ("pin",))
    (doubt,) = [one for one in made.doubts if one.id == "pin-regression"]
    assert "review the pins" in doubt.remedy
    assert any("E cores mixed" in note for note in made.notes)
    assert any("one L3" in note for note in made.notes)


@pytest.mark.parametrize("objective", [Objective.COLLECTIVE, Objective.HOST_BANDWIDTH])
def test_rtx_5090_is_excluded_until_its_link_is_fixed(objective: Objective) -> None:
    made = published("RTX 5090", objective)
    assert made.choice is None
    assert made.statement.startswith("excluded: its PCIe links")
    assert "fix the links first" in made.statement


@pytest.mark.parametrize("system", ["RTX PRO 6000", "RTX 4090", "RTX 4080"])
def test_zero_latencies_are_rejected(system: str) -> None:
    made = published(system, Objective.LATENCY)
    assert made.choice is None
    assert "zero, negative or impossible figures of memory-latency were left out" in made.statement


def test_ibm_wants_expander_buses() -> None:
    made = published("HGX A100", Objective.DEVICE_TRANSFER)
    assert (made.choice, made.layout) == ("expander buses", "pin-numa-pci")
    assert made.avoid == ("GPUs on the root complex",)
    assert not [one for one in made.doubts if one.id == "gpus-without-node"]


def test_sdumont_wants_local_memory_and_says_which_queue_gives_it() -> None:
    memory_bound = published("GH200 x4", Objective.DEVICE_TRANSFER)
    assert memory_bound.choice == "memory and CPUs on the GPU's own node"
    assert memory_bound.advice[0].startswith("its authors advise exclusive queue")
    assert any("no figure of the shared queue is printed" in note for note in memory_bound.notes)
    between = published("GH200 x4", Objective.COLLECTIVE)
    assert between.statement.startswith("no difference that matters")
    assert between.advice[0].startswith("its authors advise exclusive queue or shared queue")


def test_xapi_wants_cores_first() -> None:
    made = published("Xen, 2 nodes of 16 cores", Objective.THROUGHPUT)
    assert (made.choice, made.avoid) == ("cores-first", ("memory-first",))
    assert "-75 to -40 %" in made.statement


def test_every_published_verdict_says_so_and_names_its_source() -> None:
    for made in PUBLISHED.values():
        assert made.rung is Rung.PUBLISHED
        assert made.sources
    assert "+5 % to +15 %" in huge_page_advice(EVIDENCE)


def _repeated(run: Run, rng: random.Random) -> Run:
    """A published run as if it had been measured: three boots of ten samples, 1 % of noise each."""
    levels: dict[tuple[str, str, str | None, int | None], list[float]] = {}
    for one in run.samples:
        levels.setdefault((one.metric, one.unit, one.variant, one.index), []).append(one.value)
    samples = [
        Sample(
            metric, unit, middle * rng.lognormvariate(0, 0.01) * level, boot=boot,
            number=number, variant=variant, index=index,
        )
        for (metric, unit, variant, index), values in levels.items()
        for middle in [sum(values) / len(values)]
        for boot in range(BOOTS)
        for level in [rng.lognormvariate(0, 0.01)]
        for number in range(SAMPLES)
    ]  # fmt: skip
    head = replace(run.head, origin=Origin.MEASURED, host="the host")
    return Run(head, tuple(samples))


HELD = [
    ("H200", Objective.COLLECTIVE), ("H200", Objective.HOST_BANDWIDTH),
    ("H200", Objective.THROUGHPUT), ("RTX PRO 6000", Objective.COLLECTIVE),
    ("RTX PRO 6000", Objective.LATENCY), ("MI350X", Objective.COLLECTIVE),
    ("MI350X", Objective.THROUGHPUT), ("RTX 4090", Objective.HOST_BANDWIDTH),
    ("RTX 4080", Objective.THROUGHPUT), ("RTX 5090", Objective.COLLECTIVE),
    ("HGX A100", Objective.DEVICE_TRANSFER), ("GH200 x4", Objective.DEVICE_TRANSFER),
    ("GH200 x4", Objective.COLLECTIVE), ("Xen, 2 nodes of 16 cores", Objective.THROUGHPUT),
]  # fmt: skip


@pytest.mark.parametrize(("system", "objective"), HELD)
def test_a_verdict_holds_over_simulated_repeats_around_its_figures(
    system: str, objective: Objective
) -> None:
    first = published(system, objective)
    runs = [run for one in EVIDENCE for run in one.runs if run.head.system == system]
    held = 0
    for seed in range(20):
        rng = random.Random(seed)
        made = verdict(system, [_repeated(run, rng) for run in runs], objective, Rung.MEASURED_HERE)
        if objective is Objective.COLLECTIVE and system == "H200":
            held += made.layout in ("pin", "default") and set(made.avoid) >= set(first.avoid)
        else:
            held += (made.layout, made.avoid) == (first.layout, first.avoid)
    assert held >= 19


def test_one_boot_of_each_layout_is_no_answer_but_a_remedy() -> None:
    rng = random.Random(1)
    runs = [
        simulated_run(layout, {metric: (unit, value)}, rng, boots=1)
        for layout, (metric, unit, value) in STREAM.items()
    ]
    made = verdict("H200", runs, Objective.HOST_BANDWIDTH, Rung.MEASURED_HERE)
    assert made.choice is None
    assert made.statement.startswith("cannot tell: 1 and 1 boots")
    assert {one.position for one in made.standings} == {Position.BEST, Position.UNKNOWN}


def test_the_ladder_prefers_what_was_measured_here_to_what_was_published() -> None:
    host = load_host("h200-xeon8558")
    rng = random.Random(2)

    def runs(fingerprint: str, kind: str) -> list[Run]:
        made = [
            simulated_run(layout, {metric: (unit, value)}, rng, host=fingerprint)
            for layout, (metric, unit, value) in STREAM.items()
        ]
        return [Run(replace(run.head, host_kind=kind), run.samples) for run in made]

    def rung(those: list[Run]) -> Rung:
        (made,) = for_host(host, those, [Objective.HOST_BANDWIDTH], EVIDENCE)
        assert made.layout == "pin-numa"
        return made.rung

    here, kind = host_fingerprint(host), host_kind(host)
    assert rung(runs(here, kind)) is Rung.MEASURED_HERE
    assert rung(runs("another", kind)) is Rung.MEASURED_ON_KIND
    assert rung(runs("another", "another kind")) is Rung.PUBLISHED
    assert rung([]) is Rung.PUBLISHED


def test_a_host_that_nobody_has_measured_is_reasoned_about_and_says_so() -> None:
    (made,) = for_host(load_host("hgx-h100"), [], [Objective.COLLECTIVE], EVIDENCE)
    assert (made.rung, made.measure_next) == (Rung.REASONED, "pin-numa-pci")
    (flat,) = for_host(load_host("x86-1p1n4c4t"), [], [Objective.HOST_BANDWIDTH], EVIDENCE)
    assert (flat.rung, flat.layout) == (Rung.REASONED, "pin")
    assert "one node" in flat.statement


def test_an_excluded_kind_is_mentioned_on_the_rung_below() -> None:
    (made,) = for_host(load_host("rtx5090-epyc7702"), [], [Objective.COLLECTIVE], EVIDENCE)
    assert made.rung is Rung.REASONED
    assert any("excluded: its PCIe links" in note for note in made.notes)


def test_measured_layouts_with_expander_buses_answer_the_open_question() -> None:
    rng = random.Random(3)
    runs = [
        simulated_run(layout, {"allreduce-busbw-peak": ("bytes_per_s", value)}, rng)
        for layout, value in (("pin", 18.4e9), ("pin-numa", 8.6e9), ("pin-numa-pci", 26e9))
    ]
    (made,) = from_results(runs, [Objective.COLLECTIVE], EVIDENCE)
    assert (made.rung, made.layout, made.measure_next) == (
        Rung.MEASURED_HERE, "pin-numa-pci", None,
    )  # fmt: skip
    assert not [one for one in made.doubts if one.id == "gpus-without-node"]


def test_results_of_two_hosts_are_two_verdicts_and_never_mixed() -> None:
    rng = random.Random(4)
    runs = [
        simulated_run(layout, {metric: (unit, value)}, rng, host=host)
        for host in ("a", "b")
        for layout, (metric, unit, value) in STREAM.items()
    ]
    found = from_results(runs, [Objective.HOST_BANDWIDTH, Objective.COLLECTIVE], EVIDENCE)
    assert [one.layout for one in found] == ["pin-numa", "pin-numa"]
    assert len({one.system for one in found}) == 2


def test_emulated_figures_lead_to_no_verdict() -> None:
    rng = random.Random(5)
    runs = []
    for layout, (metric, unit, value) in STREAM.items():
        run = simulated_run(layout, {metric: (unit, value)}, rng)
        runs.append(Run(replace(run.head, origin=Origin.EMULATED), run.samples))
    made = verdict("H200", runs, Objective.HOST_BANDWIDTH, Rung.MEASURED_HERE)
    assert made.choice is None
    assert made.statement == "excluded: its figures are emulated"


def test_a_layout_that_is_better_one_way_and_worse_the_other_stays_in_the_choice() -> None:
    rng = random.Random(6)
    gpu = Bdf.parse("0000:19:00.0")
    runs = [
        simulated_run(
            layout,
            {"h2d-bandwidth": ("bytes_per_s", h2d), "d2h-bandwidth": ("bytes_per_s", d2h)}, rng,
            device=gpu,
        )
        for layout, h2d, d2h in (("pin", 50e9, 30e9), ("pin-numa-pci", 30e9, 50e9))
    ]  # fmt: skip
    made = verdict("H200", runs, Objective.DEVICE_TRANSFER, Rung.MEASURED_HERE)
    assert {made.choice, *made.also} == {"pin", "pin-numa-pci"}
    assert all(one.value > 0 and one.unit == "bytes_per_s" for one in made.standings)
    assert not [run for run in runs if run.samples[0].statistic is not Statistic.SAMPLE]


def test_memory_modes_and_page_sizes_are_alternatives_of_their_own() -> None:
    rng = random.Random(7)
    runs = []
    for mode, pages, value in (
        ("strict", 4096, 100e9), ("interleave", 4096, 140e9), ("interleave", 2 << 20, 170e9),
    ):  # fmt: skip
        run = simulated_run("pin-bound", {"memory-bandwidth": ("bytes_per_s", value)}, rng)
        runs.append(Run(replace(run.head, memory_mode=mode, page_bytes=pages), run.samples))
    made = verdict("H200", runs, Objective.HOST_BANDWIDTH, Rung.MEASURED_HERE)
    assert made.choice == "pin-bound, interleave, 2 MiB pages"
    assert (made.layout, made.memory_mode) == ("pin-bound", "interleave, on the chosen nodes")
    assert made.huge_pages == "2 MiB"
    assert made.avoid == ("pin-bound, strict, 4 KiB pages", "pin-bound, interleave, 4 KiB pages")


def test_equal_layouts_lead_to_no_difference_and_nothing_to_avoid() -> None:
    rng = random.Random(8)
    for _ in range(60):
        runs = [
            simulated_run(layout, {"memory-bandwidth": ("bytes_per_s", 1e11)}, rng, vcpus=16)
            for layout in ("default", "pin", "pin-numa", "pin-numa-pci")
        ]
        made = verdict("H200", runs, Objective.HOST_BANDWIDTH, Rung.MEASURED_HERE)
        assert (made.layout, made.avoid) == ("default", ())
        assert made.statement.startswith("no difference that matters")


def _simulated(noise: float, values: Mapping[str, float], seed: int) -> Verdict:
    rng = random.Random(seed)
    runs = [
        simulated_run(layout, {"memory-bandwidth": ("bytes_per_s", value)}, rng, between=noise)
        for layout, value in values.items()
    ]
    return verdict("H200", runs, Objective.HOST_BANDWIDTH, Rung.MEASURED_HERE)


def test_layouts_that_noise_hides_are_not_called_equal() -> None:
    made = _simulated(0.1, {"default": 1e11, "pin": 1e11, "pin-numa": 1e11}, 3)
    assert (made.choice, made.avoid) == (None, ())
    assert made.statement.startswith("cannot tell: memory bandwidth against ")
    (doubt,) = made.doubts
    assert (doubt.id, doubt.blocks) == ("wide-interval", True)
    assert "boot each layout more often" in doubt.remedy
    between = _simulated(0.025, {"default": 1e11, "pin": 1e11, "pin-numa": 1e11}, 1)
    assert between.statement.startswith("no difference shown; one below 10% may be hidden: ")
    assert between.choice == "default"


def test_a_noisy_layout_is_neither_chosen_nor_avoided_beside_clear_ones() -> None:
    rng = random.Random(5)
    runs = [
        simulated_run(layout, {"memory-bandwidth": ("bytes_per_s", value)}, rng, between=noise)
        for layout, value, noise in (
            ("default", 5.2e11, 0.25), ("pin", 1e11, 0.01), ("pin-numa", 5.6e11, 0.01),
        )
    ]  # fmt: skip
    made = verdict("H200", runs, Objective.HOST_BANDWIDTH, Rung.MEASURED_HERE)
    assert (made.choice, made.also, made.avoid) == ("pin-numa", (), ("pin",))
    assert made.statement.endswith("cannot tell of default")


def test_noise_passes_on_to_what_was_published() -> None:
    host = load_host("h200-xeon8558")
    rng = random.Random(3)
    runs = [
        simulated_run(layout, {"memory-bandwidth": ("bytes_per_s", 1e11)}, rng, between=0.1,
                      host=host_fingerprint(host))
        for layout in ("default", "pin", "pin-numa")
    ]  # fmt: skip
    (made,) = for_host(host, runs, [Objective.HOST_BANDWIDTH], EVIDENCE)
    assert (made.rung, made.layout) == (Rung.PUBLISHED, "pin-numa")
    assert any(note.startswith("measured-here, ") for note in made.notes)
