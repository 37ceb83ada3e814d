"""Copying: a copy of a domain for a trial, with its own name, UUID, NVRAM and disks. [I/O]"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from homenode.errors import HostError, InputError, UsageError
from homenode.machine.tools import qcow2
from homenode.measure.trial.guest import is_there
from homenode.measure.trial.journal import TrialCopy
from homenode.process import run
from homenode.safe.durable import create_file, create_like, remove_file
from homenode.safe.input_files import MAX_BYTES, OpenFile, open_host_file, read_plain
from homenode.safe.record_directory import create_private_directory
from homenode.vm.domain.copy import (
    WritableDisk,
    copy_domain,
    list_writable_disks,
    make_uuid,
    replace_disks,
)
from homenode.vm.domain.read import find_nvram_file, open_domain
from homenode.vm.hypervisor.connection import DomainState, is_local
from homenode.vm.hypervisor.virsh import Virsh

_SUFFIX = ".homenode-trial.qcow2"
_IMAGE_S = 120.0
_NVRAM = "<nvram>"
_SECTOR = 512
_MAX_UNDER = 32
_MAX_NVRAM_BYTES = 64 << 20
_BLOCK_DIRECTORY = Path("/var/lib/libvirt/images")


class PreparedCopy(Struct, frozen=True):
    """A copy that is prepared, but not created."""

    copy: TrialCopy
    document: bytes  # its definition
    disks: tuple[WritableDisk, ...]  # under the overlays
    nvram: tuple[str, str] | None  # (the original's file, the copy's); None if it has none


def prepare_copy(virsh: Virsh, state: DomainState, original: bytes, id: str) -> PreparedCopy:
    """Return the copy to make of a domain, without creating anything.

    The copy has the original's devices, sockets and host interfaces, so only one of the two can
    run. Raises UsageError for another machine's libvirt and if the copy exists, InputError for
    disks that cannot have an overlay.
    """
    if not is_local(virsh.connect):
        raise UsageError(
            f"copy: expected a libvirt of this machine, found {virsh.connect}: overlays are "
            "made here",
            hint="run homenode there, or boot the VM itself: --in-place",
        )
    name = f"{state.name}-trial"
    disks = list_writable_disks(original, state.name)
    overlays = {disk.target: str(_name_overlay(disk, id)) for disk in disks}
    document = replace_disks(original, overlays, state.name)
    # With a new MAC, a guest configured for the old one has no network (cloud-init writes such
    # files), and a DHCP server with reservations gives it no address.
    document = copy_domain(document, name, state.name, has_own_macs=False)
    uuid = make_uuid(state.uuid, name)
    if is_there(virsh, name) and not is_there(virsh, uuid):
        raise UsageError(
            f"copy: another domain is named {name}",
            hint="rename that domain, or boot the VM itself: --in-place",
        )
    if is_there(virsh, uuid):
        raise UsageError(
            f"copy: domain {name} exists",
            hint=f"homenode trial undo {state.argument}, or virsh undefine {uuid}",
        )
    before = find_nvram_file(open_domain(original, state.name))
    after = find_nvram_file(open_domain(document, name))
    nvram = (before, after) if before is not None and after is not None else None
    if nvram is not None:
        _check_nvram(*nvram, name)
    copy = TrialCopy(uuid, name, tuple(overlays.values()), None if nvram is None else nvram[1])
    return PreparedCopy(copy, document, disks, nvram)


def make_copy(virsh: Virsh, prepared_copy: PreparedCopy, host_lock: Sequence[int] = ()) -> None:
    """Make the overlays and define the copy. Raises HostError, or InputError for disks that have
    changed since; `remove_copy` removes a partial copy."""
    for disk, overlay in zip(prepared_copy.disks, prepared_copy.copy.overlays, strict=True):
        _make_overlay(disk, Path(overlay))
    if prepared_copy.nvram is not None:
        _copy_nvram(*prepared_copy.nvram)
    with create_private_directory("homenode-copy-") as directory:
        create_file(directory / "copy.xml", prepared_copy.document)
        virsh.define(str(directory / "copy.xml"), host_lock)


def _check_nvram(before: str, after: str, name: str) -> None:
    if os.path.lexists(after):
        raise UsageError(
            f"copy: {after} exists, the NVRAM that domain {name} would get",
            hint="remove that file if it is not needed, or boot the VM itself: --in-place",
        )
    if not before.startswith("/") or os.path.lexists(before):
        with open_host_file(before, _NVRAM):
            pass


def _copy_nvram(before: str, after: str) -> None:
    """Copy the NVRAM, if the original has one; else libvirt creates it from the template."""
    if before.startswith("/") and not os.path.lexists(before):
        return
    with open_host_file(before, _NVRAM) as original:
        try:
            content = original.start(_MAX_NVRAM_BYTES + 1)
            if original.is_block or len(content) > _MAX_NVRAM_BYTES:
                raise OSError(errno.EFBIG, f"no file of up to {_MAX_NVRAM_BYTES >> 20} MiB")
            create_like(Path(after), content, original.descriptor)
        except OSError as error:
            raise HostError(f"{after}: cannot copy {before}: {error}") from None


def _make_overlay(disk: WritableDisk, overlay: Path) -> None:
    """Raises HostError. The file is created exclusively, before qemu-img runs: qemu-img would
    follow a link of that name in a directory that another user may own.

    qemu-img opens only the new file, as the size of its backing file is given.
    """
    with open_host_file(disk.path, f"disk {disk.target}") as original:
        try:
            size = _read_size(disk, original)
            with create_private_directory("homenode-overlay-") as directory:
                image = directory / "overlay"
                backing = ("-u", "-b", disk.path, "-F", disk.format)
                argv = ("qemu-img", "create", "-q", "-f", "qcow2", *backing, str(image), str(size))
                failure = run(argv, _IMAGE_S).failure()
                if failure is not None:
                    raise HostError(f"{overlay}: cannot create the overlay: {failure}")
                content = read_plain(image, MAX_BYTES)
            create_like(overlay, content, original.descriptor)
        except OSError as error:
            raise HostError(
                f"{overlay}: cannot create the overlay: {error.strerror}",
                hint="is there room next to the original, and no file of that name?",
            ) from None


def _read_size(disk: WritableDisk, original: OpenFile) -> int:
    """Return the virtual size of a disk in bytes. Raises InputError if a backing file is not on
    this host, or has a name that QEMU would not read as a path."""
    if disk.format == "raw":
        return -(-original.size_bytes // _SECTOR) * _SECTOR
    subject = f"disk {disk.target}"
    header = qcow2.parse(original.start(qcow2.MAX_BYTES), f"{subject}: {disk.path}")
    _check_under(header, disk.path, subject, _MAX_UNDER)
    return header.size_bytes


def _check_under(header: qcow2.Qcow2Header, path: str, subject: str, levels: int) -> None:
    """Check the backing chain of an image, each file by the header of the overlay above it."""
    problem = None
    name = header.backing or ""
    if header.is_encrypted:
        problem = "an encrypted image"
    elif header.has_data_file:
        problem = "an image with its data in another file"
    elif ":" in name.partition("/")[0]:
        problem = f"{name[:200]!r} under it"
    elif header.backing_format not in (None, "raw", "qcow2"):
        problem = f"{name[:200]!r} of format {header.backing_format[:40]} under it"
    elif not levels:
        problem = f"more than {_MAX_UNDER} under one another"
    if problem is not None:
        raise InputError(
            f"{subject}: {path}: expected an image, and under it regular files or block devices of "
            f"this host as raw or qcow2, found {problem}",
            hint="--in-place works on the VM itself, and its disks",
        )
    if not name:
        return
    backing_path = str(Path(path).parent / name)
    with open_host_file(backing_path, f"{subject}: under {path}") as file:
        start = file.start(qcow2.MAX_BYTES)
    if header.backing_format == "raw":
        return
    if not start.startswith(qcow2.MAGIC):
        raise InputError(
            f"{subject}: {path}: expected a backing file with a format, found {name[:200]!r} "
            "without a format: QEMU would guess it, and open the files that such an image names",
            hint="if it is raw: qemu-img rebase -u -f qcow2 -F raw -b FILE IMAGE",
        )
    _check_under(
        qcow2.parse(start, f"{subject}: {backing_path}"), backing_path, subject, levels - 1
    )


def remove_copy(virsh: Virsh, copy: TrialCopy) -> None:
    """Undefine the copy, which is shut off, and remove those of its files that exist."""
    if is_there(virsh, copy.uuid):
        virsh.undefine(copy.uuid)
    for text in (*copy.overlays, *(() if copy.nvram is None else (copy.nvram,))):
        path = Path(text)
        if text in copy.overlays and not path.name.endswith(_SUFFIX):
            raise InputError(f"{path}: not the name of an overlay of a trial")
        try:
            remove_file(path)
        except OSError as error:
            raise HostError(f"{path}: cannot remove: {error.strerror}") from None


def _name_overlay(disk: WritableDisk, id: str) -> Path:
    """Return the overlay's path: next to the image; of a block device in libvirt's directory."""
    with open_host_file(disk.path, f"disk {disk.target}") as original:
        _read_size(disk, original)
        directory = _BLOCK_DIRECTORY if original.is_block else Path(disk.path).parent
    return directory / f"{id}-{disk.target}{_SUFFIX}"
