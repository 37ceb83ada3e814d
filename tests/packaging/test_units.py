"""The units of systemd that we ship, write or print: they have few rights, and enough."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.change.host_setup.files import (
    OF_ALL_UNITS,
    HostNeeds,
    Isolation,
    NodePages,
    setup_files,
)
from homenode.change.retrain.install import systemd_unit
from homenode.cpuset import CpuSet
from tests.systemd_namespace import systemd

ROOT = Path(__file__).parents[2]
WATCH = (ROOT / "packaging/systemd/homenode-watch.service").read_text()
MOST = 3.0
"""Of 10; a unit with all rights of root has 9.6."""


def units() -> dict[str, str]:
    needs = HostNeeds(
        domains=("vm",),
        pages=(NodePages(node=0, page_bytes=2 << 20, pages=4),),
        vm_pus=CpuSet((1,)),
        host_pus=CpuSet((0,)),
    )
    (pages,) = setup_files(needs, Isolation.NONE)
    return {
        "homenode-watch.service": WATCH,
        Path(pages.path).name: pages.text,
        "homenode-retrain.service": systemd_unit([Bdf.parse("41:00.0")], "/usr/bin/homenode"),
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


def test_the_unit_that_is_shipped_has_the_rights_of_the_others() -> None:
    lines = WATCH.splitlines()
    assert [one for one in OF_ALL_UNITS if one not in lines] == []


@pytest.mark.root
def test_the_unit_of_huge_pages_reserves_them() -> None:
    """Run by a systemd of its own, as PID 1."""
    name = "homenode-huge-pages-node0.service"
    count = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages")
    if not count.exists():
        pytest.skip("this machine has no huge pages of 2 MiB")
    before = int(count.read_text())
    text = (
        units()[name].replace("-ge 4", f"-ge {before + 2}").replace("echo 4", f"echo {before + 2}")
    )
    try:
        with systemd() as system:
            result, status, said = system.start(name, text)
        assert (result, status, said) == ("success", 0, "")
        assert int(count.read_text()) == before + 2
    finally:
        count.write_text(str(before))


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
