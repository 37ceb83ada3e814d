"""Fit: why a VMI's CPUs, huge pages, devices and cells will or will not come together on a node.

Each check asks one question of the VMI, of kubelet's configuration or of the node, and answers in
the words of whoever refuses: KubeVirt's admission, kubelet's or libvirt.

Source: KubeVirt vmi-create-admitter and virtwrap/converter/vcpu (d923fdb8), Kubernetes
documentation on CPU, Memory and Topology Manager, kubernetes#136431.
"""

from collections.abc import Iterator
from itertools import pairwise

from homenode.catalogue import finding
from homenode.findings import Finding, Findings, Severity, in_order
from homenode.json_text import NotJsonError, decode_json
from homenode.kubevirt.admission_rules import admission_findings
from homenode.kubevirt.cluster import FIRST_VERSION, Cluster
from homenode.kubevirt.demand import HOOK_ANNOTATION, Demand, demand_of
from homenode.kubevirt.fit_memory import memory_findings
from homenode.kubevirt.fit_node import aligned_nodes, node_findings
from homenode.kubevirt.launcher_pod import launcher_pod
from homenode.kubevirt.manifest_options import HookVersion
from homenode.kubevirt.vmi import Vmi
from homenode.pods.admission import TOPOLOGY_AFFINITY
from homenode.pods.checkpoints import Checkpoints
from homenode.pods.fit import fit, fit_findings, kubelet_findings
from homenode.pods.kubelet import Kubelet
from homenode.pods.machine import node_of_host, with_known_memory
from homenode.topology import Host
from homenode.units import format_bytes

NATIVE = "PCINUMAAwareTopology"
ROOT_COMPLEX_ANNOTATION = "kubevirt.io/placePCIDevicesOnRootComplex"
_ADMISSION = "KubeVirt's admission of a VMI"
_CPU = "Kubernetes, CPU Manager"
_TOPOLOGY = "Kubernetes, Topology Manager"


def check_fit(
    vmi: Vmi, kubelet: Kubelet | None, host: Host | None, cluster: Cluster | None
) -> Findings:
    """Findings on one VMI. kubelet, host, cluster: None = not given, and not judged."""
    demand = demand_of(vmi)
    found = [*admission_findings(vmi, cluster), *_spec(vmi, demand), *_hooks(vmi)]
    found += _gates(demand, cluster)
    checked = [f"VMI {vmi.name}: CPU placement, cells, memory, devices, hook"]
    if cluster is not None:
        version = "" if cluster.version is None else " {}.{}".format(*cluster.version)
        checked.append(f"KubeVirt{version}: gates {', '.join(sorted(cluster.gates)) or 'none'}")
    if kubelet is not None:
        checked.append(
            f"kubelet: cpuManagerPolicy {kubelet.cpu_policy}, topologyManagerPolicy "
            f"{kubelet.topology_policy}, memoryManagerPolicy {kubelet.memory_policy}"
        )
        found += _kubelet(demand, kubelet)
        nodes = 0 if host is None else len(host.nodes)
        found += kubelet_findings(kubelet.policies(), nodes)
    if host is not None:
        checked.append(f"node {host.name}: PUs, NUMA nodes, huge pages, GPUs")
        found += node_findings(demand, kubelet, host)
        found += memory_findings(demand, aligned_nodes(demand, kubelet, host), host)
        refused = demand.memory_bytes is None or any(
            finding.severity is Severity.CRITICAL for finding in found
        )
        if kubelet is not None and not refused:
            found += _verdict(vmi, kubelet, host)
    return Findings(tuple(checked), in_order(found))


def _verdict(vmi: Vmi, kubelet: Kubelet, host: Host) -> Iterator[Finding]:
    """The Topology Manager's refusal of the VM's pod, with nothing else on the node."""
    pod, unknown = with_known_memory(launcher_pod(vmi), host)
    node, gaps = node_of_host(host, kubelet, pod.devices, {}, Checkpoints())
    found = fit(pod, node, (*unknown, *gaps))
    ids = {"pod-not-aligned", "numa-nodes-unsearchable"}
    if found.own.refusal is not None and found.own.refusal.reason == TOPOLOGY_AFFINITY:
        ids.add("pod-refused")
    yield from (one for one in fit_findings(found, host.name).findings if one.id in ids)


