"""What the check says of VMIs and nodes that do not go together, and of those that do."""

import json
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from homenode.cluster.arguments import NATIVE_GATE, ManifestOptions
from homenode.cluster.kubevirt.check import RULES, check
from homenode.cluster.kubevirt.manifests import GATES as WRITTEN
from homenode.cluster.kubevirt.manifests import build_virtual_machine
from homenode.cluster.kubevirt.object import (
    Cluster,
    format_yaml,
    parse_quantity,
    read_cluster,
    read_manifest,
)
from homenode.cluster.kubevirt.vmi import HOOK_ANNOTATION, build_guest, build_vmi, read_vmi
from homenode.errors import InputError
from homenode.findings import Severity
from homenode.machine.topology import Host, PagePool
from homenode.vm.sources import load_host
from tests.cpu_time import cpu_time_below
from tests.kubevirt_documents import IBM
from tests.seeds import part

GATES = frozenset(WRITTEN)
HOOK = {HOOK_ANNOTATION: '[{"image": "homenode"}]'}
SCRIPT = '[{"configMap": {"hookPath": "/usr/bin/onDefineDomain"}}]'
CPU = {
    "cores": 99,
    "threads": 2,
    "model": "host-passthrough",
    "dedicatedCpuPlacement": True,
    "isolateEmulatorThread": True,
    "numa": {"guestMappingPassthrough": {}},
}
PERMITTED = {"x": "", "x.com/y": ""}
FLAT = {"numa": None}
MEMORY = {"guest": "512Gi", "hugepages": {"pageSize": "2Mi"}}


def vmi(
    cpu: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
    gpus: int = 8,
    annotations: Mapping[str, str] = HOOK,
    kind: str = "VirtualMachineInstance",
    devices: Mapping[str, Any] | None = None,
    machine: str | None = None,
    architecture: str | None = None,
) -> str:
    """A VMI, good but for what is given; in a VM where that is the kind."""
    by_name = [{"name": f"g{i}", "deviceName": "x"} for i in range(gpus)]
    domain = {
        "cpu": {**CPU, **(cpu or {})},
        "memory": {**MEMORY, **(memory or {})},
        "devices": {"gpus": by_name, **(devices or {})},
        "machine": {"type": machine},
    }
    spec = {"architecture": architecture, "domain": domain}
    inner = {"metadata": {"annotations": dict(annotations)}, "spec": spec}
    if kind == "VirtualMachine":
        return json.dumps({"kind": kind, "metadata": {"name": "v"}, "spec": {"template": inner}})
    return json.dumps({"kind": kind, **inner})


def ids(text: str, host: Host | None = None, gates: frozenset[str] | None = None) -> set[str]:
    cluster = None if gates is None else Cluster(gates, permitted=PERMITTED)
    return {finding.id for finding in check(read_vmi(text, "vmi"), host, cluster).findings}


def with_pages(count: int, page_bytes: int = 2 << 20) -> Host:
    """IBM's host with so many huge pages on each node."""
    host = load_host(IBM)
    pools = (PagePool(page_bytes, count, count),)
    return replace(host, nodes=tuple(replace(node, page_pools=pools) for node in host.nodes))


@pytest.mark.parametrize("kind", ["VirtualMachineInstance", "VirtualMachine"])
def test_what_fits_has_no_finding_and_says_what_was_checked(kind: str) -> None:
    cluster = Cluster(GATES, permitted=PERMITTED)
    answer = check(read_vmi(vmi(kind=kind), "vmi"), with_pages(131_072), cluster)
    assert (answer.findings, len(answer.unknown), len(answer.checked)) == ((), 1, 3)
    assert "reserved CPUs" in answer.unknown[0]


@pytest.mark.parametrize(("pci_id", "is_there"), [("10DE:20B0", True), ("10DE:2330", False)])
def test_a_node_without_the_permitted_gpu_is_named(pci_id: str, is_there: bool) -> None:
    cluster = Cluster(GATES, permitted={"x": pci_id})
    found = check(read_vmi(vmi(), "vmi"), with_pages(131_072), cluster).findings
    assert [one.observed for one in found] == ([] if is_there else ["none"])
    assert all(pci_id in one.expected for one in found)


