"""The GH200 study's files, made up in its layout, with the means that its summary prints.

No figure but the means is published. Each file deviates from them by a little; the deviations add
up to nothing, so that every mean is exactly the printed one.
"""

from collections.abc import Callable
from pathlib import Path

_DEVICES = ("00000009:01:00", "00000019:01:00", "00000029:01:00", "00000039:01:00")
_NODES = "0 1 2 3 4 12 20 28"

H2D = (411.6, 88.6)
"""Local, remote; GB/s."""
D2H = (169.4, 88.3)
LATENCY_NS = (739.0, 1109.0)
GPU_TO_GPU = 130.0
_TESTS = (
    ("host_to_device_memcpy_ce", "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)"),
    ("device_to_host_memcpy_ce", "memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)"),
    ("host_device_latency_sm", "memory latency SM CPU(row) <-> GPU(column) (ns)"),
)
_WOBBLE = (0.4, -0.1, -0.4, 0.1)


def write_study(directory: Path) -> None:
    """The ten files of data/transfer."""
    directory.mkdir(parents=True, exist_ok=True)
    for node in range(4):
        (directory / f"exclusive_4gpu_node{node}.txt").write_text(exclusive(node))
        (directory / f"shared_array_1gpu_node{node}.txt").write_text(shared((node,)))
    for node in range(2):
        text = shared((2 * node, 2 * node + 1))
        (directory / f"shared_array_2gpu_node{node}.txt").write_text(text)


def exclusive(node: int) -> str:
    """A whole node, pinned to one of its NUMA nodes."""
    head = f"=== PINNED to {node} ===\n" + _show("bind", (node,), str(node))
    return head + _log((0, 1, 2, 3), lambda gpu: gpu == node, node)


def shared(gpus: tuple[int, ...]) -> str:
    """A job of the shared queue: CPUs on its GPUs' nodes, memory wherever."""
    return _show("default", gpus, _NODES) + _log(gpus, lambda gpu: True, gpus[0])


def _show(policy: str, cpu_nodes: tuple[int, ...], memory: str) -> str:
    pus = " ".join(str(pu) for node in cpu_nodes for pu in range(72 * node, 72 * node + 72))
    nodes = " ".join(map(str, cpu_nodes))
    return (
        f"policy: {policy}\npreferred node: {cpu_nodes[0]}\nphyscpubind: {pus} \n"
        f"cpubind: {nodes} \nnodebind: {nodes} \nmembind: {memory} \n"
    )


def _log(gpus: tuple[int, ...], is_local: Callable[[int], bool], row: int) -> str:
    devices = "".join(
        f"Device {n}: NVIDIA GH200 120GB ({_DEVICES[gpu]})\n" for n, gpu in enumerate(gpus)
    )

    def figures(local: float, remote: float) -> list[float]:
        # In a Latin square each GPU and each row meets each deviation once.
        return [(local if is_local(g) else remote) + _WOBBLE[_step(row, g)] for g in gpus]

    text = (
        "nvbandwidth Version: v0.6\nBuilt from Git version: v0.6\n\n"
        "CUDA Runtime Version: 12060\nCUDA Driver Version: 12060\nDriver Version: 560.35.03\n\n"
        f"{devices}\n"
    )
    for (test, title), means in zip(_TESTS, (H2D, D2H, LATENCY_NS), strict=True):
        text += _matrix(test, title, figures(*means))
    return text + (_pairs(len(gpus)) if len(gpus) > 1 else "")


def _step(row: int, gpu: int) -> int:
    """Which deviation: the local cells meet each of them once, the others three times."""
    return row if row == gpu else gpu


def _matrix(test: str, title: str, values: list[float]) -> str:
    columns = "".join(f"{n:13d}" for n in range(len(values)))
    cells = "".join(f"{value:13.2f}" for value in values)
    return f"Running {test}.\n{title}\n  {columns}\n 0{cells}\n\nSUM {test} {sum(values):.2f}\n\n"


def _pairs(count: int) -> str:
    test = "device_to_device_memcpy_read_ce"
    columns = "".join(f"{n:13d}" for n in range(count))
    rows = "".join(
        f" {a}"
        + "".join(f"{'N/A' if a == b else f'{GPU_TO_GPU:.2f}':>13}" for b in range(count))
        + "\n"
        for a in range(count)
    )
    total = GPU_TO_GPU * count * (count - 1)
    title = "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)"
    return f"Running {test}.\n{title}\n  {columns}\n{rows}\nSUM {test} {total:.2f}\n\n"
