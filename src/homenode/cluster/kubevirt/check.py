"""Check: whether a VMI's CPUs, huge pages, guest nodes and GPUs fit together, and on which nodes.

Each rule is a function with one finding. The kubelet's answer, which depends on other pods, is in
the pod's events (`kubectl describe pod`).

Source: KubeVirt vmi-create-admitter.go, virtwrap/converter/vcpu and pkg/hooks of v1.6 to v1.9.
"""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from homenode.cluster.arguments import (
    NATIVE_GATE,
    NATIVE_SINCE,
    SIDECAR_IMAGE,
    TESTED_VERSIONS,
    ManifestOptions,
)
from homenode.cluster.kubevirt.kubelet import (
    compute_shares,
    count_pages,
    list_ways_together,
    place_on_idle_node,
    suggest_vcpus,
    threads_of,
)
from homenode.cluster.kubevirt.manifests import GRACE_IDS
from homenode.cluster.kubevirt.object import (
    Cluster,
    find_value,
    format_quantity,
    list_texts,
    parse_quantity,
)
from homenode.cluster.kubevirt.placing import CHOICES, GRANULARITY_ANNOTATION, HOOKS, hook_faults
from homenode.cluster.kubevirt.vmi import HOOK_ANNOTATION, Vmi, build_guest, dedicate_cpus
from homenode.findings import Finding, Findings, Severity, finding, sort_findings
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host
from homenode.text import command_line, format_nodes, plural, shorten_list
from homenode.units import GIB, MIB, format_bytes
from homenode.vm.model import Vm
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import PciGranularity

_CLAIM_GATES = {"gpus": "GPUsWithDRA", "hostDevices": "HostDevicesWithDRA"}
_ADMISSION = "KubeVirt, vmi-create-admitter.go"


def _list_device_names(vmi: Vmi) -> frozenset[str]:
    devices = [d for group in _CLAIM_GATES for d in vmi.list_at("domain", "devices", group)]
    return list_texts([find_value(device, "deviceName") for device in devices])


class CheckedVmi(Struct, frozen=True):
    vmi: Vmi
    guest: Vm
    host: Host | None  # None: no node was given
    cluster: Cluster | None  # None: no KubeVirt object was given

    @property
    def pinned_vmi(self) -> Vmi:
        """The VMI as it is, or with the dedicated CPUs and cells that another fix gives it."""
        return self.vmi if self.vmi.is_dedicated else dedicate_cpus(self.vmi)

    @property
    def has_grace(self) -> bool:
        """Whether the VM's GPUs are Grace GPUs, by the node or by the cluster's list of devices."""
        permitted_devices = (self.cluster and self.cluster.permitted) or {}
        ids = {permitted_devices.get(name, "").upper() for name in _list_device_names(self.vmi)}
        if self.vmi.gpu_count and self.host is not None and self.host.whole_gpus:
            ids = set(map(_format_pci_id, self.host.whole_gpus))
        return not ids.isdisjoint(GRACE_IDS)


