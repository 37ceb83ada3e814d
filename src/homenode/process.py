"""Process: the only place that starts a program. [I/O]"""

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from homenode.errors import ToolError

MAX_OUTPUT_BYTES = 256 << 20
"""Limit of standard output and error together; a program that writes more is stopped."""

LEFT_BEHIND_S = 5.0
"""Time limit for child processes that keep a finished program's output open."""

KILLED_S = 10.0
"""Time limit for a killed program to end. A program that waits within a driver never ends."""

_LIBRARIES = "LD_LIBRARY_PATH"
_PASSED_ON = (
    "HOME",
    "USER",
    "LOGNAME",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",  # where a program keeps its things
    "SSH_AUTH_SOCK",
    "KRB5CCNAME",  # variables with which ssh finds keys
    _LIBRARIES,  # where environment modules keep the libraries of GPU tools
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",  # a job's own GPUs
    "NCCL_TOPO_FILE",  # what this guest is shown of its host
)
_SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


_PACKAGES = {
    "lscpu": "util-linux",
    "lspci": "pciutils",
    "numactl": "numactl",
    "nvidia-smi": "nvidia-smi",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "scontrol": "slurm-client",
    "ssh": "openssh-client",
    "taskset": "util-linux",
    "virsh": "libvirt-clients",
}
"""The Debian packages of the programs that commands start."""


def install_hint(program: str) -> str | None:
    """Return the command that installs a program on Debian; None for one of another source."""
    package = _PACKAGES.get(program)
    return None if package is None else f"apt install {package}"


class ToolMissingError(ToolError):
    """The program is not installed. before: the machine that lacks it."""

    def __init__(self, program: str, before: str = "") -> None:
        super().__init__(f"{before}{program}: command not found", hint=install_hint(program))


class ToolTimeoutError(ToolError):
    """The program ran out of time and was stopped."""


class ProgramResult(Struct, frozen=True):
    """A program that ended by itself, or was killed by a signal that homenode did not send."""

    argv: tuple[str, ...]
    returncode: int  # the exit status; negative is the signal's number
    stdout: str
    stderr: str

    @property
    def signal(self) -> str | None:
        """Name of the signal that killed it ("SIGKILL"); None if it exited."""
        if self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.returncode}"

    def list_messages(self) -> list[str]:
        """Return the lines of standard error with content, without the `error: ` before them."""
        lines = map(str.strip, self.stderr.splitlines())
        return [line.removeprefix("error: ") for line in lines if line]

    def failure(self) -> str | None:
        """Return why it did not do its work, in a line; None if it did."""
        if self.returncode == 0:
            return None
        how = f"killed by {self.signal}" if self.signal else f"exit status {self.returncode}"
        message = next((line.strip() for line in self.stderr.splitlines() if line.strip()), "")
        return f"{self.argv[0]}: {how}" + (f": {message[:200]}" if message else "")

    def stdout_or_raise(self) -> str:
        """Return the output. Raises ToolError if the program failed."""
        failure = self.failure()
        if failure is not None:
            raise ToolError(failure)
        return self.stdout


def find_program(name: str) -> str | None:
    """Return the path of a program, or None if it is not installed.

    The system's directories are searched too: lspci is in /usr/sbin, which is not on every user's
    PATH. Relative directories on PATH are not: "." would run programs of a directory of captures.
    """
    import shutil  # loads what reads archives

    return shutil.which(name, path=_search_path())


def run(
    argv: Sequence[str],
    timeout_s: float,
    input: str | bytes | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    on_terminal: bool = False,
    kept_open: Sequence[int] = (),
    directory: Path | None = None,
    ends_with_us: bool = False,
    stop: threading.Event | None = None,
) -> ProgramResult:
    """Run a program to its end. Output is decoded as UTF-8, invalid bytes are replaced.

    input: text for its standard input, which is closed otherwise.
    environment: more variables; those that every program gets are few, and LC_ALL is C.
    on_terminal: it may prompt the user for a password on the terminal.
    kept_open:   file descriptors that it inherits: a lock on one holds until it ends, even if
    homenode is killed before.
    directory:      working directory; None = homenode's. A path in argv must be absolute then.
    ends_with_us: it is also killed if homenode is killed and cannot end it: see setpriv(1).
    stop:        set by another thread, it ends the program as a timeout does.

    What it left behind is killed LEFT_BEHIND_S after its end if that keeps its output open; what
    is killed and does not end, as it waits within a driver, is left to itself.

    Raises ToolMissingError, ToolTimeoutError, or ToolError if it cannot be started or prints more
    than MAX_OUTPUT_BYTES. A non-zero exit and a death by signal are answers: see ProgramResult.
    """
    program = find_program(argv[0])
    if program is None:
        raise ToolMissingError(argv[0])
    process: subprocess.Popen[bytes] | None = None
    try:
        with _hold_interrupts():
            process = _start(
                [*(_build_setpriv() if ends_with_us else ()), program, *argv[1:]],
                stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
                env={**_build_environment(), **(environment or {})},
                # A group of its own, so that what it starts ends with it. Not if it may prompt: the
                # terminal belongs to homenode's group.
                start_new_session=not on_terminal,
                pass_fds=tuple(kept_open),
                cwd=directory,
            )
        stdout, stderr = _exchange_data(process, tuple(argv), timeout_s, input, stop)
        returncode = process.wait(timeout=max(1.0, timeout_s))
    except subprocess.TimeoutExpired:
        raise ToolTimeoutError(f"{argv[0]}: no end after {timeout_s:g} s") from None
    finally:
        if process is not None:
            _end(process, group=not on_terminal)
    return ProgramResult(
        tuple(argv),
        returncode,
        stdout.decode("utf-8", "replace"),
        stderr.decode("utf-8", "replace"),
    )


