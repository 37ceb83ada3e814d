"""What the check says of VMIs, kubelets and nodes that do not go together, and of those that do."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from homenode.cluster.kubevirt.admission_rules import Cluster, read_cluster
from homenode.cluster.kubevirt.fit import check_fit
from homenode.cluster.kubevirt.manifest_options import ClaimScope, ManifestOptions
from homenode.cluster.kubevirt.manifests import gates_of, virtual_machine
from homenode.cluster.kubevirt.object import parse_quantity
from homenode.cluster.kubevirt.vmi import HOOK_ANNOTATION, read_vmi, vmi_of
from homenode.cluster.pods.kubelet import Kubelet, read_kubelet
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import Finding, Severity
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, PagePool
from homenode.vm.sources import load_host
from tests.kubevirt_documents import IBM

HOOK = {"hooks.kubevirt.io/hookSidecars": "[]"}
GATES = frozenset({"Sidecar", "CPUManager"})
GOOD_KUBELET: dict[str, Any] = {
    "kind": "KubeletConfiguration",
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
    "topologyManagerPolicy": "restricted",
    "topologyManagerScope": "pod",
    "memoryManagerPolicy": "Static",
    "reservedSystemCPUs": "0-1,128-129",
}


def vmi(
    cpu: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
    gpus: int = 8,
    annotations: Mapping[str, str] = HOOK,
    kind: str = "VirtualMachineInstance",
) -> str:
    """A VMI, good but for what is given; in a VM where that is the kind."""
    domain = {
        "cpu": {
            "cores": 199,
            "model": "host-passthrough",
            "dedicatedCpuPlacement": True,
            "isolateEmulatorThread": True,
            "numa": {"guestMappingPassthrough": {}},
            **(cpu or {}),
        },
        "memory": {"guest": "512Gi", "hugepages": {"pageSize": "2Mi"}, **(memory or {})},
        "devices": {"gpus": [{"name": f"g{i}", "deviceName": "x"} for i in range(gpus)]},
    }
    inner = {"metadata": {"annotations": dict(annotations)}, "spec": {"domain": domain}}
    if kind == "VirtualMachine":
        return json.dumps({"kind": kind, "metadata": {"name": "v"}, "spec": {"template": inner}})
    return json.dumps({"kind": kind, **inner})


def kubelet(**changes: Any) -> Kubelet:
    config = {name: value for name, value in (GOOD_KUBELET | changes).items() if value is not None}
    return read_kubelet(json.dumps({"kubeletconfig": config}), "kubelet")


def found(
    text: str,
    config: Kubelet | None = None,
    host: Host | None = None,
    gates: frozenset[str] | None = None,
) -> dict[str, Finding]:
    cluster = None if gates is None else Cluster(gates)
    return {f.id: f for f in check_fit(read_vmi(text, "vmi"), config, host, cluster).findings}


def with_pages(free: tuple[int, int], page_bytes: int = 2 << 20) -> Host:
    """IBM's host with huge pages."""
    host = load_host(IBM)
    nodes = tuple(
        replace(node, page_pools=(PagePool(page_bytes, count, count),))
        for node, count in zip(host.nodes, free, strict=True)
    )
    return replace(host, nodes=nodes)


@pytest.mark.parametrize("kind", ["VirtualMachineInstance", "VirtualMachine"])
def test_what_fits_has_no_finding_and_says_what_was_checked(kind: str) -> None:
    host = with_pages((131_072, 131_072))
    answer = check_fit(read_vmi(vmi(kind=kind), "vmi"), kubelet(), host, Cluster(GATES))
    assert answer.findings == ()
    assert len(answer.checked) == 4


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            vmi({"dedicatedCpuPlacement": False}),
            {
                "cpus-not-dedicated",
                "mapping-without-dedicated-cpus",
                "emulator-without-dedicated-cpus",
            },
        ),
        (vmi(memory={"hugepages": None}), {"mapping-without-huge-pages"}),
        (vmi({"numa": None}), {"guest-flat"}),
        (vmi({"isolateEmulatorThread": False}), {"emulator-on-vcpu"}),
        (vmi(annotations={}), {"devices-without-node"}),
        (vmi(annotations={}, gpus=0), set()),
    ],
)
def test_a_vmi_alone_is_judged_by_what_admission_and_the_guest_need(
    text: str, ids: set[str]
) -> None:
    assert set(found(text)) == ids


