"""What a log says of graph, threads, transports and buffers, in the words of each version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.pci import PciLink
from homenode.nccl.explanation import Explanation, explain
from homenode.nccl.guest_tree import GuestTree, TreeGpu, TreeLink
from homenode.nccl.log import compare_log
from homenode.nccl.log_facts import LogGraph, LogPath, facts_of_log
from tests.nccl.logs import log_of

A, B = Bdf.parse("0000:81:00.0"), Bdf.parse("0000:c1:00.0")
MASKS, LISTS = ("0f", "f0"), ("0-3", "4-7")
OWN = CpuSet(range(4)), CpuSet(range(4, 8))
VERSIONS = {
    "2.18.3": MASKS,
    "2.20.5": MASKS,
    "2.21.5": MASKS,
    "2.22.3": MASKS,
    "2.26.2": MASKS,
    "2.27.3": LISTS,
    "2.28.9": LISTS,
    "2.30.7": LISTS,
}


def machine(*nodes: int | None) -> Explanation:
    link = TreeLink(PciLink(None, None, 32.0, 16), None)
    gpus = tuple(
        TreeGpu(address=at, node=node, link=link) for at, node in zip((A, B), nodes, strict=True)
    )
    vcpus = ((0, OWN[0]), (1, OWN[1]))
    return explain(
        GuestTree(
            source="guest",
            architecture="x86_64",
            vendor="GenuineIntel",
            family=6,
            model=0x8F,
            vcpus_of_node=vcpus,
            gpus=gpus,
        )
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_gives_graph_threads_transports_and_buffers(version: str) -> None:
    facts = facts_of_log(log_of(version, affinities=VERSIONS[version]))
    assert facts.version == f"{version}+cuda12.4" and facts.rank_count == 2
    assert [(one.rank, one.device, one.address) for one in facts.ranks.values()] == [
        (0, 0, A),
        (1, 1, B),
    ]
    assert [*facts.cpu_nodes] == [0, 1]
    assert [*facts.paths.values()] == [
        LogPath(a=A, b=B, links=3, gb_per_s=22.0, type="SYS"),
        LogPath(a=B, b=A, links=3, gb_per_s=22.0, type="SYS"),
    ]
    assert facts.graphs == {4: LogGraph(pattern=4, channels=2, gb_per_s=11.0, path="SYS")}
    assert (facts.channels, facts.rings) == (2, {0: (0, 1), 1: (0, 1)})
    assert facts.affinities == {0: OWN[0], 1: OWN[1]}
    assert {way: len(channels) for way, channels in facts.transports.items()} == {
        (0, 1, "SHM", "direct/direct"): 2,
        (1, 0, "SHM", "direct/direct"): 2,
    }
    assert [*facts.buffers.values()] == [4]
    assert not facts.gaps and facts.variables == {"NCCL_DEBUG": "INFO"}
    if version >= "2.22":
        assert [*facts.threads] == [(0, 3), (1, 7)]


def test_cumem_buffers_have_their_node() -> None:
    facts = facts_of_log(log_of("2.26.2", numa=(0, 1)))
    for key in (("cumem", 0, 0), ("cumem", 1, 1)):
        assert (facts.buffers[key], facts.sizes[key]) == (2, 20971520)


def test_a_node_without_number_is_minus_one_in_both_spellings() -> None:
    for version, node in (("2.18.3", "FFFFFFFFFFFFFFFF"), ("2.26.2", "ffffffffffffff")):
        assert facts_of_log(log_of(version, nodes=(node, node))).cpu_nodes == {-1: None}


def test_other_transports_and_lines_of_the_record_are_read() -> None:
    lines = (
        "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
        "Channel 01/0 : 0[0] -> 1[1] via P2P/direct pointer",
        "Channel 00/0 : 3[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA",
        "Channel 02 : 1[1] -> 0[0] via direct shared memory",
        "Channel 03 : 1[1] -> 0[0] via SHM/direct/direct comm 0x2083dd50 nRanks 02",
        "Affinity for GPU 1 is empty, ignoring. (GPU affinity =  ; CPU affinity = 0-87).",
        "Affinity for GPU 0 is 0-1,32-47. (GPU affinity = 0-1,32-47 ; CPU affinity = 0-63).",
    )
    facts = facts_of_log("".join(f"h:1:2 [0] NCCL INFO {line}\n" for line in lines))
    assert facts.transport_names() == ("NET", "P2P", "SHM")
    assert {how for *_, how in facts.transports} == {
        "CUMEM/read",
        "direct pointer",
        "Libfabric/0/GDRDMA",
        "direct",
        "direct/direct",
    }
    assert facts.affinities == {0: CpuSet.parse("0-1,32-47"), 1: CpuSet()}


def test_an_affinity_that_may_be_a_mask_or_a_list_is_unknown() -> None:
    facts = facts_of_log("h:1:2 [0] NCCL INFO Setting affinity for GPU 0 to 10\n")
    assert not facts.affinities and "10" in facts.gaps[0].reason
    for version, cpus in (("2.26.2", CpuSet([4])), ("2.28.9", CpuSet([10]))):
        text = f"NCCL version {version}\nh:1:2 [0] NCCL INFO Setting affinity for GPU 0 to 10\n"
        assert facts_of_log(text).affinities == {0: cpus}


@given(st.text(max_size=200), st.integers(0, 40))
def test_no_text_breaks_the_reader(noise: str, at: int) -> None:
    lines = log_of("2.26.2", affinities=MASKS, numa=(0, 1)).splitlines()
    lines[at % len(lines)] = f"x [0] NCCL INFO {noise}"
    facts_of_log("\n".join(lines))


def differing(made: Explanation, text: str) -> list[str]:
    return [one.id for one in compare_log(made, facts_of_log(text), "nccl.log")[1]]


def test_a_log_that_agrees_has_no_finding() -> None:
    made = machine(0, 1)
    for version, affinities in VERSIONS.items():
        assert differing(made, log_of(version, affinities=affinities)) == []
    assert differing(made, log_of("2.30.7", affinities=LISTS, numa=(0, 1))) == []
    fewer = ("0-1", "4-5")
    assert differing(made, log_of("2.30.7", affinities=fewer)) == []


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"affinities": ("", "")}, "nccl-log-other-affinity"),
        ({"affinities": ("4-7", "0-3")}, "nccl-log-other-affinity"),
        ({"path": "PHB"}, "nccl-log-other-path"),
        ({"transport": "P2P/CUMEM"}, "nccl-log-other-transport"),
        ({"nodes": ("0", "0")}, "nccl-log-other-nodes"),
        ({"numa": (0, 0)}, "nccl-log-other-buffers"),
    ],
)
def test_what_a_log_says_otherwise_is_named(changes: dict[str, object], id: str) -> None:
    given = {"affinities": LISTS, **changes}
    text = log_of("2.30.7", **given)  # type: ignore[arg-type]
    assert set(differing(machine(0, 1), text)) == {id}


def test_a_guest_without_places_is_as_computed() -> None:
    nowhere = "ffffffffffffff"
    text = log_of("2.30.7", nodes=(nowhere, nowhere), path="PHB", numa=(0, 0))
    assert differing(machine(None, None), text) == []


def test_a_ring_that_crosses_at_every_hop_is_named() -> None:
    link = TreeLink(PciLink(None, None, 32.0, 16), None)
    gpus = tuple(TreeGpu(address=Bdf(0, 0x20 + n, 0, 0), node=n // 2, link=link) for n in range(4))
    vcpus = ((0, OWN[0]), (1, OWN[1]))
    made = explain(
        GuestTree(
            source="guest",
            architecture="x86_64",
            vendor="GenuineIntel",
            family=6,
            model=0x8F,
            vcpus_of_node=vcpus,
            gpus=gpus,
        )
    )
    for order, crosses in (("0 2 1 3", True), ("0 1 2 3", False)):
        text = "NCCL version 2.30.7\n" + "".join(
            f"h:1:{n} [{n}] NCCL INFO comm 0x1 rank {n} nranks 4 cudaDev {n} nvmlDev {n} "
            f"busId 2{n}000 commId 0x1 - Init START\n"
            for n in range(4)
        )
        text += f"h:1:1 [0] NCCL INFO Channel 00/01 : {order}\n"
        assert (differing(made, text) == ["nccl-ring-crosses-nodes"]) is crosses


@pytest.mark.parametrize(
    "line",
    [
        "Channel 00/02 : {} 1",
        "Pattern {}, crossNic 0, nChannels 2, bw 1.0/1.0, type NVL/PIX",
        "Pattern 4, crossNic 0, nChannels {}, bw 1.0/1.0, type NVL/PIX",
        "GPU/1B000 :GPU/1C000 ({}/1.0/NVL)",
    ],
)
def test_a_number_of_thousands_of_digits_is_no_number(line: str) -> None:
    facts = facts_of_log("NCCL INFO " + line.format("9" * 5000))
    assert (facts.rings, facts.graphs, facts.paths) == ({}, {}, {})


def test_logs_as_people_post_them_are_read_behind_whatever_stands_before() -> None:
    """mpirun, Ray, a cloud's console and a quoted mail each put words before a line."""
    plain = log_of("2.27.3", affinities=("0-3", "4-7"))
    facts = facts_of_log(plain)
    assert facts.affinities == {0: CpuSet.parse("0-3"), 1: CpuSet.parse("4-7")}
    for words in ("[1,2]<stdout>:", "(Worker pid=7) ", "  | 2026-01-02T03:04:05Z | ", "> > "):
        moved = "".join(f"{words}{line}\n" for line in plain.splitlines())
        assert facts_of_log(moved) == facts


