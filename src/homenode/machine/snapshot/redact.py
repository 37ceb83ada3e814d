"""Redact: a snapshot without data that identifies the machine's owner, in two steps. Every source
is reduced to known structure, if its format allows that: XML elements, kernel parameters, files
with their form. The remaining text is searched for recognisable forms (UUIDs, MACs, addresses) and
known names (host, user, serials). Secrets get pseudonyms, the same everywhere
(machine/snapshot/pseudonyms.py).

PCI addresses, CPU lists, masks and distances are no secrets and stay as they are.

For XML the lists name the elements that stay, because a new element of libvirt or a driver may
contain anything. Every value of a domain has a closed form: a number, a set, a size's unit, a word
that libvirt itself defines. So no user-defined name survives.

Source: libvirt's docs/schemas: capability.rng, domaincommon.rng, basictypes.rng;
nvsmi_device_v12.dtd.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from lxml import etree
from msgspec import Struct

from homenode.errors import InputError
from homenode.machine.snapshot.contents import (
    IDENTITY_COMMANDS,
    IDENTITY_PATHS,
    SERIAL_PATHS,
    read_table,
    read_words,
)
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.machine.snapshot.pseudonyms import Pseudonyms
from homenode.machine.tools.nvidia_smi import TERMINAL_CODE
from homenode.machine.tools.xml_text import parse_xml
from homenode.machine.topology import LAYOUT_NAMESPACE

_SHORTEST_SECRET = 4
"""Characters; most files of /sys are shorter ("1", "0-3")."""

_TOKEN = re.compile(r'(?:[^\s"]|"[^"]*")+')
_SAFE_TOKEN = re.compile(r"[A-Za-z0-9_,:.;+*!@/=-]{0,400}", re.ASCII)
_VALUE_PART = re.compile(r"[A-Za-z0-9_.]+|[^A-Za-z0-9_.]+", re.ASCII)
_STRUCTURE = re.compile(
    r"[,:;+*!@/=-]+|\d{1,12}[kKmMgGtT]?|0x[0-9a-fA-F]{1,16}|[0-9a-fA-F]{4}|[0-9a-fA-F]{2}\.[0-7]",
    re.ASCII,
)
"""Kept in a kernel parameter's value: numbers, sizes, lists, masks, PCI IDs and addresses."""

_VALUE_WORDS, _PARAMETERS = read_words("values"), read_words("parameters")
_MODULES = tuple(read_words("modules"))

_VPD_FIELD = re.compile(r"^\s*\[(\w\w)\] [^:]*:\s*(.*)$")
_SLOT_FIELD = re.compile(r"^(\s+(?:Physical Slot|DeviceName):\s*)(\S.*)$")
_SLOT = re.compile(r"\d{1,5}(?:-\d{1,3})?", re.ASCII)
_SERIAL_MARK = re.compile(
    r"\b(?:s/n|sn|ser(?:ial)?(?: ?(?:no|number))?|asset(?: tag)?|service tag)\b", re.IGNORECASE
)
_SERIAL_WORD = re.compile(
    r"(?<![\w-])(?=[A-Z0-9]{8})(?:[0-9]{8,}|(?=[A-Z]*[0-9])(?=[0-9]*[A-Z])(?:[A-Z]*[0-9]){5}[A-Z0-9]*)"
    r"(?![\w-])",
    re.ASCII,
)
"""Eight letters or more with five digits among them: models have dashes, or fewer digits."""
# Not "00:1f.5 Serial bus controller: Intel ...": fields are indented.
_SERIAL_FIELD = re.compile(r"^(\s.*?\b(?:serial number|asset tag):?\s+)(\S.*)$", re.IGNORECASE)


class RedactedSnapshot(Struct, frozen=True):
    """A snapshot that may be shown."""

    snapshot: MemorySnapshot
    # (tool, reason) where an output does not parse, so that nothing in it can be determined from
    # anything else
    omitted: tuple[tuple[str, str], ...]
    not_everywhere: tuple[str, ...] = ()  # see Manifest


class Identities(Struct, frozen=True):
    """Names that are redacted everywhere."""

    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    serials: tuple[str, ...] = ()


