"""Fit: why a VMI's CPUs, huge pages, devices and cells will or will not come together on a node.

Each check asks one question of the VMI, of kubelet's configuration or of the node, and answers in
the words of whoever refuses: KubeVirt's admission, kubelet's or libvirt.

Source: KubeVirt vmi-create-admitter and virtwrap/converter/vcpu (d923fdb8), Kubernetes
documentation on CPU, Memory and Topology Manager, kubernetes#136431.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from homenode.catalogue import finding
from homenode.check.domain.devices import address_findings, limits
from homenode.check.domain.verification import changed_settings
from homenode.cluster.kubevirt.admission_rules import FIRST_VERSION, Cluster, admission_findings
from homenode.cluster.kubevirt.manifest_options import HookVersion
from homenode.cluster.kubevirt.object import down, parse_quantity
from homenode.cluster.kubevirt.on_define_domain import CHOICES
from homenode.cluster.kubevirt.vmi import HOOK_ANNOTATION, Vmi, guest_of, launcher_pod
from homenode.cluster.pods.admission import TOPOLOGY_AFFINITY
from homenode.cluster.pods.checkpoints import Checkpoints
from homenode.cluster.pods.fit import fit, fit_findings, kubelet_findings
from homenode.cluster.pods.kubelet import Kubelet
from homenode.cluster.pods.machine import node_of_host, with_known_memory
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Findings, Severity, in_order
from homenode.indices import NodeIndex
from homenode.json_text import NotJsonError, decode_json
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.devices.fabric import board_of_host
from homenode.plan.devices.partitions import partition_sizes
from homenode.units import format_bytes
from homenode.vm.model import Vm

NATIVE = "PCINUMAAwareTopology"
ROOT_COMPLEX_ANNOTATION = "kubevirt.io/placePCIDevicesOnRootComplex"
LEAST_KUBELET = Kubelet(
    cpu_policy="static",
    cpu_options={},
    topology_policy="none",
    topology_options={},
    memory_policy="None",
    reserved_pus=CpuSet(),
    seccomp_default=False,
    reserved_cpu_count=1,
)
"""What dedicated CPUs need and nothing else, where its configuration was not given."""
_ADMISSION = "KubeVirt's admission of a VMI"
_CPU = "Kubernetes, CPU Manager"
_TOPOLOGY = "Kubernetes, Topology Manager"


def check_fit(
    vmi: Vmi,
    kubelet: Kubelet | None,
    host: Host | None,
    cluster: Cluster | None,
    planned: Vmi | None = None,
) -> Findings:
    """Findings on one VMI. kubelet, host, cluster, and planned, the VMI as it was meant to be: None
    = not given, and not judged."""
    guest = guest_of(vmi)
    found = [*admission_findings(vmi, cluster), *_spec(vmi, guest), *_hooks(vmi)]
    found += _gates(vmi, cluster)
    checked = [f"VMI {vmi.name}: CPU placement, cells, memory, devices, hook"]
    if planned is not None:
        checked.append("what was planned: every key of its spec, and its annotations")
        found += changed_settings(planned.settings(), vmi.settings(), subject=f"VMI {vmi.name}")
    if cluster is not None:
        version = "" if cluster.version is None else " {}.{}".format(*cluster.version)
        checked.append(f"KubeVirt{version}: gates {', '.join(sorted(cluster.gates)) or 'none'}")
    if kubelet is not None:
        checked.append(
            f"kubelet: cpuManagerPolicy {kubelet.cpu_policy}, topologyManagerPolicy "
            f"{kubelet.topology_policy}, memoryManagerPolicy {kubelet.memory_policy}"
        )
        found += _kubelet(vmi, guest, kubelet)
        nodes = 0 if host is None else len(host.nodes)
        found += kubelet_findings(kubelet.policies(), nodes)
    if host is not None:
        checked.append(f"node {host.name}: PUs, NUMA nodes, huge pages, GPUs")
        found += node_findings(vmi, guest, kubelet, host)
        if guest.memory_bytes:
            found += memory_findings(guest, aligned_nodes(vmi, kubelet, host), host)
        refused = any(finding.severity is Severity.CRITICAL for finding in found)
        if guest.memory_bytes and vmi.is_dedicated and not refused:
            found += _verdict(vmi, kubelet or LEAST_KUBELET, host)
    return Findings(checked=tuple(checked), findings=in_order(found))


def _verdict(vmi: Vmi, kubelet: Kubelet, host: Host) -> Iterator[Finding]:
    """The Topology Manager's refusal of the VM's pod, with nothing else on the node."""
    pod, unknown = with_known_memory(launcher_pod(vmi), host)
    node, gaps = node_of_host(host, kubelet, pod.devices, {}, Checkpoints())
    found = fit(pod, node, (*unknown, *gaps))
    ids = {"pod-not-aligned", "numa-nodes-unsearchable"}
    if found.own.refusal is not None and found.own.refusal.reason == TOPOLOGY_AFFINITY:
        ids.add("pod-refused")
    yield from (one for one in fit_findings(found, host.name).findings if one.id in ids)


def _spec(vmi: Vmi, guest: Vm) -> Iterator[Finding]:
    if vmi.instancetype is not None:
        yield finding(
            "instancetype",
            f"instance type {vmi.instancetype}",
            expected="CPUs, memory and devices in the object",
            observed="a VirtualMachine that takes them from an instance type or preference",
            source="the object",
        )
    if not guest.memory_bytes:
        yield finding(
            "memory-unknown",
            "spec.domain.memory.guest",
            expected="a size",
            observed="none: huge pages could not be counted",
            severity=Severity.WARNING if vmi.instancetype is None else None,
            source="the VMI",
        )
    if vmi.passed_count and vmi.annotations.get(ROOT_COMPLEX_ANNOTATION) == "true":
        yield finding(
            "devices-on-root-complex",
            f"annotation {ROOT_COMPLEX_ANNOTATION}",
            expected="not set",
            observed="true: KubeVirt puts every device on pcie.0, where none has a node; the "
            "hook leaves what was put there explicitly",
            source="KubeVirt, converter.go: PlacePCIDevicesOnRootComplex",
        )
    requested = vmi.at("domain", "resources", "requests", "memory")
    asked = guest.memory_bytes if requested is None else parse_quantity(requested, "memory")
    if vmi.passed_count and asked < guest.memory_bytes and guest.page_bytes is None:
        yield finding(
            "memlock-low",
            "spec.domain.resources.requests.memory",
            expected=f"{format_bytes(guest.memory_bytes)}, the guest's memory, which VFIO locks",
            observed=f"{format_bytes(asked)}: KubeVirt limits locked memory by it",
            case="of KubeVirt",
            source="kubevirt#8472, kubevirt#10379",
        )
    for group in ("gpus", "hostDevices"):
        names = [down(one, "name") for one in vmi.listed("domain", "devices", group)]
        texts = {name for name in names if name and isinstance(name, str)}
        if len(texts) < len(names):
            yield finding(
                "device-name",
                f"spec.domain.devices.{group}",
                expected="of each device a name of its own",
                observed=f"{', '.join(map(repr, names))}: the VM does not start",
                source="KubeVirt, device/hostdevice/hostdev.go: NewUserDefinedAlias",
            )
    if not vmi.is_dedicated:
        yield finding(
            "cpus-not-dedicated",
            "spec.domain.cpu.dedicatedCpuPlacement",
            expected="true",
            observed="not set: the vCPUs are not pinned, so the guest can be shown no node",
            source=_ADMISSION,
        )
    if vmi.is_mapped and guest.max_memory_bytes is not None:
        yield finding(
            "mapping-with-plugged-memory",
            "spec.domain.memory.maxGuest",
            expected="none next to guestMappingPassthrough",
            observed=f"{format_bytes(guest.max_memory_bytes)}: KubeVirt does not plug "
            "memory into a guest "
            "with cells, and refuses the VMI",
            source="KubeVirt, liveupdate/memory: ValidateLiveUpdateMemory",
        )
    if vmi.is_dedicated and not vmi.is_mapped:
        yield finding(
            "guest-flat",
            "spec.domain.cpu.numa",
            expected="guestMappingPassthrough",
            observed="not set: the guest has one node whatever it is given, and "
            "its devices have none",
            source="IBM Developer, Optimizing GPU accelerated VMs with KubeVirt",
        )
    if vmi.is_dedicated and not vmi.is_emulator_apart:
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
    for annotation, choices in CHOICES.items() if vmi.is_hooked else ():
        word = vmi.annotations.get(annotation)
        if word is not None and word not in list(choices):
            yield finding(
                "hook-annotation-wrong",
                f"annotation {annotation}",
                expected=" or ".join(choices),
                observed=f"{word[:40]!r}: the VM does not start",
                source="homenode kubevirt on-define-domain",
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


def _gates(vmi: Vmi, cluster: Cluster | None) -> Iterator[Finding]:
    source = "KubeVirt, feature gates"
    native = cluster is not None and cluster.has_gate(NATIVE)
    if vmi.passed_count and vmi.is_mapped and not vmi.is_hooked and not native:
        yield finding(
            "devices-without-node",
            f"{vmi.passed_count} devices",
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
    if vmi.is_dedicated and not cluster.has_gate("CPUManager"):
        yield finding(
            "gate-cpu-manager-off",
            "feature gate CPUManager",
            expected="on, so that nodes are labelled cpumanager=true",
            observed="off",
            source=source,
        )
    if vmi.is_hooked and native:
        yield finding(
            "hook-beside-native",
            f"feature gate {NATIVE}",
            expected="one of the hook and the gate",
            observed="both: the hook leaves alone what the gate has placed",
            source=source,
        )


def _kubelet(vmi: Vmi, guest: Vm, kubelet: Kubelet) -> Iterator[Finding]:
    if vmi.is_dedicated and kubelet.cpu_policy != "static":
        yield finding(
            "cpu-manager-off",
            "kubelet cpuManagerPolicy",
            expected="static",
            observed=f"{kubelet.cpu_policy}: the node is not labelled cpumanager=true, and "
            "the VMI is "
            "scheduled nowhere",
            source=_CPU,
        )
    if vmi.passed_count and kubelet.topology_policy == "none":
        yield finding(
            "topology-manager-off",
            "kubelet topologyManagerPolicy",
            expected="best-effort, restricted or single-numa-node",
            observed="none: CPUs, pages and devices come from any nodes",
            source=_TOPOLOGY,
        )
    if vmi.is_mapped and kubelet.seccomp_default:
        yield finding(
            "binding-forbidden",
            "kubelet seccompDefault",
            expected="false, or a seccomp profile of KubeVirt's own that lets QEMU call mbind",
            observed="true: container runtimes' profiles forbid mbind without CAP_SYS_NICE, "
            "and QEMU ends "
            "with 'cannot bind memory to host NUMA nodes: Operation not permitted'",
            source="kubevirt#17248",
        )
    if guest.page_bytes is not None and kubelet.memory_policy != "Static":
        yield finding(
            "memory-manager-off",
            "kubelet memoryManagerPolicy",
            expected="Static",
            observed=f"{kubelet.memory_policy}: huge pages are counted on the whole machine, "
            "and the VM "
            "does not start where its nodes have too few",
            source="Kubernetes, Memory Manager",
        )


def free_pus(kubelet: Kubelet | None, host: Host) -> dict[NodeIndex, int]:
    """PUs that kubelet may give away on each NUMA node, other pods not counted."""
    reserved = frozenset() if kubelet is None else frozenset(kubelet.reserved_pus)
    return {node.index: sum(pu not in reserved for pu in node.pus) for node in host.nodes}


def gpus_of_node(host: Host) -> dict[NodeIndex | None, int]:
    count: dict[NodeIndex | None, int] = {}
    for device in host.devices_of_kind(DeviceKind.GPU):
        if device.physical_function is None:
            count[device.node] = count.get(device.node, 0) + 1
    return count


def aligned_nodes(vmi: Vmi, kubelet: Kubelet | None, host: Host) -> int:
    """NUMA nodes that the VM takes at least: for its PUs, and for its GPUs."""
    by_pus = _fewest(free_pus(kubelet, host).values(), vmi.dedicated_pus)
    by_gpus = _fewest(gpus_of_node(host).values(), vmi.gpu_count)
    return max(1, by_pus, by_gpus)


def node_findings(vmi: Vmi, guest: Vm, kubelet: Kubelet | None, host: Host) -> Iterator[Finding]:
    """What does not come together, or comes together by luck."""
    pus = free_pus(kubelet, host)
    if vmi.is_dedicated and vmi.dedicated_pus > sum(pus.values()):
        yield finding(
            "pus-short",
            f"{vmi.dedicated_pus} dedicated PUs",
            expected=f"at most {sum(pus.values())}, which kubelet can give",
            observed=f"{guest.vcpus} vCPUs, and {vmi.dedicated_pus - guest.vcpus} for QEMU's "
            "own threads",
            case="of PUs",
            values={"pus": sum(pus.values())},
            source=_CPU,
        )
    siblings = max((len(core.pus) for core in host.cores), default=1)
    full = kubelet is not None and kubelet.has_cpu_option("full-pcpus-only")
    if vmi.is_dedicated and full and vmi.dedicated_pus % siblings:
        yield finding(
            "smt-alignment",
            f"{vmi.dedicated_pus} dedicated PUs",
            expected=f"a multiple of {siblings}, the PUs of a core, as full-pcpus-only wants",
            observed=f"{vmi.dedicated_pus}: kubelet refuses the pod (SMTAlignmentError)",
            source=_CPU,
        )
    if vmi.is_dedicated and kubelet is not None and siblings > 1 and not full:
        yield finding(
            "cores-shared",
            "kubelet cpuManagerPolicyOptions",
            expected="full-pcpus-only",
            observed="not set: a core's siblings may go to two VMs",
            source=_CPU,
        )
    if guest.threads_per_core > siblings:
        yield finding(
            "threads-without-siblings",
            "spec.domain.cpu.threads",
            expected=f"at most {siblings}, as the node's cores have",
            observed=str(guest.threads_per_core),
            source="kubevirt#11749",
        )
    yield from _gpus(vmi, guest, kubelet, host)
    if kubelet is not None and kubelet.topology_policy != "none":
        yield from _topology(vmi, kubelet, host)


def _gpus(vmi: Vmi, guest: Vm, kubelet: Kubelet | None, host: Host) -> Iterator[Finding]:
    count = gpus_of_node(host)
    if not host.pci_devices:
        if vmi.gpu_count:
            yield finding(
                "gpus-unknown",
                f"{vmi.gpu_count} GPUs",
                expected="the node's PCI devices",
                observed="none in the source",
                source=host.name,
            )
        return
    if vmi.gpu_count > sum(count.values()):
        yield finding(
            "gpus-short",
            f"{vmi.gpu_count} GPUs",
            expected=f"at most {sum(count.values())} on the node",
            observed=str(vmi.gpu_count),
            source=host.name,
        )
    elif vmi.gpu_count and count.get(None):
        yield finding(
            "device-node-unknown",
            f"{count[None]} GPUs of the node",
            expected="a NUMA node",
            observed="none (numa_node is -1): neither kubelet nor the hook can place them",
            source=host.name,
        )
    gpus = [one for one in host.devices_of_kind(DeviceKind.GPU) if one.physical_function is None]
    gpus.sort(key=lambda gpu: sum(bar.size_bytes for bar in gpu.bars), reverse=True)
    needs = limits(guest, gpus[: vmi.gpu_count])
    yield from address_findings(guest, needs, case="of KubeVirt")
    board = board_of_host(host)
    sizes = () if board is None else partition_sizes(board)
    if board is not None and vmi.gpu_count and vmi.gpu_count not in sizes:
        yield finding(
            "gpus-no-partition",
            f"{vmi.gpu_count} GPUs of an {board} board",
            expected=f"{', '.join(map(str, sizes))}: Fabric Manager's partitions",
            observed=f"{vmi.gpu_count}: no partition, so that the GPUs have no NVLink among them",
            source="NVIDIA Fabric Manager user guide, shared NVSwitch virtualization",
        )
    may_spread = kubelet is None or kubelet.topology_policy != "single-numa-node"
    if may_spread and 1 < vmi.gpu_count < sum(count.values()) and len(count) > 1:
        spread = ", ".join(f"{n} on node {node}" for node, n in sorted(count.items(), key=str))
        yield finding(
            "gpus-may-spread",
            f"{vmi.gpu_count} GPUs",
            expected="all of as few nodes as hold them",
            observed=f"{spread}: Topology Manager's hints do not "
            "count devices, so that they may come from more",
            source="kubernetes#136431",
        )


def _topology(vmi: Vmi, kubelet: Kubelet, host: Host) -> Iterator[Finding]:
    nodes = len(host.nodes)
    needed = aligned_nodes(vmi, kubelet, host)
    distant = 1 < needed < nodes and nodes > 2
    if distant and kubelet.topology_options.get("prefer-closest-numa-nodes") != "true":
        yield finding(
            "nodes-any-distance",
            "kubelet topologyManagerPolicyOptions",
            expected="prefer-closest-numa-nodes",
            observed=f"not set: {needed} of {nodes} nodes are chosen at any distance",
            source=_TOPOLOGY,
        )


def _fewest(sizes: Iterable[int], needed: int) -> int:
    """How many of the largest sizes make up what is needed; all of them where they do not."""
    left, count = needed, 0
    for size in sorted(sizes, reverse=True):
        if left <= 0:
            break
        left -= size
        count += 1
    return count


_SPLIT = "KubeVirt, virtwrap/converter/vcpu: memory is shared evenly over the cells"


def memory_findings(guest: Vm, nodes: int, host: Host) -> Iterator[Finding]:
    """Huge pages that are missing. nodes: NUMA nodes that the VM takes at least."""
    size, page = guest.memory_bytes, guest.page_bytes
    if not page or size % page:
        return  # admission refuses it
    subject = f"huge pages of {format_bytes(page)}"
    pools = [pool for node in host.nodes for pool in node.page_pools]
    if not pools:
        yield finding(
            "huge-pages-unknown",
            subject,
            expected="page pools of the node",
            observed="none in the source",
            source=host.name,
        )
        return
    free = sorted((pool.free_pages for pool in pools if pool.page_bytes == page), reverse=True)
    if not any(pool.total_pages for pool in pools if pool.page_bytes == page):
        yield finding(
            "huge-page-size",
            subject,
            expected="a pool of that size on the node",
            observed="none reserved: the VMI is scheduled nowhere",
            case="under KubeVirt",
            values={"pages": size // page},
            source=host.name,
        )
        return
    pages = size // page
    least, rest = divmod(pages, nodes)  # KubeVirt gives the first cells one more
    if sum(free) < pages:
        yield finding(
            "huge-pages-short",
            subject,
            expected=f"{pages} free pages",
            observed=f"{sum(free)} free",
            case="under KubeVirt",
            source=host.name,
        )
    elif sum(count >= least for count in free) < nodes or sum(c > least for c in free) < rest:
        yield finding(
            "huge-pages-uneven",
            subject,
            expected=f"{least} free pages on each of {nodes} nodes"
            + (f", and one more on {rest} of them" if rest else ""),
            observed=f"{', '.join(map(str, free))} free",
            source=_SPLIT,
        )
    most = -(-(guest.max_memory_bytes or 0) // page)
    if sum(free) < most and sum(free) >= pages:
        yield finding(
            "huge-pages-for-growth",
            subject,
            expected=f"{most} free pages, for the memory that may be plugged in (maxGuest)",
            observed=f"{sum(free)} free: the VM starts, and cannot grow so far",
            source=host.name,
        )
