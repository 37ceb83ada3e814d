"""The study's results directory, results/<gpu>/<config>/, synthesised with the figures it printed.

One run of each configuration, in the formats of its tools: what a user has who did what it did.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.measure.importers import test_cuda_bandwidth_test as cuda
from tests.measure.importers import test_stream as stream
from tests.measure.importers import test_sysbench as sysbench
from tests.published_runs import PUBLISHED_RUNS
from tests.tools import test_nccl_tests as nccl

SIZES = [8 << (2 * step) for step in range(14)]
"""8 B to 512 MiB."""


def write_study_directories(
    root: Path, start_s: float | None = None, rate: float | None = None
) -> tuple[str, ...]:
    """Directories of every system and configuration of the study; the systems' names.

    start_s: start-up time of the sweeps, which end at the printed peaks, or at this rate where none
    is printed; None: sweeps with a corner.
    """
    study = [run for run in PUBLISHED_RUNS if (run.head.source or "").startswith("study:")]
    copies = {
        run.head.system: max(s.value for s in run.samples if s.metric == "h2d-bandwidth")
        for run in study
        if run.head.name == "any"
    }
    ceilings = {
        run.head.system: max(s.value for s in run.samples if s.metric == "allreduce-busbw-peak")
        for run in study
        if run.head.name == "any" and any(s.metric == "allreduce-busbw-peak" for s in run.samples)
    }
    for run in study:
        if run.head.name == "any":
            continue
        figures = {
            sample.metric: sample.value
            for sample in run.samples
            if sample.variant in (None, "dram")
        }
        directory = root / run.head.system / run.head.name
        directory.mkdir(parents=True)
        ceiling = ceilings.get(run.head.system)
        files = _files(figures, copies[run.head.system], ceiling)
        peak = ceiling or figures.get("allreduce-busbw-peak", rate)
        if start_s is not None and peak is not None:
            files["nccl_allreduce.txt"] = _collective(_climbing(start_s, peak))
        for name, text in files.items():
            (directory / name).write_text(text)
    return tuple(dict.fromkeys(run.head.system for run in study))


def _files(figures: Mapping[str, float], copies: float, ceiling: float | None) -> dict[str, str]:
    files = {
        "metadata.json": json.dumps({"vcpus": 8}),
        "gpu_bandwidth.txt": "".join(
            f"# run {number}\n{cuda.OUTPUT.replace('55.3', f'{copies / 1e9:.1f}')}"
            for number in range(1, 6)
        ),
    }
    if "memory-bandwidth" in figures:
        rate = f"{figures['memory-bandwidth'] / 1e6:.1f}"
        files["stream.txt"] = stream.OUTPUT.replace("263208.7", rate)
    if "cpu-throughput" in figures:
        files["cpu_all.txt"] = sysbench.CPU.replace("81050.25", f"{figures['cpu-throughput']:.2f}")
    if "memory-latency" in figures:
        files["mem_latency.txt"] = f"4096 1.5\n{512 << 20} {figures['memory-latency']}\n"
    if "allreduce-busbw-peak" in figures:
        files["nccl_allreduce.txt"] = _collective(
            lambda size: figures["allreduce-busbw-peak"] * min(1.0, size / (32 << 20))
        )
    if ceiling is not None:
        files["nccl_allreduce.txt"] = _collective(lambda size: ceiling * min(1.0, size / 65536))
    return files


def _climbing(start_s: float, peak: float) -> Callable[[int], float]:
    return lambda size: size / (start_s + size / peak)


def _collective(rate_of: Callable[[int], float]) -> str:
    """A sweep of nccl-tests over sizes. rate_of: bus bandwidth of a size, in bytes/s."""
    rows = []
    for size in SIZES:
        rate = rate_of(size) / 1e9
        took = size / max(rate, 1e-6) / 1e3
        half = f"{took:.2f} {rate / 1.75:.2f} {rate:.2f} 0"
        rows.append(f" {size} {size // 4} float sum -1 {half} {half}\n")
    return nccl.HEAD + nccl.COLUMNS + "".join(rows) + nccl.FOOT
