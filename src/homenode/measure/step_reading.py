"""Step reading: results of the output of a suite's step, or of any other tool's log.

The tool of a step is known; if its output reports a failure (nvbandwidth exits with 0), this
raises, and the runner tries the test's next alternative. A log is recognised by its content.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import pairwise

from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.tools import (
    nccl_tests,
    nvbandwidth,
    rocm_bandwidth_test,
    torch_report,
)
from homenode.machine.tools.homenode_probe import parse
from homenode.machine.tools.nccl_tests import PARAMETERS_LINE, NcclTests
from homenode.machine.tools.numactl import bound_by_command
from homenode.machine.tools.nvbandwidth import TABLE_LINE, NvbandwidthDevice, NvbandwidthRun
from homenode.machine.topology import Host
from homenode.measure import gpu_tool_samples
from homenode.measure.gpu_tool_samples import (
    COPYING_THREAD,
    Binding,
    check_flat_curve,
    find_half_peak,
    parse_binding,
    split_sections,
)
from homenode.measure.importers import NAMES
from homenode.measure.model import (
    AppCommand,
    BenchTest,
    MeasuredSamples,
    Reader,
    SuiteGroup,
    ToolOutput,
    join_samples,
    number_samples,
    read_from_text,
    sample,
)
from homenode.measure.probe_samples import BracketedSample, StepReading, read_probe_results
from homenode.measure.results.model import Condition, Sample
from homenode.measure.suite import BY_BUS, select_gpus

_WATCHED = re.compile(r"^# homenode watched:((?: \d{1,9}:\d{1,9}){0,4096})$", re.M | re.ASCII)

# One run of rocm-bandwidth-test measures everything; a test keeps what it was run for.
_METRICS_OF_GROUP = {SuiteGroup.GPU_PEER: ("p2p-",), SuiteGroup.GPU_BANDWIDTH: ("h2d-", "d2h-")}


def read_step_results(test: BenchTest, output: str, host: Host) -> MeasuredSamples:
    """Return the results in a test's standard output. host: the machine that ran it.

    Their samples carry the node that the test was bound to and the test's variant. Raises
    ParseError if the output has no result.
    """
    results = list_tools()[test.reads].of_step(test, output, host)
    if not results.samples:
        tool = str(test.reads)
        reasons = (str(gap).removeprefix(f"{tool}: ") for gap in results.gaps)
        raise ParseError(tool, f"results of {test.id}", "; ".join(reasons) or "none")
    return _reject_unknown_gpus(results, host)


def _read_nvbandwidth(test: BenchTest, text: str, host: Host) -> MeasuredSamples:
    binding = None if test.node is None else Binding((test.node,), (test.node,))
    run = nvbandwidth.parse(_WATCHED.sub("", text))
    if not run.devices and BY_BUS in test.environment:
        run = _replace_devices(run, test, host)
    results = gpu_tool_samples.read_nvbandwidth_results(run, binding)
    conditions = (*results.conditions, *_find_copying_thread(text, host))
    return replace(results, conditions=conditions)


def _find_copying_thread(text: str, host: Host) -> Iterator[Condition]:
    """Yield the nodes on which the tool's threads ran for a tenth of their time or more."""
    match = _WATCHED.search(text)
    if match is None:
        return
    node_of_pu = {int(pu.index): pu.node for pu in host.pus}
    looks: dict[int, int] = {}
    for pu, count in (map(int, word.split(":")) for word in match[1].split()):
        node = node_of_pu.get(pu)
        if node is not None:
            looks[node] = looks.get(node, 0) + count
    nodes = [node for node in sorted(looks) if looks[node] * 10 >= sum(looks.values())]
    if nodes:
        yield Condition(COPYING_THREAD, f"node{'s' if len(nodes) > 1 else ''} {CpuSet(nodes)}")


