"""Redact: a snapshot without what gives whose machine it is.

Two nets, one behind the other. Every source keeps only what is known to be structure, where its
format allows that: XML elements, kernel parameters, files that have their form. What is left is
searched for everything that shows itself by its form (UUIDs, MACs, addresses) or is known by name
(host, user, serials). Secrets get pseudonyms, the same everywhere (machine/snapshot/pseudonyms.py).

PCI addresses, PU lists, masks and distances are no secrets and stay as they are.
"""

import re
from collections.abc import Callable, Iterable

from msgspec import Struct

from homenode.errors import InputError
from homenode.machine.snapshot.contents import (
    IDENTITY_COMMANDS,
    IDENTITY_PATHS,
    SERIAL_PATHS,
    words,
)
from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.snapshot.pseudonyms import Pseudonyms
from homenode.machine.snapshot.redacted_xml import (
    redact_capabilities,
    redact_domains,
    redact_nvidia_query,
)

_SHORTEST_SECRET = 4
"""Characters; most files of /sys are shorter ("1", "0-3")."""

_TOKEN = re.compile(r'(?:[^\s"]|"[^"]*")+')
_SAFE_TOKEN = re.compile(r"[A-Za-z0-9_,:.;+*!@/=-]{0,400}", re.ASCII)
_VALUE_PART = re.compile(r"[A-Za-z0-9_.]+|[^A-Za-z0-9_.]+", re.ASCII)
_STRUCTURE = re.compile(
    r"[,:;+*!@/=-]+|\d{1,12}[kKmMgGtT]?|0x[0-9a-fA-F]{1,16}|[0-9a-fA-F]{4}|[0-9a-fA-F]{2}\.[0-7]",
    re.ASCII,
)
"""In a kernel parameter's value: numbers, sizes, lists, masks, PCI IDs and addresses."""

_VALUE_WORDS, _PARAMETERS = words("values"), words("parameters")
_MODULES = tuple(words("modules"))

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


class Redacted(Struct, frozen=True):
    """A snapshot that may be shown.

    left_out: (tool, reason) where an output does not parse, so that nothing in it can be determined
    from anything else. not_everywhere: see Manifest.
    """

    snapshot: MemorySnapshot
    left_out: tuple[tuple[str, str], ...]
    not_everywhere: tuple[str, ...] = ()


class Identities(Struct, frozen=True):
    """Names that are redacted wherever they stand."""

    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    serials: tuple[str, ...] = ()


def identities_of(snapshot: Snapshot, also: Identities | None = None) -> Identities:
    """The names of a host and of the user who reads it; `also` adds to them."""
    also = also or Identities()
    words = [snapshot.read_text(path) for path in IDENTITY_PATHS]
    users = [snapshot.command_output(command.name) for command in IDENTITY_COMMANDS]
    serials = [(snapshot.read_text(path) or "").strip() for path in SERIAL_PATHS]
    return Identities(
        _distinct((*also.hosts, *_words(words))),
        _distinct((*also.users, *_words(users))),
        # "To be filled by O.E.M." is no serial.
        _distinct((*also.serials, *(one for one in serials if " " not in one))),
    )


def redact(
    snapshot: MemorySnapshot, identities: Identities, notes: tuple[tuple[str, str], ...] = ()
) -> Redacted:
    """The snapshot under the name "host", without anything of its owner.

    notes: (path or tool, remark) that go with it, redacted like the rest, at the head of left_out.
    """
    names = Pseudonyms(identities.hosts, identities.users)
    for serial in identities.serials:
        names.serial(serial)
    commands: dict[str, str] = {}
    left_out: list[tuple[str, str]] = []
    # Commands first: they give serials, which are then known in files too.
    for name, text in sorted(snapshot.commands.items()):
        try:
            commands[name] = _REDACTORS.get(name, _scrub)(text, names)
        except InputError as error:
            left_out.append((name, names.scrub(error.message)))
    # And again, because the last of them may have given a serial that stands in the first.
    commands = {name: names.scrub_words(text) for name, text in commands.items()}
    return Redacted(
        MemorySnapshot(
            "host",
            {
                names.scrub_forms(path): _file(path, text, names)
                for path, text in sorted(snapshot.files.items())
            },
            {
                names.scrub_forms(path): names.scrub_forms(target)
                for path, target in sorted(snapshot.links.items())
            },
            commands,
            tuple(names.scrub_forms(path) for path in snapshot.folders),
        ),
        (*((what, names.scrub(remark)) for what, remark in notes), *left_out),
        names.not_everywhere,
    )


