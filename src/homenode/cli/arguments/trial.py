"""What is asked of try and trial. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import AfterOption, ConnectOption, HostOption, JsonOption
from homenode.cli.arguments.measure import (
    ACCESS,
    OWN,
    SEQUENCE,
    SUITE,
    AccessOptions,
    AppArguments,
    SequenceArguments,
    StopWithinOption,
    SuiteArguments,
    WithinOption,
)
from homenode.cli.command import Only, Under
from homenode.measure.layouts.guest_access import STOP_S
from homenode.objective import Objective
from homenode.opt import Arg, Flag, Opt
from homenode.units import parse_duration
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.vm.plan_options import PLACEMENT, ManualRanges, PlanOptions

DomainArgument = Annotated[str, Arg("NAME", complete="domain_names")]
TrialArgument = Annotated[str, Arg("NAME", complete="domain_names")]

ReportOption = Annotated[Path | None, Opt("--report", "FILE")]


class TrialArguments(Struct, frozen=True, kw_only=True):
    """Boot a VM in each layout, verify, measure, and restore the VM.

    Boots are in a random order. What was killed continues with the commands below.

    Examples:
      homenode trial gpu-vm --layouts default,pin,pin-numa --as-copy --dry-run
      homenode trial gpu-vm --layouts default,pin --as-copy --until decided
    """

    name: DomainArgument
    suite: Annotated[SuiteArguments, Under(SUITE)] = SuiteArguments()
    own: Annotated[AppArguments, Under(OWN, rare=True)] = AppArguments()
    access: Annotated[AccessOptions, Under(ACCESS, rare=True)] = AccessOptions()
    manual: ManualRanges = ManualRanges()
    options: Annotated[PlanOptions, Only(PLACEMENT, "page_bytes", "pci_granularity")] = (
        PlanOptions()
    )
    after: AfterOption = ()
    layouts: Annotated[str | None, Opt("--layouts", "A,B,...", complete="layout_lists")] = None
    boots: Annotated[int | None, Opt("--boots", "N", ge=1)] = None
    sequence: Annotated[SequenceArguments, Under(SEQUENCE)] = SequenceArguments()
    as_copy: Annotated[bool, Flag("--as-copy")] = False
    in_place: Annotated[bool, Flag("--in-place")] = False
    bare: Annotated[bool, Flag("--bare")] = False
    results: Annotated[Path, Opt("--results", "DIR")] = Path("results")
    report: ReportOption = None
    id: Annotated[str | None, Opt("--name", "ID", rare=True)] = None
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    connect: ConnectOption = DEFAULT
    host: HostOption = None


class TryArguments(Struct, frozen=True, kw_only=True):
    """Say what is wrong with a VM, and measure whether a layout helps.

    Shows the worst findings of the host and the VM, the plan, what it would change and the trial,
    and asks. A copy of the VM is then booted in each layout until it is decided, and the last line
    says what to run, how sure that is, and how to take it back. The VM itself stays as it is.

    Examples:
      homenode try gpu-vm --dry-run
      homenode try gpu-vm --within 1h --ssh-key ~/.ssh/lab
    """

    name: DomainArgument
    within: Annotated[
        float, Opt("--within", "TIME", parse=parse_duration, show=lambda seconds: f"{seconds:g}s")
    ] = 1800.0
    objective: Annotated[Objective | None, Opt("--objective", "NAME")] = None
    layouts: Annotated[str | None, Opt("--layouts", "A,B,...", complete="layout_lists")] = None
    tests: Annotated[str | None, Opt("--tests", "A,B", complete="test_lists", rare=True)] = None
    long: Annotated[bool, Flag("--long")] = False
    in_place: Annotated[bool, Flag("--in-place")] = False
    access: Annotated[AccessOptions, Under(ACCESS)] = AccessOptions()
    results: Annotated[Path, Opt("--results", "DIR", rare=True)] = Path("results")
    yes: Annotated[bool, Flag("--yes -y")] = False
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    json: Annotated[bool, Flag("--json")] = False
    connect: ConnectOption = DEFAULT
    host: HostOption = None


class TrialStatusArguments(Struct, frozen=True, kw_only=True):
    """Show how far trials are.

    Examples:
      homenode trial status
      homenode trial status gpu-vm
    """

    name: Annotated[str | None, Arg("[NAME]", complete="domain_names")] = None
    json: JsonOption = False


class TrialResumeArguments(Struct, frozen=True, kw_only=True):
    """Continue the last trial of a domain, and repeat boots that failed.

    Examples:
      homenode trial resume gpu-vm
      homenode trial resume gpu-vm --report trial.html
    """

    name: TrialArgument
    access: Annotated[AccessOptions, Under(ACCESS, rare=True)] = AccessOptions()
    within: WithinOption = None
    report: ReportOption = None


class TrialUndoArguments(Struct, frozen=True, kw_only=True):
    """Stop the last trial of a domain, and restore the VM.

    Examples:
      homenode trial undo gpu-vm
      homenode trial undo gpu-vm-20260101-120000
    """

    name: TrialArgument
    stop_within: StopWithinOption = STOP_S
