"""Rows: every figure of a report as a flat row: what CSV, JSON and Parquet hold."""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import msgspec

from homenode.decide.alternative import Alternative
from homenode.decide.compare import series_key
from homenode.decide.comparison import Effect
from homenode.decide.summary import Series, SeriesKey
from homenode.errors import HostError
from homenode.measure.results.model import FigureKey
from homenode.show.page.machine import ReportedMachine
from homenode.wording import csv_text

VERSION = 1
"""Of the rows, whatever they are written as."""

COLUMNS = {
    "machine": "string",
    "system": "string",
    "layout": "string",
    "pinning": "string",
    "siblings": "string",
    "cells": "string",
    "pcie": "string",
    "memory": "string",
    "arrangement": "string",
    "memory_mode": "string",
    "page_bytes": "int64",
    "vcpus": "int64",
    "origin": "string",
    "vantage": "string",
    "metric": "string",
    "unit": "string",
    "variant": "string",
    "size_bytes": "int64",
    "node": "int64",
    "peer_node": "int64",
    "device": "string",
    "peer": "string",
    "state": "string",
    "slowest_device": "bool_",
    "value": "float64",
    "low": "float64",
    "high": "float64",
    "boots": "int64",
    "samples": "int64",
    "baseline": "string",
    "ratio": "float64",
    "ratio_low": "float64",
    "ratio_high": "float64",
    "p": "float64",
    "p_adjusted": "float64",
    "outcome": "string",
    "level": "string",
    "doubts": "string",
}
"""Of a row, with their types in Arrow's words. See docs/formats/rows.md."""

ReportRow = dict[str, Any]
"""One series of one alternative, by column."""


def rows_of(machine: ReportedMachine) -> Iterator[ReportRow]:
    """Every series of a machine's alternatives, with its effect against the baseline."""
    effects = (
        {}
        if machine.comparison is None
        else {(one.alternative, series_key(one)): one for one in machine.comparison.effects}
    )
    for alternative in machine.every:
        for key, series in machine.series[alternative.label].items():
            yield _row(machine, alternative, key, series, effects.get((alternative.label, key)))


def csv_of(rows: Iterable[ReportRow]) -> str:
    """The rows as CSV, with a head.

    >>> csv_of([]).startswith("machine,system,layout")
    True
    """
    return csv_text([[*COLUMNS], *([row[name] for name in COLUMNS] for row in rows)], "\r\n")


def json_text(rows: Iterable[ReportRow], skipped: Sequence[str]) -> str:
    """The same rows as JSON, `homenode.rows/1`, with what was left out."""
    document = {"format": f"homenode.rows/{VERSION}", "skipped": skipped, "rows": list(rows)}
    encoded = msgspec.json.encode(msgspec.to_builtins(document))
    return msgspec.json.format(encoded, indent=2).decode() + "\n"


def parquet_of(rows: Sequence[ReportRow]) -> bytes:
    """The rows, column by column. Raises HostError without pyarrow."""
    try:
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise HostError(
            "--parquet: expected the Python package pyarrow, found none",
            hint="pip install pyarrow, or use --csv: the rows are the same",
        ) from None
    schema, columns = [], []
    for name, kind in COLUMNS.items():
        of = getattr(arrow, kind)()
        schema.append((name, of))
        columns.append(arrow.array([row[name] for row in rows], of))
    table = arrow.Table.from_arrays(columns, schema=arrow.schema(schema))
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _row(
    machine: ReportedMachine,
    one: Alternative,
    key: SeriesKey,
    series: Series,
    effect: Effect | None,
) -> ReportRow:
    head = one.runs[0].head
    switches = one.switches
    counts = {run.head.vcpus for run in one.runs}
    row = ReportRow(
        machine=machine.name,
        system=head.system,
        layout=one.label,
        pinning=switches.pinning,
        siblings=switches.siblings,
        cells=switches.cells,
        pcie=switches.pcie,
        memory=switches.memory,
        arrangement=one.arrangement,
        memory_mode=one.memory_mode,
        page_bytes=one.page_bytes,
        vcpus=counts.pop() if len(counts) == 1 else None,
        origin=head.origin,
        vantage=head.vantage,
        **_figure(key),
        slowest_device=key.worst,
        value=series.value,
        low=series.low,
        high=series.high,
        boots=len(series.medians),
        samples=series.samples,
        **_against(effect),
    )
    return {name: row.get(name) for name in COLUMNS}


def _figure(key: FigureKey) -> dict[str, Any]:
    """What the figure is of; devices by their addresses."""
    shared = {name: getattr(key, name) for name in FigureKey.__struct_fields__}
    devices = {name: str(shared[name]) for name in ("device", "peer") if shared[name] is not None}
    return shared | devices


def _against(effect: Effect | None) -> dict[str, Any]:
    if effect is None:
        return {}
    return {
        "baseline": effect.baseline,
        "ratio": effect.ratio,
        "ratio_low": effect.low,
        "ratio_high": effect.high,
        "p": effect.p,
        "p_adjusted": effect.p_adjusted,
        "outcome": str(effect.outcome),
        "level": str(effect.level),
        "doubts": ", ".join(effect.doubts) or None,
    }
