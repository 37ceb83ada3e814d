"""Sources: load a Host from this machine, a directory, a file or a name. [I/O]

The kind of a file is decided by its content, never by its name.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

from homenode.errors import InputError, NotKnownError, ParseError, of_os, unknown
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import Host
from homenode.safe.input_files import read_file, read_start
from homenode.text import command_line

if TYPE_CHECKING:
    from homenode.machine.tools.nvidia_smi import TopoMatrix

_MAX_TEXT_BYTES = 16 << 20
_MAX_TREE_CHARACTERS = 8 << 20
"""Size limits of a host as text, and as XML or JSON, which takes 30 times the memory. The largest
that are known have 2 MB."""

_HEAD_BYTES = 4096
_HEAD_CHARACTERS = 4096
_ARCHIVE_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")
_TAR_MAGIC_AT = 257
_KINDS = (
    "a host is a capture or a tree of /sys (directory or tar), an hwloc XML, the output of "
    "lspci -vvv, numactl -H, lscpu -e, xl info -n or nvidia-smi topo -m, a host.toml, "
    "a homenode.host JSON, or a shipped host's name"
)


SUFFIXES = (".xml", ".json", ".conf", ".cfg", ".yaml", ".yml", ".sh", ".txt")


def names_domain(name: str) -> bool:
    """Whether an argument is the name of a domain rather than a file: no path, and no file."""
    if name == "-" or "/" in name or name.endswith(SUFFIXES):
        return False
    try:
        return not Path(name).exists()
    except (OSError, ValueError):  # longer than a file name can be
        return True


def load_host(source: str | None, *, lspci: Path | None = None) -> Host:
    """Read the host of a source; None is this machine.

    "ARCHIVE#name" picks one machine of an archive. lspci: a listing that replaces the host's PCI
    part. Raises InputError for a missing, unknown or contradictory source, HostError for an
    unreadable one.
    """
    return _overlay_lspci(_read_this_machine() if source is None else _load_named(source), lspci)


def _overlay_lspci(host: Host, lspci: Path | None = None) -> Host:
    if lspci is None:
        return host
    from homenode.machine.discover.lspci import overlay_lspci

    text = _read_text(lspci, "lspci -D -nn -vvv > lspci.txt")
    return overlay_lspci(host, text, lspci.name)


def _read_this_machine() -> Host:
    from homenode.machine.snapshot.live import LiveSnapshot

    return _discover_host(LiveSnapshot())


def _discover_host(snapshot: Snapshot) -> Host:
    """Return the host of a snapshot, with its libvirt domains."""
    from homenode.machine.discover.host import discover
    from homenode.vm.domain.read import read_running_domain

    return discover(snapshot, read_running_domain)


def _open(path: Path) -> Snapshot:
    from homenode.machine.snapshot.store import open_snapshot

    return open_snapshot(path)


def _holds_files(source: str, path: Path) -> tuple[bool, bool]:
    """Return whether a source is an archive or a directory, and whether its file exists."""
    archive, is_part, _ = source.rpartition("#")
    try:
        is_archive = path.is_dir() or (is_part and not path.exists() and Path(archive).exists())
        is_archive = is_archive or (path.is_file() and _is_archive(path))
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long a name, a NUL in it, no permission
        raise of_os(error, source, "the host") from None
    return is_archive, exists


def _load_named(source: str) -> Host:
    path = Path(source)
    is_archive, exists = _holds_files(source, path)
    if is_archive:
        return _discover_host(_open(path))
    if exists:
        return parse_host(_read_text(path), path.name)
    return load_shipped_host(source)


def is_host(source: str) -> bool:
    """Return whether a name is a source: a file, a directory or a shipped host."""
    from homenode.machine.description.parse import list_shipped_hosts

    return any(_holds_files(source, Path(source))) or source in list_shipped_hosts()


def _is_archive(path: Path) -> bool:
    try:
        head = read_start(path, _HEAD_BYTES)
    except OSError as error:
        raise of_os(error, str(path), "the host") from None
    return head.startswith(_ARCHIVE_MAGIC) or head[_TAR_MAGIC_AT:].startswith(b"ustar")


def parse_host(text: str, name: str) -> Host:
    """Read the host of a document. Parsers are imported on demand: most commands need one."""
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith(("<", "{")) and len(text) > _MAX_TREE_CHARACTERS:
        raise InputError(
            f"{name}: expected a host of at most {_MAX_TREE_CHARACTERS} characters, found "
            f"{len(text)}"
        )
    if start.startswith("<"):
        if "<topology" not in (head := start[:_HEAD_CHARACTERS]):
            if "<domain" not in head:
                raise InputError(f"{name}: expected a host, found XML but not hwloc's", hint=_KINDS)
            raise InputError(
                f"{name}: expected a host, found the domain XML of a VM",
                hint=command_line("homenode", "plan", name, "--host", "SOURCE"),
            )
        from homenode.machine.discover.hwloc import host_from_hwloc

        return host_from_hwloc(text, name)
    if start.startswith("{"):
        from homenode.formats import decode

        return _check_host(decode(text, "host", Host, name), name)
    for is_kind, read in _list_readers():
        if is_kind(text):
            try:
                return read(text, name)
            except ParseError as error:
                if error.message.startswith(name):
                    raise
                raise InputError(f"{name}: {error.message}", hint=error.hint) from None
    from homenode.machine.description.tables import read_toml

    try:
        read_toml(text)
    except ValueError as error:
        from homenode.vm.targets.registry import recognize_target

        if (target := recognize_target(text.encode("utf-8", "surrogateescape"))) is not None:
            raise InputError(
                f"{name}: expected a host, found a VM of {target}",
                hint=command_line("homenode", "plan", name, "--host", "SOURCE"),
            ) from None
        raise InputError(
            f"{name}: expected a host, found another text (as TOML: {error})", hint=_KINDS
        ) from None
    from homenode.machine.description.parse import parse_description

    return parse_description(text, name).host


_HOST_TOML = re.compile(r"^(?:packages|cores_per_package)[ \t]{0,99}=", re.MULTILINE)


def _check_host(host: Host, name: str) -> Host:
    """Return the checked host of a document. Raises InputError if it contradicts itself."""
    size, rows = len(host.nodes), host.distances
    if rows is not None and {len(rows), *map(len, rows)} != {size}:
        raise InputError(f"{name}: expected a distance between all of {size} nodes, found others")
    known_pus, caches = host.pu_at, (None, *range(len(host.llcs)))
    sets = [*(core.pus for core in host.cores), *(llc.pus for llc in host.llcs)]
    parts_listed = all(pus and known_pus.keys() >= set(pus) for pus in sets)
    if not (parts_listed and all(pu.llc in caches for pu in host.pus)):
        raise InputError(f"{name}: expected each core and cache of CPUs that are listed")
    return host


def is_host_source(name: str) -> bool:
    """Return whether a directory or a file is a source of a host, by its content. Raises InputError
    or HostError for what cannot be read."""
    path = Path(name)
    is_archive, exists = _holds_files(name, path)
    if is_archive or not exists:
        return is_archive
    try:
        text = _read_text(path)
    except InputError:
        return False  # reported when it is read as a VM
    start = text.lstrip("\ufeff \t\r\n")[:_HEAD_CHARACTERS]
    if start.startswith("<"):
        return "<topology" in start and "<domain" not in start
    if start.startswith("{"):
        return '"homenode.host/' in start
    return any(is_kind(text) for is_kind, _ in _list_readers()) or bool(_HOST_TOML.search(text))


def load_host_of(sources: Sequence[str], *, lspci: Path | None = None) -> Host:
    """Read the host that several sources describe; lspci's output supplements the others. Raises
    like load_host, and InputError for sources that do not complement each other."""
    from homenode.machine.discover.host import combine

    bases, overlays = split_sources(sources, lspci)
    if len(overlays) > 1:
        raise InputError(
            f"{overlays[0]}, {overlays[1]}: two outputs of lspci for one host",
            hint="homenode doctor --pool DIR compares hosts",
        )
    return _overlay_lspci(reduce(combine, map(_load_named, bases)), *overlays)


def split_sources(sources: Sequence[str], lspci: Path | None) -> tuple[list[str], list[Path]]:
    """Return the sources of one host that are for --host, and those that are for --lspci."""
    listings = [source for source in sources if _is_lspci(source)]
    bases = [source for source in sources if source not in listings] or listings[-1:]
    listings = [source for source in listings if source not in bases]
    return bases, [*map(Path, listings), *([] if lspci is None else [lspci])]


def read_matrices(sources: Sequence[str]) -> "dict[str, TopoMatrix]":
    """Return the sources that are outputs of `nvidia-smi topo -m`, by name."""
    from homenode.machine.tools import nvidia_smi

    files = [name for name in sources if _holds_files(name, Path(name)) == (False, True)]
    texts = {name: _read_text(Path(name)) for name in files}
    return {
        name: nvidia_smi.parse_topology(text)
        for name, text in texts.items()
        if nvidia_smi.looks_like_topology(text)
    }


def _is_lspci(source: str) -> bool:
    from homenode.machine.tools.lspci import looks_like_lspci

    path = Path(source)
    return not _holds_files(source, path)[0] and looks_like_lspci(_read_text(path))


def shows_xen(source: str | None) -> bool:
    """Return whether a source is a file of `xl info -n`, which only Xen's dom0 prints."""
    from homenode.machine.tools.xl_info import looks_like_xl_info

    if source is None or _holds_files(source, Path(source)) != (False, True):
        return False
    return looks_like_xl_info(_read_text(Path(source)))


