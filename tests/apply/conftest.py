"""What tests of apply share: a user, a domain of a stand-in for virsh, and the host it runs on."""

from pathlib import Path

import pytest

from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import be_host
from tests.virsh_stand_in import StandIn


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(tmp_path / "daemon", NAME, ORIGINAL)
    monkeypatch.setenv("PATH", f"{stand_in.bin}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    be_host(monkeypatch, "small-2n8c-2gpu")
    return stand_in
