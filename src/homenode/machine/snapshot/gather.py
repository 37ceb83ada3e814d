"""Gather: the part of a snapshot that the contents table names, and the kept part of PCI config
space. Data of a live host, a directory, or another machine's collector passes through this module
into a capture: files that are not in the table, or malformed, are omitted. A capture's
manifest.json describes it.
"""

import re
from collections.abc import Iterator
from fnmatch import translate
from functools import cache

from msgspec import Struct

from homenode import formats
from homenode.machine.snapshot.contents import BRIDGE_CLASS, COMMANDS, PATHS, PathKind, PathRule
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot

MANIFEST = "manifest.json"
KIND = "snapshot"


class Manifest(Struct, frozen=True):
    """Contents and omissions of a capture. No time or host name: equal hosts, equal files."""

    homenode: str  # version of the program that wrote it
    redacted: bool  # names, serials and addresses are pseudonyms
    files: int  # how many there are
    links: int  # how many there are
    commands: tuple[str, ...]  # tools whose output is in it
    absent: tuple[str, ...]  # globs of the contents table that matched nothing on the host
    # (path or tool, reason): was there, is not in the capture
    omitted: tuple[tuple[str, str], ...]
    # "host name", "user name": a word too short or too common to be distinguished from other text,
    # so that it gets a pseudonym only at known places
    not_everywhere: tuple[str, ...] = ()


def encode_manifest(manifest: Manifest) -> str:
    paths = [{"what": subject, "reason": reason} for subject, reason in manifest.omitted]
    return formats.encode(KIND, manifest, changes={"omitted": paths})


def check_manifest(text: str, source: str) -> None:
    """Raise InputError if a capture is newer than this program, or the document no manifest."""
    formats.check_format(text.encode("utf-8", "replace"), KIND, f"{source}: {MANIFEST}")


_NAME_IN_PATH = re.compile(r"[A-Za-z0-9_.:@+-]{1,255}", re.ASCII)


class GatheredFiles(Struct, frozen=True):
    """The gathered files as a snapshot, and the omitted ones."""

    snapshot: MemorySnapshot
    absent: tuple[str, ...]  # globs of the table that matched nothing, in the table's order
    unlike: tuple[str, ...]  # files and links omitted because they do not have their form, sorted
    commands_absent: tuple[str, ...]  # tools that gave no output, in the table's order


class _FormError(Exception):
    """A text does not match its form."""


def gather(snapshot: Snapshot) -> GatheredFiles:
    """Return the part of a snapshot that the contents table names, at real paths under /sys.

    Empty files are omitted. Texts end with one line end, so that
    a capture over ssh and one on the spot are equal.
    """
    in_use: dict[PathKind, dict[str, str]] = {kind: {} for kind in PathKind}
    absent: list[str] = []
    unlike: set[str] = set()
    for rule in PATHS:
        # The better rule is above it in the table.
        if rule.unless is not None and rule.unless not in absent:
            continue
        is_there = False
        for path in expand_glob(snapshot, rule.glob):
            try:
                value = _READERS[rule.kind](snapshot, rule, path)
            except _FormError:
                unlike.add(path)
                continue
            place = None if value is None else _place(snapshot, path)
            if value is not None and place is not None:
                in_use[rule.kind][place] = value
                is_there = True
        if not is_there:
            absent.append(rule.glob)
    outputs = {command.name: snapshot.command_output(command.name) for command in COMMANDS}
    return GatheredFiles(
        MemorySnapshot(
            snapshot.name,
            {**in_use[PathKind.FILE], **in_use[PathKind.CONFIG]},
            in_use[PathKind.LINK],
            {name: output for name, output in outputs.items() if output is not None},
            tuple(sorted(in_use[PathKind.DIRECTORY])),
        ),
        tuple(dict.fromkeys(absent)),
        tuple(sorted(unlike)),
        tuple(name for name, output in outputs.items() if output is None),
    )


def expand_glob(snapshot: Snapshot, glob: str) -> Iterator[str]:
    """Yield paths that a glob names, sorted; a literal last part is not looked for."""
    directories = [""]
    *parents, last = glob.strip("/").split("/")
    for part in parents:
        directories = [
            f"{at}/{name}" for at in directories for name in _match_names(snapshot, at, part)
        ]
    for at in directories:
        for name in _match_names(snapshot, at, last):
            yield f"{at}/{name}"