@pytest.mark.parametrize(
    ("gates", "annotations", "ids"),
    [
        (frozenset[str](), HOOK, {"gate-sidecar-off", "gate-cpu-manager-off"}),
        (GATES | {"PCINUMAAwareTopology"}, HOOK, {"hook-beside-native"}),
        (GATES | {"PCINUMAAwareTopology"}, {}, set()),
    ],
)
def test_the_clusters_gates_are_judged(
    gates: frozenset[str], annotations: Mapping[str, str], ids: set[str]
) -> None:
    assert set(found(vmi(annotations=annotations), gates=gates)) == ids


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"cpuManagerPolicy": None}, {"cpu-manager-off"}),
        ({"reservedSystemCPUs": None}, {"no-cpu-reserved"}),
        ({"reservedSystemCPUs": None, "kubeReserved": {"cpu": "500m"}}, set()),
        ({"topologyManagerPolicy": "none"}, {"topology-manager-off"}),
        ({"memoryManagerPolicy": "None"}, {"memory-manager-off"}),
        ({"cpuManagerPolicyOptions": {}}, {"cores-shared"}),
        ({"seccompDefault": True}, {"binding-forbidden"}),
        ({"seccompDefault": False}, set()),
        ({"topologyManagerPolicy": "single-numa-node"}, {"pod-refused"}),
        ({"topologyManagerScope": "container"}, {"pod-refused"}),
    ],
)
def test_a_kubelet_that_does_not_align_is_named(changes: dict[str, Any], ids: set[str]) -> None:
    host = with_pages((131_072, 131_072))
    assert set(found(vmi(), kubelet(**changes), host)) == ids


def test_an_odd_number_of_pus_is_refused_where_only_whole_cores_are_given() -> None:
    odd = found(vmi({"cores": 198}), kubelet(), with_pages((131_072, 131_072)))
    assert set(odd) == {"smt-alignment"}
    assert "199" in odd["smt-alignment"].subject


def test_the_emulator_gets_two_pus_where_its_annotation_says_even() -> None:
    host = with_pages((131_072, 131_072))
    even = {**HOOK, "alpha.kubevirt.io/EmulatorThreadCompleteToEvenParity": ""}
    assert not found(vmi({"cores": 198}, annotations=even), kubelet(), host)
    assert not found(vmi({"cores": 199}, annotations=even), kubelet(), host)


@pytest.mark.parametrize(
    ("kind", "one"),
    [
        ("hostDevices", {"name": "a", "deviceName": "nvidia.com/GA100"}),
        ("interfaces", {"name": "rdma", "sriov": {}}),
    ],
)
def test_devices_that_are_no_gpus_by_name_need_a_place_too(kind: str, one: dict[str, Any]) -> None:
    text = json.loads(vmi(gpus=0, annotations={}))
    text["spec"]["domain"]["devices"][kind] = [one]
    config = kubelet(topologyManagerPolicy="none")
    assert set(found(json.dumps(text), config)) == {"devices-without-node", "topology-manager-off"}
    text["spec"]["domain"]["devices"][kind] = [{"name": "default", "masquerade": {}}][
        : kind[0] == "i"
    ]
    assert not found(json.dumps(text), config)


def test_iothreads_of_a_pool_take_dedicated_pus() -> None:
    text = json.loads(vmi({"cores": 199}))
    text["spec"]["domain"] |= {
        "ioThreadsPolicy": "supplementalPool",
        "ioThreads": {"supplementalPoolThreadCount": 3},
    }
    odd = found(json.dumps(text), kubelet(), with_pages((131_072, 131_072)))
    assert "203" in odd["smt-alignment"].subject


def test_more_pus_than_kubelet_has_are_counted_with_the_emulators_and_without_the_reserved() -> (
    None
):
    host = with_pages((131_072, 131_072))
    assert set(found(vmi({"cores": 251}), kubelet(), host)) == set()
    assert set(found(vmi({"cores": 253}), kubelet(), host)) == {"pus-short"}


@pytest.mark.parametrize(
    ("free", "ids"),
    [
        ((0, 0), {"huge-page-size"}),
        ((131_072, 100_000), {"huge-pages-short"}),
        ((200_000, 100_000), {"huge-pages-uneven"}),
    ],
)
def test_pages_are_counted_as_kubevirt_shares_them_out(
    free: tuple[int, int], ids: set[str]
) -> None:
    assert set(found(vmi(), kubelet(), with_pages(free))) == ids