@pytest.mark.parametrize(("name", "pci_id"), [("y", "10DE:20B0"), ("x", "10DE:20B0"), ("x", "")])
def test_gpus_under_host_devices_count_by_the_clusters_id(name: str, pci_id: str) -> None:
    by_name = [{"name": f"g{i}", "deviceName": name} for i in range(8)]
    text = vmi({"cores": 48, **FLAT}, devices={"gpus": [], "hostDevices": by_name})
    cluster = Cluster(GATES | {"HostDevices"}, permitted={"x": pci_id})
    answer = check(read_vmi(text, "v"), with_pages(131_072), cluster)
    is_known = (name, pci_id) == ("x", "10DE:20B0")
    assert any(finding.id == "gpus-over-nodes" for finding in answer.findings) is is_known
    assert any(f"whether {name} of hostDevices" in line for line in answer.unknown) is not is_known


def test_a_flat_guest_with_huge_pages_needs_none() -> None:
    for memory, is_needed in ((MEMORY, False), ({"hugepages": None}, True)):
        answer = check(read_vmi(vmi(FLAT, memory), "v"), None, None)
        (flat,) = (finding for finding in answer.findings if finding.id == "guest-flat")
        assert ("huge pages" in str(flat.fix)) is is_needed


@pytest.mark.parametrize(
    ("size", "is_wrong"), [("1G", True), ("4Ki", True), ("16Gi", True), ("1Gi", False)]
)
def test_a_page_size_that_the_cpu_lacks_is_named(size: str, is_wrong: bool) -> None:
    memory = {"guest": "10Gi", "hugepages": {"pageSize": size}}
    assert ids(vmi(memory=memory)) == ({"huge-page-size"} if is_wrong else set())


def test_a_sidecar_of_others_is_unknown() -> None:
    text = vmi(annotations={HOOK_ANNOTATION: '[{"image": "registry.k8s.io/other:1"}]'})
    assert any("sidecar" in one for one in check(read_vmi(text, "vmi"), None, None).unknown)
    assert not any("sidecar" in one for one in check(read_vmi(vmi(), "vmi"), None, None).unknown)


CLAIM = {"name": "g", "claimName": "c", "requestName": "r"}
PINNING = ("dedicatedCpuPlacement", "isolateEmulatorThread")
ROWS: dict[str, tuple[str, Host | None, frozenset[str] | None]] = {
    "cpus-not-dedicated": (vmi(dict.fromkeys(PINNING, False) | FLAT), None, None),
    "emulator-on-vcpu": (vmi({"isolateEmulatorThread": False}), None, None),
    "emulator-without-dedicated-cpus": (vmi({"dedicatedCpuPlacement": None, **FLAT}), None, None),
    "mapping-without-dedicated-cpus": (vmi({"dedicatedCpuPlacement": False}), None, None),
    "mapping-without-huge-pages": (vmi(memory={"hugepages": None}), None, None),
    "expander-on-other-machine": (vmi(machine="pc-i440fx-9.0"), None, None),
    "guest-flat": (vmi(FLAT), None, None),
    "huge-page-size": (vmi(memory={"hugepages": {"pageSize": "1Gi"}}), with_pages(131_072), None),
    "gpus-short": (vmi(gpus=9), with_pages(131_072), None),
    "huge-pages-short": (vmi(), with_pages(131_071), None),
    "huge-pages-not-whole": (vmi(memory={"guest": "1000501Mi"}), None, None),
    "core-shared": (vmi({"cores": 199, "threads": 1}), with_pages(131_072), None),
    "other-architecture": (vmi(architecture="arm64"), with_pages(131_072), None),
    "threads-not-siblings": (vmi({"cores": 66, "threads": 3}), with_pages(131_072), None),
    "device-not-permitted": (vmi(devices={"gpus": [{"deviceName": "y"}]}), None, GATES),
    "node-too-small": (vmi({"cores": 300}), with_pages(131_072), None),
    "gpus-over-nodes": (vmi(FLAT), with_pages(131_072), None),
    "devices-without-node": (vmi(annotations={}), None, None),
    "gate-off": (vmi(), None, frozenset({"CPUManager"})),
    "hook-annotation-wrong": (vmi(annotations={HOOK_ANNOTATION: "nonsense"}), None, None),
}


@pytest.mark.parametrize("id", ROWS)
def test_each_rule_finds_what_it_is_for(id: str) -> None:
    found = ids(*ROWS[id])
    extra = {"cpus-not-dedicated"} if "without-dedicated" in id else set()
    extra |= {"emulator-without-dedicated-cpus"} if id.startswith("mapping-without-ded") else set()
    assert found == {id} | extra