def _match_names(snapshot: Snapshot, directory: str, part: str) -> tuple[str, ...]:
    if not any(sign in part for sign in "*?["):
        return (part,)
    pattern = _compile_pattern(part)
    return tuple(
        name
        for name in snapshot.list(directory or "/") or ()
        if pattern.fullmatch(name) and _NAME_IN_PATH.fullmatch(name)
    )


@cache
def _compile_pattern(part: str) -> "re.Pattern[str]":
    return re.compile(translate(part))


def _place(snapshot: Snapshot, path: str) -> str | None:
    """Return the path in a capture: below the real path of its directory, except under /proc, where
    /proc/self would become homenode's process number."""
    if not path.startswith("/sys/"):
        return path
    directory, _, name = path.rpartition("/")
    real = snapshot.real_path(directory)
    return None if real is None else f"{real}/{name}"


def _read_file(snapshot: Snapshot, rule: PathRule, path: str) -> str | None:
    text = snapshot.read_text(path)
    if not text:
        return None
    if rule.keep:
        lines = text.splitlines(keepends=True)
        text = "".join(line for line in lines if line == "\n" or line.startswith(rule.keep))
    text = text.replace("\0", "")  # device trees end their strings with one, nohz_full has no text
    if not rule.form.matches(text) or not _is_plain(text):
        raise _FormError
    return text.rstrip("\n") + "\n"


def _is_plain(text: str) -> bool:
    """Return whether a text is printable but for tabs and line ends."""
    return text.replace("\n", "").replace("\t", "").isprintable()


def _link(snapshot: Snapshot, rule: PathRule, path: str) -> str | None:
    target = snapshot.read_link(path)
    if target is not None and not rule.form.matches(target):
        raise _FormError
    return target


def _read_directory(snapshot: Snapshot, rule: PathRule, path: str) -> str | None:
    return None if snapshot.list(path) is None else ""


def _read_config(snapshot: Snapshot, rule: PathRule, path: str) -> str | None:
    """Return the configuration space of a bridge; nothing is read from that of other functions."""
    class_code = snapshot.read_text(path.removesuffix("config") + "class")
    if class_code is None or not class_code.startswith(BRIDGE_CLASS):
        return None
    text = snapshot.read_text(path)
    if not text:
        return None
    header = keep_port_type(text.encode("utf-8", "surrogateescape"))
    if header is None:
        raise _FormError
    return header.decode("utf-8", "surrogateescape")


_READERS = {
    PathKind.FILE: _read_file,
    PathKind.LINK: _link,
    PathKind.DIRECTORY: _read_directory,
    PathKind.CONFIG: _read_config,
}


HEADER_BYTES = 64
"""Bytes that users other than root can read."""

_CONVENTIONAL_BYTES = 256
_CAPABILITIES_POINTER = 0x34
_PCI_EXPRESS = 0x10
_PCI_EXPRESS_BYTES = 0x3C


def keep_port_type(config: bytes) -> bytes | None:
    """Return the header, capability list and PCI Express capability; all else is zero.

    Shape (64,) or (256,), as it came; extended space is cut off. None if it is shorter.

    >>> config = bytearray(range(256))
    >>> config[0x34], config[0x80:0x82], config[0x40:0x44] = 0x80, (0x09, 0x40), (0x10, 0, 0x42, 0)
    >>> kept = keep_port_type(bytes(config))
    >>> kept[0x40:0x44].hex(), kept[0x80:0x84].hex(), kept[0xF0:].hex()
    ('10004200', '09400000', '00000000000000000000000000000000')
    """
    if len(config) < HEADER_BYTES:
        return None
    if len(config) < _CONVENTIONAL_BYTES:
        return config[:HEADER_BYTES]
    blank_bytes = bytearray(_CONVENTIONAL_BYTES)
    blank_bytes[:HEADER_BYTES] = config[:HEADER_BYTES]
    at = config[_CAPABILITIES_POINTER] & ~3
    seen_offsets: set[int] = set()
    while HEADER_BYTES <= at < _CONVENTIONAL_BYTES and at not in seen_offsets:
        seen_offsets.add(at)
        length = _PCI_EXPRESS_BYTES if config[at] == _PCI_EXPRESS else 2
        end = min(at + length, _CONVENTIONAL_BYTES)
        blank_bytes[at:end] = config[at:end]
        at = config[at + 1] & ~3
    return bytes(blank_bytes)