@pytest.mark.parametrize(
    ("free", "ids"),
    [
        ((131_072, 131_071), set[str]()),
        ((131_071, 131_072), set[str]()),
        ((131_073, 131_070), {"huge-pages-uneven"}),
    ],
)
def test_an_odd_page_is_asked_of_one_node_alone(free: tuple[int, int], ids: set[str]) -> None:
    odd = vmi(memory={"guest": f"{262_143 * 2}Mi"})
    assert set(found(odd, kubelet(), with_pages(free))) == ids


def test_memory_that_is_no_whole_pages_or_not_given_is_named() -> None:
    host = with_pages((131_072, 131_072))
    assert set(found(vmi(memory={"guest": "1025Ki"}), kubelet(), host)) == {"huge-pages-not-whole"}
    assert set(found(vmi(memory={"guest": None}), kubelet(), host)) == {"memory-unknown"}


def test_memory_that_may_be_plugged_in_is_counted_and_goes_with_no_cells() -> None:
    host = with_pages((131_072, 131_072))
    grows = {"guest": "512Gi", "maxGuest": "1Ti"}
    assert set(found(vmi(memory=grows), kubelet(), host)) == {
        "mapping-with-plugged-memory",
        "huge-pages-for-growth",
    }
    flat = found(vmi({"numa": None}, memory=grows), kubelet(), with_pages((262_144, 262_144)))
    assert set(flat) == {"guest-flat"}
    stays = {"guest": "512Gi", "maxGuest": "512Gi"}
    assert not found(vmi(memory=stays), kubelet(), host)


def test_pages_of_another_size_do_not_count() -> None:
    big = vmi(memory={"hugepages": {"pageSize": "1Gi"}})
    assert set(found(big, kubelet(), with_pages((131_072, 131_072)))) == {"huge-page-size"}


def test_gpus_are_counted_and_may_spread() -> None:
    host = with_pages((131_072, 131_072))
    assert "gpus-short" in found(vmi(gpus=9), kubelet(), host)
    half = vmi({"cores": 61}, memory={"guest": "128Gi"}, gpus=4)
    spread = found(half, kubelet(), host)
    assert set(spread) == {"gpus-may-spread"}
    assert "4 on node 0, 4 on node 1" in spread["gpus-may-spread"].observed


def test_a_number_of_gpus_that_is_no_partition_of_the_board_is_named() -> None:
    host = with_pages((131_072, 131_072))
    assert "gpus-no-partition" in found(vmi(gpus=3), kubelet(), host)
    assert "gpus-no-partition" not in found(vmi(gpus=4), kubelet(), host)
    b200 = tuple(  # its NVSwitches are not on the bus
        replace(d, device_id=0x2901) for d in host.pci_devices if d.kind is not DeviceKind.NVSWITCH
    )
    odd = found(vmi(gpus=6), kubelet(), replace(host, pci_devices=b200))["gpus-no-partition"]
    assert "hgx-b200" in odd.subject
    assert "gpus-no-partition" not in found(
        vmi(gpus=3), kubelet(), load_host("rtxpro6000-xeon8468v")
    )


def test_a_grace_host_has_more_nodes_than_topology_manager_takes() -> None:
    host = load_host("gh200x4")
    small = vmi({"cores": 71}, memory={"guest": "2Mi"}, gpus=1)
    many = found(small, kubelet(reservedSystemCPUs="0"), host)
    assert "max-allowable-numa-nodes" in str(many["numa-nodes-many"].fix)
    options = {"max-allowable-numa-nodes": str(len(host.nodes))}
    allowed = kubelet(reservedSystemCPUs="0", topologyManagerPolicyOptions=options)
    assert "numa-nodes-many" not in found(small, allowed, host)


def test_guest_threads_need_siblings_on_the_node() -> None:
    host = load_host("x86-2p2n16c16t-smt-off")
    text = vmi({"cores": 3, "threads": 2, "isolateEmulatorThread": False}, gpus=0)
    assert "threads-without-siblings" in found(text, kubelet(reservedSystemCPUs="0"), host)


