"""What homenode-probe prints, read strictly, and the samples that it comes to."""

import json
from typing import Any

import pytest

from homenode.errors import ParseError
from homenode.machine.tools.homenode_probe import parse
from homenode.measure.probe_samples import StepReading, read_probe_results
from tests import probe_documents
from tests.mutations import MUTATIONS, survives
from tests.probe_build import FEW_BYTES, one_pu, probe, two_pus
from tests.probe_documents import FAR, NEAR

DOCUMENTS = {
    "bandwidth": probe_documents.bandwidth("0-1", [NEAR, FAR, NEAR] * 2),
    "latency": probe_documents.latency("0"),
    "core-to-core": probe_documents.core_to_core("0-1"),
    "throughput": probe_documents.throughput("0-1"),
    "placement": probe_documents.placement("0-1", [NEAR, FAR]),
    "smt": probe_documents.smt("0-1"),
    "loaded-latency": probe_documents.loaded_latency("0-1"),
}


def figures(text: str) -> StepReading:
    return read_probe_results(parse(text))


def values(found: StepReading, metric: str, variant: str | None) -> list[float]:
    samples = [one.sample for one in found.placed]
    return [one.value for one in samples if (one.metric, one.variant) == (metric, variant)]


def test_reported_and_moved_bytes_are_two_metrics() -> None:
    found = figures(DOCUMENTS["bandwidth"])
    reported = values(found, "memory-bandwidth", "triad")
    moved = values(found, "memory-traffic", "triad")
    assert reported == [36e9, 36e9 + 3]
    assert moved == pytest.approx([value * 32 / 24 for value in reported])
    assert values(found, "memory-bandwidth", "read")
    assert not values(found, "memory-traffic", "read"), "a read moves what it reports"


def test_non_temporal_stores_are_a_variant_of_their_own() -> None:
    document = json.loads(DOCUMENTS["bandwidth"])
    document["runs"][0]["kernels"][0]["stores"] = "non-temporal"
    found = figures(json.dumps(document))
    assert values(found, "memory-bandwidth", "triad non-temporal")
    assert not values(found, "memory-bandwidth", "triad")


def test_cells_of_a_matrix_say_where_threads_and_memory_were() -> None:
    document = json.loads(DOCUMENTS["bandwidth"])
    document["machine"]["nodes"] = [{"node": 0, "pus": "0-1"}, {"node": 1, "pus": "2-3"}]
    far = {**document["runs"][0], "pus": "2-3", "node": 0}
    document["runs"] = [{**document["runs"][0], "node": 0}, far]
    samples = [one.sample for one in figures(json.dumps(document)).placed]
    assert {(one.node, one.peer_node) for one in samples} == {(0, 0), (1, 0)}


def test_memory_that_is_not_on_its_node_is_refused() -> None:
    document = json.loads(DOCUMENTS["bandwidth"])
    document["runs"][0] |= {"node": 1}
    with pytest.raises(ParseError, match="expected all pages on node 1, found 'some on node 0'"):
        figures(json.dumps(document))


def test_the_curve_its_levels_and_memory_are_distinguished() -> None:
    found = figures(DOCUMENTS["latency"])
    assert values(found, "memory-latency", "dram") == [93.0, 94.0, 93.5, 92.0, 95.0]
    assert values(found, "memory-latency", "l1") == [1.08]
    assert values(found, "cache-capacity", "l1") == [32768]
    curve = [one.sample for one in found.placed if one.sample.size_bytes == 1 << 28]
    assert {one.variant for one in curve} == {"local, huge pages", "random, huge pages"}


def test_a_curve_without_memory_gives_no_latency_of_memory() -> None:
    document = json.loads(DOCUMENTS["latency"])
    document["levels"] = document["levels"][:1]
    assert not values(figures(json.dumps(document)), "memory-latency", "dram")


def test_one_pu_tells_a_cores_speed_and_several_tell_fairness() -> None:
    alone = figures(probe_documents.throughput("0"))
    assert {one.sample.metric for one in alone.placed} == {"cpu-single"}
    together = figures(DOCUMENTS["throughput"])
    assert values(together, "cpu-throughput", None) == pytest.approx([9200, 9209.2, 9190.8])
    assert values(together, "cpu-fairness", "CPU 1") == [1.0]
    assert values(together, "cpu-fairness", "Jain's index") == [1.0]
    assert len(values(together, "cpu-per-thread", "CPU 0")) == 3