_SHORT = (
    (re.compile(r"^xen_version +:", re.MULTILINE), "xl info", "-n"),
    (re.compile(r"^Architecture: ", re.MULTILINE), "lscpu", "-e"),
    (re.compile(r"^policy: ", re.MULTILINE), "numactl", "-H"),
    (re.compile(r"^\| NVIDIA-SMI ", re.MULTILINE), "nvidia-smi", "topo -m"),
)
"""A line of an output without topology, its command, and the option that shows the topology."""


def _is_short(text: str) -> bool:
    return any(line.search(text) for line, *_ in _SHORT)


def _reject_short(text: str, name: str) -> Host:
    command, option = next(words for line, *words in _SHORT if line.search(text))
    raise InputError(
        f"{name}: output of {command} without {option}: it shows no topology",
        hint=f"{command} {option} > host.txt",
    )


def _list_readers() -> Iterator[tuple[Callable[[str], bool], Callable[[str, str], Host]]]:
    """(is a text of this tool, host of such a text) of each tool that shows a part of a host."""
    from homenode.machine.discover import host
    from homenode.machine.discover.lspci import host_from_lspci
    from homenode.machine.tools import lscpu, numactl, nvidia_smi, xl_info
    from homenode.machine.tools.lspci import looks_like_lspci

    yield looks_like_lspci, host_from_lspci
    yield (
        numactl.looks_like_hardware,
        lambda text, name: host.host_from_numactl(numactl.parse_hardware(text), name),
    )
    yield (
        lscpu.looks_like_lscpu,
        lambda text, name: host.host_from_lscpu(lscpu.parse(text), name),
    )
    yield (
        xl_info.looks_like_xl_info,
        lambda text, name: host.host_from_xl(xl_info.parse(text), name),
    )
    yield (
        nvidia_smi.looks_like_topology,
        lambda text, name: host.host_from_topology(nvidia_smi.parse_topology(text), name),
    )
    yield _is_short, _reject_short


