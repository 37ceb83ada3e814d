"""AdmissionRules: why KubeVirt's admission refuses a VMI, as far as CPUs, memory, devices, hook go,
with its machine, firmware and launch security; and what the cluster's KubeVirt CR says.

Rules are those of v1.6 to v1.9, of the VMI with the defaults that KubeVirt's own webhook sets
first; the order is that of the admitter. Those of resource claims (DRA) and launch security are of
v1.8 and v1.9; claims of networks, which v1.9 has, are not judged. Devices that are not permitted
pass admission: virt-controller then makes no pod.

Source: KubeVirt pkg/defaults/defaults.go, vmi-create-admitter.go
(ValidateVirtualMachineInstanceSpec and what it calls), pkg/dra/admitter, virt-api/webhooks
(ValidateLaunchSecurityAmd64, ValidateLaunchSecurityS390x), renderresources.go
(validatePermittedHostDevices); kubevirt.io/v1, KubeVirtConfiguration; pkg/virt-config/featuregate
of v1.6.1 to v1.9.0.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct, field

from homenode.catalogue import entry_of, finding
from homenode.cluster.kubevirt.object import down, parse_milli, read_object
from homenode.cluster.kubevirt.vmi import HOOK_ANNOTATION, Vmi, topology_of, unknown_keys, vcpus_of
from homenode.errors import InputError, ParseError
from homenode.findings import Finding

FIRST_VERSION = {
    "GPUsWithDRA": (1, 6),
    "HostDevicesWithDRA": (1, 6),
    "PCINUMAAwareTopology": (1, 8),
    "NetworkDevicesWithDRA": (1, 9),
    "GraceIOVirtualization": (1, 9),
    "IOMMUFD": (1, 9),
    "Plugins": (1, 9),
}
"""Gates of interest and the first KubeVirt that has them; older ones ignore them silently."""

ON_SINCE = {"GPUsWithDRA": (1, 9), "HostDevicesWithDRA": (1, 9)}
"""Beta gates: on unless they are disabled."""


MACHINES = {
    "amd64": ("q35", "q35*", "pc-q35*"),
    "arm64": ("virt", "virt*"),
    "s390x": ("s390-ccw-virtio", "s390-ccw-virtio*"),
}
"""By architecture the machine of VMIs that name none, and the patterns of those that are allowed,
where the CR says neither: pkg/virt-config."""


class Cluster(Struct, frozen=True):
    """gates: that are on. version: as observed, None where the CR says none. permitted: resource
    names of permittedHostDevices, None where there is no such list. machines: what
    emulatedMachines allows by architecture, default_machines: its machineType; by "" for all.
    """

    gates: frozenset[str]
    version: tuple[int, int] | None = None
    permitted: frozenset[str] | None = None
    machines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_machines: Mapping[str, str] = field(default_factory=dict)

    def machines_of(self, architecture: str) -> tuple[str, ...]:
        """Patterns of the machine types that admission takes."""
        _, *default = MACHINES.get(architecture, MACHINES["amd64"])
        return self.machines.get("") or self.machines.get(architecture) or tuple(default)

    def default_machine(self, architecture: str) -> str:
        """The machine of a VMI that names none."""
        default, *_ = MACHINES.get(architecture, MACHINES["amd64"])
        given = self.default_machines
        return given.get("") or given.get(architecture) or default

    def has_gate(self, name: str) -> bool:
        """On, and known to the version: KubeVirt ignores a gate that it does not have."""
        return name in self.gates and not self.is_unknown(name)

    def is_unknown(self, name: str) -> bool:
        first = FIRST_VERSION.get(name)
        return first is not None and self.version is not None and self.version < first


def read_cluster(text: str | bytes, source: str) -> Cluster:
    """The KubeVirt CR as JSON, or a list of one. Raises InputError."""
    document = read_object(text, source, "a KubeVirt CR")
    items = document.get("items")
    cr = items[0] if isinstance(items, list) and len(items) == 1 else document
    kind = down(cr, "kind")
    if kind != "KubeVirt":
        raise InputError(
            f"{source}: expected one object of kind KubeVirt, found {kind!r}",
            hint="try: kubectl get kubevirt -A -o json",
        )
    config = down(cr, "spec", "configuration")
    developer = down(config, "developerConfiguration")
    permitted = down(config, "permittedHostDevices")
    version = _minor_version(down(cr, "status", "observedKubeVirtVersion"))
    by_default = {name for name, since in ON_SINCE.items() if version and version >= since}
    lists, defaults = (_by_architecture(config, key) for key in ("emulatedMachines", "machineType"))
    off = _set_of_texts(down(developer, "disabledFeatureGates"))
    return Cluster(
        _set_of_texts(down(developer, "featureGates")) | (by_default - off),
        version,
        None
        if permitted is None
        else frozenset(
            name
            for kind in ("pciHostDevices", "mediatedDevices", "usb")
            for name in _names(down(permitted, kind))
        ),
        {
            name: tuple(sorted(found))
            for name, one in lists.items()
            if (found := _set_of_texts(one))
        },
        {name: one for name, one in defaults.items() if isinstance(one, str) and one},
    )


def _by_architecture(config: object, key: str) -> dict[str, object]:
    """A setting of the whole cluster, by "", and those of its architectures."""
    of_all = {"": down(config, key)}
    own = {name: down(config, "architectureConfiguration", name, key) for name in MACHINES}
    return of_all | own


def _set_of_texts(value: object) -> frozenset[str]:
    return (
        frozenset(t for t in value if isinstance(t, str))
        if isinstance(value, list)
        else (frozenset())
    )


def _names(value: object) -> frozenset[str]:
    listed = value if isinstance(value, list) else []
    return _set_of_texts([down(one, "resourceName") for one in listed])


def _minor_version(value: object) -> tuple[int, int] | None:
    parts = str(value or "").removeprefix("v").split(".")
    if len(parts) < 2 or not all(p.isdecimal() and len(p) < 6 for p in parts[:2]):
        return None
    return int(parts[0]), int(parts[1])


SOURCE = "KubeVirt's admission of a VMI"
_CPU = "spec.domain.cpu"
_HOST_MODELS = ("host-model", "host-passthrough")
_POLICIES = ("shared", "auto", "supplementalPool")
_FEATURES = ("", "force", "require", "optional", "disable", "forbid")
_LEAST_MEMORY = 10**6
_CLAIM_GATES = {"gpus": "GPUsWithDRA", "hostDevices": "HostDevicesWithDRA"}
_ENCRYPTION_GATES = {
    "sev": "WorkloadEncryptionSEV",
    "snp": "WorkloadEncryptionSEV",
    "tdx": "WorkloadEncryptionTDX",
}

_EXPECTED = re.compile(r"Expected (?:in|of) (.+?): (.+)\.", re.DOTALL)
"""On the page of a rule's finding: its subject, and what is expected."""


