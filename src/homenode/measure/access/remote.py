"""RemoteMachine: a machine that is reached through a shell. [I/O]

Nothing need be installed there but sh and the standard tools. A program is run by a script that
prints the exit status on standard error after a random mark, because the connection's end does not
show the program's status.

RemoteHost: the machine of `bench --on`. A guest of a trial is stopped after its boot, and all that
ran in it with it. A host continues: a resumed run ends the programs that still run after a kill.
"""

import base64
import gzip
import hashlib
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from shlex import quote
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import ToolError, UsageError
from homenode.machine.snapshot.collector import build_collector_script, parse_collected
from homenode.machine.snapshot.protocol import Snapshot
from homenode.measure.access.machine import Channel, ScriptOutput
from homenode.measure.model import PROBE
from homenode.process import CLOSED, ProgramResult, ToolMissingError, ToolTimeoutError, run
from homenode.text import command_line

MISSING = "missing"
"""Printed instead of a status if the program is not installed on the machine."""

PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STATUS = re.compile(r"(\d{1,3}|missing)\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
_PRELUDE = f"PATH=$PATH:{PATHS}; LC_ALL=C; export PATH LC_ALL; "

_CHANGED = re.compile(r"[\\\n\r!]")
"""Characters that a login shell changes between single quotes: fish a backslash, csh the others."""

_SPECIAL = re.compile(r"""[\\\n\r!'"$`]""")
"""The same, and characters that are special in sh between double quotes."""


def format_sh_line(script: str) -> str:
    """Return the command line that runs a script with sh under any login shell. Characters that a
    login shell could change are passed to sh as octal numbers."""
    if not _CHANGED.search(script):
        return f"sh -c {quote(script)}"
    numbers = _SPECIAL.sub(lambda match: f"\\0{ord(match[0]):03o}", script)
    return f"""sh -c 'eval "$(printf %b "{numbers}")"'"""


def run_script(
    argv: Sequence[str],
    timeout_s: float,
    mark: str,
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
    prefix: Sequence[str] = (),
) -> str:
    """Return a line that runs a program and then prints mark and status on standard error. stdin: a
    remote input file; None = the script's own standard input. prefix: words before the program. A
    `timeout`, if installed, also ends the program remotely.

    >>> "timeout -s KILL 6 echo 'a b'" in run_script(["echo", "a b"], 5.2, "M")
    True
    """
    variables = "".join(
        f"{name}={quote(value)}; export {name}; "
        for name, value in (environment or {}).items()
        if _VARIABLE.match(name)
    )
    words = " ".join(map(quote, (*prefix, *argv)))
    fed = "" if stdin is None else f" <{quote(stdin)}"
    seconds = max(1, ceil(timeout_s))
    return (
        f"{_PRELUDE}{variables}"
        f"if command -v {quote(argv[0])} >/dev/null 2>&1; then "
        "if command -v timeout >/dev/null 2>&1; "
        f"then timeout -s KILL {seconds} {words}{fed}; else {words}{fed}; fi; r=$?; "
        f"else r={MISSING}; fi; "
        f'printf "\\n%s %s\\n" {quote(mark)} "$r" >&2'
    )


def render_script(names: Collection[str]) -> str:
    """Return a shell line that prints each name whose program is installed."""
    words = " ".join(quote(name) for name in sorted(names))
    return f'{_PRELUDE}for n in {words}; do command -v "$n" >/dev/null 2>&1 && echo "$n"; done; :'


def split_status(stderr: str, mark: str) -> tuple[str, str | None]:
    """Standard error without the mark, and the status behind it; None if the mark never came.

    >>> split_status("warning\\n\\nM 3\\n", "M")
    ('warning\\n', '3')
    """
    text, separator, status = stderr.rpartition(f"\n{mark} ")
    if not separator or not _STATUS.match(status.strip()):
        return stderr, None
    return text, status.strip()


def convert_status(status: int) -> int:
    """Return the code as in ProgramResult: a shell reports a signal as 128 plus its number.

    >>> convert_status(3), convert_status(137)
    (3, -9)
    """
    return 128 - status if 128 < status <= 128 + 64 else status


_DIRECTORIES = ("/run", "/tmp", "/var/tmp", "/dev/shm", "/root")  # noqa: S108 - a random name is made there
_IS_OURS = '[ -n "$(find $d -prune -type d -user "$(id -u)" -perm 700 2>/dev/null)" ]'
_ROOM = "dd if=/dev/zero of=$d/try bs=64k count=64 2>/dev/null"
"""4 MiB: the probe has 2.5 MiB, and a disk that is full takes a directory and a few bytes."""

_COLLECT_S = 600.0
_SHORT_S = 60.0
_MIN_BYTES_PER_S = 2_000
"""Minimum rate at which a machine receives pieces; an agent receives some MB/s."""

_KILLED = 137
_SUM = re.compile(r"[0-9a-f]{64}")


class RemoteMachine:
    """Programs run in a guest, each in a shell of its own.

    Its files are in a directory that only its owner can read. A copied program is found by its
    name.
    directory: an existing one to use again; None = a new one.
    """

    __slots__ = ("_channel", "_directory", "_name", "_prefix", "_programs")

    def __init__(self, channel: Channel, directory: str | None = None) -> None:
        self._channel = channel
        self._name = directory
        self._directory: str | None = None
        self._prefix: tuple[str, ...] = ()
        self._programs: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self._channel.name

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        words = [self._programs.get(argv[0], argv[0]), *argv[1:]]
        mark = _mark()
        stdin, piped_input = None, input
        limit = self._channel.most_input_bytes
        if input is not None and limit is not None and len(input.encode()) > limit:
            stdin, piped_input = self._write_staged_file(input), None
        script = run_script(words, timeout_s, mark, environment, stdin, self._prefix)
        if stdin is not None:
            script += f"; rm -f {quote(stdin)}"
        start_s = time.monotonic()
        result = self._channel.execute(script, timeout_s, piped_input)
        stderr, status = split_status(result.stderr, mark)
        if status is None:
            raise ToolError(
                f"{self.name}: expected {argv[0]} to end, found the way to it broken: "
                f"{_last_line(result)}"
            )
        if status == MISSING:
            raise ToolMissingError(argv[0], f"{self.name}: ")
        if int(status) == _KILLED and time.monotonic() - start_s >= timeout_s:
            raise ToolTimeoutError(f"{self.name}: {argv[0]}: no end after {timeout_s:g} s")
        return ProgramResult(tuple(argv), convert_status(int(status)), result.stdout, stderr)

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        unknown = [name for name in names if name not in self._programs]
        put = frozenset(names) & self._programs.keys()
        if not unknown:
            return put
        answer = self._channel.execute(render_script(unknown), _SHORT_S)
        return put | (frozenset(answer.stdout.split()) & frozenset(unknown))

    def snapshot(self) -> Snapshot:
        script = build_collector_script()
        result = self.run(("sh",), _COLLECT_S, script)
        return parse_collected(result.stdout_or_raise(), self.name)

    def put_program(self, name: str, content: bytes) -> str:
        """Copy a program to the machine, unless the same one is on its PATH, and return its path.
        Afterwards `run` starts it by its name. Raises ToolError if no directory can hold it (a full
        disk, all mounted noexec), or if the copy differs."""
        checksum = hashlib.sha256(content).hexdigest()
        installed_path = self._read_line(f"command -v {quote(name)} || :")
        if installed_path.startswith("/") and self._sum(installed_path) == checksum:
            self._programs[name] = installed_path
            return installed_path
        path = f"{self._own_directory()}/{name}"
        actual = None if self._name is None else self._sum(path)
        if actual != checksum:
            self._put_file(content, path)
            actual = self._sum(path)
        if actual != checksum:
            raise ToolError(
                f"{self.name}: {path}: expected sha256 {checksum}, found {actual or 'no file'}",
                hint="is its disk full?",
            )
        self._programs[name] = path
        return path

    def clean_up(self) -> None:
        """Remove the copied files. Raises ToolError if the machine cannot be reached."""
        if self._directory is not None:
            self._read_line(f"rm -rf {quote(self._directory)}")
            self._directory = None
            self._programs.clear()
        self._channel.close()

    def _put_file(self, content: bytes, path: str) -> None:
        has_gzip = "gzip" in self.find_installed(("gzip",))
        unpack = "base64 -d | gzip -d" if has_gzip else "base64 -d"
        text = base64.encodebytes(gzip.compress(content, mtime=0) if has_gzip else content).decode()
        save = f"({unpack}) >{quote(path)} && chmod 700 {quote(path)}"
        result = self.run(("sh", "-c", save), _COLLECT_S, text)
        failure = result.failure()
        if failure is not None:
            raise ToolError(f"{self.name}: {path}: cannot write: {failure}")

    def _sum(self, path: str) -> str | None:
        match = _SUM.search(
            self._read_line(f"sha256sum {quote(path)} || openssl sha256 {quote(path)}")
        )
        return None if match is None else match[0]

    def _own_directory(self) -> str:
        """Create a remote directory that allows execution: /tmp is noexec on many machines."""
        if self._directory is None:
            name = self._name or f"homenode-{secrets.token_hex(6)}"
            is_ours = "false" if self._name is None else _IS_OURS
            tries = "; ".join(
                f"d={directory}/{name}; {{ mkdir -m 700 $d 2>/dev/null || {is_ours}; }} && "
                f'{{ {_ROOM} && echo "exit 0" >$d/try && chmod 700 $d/try && '
                f"sh -c $d/try 2>/dev/null && rm $d/try && echo $d && exit; rm -rf $d; }}"
                for directory in _DIRECTORIES
            )
            own_directory = self._read_line(f"({tries})")
            if not own_directory.endswith(name):
                raise ToolError(
                    f"{self.name}: no directory for the probe: programs cannot be written to and "
                    f"run from {', '.join(_DIRECTORIES)}",
                    hint="is its disk full?",
                )
            self._directory = own_directory
        return self._directory

    def _write_staged_file(self, text: str) -> str:
        """Create a remote file with this text, sent in pieces."""
        path = f"{self._own_directory()}/input-{secrets.token_hex(4)}"
        limit = self._channel.most_input_bytes or len(text)
        content = text.encode()
        deadline = time.monotonic() + _SHORT_S + len(content) / _MIN_BYTES_PER_S
        for at in range(0, len(content), limit):
            if time.monotonic() > deadline:
                raise ToolTimeoutError(
                    f"{self.name}: {path}: expected it to take {len(content)} bytes, found it at "
                    f"{at} after {_SHORT_S + len(content) / _MIN_BYTES_PER_S:.0f} s"
                )
            piece = content[at : at + limit].decode("utf-8", "surrogateescape")
            if self._read_line(f"cat >>{quote(path)} && echo kept", piece) != "kept":
                raise ToolError(
                    f"{self.name}: {path}: cannot write",
                    hint="is its disk full?",
                )
        return path

    def _read_line(self, script: str, input: str | None = None) -> str:
        """Return the first line of a script's output. Raises ToolError if the connection breaks."""
        mark = _mark()
        output = self._channel.execute(f'{script}; echo "{mark}"', _SHORT_S, input)
        if mark not in output.stdout:
            raise ToolError(f"{self.name}: no answer: {_last_line(output)}")
        return output.stdout.partition(mark)[0].strip().partition("\n")[0]


def _mark() -> str:
    return f"homenode-{secrets.token_hex(8)}"


def _last_line(output: ScriptOutput) -> str:
    lines = [line.strip() for line in (output.stderr or output.stdout).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


_HOST = re.compile(
    r"ssh://(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9\[][A-Za-z0-9_.:%\]-]{0,255}", re.ASCII
)
_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "LogLevel=ERROR"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)
_GRACE_S = 60.0

_STEP = "step"
_STEP_TEXT = b"""\
#!/bin/sh
# Says what runs (process, process group, its start in ticks since the boot), and becomes it.
stat=$(cat /proc/$$/stat)
running() { echo "$$ $3 ${20}"; }
running ${stat##*) } >"$0.running"
exec "$@"
"""
_END = """\
if read process group start <{running}; then
  stat=$(cat /proc/$process/stat)
  started() {{ echo "${{20}}"; }}
  if [ "$(started ${{stat##*) }})" = "$start" ]; then
    kill -KILL "-$group"
    while kill -0 "$process"; do sleep 0.1; done
  fi
  rm -f {running}
fi 2>/dev/null"""
"""Source: proc_pid_stat(5), fields 5 and 22."""


class SshHost(Struct, frozen=True):
    """A Channel to a machine that continues if we are killed."""

    # ssh://[user@]host[:port]; users, keys and known hosts are ssh's own. Each script is a
    # connection of its own. Raises UsageError for an invalid address.
    url: str
    kept_open: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.url):
            raise UsageError(
                f"--on: expected ssh://[USER@]HOST[:PORT], found {self.url[:80]!r}",
                hint="--on ssh://root@gpu7",
            )

    @property
    def name(self) -> str:
        return self.url.removeprefix("ssh://")

    @property
    def most_input_bytes(self) -> int | None:
        return None

    def with_descriptor(self, descriptor: int) -> "SshHost":
        """Return a host whose local programs inherit this descriptor."""
        return replace(self, kept_open=(*self.kept_open, descriptor))

    def close(self) -> None:
        """Nothing stays open between scripts."""

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> ScriptOutput:
        argv = ("ssh", *CLOSED, *_OPTIONS, "--", self.url, format_sh_line(script))
        result = run(argv, timeout_s + _GRACE_S, input, kept_open=self.kept_open)
        if result.returncode:
            lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
            raise ToolError(
                f"{self.name}: {lines[-1][:200] if lines else result.failure()}",
                hint=command_line("ssh", "-o", "BatchMode=yes", self.url, "true"),
            )
        return ScriptOutput(result.stdout, result.stderr)


class RemoteHost(RemoteMachine):
    """A machine for one run, which can be continued after a kill. See RemoteMachine. run:
    identifies the run, and its remote directory. probe: the program to copy."""

    __slots__ = ("_host", "_probe")

    def __init__(self, channel: SshHost, run: str, probe: bytes) -> None:
        name = f"homenode-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
        super().__init__(channel, name)
        self._host, self._probe = channel, probe

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        """Find programs among the files that `holding` copies to the host."""
        return super().find_installed(frozenset(names) - {PROBE}) | (frozenset(names) & {PROBE})

    def with_descriptor(self, descriptor: int) -> Self:
        """Return the same machine, equipped for measuring; the caller must hold the run's locks.
        Local programs inherit the descriptor; remote programs left from a kill are ended."""
        self._channel = self._host = self._host.with_descriptor(descriptor)
        self._end_what_runs()
        self.put_program(PROBE, self._probe)
        self._prefix = (self.put_program(_STEP, _STEP_TEXT),)
        return self

    def clean_up(self) -> None:
        if self._directory is not None:
            self._end_what_runs()
        super().clean_up()

    def _end_what_runs(self) -> None:
        self._read_line(_END.format(running=quote(f"{self._own_directory()}/{_STEP}.running")))