def check(vmi: Vmi, host: Host | None, cluster: Cluster | None) -> Findings:
    """Apply every rule. Raises ParseError for a malformed quantity."""
    gpu_names, unknown_names = _name_host_device_gpus(vmi, host, cluster)
    names = [find_value(device, "deviceName") for device in _host_devices(vmi)]
    vmi = replace(vmi, host_device_gpus=sum(name in gpu_names for name in names))
    subject = CheckedVmi(vmi, build_guest(vmi), host, cluster)
    checks = [f"VMI {vmi.name}: CPU placement, guest nodes, memory, devices, hook"]
    unknown = []
    if host is None:
        unknown.append("the node: not specified (--host SOURCE)")
    else:
        if host.pus:
            has_pages = subject.guest.page_bytes and _has_pools(host)
            areas = ["CPUs", "NUMA nodes", *(["huge pages"] if has_pages else [])]
            areas += ["GPUs"] if vmi.gpu_count and host.pci_devices else []
            checks.append(f"node {host.name}: {', '.join(areas)}")
        else:
            unknown.append(f"CPUs and NUMA nodes of {host.name}")
        if vmi.gpu_count and not host.pci_devices:
            unknown.append("GPUs of the node: capture it with homenode capture")
        if subject.guest.page_bytes and not _has_pools(host):
            size = format_bytes(subject.guest.page_bytes)
            unknown.append(f"huge pages of {size}: capture the node with homenode capture")
        unknown.append("kubelet's reserved CPUs and its topology manager's policy")
        if unknown_names:
            names_text = f"{shorten_list(unknown_names, 3)} of hostDevices"
            unknown.append(f"whether {names_text} is a GPU: --kubevirt FILE with its PCI ids")
    sidecars = vmi.annotations.get(HOOK_ANNOTATION, "homenode")
    if "homenode" not in sidecars and HOOKS[0] not in sidecars:
        unknown.append("whether the sidecar in the annotations is the hook of homenode")
    if cluster is None:
        unknown.append("feature gates: not specified (--kubevirt FILE)")
    else:
        gates = f"KubeVirt: gates {', '.join(sorted(cluster.gates)) or 'none'}"
        if vmi.is_hooked and {"Sidecar", NATIVE_GATE} <= cluster.gates:
            gates += "; the hook adds distances, switches and audio functions only"
        checks.append(gates)
        oldest, newest = TESTED_VERSIONS
        if cluster.version is not None and not oldest <= cluster.version <= newest:
            texts = ["{}.{}".format(*version) for version in (cluster.version, oldest, newest)]
            unknown.append("KubeVirt {}: tested with {} to {}".format(*texts))
    return Findings(
        checked=tuple(checks),
        findings=sort_findings(result for rule in RULES for result in rule(subject)),
        unknown=tuple(unknown),
    )


def wrong_settings(subject: CheckedVmi) -> Iterator[Finding]:
    """Find settings below spec.domain that KubeVirt rejects, or that leave vCPUs unpinned."""
    vmi, has_pages = subject.vmi, subject.vmi.get("domain", "memory", "hugepages") is not None
    mapping, emulator = "cpu.numa.guestMappingPassthrough", "cpu.isolateEmulatorThread"
    machine = vmi.get("domain", "machine", "type") or "q35"
    dedicated_path = "cpu.dedicatedCpuPlacement"
    text, unpinned_text = "none: KubeVirt rejects the VMI", "not set: the vCPUs are not pinned"
    threads = "not set: QEMU's own threads run on the vCPUs' CPUs"
    for is_wrong, name, path, expected, observed in (
        (not vmi.is_dedicated, "cpus-not-dedicated", dedicated_path, "true", unpinned_text),
        (
            vmi.is_dedicated and not vmi.is_emulator_apart,
            *("emulator-on-vcpu", emulator, "true", threads),
        ),
        (
            vmi.is_emulator_apart and not vmi.is_dedicated,
            *("emulator-without-dedicated-cpus", emulator, f"{dedicated_path} with it", text),
        ),
        (
            vmi.is_mapped and not vmi.is_dedicated,
            *("mapping-without-dedicated-cpus", mapping, f"{dedicated_path} with it", text),
        ),
        (
            vmi.is_mapped and not has_pages,
            *("mapping-without-huge-pages", mapping, "memory.hugepages with it", text),
        ),
        (
            not machine.removeprefix("pc-").startswith(("q35", "virt")),
            *("expander-on-other-machine", "machine.type", "q35", machine),
        ),
    ):
        if is_wrong:
            case = "under KubeVirt"
            yield finding(name, f"spec.domain.{path}", expected, observed, _ADMISSION, case=case)


def guest_flat(subject: CheckedVmi) -> Iterator[Finding]:
    shares = None if subject.host is None else compute_shares(subject.vmi, subject.host)
    if not subject.vmi.is_dedicated or subject.vmi.is_mapped:
        return
    if shares is None or not shares.is_apart:
        yield finding(
            "guest-flat",
            "spec.domain.cpu.numa",
            "guestMappingPassthrough",
            "not set: the guest has one node, and its devices have no node",
            "IBM Developer, Optimizing GPU accelerated VMs with KubeVirt",
            case="with huge pages" if subject.guest.page_bytes else None,
        )