def test_each_rule_has_a_row() -> None:
    rules = {rule.__name__.replace("_", "-") for rule in RULES} - {"wrong-settings"}
    assert rules <= ROWS.keys() and len(ROWS) == len(rules) + 7


@pytest.mark.parametrize(
    ("host", "cores", "memory", "gpus", "places"),
    [
        ("hgx-a100-ibm", 48, "128Gi", 8, "4 GPUs on each of nodes 0-1, all CPUs on node 0"),
        ("hgx-a100-ibm", 48, "128Gi", 4, None),
        ("hgx-a100-ibm", 24, "128Gi", 4, None),
        ("hgx-h100", 44, "512Gi", 8, "4 GPUs on each of nodes 0-1, all CPUs on node 0"),
        ("hgx-h100", 44, "1800Gi", 8, "all CPUs on node 0, memory of 2 nodes"),
        ("hgx-h100", 24, "1200Gi", 4, "4 GPUs on node 0, all CPUs on node 0, memory of 2 nodes"),
        ("hgx-h100", 56, "1024Gi", 8, "112 CPUs on node 0, 1 CPU on node 1"),
        ("hgx-h100", 75, "1800Gi", 8, None),
        ("hgx-h100", 57, "256Gi", 4, "4 GPUs on node 0, 112 CPUs on node 0, 3 CPUs on node 1"),
        ("hgx-h100", 55, "256Gi", 4, None),
    ],
)
def test_gpus_of_both_nodes_need_cpus_of_both_whatever_the_memory_needs(
    host: str, cores: int, memory: str, gpus: int, places: str | None
) -> None:
    text = vmi({"cores": cores}, {"guest": memory, "hugepages": {"pageSize": "1Gi"}}, gpus)
    (found, *others) = check(read_vmi(text, "v"), load_host(host), None).findings or (None,)
    assert not others and (found is not None) == (places is not None)
    if found is not None and places is not None:
        assert places in found.observed and found.is_bad
        assert f"at least {'172' if 'a100' in host else '152'} CPUs" in str(found.fix)
        assert ("at most 110 CPUs" in str(found.fix)) == (cores == 57)


HOSTS = ("hgx-a100-ibm", "h200-xeon8558", "rtx4090-epyc7702")


@pytest.mark.parametrize(
    ("cores", "gpus", "host"), part(list(product((2, 70), (1, 2, 3, 4), HOSTS)), 0)
)
def test_a_fix_gives_cpus_on_all_nodes_of_the_gpus(host: str, gpus: int, cores: int) -> None:
    node, pages = load_host(host), {"hugepages": {"pageSize": "2Mi"}}
    for cpu in (FLAT, {}):
        text = vmi({**cpu, "cores": cores, "threads": 1}, {"guest": "32Gi", **pages}, gpus)
        for finding in check(read_vmi(text, "v"), node, None).findings:
            if finding.id != "gpus-over-nodes":
                continue
            more = re.search(r"at least (\d+) CPUs", str(finding.fix))
            mapped = vmi({"cores": int(more[1]) if more else cores, "threads": 1}, None, gpus)
            assert "gpus-over-nodes" not in ids(mapped, node)
            less = re.search(r"request (\d+) GPUs?, (\d+) CPUs? and (\d+)", str(finding.fix))
            if less is not None:
                fewer, cpus = int(less[1]), int(less[2])
                assert min(fewer, cpus) > 0
                size = {**cpu, "cores": cpus, "threads": 1}
                small = vmi(size, {"guest": f"{less[3]}Gi"}, fewer)
                assert "gpus-over-nodes" not in ids(small, node)


def test_a_vm_without_dedicated_cpus_is_told_at_once_what_they_need() -> None:
    node, cpu = load_host("hgx-h100"), {"cores": 64, "dedicatedCpuPlacement": False, **FLAT}
    findings = check(read_vmi(vmi(cpu), "v"), node, None).findings
    (found,) = (one for one in findings if one.id == "gpus-over-nodes")
    assert found.severity is Severity.WARNING and "at least 152 CPUs" in str(found.fix)


@pytest.mark.parametrize(
    ("memory", "page", "right"), [("512500Mi", "1Gi", "501Gi"), ("1001Ki", "2Mi", "2Mi")]
)
def test_the_fix_of_memory_names_the_next_size(memory: str, page: str, right: str) -> None:
    text = vmi(memory={"guest": memory, "hugepages": {"pageSize": page}})
    findings = check(read_vmi(text, "v"), None, None).findings
    (found,) = (one for one in findings if one.id == "huge-pages-not-whole")
    assert str(found.fix).startswith(f"set memory.guest: {right};")


