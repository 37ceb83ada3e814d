"""The terminal: output for people, with its width and colours. [I/O]

All output of commands passes through this module, which removes control characters: names of files
and VMs, definitions, and output of guests and tools may contain escapes.
"""

import os
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, cast

from homenode.errors import FINDINGS

if TYPE_CHECKING:
    from rich.console import Console

    from homenode.doc import Part
    from homenode.errors import HomenodeError
    from homenode.findings import Finding, Findings, Gap


@cache
def make_console(name: str = "stdout") -> "Console":
    """Return the standard output for people: colours only on a terminal, never wider than it or 100
    columns. Piped output is not wrapped, unless COLUMNS sets its width. name: also "stderr"."""
    from homenode.show.terminal_text import PrintableConsole

    is_terminal = getattr(sys, name).isatty()
    has_width = os.environ.get("COLUMNS", "").isdecimal()
    is_live = is_terminal and name == "stderr"  # where bars are drawn
    return PrintableConsole(
        highlight=False,
        emoji=False,
        markup=False,
        width=_get_columns() if is_terminal else None if has_width else _PIPED_COLUMNS,
        stderr=is_live,
        file=None if is_live else cast("IO[str]", _WithoutPadding(name)),
    )


@cache
def get_error_console() -> "Console":
    """Return the standard error, likewise."""
    return make_console("stderr")


_PIPED_COLUMNS = 10_000


def _get_columns() -> int:
    from shutil import get_terminal_size

    return max(60, min(100, get_terminal_size().columns))


def check_streams() -> None:
    """Raise HostError for a closed standard output: no answer could be printed, so the command
    stops.

    A closed descriptor becomes /dev/null, so that no file that is opened later gets its number, to
    which libraries write their messages.
    """
    closed = sys.stdout is None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if closed:
        sys.stdout = os.fdopen(1, "w", closefd=False)
        from homenode.errors import HostError

        raise HostError("standard output is closed", hint=">/dev/null discards the answer")


def discard_output() -> None:
    """Discard further output: its reader (head, less) is gone."""
    os.dup2(os.open(os.devnull, os.O_RDWR), sys.stdout.fileno())


class _WithoutPadding:
    """Standard output or error, with no blanks at the ends of lines."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def _stream(self) -> "TextIO":
        return cast("TextIO", getattr(sys, self._name))

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def write(self, text: str) -> int:
        self._stream.write("\n".join(line.rstrip(" ") for line in text.split("\n")))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


def say(text: str) -> None:
    """Lines to standard output."""
    print(_remove_colour(text))


def print_own(text: str) -> None:
    """Lines of homenode's own to standard output, with the styles that are in them."""
    print(text)


def note(text: str, hang: int = 2) -> None:
    """Print one line to standard error: a written file, or an omission. Newlines are escaped."""
    from homenode.text import printable

    line = printable(text)
    if sys.stderr.isatty():
        line = "\n".join(wrap_words(line, _get_columns(), hang))
    print(line, file=sys.stderr)


_PROGRAMS = frozenset(
    "apt apt-get cat echo fuser homenode kubectl make mkdir modprobe pip podman qemu-img qm "
    "scontrol ssh sudo systemctl tar virsh virtctl".split()
)


def wrap_words(line: str, columns: int, hang: int) -> list[str]:
    """Wrap a line at words, but not within a command, which ends at a comma, semicolon or colon.

    >>> wrap_words("  hint: free them, or virsh undefine an-old-vm", 30, 8)
    ['  hint: free them, or', '        virsh undefine an-old-vm']
    """
    from textwrap import wrap

    text, is_command = "", False
    for word in line.split(" "):
        text += ("\0" if is_command else " ") + word
        is_command = (is_command or word in _PROGRAMS) and not word.endswith((",", ";", ":"))
    lines = wrap(
        text.lstrip(" "),
        columns,
        initial_indent=" " * (len(line) - len(line.lstrip(" "))),
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def note_gaps(gaps: "Iterable[Gap]") -> None:
    """Print unknown facts of the host on which an answer depends."""
    from homenode.findings import NO_VMS, format_gaps

    for line in format_gaps(gap for gap in gaps if gap.subject != NO_VMS):
        note(f"unknown: {line}")


def note_error(error: "HomenodeError", before: str = "homenode") -> None:
    """Print an error and its hint, a line each, to standard error."""
    note(f"{before}: {error.message}")
    if error.hint is not None:
        note(f"  hint: {error.hint}", hang=8)


def update(text: str) -> None:
    """Print a line to standard error that the next one replaces; for terminals."""
    from homenode.text import printable

    print(f"\r{printable(text)}\r", end="", file=sys.stderr, flush=True)


def _remove_colour(text: str) -> str:
    from homenode.text import escape_lines  # the way to --help loads as little as it can

    return escape_lines(text)


def is_interactive() -> bool:
    """Return whether a user reads the output and can answer."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def check_can_ask(*, asks: bool) -> None:
    """Raise UsageError if a change needs a confirmation and there is no terminal."""
    if asks and not is_interactive():
        from homenode.errors import UsageError

        raise UsageError(
            "not a terminal; nothing was changed",
            hint="--yes, or --dry-run to see the change",
        )


def ask(question: str) -> None:
    """Ask on the terminal before a change; exits unless the answer is yes."""
    try:
        print(f"{_remove_colour(question)} [y/N] ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        note("")
        raise KeyboardInterrupt("nothing was changed") from None
    if answer.strip().lower() not in ("y", "yes"):
        if not answer.endswith("\n"):  # Ctrl-D leaves the cursor behind the question
            note("")
        note("nothing was changed")
        raise SystemExit(FINDINGS)


@contextmanager
def working(task: str) -> Iterator[None]:
    """Show a long operation and its elapsed time until it ends; only on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=get_error_console(), transient=True) as progress:
        progress.add_task(_remove_colour(task), total=None)
        yield


