"""RetrainJournal: retrains of this boot, link rates as small files, and the wall clock. [I/O]"""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from homenode import formats
from homenode.bdf import Bdf
from homenode.change.journal import Journal
from homenode.change.record_folder import RecordFolder
from homenode.change.retrain.execution import KIND
from homenode.change.step import UNSETTLED, ChangeEntry, ChangeHead, ChangeState
from homenode.errors import HomenodeError, InputError
from homenode.machine.link_path import LinkRate

FOLDER = "/run/homenode/retrain"
"""Gone after a boot, which resets the registers as well."""

_BY_HAND = "look at the port's Link Control 2 (setpci -s PORT CAP_EXP+30.w)"

LINKS_FOLDER = "/run/homenode/links"


def retrain_journal(port: Bdf, folder: str = FOLDER) -> Journal:
    """Of the link below a port. Whoever writes holds the lock of its folder: libvirt's hook trains
    within a start, for which another homenode may hold the host's."""
    undo = f"setpci, as {_BY_HAND}"
    head = ChangeHead(run=str(port), command="homenode doctor retrain", undo=undo)
    return Journal(_files(f"{folder}/{port}"), head, _earlier)


def retrain_journals(folder: str = FOLDER) -> Iterator[Journal]:
    """Of all ports since the last boot."""
    for path in sorted(Path(folder).glob("*")):
        if path.is_dir() or path.suffix == ".json":
            yield retrain_journal(Bdf.parse(path.name.removesuffix(".json"), str(path)), folder)


def open_retrain(journal: Journal) -> ChangeEntry | None:
    """The retrain that was cut short; None where none was. Raises InputError."""
    try:
        return next((one for one in journal.to_undo() if one.what in UNSETTLED), None)
    except InputError as error:
        raise InputError(error.message, hint=f"{_BY_HAND}, then remove the file") from None


class _EarlierEntry(msgspec.Struct, frozen=True, kw_only=True):
    port: Bdf
    device: Bdf
    control_2: int
    target_code: int


def _earlier(files: RecordFolder) -> tuple[ChangeEntry, ...]:
    """What homenode.retrain/1 kept: a file next to the folder while a retrain is open."""
    name = f"{files.path.name}.json"
    content = RecordFolder(files.path.parent).read(name)
    if content is None:
        return ()
    old = formats.decode(content, "retrain", _EarlierEntry, str(files.path.parent / name))
    entry = ChangeEntry(
        what=ChangeState.BEGIN,
        kind=KIND,
        subject=str(old.port),
        before=f"{old.control_2:#06x}",
        after=str(old.target_code),
        facts={"device": str(old.device)},
    )
    return (entry,)


class LinkRecords:
    """What links had when a domain's start began, for the look at `started`."""

    def __init__(self, folder: str = LINKS_FOLDER) -> None:
        self._files = _files(folder)

    def load(self, gpus: Iterable[Bdf]) -> dict[Bdf, LinkRate]:
        """Of those GPUs of which there is a sound record."""
        found: dict[Bdf, LinkRate] = {}
        for gpu in gpus:
            try:
                content = self._files.read(f"{gpu}.json")
                if content is not None:
                    found[gpu] = formats.decode(content, "link-rate", LinkRate, f"{gpu}.json")
            except HomenodeError:
                continue  # as if the hook had not been there at the start
        return found

    def save(self, links: Mapping[Bdf, LinkRate]) -> None:
        """Keeps them until they are kept again. Raises HostError where they cannot be written."""
        self._files.make()
        for gpu, link in links.items():
            self._files.write(f"{gpu}.json", formats.encode("link-rate", link).encode())


def _files(folder: str) -> RecordFolder:
    return RecordFolder(Path(folder), hint=lambda number: "run as root")


class WallClock:
    """Real time."""

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