@cache
def _build_setpriv() -> tuple[str, ...]:
    """The command that starts a program which dies with this process; () without util-linux."""
    program = find_program("setpriv")
    has_option = program is not None and "--pdeathsig" in run((program, "--help"), 10).stdout
    return (program, "--pdeathsig", "KILL") if has_option and program is not None else ()


def _start(argv: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in an argument
        name = Path(argv[0]).name
        raise ToolError(f"{name}: cannot be started: {error}") from None


@contextlib.contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Ctrl-C and similar signals wait until a starting program can be ended: an earlier signal
    would leave it running. As they are handled then, they raise at the end of the block."""
    held_signals: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(signum)
            if callable(handler):
                handlers[signum] = handler
                signal.signal(signum, lambda number, _: held_signals.append(number))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for number in held_signals:
            handlers[signal.Signals(number)](number, None)


def _exchange_data(
    process: "subprocess.Popen[bytes]",
    argv: tuple[str, ...],
    timeout_s: float,
    input: str | bytes | None,
    stop: threading.Event | None,
) -> tuple[bytes, bytes]:
    """Feed standard input and read both outputs until they close. Raises like `run`."""
    deadline = time.monotonic() + timeout_s
    assert process.stdout is not None and process.stderr is not None
    texts: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    to_write = memoryview(input.encode() if isinstance(input, str) else input or b"")
    with selectors.DefaultSelector() as selector:
        for stream in texts:
            selector.register(stream, selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        end_s: float | None = None
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (stop is not None and stop.is_set()):
                raise ToolTimeoutError(f"{argv[0]}: no end after {timeout_s:g} s")
            if end_s is None and _has_ended(process):
                end_s = time.monotonic()
            if end_s is not None and time.monotonic() - end_s > LEFT_BEHIND_S:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # gone meanwhile
                    os.killpg(process.pid, signal.SIGKILL)
                break
            for key, _ in selector.select(min(left_s, 1.0)):
                if key.fileobj is process.stdin:
                    try:
                        to_write = to_write[os.write(key.fd, to_write[: 1 << 16]) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:  # it closed its input; its exit status has the reason
                        to_write = to_write[len(to_write) :]
                    if not to_write:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                    continue
                stream = next(stream for stream in texts if stream is key.fileobj)
                texts[stream] += chunk
                if sum(map(len, texts.values())) > MAX_OUTPUT_BYTES:
                    raise ToolError(
                        f"{argv[0]}: expected at most {MAX_OUTPUT_BYTES} bytes of output, "
                        "found more"
                    )
    return bytes(texts[process.stdout]), bytes(texts[process.stderr])


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Check without waiting for it: until then, no other process gets its id or its group's."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, flags) is not None


def _end(process: "subprocess.Popen[bytes]", *, group: bool) -> None:
    """Leaves no process and no open pipe behind."""
    if process.returncode is None:  # not waited for: no other process has its id
        if group:
            # It may have ended while its children run and hold the pipes open.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it: a dead disk
        process.wait(timeout=KILLED_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _build_environment() -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    if _LIBRARIES in passed_on:
        passed_on[_LIBRARIES] = ":".join(_list_directories(passed_on[_LIBRARIES]))
    return {**passed_on, "PATH": _search_path(), "LC_ALL": "C", "LANGUAGE": ""}


def _search_path() -> str:
    directories = _list_directories(os.environ.get("PATH", ""))
    return ":".join(dict.fromkeys((*directories, *_SYSTEM_PATH)))


def _list_directories(path_list: str) -> list[str]:
    """Return the absolute ones of a colon-separated list; others mean the working directory."""
    return [part for part in path_list.split(":") if part.startswith("/")]


def find_arguments(argv: Sequence[str], option: str) -> Iterator[str]:
    """Yield the values that follow an option on a command line."""
    for word, value in pairwise(argv):
        if word == option:
            yield value


CLOSED = tuple(
    """
    -T -a -x -k -o ForwardX11Trusted=no -o ClearAllForwardings=yes -o Tunnel=no -o
    PermitLocalCommand=no
""".split()
)
"""Options of ssh to a machine that may be hostile; they override the user's configuration: the
machine gets no access to the user's agent, tickets, display or network, and runs no command here.
How it is reached (keys, ports, ProxyJump) stays the configuration's."""
