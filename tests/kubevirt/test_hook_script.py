"""The ConfigMap's script makes the same tree as the image's hook, on Python 3.9 and newer."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from homenode.cluster.kubevirt.placing import answer
from homenode.machine.discover.host import discover
from homenode.machine.pci import DeviceKind
from homenode.machine.snapshot.store import DirectorySnapshot
from tests.kubevirt.test_grace import grace_vm
from tests.kubevirt_documents import (
    IBM,
    IBM_GPUS,
    defined_again,
    document,
    ibm_document,
    shipped,
    vmi,
)
from tests.seeds import draws, seeds
from tests.tree_writer import write_tree

SCRIPT = Path("src/homenode/cluster/kubevirt/files/on_define_domain.py")
PINS = ((4, 5), (64, 65))
HOSTS = (IBM, "hgx-h100", "small-2n8c-2gpu")
MAX_LINES = 250
OTHER_PYTHONS = ("python3.9", "python3.12")
"""Pythons of CentOS Stream 9 and 10, which KubeVirt's sidecar images are built on."""

pytestmark = pytest.mark.xdist_group("hook script")
"""In one process: writing the trees of the hosts takes long."""


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in (*HOSTS, "gh200x4")}
    for name, directory in directories.items():
        write_tree(shipped(name), directory)
    return directories


def run(python: str, vmi_text: str, domain: str, root: Path) -> subprocess.CompletedProcess[str]:
    words = ("--vmi", vmi_text, "--domain", domain, "--root", str(root))
    return subprocess.run(
        [python, "-IS", SCRIPT, *words], capture_output=True, text=True, check=False
    )


def tree(text: str) -> str:
    """The document, without what libvirt numbers by itself: chassis and ports."""
    root = ElementTree.fromstring(text)
    for port in root.iterfind("devices/controller[@model='pcie-root-port']"):
        for target in port.findall("target"):
            port.remove(target)
    return ElementTree.canonicalize(ElementTree.tostring(root, encoding="unicode"))


def same_answer(python: str, vmi_text: str, domain: str, root: Path) -> bool:
    """Whether both hooks give the same tree, the very document, or an error."""
    given = answer(vmi_text, domain.encode(), lambda: DirectorySnapshot("a tree", str(root)))
    done = run(python, vmi_text, domain, root)
    if given.document is None:
        return done.returncode != 0 and not done.stdout
    if given.document == domain.encode():
        return done.stdout == domain
    return tree(given.document.decode()) == tree(done.stdout)


def calls() -> list[tuple[str, str]]:
    first = answer(vmi(), ibm_document().encode(), lambda: shipped(IBM)).document
    assert first is not None
    placed = first.decode()
    again = [defined_again(ibm_document(), placed, knows_targets=knows) for knows in (False, True)]
    return [
        *((vmi(), document(IBM_GPUS[i:], pins=PINS)) for i in seeds(8)),
        (vmi(), ibm_document()),
        (vmi(), document(IBM_GPUS, pins=PINS, nodes=None)),
        (vmi(), document(IBM_GPUS, pins=())),
        (vmi(), document([])),
        (vmi(), placed),
        *((vmi(), text) for text in again),
        (vmi(), "<a"),
        (vmi(annotations={"homenode/on-error": "passthrough"}), "<a"),
        ("[1]", document([])),
        (vmi(annotations={"homenode/on-error": "no"}), document([])),
        (vmi(interfaces=[{"pciAddress": "x"}]), document([])),
        (vmi(), document(IBM_GPUS, pins=PINS, machine="pc")),
        (vmi(), document(["ff:00.0"], pins=PINS)),
        (vmi(), "<!-- é -->" + ibm_document()),
    ]


@pytest.mark.parametrize("python", [sys.executable, *OTHER_PYTHONS])
def test_script_and_image_give_the_same_tree(python: str, roots: dict[str, Path]) -> None:
    path = shutil.which(python)
    if path is None or subprocess.run([path, "-V"], capture_output=True, check=False).returncode:
        pytest.skip(f"no {python} here")
    for vmi_text, domain in calls():
        assert same_answer(python, vmi_text, domain, roots[IBM]), domain[:200]


@pytest.mark.parametrize("name", HOSTS)
def test_devices_of_any_kind_are_numbered_alike(name: str, roots: dict[str, Path]) -> None:
    host = discover(shipped(name))
    devices = [d for d in host.pci_devices if d.kind is not DeviceKind.BRIDGE]
    firsts = [next(iter(node.pus)) for node in host.nodes if node.pus][:2]
    draw = Random(name)
    for _ in range(draws(20)):
        some = draw.sample(devices, min(len(devices), draw.randint(1, 14)))
        names = [str(device.bdf) for device in some]
        domain = document(names, pins=tuple((pu, pu + 1) for pu in firsts))
        assert same_answer(sys.executable, vmi(), domain, roots[name]), names


def test_what_only_the_image_has_is_refused_and_named(roots: dict[str, Path]) -> None:
    by_switch = vmi(annotations={"homenode/pci-granularity": "switch"})
    calls = ((by_switch, ibm_document(), IBM), (vmi(), grace_vm(), "gh200x4"))
    for vmi_text, domain, name in calls:
        done = run(sys.executable, vmi_text, domain, roots[name])
        assert done.returncode != 0 and not done.stdout and "image" in done.stderr


def test_the_script_is_short_and_needs_the_library_of_python_3_9_alone() -> None:
    text = SCRIPT.read_text()
    assert text.isascii() and text.count("\n") <= MAX_LINES
    assert len(json.dumps(text)) < 240 << 10, "kubectl apply keeps a copy in annotations"
    modules = set()
    for node in ast.walk(ast.parse(text, feature_version=(3, 9))):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    assert {str(name).partition(".")[0] for name in modules} <= sys.stdlib_module_names
