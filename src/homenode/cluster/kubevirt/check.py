"""Check: whether a VMI's CPUs, huge pages, guest nodes and GPUs go together, and on which nodes.

Each rule is a function with one finding. What a kubelet answers to the pod, with whatever else runs
on its node, is in the pod's events (`kubectl describe pod`).

Source: KubeVirt vmi-create-admitter.go, virtwrap/converter/vcpu and pkg/hooks of v1.6 to v1.9.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.kubevirt.manifest_options import HookVersion
from homenode.cluster.kubevirt.object import down, read_object
from homenode.cluster.kubevirt.on_define_domain import CHOICES
from homenode.cluster.kubevirt.vmi import HOOK_ANNOTATION, Vmi, guest_of
from homenode.errors import InputError
from homenode.findings import Finding, Findings, finding, in_order
from homenode.indices import NodeIndex
from homenode.json_text import NotJsonError, decode_json
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.text import nodes_text, plural
from homenode.units import format_bytes
from homenode.vm.layout import PRESETS, Pinning
from homenode.vm.model import Vm
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import EmulatorPolicy, PlanOptions, Policy

NATIVE = "PCINUMAAwareTopology"
_LAYOUT = replace(PRESETS["pin-numa-pci"], pinning=Pinning.NODE)
"""The guest's nodes and PCIe tree as the host's; a kubelet gives CPUs, and counts no cores."""
_CLAIM_GATES = {"gpus": "GPUsWithDRA", "hostDevices": "HostDevicesWithDRA"}
_ON_SINCE = {"GPUsWithDRA": (1, 9), "HostDevicesWithDRA": (1, 9)}
_FIRST_VERSION = {NATIVE: (1, 8)}
_ADMISSION = "KubeVirt, vmi-create-admitter.go"


def read_gates(text: str | bytes, source: str) -> frozenset[str]:
    """The feature gates of a KubeVirt object that are on and known to its version.

    It is JSON, or a list of one. Raises InputError.
    """
    document = read_object(text, source, "a KubeVirt CR")
    items = document.get("items")
    cr = items[0] if isinstance(items, list) and len(items) == 1 else document
    if down(cr, "kind") != "KubeVirt":
        raise InputError(
            f"{source}: expected one object of kind KubeVirt, found {down(cr, 'kind')!r}",
            hint="try: kubectl get kubevirt -A -o json",
        )
    version = _version(down(cr, "status", "observedKubeVirtVersion"))
    developer = down(cr, "spec", "configuration", "developerConfiguration")
    named = _texts(down(developer, "featureGates"))
    off = _texts(down(developer, "disabledFeatureGates"))
    named |= {gate for gate, since in _ON_SINCE.items() if version and version >= since} - off
    unknown = {gate for gate, first in _FIRST_VERSION.items() if version and version < first}
    return named - unknown


def _version(value: object) -> tuple[int, int] | None:
    parts = str(value or "").removeprefix("v").split(".")
    if len(parts) < 2 or not all(part.isdecimal() and len(part) < 6 for part in parts[:2]):
        return None
    return int(parts[0]), int(parts[1])


def _texts(value: object) -> frozenset[str]:
    listed = value if isinstance(value, list) else []
    return frozenset(text for text in listed if isinstance(text, str))


class CheckedVmi(Struct, frozen=True):
    """A VMI with what it is compared with."""

    vmi: Vmi
    guest: Vm
    host: Host | None  # None: no node was given
    gates: frozenset[str] | None  # that are on; None: no KubeVirt object was given


def check(vmi: Vmi, host: Host | None, gates: frozenset[str] | None) -> Findings:
    """Apply every rule. Raises ParseError for a quantity that is none."""
    subject = CheckedVmi(vmi, guest_of(vmi), host, gates)
    checked = [f"VMI {vmi.name}: CPU placement, guest nodes, memory, devices, hook"]
    not_checked = []
    if host is None:
        not_checked.append("the node: not given (--host SOURCE)")
    else:
        if host.pus:
            checked.append(f"node {host.name}: CPUs, NUMA nodes, huge pages, GPUs")
        else:
            not_checked.append(f"CPUs and NUMA nodes of {host.name}")
        if vmi.gpu_count and not host.pci_devices:
            not_checked.append("GPUs of the node: capture it with homenode capture")
        if subject.guest.page_bytes and not _has_pools(host):
            size = format_bytes(subject.guest.page_bytes)
            not_checked.append(f"huge pages of {size}: capture the node with homenode capture")
    if gates is None:
        not_checked.append("feature gates: not given (--kubevirt FILE)")
    else:
        checked.append(f"KubeVirt: gates {', '.join(sorted(gates)) or 'none'}")
    return Findings(
        checked=tuple(checked),
        findings=in_order(result for rule in RULES for result in rule(subject)),
        not_checked=tuple(not_checked),
    )


def cpus_not_dedicated(it: CheckedVmi) -> Iterator[Finding]:
    if not it.vmi.is_dedicated:
        yield finding(
            "cpus-not-dedicated",
            "spec.domain.cpu.dedicatedCpuPlacement",
            "true",
            "not set: the vCPUs are not pinned, so the guest can be shown no node",
            _ADMISSION,
        )


def emulator_on_vcpu(it: CheckedVmi) -> Iterator[Finding]:
    if it.vmi.is_dedicated and not it.vmi.is_emulator_apart:
        yield finding(
            "emulator-on-vcpu",
            "spec.domain.cpu.isolateEmulatorThread",
            "true",
            "not set: QEMU's own threads run on the vCPUs' CPUs",
            _ADMISSION,
            case="under KubeVirt",
        )


def emulator_without_dedicated_cpus(it: CheckedVmi) -> Iterator[Finding]:
    if it.vmi.is_emulator_apart and not it.vmi.is_dedicated:
        yield _refused("emulator-without-dedicated-cpus", "cpu.isolateEmulatorThread")


def mapping_without_dedicated_cpus(it: CheckedVmi) -> Iterator[Finding]:
    if it.vmi.is_mapped and not it.vmi.is_dedicated:
        yield _refused("mapping-without-dedicated-cpus", "cpu.numa.guestMappingPassthrough")


def mapping_without_huge_pages(it: CheckedVmi) -> Iterator[Finding]:
    if it.vmi.is_mapped and it.vmi.at("domain", "memory", "hugepages") is None:
        path, needed = "cpu.numa.guestMappingPassthrough", "memory.hugepages"
        yield _refused("mapping-without-huge-pages", path, needed)


def _refused(name: str, path: str, needed: str = "cpu.dedicatedCpuPlacement") -> Finding:
    expected, observed = f"{needed} with it", "none: KubeVirt refuses the VMI"
    return finding(name, f"spec.domain.{path}", expected, observed, _ADMISSION)


def guest_flat(it: CheckedVmi) -> Iterator[Finding]:
    if it.vmi.is_dedicated and not it.vmi.is_mapped and not _is_apart(it):
        yield finding(
            "guest-flat",
            "spec.domain.cpu.numa",
            "guestMappingPassthrough",
            "not set: the guest has one node, and its devices have none",
            "IBM Developer, Optimizing GPU accelerated VMs with KubeVirt",
        )


def huge_page_size(it: CheckedVmi) -> Iterator[Finding]:
    page = it.guest.page_bytes
    if it.host is None or page is None or not _has_pools(it.host):
        return
    if not _pages(it.host, page):
        yield finding(
            "huge-page-size",
            f"huge pages of {format_bytes(page)}",
            "a pool of that size on the node",
            "none reserved: the VMI is scheduled nowhere",
            it.host.name,
            case="under KubeVirt",
            values={"pages": it.guest.memory_bytes // page},
        )


def huge_pages_short(it: CheckedVmi) -> Iterator[Finding]:
    page = it.guest.page_bytes
    if it.host is None or page is None or not _pages(it.host, page):
        return
    pools = [pool for node in it.host.nodes for pool in node.page_pools]
    free = sum(pool.free_pages or 0 for pool in pools if pool.page_bytes == page)
    if free * page < it.guest.memory_bytes:
        yield finding(
            "huge-pages-short",
            f"huge pages of {format_bytes(page)}",
            f"{it.guest.memory_bytes // page} free pages",
            f"{free} free",
            it.host.name,
            case="under KubeVirt",
        )


def gpus_short(it: CheckedVmi) -> Iterator[Finding]:
    if it.host is None or not it.host.pci_devices:
        return
    there = sum(_gpus_of_nodes(it.host).values())
    if it.vmi.gpu_count > there:
        yield finding(
            "gpus-short",
            plural(it.vmi.gpu_count, "GPU"),
            f"at most {there} on the node",
            str(it.vmi.gpu_count),
            it.host.name,
        )


def node_too_small(it: CheckedVmi) -> Iterator[Finding]:
    if it.host is None or not it.vmi.is_dedicated or any(gpus_short(it)):
        return
    placed = _placed(it)
    if isinstance(placed, Unplannable):
        yield finding(
            "node-too-small",
            _needs_text(it),
            f"that many free on {it.host.name}, with a core and memory of the host's own",
            placed.message,
            it.host.name,
        )


def gpus_over_nodes(it: CheckedVmi) -> Iterator[Finding]:
    if _is_apart(it) and it.host is not None:
        placed = _placed(it)
        assert isinstance(placed, Placement), "_is_apart has looked"
        homes = _homes(it.host, placed)
        counts = sorted(homes.items())
        where = ", ".join(f"{plural(n, 'GPU')} on {nodes_text([node])}" for node, n in counts)
        if len(set(homes.values())) == 1 and len(homes) > 1:
            where = f"{counts[0][1]} GPUs on each of {nodes_text(sorted(homes))}"
        if set(homes) - set(placed.nodes):
            where += f"; all CPUs on {nodes_text(placed.nodes)}"
        if not it.vmi.is_mapped:
            where += "; no guestMappingPassthrough"
        count = len({*homes, *placed.nodes})
        most = max(len(node.pus) for node in it.host.nodes)
        yield finding(
            "gpus-over-nodes",
            _needs_text(it),
            f"GPUs and CPUs on the same nodes of {it.host.name}, shown to the guest",
            where,
            it.host.name,
            case="with its own nodes" if it.vmi.is_mapped else None,
            values={
                "gpus": it.vmi.gpu_count // count,
                "cpus": it.guest.vcpus // count,
                "most": most * (len(homes) - 1),
            },
        )


def devices_without_node(it: CheckedVmi) -> Iterator[Finding]:
    is_native = NATIVE in (it.gates or ())
    if it.vmi.passed_count and not it.vmi.is_hooked and not is_native:
        yield finding(
            "devices-without-node",
            f"{plural(it.vmi.passed_count, 'device')} without a guest NUMA node",
            f"the hook of homenode, or {NATIVE} (KubeVirt 1.8)",
            "no hook in the annotations"
            + (", and the gate is off" if it.gates is not None else ""),
            "KubeVirt, feature gates",
            case="under KubeVirt",
        )


def gate_off(it: CheckedVmi) -> Iterator[Finding]:
    if it.gates is None:
        return
    devices = {group: it.vmi.listed("domain", "devices", group) for group in _CLAIM_GATES}
    needed = {
        "Sidecar": it.vmi.is_hooked,
        "CPUManager": it.vmi.is_dedicated,
        "HostDevices": bool(devices["hostDevices"]),
    }
    for group, gate in _CLAIM_GATES.items():
        needed[gate] = any(down(device, "claimName") for device in devices[group])
    missing = [gate for gate, is_needed in needed.items() if is_needed]
    missing = [gate for gate in missing if gate not in it.gates]
    if missing:
        yield finding(
            "gate-off",
            f"feature gates {', '.join(missing)}",
            "on, as the VMI needs them",
            "off",
            "KubeVirt, feature gates",
        )


def hook_annotation_wrong(it: CheckedVmi) -> Iterator[Finding]:
    text = it.vmi.annotations.get(HOOK_ANNOTATION)
    wrong = [] if text is None else [(HOOK_ANNOTATION, fault) for fault in _hook_faults(text)]
    for annotation, choices in CHOICES.items() if text is not None else ():
        word = it.vmi.annotations.get(annotation)
        if word is not None and word not in list(choices):
            wrong.append((annotation, f"{word[:40]!r}, not {' or '.join(choices)}"))
    for annotation, fault in wrong[:1]:
        yield finding(
            "hook-annotation-wrong",
            f"annotation {annotation}",
            "what homenode kubevirt manifest writes",
            f"{fault}: the VM does not start",
            "KubeVirt, pkg/hooks and cmd/sidecars",
        )


def _hook_faults(text: str) -> Iterator[str]:
    try:
        sidecars = decode_json(text)
    except NotJsonError:
        yield "not JSON"
        return
    if not isinstance(sidecars, list) or not all(isinstance(each, dict) for each in sidecars):
        yield "not a list of objects"
        return
    for sidecar in sidecars:
        words = sidecar.get("args")
        for flag, version in pairwise(words if isinstance(words, list) else []):
            if flag == "--version" and version not in tuple(HookVersion):
                yield f"--version {str(version)[:40]}"


RULES: tuple[Callable[[CheckedVmi], Iterator[Finding]], ...] = (
    cpus_not_dedicated,
    emulator_on_vcpu,
    emulator_without_dedicated_cpus,
    mapping_without_dedicated_cpus,
    mapping_without_huge_pages,
    guest_flat,
    huge_page_size,
    huge_pages_short,
    gpus_short,
    node_too_small,
    gpus_over_nodes,
    devices_without_node,
    gate_off,
    hook_annotation_wrong,
)


def _placed(it: CheckedVmi) -> Placement | Unplannable:
    """The fewest and nearest nodes that an idle node of the cluster can give the VM.

    Huge pages count where the node has any.
    """
    assert it.host is not None, "a rule about the node"
    page = it.guest.page_bytes if _pages(it.host, it.guest.page_bytes or 0) else None
    guest = Vm(
        name=it.vmi.name,
        vcpus=it.vmi.dedicated_pus,
        memory_bytes=it.guest.memory_bytes or 1 << 20,
        architecture=it.host.architecture or it.guest.architecture,
    )
    options = PlanOptions(
        _LAYOUT.name,
        policy=Policy.MEMORY_FIRST,
        gpu_count=it.vmi.gpu_count or None,
        emulator_policy=EmulatorPolicy.NONE,
        unequal_cells=True,
    )
    request = GuestRequest(guest=guest, layout=_LAYOUT, options=options, page_bytes=page)
    try:
        return place(replace(it.host, domains=()), request)
    except Unplannable as refusal:
        return refusal


def _is_apart(it: CheckedVmi) -> bool:
    """Whether the VM's GPUs are on several nodes, or on others than its CPUs, and the guest cannot
    be shown which."""
    if it.host is None or not it.host.pci_devices or not it.vmi.gpu_count:
        return False
    placed = _placed(it)
    if not it.vmi.is_dedicated or isinstance(placed, Unplannable):
        return False
    nodes = set(placed.nodes) | set(_homes(it.host, placed))
    return len(nodes) > 1 and (not it.vmi.is_mapped or nodes != set(placed.nodes))


def _homes(host: Host, placed: Placement) -> Mapping[NodeIndex, int]:
    """How many of the placed GPUs are on each node."""
    devices = [host.device_at[bdf] for bdf in placed.devices]
    return Counter(device.node for device in devices if device.node is not None)


def _gpus_of_nodes(host: Host) -> Mapping[NodeIndex | None, int]:
    gpus = host.devices_of_kind(DeviceKind.GPU)
    return Counter(gpu.node for gpu in gpus if gpu.physical_function is None)


def _has_pools(host: Host) -> bool:
    return any(node.page_pools for node in host.nodes)


def _pages(host: Host, page_bytes: int) -> int:
    """Pages of that size on all nodes."""
    pools = [pool for node in host.nodes for pool in node.page_pools]
    return sum(pool.total_pages or 0 for pool in pools if pool.page_bytes == page_bytes)


def _needs_text(it: CheckedVmi) -> str:
    gpus = f"{plural(it.vmi.gpu_count, 'GPU')}, " if it.vmi.gpu_count else ""
    return f"{gpus}{plural(it.guest.vcpus, 'CPU')}"
