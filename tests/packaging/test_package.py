"""The package: what a wheel holds, and that shells complete."""

import subprocess
import sys
import zipfile
from pathlib import Path

from homenode.machine.description.parse import is_made_up, list_shipped_hosts


def test_a_wheel_holds_the_types_the_hosts_and_the_licence(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "homenode/py.typed" in names
    hosts = {Path(name).stem for name in names if name.startswith("homenode/machine/hosts/")}
    assert hosts == {name for name in list_shipped_hosts() if not is_made_up(name)}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "shared/", "out/"))]
    assert wheel.stat().st_size <= 1_510_000


def test_setup_installed_the_probe_next_to_homenode() -> None:
    probe = Path(sys.executable).with_name("homenode-probe")
    assert probe.exists(), "make setup builds it with the machine's C++ compiler"
    done = subprocess.run([probe, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("homenode-probe ")