def read_identities(snapshot: Snapshot, also: Identities | None = None) -> Identities:
    """Return the names of a host and of the user who reads it; `also` adds to them."""
    also = also or Identities()
    words = [snapshot.read_text(path) for path in IDENTITY_PATHS]
    users = [snapshot.command_output(command.name) for command in IDENTITY_COMMANDS]
    serials = [(snapshot.read_text(path) or "").strip() for path in SERIAL_PATHS]
    return Identities(
        _find_distinct_words((*also.hosts, *_split_words(words))),
        _find_distinct_words((*also.users, *_split_words(users))),
        # "To be filled by O.E.M." is no serial.
        _find_distinct_words((*also.serials, *(serial for serial in serials if " " not in serial))),
    )


def redact(
    snapshot: MemorySnapshot, identities: Identities, notes: tuple[tuple[str, str], ...] = ()
) -> RedactedSnapshot:
    """Return the snapshot under the name "host", without anything of its owner. notes: (path or
    tool, remark), redacted too, at the head of omitted."""
    names = Pseudonyms(identities.hosts, identities.users)
    for serial in identities.serials:
        names.replace_serial(serial)
    commands: dict[str, str] = {}
    omissions: list[tuple[str, str]] = []
    # Commands first: they give serials, which are then known in files too.
    for name, text in sorted(snapshot.commands.items()):
        try:
            commands[name] = _REDACTORS.get(name, _scrub)(text, names)
        except InputError as error:
            omissions.append((name, names.scrub(error.message)))
    # Repeated, because the last file may reveal a serial that is in the first.
    commands = {name: names.scrub_identities(text) for name, text in commands.items()}
    return RedactedSnapshot(
        MemorySnapshot(
            "host",
            {
                names.scrub_forms(path): _redact_file(path, text, names)
                for path, text in sorted(snapshot.files.items())
            },
            {
                names.scrub_forms(path): names.scrub_forms(target)
                for path, target in sorted(snapshot.links.items())
            },
            commands,
            tuple(names.scrub_forms(path) for path in snapshot.directories),
        ),
        (
            *((names.scrub_forms(subject), names.scrub(remark)) for subject, remark in notes),
            *omissions,
        ),
        names.not_everywhere,
    )


def redact_command_line(text: str, names: Pseudonyms) -> str:
    """Return a kernel command line with the parameters that affect placement; others, and words in
    values unknown to the kernel, become "redacted".

    >>> redact_command_line('root=UUID=12 isolcpus=2-31 "a b" hugepages=64 -- -p secret',
    ...                     Pseudonyms())
    'redacted isolcpus=2-31 redacted hugepages=64 redacted redacted redacted'
    """
    tokens = []
    for token in _TOKEN.findall(text):
        name, _, value = token.partition("=")
        is_public = name in _PARAMETERS or name.startswith(_MODULES)
        if not is_public or not _SAFE_TOKEN.fullmatch(token):
            tokens.append("redacted")
            continue
        parts = (
            part if _STRUCTURE.fullmatch(part) or part.lower() in _VALUE_WORDS else "redacted"
            for part in _VALUE_PART.findall(value)
        )
        tokens.append(names.scrub(name + ("=" if "=" in token else "") + "".join(parts)))
    return " ".join(tokens)


def redact_product(text: str, names: Pseudonyms) -> str:
    """Return the product name of a machine without a serial number in it.

    >>> redact_product("PowerEdge R750 S/N CZ3049XYZ1", Pseudonyms())
    'PowerEdge R750 redacted'
    >>> redact_product("ProLiant DL380 CZ3049XY71", Pseudonyms())
    'ProLiant DL380 serial-1'
    >>> redact_product("SYS-821GE-TNHR", Pseudonyms())
    'SYS-821GE-TNHR'
    """
    match = _SERIAL_MARK.search(text)
    if match is not None:
        text = text[: match.start()].rstrip() + " redacted" + ("\n" if text[-1:] == "\n" else "")
    return names.scrub(_SERIAL_WORD.sub(lambda found: names.replace_serial(found[0]), text))


_RELEASE_FILES = ("/proc/sys/kernel/osrelease", "/proc/version", "/proc/hwloc-nofile-info")


