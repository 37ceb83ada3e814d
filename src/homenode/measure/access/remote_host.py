"""RemoteHost: another host as the machine of `bench`, over ssh or another shell channel. [I/O]

A guest of a trial is stopped after its boot, and all that ran in it with it. A host continues: a
resumed run ends the programs that still run after a kill, and uses their files again.
"""

import hashlib
import re
from collections.abc import Collection
from shlex import quote
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import ToolError, UsageError
from homenode.measure.access.machine import ScriptOutput
from homenode.measure.access.remote import RemoteMachine, sh_line
from homenode.measure.model import PROBE
from homenode.process import CLOSED, run
from homenode.text import command_line

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
        argv = ("ssh", *CLOSED, *_OPTIONS, "--", self.url, sh_line(script))
        done = run(argv, timeout_s + _GRACE_S, input, kept_open=self.kept_open)
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise ToolError(
                f"{self.name}: {lines[-1][:200] if lines else done.failure()}",
                hint=f"try: {command_line('ssh', '-o', 'BatchMode=yes', self.url, 'true')}",
            )
        return ScriptOutput(done.stdout, done.stderr)


class RemoteHost(RemoteMachine):
    """A machine for one run, which can be continued after a kill. See RemoteMachine.

    run: identifies the run, and its remote directory. probe: the program to copy.
    """

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
        Local programs inherit the descriptor; remote programs left from a kill are ended.
        """
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
        self._line(_END.format(running=quote(f"{self._own_directory()}/{_STEP}.running")))
