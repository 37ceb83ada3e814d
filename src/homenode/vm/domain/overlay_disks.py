"""OverlayDisks: a domain with throw-away disks over its own, which are then not written."""

import re
from collections.abc import Mapping

from msgspec import Struct

from homenode.errors import InputError
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.edits import (
    Edit,
    New,
    apply,
    insert_before,
    remove,
    set_attribute,
    set_attributes,
)
from homenode.vm.domain.read import open_domain

_FORMATS = ("raw", "qcow2")
_TARGET = re.compile(r"[A-Za-z0-9_:]{1,64}\Z", re.ASCII)
_OVER = {"file": "file", "block": "dev"}
"""Disk types that an overlay can lie over, with the attribute that names what is under it."""


class WritableDisk(Struct, frozen=True):
    """A disk that the guest may write. target: its name in the guest. path: file or block device.

    format: of its content; "raw" where the document does not say, as libvirt takes it.
    """

    target: str
    path: str
    format: str
    is_block: bool


def writable_disks(xml: bytes, source: str) -> tuple[WritableDisk, ...]:
    """Every disk that needs an overlay, in the document's order.

    Raises InputError for one that cannot have one: on the network, from a pool, encrypted, a part
    of a file, of another format than raw and qcow2, or passed through as a LUN; for a name that is
    no absolute path; and for a folder of the host's that the guest may write.
    """
    document = open_domain(xml, source)
    _refuse_folders(document)
    return tuple(_disk(document, element) for element in _writable(document))


def with_overlays(xml: bytes, path_of_target: Mapping[str, str], source: str) -> bytes:
    """The document with each of these disks replaced by a qcow2 file."""
    document = open_domain(xml, source)
    edits: list[Edit] = []
    for element in _writable(document):
        path = path_of_target[_target(document, element)]
        under = element.child("source")
        assert under is not None, "_writable leaves out disks without one"
        edits += set_attribute(document, element, "type", "file")
        edits += set_attributes(document, under, {"dev": None, "file": path})
        driver = element.child("driver")
        if driver is None:
            wanted = New("driver", {"name": "qemu", "type": "qcow2"})
            edits += insert_before(document, under, [wanted])
        else:
            edits += set_attribute(document, driver, "type", "qcow2")
        for chain in element.all("backingStore"):
            edits += remove(document, chain)
    return apply(document, edits).to_bytes()


def _writable(document: Document) -> tuple[Element, ...]:
    return tuple(
        disk
        for disk in document.root.all("devices/disk")
        if disk.get("device") in (None, "disk", "lun", "floppy")
        and disk.child("readonly") is None
        and disk.child("source") is not None
    )


def _refuse_folders(document: Document) -> None:
    for folder in document.root.all("devices/filesystem"):
        if folder.child("readonly") is None and folder.get("type") != "ram":
            raise InputError(
                f"{document.source}:{folder.line}: expected no folder of the host's that the guest "
                "may write, found a <filesystem>: a copy would write the same one",
                hint="--in-place works on the VM itself; or make it <readonly/>",
            )


def _disk(document: Document, element: Element) -> WritableDisk:
    kind = element.get("type") or "file"
    under = element.child("source")
    path = None if under is None else under.get(_OVER.get(kind, ""))
    encrypted = element.all("encryption") or element.all("source/encryption")
    target = _target(document, element)
    content = element.value("driver/@type") or "raw"
    what = None
    if encrypted:
        what = "an encrypted one"
    elif path is None or element.get("device") == "lun":
        what = f"{element.get('device') or 'disk'} of {kind}"
    elif not path.startswith("/"):  # qemu-img would take it for a protocol and connect, say
        what = f"{path[:200]!r}, which is no absolute path"
    elif content not in _FORMATS:
        what = f"one of format {content[:40]}"
    elif under is not None and under.child("slices") is not None:
        what = "a part of a file"
    if path is None or what is not None:
        raise InputError(
            f"{document.source}:{element.line}: disk {target}: expected a file or block device "
            f"that an overlay can lie over, found {what}",
            hint="--in-place works on the VM itself, and its disks",
        )
    return WritableDisk(target, path, content, kind == "block")


def _target(document: Document, element: Element) -> str:
    name = element.value("target/@dev")
    if name is None or not _TARGET.match(name):
        raise InputError(f"{document.source}:{element.line}: expected <target dev=...> of a disk")
    return name