def test_a_vm_whose_cpus_are_in_its_instance_type_is_not_checked() -> None:
    document = json.loads(vmi(kind="VirtualMachine"))
    document["spec"]["instancetype"] = {"name": "u1.large"}
    with pytest.raises(InputError, match="found an instance type") as raised:
        build_vmi(document, "v", needs_domain=True)
    assert raised.value.hint == "virtctl expand --vm v"


def test_what_a_source_lacks_is_not_checked() -> None:
    bare = replace(load_host(IBM), pci_devices=())
    answer = check(read_vmi(vmi(), "vmi"), bare, None)
    assert len(answer.unknown) == 4
    assert "homenode capture" in answer.unknown[0]
    assert not any("huge pages" in line or "GPUs" in line for line in answer.checked)
    assert not any(finding.id.startswith("gpus") for finding in answer.findings)


@pytest.mark.parametrize(
    ("devices", "gates", "off"),
    [
        ({"hostDevices": [{"name": "a", "deviceName": "x.com/y"}]}, GATES, "HostDevices"),
        ({"gpus": [CLAIM]}, GATES, "GPUsWithDRA"),
        ({"hostDevices": [CLAIM]}, GATES | {"HostDevices"}, "HostDevicesWithDRA"),
    ],
)
def test_gates_of_devices_named(devices: dict[str, Any], gates: frozenset[str], off: str) -> None:
    cluster = Cluster(gates, permitted=PERMITTED)
    (found,) = check(read_vmi(vmi(devices=devices), "vmi"), None, cluster).findings
    assert found.id == "gate-off" and found.subject == f"feature gate {off}"
    assert "manifest" not in str(found.fix), "it adds the gates of the hook only"
    assert not ids(vmi(devices=devices), None, gates | {off})


def cluster_of(version: str, *named: str, off: tuple[str, ...] = (), kind: str = "") -> Cluster:
    """A cluster as kubectl prints it: JSON of a list, or YAML of the object."""
    lists = {"featureGates": list(named), "disabledFeatureGates": list(off)}
    devices = {"pciHostDevices": [{"pciVendorSelector": "10DE:2330", "resourceName": "x"}]}
    spec = {"configuration": {"developerConfiguration": lists, "permittedHostDevices": devices}}
    cr = {"kind": "KubeVirt", "spec": spec, "status": {"observedKubeVirtVersion": version}}
    if kind == "yaml":
        return read_cluster(format_yaml(cr).encode(), "cr")
    listed = {"kind": kind or "List", "items": [cr]}
    return read_cluster(json.dumps(listed, indent="\t").encode(), "cr")


@pytest.mark.parametrize("kind", ["yaml", "List", "KubeVirtList"])
def test_the_gates_of_a_cluster_are_those_that_its_version_knows(kind: str) -> None:
    assert cluster_of("v1.6.2", "Sidecar", NATIVE_GATE, kind=kind) == Cluster(
        frozenset({"Sidecar"}), (1, 6), {"x": "10DE:2330"}, ignores_native=True
    )
    gates = cluster_of("v1.9.0", NATIVE_GATE, off=("GPUsWithDRA",), kind=kind).gates
    assert gates == {NATIVE_GATE, "HostDevicesWithDRA"}
    assert not ids(vmi(annotations={}), None, GATES | {NATIVE_GATE})
    with pytest.raises(InputError, match="kind KubeVirt"):
        read_cluster(b"{}", "cr")


@pytest.mark.parametrize(
    ("version", "gates", "hooked", "id", "fix"),
    [
        ("v1.7.3", GATES, False, "devices-without-node", "manifest -o sidecar --vm"),
        ("v1.9.0", GATES, False, "devices-without-node", "--kubevirt v1.9"),
        ("v1.9.0", {"CPUManager"}, True, "gate-off", "manifest -o sidecar --vm"),
        ("v1.9.0", {"CPUManager", NATIVE_GATE}, True, "gate-off", "hook's annotation"),
        ("v1.9.0", {*GATES, NATIVE_GATE}, True, None, ""),
    ],
)
def test_the_version_decides_between_the_hook_and_the_gate(
    version: str, gates: frozenset[str], hooked: bool, id: str | None, fix: str
) -> None:
    subject = read_vmi(vmi(annotations=HOOK if hooked else {}), "vmi")
    answer = check(subject, None, cluster_of(version, *gates))
    assert [finding.id for finding in answer.findings] == ([] if id is None else [id])
    assert all(fix in str(finding.fix) for finding in answer.findings)
    assert ("the hook adds" in answer.checked[-1]) == (NATIVE_GATE in gates and "Sidecar" in gates)


