"""The program: its commands, its errors and its exit codes. [I/O]

Exit codes: 0 done, 1 findings, 2 usage or bad input, 3 host or tool failed, 4 unplannable.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from homenode import __version__
from homenode.cli import (
    apply,
    bench,
    capture,
    compare,
    doctor,
    gpu_check,
    host_setup,
    import_results,
    kubevirt,
    nccl_topo,
    plan,
    pod,
    pool,
    recommend,
    reference,
    replan,
    report,
    restore,
    show,
    trial,
    verify,
    watch,
)
from homenode.cli.help import HelpCommand, HelpGroup, wrong_call
from homenode.cli.slurm import commands as slurm
from homenode.cli.terminal import note, say
from homenode.errors import HomenodeError, HostError, UsageError

_WRONG_CALL: type[BaseException] = typer.BadParameter.__mro__[2]
"""ClickException, wherever this typer has its click from."""

PLACE = "Place"
CHECK = "Check"
MEASURE = "Measure"
CONCLUDE = "Conclude"
MANY = "Many VMs"
WORKLOADS = "Where GPU work is scheduled"

_ORDER: list[str] = []
"""Of the commands in the help."""


class _Program(HelpGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=_ORDER.index)


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


def _add(panel: str, name: str, command: Callable[..., None]) -> None:
    app.command(name, cls=HelpCommand, rich_help_panel=panel)(command)
    _ORDER.append(name)


def _add_group(panel: str, name: str, group: typer.Typer) -> None:
    app.add_typer(group, name=name, rich_help_panel=panel)
    _ORDER.append(name)


_add(PLACE, "show", show.show)
_add(PLACE, "plan", plan.plan)
_add(PLACE, "apply", apply.apply)
_add(PLACE, "replan", replan.replan)
_add(PLACE, "restore", restore.restore)
_add(PLACE, "capture", capture.capture)
_add_group(PLACE, "host-setup", host_setup.app)
_add(PLACE, "layouts", reference.layouts)
_add(PLACE, "hosts", reference.hosts)
_add(CHECK, "verify", verify.verify)
_add_group(CHECK, "doctor", doctor.app)
_add(CHECK, "expect", doctor.expect)
_add(CHECK, "watch", watch.watch)
_add(CHECK, "explain", reference.explain)
_add_group(MEASURE, "trial", trial.app)
_add_group(MEASURE, "bench", bench.app)
_add(MEASURE, "gpu-check", gpu_check.gpu_check)
_add(MEASURE, "import", import_results.import_results)
_add(CONCLUDE, "compare", compare.compare)
_add(CONCLUDE, "recommend", recommend.recommend)
_add(CONCLUDE, "report", report.report)
_add_group(MANY, "pool", pool.app)
_add_group(WORKLOADS, "pod", pod.app)
_add_group(WORKLOADS, "kubevirt", kubevirt.app)
_add_group(WORKLOADS, "slurm", slurm.app)
_add(WORKLOADS, "nccl-topo", nccl_topo.nccl_topo)


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


def program() -> Callable[..., Any]:
    """The command line. A path that cannot be read is an error of the command, with exit code 3;
    the library for arguments would call it a wrong call, exit code 2."""
    commands = [typer.main.get_command(app)]
    program = commands[0]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            descriptor = getattr(parameter, "type_descriptor", None)
            if descriptor is not None:
                descriptor.parameter_info.readable = False
    return program


def main() -> None:
    """Run the command line and exit with the contract's code."""
    try:
        sys.exit(program()(standalone_mode=False))
    except HomenodeError as error:
        sys.stdout.flush()
        note(f"homenode: {error}")
        sys.exit(error.exit_code)
    except _WRONG_CALL as error:
        note(wrong_call(error))
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
