"""Tool log: the figures of one file of another tool, recognised by its content."""

import re
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.measure.figures import amd as amd_figures
from homenode.measure.figures import nvidia as gpu_figures
from homenode.measure.figures import processors as cpu_figures
from homenode.measure.figures import torch_programs as torch_figures
from homenode.measure.figures.collective_curve import flat_curve
from homenode.measure.figures.nvidia import sections
from homenode.measure.figures.sample import Figures, joined
from homenode.tools import (
    cuda_bandwidth_test,
    intel_mlc,
    likwid_bench,
    nccl_tests,
    nvbandwidth,
    openssl_speed,
    rocm_bandwidth_test,
    stream,
    sysbench,
    torch_report,
    transferbench,
)
from homenode.tools.nccl_tests_text import PARAMETERS_LINE
from homenode.tools.nvbandwidth_text import TABLE_LINE


class Tool(StrEnum):
    """A tool whose output is read."""

    NVBANDWIDTH = "nvbandwidth"
    NCCL_TESTS = "nccl-tests"
    INTEL_MLC = "Intel MLC"
    STREAM = "STREAM"
    SYSBENCH = "sysbench"
    LIKWID = "likwid-bench"
    CUDA = "bandwidthTest"
    ROCM = "rocm-bandwidth-test"
    TRANSFER_BENCH = "TransferBench"
    OPENSSL = "openssl speed"
    TORCH = "homenode's PyTorch programs"


_NAMES_TEST = re.compile(r"Running \w{1,80}\.", re.ASCII)

# What only this tool prints, in the order in which it is looked for.
_SIGNS: tuple[tuple[Tool, re.Pattern[str]], ...] = (
    (Tool.NVBANDWIDTH, re.compile(r'^nvbandwidth Version: |^[ \t]*"nvbandwidth" *:', re.M)),
    (Tool.NVBANDWIDTH, re.compile(rf"^{TABLE_LINE.pattern}[ \t]*$", re.M)),
    (Tool.NCCL_TESTS, re.compile(r'^# nThread \d|"nccl_version" *:', re.M)),
    (Tool.INTEL_MLC, re.compile(r"^Intel\(R\) Memory Latency Checker|^Measuring idle lat", re.M)),
    (Tool.STREAM, re.compile(r"^STREAM version |^Function +(?:Best )?Rate ", re.M)),
    (Tool.SYSBENCH, re.compile(r"^sysbench \d+\.\d+", re.M)),
    (Tool.LIKWID, re.compile(r"^LIKWID MICRO BENCHMARK", re.M)),
    (
        Tool.CUDA,
        re.compile(r"^\[CUDA Bandwidth Test\]|^ +Transfer Size \(Bytes\)|^bandwidthTest-", re.M),
    ),
    (Tool.ROCM, re.compile(r"^[ \t]*RocmBandwidthTest Version|^=+ Src Device Id:", re.M)),
    (
        Tool.TRANSFER_BENCH,
        re.compile(r"^(?:Uni|Bi)directional copy peak bandwidth GB/s \[|^TransferBench v", re.M),
    ),
    (Tool.TORCH, re.compile(r'^\{"format": ?"homenode\.torch/', re.M)),
    (Tool.OPENSSL, re.compile(r"^ +sign +verify .*sign/s|^type +\d+ bytes", re.M)),
)
_ALL_REDUCE = re.compile(r"all[_-]?reduce", re.I)
_COLLECTIVE = re.compile(
    r"all[_-]?gather|reduce[_-]?scatter|all[_-]?to[_-]?all|sendrecv|broadcast", re.I
)


def tool_of(text: str) -> Tool | None:
    """Whose output a text is; None where it is of none that is read."""
    return next((tool for tool, sign in _SIGNS if sign.search(text)), None)


def figures_of(tool: Tool, text: str, name: str) -> Figures:
    """The figures of a file. name: the file's, for what old versions do not print.

    Raises ParseError. A file with several runs of nvbandwidth or nccl-tests gives all of them.
    """
    if tool is Tool.NVBANDWIDTH:
        return _nvbandwidth(text)
    if tool is Tool.NCCL_TESTS:
        return _nccl(text, name)
    read: dict[Tool, Callable[[str], Figures]] = {
        Tool.INTEL_MLC: lambda text: cpu_figures.of_mlc(intel_mlc.parse(text)),
        Tool.STREAM: lambda text: cpu_figures.of_stream(stream.parse(text)),
        Tool.SYSBENCH: lambda text: cpu_figures.of_sysbench(sysbench.parse(text)),
        Tool.LIKWID: lambda text: cpu_figures.of_likwid(likwid_bench.parse(text)),
        Tool.CUDA: lambda text: gpu_figures.of_cuda(cuda_bandwidth_test.parse(text)),
        Tool.ROCM: lambda text: amd_figures.of_rocm(rocm_bandwidth_test.parse(text)),
        Tool.TRANSFER_BENCH: lambda text: amd_figures.of_transferbench(transferbench.parse(text)),
        Tool.TORCH: lambda text: torch_figures.of_torch(torch_report.parse(text)),
        Tool.OPENSSL: lambda text: cpu_figures.of_openssl(openssl_speed.parse(text)),
    }
    return read[tool](text)


def _nvbandwidth(text: str) -> Figures:
    found = []
    for section in sections(text):
        figures = gpu_figures.of_nvbandwidth(nvbandwidth.parse(section.text), section.binding)
        found.append(joined([figures, Figures(gaps=section.gaps)]))
    if not found:
        for part in _tables(text):
            found.append(gpu_figures.of_nvbandwidth(nvbandwidth.parse(part), None))
    return joined(found)


def _tables(text: str) -> tuple[str, ...]:
    """Tables of nvbandwidth without a version, each from the line that names its test on."""
    lines = text.split("\n")
    starts = [at for at, line in enumerate(lines) if _NAMES_TEST.fullmatch(line.rstrip())]
    if len(starts) < 2:
        return (text,)
    bounds = [0, *starts[1:], len(lines)]
    return tuple("\n".join(lines[a:b]) for a, b in pairwise(bounds))


def _nccl(text: str, name: str) -> Figures:
    parts = []
    for part in nccl_runs(text):
        run = nccl_tests.parse(part)
        figures = gpu_figures.of_nccl(run, _collective(name))
        finding = flat_curve(run, name) if figures.samples else None
        parts.append(replace(figures, findings=() if finding is None else (finding,)))
    return joined(parts)


def nccl_runs(text: str) -> tuple[str, ...]:
    """The runs of a text, each from its versions on. A file of JSON is one."""
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
    if len(starts) < 2:
        return (text,)
    bounds = [0, *starts[1:], len(lines)]
    return tuple("\n".join(lines[a:b]) for a, b in pairwise(bounds))


def _collective(name: str) -> str | None:
    if _ALL_REDUCE.search(name):
        return "all_reduce"
    found = _COLLECTIVE.search(name)
    return None if found is None else found[0].lower().replace("-", "_")


def lenient(tool: Tool, text: str, name: str) -> Figures:
    """As figures_of; what cannot be read is a gap: one bad file does not lose the others."""
    try:
        return figures_of(tool, text, name)
    except ParseError as error:
        return Figures(gaps=(Gap(name, error.message),))