def other_architecture(subject: CheckedVmi) -> Iterator[Finding]:
    architecture, host = subject.vmi.get("architecture"), subject.host
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    host_name = None if host is None else names.get(host.architecture or "")
    if host is not None and host_name and architecture and architecture != host_name:
        yield finding(
            "other-architecture",
            "spec.architecture",
            f"{host_name}, as {host.name} has",
            str(architecture),
            host.name,
            case="under KubeVirt",
            values={"architecture": host_name},
        )


def core_shared(subject: CheckedVmi) -> Iterator[Finding]:
    vmi, host = subject.vmi, subject.host
    threads = 1 if host is None else threads_of(host)
    guest_threads = vmi.get("domain", "cpu", "threads") or 1
    if vmi.is_dedicated and host is not None and host.cores and guest_threads > threads:
        kind = "threads-not-siblings"
        observed = f"{guest_threads}: the guest takes CPUs of several cores for siblings"
    elif vmi.is_dedicated and threads > 1 and guest_threads == 1 and subject.guest.vcpus > 1:
        kind, observed = "core-shared", "1: the guest takes the siblings of a core for two cores"
    else:
        return
    yield finding(
        kind,
        "spec.domain.cpu.threads",
        f"{threads}, as the node's cores have",
        observed,
        "KubeVirt, virtwrap/converter/vcpu",
        case="under KubeVirt",
        values={"threads": threads},
    )