def _spec(vmi: Vmi, demand: Demand) -> Iterator[Finding]:
    if vmi.instancetype is not None:
        yield finding(
            "instancetype",
            f"instance type {vmi.instancetype}",
            expected="CPUs, memory and devices in the object",
            observed="a VirtualMachine that takes them from an instance type or preference",
            source="the object",
        )
    if demand.passed and vmi.annotations.get(ROOT_COMPLEX_ANNOTATION) == "true":
        yield finding(
            "devices-on-root-complex",
            f"annotation {ROOT_COMPLEX_ANNOTATION}",
            expected="not set",
            observed="true: KubeVirt puts every device on pcie.0, where none has a node; the "
            "hook leaves what was put there explicitly",
            source="KubeVirt, converter.go: PlacePCIDevicesOnRootComplex",
        )
    if not demand.dedicated:
        yield finding(
            "cpus-not-dedicated",
            "spec.domain.cpu.dedicatedCpuPlacement",
            expected="true",
            observed="not set: the vCPUs are not pinned, so the guest can be shown no node",
            source=_ADMISSION,
        )
    if demand.mapped and demand.most_memory_bytes is not None:
        yield finding(
            "mapping-with-plugged-memory",
            "spec.domain.memory.maxGuest",
            expected="none next to guestMappingPassthrough",
            observed=f"{format_bytes(demand.most_memory_bytes)}: KubeVirt does not plug "
            "memory into a guest "
            "with cells, and refuses the VMI",
            source="KubeVirt, liveupdate/memory: ValidateLiveUpdateMemory",
        )
    if demand.dedicated and not demand.mapped:
        yield finding(
            "guest-flat",
            "spec.domain.cpu.numa",
            expected="guestMappingPassthrough",
            observed="not set: the guest has one node whatever it is given, and "
            "its devices have none",
            source="IBM Developer, Optimizing GPU accelerated VMs with KubeVirt",
        )
    if demand.dedicated and not demand.emulator_apart:
        yield finding(
            "emulator-on-vcpu",
            "spec.domain.cpu.isolateEmulatorThread",
            expected="true",
            observed="not set: QEMU's own threads run on the vCPUs' PUs",
            case="under KubeVirt",
            source=_ADMISSION,
        )


def _hooks(vmi: Vmi) -> Iterator[Finding]:
    text = vmi.annotations.get(HOOK_ANNOTATION)
    wrong = None if text is None else _wrong_hook(text)
    if wrong is not None:
        yield finding(
            "hook-annotation-wrong",
            f"annotation {HOOK_ANNOTATION}",
            expected="a JSON list of sidecars, each with a --version that its shim knows: "
            + ", ".join(HookVersion),
            observed=f"{wrong}: the VM does not start",
            source="KubeVirt, pkg/hooks and cmd/sidecars",
        )


def _wrong_hook(text: str) -> str | None:
    try:
        sidecars = decode_json(text)
    except NotJsonError:
        return "no JSON"
    if not isinstance(sidecars, list) or not all(isinstance(one, dict) for one in sidecars):
        return "no list of objects"
    for sidecar in sidecars:
        args = sidecar.get("args")
        words = args if isinstance(args, list) else []
        for flag, version in pairwise(words):
            if flag == "--version" and version not in tuple(HookVersion):
                return f"--version {str(version)[:40]}"
    return None


def _gates(demand: Demand, cluster: Cluster | None) -> Iterator[Finding]:
    source = "KubeVirt, feature gates"
    native = cluster is not None and cluster.has_gate(NATIVE)
    if demand.passed and demand.mapped and not demand.hooked and not native:
        yield finding(
            "devices-without-node",
            f"{demand.passed} devices",
            expected=f"homenode's hook, or the gate {NATIVE} (KubeVirt 1.8 and newer)",
            observed="no hook in the annotations"
            + ("" if cluster is None else ", and the gate is off"),
            case="under KubeVirt",
            source=source,
        )
    if cluster is None:
        return
    for gate in sorted(cluster.gates):
        if cluster.is_unknown(gate):
            first = "{}.{}".format(*FIRST_VERSION[gate])
            yield finding(
                "gate-unknown",
                f"feature gate {gate}",
                expected=f"KubeVirt {first} or newer",
                observed="{}.{}: it ignores the gate".format(*(cluster.version or ())),
                source=source,
            )
    if demand.dedicated and not cluster.has_gate("CPUManager"):
        yield finding(
            "gate-cpu-manager-off",
            "feature gate CPUManager",
            expected="on, so that nodes are labelled cpumanager=true",
            observed="off",
            source=source,
        )
    if demand.hooked and native:
        yield finding(
            "hook-beside-native",
            f"feature gate {NATIVE}",
            expected="one of the hook and the gate",
            observed="both: the hook leaves alone what the gate has placed",
            source=source,
        )


def _kubelet(demand: Demand, kubelet: Kubelet) -> Iterator[Finding]:
    if demand.dedicated and kubelet.cpu_policy != "static":
        yield finding(
            "cpu-manager-off",
            "kubelet cpuManagerPolicy",
            expected="static",
            observed=f"{kubelet.cpu_policy}: the node is not labelled cpumanager=true, and "
            "the VMI is "
            "scheduled nowhere",
            source=_CPU,
        )
    if demand.passed and kubelet.topology_policy == "none":
        yield finding(
            "topology-manager-off",
            "kubelet topologyManagerPolicy",
            expected="best-effort, restricted or single-numa-node",
            observed="none: CPUs, pages and devices come from any nodes",
            source=_TOPOLOGY,
        )
    if demand.mapped and kubelet.seccomp_default:
        yield finding(
            "binding-forbidden",
            "kubelet seccompDefault",
            expected="false, or a seccomp profile of KubeVirt's own that lets QEMU call mbind",
            observed="true: container runtimes' profiles forbid mbind without CAP_SYS_NICE, "
            "and QEMU ends "
            "with 'cannot bind memory to host NUMA nodes: Operation not permitted'",
            source="kubevirt#17248",
        )
    if demand.page_bytes is not None and kubelet.memory_policy != "Static":
        yield finding(
            "memory-manager-off",
            "kubelet memoryManagerPolicy",
            expected="Static",
            observed=f"{kubelet.memory_policy}: huge pages are counted on the whole machine, "
            "and the VM "
            "does not start where its nodes have too few",
            source="Kubernetes, Memory Manager",
        )
