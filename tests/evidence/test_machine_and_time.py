"""Imported runs: of which machine they are, and in which order they were measured."""

import os
import random
from pathlib import Path

import pytest
from msgspec import structs

from homenode.decide.alternative import group_runs
from homenode.decide.compare import compare
from homenode.decide.comparison import NO_ORDER, ORDER, EvidenceLevel, Outcome
from homenode.decide.machine_facts import (
    MachineMatch,
    assign_runs,
    check_unassigned_runs,
    collect_host_facts,
    match_machine,
)
from homenode.errors import ParseError
from homenode.measure.imported_files import find_directories
from homenode.measure.imported_runs import ImportOptions, build_runs
from homenode.measure.importers import stream
from homenode.measure.results.model import Origin, Run, list_hardware
from homenode.measure.step_reading import read_tool_results
from homenode.vm.sources import load_host
from tests.command_line import homenode
from tests.simulated_runs import simulated_run

STREAM = """-------------------------------------------------------------
STREAM version $Revision: 5.10 $
-------------------------------------------------------------
This system uses 8 bytes per array element.
-------------------------------------------------------------
Array size = 800000000 (elements), Offset = 0 (elements)
Memory per array = 6103.5 MiB (= 6.0 GiB).
Number of Threads counted = 64
-------------------------------------------------------------
Function    Best Rate MB/s  Avg time     Min time     Max time
Copy:       {rate:.1f}     0.042     0.041     0.043
Scale:      {rate:.1f}     0.042     0.041     0.043
Add:        {rate:.1f}     0.042     0.041     0.043
Triad:      {rate:.1f}     0.042     0.041     0.043
-------------------------------------------------------------
Solution Validates: avg error less than 1.000000e-13 on all three arrays
"""
HOUR_S = 3600


@pytest.mark.parametrize(
    ("hardware", "host", "expected"),
    [
        (("NVIDIA H100 80GB HBM3",), "hgx-h100", MachineMatch.SHOWN),
        (("AMD Instinct MI350X VF",), "hgx-h100", MachineMatch.OTHER),
        (("AMD Instinct MI350X VF",), "mi350x-epyc9575f", MachineMatch.SHOWN),
        (("NVIDIA GeForce RTX 4090",), "rtx4080-i9-14900k", MachineMatch.OTHER),
        (("NVIDIA GeForce RTX 4090",), "rtx4090-epyc7702", MachineMatch.SHOWN),
        (("AMD EPYC 7702 64-Core Processor",), "rtx4090-epyc7702", MachineMatch.SHOWN),
        (("AMD EPYC 9654 96-Core Processor",), "rtx4090-epyc7702", MachineMatch.OTHER),
        # One that it has and one that it has not: another machine.
        (("AMD EPYC 7702", "NVIDIA H100 PCIe"), "rtx4090-epyc7702", MachineMatch.OTHER),
        (("QEMU Virtual CPU version 2.5+",), "hgx-h100", MachineMatch.UNKNOWN),
        ((), "hgx-h100", MachineMatch.UNKNOWN),
    ],
)
def test_a_run_belongs_to_a_host_whose_hardware_it_names(
    hardware: tuple[str, ...], host: str, expected: MachineMatch
) -> None:
    head = structs.replace(_imported("pin", 1.0).head, system="cpu-only", hardware=hardware)
    assert match_machine(head, list_hardware(load_host(host))) is expected


def _imported(layout: str, rate: float, started_s: float | None = None) -> Run:
    made = simulated_run(
        layout, {"memory-bandwidth": ("bytes_per_s", 1e11 * rate)}, random.Random(rate), boots=1
    )
    head = structs.replace(
        made.head, origin=Origin.IMPORTED, host=None, started_s=started_s, boots=(), block=None
    )
    return Run(structs.replace(head, name=f"{layout}-{rate}"), made.samples)


def _outcome(runs: list[Run]) -> tuple[tuple[str, ...], Outcome]:
    (effect,) = compare(group_runs(runs)).effects
    return effect.caveats, effect.outcome


RATES = (1.00, 1.02, 1.04, 1.06, 1.08, 1.10)


def test_without_times_and_order_no_winner_is_stated() -> None:
    runs = [_imported("pin" if i < 3 else "pin-numa", rate) for i, rate in enumerate(RATES)]
    caveats, outcome = _outcome(runs)
    assert NO_ORDER in caveats
    assert outcome is Outcome.CANNOT_TELL


@pytest.mark.parametrize("step_s", [0.0, 0.01, 0.5])
def test_times_of_files_that_were_copied_together_are_none(step_s: float) -> None:
    runs = [
        _imported("pin" if i in (0, 1, 3) else "pin-numa", rate, 1e9 + i * step_s)
        for i, rate in enumerate(RATES)
    ]
    runs = [Run(structs.replace(run.head, of_files=True), run.samples) for run in runs]
    assert NO_ORDER in _outcome(runs)[0]
    untimed = [Run(structs.replace(run.head, started_s=None), run.samples) for run in runs]
    assert compare(group_runs(runs)).effects == compare(group_runs(untimed)).effects


