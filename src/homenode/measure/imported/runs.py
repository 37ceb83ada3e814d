"""Imported: other tools' files as runs: a folder of the study's, or files of one series."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from homenode.errors import InputError
from homenode.gap import Gap
from homenode.measure.figures.sample import Figures, joined
from homenode.measure.figures.tool_log import lenient, tool_of
from homenode.measure.imported import study_folder
from homenode.results.model import (
    CPU_ONLY,
    GPU_UNKNOWN,
    Origin,
    Run,
    RunHead,
    Switches,
    system_of,
)
from homenode.results.vantage import Vantage

_REPEATED = re.compile(r"[_-]?(?:run|rep)[_-]?\d+\Z", re.I | re.A)
_OF_NODE = re.compile(r"[_-]?(?:node|numa)[_-]?\d+\Z", re.I | re.A)
_BINDING = "memory binding"
_GPU_METRIC = re.compile(r"(?:allreduce|h2d|d2h|d2d|p2p|matmul|nvbandwidth:|.*-busbw)")
_MAX_PATTERN = 120
_MADE_UP = "# synthesised"
_RESULTS_FOLDERS = frozenset({"results", "data", ""})


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """One folder's files. path: as people call it, from the named folder on, "/" between names.

    above: the name of the folder above it. texts: by file name.
    """

    path: str
    name: str
    above: str
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the user knows and the files do not say. layouts: switches by run name."""

    system: str | None = None
    host_kind: str | None = None
    vantage: Vantage | None = None
    layouts: Mapping[str, Switches] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Imported:
    """One run, the files that it was read from, and what they left open."""

    run: Run
    files: tuple[str, ...]
    gaps: tuple[Gap, ...]


def imported_runs(folders: Iterable[SourceFolder], options: ImportOptions) -> tuple[Imported, ...]:
    """The runs of these folders, in order, each with a name of its own.

    Raises InputError for a layout of a run that is not there.
    """
    drafts = [draft for folder in folders for draft in _of_folder(folder, options)]
    places = [(draft.head.system, draft.head.name) for draft in drafts]
    short = [_by_folder(draft, is_whole_path=False) for draft in drafts]
    names = [(draft.head.system, draft.head.name) for draft in short]
    drafts = [
        draft
        if places.count(place) == 1
        else one
        if names.count(name) == 1
        else _by_folder(draft, is_whole_path=True)
        for draft, place, one, name in zip(drafts, places, short, names, strict=True)
    ]
    layouts = _layouts(options.layouts, [draft.head.name for draft in drafts])
    return tuple(_finished(draft, layouts.get(draft.head.name)) for draft in drafts)


def _layouts(asked: Mapping[str, Switches], names: Sequence[str]) -> dict[str, Switches]:
    """The layout of each run that the user named, by its name or by a pattern with * and ?."""
    found: dict[str, Switches] = {}
    by_pattern: dict[str, str] = {}
    for pattern, switches in asked.items():
        matching = [name for name in names if name == pattern]
        is_exact = bool(matching)
        if not is_exact and len(pattern) <= _MAX_PATTERN:
            matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise InputError(
                f"--layout {pattern}=…: expected a run's name, found none such",
                hint=f"runs: {', '.join(sorted(set(names))) or 'none'}",
            )
        for name in matching:
            if not is_exact and name in asked:
                continue  # named itself
            if by_pattern.setdefault(name, pattern) != pattern and found[name] != switches:
                raise InputError(
                    f"--layout {pattern}=…: expected one layout of run {name}, found another by "
                    f"{by_pattern[name]}"
                )
            found[name] = switches
    return found


@dataclass(frozen=True, slots=True)
class _Draft:
    """A run before its last name and layout. files: names that it was read from."""

    head: RunHead
    folder: SourceFolder
    files: tuple[str, ...]
    figures: Figures
    is_study: bool


def _of_folder(folder: SourceFolder, options: ImportOptions) -> Iterator[_Draft]:
    names = frozenset(folder.texts)
    rest = dict(folder.texts)
    if study_folder.is_study_folder(names):
        yield _study(folder, options)
        rest = {n: t for n, t in rest.items() if n not in study_folder.FILES}
    groups: dict[str, dict[str, Figures]] = {}
    for name in sorted(rest):
        tool = tool_of(rest[name])
        if tool is not None:
            figures = lenient(tool, rest[name], name)
            groups.setdefault(_group(name, _is_bound(figures)), {})[name] = figures
    for group, parts in groups.items():
        yield _logs(folder, group, tuple(parts), joined(parts.values()), options)


def unread_files(folder: SourceFolder) -> Iterator[Gap]:
    """Files of which nothing is taken, and why."""
    is_study = study_folder.is_study_folder(frozenset(folder.texts))
    for name, text in sorted(folder.texts.items()):
        if is_study and (name in study_folder.FILES or name in study_folder.NOT_READ):
            continue
        if tool_of(text) is None:
            yield Gap(f"{folder.path}/{name}", "not the output of a tool that is read")