def test_the_nodes_own_file_is_read_too() -> None:
    written = "kind: KubeletConfiguration\ncpuManagerPolicy: static\nreservedSystemCPUs: 0,4-5\n"
    read = read_kubelet(written, "/var/lib/kubelet/config.yaml")
    assert read.cpu_policy == "static" and read.reserved_pus == CpuSet({0, 4, 5})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpuManagerPolicy: [static", "JSON"),
        ('{"kind": "Pod"}', "Pod"),
        ('{"kubeletconfig": 7}', "int"),
        ('{"cpuManagerPolicy": 7}', "cpuManagerPolicy"),
        ('{"reservedSystemCPUs": "few"}', "reservedSystemCPUs"),
    ],
)
def test_what_is_no_kubelet_configuration_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_kubelet(text, "kubelet")


def test_gates_are_read_of_a_cr_and_of_a_list_of_one() -> None:
    inner = {"configuration": {"developerConfiguration": {"featureGates": ["Sidecar"]}}}
    cr = {"kind": "KubeVirt", "spec": inner}
    assert read_cluster(json.dumps(cr), "cr").gates == {"Sidecar"}
    assert read_cluster(json.dumps({"kind": "List", "items": [cr]}), "cr").gates == {"Sidecar"}
    assert read_cluster('{"kind": "KubeVirt"}', "cr") == Cluster(frozenset())


def test_version_permitted_devices_and_gates_that_are_off_are_read_of_a_cr() -> None:
    devices = {"pciHostDevices": [{"resourceName": "nvidia.com/A100"}], "usb": [{}]}
    developer = {"featureGates": ["Sidecar"], "disabledFeatureGates": ["Sidecar", "GPUsWithDRA"]}
    config = {"developerConfiguration": developer, "permittedHostDevices": devices}
    cr = {
        "kind": "KubeVirt",
        "spec": {"configuration": config},
        "status": {"observedKubeVirtVersion": "v1.8.4"},
    }
    read = read_cluster(json.dumps(cr), "cr")
    assert read == Cluster(frozenset({"Sidecar"}), (1, 8), frozenset({"nvidia.com/A100"}))
    newer = cr | {"status": {"observedKubeVirtVersion": "v1.9.0"}}
    assert read_cluster(json.dumps(newer), "cr").gates == {"Sidecar", "HostDevicesWithDRA"}
    odd = cr | {"status": {"observedKubeVirtVersion": "devel"}}
    assert read_cluster(json.dumps(odd), "cr").version is None
    with pytest.raises(InputError, match="KubeVirt"):
        read_cluster(json.dumps({"kind": "List", "items": [cr, cr]}), "cr")


def judged(text: str, cluster: Cluster) -> set[str]:
    return {f.id for f in check_fit(read_vmi(text, "vmi"), None, None, cluster).findings}


def test_devices_that_no_one_permits_get_no_pod() -> None:
    assert judged(vmi(), Cluster(GATES)) == set()
    assert judged(vmi(), Cluster(GATES, None, frozenset({"x"}))) == set()
    assert judged(vmi(), Cluster(GATES, None, frozenset({"y"}))) == {"device-not-permitted"}
    by_claim = Cluster(GATES | {"GPUsWithDRA"}, (1, 9), frozenset())
    assert judged(vmi(), by_claim) == set()


def test_a_claim_without_a_source_is_refused_from_the_version_on_that_looks() -> None:
    document = json.loads(vmi(gpus=0))
    document["spec"]["resourceClaims"] = [{"name": "a"}]
    text = json.dumps(document)
    assert "claim-source" not in judged(text, Cluster(GATES, (1, 8)))
    assert "claim-source" in judged(text, Cluster(GATES, (1, 9)))


@pytest.mark.parametrize("odd", [3, ["x"], {"a": 1}, "", None], ids=str)
def test_claims_machines_and_firmware_of_odd_types_are_judged_without_a_traceback(
    odd: object,
) -> None:
    document = json.loads(vmi(gpus=0))
    spec = document["spec"]
    spec |= {"architecture": odd, "resourceClaims": [{"name": odd}, odd]}
    spec["domain"] |= {"machine": {"type": odd}, "firmware": odd, "launchSecurity": {"sev": odd}}
    device = {"deviceName": odd, "claimName": odd, "requestName": odd}
    spec["domain"]["devices"] = {"gpus": [device, device], "hostDevices": [odd]}
    assert judged(json.dumps(document), Cluster(GATES, (1, 9)))


