"""homenode compare, as its users call it."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from homenode.decide.recommendation import RecommendedComparison
from homenode.errors import HomenodeError
from homenode.formats import decode
from homenode.measure.results.model import Condition, Run
from homenode.measure.results.store import FILE, run_text, write_run
from tests.command_line import homenode
from tests.published_runs import DIRECTORY
from tests.simulated_runs import simulated_run

FIGURES = {
    "default": ("memory-bandwidth", 77e9),
    "pin": ("memory-bandwidth", 75e9),
    "pin-numa": ("memory-bandwidth", 561e9),
}


def runs() -> list[Run]:
    rng = random.Random(1)
    return [
        simulated_run(layout, {metric: ("bytes_per_s", value)}, rng)
        for layout, (metric, value) in FIGURES.items()
    ]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for run in runs():
        write_run(tmp_path, run)
    broken = tmp_path / "H200" / "zz-broken"
    broken.mkdir()
    (broken / FILE).write_text(run_text(runs()[0])[:-10])
    return tmp_path


def call(*arguments: object, width: int = 160) -> str:
    outcome = homenode(*map(str, arguments), env={"COLUMNS": str(width)})
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    assert outcome.exit_code in (0, 1, 5), outcome.output
    return outcome.output


def test_compare_exits_with_what_it_could_judge(results: Path) -> None:
    machine = DIRECTORY / "h200"
    for code, arguments in (
        (0, [results]),
        (1, [DIRECTORY / "rtx-5090"]),
        (5, [machine / "default", machine / "pin"]),
        (0, [machine, "--host", "h200-xeon8558"]),
        (5, [machine, "--host", "hgx-h100"]),
    ):
        assert homenode("compare", *map(str, arguments)).exit_code == code


SCREENS = {
    ("h200/default", "h200/pin"): """\
H200: cannot tell pin from default in 3 of 3 results: 1 boot each

objective         result        default        pin  change      run
multi-gpu         all-reduce  20.2 GB/s  18.4 GB/s  9 % slower  cannot tell
memory-bandwidth  bandwidth   77.2 GB/s  75.3 GB/s  3 % slower  cannot tell
latency           latency        140 ns     112 ns  20 % lower  cannot tell

caveat  one printed value for each, no samples
next    homenode trial VM --layouts default,pin
""",
    ("h200",): """\
H200: run pin for multi-gpu, pin-numa for 2 objectives (provisional)

objective         unit       default    pin  pin-numa  pin-numa-smt  run
multi-gpu         GB/s          20.2   18.4       8.6           8.3  pin
memory-bandwidth  GB/s          77.2   75.3     561.2             -  pin-numa
latency           ns             140    112       101           100  pin-numa
throughput        kevents/s        -  232.5         -         237.8  cannot tell

multi-gpu         pin is 2.1x pin-numa, 2.2x pin-numa-smt; cannot tell it from
                  default (pin is 9 % slower); the rule of auto chooses pin
memory-bandwidth  pin-numa is 7.3x default, 7.5x pin
latency           pin-numa is 28 % lower than default; cannot tell it from
                  pin-numa-smt (pin-numa is 1 % higher), pin (pin-numa is 10 %
                  lower); the rule of auto chooses pin-numa
throughput        cannot tell pin from pin-numa-smt; the rule of auto chooses
                  pin
caveat            one printed value for each, no samples; the guest has nodes,
                  its GPUs have numa_node -1: pin-numa-pci may change multi-gpu