@contextmanager
def counting(task_name: str) -> "Iterator[Callable[[int, int], None]]":
    """Show the done and total counts on a terminal; yield a function that gets both."""
    if not sys.stderr.isatty():
        yield lambda count, total: None
        return
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), MofNCompleteColumn(separator=" of ")
    with Progress(*columns, console=get_error_console(), transient=True) as bar:
        task = bar.add_task(task_name, total=None)
        yield lambda count, total: bar.update(task, completed=count, total=total)


def print_json(text: str) -> None:
    """Print a JSON document: never wrapped or coloured; control characters are JSON escapes."""
    if not text.replace("\n", "").isprintable():
        text = "".join(
            letter if letter.isprintable() or letter == "\n" else _escape_letter(letter)
            for letter in text
        )
    sys.stdout.write(text)
    sys.stdout.flush()  # a caller that writes line by line waits for each answer


def _escape_letter(letter: str) -> str:
    """Return a letter's JSON escape: two of UTF-16 above U+FFFF."""
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def print_findings(
    findings: "Findings",
    subject: str,
    *,
    as_json: bool,
    answer: str | None = None,
    explain: bool = False,
    table: "Sequence[Part]" = (),
    labels: "Mapping[str, str] | None" = None,
) -> None:
    """Print findings about a subject as JSON, or as the screen of findings_text."""
    if as_json:
        from homenode.formats import encode

        print_json(encode("findings", findings))
        return
    from homenode.show.findings_text import format_findings

    text = format_findings(
        findings, subject, answer=answer, explain=explain, table=table, labels=labels
    )
    make_console().print(text)


def exit_if_bad(findings: "Iterable[Finding]") -> None:
    """Exit with status 1 if a finding is critical or a warning."""
    from homenode.findings import are_bad

    if are_bad(findings):
        raise SystemExit(FINDINGS)


def exit_by(findings: "Findings") -> None:
    """Exit with status 1 for a critical finding or a warning, 5 if nothing was checked."""
    from homenode.findings import exit_code

    if code := exit_code(findings):
        raise SystemExit(code)


def print_file(text: str) -> None:
    """Print a file's content: unescaped if standard output is not a terminal."""
    sys.stdout.write(_remove_colour(text) if sys.stdout.isatty() else text)


def print_document(content: bytes) -> None:
    """Print a document: byte for byte if standard output is not a terminal."""
    if sys.stdout.isatty():
        print_file(content.decode("utf-8", "replace"))
    else:
        write_bytes(STANDARD_OUTPUT, content)


def print_diff(before: bytes, after: bytes, before_name: str, after_name: str) -> None:
    """Print a unified diff of two documents, coloured on a terminal; nothing if they are equal."""
    import difflib

    from rich.text import Text

    lines = difflib.unified_diff(
        before.decode("utf-8", "replace").splitlines(),
        after.decode("utf-8", "replace").splitlines(),
        before_name,
        after_name,
        lineterm="",
    )
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for line in map(_remove_colour, lines):
        header = line.startswith(("+++", "---"))
        style = "bold" if header else colours.get(line[:1], "")
        if make_console().is_terminal:
            make_console().print(
                Text(line, style=style), overflow="ignore", no_wrap=True, crop=False
            )
        else:
            print(line)


def choose_permissions(document: str) -> int:
    """Return permissions for output made from a definition: those of its file; owner only if it was
    not a regular file, because `virsh dumpxml --security-info` may be piped in."""
    from homenode.safe.durable import PRIVATE

    try:
        mode = Path(document).stat().st_mode
    except OSError:
        return PRIVATE
    return stat.S_IMODE(mode) & 0o666 if document != "-" and stat.S_ISREG(mode) else PRIVATE


