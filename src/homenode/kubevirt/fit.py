"""Fit: why a VMI's CPUs, huge pages, devices and cells will or will not come together on a node.

Each check asks one question of the VMI, of kubelet's configuration or of the node, and answers in
the words of whoever refuses: KubeVirt's admission, kubelet's or libvirt.

Source: KubeVirt vmi-create-admitter and virtwrap/converter/vcpu (d923fdb8), Kubernetes
documentation on CPU, Memory and Topology Manager, kubernetes#136431.
"""

from collections.abc import Iterator

from homenode.findings import Finding, Findings, Severity, in_order
from homenode.kubevirt.demand import Demand, demand_of
from homenode.kubevirt.fit_memory import memory_findings
from homenode.kubevirt.fit_node import aligned_nodes, node_findings
from homenode.kubevirt.vmi import Vmi
from homenode.pods.kubelet import Kubelet
from homenode.topology import Host
from homenode.units import format_bytes

Gates = frozenset[str] | None
"""Feature gates that are on in the KubeVirt CR; None = not given."""

_ADMISSION = "KubeVirt's admission of a VMI"
_CPU = "Kubernetes, CPU Manager"
_TOPOLOGY = "Kubernetes, Topology Manager"


def check_fit(vmi: Vmi, kubelet: Kubelet | None, host: Host | None, gates: Gates) -> Findings:
    """Findings on one VMI. kubelet, host, gates: None = not given, and not judged."""
    demand = demand_of(vmi)
    found = [*_spec(demand), *_gates(demand, gates)]
    checked = [f"VMI {vmi.name}: CPU placement, cells, memory, devices, hook"]
    if gates is not None:
        checked.append(f"KubeVirt's feature gates: {', '.join(sorted(gates)) or 'none'}")
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
    return Findings(tuple(checked), in_order(found))


def _spec(demand: Demand) -> Iterator[Finding]:
    if not demand.dedicated:
        yield Finding(
            "cpus-not-dedicated", Severity.WARNING, "spec.domain.cpu.dedicatedCpuPlacement",
            "true", "not set: the vCPUs are not pinned, so the guest can be told of no node", None,
            "set dedicatedCpuPlacement: true", _ADMISSION,
        )  # fmt: skip
    if demand.mapped and not demand.dedicated:
        yield Finding(
            "mapping-without-dedicated-cpus", Severity.CRITICAL,
            "spec.domain.cpu.numa.guestMappingPassthrough", "dedicatedCpuPlacement beside it",
            "none: the VMI is refused", None, "set dedicatedCpuPlacement: true", _ADMISSION,
        )  # fmt: skip
    if demand.mapped and demand.page_bytes is None:
        yield Finding(
            "mapping-without-huge-pages", Severity.CRITICAL,
            "spec.domain.cpu.numa.guestMappingPassthrough", "memory.hugepages beside it",
            "none: the VMI is refused", None, "set spec.domain.memory.hugepages.pageSize",
            _ADMISSION,
        )  # fmt: skip
    if demand.mapped and demand.most_memory_bytes is not None:
        yield Finding(
            "mapping-with-plugged-memory", Severity.CRITICAL, "spec.domain.memory.maxGuest",
            "none beside guestMappingPassthrough",
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


def _gates(demand: Demand, gates: Gates) -> Iterator[Finding]:
    source = "KubeVirt, feature gates"
    native = gates is not None and "PCINUMAAwareTopology" in gates
    if demand.passed and demand.mapped and not demand.hooked and not native:
        yield Finding(
            "devices-without-node", Severity.WARNING, f"{demand.passed} devices",
            "homenode's hook, or the gate PCINUMAAwareTopology",
            "no hook in the annotations" + ("" if gates is None else ", and the gate is off"),
            "12.6 for 15.6 GB/s from host to device (HGX A100)",
            "homenode kubevirt manifest writes the annotation and the image", source,
        )  # fmt: skip
    if gates is None:
        return
    if demand.hooked and "Sidecar" not in gates:
        yield Finding(
            "gate-sidecar-off", Severity.CRITICAL, "feature gate Sidecar", "on, for the hook",
            "off: the VMI is refused", None, "homenode kubevirt manifest writes the patch", source,
        )  # fmt: skip
    if demand.dedicated and "CPUManager" not in gates:
        yield Finding(
            "gate-cpu-manager-off", Severity.WARNING, "feature gate CPUManager",
            "on, so that nodes are labelled cpumanager=true", "off", None,
            "homenode kubevirt manifest writes the patch, or label the nodes by hand", source,
        )  # fmt: skip
    if demand.hooked and native:
        yield Finding(
            "hook-beside-native", Severity.INFO, "feature gate PCINUMAAwareTopology",
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
            "some CPU reserved beside the static policy", "none: kubelet does not start", None,
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
