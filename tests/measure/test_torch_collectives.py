"""All-reduce by PyTorch: curves, bindings, ranks that fail, hang or stay in a driver."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.errors import ParseError
from homenode.machine.tools import torch_report
from homenode.measure.model import BenchTest, Reader, SuiteGroup
from homenode.measure.programs import torch_collectives
from homenode.measure.programs.torch_place import nodes_to_bind
from tests.measure.test_torch_programs import read
from tests.torch_programs import all_reduce

REDUCE = BenchTest("nccl", SuiteGroup.NCCL, ("python3", "-"), 1, 1, reads=Reader.TORCH)


def test_an_all_reduce_has_a_curve_its_peak_and_its_start() -> None:
    figures = read(all_reduce().stdout_or_raise(), REDUCE)
    rates = (one for one in figures.samples if one.metric == "allreduce-busbw")
    by_size = {one.size_bytes or 0: one.value for one in rates}
    assert sorted(by_size) == [8 << n for n in range(14)]
    # A busy machine is late with calls, so that rates may be lower than the GPUs'; never higher.
    assert 0 < by_size[65536] <= 65536 / (20e-6 + 65536 / 10e9) * 1.01
    one = {s.metric: s.value for s in figures.samples if s.metric != "allreduce-busbw"}
    assert one["allreduce-busbw-peak"] == max(by_size.values())
    assert one["allreduce-busbw-mean"] == pytest.approx(sum(by_size.values()) / 14)
    assert one["allreduce-latency"] >= 20e3 * 0.99
    half = next(size for size in sorted(by_size) if by_size[size] >= max(by_size.values()) / 2)
    assert one["allreduce-half-peak"] == half
    conditions = {condition.name: condition.value for condition in figures.conditions}
    assert conditions["collective repeats"] == "3 + 20"
    assert conditions["tool nccl-tests"] == "as PyTorch does it"


def test_an_all_reduce_without_peers_is_slower_and_bound_ranks_say_so() -> None:
    nodes = nodes_to_bind()
    bind = str(nodes[0]) if nodes else "none"
    output = all_reduce("--no-peers", "--bind", bind).stdout_or_raise()
    document = json.loads(output.splitlines()[-1])
    assert not document["peers"]
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert {rank["bound_node"] for rank in document["ranks"]} == {nodes[0] if nodes else None}
    (run,) = torch_report.parse(output)
    assert run.rows[-1].time_ns > 1.5 * 20e3


def test_variants_keep_collectives_under_other_bindings_apart() -> None:
    test = replace(REDUCE, variant="P2P off", binding="nothing bound")
    figures = read(all_reduce("--no-peers").stdout_or_raise(), test)
    assert all((one.variant or "").startswith("P2P off") for one in figures.samples)


def test_wrong_sums_leave_no_figure() -> None:
    with pytest.raises(ParseError, match="wrong values"):
        read(all_reduce(wrong_at=4096).stdout_or_raise(), REDUCE)


def test_a_rank_that_fails_ends_all_ranks_with_its_reason() -> None:
    ended = all_reduce(rank_fails=1)
    assert ended.returncode == 1
    assert "rank 1: NCCL error: unhandled system error" in ended.stderr
    assert "rank 1 failed" in ended.stderr


def test_an_all_reduce_that_hangs_keeps_the_sizes_before() -> None:
    ended = all_reduce("--stall", "10", hangs_at=4096)
    (run,) = torch_report.parse(ended.stdout_or_raise())
    assert [row.size_bytes for row in run.rows] == [8 << n for n in range(9)]
    assert run.stalled == "no progress for 10 s"
    figures = read(ended.stdout, REDUCE)
    assert any("did not end" in gap.reason for gap in figures.gaps)


def test_stuck_ranks_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal does not reach a process that waits within the kernel."""
    monkeypatch.setattr(torch_collectives, "KILLED_S", 0.2)
    spared: list[int] = []
    monkeypatch.setattr(os, "kill", lambda child, _: spared.append(child))
    crew = torch_collectives.ProcessGroup(tmp_path, 0.2)
    crew.start(0, lambda: time.sleep(600))
    assert crew.wait() == "no progress for 0.2 s"
    monkeypatch.undo()
    os.kill(spared[0], 0)  # there still: its end was not waited for
    os.kill(spared[0], signal.SIGKILL)
    os.waitpid(spared[0], 0)


@pytest.mark.parametrize(
    ("words", "gpus", "says"),
    [(("--bind", "gpu"), 2, "has no node here"), ((), 3, "--gpus 3: PyTorch sees 2")],
)
def test_a_bad_all_reduce_is_reported(words: tuple[str, ...], gpus: int, says: str) -> None:
    ended = all_reduce(*words, gpus=gpus)
    assert ended.returncode == 1
    assert says in ended.stderr