def redact_command_line(text: str, names: Pseudonyms) -> str:
    """A kernel command line with the parameters that bear on placement; others are "redacted", and
    so are words of their values that the kernel does not know.

    >>> redact_command_line('root=UUID=12 isolcpus=2-31 "a b" hugepages=64 -- -p secret',
    ...                     Pseudonyms())
    'redacted isolcpus=2-31 redacted hugepages=64 redacted redacted redacted'
    """
    kept = []
    for token in _TOKEN.findall(text):
        name, _, value = token.partition("=")
        known = name in _PARAMETERS or name.startswith(_MODULES)
        if not known or not _SAFE_TOKEN.fullmatch(token):
            kept.append("redacted")
            continue
        parts = (
            part if _STRUCTURE.fullmatch(part) or part.lower() in _VALUE_WORDS else "redacted"
            for part in _VALUE_PART.findall(value)
        )
        kept.append(names.scrub(name + ("=" if "=" in token else "") + "".join(parts)))
    return " ".join(kept)


def redact_product(text: str, names: Pseudonyms) -> str:
    """The name of a machine as its maker gives it, without a serial that stands in it.

    >>> redact_product("PowerEdge R750 S/N CZ3049XYZ1", Pseudonyms())
    'PowerEdge R750 redacted'
    >>> redact_product("ProLiant DL380 CZ3049XY71", Pseudonyms())
    'ProLiant DL380 serial-1'
    >>> redact_product("SYS-821GE-TNHR", Pseudonyms())
    'SYS-821GE-TNHR'
    """
    marked = _SERIAL_MARK.search(text)
    if marked is not None:
        text = text[: marked.start()].rstrip() + " redacted" + ("\n" if text[-1:] == "\n" else "")
    return names.scrub(_SERIAL_WORD.sub(lambda found: names.serial(found[0]), text))


def _file(path: str, text: str, names: Pseudonyms) -> str:
    if path == "/proc/cmdline":
        return redact_command_line(text, names) + "\n"
    if path.startswith("/sys/devices/virtual/dmi/") or path == "/proc/device-tree/model":
        return redact_product(text, names)
    # These are binary, and gather() has blanked what is not structure.
    if path.endswith("/config") or path.startswith("/sys/firmware/acpi/tables/"):
        return text
    if len(text.strip()) < _SHORTEST_SECRET:
        return text
    return names.scrub(text)


def _scrub(text: str, names: Pseudonyms) -> str:
    return names.scrub(text)


def _lspci(text: str, names: Pseudonyms) -> str:
    """lspci -vvv: vital product data holds serials, asset tags and whatever a vendor likes.

    [SN] Serial number: MT2311X12345     [V3] Vendor specific: 8f2a...     [YA] Asset tag: rack 4
    """
    lines = []
    for line in text.splitlines():
        field = _VPD_FIELD.match(line)
        if field is not None:
            if field[1] == "SN":
                names.serial(field[2])
            line = line[: field.start(2)] + "redacted"
        slot = _SLOT_FIELD.match(line)
        if slot is not None and not _SLOT.fullmatch(slot[2].strip()):
            line = slot[1] + names.of("slot", slot[2].strip())  # somebody's label
        lines.append(_SERIAL_FIELD.sub(lambda found: found[1] + _serial(found[2], names), line))
    return names.scrub("\n".join(lines) + "\n")


def _serial(text: str, names: Pseudonyms) -> str:
    """A serial's pseudonym; one like b8-ce-f6-ff-ff-12-34-56 is found by its form later on."""
    return text if names.scrub(text) != text or text == "redacted" else names.serial(text)


_AMD_SECRET = re.compile(r'("[^"]{0,40}(?:serial|uuid|guid|hive)[^"]{0,20}":\s{0,4})("[^"]*"|\d+)')


def _amd(text: str, names: Pseudonyms) -> str:
    return names.scrub(_AMD_SECRET.sub(r'\1"redacted"', text))


_REDACTORS: dict[str, Callable[[str, Pseudonyms], str]] = {
    "lspci": _lspci,
    "amd-smi-topology": _amd,
    "amd-smi-partition": _amd,
    "nvidia-smi-query": redact_nvidia_query,
    "virsh-capabilities": redact_capabilities,
    "virsh-domains": redact_domains,
}


def _words(texts: Iterable[str | None]) -> tuple[str, ...]:
    # "(none)" is the domain name of a host that has none.
    return tuple(word for text in texts for word in (text or "").split() if word != "(none)")


def _distinct(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in words if word))
