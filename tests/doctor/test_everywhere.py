"""The doctor on every machine and document at hand, and for each finding one that nearly has it."""

import ast
import json
import re
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.check.doctor.baseline import find_drift, record_of
from homenode.check.doctor.diagnosis import diagnose
from homenode.errors import HomenodeError, InputError
from homenode.findings import Severity, catalogue
from homenode.machine.description.parse import list_shipped_hosts
from homenode.plan.pipeline import plan_file
from homenode.units import GIB
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from homenode.vm.targets.registry import TARGETS
from tests import source_trees
from tests.command_line import homenode
from tests.doctor_cases import HEALTH_CASES, HOST_CASES, QUIET_CASES
from tests.doctor_domains import NAME, domain, gpus, host
from tests.doctor_guest_cases import GUEST_CASES
from tests.seeds import THOROUGH, part
from tests.shared_data import needs_shared, shared

DOMAINS = Path(__file__).parents[1] / "domains"


def documents() -> list[Document]:
    found = []
    for path in sorted(DOMAINS.rglob("*.xml")):
        try:
            found.append(open_domain(path.read_bytes(), path.name))
        except InputError:  # some are odd on purpose
            continue
    return found


DOCUMENTS = documents()


@pytest.mark.parametrize("name", list_shipped_hosts())
def test_any_document_is_diagnosed_on_any_host(name: str) -> None:
    first = list_shipped_hosts().index(name) % 4  # each host gets a part of them
    chosen = DOCUMENTS if THOROUGH else DOCUMENTS[first::4]
    assert chosen
    for document in chosen:
        for finding in diagnose(host(name), document).findings:
            assert finding.subject and finding.expected and finding.observed and finding.source
            if finding.severity in (Severity.CRITICAL, Severity.WARNING):
                assert finding.cost and finding.fix, finding


@pytest.mark.parametrize("target", TARGETS)
def test_findings_on_a_targets_vm_name_nothing_of_libvirt(target: str) -> None:
    for document, name in product(DOCUMENTS, ("hgx-h100", "small-2n8c-2gpu", "rtx4080-i9-14900k")):
        vm = build_vm(document)
        hostdevs = tuple(replace(device, managed=True) for device in vm.hostdevs)
        vm = replace(vm, has_acpi=True, hostdevs=hostdevs)  # as the files of targets have them
        for finding in diagnose(host(name), None, None, vm, target).findings:
            texts = (finding.subject, finding.expected, finding.observed, finding.headline)
            text = " ".join((*texts, finding.cost or "", finding.fix or ""))
            assert not re.search("<[a-z]|libvirt|virsh|managed=", text), (document.source, finding)
            assert target != "xen" or not re.search(r"--layout \S*-(pci|smt)|VFIO", text), finding


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ["pin", "pin-bound", "pin-numa", "pin-numa-pci-smt", "auto"])
def test_a_file_of_a_target_gives_no_alarm_on_its_own_plan(
    target: str, layout: str, tmp_path: Path
) -> None:
    """A VM of two nodes; the pins of each vCPU may be in a script next to the file."""
    size = "--vcpus 80 --memory 1100GiB --gpus 8 --with-nvswitches --host hgx-h100".split()
    words = ("--target", target, "--layout", layout, "-o", tmp_path / "vm")
    assert homenode("plan", *size, *words).exit_code == 0
    done = homenode("doctor", tmp_path / "vm", "--host", "hgx-h100", "--json")
    bad = {f["id"] for f in json.loads(done.stdout)["findings"] if f["severity"] != "info"}
    assert bad == ({"device-without-cell"} if layout == "pin-numa" and target != "xen" else set())
    if target == "proxmox" and layout == "pin-numa":
        (tmp_path / "vm.hook.sh").unlink()
        done = homenode("doctor", tmp_path / "vm", "--host", "hgx-h100")
        assert "vm.hook.sh is missing" in done.stdout and "pin-off-node" not in done.stdout


def test_a_script_for_qemu_has_the_nodes_of_a_grace_gpu_without_libvirt(tmp_path: Path) -> None:
    words = "--target qemu --vcpus 8 --memory 16GiB --gpus 1 --host gh200x4 --qemu 9.1".split()
    planned = homenode("plan", *words, "-o", tmp_path / "vm.sh")
    assert "initiators-missing" not in planned.output and "libvirt" not in planned.output
    done = homenode("doctor", tmp_path / "vm.sh", "--host", "gh200x4")
    assert done.exit_code == 0, done.stdout


