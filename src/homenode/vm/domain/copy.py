"""Copy: definitions of new domains: from scratch, as a copy, or with overlays on disks.

UUID, MACs and similar values are derived from the original and the new name: copying twice gives
the same bytes. Resources that both domains share are findings.
"""

import hashlib
import re
import uuid as uuids
from collections.abc import Mapping

from msgspec import Struct

from homenode.errors import InputError, UsageError
from homenode.findings import Finding, finding
from homenode.package_data import read_package_text
from homenode.units import KIB
from homenode.vm.domain.codec import read_name
from homenode.vm.domain.document import Document, Element, format_size
from homenode.vm.domain.edits import (
    Edit,
    NewElement,
    apply,
    drop_attribute,
    escape_xml,
    insert_before,
    remove,
    set_attribute,
    set_attributes,
    set_text,
)
from homenode.vm.domain.hostdevs import is_pci_function
from homenode.vm.domain.read import open_domain

_NAME = re.compile(r"[^/\x00-\x1f]{1,255}\Z")
_LIBVIRT_SOCKET = "/libvirt/qemu/"


def copy_domain(
    xml: bytes, name: str, source: str = "domain", *, has_own_macs: bool = True
) -> bytes:
    """Return the domain under another name, with its own UUID, NVRAM file, MACs and generation id.

    has_own_macs: False for a copy that runs only while the original is off, on the same networks.
    Raises UsageError for a name that libvirt rejects, InputError for the original's name or a
    malformed UUID.
    """
    check_name(name)
    document = open_domain(xml, source)
    original = read_name(document)
    if name == original:
        raise InputError(
            f"{source}: --name {name!r} is the name of the VM itself",
            hint="choose another --name, or omit it to change the domain itself",
        )
    for step in (
        _edit_identity,
        _edit_firmware,
        _edit_devices,
        *((_edit_macs,) if has_own_macs else ()),
    ):
        document = apply(document, step(document, original, name))
    return document.to_bytes()


def check_name(name: str) -> str:
    """Check the name of a new domain. Raises UsageError if libvirt would reject it."""
    if not _NAME.match(name) or not name.strip() or name in (".", ".."):
        raise UsageError(
            f"name {name!r}: expected 1 to 255 characters without / and line breaks",
            hint="the domain's NVRAM file is named after it",
        )
    return name


def make_uuid(original_uuid: str, name: str) -> str:
    """Return the UUID of a copy: version 5, of the name in the original's namespace."""
    return str(uuids.uuid5(uuids.UUID(original_uuid), name))


def make_mac(original_mac: str, name: str) -> str:
    """Return the MAC of a copy: locally administered, unicast.

    >>> make_mac("52:54:00:11:22:33", "copy")[:2] in ("02", "06", "0a", "0e")
    True
    """
    digest = hashlib.sha256(f"{name}\n{original_mac.lower()}".encode()).digest()
    octets = bytes([0x02 | (digest[0] & 0x0C), *digest[1:6]])
    return ":".join(f"{octet:02x}" for octet in octets)


def check_shared(xml: bytes, source: str = "domain") -> tuple[Finding, ...]:
    """The resources that the original and its copy share, so that both cannot run at once."""
    document = open_domain(xml, source)
    findings = map(_find_sharing, document.root.all("devices/*"))
    return tuple(finding for finding in findings if finding is not None)


def _find_sharing(element: Element) -> Finding | None:
    name = element.value("target/@dev") or f"on line {element.line}"
    path = element.value("source/@path")
    if element.name == "disk":
        if not _is_writable(element):
            return None
        kind = "copy-shares-disk"
        detail = "both domains write it: running both at once destroys its file system"
    elif element.name == "hostdev" or is_pci_function(element):
        kind = "copy-shares-device"
        detail = "both domains have this host device: only one of them can run"
    elif element.name == "interface" and element.all("target"):
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
    return finding(kind, f"{element.name} {name}", observed=detail)


def _edit_identity(document: Document, original: str, name: str) -> list[Edit]:
    root = document.root
    element = root.child("name")
    assert element is not None, "read_name has read it"
    edits = set_text(document, element, name) + drop_attribute(document, root, "id")
    # libvirt rejects an SMBIOS uuid that is not the domain's.
    entries = [
        entry
        for sysinfo in root.all("sysinfo")
        for entry in sysinfo.walk()
        if entry.name == "entry" and entry.get("name") == "uuid"
    ]
    chosen_elements = [
        element_with_uuid
        for element_with_uuid in (*root.all("genid"), *entries)
        if element_with_uuid.text.strip()
    ]
    for element_with_uuid in (*root.all("uuid"), *root.all("hwuuid"), *chosen_elements):
        edits += set_text(
            document, element_with_uuid, _make_uuid(document, element_with_uuid, name)
        )
    return edits


