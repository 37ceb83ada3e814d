"""Vmi: what the hook and the check need of a VirtualMachineInstance.

Source: kubevirt.io/api/core/v1, VirtualMachineInstanceSpec; `kubectl get vmi NAME -o json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homenode.bdf import Bdf
from homenode.errors import InputError, ParseError
from homenode.pods.objects import down, read_object

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


@dataclass(frozen=True, slots=True)
class Vmi:
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
