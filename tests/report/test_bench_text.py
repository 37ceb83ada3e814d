"""What homenode bench prints, on wide and on narrow terminals."""

import io
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.doc import Doc
from homenode.findings import Gap
from homenode.measure import runner
from homenode.measure.model import Depth, SuiteOptions
from homenode.measure.options import BenchOptions, BenchOutcome
from homenode.measure.results.vantage import Vantage
from homenode.show.results_text import bench_text, steps_text
from homenode.show.terminal_text import PrintableConsole
from tests.bench_machines import FakeMachine

ORDERS = BenchOptions("x", SuiteOptions(depth=Depth.QUICK), repeats=1, vantage=Vantage.HOST)


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchOutcome:
    monkeypatch.setattr(runner, "IDLE_S", 0.0)
    return runner.run_bench(FakeMachine(), ORDERS, tmp_path, lambda progress: None)


def shown(text: Doc, width: int) -> str:
    stream = io.StringIO()
    PrintableConsole(file=stream, width=width, highlight=False).print(text)
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_figure_has_its_median_and_its_range(outcome: BenchOutcome, width: int) -> None:
    text = " ".join(shown(bench_text(outcome), width).split())
    for words in ("memory bandwidth", "27 ns apart", "36 GB/s", "93.5 ns", "4,600 events/s"):
        assert words in text, words


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_step_is_shown_with_its_command(width: int) -> None:
    record = runner.inspect(FakeMachine(), ORDERS)[0].record
    text = " ".join(shown(steps_text(record), width).split())
    assert text.count("cpu-single (control)") == 2
    assert "homenode-probe placement" in text
    assert "not measured: nccl: no GPU" in text


def test_why_a_run_is_marked_is_shown_and_nothing_steers_the_terminal(
    outcome: BenchOutcome,
) -> None:
    assert outcome.run is not None
    head = structs.replace(outcome.run.head, unusable=("\x1b[2Jevil",))
    gaps = tuple(Gap(f"test {number}", "\x1b]0;evil") for number in range(40))
    text = shown(
        bench_text(replace(outcome, run=structs.replace(outcome.run, head=head), gaps=gaps)), 80
    )
    assert "\x1b" not in text
    assert "marked: ?[2Jevil" in text
    assert "not measured: 28 more" in text