next              homenode trial VM --layouts default,pin,pin-numa,pin-numa-pci
""",
}


def test_compare_for_a_host_joins_the_objectives_without_results_and_the_other_runs() -> None:
    lines = call("compare", DIRECTORY, "--host", "h200-xeon8558", width=80).splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 80
    assert "rule              without results auto chooses pin-numa-pci for gpu-copy" in lines
    text = call("compare", DIRECTORY / "h200", "--host", "hgx-h100", width=80)
    first, _, *others = text.splitlines()
    assert first == "hgx-h100: cannot tell which layout is best: no results of two layouts"
    assert len(others) <= 6 and "runs that do not name this machine do not count" in text


@pytest.mark.parametrize("directories", SCREENS)
def test_compare_answers_in_line_1_then_a_table_then_labels(directories: tuple[str, ...]) -> None:
    text = call("compare", *(DIRECTORY / directory for directory in directories), width=80)
    assert [line.rstrip() for line in text.splitlines()] == SCREENS[directories].splitlines()


def test_of_many_machines_compare_prints_a_line_each() -> None:
    *lines, following = call("compare", DIRECTORY, width=80).splitlines()
    assert len(lines) == 9 and max(map(len, lines)) <= 80 and following.startswith("next  ")
    assert not [line for line in lines if line.startswith("any machine")], "a rule of thumb"
    assert lines[6] == (
        "RTX 5090: repair first: host to device and 1 more: 5.2 GB/s, expected 8 GB/s"
    )
    sick = call("compare", DIRECTORY / "rtx-5090")
    assert sick.startswith("RTX 5090: repair first: ") and "\nrepair  not ready: " in sick
    assert "\nnext" not in sick, "no trial before the repair"
    blocked = call("compare", DIRECTORY, "--objective", "latency", width=80).splitlines()
    assert "RTX 5090: not ready: its PCIe links are up at a fraction of their speed" in blocked


def test_what_was_not_read_for_one_reason_is_one_line(results: Path) -> None:
    text = (results / "H200/zz-broken" / FILE).read_text()
    (results / "H200/zz-other").mkdir()
    (results / "H200/zz-other" / FILE).write_text(text)
    text = " ".join(call("compare", results).split())
    assert text.count("not read") == 1 and " and 1 more: expected a finished run" in text


def test_machines_are_never_compared_with_each_other(tmp_path: Path) -> None:
    rng = random.Random(4)
    for system, layouts in (("a", ("pin", "pin-numa")), ("b", ("default", "pin")), ("c", ("pin",))):
        for layout in layouts:
            figures = {"memory-bandwidth": ("bytes_per_s", 1e11)}
            run = simulated_run(layout, figures, rng, system=system)
            write_run(tmp_path, Run(msgspec.structs.replace(run.head, host=system), run.samples))
    printed = json.loads(call("compare", tmp_path, "--json"))
    pairs = {(one["system"], one["baseline"], one["alternative"]) for one in printed["effects"]}
    assert pairs == {("a", "pin", "pin-numa"), ("b", "default", "pin")}
    assert {"subject": "c", "reason": "results of one layout only"} in printed["skipped"]
    assert not [one for one in printed["caveats"] if one["id"] == "other-host"]


def test_where_nothing_can_be_told_the_fix_stands_in_place_of_tables(tmp_path: Path) -> None:
    figures = {"allreduce-busbw-peak": ("bytes_per_s", 2e10)}
    sides = {
        "a": (("default", 1 << 30, "Xeon 8558"), ("pin", 1 << 17, "Xeon 8558")),
        "b": (("default", 1 << 30, "Xeon 8558"), ("pin", 1 << 30, "EPYC 9575F")),
    }
    for system, (layout, largest, cpu) in ((name, side) for name in sides for side in sides[name]):
        conditions = (Condition("tool largest message", f"{largest} bytes"),)
        run = simulated_run(layout, figures, random.Random(1), system=system, conditions=conditions)
        head = msgspec.structs.replace(run.head, hardware=(cpu,), host=None, host_kind=None)
        write_run(tmp_path / system, Run(head, run.samples))
    size, host = "measure both again to the same largest message", "run all layouts on one host"
    for system, fix, other in (("a", size, host), ("b", host, size)):
        printed = call("compare", tmp_path / system)
        assert "cannot tell which layout is best" in printed, printed
        assert f"fix        {fix}" in printed and other not in printed
        assert "for information only" not in printed and "primary" not in printed
        assert "primary; boots" in call("compare", tmp_path / system, "--explain")
    both = call("compare", tmp_path)
    assert (both.count(size), both.count(host)) == (1, 1), "each machine has its own"


def test_compare_fits_a_narrow_terminal(results: Path) -> None:
    assert max(map(len, call("compare", results, width=60).splitlines())) <= 60


def test_compare_prints_the_documented_format(results: Path) -> None:
    comparison = decode(
        call("compare", results, "--json"), "comparison", RecommendedComparison, "output"
    )
    assert comparison.baseline == "default"
    assert comparison.alternatives == ("pin", "pin-numa")
    assert [one.outcome for one in comparison.effects][1] == "better"
    assert "zz-broken" in comparison.skipped[0].subject


def test_runs_of_one_layout_are_compared_argument_by_argument(tmp_path: Path) -> None:
    rng = random.Random(2)
    for day in ("monday", "friday"):
        run = simulated_run("pin", {"memory-bandwidth": ("bytes_per_s", 75e9)}, rng)
        write_run(tmp_path / day, run)
    printed = call("compare", tmp_path / "monday", tmp_path / "friday", width=200)
    assert f"{tmp_path / 'friday'} against {tmp_path / 'monday'}" in printed


def test_a_pair_with_a_long_unit_keeps_its_table_at_80_columns() -> None:
    lines = call("compare", DIRECTORY / "xen-2-nodes-of-16-cores", width=80).splitlines()
    assert lines[2].split() == ["objective", "unit", "cores-first", "memory-first", "run"]


def test_columns_of_arrangements_that_are_not_layouts_have_one_order() -> None:
    lines = call("compare", DIRECTORY / "hgx-a100", "--host", "hgx-a100-ibm").splitlines()
    assert lines[2].index("GPUs on the root complex") < lines[2].index("expander buses")


def test_each_of_several_machines_is_told_the_fix_that_they_share(tmp_path: Path) -> None:
    rng = random.Random(1)
    for system in ("b200", "h200"):
        for layout, governor in (("default", "powersave"), ("pin", "performance")):
            figures = {"memory-bandwidth": ("bytes_per_s", 1e11)}
            conditions = (Condition("governor", governor),)
            write_run(
                tmp_path,
                simulated_run(
                    layout, figures, rng, system=system, host=system, conditions=conditions
                ),
            )
    printed = call("compare", tmp_path)
    assert printed.count("under equal conditions") == 2
    assert "b200: governor; h200: governor: " in call("compare", tmp_path, "--explain")
    stored = decode(
        call("compare", tmp_path, "--json"), "comparison", RecommendedComparison, "output"
    )
    assert [(caveat.system, caveat.subject) for caveat in stored.caveats] == [
        ("b200", "governor"),
        ("h200", "governor"),
    ]


def test_compare_for_a_host_takes_the_best_rung_and_prints_the_documented_format(
    results: Path,
) -> None:
    printed = call("compare", results, "--host", "h200-xeon8558", "--json")
    verdicts = decode(printed, "comparison", RecommendedComparison, "output").recommendations
    assert len(verdicts) == 6
    assert {one.level for one in verdicts} == {"rule"}
    assert json.loads(printed)["format"] == "homenode.comparison/1"


def test_nothing_to_compare_says_what_to_name(tmp_path: Path) -> None:
    write_run(tmp_path, runs()[0])
    with pytest.raises(HomenodeError, match="expected two alternatives or more, found default"):
        call("compare", tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (("compare", empty, tmp_path), ("report", empty)):
        with pytest.raises(HomenodeError, match=r"^\S*/empty: no run in it"):
            call(*words)


def test_runs_are_known_by_their_content_and_other_files_by_name(tmp_path: Path) -> None:
    """Files as a colleague sends them: renamed, as an archive, as the report on them."""
    for run in runs():
        (tmp_path / f"{run.head.name}.jsonl").write_text(run_text(run))
    in_directory = call("compare", tmp_path)
    assert call("compare", *sorted(tmp_path.glob("*.jsonl"))) == in_directory
    assert "pin-numa" in in_directory.splitlines()[0]
    (tmp_path / "mail.tar.gz").write_bytes(b"\x1f\x8b\0\0")
    (tmp_path / "mail.html").write_text("<html>")
    (tmp_path / "rows.json").write_text('{"format": "homenode.rows/1"}')
    for name, reason in (
        ("mail.tar.gz", "mail.tar.gz: an archive"),
        ("mail.html", "/mail.html: a report"),
        ("rows.json", "/rows.json: a homenode.rows"),
    ):
        for command in ("compare", "report"):
            with pytest.raises(HomenodeError, match=reason):
                call(command, tmp_path / name)


def test_pairs_of_pus_are_listed_with_explain_only(tmp_path: Path) -> None:
    rng = random.Random(9)
    for layout in ("pin", "default"):
        run = simulated_run(layout, {"core-to-core-latency": ("ns", 60.0)}, rng)
        pairs = (msgspec.structs.replace(one, variant="0 to 1") for one in run.samples)
        write_run(tmp_path, Run(run.head, tuple(pairs)))
    assert "0 to 1" not in call("compare", tmp_path)
    assert "1 more series with --explain" in call("compare", tmp_path)
    assert "0 to 1" in call("compare", tmp_path, "--explain")
