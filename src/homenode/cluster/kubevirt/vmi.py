"""Vmi: a VirtualMachineInstance: what it says, and what it asks of a node.

Source: kubevirt.io/api/core/v1, VirtualMachineInstanceSpec; `kubectl get vmi NAME -o json`;
virt-controller/services/renderresources.go of KubeVirt 1.8.4.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cluster.kubevirt.object import down, parse_quantity, read_object
from homenode.errors import InputError, ParseError
from homenode.vm.model import GuestTopology, Vm

_NOTHING: Mapping[str, Any] = {}
_TYPES: Mapping[str, type] = {
    "cpu": dict,
    "cpu.cores": int,
    "cpu.sockets": int,
    "cpu.threads": int,
    "cpu.maxSockets": int,
    "cpu.features": list,
    "cpu.model": str,
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
"""Of what is below spec.domain: the API server refuses others."""


HOOK_ANNOTATION = "hooks.kubevirt.io/hookSidecars"
EVEN_ANNOTATION = "alpha.kubevirt.io/EmulatorThreadCompleteToEvenParity"
"""QEMU's own threads get two PUs where one would make the sum odd. KubeVirt puts it on VMIs itself
where the gate AlignCPUs is on and the KubeVirt CR has it.

Source: KubeVirt, virt-controller/services/renderresources.go, WithCPUPinning.
"""


class Vmi(Struct, frozen=True):
    """A VMI, or the template of a VM."""

    name: str
    spec: Mapping[str, Any]  # as given
    annotations: Mapping[str, str]  # name -> text
    # guest PCI addresses that the user asked for by name (`pciAddress`), as written; such a device
    # stays where it is
    guest_addresses: frozenset[tuple[int, int, int, int]]

    def at(self, *path: str) -> Any:
        """What is down a path of names in the spec; None where it is not there."""
        return down(self.spec, *path)

    def listed(self, *path: str) -> list[Any]:
        """The list down a path; an empty one where there is none."""
        found = self.at(*path)
        return found if isinstance(found, list) else []

    @property
    def is_dedicated(self) -> bool:
        return bool(self.at("domain", "cpu", "dedicatedCpuPlacement"))

    @property
    def is_emulator_apart(self) -> bool:
        return bool(self.at("domain", "cpu", "isolateEmulatorThread"))

    @property
    def is_mapped(self) -> bool:
        """Whether the guest gets cells."""
        return self.at("domain", "cpu", "numa", "guestMappingPassthrough") is not None

    @property
    def is_hooked(self) -> bool:
        return HOOK_ANNOTATION in self.annotations

    @property
    def gpu_count(self) -> int:
        """GPUs of any kind."""
        return len(self.listed("domain", "devices", "gpus"))

    @property
    def passed_count(self) -> int:
        """Functions of the host, GPUs and SR-IOV NICs among them."""
        nics = self.listed("domain", "devices", "interfaces")
        others = len(self.listed("domain", "devices", "hostDevices"))
        return self.gpu_count + others + sum(down(one, "sriov") is not None for one in nics)

    @property
    def dedicated_pus(self) -> int:
        """PUs asked of kubelet, those of the emulator and of a pool of IOThreads included."""
        pool = self.at("domain", "ioThreads", "supplementalPoolThreadCount")
        has_pool = self.at("domain", "ioThreadsPolicy") == "supplementalPool" and pool is not None
        pus = guest_of(self).vcpus + (parse_quantity(pool, "ioThreads") if has_pool else 0)
        if self.is_emulator_apart:
            pus += 2 if EVEN_ANNOTATION in self.annotations and pus % 2 == 0 else 1
        return pus


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
    if template is not None:
        template = _mapping(template, source, "spec.template")
        inner = _mapping(template.get("metadata"), source, "spec.template.metadata")
        annotations = _texts(inner.get("annotations"), source)
        whole = _mapping(template.get("spec"), source, "spec.template.spec")
    else:
        annotations = _texts(metadata.get("annotations"), source)
    if needs_domain and not isinstance(whole.get("domain"), dict):
        found = ", ".join(str(key)[:20] for key in list(document)[:8]) or "an empty object"
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
    )


_WORDS = {dict: "an object", list: "a list", int: "a whole number", str: "a text"}


def _check_types(domain: Mapping[str, Any], source: str) -> None:
    read = [(path, down(domain, *path.split(".")), expected) for path, expected in _TYPES.items()]
    for path, value, _ in (*read,):
        items = enumerate(value) if isinstance(value, list) else ()
        read += [(f"{path}[{number}]", one, dict) for number, one in items]
    for path, value, expected in read:
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
    if not all(isinstance(text, str) for text in annotations.values()):
        raise InputError(f"{source}: expected annotations to be texts, found others")
    return annotations


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


def topology_of(vmi: Vmi) -> GuestTopology | None:
    """None where nothing of it is set."""
    cpu = vmi.at("domain", "cpu")
    sockets, cores, threads = (
        0 if (count := down(cpu, name)) is None else parse_quantity(count, f"cpu.{name}")
        for name in ("sockets", "cores", "threads")
    )
    if not (sockets or cores or threads):
        return None
    return GuestTopology(sockets or 1, 1, cores or 1, threads or 1)


def vcpus_of(vmi: Vmi) -> int:
    topology = topology_of(vmi)
    if topology is not None:
        return prod(topology)
    resources = vmi.at("domain", "resources")
    asked = down(resources, "limits", "cpu") or down(resources, "requests", "cpu")
    return 1 if asked is None else parse_quantity(asked, "resources.cpu")


def _memory(vmi: Vmi) -> int:
    """0 where the VMI does not say."""
    memory, resources = vmi.at("domain", "memory", "guest"), vmi.at("domain", "resources")
    memory = memory or down(resources, "limits", "memory") or down(resources, "requests", "memory")
    return 0 if memory is None else parse_quantity(memory, "memory")


def _most_memory(vmi: Vmi) -> int | None:
    """To which memory may be plugged in while it runs; None = it is not to grow."""
    most = vmi.at("domain", "memory", "maxGuest")
    most_bytes = 0 if most is None else parse_quantity(most, "memory.maxGuest")
    return most_bytes if most_bytes > _memory(vmi) else None


def _cpu_mode(vmi: Vmi) -> str:
    model = vmi.at("domain", "cpu", "model")
    named = isinstance(model, str) and model and not model.startswith("host-")
    return "custom" if named else str(model or "host-model")


def _page(vmi: Vmi) -> int | None:
    page = vmi.at("domain", "memory", "hugepages", "pageSize")
    return None if page is None else parse_quantity(page, "memory.hugepages.pageSize")


_FACTS: Mapping[str, Callable[[Vmi], Any]] = {
    "name": lambda vmi: vmi.name,
    "vcpus": vcpus_of,
    "cpu_topology": topology_of,
    "memory_bytes": _memory,
    "max_memory_bytes": _most_memory,
    "page_bytes": _page,
    "cpu_mode": _cpu_mode,
    "firmware": lambda vmi: (
        "bios" if vmi.at("domain", "firmware", "bootloader", "efi") is None else "efi"
    ),
    "architecture": lambda vmi: "aarch64" if vmi.at("architecture") == "arm64" else "x86_64",
}
"""Facts of a VM, and how a VMI says them. It is read alone: a plan for KubeVirt is kubelet's."""


def guest_of(vmi: Vmi) -> Vm:
    """The VM of a VMI. Raises ParseError for a quantity that is none."""
    return Vm(**{fact: read(vmi) for fact, read in _FACTS.items()})
