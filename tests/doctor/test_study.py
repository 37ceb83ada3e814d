"""The study's six machines, sick and sound, as the doctor sees them.

The hosts are the shipped descriptions, which say what of them is published and what assumed. The
domains are assumed throughout: the study publishes counts of vCPUs and GPUs, and one pair of
listings; pins follow the listings' style (one CPU for each core, in ascending order).
"""

import pytest
from msgspec.structs import replace

from homenode.cpuset import CpuSet, LlcIndex
from homenode.findings import Severity
from tests.doctor_domains import (
    binding,
    board,
    cells,
    diagnosed,
    domain,
    gpus,
    ids,
    planned,
    topology,
)
from tests.doctor_domains import host as shipped

STUDY = {
    "h200-xeon8558": (88, 1024, 7),
    "mi350x-epyc9575f": (120, 1024, 8),
    "rtxpro6000-xeon8468v": (88, 960, 8),
    "rtx4090-epyc7702": (60, 192, 4),
    "rtx4080-i9-14900k": (8, 32, 1),
    "rtx5090-epyc7702": (56, 1024, 8),
}
"""vCPUs (assumed to be whole cells), GiB (assumed) and GPUs (published)."""


def plain(name: str) -> bytes:
    vcpus, gib, count = STUDY[name]
    return domain(vcpus, gpus(name, count), gib=gib)


@pytest.mark.parametrize("name", STUDY)
@pytest.mark.parametrize("layout", ["pin-numa-pci", "pin-numa-pci-smt"])
def test_a_well_placed_vm_gets_nothing(name: str, layout: str) -> None:
    found = diagnosed(planned(plain(name), name, layout), name)
    # The 5090 host is sick itself: its links stay.
    assert [f for f in found if f.id != "pcie-link-slow"] == []
    assert ("pcie-link-slow" in ids(found)) is (name == "rtx5090-epyc7702")


def test_the_5090_host_has_slow_links_and_scattered_vcpus() -> None:
    """Pins of the study's listing A: cores 0-27 and 32-59, one on each node."""
    name = "rtx5090-epyc7702"
    xml = domain(
        56,
        gpus(name, 8),
        gib=1536,
        pins=[*range(28), *range(32, 60)],
        cputune="<emulatorpin cpuset='28,29'/>",
    )
    found = diagnosed(xml, name)
    links = [f for f in found if f.id == "pcie-link-slow"]
    assert len(links) == 8 and all(f.severity is Severity.CRITICAL for f in links)
    scatter = next(f for f in found if f.id == "flat-over-nodes")
    assert scatter.severity is Severity.WARNING and "nodes 0-1" in scatter.observed


@pytest.mark.parametrize(("at", "suffices"), [((0, 1), True), ((0, 7), False), ((), True)])
def test_one_node_is_advised_only_next_to_all_devices(at: tuple[int, ...], suffices: bool) -> None:
    devices = [gpus("hgx-h100", 8)[i] for i in at]
    found = diagnosed(domain(8, devices, pins=[*range(4), *range(56, 60)]), "hgx-h100")
    scatter = next(f for f in found if f.id == "flat-over-nodes")
    assert ("--max-nodes 1" in (scatter.fix or "")) is suffices


def test_the_4090_hosts_pins_cross_nodes_under_a_flat_guest() -> None:
    name = "rtx4090-epyc7702"
    xml = domain(60, gpus(name, 4), gib=192, pins=range(60))
    found = diagnosed(xml, name)
    assert "flat-over-nodes" in ids(found)
    scatter = next(f for f in found if f.id == "flat-over-nodes")
    assert "nodes 0-3" in scatter.observed and "39 to 24" in (scatter.cost or "")


def test_each_candidate_cause_of_the_4080s_loss_is_named() -> None:
    """22 vCPUs in ascending order: 8 P cores with both siblings, then 6 E cores."""
    xml = domain(22, gpus("rtx4080-i9-14900k", 1), gib=32, pins=range(22))
    found = diagnosed(xml, "rtx4080-i9-14900k")
    by_id = {finding.id: finding for finding in found}
    split = by_id["core-shared"]
    assert split.severity is Severity.WARNING and "vCPUs 14-15" in split.subject
    mixed = by_id["core-kinds-mixed"]
    assert "vCPUs 0-15 on P cores, vCPUs 16-21 on E cores" in mixed.observed
    # The study's own guess, two last-level caches, is refuted.
    assert "one last-level cache" in mixed.observed
    assert "llc-straddled" not in by_id
    # Where there are two, nothing is refuted.
    there = shipped("rtx4080-i9-14900k")
    (llc,) = there.llcs
    halves = [CpuSet(pu for pu in llc.pus if (pu < 16) is first) for first in (True, False)]
    split_host = replace(
        there, llcs=tuple(replace(llc, index=LlcIndex(i), pus=p) for i, p in enumerate(halves))
    )
    two = next(f for f in diagnosed(xml, split_host) if f.id == "core-kinds-mixed")
    assert "last-level cache" not in two.observed


