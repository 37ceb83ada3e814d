"""RetrainJournal: open retrains and link rates as small files, and the wall clock. [I/O]"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from homenode import formats
from homenode.bdf import Bdf
from homenode.doctor.links.rate import LinkRate
from homenode.doctor.retrain.execution import JournalEntry
from homenode.errors import HomenodeError, HostError, InputError
from homenode.record_folder import RecordFolder

FOLDER = "/run/homenode/retrain"
"""Gone after a boot, which resets the registers as well."""

LINKS_FOLDER = "/run/homenode/links"


class FileJournal:
    """One file a port, replaced whole."""

    def __init__(self, folder: str = FOLDER) -> None:
        self._files = _files(folder)

    def load(self, port: Bdf) -> JournalEntry | None:
        name = f"{port}.json"
        content = self._files.read(name)
        if content is None:
            return None
        try:
            return formats.decode(content, "retrain", JournalEntry, str(self._files.path / name))
        except InputError as error:
            raise HostError(
                error.message,
                hint="look at the port's Link Control 2 (setpci -s PORT CAP_EXP+30.w), then "
                "remove the file",
            ) from None

    def save(self, entry: JournalEntry) -> None:
        """Raises HostError where it cannot be written: no register may be changed then."""
        self._files.make()
        self._files.write(f"{entry.port}.json", formats.encode("retrain", entry).encode())

    def clear(self, port: Bdf) -> None:
        self._files.remove(f"{port}.json")


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
