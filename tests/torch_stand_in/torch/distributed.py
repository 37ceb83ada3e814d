"""torch.distributed: ranks meet in files next to the store; an all-reduce takes its time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from . import cuda

_SETTINGS = json.loads(os.environ.get("STAND_IN", "{}"))


class ReduceOp:
    SUM, MAX = "sum", "max"


class _World:
    rank = 0
    size = 1
    calls = 0
    store = Path()


def init_process_group(
    backend: str, *, init_method: str, rank: int, world_size: int, timeout: Any
) -> None:
    assert backend == "nccl"
    _World.rank, _World.size, _World.calls = rank, world_size, 0
    _, _, place = init_method.partition("://")
    _World.store = Path(os.environ.get("STAND_IN_SHARED", "")) / f"{place}.stand-in"
    _World.store.mkdir(exist_ok=True)
    if _SETTINGS.get("rank_fails") == rank:
        raise RuntimeError("NCCL error: unhandled system error")
    barrier()


def destroy_process_group() -> None:
    barrier()


def _meet(value: Any) -> list[Any]:
    number, _World.calls = _World.calls, _World.calls + 1
    part = _World.store / f"part.{_World.rank}"
    part.write_text(json.dumps(value))
    part.rename(_World.store / f"{number}.{_World.rank}")
    paths = [_World.store / f"{number}.{rank}" for rank in range(_World.size)]
    while not all(path.exists() for path in paths):
        time.sleep(0.0005)
    return [json.loads(path.read_text()) for path in paths]


def barrier() -> None:
    _meet(None)


def broadcast(tensor: Any, source: int) -> None:
    tensor.store.value = _meet(tensor.store.value)[source]


def all_reduce(tensor: Any, op: str = ReduceOp.SUM) -> None:
    size = tensor.size_bytes
    if size == _SETTINGS.get("hangs_at"):
        time.sleep(3600)
    if tensor.store.value != 0.0 or size == 4:
        values = _meet(tensor.store.value)
        tensor.store.value = max(values) if op == ReduceOp.MAX else sum(values)
        if size == _SETTINGS.get("wrong_at") and _World.rank == 1:
            tensor.store.value += 1
    rate = 2e9 if os.environ.get("NCCL_P2P_DISABLE") == "1" else 10e9
    cuda.enqueue(None, 20e-6 + size / rate)