def test_a_gate_that_the_version_does_not_have_does_not_count() -> None:
    gates = GATES | {"PCINUMAAwareTopology"}
    assert judged(vmi(annotations={}), Cluster(gates, (1, 8))) == set()
    assert judged(vmi(annotations={}), Cluster(gates, (1, 6))) == {
        "gate-unknown",
        "devices-without-node",
    }


def test_what_admission_and_the_hook_cannot_see_is_said() -> None:
    annotations = {**HOOK, "kubevirt.io/placePCIDevicesOnRootComplex": "true"}
    assert set(found(vmi(annotations=annotations))) == {"devices-on-root-complex"}
    vm = json.loads(vmi(kind="VirtualMachine"))
    vm["spec"]["instancetype"] = {"name": "u1.large"}
    assert set(found(json.dumps(vm))) == {"instancetype"}


@pytest.mark.parametrize("text", ["", "-1", "1Xi", "1e999", "٣", "1" * 40, "[]"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_quantity(text, "memory")


@pytest.mark.parametrize(
    ("sidecars", "wrong"),
    [
        ("nonsense", True),
        ("[" * 20000, True),
        ("[3]", True),
        ('[{"args": ["--version", "v9"]}]', True),
        ('[{"args": ["--version", "v1alpha2"], "image": "a"}, {"image": "b"}]', False),
        ("[]", False),
    ],
    ids=("no JSON", "deep", "a number", "a version", "two hooks", "none"),
)
def test_an_annotation_that_makes_no_sidecar_is_found(sidecars: str, wrong: bool) -> None:
    found = judged(vmi(annotations={HOOK_ANNOTATION: sidecars}), Cluster(GATES))
    assert ("hook-annotation-wrong" in found) == wrong


@pytest.mark.parametrize(
    ("path", "value"),
    [("cpu", "x"), ("cores", "8"), ("cores", True), ("gpus", "x"), ("memory", [])],
    ids=str,
)
def test_what_the_api_server_refuses_by_its_type_is_refused(path: str, value: object) -> None:
    document = json.loads(vmi())
    domain = document["spec"]["domain"]
    owner = {"cores": domain["cpu"], "gpus": domain["devices"]}.get(path, domain)
    owner[path] = value
    with pytest.raises(InputError, match=path):
        vmi_of(document, "vmi", needs_domain=True)


@pytest.mark.parametrize("claims", [None, *ClaimScope])
@pytest.mark.parametrize("nic_class", [None, "nic.example.com"])
def test_the_vm_and_the_gates_of_the_manifest_pass_admission(
    claims: ClaimScope | None, nic_class: str | None
) -> None:
    options = ManifestOptions(claims=claims, nic_class=nic_class)
    cluster = Cluster(frozenset(gates_of(options)), (1, 8))
    vm = json.dumps(virtual_machine(options))
    assert judged(vm, cluster) == set()


@pytest.mark.parametrize("host", [IBM, "hgx-h100"])
@pytest.mark.parametrize("policy", [None, "none", "best-effort", "restricted"])
def test_the_default_vm_gets_a_fix_with_which_its_cpus_come_from_the_nodes_of_its_gpus(
    host: str, policy: str | None
) -> None:
    node = load_host(host)
    config = None if policy is None else kubelet(topologyManagerPolicy=policy)

    def answered(vcpus: int) -> dict[str, Finding]:
        return found(json.dumps(virtual_machine(ManifestOptions(vcpus=vcpus))), config, node)

    odd = answered(ManifestOptions().vcpus)
    fix = (odd.get("pod-refused") or odd["pod-not-aligned"]).fix or ""
    wanted = re.search(r"cpu \d+ to (\d+)", fix)
    assert wanted
    better = answered(int(wanted[1]) - 2)  # QEMU's own threads have two
    assert not better.keys() & {"pod-refused", "pod-not-aligned", "smt-alignment", "pus-short"}


_WHOLE_CPU = {"cpu": {"model": "host-passthrough"}}


@pytest.mark.parametrize(
    ("domain", "ids"),
    [
        ({"cpu": {"model": "Skylake-Server"}}, {"address-bits-small"}),
        ({"cpu": {"model": "host-passthrough"}}, set()),
        ({"cpu": {"model": "host-model"}}, {"address-bits-small"}),
        ({"cpu": {}}, {"address-bits-small"}),
        (
            {**_WHOLE_CPU, "resources": {"requests": {"memory": "256Gi"}}},
            {"memlock-low"},
        ),
        ({**_WHOLE_CPU, "resources": {"requests": {"memory": "512Gi"}}}, set()),
    ],
)
def test_bars_above_the_guests_address_bits_and_memory_that_cannot_be_locked_are_named(
    domain: Mapping[str, Any], ids: set[str]
) -> None:
    devices = {"gpus": [{"name": f"g{i}", "deviceName": "x"} for i in range(8)]}
    memory = {"memory": {"guest": "512Gi"}}
    text = json.dumps(
        {
            "kind": "VirtualMachineInstance",
            "spec": {"domain": {"devices": devices, **memory, **domain}},
        }
    )
    names = found(text, None, load_host("hgx-h100")).keys()
    assert names & {"address-bits-small", "pci-window-small", "memlock-low"} == ids


@pytest.mark.parametrize(
    ("cpu", "memory", "annotations", "id"),
    [
        ({"isolateEmulatorThreads": True}, {}, HOOK, "key-unknown"),
        ({"numa": {"guestmappingpassthrough": {}}}, {}, HOOK, "key-unknown"),
        ({}, {"guests": "8Gi"}, HOOK, "key-unknown"),
        ({"model": "host-passthroug"}, {}, HOOK, "cpu-model-misspelt"),
        ({"model": "HOST-MODEL"}, {}, HOOK, "cpu-model-misspelt"),
        ({}, {"guest": None}, HOOK, "memory-unknown"),
        ({}, {}, {**HOOK, "homenode/on-error": "FAIL"}, "hook-annotation-wrong"),
        ({}, {}, {**HOOK, "homenode/pci-granularity": "cells"}, "hook-annotation-wrong"),
    ],
)
def test_a_misspelt_key_or_word_is_named(
    cpu: Mapping[str, Any], memory: Mapping[str, Any], annotations: Mapping[str, str], id: str
) -> None:
    one = found(vmi(cpu, memory, annotations=annotations))[id]
    assert one.severity in (Severity.CRITICAL, Severity.WARNING)
    assert id not in found(vmi({"model": "Skylake-Server"}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
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
        read_vmi(json.dumps(document), "vmi", needs_domain=True)


def test_a_misspelt_list_of_devices_is_named() -> None:
    document = json.loads(vmi())
    devices = document["spec"]["domain"]["devices"]
    devices["gpu"] = devices.pop("gpus")
    assert "key-unknown" in found(json.dumps(document))


@pytest.mark.parametrize("names", [["g0", "g0"], ["g0", None], ["g0", ""], ["g0", ["g1"]]])
def test_a_gpu_without_a_name_of_its_own_is_named(names: list[Any]) -> None:
    document = json.loads(vmi(gpus=2))
    for gpu, name in zip(document["spec"]["domain"]["devices"]["gpus"], names, strict=True):
        gpu["name"] = name
    assert "device-name" in found(json.dumps(document))


def test_a_machine_that_a_pattern_allows_and_qemu_lacks_is_named() -> None:
    document = json.loads(vmi())
    ids = []
    for machine in ("q35", "pc-q35-9.0", "q35x"):
        document["spec"]["domain"]["machine"] = {"type": machine}
        ids.append("machine-misspelt" in found(json.dumps(document), gates=GATES))
    assert ids == [False, False, True]


def test_whatever_changes_of_a_vmi_is_named_where_the_planned_one_is_given() -> None:
    planned = read_vmi(vmi(), "vmi")

    def named(document: Any) -> bool:
        try:
            found = check_fit(vmi_of(document, "vmi"), None, None, None, planned).findings
        except InputError:
            return True
        return any(one.id == "plan-setting" for one in found)

    def edits(value: Any) -> Iterator[Any]:
        """The value with one thing in it gone or other."""
        if isinstance(value, dict | list):
            for key, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
                kept = value.copy()
                del kept[key]
                yield kept
                for other in edits(one):
                    changed = value.copy()
                    changed[key] = other
                    yield changed
        elif isinstance(value, int):
            yield from (value + 1, not value)
        else:
            yield f"{value}0"

    document = json.loads(vmi())
    assert not named(document)
    spec = document["spec"]
    tried = [{**document, "spec": one} for one in edits(spec) if "domain" in one]
    assert len(tried) > 40 and all(map(named, tried))
    assert named({**document, "metadata": {"annotations": {}}})
