"""Imported: other tools' files as runs: a directory of the study's, or files of one series.

The study's scripts write results/<gpu>/<config>/:

    metadata.json  cpu_single.txt  cpu_all.txt  stream.txt  stream_numa_local.txt  …_remote.txt
    mem_latency.txt  gpu_compute.txt  gpu_bandwidth.txt  nccl_allreduce.txt  numa_topology.txt
    cpu_topology.txt (lscpu)  hugepages.txt (of /proc/meminfo)

Source: run_vcpu_benchmark.sh of revision 8476fab. Facts that only the script has:

* "local" and "remote" are memory bound to node 0 and to node 1, with threads on all nodes.
* Collectives ran with P2P switched off, ring and simple; if no GPU had a node, on CPUs and memory
of node 0. A guest with cells and no expander buses is an example.
* One sample of each CPU test; gpu_bandwidth.txt holds five runs under "# run N".
* summary.csv is derived from the others, and may be stale: it is not read. hugepages.txt is the
  guest's own pool and not its backing.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.errors import InputError, ParseError
from homenode.findings import Gap
from homenode.machine.tools import lines, numactl, study_programs
from homenode.measure import gpu_tool_samples
from homenode.measure.importers import cuda_bandwidth_test, stream, sysbench
from homenode.measure.model import MeasuredSamples, Reader, SampleBuilder, join_samples, sample
from homenode.measure.results.model import (
    CPU_ONLY,
    GPU_UNKNOWN,
    UNKNOWN_SWITCHES,
    Condition,
    Origin,
    Run,
    RunHead,
    Switches,
    name_system,
)
from homenode.measure.results.vantage import Vantage
from homenode.measure.step_reading import read_or_report, read_tool_results, recognize_tool
from homenode.units import MIB, parse_whole
from homenode.vm.layout import PRESETS, GuestCells, Siblings

_REPEATED = re.compile(r"[_-]?(?:run|rep)[_-]?\d+\Z", re.I | re.A)
_OF_NODE = re.compile(r"[_-]?(?:node|numa)[_-]?\d+\Z", re.I | re.A)
_BINDING = "memory binding"
_GPU_METRIC = re.compile(r"(?:allreduce|h2d|d2h|d2d|p2p|matmul|nvbandwidth:|.*-busbw)")
_MAX_PATTERN = 120
_MADE_UP = "# synthesised"
_RESULTS_DIRECTORIES = frozenset({"results", "data", ""})


class SourceDirectory(Struct, frozen=True):
    path: str  # as people call it, from the named directory on, "/" between names
    name: str
    above: str  # the name of the directory above it
    texts: Mapping[str, str]  # by file name
    # when each was last written, seconds since 1970 (UTC), as far as it is known
    times: Mapping[str, float] = field(default_factory=dict)


class ImportOptions(Struct, frozen=True):
    """Facts from the user that the files lack."""

    system: str | None = None
    host_kind: str | None = None
    host: str | None = None  # fingerprint of the machine
    vantage: Vantage | None = None
    layouts: Mapping[str, Switches] = field(default_factory=dict)  # switches by run name
    # names of all runs in the order in which they were measured; () = by the files' times
    order: tuple[str, ...] = ()


class RunWithSources(Struct, frozen=True):
    """A run, its source files, and their unknown facts."""

    run: Run
    files: tuple[str, ...]
    gaps: tuple[Gap, ...]


def build_runs(
    directories: Iterable[SourceDirectory], options: ImportOptions
) -> tuple[RunWithSources, ...]:
    """The runs of these directories, in order, each with a name of its own. Raises InputError for a
    layout of a run that is not there, and for an order that does not name each run once."""
    drafts = [draft for directory in directories for draft in _draft_directory(directory, options)]
    places = [(draft.head.system, draft.head.name) for draft in drafts]
    short = [_add_directory(draft, is_whole_path=False) for draft in drafts]
    names = [(draft.head.system, draft.head.name) for draft in short]
    drafts = [
        draft
        if places.count(place) == 1
        else run
        if names.count(name) == 1
        else _add_directory(draft, is_whole_path=True)
        for draft, place, run, name in zip(drafts, places, short, names, strict=True)
    ]
    last = [draft.head.name for draft in drafts]
    layouts = _match_layouts(options.layouts, last)
    positions = _find_positions(options.order, last)
    return tuple(
        _finish(draft, layouts.get(draft.head.name), positions.get(draft.head.name), options)
        for draft in drafts
    )


def _find_positions(order: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return the position of each run in the user's order; empty without one. A word matches the
    run of that name, and the runs whose names begin with it: one for each tool of a boot."""
    word_of = {
        name: max((w for w in order if f"{name}-".startswith(f"{w}-")), key=len, default="")
        for name in names
    }
    if order and (set(word_of.values()) != set(order) or len(set(order)) < len(order)):
        raise InputError(
            f"--order: expected each run once, found {', '.join(order)}",
            hint=f"runs: {', '.join(names) or 'none'}",
        )
    return {name: order.index(word) for name, word in word_of.items() if order}


