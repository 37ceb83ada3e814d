"""Needs: what a domain needs of the machine that starts it, as its document says it.

One table, needs.toml: a row for each place of a document that names something of the host, with the
kind of need that it is. What the machine answers is in paths.py and libvirt_answers.py. What
libvirt makes itself at the start is no need: an NVRAM file from its template, sockets in folders of
its own, ports and addresses that it chooses.
"""

import itertools
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, structs, toml

from homenode.input_files import package_text
from homenode.vm.domain.controllers import argument_properties, qemu_arguments
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.fields import size_of
from homenode.vm.domain.memory import memory_devices


class NeedKind(StrEnum):
    """What a value must be on the machine, in words for findings."""

    FILE = "a file that QEMU can read"
    BACKING = "a file with room for the memory"
    NODE = "a device node"
    DISK = "a disk of this machine"
    OPENED = "what QEMU's user may open itself"
    BLOCK = "a block device"
    FOLDER = "a folder"
    PARENT = "a folder in which the file is made"
    BOUND = "a folder in which the socket is made"
    MADE = "a folder in which QEMU makes the file"
    PIPE = "a named pipe"
    SOCKET = "a socket on which something listens"
    PROGRAM = "a program"
    IMAGE = "a disk image"
    VOLUME = "a volume of an active storage pool"
    VARIABLES = "a firmware image with a template of its variable store"
    NETWORK = "an active libvirt network"
    BRIDGE = "a bridge"
    LINK = "a network interface"
    FILTER = "a libvirt network filter"
    ADDRESS = "an address of this machine"
    PORT = "a free port"
    TAP = "a name for a tap device"
    LISTENER = "a port on which something listens"
    EMULATOR = "an emulator with this accelerator and machine type"
    CPU = "a CPU that this emulator can give"
    USB = "a USB device"
    SCSI = "a SCSI device"
    PCI = "a PCI function"
    MEDIATED = "a mediated device"
    LOCK = "a limit on locked memory that libvirt can raise"
    SECURITY = "a security driver of this libvirt"
    PARTITION = "a cgroup"
    SCHEDULER = "a scheduler that this libvirt may set"
    WEIGHT = "a weight that the kernel takes"
    LABEL = "a user of this machine, whom libvirt gives what QEMU opens"
    RANGE = "a value in QEMU's range"
    NAME = "a name that no other domain has"
    DRIVER = "a block driver that this QEMU has"
    ARGUMENT = "an argument that this QEMU knows"
    ELSEWHERE = "something on another machine"

    @property
    def words(self) -> str:
        """What it is about: "disk image" would be "image"."""
        return self.name.lower().replace("_", " ")


class NeedState(StrEnum):
    """Three answers, never a silent yes."""

    READY = "ready"
    MISSING = "missing"
    UNKNOWN = "not known"


class NeedAnswer(NamedTuple):
    """Of one need. why: what was found, or why it is not known. of: the finding, where it is not
    that of its kind."""

    state: NeedState
    why: str = ""
    of: str | None = None


READY = NeedAnswer(NeedState.READY)


def missing(why: str, of: str | None = None) -> NeedAnswer:
    return NeedAnswer(NeedState.MISSING, why, of)


def unknown(why: str) -> NeedAnswer:
    return NeedAnswer(NeedState.UNKNOWN, why)


class Need(Struct, frozen=True, kw_only=True):
    """One thing that a start needs. subject: the element, in the user's words. value: the path or
    name. detail: what else it takes: an image's format, a volume, a port's address."""

    subject: str
    kind: NeedKind
    value: str
    detail: str = ""
    # Of an image: whether the guest writes it, shares it, and the chain below it is read from it.
    is_written: bool = True
    is_shared: bool = False
    is_followed: bool = False


class _Row(Struct, frozen=True):
    """A place of a document, as the head of needs.toml says it."""

    path: str
    value: str
    kind: str
    where: dict[str, tuple[str, ...]] = {}
    detail: str = ""


