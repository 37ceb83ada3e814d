"""The program: its commands, its errors and its exit codes. [I/O]"""

import os
import sys
from collections.abc import Sequence

from homenode import __version__
from homenode.cli.command import CallError, Command, find_call
from homenode.cli.terminal import check_streams, discard_output, note, note_error, say
from homenode.errors import DONE, EXIT_CODES, INTERRUPTED, HomenodeError, HostError

PLACE = "Place"
CHECK = "Check"
MEASURE = "Measure"
CONCLUDE = "Conclude"
WORKLOADS = "Many VMs, and GPU work that is scheduled"
LOOK_UP = "Look up"

_PLACE, _CHECK, _MEASURE = "arguments.place:", "arguments.check:", "arguments.measure:"

DOCTOR = Command(
    "doctor",
    f"{_CHECK}DoctorArguments",
    "doctor:doctor",
    CHECK,
    commands=(
        Command("retrain", f"{_CHECK}RetrainArguments", "retrain:retrain"),
        Command("hook", f"{_CHECK}RetrainHookArguments", "retrain:hook", hidden=True),
    ),
)
TRIAL = Command(
    "trial",
    f"{_MEASURE}TrialArguments",
    "trial:begin_trial",
    MEASURE,
    commands=(
        Command("status", f"{_MEASURE}TrialStatusArguments", "trial:show_status"),
        Command("resume", f"{_MEASURE}TrialResumeArguments", "trial:resume_trial"),
        Command("undo", f"{_MEASURE}TrialUndoArguments", "trial:rollback_trial"),
    ),
)
BENCH = Command(
    "bench",
    f"{_MEASURE}BenchArguments",
    "bench:bench",
    MEASURE,
    commands=(Command("setup", f"{_MEASURE}BenchSetupArguments", "bench:set_up"),),
)
POOL = Command(
    "pool",
    panel=WORKLOADS,
    about="See what fits on many hosts, and where VMs go.",
    room=".cluster.commands:POOL",
)
KUBEVIRT = Command(
    "kubevirt",
    panel=WORKLOADS,
    about="Put GPUs of KubeVirt VMs on their nodes: hook, checks, manifests.",
    room=".cluster.commands:KUBEVIRT",
)
SLURM = Command(
    "slurm",
    panel=WORKLOADS,
    about="Check placement of GPU jobs and Slurm's configuration; measure the effect of binding.",
    room=".cluster.commands:SLURM",
)
LIST = Command(
    "list",
    panel=LOOK_UP,
    about="""List shipped hosts, layouts and findings.

    Examples:
      homenode list hosts
      homenode list findings pcie-link-narrow
    """,
    commands=(
        Command("hosts", f"{_MEASURE}HostsArguments", "host:hosts"),
        Command("layouts", f"{_MEASURE}LayoutsArguments", "host:layouts"),
        Command("findings", f"{_MEASURE}FindingsArguments", "host:findings"),
    ),
)
PROGRAM = Command(
    "homenode",
    about=f"""Put each vCPU, page and GPU of a VM on its home NUMA node.
    Exit codes: {", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())}.

    Examples:
      homenode show
      homenode apply gpu-vm --dry-run
    """,
    commands=(
        Command("show", f"{_PLACE}ShowArguments", "host:show", PLACE),
        Command("plan", f"{_PLACE}PlanArguments", "plan:plan", PLACE),
        Command("apply", f"{_PLACE}ApplyArguments", "apply:apply", PLACE),
        Command("restore", f"{_PLACE}RestoreArguments", "restore:restore", PLACE),
        Command("capture", f"{_PLACE}CaptureArguments", "host:capture", PLACE),
        Command("verify", f"{_CHECK}VerifyArguments", "verify:verify", CHECK),
        DOCTOR,
        TRIAL,
        BENCH,
        Command("import", f"{_MEASURE}ImportArguments", "import_results:import_results", MEASURE),
        Command("compare", f"{_MEASURE}CompareArguments", "report:compare", CONCLUDE),
        Command("report", f"{_MEASURE}ReportArguments", "report:report", CONCLUDE),
        POOL,
        KUBEVIRT,
        SLURM,
        Command("nccl-topo", f"{_PLACE}NcclTopoArguments", "nccl_topo:nccl_topo", WORKLOADS),
        LIST,
    ),
)
"""All commands, in the order of the help."""


def run(words: Sequence[str]) -> None:
    """Run the command of a command line. Raises HomenodeError; exits as commands do."""
    if words and words[0] in ("--version", "--show-completion"):
        _about_the_program(words)
        return
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words:
        from homenode.cli.host import print_overview

        print_overview()
        return
    call = find_call(PROGRAM, words, PROGRAM.name)
    if call.help:
        from homenode.cli.help import print_help

        print_help(call.command, call.path, shows_all=call.help == "--help-all")
        return
    call.command.run(call.read_options())


def _about_the_program(words: Sequence[str]) -> None:
    if words[0] == "--version":
        say(f"homenode {__version__}")
        return
    from homenode.cli.help import find_shell, read_script

    say(read_script(find_shell(words[1] if len(words) > 1 else None)))


def main() -> None:
    """Run the command line and exit with the contract's code."""
    # Libraries start programs too, and an empty or relative part is the current directory.
    directories = [
        directory
        for directory in os.environ.get("PATH", "").split(":")
        if directory.startswith("/")
    ]
    os.environ["PATH"] = ":".join(directories) or os.defpath
    request = os.environ.get("_HOMENODE_COMPLETE")
    if request is not None:
        from homenode.cli.help import answer_completion

        answer_completion(request, PROGRAM)
        sys.exit(0)
    sys.exit(run_and_report(sys.argv[1:]))


def _flush_output() -> None:
    """Write what was printed before an error; discard what its file does not take."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()


def run_and_report(words: Sequence[str]) -> int:
    """Return the exit code, and print the error."""
    try:
        check_streams()
        run(words)
    except CallError as error:
        if error.group is None:
            note_error(error, before=error.path)
        else:
            from homenode.cli.help import format_help

            for line in format_help(error.group, error.path).split("\n"):
                note(line)
        return error.exit_code
    except HomenodeError as error:
        _flush_output()
        note_error(error)
        return error.exit_code
    except BrokenPipeError:
        discard_output()  # no traceback, and nothing more to flush at exit
    except OSError as error:
        # A directory that cannot be entered, a disk that fails: wherever it was met.
        prefix = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _flush_output()
        note(f"homenode: {prefix}{error.strerror or error}")
        return HostError.exit_code
    except KeyboardInterrupt as error:
        note("; ".join(("homenode: interrupted", *map(str, error.args))))
        return INTERRUPTED
    return DONE


if __name__ == "__main__":
    main()
