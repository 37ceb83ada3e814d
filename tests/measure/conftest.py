"""A stand-in for libvirt on which trials are over at once."""

from pathlib import Path

import pytest

from homenode.measure import runner as bench_runner
from homenode.measure.trial import guest
from tests.simulated_trial import daemon_in
from tests.virsh_stand_in import StandIn


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is looked at twice before a run, and at once."""
    monkeypatch.setattr(bench_runner, "IDLE_S", 0.0)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_waiting: None) -> StandIn:
    daemon = daemon_in(tmp_path / "daemon")
    monkeypatch.setenv("PATH", f"{daemon.bin}:/usr/bin:/bin")
    monkeypatch.setattr(guest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(guest, "DAEMON_S", 0.2)
    return daemon
