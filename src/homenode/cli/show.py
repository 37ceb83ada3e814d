"""homenode show: the host as a tree and as a picture. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.options import ForceOption, HostOption, JsonOption, LspciOption
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    console,
    note_written,
    print_json,
    write_text,
)
from homenode.errors import UsageError
from homenode.input_files import read_input


def show(
    host: HostOption = None,
    lspci: LspciOption = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the host here, as SVG.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="PLAN.json",
            help="With --svg: draw the VM of this saved plan as well.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every PCI function and every gap.")
    ] = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Show a host: nodes, LLCs, cores, memory, the PCI tree, links, and the VMs on it.

    Examples:
      homenode show
      homenode show --host hgx-h100 --svg host.svg
    """
    from homenode.sources import load_host

    if plan is not None and svg is None:
        raise UsageError("--plan: expected --svg as well, found none")
    if json and svg == STANDARD_OUTPUT:
        raise UsageError("give either --json or --svg -, not both")
    check_can_write(svg, force=force)
    loaded = load_host(host, lspci=lspci)
    if svg is not None:
        from homenode.plan.stored import read_plan_for
        from homenode.report.topology_map import topology_map

        drawn = (
            None
            if plan is None
            else read_plan_for(loaded, read_input(plan, "a saved plan"), str(plan))
        )
        write_text(svg, topology_map(loaded, drawn))
        note_written(svg)
    if json:
        from homenode.formats import encode
        from homenode.topology import summarise

        print_json(encode("host", loaded, {"summary": summarise(loaded)}))
    elif svg is None:
        from homenode.report.host_tree import host_tree

        console().print(host_tree(loaded, everything))
