"""homenode import: convert other tools' outputs to results. [I/O]"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from msgspec import Struct

from homenode.cli.arguments.measure import ImportArguments
from homenode.cli.terminal import make_console, note, note_gaps, print_json
from homenode.decide.health import check_results
from homenode.doc import Doc, Part, Table, Text
from homenode.errors import InputError, UsageError
from homenode.findings import Gap
from homenode.formats import encode
from homenode.measure.imported_files import find_sources
from homenode.measure.imported_runs import (
    ImportOptions,
    RunWithSources,
    build_runs,
    list_unread,
)
from homenode.measure.results.model import Switches, host_kind
from homenode.measure.results.store import FILE, run_directory, write_run
from homenode.text import format_subjects, plural
from homenode.vm.layout import PRESETS, find_preset
from homenode.vm.sources import load_host

_SHOWN = 20


class ImportedRun(Struct, frozen=True, kw_only=True):
    system: str
    name: str
    layout: str
    vantage: str
    samples: int  # how many
    metrics: tuple[str, ...]
    files: tuple[str, ...]
    gaps: tuple[Gap, ...]  # facts that are missing in the files


class ImportedRuns(Struct, frozen=True, kw_only=True):
    directory: str
    written: bool  # False of a dry run
    runs: tuple[ImportedRun, ...]
    omitted: tuple[Gap, ...]


def import_results(arguments: ImportArguments) -> None:
    sources = find_sources(arguments.directories)
    host = None if arguments.machine is None else load_host(arguments.machine)
    options = ImportOptions(
        system=arguments.system,
        host_kind=arguments.host_kind or (None if host is None else host_kind(host)),
        host=None if host is None else host.fingerprint,
        vantage=arguments.vantage,
        layouts=_parse_layouts(arguments.layout),
        order=tuple(filter(None, (arguments.order or "").split(","))),
    )
    runs = build_runs(sources.directories, options)
    gaps = list(sources.skipped)
    gaps += [gap for directory in sources.directories for gap in list_unread(directory)]
    with_figures = tuple(run for run in runs if run.run.samples)
    head = ""
    if with_figures:
        _check_places(with_figures, arguments.output)
        samples = sum(len(run.run.samples) for run in with_figures)
        if not arguments.dry_run:
            for run in with_figures:
                write_run(arguments.output, run.run)
        verb = "would write" if arguments.dry_run else "wrote"
        counts = f"{plural(len(with_figures), 'run')}, {plural(samples, 'sample')}"
        head = f"{verb} {arguments.output}: {counts}"
    if arguments.json:
        is_written = bool(with_figures) and not arguments.dry_run
        print_json(encode("imported-runs", _answer(runs, gaps, arguments, is_written=is_written)))
        note(head)
    else:
        make_console().print(_build_screen(head, runs, gaps, everything=arguments.everything))
    note_gaps(() if host is None else host.gaps)
    if not with_figures:
        names = ", ".join(map(str, arguments.directories))
        if runs:
            raise InputError(
                f"{names}: no result of the tools can be used",
                hint="the reasons are above; run these tools again",
            )
        raise InputError(
            f"{names}: no outputs of measuring tools",
            hint="homenode import logs/ -o results",
        )


def _answer(
    runs: tuple[RunWithSources, ...],
    gaps: Sequence[Gap],
    arguments: ImportArguments,
    *,
    is_written: bool,
) -> ImportedRuns:
    answers = tuple(
        ImportedRun(
            system=run.run.head.system,
            name=run.run.head.name,
            layout=run.run.head.switches.name,
            vantage=str(run.run.head.vantage),
            samples=len(run.run.samples),
            metrics=tuple(dict.fromkeys(sample.metric for sample in run.run.samples)),
            files=run.files,
            gaps=run.gaps,
        )
        for run in runs
    )
    return ImportedRuns(
        directory=str(arguments.output), written=is_written, runs=answers, omitted=tuple(gaps)
    )


def _parse_layouts(texts: Sequence[str]) -> dict[str, Switches]:
    layouts = {}
    for text in texts:
        name, is_pair, layout = text.partition("=")
        preset = find_preset(layout)
        if not is_pair or not name or preset is None:
            raise UsageError(
                f"--layout {text}: expected NAME=PRESET", hint=f"presets: {', '.join(PRESETS)}"
            )
        if name in layouts:
            raise UsageError(f"--layout {text}: expected each run once")
        layouts[name] = Switches.from_layout(preset)
    return layouts


def _check_places(runs: tuple[RunWithSources, ...], output: Path) -> None:
    """Raise if a run exists already, or two runs would have the same directory."""
    paths = [run_directory(output, run.run.head.system, run.run.head.name) / FILE for run in runs]
    for path in paths:
        if path.exists():
            raise UsageError(
                f"{path}: a run of this name exists",
                hint="choose another directory with -o, another --system, or remove it",
            )
        if paths.count(path) > 1:
            raise InputError(
                f"{path}: expected one run of this name, found {paths.count(path)}",
                hint="import the directories one by one, each with its own --system",
            )


def _build_screen(
    head: str, runs: tuple[RunWithSources, ...], gaps: list[Gap], *, everything: bool
) -> Doc:
    rows = tuple(
        (
            _name(run),
            run.run.head.switches.name,
            str(run.run.head.vantage),
            str(len(run.run.samples)),
            str(len({sample.metric for sample in run.run.samples})),
            str(len(run.files)),
        )
        for run in runs
    )
    heads = ("run", "layout", "vantage", "samples", "metrics", "files")
    table = Table(heads=heads, rows=rows, numeric=heads[3:], least=heads[2:3], shortened=True)
    runs_of_gap: dict[Gap, list[str]] = {}
    for run in runs:
        for gap in run.gaps:
            runs_of_gap.setdefault(gap, []).append(_name(run))
    subjects_of: dict[str, list[str]] = {}
    for gap in gaps:
        subjects_of.setdefault(gap.reason, []).append(gap.subject)
    labels = {
        "by node": list(_format_node_results(runs)),
        "warning": [
            f"{problem.subject}: {problem.observed}; expected {problem.expected}"
            for problem in check_results([run.run for run in runs])
        ],
        "not read": [f"{format_subjects(s)}: {reason}" for reason, s in subjects_of.items()],
        "unknown": [
            f"{names[0] if len(names) == 1 else f'{len(names)} runs'}: {gap}"
            for gap, names in runs_of_gap.items()
        ],
    }
    parts: list[Part] = [table]
    for label, lines in labels.items():
        limit = len(lines) if everything else _SHOWN
        more = [f"{len(lines) - limit} more (--all)"] if lines[limit:] else []
        for line in (*lines[:limit], *more):
            parts.append(Text(f"{label:<10}{line}", _LOOKS.get(label, ""), hang=10))
    return Doc(head, tuple(parts))


_LOOKS = dict.fromkeys(("warning", "not read", "unknown"), "warn")


def _name(run: RunWithSources) -> str:
    return f"{run.run.head.system}/{run.run.head.name}"


def _format_node_results(runs: tuple[RunWithSources, ...]) -> Iterator[str]:
    """Yield a line for each metric of a run that was measured from several nodes."""
    for run in runs:
        rates: dict[str, dict[int, list[float]]] = {}
        for sample in run.run.samples:
            if sample.node is not None and sample.unit == "bytes_per_s":
                title = " ".join(filter(None, (sample.metric, sample.variant)))
                rates.setdefault(title, {}).setdefault(sample.node, []).append(sample.value)
        for title, by_node in rates.items():
            nodes = ", ".join(
                f"{median(values) / 1e9:.1f} GB/s from node {node}"
                for node, values in sorted(by_node.items())
            )
            if len(by_node) > 1:
                yield f"{_name(run)}: {title}: {nodes}"
