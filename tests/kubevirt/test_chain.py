"""KubeVirt's types, hook manager, gRPC and shim, the hook file, libvirt, and all of it again."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from homenode.cli.kubevirt import _own_source
from homenode.domain.read import guest_of, open_domain
from homenode.kubevirt.hook_file import hook_file
from homenode.plan.guest import Guest
from tests.domain.test_libvirt import libvirt, virsh
from tests.kubevirt.test_live import NAME, valid
from tests.kubevirt_documents import IBM, IBM_GPUS, document, ibm_document, shipped, vmi
from tests.tree_writer import write_tree

__all__ = ["libvirt"]
ORACLE = Path(__file__).parent / "oracle"
PINS = ((4, 5), (64, 65))


_SHIM = """
mount --bind "$1" /var/run/kubevirt-hooks
export PATH="$2:$PATH"
exec "$3" --version v1alpha3
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KubeVirt 1.8.4's types and hook manager as `second`, its sidecar's shim as `shim`."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no go here: KubeVirt's code cannot be built")
    folder = tmp_path_factory.mktemp("programs")
    for name, package in (("second", "./second"), ("shim", "kubevirt.io/kubevirt/cmd/sidecars")):
        built = subprocess.run(
            [go, "build", "-o", str(folder / name), package],
            cwd=ORACLE,
            env={**os.environ, "GOSUMDB": "off"},
            capture_output=True,
            text=True,
            check=False,
            timeout=1500,
        )
        assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def chain(programs: Path, tmp_path: Path) -> Iterator[Path]:
    """A sidecar with the hook file: its shim, with the socket where virt-launcher looks for it."""
    sockets = Path("/var/run/kubevirt-hooks/hook-sidecar-0")
    sockets.mkdir(parents=True, exist_ok=True)
    tree, hook = tmp_path / "tree", tmp_path / "bin"
    write_tree(shipped(IBM), tree)
    hook.mkdir()
    (hook / "hook").write_text(hook_file(_own_source, "1"))
    caller = hook / "onDefineDomain"
    caller.write_text(f'#!/bin/sh\nexec {sys.executable} {hook}/hook --root {tree} "$@"\n')
    caller.chmod(0o755)
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _SHIM, "sh"]
    shim = subprocess.Popen([*argv, str(sockets), str(hook), str(programs / "shim")])
    try:
        yield programs / "second"
    finally:
        shim.terminate()
        shim.wait(30)
        for socket in sockets.glob("*.sock"):
            socket.unlink()


def defined_by_kubevirt(chain: Path, before: str, printed: str = "") -> tuple[str, str]:
    """The document that the hook was given, and its answer, as they came over gRPC."""
    call = json.dumps({"Before": before, "Printed": printed, "VMI": json.loads(vmi())})
    done = subprocess.run([chain], input=call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["Given"], answer["Placed"]


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
@pytest.mark.root
@pytest.mark.libvirt
@pytest.mark.parametrize("vm", ["ibm", "small", "one node"])
def test_the_last_definition_has_cells_distances_and_addresses_of_the_first(
    libvirt: None, chain: Path, tmp_path: Path, vm: str
) -> None:
    given = {"kind": "qemu", "name": NAME}
    devices = IBM_GPUS[:4] if vm == "one node" else IBM_GPUS
    before = (
        ibm_document(**given) if vm == "ibm" else document(devices, pins=PINS, **given)  # type: ignore[arg-type]
    )
    before = valid(before).replace('unit="M">', 'unit="M" nodeset="0,1">')
    _, placed = defined_by_kubevirt(chain, before)
    first = defined(placed, tmp_path)
    again, placed = defined_by_kubevirt(chain, before, first)
    assert "<distances>" not in again, "KubeVirt 1.8 drops them"
    last = defined(placed, tmp_path)
    assert distances(last) == distances(first) != []
    assert read(last).hostdevs == read(first).hostdevs
    assert read(last).controllers == read(first).controllers
    assert sorted(c.node for c in read(last).controllers if c.node is not None) == [0, 1]
