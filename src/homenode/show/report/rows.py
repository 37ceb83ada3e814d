"""Rows: every result of a report as a flat row, for CSV and JSON."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from homenode.decide.alternative import Alternative
from homenode.decide.compare import make_series_key
from homenode.decide.comparison import Effect
from homenode.decide.summary import Series, SeriesKey
from homenode.findings import Gap
from homenode.formats import encode_json
from homenode.measure.results.model import SeriesId
from homenode.show.report.machine import ReportedMachine
from homenode.text import write_csv

VERSION = 1
"""Version of the rows, in every output format."""

COLUMNS = tuple(
    """
    machine system layout pinning siblings cells pcie memory arrangement memory_mode
    page_bytes vcpus origin vantage metric unit variant size_bytes node peer_node device
    peer state slowest_device value low high boots samples baseline ratio ratio_low
    ratio_high p p_adjusted outcome level caveats
""".split()
)
"""Columns of a row. See docs/reference/formats/rows.md."""

ReportRow = dict[str, Any]
"""One series of one alternative, by column."""


def list_rows(machine: ReportedMachine) -> Iterator[ReportRow]:
    """Yield every series of a machine's alternatives, with its effect against the baseline."""
    compared = () if machine.comparison is None else machine.comparison.effects
    effects = {(effect.alternative, make_series_key(effect)): effect for effect in compared}
    for alternative in machine.alternatives:
        for key, series in machine.series[alternative.label].items():
            yield _build_row(
                machine, alternative, key, series, effects.get((alternative.label, key))
            )


def format_csv(rows: Iterable[ReportRow]) -> str:
    """Return the rows as CSV, with a header.

    >>> format_csv([]).startswith("machine,system,layout")
    True
    """
    return write_csv([[*COLUMNS], *([row[name] for name in COLUMNS] for row in rows)])


def format_json(rows: Iterable[ReportRow], gaps: Sequence[Gap]) -> str:
    """Return the rows as JSON, `homenode.rows/1`, with the omitted inputs."""
    document = {"format": f"homenode.rows/{VERSION}", "skipped": gaps, "rows": list(rows)}
    json_text = encode_json(msgspec.to_builtins(document))
    return msgspec.json.format(json_text, indent=2).decode() + "\n"


def _build_row(
    machine: ReportedMachine,
    alternative: Alternative,
    key: SeriesKey,
    series: Series,
    effect: Effect | None,
) -> ReportRow:
    head = alternative.runs[0].head
    switches = alternative.switches
    counts = {run.head.vcpus for run in alternative.runs}
    row = ReportRow(
        machine=machine.name,
        system=head.system,
        layout=alternative.label,
        pinning=switches.pinning,
        siblings=switches.siblings,
        cells=switches.cells,
        pcie=switches.pcie,
        memory=switches.memory,
        arrangement=alternative.arrangement,
        memory_mode=alternative.memory_mode,
        page_bytes=alternative.page_bytes,
        vcpus=counts.pop() if len(counts) == 1 else None,
        origin=head.origin,
        vantage=head.vantage,
        **_list_fields(key),
        slowest_device=key.worst,
        value=series.value,
        low=series.low,
        high=series.high,
        boots=len(series.medians),
        samples=series.samples,
        **_effect_columns(effect),
    )
    return {name: row.get(name) for name in COLUMNS}


def _list_fields(key: SeriesId) -> dict[str, Any]:
    """Return the subject of the result; devices by their addresses."""
    fields = {name: getattr(key, name) for name in SeriesId.__struct_fields__}
    devices = {name: str(fields[name]) for name in ("device", "peer") if fields[name] is not None}
    return fields | devices


def _effect_columns(effect: Effect | None) -> dict[str, Any]:
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
        "caveats": ", ".join(effect.caveats) or None,
    }