def _replace_devices(run: NvbandwidthRun, test: BenchTest, host: Host) -> NvbandwidthRun:
    """Replace devices by the machine's GPUs, if their number equals the tool's columns."""
    names = {gpu.bdf: gpu.name or "NVIDIA GPU" for gpu in select_gpus(host, [])}
    gpus = test.gpus or tuple(sorted(names))
    matrices = [matrix for test_run in run.tests for matrix in test_run.matrices]
    if {matrix.columns for matrix in matrices} != {len(gpus)}:
        return run
    devices = tuple(
        NvbandwidthDevice(number, names.get(gpu, "NVIDIA GPU"), gpu)
        for number, gpu in enumerate(gpus)
    )
    how = "the driver gave" if test.gpus else "CUDA_DEVICE_ORDER=PCI_BUS_ID gave"
    reason = f"nvbandwidth prints numbers alone; {how} their order"
    return replace(run, devices=devices, gaps=(*run.gaps, Gap("GPU addresses", reason)))


def _read_nccl(test: BenchTest, text: str, host: Host) -> MeasuredSamples:
    run = nccl_tests.parse(split_nccl_runs(text)[0])
    return _add_collective(gpu_tool_samples.read_nccl_results(run, "all_reduce"), run, test)


def _read_torch(test: BenchTest, text: str, host: Host) -> MeasuredSamples:
    runs = torch_report.parse(text)
    results = gpu_tool_samples.read_torch_run_results(runs)
    if test.group is not SuiteGroup.NCCL:
        return results
    run = next((run for run in runs if run.rows), None)
    return (
        results
        if run is None
        else _add_collective(results, gpu_tool_samples.convert_to_nccl(run), test)
    )


def _add_collective(results: MeasuredSamples, run: NcclTests, test: BenchTest) -> MeasuredSamples:
    """Add the curve's results, and the test's variant on every sample."""
    half_peak = find_half_peak(run) if results.samples else None
    finding = check_flat_curve(run, test.id) if half_peak is not None else None
    samples = results.samples
    if half_peak is not None:
        samples = (*samples, sample("allreduce-half-peak", "bytes", float(half_peak)))
    conditions = results.conditions
    if test.variant is None and test.binding is not None:
        conditions += (Condition("collective binding", test.binding),)
    return replace(
        results,
        samples=number_samples(_add_variant(s, test.variant, s.variant) for s in samples),
        conditions=conditions,
        findings=(*results.findings, *([finding] if finding is not None else [])),
    )


def _add_variant(sample: Sample, *words: str | None) -> Sample:
    return replace(sample, variant=", ".join(filter(None, words)) or None)


def _read_rocm(test: BenchTest, text: str, host: Host) -> MeasuredSamples:
    results = gpu_tool_samples.read_rocm_results(rocm_bandwidth_test.parse(text), test.gpus)
    starts = _METRICS_OF_GROUP.get(test.group)
    if starts is None:
        return results
    samples = [sample for sample in results.samples if sample.metric.startswith(starts)]
    return replace(results, samples=number_samples(samples))


def _reject_unknown_gpus(results: MeasuredSamples, host: Host) -> MeasuredSamples:
    """Reject GPUs that the host does not have: the tool saw another machine, or other addresses."""
    addresses = {device.bdf for device in host.pci_devices}
    strange = sorted({s.device for s in results.samples if s.device is not None} - addresses)
    if not strange:
        return results
    gap = Gap("GPU addresses", f"the tool reports {strange[0]}, which this machine does not show")
    return replace(results, gaps=(*results.gaps, gap))


REPLAYED = "replayed"
"""Condition of a run whose results a simulated tool printed."""

REPLAYED_LINE = re.compile(r"(?m)^replayed: (.{1,200})$")


