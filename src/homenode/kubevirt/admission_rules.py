"""AdmissionRules: why KubeVirt's admission refuses a VMI, as far as CPUs, memory, devices, hook go.

Rules are those of v1.6 to v1.9; the order is that of the admitter. Devices that no one permits pass
admission: virt-controller then makes no pod.

Source: KubeVirt vmi-create-admitter.go (ValidateVirtualMachineInstanceSpec and what it calls),
renderresources.go (validatePermittedHostDevices).
"""

from collections.abc import Iterator
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
_POLICIES = ("shared", "auto", "supplementalPool")
_FEATURES = ("", "force", "require", "optional", "disable", "forbid")


def admission_findings(vmi: Vmi, cluster: Cluster | None) -> Iterator[Finding]:
    """One for each cause that the admitter gives. cluster: None = not given, gates not judged."""
    yield from _memory(vmi)
    if down(vmi.spec, "domain", "cpu", "dedicatedCpuPlacement") is True:
        yield from _dedicated(vmi)
    yield from _cpu(vmi)
    yield from _mapping(vmi)
    yield from _threads(vmi)
    if cluster is not None:
        yield from _gates(vmi, cluster)
        yield from _permitted(vmi, cluster)


def _refused(
    id: str, subject: str, expected: str, observed: str, fix: str, source: str = SOURCE
) -> Finding:
    observed = f"{observed}: the VMI is refused"
    return Finding(
        id=id,
        severity=Severity.CRITICAL,
        subject=subject,
        expected=expected,
        observed=observed,
        fix=fix,
        source=source,
    )


def _number(vmi: Vmi, *path: str) -> int:
    """Thousandths of a quantity; 0 where it is not there."""
    value = vmi.at(*path)
    return 0 if value is None else parse_milli(value, "spec." + ".".join(path))


def vcpus_of(cpu: Any) -> int:
    """As KubeVirt counts them: the product of those that are set; 0 where none is."""
    total = 0
    for name in ("cores", "sockets", "threads"):
        count = down(cpu, name)
        number = 0 if count is None else parse_quantity(count, f"cpu.{name}")
        total = number if total == 0 else total * (number or 1)
    return total


