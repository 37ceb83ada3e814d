"""Fit: why a VMI's CPUs, huge pages, devices and cells will or will not come together on a node.

Each check asks one question of the VMI, of kubelet's configuration or of the node, and answers in
the words of whoever refuses: KubeVirt's admission, kubelet's or libvirt.

Source: KubeVirt vmi-create-admitter and virtwrap/converter/vcpu (d923fdb8), Kubernetes
documentation on CPU, Memory and Topology Manager, kubernetes#136431.
"""

from collections.abc import Iterator

from homenode.findings import Finding, Findings, Severity, in_order
from homenode.kubevirt.admission_rules import admission_findings
from homenode.kubevirt.cluster import FIRST_VERSION, Cluster
from homenode.kubevirt.demand import Demand, demand_of
from homenode.kubevirt.fit_memory import memory_findings
from homenode.kubevirt.fit_node import aligned_nodes, node_findings
from homenode.kubevirt.launcher_pod import launcher_pod
from homenode.kubevirt.vmi import Vmi
from homenode.pods.checkpoints import Checkpoints
from homenode.pods.fit import MOST_NODES, fit, fit_findings
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
    found = [*admission_findings(vmi, cluster), *_spec(vmi, demand), *_gates(demand, cluster)]
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
    if host is not None:
        checked.append(f"node {host.name}: PUs, NUMA nodes, huge pages, GPUs")
        found += node_findings(demand, kubelet, host)
        found += memory_findings(demand, aligned_nodes(demand, kubelet, host), host)
        refused = demand.memory_bytes is None or any(
            finding.severity is Severity.CRITICAL for finding in found
        )
        if kubelet is not None and not refused and len(host.nodes) <= MOST_NODES:
            found += _verdict(vmi, kubelet, host)
    return Findings(tuple(checked), in_order(found))


def _verdict(vmi: Vmi, kubelet: Kubelet, host: Host) -> Iterator[Finding]:
    """The kubelet's refusal of the VM's pod, with nothing else on the node."""
    pod, unknown = with_known_memory(launcher_pod(vmi), host)
    node, gaps = node_of_host(host, kubelet, pod.devices, {}, Checkpoints())
    for finding in fit_findings(fit(pod, node, (*unknown, *gaps)), host.name).findings:
        if finding.id == "pod-not-aligned" or "TopologyAffinityError" in finding.observed:
            yield finding


def _spec(vmi: Vmi, demand: Demand) -> Iterator[Finding]:
    if vmi.instancetype is not None:
        yield Finding(
            "instancetype", Severity.INCONCLUSIVE, f"instance type {vmi.instancetype}",
            "CPUs, memory and devices in the object", "a VirtualMachine that takes them from an "
            "instance type or preference", None,
            "check the VMI: kubectl get vmi NAME -o yaml, once it is started", "the object",
        )  # fmt: skip
    if demand.passed and vmi.annotations.get(ROOT_COMPLEX_ANNOTATION) == "true":
        yield Finding(
            "devices-on-root-complex", Severity.WARNING, f"annotation {ROOT_COMPLEX_ANNOTATION}",
            "not set", "true: KubeVirt puts every device on pcie.0, where none has a node; the "
            "hook leaves what was put there explicitly", None, "remove the annotation",
            "KubeVirt, converter.go: PlacePCIDevicesOnRootComplex",
        )  # fmt: skip
    if not demand.dedicated:
        yield Finding(
            "cpus-not-dedicated", Severity.WARNING, "spec.domain.cpu.dedicatedCpuPlacement",
            "true", "not set: the vCPUs are not pinned, so the guest can be shown no node", None,
            "set dedicatedCpuPlacement: true", _ADMISSION,
        )  # fmt: skip
    if demand.mapped and demand.most_memory_bytes is not None:
        yield Finding(
            "mapping-with-plugged-memory", Severity.CRITICAL, "spec.domain.memory.maxGuest",
            "none next to guestMappingPassthrough",
            f"{format_bytes(demand.most_memory_bytes)}: KubeVirt does not plug memory into a guest "
            "with cells, and refuses the VMI", None,
            "leave maxGuest out, and give the VM all its memory in spec.domain.memory.guest",
            "KubeVirt, liveupdate/memory: ValidateLiveUpdateMemory",
        )  # fmt: skip
    if demand.dedicated and not demand.mapped:
        yield Finding(
            "guest-flat", Severity.WARNING, "spec.domain.cpu.numa",
            "guestMappingPassthrough", "not set: the guest has one node whatever it is given, and "
            "its devices have none", "12.6 for 15.6 GB/s from host to device (HGX A100)",
            "set numa: {guestMappingPassthrough: {}} and huge pages",
            "IBM Developer, Optimizing GPU accelerated VMs with KubeVirt",
        )  # fmt: skip
    if demand.dedicated and not demand.emulator_apart:
        yield Finding(
            "emulator-on-vcpu", Severity.INFO, "spec.domain.cpu.isolateEmulatorThread", "true",
            "not set: QEMU's own threads run on the vCPUs' PUs", None,
            "set isolateEmulatorThread: true; it costs one more dedicated PU", _ADMISSION,
        )  # fmt: skip


