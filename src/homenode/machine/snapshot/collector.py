"""Collector: one script for a POSIX shell that reads the files and commands of the contents table.

It runs on a host without homenode, with sh of busybox or dash, and writes nothing on it. Its
output:

    homenode-collector 1          the first line of the script; a login banner may precede it
    F proc/device-tree/model      a file, then its lines, each after a space
     0-3
    G sys/.../online sys/.../*/x  many files: lines "path:line", as grep prints them
    H sys/bus/.../config          a binary file, then its bytes in hexadecimal
    D sys/class/iommu             a directory
    L                             then lines of "ls -l" that give links, each after a space
    C lspci                       a tool's output, each line after a space, then its exit status
    Z                             the end; without it the transfer was cut short

One program reads many files: starting one for each would take a minute on a host of 1024 CPUs, and
in an emulated guest it takes longer than to boot. The shell's own read will not do: dash and
busybox read byte by byte, and /proc/sys and the bitmaps of /sys/devices/system/cpu end after the
first byte then (seen on Linux 6.18).
"""

import re
from collections.abc import Iterator, Sequence
from shlex import quote

from homenode.errors import ParseError
from homenode.machine.snapshot.contents import (
    BRIDGE_CLASS,
    COMMANDS,
    IDENTITY_COMMANDS,
    IDENTITY_PATHS,
    PATHS,
    SERIAL_PATHS,
    PathKind,
    PathRule,
    ToolCommand,
)
from homenode.machine.snapshot.protocol import MemorySnapshot, follow, join
from homenode.package_data import read_package_text

_START = "homenode-collector 1"
_SAFE_GLOB = re.compile(r"/[A-Za-z0-9_./*\[\]-]+\Z", re.ASCII)
_LISTED_LINK = re.compile(r"^ l\S* .*? (sys/\S+) -> (\S+)$", re.ASCII)
_STATUS = re.compile(r"\nS (\d+)\Z")

_FUNCTIONS = read_package_text("machine", "snapshot", "collector.sh")


def build_collector_script(root: str = "/") -> str:
    """Return the script. root: where /sys and /proc are (a chroot, a mounted tree)."""
    lines = [_FUNCTIONS, f"cd {quote(root)} || exit 3", f"echo '{_START}'"]
    lines += [f"f {_make_glob_relative(path)}" for path in (*IDENTITY_PATHS, *SERIAL_PATHS)]
    together = [_make_glob_relative(rule.glob) for rule in PATHS if _is_text(rule)]
    lines.append(f"g '{' '.join(together)}'")
    links: list[str] = []
    for rule in PATHS:
        if rule.kind is PathKind.LINK:
            links.append(_make_glob_relative(rule.glob))
        elif _is_text(rule):
            continue
        elif rule.unless is None:
            lines += _list_reading_lines(rule)
        else:
            guard = f'set -- {_make_glob_relative(rule.unless)}; [ -e "$1" ] || {{'
            lines += [guard, *_list_reading_lines(rule), "}"]
    lines.append("echo L")
    # A bare tree may have directories instead of a host's links.
    lines.append(f"ls -ld {' '.join(links)} </dev/null | sed -n 's/^l/ l/p'")
    lines.append("set -f")
    for command in (*IDENTITY_COMMANDS, *COMMANDS):
        lines += _list_command_lines(command)
    lines.append("echo Z")
    return "\n".join(lines) + "\n"


def parse_collected(text: str, name: str) -> MemorySnapshot:
    """Return a collector's output as a snapshot; gather() then selects the table's part. Failed
    tools are omitted. Raises ParseError if the text is no collector's, or cut short."""
    lines = text.split("\n")
    if _START not in lines:
        raise ParseError(
            name, f"a line {_START!r}", lines[0], hint="is its login shell a POSIX shell?"
        )
    first = lines.index(_START) + 1
    if "Z" not in lines[first:]:
        raise ParseError(name, "a line 'Z' at the end", lines[-1], hint="run the capture again")
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    commands: dict[str, str] = {}
    directories: list[str] = []
    for number, mark, body in _split_blocks(lines, first):
        kind, _, subject = mark.partition(" ")
        if kind == "F":
            files[f"/{subject}"] = _join_text(body)
        elif kind == "G":
            files.update(_split_lines(subject, body))
        elif kind == "H":
            files[f"/{subject}"] = _decode_binary(body, name, number)
        elif kind == "D":
            directories.append(f"/{subject}")
        elif kind == "L":
            links.update(_parse_links(body))
        elif kind == "C":
            output = _join_text(body)
            status = _STATUS.search(output)
            if status is None:
                raise ParseError(name, "an exit status", mark, line=number)
            if status[1] == "0":
                commands[subject] = output[: status.start()]
        elif kind != "Z":
            raise ParseError(name, "one of F, G, H, D, L, C, Z", mark, line=number)
    return MemorySnapshot(
        name,
        {_resolve(path, links): text for path, text in files.items()},
        {_resolve(path, links): target for path, target in links.items()},
        commands,
        tuple(_resolve(path, links) for path in directories),
    )


def _make_glob_relative(glob: str) -> str:
    """Return a glob of the table below the current directory; it goes to the shell unquoted."""
    assert _SAFE_GLOB.match(glob), glob
    return glob.lstrip("/")


