"""Copy: a domain that can stand next to the one that it was made from.

Everything that must be a domain's own gets a new value, derived from the original's and the new
name: the same copy twice is the same bytes. What two domains would still share is a finding.
"""

import hashlib
import re
import uuid as uuids

from homenode.errors import InputError, UsageError
from homenode.vm.domain.codec import read_name
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.edits import (
    Edit,
    apply,
    drop_attribute,
    remove,
    set_attribute,
    set_attributes,
    set_text,
)
from homenode.vm.domain.read import open_domain
from homenode.vm.plan_model import PlanFinding, plan_finding

_NAME = re.compile(r"[^/\x00-\x1f]{1,255}\Z")
_LIBVIRT_SOCKET = "/libvirt/qemu/"


def copy_domain(xml: bytes, name: str, source: str = "domain") -> bytes:
    """The domain under another name, with its own UUID, NVRAM file, MACs and generation id.

    Raises UsageError for a name that libvirt would refuse, InputError where the name is the
    original's or the UUID is none.
    """
    check_name(name)
    document = open_domain(xml, source)
    original = read_name(document)
    if name == original:
        raise InputError(
            f"{source}: expected another name for the copy, found {name!r}, the original's",
            hint="choose another --name, or leave it out to change the domain itself",
        )
    for step in (_identity, _firmware, _devices):
        document = apply(document, step(document, original, name))
    return document.to_bytes()


def check_name(name: str) -> str:
    """The name of a new domain. Raises UsageError for one that libvirt would refuse."""
    if not _NAME.match(name) or not name.strip() or name in (".", ".."):
        raise UsageError(
            f"name {name!r}: expected 1 to 255 characters without / and line breaks",
            hint="the domain's NVRAM file is named after it",
        )
    return name


def copied_uuid(original_uuid: str, name: str) -> str:
    """The UUID of a copy: version 5, of the name in the original's namespace."""
    return str(uuids.uuid5(uuids.UUID(original_uuid), name))


def copied_mac(original_mac: str, name: str) -> str:
    """The MAC of a copy: locally administered, unicast.

    >>> copied_mac("52:54:00:11:22:33", "copy")[:2] in ("02", "06", "0a", "0e")
    True
    """
    digest = hashlib.sha256(f"{name}\n{original_mac.lower()}".encode()).digest()
    octets = bytes([0x02 | (digest[0] & 0x0C), *digest[1:6]])
    return ":".join(f"{octet:02x}" for octet in octets)


def shared_with_original(xml: bytes, source: str = "domain") -> tuple[PlanFinding, ...]:
    """What a copy of this domain has in common with it, so that both may not run at once."""
    document = open_domain(xml, source)
    devices = document.root.child("devices")
    found = (_shared(element) for element in (() if devices is None else devices.children))
    return tuple(finding for finding in found if finding is not None)


def _shared(element: Element) -> PlanFinding | None:
    target = element.child("target")
    name = (None if target is None else target.get("dev")) or f"on line {element.line}"
    source = element.child("source")
    path = None if source is None else source.get("path")
    if element.name == "disk":
        writable = element.get("device") in (None, "disk", "lun") and source is not None
        if not writable or element.child("readonly") is not None:
            return None
        kind = "copy-shares-disk"
        detail = "both domains write it: running both at once destroys its file system"
    elif _is_host_device(element):
        kind = "copy-shares-device"
        detail = "both domains are given this host device: only one of them can run"
    elif element.name == "interface" and target is not None:
        if name.startswith(("vnet", "macvtap", "on line")):
            return None  # libvirt chooses these again
        kind = "copy-shares-tap"
        detail = "both domains name this host interface: only one of them can run"
    elif path is not None and element.get("type") in ("file", "unix"):
        if _LIBVIRT_SOCKET in path:
            return None
        kind, name = "copy-shares-file", path
        detail = "both domains open this file"
    else:
        return None
    return plan_finding(kind, f"{element.name} {name}", detail)


def _is_host_device(element: Element) -> bool:
    return (element.name == "hostdev" and element.get("type") == "pci") or (
        element.name == "interface" and element.get("type") == "hostdev"
    )


def _identity(document: Document, original: str, name: str) -> list[Edit]:
    root = document.root
    element = root.child("name")
    assert element is not None, "read_name has read it"
    edits = set_text(document, element, name) + drop_attribute(document, root, "id")
    uuid = root.child("uuid")
    if uuid is not None:
        edits += set_text(document, uuid, _new_uuid(document, uuid, name))
    for number in root.all("hwuuid"):
        edits += set_text(document, number, _new_uuid(document, number, name))
    generation = root.child("genid")
    if generation is not None and generation.text.strip():
        edits += set_text(document, generation, _new_uuid(document, generation, name))
    # libvirt refuses an SMBIOS uuid that is not the domain's.
    for sysinfo in root.all("sysinfo"):
        for entry in sysinfo.walk():
            if entry.name == "entry" and entry.get("name") == "uuid" and entry.text.strip():
                edits += set_text(document, entry, _new_uuid(document, entry, name))
    return edits


def _new_uuid(document: Document, element: Element, name: str) -> str:
    try:
        return copied_uuid(element.text.strip(), name)
    except ValueError:
        raise InputError(
            f"{document.source}:{element.line}: expected a UUID in <{element.tag}>, found "
            f"{element.text.strip()[:60]!r}"
        ) from None


def _firmware(document: Document, original: str, name: str) -> list[Edit]:
    nvram = document.root.at("os", "nvram")
    if nvram is None:
        return []
    source = nvram.child("source")
    if source is not None:
        path = source.get("file")
        if path is None:  # a block device or network disk: no one but the user can make another
            return []
        return set_attribute(document, source, "file", _own_path(path, original, name))
    path = nvram.text.strip()
    return set_text(document, nvram, _own_path(path, original, name)) if path else []


def _own_path(path: str, original: str, name: str) -> str:
    """The file next to the original's: its name with the new domain's in it."""
    folder, slash, file = path.rpartition("/")
    if re.match(rf"{re.escape(original)}(?![A-Za-z0-9])", file):
        return folder + slash + name + file[len(original) :]
    return f"{folder}{slash}{name}_{file}"


def _devices(document: Document, original: str, name: str) -> list[Edit]:
    devices = document.root.child("devices")
    edits: list[Edit] = []
    for element in () if devices is None else devices.children:
        if element.name == "interface":
            mac = element.child("mac")
            address = None if mac is None else mac.get("address")
            if mac is not None and address is not None:
                edits += set_attribute(document, mac, "address", copied_mac(address, name))
        elif element.name == "graphics":
            edits += _graphics(document, element)
        elif element.name == "channel":
            socket = element.child("source")
            if socket is not None and _LIBVIRT_SOCKET in (socket.get("path") or ""):
                edits += remove(document, socket)  # libvirt makes the copy's own
        elif element.name == "vsock":
            cid = element.child("cid")
            if cid is not None and cid.get("address") is not None:
                edits += set_attributes(document, cid, {"auto": "yes", "address": None})
    return edits


def _graphics(document: Document, element: Element) -> list[Edit]:
    """A fixed port belongs to the original: libvirt chooses the copy's."""
    values: dict[str, str | None] = {}
    if element.get("port") not in (None, "-1"):
        values |= {"port": "-1", "autoport": "yes"}
    if element.get("tlsPort") not in (None, "-1"):
        values |= {"tlsPort": "-1", "autoport": "yes"}
    if element.get("websocket") not in (None, "-1"):
        values["websocket"] = "-1"
    return set_attributes(document, element, values)
