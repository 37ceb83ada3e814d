"""homenode trial: boot and measure a VM in each layout, and restore it. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.bench_options import AppArguments, SuiteArguments
from homenode.cli.completion import domain_names, layout_lists
from homenode.cli.help import CommandWithActions, HelpCommand
from homenode.cli.options import ConnectOption, HostOption, with_records
from homenode.cli.placing_options import (
    ManualOptions,
    PageSizeOption,
    PciGranularityOption,
    PlacementOptions,
)
from homenode.cli.trial_options import AccessOptions
from homenode.hypervisor.connection import DEFAULT
from homenode.measure.layouts.guest_access import STOP_S
from homenode.plan.options import PciGranularity

app = typer.Typer(cls=CommandWithActions, no_args_is_help=False)

TrialArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The domain, or the trial's id.", autocompletion=domain_names
    ),
]

ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write the report here: .html or .pdf."),
]


@app.command("trial", cls=HelpCommand)
@with_records
def trial(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The domain: its name or UUID.", autocompletion=domain_names
        ),
    ],
    suite: SuiteArguments,
    own: AppArguments,
    access: AccessOptions,
    manual: ManualOptions,
    placement: PlacementOptions,
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts",
            metavar="A,B,...",
            help="Layouts to compare (homenode layouts); the first is the baseline. Default of "
            "--tests collectives: default,pin,pin-numa,pin-numa-pci.",
            autocompletion=layout_lists,
        ),
    ] = None,
    boots: Annotated[
        int | None,
        typer.Option(
            "--boots",
            metavar="N",
            min=1,
            help="Boots of each layout. Default: 3; of --tests collectives 1.",
        ),
    ] = None,
    as_copy: Annotated[
        bool,
        typer.Option("--as-copy", help="Boot a copy with throw-away disks; the VM is unchanged."),
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Boot the VM itself, and restore its definition after."),
    ] = False,
    bare: Annotated[
        bool,
        typer.Option("--bare", help="Also measure the host, on the plan's PUs and nodes alone."),
    ] = False,
    results: Annotated[
        Path,
        typer.Option("--results", metavar="DIR", help="Results folder; each boot is a run in it."),
    ] = Path("results"),
    report: ReportOption = None,
    id: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="ID", help="Name of the trial. Default: the domain and the time."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show the plans and the schedule; do nothing.")
    ] = False,
    connect: ConnectOption = DEFAULT,
    host: HostOption = None,
    page_size: PageSizeOption = None,
    pci_granularity: PciGranularityOption = PciGranularity.CELL,
) -> None:
    """Boot a VM in each layout, verify and measure each boot, and restore the VM.

    Boots of the layouts are interleaved in a random order. Ctrl-C, a crash and a lost connection
    leave a journal, from which the subcommands below continue.

    Examples:
      homenode trial gpu-vm --layouts default,pin,pin-numa --as-copy --dry-run
      homenode trial gpu-vm --layouts default,pin-numa-pci --boots 3 --in-place
    """
    from homenode.cli import trial_work as work
    from homenode.cli.trial_options import (
        TrialArguments,
        default_layouts,
        is_experiment,
        layouts_named,
    )

    work.begin_trial(
        name,
        TrialArguments(
            layouts=layouts_named(layouts or default_layouts(suite)),
            boots=boots or (1 if is_experiment(suite) else 3),
            bare=bare,
            as_copy=as_copy,
            in_place=in_place,
            results=results,
            report=report,
            id=id,
            dry_run=dry_run,
            connect=connect,
            host=host,
            page_size=page_size,
            pci_granularity=pci_granularity,
            suite=suite,
            app=own,
            access=access,
            manual=manual,
            placement=placement,
        ),
    )


@app.command("status", cls=HelpCommand)
def status(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A domain or a trial's id. Default: all trials.",
            autocompletion=domain_names,
        ),
    ] = None,
) -> None:
    """Show how far trials are.

    Examples:
      homenode trial status
      homenode trial status gpu-vm
    """
    from homenode.cli import trial_work as work

    work.show_status(name)


@app.command("resume", cls=HelpCommand)
@with_records
def resume(name: TrialArgument, access: AccessOptions, report: ReportOption = None) -> None:
    """Continue the last trial of a domain; boots that failed are tried again.

    Examples:
      homenode trial resume gpu-vm
      homenode trial resume gpu-vm --report trial.html
    """
    from homenode.cli import trial_work as work

    given = None if access.is_default else access
    work.resume_trial(name, given, access.probe, report)


@app.command("undo", cls=HelpCommand)
def undo(
    name: TrialArgument,
    stop_within: Annotated[
        float,
        typer.Option(
            "--stop-within",
            metavar="SECONDS",
            min=0,
            help="How long a guest may take to shut down before it is stopped.",
        ),
    ] = STOP_S,
) -> None:
    """Stop the last trial of a domain, and restore the VM.

    Examples:
      homenode trial undo gpu-vm
      homenode trial undo gpu-vm-20260101-120000
    """
    from homenode.cli import trial_work as work

    work.rollback_trial(name, stop_within)
