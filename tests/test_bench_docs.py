"""Every finding of bench has a page, and every metric that the probe gives is documented."""

import re

import pytest

from homenode.measure.figures.probe import probe_figures
from homenode.measure.record import LookRecord, RunRecord, StepRecord
from homenode.tools.homenode_probe import parse
from tests import probe_documents
from tests.doc_pages import ROOT, first_column, read_page
from tests.finding_ids import ids_given

PAGES = ROOT / "docs" / "findings"
SECTIONS = ("Cause", "Cost", "Fix", "Source")


IDS = sorted(
    {one for path in (ROOT / "src/homenode/measure").rglob("*.py") for one in ids_given(path)}
)


@pytest.mark.parametrize("id", IDS)
def test_a_finding_has_a_page_with_cause_cost_fix_and_source(id: str) -> None:
    text = (PAGES / f"{id}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {id}\n")
    assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == SECTIONS
    bodies = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    assert all(len(body.strip()) > 10 for body in bodies)
    assert f"]({id}.md)" in (PAGES / "README.md").read_text(encoding="utf-8")


def test_no_page_of_bench_is_left_over() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")}
    assert {name for name in pages if name.startswith(("bench-", "collective-"))} == set(IDS)


@pytest.mark.parametrize(
    "command",
    ["throughput", "bandwidth", "latency", "core-to-core", "placement", "smt", "loaded-latency"],
)
def test_every_metric_of_the_probe_is_documented(command: str) -> None:
    text = probe_documents.answer(["homenode-probe", command, "--pus", "0-1"])
    found = {one.sample.metric for one in probe_figures(parse(text)).placed}
    assert found <= read_page("docs/formats/results.md").words_in_code()
    assert command in first_column(read_page("docs/formats/probe.md").sections()["Commands"])


@pytest.mark.parametrize(
    ("record", "heading"),
    [(RunRecord, "The head: what was ordered"), (LookRecord, "look"), (StepRecord, "step")],
)
def test_every_field_of_a_record_is_documented(record: type, heading: str) -> None:
    sections = read_page("docs/formats/bench.md").sections()
    (section,) = (text for title, text in sections.items() if title == heading)
    fields = set(record.__dataclass_fields__)  # type: ignore[attr-defined]
    listed = {word for cell in first_column(section) for word in cell.split(", ")}
    assert fields <= listed
