"""homenode slurm report: what a study of bindings and queues came to. [I/O]"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from homenode import __version__
from homenode.cli.arguments.slurm import SlurmReportArguments
from homenode.cli.terminal import check_can_write, console, note, print_json, write_text
from homenode.cluster.bindings.folder import read_sources
from homenode.cluster.bindings.study_report import StudyReport, study_report
from homenode.errors import InputError, UsageError
from homenode.formats import encode
from homenode.show.html import html_page
from homenode.show.slurm_study import slurm_study_page, slurm_study_text


def report(asked: SlurmReportArguments) -> None:
    """Print the study, or write its page."""
    if asked.output is not None and asked.output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {asked.output}: expected a name that ends in .html")
    if asked.output is not None and asked.json:
        raise UsageError("give either -o or --json, not both")
    check_can_write(asked.output)
    made = _made(asked.folders)
    if asked.output is not None:
        _write(made, asked.output)
        return
    if asked.json:
        print_json(encode("slurm-report", made))
        return

    console().print(slurm_study_text(made, everything=asked.everything))


def _write(made: StudyReport, output: Path) -> None:
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, homenode {__version__}"
    write_text(output, html_page(slurm_study_page(made, when)))
    note(f"wrote {output}")


def _made(folders: Sequence[Path]) -> StudyReport:
    found = read_sources(folders)
    if not found.jobs and not found.missing:
        raise InputError(
            f"{', '.join(map(str, folders))}: expected jobs of a study, found none",
            hint="homenode slurm study makes them; logs are named exclusive_… and shared_…",
        )
    source = ", ".join(map(str, folders))
    return study_report(source, found.jobs, found.collective, found.missing, found.gaps)
