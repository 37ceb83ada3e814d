"""Hook sessions: requests answered from a pool that other commands reserve in too. [I/O]"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.hook import Hook, HookAnswer, encoded
from homenode.cluster.pool.ledger import Ledger, capture_of
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.place import PoolPlaces
from homenode.cluster.pool.planner import Planner
from homenode.errors import HomenodeError


class HookSession:
    """Answers requests one after the other. With a ledger each is answered from what all commands
    have reserved by then and what the newest capture shows, and is reserved before it is answered.

    load: reads the captured pool.
    """

    def __init__(
        self,
        load: Callable[[], Pool],
        flavours: Sequence[Flavour],
        planner_of: Callable[[Pool], Planner],
        ledger: Ledger | None,
        folder: Path | None,
    ) -> None:
        self._load, self._flavours, self._planner_of = load, tuple(flavours), planner_of
        self._ledger, self._folder = ledger, folder
        self._captured: Pool | None = None
        self._stamp: str | None = None
        self._version, self._expires_s = -1, float("inf")
        if ledger is None:
            self._begin(load())
        else:
            with ledger.writing():
                self._refresh(ledger)

    def _begin(self, pool: Pool) -> None:
        self._places = PoolPlaces(pool, self._flavours, self._planner_of(pool))
        self._hook = Hook(self._places, self._flavours)
        self._hook.prepare()

    def answer(self, line: bytes) -> str:
        """The line of JSON that answers a line; by then what it says is on the disk."""
        if self._ledger is None:
            return self._hook.answer(line)
        try:
            with self._ledger.writing():
                self._refresh(self._ledger)
                found = self._hook.answer(line, self._ledger, time.time())
            self._expires_s = self._ledger.next_expiry_s()
            return found
        except HomenodeError as error:
            self._captured = None  # what was placed may not have been reserved
            return encoded(HookAnswer(vm=None, op="none", error=error.message))

    def tidy(self) -> None:
        """Between requests: forget what requests of many sizes have left behind."""
        self._hook.tidy()

    def _refresh(self, ledger: Ledger) -> None:
        stamp = "" if self._folder is None else capture_of(self._folder)
        if self._captured is None or stamp != self._stamp:
            self._captured, self._stamp = self._load(), stamp
            self._begin(ledger.update(self._captured))
        elif ledger.version() != self._version or time.time() >= self._expires_s:
            for host in ledger.update(self._captured).hosts:
                if host != self._places.host(host.name):
                    self._places.put(host)
        self._version = ledger.version()
        self._expires_s = ledger.next_expiry_s()
