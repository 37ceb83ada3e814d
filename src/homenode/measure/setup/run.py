"""Setup run: carries a setup plan out, keeps a record of it, and undoes it. [I/O]"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from homenode import formats
from homenode.durable import check_links, replace_file
from homenode.errors import HostError, InputError, ToolError, of_os
from homenode.input_files import MAX_BYTES, read_plain
from homenode.measure.access.machine import Machine
from homenode.measure.setup.plan import SetupPlan, SetupStep

KIND = "setup"
RECORD = "share/homenode/setup.json"
_MOST_SAID = 2000
_MOST_PROGRAM_BYTES = 1 << 30
_LITTLE_BYTES = 16 << 20
_OF_THE_NETWORK = tuple(
    """
    http_proxy https_proxy HTTPS_PROXY all_proxy ALL_PROXY no_proxy NO_PROXY CURL_CA_BUNDLE
    SSL_CERT_FILE SSL_CERT_DIR GIT_SSL_CAINFO
""".split()
)

_OF_MODULES = tuple(
    """
    CC CXX CUDACXX CPATH LIBRARY_PATH CMAKE_PREFIX_PATH NCCL_HOME ROCM_PATH
""".split()
)


@dataclass(frozen=True, slots=True)
class InstalledFile:
    """A program that we put there. path: below the prefix. sha256: as we left it."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class SetupRecord:
    """What setups did below a prefix: every command that ran, every program that came of it."""

    commands: tuple[tuple[str, ...], ...]
    files: tuple[InstalledFile, ...]


def carry_out(
    plan: SetupPlan, machine: Machine, notify: Callable[[SetupStep], None]
) -> SetupRecord:
    """Run the steps on this machine; a tool that fails ends it, with those before it kept.

    notify: called before each step. Raises HostError where a program is there that we did not put
    there, or nothing can be written; ToolError for a step that failed.
    """
    prefix = Path(plan.prefix)
    known = read_record(prefix)
    ours = {file.path: file.sha256 for file in known.files}
    for target in map(Path, plan.installs):
        inside = str(target.relative_to(prefix))
        if target.exists() and ours.get(inside) != _sum(target):
            raise HostError(
                f"{target}: expected no program that homenode did not put there, found one",
                hint="remove it, or choose another --prefix",
            )
    commands = list(known.commands)
    for number, step in enumerate(plan.steps):
        notify(step)
        commands.append(step.argv)
        environment = _set_here(_OF_THE_NETWORK if step.fetches else _OF_MODULES)
        ended = machine.run(step.argv, step.timeout_s, step.input, environment=environment)
        failure = ended.failure()
        if failure is not None:
            with contextlib.suppress(HostError):  # nothing can be written there: that is `failure`
                _write(prefix, SetupRecord(tuple(commands), known.files))
            said = (ended.stderr.strip() or ended.stdout.strip())[-_MOST_SAID:]
            raise ToolError(f"{step.tool}: {failure}{_when_full(prefix)}", hint=said or None)
        is_last = number + 1 == len(plan.steps) or plan.steps[number + 1].tool != step.tool
        if is_last:
            known = _with(known, prefix, Path(step.argv[-1]), tuple(commands))
            _write(prefix, known)
    return known


def _when_full(prefix: Path) -> str:
    """Compilers and CMake say anything of a full disk but that it is full."""
    try:
        left = shutil.disk_usage(prefix).free
    except OSError:
        return ""
    return f" ({prefix}: {left} bytes left on its disk)" if left < _LITTLE_BYTES else ""


def _set_here(names: tuple[str, ...]) -> dict[str, str]:
    """How this user reaches the network, or where environment modules keep libraries. A proxy may
    hold a password: nothing of these is recorded."""
    return {name: os.environ[name] for name in names if name in os.environ}


def take_back(prefix: Path) -> tuple[str, ...]:
    """Remove the programs of the record that are as we left them; the paths of those.

    Raises HostError where there is no record, or a program was changed since: nothing is removed.
    """
    record = read_record(prefix)
    if not record.files:
        raise HostError(
            f"{prefix / RECORD}: expected the record of a setup, found none",
            hint="give the --prefix that it was built with",
        )
    for file in record.files:
        path = prefix / file.path
        try:
            check_links(path)
            is_ours = not path.exists() or _sum(path) == file.sha256
        except OSError as error:
            raise of_os(error, str(path), "it as homenode built it") from None
        if not is_ours:
            raise HostError(
                f"{path}: expected it as homenode built it, found another file",
                hint="remove it by hand if it may go",
            )
    for file in record.files:
        (prefix / file.path).unlink(missing_ok=True)
    _write(prefix, SetupRecord(record.commands, ()))
    return tuple(str(prefix / file.path) for file in record.files)


def read_record(prefix: Path) -> SetupRecord:
    """The record below a prefix; an empty one where there is none. Raises InputError."""
    path = prefix / RECORD
    try:
        content = read_plain(path, MAX_BYTES)
    except FileNotFoundError:
        return SetupRecord((), ())
    except OSError as error:
        raise InputError(f"{path}: expected a record, found: {error.strerror}") from None
    record = formats.decode(content, KIND, SetupRecord, str(path))
    for file in record.files:
        parts = Path(file.path).parts
        if len(parts) != 2 or parts[0] != "bin" or parts[1] in (".", ".."):
            raise InputError(f"{path}: expected programs below bin, found {file.path!r}")
    return record


def _with(
    known: SetupRecord, prefix: Path, program: Path, commands: tuple[tuple[str, ...], ...]
) -> SetupRecord:
    inside = str(program.relative_to(prefix))
    others = tuple(file for file in known.files if file.path != inside)
    return SetupRecord(commands, (*others, InstalledFile(inside, _sum(program))))


def _sum(path: Path) -> str:
    return hashlib.sha256(read_plain(path, _MOST_PROGRAM_BYTES)).hexdigest()


def _write(prefix: Path, record: SetupRecord) -> None:
    path = prefix / RECORD
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, formats.encode(KIND, record).encode(), None)
    except OSError as error:
        raise HostError(f"{path}: expected to write there, found: {error.strerror}") from None
