"""Every command that says which layout to run says the same, for every machine and objective."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode import api
from homenode.cli.apply import plan_together
from homenode.decide.comparison import EvidenceLevel
from homenode.decide.machine_facts import collect_host_facts, collect_measured_facts
from homenode.decide.recommendation import Recommendation, RecommendedComparison, decide
from homenode.decide.sentences import choose_by_results
from homenode.decide.switch_effects import conclude
from homenode.formats import decode
from homenode.machine.topology import Host
from homenode.measure.imported_files import find_sources
from homenode.measure.imported_runs import ImportOptions, build_runs
from homenode.measure.results.model import Run
from homenode.measure.results.store import write_run
from homenode.objective import Objective
from homenode.plan import planner
from homenode.plan.request import build_layout
from homenode.plan.stored import read_plan
from homenode.show.report.inputs import gather
from homenode.show.report.machine import build_machines
from homenode.vm.domain.read import read_vm
from homenode.vm.layout import PRESETS, Layout, MemoryBinding, Pinning
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.command_line import homenode
from tests.sdumont_study import write_study
from tests.simulated_runs import simulated_run

DOCUMENT = Path(__file__).parents[2] / "demo" / "gpu-vm.xml"
HOSTS = ("h200-xeon8558", "rtx4080-i9-14900k", "rtx5090-epyc7702", "hgx-a100-ibm", "gh200x4")
STREAM = {"default": 77e9, "pin": 75e9, "pin-numa": 84e9}


Answer = tuple[str | None, str | None, str | None, tuple[str, ...]]


def answer(made: Recommendation) -> Answer:
    return made.choice, made.layout, made.level, made.words


@cache
def host_of(system: str) -> Host:
    return load_host(system)


def recommended(*arguments: str) -> dict[Objective, Answer]:
    done = homenode("compare", *arguments, "--json")
    assert done.exit_code in (0, 1, 5), done.output
    found = decode(done.stdout, "comparison", RecommendedComparison, "output").recommendations
    return {one.objective: answer(one) for one in found}


def planned(host: Host, runs: Sequence[Run]) -> Iterator[tuple[Objective, tuple[object, ...]]]:
    """What `plan --results` takes for a VM without GPUs."""
    guest = read_vm(DOCUMENT.read_bytes(), "vm.xml")
    for objective in Objective:
        wanted = PlanOptions("auto", objective=objective)
        made = planner.resolve_layout(guest, wanted, host, choose_by_results(runs)).options
        yield objective, (build_layout(made), made.keep_vcpus)


def expected_plan(made: Recommendation, host: Host) -> tuple[object, ...]:
    """The layout of results that decide, else that of the table."""
    if made.level in (EvidenceLevel.MEASURED, EvidenceLevel.PROVISIONAL):
        return layout_of(made), made.keeps_vcpus
    inputs = replace(planner.build_host_inputs(host), has_gpus=False)
    choice = planner.choose_layout(made.objective, inputs)
    return PRESETS[choice.layout], choice.keep_vcpus


def reported(*arguments: str, host: str | None = None) -> dict[Objective, Answer]:
    found = gather(arguments, () if host is None else (host,))
    (machine,) = build_machines(found.runs, found.stored, found.hosts)
    return {one.objective: answer(one) for one in machine.recommendations}


def concluded(runs: list[Run], host: Host) -> dict[Objective, Answer]:
    machine = collect_measured_facts(runs, host)
    found = conclude(runs, "vm", "qemu:///system", (), machine)
    return {one.objective: answer(one) for one in found.recommendations}


@pytest.mark.parametrize("source", [*HOSTS[:3], "hgx-h100"])
def test_every_command_gives_one_answer_from_measured_figures(source: str, tmp_path: Path) -> None:
    host = load_host(source)
    rng = random.Random(20261122)
    runs = [
        simulated_run(
            layout,
            {"memory-bandwidth": ("bytes_per_s", value)},
            rng,
            between=0.001,
            within=0.001,
            host=host.fingerprint,
        )
        for layout, value in STREAM.items()
    ]
    for run in runs:
        write_run(tmp_path, run)
    evidence = tuple(runs)
    machine = collect_host_facts(host)
    without = replace(machine.inputs, has_gpus=False)
    expected = {one: answer(decide(evidence, machine, one)) for one in Objective}
    if source != "rtx5090-epyc7702":
        assert expected[Objective.MEMORY_BANDWIDTH][1:3] == ("pin-numa", "measured")
    assert recommended(str(tmp_path), "--host", source) == expected
    assert reported(str(tmp_path), host=source) == expected
    assert concluded(runs, host) == expected
    assert dict(planned(host, runs)) == {
        one: expected_plan(decide(runs, machine, one, without), host) for one in Objective
    }


SMALL = (
    DOCUMENT.read_bytes()
    .replace(b"'GiB'>1024<", b"'GiB'>2<")
    .replace(b">88</vcpu>", b">2</vcpu>")
    .replace(b"<iothreads>1</iothreads>", b"")
    .replace(b" iothread='1'", b"")
    .replace(
        b"<hugepages>\n      <page size='1' unit='GiB'/>\n    </hugepages>", b"<nosharepages/>"
    )
)


def layout_of(made: Recommendation) -> Layout | None:
    """The switches that a verdict comes to."""
    if made.layout is None:
        return None
    layout = PRESETS[made.layout]
    if made.floats:
        return replace(layout, name="custom", pinning=Pinning.NODE, memory=MemoryBinding.BOUND)
    return layout


def placed_with(command: str, document: Path, host: str, objective: Objective) -> Layout:
    """The layout of the plan that a command makes."""
    if command in ("apply", "Python"):
        wanted = PlanOptions("auto", objective=objective)
        if command == "Python":
            return api.plan(document, host, wanted).layout
        content = document.read_bytes()
        (made,) = plan_together({"gpu-vm": content}, wanted, load_host(host), (), ())
        return made.plan.layout
    words = {
        "plan": ["plan", str(document), "--host", host],
        "plan --target": ["plan", str(document), "--host", host, "--target", "qemu"],
        "pool place": ["pool", "place", str(document), "--pool", host],
    }[command]
    options = ["--layout", "auto", "--objective", str(objective), "--json"]
    done = homenode(*words, *options)
    assert done.exit_code == 0, done.output
    return read_plan(done.stdout.encode(), "output").layout


COMMANDS = ("plan", "plan --target", "pool place", "apply", "Python")


def check_commands(system: str, objectives: tuple[Objective, ...], directory: Path) -> None:
    document = directory / "vm.xml"
    is_arm = host_of(system).architecture == "aarch64"
    small = SMALL.replace(b"x86_64' machine='q35'", b"aarch64' machine='virt'") if is_arm else SMALL
    document.write_bytes(small)
    inputs = replace(planner.build_host_inputs(host_of(system)), has_gpus=False)
    for command, objective in zip(COMMANDS, objectives, strict=True):
        layout = PRESETS[planner.choose_layout(objective, inputs).layout]
        assert placed_with(command, document, system, objective) == layout, command


@pytest.mark.parametrize("system", HOSTS)
def test_commands_that_place_a_vm_take_that_answer(system: str, tmp_path: Path) -> None:
    """Each command for one objective of each machine, another one on each."""
    first = HOSTS.index(system)
    wanted = [list(Objective)[(first + n) % len(Objective)] for n in range(len(COMMANDS))]
    check_commands(system, tuple(wanted), tmp_path)


@pytest.mark.lab
@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("system", HOSTS)
def test_commands_that_place_a_vm_take_every_answer(
    system: str, objective: Objective, tmp_path: Path
) -> None:
    check_commands(system, (objective,) * len(COMMANDS), tmp_path)


def test_logs_whose_layout_is_unknown_have_one_answer(tmp_path: Path) -> None:
    """The names of such runs are no layouts: nothing is chosen among them."""
    write_study(tmp_path / "transfer")
    for one in build_runs(find_sources([tmp_path / "transfer"]).directories, ImportOptions()):
        write_run(tmp_path / "results", one.run)
    assert recommended(*map(str, sorted((tmp_path / "results").glob("*/*")))) == {}
    assert reported(str(tmp_path / "results")) == {}