def _match_layouts(patterns: Mapping[str, Switches], names: Sequence[str]) -> dict[str, Switches]:
    """The layout of each run that the user named, by its name or by a pattern with * and ?."""
    layouts: dict[str, Switches] = {}
    by_pattern: dict[str, str] = {}
    for pattern, switches in patterns.items():
        matching = [name for name in names if name == pattern]
        is_exact = bool(matching)
        if not is_exact and len(pattern) <= _MAX_PATTERN:
            matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise InputError(
                f"--layout: no run named {pattern}",
                hint=f"runs: {', '.join(sorted(set(names))) or 'none'}",
            )
        for name in matching:
            if not is_exact and name in patterns:
                continue  # named itself
            if by_pattern.setdefault(name, pattern) != pattern and layouts[name] != switches:
                raise InputError(
                    f"--layout {pattern}=…: expected one layout of run {name}, found another by "
                    f"{by_pattern[name]}"
                )
            layouts[name] = switches
    return layouts


class _Draft(Struct, frozen=True):
    """A run before its last name and layout."""

    head: RunHead
    directory: SourceDirectory
    files: tuple[str, ...]  # names that it was read from
    results: MeasuredSamples
    is_study: bool


def _draft_directory(directory: SourceDirectory, options: ImportOptions) -> Iterator[_Draft]:
    names = frozenset(directory.texts)
    texts = dict(directory.texts)
    if is_study_directory(names):
        yield _draft_study(directory, options)
        texts = {n: t for n, t in texts.items() if n not in FILES}
    groups: dict[str, dict[str, MeasuredSamples]] = {}
    for name in sorted(texts):
        tool = recognize_tool(texts[name])
        if tool is not None:
            results = read_or_report(tool, texts[name], name)
            groups.setdefault(_group(name, _is_bound(results)), {})[name] = results
    for group, parts in groups.items():
        yield _draft_logs(directory, group, tuple(parts), join_samples(parts.values()), options)


def list_unread(directory: SourceDirectory) -> Iterator[Gap]:
    """Yield files that were not imported, with the reason."""
    is_study = is_study_directory(frozenset(directory.texts))
    for name, text in sorted(directory.texts.items()):
        if is_study and (name in FILES or name in NOT_READ):
            continue
        if recognize_tool(text) is None:
            yield Gap(f"{directory.path}/{name}", "not the output of a tool that is read")


def _draft_study(directory: SourceDirectory, options: ImportOptions) -> _Draft:
    results = read_study_results(directory.texts)
    parent = "" if directory.above in _RESULTS_DIRECTORIES else directory.above
    head = RunHead(
        directory.name,
        options.system or parent or _name_system(results),
        _find_origin(directory.texts.values()),
        options.vantage or Vantage.GUEST,
        parse_switches(directory.name),
        vcpus=count_vcpus(directory.texts),
        conditions=results.conditions,
        source=directory.path,
    )
    read = tuple(sorted(set(directory.texts) & FILES))
    return _Draft(head, directory, read, results, is_study=True)


