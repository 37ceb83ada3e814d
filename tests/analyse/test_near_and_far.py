"""Near and far copies: by the host's topology or by nodes; and copies in two groups."""

import random
from collections.abc import Sequence

from msgspec import structs

from homenode.bdf import Bdf
from homenode.decide.alternative import Alternative, alternatives
from homenode.decide.compare import compare
from homenode.decide.comparison import Outcome
from homenode.decide.doubts import doubts_of
from homenode.decide.matrices import far_copies, localities
from homenode.measure.results.model import GpuPlace, Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS

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
        f"{layout}-1", "gpus", Origin.IMPORTED, Vantage.HOST, Switches.of_layout(PRESETS[layout])
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
    (found,) = alternatives([Run(head, samples)])
    return found


def test_copies_in_two_groups_of_two_are_far_in_the_slower_one() -> None:
    (copies,) = far_copies(alternative("default", BEFORE, (1,) * 8))
    assert copies.gpus == (4, 8) and 1.2 < copies.near / copies.far < 1.3
    latency = alternative("default", (700, 702, 1100, 1104), metric="h2d-latency")
    (copies,) = far_copies(latency)
    assert (copies.near, copies.far) == (701, 1102)


def test_gpus_that_differ_by_chance_or_one_slow_link_are_no_groups() -> None:
    rng = random.Random(5)
    for _ in range(300):
        figures = [25.0 * rng.gauss(1, 0.01) for _ in range(8)]
        assert not list(far_copies(alternative("default", figures)))
    assert not list(far_copies(alternative("default", (*AFTER[:7], 12.0))))


def test_copies_that_were_bound_to_the_other_node_are_remote() -> None:
    gpus = [Bdf.parse(f"0000:{bus:02x}:00.0") for bus in (7, 8, 0x47, 0x48)]
    bound = alternative("default", BEFORE[:2] + BEFORE[:2], bound=1, gpus=gpus)
    (found,) = localities([bound], dict.fromkeys(gpus, 0))
    assert (found.local, found.cells) == (None, (0, 4))
    (found,) = localities([bound], dict.fromkeys(gpus, 1))
    assert (found.remote, found.cells) == (None, (4, 0))


def test_before_and_after_are_compared_whatever_node_the_threads_chose() -> None:
    before = alternative("default", BEFORE, (1,) * 8)
    after = alternative("pin-numa-pci", AFTER, (1, 1, 1, 1, 0, 0, 0, 0))
    found = compare([before, after])
    (effect,) = (one for one in found.effects if one.primary)
    assert effect.slowest_device
    assert effect.outcome is Outcome.BETTER
    assert [one.subject for one in found.doubts if one.id == "far-copies"] == ["default"]


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
    assert not list(doubts_of(alternatives([Run(head, samples)])[0]))
    astray = alternative("pin-numa-pci", (*far[:2], *near[2:]), (1,) * 4, gpus=gpus).runs[0]
    (doubt,) = doubts_of(alternatives([astray])[0])
    assert doubt.id == "far-copies" and "2 of 4 GPUs 41.2 GB/s" in doubt.detail
