"""Torch programs: samples of homenode's PyTorch programs, keyed by the GPUs' addresses."""

from collections.abc import Iterator
from typing import Any

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Gap
from homenode.machine.tools.nccl_tests import CollectiveLibrary as Family
from homenode.machine.tools.nccl_tests import NcclHalf, NcclRow, NcclTests
from homenode.machine.tools.torch_report import TorchResult, TorchRow, TorchRun
from homenode.measure.results.model import Condition, Sample
from homenode.measure.samples.gpu_tools import read_nccl_results
from homenode.measure.samples.sample import MeasuredSamples, join_samples, sample

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
    place = _place(result, run)
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


def _place(result: TorchResult, run: TorchRun) -> dict[str, Any]:
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
