"""Every finding of bench has a page, and every metric that the probe gives is documented."""

import pytest

from homenode.machine.tools.homenode_probe import parse
from homenode.measure.probe_samples import read_probe_results
from homenode.measure.run_directory import EnvironmentRecord, RunRecord, StepRecord
from tests import probe_documents
from tests.doc_pages import first_column, read_page


@pytest.mark.parametrize(
    "command",
    ["throughput", "bandwidth", "latency", "core-to-core", "placement", "smt", "loaded-latency"],
)
def test_every_metric_of_the_probe_is_documented(command: str) -> None:
    text = probe_documents.answer(["homenode-probe", command, "--pus", "0-1"])
    found = {one.sample.metric for one in read_probe_results(parse(text)).placed}
    assert found <= read_page("docs/reference/formats/results.md").words_in_code()
    commands = read_page("docs/reference/formats/probe.md").sections()["Commands"]
    assert command in first_column(commands)


@pytest.mark.parametrize(
    ("record", "heading"),
    [(RunRecord, "The head: the requested run"), (EnvironmentRecord, "look"), (StepRecord, "step")],
)
def test_every_field_of_a_record_is_documented(record: type, heading: str) -> None:
    sections = read_page("docs/developer/formats/bench.md").sections()
    (section,) = (text for title, text in sections.items() if title == heading)
    fields = set(record.__struct_fields__)  # type: ignore[attr-defined]
    listed = {word for cell in first_column(section) for word in cell.split(", ")}
    assert fields <= listed
