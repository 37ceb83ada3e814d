"""Needs: what a domain needs of the machine that starts it, as its document says it.

One table, needs.toml: a row for each place of a document that names something of the host, with the
kind of need that it is. What the machine answers is in paths.py and libvirt_answers.py. What
libvirt makes itself at the start is no need: an NVRAM file from its template, sockets in folders of
its own, ports and addresses that it chooses.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from msgspec import Struct, structs, toml

from homenode.errors import InputError
from homenode.input_files import package_text
from homenode.vm.domain.controllers import argument_properties, qemu_arguments
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.fields import size_of
from homenode.vm.domain.memory import memory_devices


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
    kind: str
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

    def needs(self, subject: str, get: Callable[[str], str | None]) -> Iterator[Need]:
        """The need of one place, of which `get` reads; none where it does not fit."""
        value, detail = (_written(one, get) for one in (self.value, self.detail))
        if value and all((get(path) or "") in values for path, values in self.where.items()):
            yield Need(subject=subject, kind=self.kind, value=value, detail=detail)


def _written(what: str, get: Callable[[str], str | None]) -> str:
    """What a row names: itself behind "=" and as a path; of several places, "0" where one is not
    there, and nothing where the last is not."""
    if what.startswith(("=", "/")):
        return what.removeprefix("=")
    found = [get(one) for one in what.split()] or [None]
    return " ".join(one or "0" for one in found) if found[-1] else ""


class _Kind(NamedTuple):
    """What a value must be, in words for findings, and the finding where it is not."""

    words: str
    finding: str


class _Table(Struct, frozen=True):
    kinds: dict[str, _Kind]
    rows: tuple[_Row, ...]
    options: tuple[_Row, ...]
    connections: dict[str, tuple[str, ...]]
    chardevs: tuple[str, ...]
    shorthands: dict[str, tuple[str, str]]


TABLE = toml.decode(package_text("check", "start", "needs.toml"), type=_Table)
"""What a value alone says. What needs more than that is in _READERS."""

_NAMED_BY = ("target/@dev", "target/@name", "alias/@name", "@bus", "@type")


def in_words(kind: str) -> str:
    """What a kind is about: "disk image" would be "image"."""
    return kind.lower().replace("_", " ")


def needs_of(document: Document) -> tuple[Need, ...]:
    """Everything that the domain needs of its machine, in the order of the rows, however often."""
    found = [need for row in TABLE.rows for need in _of_row(document, row)]
    for read in _READERS:
        found += read(document)
    return tuple(found)


def _of_row(document: Document, row: _Row) -> Iterator[Need]:
    places = (elements(document.root, path) for path in row.path.split())
    for element in itertools.chain.from_iterable(places):
        yield from row.needs(_subject(document, element), partial(_read, element))


def _read(element: Element, path: str) -> str | None:
    return element.text.strip() if path == "." else element.value(path)


def elements(root: Element, path: str) -> Iterator[Element]:
    """Those down a path, below each element of it. "." is the root itself."""
    if path == ".":
        yield root
        return
    name, _, rest = path.partition("/")
    for child in root.all(name):
        if rest:
            yield from elements(child, rest)
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
    yield Need(subject="<emulator>", kind="EMULATOR", value=emulator)
    mode = root.value("cpu/@mode") or ("custom" if root.value("cpu/model") else None)
    if mode is not None:
        name = mode if mode != "custom" else root.value("cpu/model") or ""
        detail = root.value("cpu/@check") or "" if mode == "custom" else ""
        yield Need(subject="<cpu>", kind="CPU", value=name, detail=detail)
    name = root.value("name") or ""
    yield Need(subject="<name>", kind="NAME", value=name, detail=root.value("uuid") or "")


def _disks(document: Document) -> Iterator[Need]:
    for disk in document.root.all("devices/disk"):
        source = disk.child("source")
        if source is None or source.get("startupPolicy") == "optional":
            continue
        is_disc = disk.get("device") in ("cdrom", "floppy")
        own = Need(
            subject=_subject(document, disk),
            kind="IMAGE",
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
        yield structs.replace(one, kind="VOLUME", value=pool, detail=source.get("volume") or "")
    elif kind == "block" and path:
        yield structs.replace(one, kind="BLOCK", value=path)
    elif kind == "file" and path:
        yield structs.replace(one, value=path)
    if below is not None and below.child("source") is not None:
        detail = below.value("format/@type") or "raw"
        under = structs.replace(top, detail=detail, is_written=False)
        yield from _layers(under, below, below.get("type") or "file")


def _implied(document: Document) -> Iterator[Need]:
    """What elements without a path need."""
    root = document.root
    for device in root.all("devices/shmem"):
        size, name = device.at("size"), device.get("name") or ""
        if size is None or device.child("server") is not None:
            continue
        with suppress(InputError):  # a size that libvirt refuses itself
            whole = str(size_of(size))
            yield Need(subject=f"shmem {name}", kind="SHARED", value=name, detail=whole)
    for device in memory_devices(document):
        path, size = device.value("source/path"), device.at("target/size")
        if path and size is not None:
            whole = str(size_of(size))
            yield Need(subject=_subject(document, device), kind="BACKING", value=path, detail=whole)
    locked = root.at("memoryBacking/locked") or root.at("memtune/hard_limit")
    if locked is not None or any(one.get("type") == "pci" for one in root.all("devices/hostdev")):
        yield Need(subject="locked memory", kind="LOCK", value="locked")


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
            if option.startswith("/"):  # which is the image of a disk
                yield Need(subject=option[:80], kind="FILE", value=option)
            continue
        if at + 1 < len(words) and not words[at + 1].startswith("-"):
            value = words[at + 1]
        yield Need(subject=option, kind="ARGUMENT", value=option, detail=value)
        said = _properties(option, value)
        if said[""] == "vfio-pci" and (place := _HOST.match(said.get("host", ""))) is not None:
            where = " ".join(f"0x{word or '0'}" for word in place.groups())
            yield Need(subject=option, kind="PCI", value=where)
        for row in TABLE.options:
            for need in row.needs(option, said.get) if option in row.path.split() else ():
                if need.value.startswith("/") or need.kind not in _PATHS:
                    yield need
        at += 1 + bool(value)
        count += 1


_PATHS = ("FILE", "NODE", "TPM", "FOLDER", "MADE", "PIPE", "SOCKET", "PARENT", "IMAGE")


def _properties(option: str, value: str) -> dict[str, str]:
    """The properties of an argument, "." = the whole; those of -serial or -gdb as -chardev has
    them.

    >>> _properties("-gdb", "tcp::1234")
    {'': 'socket', '.': 'tcp::1234', 'address': ':1234'}
    """
    said = argument_properties(value)
    said[""] = next((said[name] for name in _KINDS if name in said), "")
    scheme, _, rest = said[""].partition(":")
    if option in TABLE.chardevs and scheme in TABLE.shorthands:
        said[""], name = TABLE.shorthands[scheme]
        return {**said, ".": value, name: rest}
    return {**said, ".": value, "*": said[""]}


_KINDS = ("driver", "qom-type", "backend", "")

_READERS = (_machine, _disks, _implied, _arguments)


def not_asked(document: Document, where: str) -> str:
    """What of a start on another machine cannot be known here; its paths are not looked at."""
    kinds = dict.fromkeys(in_words(need.kind) for need in needs_of(document))
    return f"whether it would start on {where}: {', '.join(kinds)}; run homenode verify there"
