"""GPU matrix: what `nvidia-smi topo -m` alone says of the place of GPUs, and of its caller."""

from collections.abc import Iterator
from itertools import combinations

from homenode.cpuset import CpuSet
from homenode.findings import Finding, finding
from homenode.machine.tools.nvidia_smi import TopoDevice, TopoMatrix
from homenode.text import first_few

_MOST_NAMED = 8


def matrix_findings(matrix: TopoMatrix, source: str) -> Iterator[Finding]:
    """GPUs on nodes of which the caller of nvidia-smi has no CPU."""
    far = [gpu for _, gpu in _list_gpus(matrix) if gpu.nodes and not gpu.cpus]
    if far:
        nodes = CpuSet(node for gpu in far for node in gpu.nodes or ())
        yield finding(
            "job-gpu-far",
            first_few((gpu.name for gpu in far), _MOST_NAMED),
            expected=f"CPUs of node {nodes}, where they are (NUMA Affinity)",
            observed=f"the job, or whoever ran nvidia-smi, has no CPU of node {nodes}: CPU "
            "Affinity is empty",
            source=source,
        )


def describe_matrix(matrix: TopoMatrix) -> str | None:
    """Return which nodes the GPUs are on and what SYS means, or None if no node is shown."""
    if not any(gpu.nodes for _, gpu in _list_gpus(matrix)):
        return None
    numbers_on: dict[str, list[int]] = {}
    for _, gpu in _list_gpus(matrix):
        numbers_on.setdefault(str(CpuSet(gpu.nodes or ())), []).append(int(gpu.name[3:]))
    places = ", ".join(
        f"{'GPU' if len(numbers) == 1 else 'GPUs'} {CpuSet(numbers)} on "
        f"{f'node {nodes}' if nodes else 'a node that is not shown'}"
        for nodes, numbers in numbers_on.items()
    )
    is_no_hint = any(
        matrix.links[row][other] == "SYS" and first.nodes and first.nodes == second.nodes
        for (row, first), (other, second) in combinations(_list_gpus(matrix), 2)
    )
    hint = "; SYS stands between GPUs of one node too, so it shows nothing about nodes"
    return f"{places}, by NUMA Affinity{hint if is_no_hint else ''}"


def _list_gpus(matrix: TopoMatrix) -> list[tuple[int, TopoDevice]]:
    rows = enumerate(matrix.devices)
    return [(row, device) for row, device in rows if device.name.startswith("GPU")]
