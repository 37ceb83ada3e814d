"""Setup run: carries a setup plan out, keeps a record of it, and undoes it. [I/O]"""

import contextlib
import hashlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec
from msgspec import structs

from homenode import formats
from homenode.change.journal import Journal, state_hint
from homenode.change.record_folder import RecordFolder
from homenode.change.step import ChangeEntry, ChangeHead, ChangeState, Note
from homenode.durable import check_links
from homenode.errors import HostError, InputError, ToolError, of_os
from homenode.input_files import read_plain
from homenode.measure.access.machine import Machine
from homenode.measure.setup.plan import SetupPlan, SetupStep
from homenode.wording import command_line

KIND = "install-program"
FOLDER = "share/homenode"
OLD_RECORD = "setup.json"
_PREFIXES = "setups"
_ALONE = "no other homenode bench setup"
_WAIT_S = 10.0
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


def setup_journal(prefix: Path) -> Journal:
    """Of the programs below a prefix: the journal lies there as well."""
    undo = command_line("homenode", "bench", "setup", "--prefix", prefix, "--remove")
    head = ChangeHead(run=str(prefix), command="homenode bench setup --apply", undo=undo)
    files = RecordFolder(prefix / FOLDER, private=False)
    return Journal(files, head, _earlier)


def setup_journals(root: Path) -> Iterator[Journal]:
    """Those of the prefixes that were built in. root: homenode's own folder."""
    for path in sorted((root / _PREFIXES).glob("[0-9a-f]*")):
        prefix = (RecordFolder(root / _PREFIXES).read(path.name) or b"").decode(errors="replace")
        if prefix.startswith("/"):
            yield setup_journal(Path(prefix.strip()))


def carry_out(
    plan: SetupPlan, machine: Machine, root: Path, notify: Callable[[SetupStep], None]
) -> tuple[str, ...]:
    """Run the steps on this machine; gives the programs of all setups there. A tool that fails ends
    it, with those before it kept.

    root: homenode's own folder. notify: called before each step. Raises HostError where a program
    is there that we did not put there, or nothing can be written; ToolError for a step that failed.
    """
    prefix = Path(plan.prefix)
    journal = setup_journal(prefix)
    with journal.files.locked(_ALONE):
        journal.settle(lambda entry: InstallStep(prefix))
        ours = {entry.subject: entry for entry in installed(journal)}
        for target in plan.installs:
            is_ours = target in ours and InstallStep(prefix).is_done(ours[target])
            if Path(target).exists() and not is_ours:
                raise HostError(
                    f"{target}: expected no program that homenode did not put there, found one",
                    hint="remove it, or choose another --prefix",
                )
        if plan.steps:
            prefixes = RecordFolder(root / _PREFIXES, hint=state_hint)
            with prefixes.locked(_ALONE, wait_s=_WAIT_S):
                name = hashlib.sha256(plan.prefix.encode()).hexdigest()[:8]
                prefixes.write(name, plan.prefix.encode())
        for _, steps in groupby(plan.steps, key=lambda step: step.tool):
            InstallStep(prefix, tuple(steps), machine, notify).do(journal.write)
        return tuple(entry.subject for entry in installed(journal))


class InstallStep:
    """A program as a step: built first, under its name at once."""

    def __init__(
        self,
        prefix: Path,
        steps: tuple[SetupStep, ...] = (),
        machine: Machine | None = None,
        notify: Callable[[SetupStep], None] = lambda step: None,
    ) -> None:
        """steps: commands, the last of which gives the program its name; none are needed to
        undo."""
        self._prefix, self._steps, self._machine, self._notify = prefix, steps, machine, notify

    def do(self, note: Note) -> ChangeEntry:
        *builds, move = self._steps
        part, target = move.argv[-2:]
        entry = ChangeEntry(
            what=ChangeState.REFUSED,
            kind=KIND,
            subject=target,
            part=part,
            by_hand=command_line("rm", target),
            facts={"commands": "\n".join(shlex.join(step.argv) for step in self._steps)},
        )
        for step in builds:
            self._run(step, entry, note)
        entry = structs.replace(entry, after=_sum(Path(part)))
        note(entry.now(ChangeState.BEGIN))
        self._run(move, entry, note)
        entry = entry.now(ChangeState.DONE)
        note(entry)
        return entry

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        for name in (entry.subject, entry.part or entry.subject):
            Path(name).unlink(missing_ok=True)
        entry = entry.now(ChangeState.UNDONE)
        note(entry)
        return entry

    def is_done(self, entry: ChangeEntry) -> bool:
        return Path(entry.subject).exists() and _sum(Path(entry.subject)) == entry.after

    def _run(self, step: SetupStep, entry: ChangeEntry, note: Note) -> None:
        assert self._machine is not None, "there is one to build on"
        self._notify(step)
        environment = _set_here(_OF_THE_NETWORK if step.fetches else _OF_MODULES)
        ended = self._machine.run(step.argv, step.timeout_s, step.input, environment=environment)
        failure = ended.failure()
        if failure is not None:
            with contextlib.suppress(HostError):  # nothing can be written there: that is `failure`
                note(entry)
            said = (ended.stderr.strip() or ended.stdout.strip())[-_MOST_SAID:]
            raise ToolError(f"{step.tool}: {failure}{_when_full(self._prefix)}", hint=said or None)


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
    """Remove the programs of the journal that are as we left them; the paths of those.

    Raises HostError where there is no journal, or a program was changed since: nothing is removed.
    """
    journal, step = setup_journal(prefix), InstallStep(prefix)
    if not installed(journal):
        raise HostError(
            f"{journal.files.path}: expected the record of a setup, found none",
            hint="give the --prefix that it was built with",
        )
    with journal.files.locked(_ALONE):
        for entry in installed(journal):
            path = Path(entry.subject)
            try:
                check_links(path)
                is_ours = not path.exists() or step.is_done(entry)
            except OSError as error:
                raise of_os(error, str(path), "it as homenode built it") from None
            if not is_ours:
                raise HostError(
                    f"{path}: expected it as homenode built it, found another file",
                    hint="remove it by hand if it may go",
                )
        return tuple(entry.subject for entry in journal.undo(lambda entry: step))


def installed(journal: Journal) -> tuple[ChangeEntry, ...]:
    """The programs that are there by us. Raises InputError for one that is not below bin."""
    folder = Path(journal.head.run) / "bin"
    for entry in journal.to_undo():
        path = Path(entry.subject)
        if path.parent != folder or path.name in ("", ".", ".."):
            raise InputError(
                f"{journal.files.path}: expected programs below bin, found {entry.subject!r}"
            )
    return journal.to_undo()


class _EarlierFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    sha256: str


class _EarlierRecord(msgspec.Struct, frozen=True, kw_only=True):
    commands: tuple[tuple[str, ...], ...]
    files: tuple[_EarlierFile, ...]


def _earlier(files: RecordFolder) -> tuple[ChangeEntry, ...]:
    """What homenode.setup/1 kept. Raises InputError."""
    content = files.read(OLD_RECORD)
    if content is None:
        return ()
    record = formats.decode(content, "setup", _EarlierRecord, str(files.path / OLD_RECORD))
    commands = "\n".join(map(shlex.join, record.commands))
    return tuple(
        ChangeEntry(
            what=ChangeState.DONE,
            kind=KIND,
            subject=f"{files.path.parent.parent}/{one.path}",
            after=one.sha256,
            facts={"commands": commands},
        )
        for one in record.files
    )


def _sum(path: Path) -> str:
    return hashlib.sha256(read_plain(path, _MOST_PROGRAM_BYTES)).hexdigest()
