"""AdmissionRules: why KubeVirt's admission refuses a VMI, as far as CPUs, memory, devices, hook go.

Rules are those of v1.6 to v1.9, of the VMI with the defaults that KubeVirt's own webhook sets
first; the order is that of the admitter. Devices that are not permitted pass admission:
virt-controller then makes no pod.

Source: KubeVirt pkg/defaults/defaults.go, vmi-create-admitter.go
(ValidateVirtualMachineInstanceSpec and what it calls), renderresources.go
(validatePermittedHostDevices).
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from homenode.errors import ParseError
from homenode.findings import Finding, Severity
from homenode.kubevirt.cluster import Cluster
from homenode.kubevirt.demand import HOOK_ANNOTATION
from homenode.kubevirt.vmi import Vmi
from homenode.pods.objects import down
from homenode.pods.quantity import parse_milli, parse_quantity

SOURCE = "KubeVirt's admission of a VMI"
_CPU = "spec.domain.cpu"
_MAPPING = f"{_CPU}.numa.guestMappingPassthrough"
_MEMORY = "spec.domain.memory"
_REQUESTS = "spec.domain.resources.requests"
_POLICIES = ("shared", "auto", "supplementalPool")
_FEATURES = ("", "force", "require", "optional", "disable", "forbid")
_DEDICATED = ("dedicatedCpuPlacement with it", "set dedicatedCpuPlacement: true")
_LEAST_MEMORY = 10**6

_RULES = {
    "memory-missing": (f"{_MEMORY}.guest", "a size", f"set {_MEMORY}.guest"),
    "memory-too-small": (f"{_REQUESTS}.memory", "at least 1M", "raise it"),
    "memory-above-limit": (
        f"{_REQUESTS}.memory",
        "at most the limit",
        "make requests and limits equal",
    ),
    "huge-page-size-wrong": (
        f"{_MEMORY}.hugepages.pageSize",
        "a size such as 1Gi",
        "set 2Mi or 1Gi",
    ),
    "huge-pages-not-whole": (
        f"{_MEMORY}.guest",
        "a multiple of the page size",
        "take a multiple of the page size",
    ),
    "dedicated-without-memory": (
        f"{_CPU}.dedicatedCpuPlacement",
        "memory as well",
        f"set {_MEMORY}.guest",
    ),
    "memory-limit-differs": (
        f"{_REQUESTS}.memory",
        "equal to the limit with dedicated CPUs",
        "make them equal",
    ),
    "cpus-fractional": ("spec.domain.resources", "a whole number of CPUs", "round it up"),
    "cpu-limit-differs": (
        f"{_REQUESTS}.cpu",
        "equal to the limit with dedicated CPUs",
        "make them equal",
    ),
    "cpus-given-twice": (
        f"{_REQUESTS}.cpu",
        "as many as cores, sockets and threads make",
        "leave resources.cpu out",
    ),
    "cpus-above-limit": (f"{_REQUESTS}.cpu", "at most the limit", "lower the request"),
    "emulator-without-dedicated-cpus": (f"{_CPU}.isolateEmulatorThread", *_DEDICATED),
    "sockets-above-most": (f"{_CPU}.sockets", "at most maxSockets", "raise maxSockets"),
    "cpu-feature-policy": (
        f"{_CPU}.features",
        "a policy: " + ", ".join(_FEATURES[1:]),
        "choose one of them",
    ),
    "cpu-model": (f"{_CPU}.model", "host-passthrough on arm64", "set host-passthrough"),
    "realtime-without-dedicated-cpus": (f"{_CPU}.realtime", *_DEDICATED),
    "realtime-without-mapping": (
        f"{_CPU}.realtime",
        "guestMappingPassthrough with it",
        "set numa: {guestMappingPassthrough: {}}",
    ),
    "mapping-without-dedicated-cpus": (_MAPPING, *_DEDICATED),
    "mapping-without-huge-pages": (
        _MAPPING,
        "memory.hugepages with it",
        f"set {_MEMORY}.hugepages.pageSize",
    ),
    "threads-many": (
        f"{_CPU}.threads",
        "at most 2 with dedicated CPUs, 1 on arm64",
        "set threads: 1 and as many more cores",
    ),
    "iothreads-policy": ("spec.domain.ioThreadsPolicy", ", ".join(_POLICIES), "choose one of them"),
    "iothreads-count": (
        "spec.domain.ioThreads.supplementalPoolThreadCount",
        "a positive number with supplementalPool",
        "set it",
    ),
    "gate-sidecar-off": (
        "feature gate Sidecar",
        "on, for the hook",
        "homenode kubevirt manifest writes the patch",
    ),
    "gate-host-devices-off": (
        "feature gate HostDevices",
        "on, for hostDevices",
        "add it to spec.configuration.developerConfiguration.featureGates",
    ),
}
"""By the id of a finding: its subject, what is expected, the fix."""


def admission_findings(vmi: Vmi, cluster: Cluster | None) -> Iterator[Finding]:
    """One for each cause that the admitter gives. cluster: None = not given, gates not judged."""
    yield from _memory(vmi)
    yield from _cpu(vmi)
    if down(vmi.spec, "domain", "cpu", "dedicatedCpuPlacement") is True:
        yield from _dedicated(vmi)
    yield from _needing(vmi)
    yield from _iothreads(vmi)
    if cluster is not None:
        if vmi.annotations.get(HOOK_ANNOTATION) and not cluster.has_gate("Sidecar"):
            yield _refused("gate-sidecar-off", "off")
        if vmi.at("domain", "devices", "hostDevices") and not cluster.has_gate("HostDevices"):
            yield _refused("gate-host-devices-off", "off")
        yield from _permitted(vmi, cluster)


def _refused(id: str, observed: Any) -> Finding:
    subject, expected, fix = _RULES[id]
    return Finding(
        id=id,
        severity=Severity.CRITICAL,
        subject=subject,
        expected=expected,
        observed=f"{observed}: the VMI is refused",
        fix=fix,
        source=SOURCE,
    )


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
    cpu = vmi.at("domain", "cpu")
    counts = [
        0 if (count := down(cpu, name)) is None else parse_quantity(count, f"cpu.{name}")
        for name in ("sockets", "cores", "threads")
    ]
    if not any(counts):
        requests, limits = _resources(vmi, "cpu")
        counts[0] = -(-(limits or requests) // 1000) or 1
    return counts[0], prod(count or 1 for count in counts)


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
        yield _refused("huge-pages-not-whole", f"{stated or size // 1000} of {pages['pageSize']}")


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
    features = down(cpu, "features")
    for feature in features if isinstance(features, list) else ():
        if (down(feature, "policy") or "") not in _FEATURES:
            yield _refused("cpu-feature-policy", f"{down(feature, 'name')}: {feature['policy']}")
    is_arm = vmi.at("architecture") == "arm64"
    model = down(cpu, "model")
    if is_arm and model and model != "host-passthrough":
        yield _refused("cpu-model", model)
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


def _permitted(vmi: Vmi, cluster: Cluster) -> Iterator[Finding]:
    if cluster.permitted is None:
        return
    groups = ("hostDevices",) if cluster.has_gate("GPUsWithDRA") else ("gpus", "hostDevices")
    for group in groups:
        listed = vmi.at("domain", "devices", group)
        names = (
            [down(device, "deviceName") for device in listed] if isinstance(listed, list) else []
        )
        for name in sorted({name for name in names if isinstance(name, str)}):
            if name not in cluster.permitted:
                yield Finding(
                    id="device-not-permitted",
                    severity=Severity.CRITICAL,
                    subject=f"{group}: {name}",
                    expected="an entry of spec.configuration.permittedHostDevices in the "
                    "KubeVirt CR",
                    observed="none: virt-controller makes no pod for the VMI (FailedCreate)",
                    fix="homenode kubevirt manifest writes permitted-devices.yaml",
                    source="KubeVirt, renderresources.go: validatePermittedHostDevices",
                )
