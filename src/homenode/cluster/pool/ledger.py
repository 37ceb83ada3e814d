"""Ledger: a pool's reservations and the states of its hosts, in SQLite. [I/O]

One file a pool, `ledger.sqlite` in its folder. Whoever reserves holds its write lock from the
reading of the pool to the end, so that no two processes choose from the same free GPUs; a process
that is killed meanwhile has reserved nothing. What a command has answered is on the disk.
"""

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
import struct
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import product
from pathlib import Path

from msgspec import Struct

from homenode import formats
from homenode.change.record_folder import RecordFolder
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.reservations import (
    LedgerView,
    Reservation,
    ReservationState,
    of_journal,
    reservation_of,
    with_reservations,
)
from homenode.cluster.pool.rules import Availability
from homenode.cluster.pool.stored import POOL_FILE
from homenode.durable import (
    PRIVATE,
    open_existing,
    open_lock,
    part_name,
    remove_file,
    replace_file,
)
from homenode.errors import HostError, InputError
from homenode.input_files import read_kernel_file
from homenode.machine.topology import RunningDomain

LEDGER = "ledger.sqlite"
PLACEMENTS = "placements.jsonl"
"""What earlier versions wrote; it is read once."""

_WAIT_S = 60.0
_FORMAT = f"homenode.pool-ledger/{formats.VERSIONS['pool-ledger']}"
_SCHEMA = (
    "CREATE TABLE ledger (format TEXT NOT NULL)",
    "CREATE TABLE host (name TEXT PRIMARY KEY, state TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE reservation (id INTEGER PRIMARY KEY, uuid TEXT UNIQUE, name TEXT NOT NULL, "
    "owner TEXT NOT NULL, host TEXT NOT NULL, state TEXT NOT NULL, content TEXT NOT NULL)",
    "CREATE INDEX of_name ON reservation (name)",
    "CREATE UNIQUE INDEX one_name ON reservation (name, owner) WHERE uuid IS NULL",
    # Of VMs that have not started. Those that run have what a capture shows.
    "CREATE TABLE device (host TEXT NOT NULL, device TEXT NOT NULL, reservation INTEGER NOT NULL "
    "REFERENCES reservation ON DELETE CASCADE, PRIMARY KEY (host, device)) WITHOUT ROWID",
    "CREATE TABLE journal (digest TEXT PRIMARY KEY) WITHOUT ROWID",
)
_ALL = "SELECT id, content FROM reservation ORDER BY id"
_OF_VM = "SELECT id, content FROM reservation WHERE uuid = ? OR name = ? ORDER BY id"
_OF_ROW = (
    "SELECT id, content FROM reservation "
    "WHERE uuid = ? OR (? IS NULL AND uuid IS NULL AND name = ? AND owner = ?)"
)
_UPDATE = (
    "UPDATE reservation SET uuid = ?, name = ?, owner = ?, host = ?, state = ?, content = ? "
    "WHERE id = ?"
)
_NETWORK = frozenset(
    "9p afs beegfs ceph cifs fuse.glusterfs fuse.sshfs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 "
    "smb3 smbfs virtiofs".split()
)
"""File systems of several machines, which do not share what SQLite keeps in memory."""

_LOCAL = "keep the pool's folder on a local file system, such as ext4 or XFS"
_NO_LOCKS = {
    *("SQLITE_IOERR_LOCK", "SQLITE_IOERR_RDLOCK", "SQLITE_PROTOCOL", "SQLITE_NOLFS"),
    *("SQLITE_IOERR_SHMLOCK", "SQLITE_IOERR_SHMMAP", "SQLITE_IOERR_SHMOPEN"),
}
_FULL = "free some space on its file system: nothing was reserved"
_HINTS = {
    "SQLITE_FULL": _FULL,
    "SQLITE_IOERR_SHMSIZE": _FULL,
    "SQLITE_IOERR_WRITE": _FULL,
    "SQLITE_CANTOPEN": "it, and its -wal and -shm, have to be regular files of this user",
}


def capture_of(folder: Path) -> str:
    """What another capture of the pool changes."""
    try:
        known = (folder / POOL_FILE).stat()
    except OSError:
        return ""
    return f"{known.st_mtime_ns} {known.st_size} {known.st_ino}"


class PlacementsHead(Struct, omit_defaults=True, frozen=True):
    """The first line of an earlier version's journal."""

    about: str = ""


class PlacementLine(Struct, omit_defaults=True, frozen=True, kw_only=True):
    """A VM that was placed on a host, or (vm None) one that was removed."""

    host: str
    name: str
    vm: RunningDomain | None = None


def has_ledger(folder: Path) -> bool:
    """Whether a folder has a ledger, or what an earlier version wrote in its place."""
    return any(os.path.lexists(folder / name) for name in (LEDGER, PLACEMENTS))


