"""CPU figures: samples of sysbench, STREAM, Intel MLC, likwid-bench, openssl and pointer chases.

Of a pair of nodes, `node` is where the threads ran and `peer_node` where the memory was.
"""

from collections.abc import Iterator, Sequence

from homenode.gap import Gap
from homenode.measure.figures.sample import Figures, sample
from homenode.results.model import Condition, Sample
from homenode.tools.intel_mlc import MlcMatrix, MlcRun
from homenode.tools.likwid_bench import LikwidBench
from homenode.tools.openssl_speed import OpensslSpeed
from homenode.tools.stream import StreamRun
from homenode.tools.study_programs import ChasePoint
from homenode.tools.sysbench import SysbenchRun
from homenode.units import MIB

LEAST_DRAM_BYTES = 256 * MIB
"""A curve's last point is mistaken for memory from here on; below, an LLC may hold it."""

DEVIATION = "deviation over threads"
"""Variant of cpu-fairness: standard deviation over mean of the threads' events."""

_MLC_VARIANTS = {"ALL Reads": "read", "Stream-triad like": "triad"}


def of_sysbench(run: SysbenchRun) -> Figures:
    """Events per second, on one thread or on all; the memory test under its own name."""
    conditions = [Condition("tool sysbench", run.version)]
    samples: list[Sample] = []
    gaps = list(run.gaps)
    if run.memory is not None:
        memory = run.memory
        variant = f"{memory.operation} {memory.block_bytes} bytes {memory.scope}"
        samples.append(
            sample("sysbench-memory", "bytes_per_s", memory.bytes_per_s, variant=variant)
        )
        if memory.shares_one_buffer:
            gaps.append(Gap("memory bandwidth", "sysbench's threads shared one buffer in a cache"))
    elif run.threads == 1:
        samples.append(sample("cpu-single", "events_per_s", run.events_per_s))
    else:
        samples.append(sample("cpu-throughput", "events_per_s", run.events_per_s))
        each = run.events_per_s / run.threads
        samples.append(sample("cpu-per-thread", "events_per_s", each))
        if run.events_per_thread is not None and run.events_per_thread[0] > 0:
            mean, deviation = run.events_per_thread
            samples.append(sample("cpu-fairness", "ratio", deviation / mean, variant=DEVIATION))
    if run.prime_limit is not None:
        conditions.append(Condition("tool sysbench primes", str(run.prime_limit)))
    return Figures(tuple(samples), tuple(conditions), gaps=tuple(gaps))


def of_stream(run: StreamRun, node: int | None = None) -> Figures:
    """The best rate of each kernel. node: what its memory was bound to."""
    if run.is_valid is False:
        reason = "its own check failed: no figure of it is kept"
        return Figures(gaps=(*run.gaps, Gap("STREAM", reason)))
    samples = tuple(
        sample(
            "memory-bandwidth",
            "bytes_per_s",
            kernel.best_bytes_per_s,
            variant=kernel.name.lower(),
            node=node,
        )
        for kernel in run.kernels
    )
    known = run.arrays_bytes is not None
    size = f"{run.arrays_bytes} bytes in three arrays" if known else "arrays of unknown size"
    version = run.version or "unknown version"
    conditions = (Condition("tool STREAM", f"{version}, best pass, {size}"),)
    return Figures(samples, conditions, gaps=run.gaps)


def of_chase(points: Sequence[ChasePoint]) -> Figures:
    """The curve by size; its end as the latency of memory, where it is large enough."""
    samples = [
        sample("memory-latency", "ns", point.latency_ns, size_bytes=point.size_bytes)
        for point in points
    ]
    gaps: tuple[Gap, ...] = ()
    if points[-1].size_bytes >= LEAST_DRAM_BYTES:
        samples.append(sample("memory-latency", "ns", points[-1].latency_ns, variant="dram"))
    else:
        reason = f"the curve ends at {points[-1].size_bytes} bytes, which an LLC may hold"
        gaps = (Gap("memory latency", reason),)
    conditions = (Condition("tool chase", "8-byte slots, random cycle, ordinary pages"),)
    return Figures(tuple(samples), conditions, gaps=gaps)


def of_mlc(run: MlcRun) -> Figures:
    """Matrices by node, peak bandwidths by mix, latency and bandwidth under load."""
    samples: list[Sample] = []
    if run.latency_ns is not None:
        samples.append(sample("memory-latency", "ns", run.latency_ns, variant="dram"))
    if run.idle_ns is not None:
        samples += _matrix(run.idle_ns, "memory-latency", "ns", "dram")
    if run.bandwidth_bytes_per_s is not None:
        samples += _matrix(run.bandwidth_bytes_per_s, "memory-bandwidth", "bytes_per_s", "read")
    for mix, rate in run.peaks:
        variant = _MLC_VARIANTS.get(mix, mix.lower())
        samples.append(sample("memory-bandwidth", "bytes_per_s", rate, variant=variant))
    for load in run.loaded:
        variant = f"delay {load.delay}"
        samples.append(sample("loaded-latency", "ns", load.latency_ns, variant=variant))
        samples.append(sample("loaded-bandwidth", "bytes_per_s", load.bytes_per_s, variant=variant))
    conditions = [Condition("tool Intel MLC", run.version or "unknown version")]
    if run.access is not None:
        conditions.append(Condition("tool Intel MLC access", run.access))
    if run.prefetchers_were_on:
        conditions.append(Condition("tool Intel MLC prefetchers", "could not be switched off"))
    return Figures(tuple(samples), tuple(conditions), gaps=run.gaps)


def of_likwid(run: LikwidBench) -> Figures:
    """The bandwidth of one loop, under the loop's name."""
    found = sample("memory-bandwidth", "bytes_per_s", run.bytes_per_s, variant=f"likwid {run.test}")
    conditions = (Condition("tool likwid-bench", f"{run.size_bytes} bytes, {run.threads} threads"),)
    return Figures((found,), conditions, gaps=run.gaps)


def of_openssl(run: OpensslSpeed) -> Figures:
    """Operations per second, and bytes per second of bulk ciphers, as a program of one's own."""
    samples = [
        sample(
            f"app-rate:openssl {rate.algorithm} {rate.operation}",
            "units_per_s",
            rate.operations_per_s,
        )
        for rate in run.rates
        if rate.operations_per_s > 0
    ]
    samples += [
        sample(
            f"app-rate:openssl {bulk.algorithm}",
            "bytes_per_s",
            bulk.bytes_per_s,
            size_bytes=bulk.block_bytes,
        )
        for bulk in run.bulk
        if bulk.bytes_per_s > 0
    ]
    conditions = [Condition("tool openssl", run.version or "unknown version")]
    if run.processes is not None:
        conditions.append(Condition("tool openssl processes", str(run.processes)))
    return Figures(tuple(samples), tuple(conditions), gaps=run.gaps)


def _matrix(matrix: MlcMatrix, metric: str, unit: str, variant: str) -> Iterator[Sample]:
    for node, row in zip(matrix.rows, matrix.cells, strict=True):
        for peer, value in zip(matrix.columns, row, strict=True):
            if value is not None:
                yield sample(metric, unit, value, node=node, peer_node=peer, variant=variant)
