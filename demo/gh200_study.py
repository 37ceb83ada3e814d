"""Files in the format of the published study of GH200 nodes under Slurm, made up and marked so.

    demo/gh200_study.py DIRECTORY

The study prints summary figures and no matrix. These logs
have its layout: nvbandwidth 0.6 under `numactl --show`, one file for each node in the exclusive
queue and for each job in the shared one. Their means are its seven figures; single cells are made
up around them. The first line of each says so, and `homenode import` keeps that.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

GPUS = 4
PUS_OF_NODE = 72
MARK = "# synthesised: made up around published means, in the format of the study's logs"

LOCAL = {"h2d": 411.6, "d2h": 169.4, "latency": 739.0}
REMOTE = {"h2d": 88.6, "d2h": 88.3, "latency": 1109.0}
"""GB/s and ns, as the study's summary prints them."""

_AROUND_LOCAL = (-0.9, 0.4, 0.7, -0.2)
_AROUND_REMOTE = (0.3, -0.2, -0.1, 0.1, 0.2, -0.3, -0.4, 0.1, 0.3, 0.2, 0.1, -0.3)
"""Add up to nothing, so that the means are the printed ones."""


def cells(what: str) -> tuple[tuple[float, ...], ...]:
    """A 4 x 4 matrix: row = node of memory and threads, column = GPU."""
    scale = 10.0 if what == "latency" else 1.0
    remote = iter(_AROUND_REMOTE)
    return tuple(
        tuple(
            round(
                LOCAL[what] + scale * _AROUND_LOCAL[node]
                if gpu == node
                else REMOTE[what] + scale * next(remote),
                2,
            )
            for gpu in range(GPUS)
        )
        for node in range(GPUS)
    )


def files() -> dict[str, str]:
    """Each file's name and text."""
    found = {}
    matrices = {what: cells(what) for what in LOCAL}
    for node in range(GPUS):
        rows = {what: matrix[node] for what, matrix in matrices.items()}
        found[f"exclusive_4gpu_node{node}.txt"] = _log(
            f"=== PINNED to {node} ===", (node,), (node,), range(GPUS), rows
        )
    for job in range(GPUS):
        rows = {what: (matrix[job][job],) for what, matrix in matrices.items()}
        found[f"shared_array_1gpu_node{job}.txt"] = _log(
            f"Slurm array task {job}", (job,), None, (job,), rows
        )
    for job in range(2):
        gpus = (2 * job, 2 * job + 1)
        rows = {what: tuple(matrix[gpu][gpu] for gpu in gpus) for what, matrix in matrices.items()}
        found[f"shared_array_2gpu_node{job}.txt"] = _log(
            f"Slurm array task {job}", gpus, None, gpus, rows
        )
    return found


def write(directory: Path) -> None:
    """Write the files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (directory / name).write_text(text, encoding="utf-8")


_TESTS = (
    ("h2d", "host_to_device_memcpy_ce", "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)"),
    ("d2h", "device_to_host_memcpy_ce", "memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)"),
    ("latency", "host_device_latency_sm", "memory latency SM CPU(row) <-> GPU(column) (ns)"),
)


def _log(
    head: str,
    nodes: Sequence[int],
    memory: Sequence[int] | None,
    gpus: Sequence[int],
    rows: dict[str, tuple[float, ...]],
) -> str:
    """One log. memory: nodes it was bound to; None = as Slurm's shared queue leaves it."""
    pus = " ".join(str(node * PUS_OF_NODE + pu) for node in nodes for pu in range(PUS_OF_NODE))
    bound = "0 1 2 3 4 12 20 28" if memory is None else " ".join(map(str, memory))
    policy = "default" if memory is None else "bind"
    listed = " ".join(map(str, nodes))
    lines = [
        MARK,
        head,
        f"policy: {policy}",
        f"preferred node: {nodes[0]}",
        f"physcpubind: {pus} ",
        f"cpubind: {listed} ",
        f"nodebind: {listed} ",
        f"membind: {bound} ",
        "preferred: ",
        "nvbandwidth Version: v0.6",
        "Built from Git version: v0.6",
        "",
        "CUDA Runtime Version: 12060",
        "CUDA Driver Version: 12060",
        "Driver Version: 560.35.03",
        "",
        *(f"Device {n}: NVIDIA GH200 120GB (000000{gpu}9:01:00)" for n, gpu in enumerate(gpus)),
        "",
    ]
    columns = "".join(f"{number:>10}" for number in range(len(gpus)))
    for what, name, title in _TESTS:
        figures = "".join(f"{value:>10.2f}" for value in rows[what])
        lines += [
            f"Running {name}.",
            title,
            f"  {columns}",
            f" 0{figures}",
            "",
            f"SUM {name} {sum(rows[what]):.2f}",
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