def _make_uuid(document: Document, element: Element, name: str) -> str:
    try:
        return make_uuid(element.text.strip(), name)
    except ValueError:
        raise InputError(
            f"{document.source}:{element.line}: expected a UUID in <{element.tag}>, found "
            f"{element.text.strip()[:60]!r}"
        ) from None


def _edit_firmware(document: Document, original: str, name: str) -> list[Edit]:
    nvram = document.root.find("os/nvram")
    if nvram is None:
        return []
    source = nvram.child("source")
    if source is not None:
        path = source.get("file")
        if path is None:  # a block device or network disk: only the user can copy it
            return []
        return set_attribute(document, source, "file", _own_path(path, original, name))
    path = nvram.text.strip()
    return set_text(document, nvram, _own_path(path, original, name)) if path else []


def _own_path(path: str, original: str, name: str) -> str:
    """Return a file next to the original's, with the new domain's name in its name."""
    directory, slash, file = path.rpartition("/")
    if re.match(rf"{re.escape(original)}(?![A-Za-z0-9])", file):
        return directory + slash + name + file[len(original) :]
    return f"{directory}{slash}{name}_{file}"


def _edit_devices(document: Document, original: str, name: str) -> list[Edit]:
    edits: list[Edit] = []
    for element in document.root.all("devices/*"):
        if element.name == "graphics":
            edits += _edit_graphics(document, element)
        elif element.name == "channel":
            socket = element.child("source")
            if socket is not None and _LIBVIRT_SOCKET in (socket.get("path") or ""):
                edits += remove(document, socket)  # libvirt makes the copy's own
        elif element.name == "vsock":
            cid = element.child("cid")
            if cid is not None and cid.get("address") is not None:
                edits += set_attributes(document, cid, {"auto": "yes", "address": None})
    return edits


def _edit_macs(document: Document, original: str, name: str) -> list[Edit]:
    edits: list[Edit] = []
    for interface in document.root.all("devices/interface"):
        for mac in interface.all("mac"):
            if (address := mac.get("address")) is not None:
                edits += set_attribute(document, mac, "address", make_mac(address, name))
    return edits


def _edit_graphics(document: Document, element: Element) -> list[Edit]:
    """Remove fixed ports, which belong to the original: libvirt chooses the copy's."""
    values: dict[str, str | None] = {}
    if element.get("port") not in (None, "-1"):
        values |= {"port": "-1", "autoport": "yes"}
    if element.get("tlsPort") not in (None, "-1"):
        values |= {"tlsPort": "-1", "autoport": "yes"}
    if element.get("websocket") not in (None, "-1"):
        values["websocket"] = "-1"
    return set_attributes(document, element, values)


DEFAULT_NAME = "vm"

_MACHINES = {
    # The GIC of every host with more than 8 cores; QEMU's default is version 2.
    "aarch64": ("virt", "<acpi/>\n    <gic version='3'/>"),
    "x86_64": ("q35", "<acpi/>\n    <apic/>"),
}
"""Machine type and features, by architecture. Both have UEFI and a PCIe tree."""

_DOCUMENT = read_package_text("vm", "domain", "new_vm.xml")


