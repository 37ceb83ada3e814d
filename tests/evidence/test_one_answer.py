"""Every command that says which layout to run says the same, for every machine and objective."""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from homenode.analyse.decide import decide
from homenode.analyse.machine_facts import facts_of_host, facts_of_measured
from homenode.analyse.trial_conclusion import conclude
from homenode.analyse.verdict import Verdict, Verdicts
from homenode.auto_layout import NotRecommended, settled
from homenode.cli import terminal
from homenode.cli.recommend import recommend
from homenode.domain.read import read_guest
from homenode.evidence.documents import publications
from homenode.evidence.model import Evidence
from homenode.formats import decode
from homenode.objective import Objective
from homenode.plan.fingerprint import host_fingerprint
from homenode.plan.options import PlanOptions
from homenode.report.page.gathered import gather
from homenode.report.page.machine import machines_of
from homenode.results.model import Run
from homenode.results.store import write_run
from homenode.sources import load_host
from homenode.topology import Host
from tests.simulated_runs import simulated_run

DOCUMENT = Path(__file__).parents[2] / "demo" / "gpu-vm.xml"
MACHINES = {
    system.name: system.host
    for publication in publications()
    for system in publication.systems
    if system.host is not None
}
STREAM = {"default": 77e9, "pin": 75e9, "pin-numa": 84e9}

app = typer.Typer()
app.command("recommend")(recommend)
app.command("other")(lambda: None)  # a command of one has no name

Answer = tuple[str | None, str | None, str | None, bool]


def answer(made: Verdict) -> Answer:
    return made.choice, made.layout, made.level, made.keep_vcpus


@cache
def host_of(system: str) -> Host:
    return load_host(MACHINES[system] or "")


def recommended(*arguments: str) -> dict[Objective, Answer]:
    terminal.console.cache_clear()
    done = CliRunner().invoke(app, ["recommend", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = decode(done.output, "verdict", Verdicts, "output").verdicts
    assert json.loads(done.output)["verdicts"]
    return {one.objective: answer(one) for one in found}


def planned(host: Host, evidence: Evidence) -> Iterator[tuple[Objective, tuple[object, ...]]]:
    """What `plan --layout auto` takes."""
    guest = read_guest(DOCUMENT.read_bytes(), "vm.xml")
    for objective in Objective:
        try:
            made = settled(guest, PlanOptions("auto", objective=objective), host, evidence)
        except NotRecommended:
            yield objective, (None, False)
        else:
            yield objective, (made.options.layout, made.options.keep_vcpus)


def reported(*arguments: str, host: str | None = None) -> dict[Objective, Answer]:
    found = gather(arguments, publications(), () if host is None else (host,))
    (machine,) = machines_of(found.runs, found.stored, publications(), found.hosts)
    return {one.objective: answer(one) for one in machine.verdicts}


def concluded(runs: list[Run], host: Host) -> dict[Objective, Answer]:
    machine = facts_of_measured(runs, host, publications())
    found = conclude(runs, "vm", "qemu:///system", (), publications(), machine)
    return {one.objective: answer(one) for one in found.verdicts.verdicts}


@pytest.mark.parametrize("system", MACHINES)
def test_every_command_gives_one_answer_from_published_figures(system: str) -> None:
    host = host_of(system)
    evidence = Evidence(publications())
    machine = facts_of_host(host, publications())
    expected = {one: answer(decide(evidence, machine, one)) for one in Objective}
    assert recommended("--host", MACHINES[system] or "") == expected
    assert recommended(f"published:{system}") == expected
    assert reported(f"published:{system}") == expected
    layouts = {one: (layout, keep) for one, (_, layout, _, keep) in expected.items()}
    assert dict(planned(host, evidence)) == layouts


@pytest.mark.parametrize("system", ["H200", "RTX 4080", "RTX 5090", "hgx-h100"])
def test_every_command_gives_one_answer_from_measured_figures(system: str, tmp_path: Path) -> None:
    """pin-numa is 9 to 12 % better, which published figures do not say."""
    source = MACHINES.get(system) or system
    host = load_host(source)
    rng = random.Random(20261122)
    runs = [
        simulated_run(
            layout, {"memory-bandwidth": ("bytes_per_s", value)}, rng, between=0.001, within=0.001,
            host=host_fingerprint(host),
        )
        for layout, value in STREAM.items()
    ]  # fmt: skip
    for run in runs:
        write_run(tmp_path, run)
    evidence = Evidence(publications(), tuple(runs))
    machine = facts_of_host(host, publications())
    expected = {one: answer(decide(evidence, machine, one)) for one in Objective}
    if system != "RTX 5090":
        assert expected[Objective.HOST_BANDWIDTH][1:3] == ("pin-numa", "measured")
    assert recommended(str(tmp_path), "--host", source) == expected
    assert reported(str(tmp_path), host=source) == expected
    assert concluded(runs, host) == expected
    layouts = {one: (layout, keep) for one, (_, layout, _, keep) in expected.items()}
    assert dict(planned(host, evidence)) == layouts