def _redact_file(path: str, text: str, names: Pseudonyms) -> str:
    if path == "/proc/cmdline":
        return redact_command_line(text, names) + "\n"
    if path in _RELEASE_FILES:
        return redact_release(text, names)
    if path.endswith("/bios_vendor") and text.split()[:1] and text.split()[0] not in _FIRMWARE:
        return "redacted\n"
    if path.startswith("/sys/devices/virtual/dmi/") or path == "/proc/device-tree/model":
        return redact_product(text, names)
    # It is binary, and gather() has blanked all but the structure.
    if path.endswith("/config"):
        return text
    if len(text.strip()) < _SHORTEST_SECRET:
        return text
    return names.scrub(text)


def redact_release(text: str, names: Pseudonyms) -> str:
    """Return a kernel's or tool's version, without the words that whoever built it put there.

    >>> redact_release("6.8.0-45-acme+gpu7-generic", Pseudonyms())
    '6.8.0-45-redacted+redacted-generic'
    """

    def redact_part(match: re.Match[str]) -> str:
        word = match[0].lower()
        return match[0] if _NUMBERED.fullmatch(word) or word in _RELEASES else "redacted"

    return _RELEASE_PART.sub(redact_part, names.scrub(text))


_RELEASE_PART = re.compile(r"[A-Za-z0-9]+")
_NUMBERED = re.compile(r"(?:rc|v|el|fc|deb|amzn|azl|cm|dfsg)?\d+k?")
_FIRMWARE = read_words("firmware")


def _redact_topology(text: str, names: Pseudonyms) -> str:
    """Redact nvidia-smi topo -m: its NICs may have user-defined names. Its header is underlined."""
    text = TERMINAL_CODE.sub("", text)
    header = next((line for line in text.splitlines() if line.split()[:1] == ["GPU0"]), "")
    named = {*header.partition("CPU Affinity")[0].split(), *_NIC_IN_LEGEND.findall(text)}
    named = {name for name in named if not _TOPO_NAME.fullmatch(name)}
    parts = _SPACE.split(names.scrub(text)) if named else (names.scrub(text),)
    return "".join(names.replace_secret("nic", part) if part in named else part for part in parts)


_SPACE = re.compile(r"(\s+)")
_NIC_IN_LEGEND = re.compile(r"NIC\d{1,4}: (\S{1,80})")
_TOPO_NAME = re.compile(
    r"(?:GPU|NIC|(?:mlx[45]|mlx5_bond|bnxt_re|irdma|hfi1|qedr|efa|mana|hns)_)\d{1,3}"
)
"""Device names of the tool and of the kernel's drivers."""


def _scrub(text: str, names: Pseudonyms) -> str:
    return names.scrub(text)


def _redact_lspci(text: str, names: Pseudonyms) -> str:
    """Redact lspci -vvv: vital product data contains serials, asset tags and vendor data.

    [SN] Serial number: MT2311X12345     [V3] Vendor specific: 8f2a...     [YA] Asset tag: rack 4
    """
    lines = []
    for line in text.splitlines():
        field = _VPD_FIELD.match(line)
        if field is not None:
            if field[1] == "SN":
                names.replace_serial(field[2])
            line = line[: field.start(2)] + "redacted"
        slot = _SLOT_FIELD.match(line)
        if slot is not None and not _SLOT.fullmatch(slot[2].strip()):
            line = slot[1] + names.replace_secret("slot", slot[2].strip())  # a label set by users
        lines.append(
            _SERIAL_FIELD.sub(lambda found: found[1] + _redact_serial(found[2], names), line)
        )
    return names.scrub("\n".join(lines) + "\n")


def _redact_serial(text: str, names: Pseudonyms) -> str:
    """Return a serial's pseudonym; b8-ce-f6-ff-ff-12-34-56 is found by its form later."""
    return text if names.scrub(text) != text or text == "redacted" else names.replace_serial(text)


_AMD_SECRET = re.compile(
    r'("[^"]{0,40}(?:serial|uuid|guid|hive)[^"]{0,20}":\s{0,4})("[^"]*"|\d+)', re.I
)