def make_domain(
    vcpus: int, memory_bytes: int, *, architecture: str | None, name: str = DEFAULT_NAME
) -> bytes:
    """Return a KVM guest of this size with UEFI and the host's CPU, without disk and network.

    architecture: of the host, None = x86_64. Memory is whole KiB, rounded up as libvirt does.
    Raises UsageError for a name that libvirt would reject, InputError for an unsupported
    architecture.
    """
    architecture = architecture or "x86_64"
    if architecture not in _MACHINES:
        raise InputError(
            f"a new VM: expected a host of {' or '.join(sorted(_MACHINES))}, found {architecture}",
            hint="give a domain XML: virsh dumpxml --inactive NAME > VM.xml",
        )
    machine, features = _MACHINES[architecture]
    memory, unit = format_size(-(-memory_bytes // KIB) * KIB, ("GiB", "MiB"))
    return _DOCUMENT.format(
        name=escape_xml(check_name(name)).decode(),
        unit=unit,
        memory=memory,
        vcpus=vcpus,
        architecture=architecture,
        machine=machine,
        features=features,
    ).encode()


_FORMATS = ("raw", "qcow2")
_TARGET = re.compile(r"[A-Za-z0-9_:]{1,64}\Z", re.ASCII)
_OVER = {"file": "file", "block": "dev"}
"""Disk types that can have an overlay, with the attribute that names the backing file."""


class WritableDisk(Struct, frozen=True):
    """A disk that the guest can write."""

    target: str  # its name in the guest
    path: str  # file or block device
    format: str  # format of the disk's content; "raw" if not given, as in libvirt
    is_block: bool


def list_writable_disks(xml: bytes, source: str) -> tuple[WritableDisk, ...]:
    """Return every disk that needs an overlay, in the definition's order.

    Raises InputError for one that cannot have one: on the network, from a pool, encrypted, a part
    of a file, of another format than raw and qcow2, or passed through as a LUN; for a name that is
    no absolute path; and for a directory of the host's that the guest may write.
    """
    document = open_domain(xml, source)
    _reject_directories(document)
    return tuple(_read_disk(document, element) for element in _find_writable_disks(document))


def replace_disks(xml: bytes, path_of_target: Mapping[str, str], source: str) -> bytes:
    """Return the definition with each of these disks replaced by a qcow2 file."""
    document = open_domain(xml, source)
    edits: list[Edit] = []
    for element in _find_writable_disks(document):
        path = path_of_target[_read_target(document, element)]
        source_element = element.child("source")
        assert source_element is not None, "_is_writable rejects disks without one"
        edits += set_attribute(document, element, "type", "file")
        edits += set_attributes(document, source_element, {"dev": None, "file": path})
        driver = element.child("driver")
        if driver is None:
            new_driver = NewElement("driver", {"name": "qemu", "type": "qcow2"})
            edits += insert_before(document, source_element, [new_driver])
        else:
            edits += set_attribute(document, driver, "type", "qcow2")
        for chain in element.all("backingStore"):
            edits += remove(document, chain)
    return apply(document, edits).to_bytes()


def _find_writable_disks(document: Document) -> tuple[Element, ...]:
    return tuple(filter(_is_writable, document.root.all("devices/disk")))


def _is_writable(disk: Element) -> bool:
    is_kind = disk.get("device") in (None, "disk", "lun", "floppy")
    return is_kind and disk.child("readonly") is None and disk.child("source") is not None


def _reject_directories(document: Document) -> None:
    for directory in document.root.all("devices/filesystem"):
        if directory.child("readonly") is None and directory.get("type") != "ram":
            raise InputError(
                f"{document.source}:{directory.line}: expected no host directory that the guest "
                "may write, found a <filesystem>: a copy would write to the same directory",
                hint="--in-place works on the VM itself; or make it <readonly/>",
            )


def _read_disk(document: Document, element: Element) -> WritableDisk:
    kind = element.get("type") or "file"
    source = element.child("source")
    path = None if source is None else source.get(_OVER.get(kind, ""))
    encryption = element.all("encryption") or element.all("source/encryption")
    target = _read_target(document, element)
    content = element.value("driver/@type") or "raw"
    obstacle = None
    if encryption:
        obstacle = "an encrypted one"
    elif path is None or element.get("device") == "lun":
        obstacle = f"{element.get('device') or 'disk'} of {kind}"
    elif not path.startswith("/"):  # qemu-img would take it for a protocol, and might connect
        obstacle = f"{path[:200]!r}, which is not an absolute path"
    elif content not in _FORMATS:
        obstacle = f"one of format {content[:40]}"
    elif source is not None and source.child("slices") is not None:
        obstacle = "a part of a file"
    if path is None or obstacle is not None:
        raise InputError(
            f"{document.source}:{element.line}: disk {target}: expected a file or block device "
            f"that can be a backing file, found {obstacle}",
            hint="--in-place works on the VM itself, and its disks",
        )
    return WritableDisk(target, path, content, kind == "block")


def _read_target(document: Document, element: Element) -> str:
    name = element.value("target/@dev")
    if name is None or not _TARGET.match(name):
        raise InputError(f"{document.source}:{element.line}: expected <target dev=...> of a disk")
    return name