def test_the_command_of_a_fix_names_the_vms_gpu() -> None:
    subject = read_vmi(vmi(annotations={}, gpus=4, memory={"guest": "900Gi"}), "vmi")
    for host, ids_of_gpu in ((None, "VENDOR:DEVICE"), (load_host("hgx-h100"), "10DE:2330")):
        fixes = [str(finding.fix) for finding in check(subject, host, None).findings]
        words = f"--gpu x --gpu-id {ids_of_gpu} --gpus 4 --vcpus 198 --memory 900GiB"
        assert any(fix.endswith(words) for fix in fixes)
    moved = {"gpus": [], "hostDevices": [{"deviceName": "x"}] * 4}
    findings = check(read_vmi(vmi(annotations={}, devices=moved), "v"), None, None).findings
    assert any("--gpu x --gpu-id VENDOR:DEVICE --gpus 4" in str(found.fix) for found in findings)


def test_a_fix_for_a_nic_does_not_add_the_nodes_gpu() -> None:
    text = vmi(annotations={}, devices={"hostDevices": [{"deviceName": "x.com/nic"}]})
    for devices in (text, text.replace('"gpus"', '"others"')):
        cluster = Cluster(GATES | {"HostDevices"}, permitted={"x": "10DE:2330"})
        findings = check(read_vmi(devices, "v"), load_host("hgx-h100"), cluster).findings
        (finding,) = (f for f in findings if f.id == "device-not-permitted")
        assert "pciVendorSelector" in str(finding.fix)
        assert not any("nic --gpu-id 10DE" in str(finding.fix) for finding in findings)


@pytest.mark.parametrize(
    ("host", "pci_id", "is_grace"),
    [("gh200x4", "", True), (None, "10de:2342", True), ("hgx-h100", "10DE:2342", False)],
)
def test_the_script_is_no_hook_for_grace(host: str | None, pci_id: str, is_grace: bool) -> None:
    nic = vmi(gpus=0, annotations={HOOK_ANNOTATION: SCRIPT}, devices={"hostDevices": [{}]})
    assert "hook-annotation-wrong" not in ids(nic, load_host("gh200x4"))
    cluster = Cluster(GATES, permitted={"x": pci_id})
    for annotation, is_wrong in ((SCRIPT, is_grace), ('[{"image": "homenode"}]', False)):
        subject = read_vmi(vmi(gpus=1, annotations={HOOK_ANNOTATION: annotation}), "v")
        findings = check(subject, load_host(host) if host else None, cluster).findings
        fixes = [str(f.fix) for f in findings if f.id == "hook-annotation-wrong"]
        assert bool(fixes) == is_wrong and all("--image" in fix for fix in fixes)


def test_a_guest_of_one_vcpu_shows_no_siblings() -> None:
    text = vmi({"cores": 1, "threads": 1}, {"guest": "4Gi"}, gpus=1)
    assert ids(text, with_pages(131_072)) == set()


@pytest.mark.parametrize(("version", "count"), [("v1.5.2", 1), ("v1.6.0", 0), ("v1.10.0", 1)])
def test_a_version_that_was_not_tested_is_named(version: str, count: int) -> None:
    answer = check(read_vmi(vmi(), "v"), None, cluster_of(version, *GATES))
    assert sum(line.startswith("KubeVirt 1.") for line in answer.unknown) == count


