"""Vmi: the settings of a VirtualMachineInstance, and its requests to a node.

Source: kubevirt.io/api/core/v1, VirtualMachineInstanceSpec; `kubectl get vmi NAME -o json`;
virt-controller/services/renderresources.go of KubeVirt 1.8.4.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.kubevirt.object import find_value, parse_quantity, read_object
from homenode.errors import InputError, ParseError
from homenode.text import command_line
from homenode.vm.model import Vm

_NOTHING: Mapping[str, Any] = {}
_TYPES: Mapping[str, type] = {
    "cpu": dict,
    "cpu.cores": int,
    "cpu.sockets": int,
    "cpu.threads": int,
    "cpu.maxSockets": int,
    "cpu.features": list,
    "cpu.model": str,
    "cpu.dedicatedCpuPlacement": bool,
    "cpu.isolateEmulatorThread": bool,
    "cpu.numa": dict,
    "cpu.numa.guestMappingPassthrough": dict,
    "memory": dict,
    "memory.hugepages": dict,
    "machine": dict,
    "machine.type": str,
    "resources": dict,
    "resources.requests": dict,
    "resources.limits": dict,
    "devices": dict,
    "devices.gpus": list,
    "devices.hostDevices": list,
    "devices.interfaces": list,
}
"""Types of the fields below spec.domain: the API server rejects others."""


HOOK_ANNOTATION = "hooks.kubevirt.io/hookSidecars"
EVEN_ANNOTATION = "alpha.kubevirt.io/EmulatorThreadCompleteToEvenParity"
"""QEMU's own threads get two CPUs if one CPU would make the sum odd. KubeVirt sets it on VMIs if
the gate AlignCPUs is on and the KubeVirt CR has it.

