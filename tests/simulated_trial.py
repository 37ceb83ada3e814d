"""Trials on a simulated hypervisor: the stand-in for virsh, and guests with known effects.

A guest is what the stand-in's definition says: flat or with two cells, and as fast as its layout is
said to be, with noise of a boot and of a sample that only depend on the boot's number.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from homenode.change.journal import ChangeEntry, ChangeState
from homenode.errors import ToolError
from homenode.machine.description.parse import parse_description
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.machine.topology import Host
from homenode.measure.access.machine import Machine
from homenode.measure.model import SuiteDepth, SuiteGroup, SuiteOptions
from homenode.measure.trial.journal import BOOT, MeasureOptions, TrialHead, TrialJournal
from homenode.measure.trial.prepare import TrialRequest, preflight, prepare, reopen
from homenode.measure.trial.runner import Trial, run_trial
from homenode.process import ProgramResult
from homenode.vm.hypervisor.connection import GuestAccess
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan_options import PlanOptions, Policy
from homenode.vm.sources import load_host
from tests import probe_documents
from tests.apply_documents import NAME, ORIGINAL
from tests.bench_machines import FakeMachine
from tests.rendered.machine import render
from tests.virsh_stand_in import URI, UUID, StandIn

HOST = "x86-2p2n16c16t-smt-off"
LAYOUTS = ("default", "pin", "pin-numa")
GROUPS = (SuiteGroup.CPU_SINGLE, SuiteGroup.MEMORY_BANDWIDTH)
NOISE = 0.005

_FLAT = """
format = 1
name = "guest"
cores_per_package = 4
llc_size = "8MiB"
memory_per_node = "1GiB"
"""
_CELLS = """
format = 1
name = "guest"
packages = 2
cores_per_package = 2
llc_size = "8MiB"
memory_per_node = "512MiB"
distances = { other_package = 21 }
"""


def guest_snapshot(text: str, definition: bytes) -> MemorySnapshot:
    """What a described guest shows of itself: no L3 where its definition says so."""
    made = render(parse_description(text, "guest"))
    shows_l3 = b"<cache mode='disable'/>" not in definition
    return MemorySnapshot(
        "guest",
        {path: said for path, said in made.files.items() if shows_l3 or "/index3/" not in path},
        made.links,
        made.commands,
        made.directories,
    )


class SimulatedGuest(FakeMachine):
    """One boot of the stand-in's domain."""

    def __init__(self, daemon: StandIn, run_id: str, effect: float, cells: bool) -> None:
        super().__init__(boot=f"boot {run_id}")
        self.stream_fails = False
        self._daemon = daemon
        self._run_id = run_id
        self._text = _CELLS if cells else _FLAT
        self._random = random.Random(f"boot {run_id}")
        self._speed = effect * (1 + self._random.gauss(0, NOISE))

    def run(self, argv: Sequence[str], *rest: Any, **named: Any) -> ProgramResult:
        self._check()
        if argv[1:2] in (["bandwidth"], ("bandwidth",)) and self.stream_fails:
            return ProgramResult(tuple(argv), 1, "", "homenode-probe: not enough memory")
        if argv[0] == "poweroff":
            return ProgramResult(tuple(argv), 1, "", "Interactive authentication required.")
        if argv[1:2] in (["bandwidth"], ("bandwidth",)) and not self.code:
            return ProgramResult(tuple(argv), 0, self._bandwidth(argv), "")
        return super().run(argv, *rest, **named)

    def snapshot(self) -> Snapshot:
        self._check()
        return guest_snapshot(self._text, self._daemon.definition())

    def _check(self) -> None:
        state = self._daemon.state
        if (state / "unreachable").exists():
            raise ToolError("guest: Connection timed out")
        try:
            now = self._daemon.get("id")
        except FileNotFoundError:
            now = ""
        if now != self._run_id:
            raise ToolError("guest: Connection refused")

    def _bandwidth(self, argv: Sequence[str]) -> str:
        document = json.loads(probe_documents.answer(list(argv)))
        for run in document["runs"]:
            for kernel in run["kernels"]:
                for sample in kernel["raw"]:
                    noise = 1 + self._random.gauss(0, NOISE)
                    sample["bytes_per_s"] = 36e9 * self._speed * noise
        return json.dumps(document)


