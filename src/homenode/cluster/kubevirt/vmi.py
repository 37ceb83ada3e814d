"""Vmi: a VirtualMachineInstance: what it says, what it asks of a node, and the pod that it becomes.

Source: kubevirt.io/api/core/v1, VirtualMachineInstanceSpec; `kubectl get vmi NAME -o json`;
virt-controller/services (renderresources.go, template.go) and hypervisor/kvm (GetMemoryOverhead) of
KubeVirt 1.8.4.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cluster.pods.objects import down, read_object
from homenode.cluster.pods.pod import MEMORY, Container, Pod
from homenode.cluster.pods.quantity import parse_quantity
from homenode.errors import InputError, ParseError
from homenode.units import GIB, MIB

_NOTHING: Mapping[str, Any] = {}
_TYPES: Mapping[str, type] = {
    "cpu": dict,
    "cpu.cores": int,
    "cpu.sockets": int,
    "cpu.threads": int,
    "cpu.maxSockets": int,
    "cpu.features": list,
    "memory": dict,
    "memory.hugepages": dict,
    "resources": dict,
    "resources.requests": dict,
    "resources.limits": dict,
    "devices": dict,
    "devices.gpus": list,
    "devices.hostDevices": list,
    "devices.interfaces": list,
}
"""Of what is below spec.domain: the API server refuses others."""


class Vmi(Struct, frozen=True):
    """A VMI, or the template of a VM.

    spec: as given. annotations: name -> text. guest_addresses: guest PCI addresses that the user
    asked for by name (`pciAddress`), as written; such a device stays where it is. instancetype: of
    the instance type or preference that a VM takes CPUs and devices from.
    """

    name: str
    spec: Mapping[str, Any]
    annotations: Mapping[str, str]
    guest_addresses: frozenset[tuple[int, int, int, int]]
    instancetype: str | None = None

    def at(self, *path: str) -> Any:
        """What is down a path of names in the spec; None where it is not there."""
        return down(self.spec, *path)


def read_vmi(text: str | bytes, source: str, *, needs_domain: bool = False) -> Vmi:
    """The VMI of its JSON; a VirtualMachine gives its template.

    needs_domain: refuse one without spec.domain, which every VMI of a cluster has.
    Raises InputError for what is no such object.
    """
    document = read_object(text, source, "a VirtualMachineInstance")
    return vmi_of(document, source, needs_domain=needs_domain)


def vmi_of(document: Mapping[str, Any], source: str, *, needs_domain: bool = False) -> Vmi:
    """The VMI of a parsed document. Raises InputError."""
    kind = document.get("kind")
    if kind not in (None, "", "VirtualMachineInstance", "VirtualMachine"):
        raise InputError(
            f"{source}: expected a VirtualMachineInstance or a VirtualMachine, found {kind!r}",
            hint="try: kubectl get vmi NAME -o json",
        )
    metadata = _mapping(document.get("metadata"), source, "metadata")
    whole = _mapping(document.get("spec"), source, "spec")
    template = whole.get("template")
    names = [down(whole, kind, "name") for kind in ("instancetype", "preference")]
    given = next((name for name in names if isinstance(name, str)), None)
    if template is not None:
        template = _mapping(template, source, "spec.template")
        inner = _mapping(template.get("metadata"), source, "spec.template.metadata")
        annotations = _texts(inner.get("annotations"), source)
        whole = _mapping(template.get("spec"), source, "spec.template.spec")
    else:
        annotations = _texts(metadata.get("annotations"), source)
    if needs_domain and not isinstance(whole.get("domain"), dict):
        found = ", ".join(list(document)[:8]) or "an empty object"
        raise InputError(
            f"{source}: expected a VirtualMachineInstance or a VirtualMachine with spec.domain, "
            f"found {found[:200]}",
            hint="try: kubectl get vmi NAME -o json",
        )
    if needs_domain:
        _check_types(whole["domain"], source)
    return Vmi(
        name=str(metadata.get("name") or "unnamed"),
        spec=whole,
        annotations=annotations,
        guest_addresses=frozenset(_addresses(whole, source)),
        instancetype=given,
    )


_WORDS = {dict: "an object", list: "a list", int: "a whole number"}


def _check_types(domain: Mapping[str, Any], source: str) -> None:
    for path, expected in _TYPES.items():
        value = down(domain, *path.split("."))
        if value is not None and type(value) is not expected:
            raise InputError(
                f"{source}: expected spec.domain.{path} to be {_WORDS[expected]}, found "
                f"{type(value).__name__}"
            )


def _mapping(value: Any, source: str, what: str) -> Mapping[str, Any]:
    if value is None:
        return _NOTHING
    if not isinstance(value, dict):
        raise InputError(f"{source}: expected {what} to be an object, found {type(value).__name__}")
    return value


def _texts(value: Any, source: str) -> Mapping[str, str]:
    annotations = _mapping(value, source, "annotations")
    return {name: text for name, text in annotations.items() if isinstance(text, str)}


def _addresses(spec: Mapping[str, Any], source: str) -> list[tuple[int, int, int, int]]:
    """Every pciAddress of interfaces and disks. Raises InputError."""
    devices = down(spec, "domain", "devices")
    found: list[tuple[int, int, int, int]] = []
    for group in ("interfaces", "disks"):
        members = down(devices, group)
        for member in members if isinstance(members, list) else ():
            for owner in (member, down(member, "disk"), down(member, "lun")):
                text = down(owner, "pciAddress")
                if isinstance(text, str) and text:
                    found.append(_address(text, source, group))
    return found


def _address(text: str, source: str, group: str) -> tuple[int, int, int, int]:
    try:
        at = Bdf.parse(text)
    except ParseError:
        raise InputError(
            f"{source}: expected a pciAddress in {group} such as 0000:81:00.1, found {text[:60]!r}"
        ) from None
    return at.domain, at.bus, at.device, at.function


HOOK_ANNOTATION = "hooks.kubevirt.io/hookSidecars"
EVEN_ANNOTATION = "alpha.kubevirt.io/EmulatorThreadCompleteToEvenParity"
"""QEMU's own threads get two PUs where one would make the sum odd. KubeVirt puts it on VMIs itself
where the gate AlignCPUs is on and the KubeVirt CR has it.

