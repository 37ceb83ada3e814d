"""homenode trial: boot and measure a VM in each layout, and put it back. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.apply import ConnectOption
from homenode.cli.placing_options import (
    DeviceLocalityOption,
    EmulatorOption,
    HostReserveOption,
    HousekeepingOption,
    KeepVcpusOption,
    MaxNodesOption,
    MemoryModeOption,
    PageSizeOption,
    PciGranularityOption,
    PolicyOption,
    ReservePusOption,
    UnequalCellsOption,
)
from homenode.errors import UsageError
from homenode.hypervisor.connection import DEFAULT
from homenode.measure.layouts.guest_access import ANSWER_S, STOP_S, GuestAccess, Transport
from homenode.plan.request import (
    DeviceLocality,
    EmulatorPolicy,
    MemoryMode,
    PciGranularity,
    Policy,
)

_BENCH = "What is measured"
_REACH = "How the guest is reached"
_LISTS = "PUs by hand"
_LATER = "A trial that was begun"


def trial(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The domain; later also the trial's id.")
    ] = None,
    layouts: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Layouts; the first is the baseline.")
    ] = None,
    boots: Annotated[int, typer.Option(metavar="N", min=1, help="Boots of each layout.")] = 3,
    as_copy: Annotated[
        bool,
        typer.Option("--as-copy", help="Boot a copy with throw-away disks; the VM stays as it is."),
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Boot the VM itself, and give its definition back after."),
    ] = False,
    bare: Annotated[
        bool,
        typer.Option("--bare", help="Also the host itself, on the plan's PUs and nodes alone."),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order of boots.")] = 1,
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="Results folder; each boot is a run in it.")
    ] = Path("results"),
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report here: .html or .pdf.")
    ] = None,
    id: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="ID", help="Of the trial. Default: the domain and the time."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show the plans and the schedule; do nothing.")
    ] = False,
    connect: ConnectOption = DEFAULT,
    host: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="The host to plan for.")
    ] = None,
    tests: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Groups of tests, as for bench.", rich_help_panel=_BENCH),
    ] = None,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Rounds.", rich_help_panel=_BENCH)
    ] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="Half a second a figure.", rich_help_panel=_BENCH)
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Eight seconds a figure.", rich_help_panel=_BENCH)
    ] = False,
    app: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="A command in the guest.", rich_help_panel=_BENCH),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Finds its figure.", rich_help_panel=_BENCH),
    ] = None,
    lower: Annotated[
        bool,
        typer.Option(
            "--lower/--higher-is-better",
            help="The figure is a time, or a rate.",
            rich_help_panel=_BENCH,
        ),
    ] = False,
    nccl_max_msg: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest message.", rich_help_panel=_BENCH)
    ] = "1GiB",
    python: Annotated[
        str,
        typer.Option(metavar="FILE", help="The guest's, for GPU tests.", rich_help_panel=_BENCH),
    ] = "python3",
    reach: Annotated[
        Transport | None,
        typer.Option(help="By ssh, guest agent or console.", rich_help_panel=_REACH),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Default: libvirt's lease.", rich_help_panel=_REACH),
    ] = None,
    ssh_user: Annotated[
        str, typer.Option(metavar="USER", help="Also of the console.", rich_help_panel=_REACH)
    ] = "root",
    ssh_port: Annotated[int, typer.Option(metavar="N", rich_help_panel=_REACH)] = 22,
    ssh_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A private key.", rich_help_panel=_REACH)
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The static probe to put there.", rich_help_panel=_REACH),
    ] = None,
    answer_within: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, help="From its start.", rich_help_panel=_REACH),
    ] = ANSWER_S,
    stop_within: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Then it is ended.", rich_help_panel=_REACH),
    ] = STOP_S,
    node_pus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PUS",
            help="Pin to these PUs of one node; once for each node.",
            rich_help_panel=_LISTS,
        ),
    ] = None,
    sibling_pus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PUS",
            help="Their SMT siblings, for layouts that pin all PUs.",
            rich_help_panel=_LISTS,
        ),
    ] = None,
    page_size: PageSizeOption = None,
    policy: PolicyOption = Policy.CORES_FIRST,
    max_nodes: MaxNodesOption = None,
    keep_vcpus: KeepVcpusOption = False,
    unequal_cells: UnequalCellsOption = False,
    memory_mode: MemoryModeOption = MemoryMode.STRICT,
    reserve_pus: ReservePusOption = "",
    host_reserve: HostReserveOption = None,
    housekeeping_pus: HousekeepingOption = "",
    device_locality: DeviceLocalityOption = DeviceLocality.PREFER,
    emulator: EmulatorOption = EmulatorPolicy.AUTO,
    pci_granularity: PciGranularityOption = PciGranularity.CELL,
    status: Annotated[
        bool, typer.Option("--status", help="How far it is.", rich_help_panel=_LATER)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Measure what is left of it.", rich_help_panel=_LATER),
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Take back what it left.", rich_help_panel=_LATER)
    ] = False,
) -> None:
    """Boot a VM in each layout, verify and measure each boot, and put the VM back.

    Boots of the layouts are interleaved in a seeded order. Ctrl-C, a crash and a lost connection
    leave a journal: --status reads it, --resume goes on, --undo takes back.
    """
    from homenode.cli import trial_work as work
    from homenode.cli.trial_options import TrialOptions, layouts_named

    if sum((status, resume, undo)) > 1:
        raise UsageError("--status, --resume, --undo: expected one of them, found several")
    if status:
        work.show_status(name)
        return
    if name is None:
        raise UsageError("expected a domain, found none", hint="homenode trial --status lists all")
    reaching = GuestAccess(
        reach or Transport.SSH, address, ssh_user, ssh_port,
        None if ssh_key is None else str(ssh_key.absolute()),
    )  # fmt: skip
    if undo:
        work.rollback_trial(name, stop_within)
        return
    if resume:
        given = None if reaching == GuestAccess() else reaching
        work.resume_trial(name, given, probe, report)
        return
    if layouts is None:
        raise UsageError(
            "--layouts: expected some, found none",
            hint="--layouts default,pin,pin-numa,pin-numa-pci",
        )
    work.begin_trial(
        name,
        TrialOptions(
            layouts=layouts_named(layouts),
            boots=boots, seed=seed, bare=bare, as_copy=as_copy, in_place=in_place,
            results=results, report=report, id=id, dry_run=dry_run, connect=connect, host=host,
            tests=tests, repeat=repeat, quick=quick, full=full, app=app, metric=metric,
            lower=lower, nccl_max_msg=nccl_max_msg, python=python, reaching=reaching,
            probe=probe, answer_s=answer_within, stop_s=stop_within, page_size=page_size,
            policy=policy, max_nodes=max_nodes, keep_vcpus=keep_vcpus,
            unequal_cells=unequal_cells, memory_mode=memory_mode, reserve_pus=reserve_pus,
            host_reserve=host_reserve, housekeeping_pus=housekeeping_pus,
            device_locality=device_locality, emulator=emulator, pci_granularity=pci_granularity,
            node_pus=tuple(node_pus or ()), sibling_pus=tuple(sibling_pus or ()),
        ),
    )  # fmt: skip