class _Table(Struct, frozen=True):
    rows: tuple[_Row, ...]
    options: tuple[_Row, ...]


Q = NeedKind
_TABLE = toml.decode(package_text("check", "start", "needs.toml"), type=_Table)
ROWS = _TABLE.rows
"""What a value alone says. What needs more than that is in _READERS."""

_NAMED_BY = ("target/@dev", "target/@name", "alias/@name", "@bus", "@type")


def needs_of(document: Document) -> tuple[Need, ...]:
    """Everything that the domain needs of its machine, in the order of the rows."""
    found = [need for row in ROWS for need in _of_row(document, row)]
    for read in _READERS:
        found += read(document)
    return tuple(dict.fromkeys(found))


def _of_row(document: Document, row: _Row) -> Iterator[Need]:
    places = (_elements(document.root, path) for path in row.path.split())
    for element in itertools.chain.from_iterable(places):
        value = element.text.strip() if row.value == "." else element.value(row.value)
        fits = all((element.value(path) or "") in values for path, values in row.where.items())
        if value and fits:
            yield Need(
                subject=_subject(document, element),
                kind=NeedKind[row.kind],
                value=value,
                detail=row.detail
                if row.detail[:1].isdigit()
                else (row.detail and element.value(row.detail)) or "",
            )


def _elements(root: Element, path: str) -> Iterator[Element]:
    name, _, rest = path.partition("/")
    for child in root.all(name):
        if rest:
            yield from _elements(child, rest)
        else:
            yield child


def _subject(document: Document, element: Element) -> str:
    """The device that an element belongs to, as people name it: "disk vda"."""
    above = document.parent_of
    here = element
    while (around := above.get(here.start)) is not None and around.name != "devices":
        if around.name in ("domain", "os", "resource", "sysinfo"):
            return f"<{element.name}>"
        here = around
    name = next((value for path in _NAMED_BY if (value := here.value(path))), "")
    return f"{here.name} {name}".rstrip()


def _machine(document: Document) -> Iterator[Need]:
    root = document.root
    emulator = root.value("devices/emulator") or ""
    yield Need(subject="<emulator>", kind=Q.EMULATOR, value=emulator)
    mode = root.value("cpu/@mode") or ("custom" if root.value("cpu/model") else None)
    if mode is not None:
        name = mode if mode != "custom" else root.value("cpu/model") or ""
        detail = root.value("cpu/@check") or "" if mode == "custom" else ""
        yield Need(subject="<cpu>", kind=Q.CPU, value=name, detail=detail)
    name = root.value("name") or ""
    yield Need(subject="<name>", kind=Q.NAME, value=name, detail=root.value("uuid") or "")


def _firmware(document: Document) -> Iterator[Need]:
    """The variable store: the file itself, or what it is made from and the folder for it."""
    loader, nvram = document.root.at("os/loader"), document.root.at("os/nvram")
    if loader is None or loader.get("type") != "pflash" or loader.get("stateless") == "yes":
        return
    template = None if nvram is None else nvram.get("template")
    source = None if nvram is None else nvram.value("source/@file") or nvram.text.strip()
    if nvram is not None and nvram.get("type") not in (None, "file"):
        if (served := nvram.child("source")) is not None:
            yield from _served("<nvram>", served)
        return
    if source:
        yield Need(subject="<nvram>", kind=Q.PARENT, value=source, detail="on")
    yield Need(
        subject="<nvram>",
        kind=Q.FILE if template else Q.VARIABLES,
        value=template or loader.text.strip(),
        detail=source or "",
    )


