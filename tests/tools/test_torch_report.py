"""What our PyTorch programs print, and what NCCL logs."""

import json
from typing import Any

import pytest
from msgspec.structs import fields

from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.tools import nccl_tests
from homenode.machine.tools.nccl_tests import nccl_choice as choice
from homenode.machine.tools.torch_report import (
    TorchChoice,
    TorchDevice,
    TorchFigure,
    TorchRank,
    TorchRow,
    TorchRun,
    parse,
)
from homenode.measure.figures.torch_programs import of_torch
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
    "figures": [FIGURE],
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
    "ranks": [],
    "choices": [{"size_bytes": 8, "algorithm": "1", "protocol": "0"}],
    "figures": [],
    "gaps": [],
    "stalled": None,
}
LOG = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 32
node:1:1 [0] NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
           8             2     float     sum      -1    10.1    0.00    0.00      0
node:1:1 [0] NCCL INFO 16 Bytes -> Algo 0 proto 2 time 11.200000
node:1:1 [0] NCCL INFO Broadcast: 4 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
node:1:1 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo NVLS proto Simple channel{Lo..Hi}={0..15}
"""


def text_of(*documents: dict[str, Any]) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def test_figures_have_addresses_and_the_bound_node() -> None:
    seen = {**COPIES, "figures": [{**FIGURE, "memory_node": 0}]}
    figures = of_torch(parse("NCCL version 2.26\n" + text_of(seen)))
    assert [(str(s.device), s.node, s.value, s.number) for s in figures.samples] == [
        ("0000:9b:00.0", 0, 55.1e9, 0),
        ("0000:9b:00.0", 0, 55.3e9, 1),
    ]
    assert [(gap.subject, gap.reason) for gap in figures.gaps] == [("x", "y")]


def test_memory_that_went_elsewhere_and_figures_that_were_not_steady_are_reported() -> None:
    document = {**COPIES, "figures": [{**FIGURE, "steady": False, "memory_node": 1}]}
    figures = of_torch(parse(text_of(document)))
    reasons = [gap.reason for gap in figures.gaps]
    assert "memory was bound to node 0 and lies on node 1: not kept" in reasons
    assert not figures.samples
    assert "did not become steady before it was sampled" in reasons


def test_the_process_of_a_node_that_failed_is_a_gap_next_to_the_others() -> None:
    failed = {"format": "homenode.torch/1", "failed": "node 1: status 256"}
    figures = of_torch(parse(text_of(COPIES, failed)))
    assert len(figures.samples) == 2
    assert any(gap.reason == "node 1: status 256" for gap in figures.gaps)


def test_an_all_reduce_is_counted_as_nccl_tests_count_it() -> None:
    figures = of_torch(parse(text_of(REDUCE)))
    peak = next(s.value for s in figures.samples if s.metric == "allreduce-busbw-peak")
    assert peak == pytest.approx((1 << 30) / 4.2e-3)  # 2(n-1)/n is 1 of two
    assert ("collective algorithm", "RING LL 8 B") in [
        (c.name, c.value) for c in figures.conditions
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "homenode.torch/2"}, "homenode.torch/1"),
        ({"figures": [{**FIGURE, "device": 2}]}, "a device below 2"),
        ({"figures": [{**FIGURE, "samples": [0.0]}]}, "above 0 and finite"),
        ({"figures": [{**FIGURE, "samples": [float("nan")]}]}, "above 0 and finite"),
        ({"figures": [{**FIGURE, "unit": "parsecs"}]}, "one of"),
        ({"figures": [{**FIGURE, "samples": ["5"]}]}, "its fields"),
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


def test_choices_have_names_whatever_the_version_prints() -> None:
    assert nccl_tests.parse_tuning_log(LOG) == (
        choice(8, "RING", "LL"),
        choice(16, "TREE", "SIMPLE"),
        choice(1 << 20, "NVLS", "SIMPLE"),
    )
    assert nccl_tests.in_words(nccl_tests.parse_tuning_log(LOG)) == (
        "RING LL 8 B; TREE SIMPLE 16 B; NVLS SIMPLE 1 MiB"
    )


def test_a_log_without_choices_is_reported() -> None:
    with pytest.raises(ParseError, match="8 Bytes -> Algo"):
        nccl_tests.parse_tuning_log("NCCL INFO Bootstrap\n")


@pytest.mark.parametrize("document", [COPIES, REDUCE], ids=["copies", "all-reduce"])
def test_damaged_reports_give_figures_or_a_parse_error(document: dict[str, Any]) -> None:
    survives(lambda text: of_torch(parse(text)), text_of(document), MUTATIONS)


def test_damaged_logs_give_choices_or_a_parse_error() -> None:
    survives(lambda text: nccl_tests.in_words(nccl_tests.parse_tuning_log(text)), LOG, MUTATIONS)


def test_the_page_of_the_format_names_every_field() -> None:
    words = {
        word.removesuffix("[]")
        for word in read_page("docs/reference/formats/torch.md").words_in_code()
    }
    for record in (TorchRun, TorchDevice, TorchFigure, Gap, TorchRank, TorchRow, TorchChoice):
        missing = {field.name for field in fields(record)} - words - {"index", "name"}
        assert not missing, record
