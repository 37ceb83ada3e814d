"""homenode compare: effects with intervals between layouts, or "cannot tell". [I/O]"""

from typing import Annotated

import typer

from homenode.cli.options import JsonOption
from homenode.cli.terminal import console, print_json
from homenode.objective import Objective


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Results folders, the first one's layout being the baseline; or published:SYSTEM.",
        ),
    ],
    objective: Annotated[
        Objective | None,
        typer.Option(
            "--objective",
            help="What the VM is for: its metrics decide. Default: every objective's.",
        ),
    ] = None,
    bare: Annotated[
        str | None,
        typer.Option(
            "--bare",
            metavar="HOSTRUN",
            help="A run on the host itself, on the plan's PUs and nodes: percent of bare metal.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also single devices, nodes and sizes.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare layouts by their results: each metric's effect with an interval, or cannot tell.

    Runs of one layout are combined; the boot is the unit of replication.

    Examples:
      homenode compare results/h200/default results/h200/pin-numa
      homenode compare published:H200 --objective collective
    """
    from homenode.analyse.alternative import alternatives_of
    from homenode.analyse.compare import compare as compare_alternatives
    from homenode.evidence.sources import load_sources

    named = load_sources(runs if bare is None else [bare, *runs])
    chosen = alternatives_of(
        [(one.argument, one.runs) for one in named], first_alone=bare is not None
    )
    skipped = [reason for one in named for reason in one.skipped]
    comparison = compare_alternatives(chosen, objective, bare=bare is not None, skipped=skipped)
    if json:
        from homenode.formats import encode

        print_json(encode("comparison", comparison))
    else:
        from homenode.report.comparison_text import comparison_text

        console().print(comparison_text(comparison, everything=everything))
