"""CPU figures: samples of sysbench, STREAM, Intel MLC, likwid-bench, openssl and pointer chases.

Of a pair of nodes, `node` is where the threads ran and `peer_node` where the memory was.
"""

from collections.abc import Iterator, Sequence

from homenode.gap import Gap
from homenode.machine.tools.intel_mlc import MlcMatrix, MlcRun
from homenode.machine.tools.likwid_bench import LikwidBench
from homenode.machine.tools.openssl_speed import OpensslSpeed
from homenode.machine.tools.stream import StreamRun
from homenode.machine.tools.study_programs import ChasePoint
from homenode.machine.tools.sysbench import SysbenchRun
from homenode.measure.figures.sample import FigureList, Figures
from homenode.units import MIB

LEAST_DRAM_BYTES = 256 * MIB
LEAST_ARRAY_BYTES = 32 * MIB
"""Of one array of STREAM: its rule is four times the last-level cache, and 8 MiB of that are few.
With less, what was measured is a cache, whatever the machine."""
"""A curve's last point is mistaken for memory from here on; below, an LLC may hold it."""

DEVIATION = "deviation over threads"
"""Variant of cpu-fairness: standard deviation over mean of the threads' events."""

_MLC_VARIANTS = {"ALL Reads": "read", "Stream-triad like": "triad"}


def of_sysbench(run: SysbenchRun) -> Figures:
    """Events per second, on one thread or on all; the memory test under its own name."""
    found = FigureList("sysbench", run.version, run.gaps)
    if run.memory is not None:
        memory = run.memory
        variant = f"{memory.operation} {memory.block_bytes} bytes {memory.scope}"
        found.add("sysbench-memory", "bytes_per_s", memory.bytes_per_s, variant=variant)
        if memory.shares_one_buffer:
            found.gap("memory bandwidth", "sysbench's threads shared one buffer in a cache")
    elif run.threads == 1:
        found.add("cpu-single", "events_per_s", run.events_per_s)
    else:
        found.add("cpu-throughput", "events_per_s", run.events_per_s)
        found.add("cpu-per-thread", "events_per_s", run.events_per_s / run.threads)
        if run.events_per_thread is not None and run.events_per_thread[0] > 0:
            mean, deviation = run.events_per_thread
            found.add("cpu-fairness", "ratio", deviation / mean, variant=DEVIATION)
    found.condition("tool sysbench primes", run.prime_limit)
    return found.figures()


def of_stream(run: StreamRun, node: int | None = None) -> Figures:
    """The best rate of each kernel. node: what its memory was bound to."""
    if run.is_valid is False:
        reason = "its own check failed: no figure of it is kept"
        return Figures(gaps=(*run.gaps, Gap("STREAM", reason)))
    if run.arrays_bytes is not None and run.arrays_bytes < 3 * LEAST_ARRAY_BYTES:
        reason = f"arrays of {run.arrays_bytes // 3} bytes fit into caches: no figure of memory"
        return Figures(gaps=(*run.gaps, Gap("STREAM", reason)))
    known = run.arrays_bytes is not None
    size = f"{run.arrays_bytes} bytes in three arrays" if known else "arrays of unknown size"
    version = run.version or "unknown version"
    found = FigureList("STREAM", f"{version}, best pass, {size}", run.gaps)
    for kernel in run.kernels:
        name, rate = kernel.name.lower(), kernel.best_bytes_per_s
        found.add("memory-bandwidth", "bytes_per_s", rate, variant=name, node=node)
    return found.figures()


def of_chase(points: Sequence[ChasePoint]) -> Figures:
    """The curve by size; its end as the latency of memory, where it is large enough."""
    found = FigureList("chase", "8-byte slots, random cycle, ordinary pages")
    for point in points:
        found.add("memory-latency", "ns", point.latency_ns, size_bytes=point.size_bytes)
    last = points[-1]
    if last.size_bytes >= LEAST_DRAM_BYTES:
        found.add("memory-latency", "ns", last.latency_ns, variant="dram")
    else:
        reason = f"the curve ends at {last.size_bytes} bytes, which an LLC may hold"
        found.gap("memory latency", reason)
    return found.figures()


def of_mlc(run: MlcRun) -> Figures:
    """Matrices by node, peak bandwidths by mix, latency and bandwidth under load."""
    found = FigureList("Intel MLC", run.version, run.gaps)
    if run.latency_ns is not None:
        found.add("memory-latency", "ns", run.latency_ns, variant="dram")
    for matrix, metric, unit, variant in (
        (run.idle_ns, "memory-latency", "ns", "dram"),
        (run.bandwidth_bytes_per_s, "memory-bandwidth", "bytes_per_s", "read"),
    ):
        for node, peer, value in () if matrix is None else _cells(matrix):
            found.add(metric, unit, value, node=node, peer_node=peer, variant=variant)
    for mix, rate in run.peaks:
        variant = _MLC_VARIANTS.get(mix, mix.lower())
        found.add("memory-bandwidth", "bytes_per_s", rate, variant=variant)
    for load in run.loaded:
        variant = f"delay {load.delay}"
        found.add("loaded-latency", "ns", load.latency_ns, variant=variant)
        found.add("loaded-bandwidth", "bytes_per_s", load.bytes_per_s, variant=variant)
    found.condition("tool Intel MLC access", run.access)
    if run.prefetchers_were_on:
        found.condition("tool Intel MLC prefetchers", "could not be switched off")
    return found.figures()


def _cells(matrix: MlcMatrix) -> Iterator[tuple[int, int, float]]:
    for node, row in zip(matrix.rows, matrix.cells, strict=True):
        for peer, value in zip(matrix.columns, row, strict=True):
            if value is not None:
                yield node, peer, value


def of_likwid(run: LikwidBench) -> Figures:
    """The bandwidth of one loop, under the loop's name."""
    found = FigureList("likwid-bench", f"{run.size_bytes} bytes, {run.threads} threads", run.gaps)
    found.add("memory-bandwidth", "bytes_per_s", run.bytes_per_s, variant=f"likwid {run.test}")
    return found.figures()


def of_openssl(run: OpensslSpeed) -> Figures:
    """Operations per second, and bytes per second of bulk ciphers, as a program of one's own."""
    found = FigureList("openssl", run.version, run.gaps)
    for rate in run.rates:
        if rate.operations_per_s > 0:
            metric = f"app-rate:openssl {rate.algorithm} {rate.operation}"
            found.add(metric, "units_per_s", rate.operations_per_s)
    for bulk in run.bulk:
        if bulk.bytes_per_s > 0:
            metric, size = f"app-rate:openssl {bulk.algorithm}", bulk.block_bytes
            found.add(metric, "bytes_per_s", bulk.bytes_per_s, size_bytes=size)
    found.condition("tool openssl processes", run.processes)
    return found.figures()
