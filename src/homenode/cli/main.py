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
    import_results,
    kubevirt,
    nccl_topo,
    plan,
    recommend,
    report,
    restore,
    show,
    trial,
    verify,
)
from homenode.cli.slurm import commands as slurm
from homenode.cli.terminal import note, say
from homenode.errors import HomenodeError, HostError, UsageError

_WRONG_CALL: type[BaseException] = typer.BadParameter.__mro__[2]
"""ClickException, wherever this typer has its click from."""

app = typer.Typer(
    name="homenode",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Put every vCPU, every page and every GPU of a virtual machine on its home NUMA node.",
    epilog=(
        "Exit codes: 0 done, 1 findings, 2 usage or bad input, 3 host or tool failed, "
        "4 unplannable."
    ),
)
app.command("capture")(capture.capture)
app.command("show")(show.show)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("apply")(apply.apply)
app.command("restore")(restore.restore)
app.command("doctor")(doctor.doctor)
app.command("expect")(doctor.expect)
app.command("trial")(trial.trial)
app.command("bench")(bench.bench)
app.command("gpu-check")(gpu_check.gpu_check)
app.command("import")(import_results.import_results)
app.command("compare")(compare.compare)
app.command("recommend")(recommend.recommend)
app.command("report")(report.report)
app.command("nccl-topo")(nccl_topo.nccl_topo)
app.add_typer(kubevirt.app, name="kubevirt")
app.add_typer(slurm.app, name="slurm")


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
    """Put every vCPU, every page and every GPU of a virtual machine on its home NUMA node."""


def program() -> Callable[..., Any]:
    """The command line. That a path cannot be read is for its reader to say, with exit code 3: the
    library for arguments would call it a wrong call, exit code 2."""
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


def _say_wrong_call(error: Any) -> None:
    """As typer says it, of words that may be names of files that somebody else chose."""
    from typer.rich_utils import rich_format_error

    from homenode.wording import printable_lines

    error.message = printable_lines(error.message)
    rich_format_error(error)


def main() -> None:
    """Run the command line and exit with the contract's code."""
    try:
        sys.exit(program()(standalone_mode=False))
    except HomenodeError as error:
        sys.stdout.flush()
        note(f"homenode: {error}")
        sys.exit(error.exit_code)
    except _WRONG_CALL as error:
        _say_wrong_call(error)
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