@dataclass
class SimulatedReach:
    """See trial.guest.Reach. effects: speed of memory by layout. wrong: layouts whose guest comes
    up without its cells."""

    daemon: StandIn
    effects: Mapping[str, float]
    wrong: Sequence[str] = ()
    silent: Sequence[str] = ()

    def machine(self, uuid: str) -> SimulatedGuest:
        definition = self.daemon.definition()
        cells = b"<cell" in definition
        layout = "pin-numa" if cells else "pin" if b"<vcpupin" in definition else "default"
        if layout in self.silent:
            raise ToolError(
                "root@192.0.2.7 over ssh: Permission denied (publickey)",
                hint="does it have this user's key?",
            )
        try:
            run_id = self.daemon.get("id")
        except FileNotFoundError:
            run_id = ""
        shows_cells = cells and layout not in self.wrong
        guest = SimulatedGuest(self.daemon, run_id, self.effects[layout], shows_cells)
        guest.run(("true",), 1)
        return guest

    def equip(self, machine: Machine) -> None:
        machine.run(("true",), 1)

    def leave(self, machine: Machine) -> None:
        machine.run(("true",), 1)


def daemon_in(directory: Path) -> StandIn:
    """A stand-in whose only domain is that of apply_documents."""
    return StandIn(directory, NAME, ORIGINAL)


def host() -> Host:
    return load_host(HOST)


def wanted(
    results: Path,
    *,
    boots: int = 2,
    layouts: tuple[str, ...] = LAYOUTS,
    bare: bool = False,
    as_copy: bool = False,
    answer_s: float = 5.0,
    repeats: int = 1,
    id: str = "trial",
) -> TrialRequest:
    measuring = MeasureOptions(
        SuiteOptions(GROUPS, SuiteDepth.QUICK), repeats=repeats, answer_s=answer_s, stop_s=0.2
    )
    return TrialRequest(
        id,
        layouts,
        boots,
        3,
        bare,
        as_copy,
        results,
        PlanOptions(layout="pin", policy=Policy.SPREAD),
        ("--policy", "spread"),
        measuring,
        GuestAccess(),
    )


def begun(root: Path, asked: TrialRequest) -> tuple[TrialHead, TrialJournal]:
    """A trial of the stand-in's domain, looked at and written down."""
    checked = preflight(Virsh(URI), NAME, asked, host(), root)
    assert not checked.obstacles
    assert not any(one.against for one in checked.fitted)
    journal = TrialJournal(root, asked.id)
    prepare(checked, journal)
    return checked.head, journal


def changed(
    journal: TrialJournal, kind: str, what: ChangeState = ChangeState.BEGIN, **facts: str
) -> None:
    """Have a line in the journal's changes, as a step of the trial writes it."""
    facts = {"number": "0", **facts} if kind == BOOT else facts
    journal.changes.write(ChangeEntry(what=what, kind=kind, subject=UUID, facts=facts))


def trial_of(
    head: TrialHead,
    journal: TrialJournal,
    root: Path,
    reach: SimulatedReach,
    stated: list[str] | None = None,
    within_s: float | None = None,
) -> Trial:
    """Ready to run, or to go on."""
    found = reopen(head, journal)
    found = replace(found, config=replace(found.config, emulated=False))
    said = [] if stated is None else stated
    return Trial(
        **asdict(found),
        virsh=Virsh(URI),
        journal=journal,
        root=root,
        reach=reach,
        on_boot=lambda progress: None,
        on_progress=lambda progress: None,
        on_wait=lambda waited_s, timeout_s: said.append(f"waiting, {timeout_s:g} s at most"),
        notify=said.append,
        within_s=within_s,
    )


def new_trial(directory: Path, reach: SimulatedReach, **asked: Any) -> Trial:
    """A trial that is ready to run: its state and its results are in this directory."""
    head, journal = begun(directory / "state", wanted(directory / "results", **asked))
    return trial_of(head, journal, directory / "state", reach)


def run_whole(trial: Trial) -> None:
    """Run it, or go on with it, under its journal's lock."""
    with trial.journal.hold() as lock:
        run_trial(trial, lock)
