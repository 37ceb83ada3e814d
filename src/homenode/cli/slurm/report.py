"""homenode slurm report: what a study of bindings and queues came to. [I/O]"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.options import JsonOption
from homenode.cli.terminal import check_can_write, console, note, print_json, write_text
from homenode.errors import InputError, UsageError

if TYPE_CHECKING:
    from homenode.analyse.study_report import StudyReport


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Studies, results of homenode import, or logs."),
    ],
    everything: Annotated[bool, typer.Option("--all", help="Every map, job and gap.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write all of it as one page, FILE.html."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report a study: maps of each node, shared and whole nodes, each job's locality, which queue.

    Reads folders of homenode slurm study, also while it runs; folders that homenode import
    wrote; and logs of nvbandwidth named exclusive_… and shared_….

    Examples:
      homenode slurm report study
      homenode slurm report study -o study.html
    """
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {output}: expected a name that ends in .html")
    if output is not None and as_json:
        raise UsageError("give either -o or --json, not both")
    check_can_write(output)
    made = _made(folders)
    if output is not None:
        _write(made, output)
        return
    if as_json:
        from homenode.formats import encode

        print_json(encode("slurm-report", made))
        return
    from homenode.report.slurm_study import slurm_study_text

    console().print(slurm_study_text(made, everything=everything))


def _write(made: "StudyReport", output: Path) -> None:
    from datetime import UTC, datetime

    from homenode import __version__
    from homenode.report.html import html_page
    from homenode.report.slurm_study import slurm_study_page

    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, homenode {__version__}"
    write_text(output, html_page(slurm_study_page(made, when)))
    note(f"wrote {output}")


def _made(folders: list[Path]) -> "StudyReport":
    from homenode.analyse.study_report import study_report
    from homenode.measure.bindings.folder import read_sources

    found = read_sources(folders)
    if not found.jobs and not found.missing:
        raise InputError(
            f"{', '.join(map(str, folders))}: expected jobs of a study, found none",
            hint="homenode slurm study makes them; logs are named exclusive_… and shared_…",
        )
    source = ", ".join(map(str, folders))
    return study_report(source, found.jobs, found.collective, found.missing, found.gaps)
