"""GPU tools: samples of nvbandwidth, nccl-tests, rocm-bandwidth-test and the PyTorch programs, and
their bindings.

The head of a log has the binding of the process:

=== PINNED to 2 ===
policy: bind
cpubind: 2
membind: 2
nvbandwidth Version: v0.6
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Gap, Severity, finding
from homenode.machine.tools.nccl_tests import CollectiveLibrary as Family
from homenode.machine.tools.nccl_tests import NcclHalf, NcclRow, NcclTests
from homenode.machine.tools.numactl import bound_by_command, parse_show
from homenode.machine.tools.nvbandwidth import (
    VERSION_LINE,
    NvbandwidthMatrix,
    NvbandwidthRun,
    NvbandwidthTest,
    Status,
    Unit,
)
from homenode.machine.tools.rocm_bandwidth_test import RocmBandwidthTest
from homenode.machine.tools.study_programs import GpuCopies
from homenode.machine.tools.torch_report import TorchResult, TorchRow, TorchRun
from homenode.measure.model import MeasuredSamples, SampleBuilder, join_samples, sample
from homenode.measure.results.model import (
    COLLECTIVE_GPUS,
    MIN_RATE_BYTES_PER_S,
    Condition,
    Sample,
    fit_flat,
)

_PINNED = re.compile(r"\bPINNED to (\d{1,5})\b", re.ASCII)


class Binding(Struct, frozen=True):
    """Nodes of the CPUs and of the memory that the process might use."""

    cpu_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]

    @property
    def node(self) -> int | None:
        """The node of bound memory; for several nodes, the node of the threads. None if neither is
        a single node."""
        for nodes in (self.memory_nodes, self.cpu_nodes):
            if len(nodes) == 1:
                return nodes[0]
        return None

    def conditions(self) -> tuple[Condition, ...]:
        """Return the strictness of the binding; its nodes are in the samples."""
        is_strict = len(self.memory_nodes) == 1
        return (Condition("memory binding", "one node" if is_strict else "several nodes"),)


class LoggedRun(Struct, frozen=True):
    """A run of nvbandwidth in a log."""

    text: str
    line: int  # line of its version, from 1
    binding: Binding | None
    gaps: tuple[Gap, ...]


def split_sections(text: str) -> Iterator[LoggedRun]:
    """Yield the runs of a text, each with the binding before it. Text after the last run belongs to
    it. Empty without runs."""
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if VERSION_LINE.fullmatch(line.rstrip())]
    if not starts:
        return
    heads = [0, *(_find_head(lines, a, b) for a, b in pairwise(starts))]
    ends = [*heads[1:], len(lines)]
    for head, start, end in zip(heads, starts, ends, strict=True):
        binding, gaps = parse_binding("\n".join(lines[head:start]))
        yield LoggedRun("\n".join(lines[start:end]), start + 1, binding, gaps)


def _find_head(lines: list[str], previous: int, start: int) -> int:
    """Return the start of a run's head: the first line with a binding after the last run."""
    for number in range(previous, start):
        line = lines[number]
        if line.startswith("policy:") or _PINNED.search(line) or bound_by_command(line):
            return number
    return start