class Ledger:
    """The ledger of a pool's folder, which is created where there is none. Raises HostError where
    the file system has no locks, InputError for a file that is none or newer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / LEDGER
        self._rows: dict[int, tuple[str, Reservation]] = {}
        self._decoder = formats.plain_line_decoder(Reservation)
        with self._errors():
            self._connection = self._opened()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> sqlite3.Connection:
        check_locks(self._folder)
        if not os.path.lexists(self.path):
            os.close(open_lock(self.path, PRIVATE))
        # To close a descriptor of a file that is in use here would free its locks.
        if not stat.S_ISREG(os.lstat(self.path).st_mode):
            raise InputError(f"{self.path}: expected a regular file, found something else")
        return sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)

    def _prepare(self) -> None:
        with self._errors():
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "foreign_keys=ON"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._check()
            mode = self._journal_mode()
            if mode != "wal":
                raise HostError(
                    f"{self.path}: expected a file system for a write-ahead log, found SQLite keep "
                    f"{mode!r}",
                    hint=_LOCAL,
                )
            self._connection.execute("PRAGMA synchronous=FULL")
        if not self._is_new() and not (self._folder / PLACEMENTS).exists():
            return
        with self.writing():
            if self._is_new():
                for statement in _SCHEMA:
                    self._connection.execute(statement)
                self._connection.execute("INSERT INTO ledger VALUES (?)", (_FORMAT,))
            self._import_journal()

    def _journal_mode(self) -> str:
        """The mode after WAL was asked for, which SQLite refuses while others open the file."""
        end = time.monotonic() + _WAIT_S
        while True:
            try:
                return str(self._connection.execute("PRAGMA journal_mode=WAL").fetchone()[0])
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def _is_new(self) -> bool:
        with self._errors():
            return not self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]

    def _check(self) -> None:
        """Raises InputError for a database that is no ledger of this version."""
        schema = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"
        found = {sql for (sql,) in self._connection.execute(schema)}
        if not found:
            return
        if _SCHEMA[0] in found:
            row = self._connection.execute("SELECT format FROM ledger").fetchone() or ("nothing",)
            if row[0] == _FORMAT and found == set(_SCHEMA):
                return
            if row[0] != _FORMAT:
                raise InputError(
                    f"{self.path}: expected {_FORMAT}, found {row[0]!r}",
                    hint="a newer homenode wrote it: update this one",
                )
        raise InputError(f"{self.path}: expected the tables of {_FORMAT}, found others")

    def _import_journal(self) -> None:
        path = self._folder / PLACEMENTS
        content = RecordFolder(self._folder, journal=PLACEMENTS).journal()
        if content:
            digest = blake2b(content).hexdigest()
            known = "SELECT 1 FROM journal WHERE digest = ?"
            if self._connection.execute(known, (digest,)).fetchone() is None:
                _, lines = formats.decode_journal(
                    content, "pool-placements", PlacementsHead, PlacementLine, str(path)
                )
                for one in of_journal((line.host, line.name, line.vm) for line in lines):
                    self.reserve(one)
                self._connection.execute("INSERT INTO journal VALUES (?)", (digest,))
            replace_file(path.with_suffix(".read"), content)
        remove_file(path)

    @contextlib.contextmanager
    def writing(self, on_wait: Callable[[], None] = lambda: None) -> Iterator["Ledger"]:
        """Hold the write lock: what is reserved inside is there at the end, or none of it. Raises
        HostError where others hold it for a minute."""
        with self._errors():
            self._connection.execute("PRAGMA busy_timeout=0")
            try:
                self._connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY":
                    raise
                on_wait()
                self._connection.execute(f"PRAGMA busy_timeout={int(_WAIT_S * 1000)}")
                self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self
                self._connection.execute("COMMIT")
            except BaseException:
                self._rows.clear()
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def version(self) -> int:
        """A number that changes when another process has written."""
        with self._errors():
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def next_expiry_s(self) -> float:
        """When the first planned VM no longer counts."""
        expiries = [one.expires_at_s for _, one in self._rows.values() if one.is_counted]
        return min((at for at in expiries if at is not None), default=float("inf"))

    def reservations(self) -> tuple[Reservation, ...]:
        """All, in the order in which they were made."""
        rows = self._select(_ALL, ())
        self._rows = {number: self._rows[number] for number in rows}
        return tuple(rows.values())

    def _select(self, read: str, values: tuple[str | None, ...]) -> dict[int, Reservation]:
        found = {}
        with self._errors():
            for number, content in self._connection.execute(read, values):
                if self._rows.get(number, ("", None))[0] != content:
                    one = self._decoder(content.encode())
                    if one is None:
                        raise InputError(
                            f"{self.path}: expected a reservation in row {number}, found another"
                        )
                    self._rows[number] = content, one
                found[number] = self._rows[number][1]
        return found

    def view(self, pool: Pool) -> LedgerView:
        """The captured pool with what is reserved in it."""
        with self._errors():
            rows = self._connection.execute("SELECT name, state FROM host").fetchall()
        try:
            states = {name: Availability(state) for name, state in rows}
        except ValueError as error:
            raise InputError(f"{self.path}: expected a state of a host, found: {error}") from None
        known, capture = self.reservations(), capture_of(self._folder)
        return with_reservations(pool, known, states, time.time(), capture)

    def update(self, pool: Pool) -> Pool:
        """As `view`, and write down what the capture shows of the VMs."""
        view = self.view(pool)
        for before, now in view.changed:
            self._put(self._number(before), now)
        return view.pool

    def forget_gone(self) -> None:
        """Remove the VMs that an earlier capture did not show any more."""
        gone = ReservationState.GONE.value
        self._connection.execute("DELETE FROM reservation WHERE state = ?", (gone,))

    def find(self, name: str, uuid: str | None, owner: str = "") -> Reservation | None:
        """The VM's reservation, if it has one."""
        known = self._select(_OF_VM, (uuid, name))
        return reservation_of(known.values(), name, uuid, owner)

    def reserve(self, one: Reservation) -> None:
        """Reserve for a VM, in place of what it had. Raises HostError where another VM has one of
        the devices."""
        known = self.find(one.vm.name, None if one.by_name else one.vm.uuid, one.owner)
        self._put(None if known is None else self._number(known), one)

    def release(self, one: Reservation) -> None:
        """Stop counting a VM."""
        with self._errors():
            self._connection.execute("DELETE FROM reservation WHERE id = ?", (self._number(one),))

    def set_host(self, host: str, availability: Availability) -> None:
        """Whether the host takes VMs."""
        with self._errors():
            put = "INSERT OR REPLACE INTO host VALUES (?, ?)"
            self._connection.execute(put, (host, availability.value))

    def _number(self, one: Reservation) -> int:
        uuid = None if one.by_name else one.vm.uuid
        return next(iter(self._select(_OF_ROW, (uuid, uuid, one.vm.name, one.owner))))

    def _put(self, number: int | None, one: Reservation) -> None:
        uuid = None if one.by_name else one.vm.uuid
        content = formats.line(one).rstrip("\n")
        row = uuid, one.vm.name, one.owner, one.host, one.state.value, content
        with self._errors():
            if number is None:
                insert = "INSERT INTO reservation VALUES (NULL, ?, ?, ?, ?, ?, ?)"
                number = self._connection.execute(insert, row).lastrowid
            else:
                self._connection.execute(_UPDATE, (*row, number))
                self._connection.execute("DELETE FROM device WHERE reservation = ?", (number,))
            assert number is not None
            self._rows[number] = content, one
            if one.state is ReservationState.PLANNED:
                devices = [*map(str, one.vm.devices), *one.vm.mediated]
                self._connection.executemany(
                    "INSERT INTO device VALUES (?, ?, ?)",
                    [(one.host, device, number) for device in devices],
                )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise HostError(
                f"{self.path}: expected devices that no other VM has, found: {error}"
            ) from None
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith("SQLITE_BUSY"):
                raise HostError(
                    f"{self.path}: expected no other homenode that reserves in this pool",
                    hint="run it again when the other has ended",
                ) from None
            if name in _NO_LOCKS:
                raise _no_locks(self._folder, str(error)) from None
            if name in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
                raise InputError(
                    f"{self.path}: expected {_FORMAT}, found: {error}",
                    hint="put a copy back; without the file only VMs that captures show count",
                ) from None
            raise HostError(
                f"{self.path}: expected to read and write, found: {error}", hint=_HINTS.get(name)
            ) from None
        except OSError as error:
            raise HostError(
                f"{error.filename or self.path}: expected to read and write there, found: "
                f"{error.strerror or error}"
            ) from None