def _disks(document: Document) -> Iterator[Need]:
    for disk in document.root.all("devices/disk"):
        source = disk.child("source")
        if source is None or source.get("startupPolicy") == "optional":
            continue
        is_disc = disk.get("device") in ("cdrom", "floppy")
        own = Need(
            subject=_subject(document, disk),
            kind=Q.IMAGE,
            value="",
            detail=_image_format(disk),
            is_written=disk.child("readonly") is None and disk.get("device") != "cdrom",
            is_shared=disk.child("shareable") is not None,
            is_followed=True,
        )
        if is_disc and source.get("startupPolicy") == "requisite":
            own = structs.replace(own, is_followed=False)
        yield from _layers(own, disk, disk.get("type") or "file")


def _image_format(disk: Element) -> str:
    """A raw image that libvirt is to decrypt is one of LUKS."""
    said = disk.value("driver/@type") or "raw"
    luks = "luks" in (disk.value("encryption/@format"), disk.value("source/encryption/@format"))
    return "luks" if luks and said == "raw" else said


def _layers(top: Need, element: Element, kind: str) -> Iterator[Need]:
    """A disk and the layers below it that the document names itself."""
    source, below = element.child("source"), element.child("backingStore")
    if source is None:
        return
    cut = below is not None
    one = structs.replace(top, is_followed=top.is_followed and not cut)
    pool, path = source.get("pool"), source.get("file") or source.get("dev")
    if pool is not None:
        yield structs.replace(one, kind=Q.VOLUME, value=pool, detail=source.get("volume") or "")
    elif kind == "block" and path:
        yield structs.replace(one, kind=Q.BLOCK, value=path)
    elif kind == "file" and path:
        yield structs.replace(one, value=path)
    elif kind == "network":
        yield from _served(top.subject, source)
    elif kind == "nvme":
        yield from _functions(top.subject, source)
    if below is not None and below.child("source") is not None:
        detail = below.value("format/@type") or "raw"
        under = structs.replace(top, detail=detail, is_written=False)
        yield from _layers(under, below, below.get("type") or "file")


def _served(subject: str, source: Element) -> Iterator[Need]:
    """The servers of a network disk: only one on this machine can be looked at from here."""
    for host in source.all("host"):
        if host.get("transport") == "unix":
            continue
        name, port = host.get("name") or "", host.get("port") or ""
        here = name in _LOOPBACK and port
        yield Need(
            subject=subject,
            kind=Q.LISTENER if here else Q.ELSEWHERE,
            value=port if here else name,
            detail=name if here else f"{source.get('protocol') or 'network'} disk",
        )


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def _hostdevs(document: Document) -> Iterator[Need]:
    for one in document.root.all("devices/interface"):
        if one.get("type") == "hostdev" and (source := one.child("source")) is not None:
            yield from _functions(_subject(document, one), source)
    for one in document.root.all("devices/hostdev"):
        source, kind = one.child("source"), one.get("type")
        if source is None or source.get("startupPolicy") == "optional":
            continue
        subject = f"hostdev {kind}"
        address = source.child("address")
        if kind == "usb":
            vendor, product = source.value("vendor/@id"), source.value("product/@id")
            if vendor and product:
                yield Need(subject=subject, kind=Q.USB, value=f"{vendor}:{product}")
            elif address is not None:
                place = f"{address.get('bus')}.{address.get('device')}"
                yield Need(subject=subject, kind=Q.USB, value=place)
        elif kind == "scsi" and address is not None and source.value("adapter/@name"):
            parts = [address.get(name) or "0" for name in ("bus", "target", "unit")]
            host = (source.value("adapter/@name") or "").removeprefix("scsi_host")
            yield Need(subject=subject, kind=Q.SCSI, value=":".join((host, *parts)))
        elif kind == "scsi" and source.get("protocol") == "iscsi":
            yield from _served(subject, source)
        elif kind == "scsi_host":
            yield Need(subject=subject, kind=Q.NODE, value="/dev/vhost-scsi")
        elif kind == "mdev" and address is not None:
            uuid = address.get("uuid") or ""
            yield Need(subject=subject, kind=Q.MEDIATED, value=uuid)
        elif kind == "pci":
            yield from _functions(subject, source)


