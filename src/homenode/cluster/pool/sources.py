"""Sources of a pool: folders, lists, libvirt URIs, shipped hosts times a number. [I/O]"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

from msgspec.structs import replace

from homenode.cluster.pool.ledger import LEDGER, PLACEMENTS, Ledger, has_ledger
from homenode.cluster.pool.model import NodeMemoryState, Pool, PoolBuilder, PoolHost, shape_of
from homenode.cluster.pool.stored import POOL_FILE, read_pool
from homenode.errors import HomenodeError, InputError, UsageError, of_os
from homenode.input_files import read_file, read_start
from homenode.machine.description.shipped import shipped_hosts
from homenode.machine.topology import Host
from homenode.wording import did_you_mean

PART_FILES = "host-*.part"
"""Each host that a capture has read, until all are in one file."""

MAX_POOL_BYTES = 1 << 30
MOST_HOSTS = 100_000
_TIMES = re.compile(r"(?P<name>.+)\*(?P<count>[0-9]{1,6})\Z", re.ASCII)
_URI = re.compile(r"[a-z][a-z0-9]*(\+[a-z0-9]+)?://", re.ASCII)
_SSH_URI = re.compile(r"qemu\+ssh://(?P<server>[^/?#]+)(/|\Z)", re.ASCII)
_HEAD_BYTES = 4096
_KEYS = {"name", "fault_domain"}
_POOL_HEAD = b'{"format":"homenode.pool-hosts/'

Progress = Callable[[int, int], None]


def load_pool(
    sources: Sequence[str],
    progress: Progress = lambda done, total: None,
    *,
    jobs: int = 8,
    reserved: bool = True,
) -> Pool:
    """The pool of all these sources. A source without a host is a failure of the pool; the others
    are read. progress: called with the number of hosts read, and of all. reserved: with what
    the ledgers of folders have reserved.

    Raises UsageError if no source is named, InputError if no source gives a host.
    """
    return _read_all(sources, progress, jobs, reserved=reserved)[0]


def load_whole_hosts(
    sources: Sequence[str], progress: Progress = lambda done, total: None
) -> tuple[Pool, list[tuple[str, Host]]]:
    """The pool of these sources, and its hosts by name with what a pool does not store, above all
    link states; a host of a stored pool is as it is stored: what that names as its source may be
    anything by now. Raises as load_pool."""
    pool, builder = _read_all(sources, progress, 8, reserved=True)
    return pool, [(one.name, builder.whole.get(one.name) or pool.host(one)) for one in pool.hosts]


def _read_all(
    sources: Sequence[str], progress: Progress, jobs: int, *, reserved: bool
) -> tuple[Pool, PoolBuilder]:
    if not sources:
        raise UsageError(
            "a pool: expected hosts, found none",
            hint="a folder of captures, a list of hosts, NAME*COUNT (hgx-h100*40), qemu+ssh://HOST",
        )
    builder = PoolBuilder()
    for source in sources:
        _add(builder, source, progress, jobs)
    pool = builder.pool()
    for source in sources if reserved else ():
        if has_ledger(Path(source)):
            with Ledger(Path(source)) as ledger:
                pool = ledger.view(pool).pool
    if not pool.hosts:
        first = pool.failures[0]
        name = Path(first.source).name.partition("*")[0]
        meant = did_you_mean(name, shipped_hosts()) if "*" in first.source else ""
        raise InputError(
            f"{first.source}: {first.reason}",
            hint=f"{meant}a pool is a folder that pool capture wrote, a folder or list of hosts, a "
            "libvirt URI, or a host times a number: 'hgx-h100*40'",
        )
    return pool, builder


def _add(
    builder: PoolBuilder,
    source: str,
    progress: Progress,
    jobs: int,
    name: str | None = None,
    fault_domain: str | None = None,
) -> None:
    """Add all hosts of a source. name, fault_domain: of hosts times a number, if a list names
    them."""
    try:
        times = _TIMES.match(source)
        if times is not None and not _exists(Path(source)):
            _add_times(builder, times["name"], int(times["count"]), source, name, fault_domain)
        elif _URI.match(source):
            builder.add(host_of_uri(source), _name_of_uri(source), source)
        elif Path(source).is_dir() and not _is_tree(Path(source)):
            _add_folder(builder, Path(source), progress, jobs)
        elif _is_stored_pool(Path(source)):
            read_pool(_read(Path(source)), source, builder)
        elif _is_list(Path(source)):
            _add_each(builder, _listed(builder, Path(source)), progress, jobs)
        else:
            host = load_host(source)
            builder.add(host, host.name or source, source)
    except HomenodeError as error:
        builder.fail(source, error.message)
    except (OSError, ValueError) as error:
        builder.fail(source, of_os(error, source, "a pool or a host").message)


def _add_times(
    builder: PoolBuilder,
    what: str,
    count: int,
    source: str,
    name: str | None,
    fault_domain: str | None,
) -> None:
    if not 1 <= count <= MOST_HOSTS:
        raise InputError(f"{source}: expected 1 to {MOST_HOSTS} hosts, found {count}")
    host = load_host(what)
    shape = builder.shape(shape_of(host))
    nodes = tuple(
        NodeMemoryState(
            memory_bytes=node.memory_bytes,
            memory_free_bytes=node.memory_free_bytes,
            page_pools=node.page_pools,
        )
        for node in host.nodes
    )
    for number in range(1, count + 1):
        own = f"{name or host.name or what}-{number}"
        builder.add_known(
            PoolHost(
                name=own,
                shape=shape,
                nodes=nodes,
                domains=host.domains,
                source=source,
                fault_domain=fault_domain,
            )
        )


def _add_folder(builder: PoolBuilder, folder: Path, progress: Progress, jobs: int) -> None:
    """Add a captured pool, or the captures and descriptions in a folder, in the order of names."""
    if _exists(folder / POOL_FILE):
        read_pool(_read(folder / POOL_FILE), str(folder / POOL_FILE), builder)
        return
    if parts := sorted(folder.glob(PART_FILES)):
        for path in parts:
            read_pool(_read(path), str(path), builder)
        builder.fail(str(folder), "expected all hosts: pool capture was cut short: run it again")
        return
    entries = sorted(
        path
        for path in folder.iterdir()
        if not path.name.startswith((".", LEDGER, Path(PLACEMENTS).stem))
    )
    if not entries:
        raise InputError(f"{folder}: expected captures or host.toml files in it, found none")
    named = [(str(path), _plain_name(path.name), None) for path in entries]
    _add_each(builder, named, progress, jobs)


def _add_each(
    builder: PoolBuilder,
    named: Sequence[tuple[str, str | None, str | None]],
    progress: Progress,
    jobs: int,
) -> None:
    """Add (source, name, fault domain) of each, read in parallel, in the order given."""

    def read(source: str) -> Host | str:
        try:
            if _URI.match(source):
                return host_of_uri(source)
            return load_host(source)
        except HomenodeError as error:
            return error.message
        except (OSError, ValueError) as error:
            return of_os(error, source, "a host").message

    plain = [one for one in named if not _TIMES.match(one[0]) or _exists(Path(one[0]))]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        found = dict(zip(plain, pool.map(read, [one[0] for one in plain]), strict=True))
    for number, one in enumerate(named, start=1):
        source, name, fault_domain = one
        progress(number, len(named))
        if one not in found:
            _add(builder, source, progress, jobs, name, fault_domain)
            continue
        host = found[one]
        if isinstance(host, str):
            builder.fail(source, host)
            continue
        if name is None:
            name = _name_of_uri(source) if _URI.match(source) else host.name
        builder.add(host, name or source, source, fault_domain=fault_domain)


def _listed(builder: PoolBuilder, path: Path) -> list[tuple[str, str | None, str | None]]:
    """The sources of a list: one on each line, then name=NAME and fault_domain=NAME. A word that
    begins with # starts a comment. A line of another form is a failure of the pool.

    Raises InputError for a list without a source.
    """
    found: list[tuple[str, str | None, str | None]] = []
    strange = 0
    for number, line in enumerate(_read(path).decode("utf-8-sig", "replace").splitlines(), start=1):
        words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        keys = dict(word.partition("=")[::2] for word in words[1:])
        odd = [key for key, value in keys.items() if key not in _KEYS or not value]
        if odd:
            strange += 1
            builder.fail(
                f"{path}:{number}",
                f"expected SOURCE [name=NAME] [fault_domain=NAME], found {odd[0]!r}",
            )
            continue
        source = words[0]
        neighbours = path.parent / source
        if not _URI.match(source) and _exists(neighbours):
            source = str(neighbours)
        found.append((source, keys.get("name"), keys.get("fault_domain")))
    if not found and not strange:
        raise InputError(f"{path}: expected a source of a host on each line, found none")
    return found


def host_of_uri(uri: str) -> Host:
    """The host of a libvirt URI: this machine, or one that ssh reaches.

    Raises UsageError for other transports, HostError where it cannot be reached.
    """
    from homenode.vm.hypervisor.connection import checked_uri, is_local

    checked_uri(uri)
    if is_local(uri):
        return load_host(None)
    match = _SSH_URI.match(uri)
    if match is None:
        raise UsageError(
            f"{uri}: expected qemu:///system or qemu+ssh://HOST/system, found another transport"
        )
    return replace(host_over_ssh(match["server"]), name=_name_of_uri(uri))


def host_over_ssh(server: str) -> Host:
    """The host that ssh reaches. server: [user@]host[:port]."""
    from homenode.machine.discover import discover
    from homenode.machine.snapshot.capture import collect_over_ssh
    from homenode.vm.domain.read import read_running_domain

    name = f"ssh://{server}" if re.search(r":[0-9]+\Z", server) else server
    return discover(collect_over_ssh(name), read_running_domain)


def _name_of_uri(uri: str) -> str:
    match = _SSH_URI.match(uri)
    server = match["server"] if match else "localhost"
    return re.sub(r":[0-9]+\Z", "", server.rpartition("@")[2])


def _plain_name(name: str) -> str:
    """gpu-7 of gpu-7.tar.gz.

    >>> _plain_name("gpu-7.example.org.tar.gz"), _plain_name("gpu-7.toml"), _plain_name("gpu.7")
    ('gpu-7.example.org', 'gpu-7', 'gpu.7')
    """
    for suffix in (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".toml", ".xml", ".json"):
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    return name


def _is_tree(folder: Path) -> bool:
    """Whether a folder is one host: a tree of /sys or an unpacked capture."""
    return any(_exists(folder / name) for name in ("sys", "devices", "snapshot", "manifest.json"))


def _is_stored_pool(path: Path) -> bool:
    try:
        return read_start(path, len(_POOL_HEAD)) == _POOL_HEAD
    except OSError:
        return False


def _is_list(path: Path) -> bool:
    """Whether a text names a source on each line; TOML, XML and JSON describe one host."""
    try:
        head = read_start(path, _HEAD_BYTES)
    except OSError:
        return False
    if b"\0" in head or not head.strip() or head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ")):
        return False
    lines = [line.strip() for line in head.decode("utf-8-sig", "replace").splitlines()]
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if not first:
        return len(head) < _HEAD_BYTES  # comments only
    word = first.split()[0]
    if word[0] in "<{[" or (len(first.split()) > 1 and "=" not in first.split()[1]):
        return False
    if first.partition("=")[0].strip().isidentifier() and "=" in first.partition(" ")[2][:2]:
        return False  # key = value: a description
    return bool(
        _URI.match(word)
        or _TIMES.match(word)
        or _exists(path.parent / word)
        or _exists(Path(word))
        or re.fullmatch(r"[A-Za-z0-9._@-]+", word)
    )


def load_host(source: str | None) -> Host:
    """As homenode.vm.sources.load_host, imported only when needed: a captured pool does not need
    it."""
    from homenode.vm.sources import load_host as load

    return load(source)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _read(path: Path) -> bytes:
    return read_file(path, "a file that can be read", most=MAX_POOL_BYTES)
