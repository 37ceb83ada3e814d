"""homenode compare and report: recommendations from results. [I/O]"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs
from msgspec.structs import asdict

from homenode import __version__
from homenode.cli.arguments.measure import CompareArguments, ReportArguments
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    make_console,
    note,
    note_gaps,
    note_written,
    print_file,
    print_json,
    working,
    write_bytes,
    write_text,
)
from homenode.decide.alternative import Alternative, group_by_argument
from homenode.decide.compare import compare as compare_alternatives
from homenode.decide.compare import compare_machines, group_alternatives
from homenode.decide.comparison import Outcome
from homenode.decide.machine_facts import assign_runs, collect_host_facts
from homenode.decide.recommendation import (
    Recommendation,
    RecommendedComparison,
    decide_all,
    decide_for_machines,
)
from homenode.decide.summary import find_unused_results
from homenode.decide.switch_effects import file_effects
from homenode.errors import FINDINGS, NOT_KNOWN, HomenodeError, UsageError, exclusive, missing
from homenode.findings import Gap
from homenode.formats import encode
from homenode.machine.topology import Host
from homenode.measure.imported_files import load_sources
from homenode.measure.results.model import Run
from homenode.objective import Objective
from homenode.show.results_text import MAX_IN_FULL, format_comparison
from homenode.vm.sources import load_host

if TYPE_CHECKING:
    from homenode.show.report.machine import ReportedMachine


def compare(arguments: CompareArguments) -> None:
    """Print the recommendations, then each metric's effect."""
    bare = [] if arguments.bare is None else [arguments.bare]
    sources = load_sources([*bare, *arguments.runs])
    by_argument = [(results.argument, results.runs) for results in sources]
    runs = [run for results in sources for run in results.runs]
    objectives = tuple(Objective) if arguments.objective is None else (arguments.objective,)
    gaps = [gap for results in sources for gap in results.skipped]
    gaps += find_unused_results(runs, objectives)
    machines: dict[str, tuple[Alternative, ...]] = {}
    if arguments.bare is None:
        machines = group_alternatives(by_argument)
        is_brief = len(machines) > MAX_IN_FULL and not (arguments.json or arguments.everything)
        objective = arguments.objective
        compared = compare_machines(machines, objective, is_brief=is_brief)
    else:
        groups = group_by_argument(by_argument, first_alone=True)
        compared = compare_alternatives(groups, arguments.objective, bare=True)
    answers = _decide(runs, objectives, arguments.host, machines)
    files = [
        structs.replace(effect, system=name if len(machines) > 1 else "")
        for name, alternatives in machines.items()
        for effect in file_effects(alternatives)
    ]
    effects, gaps = (*compared.effects, *files), [*gaps, *compared.skipped]
    compared = structs.replace(compared, effects=effects, skipped=tuple(gaps))
    comparison = RecommendedComparison(**asdict(compared), recommendations=answers)
    if arguments.json:
        print_json(encode("comparison", comparison))
    else:
        make_console().print(format_comparison(comparison, everything=arguments.everything))
    # Effects on other machines say nothing about a named host.
    is_shown = arguments.host is None or arguments.bare is not None
    effects = comparison.effects if is_shown else ()
    tells = any(effect.outcome is not Outcome.CANNOT_TELL for effect in effects)
    if not tells and not any(answer.tells for answer in answers):
        raise SystemExit(FINDINGS if any(answer.findings for answer in answers) else NOT_KNOWN)


def _decide(
    runs: Sequence[Run],
    objectives: Sequence[Objective],
    host: str | None,
    machines: Mapping[str, Sequence[Alternative]],
) -> tuple[Recommendation, ...]:
    """Return the answers for a host, or for every machine of the runs if no host is named."""
    if host is not None:
        machine = load_host(host)
        note_gaps(machine.gaps)
        return decide_all(assign_runs(runs, machine), collect_host_facts(machine), objectives)
    this_host = _read_this_machine() if any(run.head.host is not None for run in runs) else None
    return decide_for_machines(runs, objectives, this_host, machines)


def _read_this_machine() -> Host | None:
    """Return this machine, which runs may name as their host; None if it cannot be read."""
    try:
        return load_host(None)
    except HomenodeError:
        return None


RESULTS = Path("results")
PAGE = "report.html"
_MAX_NAMED = 10