def _functions(subject: str, source: Element) -> Iterator[Need]:
    address = source.child("address")
    if address is not None:
        words = [address.get(name) or "0" for name in ("domain", "bus", "slot", "function")]
        yield Need(subject=subject, kind=Q.PCI, value=" ".join(words))


def _implied(document: Document) -> Iterator[Need]:
    """What elements without a path need."""
    root = document.root
    for vsock in root.all("devices/vsock"):
        yield Need(subject=_subject(document, vsock), kind=Q.NODE, value="/dev/vhost-vsock")
    for backend in _elements(root, "devices/tpm/backend"):
        if backend.get("type") == "emulator":
            for name in ("swtpm", "swtpm_setup"):
                yield Need(subject="tpm", kind=Q.PROGRAM, value=name)
    for port in _elements(root, "devices/interface/virtualport"):
        if port.get("type") == "openvswitch":
            yield Need(subject=_subject(document, port), kind=Q.PROGRAM, value="ovs-vsctl")
    for device in memory_devices(document):
        path, size = device.value("source/path"), device.at("target/size")
        if path and size is not None:
            whole = str(size_of(size))
            yield Need(subject=_subject(document, device), kind=Q.BACKING, value=path, detail=whole)
    for place in ("vcpu", "numatune/memory"):
        if root.value(f"{place}/@placement") == "auto":
            yield Need(subject=f"<{place.rpartition('/')[2]}>", kind=Q.PROGRAM, value="numad")
    locked = root.at("memoryBacking/locked") or root.at("memtune/hard_limit")
    if locked is not None or any(one.get("type") == "pci" for one in root.all("devices/hostdev")):
        yield Need(subject="locked memory", kind=Q.LOCK, value="locked")


_HOST = re.compile(r"(?:([0-9a-f]{1,4}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])\Z", re.ASCII)
_MAX_ARGUMENTS = 64


def _arguments(document: Document) -> Iterator[Need]:
    """Each option of <qemu:commandline> with its value, and each file that one names."""
    words = [one.get("value") or "" for one in qemu_arguments(document) if one.name.endswith("arg")]
    at, count = 0, 0
    while at < len(words) and count < _MAX_ARGUMENTS:
        option, value = words[at], ""
        if not option.startswith("-"):
            at += 1
            continue
        if at + 1 < len(words) and not words[at + 1].startswith("-"):
            value = words[at + 1]
        yield Need(subject=option, kind=Q.ARGUMENT, value=option, detail=value)
        said = argument_properties(value)
        first = said.get("driver") or said.get("qom-type") or said.get("backend") or said.get("")
        opened = [
            (value if one.value == "." else said.get(one.value), NeedKind[one.kind])
            for one in _TABLE.options
            if one.path == option and one.detail in ("", first)
        ]
        is_joined = option == "-chardev" and said.get("server") not in ("on", "server", "yes")
        if first == "vfio-pci" and (place := _HOST.match(said.get("host", ""))) is not None:
            where = " ".join(f"0x{word or '0'}" for word in place.groups())
            yield Need(subject=option, kind=Q.PCI, value=where)
        for path, kind in opened:
            if path is not None and path.startswith("/"):
                kind = Q.SOCKET if first == "socket" and is_joined else kind
                is_image = kind is Q.IMAGE
                detail = said.get("format") or "raw" if is_image else said.get("append", "")
                yield Need(subject=option, kind=kind, value=path, detail=detail)
        at += 1 + bool(value)
        count += 1


_READERS = (_machine, _firmware, _disks, _hostdevs, _implied, _arguments)


def not_asked(document: Document, where: str) -> str:
    """What of a start on another machine cannot be known here; its paths are not looked at."""
    kinds = dict.fromkeys(need.kind.words for need in needs_of(document))
    return f"whether it would start on {where}: {', '.join(kinds)}; run homenode verify there"
