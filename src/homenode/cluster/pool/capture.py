"""Capture of a pool: many hosts over ssh at once, into a folder that can be continued. [I/O]"""

import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import takewhile
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode.change.record_folder import RecordFolder
from homenode.cluster.pool.model import Pool, PoolBuilder, natural_key
from homenode.cluster.pool.sources import PART_FILES, Progress
from homenode.cluster.pool.stored import POOL_FILE, encode_pool, read_pool
from homenode.errors import HomenodeError, InputError
from homenode.machine.discover import discover
from homenode.machine.snapshot.capture import collect_over_ssh
from homenode.machine.topology import Host
from homenode.vm.domain.read import read_running_domain

_SERVER = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9_.:@%\[\]+-]{0,255}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,254}", re.ASCII)


class ListedHost(Struct, frozen=True, kw_only=True):
    """A line of a list: where ssh finds the host, its name in the pool, and its fault domain."""

    server: str
    name: str
    fault_domain: str | None


class CapturedPool(Struct, frozen=True):
    """The pool as the folder has it now. read: hosts that were read this time."""

    pool: Pool
    read: int


def capture_pool(
    listed: str,
    source: str,
    folder: Path,
    progress: Progress,
    *,
    jobs: int,
    timeout_s: float,
    again: bool = False,
) -> CapturedPool:
    """Read the hosts of a list into the folder. Each host is saved as soon as it was read; after an
    interruption the same call reads the others.

    again: also read hosts that the folder has. Raises InputError for a list without hosts,
    HostError where the folder cannot be written.
    """
    hosts, failures = read_list(listed, source)
    record = RecordFolder(folder, private=True)
    with record.locked("no other homenode that captures this pool"):
        kept = _kept(record)
        wanted = [one for one in hosts if again or one.name not in kept]
        done = 0
        builder = _Folder(record, kept, {one.name: one for one in hosts})
        with ThreadPoolExecutor(max_workers=jobs) as threads:
            running = {threads.submit(_read, one, timeout_s): one for one in wanted}
            try:
                for number, future in enumerate(as_completed(running), start=1):
                    one = running[future]
                    found = future.result()
                    if isinstance(found, str):
                        failures.append((one.server, found))
                    else:
                        done += 1
                        builder.keep(one, found)
                    progress(number, len(wanted))
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        pool = builder.write(failures)
    return CapturedPool(pool, done)


def store_pool(pool: Pool, folder: Path) -> None:
    """Write a pool that was read from other sources into a folder, in place of what it has. Raises
    HostError."""
    record = RecordFolder(folder, private=True)
    with record.locked("no other homenode that captures this pool"):
        _Folder(record, {}, {}).store(pool)


def _read(one: ListedHost, timeout_s: float) -> Host | str:
    """The host, or why there is none."""
    server = one.server
    name = f"ssh://{server}" if re.search(r"[^:]:[0-9]{1,5}\Z", server) else server
    try:
        return discover(collect_over_ssh(name, timeout_s, batch=True), read_running_domain)
    except HomenodeError as error:
        return error.message


class _Folder:
    """The folder's content: one file for each host, and at the end one file for all."""

    def __init__(
        self, record: RecordFolder, kept: dict[str, bytes], listed: dict[str, ListedHost]
    ) -> None:
        self._record, self._kept, self._listed = record, kept, listed

    def keep(self, one: ListedHost, host: Host) -> None:
        builder = PoolBuilder()
        builder.add(host, one.name, one.server, fault_domain=one.fault_domain)
        content = "".join(encode_pool(builder.pool())).encode()
        self._record.write(_file_of(one.name), content)
        self._kept[one.name] = content

    def write(self, failures: list[tuple[str, str]]) -> Pool:
        """Write all hosts to one file and remove the files of single hosts."""
        builder = PoolBuilder()
        for name in sorted(self._kept, key=natural_key):
            if name in self._listed:
                read_pool(self._kept[name], name, builder)
        for source, reason in sorted(failures):
            builder.fail(source, reason)
        pool = builder.pool()
        self.store(pool)
        return pool

    def store(self, pool: Pool) -> None:
        self._record.write(POOL_FILE, "".join(encode_pool(pool)).encode())
        for path in self._record.path.glob(PART_FILES):
            self._record.remove(path.name)


def _file_of(name: str) -> str:
    return f"host-{name}.part"


def _kept(record: RecordFolder) -> dict[str, bytes]:
    """The hosts in the folder by name, each as a stored pool of one host."""
    kept: dict[str, bytes] = {}
    whole = record.read(POOL_FILE)
    if whole is not None:
        builder = PoolBuilder()
        read_pool(whole, POOL_FILE, builder)
        pool = builder.pool()
        for host in pool.hosts:
            alone = PoolBuilder()
            alone.shape(pool.shapes[host.shape])
            alone.add_known(replace(host, shape=0))
            kept[host.name] = "".join(encode_pool(alone.pool())).encode()
    for path in sorted(record.path.glob(PART_FILES)):
        content = record.read(path.name)
        builder = PoolBuilder()
        if content is not None:
            read_pool(content, path.name, builder)
            kept[path.name.removeprefix("host-").removesuffix(".part")] = content
    return kept


def read_list(text: str, source: str) -> tuple[tuple[ListedHost, ...], list[tuple[str, str]]]:
    """The hosts of a list, and (where, why) of each line that is refused: no host, or a name of
    an earlier line. Raises InputError for a list without hosts."""
    found: dict[str, ListedHost] = {}
    lines: dict[str, int] = {}
    failures: list[tuple[str, str]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        keys = dict(word.partition("=")[::2] for word in words[1:])
        server = words[0].rpartition("@")[2]
        name = keys.get("name") or re.sub(r":[0-9]{1,5}\Z", "", server)
        reason = None
        if set(keys) - {"name", "fault_domain"} or not _SERVER.fullmatch(words[0]):
            reason = (
                "expected [USER@]HOST[:PORT] [name=NAME] [fault_domain=NAME], found "
                f"{line.strip()[:80]!r}"
            )
        elif not _NAME.fullmatch(name):
            reason = f"expected a name of letters and digits, found {name[:80]!r}"
        elif name in found:
            reason = (
                f"expected a name of its own for each host, found {name!r}, which line "
                f"{lines[name]} has: add name=NAME"
            )
        if reason is not None:
            failures.append((f"{source}:{number}", reason))
            continue
        lines[name] = number
        found[name] = ListedHost(
            server=words[0], name=name, fault_domain=keys.get("fault_domain") or None
        )
    if not found:
        where, reason = failures[0] if failures else (source, "expected hosts, found none")
        raise InputError(f"{where}: {reason}")
    return tuple(found.values()), failures
