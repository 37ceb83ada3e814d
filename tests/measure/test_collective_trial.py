"""The experiment on collectives as a trial, on a simulated hypervisor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from homenode.analyse.alternative import alternatives_of
from homenode.analyse.collective_causes import Cause, Diagnosis, diagnose
from homenode.description.parse import parse_description
from homenode.description.render import render
from homenode.measure import runner as bench_runner
from homenode.measure.layouts import guest
from homenode.measure.layouts.runner import outcome_code, run_trial, steps_of
from homenode.measure.model import Depth, Group, SuiteOptions
from homenode.process import Completed
from homenode.results.model import Run
from homenode.results.store import read_run
from homenode.snapshot.memory import MemorySnapshot
from homenode.snapshot.protocol import Snapshot
from tests.measure.collective_guests import (
    CollectiveGuest,
    Settings,
    by_binding,
    by_mechanism,
)
from tests.simulated_trial import (
    SimulatedGuest,
    SimulatedReach,
    begun,
    daemon_in,
    trial_of,
    wanted,
)
from tests.virsh_stand_in import StandIn

_GPUS = """
[model.gpu]
class = "gpu"
vendor = 0x10de
bars = ["16MiB"]

[[root]]
bus = 0x10
ports = ["gpu", "gpu"]
"""
LAYOUTS = ("pin", "pin-numa")


class GpuGuest(SimulatedGuest):
    """A boot with two GPUs without a node; its all-reduces are those of CollectiveGuest."""

    collectives: CollectiveGuest

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        if argv[0] in ("cat", "true", "poweroff"):
            return super().run(argv, timeout_s, input, environment=environment)
        self._check()
        return self.collectives.run(argv, timeout_s, input, environment=environment)

    def installed(self, names: object) -> frozenset[str]:
        return self.collectives.installed(names)  # type: ignore[arg-type]

    def snapshot(self) -> Snapshot:
        self._check()
        made = render(parse_description(self._text + _GPUS, "guest"))
        return MemorySnapshot("guest", made.files, made.links, made.commands, made.folders)


class GpuReach(SimulatedReach):
    """Guests whose all-reduces have an effect by settings."""

    def __init__(self, daemon: StandIn, effect: Callable[[Settings], float]) -> None:
        super().__init__(daemon, dict.fromkeys(("default", *LAYOUTS), 1.0))
        self._effect = effect

    def machine(self, uuid: str) -> SimulatedGuest:
        plain = super().machine(uuid)
        found = GpuGuest(self._daemon, plain._run_id, 1.0, b"<cell" in self._daemon.definition())
        layout = "pin-numa" if b"<cell" in self._daemon.definition() else "pin"
        found.collectives = CollectiveGuest(
            layout=layout, effect=self._effect, shown=("0000:11:00.0", "0000:12:00.0")
        )
        return found


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = daemon_in(tmp_path / "daemon")
    monkeypatch.setenv("PATH", f"{found.bin}:/usr/bin:/bin")
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(guest, "DAEMON_S", 0.2)
    monkeypatch.setattr(bench_runner, "IDLE_S", 0.0)
    return found


def concluded(
    daemon: StandIn, tmp_path: Path, effect: Callable[[Settings], float]
) -> tuple[Diagnosis, list[Run]]:
    asked = wanted(tmp_path / "results", boots=1, layouts=LAYOUTS)
    suite = SuiteOptions((Group.COLLECTIVES,), Depth.NORMAL, 65536)
    asked = replace(asked, measuring=replace(asked.measuring, suite=suite))
    root = tmp_path / "state"
    head, journal = begun(root, asked)
    with journal.locked() as lock:
        run_trial(trial_of(head, journal, root, GpuReach(daemon, effect)), lock)
    state = journal.known().state
    assert outcome_code(state) == 0, list(state.outcomes.values())
    runs = [
        read_run(next(Path(head.results).glob(f"*/{state.outcomes[step.number].run}")))
        for step in steps_of(head)
    ]
    found = diagnose(alternatives_of([("trial", runs)]))
    assert found is not None
    return found, runs


def test_a_trial_names_the_binding_where_nothing_else_costs(
    daemon: StandIn, tmp_path: Path
) -> None:
    found, runs = concluded(daemon, tmp_path, by_binding)
    assert found.cause is Cause.SCRIPT_BINDING, found.because
    conditions = {one.name for run in runs for one in run.head.conditions}
    assert {"memory on the host", "nccl graph, bound to the first node"} <= conditions


def test_a_trial_without_the_gpus_places_cannot_tell(daemon: StandIn, tmp_path: Path) -> None:
    found, _ = concluded(daemon, tmp_path, by_mechanism)
    assert found.cause is Cause.CANNOT_TELL
    assert "pin-numa-pci" in found.because and "NCCL file" in found.because
