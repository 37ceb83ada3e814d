"""What `pod fit` says of pods, from manifests, hosts and the kubelet's own files."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from homenode.cluster.kubevirt.object import read_manifest
from homenode.cluster.pods.admission import admit
from homenode.cluster.pods.checkpoints import read_checkpoints, running_pods
from homenode.cluster.pods.fit import POLICIES, Fit, fit, fit_findings, kubelet_findings, with_moves
from homenode.cluster.pods.hints import SINGLE
from homenode.cluster.pods.kubelet import Kubelet, read_kubelet, usual_kubelet
from homenode.cluster.pods.machine import node_of_host
from homenode.cluster.pods.node import Node
from homenode.cluster.pods.pod import Pod, read_pod
from homenode.cluster.scheduler.claims import PCI_BUS_ID, claimed
from homenode.errors import InputError, UsageError
from homenode.findings import are_bad
from homenode.machine.pci import DeviceKind
from homenode.vm.sources import load_host
from tests.command_line import Result, homenode
from tests.kubelet.cases import node_of, random_case

GPU = "nvidia.com/gpu"
HOST = "hgx-h100"
"""Two nodes of 112 PUs on 56 cores and four GPUs each."""


def manifest(*containers: dict[str, Any], kind: str = "Pod", **spec: Any) -> dict[str, Any]:
    inner = {"containers": list(containers), **spec}
    if kind == "Pod":
        return {"kind": "Pod", "metadata": {"name": "train"}, "spec": inner}
    return {"kind": kind, "metadata": {"name": "train"}, "spec": {"template": {"spec": inner}}}


def container(name: str = "main", **limits: Any) -> dict[str, Any]:
    return {"name": name, "resources": {"limits": limits}}


def gpus(count: int, cpus: int, memory: str = "64Gi") -> Pod:
    limits = {"cpu": cpus, "memory": memory, GPU: count}
    return read_pod(manifest({"name": "main", "resources": {"limits": limits}}), "pod")


def kubelet(policy: str, **changes: Any) -> Kubelet:
    config = {
        "cpuManagerPolicy": "static",
        "topologyManagerPolicy": policy,
        "memoryManagerPolicy": "None",
        "reservedSystemCPUs": "0,112",
        **changes,
    }
    return read_kubelet(json.dumps(config), "kubelet")


def answered(pod: Pod, config: Kubelet, states: dict[str, Any] | None = None) -> Fit:
    texts = {name: json.dumps(state) for name, state in (states or {}).items()}
    checkpoints = read_checkpoints(texts, "state")
    node, gaps = node_of_host(load_host(HOST), config, pod.devices, {}, checkpoints)
    return fit(pod, node, gaps)


def ids(found: Fit) -> set[str]:
    return {finding.id for finding in fit_findings(found, HOST).findings}


@pytest.mark.parametrize("limits", [{"cpu": "1E", GPU: 1}, {"cpu": 4, GPU: "1E"}])
def test_requests_beyond_any_machine_are_answered_at_once(limits: dict[str, Any]) -> None:
    found = answered(
        read_pod(manifest(container(**limits, memory="64Gi")), "pod"), kubelet("best-effort")
    )
    assert found.lacking
    assert found.change is not None


def test_four_gpus_and_their_cpus_fit_one_node_under_every_policy() -> None:
    for policy in POLICIES:
        found = answered(gpus(4, 60), kubelet(policy))
        assert ids(found) == set()
        assert all(answer.admission.refusal is None for answer in found.answers)


def test_six_gpus_need_two_nodes_and_cpus_for_one_are_refused_by_restricted_too() -> None:
    """The CPUs prefer one node and the GPUs both: there is no set that both prefer."""
    found = answered(gpus(6, 48), kubelet("restricted"))
    assert ids(found) == {"pod-refused"}
    assert [a.policy for a in found.answers if a.admission.refusal is None] == list(POLICIES[:2])
    (finding,) = fit_findings(found, HOST).findings
    assert "cpu: node 0 or 1" in finding.observed
    assert f"{GPU}: node 0+1" in finding.observed
    assert found.change is not None and found.setting is not None
    assert found.change.pod.devices == {GPU: 4}
    assert found.setting.node.policies.topology_policy == "best-effort"


def test_more_cpus_are_a_smaller_change_than_half_of_the_gpus() -> None:
    found = answered(gpus(8, 100), kubelet("restricted"))
    assert found.change is not None
    assert found.change.text == "main: cpu 100 to 114"
    assert answered(found.change.pod, kubelet("restricted")).own.refusal is None


def test_whole_cores_are_named_where_full_pcpus_only_refuses() -> None:
    config = kubelet(SINGLE, cpuManagerPolicyOptions={"full-pcpus-only": "true"})
    found = answered(gpus(1, 13), config)
    assert found.own.refusal is not None
    assert found.own.refusal.reason == "SMTAlignmentError"
    assert found.change is not None
    assert found.change.pod.cpus in (12, 14)


def test_what_runs_counts_from_the_kubelets_own_files() -> None:
    states: dict[str, Any] = {
        "cpu_manager_state": {
            "policyName": "static",
            "defaultCpuSet": "0-19,56-131,168-223",
            "entries": {},
        },
        "kubelet_internal_checkpoint": {
            "Data": {
                "PodDeviceEntries": [
                    {
                        "PodUID": "x",
                        "ContainerName": "c",
                        "ResourceName": GPU,
                        "DeviceIDs": {"1": ["GPU-1", "GPU-2", "GPU-3"]},
                    },
                ]
            }
        },
    }
    assert answered(gpus(2, 40), kubelet(SINGLE)).own.refusal is None
    found = answered(gpus(2, 40), kubelet(SINGLE), states)
    assert found.own.refusal is not None
    assert found.change is not None
    after = answered(found.change.pod, kubelet(SINGLE), states)
    assert after.own.refusal is None
    (given,) = after.own.given
    assert {after.node.cpus.places[cpu].node for cpu in given.cpus} <= {0, 1}


def test_memory_that_other_pods_have_is_read_from_the_memory_managers_file() -> None:
    config = kubelet(
        SINGLE,
        memoryManagerPolicy="Static",
        reservedMemory=[{"numaNode": 0, "limits": {"memory": "1Gi"}}],
    )
    table = {"total": 0, "systemReserved": 0, "allocatable": 1 << 40, "reserved": 0}
    state = {
        str(node): {
            "numberOfAssignments": 1,
            "cells": [node],
            "memoryMap": {"memory": {**table, "free": free}},
        }
        for node, free in ((0, 32 << 30), (1, 16 << 30))
    }
    states = {"memory_manager_state": {"policyName": "Static", "machineState": state}}
    assert answered(gpus(1, 8, "24Gi"), config, states).own.refusal is None
    found = answered(gpus(1, 8, "40Gi"), config, states)
    assert found.own.refusal is not None
    assert found.change is not None
    assert found.change.pod.memory_bytes["memory"] == 32 << 30


def test_more_than_is_free_is_pending_whatever_the_nodes() -> None:
    found = answered(gpus(9, 300), kubelet("best-effort"))
    assert ids(found) == {"pod-pending"}
    (finding,) = fit_findings(found, HOST).findings
    assert "cpu: 300 requested, 222 free" in finding.observed
    assert f"{GPU}: 9 requested, 8 free" in finding.observed


@pytest.mark.parametrize(
    ("limits", "requests", "finding"),
    [
        ({"cpu": 8, "memory": "8Gi", GPU: 1}, {"cpu": 4}, "pod-not-guaranteed"),
        ({"cpu": "7500m", "memory": "8Gi", GPU: 1}, {}, "cpus-not-whole"),
        ({"cpu": 8, "memory": "8Gi", "rdma/vf": 1}, {}, "pod-unknown"),
    ],
)
def test_what_keeps_a_pod_from_being_aligned_is_said(
    limits: dict[str, Any], requests: dict[str, Any], finding: str
) -> None:
    resources = {"limits": limits, "requests": requests}
    pod = read_pod(manifest({"name": "main", "resources": resources}), "pod")
    assert finding in ids(answered(pod, kubelet(SINGLE)))


def test_the_running_pod_whose_place_lets_it_in_is_named() -> None:
    """Node 0 (0-55, 112-167) has 12 CPUs left, and node 1 none."""
    entries = {
        "small": {"c": "12-15"},
        "large": {"c": "16-55,112-131"},
        "other": {"c": "132-167"},
        "far": {"c": "56-111,168-223"},
    }
    state = {"policyName": "static", "defaultCpuSet": "0-11", "entries": entries}
    texts = {"cpu_manager_state": json.dumps(state)}

    def node_without(moved: frozenset[str]) -> Node:
        running = read_checkpoints(texts, "state", moved)
        return node_of_host(load_host(HOST), kubelet(SINGLE), [GPU], {}, running)[0]

    running = running_pods(texts, "state")
    assert running == ("small", "other", "large", "far")
    for cpus, moves in (
        (10, ()),
        (14, ("small",)),
        (40, ("other",)),
        (50, ("large",)),
        (90, ("far",)),
    ):
        found = with_moves(fit(gpus(1, cpus), node_without(frozenset())), running, node_without)
        assert found.moves == moves
        assert all(uid in str(fit_findings(found, HOST).findings) for uid in moves)


def test_a_pod_with_claims_is_told_that_they_are_not_judged() -> None:
    document = manifest(container(cpu=8, memory="8Gi"), resourceClaims=[{"name": "gpu"}])
    assert ids(answered(read_pod(document, "pod"), kubelet(SINGLE))) == {"pod-claims-not-judged"}


@pytest.mark.parametrize(
    ("bdf", "numa", "is_far"), [(0, None, False), (7, None, True), (0, 1, True)]
)
def test_where_claimed_devices_are_is_named_and_compared(
    bdf: int, numa: int | None, is_far: bool
) -> None:
    host = load_host(HOST)
    gpu = sorted(host.devices_of_kind(DeviceKind.GPU), key=lambda one: one.bdf)[bdf]
    document = manifest(container(cpu=8, memory="8Gi"), resourceClaims=[{"name": "gpu"}])
    made = [{"name": "gpu", "resourceClaimName": "train-gpu"}]
    document["status"] = {"resourceClaimStatuses": made}
    attributes: dict[str, Any] = {PCI_BUS_ID: {"string": str(gpu.bdf)}}
    if numa is not None:
        attributes["numaNode"] = {"int": numa}
    device = {"name": "gpu-0", "attributes": attributes}
    spec = {"driver": "gpu.nvidia.com", "pool": {"name": "n"}, "devices": [device]}
    result = {"driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0"}
    claim = {
        "metadata": {"name": "train-gpu"},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }
    content = json.dumps({"items": [{"kind": "ResourceSlice", "spec": spec}, claim]}).encode()
    pod = replace(read_pod(document, "pod"), claimed=claimed(document, content, "file", host))
    found = answered(pod, kubelet(SINGLE))
    assert ids(found) == ({"pod-not-aligned"} if is_far else set())
    node = gpu.node if numa is None else numa
    assert fit_findings(found, HOST).checked[-1] == f"resource claims: {gpu.bdf} on node {node}"
    with pytest.raises(InputError, match="allocations"):
        claimed(document, json.dumps({"items": [{"spec": spec}]}).encode(), "file", host)


def test_cpus_and_devices_on_different_nodes_are_a_warning() -> None:
    states = {"cpu_manager_state": {"policyName": "static", "defaultCpuSet": "0,56-112,168-223"}}
    found = answered(gpus(4, 20), kubelet("none"), states)
    assert found.own.refusal is None
    assert "pod-not-aligned" in ids(found)


def test_every_change_and_setting_that_is_named_is_admitted() -> None:
    random, named = Random(3), 0
    for _ in range(60):
        case = random_case(random, pods=1)
        node = node_of(case)
        found = fit(read_pod(case["Pods"][0], "pod"), node)
        assert found.own == admit(found.pod, node)
        for change in (found.change, found.setting):
            if change is not None:
                named += 1
                assert admit(change.pod, change.node).refusal is None
        apart = "pod-not-aligned" in ids(found)
        if found.own.refusal is None and not found.lacking:
            assert (apart or found.change is None) and found.setting is None
        if apart and found.change is not None:
            assert "pod-not-aligned" not in ids(fit(found.change.pod, found.change.node))
        assert are_bad(fit_findings(found, "host").findings) or found.own.refusal is None
    assert named > 10


# Reading pods


def test_sums_count_init_containers_and_sidecars_as_kubernetes_does() -> None:
    init = [
        container("first", cpu=10, memory="1Gi"),
        {**container("proxy", cpu=1, memory="1Gi"), "restartPolicy": "Always"},
        container("last", cpu=3, memory="9Gi"),
    ]
    pod = read_pod(manifest(container(cpu=4, memory="4Gi"), initContainers=init), "pod")
    assert pod.cpus == 10
    assert pod.memory_bytes == {"memory": 10 << 30}
    assert [c.name for c in pod.containers if c.is_init and c.restarts] == ["proxy"]


@pytest.mark.parametrize("kind", ["Deployment", "Job", "StatefulSet"])
def test_workloads_are_read_by_their_template(kind: str) -> None:
    assert read_pod(manifest(container(cpu=4, memory="4Gi"), kind=kind), "pod").cpus == 4


@pytest.mark.parametrize(
    ("limits", "requests", "guaranteed"),
    [
        ({"cpu": 1, "memory": "1Gi"}, {}, True),
        ({"cpu": 1, "memory": "1Gi"}, {"cpu": "1000m", "memory": 1 << 30}, True),
        ({"cpu": 1, "memory": "1Gi"}, {"cpu": "500m"}, False),
        ({"cpu": 1}, {"memory": "1Gi"}, False),
        ({}, {}, False),
    ],
)
def test_the_quality_of_service_is_kubernetes_own(
    limits: dict[str, Any], requests: dict[str, Any], guaranteed: bool
) -> None:
    resources = {"limits": limits, "requests": requests}
    pod = read_pod(manifest({"name": "main", "resources": resources}), "pod")
    assert pod.is_guaranteed == guaranteed


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1]\nb: *x\n",
        "- 1\n",
        "a: 1\n---\nb: 2\n",
        "",
        "a: [",
        "\x00",
        "[" * 5000,
        "a: !!python/object:os.system x\n",
    ],
)
def test_manifests_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected"):
        read_manifest(text.encode(), "pod.yaml", "a Pod")


def test_yaml_json_and_lists_of_one_are_read() -> None:
    pod = manifest(container(cpu=4, memory="4Gi"))
    for text in (json.dumps(pod), json.dumps({"kind": "List", "items": [pod]})):
        assert read_manifest(text.encode(), "pod", "a Pod") == pod
    assert read_manifest(b"kind: Pod\nat: 2020-01-01\n", "pod", "a Pod")["at"] == "2020-01-01"


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "Service", "spec": {}},
        {"a": 1},
        {"kind": "Pod", "spec": {"containers": 1}},
        manifest(),
    ],
)
def test_what_is_no_pod_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        read_pod(document, "pod")


# The command


def run(*arguments: str | Path) -> Result:
    return homenode(*arguments)


def test_the_command_prints_every_policy_and_exits_by_its_own(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    limits = {"cpu": 60, "memory": "64Gi", GPU: 4}
    path.write_text(json.dumps(manifest({"name": "main", "resources": {"limits": limits}})))
    done = run("pod", "fit", path, "--host", HOST)
    assert done.exit_code == 0, done.output
    assert all(policy in done.output for policy in POLICIES)
    limits["cpu"] = 130
    path.write_text(json.dumps(manifest({"name": "main", "resources": {"limits": limits}})))
    refused = run("pod", "fit", path, "--host", HOST, "--json")
    assert refused.exit_code == 1
    (finding,) = json.loads(refused.stdout)["findings"]
    assert finding["id"] == "pod-refused"
    assert "cpu 130 to 112" in finding["fix"]


def test_devices_of_other_resources_can_be_named(tmp_path: Path) -> None:
    host = load_host(HOST)
    nics = [str(d.bdf) for d in host.pci_devices if d.kind.value == "nic" and d.node == 1][:2]
    path = tmp_path / "pod.yaml"
    limits = {"cpu": 8, "memory": "8Gi", GPU: 1, "rdma/vf": 2}
    path.write_text(json.dumps(manifest({"name": "main", "resources": {"limits": limits}})))
    done = run("pod", "fit", path, "--host", HOST, "--device", f"rdma/vf={','.join(nics)}")
    assert done.exit_code == 0, done.output
    assert "rdma/vf on node 1" in " ".join(done.output.split())
    wrong = run("pod", "fit", path, "--host", HOST, "--device", "rdma/vf")
    assert "RESOURCE=BDF" in str(wrong.exception)


def test_a_usual_kubelet_reserves_one_core() -> None:
    config = usual_kubelet(load_host(HOST))
    assert len(config.reserved_pus) == 2
    assert not list(kubelet_findings(config.policies(), 2))


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"reservedSystemCPUs": ""}, "no-cpu-reserved"),
        ({"topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "8"}}, "numa-nodes-many"),
        ({"topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "9"}}, None),
    ],
)
def test_a_kubelet_that_would_not_start_is_found(
    changes: dict[str, Any], finding: str | None
) -> None:
    found = kubelet_findings(kubelet("restricted", **changes).policies(), 9)
    assert [one.id for one in found] == ([finding] if finding else []) + (
        ["numa-nodes-many"] if finding == "no-cpu-reserved" else []
    )


def on_grace(topology: str, **changes: Any) -> Fit:
    host = load_host("gh200x4")
    config = kubelet(topology, **{"reservedSystemCPUs": "0", **changes})
    node, gaps = node_of_host(host, config, [GPU], {}, read_checkpoints({}, "state"))
    return fit(gpus(1, 8, "8Gi"), node, gaps)


MANY = {"topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "36"}}


@pytest.mark.parametrize(
    ("policy", "changes", "finding"),
    [
        ("none", {}, None),
        (SINGLE, {}, "numa-nodes-many"),
        (SINGLE, MANY, None),
        (SINGLE, {**MANY, "memoryManagerPolicy": "Static"}, "numa-nodes-unsearchable"),
        ("none", {"memoryManagerPolicy": "Static"}, "numa-nodes-unsearchable"),
        (
            SINGLE,
            {"topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "4"}},
            "numa-nodes-many",
        ),
    ],
)
def test_a_machine_of_36_nodes_is_answered_as_its_kubelet_does(
    policy: str, changes: dict[str, Any], finding: str | None
) -> None:
    found = on_grace(policy, **changes)
    assert ids(found) == ({finding} if finding else set())
    assert (found.own.refusal is None) == (finding is None)


# Pools


def pod_file(folder: Path, **limits: Any) -> Path:
    path = folder / "pod.yaml"
    path.write_text(json.dumps(manifest(container(**limits))))
    return path


def pool_state(folder: Path) -> Path:
    """Of three nodes: an empty one, one with a GPU left on each NUMA node, one that is full."""
    for number, used in enumerate((0, 3, 4), start=1):
        node = folder / "state" / f"{HOST}-{number}"
        node.mkdir(parents=True)
        ids = {str(numa): [f"GPU-{numa}-{i}" for i in range(used)] for numa in (0, 1)}
        entry = {"PodUID": "x", "ContainerName": "c", "ResourceName": GPU, "DeviceIDs": ids}
        text = json.dumps({"Data": {"PodDeviceEntries": [entry]}})
        (node / "kubelet_internal_checkpoint").write_text(text)
    return folder / "state"


def test_nodes_of_a_pool_are_grouped_by_their_answer(tmp_path: Path) -> None:
    pod = pod_file(tmp_path, cpu=8, memory="8Gi", **{GPU: 2})
    done = run("pod", "fit", pod, "--pool", f"{HOST}*3", "--state", pool_state(tmp_path), "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    severities = {one["id"]: (one["severity"], one["subject"]) for one in found["findings"]}
    assert severities["pod-refused"][0] == "warning"
    assert f"{HOST}-2" in severities["pod-refused"][1]
    assert severities["pod-pending"][0] == "info"
    assert f"{HOST}-3" in severities["pod-pending"][1]
    assert any(line == f"admitted: 1 of 3 nodes: {HOST}-1" for line in found["checked"])
    refused = next(one for one in found["findings"] if one["id"] == "pod-refused")
    assert f"nodeAffinity for {HOST}-1" in refused["fix"]


def test_a_pod_that_no_node_of_a_pool_admits_is_critical(tmp_path: Path) -> None:
    pod = pod_file(tmp_path, cpu=8, memory="8Gi", **{GPU: 5})
    done = run("pod", "fit", pod, "--pool", f"{HOST}*3", "--json")
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["id"], finding["severity"]) == ("pod-refused", "critical")
    assert finding["subject"] == "pod train, container main"


def test_a_vm_is_judged_on_every_node_of_a_pool(tmp_path: Path) -> None:
    cpu = {"cores": 8, "dedicatedCpuPlacement": True}
    gpu = [{"name": "a", "deviceName": GPU}]
    domain = {"cpu": cpu, "memory": {"guest": "8Gi"}, "devices": {"gpus": gpu}}
    vmi = {"kind": "VirtualMachineInstance", "metadata": {"name": "v"}, "spec": {"domain": domain}}
    path = tmp_path / "vmi.json"
    path.write_text(json.dumps(vmi))
    done = run("kubevirt", "fit", path, "--pool", f"{HOST}*40", "--pool", "h200-xeon8558")
    assert done.exit_code == 0, done.output
    assert "41 of 41" in done.output


def test_a_node_without_a_state_of_its_own_is_left_out_and_none_is_an_error(
    tmp_path: Path,
) -> None:
    pod = pod_file(tmp_path, cpu=8, memory="8Gi", **{GPU: 1})
    state = pool_state(tmp_path)
    done = run("pod", "fit", pod, "--pool", f"{HOST}*4", "--state", state)
    assert "1 of 3" in done.output
    assert f"left out {HOST}-4" in done.output
    none = run("pod", "fit", pod, "--pool", "h200-xeon8558", "--state", state)
    assert isinstance(none.exception, InputError)
    both = run("pod", "fit", pod, "--pool", f"{HOST}*4", "--host", HOST)
    assert isinstance(both.exception, UsageError)


def test_memory_with_a_fraction_of_a_byte_is_refused_by_the_static_memory_manager() -> None:
    limits = {"cpu": 2, "memory": "8.789Gi"}
    pod = read_pod(manifest({"name": "main", "resources": {"limits": limits}}), "pod")
    reserved = [{"numaNode": 0, "limits": {"memory": "1Gi"}}]
    static = kubelet(SINGLE, memoryManagerPolicy="Static", reservedMemory=reserved)
    refusal = answered(pod, static).own.refusal
    assert refusal is not None and refusal.reason == "UnexpectedAdmissionError"
    assert answered(pod, kubelet(SINGLE)).own.refusal is None


def test_an_init_container_that_asks_for_more_cpus_than_there_are_keeps_the_pod_pending() -> None:
    document = manifest(container(cpu=2), initContainers=[container("first", cpu=300)])
    assert "pod-pending" in ids(answered(read_pod(document, "pod"), kubelet(SINGLE)))
