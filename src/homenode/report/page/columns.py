"""Columns: a report's rows as a Parquet file, where pyarrow is installed."""

from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

from homenode.errors import HostError
from homenode.report.page.rows import Row

_TYPES = {"str": "string", "int": "int64", "float": "float64", "bool": "bool_"}


def parquet_of(rows: Sequence[Row]) -> bytes:
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
    for field in fields(Row):
        named = str(getattr(field.type, "__name__", field.type)).partition(" | ")[0]
        of = getattr(arrow, _TYPES[named])()
        schema.append((field.name, of))
        columns.append(arrow.array([getattr(row, field.name) for row in rows], of))
    table = arrow.Table.from_arrays(columns, schema=arrow.schema(schema))
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content