def _redact_amd(text: str, names: Pseudonyms) -> str:
    return names.scrub(_AMD_SECRET.sub(r'\1"redacted"', text))


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
    **dict.fromkeys(read_words("nvidia-smi"), WHOLE),
    "mig_devices": frozenset(),
    "mig_device": frozenset(),
    "platformInfo": frozenset(),
    "fabric": frozenset(),
}


_OF_SCRUBBED_UUID = "00000000-0000-4000-8000-"


def redact_capabilities(text: str, names: Pseudonyms) -> str:
    """Remove the host's UUID and security labels from capabilities. Raises ParseError."""
    root = parse_xml(text, "capabilities", "virsh capabilities")
    _drop_unlisted(root, _CAPABILITIES)
    _scrub_tree(root, names)
    _redact_value(root.find("host/uuid"), names)
    return _serialize(root)


def redact_nvidia_query(text: str, names: Pseudonyms) -> str:
    """Return nvidia-smi -q -x without serials, processes and other secrets. Raises ParseError."""
    root = parse_xml(text, "nvidia_smi_log", "nvidia-smi -q -x")
    for element in root.iter():
        # Collected first, so that they are replaced everywhere.
        tag, value = str(element.tag).lower(), (element.text or "").strip()
        if "serial" in tag and value not in ("", "N/A", "0"):
            names.replace_serial(value)
    _drop_unlisted(root, _NVIDIA)
    _scrub_tree(root, names)
    for gpu in root.findall("gpu"):
        _redact_value(gpu.find("uuid"), names)
    return _serialize(root)


def _drop_unlisted(element: etree._Element, rules: Rules) -> None:
    """Remove everything that is not listed, from the element down."""
    for child in list(element):
        # Entities that the document uses but does not declare are nodes without a name.
        name = _strip_namespace(child.tag) if isinstance(child.tag, str) else ""
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
        _drop_unlisted(child, rules)


def _remove(parent: etree._Element, child: etree._Element) -> None:
    """Remove a child with the white space after it."""
    child.tail = None
    parent.remove(child)


def _redact_value(uuid: etree._Element | None, names: Pseudonyms) -> None:
    """Replace a value without a recognisable form. UUIDs have been replaced already."""
    text = "" if uuid is None else (uuid.text or "").strip()
    if uuid is not None and text and _OF_SCRUBBED_UUID not in text:
        uuid.text = names.replace_uuid(text)


def _scrub_tree(root: etree._Element, names: Pseudonyms) -> None:
    for element in root.iter():
        if element.text:
            element.text = names.scrub(element.text)
        if element.tail:
            element.tail = names.scrub(element.tail)
        for attribute, value in element.attrib.items():
            element.attrib[attribute] = names.scrub(str(value))


def _serialize(root: etree._Element) -> str:
    return etree.tostring(root, encoding="unicode") + "\n"


def _strip_namespace(tag: str) -> str:
    """Return the name without its namespace: {http://libvirt.org/schemas/...}arg is arg."""
    return tag.rpartition("}")[2]


NAME_PREFIX = "redacted/"
"""Prefix of a domain's pseudonym. libvirt rejects "/" in names, so no real name has it."""

_MARK = f"{{{LAYOUT_NAMESPACE}}}layout"

UNKNOWN_EMULATOR = "/usr/bin/redacted"


def _compile_words(*words: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


_ARCHITECTURES = tuple(
    """
    aarch64 alpha armv6l armv7l i686 loongarch64 mips mips64 mips64el mipsel ppc ppc64
    ppc64le riscv32 riscv64 s390 s390x sparc sparc64 x86_64
""".split()
)
_RELEASES = read_words("releases") | {"host", "user", *_ARCHITECTURES}
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
    "access": _compile_words("shared", "private"),
    "address": re.compile(r"0[xX][0-9a-fA-F]{1,8}|\d{1,10}", re.ASCII),
    "mode": _compile_words("strict", "interleave", "preferred", "restrictive"),
    "number": re.compile(r"\s*\+?\d{1,19}\s*", re.ASCII),
    "placement": _compile_words("static", "auto"),
    "set": re.compile(r"\s*\^?\d{1,7}(?:\s*[,-]\s*\^?\d{1,7})*\s*", re.ASCII),
    "switch": _compile_words("yes", "no", "on", "off"),
    "unit": re.compile(r"b|bytes?|[kKMGTPE](?:B|iB)?", re.ASCII),
    "uuid": re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}", re.ASCII),
    "arch": _compile_words(*_ARCHITECTURES),
    "machine": _MACHINE,
    "emulator": _EMULATOR,
}
"""Valid forms of a value, besides the words in its row."""