def _memory(vmi: Vmi) -> Iterator[Finding]:
    guest = _number(vmi, "domain", "memory", "guest")
    requests, limits = (
        _number(vmi, "domain", "resources", kind, "memory") for kind in ("requests", "limits")
    )
    pages = vmi.at("domain", "memory", "hugepages")
    if not requests and vmi.at("domain", "memory", "guest") is None and pages is None:
        yield _refused(
            "memory-missing",
            "spec.domain.memory.guest",
            "a size",
            "no memory requested",
            "set spec.domain.memory.guest",
        )
    if requests and limits and requests > limits:
        yield _refused(
            "memory-above-limit",
            "spec.domain.resources.requests.memory",
            "at most the limit",
            "more",
            "make requests and limits equal",
        )
    if pages is None:
        return
    try:
        page = parse_milli(down(pages, "pageSize"), "pageSize")
    except ParseError:
        page = 0
    if page <= 0:
        yield _refused(
            "huge-page-size-wrong",
            "spec.domain.memory.hugepages.pageSize",
            "a size such as 1Gi",
            repr(down(pages, "pageSize")),
            "set 2Mi or 1Gi",
        )
        return
    size = requests or guest or limits
    if size % page or (size and size < page):
        yield _refused(
            "huge-pages-not-whole",
            "spec.domain.memory.guest",
            f"a multiple of the page size {down(pages, 'pageSize')}",
            str(vmi.at("domain", "memory", "guest") or size // 1000),
            "take a multiple of the page size",
        )


def _dedicated(vmi: Vmi) -> Iterator[Finding]:
    cpu = vmi.at("domain", "cpu")
    requests, limits = (
        _number(vmi, "domain", "resources", kind, "cpu") for kind in ("requests", "limits")
    )
    memory = [
        _number(vmi, "domain", "resources", kind, "memory") for kind in ("requests", "limits")
    ]
    if (
        not any(memory)
        and vmi.at("domain", "memory", "hugepages") is None
        and not _number(vmi, "domain", "memory", "guest")
    ):
        yield _refused(
            "dedicated-without-memory",
            f"{_CPU}.dedicatedCpuPlacement",
            "memory as well",
            "none",
            "set spec.domain.memory.guest",
        )
    if all(memory) and memory[0] != memory[1]:
        yield _refused(
            "memory-limit-differs",
            "spec.domain.resources.requests.memory",
            "equal to the limit with dedicated CPUs",
            "another size",
            "make them equal",
        )
    for kind, value in (("requests", requests), ("limits", limits)):
        if value % 1000:
            yield _refused(
                "cpus-fractional",
                f"spec.domain.resources.{kind}.cpu",
                "a whole number",
                f"{value}m",
                "round it up",
            )
    vcpus = 1000 * vcpus_of(cpu)
    whole = [-(-value // 1000) * 1000 for value in (requests, limits)]
    if not any(whole) and not vcpus:
        yield _refused(
            "dedicated-without-cpus",
            f"{_CPU}.cores",
            "CPUs to dedicate",
            "none",
            "set cores",
        )
    if all(whole) and whole[0] != whole[1]:
        yield _refused(
            "cpu-limit-differs",
            "spec.domain.resources.requests.cpu",
            "equal to the limit with dedicated CPUs",
            "another number",
            "make them equal",
        )
    if any(whole) and vcpus and vcpus not in whole:
        yield _refused(
            "cpus-given-twice",
            "spec.domain.resources.requests.cpu",
            f"{vcpus // 1000}, as cores, sockets and threads make",
            "another number",
            "leave resources.cpu out",
        )


def _cpu(vmi: Vmi) -> Iterator[Finding]:
    cpu = vmi.at("domain", "cpu")
    dedicated = down(cpu, "dedicatedCpuPlacement") is True
    requests, limits = (
        _number(vmi, "domain", "resources", kind, "cpu") for kind in ("requests", "limits")
    )
    if limits and requests > limits:
        yield _refused(
            "cpus-above-limit",
            "spec.domain.resources.requests.cpu",
            "at most the limit",
            "more",
            "lower the request",
        )
    if down(cpu, "isolateEmulatorThread") is True and not dedicated:
        yield _refused(
            "emulator-without-dedicated-cpus",
            f"{_CPU}.isolateEmulatorThread",
            "dedicatedCpuPlacement with it",
            "none",
            "set dedicatedCpuPlacement: true",
        )
    most = down(cpu, "maxSockets")
    sockets = down(cpu, "sockets")
    if isinstance(most, int) and isinstance(sockets, int) and most and sockets > most:
        yield _refused(
            "sockets-above-most",
            f"{_CPU}.sockets",
            f"at most maxSockets, {most}",
            str(sockets),
            "raise maxSockets",
        )
    features = down(cpu, "features")
    for feature in features if isinstance(features, list) else ():
        if (down(feature, "policy") or "") not in _FEATURES:
            yield _refused(
                "cpu-feature-policy",
                f"{_CPU}.features {down(feature, 'name')}",
                "a policy: " + ", ".join(_FEATURES[1:]),
                str(down(feature, "policy")),
                "choose one of them",
            )
    if down(cpu, "realtime") is not None:
        if not dedicated:
            yield _refused(
                "realtime-without-dedicated-cpus",
                f"{_CPU}.realtime",
                "dedicatedCpuPlacement with it",
                "none",
                "set dedicatedCpuPlacement: true",
            )
        if down(cpu, "numa", "guestMappingPassthrough") is None:
            yield _refused(
                "realtime-without-mapping",
                f"{_CPU}.realtime",
                "guestMappingPassthrough with it",
                "none",
                "set numa: {guestMappingPassthrough: {}}",
            )


def _mapping(vmi: Vmi) -> Iterator[Finding]:
    where = f"{_CPU}.numa.guestMappingPassthrough"
    if down(vmi.spec, "domain", "cpu", "numa", "guestMappingPassthrough") is None:
        return
    if down(vmi.spec, "domain", "cpu", "dedicatedCpuPlacement") is not True:
        yield _refused(
            "mapping-without-dedicated-cpus",
            where,
            "dedicatedCpuPlacement with it",
            "none",
            "set dedicatedCpuPlacement: true",
        )
    if vmi.at("domain", "memory", "hugepages") is None:
        yield _refused(
            "mapping-without-huge-pages",
            where,
            "memory.hugepages with it",
            "none",
            "set spec.domain.memory.hugepages.pageSize",
        )


def _threads(vmi: Vmi) -> Iterator[Finding]:
    cpu = vmi.at("domain", "cpu")
    threads = down(cpu, "threads")
    if down(cpu, "dedicatedCpuPlacement") is True and isinstance(threads, int):
        is_arm = vmi.at("architecture") == "arm64"
        if threads > 2 or (threads > 1 and is_arm):
            yield _refused(
                "threads-many",
                f"{_CPU}.threads",
                "1 on arm64" if is_arm else "at most 2 with dedicated CPUs",
                str(threads),
                "set threads: 1 and as many more cores",
            )
    policy = vmi.at("domain", "ioThreadsPolicy")
    if policy is not None and policy not in _POLICIES:
        yield _refused(
            "iothreads-policy",
            "spec.domain.ioThreadsPolicy",
            ", ".join(_POLICIES),
            str(policy),
            "choose one of them",
        )
    count = vmi.at("domain", "ioThreads", "supplementalPoolThreadCount")
    if policy == "supplementalPool" and not (isinstance(count, int) and count > 0):
        yield _refused(
            "iothreads-count",
            "spec.domain.ioThreads.supplementalPoolThreadCount",
            "a positive number with supplementalPool",
            str(count),
            "set it",
        )


def _gates(vmi: Vmi, cluster: Cluster) -> Iterator[Finding]:
    source = "KubeVirt, feature gates"
    if vmi.annotations.get(HOOK_ANNOTATION) and not cluster.has_gate("Sidecar"):
        yield _refused(
            "gate-sidecar-off",
            "feature gate Sidecar",
            "on, for the hook",
            "off",
            "homenode kubevirt manifest writes the patch",
            source,
        )
    if vmi.at("domain", "devices", "hostDevices") is not None and not cluster.has_gate(
        "HostDevices"
    ):
        yield _refused(
            "gate-host-devices-off",
            "feature gate HostDevices",
            "on, for hostDevices",
            "off",
            "add it to spec.configuration.developerConfiguration.featureGates",
            source,
        )


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