def parse_command(head: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the settings of a command that follow numactl's output in the head."""
    lines = head[head.rfind("policy:") + 1 :].split("\n")
    bindings = [binding for binding in map(bound_by_command, lines) if binding is not None]
    return bindings[-1] if bindings else None


def parse_binding(head: str) -> tuple[Binding | None, tuple[Gap, ...]]:
    """The last binding of a head, as shown or set by numactl; else the script's own statement."""
    pinned_nodes = [int(node) for node in _PINNED.findall(head)]
    at = head.rfind("policy:")
    if (command := parse_command(head)) is not None:
        pus, memory = command
        if not pus and not memory:
            return None, (Gap("binding", "the log's numactl names no node, or interleaves"),)
        return Binding(pus, memory or pus), ()
    if at < 0:
        if not pinned_nodes:
            return None, (Gap("binding", "the log has no numactl --show before its results"),)
        return Binding((pinned_nodes[-1],), (pinned_nodes[-1],)), ()
    try:
        binding = Binding(*parse_show(head[at:]))
    except ParseError as error:
        return None, (Gap("binding", error.message),)
    if pinned_nodes and pinned_nodes[-1] not in binding.cpu_nodes:
        # numactl ran before the pinning, or outside it: the script's own line is about the run.
        reason = f"the log has PINNED to {pinned_nodes[-1]}, its numactl --show {binding.cpu_nodes}"
        return Binding((pinned_nodes[-1],), (pinned_nodes[-1],)), (Gap("binding", reason),)
    return binding, ()


_METRIC_OF_TEST: dict[str, tuple[str, str | None]] = {
    "host_to_device_memcpy_ce": ("h2d-bandwidth", None),
    "host_to_device_memcpy_sm": ("h2d-bandwidth", "sm"),
    "device_to_host_memcpy_ce": ("d2h-bandwidth", None),
    "device_to_host_memcpy_sm": ("d2h-bandwidth", "sm"),
    "host_device_latency_sm": ("h2d-latency", None),
    "host_to_device_bidirectional_memcpy_ce": ("h2d-bandwidth", "both ways"),
    "device_to_host_bidirectional_memcpy_ce": ("d2h-bandwidth", "both ways"),
    "host_to_device_bidirectional_memcpy_sm": ("h2d-bandwidth", "sm both ways"),
    "device_to_host_bidirectional_memcpy_sm": ("d2h-bandwidth", "sm both ways"),
    "host_to_all_memcpy_ce": ("h2d-bandwidth", "all at once"),
    "all_to_host_memcpy_ce": ("d2h-bandwidth", "all at once"),
    "device_local_copy": ("d2d-bandwidth", None),
    "device_to_device_memcpy_read_ce": ("p2p-bandwidth", None),
    "device_to_device_memcpy_read_sm": ("p2p-bandwidth", "read sm"),
    "device_to_device_memcpy_write_ce": ("p2p-bandwidth", "write ce"),
    "device_to_device_memcpy_write_sm": ("p2p-bandwidth", "write sm"),
}
"""Test of nvbandwidth -> metric and variant. Other tests keep their names, uncompared."""

_UNITS = {Unit.BYTES_PER_S: "bytes_per_s", Unit.NS: "ns"}
# The row's GPU reads from the column's, whatever the arrow in the description is (testcases_ce.cpp,
# testcases_sm.cpp): the column's GPU is the source.
_READS = frozenset({"device_to_device_memcpy_read_ce", "device_to_device_memcpy_read_sm"})

SMALL_MESSAGE_BYTES = 1024
"""All-reduces up to here are all coordination."""


def read_nvbandwidth_results(run: NvbandwidthRun, binding: Binding | None) -> MeasuredSamples:
    """Return each cell of each passed test. binding: of the process, if its log has it.

    A host copy's node is the node that memory was bound to, else the node of the CPUs. The node of
    the tool's own thread is not a setting: `peer_node`, over which results are compared.
    """
    address_of = {device.index: device.address for device in run.devices}
    gaps = list(run.gaps)
    gaps += [Gap("nvbandwidth", error.removeprefix("nvbandwidth: ")) for error in run.errors]
    samples: list[Sample] = []
    for test in run.tests:
        if test.status is Status.PASSED:
            samples += _read_test_results(test, address_of, binding)
        elif test.status is not Status.WAIVED:
            gaps.append(Gap(f"nvbandwidth {test.name}", f"no result: {test.status}"))
    if not run.devices:
        tool = " ".join(filter(None, ("nvbandwidth", run.version)))
        gaps.append(Gap("GPU addresses", f"{tool} printed none"))
    conditions = []
    if run.version is not None:
        conditions.append(Condition("tool nvbandwidth", run.version))
    if run.driver_version is not None:
        conditions.append(Condition("driver", run.driver_version))
    if binding is not None:
        conditions += binding.conditions()
    names = tuple(dict.fromkeys(device.name for device in run.devices))
    return MeasuredSamples(tuple(samples), tuple(conditions), names, tuple(gaps))


def _read_test_results(
    test: NvbandwidthTest, address_of: dict[int, Bdf | None], binding: Binding | None
) -> Iterator[Sample]:
    name = test.name or ""
    metric, variant = _METRIC_OF_TEST.get(name, (f"nvbandwidth:{name}", None))
    between_gpus = "device_to_device" in name
    node_of_thread = dict(test.threads)
    for matrix in test.matrices:
        parts = [variant, matrix.part]
        if not between_gpus and len(matrix.cells) > 1:
            parts.append("row")  # several CPU rows: no known version prints them
        for row, column, value in _list_cells(matrix, between_gpus=between_gpus):
            words = [part if part != "row" else f"row {row}" for part in parts if part]
            first, second = (column, row) if name in _READS else (row, column)
            fields = _place(first if between_gpus else None, second, matrix, address_of)
            if not between_gpus and binding is not None:
                fields["node"] = binding.node
            elif not between_gpus and second in node_of_thread:
                fields["peer_node"] = node_of_thread[second]
            yield sample(
                metric, _UNITS[matrix.unit], value, variant=" ".join(words) or None, **fields
            )


def _list_cells(
    matrix: NvbandwidthMatrix, *, between_gpus: bool
) -> Iterator[tuple[int, int, float]]:
    """Zeroes are kept and rejected later; before v0.5 the diagonal between GPUs was 0.00, and pairs
    without access still are."""
    for row, cells in enumerate(matrix.cells):
        for column, value in enumerate(cells):
            if value is not None and (value > 0 or not between_gpus):
                yield row, column, value


def _place(
    row: int | None, column: int, matrix: NvbandwidthMatrix, address_of: dict[int, Bdf | None]
) -> dict[str, Any]:
    """Return the GPU of a cell; the first GPU of a pair is the sender."""
    if row is None:
        address = address_of.get(column)
        return {"device": address, "index": None if address is not None else column}
    device, peer = address_of.get(row), address_of.get(column)
    if device is None or peer is None:
        return {"index": row * matrix.columns + column}
    return {"device": device, "peer": peer}


def read_nccl_results(run: NcclTests, collective: str | None) -> MeasuredSamples:
    """Bus bandwidth of each size and half; its peak and mean; time of the smallest message.

    collective: from the file's name, for versions that do not print it. Rates that the two
    decimals of a text cut to 0.00 are omitted.
    """
    name = run.collective or collective
    library = f"library {run.library_version}" if run.library_version else None
    version = " ".join(filter(None, (run.version, library)))
    results = SampleBuilder(f"{run.family}-tests", version, run.gaps)
    if name is None:
        results.add_gap("collective", "neither the output nor the file's name has the collective")
    if run.is_correct is False:
        results.add_gap(f"{name or 'collective'} data", "wrong values: its results are omitted")
        return MeasuredSamples(gaps=results.build_samples().gaps)
    if run.is_correct is None:
        results.add_gap(f"{name or 'collective'} data", "not checked by the run (-c 1 checks)")
    metric = "allreduce" if name == "all_reduce" else (name or "collective").replace("_", "-")
    for row in run.rows:
        for half, variant in ((row.out_of_place, "out-of-place"), (row.in_place, "in-place")):
            if half is not None and half.bus_bytes_per_s > 0:
                fields = {"size_bytes": row.size_bytes, "variant": variant}
                results.add(f"{metric}-busbw", "bytes_per_s", half.bus_bytes_per_s, **fields)
    results.add(f"{metric}-busbw-peak", "bytes_per_s", run.peak_bus_bytes_per_s())
    if run.average_bus_bytes_per_s:
        results.add(f"{metric}-busbw-mean", "bytes_per_s", run.average_bus_bytes_per_s)
    sizes = [row for row in run.rows if row.size_bytes > 0]
    small = min(sizes, key=lambda row: row.size_bytes, default=None)
    if small is not None and small.size_bytes <= SMALL_MESSAGE_BYTES:
        results.add(f"{metric}-latency", "ns", small.list_halves()[0].time_ns)
    largest = max(row.size_bytes for row in run.rows)
    results.add_condition("tool largest message", f"{largest} bytes")
    results.add_condition(COLLECTIVE_GPUS, run.gpus)
    if run.iterations is not None and run.warmups is not None:
        results.add_condition("collective repeats", f"{run.warmups} + {run.iterations}")
    return results.build_samples(run.gpu_names)


def read_copy_results(gpus: tuple[GpuCopies, ...]) -> MeasuredSamples:
    """Return the study's own copies, one GPU at a time."""
    results = SampleBuilder("device copy", "PyTorch, 256 MiB, bytes within a GPU counted once")
    for gpu in gpus:
        for metric, value in (
            ("h2d-bandwidth", gpu.host_to_device),
            ("d2h-bandwidth", gpu.device_to_host),
            ("d2d-bandwidth", gpu.device_to_device),
        ):
            if value is not None:
                results.add(metric, "bytes_per_s", value, index=gpu.device)
    return results.build_samples(gpu.name for gpu in gpus)


def find_half_peak(run: NcclTests) -> int | None:
    """Return the first size with half of the highest bus bandwidth; None if nothing was moved."""
    points = _list_points(run.rows)
    peak = max((rate for _, rate in points), default=0.0)
    return next((size for size, rate in points if rate >= peak / 2), None)


def check_flat_curve(run: NcclTests, subject: str) -> Finding | None:
    """Return the finding of a curve that meets a ceiling. subject: the run, in the user's words."""
    gpus = run.gpus or 1
    fit = fit_flat(_list_points(run.rows), 2 * (gpus - 1) / gpus if gpus > 1 else 1.0)
    if fit is None:
        return None
    return finding(
        "collective-flat-curve",
        subject,
        expected=f"{MIN_RATE_BYTES_PER_S / 1e9:g} GB/s at least, as one lane of PCIe 3.0",
        observed=fit.text,
        severity=Severity.WARNING,
        source="sweep over message sizes",
    )


def _list_points(rows: Sequence[NcclRow]) -> list[tuple[int, float]]:
    """Return (size, bus bandwidth), ascending, without rates that two decimals cut to zero."""
    rates: dict[int, float] = {}
    for row in rows:
        for half in row.list_halves():
            if half.bus_bytes_per_s > 0 and row.size_bytes > 0:
                best = max(rates.get(row.size_bytes, 0.0), half.bus_bytes_per_s)
                rates[row.size_bytes] = best
    return sorted(rates.items())


_BOTH = "both ways together"
"""Variant of rocm-bandwidth-test: it adds both directions; other tools report one."""


def read_rocm_results(run: RocmBandwidthTest, gpus: tuple[Bdf, ...] = ()) -> MeasuredSamples:
    """Return the cells between host and GPUs and between GPUs, one way; the last size of each pair.

    Which devices are GPUs is known by their addresses, or by what a pair says. The tool prints no
    PCI domain: it is that of the one of `gpus` with the same bus, if there is one.

    It measures from every node at once, and numbers CPUs first, in the kernel's order of nodes: if
    the tool lists several CPUs, the n-th is assumed to be node n.
    """
    address_of = {
        device.index: _add_domain(device.address, gpus)
        for device in run.devices
        if device.address is not None
    }
    several = len(run.devices) - len(address_of) > 1
    results = SampleBuilder("rocm-bandwidth-test", run.version, run.gaps)
    for matrix in run.matrices if address_of else ():
        for source, row in zip(matrix.devices, matrix.cells, strict=True):
            for destination, value in zip(matrix.devices, row, strict=True):
                ends = (source not in address_of, destination not in address_of)
                metric = _name_metric(*ends, source == destination)
                if metric is None or value is None:
                    continue
                node = source if ends[0] else destination
                results.add(
                    metric,
                    "bytes_per_s",
                    value,
                    device=address_of.get(source) or address_of[destination],
                    peer=address_of[destination] if metric == "p2p-bandwidth" else None,
                    variant=_BOTH if matrix.is_bidirectional else None,
                    node=node if several and any(ends) else None,
                )
    if several:
        results.add_gap("nodes", "CPU n of rocm-bandwidth-test counts as node n")
    if run.matrices and not address_of:
        results.add_gap("rocm-bandwidth-test devices", "no GPU addresses: its results are skipped")
    last = {(c.is_bidirectional, c.source, c.destination): c for c in run.copies}
    for copy in last.values():
        metric = _name_metric(
            copy.source_is_cpu, copy.destination_is_cpu, copy.source == copy.destination
        )
        if metric is not None:
            variant = _BOTH if copy.is_bidirectional else None
            index = copy.destination if copy.source_is_cpu else copy.source
            results.add(metric, "bytes_per_s", copy.peak_bytes_per_s, index=index, variant=variant)
    return results.build_samples(
        device.name for device in run.devices if device.address is not None
    )


def _add_domain(printed_bdf: Bdf, gpus: tuple[Bdf, ...]) -> Bdf:
    place = (printed_bdf.bus, printed_bdf.device, printed_bdf.function)
    matches = [gpu for gpu in gpus if (gpu.bus, gpu.device, gpu.function) == place]
    return matches[0] if len(matches) == 1 else printed_bdf


def _name_metric(source_is_cpu: bool, destination_is_cpu: bool, is_same: bool) -> str | None:
    if source_is_cpu and destination_is_cpu:
        return None
    if source_is_cpu:
        return "h2d-bandwidth"
    if destination_is_cpu:
        return "d2h-bandwidth"
    return "d2d-bandwidth" if is_same else "p2p-bandwidth"


COPYING_THREAD = "copying thread"
"""Condition: the nodes on which the copying thread ran, if it was not bound."""


def read_torch_run_results(runs: tuple[TorchRun, ...]) -> MeasuredSamples:
    """Return the results of all documents of an output: one document, or one for each node."""
    return join_samples(_read_run_results(run) for run in runs)


def _read_run_results(run: TorchRun) -> MeasuredSamples:
    if run.failed is not None:
        return MeasuredSamples(gaps=(Gap("PyTorch", run.failed),))
    gaps = [Gap(gap.subject, gap.reason) for gap in run.gaps]
    if run.stalled is not None:
        gaps.append(Gap(run.stalled, "did not end: the program stopped itself there"))
    if any(device.address is None for device in run.devices):
        gaps.append(Gap("GPU addresses", "PyTorch reports no addresses: results cannot be paired"))
    samples = tuple(sample for result in run.results for sample in _list_samples(result, run))
    gaps += [gap for result in run.results for gap in _list_result_gaps(result, run)]
    if run.bound_node is not None and any(_lies_unseen(result) for result in run.results):
        reason = "the driver does not report the buffer's node: unconfirmed"
        gaps.append(Gap(f"host memory bound to node {run.bound_node}", reason))
    names = tuple(dict.fromkeys(device.name for device in run.devices))
    results = MeasuredSamples(samples, tuple(_list_conditions(run)), names, tuple(gaps))
    return (
        join_samples((results, read_nccl_results(convert_to_nccl(run), None)))
        if run.rows
        else results
    )


def convert_to_nccl(run: TorchRun) -> NcclTests:
    """Return an all-reduce as nccl-tests would give it. The run has rows."""
    family = Family.RCCL if run.runtime.startswith("hip") else Family.NCCL
    return NcclTests(
        family=family,
        version="as PyTorch does it",
        collective="all_reduce",
        gpus=run.gpus,
        warmups=run.warmups,
        iterations=min(row.iterations for row in run.rows),
        rows=tuple(_convert_row(row, run.gpus) for row in run.rows),
        is_correct=all(row.wrong_ranks == 0 for row in run.rows),
        average_bus_bytes_per_s=_compute_mean(run),
    )


def _convert_row(row: TorchRow, gpus: int) -> NcclRow:
    rate = _compute_bus_rate(row.size_bytes / row.time_ns * 1e9, gpus)
    half = NcclHalf(time_ns=row.time_ns, bus_bytes_per_s=rate, wrong=row.wrong_ranks)
    return NcclRow(size_bytes=row.size_bytes, out_of_place=None, in_place=half)


def _compute_bus_rate(rate: float, gpus: int) -> float:
    """Return 2(n-1)/n of the rate. Source: doc/PERFORMANCE.md of nccl-tests, all-reduce."""
    return rate * 2 * (gpus - 1) / gpus


def _compute_mean(run: TorchRun) -> float:
    rates = [_compute_bus_rate(row.size_bytes / row.time_ns * 1e9, run.gpus) for row in run.rows]
    return sum(rates) / len(rates)


def _list_samples(result: TorchResult, run: TorchRun) -> Iterator[Sample]:
    place = _torch_place(result, run)
    if _lies_elsewhere(result, run):
        return
    for value in result.samples:
        yield sample(
            result.metric,
            result.unit,
            value,
            variant=result.variant,
            size_bytes=result.size_bytes,
            node=_find_node(result, run),
            **place,
        )


def _lies_unseen(result: TorchResult) -> bool:
    return result.metric.startswith(("h2d-", "d2h-")) and result.memory_node is None


def _lies_elsewhere(result: TorchResult, run: TorchRun) -> bool:
    """Return whether a cell belongs to another row of the matrix, whatever was requested."""
    bound, memory_node = run.bound_node, result.memory_node
    return bound is not None and memory_node is not None and memory_node != bound


def _find_node(result: TorchResult, run: TorchRun) -> int | None:
    """Return the host node, for transfers through host memory only."""
    return run.bound_node if result.metric.startswith(("h2d-", "d2h-")) else None


def _torch_place(result: TorchResult, run: TorchRun) -> dict[str, Any]:
    address = run.devices[result.device].address
    if result.peer is None:
        bdf = None if address is None else Bdf.parse(address)
        return {"device": bdf, "index": result.device if bdf is None else None}
    other = run.devices[result.peer].address
    if address is None or other is None:
        return {"index": result.device * len(run.devices) + result.peer}
    return {"device": Bdf.parse(address), "peer": Bdf.parse(other)}


def _list_result_gaps(result: TorchResult, run: TorchRun) -> Iterator[Gap]:
    device = run.devices[result.device]
    name = " ".join(filter(None, (result.metric, result.variant, device.address)))
    if not result.steady:
        yield Gap(name, "did not become steady before it was sampled")
    if _lies_elsewhere(result, run):
        nodes = f"node {run.bound_node} and is on node {result.memory_node}"
        yield Gap(name, f"memory was bound to {nodes}: not kept")


def _list_conditions(run: TorchRun) -> Iterator[Condition]:
    yield Condition("tool PyTorch", f"{run.torch}, {run.runtime}")
    if run.copy_bytes is not None and any("both" in (f.variant or "") for f in run.results):
        yield Condition("tool copy size", f"{run.copy_bytes} bytes")
    if any(result.metric == "d2d-bandwidth" for result in run.results):
        yield Condition("tool device copy", "PyTorch, bytes within a GPU counted once")
    copies = [f for f in run.results if f.metric in ("h2d-bandwidth", "d2h-bandwidth")]
    nodes = {copy.thread.node for copy in copies if copy.thread.node is not None}
    if run.bound_node is None and nodes:
        words = "nodes" if len(nodes) > 1 else "node"
        yield Condition(COPYING_THREAD, f"{words} {CpuSet(nodes)}")
