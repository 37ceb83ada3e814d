"""Hook, libvirt, KubeVirt's own types, hook, libvirt: the last definition is as planned."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from homenode.domain.read import guest_of, open_domain
from homenode.plan.guest import Guest
from tests.domain.test_libvirt import libvirt, virsh
from tests.kubevirt.test_live import NAME, placed, valid
from tests.kubevirt_documents import IBM_GPUS, document, ibm_document

__all__ = ["libvirt"]
ORACLE = Path(__file__).parent / "oracle"
PINS = ((4, 5), (64, 65))


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KubeVirt's types of 1.8.4 as a program."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no go here: KubeVirt's types cannot be built")
    program = tmp_path_factory.mktemp("second") / "second"
    built = subprocess.run(
        [go, "build", "-o", str(program), "./second"],
        cwd=ORACLE, env={**os.environ, "GOSUMDB": "off"},
        capture_output=True, text=True, check=False, timeout=1500,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return program


def defined(xml: str, folder: Path) -> str:
    path = folder / "vm.xml"
    path.write_text(xml)
    done = virsh("define", str(path))
    assert done.returncode == 0, done.stderr
    printed = virsh("dumpxml", "--inactive", NAME).stdout
    assert virsh("undefine", "--nvram", NAME).returncode == 0
    return printed


def read(xml: str) -> Guest:
    return guest_of(open_domain(xml.encode(), "vm.xml"))


def distances(xml: str) -> list[str | None]:
    root = ElementTree.fromstring(xml)
    return [s.get("value") for s in root.iterfind("cpu/numa/cell/distances/sibling")]


@pytest.mark.lab
@pytest.mark.libvirt
@pytest.mark.parametrize("vm", ["ibm", "small", "one node"])
def test_the_last_definition_has_cells_distances_and_addresses_of_the_first(
    libvirt: None, second: Path, tmp_path: Path, vm: str
) -> None:
    given = {"kind": "qemu", "name": NAME}
    devices = IBM_GPUS[:4] if vm == "one node" else IBM_GPUS
    before = (
        ibm_document(**given) if vm == "ibm" else document(devices, pins=PINS, **given)  # type: ignore[arg-type]
    )
    before = valid(before).replace('unit="M">', 'unit="M" nodeset="0,1">')
    first = defined(placed(before).decode(), tmp_path)
    call = json.dumps({"Before": before, "Printed": first})
    again = subprocess.run([second], input=call, capture_output=True, text=True, check=True)
    assert "<distances>" not in again.stdout, "KubeVirt 1.8 drops them"
    last = defined(placed(again.stdout).decode(), tmp_path)
    assert distances(last) == distances(first) != []
    assert read(last).hostdevs == read(first).hostdevs
    assert read(last).controllers == read(first).controllers
    assert sorted(c.node for c in read(last).controllers if c.node is not None) == [0, 1]