def _no_locks(folder: Path, found: str) -> HostError:
    return HostError(
        f"{folder}: expected a file system with locks, found {file_system(folder) or 'one'}: "
        f"{found}",
        hint=_LOCAL,
    )


def check_locks(folder: Path) -> None:
    """Raises HostError, with the name of the file system, where a lock keeps no other process out,
    or where other machines would not see it."""
    kind = file_system(folder)
    if kind in _NETWORK:
        raise HostError(
            f"{folder}: expected a file system of this machine alone, found {kind}", hint=_LOCAL
        )
    path = folder / part_name().removesuffix(".part")  # no part, which others might sweep
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

    def by_range(descriptor: int) -> None:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole)

    def by_file(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    with contextlib.ExitStack() as undo:
        opened = [open_lock(path, PRIVATE), open_existing(path)]
        for descriptor in opened:
            undo.callback(os.close, descriptor)
        remove_file(path)
        for number, lock in product(range(2), (by_range, by_file)):
            try:
                lock(opened[number])
            except OSError as error:
                if number and error.errno in (errno.EAGAIN, errno.EACCES):
                    continue
                raise _no_locks(folder, error.strerror or str(error)) from None
            if number:
                raise _no_locks(folder, "two locks of one file at once")


def file_system(folder: Path) -> str | None:
    """The type of the file system of a folder, as the kernel names it; None where it does not."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = (read_kernel_file("/proc/self/mountinfo") or b"").decode("utf-8", "replace")
    found = None
    for line in mounts.splitlines():
        words = line.split()
        if len(words) > 3 and words[2] == wanted and "-" in words[6:]:
            found = words[words.index("-", 6) + 1]
    return found