STANDARD_OUTPUT = Path("-")

_SIGNED_BYTES = 4096
_SIGNATURES = (
    b'"format":"homenode.',
    b'"format": "homenode.',
    b'content="homenode',
    b"<!-- homenode",
    b"# homenode",
    b'<title id="title">Topology of ',
)
"""Beginnings of the files of homenode that may be overwritten; binary files have SIGNED_END at
their end instead."""


def check_can_write(*paths: Path | None, force: bool | None = None) -> None:
    """Raise UsageError for the first path that is a directory, or a file that homenode did not
    write; HostError if its directory is missing or inaccessible. force: overwrite it; None if no
    option says so.

    Commands call it before they write anything, so that they write all files or none.
    """
    for path in paths:
        if path is None or path == STANDARD_OUTPUT:
            continue
        _check_output_path(path)
        if not force and path.exists() and not _is_ours(path):
            reject_overwrite(path, has_force=force is not None)


def reject_overwrite(path: Path, *, has_force: bool) -> None:
    """Raise UsageError for a file that homenode did not write."""
    from homenode.errors import UsageError

    raise UsageError(
        f"{path}: file exists, and homenode did not write it",
        hint="choose another name" + (", or overwrite it with --force" if has_force else ""),
    )


def _check_output_path(path: Path) -> None:
    from homenode.errors import HostError, UsageError

    try:
        is_directory, has_parent = path.is_dir() or not path.name, path.parent.is_dir()
    except OSError as error:  # a directory above it that this user may not enter
        raise HostError(f"{path}: cannot write: {error.strerror}") from None
    if is_directory:
        raise UsageError(f"{path}: a directory, not a regular file", hint=f"{path / 'FILE'}")
    if not has_parent:
        raise UsageError(f"{path.parent}: no such directory", hint=f"mkdir -p {path.parent}")


def _is_ours(path: Path) -> bool:
    """Return whether a file is empty, a device such as /dev/null, or has homenode's signature."""
    from homenode.safe.input_files import open_regular
    from homenode.show.html import SIGNED_END

    try:
        if not path.is_file():
            return True
        with open_regular(path) as file:
            start = file.read(_SIGNED_BYTES)
            file.seek(-min(len(start), len(SIGNED_END)), os.SEEK_END)
            end = file.read(len(SIGNED_END))
    except OSError:
        return False
    return not start or end == SIGNED_END or any(signature in start for signature in _SIGNATURES)


def note_written(path: Path) -> None:
    """Print the path of a written file, unless it went to standard output."""
    if path != STANDARD_OUTPUT:
        note(f"wrote {path}")


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file completely or not at all; mode as in durable.replace_file. Raises HostError."""
    if path == STANDARD_OUTPUT:
        print_file(text)
        return
    write_bytes(path, text.encode(), mode)


_MAX_WRITTEN = 64 << 20
"""Bytes of a file that a command wrote and may write again."""


def write_new_files(
    directory: Path, texts: Mapping[Path, str], mode_of: Mapping[Path, int] | None = None
) -> None:
    """Write files below a directory, all or none. Raises UsageError if one has other content."""
    from homenode.errors import HostError, UsageError
    from homenode.safe.input_files import read_plain
    from homenode.text import command_line, plural

    if directory == STANDARD_OUTPUT:
        raise UsageError("-o -: several files need a directory, not standard output")
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: a file, not a directory")
    try:
        for path, text in texts.items():
            if path.exists() and read_plain(path, _MAX_WRITTEN) != text.encode():
                hint = f"-o {command_line(directory / 'new')}, or another new directory"
                raise UsageError(f"{path}: file exists, with other content", hint=hint)
        for path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{directory}: cannot write: {error.strerror}") from None
    check_can_write(*(path for path in texts if not path.exists()))
    for path, text in texts.items():
        write_text(path, text, (mode_of or {}).get(path))
    names = (str(path.relative_to(directory)) for path in texts)
    note(f"wrote {directory}: {plural(len(texts), 'file')}: {', '.join(names)}")


def write_bytes(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write bytes as `write_text` does. Raises UsageError for bytes to a terminal."""
    from homenode.errors import HostError, UsageError
    from homenode.safe.durable import replace_file

    if path == STANDARD_OUTPUT:
        if sys.stdout.isatty():
            raise UsageError("-o -: expected a file or a pipe for binary data, found a terminal")
        print_bytes(content)
        return
    _check_output_path(path)
    try:
        replace_file(path, content, mode, synced=False)
    except OSError as error:
        raise HostError(f"{path}: cannot write: {error.strerror}") from None


def print_bytes(content: bytes) -> None:
    """A document to standard output, byte for byte."""
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt inside, unless nohup ignores them."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {}
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            before[signal_number] = signal.signal(signal_number, interrupt)
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)
