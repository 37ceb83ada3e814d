"""Rows: every figure of a report as a flat row: what CSV, JSON and Parquet hold."""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, get_type_hints

import msgspec

from homenode.decide.alternative import Alternative
from homenode.decide.compare import series_key
from homenode.decide.comparison import Effect
from homenode.decide.summary import Series, SeriesKey
from homenode.errors import HostError
from homenode.measure.results.model import FigureKey
from homenode.show.page.machine import ReportedMachine
from homenode.wording import printable

VERSION = 2
"""Of the rows, whatever they are written as."""

_TYPES = {"str": "string", "int": "int64", "float": "float64", "bool": "bool_"}

_STEERS = ("=", "+", "-", "@", "\t", "\r")
"""A cell that begins so is a formula to a spreadsheet."""


class ReportRow(msgspec.Struct, frozen=True, kw_only=True):
    """One series of one alternative; the names are the columns. See docs/formats/rows.md."""

    machine: str
    system: str
    layout: str
    pinning: str | None
    siblings: str | None
    cells: str | None
    pcie: str | None
    memory: str | None
    arrangement: str | None
    memory_mode: str | None
    page_bytes: int | None
    vcpus: int | None
    origin: str
    vantage: str
    metric: str
    unit: str
    variant: str | None
    size_bytes: int | None
    node: int | None
    peer_node: int | None
    device: str | None
    peer: str | None
    state: str | None
    slowest_device: bool
    value: float
    low: float
    high: float
    boots: int
    samples: int
    baseline: str | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    p: float | None
    p_adjusted: float | None
    outcome: str | None
    level: str | None
    doubts: str | None


COLUMNS = ReportRow.__struct_fields__


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


def csv_text(rows: Iterable[ReportRow]) -> str:
    """The rows as CSV (RFC 4180), with a head. A text that a spreadsheet would run is quoted off,
    and what steers a terminal is a question mark.

    >>> csv_text([]).startswith("machine,system,layout")
    True
    """
    lines = [",".join(COLUMNS)]
    lines += [",".join(_cell(getattr(row, name)) for name in COLUMNS) for row in rows]
    return "\r\n".join(lines) + "\r\n"


def json_text(rows: Iterable[ReportRow], skipped: Sequence[str]) -> str:
    """The same rows as JSON, `homenode.rows/2`, with what was left out."""
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
    for name, kind in get_type_hints(ReportRow).items():
        named = str(getattr(kind, "__name__", kind)).partition(" | ")[0]
        of = getattr(arrow, _TYPES[named])()
        schema.append((name, of))
        columns.append(arrow.array([getattr(row, name) for row in rows], of))
    table = arrow.Table.from_arrays(columns, schema=arrow.schema(schema))
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    text = str(value)
    if text.startswith(_STEERS):
        text = "'" + text
    text = printable(text)
    if "," in text or '"' in text:
        return '"' + text.replace('"', '""') + '"'
    return text


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
    return ReportRow(
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


def _figure(key: FigureKey) -> dict[str, Any]:
    """What the figure is of; devices by their addresses."""
    shared = {name: getattr(key, name) for name in FigureKey.__struct_fields__}
    devices = {name: str(shared[name]) for name in ("device", "peer") if shared[name] is not None}
    return shared | devices


def _against(effect: Effect | None) -> dict[str, Any]:
    if effect is None:
        names = ("baseline", "ratio", "ratio_low", "ratio_high", "p", "p_adjusted", "outcome")
        return dict.fromkeys((*names, "level", "doubts"))
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