def load_shipped_host(name: str) -> Host:
    """Return a shipped host, even if the current directory has a file of its name. Raises
    InputError for an unknown name."""
    from homenode.machine.description.parse import list_shipped_hosts, load_shipped

    names = list_shipped_hosts()
    if name not in names:
        if not name.isprintable() or set(name) & {".", "/"} or not name:
            raise InputError(f"{name[:200]!r}: no such file", hint="homenode list hosts")
        if name.startswith("ssh:"):
            hint = command_line("homenode", "capture", "--ssh", name[4:], "-o", "host.tar.gz")
            raise InputError(f"{name}: a host over ssh, not a file or a shipped host", hint=hint)
        raise unknown("host", name, names, "homenode list hosts")
    return load_shipped(name).host


def _read_text(path: Path, hint: str | None = None) -> str:
    data = read_file(path, "the host", max_bytes=_MAX_TEXT_BYTES, hint=hint)
    if not data.removeprefix(b"\xef\xbb\xbf").strip():
        raise NotKnownError(
            f"{path}: expected a host, found an empty file",
            hint="check that the command which wrote it is installed, and ran as root",
        )
    if b"\0" in data:
        raise InputError(
            f"{path}: expected a host, found binary data of no known kind",
            hint="homenode capture -o host.tar.gz writes one",
        )
    text = data.decode("utf-8", "surrogateescape")
    return dedent(text) if text[:1].isspace() else text  # a quotation in a forum is indented