def test_what_siblings_add_and_what_load_costs() -> None:
    assert values(figures(DOCUMENTS["smt"]), "smt-gain", "primes 0,1") == [1.25]
    loaded = figures(DOCUMENTS["loaded-latency"])
    assert values(loaded, "loaded-latency", "at rest") == [95.0]
    assert values(loaded, "loaded-bandwidth", "at rest") == []
    assert values(loaded, "loaded-bandwidth", "delay 0 cycles") == [30e9]


def test_who_else_ran_and_an_emulated_machine_are_reported() -> None:
    quiet = figures(probe_documents.throughput("0"))
    assert quiet.busy is None and not quiet.emulated
    assert "48 %" in str(figures(probe_documents.throughput("0", busy=True)).busy)
    assert figures(probe_documents.throughput("0", emulated=True)).emulated


def test_an_llc_that_is_not_there_is_a_finding() -> None:
    caveat = {"id": "llc-not-shared", "detail": "108 ns apart", "fix": "pin the vCPUs"}
    (finding,) = figures(probe_documents.placement("0-1", [FAR], caveats=[caveat])).findings
    assert (finding.id, finding.severity) == ("bench-hidden-place", "warning")
    assert finding.fix == "pin the vCPUs"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "homenode.probe/2"}, "up to version 1"),
        ({"format": "homenode.plan/1"}, "homenode.probe/1"),
        ({"command": "rm"}, "one of bandwidth"),
        ({"one": None}, "one as homenode-probe writes it"),
        ({"machine": []}, "`$.machine`"),
        ({"pus": 7}, "`$.pus`"),
    ],
)
def test_what_is_no_document_is_refused(change: dict[str, Any], says: str) -> None:
    text = json.dumps({**json.loads(probe_documents.throughput("0")), **change})
    with pytest.raises(ParseError, match="expected") as caught:
        parse(text)
    assert says in caught.value.message


@pytest.mark.parametrize("value", ["0", "-1", "1e999"])
def test_a_figure_of_zero_or_less_is_refused(value: str) -> None:
    text = probe_documents.throughput("0").replace("4600.0", value)
    with pytest.raises(ParseError, match="expected"):
        parse(text)


def test_a_document_without_samples_is_refused() -> None:
    document = json.loads(DOCUMENTS["core-to-core"])
    document["pairs"] = []
    with pytest.raises(ParseError, match="missing samples of core-to-core"):
        figures(json.dumps(document))


@pytest.mark.parametrize("command", DOCUMENTS)
def test_damaged_documents_are_read_or_refused_and_nothing_else(command: str) -> None:
    survives(figures, DOCUMENTS[command], MUTATIONS)


@pytest.mark.parametrize(
    "command",
    [
        ("bandwidth", *FEW_BYTES),
        ("bandwidth", "--matrix", *FEW_BYTES),
        ("core-to-core", "--seconds", "0.05"),
        ("throughput", "--seconds", "0.05"),
        ("placement", "--seconds", "0.05"),
        ("smt", "--core", "both", "--seconds", "0.1"),
        ("loaded-latency", "--seconds", "0.1", "--chain-bytes", "4M", "--array-bytes", "4M"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_what_the_real_probe_prints_is_read(command: tuple[str, ...]) -> None:
    pus = two_pus()
    words = [pus if word == "both" else word for word in command]
    answer = probe(*words, *([] if "--core" in words else ["--pus", pus]))
    if answer.code == 3 and "NUMA" in answer.errors:
        pytest.skip("this kernel shows no NUMA nodes")
    assert answer.code == 0, answer.errors
    found = figures(answer.text)
    assert found.placed
    assert all(one.sample.value > 0 for one in found.placed)


def test_a_real_curve_is_read() -> None:
    answer = probe("latency", "--quick", "--seconds", "0.1", "--max-bytes", "1M", "--pus", one_pu())
    assert answer.code == 0, answer.errors
    assert {one.sample.unit for one in figures(answer.text).placed} <= {"ns", "bytes"}
