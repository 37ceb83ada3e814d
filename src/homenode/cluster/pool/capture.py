"""Capture: many hosts over ssh at once, each into a file of a directory. [I/O]"""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import HomenodeError, HostError, InputError
from homenode.findings import Gap
from homenode.formats import encode
from homenode.safe.durable import PRIVATE, replace_file
from homenode.vm.host_sources import Progress, host_over_ssh

_SERVER = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9_.:@%\[\]+-]{0,255}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,254}", re.ASCII)


class ListedHost(Struct, frozen=True, kw_only=True):
    """A host of a list: its ssh address, and its name in the pool."""

    server: str
    name: str


class CapturedHosts(Struct, frozen=True, kw_only=True):
    """Number of hosts in the directory, number read by this call, and unreadable hosts."""

    hosts: int
    read: int
    failures: tuple[Gap, ...]


def capture_hosts(
    listed: tuple[ListedHost, ...],
    directory: Path,
    progress: Progress,
    *,
    jobs: int,
    timeout_s: float,
    again: bool = False,
) -> CapturedHosts:
    """Read hosts into NAME.json of the directory, for this user alone. Each is written as soon as
    it was read: after an interruption the same call reads the missing hosts. again: also read hosts
    that the directory has. Raises HostError if it cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{directory}: cannot create the directory: {error.strerror}") from None
    missing = [host for host in listed if again or not _file_of(directory, host).exists()]
    failures: list[Gap] = []
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        reads = {threads.submit(_capture, host, directory, timeout_s): host for host in missing}
        try:
            for number, read in enumerate(as_completed(reads), start=1):
                reason = read.result()
                if reason is not None:
                    failures.append(Gap(reads[read].server, reason))
                progress(number, len(missing))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    return CapturedHosts(
        hosts=sum(_file_of(directory, host).exists() for host in listed),
        read=len(missing) - len(failures),
        failures=tuple(sorted(failures, key=lambda failure: failure.subject)),
    )


def _capture(listed: ListedHost, directory: Path, timeout_s: float) -> str | None:
    """Write the host; return the reason if it cannot be read."""
    try:
        host = replace(host_over_ssh(listed.server, timeout_s), name=listed.name)
    except HomenodeError as error:
        return error.message.removeprefix(f"{listed.server}: ")
    replace_file(_file_of(directory, listed), encode("host", host).encode(), PRIVATE)
    return None


def _file_of(directory: Path, listed: ListedHost) -> Path:
    return directory / f"{listed.name}.json"


def read_list(lines: Iterable[str], source: str) -> tuple[tuple[ListedHost, ...], tuple[Gap, ...]]:
    """Return the hosts of lines `[USER@]HOST[:PORT] [name=NAME]`, and the rejected lines; # begins
    a comment. Raises InputError if no line names a host."""
    hosts: dict[str, ListedHost] = {}
    refused: list[Gap] = []
    for number, line in enumerate(lines, start=1):
        words = line.removeprefix("\ufeff").partition("#")[0].split()
        if not words:
            continue
        server = words[0]
        name = re.sub(r":[0-9]{1,5}\Z", "", server.rpartition("@")[2])
        named = words[1].removeprefix("name=") if words[1:2] else name
        is_formed = len(words) == 1 or (len(words) == 2 and words[1].startswith("name="))
        if not (is_formed and _SERVER.fullmatch(server) and _NAME.fullmatch(named)):
            reason = f"expected [USER@]HOST[:PORT] [name=NAME], found {line.strip()[:80]!r}"
        elif named in hosts:
            reason = f"duplicate name {named!r}: {hosts[named].server} has it"
        else:
            hosts[named] = ListedHost(server=server, name=named)
            continue
        refused.append(Gap(f"{source}:{number}", reason))
    if not hosts:
        first = refused[0] if refused else Gap(source, "no hosts in it")
        raise InputError(str(first))
    return tuple(hosts.values()), tuple(refused)
