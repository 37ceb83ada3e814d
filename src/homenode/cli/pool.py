"""homenode pool: many hosts: what still fits, where the next VM goes, what to move. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.help import HelpCommand, HelpGroup
from homenode.cli.options import JsonOption, Without, with_records
from homenode.cli.placing_options import (
    LayoutOptions,
    PlacementOptions,
    SwitchOptions,
    VmOptions,
    plan_options,
)
from homenode.errors import UsageError
from homenode.pool.scheduler import Scheduler

app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    help="""See what still fits on many hosts, where the next VM goes, and what to move.

    Examples:
      homenode pool show 'hgx-h100*40'
      homenode pool place VM.xml --pool pool/ --gpus 2 -o tuned.xml
    """,
)

SourceArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="POOL...",
        help="A pool: a folder of captures or host.toml files, a list of hosts, a libvirt URI "
        "(qemu+ssh://HOST/system), or a shipped host times a number: 'hgx-h100*40'.",
    ),
]
PoolOption = Annotated[
    list[str],
    typer.Option("--pool", metavar="POOL", help="The hosts, as in pool show."),
]
FlavoursOption = Annotated[
    Path | None,
    typer.Option(
        "--flavours",
        metavar="FILE",
        help="Sizes of VM (flavours.toml). Default: 1, 2, 4 and 8 GPUs with their share of a host.",
    ),
]


@app.command("show", cls=HelpCommand)
def show(
    pool: SourceArgument,
    flavours: FlavoursOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="A row for each host, however many there are.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print a table for other programs.")] = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print Prometheus' text format.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="Write a page (HTML) with a map of the hosts."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what is free on each host and in sum, which VMs still fit, which GPUs are stranded.

    Examples:
      homenode pool show 'hgx-h100*40'
      homenode pool show captures/ --flavours flavours.toml --json
    """
    from homenode.cli import pool_reading

    if sum((csv, prometheus, json)) > 1:
        raise UsageError("--csv, --prometheus, --json: expected one of them, found several")
    form = "csv" if csv else "prometheus" if prometheus else "json" if json else "text"
    pool_reading.show(pool, flavours, form, page, everything=everything)