def test_the_h200_guests_devices_without_a_node_are_found() -> None:
    """Listing B's style: cells and strict binding, and no expander bus."""
    name = "h200-xeon8558"
    pins = [24 * node + core for node in range(4) for core in range(22)]
    xml = domain(
        88,
        gpus(name, 7),
        gib=1024,
        pins=pins,
        cpu=topology(4, 22, inside=cells([f"{22 * i}-{22 * i + 21}" for i in range(4)], 1024)),
        more=binding(range(4), cell_mode="strict"),
    )
    found = diagnosed(xml, name)
    devices = {f.subject: f.fix or "" for f in found if f.id == "device-without-cell"}
    assert devices.keys() == {str(gpu) for gpu in gpus(name, 7)}
    assert all("pin-numa-pci" in fix for fix in devices.values())


@pytest.mark.parametrize(
    ("sockets", "cut"), [(1, False), (2, False), (4, False), (8, False), (3, True)]
)
def test_cells_may_share_a_socket_and_sockets_a_cell(sockets: int, cut: bool) -> None:
    """As with NPS4, SNC and several packages in a node; what a cell cuts in two is found."""
    inside = cells([f"{6 * i}-{6 * i + 5}" for i in range(4)], 64)
    xml = domain(
        24,
        gib=64,
        pins=range(24),
        more=binding(range(4), cell_mode="strict"),
        cpu=topology(sockets, 24 // sockets, inside=inside),
    )
    assert ("socket-cut-by-cell" in ids(diagnosed(xml, "h200-xeon8558"))) is cut


@pytest.mark.parametrize(("sockets", "false"), [(2, False), (4, False), (1, True)])
def test_a_cache_that_is_passed_through_ends_at_the_guests_socket(
    sockets: int, false: bool
) -> None:
    """96 siblings share each LLC of the host, so a socket of fewer vCPUs is behind one of them."""
    pins = [*range(22), *range(48, 70)]  # the cores of both packages
    xml = domain(
        44,
        gib=64,
        pins=pins,
        cpu=topology(sockets, 44 // sockets, inside="<cache mode='passthrough'/>"),
    )
    found = ids(diagnosed(xml, "h200-xeon8558"))
    assert ("cache-passthrough-false" in found) is false


@pytest.mark.parametrize(("vcpus", "severity"), [(1, Severity.INFO), (11, None), (12, None)])
def test_only_a_vm_with_too_few_vcpus_for_two_cells_has_devices_far_and_no_alarm(
    vcpus: int, severity: Severity | None
) -> None:
    xml = planned(domain(vcpus, board("hgx-h100"), gib=64), "hgx-h100", "pin-numa-pci")
    found = diagnosed(xml, "hgx-h100")
    assert {f.severity for f in found} == ({severity} if severity else set())


def test_memory_that_numad_binds_counts_as_bound() -> None:
    xml = domain(
        16,
        gib=64,
        pins=range(16),
        cpu=topology(1, 16),
        more="<numatune><memory mode='strict' placement='auto'/></numatune>",
    )
    assert not {"memory-unbound", "numa-balancing"} & set(ids(diagnosed(xml, "h200-xeon8558")))
    assert "memory-unbound" in ids(diagnosed(domain(16, gib=64, pins=range(16)), "h200-xeon8558"))


@pytest.mark.parametrize(
    ("pins", "nodes", "stated"),
    [
        (range(8), (1,), "on node 1 only"),
        (range(8), (0, 1), "node 1 as well"),
        (range(8), (0,), None),
        ([*range(4), *range(24, 28)], (1,), "none on node 0"),
        ([*range(4), *range(24, 28)], (0, 1), None),
    ],
)
def test_memory_is_compared_with_the_nodes_of_the_vcpus(
    pins: list[int], nodes: tuple[int, ...], stated: str | None
) -> None:
    xml = domain(8, gib=64, pins=list(pins), cpu=topology(1, 8), more=binding(nodes))
    found = [f for f in diagnosed(xml, "h200-xeon8558") if f.id == "memory-elsewhere"]
    assert [finding.observed for finding in found] == ([] if stated is None else [stated])


def test_memory_of_the_whole_host_leaves_none_for_qemu() -> None:
    for gib, is_short in ((255, False), (256, True)):
        found = diagnosed(domain(8, gib=gib), "rtx4090-epyc7702")
        assert [f.severity for f in found if f.id == "memory-short"] == ["critical"] * is_short


@pytest.mark.parametrize("name", STUDY)
def test_what_the_default_layout_lacks_is_reported(name: str) -> None:
    found = diagnosed(plain(name), name)
    unpinned = next(f for f in found if f.id == "unpinned")
    # The desktop has one node: floating vCPUs lose little there.
    one_node = name == "rtx4080-i9-14900k"
    assert unpinned.severity is (Severity.INFO if one_node else Severity.WARNING)