def admission_findings(vmi: Vmi, cluster: Cluster | None) -> Iterator[Finding]:
    """One for each cause that the admitter gives. cluster: None = not given, gates not judged."""
    yield from _memory(vmi)
    yield from _cpu(vmi)
    if down(vmi.spec, "domain", "cpu", "dedicatedCpuPlacement") is True:
        yield from _dedicated(vmi)
    yield from _needing(vmi)
    yield from _iothreads(vmi)
    yield from _claims(vmi, cluster)
    yield from _firmware(vmi)
    yield from _launch_security(vmi, cluster)
    for path, more, known in unknown_keys(vmi):  # ValidateSchema of the webhook refuses them
        yield finding(
            "key-unknown",
            path,
            expected=f"keys of KubeVirt 1.6 to 1.9: {', '.join(known)}",
            observed=f"{', '.join(more)}: the VMI is refused",
            source=SOURCE,
        )
    if cluster is not None:
        if vmi.annotations.get(HOOK_ANNOTATION) and not cluster.has_gate("Sidecar"):
            yield _refused("gate-sidecar-off", "off")
        if vmi.at("domain", "devices", "hostDevices") and not cluster.has_gate("HostDevices"):
            yield _refused("gate-host-devices-off", "off")
        yield from _machine(vmi, cluster)
        yield from _permitted(vmi, cluster)


def _refused(id: str, observed: Any) -> Finding:
    meaning = " ".join(entry_of(id).meaning.replace("`", "").split())
    subject, expected = _EXPECTED.findall(meaning)[0]
    return finding(id, subject, expected, f"{observed}: the VMI is refused", SOURCE)


