"""Redacted XML: what of the tools' documents a capture keeps. All else goes.

Domains are in machine/snapshot/redacted_domain.py.

The lists say what stays, not what goes: an element that a later libvirt or driver brings may hold
anything. Elements on them are structure: counts, sizes, addresses, places.

Source: libvirt's docs/schemas/capability.rng; nvsmi_device_v12.dtd.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias

from lxml import etree

from homenode.machine.snapshot.pseudonyms import Pseudonyms
from homenode.machine.tools.xml_text import parse_xml

WHOLE: Final = None
"""An element that stays with everything below it."""

Rules: TypeAlias = Mapping[str, "frozenset[str] | None"]
"""Element name -> attributes that stay, or WHOLE."""

_CAPABILITIES: Rules = {
    "capabilities": frozenset(),
    "host": frozenset(),
    "uuid": frozenset(),
    "guest": frozenset(),
    **dict.fromkeys(
        (
            "cpu",
            "power_management",
            "iommu",
            "migration_features",
            "topology",
            "cache",
            "memory_bandwidth",
            "os_type",
            "arch",
            "features",
        ),
        WHOLE,
    ),
}

_NVIDIA: Rules = {
    "nvidia_smi_log": frozenset(),
    "gpu": frozenset({"id"}),
    **dict.fromkeys(
        (
            "driver_version",
            "cuda_version",
            "attached_gpus",
            "product_name",
            "product_brand",
            "product_architecture",
            "persistence_mode",
            "addressing_mode",
            "mig_mode",
            "driver_model",
            "minor_number",
            "vbios_version",
            "multigpu_board",
            "board_part_number",
            "gpu_part_number",
            "gpu_operation_mode",
            "c2c_mode",
            "gpu_virtualization_mode",
            "gsp_firmware_version",
            "pci",
            "performance_state",
            "clocks_event_reasons",
            "clocks_throttle_reasons",
            "fb_memory_usage",
            "bar1_memory_usage",
            "cc_protected_memory_usage",
            "compute_mode",
            "utilization",
            "ecc_mode",
            "temperature",
            "gpu_power_readings",
            "power_readings",
            "clocks",
            "max_clocks",
            "uuid",
            "numa_node_id",
            "module_id",
            "state",
            "status",
            "cliqueId",
            "index",
            "gpu_instance_id",
            "compute_instance_id",
        ),
        WHOLE,
    ),
    "mig_devices": frozenset(),
    "mig_device": frozenset(),
    "platformInfo": frozenset(),
    "fabric": frozenset(),
}


_OF_SCRUBBED_UUID = "00000000-0000-4000-8000-"


def redact_capabilities(text: str, names: Pseudonyms) -> str:
    """libvirt's capabilities without the host's UUID and security labels. Raises ParseError."""
    root = parse_xml(text, "capabilities", "virsh capabilities")
    _keep(root, _CAPABILITIES)
    _scrub(root, names)
    _pseudonym(root.find("host/uuid"), names)
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
        _pseudonym(gpu.find("uuid"), names)
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
        if child.text and name != "uuid" and child.text.strip():
            child.text = None
        child.tail = "\n" if child.tail and child.tail.strip() else child.tail
        _keep(child, rules)


def _remove(parent: etree._Element, child: etree._Element) -> None:
    """Removes a child, and what stands behind it goes too: between elements it is white space."""
    child.tail = None
    parent.remove(child)


def _pseudonym(uuid: etree._Element | None, names: Pseudonyms) -> None:
    """For what does not show itself by its form. UUIDs do, and have been scrubbed already."""
    text = "" if uuid is None else (uuid.text or "").strip()
    if uuid is not None and text and _OF_SCRUBBED_UUID not in text:
        uuid.text = names.uuid(text)


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
