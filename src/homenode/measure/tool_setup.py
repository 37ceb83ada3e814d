"""Tool setup: builds pinned GPU tools for the GPUs of a machine, and removes them. [I/O]

Sources are pinned by the sha256 of their archive, or by a commit; each tool is built for the
machine's own GPUs and nothing else. PyTorch is a wheel of one version in a separate environment.
All files are below one prefix, with a record.

A machine's installed programs are found, and a Python is started on it, only here. One with PyTorch
gets homenode's measuring programs on its standard input. It may be another Python, 3.8 or newer, on
a machine without homenode: the text contains the modules that the program imports, each under its
own name. A Python that reads its program from standard input or from -c searches the current
directory for modules first, so root would run another user's json.py. PYTHONSAFEPATH prevents that
from 3.11 on; for earlier versions the program's first line removes that directory. The user's own
packages are not changed: PyTorch may be one of them.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from msgspec import Struct, structs, toml

from homenode.change.journal import ChangeEntry, ChangeHead, ChangeState, Journal, Note, state_hint
from homenode.errors import HostError, InputError, ParseError, ToolError, UsageError, of_os
from homenode.machine.tools.proc_stat import PATH as PROC_STAT
from homenode.machine.tools.proc_stat import PuTimes, parse
from homenode.machine.topology import Host
from homenode.measure.access.machine import LocalMachine, Machine
from homenode.measure.gpu_tests import is_nvidia
from homenode.measure.model import PROBE, PYTHON, TORCH, SuiteOptions
from homenode.measure.suite import BY_BUS, ShownGpus, parse_shown, select_gpus
from homenode.package_data import read_package_text
from homenode.process import ProgramResult, ToolMissingError, ToolTimeoutError
from homenode.safe.durable import check_links, remove_file, remove_tree
from homenode.safe.input_files import read_plain
from homenode.safe.record_directory import RecordDirectory
from homenode.text import command_line

TORCH_PYTHON = "homenode-torch-python"
"""Name of the Python with PyTorch below the prefix."""


class Vendor(StrEnum):
    """Whose GPUs."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"


