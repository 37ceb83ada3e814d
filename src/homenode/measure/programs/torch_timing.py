"""Torch timing: results by the GPU's clock, repeated until they are steady. [I/O]

Timed by events in the stream of the work: only the work is between them. The stream
is held by a short spin while the CPU queues a batch, so that slow launches are not measured.
A wall clock around it rejects events that report more time than has passed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FORMAT = "homenode.torch/1"
STEADY_WITHIN = 0.02
"""Three batches in a row that differ by no more: warm."""

MIN_SAMPLES = 5
BATCH_S = 0.02
_MAX_REPEATS = 200
_MAX_SAMPLES = 200
_SPIN_CYCLES = 40_000  # of one launch, at 1 to 2 GHz: 20 to 40 us


class Report:
    """The document that is printed once: at the end, or if a result is missing."""

    def __init__(self, head: dict[str, Any], limit_s: float) -> None:
        self._limit_s = limit_s
        self.document: dict[str, Any] = dict(
            {"format": FORMAT}, **head, results=[], gaps=[], stalled=None
        )
        self._lock = threading.Lock()
        self._is_printed = False

    def figure(self, **fields: Any) -> None:
        self.document["results"].append(fields)

    def gap(self, subject: str, reason: str) -> None:
        self.document["gaps"].append({"subject": subject, "reason": reason})

    def print(self) -> None:
        with self._lock:
            if not self._is_printed:
                self._is_printed = True
                sys.stdout.write(json.dumps(self.document) + "\n")
                sys.stdout.flush()

    def drop(self, device: int) -> None:
        """Forget the results of a GPU."""
        figures = [figure for figure in self.document["results"] if figure["device"] != device]
        self.document["results"] = figures

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Inside the block, a result that takes far too long ends the program with the results so
        far. A call that hangs in the driver cannot be interrupted, so another thread ends the
        program.
        """
        timer = threading.Timer(self._limit_s, self._leave, [name])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _leave(self, name: str) -> None:
        self.document["stalled"] = name
        self.print()
        os._exit(0)


def steady(batch: Callable[[int], float], seconds: float) -> dict[str, Any]:
    """Return the samples of a piece of work, in seconds each: {"samples", "steady", "warmups"}.

    batch: runs it that many times and returns the total seconds. Warms up until three batches agree
    within STEADY_WITHIN, for twice `seconds` at most; then samples for `seconds`.
    """
    batch(1)
    call_s = max(batch(1), 1e-9)
    repeats = max(1, min(_MAX_REPEATS, int(BATCH_S / call_s)))
    last: list[float] = []
    until = time.perf_counter() + 2 * seconds
    warmups = 2
    while time.perf_counter() < until or len(last) < 3:
        last.append(batch(repeats) / repeats)
        warmups += 1
        if len(last) >= 3 and max(last[-3:]) <= min(last[-3:]) * (1 + STEADY_WITHIN):
            break
    is_steady = max(last[-3:]) <= min(last[-3:]) * (1 + STEADY_WITHIN)
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or time.perf_counter() < until:
        samples.append(batch(repeats) / repeats)
        if len(samples) >= _MAX_SAMPLES:
            break
    return {"samples": samples, "steady": is_steady, "warmups": warmups * repeats}


class TimedStream:
    """A stream of one GPU, with work that is timed by its own events."""

    def __init__(self, torch: Any, device: int, work: Callable[[], Any]) -> None:
        self._torch, self._work, self.device = torch, work, device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._begin = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)

    def hold(self, launches: int) -> None:
        """Spin while this number of launches is queued behind."""
        with self._torch.cuda.device(self.device), self._torch.cuda.stream(self._stream):
            self._torch.cuda._sleep(min(launches, 2 * _MAX_REPEATS) * _SPIN_CYCLES)

    def queue(self, repeats: int) -> None:
        with self._torch.cuda.device(self.device), self._torch.cuda.stream(self._stream):
            self._begin.record(self._stream)
            for _ in range(repeats):
                self._work()
            self._end.record(self._stream)

    def seconds(self) -> float:
        """Wait for the last queued work, and return its seconds."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3

    def finish(self) -> None:
        self._stream.synchronize()


def time_copies(lane: TimedStream, neighbours: list[TimedStream], repeats: int) -> float:
    """Return the seconds of `repeats` on a lane while the others, if any, are busy all the time.

    Raises RuntimeError if the GPU's clock gives no time, or more than has passed.
    """
    before = time.perf_counter()
    for other_lane in (*neighbours, lane):
        other_lane.hold(repeats * (1 + 3 * len(neighbours)))
    for other_lane in neighbours:
        other_lane.queue(3 * repeats)  # outlasts what is timed, also if it is the faster one
    lane.queue(repeats)
    seconds = lane.seconds()
    for other_lane in neighbours:
        other_lane.finish()
    elapsed_s = time.perf_counter() - before
    if seconds <= 0:
        raise RuntimeError("events show that no time has passed")
    if seconds > elapsed_s * 1.05 + 1e-4:
        raise RuntimeError(f"events show {seconds:g} s, {elapsed_s:g} s have passed")
    return seconds