def read_step(test: BenchTest, output: str, host: Host) -> StepReading:
    """Return the results of a test's output; host: the machine that ran it. Raises ParseError."""
    if test.reads is Reader.PROBE:
        reading = read_probe_results(parse(output))
        placed = tuple(
            replace(placed, sample=_add_variant(s, s.variant, test.variant))
            for placed in reading.placed
            for s in (placed.sample,)
        )
        return replace(reading, placed=placed)
    results = read_step_results(test, output, host)
    match = REPLAYED_LINE.search(output)
    conditions = (Condition(REPLAYED, match[1].strip()),) if match else ()
    return StepReading(
        tuple(BracketedSample(sample) for sample in results.samples),
        (*results.conditions, *conditions),
        results.gaps,
        results.findings,
    )


def read_app(order: AppCommand, result: float) -> StepReading:
    """Read the user's own result: a rate in its own units, or a time in seconds."""
    if order.lower_is_better:
        app_sample = sample(f"app-time:{order.name}", "ns", result * 1e9)
    else:
        app_sample = sample(f"app-rate:{order.name}", "units_per_s", result)
    tool = Condition("tool app", " ".join(order.argv))
    return StepReading((BracketedSample(app_sample),), (tool,))


def mark_disturbed(reading: StepReading) -> StepReading:
    return replace(
        reading,
        placed=tuple(
            replace(placed_sample, sample=replace(placed_sample.sample, disturbed=True))
            for placed_sample in reading.placed
        ),
    )


_NAMES_TEST = re.compile(r"Running \w{1,80}\.", re.ASCII)
_ALL_REDUCE = re.compile(r"all[_-]?reduce", re.I)
_COLLECTIVE = re.compile(
    r"all[_-]?gather|reduce[_-]?scatter|all[_-]?to[_-]?all|sendrecv|broadcast", re.I
)


def recognize_tool(text: str) -> str | None:
    """Return the tool of an output; None if it is unknown."""
    signs = ((tool, output.sign) for tool, output in list_tools().items())
    return next((tool for tool, sign in signs if sign is not None and sign.search(text)), None)


def read_tool_results(tool: str, text: str, name: str) -> MeasuredSamples:
    """Return a file's results. name: the file's, for facts that old versions do not print.

    Raises ParseError. A file with several runs of nvbandwidth or nccl-tests has several results,
    and so has a file of any tool if each run is below a command of numactl.
    """
    output = list_tools()[tool]
    parts = [] if tool == Reader.NVBANDWIDTH else list(_split_by_commands(text, output))
    if not any(binding for binding, _ in parts):
        return output.of_log(text, name)
    return join_samples(
        [_add_binding(output.of_log(part, name), binding) for binding, part in parts]
    )


def _split_by_commands(text: str, output: ToolOutput) -> Iterator[tuple[Binding | None, str]]:
    """The runs of a paste, each with the binding of the command above it. A run of STREAM keeps its
    command: it is read with it."""
    lines = text.split("\n")
    starts = dict.fromkeys(n for n, line in enumerate(lines) if bound_by_command(line) is not None)
    for start, end in pairwise([0, *starts, len(lines)]):
        body = (
            lines[start:end] if output.name == "STREAM" else lines[start + (start in starts) : end]
        )
        part = "\n".join(body)
        if output.sign is not None and output.sign.search(part):
            yield parse_binding(lines[start])[0], part


def _add_binding(results: MeasuredSamples, binding: Binding | None) -> MeasuredSamples:
    """Return the results with the node of the memory that their process was bound to."""
    if binding is None:
        return results
    samples = (
        replace(sample, node=binding.node)
        if sample.node is None and sample.metric.startswith(("h2d-", "d2h-", "memory-"))
        else sample
        for sample in results.samples
    )
    conditions = (*results.conditions, *binding.conditions())
    return replace(results, samples=tuple(samples), conditions=conditions)