def _milli(vmi: Vmi, *path: str) -> int:
    """Thousandths of a quantity; 0 where it is not there."""
    value = vmi.at(*path)
    return 0 if value is None else parse_milli(value, "spec." + ".".join(path))


def _resources(vmi: Vmi, name: str) -> tuple[int, int]:
    """Thousandths: requests and limits."""
    requests, limits = (
        _milli(vmi, "domain", "resources", kind, name) for kind in ("requests", "limits")
    )
    return (requests or limits if name == "cpu" else requests), limits


def _topology(vmi: Vmi) -> tuple[int, int]:
    """Sockets and vCPUs. Where nothing is set, the CPUs of the resources become sockets."""
    shape, vcpus = topology_of(vmi), vcpus_of(vmi)
    return shape.sockets if shape else vcpus, vcpus


def _memory(vmi: Vmi) -> Iterator[Finding]:
    requests, limits = _resources(vmi, "memory")
    pages = vmi.at("domain", "memory", "hugepages")
    stated = vmi.at("domain", "memory", "guest")
    if not requests and not limits and stated is None and pages is None:
        yield _refused("memory-missing", "no memory requested")
    if 0 < requests < 1000 * _LEAST_MEMORY:
        yield _refused("memory-too-small", vmi.at("domain", "resources", "requests", "memory"))
    if requests and limits and requests > limits:
        yield _refused("memory-above-limit", "more")
    if pages is None:
        return
    try:
        page = parse_milli(down(pages, "pageSize"), "pageSize")
    except ParseError:
        page = 0
    if page <= 0:
        yield _refused("huge-page-size-wrong", repr(down(pages, "pageSize")))
        return
    size = requests or _milli(vmi, "domain", "memory", "guest") or limits
    if size % page:
        yield finding(
            "huge-pages-not-whole",
            "spec.domain.memory.guest",
            "a multiple of the page size",
            f"{stated or size // 1000} of {pages['pageSize']}" + ": the VMI is refused",
            SOURCE,
        )


