"""The units of systemd that we write or print: they have few rights, and enough."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.change.retrain.plan import render_systemd_unit
from tests.systemd_namespace import systemd

MOST = 3.0
"""Highest exposure, of 10; a unit with all rights of root has 9.6."""


def units() -> dict[str, str]:
    return {
        "homenode-retrain.service": render_systemd_unit([Bdf.parse("41:00.0")], "/usr/bin/homenode")
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("name", units())
def test_a_unit_has_few_rights(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(units()[name])
    argv = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert score is not None and float(score[1]) <= MOST, said
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True
    )
    assert "Unknown" not in verified.stderr and "Failed to parse" not in verified.stderr


@pytest.mark.root
def test_the_unit_of_links_sees_and_reaches_what_a_retrain_needs() -> None:
    text = units()["homenode-retrain.service"].replace("ExecStart=-", "ExecStart=")
    script = (
        "set -e; for one in /proc/[0-9]*; do ls -l $one/fd >/dev/null; done; "
        "mkdir -p /run/homenode/retrain; test -w /var/cache/homenode; ! touch /etc/homenode-test; "
        "for one in /sys/bus/pci/devices/*/config; do : >>$one; cat $one; done 2>&1 | wc -c"
    )
    settings = f"ExecStart=\nExecStart=/bin/bash -c '{script}'\n"
    functions = len(list(Path("/sys/bus/pci/devices").iterdir()))
    with systemd("/var/cache") as system:
        system.run("sh", "-c", "setpriv --reuid=1 --clear-groups sleep 60 >/dev/null 2>&1 &")
        result, status, said = system.start("homenode-retrain.service", text, settings)
        assert (result, status) == ("success", 0), said
        assert "denied" not in said
        assert int(said.split()[-1]) >= functions * 256
        assert (system.root / "run/homenode/retrain").is_dir()
