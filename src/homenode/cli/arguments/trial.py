"""What is asked of try and trial. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import AfterOption, ConnectOption, HostOption, JsonOption
from homenode.cli.arguments.measure import (
    ACCESS,
    OWN,
    SUITE,
    AccessOptions,
    AppArguments,
    StopWithinOption,
    SuiteArguments,
    WithinOption,
)
from homenode.cli.command import IncludeFields, OptionGroup
from homenode.objective import Objective
from homenode.option import Arg, Flag, Opt
from homenode.vm.hypervisor.connection import DEFAULT, STOP_S
from homenode.vm.plan_options import PLACEMENT, ManualRanges, PlanOptions

DomainArgument = Annotated[str, Arg("NAME", "The domain.", complete="domain_names")]
TrialArgument = Annotated[str, Arg("NAME", "The domain.", complete="domain_names")]

ReportOption = Annotated[Path | None, Opt("--report", "FILE")]


class TrialArguments(Struct, frozen=True, kw_only=True):
    """Boot a copy of a VM in each layout, measure, and say which layout to run.

    Prints findings, plans and the time first, then asks. The copy has throw-away disks. What was
    killed continues with the commands below.

    Options:
      report: Write the report here, .html or .pdf. Default: report.html in the trial's directory.
      within: Begin no round that would end later: 30m, 2h. Default: as long as it takes.
      layouts: Layouts; the first is the baseline. Default: default, pin; pin-numa where the host
        has several nodes, pin-numa-pci where the VM has GPUs too.
      boots: Boots of each layout. Default: 3 of two layouts, 4 of more.
      objective: What is to be decided: multi-gpu, memory-bandwidth, latency, gpu-copy, throughput,
        density. Default: as the VM's devices suggest.
      in_place: Boot the VM itself: what the guest writes stays. Default: a copy is booted.
      bare: Also measure the host itself; this runs on the PUs and nodes of the first layout that
        pins, and gives percentages of bare metal.
      results: Results directory; each boot is a run ID-LAYOUT-N in it.
      id: Name of the trial. Default: the domain and the time.
      yes: Boot without asking.
      dry_run: Show the plans and the schedule; do nothing.
      host: The host to plan for; it must be the host of the libvirt daemon: an equal machine is
        accepted, another is refused. Default: this machine.

    Examples:
      homenode trial gpu-vm --dry-run
      homenode trial gpu-vm --layouts default,pin,pin-numa --within 1h
    """

    name: DomainArgument
    suite: Annotated[SuiteArguments, OptionGroup(SUITE)] = SuiteArguments()
    own: Annotated[AppArguments, OptionGroup(OWN, rare=True)] = AppArguments()
    access: Annotated[AccessOptions, OptionGroup(ACCESS, rare=True)] = AccessOptions()
    manual: ManualRanges = ManualRanges()
    options: Annotated[PlanOptions, IncludeFields(PLACEMENT, "page_bytes", "pci_granularity")] = (
        PlanOptions()
    )
    after: AfterOption = ()
    layouts: Annotated[str | None, Opt("--layouts", "A,B,...", complete="layout_lists")] = None
    boots: Annotated[int | None, Opt("--boots", "N", ge=1)] = None
    within: WithinOption = None
    objective: Annotated[Objective | None, Opt("--objective", "NAME")] = None
    in_place: Annotated[bool, Flag("--in-place")] = False
    bare: Annotated[bool, Flag("--bare-metal", rare=True)] = False
    results: Annotated[Path, Opt("--results", "DIR", rare=True)] = Path("results")
    report: ReportOption = None
    id: Annotated[str | None, Opt("--name", "ID", rare=True)] = None
    yes: Annotated[bool, Flag("--yes -y")] = False
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    connect: ConnectOption = DEFAULT
    host: HostOption = None


class TrialStatusArguments(Struct, frozen=True, kw_only=True):
    """Show how far trials are.

    Options:
      name: Of status: a domain, whose last trial is shown, or a trial's id; without it all.

    Examples:
      homenode trial status
      homenode trial status gpu-vm
    """

    name: Annotated[str | None, Arg("[NAME]", complete="domain_names")] = None
    json: JsonOption = False


class TrialResumeArguments(Struct, frozen=True, kw_only=True):
    """Continue the last trial of a domain, and repeat boots that failed.

    Options:
      report: Write the report here, .html or .pdf. Default: report.html in the trial's directory.
      within: Begin no round that would end later, by its own clock. Default: as long as it takes.
      boots: Boots of each layout. Default: 3 of two layouts, 4 of more.

    Examples:
      homenode trial resume gpu-vm --boots 6
      homenode trial resume gpu-vm --report trial.html
    """

    name: TrialArgument
    access: Annotated[AccessOptions, OptionGroup(ACCESS, rare=True)] = AccessOptions()
    boots: Annotated[int | None, Opt("--boots", "N", ge=1)] = None
    within: WithinOption = None
    report: ReportOption = None


class TrialUndoArguments(Struct, frozen=True, kw_only=True):
    """Stop the last trial of a domain, and restore the VM.

    Options:
      stop_within: How long it may take to shut down; then it is destroyed.

    Examples:
      homenode trial undo gpu-vm
      homenode trial undo gpu-vm-20260101-120000
    """

    name: TrialArgument
    stop_within: StopWithinOption = STOP_S