@pytest.mark.parametrize("name", list_shipped_hosts())
def test_no_host_drifts_from_its_own_record(name: str) -> None:
    assert list(find_drift(record_of(host(name)), host(name), "host.json")) == []


WARNED = {
    "mixed-kinds": "core-kinds-mixed",
    "siblings-not-exposed": "core-shared",
    "host-core-taken": "host-core-taken",
    "nvswitches-omitted": "nvswitches-omitted",
    "initiators-missing": "initiators-missing",
}
"""Findings of a plan, and of the doctor, on the same."""


@pytest.mark.parametrize("name", part(list_shipped_hosts(), 0, every=6))
@pytest.mark.parametrize("layout", ["pin-numa-pci", "pin-numa-pci-smt"])
def test_plans_of_our_own_give_no_alarm_on_any_host_in_any_size(name: str, layout: str) -> None:
    there = host(name)
    sick = {finding.id for finding in diagnose(there).findings}
    memory = sum(node.memory_bytes or 0 for node in there.nodes if node.pus) // GIB
    sizes = list(product(sorted({0, 1, len(gpus(name, 8))}), (0.1, 0.5, 1.0)))
    # Each layout gets every fourth size, which are others on the next host.
    first = (list_shipped_hosts().index(name) // 3 + 2 * layout.endswith("smt")) % 4
    for count, share in sizes if THOROUGH else sizes[first::4]:
        xml = domain(
            max(1, int(len(there.cores) * share)),
            gpus(name, count),
            gib=max(1, int(memory * share * 0.8)),
        )
        try:
            tuned = plan_file(xml, NAME, PlanOptions(layout=layout), there)
        except HomenodeError:  # no such plan there
            continue
        # What the plan itself warns of is no surprise.
        said = {f.id for f in tuned.plan.findings} & WARNED.keys()
        known = sick | {WARNED[one] for one in said}
        found = diagnose(there, open_domain(tuned.document, NAME)).findings
        assert {f.id for f in found if f.severity is not Severity.INFO} <= known, (count, share)


SICK = {
    "AMD-19h-Zen4-2xEpyc-9654.xml": ["node-spans-packages"],
    # hwloc says nothing of what the ends of links can.
    "eas-tioga.xml": ["pcie-link-unknown"],
    "nvidiaDGX2.xml": ["pcie-link-unknown"],
    "64amd64-4s2n4ca2co.tar.bz2": ["node-memory-unequal"],
}
"""Findings of the published captures: what is wrong with them, or not known."""


@needs_shared
@pytest.mark.parametrize("directory", ["hwloc", "sysfs", "lspci"])
def test_published_captures_of_sound_machines_give_no_alarm(directory: str) -> None:
    for path in part(sorted(shared("machines").joinpath(directory).iterdir()), 0):
        try:
            captured = load_host(str(path))
        except InputError:  # an archive of several machines
            continue
        bad = [f for f in diagnose(captured).findings if f.severity is not Severity.INFO]
        assert [f.id for f in bad] == SICK.get(path.name, []), path.name


ROOT = Path(__file__).resolve().parents[2]
CASES = {**HOST_CASES, **HEALTH_CASES, **GUEST_CASES, **QUIET_CASES}
DOMAINS_FILES = ("pins", "cores", "memory", "devices")
"""Files of check/domain/, whose findings the doctor shows."""


def _ids() -> set[str]:
    source = ROOT / "src" / "homenode"
    files = [*(source / "check/doctor").rglob("*.py"), *(source / "change/retrain").rglob("*.py")]
    files += [source / "check/domain" / f"{name}.py" for name in DOMAINS_FILES]
    texts = (
        node.value
        for file in files
        for node in source_trees.nodes(file)
        if isinstance(node, ast.Constant)
    )
    return {text for text in texts if isinstance(text, str)} & catalogue().keys()


def test_every_finding_has_its_case() -> None:
    without, unused = _ids() - set(CASES), set(CASES) - _ids()
    assert not without | unused, f"add a Case to tests/doctor_cases.py: {without}; drop: {unused}"


@pytest.mark.parametrize("id", CASES)
def test_a_machine_that_has_it_is_found(id: str) -> None:
    assert id in {finding.id for finding in CASES[id].found()}


@pytest.mark.parametrize("id", CASES)
def test_a_machine_that_nearly_has_it_is_not(id: str) -> None:
    assert id not in {finding.id for finding in CASES[id].silent()}