def _parse_rule(row: str) -> dict[str, re.Pattern[str]]:
    """Return the form of each attribute in a row "unit=unit type=a|b =number"; "" is its text."""
    forms = {}
    for item in row.split():
        name, _, form = item.partition("=")
        forms[name] = _FORMS.get(form) or _compile_words(*form.split("|"))
    return forms


_DOMAIN = {
    path.partition("/")[2]: _parse_rule(row)
    for path, _, row in (line.partition(":") for line in read_table("redacted_domain.txt"))
}
"""The elements of a domain that stay, by their path. libvirt also checks <name> and <uuid>, which
are pseudonyms."""


def redact_domains(text: str, names: Pseudonyms) -> str:
    """Rewrite the domains of virsh-domains from the elements that the list above allows. Raises
    ParseError if the text is no XML."""
    root = parse_xml(text, "domains", "virsh dumpxml")
    redacted_root = etree.Element("domains")
    redacted_root.text = "\n"
    for domain in root.findall("domain"):
        redacted_domain = _copy(domain, "")
        identity = []
        for tag, kind in (("name", "vm"), ("uuid", "uuid")):
            secret = (domain.findtext(tag) or "").strip()
            if secret:
                element = etree.Element(tag)
                element.text = (
                    names.replace_uuid(secret)
                    if kind == "uuid"
                    else NAME_PREFIX + names.replace_secret(kind, secret)
                )
                identity.append(element)
        mark = domain.find(f"metadata/{_MARK}")
        if mark is not None:
            identity.append(etree.Element("metadata"))
            copied = etree.SubElement(identity[-1], _MARK, nsmap={"homenode": LAYOUT_NAMESPACE})
            if mark.get("uuid"):
                # The pseudonym of the domain's own UUID, or of another's: whose it is can be read.
                copied.set("uuid", names.replace_uuid(str(mark.get("uuid"))))
        for at, element in enumerate(identity):
            redacted_domain.insert(at, element)
        for address in redacted_domain.iterfind("devices/hostdev/source/address[@uuid]"):
            address.set("uuid", names.replace_uuid(str(address.get("uuid"))))
        emulator = redacted_domain.find("devices/emulator")
        if emulator is not None and not emulator.text:
            emulator.text = UNKNOWN_EMULATOR
        redacted_domain.tail = "\n"
        redacted_root.append(redacted_domain)
    etree.indent(redacted_root)
    return etree.tostring(redacted_root, encoding="unicode") + "\n"


def _copy(element: etree._Element, path: str) -> etree._Element:
    """Return the element with the content that its row allows, without namespaces and comments."""
    clone = etree.Element(str(element.tag))
    for name, form in _DOMAIN[path].items():
        value = element.get(name) if name else (element.text or "").strip()
        if value and form.fullmatch(value):
            if name:
                clone.set(name, value)
            else:
                clone.text = value
    for child in element:
        # Comments and entities are nodes without a name.
        child_path = f"{path}/{child.tag}".lstrip("/") if isinstance(child.tag, str) else ""
        if child_path in _DOMAIN and child_path:
            clone.append(_copy(child, child_path))
    return clone


_REDACTORS: dict[str, Callable[[str, Pseudonyms], str]] = {
    "lspci": _redact_lspci,
    **dict.fromkeys(("amd-smi-topology", "amd-smi-partition", "rocm-smi-json"), _redact_amd),
    "nvidia-smi-query": redact_nvidia_query,
    "nvidia-smi-topo": _redact_topology,
    **dict.fromkeys(("qemu-version", "uname", "virsh-version"), redact_release),
    "virsh-capabilities": redact_capabilities,
    "virsh-domains": redact_domains,
}


def _split_words(texts: Iterable[str | None]) -> tuple[str, ...]:
    # "(none)" is the domain name of a host without a domain name.
    return tuple(word for text in texts for word in (text or "").split() if word != "(none)")


def _find_distinct_words(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in words if word))