def _dedicated(vmi: Vmi) -> Iterator[Finding]:
    memory = _resources(vmi, "memory")
    pages = vmi.at("domain", "memory", "hugepages")
    if not any(memory) and pages is None and not _milli(vmi, "domain", "memory", "guest"):
        yield _refused("dedicated-without-memory", "none")
    if all(memory) and memory[0] != memory[1]:
        yield _refused("memory-limit-differs", "another size")
    cpus = _resources(vmi, "cpu")
    whole = [-(-value // 1000) for value in cpus]
    if any(value % 1000 for value in cpus):
        yield _refused("cpus-fractional", " and ".join(f"{value}m" for value in cpus))
    if all(whole) and whole[0] != whole[1]:
        yield _refused("cpu-limit-differs", "another number")
    _, vcpus = _topology(vmi)
    if any(whole) and vcpus not in whole:
        yield _refused("cpus-given-twice", f"{whole[0] or whole[1]} and {vcpus}")


def _cpu(vmi: Vmi) -> Iterator[Finding]:
    cpu = vmi.at("domain", "cpu")
    requests, limits = _resources(vmi, "cpu")
    if limits and requests > limits:
        yield _refused("cpus-above-limit", "more")
    most, (sockets, _) = down(cpu, "maxSockets"), _topology(vmi)
    if isinstance(most, int) and 0 < most < sockets:
        yield _refused("sockets-above-most", f"{sockets} of {most}")
    for feature in vmi.listed("domain", "cpu", "features"):
        if (down(feature, "policy") or "") not in _FEATURES:
            yield _refused("cpu-feature-policy", f"{down(feature, 'name')}: {feature['policy']}")
    is_arm = vmi.at("architecture") == "arm64"
    model = down(cpu, "model")
    if is_arm and model and model != "host-passthrough":
        yield _refused("cpu-model", model)
    if model and str(model).lower().startswith("host") and model not in _HOST_MODELS:
        yield finding(
            "cpu-model-misspelt",
            f"{_CPU}.model",
            expected=f"{' or '.join(_HOST_MODELS)}, or a CPU model",
            observed=f"{model}: no node has its label, and the VMI is scheduled nowhere",
            source="KubeVirt, nodeselectorrenderer.go: CPUModelLabelFromCPUModel",
        )
    threads = down(cpu, "threads")
    dedicated = down(cpu, "dedicatedCpuPlacement") is True
    if dedicated and isinstance(threads, int) and threads > (1 if is_arm else 2):
        yield _refused("threads-many", threads)


def _needing(vmi: Vmi) -> Iterator[Finding]:
    """What is of no use without dedicated CPUs, cells or huge pages."""
    cpu = vmi.at("domain", "cpu")
    dedicated = down(cpu, "dedicatedCpuPlacement") is True
    mapping = down(cpu, "numa", "guestMappingPassthrough") is not None
    realtime = down(cpu, "realtime") is not None
    if mapping and not dedicated:
        yield _refused("mapping-without-dedicated-cpus", "none")
    if mapping and vmi.at("domain", "memory", "hugepages") is None:
        yield _refused("mapping-without-huge-pages", "none")
    if down(cpu, "isolateEmulatorThread") is True and not dedicated:
        yield _refused("emulator-without-dedicated-cpus", "none")
    if realtime and not dedicated:
        yield _refused("realtime-without-dedicated-cpus", "none")
    if realtime and not mapping:
        yield _refused("realtime-without-mapping", "none")


def _iothreads(vmi: Vmi) -> Iterator[Finding]:
    policy = vmi.at("domain", "ioThreadsPolicy")
    if policy is not None and policy not in _POLICIES:
        yield _refused("iothreads-policy", policy)
    count = vmi.at("domain", "ioThreads", "supplementalPoolThreadCount")
    if policy == "supplementalPool" and not (isinstance(count, int) and count > 0):
        yield _refused("iothreads-count", count)


def _text(value: Any, name: str) -> str | None:
    found = down(value, name)
    return found if isinstance(found, str) else None


def _claims(vmi: Vmi, cluster: Cluster | None) -> Iterator[Finding]:
    """Devices by resource claim (DRA), and by name next to these."""
    requests: list[tuple[str, str]] = []
    for group, gate in _CLAIM_GATES.items():
        devices = vmi.listed("domain", "devices", group)
        names = [_text(one, "deviceName") for one in devices]
        claims = [(_text(one, "claimName"), _text(one, "requestName")) for one in devices]
        by_claim = [
            claim
            for name, claim in zip(names, claims, strict=True)
            if not name and claim != (None, None)
        ]
        if group == "gpus" and 0 < len(by_claim) < len(devices):
            yield _refused("claims-mixed", f"{len(by_claim)} of {len(devices)} by claim")
            continue
        for name, claim in zip(names, claims, strict=True):
            is_named = claim == (None, None) if name else all(claim)
            if not is_named:
                found = "nothing or half a claim" if not name else f"{name} and a claim"
                yield _refused("device-named-wrongly", f"{group}: {found}")
        if by_claim and cluster is not None and not cluster.has_gate(gate):
            yield _refused("gate-claims-off", f"{gate} off")
            continue
        requests += [(claim, request) for claim, request in by_claim if claim and request]
    for pair, count in Counter(requests).items():
        if count > 1:
            yield _refused("claim-request-twice", f"{'/'.join(pair)} {count} times")
    listed = vmi.listed("resourceClaims")
    known = Counter(_text(one, "name") or "" for one in listed)
    missing = sorted({pair[0] for pair in requests} - set(known))
    twice = sorted(name for name, count in known.items() if count > 1)
    if missing or twice:
        said = [f"no {name}" for name in missing] + [f"{name} more than once" for name in twice]
        yield _refused("claim-not-listed", ", ".join(said))
    if cluster is not None and cluster.version is not None and cluster.version >= (1, 9):
        for one in listed:
            sources = ("resourceClaimName", "resourceClaimTemplateName")
            if sum(down(one, source) is not None for source in sources) != 1:
                yield _refused("claim-source", f"{down(one, 'name')} with none or both")


def _machine(vmi: Vmi, cluster: Cluster) -> Iterator[Finding]:
    machine = _text(vmi.at("domain", "machine"), "type")
    machine = machine or cluster.default_machine(_architecture(vmi))
    allowed = cluster.machines_of(_architecture(vmi))
    if not any(fnmatchcase(machine, one) for one in allowed):
        yield _refused("machine-type", f"{machine}, of {', '.join(allowed)}")
    elif machine.startswith("q35") and machine != "q35":
        yield finding(
            "machine-misspelt",
            "spec.domain.machine.type",
            expected="q35 or pc-q35-VERSION",
            observed=f"{machine}, which QEMU does not have: the VM does not start",
            source="QEMU, hw/i386/pc_q35.c",
        )


def _architecture(vmi: Vmi) -> str:
    return _text(vmi.spec, "architecture") or "amd64"


def _is_on(switch: Any) -> bool:
    """Whether a feature such as smm is on: where it is there and not disabled."""
    return switch is not None and down(switch, "enabled") is not False


def _has_secure_boot(vmi: Vmi) -> bool:
    """On by default but on arm64, where KubeVirt sets it to false."""
    efi = vmi.at("domain", "firmware", "bootloader", "efi")
    secure = down(efi, "secureBoot")
    return efi is not None and (_architecture(vmi) != "arm64" if secure is None else secure)


def _firmware(vmi: Vmi) -> Iterator[Finding]:
    loader = vmi.at("domain", "firmware", "bootloader")
    efi, bios = down(loader, "efi"), down(loader, "bios")
    if bios is not None and (efi is not None or _architecture(vmi) == "arm64"):
        yield _refused("bootloader-wrong", "bios" if efi is None else "both")
    if _has_secure_boot(vmi) and not _is_on(vmi.at("domain", "features", "smm")):
        yield _refused("secure-boot-without-smm", "Secure Boot without SMM")


def _launch_security(vmi: Vmi, cluster: Cluster | None) -> Iterator[Finding]:
    security, architecture = vmi.at("domain", "launchSecurity"), _architecture(vmi)
    if security is None:
        return
    kinds = [kind for kind in _ENCRYPTION_GATES if down(security, kind) is not None]
    gate = "SecureExecution" if architecture == "s390x" else None
    if gate is None and (architecture != "amd64" or len(kinds) != 1):
        yield _refused("launch-security-kind", f"{', '.join(kinds) or 'none'} on {architecture}")
        return
    gate = gate or _ENCRYPTION_GATES[kinds[0]]
    if cluster is not None and not cluster.has_gate(gate):
        yield _refused("gate-encryption-off", f"{gate} off")
    if architecture != "amd64":
        return
    kind, efi = kinds[0], vmi.at("domain", "firmware", "bootloader", "efi")
    if efi is None:
        yield _refused("launch-security-without-efi", "no efi")
    attested = kind == "sev" and down(security, "sev", "attestation") is not None
    conflicts = {
        "Secure Boot": kind != "tdx" and _has_secure_boot(vmi),
        "persistent": kind != "sev" and down(efi, "persistent") is True,
        "SMM": kind == "tdx" and _is_on(vmi.at("domain", "features", "smm")),
        "attestation": attested and vmi.at("startStrategy") != "Paused",
        "bootOrder": any(
            down(one, "bootOrder") is not None
            for one in vmi.listed("domain", "devices", "interfaces")
        ),
    }
    if any(conflicts.values()):
        found = ", ".join(what for what, is_there in conflicts.items() if is_there)
        yield _refused("launch-security-conflict", f"{kind} with {found}")


def _permitted(vmi: Vmi, cluster: Cluster) -> Iterator[Finding]:
    if cluster.permitted is None:
        return
    groups = ("hostDevices",) if cluster.has_gate("GPUsWithDRA") else ("gpus", "hostDevices")
    for group in groups:
        names = [down(one, "deviceName") for one in vmi.listed("domain", "devices", group)]
        for name in sorted({name for name in names if isinstance(name, str)}):
            if name not in cluster.permitted:
                yield finding(
                    "device-not-permitted",
                    f"{group}: {name}",
                    expected="an entry of spec.configuration.permittedHostDevices in the "
                    "KubeVirt CR",
                    observed="none: virt-controller makes no pod for the VMI (FailedCreate)",
                    source="KubeVirt, renderresources.go: validatePermittedHostDevices",
                )
