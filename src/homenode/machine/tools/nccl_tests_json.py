"""The file of nccl-tests -J: see nccl_tests for the tool.

    {"version": 3, "args": [...], "env": [...], "nccl_version": 22809, "config": {...},
     "results": [{"size": 8, "count": 2, "type": "float", "redop": "sum", "root": "    -1",
       "out_of_place": {"time": 21.53, "alg_bw": ..., "bus_bw": ..., "nwrong": 0.0}, ...}],
     "average_bus_bandwidth": {"bandwidth": 248.72, "okay": "unchecked"}, ...}

Booleans are "true" and "false"; a number may be the text "nan". Version 1 spells "bandwidith".
"""

from typing import Any

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.tools.figures import LARGEST
from homenode.machine.tools.json_documents import whole
from homenode.machine.tools.nccl_tests_records import (
    MAX_ROWS,
    SOURCE,
    Family,
    NcclHalf,
    NcclRank,
    NcclRow,
    NcclTests,
)
from homenode.machine.tools.nccl_tests_text import address_of, is_correct

# Not read: args and env hold the user's environment.
_KEYS = set(
    """
    version start_time args env nccl_version config results out_of_bounds
    average_bus_bandwidth average_bus_bandwidith errors end_time
""".split()
)
_AVERAGES = (
    ("average_bus_bandwidth", "bandwidth"),
    ("average_bus_bandwidith", "bandwidith"),
    ("average_bus_bandwidith", "bandwidth"),
    ("average_bus_bandwidth", "bandwidith"),
)
_COLLECTIVES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AlltoAll": "alltoall",
    "AlltoAllv": "alltoallv",
    "SendRecv": "sendrecv",
    "HyperCube": "hypercube",
}


def parse_json(text: str) -> NcclTests:
    """The run of a file. Raises ParseError."""
    document = whole(text, SOURCE)
    gaps = [Gap(SOURCE, f"key not known: {key[:80]!r}") for key in sorted(set(document) - _KEYS)]
    config = _object(document.get("config", {}), "config")
    results = _list(document.get("results"), "results")
    rows = tuple(_row(entry) for entry in results[: MAX_ROWS + 1])
    if not 0 < len(rows) <= MAX_ROWS:
        raise ParseError(SOURCE, f"1 to {MAX_ROWS} results", str(len(results)))
    errors = document.get("errors")
    gaps += [Gap(SOURCE, f"error: {str(e)[:200]}") for e in (errors if errors else [])][:16]
    out_of_bounds = _object(document.get("out_of_bounds", {}), "out_of_bounds").get("count")
    library = document.get("nccl_version")
    return NcclTests(
        Family.NCCL,
        None,
        None if library is None else str(_whole(library, "nccl_version")),
        _collective(results[0]),
        _gpus(config),
        _whole_or_none(config.get("warmup_iters"), "warmup_iters"),
        _whole_or_none(config.get("iterations"), "iterations"),
        _ranks(config.get("devices", [])),
        rows,
        is_correct(rows, _whole_or_none(out_of_bounds, "out_of_bounds")),
        _average(document),
        tuple(gaps),
    )


def _row(entry: Any) -> NcclRow:
    row = _object(entry, "a result")
    halves = [_half(row.get(name), name) for name in ("out_of_place", "in_place")]
    if halves == [None, None]:
        raise ParseError(SOURCE, "a result out of place or in place", "none")
    root = str(row.get("root", "-1")).strip()
    if not (root == "-1" or (root.isascii() and root.isdigit() and len(root) < 10)):
        raise ParseError(SOURCE, "a root", root)
    return NcclRow(
        _whole(row.get("size"), "size"),
        _whole(row.get("count"), "count"),
        str(row.get("type", ""))[:40],
        str(row.get("redop", ""))[:40],
        None if root == "-1" else int(root),
        halves[0],
        halves[1],
    )


def _half(value: Any, name: str) -> NcclHalf | None:
    if value is None:
        return None
    half = _object(value, name)
    time_us = half.get("time", half.get("cpu_time"))
    wrong = _number_or_none(half.get("nwrong"), "nwrong")
    return NcclHalf(
        _number(time_us, "time") * 1e3,
        _number(half.get("alg_bw"), "alg_bw") * 1e9,
        _number(half.get("bus_bw"), "bus_bw") * 1e9,
        None if wrong is None else int(wrong),
    )


def _ranks(entries: Any) -> tuple[NcclRank, ...]:
    hosts: list[str] = []
    ranks = []
    for entry in _list(entries, "devices"):
        device = _object(entry, "a device")
        host = str(device.get("hostname", ""))
        if host not in hosts:
            hosts.append(host)
        ranks.append(
            NcclRank(
                _whole(device.get("rank"), "rank"),
                hosts.index(host),
                _whole(device.get("device"), "device"),
                address_of(str(device.get("device_hex", "0x"))),
                str(device.get("device_info", ""))[:200].strip(),
            )
        )
    return tuple(ranks)


def _gpus(config: dict[str, Any]) -> int | None:
    """GPUs of one process: threads times GPUs of each."""
    threads, gpus = config.get("nthreads"), config.get("ngpus")
    if threads is None or gpus is None:
        return None
    return _whole(threads, "nthreads") * _whole(gpus, "ngpus")


def _collective(first: Any) -> str | None:
    name = first.get("experiment_name") if isinstance(first, dict) else None
    if not isinstance(name, str):
        return None
    return _COLLECTIVES.get(name, name.lower()[:40])


def _average(document: dict[str, Any]) -> float | None:
    for key, inner in _AVERAGES:
        holder = document.get(key)
        if isinstance(holder, dict) and inner in holder:
            value = _number_or_none(holder[inner], inner)
            return None if value is None else value * 1e9
    return None


def _number(value: Any, what: str) -> float:
    found = _number_or_none(value, what)
    if found is None:
        raise ParseError(SOURCE, f"{what}: a number", str(value)[:40])
    return found


def _number_or_none(value: Any, what: str) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() in ("nan", "-nan")):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParseError(SOURCE, f"{what}: a number", str(value)[:40])
    if value != value:  # NaN, which is no JSON but is written and read
        return None
    if not 0 <= value < LARGEST:
        raise ParseError(SOURCE, f"{what}: a number from 0 to {LARGEST:g}", str(value)[:40])
    return float(value)


def _whole(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
        raise ParseError(SOURCE, f"{what}: a whole number", str(value)[:40])
    return value


def _whole_or_none(value: Any, what: str) -> int | None:
    return None if value is None else _whole(value, what)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ParseError(SOURCE, f"{what}: an object", type(value).__name__)
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ParseError(SOURCE, f"{what}: a list", type(value).__name__)
    return value
