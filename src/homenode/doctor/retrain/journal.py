"""RetrainJournal: open retrains as small files, and the wall clock. [I/O]"""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from homenode.bdf import Bdf
from homenode.doctor.links.rate import LinkRate
from homenode.doctor.retrain.execution import JournalEntry
from homenode.durable import replace_file
from homenode.errors import HomenodeError, HostError

FOLDER = "/run/homenode/retrain"
"""Gone after a boot, which resets the registers as well."""

LINKS_FOLDER = "/run/homenode/links"


class FileJournal:
    """One file a port, replaced whole."""

    def __init__(self, folder: str = FOLDER) -> None:
        self._folder = Path(folder)

    def load(self, port: Bdf) -> JournalEntry | None:
        path = self._path(port)
        try:
            value = json.loads(path.read_bytes())
            return JournalEntry(
                Bdf.parse(value["port"]), Bdf.parse(value["device"]),
                int(value["control_2"]) & 0xFFFF, int(value["target_code"]) & 0xF,
            )  # fmt: skip
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, HomenodeError) as error:
            raise HostError(
                f"{path}: expected an open retrain's record, found: {error}",
                hint="look at the port's Link Control 2 (setpci -s PORT CAP_EXP+30.w), then "
                "remove the file",
            ) from None

    def save(self, entry: JournalEntry) -> None:
        path = self._path(entry.port)
        text = json.dumps({
            "port": str(entry.port), "device": str(entry.device),
            "control_2": entry.control_2, "target_code": entry.target_code,
        })  # fmt: skip
        try:
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            replace_file(path, text.encode())
        except OSError as error:
            raise HostError(
                f"{path}: expected to write there before any register, found: {error.strerror}",
                hint="run as root",
            ) from None

    def clear(self, port: Bdf) -> None:
        self._path(port).unlink(missing_ok=True)

    def _path(self, port: Bdf) -> Path:
        return self._folder / f"{port}.json"


class LinkRecords:
    """What links had when a domain's start began, for the look at `started`."""

    def __init__(self, folder: str = LINKS_FOLDER) -> None:
        self._folder = Path(folder)

    def load(self, gpus: Iterable[Bdf]) -> dict[Bdf, LinkRate]:
        """Of those GPUs of which there is a sound record."""
        found: dict[Bdf, LinkRate] = {}
        for gpu in gpus:
            try:
                value = json.loads((self._folder / f"{gpu}.json").read_bytes())
                found[gpu] = LinkRate(float(value["gt_per_s"]), int(value["width"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # as if the hook had not been there at the start
        return found

    def save(self, links: Mapping[Bdf, LinkRate]) -> None:
        """Keeps them until they are kept again. Raises HostError where they cannot be written."""
        try:
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            for gpu, link in links.items():
                text = json.dumps({"gt_per_s": link.gt_per_s, "width": link.width})
                replace_file(self._folder / f"{gpu}.json", text.encode())
        except OSError as error:
            raise HostError(
                f"{self._folder}: expected to write there, found: {error.strerror}",
                hint="run as root",
            ) from None


class WallClock:
    """Real time."""

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
