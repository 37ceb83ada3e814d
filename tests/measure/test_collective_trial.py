"""The experiment on collectives as a trial, on a simulated hypervisor."""

from pathlib import Path

import pytest

from homenode.decide.collective_mechanisms import Cause
from homenode.measure import runner as bench_runner
from homenode.measure.layouts import guest
from homenode.nccl.checks import check_topology
from tests.measure.collective_guests import by_binding, by_mechanism
from tests.measure.gpu_trial import NAME, ORIGINAL, concluded
from tests.virsh_stand_in import StandIn


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn(tmp_path / "daemon", NAME, ORIGINAL)
    monkeypatch.setenv("PATH", f"{found.bin}:/usr/bin:/bin")
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(guest, "DAEMON_S", 0.2)
    monkeypatch.setattr(bench_runner, "IDLE_S", 0.0)
    return found


def test_a_trial_without_the_host_asks_for_the_host_bound_to_its_first_node(
    daemon: StandIn, tmp_path: Path
) -> None:
    layouts = ("pin", "pin-numa", "pin-numa-pci")
    found, runs, _ = concluded(daemon, tmp_path, by_binding, layouts)
    assert found.cause is Cause.CANNOT_TELL and str(Cause.SCRIPT_BINDING) in found.because
    assert found.next_cell is not None and found.next_cell.cell == "bare, bound to the first node"
    conditions = {one.name for run in runs for one in run.head.conditions}
    assert {
        "memory on the host",
        "nccl graph, bound to the first node",
        "nccl memory allocated on the host, bound to the first node",
    } <= conditions


def test_a_trial_boots_guests_with_places_and_gives_each_layout_its_own_nccl_file(
    daemon: StandIn, tmp_path: Path
) -> None:
    """The GPUs are elsewhere in a guest with expander buses, and so they are in its file."""
    layouts = ("pin", "pin-numa", "pin-numa-pci")
    found, runs, files = concluded(daemon, tmp_path, by_mechanism, layouts)
    assert found.cause is Cause.PLACEMENT, found.because
    assert {run.head.switches.name for run in runs} == set(layouts)
    assert len(files) == 3 * 3  # layouts, rounds
    for file in files:
        assert not any(one.is_bad for one in check_topology(file.encode(), "topo.xml"))
        addresses = {one for one in ("01:00.0", "02:00.0", "81:00.0", "c1:00.0") if one in file}
        assert addresses in ({"01:00.0", "02:00.0"}, {"81:00.0", "c1:00.0"})
    assert sum("81:00.0" in file for file in files) == 3


def test_a_trial_without_the_gpus_places_says_which_layout_is_missing(
    daemon: StandIn, tmp_path: Path
) -> None:
    found, _, _ = concluded(daemon, tmp_path, by_mechanism, ("pin", "pin-numa"))
    assert found.cause is Cause.CANNOT_TELL
    assert found.next_cell is not None and "pin-numa-pci" in found.next_cell.trial