def huge_pages_not_whole(subject: CheckedVmi) -> Iterator[Finding]:
    request = subject.vmi.get("domain", "resources", "requests", "memory")
    requested_bytes = 0 if request is None else parse_quantity(request, "resources.requests.memory")
    memory, page = requested_bytes or subject.guest.memory_bytes, subject.guest.page_bytes
    if page and memory % page and not _is_page_of_no_cpu(subject):
        yield finding(
            "huge-pages-not-whole",
            "spec.domain.memory",
            f"a multiple of the page size, {format_bytes(page)}",
            f"{format_quantity(memory)}: KubeVirt rejects the VMI",
            _ADMISSION,
            case="under KubeVirt",
            values={"memory": format_quantity(-(-memory // page) * page)},
        )


def _is_page_of_no_cpu(subject: CheckedVmi) -> bool:
    page = subject.guest.page_bytes
    return subject.guest.architecture == "x86_64" and page not in (None, 2 * MIB, GIB)


def huge_page_size(subject: CheckedVmi) -> Iterator[Finding]:
    page = subject.guest.page_bytes
    if page and _is_page_of_no_cpu(subject):
        expected, fact = "2Mi or 1Gi, the sizes of x86-64", "the VMI cannot be scheduled"
        texts = ("spec.domain.memory.hugepages.pageSize", expected, f"{format_bytes(page)}: {fact}")
        yield finding("huge-page-size", *texts, "KubeVirt, spec.domain.memory", case="no size")
        return
    if subject.host is None or page is None or not _has_pools(subject.host):
        return
    if not count_pages(subject.host, page):
        yield finding(
            "huge-page-size",
            f"huge pages of {format_bytes(page)}",
            "a pool of that size on the node",
            "no huge pages are reserved: the VMI cannot be scheduled",
            subject.host.name,
            case="under KubeVirt",
            values={"pages": subject.guest.memory_bytes // page},
        )


def huge_pages_short(subject: CheckedVmi) -> Iterator[Finding]:
    page = subject.guest.page_bytes
    if subject.host is None or page is None or not count_pages(subject.host, page):
        return
    pools = [pool for node in subject.host.nodes for pool in node.page_pools]
    free = sum(pool.free_pages for pool in pools if pool.page_bytes == page)
    if free * page < subject.guest.memory_bytes:
        yield finding(
            "huge-pages-short",
            f"huge pages of {format_bytes(page)}",
            f"{plural(subject.guest.memory_bytes // page, 'free page')}",
            f"{free} free",
            subject.host.name,
            case="under KubeVirt",
        )


def gpus_short(subject: CheckedVmi) -> Iterator[Finding]:
    if subject.host is None or not subject.host.pci_devices:
        return
    gpu_count = len(subject.host.whole_gpus)
    if subject.vmi.gpu_count > gpu_count:
        yield finding(
            "gpus-short",
            plural(subject.vmi.gpu_count, "GPU"),
            f"at most {gpu_count} on the node",
            str(subject.vmi.gpu_count),
            subject.host.name,
            values={"fact": "the VM needs more GPUs than the node has"},
        )
        return
    ids = set(map(_format_pci_id, subject.host.pci_devices))
    permitted_devices = (subject.cluster and subject.cluster.permitted) or {}
    for name in sorted(_list_device_names(subject.vmi) & permitted_devices.keys()):
        pci_id = permitted_devices[name].upper()
        if pci_id and not ids & {pci_id, _NO_ID}:
            yield finding(
                "gpus-short",
                name,
                f"a device {pci_id} on the node, as the KubeVirt CR says",
                "none",
                subject.host.name,
                case="other model",
                values={"fact": f"the node has no device {pci_id}"},
            )


def node_too_small(subject: CheckedVmi) -> Iterator[Finding]:
    host, gpu_count = subject.host, subject.vmi.gpu_count
    # What the host's source does not show is not absent.
    if (
        host is None
        or not host.pus
        or (gpu_count and not host.pci_devices)
        or any(gpus_short(subject))
    ):
        return
    placement = place_on_idle_node(subject.pinned_vmi, host)
    reason = placement.message if isinstance(placement, Unplannable) else ""
    if not reason and subject.pinned_vmi.dedicated_pus >= len(host.pus):
        reason = f"{plural(len(host.pus), 'CPU')}, and kubelet reserves at least one"
    if reason:
        yield finding(
            "node-too-small",
            subject.guest.name,
            f"{_needs_text(subject)} free on {host.name}, with a core and memory to spare",
            reason,
            host.name,
        )


def gpus_over_nodes(subject: CheckedVmi) -> Iterator[Finding]:
    vmi = subject.pinned_vmi
    shares = None if subject.host is None else compute_shares(vmi, subject.host)
    if subject.host is None or shares is None or not (shares.is_apart or shares.is_uneven):
        return
    counts = sorted(shares.gpus.items())
    places = ", ".join(f"{plural(n, 'GPU')} on {format_nodes([node])}" for node, n in counts)
    if len(set(shares.gpus.values())) == 1 and len(counts) > 1:
        places = f"{plural(counts[0][1], 'GPU')} on each of {format_nodes(shares.gpus)}"
    if len(shares.cpus) == 1:
        places += f", all CPUs on {format_nodes(shares.cpus)}"
    elif shares.is_uneven:
        places += "".join(f", {plural(n, 'CPU')} on node {node}" for node, n in shares.cpus.items())
    else:
        places += f", CPUs on {format_nodes(shares.cpus)}"
    if shares.memory_node_count > len(shares.cpus):
        places += f", memory of {plural(shares.memory_node_count, 'node')}"
    if not vmi.is_mapped:
        places += "; no guestMappingPassthrough"
    if not subject.vmi.is_dedicated:
        places += ", with dedicatedCpuPlacement and guestMappingPassthrough"
    nodes = {*shares.gpus, *shares.cpus}
    count = shares.node_count
    nodes_words = format_nodes(nodes) if len(nodes) == count else plural(count, "node")
    ways = tuple(list_ways_together(vmi, subject.host, shares))
    yield finding(
        "gpus-over-nodes",
        _needs_text(subject),
        f"GPUs and CPUs on the same nodes of {subject.host.name}, shown to the guest",
        places,
        subject.host.name,
        severity=None if shares.is_apart and subject.vmi.is_dedicated else Severity.WARNING,
        case=None if ways else "on no node",
        values={
            "needs": _needs_text(subject).replace(", ", " and "),
            "nodes": "both nodes" if count == 2 else nodes_words,
        },
        fix="; or ".join(ways) or UNSET,
    )


def _manifest_options(subject: CheckedVmi, *options: str) -> dict[str, str]:
    """Return the options of `manifest` for this VM and its GPUs, as the value of a command."""
    vmi = subject.vmi
    words = ["--vm", vmi.name, *(("--namespace", vmi.namespace) if vmi.namespace else ())]
    devices = vmi.gpus or _host_devices(vmi)
    resources = list_texts([find_value(device, "deviceName") for device in devices])
    if len(resources) == 1 and resources != {ManifestOptions().gpu}:
        (resource,) = resources
        permitted_devices = (subject.cluster and subject.cluster.permitted) or {}
        ids = {permitted_devices.get(resource, "")} - {""}
        if vmi.gpus and subject.host is not None and not ids:
            ids = set(map(_format_pci_id, subject.host.whole_gpus)) - {_NO_ID}
        words += ["--gpu", resource, "--gpu-id", *(ids if len(ids) == 1 else ("VENDOR:DEVICE",))]
    memory_gib = -(-subject.guest.memory_bytes // GIB) or ManifestOptions().memory_gib
    pinned, larger = subject.pinned_vmi, None
    shares = None if subject.host is None else compute_shares(pinned, subject.host)
    if subject.host and shares is not None and (shares.is_apart or shares.is_uneven):
        larger = suggest_vcpus(pinned, subject.host, shares)  # as the fix of gpus-over-nodes says
    for option, value, default in (
        ("--image", SIDECAR_IMAGE if subject.has_grace else None, None),
        ("--gpus", vmi.gpu_count or len(devices) or 1, ManifestOptions().gpus),
        ("--vcpus", larger or subject.guest.vcpus, ManifestOptions().vcpus),
        ("--memory", f"{memory_gib}GiB", f"{ManifestOptions().memory_gib}GiB"),
    ):
        words += [option, str(value)] if value != default else []
    return {"options": command_line(*words, *options)}


def devices_without_node(subject: CheckedVmi) -> Iterator[Finding]:
    cluster, count = subject.cluster, subject.vmi.passed_count
    if not count or subject.vmi.is_hooked or (cluster is not None and cluster.has_native):
        return
    version = None if cluster is None else cluster.version
    expected, case = f"the hook of homenode, or {NATIVE_GATE} (KubeVirt 1.8)", "under KubeVirt"
    observed = "no hook in the annotations" + (", and the gate is off" if cluster else "")
    options: tuple[str, ...] = ()
    if version is not None and version < NATIVE_SINCE:
        expected, observed = "the hook of homenode", "no hook in the annotations"
        if cluster is not None and cluster.ignores_native:
            observed = f"no hook, and {NATIVE_GATE}, which needs KubeVirt 1.8"
    elif version is not None:
        expected, case = f"{NATIVE_GATE} on (Alpha), or the hook of homenode", "from KubeVirt 1.8"
        options = ("--kubevirt", f"v{'.'.join(map(str, version))}")
    noun = "GPU" if count == subject.vmi.gpu_count else "device"
    yield finding(
        "devices-without-node",
        f"{plural(count, noun)} {'has' if count == 1 else 'have'} no guest NUMA node",
        expected,
        observed,
        "KubeVirt, feature gates",
        case=case,
        values=_manifest_options(subject, *options),
    )


def gate_off(subject: CheckedVmi) -> Iterator[Finding]:
    cluster = subject.cluster
    if cluster is None:
        return
    devices = {group: subject.vmi.list_at("domain", "devices", group) for group in _CLAIM_GATES}
    needed_gates = {
        "Sidecar": subject.vmi.is_hooked,
        "CPUManager": subject.vmi.is_dedicated,
        "HostDevices": bool(devices["hostDevices"]),
    }
    for group, gate in _CLAIM_GATES.items():
        needed_gates[gate] = any(find_value(device, "claimName") for device in devices[group])
    missing = [gate for gate in needed_gates if needed_gates[gate] and gate not in cluster.gates]
    if missing:
        case = None if {*missing} <= {"Sidecar", "CPUManager"} else "not of the hook"
        if missing == ["Sidecar"] and cluster.has_native:
            case = "hook not needed"
        yield finding(
            "gate-off",
            f"feature {'gate' if len(missing) == 1 else 'gates'} {', '.join(missing)}",
            "on, as the VMI needs them",
            "off",
            "KubeVirt, feature gates",
            case=case,
            values=_manifest_options(subject),
        )


def device_not_permitted(subject: CheckedVmi) -> Iterator[Finding]:
    cluster = subject.cluster
    if cluster is None:
        return
    gpu_names = list_texts([find_value(gpu, "deviceName") for gpu in subject.vmi.gpus])
    if missing := sorted(_list_device_names(subject.vmi) - (cluster.permitted or {}).keys()):
        observed = "no list: the pod stays Pending unless a device plugin announces the device"
        if cluster.permitted is not None:
            permitted_text = shorten_list(sorted(cluster.permitted), 3) or "no device"
            observed = f"{permitted_text} in the list: KubeVirt creates no pod"
        yield finding(
            "device-not-permitted",
            ", ".join(name or "a device without a name" for name in missing),
            "in permittedHostDevices of the KubeVirt CR",
            observed,
            "KubeVirt, virt-controller/services/renderresources.go",
            severity=Severity.WARNING if cluster.permitted is None else None,
            case=None if gpu_names.issuperset(missing) else "not a GPU",
            values=_manifest_options(subject),
        )


def hook_annotation_wrong(subject: CheckedVmi) -> Iterator[Finding]:
    text = subject.vmi.annotations.get(HOOK_ANNOTATION)
    wrong = [] if text is None else [(HOOK_ANNOTATION, fault) for fault in hook_faults(text)]
    for annotation, choices in CHOICES.items() if text is not None else ():
        word = subject.vmi.annotations.get(annotation)
        if word is not None and word not in list(choices):
            fault = f"{word[:40]!r}, not {' or '.join(choices)}: the VM does not start"
            wrong.append((annotation, fault))
    coarse = subject.vmi.annotations.get(GRANULARITY_ANNOTATION, PciGranularity.CELL)
    if coarse != PciGranularity.CELL and '"configMap"' in (text or ""):
        fault = f"{coarse[:40]}, which only the hook's image supports: the VM does not start"
        wrong.append((GRANULARITY_ANNOTATION, fault))
    if subject.has_grace and '"configMap"' in (text or ""):
        fault = "a ConfigMap, whose script rejects Grace GPUs: the VM does not start"
        wrong.append((HOOK_ANNOTATION, fault))
    for annotation, fault in wrong[:1]:
        yield finding(
            "hook-annotation-wrong",
            f"annotation {annotation}",
            "what homenode kubevirt manifest writes",
            fault,
            "KubeVirt, pkg/hooks and cmd/sidecars",
            values=_manifest_options(subject),
        )


RULES: tuple[Callable[[CheckedVmi], Iterator[Finding]], ...] = (
    wrong_settings,
    guest_flat,
    other_architecture,
    core_shared,
    huge_pages_not_whole,
    huge_page_size,
    huge_pages_short,
    gpus_short,
    node_too_small,
    gpus_over_nodes,
    devices_without_node,
    gate_off,
    device_not_permitted,
    hook_annotation_wrong,
)


_NO_ID = "0000:0000"
"""PCI ids of a device whose ids the host's source does not show."""


def _format_pci_id(device: PciDevice) -> str:
    return f"{device.vendor_id or 0:04X}:{device.device_id or 0:04X}"


def _host_devices(vmi: Vmi) -> list[Any]:
    return vmi.list_at("domain", "devices", "hostDevices")


def _name_host_device_gpus(
    vmi: Vmi, host: Host | None, cluster: Cluster | None
) -> tuple[list[str], list[str]]:
    """Return names in hostDevices: those of the node's GPUs, and those that may be."""
    gpu_ids = set() if host is None else set(map(_format_pci_id, host.whole_gpus)) - {_NO_ID}
    permitted = (cluster and cluster.permitted) or {}
    names = list_texts([find_value(device, "deviceName") for device in _host_devices(vmi)])
    unknown_names = sorted(name for name in names if name and not permitted.get(name))
    gpu_names = [name for name in names if permitted.get(name, "").upper() in gpu_ids]
    return gpu_names, unknown_names if gpu_ids else []


def _has_pools(host: Host) -> bool:
    return any(node.page_pools for node in host.nodes)


def _needs_text(subject: CheckedVmi) -> str:
    gpus = f"{plural(subject.vmi.gpu_count, 'GPU')}, " if subject.vmi.gpu_count else ""
    return f"{gpus}{plural(subject.guest.vcpus, 'CPU')}"
