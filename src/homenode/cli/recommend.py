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
        typer.Option("--objective", help="What the VM is for. Repeatable. Default: every one."),
    ] = None,
    host: HostOption = None,
    lspci: LspciOption = None,
    notes: Annotated[
        bool, typer.Option("--notes", help="Also what is wrong with published figures.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Say which layout to run for each objective, on what evidence, and what to measure next.

    With --host, for that host: by results of it, of its kind, published ones, or its topology.

    Examples:
      homenode recommend
      homenode recommend results --host this-host.tar.gz --objective collective
    """
    from homenode.analyse.decide import decide_all, decide_for_machines
    from homenode.analyse.machine_facts import facts_of_host, of_host
    from homenode.analyse.verdict import Verdicts
    from homenode.evidence.documents import publications
    from homenode.evidence.model import Evidence
    from homenode.evidence.sources import load_sources, published_hosts
    from homenode.sources import load_host

    wanted = tuple(objective or Objective)
    named = load_sources(runs or [])
    loaded = tuple(run for one in named for run in one.runs)
    if host is not None or lspci is not None:
        machine = load_host(host, lspci=lspci)
        evidence = Evidence(publications(), of_host(loaded, machine))
        found = decide_all(evidence, facts_of_host(machine, publications()), wanted)
    else:
        printed = None if not loaded else {run.head.system for run in loaded}
        hosts = published_hosts(printed)
        found = decide_for_machines(Evidence(publications(), loaded), hosts, wanted)
    verdicts = Verdicts(found, tuple(reason for one in named for reason in one.skipped))
    if json:
        from homenode.formats import encode

        print_json(encode("verdict", verdicts))
    else:
        from homenode.report.verdict_text import verdicts_text

        console().print(verdicts_text(verdicts, notes=notes))