Source: KubeVirt, virt-controller/services/renderresources.go, WithCPUPinning.
"""


class Demand(Struct, frozen=True):
    """vcpus: of the guest. threads: of its topology. pus: dedicated ones asked of kubelet, those of
    the emulator and of a pool of IOThreads included. memory_bytes, page_bytes: None where not said.
    most_memory_bytes: to which memory may be plugged in while it runs; None = it is not to grow.
    gpus: how many, of any kind. passed: functions of the host, GPUs and SR-IOV NICs among them.
    """

    vcpus: int
    threads: int
    pus: int
    dedicated: bool
    emulator_apart: bool
    mapped: bool
    memory_bytes: int | None
    most_memory_bytes: int | None
    page_bytes: int | None
    gpus: int
    passed: int
    hooked: bool


def demand_of(vmi: Vmi) -> Demand:
    """The demand of a VMI. Raises ParseError for a quantity that is none."""
    cpu = vmi.at("domain", "cpu")
    counts = [_count(down(cpu, name), name) for name in ("sockets", "cores", "threads")]
    vcpus = 1
    for count in counts:
        vcpus *= count or 1
    if not any(counts):
        asked = vmi.at("domain", "resources", "limits", "cpu") or vmi.at(
            "domain", "resources", "requests", "cpu"
        )
        vcpus = vcpus if asked is None else parse_quantity(asked, "resources.cpu")
    memory = vmi.at("domain", "memory", "guest")
    for kind in ("limits", "requests"):
        memory = memory or vmi.at("domain", "resources", kind, "memory")
    page = vmi.at("domain", "memory", "hugepages", "pageSize")
    gpus = _listed(vmi, "gpus")
    nics = [one for one in _listed(vmi, "interfaces") if down(one, "sriov") is not None]
    emulator_apart = bool(down(cpu, "isolateEmulatorThread"))
    pus = vcpus + _pool(vmi)
    if emulator_apart:
        pus += 2 if EVEN_ANNOTATION in vmi.annotations and pus % 2 == 0 else 1
    size = None if memory is None else parse_quantity(memory, "memory")
    most = vmi.at("domain", "memory", "maxGuest")
    most_bytes = None if most is None else parse_quantity(most, "memory.maxGuest")
    return Demand(
        vcpus=vcpus,
        threads=counts[2] or 1,
        pus=pus,
        dedicated=bool(down(cpu, "dedicatedCpuPlacement")),
        emulator_apart=emulator_apart,
        mapped=down(cpu, "numa", "guestMappingPassthrough") is not None,
        memory_bytes=size,
        most_memory_bytes=most_bytes if most_bytes and most_bytes > (size or 0) else None,
        page_bytes=None if page is None else parse_quantity(page, "memory.hugepages.pageSize"),
        gpus=len(gpus),
        passed=len(gpus) + len(_listed(vmi, "hostDevices")) + len(nics),
        hooked=HOOK_ANNOTATION in vmi.annotations,
    )


def _listed(vmi: Vmi, name: str) -> list[Any]:
    found = vmi.at("domain", "devices", name)
    return found if isinstance(found, list) else []


def _pool(vmi: Vmi) -> int:
    """IOThreads with PUs of their own."""
    if vmi.at("domain", "ioThreadsPolicy") != "supplementalPool":
        return 0
    threads = vmi.at("domain", "ioThreads", "supplementalPoolThreadCount")
    return 0 if threads is None else parse_quantity(threads, "ioThreads")


def _count(value: Any, name: str) -> int:
    return 0 if value is None else parse_quantity(value, f"cpu.{name}")


_FIXED_MIB = 25 + 100 + 25 + 40 + 30
"""virt-launcher-monitor, virt-launcher, virtlogd, virtqemud, QEMU."""
_SIDECAR = {"cpu": 200, MEMORY: 64_000_000}


def launcher_pod(vmi: Vmi) -> Pod:
    """The virt-launcher pod: QEMU's container, and one for each hook. Raises ParseError.

    Memory is KubeVirt's estimate for QEMU and its own processes, and the guest's where it is not
    in huge pages.
    """
    demand = demand_of(vmi)
    overhead = _overhead_bytes(vmi, demand.vcpus, demand.passed > 0, demand.dedicated)
    guest = demand.memory_bytes or 0
    page = vmi.at("domain", "memory", "hugepages", "pageSize")
    memory = {MEMORY: overhead + (0 if page else guest)}
    if page:
        memory[f"hugepages-{page}"] = guest
    devices: dict[str, int] = {}
    for group in ("gpus", "hostDevices"):
        listed = vmi.at("domain", "devices", group)
        for device in listed if isinstance(listed, list) else ():
            name = down(device, "deviceName")
            if isinstance(name, str):
                devices[name] = devices.get(name, 0) + 1
    compute = Container(
        name="compute",
        cpu_milli=1000 * demand.pus,
        memory_bytes=memory,
        devices=devices,
        is_guaranteed=demand.dedicated,
    )
    hooks = [
        Container(
            name=f"hook-sidecar-{i}",
            cpu_milli=_SIDECAR["cpu"],
            memory_bytes={MEMORY: _SIDECAR[MEMORY]},
        )
        for i in range(1 if HOOK_ANNOTATION in vmi.annotations else 0)
    ]
    return Pod(name=f"virt-launcher-{vmi.name}", containers=(compute, *hooks))


def _overhead_bytes(vmi: Vmi, vcpus: int, passed: bool, dedicated: bool) -> int:
    requested: Any = vmi.at("domain", "resources", "requests", "memory")
    tables = 0 if requested is None else parse_quantity(requested, "resources.memory") // 512
    mib = _FIXED_MIB + 8 * max(1, vcpus) + 8
    mib += 0 if vmi.at("domain", "devices", "autoattachGraphicsDevice") is False else 32
    mib += 128 if vmi.at("architecture") == "arm64" else 0
    mib += 53 if vmi.at("domain", "devices", "tpm") is not None else 0
    mib += 100 if dedicated else 0
    return tables + mib * MIB + (GIB if passed else 0)
