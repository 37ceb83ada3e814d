"""Copying: a domain for the trial alone: name, UUID, NVRAM, MACs and disks of its own. [I/O]"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from homenode.domain.copy import copied_uuid, copy_domain
from homenode.domain.overlay_disks import WritableDisk, with_overlays, writable_disks
from homenode.domain.read import open_domain
from homenode.durable import create_file, replace_file
from homenode.errors import HostError, InputError, UsageError
from homenode.hypervisor.connection import is_local
from homenode.hypervisor.domain_state import DomainState
from homenode.hypervisor.virsh import Virsh
from homenode.measure.layouts.guest import is_there
from homenode.measure.layouts.journal import Copy
from homenode.process import run

_SUFFIX = ".homenode-trial.qcow2"
_IMAGE_S = 120.0
_BLOCK_FOLDER = Path("/var/lib/libvirt/images")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A copy that is still to be made. document: its definition. disks: under the overlays.

    nvram: (the original's file, the copy's); None where it has none.
    """

    copy: Copy
    document: bytes
    disks: tuple[WritableDisk, ...]
    nvram: tuple[str, str] | None


def prepare_copy(virsh: Virsh, state: DomainState, original: bytes, id: str) -> Prepared:
    """What a copy of a domain would be; nothing is made.

    Devices, sockets and host interfaces are the original's: it is off meanwhile, and libvirt lets
    only one of them run. Raises UsageError for another machine's libvirt and where such a copy is
    there, InputError for disks that cannot have an overlay.
    """
    if not is_local(virsh.connect):
        raise UsageError(
            f"--as-copy: expected a libvirt of this machine, found {virsh.connect}: overlays are "
            "made here",
            hint="run homenode there, or --in-place",
        )
    name = f"{state.name}-trial"
    disks = writable_disks(original, state.name)
    overlays = {disk.target: str(_overlay(disk, id)) for disk in disks}
    document = copy_domain(with_overlays(original, overlays, state.name), name, state.name)
    uuid = copied_uuid(state.uuid, name)
    if is_there(virsh, name) and not is_there(virsh, uuid):
        raise UsageError(
            f"--as-copy: expected the name {name} free for the copy, found another domain of it",
            hint="rename that one, or --in-place",
        )
    if is_there(virsh, uuid):
        raise UsageError(
            f"--as-copy: expected no domain {name}, found one",
            hint=f"homenode trial undo {state.argument}, or virsh undefine {uuid}",
        )
    before, after = _nvram(original, state.name), _nvram(document, name)
    nvram = (before, after) if before is not None and after is not None else None
    copy = Copy(uuid, name, tuple(overlays.values()), None if nvram is None else nvram[1])
    return Prepared(copy, document, disks, nvram)


def make_copy(virsh: Virsh, prepared: Prepared) -> None:
    """Make the overlays and define the copy. Raises HostError; `remove_copy` undoes what was
    made before."""
    for disk, overlay in zip(prepared.disks, prepared.copy.overlays, strict=True):
        _make_overlay(disk, Path(overlay))
    try:
        if prepared.nvram is not None and Path(prepared.nvram[0]).exists():
            before, after = map(Path, prepared.nvram)
            replace_file(after, before.read_bytes(), before.stat().st_mode & 0o777)
    except OSError as error:
        raise HostError(f"{prepared.nvram}: expected to copy it, found: {error}") from None
    with tempfile.NamedTemporaryFile(prefix="homenode-copy-", suffix=".xml") as file:
        file.write(prepared.document)
        file.flush()
        virsh.define(file.name)


def _make_overlay(disk: WritableDisk, overlay: Path) -> None:
    """Raises HostError. The file is made by us, and exclusively: qemu-img would write to whatever a
    link of that name points at, in a folder that may be another user's. It has no data yet."""
    try:
        with tempfile.TemporaryDirectory(prefix="homenode-overlay-") as folder:
            made = Path(folder) / "overlay"
            argv = (
                "qemu-img",
                "create",
                "-q",
                "-f",
                "qcow2",
                "-F",
                disk.format,
                "-b",
                disk.path,
                str(made),
            )
            failure = run(argv, _IMAGE_S).failure()
            if failure is not None:
                raise HostError(f"{overlay}: expected a throw-away disk, found: {failure}")
            create_file(overlay, made.read_bytes(), 0o644)
    except OSError as error:
        raise HostError(
            f"{overlay}: expected a throw-away disk, found: {error.strerror}",
            hint="is there room next to the original, and no file of that name?",
        ) from None


def remove_copy(virsh: Virsh, copy: Copy) -> None:
    """Undefine the copy, which is shut off, and remove its files, as far as they are there."""
    if is_there(virsh, copy.uuid):
        virsh.undefine(copy.uuid)
    for text in (*copy.overlays, *(() if copy.nvram is None else (copy.nvram,))):
        path = Path(text)
        if text in copy.overlays and not path.name.endswith(_SUFFIX):
            raise InputError(f"{path}: expected a throw-away disk of a trial, found another name")
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise HostError(f"{path}: expected to remove it, found: {error.strerror}") from None


def _overlay(disk: WritableDisk, id: str) -> Path:
    """By the original, where QEMU's user gets in; of a block device where libvirt has files."""
    folder = _BLOCK_FOLDER if disk.is_block else Path(disk.path).parent
    return folder / f"{id}-{disk.target}{_SUFFIX}"


def _nvram(document: bytes, source: str) -> str | None:
    nvram = open_domain(document, source).root.at("os", "nvram")
    if nvram is None:
        return None
    under = nvram.child("source")
    return (nvram.text.strip() if under is None else under.get("file")) or None