def _read_nvbandwidth_log(text: str, name: str) -> MeasuredSamples:
    logs = []
    for section in split_sections(text):
        results = gpu_tool_samples.read_nvbandwidth_results(
            nvbandwidth.parse(section.text), section.binding
        )
        logs.append(join_samples([results, MeasuredSamples(gaps=section.gaps)]))
    if not logs:
        # Tables without a version, each from the line that names its test on.
        lines = text.split("\n")
        starts = [at for at, line in enumerate(lines) if _NAMES_TEST.fullmatch(line.rstrip())]
        parts = _split_text(lines, starts)
        logs = [
            gpu_tool_samples.read_nvbandwidth_results(nvbandwidth.parse(part), None)
            for part in parts
        ]
    return join_samples(logs)


def _read_nccl_log(text: str, name: str) -> MeasuredSamples:
    parts = []
    for part in split_nccl_runs(text):
        run = nccl_tests.parse(part)
        results = gpu_tool_samples.read_nccl_results(run, _find_collective(name))
        finding = check_flat_curve(run, name) if results.samples else None
        parts.append(replace(results, findings=() if finding is None else (finding,)))
    return join_samples(parts)


def split_nccl_runs(text: str) -> tuple[str, ...]:
    """Return the runs of a text, each from its versions on. A file of JSON is one."""
    lines = text.split("\n")
    starts = []
    for number, line in enumerate(lines):
        if PARAMETERS_LINE.fullmatch(line.rstrip()):
            first = number
            while first > 0 and lines[first - 1].startswith(
                ("# nccl-tests", "# Collective test s")
            ):
                first -= 1
            starts.append(first)
    return _split_text(lines, starts)


def _split_text(lines: list[str], starts: list[int]) -> tuple[str, ...]:
    """Split a text at these lines; the text before the first line belongs to the first part."""
    bounds = [0, *starts[1:], len(lines)]
    return tuple("\n".join(lines[a:b]) for a, b in pairwise(bounds))


def _find_collective(name: str) -> str | None:
    if _ALL_REDUCE.search(name):
        return "all_reduce"
    match = _COLLECTIVE.search(name)
    return None if match is None else match[0].lower().replace("-", "_")


_NVBANDWIDTH = re.compile(
    rf'^nvbandwidth Version: |^[ \t]*"nvbandwidth" *:|^{TABLE_LINE.pattern}[ \t]*$', re.M
)
_NCCL_TESTS = re.compile(r'^# nThread \d|"nccl_version" *:', re.M)
_ROCM = re.compile(r"^[ \t]*RocmBandwidthTest Version|^=+ Src Device Id:", re.M)
_TORCH = re.compile(r'^\{"format": ?"homenode\.torch/', re.M)
_OF_SUITE = (
    ToolOutput(Reader.NVBANDWIDTH, _NVBANDWIDTH, _read_nvbandwidth_log, _read_nvbandwidth),
    ToolOutput(Reader.NCCL_TESTS, _NCCL_TESTS, _read_nccl_log, _read_nccl),
    ToolOutput(
        Reader.ROCM,
        _ROCM,
        read_from_text(rocm_bandwidth_test.parse, gpu_tool_samples.read_rocm_results),
        _read_rocm,
    ),
    ToolOutput(
        Reader.TORCH,
        _TORCH,
        read_from_text(torch_report.parse, gpu_tool_samples.read_torch_run_results),
        _read_torch,
    ),
)


@cache
def list_tools() -> Mapping[str, ToolOutput]:
    """Return the tools of the suite and each OUTPUT of `importers`, in the order of recognition."""
    modules = (import_module(f"homenode.measure.importers.{name}") for name in NAMES)
    return {output.name: output for output in (*_OF_SUITE, *(module.OUTPUT for module in modules))}


def read_or_report(tool: str, text: str, name: str) -> MeasuredSamples:
    """Read the results of a tool; an unreadable file becomes a gap, so that others are read."""
    try:
        return read_tool_results(tool, text, name)
    except ParseError as error:
        return MeasuredSamples(gaps=(Gap(name, error.message),))
