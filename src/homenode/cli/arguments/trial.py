"""Arguments of try and trial. [I/O]"""

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
from homenode.vm.plan_options import PLACEMENT, PlanOptions

DomainArgument = Annotated[
    str, Arg("NAME", "Domain of libvirt, by name or UUID.", complete="domain_names")
]
TrialArgument = Annotated[
    str, Arg("NAME", "Domain of libvirt, by name or UUID.", complete="domain_names")
]

ReportOption = Annotated[Path | None, Opt("--report", "FILE")]


class TrialArguments(Struct, frozen=True, kw_only=True):
    """Boot a copy of a VM in each layout, measure, and say which layout to run.

    Prints findings, plans and the time first, then asks. The copy has throw-away disks. What was
    killed continues with the commands below.

    Options:
      report: Write the report here, .html or .pdf. Default: report.html in the trial's directory.
      within: Time limit, such as 30m or 2h; no round is started that would exceed it. Default: no
        limit.
      layouts: Layouts to boot, separated by commas; the first is the baseline. Default: default,
        pin; also pin-numa if the host has several nodes, and pin-numa-pci if the VM has GPUs too.
      boots: Boots of each layout. Default: 3 for two layouts, 4 for more.
      objective: The objective to decide for; multi-gpu, memory-bandwidth, latency, gpu-copy,
        throughput, density. Default: chosen by the VM's devices.
      in_place: Boot the VM itself: changes in the guest stay. Default: a copy is booted.
      bare: Also measure the host itself, on the CPUs and nodes of the first layout that pins;
        results are also a percentage of bare metal.
      results: Results directory; each boot's run is ID-LAYOUT-N in it.
      id: Name of the trial. Default: the domain and the time.
      yes: Boot the copies without a prompt; needed without a terminal.
      dry_run: Print the plans and the schedule; boot nothing.
      host: The host to plan for; it must be the host of the libvirt daemon, or an equal machine.
        Default: this machine.

    Examples:
      homenode trial gpu-vm --dry-run
      homenode trial gpu-vm --layouts default,pin,pin-numa --within 1h
    """

    name: DomainArgument
    suite: Annotated[SuiteArguments, OptionGroup(SUITE)] = SuiteArguments()
    own: Annotated[AppArguments, OptionGroup(OWN, rare=True)] = AppArguments()
    access: Annotated[AccessOptions, OptionGroup(ACCESS, rare=True)] = AccessOptions()
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
      name: A domain, to show its last trial, or a trial's id. Default: all trials.

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
      within: Time limit, such as 30m or 2h; no round is started that would exceed it. Default: no
        limit.
      boots: Boots of each layout. Default: 3 for two layouts, 4 for more.

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
      stop_within: Time limit for the shutdown; then the VM is destroyed.

    Examples:
      homenode trial undo gpu-vm
      homenode trial undo gpu-vm-20260101-120000
    """

    name: TrialArgument
    stop_within: StopWithinOption = STOP_S
