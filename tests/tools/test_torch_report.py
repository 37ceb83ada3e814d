"""What our PyTorch programs print, and what NCCL logs."""

import json
from typing import Any

import pytest
from msgspec.structs import fields

from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.tools.torch_report import TorchDevice, TorchResult, TorchRow, TorchRun, parse
from homenode.measure.gpu_tool_samples import read_torch_run_results
from tests.doc_pages import read_page
from tests.mutations import MUTATIONS, survives

DEVICES = [
    {"index": 0, "address": "0000:19:00.0", "name": "NVIDIA H200", "node": 0},
    {"index": 1, "address": "0000:9b:00.0", "name": "NVIDIA H200", "node": 1},
]
FIGURE = {
    "metric": "h2d-bandwidth",
    "unit": "bytes_per_s",
    "device": 1,
    "samples": [55.1e9, 55.3e9],
    "steady": True,
    "warmups": 12,
    "thread": {"cpu": 3, "node": 0},
    "variant": None,
    "memory_node": None,
}
COPIES: dict[str, Any] = {
    "format": "homenode.torch/1",
    "command": "host-copies",
    "torch": "2.15.0",
    "runtime": "cuda 13.2",
    "devices": DEVICES,
    "bound_node": 0,
    "copy_bytes": 1 << 28,
    "results": [FIGURE],
    "gaps": [{"subject": "x", "reason": "y"}],
    "stalled": None,
}
REDUCE: dict[str, Any] = {
    "format": "homenode.torch/1",
    "command": "all-reduce",
    "torch": "2.15.0",
    "runtime": "hip 6.3",
    "devices": DEVICES,
    "bind": "none",
    "peers": True,
    "warmups": 10,
    "gpus": 2,
    "rows": [
        {"size_bytes": 8, "time_ns": 2.1e4, "iterations": 100, "wrong_ranks": 0},
        {"size_bytes": 1 << 30, "time_ns": 4.2e6, "iterations": 100, "wrong_ranks": 0},
    ],
    "results": [],
    "gaps": [],
    "stalled": None,
}


def text_of(*documents: dict[str, Any]) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def test_figures_have_addresses_and_the_bound_node() -> None:
    seen = {**COPIES, "results": [{**FIGURE, "memory_node": 0}]}
    figures = read_torch_run_results(parse("NCCL version 2.26\n" + text_of(seen)))
    assert [(str(s.device), s.node, s.value, s.number) for s in figures.samples] == [
        ("0000:9b:00.0", 0, 55.1e9, 0),
        ("0000:9b:00.0", 0, 55.3e9, 1),
    ]
    assert [(gap.subject, gap.reason) for gap in figures.gaps] == [("x", "y")]


def test_memory_that_went_elsewhere_and_figures_that_were_not_steady_are_reported() -> None:
    document = {**COPIES, "results": [{**FIGURE, "steady": False, "memory_node": 1}]}
    figures = read_torch_run_results(parse(text_of(document)))
    reasons = [gap.reason for gap in figures.gaps]
    assert "memory was bound to node 0 and is on node 1: not kept" in reasons
    assert not figures.samples
    assert "did not become steady before it was sampled" in reasons


def test_the_process_of_a_node_that_failed_is_a_gap_next_to_the_others() -> None:
    failed = {"format": "homenode.torch/1", "failed": "node 1: status 256"}
    figures = read_torch_run_results(parse(text_of(COPIES, failed)))
    assert len(figures.samples) == 2
    assert any(gap.reason == "node 1: status 256" for gap in figures.gaps)


def test_an_all_reduce_is_counted_as_nccl_tests_count_it() -> None:
    figures = read_torch_run_results(parse(text_of(REDUCE)))
    peak = next(s.value for s in figures.samples if s.metric == "allreduce-busbw-peak")
    assert peak == pytest.approx((1 << 30) / 4.2e-3)  # 2(n-1)/n is 1 of two


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "homenode.torch/2"}, "homenode.torch/1"),
        ({"results": [{**FIGURE, "device": 2}]}, "a device below 2"),
        ({"results": [{**FIGURE, "samples": [0.0]}]}, "above 0 and finite"),
        ({"results": [{**FIGURE, "samples": [float("nan")]}]}, "above 0 and finite"),
        ({"results": [{**FIGURE, "unit": "parsecs"}]}, "one of"),
        ({"results": [{**FIGURE, "samples": ["5"]}]}, "its fields"),
        ({"devices": [{**DEVICES[0], "address": "../etc"}]}, "domain:bus:device.function"),
        ({"devices": list(reversed(DEVICES))}, "numbered from 0"),
        ({"rows": [{**REDUCE["rows"][0], "iterations": 0}]}, "above 0"),
        ({"rows": REDUCE["rows"], "gpus": 9}, "of its devices"),
    ],
)
def test_what_is_no_such_document_is_reported_with_its_line(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ParseError, match=says) as refused:
        parse("warning\n" + text_of({**COPIES, **change}))
    assert ":2: expected" in str(refused.value)


def test_an_output_without_a_document_is_reported() -> None:
    with pytest.raises(ParseError, match=r"homenode\.torch/1"):
        parse("Segmentation fault\n")


@pytest.mark.parametrize("document", [COPIES, REDUCE], ids=["copies", "all-reduce"])
def test_damaged_reports_give_figures_or_a_parse_error(document: dict[str, Any]) -> None:
    survives(lambda text: read_torch_run_results(parse(text)), text_of(document), MUTATIONS)


def test_the_page_of_the_format_names_every_field() -> None:
    words = {
        word.removesuffix("[]")
        for word in read_page("docs/reference/formats/torch.md").words_in_code()
    }
    for record in (TorchRun, TorchDevice, TorchResult, Gap, TorchRow):
        missing = {field.name for field in fields(record)} - words - {"index", "name", "kind"}
        assert not missing, record
