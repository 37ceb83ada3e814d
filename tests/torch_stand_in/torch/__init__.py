"""PyTorch's calls that our programs use, on GPUs that only take time.

STAND_IN holds JSON: {"addresses": [...], "refuses": [...], "hangs": ..., "wrong": true, "rates":
{...}}. Time passes for real, so that wall clocks and events agree.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from . import cuda as cuda
from . import distributed as distributed

__version__ = "2.99.0+standin"

SETTINGS: dict[str, Any] = json.loads(os.environ.get("STAND_IN", "{}"))
RATES = {
    "h2d": 50e9,
    "d2h": 40e9,
    "sm": 30e9,
    "local": 2e12,
    "p2p": 20e9,
    "highest": 50e12,
    "high": 400e12,
    "bfloat16": 800e12,
    "float16": 780e12,
    **SETTINGS.get("rates", {}),
}


class Dtype:
    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size


int32, float32 = Dtype("int32", 4), Dtype("float32", 4)
bfloat16, float16 = Dtype("bfloat16", 2), Dtype("float16", 2)


class version:  # noqa: N801
    cuda = "13.2"
    hip = None


class Store:
    """What a tensor and its slices share. value: of all its elements, or a pattern's name."""

    next_pointer = 1 << 40

    def __init__(self, value: Any, device: int | None) -> None:
        self.value, self.device = value, device
        self.pointer = Store.next_pointer
        Store.next_pointer += 1 << 34
        STORES[self.pointer] = self


STORES: dict[int, Store] = {}


class Tensor:
    def __init__(self, shape: tuple[int, ...], dtype: Dtype, store: Store) -> None:
        self.shape, self.dtype, self.store = shape, dtype, store

    @property
    def size_bytes(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.size

    def data_ptr(self) -> int:
        return self.store.pointer

    def __getitem__(self, part: slice) -> Tensor:
        length = len(range(*part.indices(self.shape[0])))
        return Tensor((length, *self.shape[1:]), self.dtype, self.store)

    def __eq__(self, other: object) -> Any:
        return Tensor((1,), int32, Store(self.store.value == other, None))

    __hash__ = None  # type: ignore[assignment]

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        way = (source.store.device, self.store.device)
        if source.store.value != "wrong":
            self.store.value = source.store.value
        if way == (None, None):
            return
        kind = "h2d" if way[0] is None else "d2h" if way[1] is None else "p2p"
        kind = "local" if way[0] == way[1] else kind
        _refuse(kind)
        rate = RATES[kind] / 2 if kind == "local" else RATES[kind]
        device = way[0] if way[0] is not None else way[1]
        cuda.enqueue(device, 5e-6 + self.size_bytes / rate)

    def fill_(self, value: Any) -> None:
        self.store.value = "wrong" if SETTINGS.get("wrong") else value

    def zero_(self) -> None:
        self.store.value = 0.0

    def cpu(self) -> Tensor:
        return Tensor(self.shape, self.dtype, Store(self.store.value, None))

    def to(self, dtype: Dtype) -> Tensor:
        return Tensor(self.shape, dtype, Store(self.store.value, self.store.device))

    def clone(self) -> Tensor:
        return self.to(self.dtype)

    def all(self) -> Any:
        return self.store.value

    def min(self) -> Any:
        return 0 if isinstance(self.store.value, str) else self.store.value

    def item(self) -> Any:
        return self.store.value


def _refuse(kind: str) -> None:
    if kind in SETTINGS.get("refuses", ()):
        raise RuntimeError(f"{kind}: refused by the stand-in")
    if kind == SETTINGS.get("hangs"):
        time.sleep(3600)


def _device(text: str | None) -> int | None:
    return None if text is None else int(text.rpartition(":")[2])


def empty(
    *shape: int, dtype: Dtype = float32, device: str | None = None, pin_memory: bool = False
) -> Tensor:
    return Tensor(shape, dtype, Store("junk", _device(device)))


def zeros(*shape: int, dtype: Dtype = float32, device: str | None = None) -> Tensor:
    return Tensor(shape, dtype, Store(0, _device(device)))


def full(shape: tuple[int, ...], value: float, *, dtype: Dtype, device: str) -> Tensor:
    return Tensor(shape, dtype, Store(value, _device(device)))


def arange(count: int, dtype: Dtype = int32) -> Tensor:
    return Tensor((count,), dtype, Store("arange", None))


def randn(*shape: int, device: str) -> Tensor:
    return Tensor(shape, float32, Store("normal", _device(device)))


def empty_like(other: Tensor) -> Tensor:
    return Tensor(other.shape, other.dtype, Store("junk", other.store.device))


def as_tensor(shown: Any, device: str) -> Tensor:
    interface = shown.__cuda_array_interface__
    if "alias" in SETTINGS.get("refuses", ()):
        return zeros(*interface["shape"], dtype=int32, device=device)
    return Tensor(interface["shape"], int32, STORES[interface["data"][0]])


def equal(first: Tensor, second: Tensor) -> bool:
    return bool(first.store.value == second.store.value)


def manual_seed(seed: int) -> None:
    return None


_precision = ["highest"]


def set_float32_matmul_precision(name: str) -> None:
    _precision[0] = name


def add(first: Tensor, second: int, *, out: Tensor) -> None:
    _refuse("sm")
    device = out.store.device if out.store.device is not None else first.store.device
    cuda.enqueue(device, 5e-6 + out.size_bytes / RATES["sm"])


def mm(first: Tensor, second: Tensor, *, out: Tensor) -> None:
    kind = _precision[0] if first.dtype is float32 else first.dtype.name
    out.store.value = "fp32" if kind == "high" and SETTINGS.get("no_tf32") else kind
    if kind == "highest":
        out.store.value = "fp32"
    cuda.enqueue(first.store.device, 2 * first.shape[0] ** 3 / RATES[kind])
