"""The first screen: a few sentences that follow from the figures, each with its evidence."""

import random
import re
from xml.etree import ElementTree

import pytest

from homenode.doc import Cell, Gallery, Items, Section, Table, Text, plain, spans
from homenode.measure.results.model import Run
from homenode.show.page.answer import advice_of, answer_section
from homenode.show.page.document import document_of
from homenode.show.page.gathered import gather
from homenode.show.page.machine import ReportedMachine, Stored, machines_of
from tests.published_runs import FOLDER
from tests.simulated_runs import simulated_run

BANDWIDTH = ("memory-bandwidth", "bytes_per_s")


@pytest.fixture(scope="module")
def published() -> tuple[ReportedMachine, ...]:
    found = gather([str(FOLDER)], [])
    return machines_of(found.runs, found.stored, found.hosts)


def measured(*runs: Run) -> tuple[ReportedMachine, ...]:
    return machines_of(runs, [Stored()] * len(runs), {})


def made(system: str, **figures: float) -> list[Run]:
    """Runs of layouts with these bandwidths, in GB/s."""
    rng = random.Random(len(system))
    return [
        simulated_run(
            name.replace("_", "-"), {BANDWIDTH[0]: (BANDWIDTH[1], 1e9 * value)}, rng, system=system
        )
        for name, value in figures.items()
    ]


def sentences(machines: tuple[ReportedMachine, ...]) -> list[str]:
    return [one.text for one in advice_of(machines)]


def test_published_figures_say_what_to_run_and_what_not_and_what_to_repair(
    published: tuple[ReportedMachine, ...],
) -> None:
    memory, collectives, sick, reviewed = sentences(published)
    assert (
        "run pin-numa (show the guest its NUMA nodes); memory bandwidth 2.6x to 7.5x pin" in memory
    )
    assert ": run pin, not pin-numa (do not show the guest NUMA nodes unless its" in collectives
    assert "53 to 63 % slower than pin on 2 of the 3 machines" in collectives
    assert sick.startswith("RTX 5090: repair it first; host to device and 1 more: 5.2 GB/s")
    assert reviewed.startswith("RTX 4080: review it first; check the pins of pin: 36 % slower")
    assert reviewed.endswith("it gives no advice for other machines.")


def test_ranges_are_those_of_the_figures_themselves() -> None:
    machines = measured(
        *made("A", pin=100, pin_numa=250), *made("B", pin=100, pin_numa=420), *made("C", pin=100)
    )
    (only,) = sentences(machines)
    low, high = map(float, re.findall(r"[\d.]+(?=x to)|(?<=to )[\d.]+", only))
    assert low == pytest.approx(2.5, rel=0.03) and high == pytest.approx(4.2, rel=0.03)
    assert "on all 2 machines with results" in only, "C has nothing to compare with"


def test_machines_that_disagree_are_both_named() -> None:
    (only,) = sentences(
        measured(*made("A", pin=100, pin_numa=250), *made("B", pin=100, pin_numa=50))
    )
    assert "measure pin-numa before you show the guest its NUMA nodes" in only
    assert " on B, " in only and only.endswith(" on A.")


def test_layouts_that_are_equal_are_no_reason_to_do_anything() -> None:
    machines = measured(*made("A", pin=100, pin_numa=100), *made("B", pin=100, pin_numa=100))
    assert sentences(machines) == []
    assert "No figure decides" in plain(answer_section(machines, ["a", "b"]).parts[0].words)  # type: ignore[union-attr]


def test_one_machine_is_told_its_layout_and_how_sure_that_is() -> None:
    (only,) = sentences(measured(*made("A", default=100, pin_numa=250)))
    assert re.search(
        r"run pin-numa; memory bandwidth 2\.\dx default \(2\.\d*x to 2\.\d*x\) \(measured\)\.", only
    )


def test_machines_whose_layouts_differ_in_several_steps_are_told_as_well() -> None:
    """No two of them differ in one step, and a trial of these three is what README proposes."""
    decided = made("H200", default=100, pin_numa_pci=400)
    said = [*advice_of(measured(*decided, *made("MI350X", pin=100)))]
    assert [one.machine for one in said] == ["H200"]
    assert "run pin-numa-pci" in said[0].text and "4x default" in said[0].text


def test_each_sentence_is_a_link_to_a_section_of_the_page(
    published: tuple[ReportedMachine, ...],
) -> None:
    page = document_of(published, (), "now")
    first = page.parts[0]
    assert isinstance(first, Section) and isinstance(first.parts[0], Items)
    ids = {one.id for one in page.parts if isinstance(one, Section)}
    links = [{run.link for run in spans(item)} - {""} for item in first.parts[0].items]
    assert len(links) == 4 and all(len(one) == 1 and one <= ids for one in links)


def test_the_picture_has_each_healthy_machine_with_its_furthest_change(
    published: tuple[ReportedMachine, ...],
) -> None:
    _, meanings, gallery = answer_section(published, [str(n) for n in range(len(published))]).parts
    assert isinstance(gallery, Gallery) and isinstance(meanings, Items)
    assert {"pin: ", "pin-numa: ", "pin-numa-smt: "} <= {
        plain(item).partition(" ")[0] + " " for item in meanings.items
    }, "what the picture names is explained next to it"
    drawn = ElementTree.fromstring(gallery.pictures[0].svg)
    texts = [one.text for one in drawn.iter("text")]
    assert "7.3x" in texts and "0.41x" in texts and "RTX 5090" not in texts
    dots = [
        float(one.get("cx", "")) for one in drawn.iter("circle") if one.find("title") is not None
    ]
    said = [
        float((one.findtext("title") or "").split()[-2])
        for one in drawn.iter("circle")
        if one.find("title") is not None
    ]
    assert [x for _, x in sorted(zip(said, dots, strict=True))] == sorted(dots), "one axis"


def test_grades_are_explained_before_the_table(
    published: tuple[ReportedMachine, ...],
) -> None:
    verdicts = document_of(published, (), "now").parts[1]
    assert isinstance(verdicts, Section)
    *legends, table = verdicts.parts
    assert isinstance(table, Table)
    said = " ".join(plain(one.words) for one in legends if isinstance(one, Text))
    grades = {
        run.text
        for row in table.rows
        if isinstance(row[0], Cell)
        for line in row[0].lines
        for run in spans(line)
        if run.look.startswith("grade")
    }
    assert grades and all(f"{grade} " in said for grade in grades), "explained before the table"
