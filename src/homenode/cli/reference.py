"""homenode layouts, hosts, explain: what layouts, shipped hosts and findings are. [I/O]"""

from typing import Annotated

import typer

from homenode.cli.completion import finding_ids
from homenode.cli.terminal import console, say
from homenode.errors import InputError


def layouts() -> None:
    """List the layouts: what each changes in a VM, and its name in the published study.

    Examples:
      homenode layouts
      homenode plan VM.xml --layout pin-numa
    """
    from homenode.doc import Doc, Table
    from homenode.vm.layout import PRESETS, STUDY_NAMES, SUMMARIES

    say("auto: what the evidence recommends for the VM (the default)\n")
    for name, summary in SUMMARIES.items():
        also = [study for study, preset in STUDY_NAMES.items() if preset == name]
        say(f"{name}: {summary}" + (f" (study: {', '.join(also)})" if also else ""))
    rows = tuple(
        (
            preset.name,
            preset.pinning.replace("-", " ").replace("pu", "PU"),
            *(
                "-" if switch in ("as-it-was", "as-they-were") else switch.replace("bound-", "")
                for switch in (preset.siblings, preset.cells, preset.pcie, preset.memory)
            ),
        )
        for preset in PRESETS.values()
    )
    say("")
    columns = ("layout", "pinning", "siblings", "cells", "PCIe", "memory")
    console().print(Doc("", (Table(heads=columns, rows=rows),)))
    say("-: as the domain has it; per-cell: each guest cell's memory on its own host node")
    say("-smt layouts double the vCPUs on the same cores; --keep-vcpus halves the cores.")


def hosts() -> None:
    """List the hosts that come with homenode, for --host.

    Examples:
      homenode hosts
      homenode show --host hgx-h100
    """
    from homenode.description.shipped import load_shipped, shipped_hosts
    from homenode.doc import Doc, Table

    rows = tuple((name, load_shipped(name).about) for name in shipped_hosts())
    heads = ("name", "what it is")
    console().print(Doc("", (Table(heads=heads, rows=rows, folds=heads[-1:]),)))


def explain(
    finding: Annotated[
        str,
        typer.Argument(
            metavar="FINDING-ID",
            help="An id as `homenode doctor` prints it: pcie-link-narrow.",
            autocompletion=finding_ids,
        ),
    ],
) -> None:
    """Explain a finding: what it means, how it is measured, what it costs and how to fix it.

    Examples:
      homenode explain pcie-link-narrow
      homenode explain pcie-link-slow
    """
    from rich.markdown import Markdown

    from homenode.catalogue import catalogue
    from homenode.wording import did_you_mean

    known = catalogue()
    if finding not in known:
        raise InputError(
            f"{finding}: expected the id of a finding, found none of that name",
            hint=f"{did_you_mean(finding, known)}each finding ends with its id in brackets",
        )
    text = known[finding].text
    if console().is_terminal:
        console().print(Markdown(text))
    else:
        say(text.rstrip())