def test_lines_that_are_cut_or_run_into_each_other_are_left_out() -> None:
    text = (
        "(Worker pid=1) host:1:2 [0] N\n"
        "(Worker pid=2) CCL INFO Channel 08/0 : 0[0] -> 1[1] via P2P/IPC\n"
        "host:1:2 [0] NCCL INFO ncclTopoGetCpuAffinity: Affinity for GPU 0 is \n"
        "host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via\n"
        "host:1:2 [0] NCCL INFO CPU/0-0 (1/\n"
    )
    facts = facts_of_log(text)
    assert (facts.transports, facts.affinities, facts.cpu_nodes) == ({}, {}, {})


def test_a_log_of_rccl_names_its_version_and_ranks() -> None:
    text = (
        "RCCL version : 2.21.5-HEAD:9a0e6a1\nHIP version  : 6.3.42134-a9a80e791\n"
        "ws:5:9 [2] NCCL INFO ncclCommInitAll_impl comm 0x257 rank 2 nranks 4 cudaDev 2 nvmlDev 1 "
        "busId 23000 commId 0x94 - Init START\n"
    )
    facts = facts_of_log(text)
    assert facts.version is not None and facts.version.startswith("2.21.5")
    assert [(one.rank, one.device, str(one.address)) for one in facts.ranks.values()] == [
        (2, 1, "0000:23:00.0")
    ]