def report(arguments: ReportArguments) -> None:
    runs, output = list(arguments.runs), arguments.output
    if not runs:
        if not RESULTS.is_dir():
            raise missing("DIR", "homenode bench --results results")
        runs = [str(RESULTS)]
    if output is None and not (arguments.csv or arguments.json):
        output = _find_default_path(runs)
    if arguments.csv and arguments.json:
        raise exclusive("--csv", "--json")
    check_can_write(output, force=arguments.force)
    if (
        output is not None
        and output != STANDARD_OUTPUT
        and output.suffix.lower() not in (".html", ".htm", ".pdf")
    ):
        raise UsageError(f"-o {output}: expected a name that ends in .html or .pdf")
    machines, gaps = _read_machines(runs, arguments.host)
    if output is not None:
        _write(machines, gaps, arguments.title, output, appendix=arguments.appendix)
        if not (arguments.csv or arguments.json or output == STANDARD_OUTPUT):
            _print_summary(machines, output)
        elif output != STANDARD_OUTPUT:
            note_written(output)
    if arguments.csv or arguments.json:
        from homenode.show.report.machine import format_csv, format_json, list_rows

        rows = [row for machine in machines for row in list_rows(machine)]
        if arguments.csv:
            print_file(format_csv(rows))
        else:
            print_json(format_json(rows, gaps))


def _find_default_path(runs: Sequence[str]) -> Path:
    """The default path of a page: in the first directory of results, else in the current one."""
    directories = (Path(run) for run in runs)
    return next((directory / PAGE for directory in directories if directory.is_dir()), Path(PAGE))


def write_page(directories: list[str], host: str | None, title: str, output: Path) -> None:
    """Write the page of results of one host: a source, or this machine if the results name it."""
    machines, gaps = _read_machines(directories, [host])
    _write(machines, gaps, title, output)
    note_written(output)


def _note_queues(machines: "tuple[ReportedMachine, ...]") -> None:
    """Name the other report for jobs of queues, which have no layout."""
    from homenode.measure.results.model import Origin
    from homenode.measure.results.vantage import Vantage

    heads = [run.head for machine in machines for run in machine.runs]
    if any(head.vantage is Vantage.JOB and head.origin is not Origin.PUBLISHED for head in heads):
        note("jobs of Slurm's queues: homenode slurm report recommends queues")


def _read_machines(
    arguments: list[str], hosts: Sequence[str | None]
) -> "tuple[tuple[ReportedMachine, ...], tuple[Gap, ...]]":
    from homenode.show.report.inputs import gather
    from homenode.show.report.machine import build_machines

    with working("reading results"):
        inputs = gather(arguments, hosts)
        machines = build_machines(inputs.runs, inputs.stored, inputs.hosts)
    ordered_machines = tuple(sorted(machines, key=_place))
    if inputs.imported:
        several = "s" if inputs.imported > 1 else ""
        note(
            f"read {inputs.imported} run{several} of other tools' files; homenode import keeps them"
        )
    for host in inputs.hosts.values() if any(hosts) else ():
        note_gaps(host.gaps)
    for gap in inputs.skipped[:_MAX_NAMED]:
        note(f"skipped: {gap}")
    if len(inputs.skipped) > _MAX_NAMED:
        note(f"skipped: {len(inputs.skipped) - _MAX_NAMED} more; the report names them")
    _note_queues(ordered_machines)
    return ordered_machines, inputs.skipped


def _place(machine: "ReportedMachine") -> tuple[bool, int]:
    """Return the sort key: measured machines first, those with more layouts before others."""
    return machine.is_published, 0 if machine.is_published else -len(machine.chosen)


def _write(
    machines: "tuple[ReportedMachine, ...]",
    gaps: tuple[Gap, ...],
    title: str | None,
    output: Path,
    *,
    appendix: bool = False,
) -> None:
    from datetime import UTC, datetime

    from homenode.show.html import render_page, render_paper_html, render_pdf
    from homenode.show.report.document import build_report

    creation_time = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, homenode {__version__}"
    is_pdf = output.suffix.lower() == ".pdf"
    document = build_report(
        machines,
        gaps,
        creation_time,
        title=title,
        paper=is_pdf,
        appendix=appendix or not is_pdf,
    )
    if is_pdf:
        with working("writing the PDF"):
            pages = render_pdf(render_paper_html(document))
        write_bytes(output, pages)
    else:
        write_text(output, render_page(document))


def _print_summary(machines: "tuple[ReportedMachine, ...]", output: Path) -> None:
    from homenode.decide.health import check_results
    from homenode.show.report.answer import answer_text, format_counts

    note(f"wrote {output}: {format_counts(machines)}")
    make_console().print(answer_text(machines))
    runs = [run for machine in machines if not machine.is_published for run in machine.runs]
    for finding in check_results(runs):
        text = f"{finding.subject}: {finding.observed}; expected {finding.expected}"
        note(f"{finding.severity}: {text}")