def _draft_logs(
    directory: SourceDirectory,
    group: str,
    files: tuple[str, ...],
    results: MeasuredSamples,
    options: ImportOptions,
) -> _Draft:
    vantage = options.vantage or (Vantage.JOB if _is_bound(results) else Vantage.HOST)
    if options.vantage is None:
        reason = f"not recorded; assumed to be a {vantage} (--context)"
        results = replace(results, gaps=(*results.gaps, Gap("vantage", reason)))
    head = RunHead(
        group,
        options.system or _name_system(results),
        _find_origin(directory.texts[name] for name in files),
        vantage,
        parse_switches(directory.name),
        host_addresses=vantage is not Vantage.GUEST,
        conditions=results.conditions,
        source=directory.path,
    )
    return _Draft(head, directory, files, results, is_study=False)


def _finish(
    draft: _Draft, layout: Switches | None, place: int | None, options: ImportOptions
) -> RunWithSources:
    """Return the run under the layout that the user names, else that of its directory's name."""
    times = [draft.directory.times[name] for name in draft.files if name in draft.directory.times]
    head = replace(
        draft.head,
        switches=draft.head.switches if layout is None else layout,
        host_kind=options.host_kind,
        host=options.host,
        started_s=min(times, default=None),
        ended_s=max(times, default=None),
        of_files=bool(times),
        place=place,
        hardware=(*_list_processors(draft.directory.texts), *draft.results.gpu_names),
    )
    if draft.is_study:
        texts = draft.directory.texts
        head = replace(head, unusable=tuple(find_contradictions(texts, head.switches)))
    gaps = draft.results.gaps
    if head.switches.name == "unknown":
        gaps = (*gaps, Gap("layout", "not recorded (--layout NAME=PRESET)"))
    gaps += tuple(Gap("unusable", reason) for reason in head.unusable)
    gaps += tuple(
        Gap(finding.id, f"{finding.subject}: {finding.observed}")
        for finding in draft.results.findings
    )
    paths = tuple(f"{draft.directory.path}/{name}" for name in draft.files)
    return RunWithSources(Run(head, draft.results.samples), paths, gaps)


def _name_system(results: MeasuredSamples) -> str:
    """Return the directory's name of the machine: its GPU."""
    if results.gpu_names:
        return name_system(results.gpu_names[0])
    has_gpu = any(_GPU_METRIC.match(sample.metric) for sample in results.samples)
    return GPU_UNKNOWN if has_gpu else CPU_ONLY


def _find_origin(texts: Iterable[str]) -> Origin:
    """Return the origin: synthetic files are marked in their heads, and stay marked as results."""
    marked = any(line.startswith(_MADE_UP) for text in texts for line in text.split("\n", 8)[:8])
    return Origin.SYNTHESISED if marked else Origin.IMPORTED


def _is_bound(results: MeasuredSamples) -> bool:
    """Return whether the log has the binding of its process."""
    return any(condition.name == _BINDING for condition in results.conditions)


def _group(name: str, is_bound: bool) -> str:
    """Return the common name of files in one series: a log for each node, or for each repeat.

    Files of several nodes are one series only if each has its node; otherwise results of one node
    would count as repeats of another.

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


def _add_directory(draft: _Draft, *, is_whole_path: bool) -> _Draft:
    """Add the directory or its path to the name: two directories have files of one name."""
    directory = draft.directory.path.replace("/", "-") if is_whole_path else draft.directory.name
    name = (
        directory if draft.head.name == draft.directory.name else f"{directory}-{draft.head.name}"
    )
    return replace(draft, head=replace(draft.head, name=_name(name)))


FILES = frozenset(
    """
    metadata.json cpu_single.txt cpu_all.txt stream.txt stream_numa_local.txt
    stream_numa_remote.txt mem_latency.txt gpu_compute.txt gpu_bandwidth.txt
    nccl_allreduce.txt numa_topology.txt cpu_topology.txt hugepages.txt
""".split()
)
"""Names that are read."""

NOT_READ = frozenset({"summary.csv"})

LAYOUTS = {
    "vcpu-pin": "pin",
    "vcpu-pin-numa": "pin-numa",
    "vcpu-pin-numa-smt": "pin-numa-smt",
    **{name: name for name in PRESETS},
}
"""Presets of directory names: the study's and homenode's, in lower case, with dashes."""

_SUFFIX = re.compile(
    r"[-. ]?(?:\(\d{1,4}\)|(?<=[-. ])(?:\d{1,4}(?:-?(?:c|vcpus?|cores?))?|"
    r"(?:run|rep|boot)-?\d{1,4}))\Z",
    re.A,
)
"""Suffixes of layout names in directory names: a core count, a repeat, a copy's number."""