@app.command("vms", cls=HelpCommand)
def vms(
    pool: SourceArgument,
    among: Annotated[
        list[str] | None, typer.Option("--on", metavar="HOST", help="Only the VMs of this host.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the VMs: on which host and nodes each is, and how many of its GPUs are elsewhere.

    Examples:
      homenode pool vms pool/
      homenode pool vms pool/ --on gpu-7 --json
    """
    from homenode.cli import pool_reading

    pool_reading.list_vms(pool, tuple(among or ()), as_json=json)


@app.command("capture", cls=HelpCommand)
def capture(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="POOL/", help="The folder to write.")
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE...", help="Instead of --hosts: a pool, as for pool show."),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A list: on each line [USER@]HOST[:PORT], then name=NAME and fault_domain=NAME "
            "where wanted.",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, max=256, help="Hosts read at the same time.")
    ] = 16,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="The longest time for one host.")
    ] = 120.0,
    again: Annotated[
        bool, typer.Option("--again", help="Also read the hosts that the folder has already.")
    ] = False,
) -> None:
    """Read many hosts over ssh at once into a folder, which every pool command takes.

    Nothing is installed on the hosts. A host that fails is named and left out; the same command
    later reads those that are missing. SOURCE: hosts of captures, host.toml files and libvirt URIs,
    which are read once instead of by every command.

    Examples:
      homenode pool capture --hosts hosts.txt -o pool/
      homenode pool capture captures/ qemu+ssh://gpu-9/system -o pool/
    """
    from homenode.cli import pool_reading

    pool_reading.capture(sources or (), hosts, output, jobs, timeout, again=again)


@app.command("place", cls=HelpCommand)
@with_records
def place(
    pool: PoolOption,
    layout: LayoutOptions,
    vm: VmOptions,
    placement: Annotated[PlacementOptions, Without("after", "replaces")],
    switches: SwitchOptions,
    document: Annotated[
        str | None,
        typer.Argument(metavar="VM.xml", help="The domain document; - for standard input."),
    ] = None,
    flavours: FlavoursOption = None,
    among: Annotated[
        list[str] | None,
        typer.Option("--on", metavar="HOST", help="Choose this host of the pool only."),
    ] = None,
    gpu_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --gpus: a part of the GPUs' name, such as H200."),
    ] = None,
    count: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="Place N such VMs: VM-1 to VM-N.")
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="Write the tuned document here; with --count, a folder for them.",
        ),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Record the VM in the pool's folder: later commands count it."
        ),
    ] = False,
    hook: Annotated[
        bool,
        typer.Option("--hook", help="Answer requests (lines of JSON) from standard input."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Rank the hosts for a VM by its locality, then by what no longer fits; plan for the best.

    Examples:
      homenode pool place gpu-vm.xml --pool pool/ --gpus 2 -o tuned.xml
      echo '{"vm":"a","gpus":4}' | homenode pool place --hook --pool 'hgx-h100*40'
    """
    from homenode.cli import pool_placing

    if hook:
        if document is not None or record or count > 1 or output is not None or among:
            raise UsageError("--hook: expected requests on standard input, found a document too")
        pool_placing.answer(pool, flavours)
        return
    if document is None:
        raise UsageError("pool place: expected a document, found none", hint="or --hook")
    options = plan_options(layout, vm, placement, switches)
    if gpu_model is not None and not options.gpu_count:
        raise UsageError("--gpu-model: expected --gpus N with it, found none")
    pool_placing.place(
        document,
        pool,
        options,
        flavours,
        layout.results,
        pool_placing.PlaceOutputs(count, output, record, json, tuple(among or ()), gpu_model),
    )


@app.command("remove", cls=HelpCommand)
def remove(
    pool: Annotated[Path, typer.Option("--pool", metavar="POOL/", help="The pool's folder.")],
    vms: Annotated[
        list[str] | None, typer.Argument(metavar="VM...", help="Names of recorded VMs.")
    ] = None,
    packing: Annotated[
        Path | None,
        typer.Option(
            "--packing", metavar="DIR", help="All VMs of the packing that pool pack wrote there."
        ),
    ] = None,
) -> None:
    """Remove the records of VMs that pool place or pool pack has placed with --record.

    Examples:
      homenode pool remove gpu-vm-1 gpu-vm-2 --pool pool/
      homenode pool remove --packing packed/ --pool pool/
    """
    from homenode.cli import pool_placing

    pool_placing.remove(vms or (), packing, pool)


@app.command("simulate", cls=HelpCommand)
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="Requests as CSV (tasks with parts of GPUs, or VMs of cells), or random: VMs that "
            "arrive and depart on the hosts of --pool.",
        ),
    ],
    nodes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The machines of a CSV trace, as CSV."),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", metavar="POOL", help="With random: the hosts, as in pool show."),
    ] = None,
    flavours: FlavoursOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="first-fit, best-fit, homenode; fgd for tasks and random; with random also nova, "
            "xapi, most-left, repacked; for cells blind-best-fit. Default: all.",
        ),
    ] = None,
    orders: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Number of random orders.")
    ] = 5,
    load: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0.01,
            max=10,
            help="With random: GPUs requested, as a share of all.",
        ),
    ] = 0.9,
    vms: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=1_000_000, help="With random: how many VMs arrive."),
    ] = 500,
    mix: Annotated[
        str | None,
        typer.Option(
            metavar="FLAVOUR=WEIGHT,...",
            help="With random: how often each flavour arrives. Default: equally often.",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write a page with a chart.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Replay arrivals under several policies: shares allocated, refusals, stranded GPUs.

    Arrivals and results are simulated. Needs OR-tools (docs/install.md); without it, the error
    names the command that installs it.

    Examples:
      homenode pool simulate random --pool 'hgx-h100*8' --load 0.9 --mix gpu1=8,gpu2=4,gpu8=1
      homenode pool simulate tasks.csv --nodes nodes.csv --policy fgd --policy homenode
    """
    from homenode.cli import pool_simulation

    pool_simulation.simulate(
        trace,
        nodes,
        tuple(pool or ()),
        flavours,
        tuple(policy or ()),
        orders,
        pool_simulation.RandomLoad(load, vms, mix),
        page,
        as_json=json,
    )


@app.command("pack", cls=HelpCommand)
def pack(
    requests: Annotated[
        Path, typer.Argument(metavar="REQUESTS", help="The VMs: a TOML file of [[vm]] tables.")
    ],
    pool: PoolOption,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="A folder for the plans, one for each VM."
        ),
    ],
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Time for the solver.")
    ] = 60.0,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Record the VMs in the pool's folder: later commands count them."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Place many VMs at once: most value, then fewest packages crossed, then fewest hosts.

    Prints the solver's bound and the gap. Every VM has a plan of the ordinary planner. Needs
    OR-tools (docs/install.md); without it, the error names the command that installs it.

    Examples:
      homenode pool pack vms.toml --pool pool/ --record -o packed/
      homenode pool pack vms.toml --pool 'hgx-h100*20' -o packed/ --time-limit 300
    """
    from homenode.cli import pool_packing

    pool_packing.pack(requests, pool, output, time_limit, record=record, as_json=json)


@app.command("drain", cls=HelpCommand)
def drain(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Its name in the pool.")],
    pool: PoolOption,
    flavours: FlavoursOption = None,
    json: JsonOption = False,
) -> None:
    """List the moves that empty a host, and how each VM moves. Nothing is moved.

    Examples:
      homenode pool drain gpu-7 --pool pool/
      homenode pool drain gpu-7 --pool pool/ --json
    """
    from homenode.cli import pool_packing

    pool_packing.drain(host, pool, flavours, as_json=json)


@app.command("defragment", cls=HelpCommand)
def defragment(
    pool: SourceArgument,
    flavours: FlavoursOption = None,
    flavour: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="FLAVOUR", help="The flavour that should fit. Default: the largest."
        ),
    ] = None,
    most: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Stop after N additional VMs.")
    ] = 8,
    json: JsonOption = False,
) -> None:
    """List the moves after which more large VMs fit, fewest first. Nothing is moved.

    Examples:
      homenode pool defragment pool/
      homenode pool defragment pool/ --for gpu4 --most 2
    """
    from homenode.cli import pool_packing

    pool_packing.defragment(pool, flavours, flavour, most, as_json=json)


@app.command("export", cls=HelpCommand)
def export(
    pool: SourceArgument,
    scheduler: Annotated[
        Scheduler, typer.Option("--for", help="The scheduler. For others: pool show --json.")
    ],
    flavours: FlavoursOption = None,
) -> None:
    """Print what still fits for a scheduler: labels, aggregates and traits, or features.

    Examples:
      homenode pool export pool/ --for kubernetes
      homenode pool export pool/ --for slurm
    """
    from homenode.cli import pool_reading

    pool_reading.export(pool, scheduler, flavours)
