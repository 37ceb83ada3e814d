"""homenode recommend: one verdict per objective, from the best evidence there is. [I/O]"""

from typing import Annotated

import typer

from homenode.cli.options import HostOption, JsonOption, LspciOption
from homenode.cli.terminal import console, print_json
from homenode.objective import Objective


def recommend(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Results folders, or published:SYSTEM. Default: published."
        ),
    ] = None,
    objective: Annotated[
        list[Objective] | None,
        typer.Option(help="What the VM is for; may be repeated. Default: every one."),
    ] = None,
    host: HostOption = None,
    lspci: LspciOption = None,
    notes: Annotated[
        bool, typer.Option("--notes", help="Also what is wrong with published figures.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Say which layout to run for each objective, on what evidence, and what to measure next.

    With --host, for that host: from its own results, its kind's, published ones, or its topology.
    """
    from homenode.analyse.recommend import for_host, from_published, from_results
    from homenode.analyse.verdict import Verdicts
    from homenode.evidence.documents import published_evidence
    from homenode.evidence.sources import load_sources

    wanted = tuple(objective or Objective)
    named = load_sources(runs or [])
    loaded = [run for one in named for run in one.runs]
    evidence = published_evidence()
    if host is not None or lspci is not None:
        from homenode.sources import load_host

        found = for_host(load_host(host, lspci=lspci), loaded, wanted, evidence)
    elif loaded:
        found = from_results(loaded, wanted, evidence)
    else:
        found = from_published(evidence, wanted)
    verdicts = Verdicts(found, tuple(reason for one in named for reason in one.skipped))
    if json:
        from homenode.formats import encode

        print_json(encode("verdict", verdicts))
    else:
        from homenode.report.verdict_text import verdicts_text

        console().print(verdicts_text(verdicts, notes=notes))
