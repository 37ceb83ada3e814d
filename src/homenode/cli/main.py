"""The program: its commands, its errors and its exit codes. [I/O]

Exit codes: 0 done, 1 findings, 2 usage or bad input, 3 host or tool failed, 4 unplannable.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from homenode import __version__
from homenode.cli.help import HelpCommand, HelpGroup, wrong_call
from homenode.cli.terminal import note, note_error, say
from homenode.errors import HomenodeError, HostError, UsageError

_WRONG_CALL: type[BaseException] = typer.BadParameter.__mro__[2]
"""ClickException, wherever this typer has its click from."""

PLACE = "Place"
CHECK = "Check"
MEASURE = "Measure"
CONCLUDE = "Conclude"
MANY = "Many VMs"
WORKLOADS = "Where GPU work is scheduled"

COMMANDS: Mapping[str, tuple[str, str]] = {
    "show": (PLACE, "show:show"),
    "plan": (PLACE, "plan:plan"),
    "apply": (PLACE, "apply:apply"),
    "replan": (PLACE, "replan:replan"),
    "restore": (PLACE, "restore:restore"),
    "capture": (PLACE, "capture:capture"),
    "host-setup": (PLACE, "host_setup:app"),
    "layouts": (PLACE, "reference:layouts"),
    "hosts": (PLACE, "reference:hosts"),
    "verify": (CHECK, "verify:verify"),
    "doctor": (CHECK, "doctor:app"),
    "expect": (CHECK, "doctor:expect"),
    "watch": (CHECK, "watch:watch"),
    "explain": (CHECK, "reference:explain"),
    "trial": (MEASURE, "trial:app"),
    "bench": (MEASURE, "bench:app"),
    "gpu-check": (MEASURE, "gpu_check:gpu_check"),
    "import": (MEASURE, "import_results:import_results"),
    "compare": (CONCLUDE, "compare:compare"),
    "recommend": (CONCLUDE, "recommend:recommend"),
    "report": (CONCLUDE, "report:report"),
    "pool": (MANY, "pool:app"),
    "pod": (WORKLOADS, "pod:app"),
    "kubevirt": (WORKLOADS, "kubevirt:app"),
    "slurm": (WORKLOADS, "slurm.commands:app"),
    "nccl-topo": (WORKLOADS, "nccl_topo:nccl_topo"),
}
"""In the order of the help: the panel, and the module of cli/ with the function or group in it."""


class _Commands(Mapping[str, Any]):
    """The commands by name. Each is imported when it is asked for: a run needs one of them."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name, *COMMANDS[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Program(HelpGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


def _load(name: str, panel: str, where: str) -> Any:
    module, _, attribute = where.partition(":")
    found = getattr(import_module(f"homenode.cli.{module}"), attribute)
    holder = typer.Typer()
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name, rich_help_panel=panel)
    else:
        holder.command(name, cls=HelpCommand, rich_help_panel=panel)(found)
    command = typer.main.get_group(holder).commands[name]
    _leave_files_to_commands(command)
    return command


def _leave_files_to_commands(command: Any) -> None:
    """A path that cannot be read is an error of the command, with exit code 3; the library for
    arguments would call it a wrong call, exit code 2."""
    for one in getattr(command, "commands", {}).values():
        _leave_files_to_commands(one)
    for parameter in command.params:
        descriptor = getattr(parameter, "type_descriptor", None)
        if descriptor is not None:
            descriptor.parameter_info.readable = False


app = typer.Typer(
    name="homenode",
    cls=_Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Exit codes: 0 done, 1 findings, 2 usage or bad input, 3 host or tool failed, "
        "4 unplannable. Completion: homenode --install-completion."
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"homenode {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Put every vCPU, every page and every GPU of a virtual machine on its home NUMA node.

    Examples:
      homenode show
      homenode apply gpu-vm --dry-run
    """


def main() -> None:
    """Run the command line and exit with the contract's code."""
    # Libraries start programs too, and an empty or relative part is the current folder.
    folders = [one for one in os.environ.get("PATH", "").split(":") if one.startswith("/")]
    os.environ["PATH"] = ":".join(folders) or os.defpath
    try:
        sys.exit(typer.main.get_command(app)(standalone_mode=False))
    except HomenodeError as error:
        sys.stdout.flush()
        note_error(error)
        sys.exit(error.exit_code)
    except _WRONG_CALL as error:
        for line in wrong_call(error).split("\n"):
            note(line)
        sys.exit(UsageError.exit_code)
    except typer.Abort:
        note("homenode: stopped")
        sys.exit(1)
    except BrokenPipeError:
        # The reader (head, less) went away: no traceback, and nothing more to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        # A folder that cannot be entered, a disk that fails: wherever it was met.
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        sys.stdout.flush()
        note(f"homenode: {where}{error.strerror or error}")
        sys.exit(HostError.exit_code)
    except KeyboardInterrupt:
        note("homenode: interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