@pytest.mark.parametrize(
    ("annotations", "wrong"),
    [
        ({HOOK_ANNOTATION: "[" * 20000}, True),
        ({HOOK_ANNOTATION: "[3]"}, True),
        ({HOOK_ANNOTATION: "[]"}, True),
        ({HOOK_ANNOTATION: '[{"args": ["--version", "v9"]}]'}, True),
        ({HOOK_ANNOTATION: '[{"args": ["--version", "v1alpha2"]}, {"image": "b"}]'}, False),
        ({HOOK_ANNOTATION: '[{"configMap": {"hookPath": "/x"}}]'}, True),
        ({HOOK_ANNOTATION: SCRIPT, "homenode/pci-granularity": "switch"}, True),
        ({HOOK_ANNOTATION: SCRIPT, "homenode/pci-granularity": "cell"}, False),
        ({HOOK_ANNOTATION: '[{"configMap": {"hookPath": "/usr/bin/preCloudInitIso"}}]'}, False),
        ({**HOOK, "homenode/on-error": "FAIL"}, True),
        ({**HOOK, "homenode/pci-granularity": "switch"}, False),
    ],
    ids=range(11),
)
def test_an_annotation_without_sidecar_is_found(annotations: dict[str, str], wrong: bool) -> None:
    assert ("hook-annotation-wrong" in ids(vmi(annotations=annotations))) == wrong


def test_the_check_finds_nothing_in_the_vm_and_the_gates_of_the_manifest() -> None:
    text, gpu = json.dumps(build_virtual_machine(ManifestOptions())), {ManifestOptions().gpu: ""}
    for host in (None, load_host(IBM), load_host("hgx-h100")):
        answer = check(read_vmi(text, "vm.yaml"), host, Cluster(GATES, permitted=gpu))
        assert not answer.findings


def test_devices_of_a_cluster_without_a_list_may_be_announced_by_a_plugin() -> None:
    (found,) = check(read_vmi(vmi(), "vmi"), None, Cluster(GATES)).findings
    assert (found.id, found.severity) == ("device-not-permitted", Severity.WARNING)


@pytest.mark.parametrize("text", ["", "-1", "1Xi", "1e999", "٣", "1" * 40, "[]"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_quantity(text, "memory")


def test_quantities_beyond_what_a_node_has_are_read_as_kubernetes_reads_them() -> None:
    assert parse_quantity("999999999999999999E", "memory") == 2**63 - 1
    resources = {"limits": {"cpu": "0"}}
    assert build_guest(build_vmi({"spec": {"domain": {"resources": resources}}}, "vmi")).vcpus == 1
    with pytest.raises(InputError, match=r"pageSize.*expected a size such as 2Mi"):
        ids(vmi(memory={"hugepages": {"pageSize": "0"}}), with_pages(1))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.domain.cpu", "x"),
        ("spec.domain.cpu.cores", "8"),
        ("spec.domain.cpu.cores", True),
        ("spec.domain.memory", []),
        ("spec.domain.cpu.numa.guestMappingPassthrough", [{}]),
        ("spec.domain.cpu.features", [["x"]]),
        ("spec.domain.devices.gpus", ["g0"]),
        ("spec.domain.machine", 1),
        ("metadata.annotations", {"homenode/on-error": 1}),
    ],
)
def test_what_the_api_server_would_not_take_is_refused(path: str, value: Any) -> None:
    document = json.loads(vmi())
    *above, last = path.split(".")
    at = document
    for name in above:
        at = at.setdefault(name, {})
    at[last] = value
    with pytest.raises(InputError):
        build_vmi(document, "vmi", needs_domain=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"kind: \xe4\n", "in UTF-8"), (b"kind: Pod\nkind: Pod\n", "found the key 'kind' twice")],
)
def test_what_is_no_manifest_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_manifest(content, "vm.yaml", "a VM")


def test_a_manifest_whose_keys_are_numbers_is_no_vmi() -> None:
    with pytest.raises(InputError, match="found 0, 1"):
        build_vmi(read_manifest(b"0: 1\n1: 2", "vm.yaml", "a VMI"), "vm.yaml", needs_domain=True)


@pytest.mark.parametrize(
    "text",
    [
        "---\na: 1\n" * 30_000,
        pytest.param("---\n" * 100_000, marks=pytest.mark.nightly),
        "items: [" + "1," * 40_000,
        "- a: " + "1:" * 300_000 + "1",
        pytest.param('a: !!int "' + "1:" * 300_000 + '1"', marks=pytest.mark.nightly),
        "- " * 100_000,
        "a: &a [1]\nb: *a",
        "!!python/object/apply:os.getcwd []",
    ],
    ids=("documents", "empty documents", "values", "base 60", "tag", "depth", "alias", "object"),
)
def test_a_manifest_is_counted_before_it_is_built(text: str) -> None:
    with cpu_time_below(2), pytest.raises(InputError):
        read_manifest(text.encode(), "vm.yaml", "a VMI")