_RUN = re.compile(r"(?m)^# run \d+\s*$", re.ASCII)


def is_study_directory(names: frozenset[str]) -> bool:
    """Whether a directory of these files is a study's: its metadata, or two of its other names."""
    study_files = names & FILES
    return "metadata.json" in study_files or len(study_files) >= 2


def parse_switches(name: str) -> Switches:
    """Return the layout that a directory's name denotes; unknown for other names.

    >>> parse_switches("vcpu_pin_60c").name, parse_switches("VCPU-Pin_NUMA.run2 (1)").name
    ('pin', 'pin-numa')
    """
    name = name.lower().replace("_", "-")
    preset = LAYOUTS.get(name)
    while preset is None and (shorter := _SUFFIX.sub("", name)) != name:
        name, preset = shorter, LAYOUTS.get(shorter)
    return UNKNOWN_SWITCHES if preset is None else Switches.from_layout(PRESETS[preset])


def read_study_results(files: Mapping[str, str]) -> MeasuredSamples:
    """Return all results of a directory. files: text by name; unknown names are ignored. What
    cannot be read is a gap that names its file: the others are kept."""
    read: dict[str, Callable[[str], MeasuredSamples]] = {
        "metadata.json": _parse_metadata,
        "cpu_single.txt": lambda text: sysbench.OUTPUT.of_log(text, ""),
        "cpu_all.txt": lambda text: sysbench.OUTPUT.of_log(text, ""),
        "stream.txt": lambda text: stream.OUTPUT.of_log(text, ""),
        "stream_numa_local.txt": lambda text: stream.read_stream_results(stream.parse(text), 0),
        "stream_numa_remote.txt": lambda text: stream.read_stream_results(stream.parse(text), 1),
        "mem_latency.txt": lambda text: read_chase_results(study_programs.parse_chase(text)),
        "gpu_compute.txt": _parse_matmul,
        "gpu_bandwidth.txt": _parse_copies,
        "nccl_allreduce.txt": _parse_collective,
    }
    parts = [MeasuredSamples(conditions=tuple(_list_guest_conditions(files)))]
    for name, reader in read.items():
        if name in files and files[name].strip():
            parts.append(_catch_errors(reader, name, files[name]))
        elif name in files:
            parts.append(MeasuredSamples(gaps=(Gap(name, "empty: the test did not run"),)))
    return join_samples(parts)


def count_vcpus(files: Mapping[str, str]) -> int | None:
    """Return the guest's vCPUs: those of all its nodes, else the number in its metadata."""
    hardware = _parse_hardware(files)
    if hardware is not None:
        return sum(len(node.pus) for node in hardware.nodes) or None
    cpus = parse_whole(_parse_fields(files, _LSCPU).get("CPU(s)"), digits=6)
    if cpus is not None:
        return cpus
    try:
        vcpus = lines.json_object(files.get("metadata.json", ""), "metadata.json").get("vcpus")
    except ParseError:
        return None
    return vcpus if isinstance(vcpus, int) and 0 < vcpus < 1 << 20 else None


def find_contradictions(files: Mapping[str, str], switches: Switches) -> Iterator[str]:
    """Yield why the guest cannot have had the layout in its directory's name."""
    threads = _parse_fields(files, _LSCPU).get("Thread(s) per core", "1")
    if switches.siblings is Siblings.HIDDEN and threads != "1":
        yield f"layout {switches.name} hides siblings, the guest showed {threads} a core"
    hardware = _parse_hardware(files)
    if hardware is None or switches.cells is None:
        return
    nodes = sum(bool(node.pus) for node in hardware.nodes)
    if switches.cells is GuestCells.SINGLE and nodes > 1:
        yield f"layout {switches.name} has no guest cells, but the guest showed {nodes} nodes"
    if switches.cells is GuestCells.HOST and nodes == 1:
        yield f"layout {switches.name} has guest cells, but the guest showed one node"


_LSCPU, _MEMINFO = "cpu_topology.txt", "hugepages.txt"