Source: KubeVirt, virt-controller/services/renderresources.go, WithCPUPinning.
"""


class Vmi(Struct, frozen=True):
    """A VMI, or the template of a VM."""

    name: str
    namespace: str  # "" = that of the user's context
    spec: Mapping[str, Any]  # as given
    annotations: Mapping[str, str]  # name -> text
    # guest PCI addresses that the user set by name (`pciAddress`), as written; such a device keeps
    # its place
    guest_addresses: frozenset[tuple[int, int, int, int]]
    host_device_gpus: int = 0  # number of GPUs under hostDevices; 0 also if unknown

    def get(self, *path: str) -> Any:
        """Return the value at a path of names in the spec; None if it is not there."""
        return find_value(self.spec, *path)

    def list_at(self, *path: str) -> list[Any]:
        """Return the list at a path; empty if there is none."""
        members = self.get(*path)
        return members if isinstance(members, list) else []

    @property
    def is_dedicated(self) -> bool:
        return bool(self.get("domain", "cpu", "dedicatedCpuPlacement"))

    @property
    def is_emulator_apart(self) -> bool:
        return bool(self.get("domain", "cpu", "isolateEmulatorThread"))

    @property
    def is_mapped(self) -> bool:
        """Whether the guest gets cells."""
        return self.get("domain", "cpu", "numa", "guestMappingPassthrough") is not None

    @property
    def is_hooked(self) -> bool:
        return HOOK_ANNOTATION in self.annotations

    @property
    def gpus(self) -> list[Any]:
        """GPUs of any kind, as given."""
        return self.list_at("domain", "devices", "gpus")

    @property
    def gpu_count(self) -> int:
        return len(self.gpus) + self.host_device_gpus

    @property
    def passed_count(self) -> int:
        """Number of passed-through functions, including GPUs and SR-IOV NICs."""
        nics = self.list_at("domain", "devices", "interfaces")
        count = len(self.list_at("domain", "devices", "hostDevices"))
        return len(self.gpus) + count + sum(find_value(nic, "sriov") is not None for nic in nics)

    @property
    def dedicated_pus(self) -> int:
        """Number of CPUs requested from the kubelet, with those of the emulator and IOThreads."""
        pool = self.get("domain", "ioThreads", "supplementalPoolThreadCount")
        has_pool = self.get("domain", "ioThreadsPolicy") == "supplementalPool" and pool is not None
        pus = build_guest(self).vcpus + (parse_quantity(pool, "ioThreads") if has_pool else 0)
        if self.is_emulator_apart:
            pus += 2 if EVEN_ANNOTATION in self.annotations and pus % 2 == 0 else 1
        return pus


def dedicate_cpus(vmi: Vmi) -> Vmi:
    """Return the VMI with dedicated CPUs for vCPUs and emulator, and the cells of their nodes."""
    domain = vmi.get("domain") or {}
    cpu = {
        **(domain.get("cpu") or {}),
        "dedicatedCpuPlacement": True,
        "isolateEmulatorThread": True,
        "numa": {"guestMappingPassthrough": {}},
    }
    return replace(vmi, spec={**vmi.spec, "domain": {**domain, "cpu": cpu}})


def read_vmi(text: str | bytes, source: str) -> Vmi:
    """Return the VMI of its JSON; a VirtualMachine gives its template. Raises InputError for other
    objects."""
    return build_vmi(read_object(text, source, "a VirtualMachineInstance"), source)


def build_vmi(document: Mapping[str, Any], source: str, *, needs_domain: bool = False) -> Vmi:
    """Return the VMI of a parsed document. Raises InputError. needs_domain: also for one without
    spec.domain, which every VMI of a cluster has."""
    kind = document.get("kind")
    if kind not in (None, "", "VirtualMachineInstance", "VirtualMachine"):
        raise InputError(
            f"{source}: expected a VirtualMachineInstance or a VirtualMachine, found {kind!r}",
            hint="kubectl get vm NAME -o yaml > vm.yaml",
        )
    metadata = _expect_mapping(document.get("metadata"), source, "metadata")
    spec = _expect_mapping(document.get("spec"), source, "spec")
    template = spec.get("template")
    if needs_domain and template is not None and spec.get("instancetype") is not None:
        raise InputError(
            f"{source}: expected CPUs and memory in the VM, found an instance type, which has them",
            hint=command_line(
                *("virtctl", "expand", "--vm", metadata.get("name") or "NAME"),
                *(("-n", metadata["namespace"]) if metadata.get("namespace") else ()),
            ),
        )
    if template is not None:
        template = _expect_mapping(template, source, "spec.template")
        inner = _expect_mapping(template.get("metadata"), source, "spec.template.metadata")
        annotations = _expect_texts(inner.get("annotations"), source)
        spec = _expect_mapping(template.get("spec"), source, "spec.template.spec")
    else:
        annotations = _expect_texts(metadata.get("annotations"), source)
    if needs_domain and not isinstance(spec.get("domain"), dict):
        keys = ", ".join(str(key)[:20] for key in list(document)[:8]) or "an empty object"
        raise InputError(
            f"{source}: expected a VirtualMachineInstance or a VirtualMachine with spec.domain, "
            f"found {keys[:200]}",
            hint="kubectl get vm NAME -o yaml > vm.yaml",
        )
    if needs_domain:
        _check_types(spec["domain"], source)
    return Vmi(
        name=str(metadata.get("name") or "unnamed"),
        namespace=str(metadata.get("namespace") or ""),
        spec=spec,
        annotations=annotations,
        guest_addresses=frozenset(_list_addresses(spec, source)),
    )


_WORDS = {
    dict: "an object",
    list: "a list",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    float: "a fraction",
}


def _check_types(domain: Mapping[str, Any], source: str) -> None:
    read = [(path, find_value(domain, *path.split(".")), kind) for path, kind in _TYPES.items()]
    for path, value, _ in (*read,):
        items = enumerate(value) if isinstance(value, list) else ()
        read += [(f"{path}[{number}]", item, dict) for number, item in items]
    for path, value, expected in read:
        if value is not None and type(value) is not expected:
            raise InputError(
                f"{source}: expected spec.domain.{path} to be {_WORDS[expected]}, found "
                f"{_WORDS.get(type(value), type(value).__name__)}"
            )


def _expect_mapping(value: Any, source: str, path: str) -> Mapping[str, Any]:
    if value is None:
        return _NOTHING
    if not isinstance(value, dict):
        type_word = _WORDS.get(type(value), type(value).__name__)
        raise InputError(f"{source}: expected {path} to be an object, found {type_word}")
    return value


def _expect_texts(value: Any, source: str) -> Mapping[str, str]:
    annotations = _expect_mapping(value, source, "annotations")
    if not all(isinstance(text, str) for text in annotations.values()):
        raise InputError(f"{source}: expected annotations to be texts, found others")
    return annotations


def _list_addresses(spec: Mapping[str, Any], source: str) -> list[tuple[int, int, int, int]]:
    """Return every pciAddress of interfaces and disks. Raises InputError."""
    devices = find_value(spec, "domain", "devices")
    addresses: list[tuple[int, int, int, int]] = []
    for group in ("interfaces", "disks"):
        members = find_value(devices, group)
        for member in members if isinstance(members, list) else ():
            for owner in (member, find_value(member, "disk"), find_value(member, "lun")):
                text = find_value(owner, "pciAddress")
                if isinstance(text, str) and text:
                    addresses.append(_parse_address(text, source, group))
    return addresses


def _parse_address(text: str, source: str, group: str) -> tuple[int, int, int, int]:
    try:
        at = Bdf.parse(text)
    except ParseError:
        raise InputError(
            f"{source}: expected a pciAddress in {group} such as 0000:81:00.1, found {text[:60]!r}"
        ) from None
    return at.domain, at.bus, at.device, at.function


def _count_vcpus(vmi: Vmi) -> int:
    cpu = vmi.get("domain", "cpu")
    counts = [
        0 if (count := find_value(cpu, name)) is None else parse_quantity(count, f"cpu.{name}")
        for name in ("sockets", "cores", "threads")
    ]
    if any(counts):
        return prod(count or 1 for count in counts)
    cpus = _find_resource(vmi, "cpu")
    return 1 if cpus is None else max(1, parse_quantity(cpus, "resources.cpu"))


def _find_resource(vmi: Vmi, name: str) -> Any:
    resources = vmi.get("domain", "resources")
    return find_value(resources, "limits", name) or find_value(resources, "requests", name)


def _find_memory(vmi: Vmi) -> int:
    """Return the memory; 0 if the VMI does not set it."""
    memory = vmi.get("domain", "memory", "guest") or _find_resource(vmi, "memory")
    return 0 if memory is None else parse_quantity(memory, "memory")


def _find_page_size(vmi: Vmi) -> int | None:
    source = "memory.hugepages.pageSize"
    page = vmi.get("domain", *source.split("."))
    if page is None:
        return None
    page_bytes = parse_quantity(page, source)
    if not page_bytes:
        raise ParseError(source, "a size such as 2Mi or 1Gi", str(page))
    return page_bytes


def build_guest(vmi: Vmi) -> Vm:
    """The VM of a VMI with its requests to a node. Raises ParseError for a malformed quantity."""
    return Vm(
        name=vmi.name,
        vcpus=_count_vcpus(vmi),
        memory_bytes=_find_memory(vmi),
        page_bytes=_find_page_size(vmi),
        architecture="aarch64" if vmi.get("architecture") == "arm64" else "x86_64",
    )