def _study(folder: SourceFolder, options: ImportOptions) -> _Draft:
    figures = study_folder.figures_of_study(folder.texts)
    above = "" if folder.above in _RESULTS_FOLDERS else folder.above
    head = RunHead(
        folder.name,
        options.system or above or _system(figures),
        _origin(folder.texts.values()),
        options.vantage or Vantage.GUEST,
        study_folder.switches_of(folder.name),
        host_kind=options.host_kind,
        vcpus=study_folder.vcpus_of(folder.texts),
        conditions=figures.conditions,
        source=folder.path,
    )
    read = tuple(sorted(set(folder.texts) & study_folder.FILES))
    return _Draft(head, folder, read, figures, is_study=True)


def _logs(
    folder: SourceFolder,
    group: str,
    files: tuple[str, ...],
    figures: Figures,
    options: ImportOptions,
) -> _Draft:
    vantage = options.vantage or (Vantage.JOB if _is_bound(figures) else Vantage.HOST)
    if options.vantage is None:
        reason = f"no one said where the tools ran; taken for a {vantage} (--vantage)"
        figures = replace(figures, gaps=(*figures.gaps, Gap("vantage", reason)))
    head = RunHead(
        group,
        options.system or _system(figures),
        _origin(folder.texts[name] for name in files),
        vantage,
        study_folder.switches_of(folder.name),
        host_kind=options.host_kind,
        host_addresses=vantage is not Vantage.GUEST,
        conditions=figures.conditions,
        source=folder.path,
    )
    return _Draft(head, folder, files, figures, is_study=False)


def _finished(draft: _Draft, layout: Switches | None) -> Imported:
    """The run under the layout that the user names, else the one that its folder is named for."""
    head = draft.head if layout is None else replace(draft.head, switches=layout)
    if draft.is_study:
        texts = draft.folder.texts
        contradictions = tuple(study_folder.contradictions(texts, head.switches))
        head = replace(head, unusable=contradictions)
    gaps = draft.figures.gaps
    if head.switches.name == "unknown":
        gaps = (*gaps, Gap("layout", "no one said which it was (--layout NAME=PRESET)"))
    gaps += tuple(Gap("unusable", reason) for reason in head.unusable)
    gaps += tuple(
        Gap(finding.id, f"{finding.subject}: {finding.observed}")
        for finding in draft.figures.findings
    )
    paths = tuple(f"{draft.folder.path}/{name}" for name in draft.files)
    return Imported(Run(head, draft.figures.samples), paths, gaps)


def _system(figures: Figures) -> str:
    """The folder's name of the machine: its GPU."""
    if figures.gpu_names:
        return system_of(figures.gpu_names[0])
    has_gpu = any(_GPU_METRIC.match(sample.metric) for sample in figures.samples)
    return GPU_UNKNOWN if has_gpu else CPU_ONLY


def _origin(texts: Iterable[str]) -> Origin:
    """Made-up files say so in a line of their heads, and keep saying so as results."""
    marked = any(line.startswith(_MADE_UP) for text in texts for line in text.split("\n", 8)[:8])
    return Origin.SYNTHESISED if marked else Origin.IMPORTED


def _is_bound(figures: Figures) -> bool:
    """Whether its log says how the process was bound."""
    return any(condition.name == _BINDING for condition in figures.conditions)


def _group(name: str, is_bound: bool) -> str:
    """What files of one series have in common: a log for each node, or for each repeat.

    Files of several nodes are one series only where each says its node: else figures of one node
    would pass for repeats of another's.

    >>> _group("exclusive_4gpu_node3.txt", True), _group("exclusive_4gpu_node3.txt", False)
    ('exclusive_4gpu', 'exclusive_4gpu_node3')
    >>> _group("all_reduce_8_run2.log", False), _group("run1", False)
    ('all_reduce_8', 'run1')
    """
    stem = name.rpartition(".")[0] or name
    short = _REPEATED.sub("", stem)
    short = _OF_NODE.sub("", short) if is_bound else short
    return _name(short or stem)


def _name(text: str) -> str:
    return "".join(c if c.isprintable() and c != "/" else "-" for c in text).strip(".")[:120] or "-"


def _by_folder(draft: _Draft, *, is_whole_path: bool) -> _Draft:
    """With the folder in its name, or the path to it: two folders hold files of one name."""
    folder = draft.folder.path.replace("/", "-") if is_whole_path else draft.folder.name
    name = folder if draft.head.name == draft.folder.name else f"{folder}-{draft.head.name}"
    return replace(draft, head=replace(draft.head, name=_name(name)))