def _parse_fields(files: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the fields of a file of lines "NAME: VALUE": lscpu's, /proc/meminfo's."""
    rows = (line.partition(":") for line in files.get(name, "").splitlines())
    return {key.strip(): value.strip() for key, _, value in rows if value.strip()}


def _list_processors(files: Mapping[str, str]) -> tuple[str, ...]:
    model_name = _parse_fields(files, _LSCPU).get("Model name")
    return () if model_name is None else (_name(" ".join(model_name.split())),)


def _list_guest_conditions(files: Mapping[str, str]) -> Iterator[Condition]:
    """Yield conditions on the guest's cores and pages."""
    if threads := _parse_fields(files, _LSCPU).get("Thread(s) per core"):
        yield Condition("guest threads per core", threads)
    pages = _parse_fields(files, _MEMINFO)
    if count := pages.get("HugePages_Total"):
        size = pages.get("Hugepagesize", "unknown size")
        yield Condition("huge pages", "none" if count == "0" else f"{count} of {size}")


def _parse_hardware(files: Mapping[str, str]) -> numactl.NumactlHardware | None:
    try:
        return numactl.parse_hardware(files["numa_topology.txt"])
    except (KeyError, ParseError):
        return None


def _catch_errors(
    reader: Callable[[str], MeasuredSamples], name: str, text: str
) -> MeasuredSamples:
    try:
        return reader(text)
    except ParseError as error:
        return MeasuredSamples(gaps=(Gap(name, error.message_with_hint),))


def _parse_metadata(text: str) -> MeasuredSamples:
    document = lines.json_object(text, "metadata.json")
    devices: Any = document.get("gpu_devices")
    names = [name for name in devices if isinstance(name, str)] if isinstance(devices, list) else []
    return MeasuredSamples(gpu_names=tuple(dict.fromkeys(name[:100] for name in names)))


MIN_DRAM_BYTES = 256 * MIB
"""A curve's last point counts as memory from here on; below, an LLC may hold it."""


def read_chase_results(points: Sequence[tuple[int, float]]) -> MeasuredSamples:
    """Return the latency by size; that of the largest size, if large enough, as the memory's."""
    results = SampleBuilder("chase", "8-byte slots, random cycle, ordinary pages")
    for size_bytes, latency_ns in points:
        results.add("memory-latency", "ns", latency_ns, size_bytes=size_bytes)
    size_bytes, latency_ns = points[-1]
    if size_bytes >= MIN_DRAM_BYTES:
        results.add("memory-latency", "ns", latency_ns, variant="dram")
    else:
        reason = f"the curve ends at {size_bytes} bytes, which an LLC may hold"
        results.add_gap("memory latency", reason)
    return results.build_samples()


def _parse_matmul(text: str) -> MeasuredSamples:
    matmul_sample = sample("matmul-time", "ns", study_programs.parse_matmul(text), index=0)
    return MeasuredSamples(
        (matmul_sample,), (Condition("tool matmul", "8192 x 8192, fp32, mean of 100"),)
    )


def _parse_copies(text: str) -> MeasuredSamples:
    """Read five runs, each a sample of its GPU. The words identify the program."""
    runs = [run for run in _RUN.split(text) if run.strip()]
    if not runs:
        raise ParseError("gpu_bandwidth.txt", "runs under '# run 1'")
    parts = []
    for run in runs:
        if "Host-to-Device:" in run:
            parts.append(gpu_tool_samples.read_copy_results(study_programs.parse_copies(run)))
        elif "RocmBandwidthTest" in run or "Src Device Id" in run:
            parts.append(read_tool_results(Reader.ROCM, run, "gpu_bandwidth.txt"))
        else:
            parts.append(cuda_bandwidth_test.OUTPUT.of_log(run, ""))
    return join_samples(parts)


def _parse_collective(text: str) -> MeasuredSamples:
    return join_samples(
        (
            read_tool_results(Reader.NCCL_TESTS, text, "nccl_allreduce.txt"),
            MeasuredSamples(
                conditions=(
                    Condition("tool collective transport", "P2P off, ring, simple"),
                    Condition("tool collective binding", "GPUs' nodes; node 0 if they have none"),
                )
            ),
        )
    )