def test_an_order_that_the_user_gives_counts_before_times() -> None:
    mixed = [_imported("pin" if i % 2 else "pin-numa", rate) for i, rate in enumerate(RATES)]
    placed = [
        Run(structs.replace(run.head, place=place), run.samples) for place, run in enumerate(mixed)
    ]
    assert not {ORDER, NO_ORDER} & set(_outcome(placed)[0])
    blocked = sorted(mixed, key=lambda run: run.head.switches.name)
    placed = [
        Run(structs.replace(run.head, place=place), run.samples)
        for place, run in enumerate(blocked)
    ]
    assert ORDER in _outcome(placed)[0]


def test_a_difference_beyond_any_drift_is_provisional() -> None:
    runs = [_imported("pin", 1 + i / 100) for i in range(3)]
    runs += [_imported("pin-numa", 3 + i / 100) for i in range(3)]
    (effect,) = compare(group_runs(runs)).effects
    assert (effect.outcome, effect.level) == (Outcome.BETTER, EvidenceLevel.PROVISIONAL)


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Equal layouts on a machine that drifts by a tenth, an hour between two logs."""
    for number, rate in enumerate(RATES):
        layout = "pin" if number < 3 else "pin-numa"
        path = tmp_path / "logs" / layout / f"stream-{chr(97 + number)}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STREAM.format(rate=200000 * rate))
        os.utime(path, (1e9 + number * HOUR_S,) * 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_equal_layouts_that_drift_are_not_told_apart(logs: Path) -> None:
    done = homenode("import", "logs/pin", "logs/pin-numa", "-o", "res")
    assert done.exit_code == 0, done.stderr
    said = homenode("compare", "res")
    assert "one layout's boots were all measured before the other's" in said.stdout
    found = homenode("compare", "res", "--objective", "memory-bandwidth")
    assert "measured here" not in found.stdout
    assert "rather than" not in found.stdout


def test_an_order_names_each_run_once(logs: Path) -> None:
    for order in ("stream-a,stream-b", "stream,x", "stream,stream-a,stream"):
        done = homenode("import", "logs", "--order", order, "-o", "res")
        assert done.exit_code == 2
        assert "--order: expected each run once" in str(done.exception)
    done = homenode("import", "logs", "--order", "stream-a,stream", "-o", "res")
    assert done.exit_code == 0, "a word stands for the runs whose names it begins"


@pytest.mark.parametrize(
    ("unit", "expected"), [("MB", 2e11), ("GB", 2e14), ("MiB", 2e5 * 2**20), ("GiB", 2e5 * 2**30)]
)
def test_rates_of_stream_are_in_the_unit_of_their_head(unit: str, expected: float) -> None:
    text = STREAM.format(rate=200000).replace("MB/s", f"{unit}/s")
    assert stream.parse(text).kernels[0].best_bytes_per_s == pytest.approx(expected)


def test_a_rate_in_another_unit_is_refused() -> None:
    with pytest.raises(ParseError, match="rates in MB, GB, MiB, GiB"):
        stream.parse(STREAM.format(rate=200000).replace("MB/s", "furlongs/s"))


def test_arrays_that_fit_into_caches_measure_no_memory() -> None:
    small = STREAM.format(rate=200000).replace("800000000", "100000")
    figures = read_tool_results("STREAM", small, "x.txt")
    assert not figures.samples
    assert "fit into caches" in str(figures.gaps)


SHOW = """policy: bind
preferred node: 1
physcpubind: 0 1 2 3
cpubind: 0
nodebind: 0
membind: 1
"""


def test_memory_that_numactl_bound_is_that_node_s_and_no_headline() -> None:
    text = STREAM.format(rate=200000)
    assert {one.node for one in read_tool_results("STREAM", SHOW + text, "x").samples} == {1}
    of_all = SHOW.replace("policy: bind", "policy: default").replace("membind: 1", "membind: 0")
    assert {one.node for one in read_tool_results("STREAM", of_all + text, "x").samples} == {None}


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", "[prterun-host-1@1,0]<stdout>: "])
def test_tags_of_mpirun_are_removed(tag: str, tmp_path: Path) -> None:
    text = STREAM.format(rate=200000)
    (tmp_path / "x.log").write_text("".join(f"{tag}{line}\n" for line in text.splitlines()))
    (run,) = build_runs(find_directories(tmp_path).directories, ImportOptions())
    assert run.run.samples


def test_directories_of_other_tools_are_compared_as_they_are(logs: Path) -> None:
    said = homenode("compare", "logs/pin", "logs/pin-numa")
    assert said.exit_code == 5, said.exception
    assert "bandwidth" in said.stdout


def test_what_keeps_runs_from_counting_is_what_is_said() -> None:
    machine = collect_host_facts(load_host("hgx-h100"))
    heads = {
        "cpu-only": (),
        "lab-a": ("NVIDIA H100",),
        "lab-b": ("NVIDIA H100",),
        "other": ("NVIDIA A100",),
        "another": ("AMD MI300X",),
    }
    runs = [
        Run(structs.replace(made.head, system=system, hardware=hardware), made.samples)
        for system, hardware in heads.items()
        for made in (_imported("pin", 1.0),)
    ]
    assert {run.head.host for run in assign_runs(runs, load_host("hgx-h100"))} == {None}
    said = {one.subject: (one.id, one.detail) for one in check_unassigned_runs(runs, machine)}
    others = said["other; another"]
    assert others[0] == "other-machine" and "NVIDIA A100, AMD MI300X" in others[1]
    assert said["lab-a; lab-b"][0] == "machine-unknown"
    assert "several directories" in said["lab-a; lab-b"][1]
    assert "GPU model" in said["cpu-only"][1]
