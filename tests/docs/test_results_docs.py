"""The pages of results, doubts and published evidence against the program."""

import msgspec
import pytest

from homenode import formats
from homenode.measure.results.model import (
    Condition,
    GpuPlace,
    Origin,
    RunHead,
    Sample,
    Statistic,
    Switches,
)
from homenode.measure.results.store import parse_run
from homenode.measure.results.vantage import Vantage
from homenode.metrics import METRICS
from tests.doc_pages import ROOT, first_column, read_page
from tests.finding_ids import ids_given

RECORDS: list[tuple[str, str, type]] = [
    ("results", "Fields", RunHead),
    ("results", "switches", Switches),
    ("results", "gpus[]", GpuPlace),
    ("results", "conditions[]", Condition),
]


@pytest.mark.parametrize(("kind", "section", "record"), RECORDS)
def test_a_page_lists_every_field_in_order(kind: str, section: str, record: type) -> None:
    fields = tuple(field.name for field in msgspec.structs.fields(record))
    assert (
        first_column(read_page(f"docs/reference/formats/{kind}.md").sections()[section]) == fields
    )


def test_the_page_of_samples_names_every_field() -> None:
    listed = first_column(read_page("docs/reference/formats/results.md").sections()["Samples"])
    fields = Sample.__struct_fields__
    assert listed[: len(fields)] == fields


def test_the_page_of_results_tells_its_version() -> None:
    text = read_page("docs/reference/formats/results.md").text
    version = formats.VERSIONS["results"]
    assert f'"homenode.results/{version}"' in text
    assert f"Version: {version}." in text


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("results", [Origin, Vantage, Statistic]),
    ],
)
def test_a_page_names_every_value(kind: str, values: list[type]) -> None:
    words = read_page(f"docs/reference/formats/{kind}.md").words_in_code()
    assert {str(one) for enumeration in values for one in enumeration} <= words  # type: ignore[attr-defined]


def test_the_page_of_results_names_every_metric_with_its_unit_and_direction() -> None:
    section = read_page("docs/reference/formats/results.md").sections()["Metrics"]
    rows = {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}
    for metric in METRICS.values():
        row = rows[metric.id]
        assert f"`{metric.unit}`" in row
        assert ("| less |" in row) is metric.lower_is_better
        assert ("control" in row) is metric.control
        for objective in metric.primary:
            assert f"`{objective}`" in row


def test_the_page_of_comparisons_explains_every_doubt() -> None:
    sources = (ROOT / "src/homenode/decide").glob("*.py")
    ids = {one for source in sources for one in ids_given(source, {"make_doubt"})}
    assert len(ids) > 12
    assert ids <= read_page("docs/reference/formats/comparison.md").words_in_code()


def test_the_examples_of_the_pages_are_read() -> None:
    (lines,) = [b.text for b in read_page("docs/reference/formats/results.md").blocks() if b.text]
    run = parse_run((lines + "\n").encode(), "the page")
    assert run.head.switches.name == "pin-numa"
