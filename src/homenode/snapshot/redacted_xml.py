"""Redacted XML: what of the tools' documents a capture keeps. All else goes.

The lists say what stays, not what goes: an element that a later libvirt or driver brings may hold
anything. Elements on them are structure: counts, sizes, addresses, places.

Source: libvirt's docs/schemas/{domain,capability}.rng; nvsmi_device_v12.dtd.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

from lxml import etree

from homenode.snapshot.pseudonyms import Pseudonyms
from homenode.tools.xml_text import parse_xml

WHOLE: Final = None
"""An element that stays with everything below it."""

Rules: TypeAlias = Mapping[str, "frozenset[str] | None"]
"""Element name -> attributes that stay, or WHOLE."""

_ATTRIBUTES_OF: Rules = {
    # Parents and places; the attributes that stay.
    "domains": frozenset(),
    "domain": frozenset({"type", "id"}),
    "name": frozenset(),
    "uuid": frozenset(),
    "os": frozenset({"firmware"}),
    "type": frozenset({"arch", "machine"}),
    "loader": frozenset({"readonly", "secure", "type", "format"}),
    "boot": frozenset({"dev", "order"}),
    "devices": frozenset(),
    "emulator": frozenset(),
    "hostdev": frozenset({"mode", "type", "managed", "model", "display"}),
    "source": frozenset({"mode", "writeFiltering"}),
    "interface": frozenset({"type", "managed"}),
    "mac": frozenset({"address", "type"}),
    "disk": frozenset({"type", "device", "model"}),
    "memory": frozenset({"unit", "model", "access", "discard", "dumpCore"}),
    "rom": frozenset({"bar", "enabled"}),
    "launchSecurity": frozenset({"type", "kernelHashes"}),
    "commandline": frozenset(),
    "arg": frozenset(),
    **dict.fromkeys(
        (
            "currentMemory", "maxMemory", "memoryBacking", "vcpu", "vcpus", "iothreads",
            "iothreadids", "cputune", "numatune", "features", "cpu", "pm", "clock", "address",
            "controller", "driver", "model", "memballoon", "watchdog", "iommu", "video", "target",
            "nodemask", "pagesize", "cbitpos", "reducedPhysBits", "policy", "acpi", "bandwidth",
            "on_poweroff", "on_reboot", "on_crash",
        ),
        WHOLE,
    ),
}  # fmt: skip

_TEXT_STAYS = frozenset({"name", "uuid", "type", "emulator", "memory"})
"""Elements that do not stay whole, and whose text does. Arguments of QEMU are counted only."""

_CAPABILITIES: Rules = {
    "capabilities": frozenset(),
    "host": frozenset(),
    "uuid": frozenset(),
    "guest": frozenset(),
    **dict.fromkeys(
        (
            "cpu", "power_management", "iommu", "migration_features", "topology", "cache",
            "memory_bandwidth", "os_type", "arch", "features",
        ),
        WHOLE,
    ),
}  # fmt: skip

_NVIDIA: Rules = {
    "nvidia_smi_log": frozenset(),
    "gpu": frozenset({"id"}),
    **dict.fromkeys(
        (
            "driver_version", "cuda_version", "attached_gpus", "product_name", "product_brand",
            "product_architecture", "persistence_mode", "addressing_mode", "mig_mode",
            "driver_model", "minor_number", "vbios_version", "multigpu_board",
            "board_part_number", "gpu_part_number", "gpu_operation_mode", "c2c_mode",
            "gpu_virtualization_mode", "gsp_firmware_version", "pci", "performance_state",
            "clocks_event_reasons", "clocks_throttle_reasons", "fb_memory_usage",
            "bar1_memory_usage", "cc_protected_memory_usage", "compute_mode", "utilization",
            "ecc_mode", "temperature", "gpu_power_readings", "power_readings", "clocks",
            "max_clocks", "uuid", "numa_node_id", "module_id", "state", "status", "cliqueId",
        ),
        WHOLE,
    ),
    "platformInfo": frozenset(),
    "fabric": frozenset(),
}  # fmt: skip


_OF_SCRUBBED_UUID = "00000000-0000-4000-8000-"


def redact_domains(text: str, names: Pseudonyms) -> str:
    """The domains of virsh-domains: names, disks, networks and everything free are gone.

    Raises ParseError where the text is no XML.
    """
    root = parse_xml(text, "domains", "virsh dumpxml")
    _keep(root, _ATTRIBUTES_OF)
    for target in root.iterfind(".//interface/target"):
        target.attrib.clear()  # a tap device may be named after a customer
    _scrub(root, names)
    for domain in root.findall("domain"):
        _pseudonym(domain.find("name"), names, "vm")
        _pseudonym(domain.find("uuid"), names, "uuid")
        emulator = domain.find("devices/emulator")
        if emulator is not None and not (emulator.text or "").startswith("/usr/"):
            emulator.text = "/usr/bin/redacted"
    return _document(root)


def redact_capabilities(text: str, names: Pseudonyms) -> str:
    """libvirt's capabilities without the host's UUID and security labels. Raises ParseError."""
    root = parse_xml(text, "capabilities", "virsh capabilities")
    _keep(root, _CAPABILITIES)
    _scrub(root, names)
    _pseudonym(root.find("host/uuid"), names, "uuid")
    return _document(root)


def redact_nvidia_query(text: str, names: Pseudonyms) -> str:
    """nvidia-smi -q -x without serials, processes and their like. Raises ParseError."""
    root = parse_xml(text, "nvidia_smi_log", "nvidia-smi -q -x")
    for element in root.iter():
        # Found here, so that they are known wherever else they stand.
        tag, value = str(element.tag).lower(), (element.text or "").strip()
        if "serial" in tag and value not in ("", "N/A", "0"):
            names.serial(value)
    _keep(root, _NVIDIA)
    _scrub(root, names)
    for gpu in root.findall("gpu"):
        _pseudonym(gpu.find("uuid"), names, "uuid")
    return _document(root)


def _keep(element: etree._Element, rules: Rules) -> None:
    """Removes what is not on the list, from the element down."""
    for child in list(element):
        # Entities that the document uses but does not declare are nodes without a name.
        name = _local(child.tag) if isinstance(child.tag, str) else ""
        if name not in rules:
            _remove(element, child)
            continue
        attributes = rules[name]
        if attributes is WHOLE:
            continue
        for attribute in list(child.attrib):
            if attribute not in attributes:
                del child.attrib[attribute]
        if child.text and name not in _TEXT_STAYS and child.text.strip():
            child.text = None
        child.tail = "\n" if child.tail and child.tail.strip() else child.tail
        _keep(child, rules)


def _remove(parent: etree._Element, child: etree._Element) -> None:
    """Removes a child, and what stands behind it goes too: between elements it is white space."""
    child.tail = None
    parent.remove(child)


def _pseudonym(element: etree._Element | None, names: Pseudonyms, kind: str) -> None:
    """For what does not show itself by its form. UUIDs do, and have been scrubbed already."""
    text = "" if element is None else (element.text or "").strip()
    if element is None or not text or (kind == "uuid" and _OF_SCRUBBED_UUID in text):
        return
    element.text = names.uuid(text) if kind == "uuid" else names.of(kind, text)


def _scrub(root: etree._Element, names: Pseudonyms) -> None:
    for element in root.iter():
        if element.text:
            element.text = names.scrub(element.text)
        if element.tail:
            element.tail = names.scrub(element.tail)
        for attribute, value in element.attrib.items():
            element.attrib[attribute] = names.scrub(str(value))


def _document(root: etree._Element) -> str:
    return etree.tostring(root, encoding="unicode") + "\n"


def _local(tag: str) -> str:
    """The name without its namespace: {http://libvirt.org/schemas/domain/qemu/1.0}arg is arg."""
    return tag.rpartition("}")[2]
