"""torch.cuda: streams are moments until which they are busy, on the clock of this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SETTINGS = json.loads(os.environ.get("STAND_IN", "{}"))
_ADDRESSES: list[str] = _SETTINGS.get("addresses", ["0000:19:00.0", "0000:9b:00.0"])


class Properties:
    def __init__(self, address: str) -> None:
        self.name = _SETTINGS.get("name", "NVIDIA Stand-in")
        if not _SETTINGS.get("hides_addresses"):
            domain, bus, rest = address.split(":")
            self.pci_domain_id, self.pci_bus_id = int(domain, 16), int(bus, 16)
            self.pci_device_id = int(rest.partition(".")[0], 16)


class Stream:
    def __init__(self, device: int) -> None:
        self.device, self.busy_until = device, 0.0

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.busy_until - time.perf_counter()))


_defaults = [Stream(number) for number in range(len(_ADDRESSES))]
_current = list(_defaults)
_device = [0]


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        chosen = stream or _current[_device[0]]
        self.at = max(time.perf_counter(), chosen.busy_until)

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3 * float(_SETTINGS.get("event_scale", 1.0))


def enqueue(device: int | None, seconds: float) -> None:
    stream = _current[_device[0] if device is None else device]
    stream.busy_until = max(time.perf_counter(), stream.busy_until) + seconds


def is_available() -> bool:
    return bool(_ADDRESSES)


def device_count() -> int:
    return len(_ADDRESSES)


def get_device_properties(device: int) -> Properties:
    return Properties(_ADDRESSES[device])


def can_device_access_peer(device: int, peer: int) -> bool:
    return not _SETTINGS.get("no_peers")


def mem_get_info(device: int) -> tuple[int, int]:
    return 80 << 30, 80 << 30


def set_device(device: int) -> None:
    _device[0] = device


def current_stream(device: int) -> Stream:
    return _current[device]


def synchronize(device: int | None = None) -> None:
    _current[_device[0] if device is None else device].synchronize()


def _sleep(cycles: int) -> None:
    enqueue(None, cycles / 2e9)


@contextmanager
def device(number: int) -> Iterator[None]:
    before, _device[0] = _device[0], number
    try:
        yield
    finally:
        _device[0] = before


@contextmanager
def stream(chosen: Any) -> Iterator[None]:
    before, _current[chosen.device] = _current[chosen.device], chosen
    try:
        yield
    finally:
        _current[chosen.device] = before