def _gates(demand: Demand, cluster: Cluster | None) -> Iterator[Finding]:
    source = "KubeVirt, feature gates"
    native = cluster is not None and cluster.has_gate(NATIVE)
    if demand.passed and demand.mapped and not demand.hooked and not native:
        yield Finding(
            "devices-without-node", Severity.WARNING, f"{demand.passed} devices",
            f"homenode's hook, or the gate {NATIVE} (KubeVirt 1.8 and newer)",
            "no hook in the annotations" + ("" if cluster is None else ", and the gate is off"),
            "12.6 for 15.6 GB/s from host to device (HGX A100)",
            "homenode kubevirt manifest writes the annotation and the hook", source,
        )  # fmt: skip
    if cluster is None:
        return
    for gate in sorted(cluster.gates):
        if cluster.is_unknown(gate):
            first = "{}.{}".format(*FIRST_VERSION[gate])
            yield Finding(
                "gate-unknown", Severity.WARNING, f"feature gate {gate}",
                f"KubeVirt {first} or newer", "{}.{}: it ignores the gate".format(
                    *(cluster.version or ())), None, "upgrade, or remove the gate", source,
            )  # fmt: skip
    if demand.dedicated and not cluster.has_gate("CPUManager"):
        yield Finding(
            "gate-cpu-manager-off", Severity.WARNING, "feature gate CPUManager",
            "on, so that nodes are labelled cpumanager=true", "off", None,
            "homenode kubevirt manifest writes the patch, or label the nodes by hand", source,
        )  # fmt: skip
    if demand.hooked and native:
        yield Finding(
            "hook-beside-native", Severity.INFO, f"feature gate {NATIVE}",
            "one of the hook and the gate", "both: the hook leaves alone what the gate has placed",
            None, None, source,
        )  # fmt: skip


def _kubelet(demand: Demand, kubelet: Kubelet) -> Iterator[Finding]:
    if demand.dedicated and kubelet.cpu_policy != "static":
        yield Finding(
            "cpu-manager-off", Severity.CRITICAL, "kubelet cpuManagerPolicy", "static",
            f"{kubelet.cpu_policy}: the node is not labelled cpumanager=true, and the VMI is "
            "scheduled nowhere", None,
            "set it, drain the node, remove /var/lib/kubelet/cpu_manager_state, restart kubelet",
            _CPU,
        )  # fmt: skip
    if kubelet.cpu_policy == "static" and not kubelet.reserves_cpu:
        yield Finding(
            "no-cpu-reserved", Severity.CRITICAL, "kubelet reservedSystemCPUs",
            "some CPU reserved next to the static policy", "none: kubelet does not start", None,
            "set reservedSystemCPUs, or cpu in systemReserved or kubeReserved", _CPU,
        )  # fmt: skip
    if demand.passed and kubelet.topology_policy == "none":
        yield Finding(
            "topology-manager-off", Severity.WARNING, "kubelet topologyManagerPolicy",
            "best-effort, restricted or single-numa-node",
            "none: CPUs, pages and devices come from any nodes", None,
            "set restricted for VMs of several nodes, single-numa-node for those of one",
            _TOPOLOGY,
        )  # fmt: skip
    if demand.mapped and kubelet.seccomp_default:
        yield Finding(
            "binding-forbidden", Severity.WARNING, "kubelet seccompDefault",
            "false, or a seccomp profile of KubeVirt's own that lets QEMU call mbind",
            "true: container runtimes' profiles forbid mbind without CAP_SYS_NICE, and QEMU ends "
            "with 'cannot bind memory to host NUMA nodes: Operation not permitted'", None,
            "name a profile with mbind in the KubeVirt CR: spec.configuration.seccompConfiguration."
            "virtualMachineInstanceProfile", "kubevirt#17248",
        )  # fmt: skip
    if demand.page_bytes is not None and kubelet.memory_policy != "Static":
        yield Finding(
            "memory-manager-off", Severity.WARNING, "kubelet memoryManagerPolicy", "Static",
            f"{kubelet.memory_policy}: huge pages are counted on the whole machine, and the VM "
            "does not start where its nodes have too few", None,
            "set Static, with reservedMemory for each node", "Kubernetes, Memory Manager",
        )  # fmt: skip