class ToolSource(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    version: str
    vendor: Vendor
    # of an archive with this sha256, of a git repository at this commit, or of an index that has a
    # wheel of this version
    url: str
    directory: str  # the archive's top directory
    program: str  # the installed program; the build writes it to build/
    needs: tuple[str, ...]  # programs that build it
    packages: str  # Debian's, that have them and what has no program
    sha256: str | None = None
    commit: str | None = None


class SetupStep(Struct, frozen=True):
    tool: str  # whose step it is
    argv: tuple[str, ...]
    timeout_s: float
    input: str | None = None  # for its standard input
    fetches: bool = False  # from the network, maybe through a proxy


class SetupPlan(Struct, frozen=True):
    """Commands that build the tools of a machine."""

    prefix: str
    steps: tuple[SetupStep, ...]  # in order
    installs: tuple[str, ...]  # programs below the prefix
    lacks: tuple[str, ...]  # missing requirements of the build
    present: tuple[str, ...]  # tools that are there already


class _Table(Struct, forbid_unknown_fields=True):
    tool: tuple[ToolSource, ...]


SOURCES = toml.decode(read_package_text("measure", "tools.toml"), type=_Table).tool

NEEDED = frozenset(need for source in SOURCES for need in source.needs) | {"sha256sum", "install"}
"""Programs that are searched before a plan is made."""

_FETCH_S, _BUILD_S, _SHORT_S = 1800.0, 3600.0, 60.0


def setup_plan(
    vendor: Vendor,
    architectures: tuple[str, ...],
    programs: Collection[str],
    prefix: str,
    sources: tuple[ToolSource, ...] = SOURCES,
    cuda_home: str | None = None,
) -> SetupPlan:
    """Return the plan for a machine. architectures: of its GPUs ("90"; "gfx942").

    programs: programs of NEEDED, and tools, that can be run on the machine. cuda_home:
    where nvcc's CUDA lies; None = /usr/local/cuda, the default of makefiles. Raises
    UsageError for a prefix that is not an absolute path of plain characters.
    """
    if not is_plain(prefix):
        raise UsageError(
            f"--prefix {prefix}: expected an absolute path of letters, digits and ._-+"
        )
    if cuda_home is not None and not is_plain(cuda_home):
        cuda_home = None
    vendor_sources = [source for source in sources if source.vendor is vendor]
    present = tuple(source.program for source in vendor_sources if source.program in programs)
    lacks: list[str] = []
    steps: list[SetupStep] = []
    installs: list[str] = []
    for source in vendor_sources:
        if source.program in present:
            continue
        missing = [need for need in source.needs if need not in programs]
        if missing:
            lacks.append(f"{source.name}: needs {', '.join(missing)} (packages: {source.packages})")
            continue
        steps += _list_steps(source, architectures, prefix, cuda_home)
        installs.append(f"{prefix}/bin/{source.program}")
    return SetupPlan(prefix, tuple(steps), tuple(installs), tuple(lacks), present)


def is_plain(path: str) -> bool:
    """Whether a path is safe for CMake and make, which split at quoted blanks and dollars."""
    plain = all(c.isalnum() or c in "/._-+" for c in path)
    return path.startswith("/") and plain and "/../" not in f"{path}/"


def _list_steps(
    source: ToolSource, architectures: tuple[str, ...], prefix: str, cuda_home: str | None
) -> Iterator[SetupStep]:
    work = f"{prefix}/share/homenode/src"
    tree = f"{work}/{source.directory}"

    def make_step(timeout_s: float, *argv: str, input: str | None = None) -> SetupStep:
        return SetupStep(source.name, argv, timeout_s, input, timeout_s == _FETCH_S)

    # What a killed setup left: half of an object file that make takes for whole, locks of git.
    yield make_step(_SHORT_S, "rm", "-rf", "--one-file-system", tree)
    yield make_step(_SHORT_S, "mkdir", "-p", work, f"{prefix}/bin")
    if source.sha256 is not None:
        archive = f"{tree}.tar.gz"
        fetch = ("curl", "--fail", "--location", "--retry", "3", "--silent", "--show-error")
        yield make_step(_FETCH_S, *fetch, "--proto", "=https", "--output", archive, source.url)
        yield make_step(
            _SHORT_S, "sha256sum", "--check", "--strict", input=f"{source.sha256}  {archive}\n"
        )
        yield make_step(_SHORT_S, "tar", "-xzf", archive, "-C", work, "--no-same-owner")
    elif source.commit is None:
        yield make_step(_SHORT_S, "python3", "-m", "venv", tree)
        words = ("install", "--disable-pip-version-check", "--only-binary", ":all:")
        wheel = f"torch=={source.version}"
        yield make_step(
            _FETCH_S, f"{tree}/bin/pip", *words, "--index-url", source.url, wheel, "numpy"
        )
    else:
        commit = str(source.commit)
        yield make_step(_SHORT_S, "git", "init", "--quiet", tree)
        yield make_step(
            _FETCH_S, "git", "-C", tree, "fetch", "--quiet", "--depth", "1", source.url, commit
        )
        yield make_step(
            _SHORT_S,
            "git",
            "-C",
            tree,
            "-c",
            "advice.detachedHead=false",
            "checkout",
            "--quiet",
            commit,
        )
    for argv in _build(source, architectures, tree, cuda_home):
        yield make_step(_BUILD_S, *argv)
    # A full disk leaves a part of a file: not under the program's name, and not executable.
    part = f"{prefix}/share/homenode/{source.program}.part"
    install = ("install", "-m", "755")
    if source.program == TORCH_PYTHON:
        launcher = f'#!/bin/sh\nexec {tree}/bin/python "$@"\n'
        yield make_step(_SHORT_S, *install, "/dev/stdin", part, input=launcher)
    else:
        yield make_step(_SHORT_S, *install, f"{tree}/build/{source.program}", part)
    yield make_step(_SHORT_S, "mv", "-f", "-T", part, f"{prefix}/bin/{source.program}")


def _build(
    source: ToolSource, architectures: tuple[str, ...], tree: str, cuda_home: str | None
) -> Iterator[tuple[str, ...]]:
    if source.program == TORCH_PYTHON:
        return
    if source.name == "nccl-tests":
        code = " ".join(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures)
        variables = () if cuda_home is None else (f"CUDA_HOME={cuda_home}",)
        yield ("make", "-C", tree, "-j", "4", f"NVCC_GENCODE={code}", *variables)
        return
    names = ";".join(architectures)
    is_nvidia = source.vendor is Vendor.NVIDIA
    target = f"-DCMAKE_CUDA_ARCHITECTURES={names}" if is_nvidia else f"-DGPU_TARGETS={names}"
    rocm = () if is_nvidia else ("-DCMAKE_PREFIX_PATH=/opt/rocm", "-DCMAKE_CXX_COMPILER=hipcc")
    yield ("cmake", "-S", tree, "-B", f"{tree}/build", "-DCMAKE_BUILD_TYPE=Release", target, *rocm)
    yield ("cmake", "--build", f"{tree}/build", "--parallel", "4")


KIND = "install-program"
DIRECTORY = "share/homenode"
_PREFIXES = "setups"
_BUSY = "in use by another homenode bench setup"
_WAIT_S = 10.0
_MAX_MESSAGE = 2000
_MAX_PROGRAM_BYTES = 1 << 30
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
    undo = command_line("homenode", "bench", "setup", "--prefix", prefix, "--remove")
    head = ChangeHead(run=str(prefix), command="homenode bench setup --apply", undo=undo)
    files = RecordDirectory(prefix / DIRECTORY, private=False)
    return Journal(files, head)


def setup_journals(root: Path) -> Iterator[Journal]:
    """Yield the journals of all prefixes with builds. root: homenode's own directory."""
    for path in sorted((root / _PREFIXES).glob("[0-9a-f]*")):
        prefix = (RecordDirectory(root / _PREFIXES).read(path.name) or b"").decode(errors="replace")
        if prefix.startswith("/"):
            yield setup_journal(Path(prefix.strip()))


def carry_out(
    plan: SetupPlan, machine: Machine, root: Path, notify: Callable[[SetupStep], None]
) -> tuple[str, ...]:
    """Run the steps on this machine; returns the programs of all setups there. A failing tool ends
    the setup; earlier tools are kept.

    root: homenode's own directory. notify: called before each step. Raises HostError for an
    existing program of another origin, or if nothing can be written; ToolError for a step that
    failed.
    """
    prefix = Path(plan.prefix)
    journal = setup_journal(prefix)
    with journal.files.hold_lock(_BUSY):
        journal.settle(lambda entry: InstallStep(prefix))
        entries = {entry.subject: entry for entry in list_installed(journal)}
        for target in plan.installs:
            is_ours = target in entries and InstallStep(prefix).is_done(entries[target])
            if Path(target).exists() and not is_ours:
                raise HostError(
                    f"{target}: this program exists and is not one that homenode installed",
                    hint="remove it, or choose another --prefix",
                )
        if plan.steps:
            prefixes = RecordDirectory(root / _PREFIXES, hint=state_hint)
            with prefixes.hold_lock(_BUSY, wait_s=_WAIT_S):
                name = hashlib.sha256(plan.prefix.encode()).hexdigest()[:8]
                prefixes.write(name, plan.prefix.encode())
        for _, steps in groupby(plan.steps, key=lambda step: step.tool):
            InstallStep(prefix, tuple(steps), machine, notify).do(journal.write)
        return tuple(entry.subject for entry in list_installed(journal))


class InstallStep:
    """A step that installs a program: it is built first, then renamed atomically."""

    def __init__(
        self,
        prefix: Path,
        steps: tuple[SetupStep, ...] = (),
        machine: Machine | None = None,
        notify: Callable[[SetupStep], None] = lambda step: None,
    ) -> None:
        """steps: commands; the last one gives the program its name. An undo needs none."""
        self._prefix, self._steps, self._machine, self._notify = prefix, steps, machine, notify

    def do(self, note: Note) -> ChangeEntry:
        *builds, move = self._steps
        part, target = move.argv[-2:]
        entry = ChangeEntry(
            what=ChangeState.REJECTED,
            kind=KIND,
            subject=target,
            by_hand=command_line("rm", target),
            facts={"commands": "\n".join(shlex.join(step.argv) for step in self._steps)},
        )
        for step in builds:
            self._run(step, entry, note)
        entry = structs.replace(entry, after=_sum(Path(part)))
        note(entry.with_state(ChangeState.BEGIN))
        self._run(move, entry, note)
        entry = entry.with_state(ChangeState.DONE)
        note(entry)
        return entry

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        Path(entry.subject).unlink(missing_ok=True)
        entry = entry.with_state(ChangeState.UNDONE)
        note(entry)
        return entry

    def is_done(self, entry: ChangeEntry) -> bool:
        return Path(entry.subject).exists() and _sum(Path(entry.subject)) == entry.after

    def _run(self, step: SetupStep, entry: ChangeEntry, note: Note) -> None:
        assert self._machine is not None, "there is one to build on"
        self._notify(step)
        environment = _set_here(_OF_THE_NETWORK if step.fetches else _OF_MODULES)
        result = self._machine.run(step.argv, step.timeout_s, step.input, environment=environment)
        failure = result.failure()
        if failure is not None:
            with contextlib.suppress(HostError):  # an unwritable prefix is already in `failure`
                note(entry)
            text = (result.stderr.strip() or result.stdout.strip())[-_MAX_MESSAGE:]
            raise ToolError(
                f"{step.tool}: {failure}{_format_full_hint(self._prefix)}", hint=text or None
            )


def _format_full_hint(prefix: Path) -> str:
    """Return a clear error for a full disk, which compilers and CMake do not report."""
    try:
        free_bytes = shutil.disk_usage(prefix).free
    except OSError:
        return ""
    return f" ({prefix}: {free_bytes} bytes left on its disk)" if free_bytes < _LITTLE_BYTES else ""


def _set_here(names: tuple[str, ...]) -> dict[str, str]:
    """Return the user's variables for the network and for libraries of environment modules. A proxy
    may contain a password: these are not recorded."""
    return {name: os.environ[name] for name in names if name in os.environ}


def take_back(prefix: Path) -> tuple[str, ...]:
    """Remove the unchanged programs of the journal and their build files, also after a failed
    build; return their paths.

    Raises HostError if there is neither, or a program was changed since: nothing is removed.
    """
    journal, step = setup_journal(prefix), InstallStep(prefix)
    sources = prefix / DIRECTORY / "src"
    if not list_installed(journal) and not sources.is_dir():
        raise HostError(
            f"{journal.files.path}: no record of a setup",
            hint="--prefix with the directory of the setup",
        )
    with journal.files.hold_lock(_BUSY):
        for entry in list_installed(journal):
            path = Path(entry.subject)
            try:
                check_links(path)
                is_ours = not path.exists() or step.is_done(entry)
            except OSError as error:
                raise of_os(error, str(path), "the program") from None
            if not is_ours:
                raise HostError(
                    f"{path}: expected it as homenode built it, found another file",
                    hint="remove it manually if it may go",
                )
        removed_paths = [entry.subject for entry in journal.undo(lambda entry: step)]
        try:
            if sources.is_dir():
                remove_tree(sources)
                removed_paths.append(str(sources))
            for part in (prefix / DIRECTORY).glob("*.part"):
                remove_file(part)
        except OSError as error:
            raise of_os(error, str(sources), "the directory") from None
        return tuple(removed_paths)


def list_installed(journal: Journal) -> tuple[ChangeEntry, ...]:
    """The programs that homenode installed. Raises InputError for one that is not below bin."""
    directory = Path(journal.head.run) / "bin"
    for entry in journal.to_undo():
        path = Path(entry.subject)
        if path.parent != directory or path.name in ("", ".", ".."):
            raise InputError(
                f"{journal.files.path}: expected programs below bin, found {entry.subject!r}"
            )
    return journal.to_undo()


def _sum(path: Path) -> str:
    return hashlib.sha256(read_plain(path, _MAX_PROGRAM_BYTES)).hexdigest()


_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_ASK_S = 60.0

PROGRAMS = (PROBE, *"numactl taskset nvbandwidth all_reduce_perf rocm-bandwidth-test".split())
"""Programs that the suite runs if they are installed."""


def boot_identity(machine: Machine) -> str:
    """Return an identity of this boot that reveals nothing else of the machine. Raises ToolError if
    it is not available."""
    result = machine.run(["cat", _BOOT_ID], _ASK_S)
    if result.failure() is not None or not result.stdout.strip():
        raise ToolError(
            f"{machine.name}: cannot read the boot's identity from {_BOOT_ID}",
            hint="--boot ID names this boot",
        )
    return hashlib.sha256(result.stdout.strip().encode()).hexdigest()[:16]


def read_pu_times(machine: Machine) -> tuple[PuTimes, ...]:
    """Ticks of each CPU since boot; () if the machine does not count. Raises ToolError."""
    try:
        return parse(machine.run(["cat", PROC_STAT], _ASK_S).stdout)
    except (ParseError, ToolMissingError):
        return ()


def find_installed_programs(
    machine: Machine, options: SuiteOptions, *, gpus: bool
) -> frozenset[str]:
    """Programs of the suite that can be run there, "python" and, if it has PyTorch, "torch".

    gpus: whether GPUs are measured; else PyTorch is not searched, which takes seconds.
    Raises ToolError if the machine cannot be reached.
    """
    programs = machine.find_installed(PROGRAMS)
    if not gpus:
        return programs
    try:
        result = ask_for_torch(machine, options.python, _ASK_S)
    except (ToolMissingError, ToolTimeoutError):
        return programs
    if result.returncode != 0:
        return programs
    return programs | ({PYTHON, TORCH} if result.stdout.strip() == "True" else {PYTHON})


def find_shown_gpus(
    machine: Machine, options: SuiteOptions, host: Host, programs: Collection[str]
) -> ShownGpus | None:
    """Return the GPUs that the machine's driver exposes; None if the driver cannot be queried.
    Raises ToolError if the machine cannot be reached."""
    gpus = select_gpus(host, [])
    # On this machine homenode's interpreter runs it: a node's python3 may be absent, or too old.
    python = sys.executable if isinstance(machine, LocalMachine) else options.python
    if not gpus or (python == options.python and PYTHON not in programs):
        return None
    driver = "cuda" if is_nvidia(gpus) else "hip"
    try:
        argv = (python, "-", driver)
        result = run_program(machine, argv, _ASK_S, "gpus_shown", dict([BY_BUS]))
        return parse_shown(result.stdout)
    except (ParseError, ToolMissingError, ToolTimeoutError):
        return None


_PACKAGE = "homenode.measure.programs"
_DIRECTORY = ("measure", "programs")
_CARRIED = ("torch_place", "torch_collectives", "watched")

_SAFE = {"PYTHONSAFEPATH": "1"}
_NOT_FROM_HERE = """\
import sys
sys.path[:] = [path for path in sys.path if path not in ("", ".")]
import os
for _part in (os.environ.get("PYTHONPATH") or "/").split(":"):
    if not os.path.isabs(_part) and os.path.abspath(_part) in sys.path:
        sys.path.remove(os.path.abspath(_part))
"""
_HAS_TORCH = (
    "import importlib.util; "
    "print(sys.version_info >= (3, 8) and importlib.util.find_spec('torch') is not None)"
)
_LAUNCHER = """\
import types
def _carry(name, source):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
"""


def run_program(
    machine: Machine,
    argv: Sequence[str],
    timeout_s: float,
    name: str,
    environment: Mapping[str, str] | None = None,
) -> ProgramResult:
    """Run a program of measure/programs on a machine. argv: the Python there, "-", its words.
    Raises like machine.run, and HostError if the installation lacks the program."""
    return machine.run(
        argv, timeout_s, read_program(name), environment={**(environment or {}), **_SAFE}
    )


def ask_for_torch(machine: Machine, python: str, timeout_s: float) -> ProgramResult:
    """Ask a Python on a machine for PyTorch: it prints True or False. Raises like machine.run."""
    argv = (python, "-c", _NOT_FROM_HERE + _HAS_TORCH)
    return machine.run(argv, timeout_s, environment=_SAFE)


def read_program(name: str) -> str:
    """Return the text of a program of measure/programs, for `python3 - ...`. Raises HostError if
    the installation lacks it."""
    lines, source = [_NOT_FROM_HERE, _LAUNCHER], _format_source(name)
    if _PACKAGE in source:
        for module in _CARRIED:
            lines.append(f"_carry({f'{_PACKAGE}.{module}'!r}, {_format_source(module)!r})\n")
    main = f'compile({source!r}, "homenode {name}", "exec")'
    lines.append(f'exec({main}, {{"__name__": "__main__"}})\n')
    return "".join(lines)


def _format_source(name: str) -> str:
    try:
        return read_package_text(*_DIRECTORY, f"{name}.py")
    except OSError as error:
        raise HostError(
            f"{name}: expected it in measure/programs, found: {error.strerror}",
            hint="install homenode again",
        ) from None
