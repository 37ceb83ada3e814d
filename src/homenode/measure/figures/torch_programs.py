"""Torch figures: samples of homenode's PyTorch programs, keyed by the GPUs' addresses."""

from collections.abc import Iterator
from typing import Any

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Gap
from homenode.machine.tools.nccl_tests import CollectiveLibrary as Family
from homenode.machine.tools.nccl_tests import NcclHalf, NcclRow, NcclTests
from homenode.machine.tools.torch_report import TorchResult, TorchRow, TorchRun
from homenode.measure.figures.gpu_tools import read_nccl_results
from homenode.measure.figures.sample import MeasuredSamples, join_samples, sample
from homenode.measure.results.model import Condition, Sample

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
    samples = tuple(figures for figure in run.results for figures in _list_samples(figure, run))
    gaps += [gap for figure in run.results for gap in _result_gaps(figure, run)]
    if run.bound_node is not None and any(_lies_unseen(figure) for figure in run.results):
        reason = "the driver does not report the buffer's node: unconfirmed"
        gaps.append(Gap(f"host memory bound to node {run.bound_node}", reason))
    names = tuple(dict.fromkeys(device.name for device in run.devices))
    figures = MeasuredSamples(samples, tuple(_list_conditions(run)), names, tuple(gaps))
    return (
        join_samples((figures, read_nccl_results(convert_to_nccl(run), None)))
        if run.rows
        else figures
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


def _list_samples(figure: TorchResult, run: TorchRun) -> Iterator[Sample]:
    place = _place(figure, run)
    if _lies_elsewhere(figure, run):
        return
    for value in figure.samples:
        yield sample(
            figure.metric,
            figure.unit,
            value,
            variant=figure.variant,
            size_bytes=figure.size_bytes,
            node=_find_node(figure, run),
            **place,
        )


def _lies_unseen(figure: TorchResult) -> bool:
    return figure.metric.startswith(("h2d-", "d2h-")) and figure.memory_node is None


def _lies_elsewhere(figure: TorchResult, run: TorchRun) -> bool:
    """Return whether a cell belongs to another row of the matrix, whatever was requested."""
    bound, memory_node = run.bound_node, figure.memory_node
    return bound is not None and memory_node is not None and memory_node != bound


def _find_node(figure: TorchResult, run: TorchRun) -> int | None:
    """Return the host node, for transfers through host memory only."""
    return run.bound_node if figure.metric.startswith(("h2d-", "d2h-")) else None


def _place(figure: TorchResult, run: TorchRun) -> dict[str, Any]:
    address = run.devices[figure.device].address
    if figure.peer is None:
        bdf = None if address is None else Bdf.parse(address)
        return {"device": bdf, "index": figure.device if bdf is None else None}
    other = run.devices[figure.peer].address
    if address is None or other is None:
        return {"index": figure.device * len(run.devices) + figure.peer}
    return {"device": Bdf.parse(address), "peer": Bdf.parse(other)}


def _result_gaps(figure: TorchResult, run: TorchRun) -> Iterator[Gap]:
    device = run.devices[figure.device]
    name = " ".join(filter(None, (figure.metric, figure.variant, device.address)))
    if not figure.steady:
        yield Gap(name, "did not become steady before it was sampled")
    if _lies_elsewhere(figure, run):
        nodes = f"node {run.bound_node} and is on node {figure.memory_node}"
        yield Gap(name, f"memory was bound to {nodes}: not kept")


def _list_conditions(run: TorchRun) -> Iterator[Condition]:
    yield Condition("tool PyTorch", f"{run.torch}, {run.runtime}")
    if run.copy_bytes is not None and any("both" in (f.variant or "") for f in run.results):
        yield Condition("tool copy size", f"{run.copy_bytes} bytes")
    if any(figure.metric == "d2d-bandwidth" for figure in run.results):
        yield Condition("tool device copy", "PyTorch, bytes within a GPU counted once")
    copies = [f for f in run.results if f.metric in ("h2d-bandwidth", "d2h-bandwidth")]
    nodes = {copy.thread.node for copy in copies if copy.thread.node is not None}
    if run.bound_node is None and nodes:
        words = "nodes" if len(nodes) > 1 else "node"
        yield Condition(COPYING_THREAD, f"{words} {CpuSet(nodes)}")
