"""Redacted XML: what of tools' documents and libvirt's domains a capture keeps.

The lists say what stays, not what goes: an element that a later libvirt or driver brings may hold
anything. Elements on them are structure: counts, sizes, addresses, places. Every value of a domain
has a closed form: a number, a set, a size's unit, a word that libvirt itself defines. So nothing
that someone named survives, wherever libvirt takes free text: aliases, titles, metadata, disks,
networks, serials, secrets, arguments of QEMU. What a domain is read for: vm/domain/read.py.

Source: libvirt's docs/schemas: capability.rng, domaincommon.rng, basictypes.rng;
nvsmi_device_v12.dtd.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from lxml import etree

from homenode.machine.snapshot.contents import table, words
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
        """
        cpu power_management iommu migration_features topology cache memory_bandwidth os_type arch
        features
        """.split(),
        WHOLE,
    ),
}

_NVIDIA: Rules = {
    "nvidia_smi_log": frozenset(),
    "gpu": frozenset({"id"}),
    **dict.fromkeys(words("nvidia-smi"), WHOLE),
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


NAME_PREFIX = "redacted/"
"""Of a domain's pseudonym. libvirt takes no "/" in names, so no document's name equals one."""

UNKNOWN_EMULATOR = "/usr/bin/redacted"


def _words(*words: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


_NUMBER = re.compile(r"\s*\+?\d{1,19}\s*", re.ASCII)
_PART_OF_ADDRESS = re.compile(r"0[xX][0-9a-fA-F]{1,8}|\d{1,10}", re.ASCII)
_SET = re.compile(r"\s*\^?\d{1,7}(?:\s*[,-]\s*\^?\d{1,7})*\s*", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}", re.ASCII)
_SWITCH = _words("yes", "no", "on", "off")
_UNIT = re.compile(r"b|bytes?|[kKMGTPE](?:B|iB)?", re.ASCII)
_PLACEMENT = _words("static", "auto")
_MODE = _words("strict", "interleave", "preferred", "restrictive")
_ACCESS = _words("shared", "private")
_ARCHITECTURES = tuple(
    """
    aarch64 alpha armv6l armv7l i686 loongarch64 mips mips64 mips64el mipsel ppc ppc64
    ppc64le riscv32 riscv64 s390 s390x sparc sparc64 x86_64
""".split()
)
_DISTRIBUTIONS = ("rhel", "ubuntu", "noble", "jammy", "focal", "bionic", "openeuler", "bclinux")
_MACHINE = re.compile(
    r"(?:pc|q35|pc-q35|pc-i440fx|virt|pseries|microvm|s390-ccw-virtio)"
    rf"(?:-(?:{'|'.join(_DISTRIBUTIONS)})?-?\d{{1,3}}(?:\.\d{{1,3}}){{0,2}})?",
    re.ASCII,
)
_EMULATOR = re.compile(
    r"/usr/(?:local/)?(?:bin|libexec|sbin)/"
    rf"(?:qemu-system-(?:arm|i386|{'|'.join(_ARCHITECTURES)})|qemu-kvm|kvm)"
)


_FORMS = {
    "access": _ACCESS,
    "address": _PART_OF_ADDRESS,
    "mode": _MODE,
    "number": _NUMBER,
    "placement": _PLACEMENT,
    "set": _SET,
    "switch": _SWITCH,
    "unit": _UNIT,
    "uuid": _UUID,
    "arch": _words(*_ARCHITECTURES),
    "machine": _MACHINE,
    "emulator": _EMULATOR,
}
"""What a value may be, besides the words that stand in its row."""


class Kept(NamedTuple):
    """An element that stays. attributes: name -> form; text: its form, None = no text stays."""

    attributes: dict[str, re.Pattern[str]]
    text: re.Pattern[str] | None


def _kept(row: str) -> Kept:
    """Of a row such as "unit=unit type=a|b =number": its attributes, and its text."""
    forms = {}
    for item in row.split():
        name, _, form = item.partition("=")
        forms[name] = _FORMS.get(form) or _words(*form.split("|"))
    return Kept({name: form for name, form in forms.items() if name}, forms.get(""))


_DOMAIN = {
    path.partition("/")[2]: _kept(row)
    for path, _, row in (line.partition(":") for line in table("redacted_domain.txt"))
}
"""The elements of a domain that stay, by their path. libvirt also checks <name> and <uuid>, which
are pseudonyms."""


def redact_domains(text: str, names: Pseudonyms) -> str:
    """The domains of virsh-domains, written again from what the list above lets through.

    Raises ParseError where the text is no XML.
    """
    root = parse_xml(text, "domains", "virsh dumpxml")
    redacted = etree.Element("domains")
    redacted.text = "\n"
    for domain in root.findall("domain"):
        kept = _copy(domain, "")
        identity = []
        for tag, kind in (("name", "vm"), ("uuid", "uuid")):
            secret = (domain.findtext(tag) or "").strip()
            if secret:
                element = etree.Element(tag)
                element.text = (
                    names.uuid(secret) if kind == "uuid" else NAME_PREFIX + names.of(kind, secret)
                )
                identity.append(element)
        for at, element in enumerate(identity):
            kept.insert(at, element)
        for address in kept.iterfind("devices/hostdev/source/address[@uuid]"):
            address.set("uuid", names.uuid(str(address.get("uuid"))))
        emulator = kept.find("devices/emulator")
        if emulator is not None and not emulator.text:
            emulator.text = UNKNOWN_EMULATOR
        kept.tail = "\n"
        redacted.append(kept)
    etree.indent(redacted)
    return etree.tostring(redacted, encoding="unicode") + "\n"


def _copy(element: etree._Element, path: str) -> etree._Element:
    """The element with what its row lets through; namespaces and comments stay behind."""
    copied = etree.Element(str(element.tag))
    row = _DOMAIN[path]
    for name, form in row.attributes.items():
        value = element.get(name)
        if value is not None and form.fullmatch(value):
            copied.set(name, value)
    if row.text is not None and element.text and row.text.fullmatch(element.text.strip()):
        copied.text = element.text.strip()
    for child in element:
        # Comments and entities are nodes without a name.
        below = f"{path}/{child.tag}".lstrip("/") if isinstance(child.tag, str) else ""
        if below in _DOMAIN and below:
            copied.append(_copy(child, below))
    return copied