def _is_text(rule: PathRule) -> bool:
    """Return whether grep can read it with others. The device tree's texts end in a zero byte."""
    return rule.kind is PathKind.FILE and rule.unless is None and "device-tree" not in rule.glob


def _list_reading_lines(rule: PathRule) -> Iterator[str]:
    glob = _make_glob_relative(rule.glob)
    if rule.kind is PathKind.DIRECTORY:
        yield f'for p in {glob}; do d "$p"; done'
    elif rule.kind is PathKind.CONFIG:
        classes = glob.removesuffix("config") + "class"
        bridges = f"grep -l '^{BRIDGE_CLASS}' {classes} /dev/null </dev/null"
        yield f'for p in $({bridges}); do b "${{p%class}}config"; done'
    elif _is_pattern(glob):
        yield f"g '{glob}'"
    else:
        yield f"f {glob}"


def _list_command_lines(command: ToolCommand) -> Iterator[str]:
    """Yield lines that run a tool, if it is installed, and frame its output. The exit status
    follows in the same pipe, on a separate line."""
    for position, argv in enumerate(command.spellings):
        yield f"{'el' if position else ''}if command -v {quote(argv[0])} >/dev/null; then"
        yield f"echo 'C {command.name}'"
        yield "{"
        if command.list_argv:
            run_list = _format_invocation(command.list_argv, command.timeout_s)
            yield f"w=$({run_list}); r=$?"
            yield f"echo '<{command.wrapped}>'"
            # Not quoted: words are what the list is split into. They are UUIDs.
            run_one = _format_invocation(argv, command.timeout_s, '"$i"')
            # One that fails is an error unless its domain ended meanwhile.
            yield f"for i in $w; do {run_one} || {{ w=$({run_list}) || r=1"
            yield 'case $w in *"$i"*) r=1;; esac; }; done'
            yield f"echo '</{command.wrapped}>'"
        else:
            yield _format_invocation(argv, command.timeout_s)
            yield "r=$?"
        yield r"printf '\nS %s\n' $r"
        yield "} | sed 's/^/ /'"
    yield "fi"


def _format_invocation(argv: Sequence[str], timeout_s: int, word: str = "") -> str:
    return " ".join(
        ["t", str(timeout_s), *map(quote, argv), *([word] if word else []), "</dev/null"]
    )


def _is_pattern(glob: str) -> bool:
    return any(sign in glob for sign in "*[")


def _split_blocks(lines: Sequence[str], first: int) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (line number, mark, lines of the block) up to Z."""
    at = first
    while at < len(lines):
        mark = lines[at]
        at += 1
        number = at
        inner = ("sys/", "proc/") if mark[:1] == "G" else (" ",)
        while at < len(lines) and lines[at].startswith(inner):
            at += 1
        yield number, mark, list(lines[number:at])
        if mark == "Z":
            return


def _join_text(body: Sequence[str]) -> str:
    """Return the lines of a block, each after its space. The last line end was added by f()."""
    return "\n".join(line[1:] for line in body)


def _split_lines(globs: str, body: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(path, text) of lines "path:line". A path may hold colons: 0000:3b:00.0/class:0x030200."""
    patterns = ["/".join(map(_format_part_pattern, glob.split("/"))) for glob in globs.split(" ")]
    line_patterns = [re.compile(rf"({pattern}):(.*)", re.DOTALL) for pattern in patterns]
    any_ = re.compile("|".join(f"({pattern}):" for pattern in patterns))
    texts: dict[str, list[str]] = {}
    now = line_patterns[0]  # lines of one glob follow each other
    for line in body:
        match = now.fullmatch(line)
        if match is None and (first := any_.match(line)) is not None and first.lastindex:
            now = line_patterns[first.lastindex - 1]
            match = now.fullmatch(line)
        if match is not None:
            texts.setdefault(f"/{match[1]}", []).append(match[2])
    for path, of_path in texts.items():
        yield path, "\n".join(of_path) + "\n"


def _format_part_pattern(part: str) -> str:
    """Return a pattern for a part of a glob. A number contains no colon, so it may come last."""
    ending = {"[0-9]*": "[0-9]+"}.get(part)
    return ending or ("[^/]*" if _is_pattern(part) else re.escape(part))


def _decode_binary(body: Sequence[str], name: str, number: int) -> str:
    try:
        content = bytes.fromhex("".join(body))
    except ValueError:
        raise ParseError(name, "bytes in hexadecimal", " ".join(body), line=number) from None
    return content.decode("utf-8", "surrogateescape")


def _parse_links(body: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (path, target) of lines such as

    lrwxrwxrwx 1 root root 0 Nov 20 09:10 sys/bus/pci/devices/0000:00:01.0 -> ../../../devices/x
    """
    for line in body:
        match = _LISTED_LINK.match(line)
        if match is not None:
            yield f"/{match[1]}", match[2]


def _resolve(path: str, links: dict[str, str]) -> str:
    """Return the real path, following links above its last part; /sys has no other links."""
    directory, _, name = path.rpartition("/")
    real = follow("/", directory.split("/"), links.get, lambda path: True)
    return path if real is None else join(real, name)
