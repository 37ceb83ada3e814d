"""The first screen: a few sentences that follow from the figures, each with its evidence."""

import io
import random
import re
from xml.etree import ElementTree

import pytest
from msgspec import structs

from homenode.decide.machine_facts import find_machines, group_runs_by_machine
from homenode.doc import Gallery, Items, Section, Text, format_plain, spans
from homenode.measure.results.model import Run
from homenode.show.bars import EffectDot, EffectGroup, EffectRow, has_lines
from homenode.show.html import render_page
from homenode.show.report.across import build_across_pictures, link_speeds
from homenode.show.report.answer import answer_section, answer_text, format_counts, list_advice
from homenode.show.report.document import build_report, format_title
from homenode.show.report.inputs import gather
from homenode.show.report.machine import ReportedMachine, StoredRun, build_machines
from homenode.show.report.pictures import build_bar_pictures, build_forest_pictures
from homenode.show.terminal_text import PrintableConsole
from homenode.vm.sources import load_host
from tests.published_runs import DIRECTORY
from tests.simulated_runs import simulated_run

HOSTS = ("a" * 64, "b" * 64, None)
BANDWIDTH = ("memory-bandwidth", "bytes_per_s")


@pytest.fixture(scope="module")
def published() -> tuple[ReportedMachine, ...]:
    found = gather([str(DIRECTORY)], [])
    return build_machines(found.runs, found.stored, found.hosts)


def measured(*runs: Run) -> tuple[ReportedMachine, ...]:
    return build_machines(runs, [StoredRun()] * len(runs), {})


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
    return [f"{one.subject}: {one.action}; {one.ground}" for one in list_advice(machines)]


def test_machines_of_one_directory_have_the_same_names_everywhere() -> None:
    """A run that names no host is of the directory's only one, and of none where there are two."""
    one, other, nameless = (
        structs.replace(run, head=structs.replace(run.head, host=host, host_kind=None))
        for run, host in zip(made("A", pin=100, default=90, pin_numa=80), HOSTS, strict=True)
    )
    for runs, names in (
        ((one, nameless), ["A"]),
        ((one, other), ["A on aaaaaaaa", "A on bbbbbbbb"]),
        (
            (one, other, nameless),
            ["A on aaaaaaaa", "A on bbbbbbbb", "A on a host that is not named"],
        ),
    ):
        assert list(group_runs_by_machine(runs)) == names
        assert [machine.name for machine in find_machines(runs)] == names
        assert [machine.name for machine in measured(*runs)] == names


def test_report_answers_in_line_1_then_a_line_each(published: tuple[ReportedMachine, ...]) -> None:
    out = io.StringIO()
    PrintableConsole(file=out, width=80, color_system=None).print(answer_text(published))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "  memory-bandwidth  pin-numa  2.6x to 7.5x pin on 4 of 4 machines",
        "  multi-gpu         pin       pin-numa is 53 to 63 % slower on 2 of 3 machines",
        "  RTX 5090          repair    host to device and 1 more: 5.2 GB/s, expected 8",
        "                              GB/s",
        "  RTX 4080          review    check the pins of pin: 36 % slower than default",
    ]
    assert format_counts(published) == "9 machines; 2 answers, 1 to repair first, 1 to review first"
    page = render_page(build_report(published, (), "now"))
    assert "Multi GPU: pin, not pin-numa. " in page and "not used for other machines" in page


def test_ranges_are_those_of_the_figures_themselves() -> None:
    machines = measured(
        *made("A", pin=100, pin_numa=250), *made("B", pin=100, pin_numa=420), *made("C", pin=100)
    )
    (only,) = sentences(machines)
    low, high = map(float, re.findall(r"[\d.]+(?=x to)|(?<=to )[\d.]+", only))
    assert low == pytest.approx(2.5, rel=0.03) and high == pytest.approx(4.2, rel=0.03)
    assert "on 2 of 2 machines" in only, "C has nothing to compare with"


def test_what_one_machine_alone_decides_is_that_machines_answer() -> None:
    machines = measured(*made("A", default=100, pin=130, pin_numa=138), *made("B", pin=100))
    (only,) = sentences(machines)
    (answer,) = [a for m in machines for a in m.recommendations if a.tells]
    assert only.startswith(f"memory-bandwidth: {answer.choice}; ") and only.endswith(" on A")


def test_machines_that_disagree_are_both_named() -> None:
    (only,) = sentences(
        measured(*made("A", pin=100, pin_numa=250), *made("B", pin=100, pin_numa=50))
    )
    assert only.startswith("memory-bandwidth: measure pin-numa; pin-numa is ")
    assert " on B, " in only and only.endswith(" on A")


def test_layouts_that_are_equal_are_no_reason_to_do_anything() -> None:
    machines = measured(*made("A", pin=100, pin_numa=100), *made("B", pin=100, pin_numa=100))
    assert sentences(machines) == []
    assert "No result decides" in format_plain(answer_section(machines, ["a", "b"]).parts[0].words)  # type: ignore[union-attr]


def test_one_machine_is_told_its_layout_and_how_sure_that_is() -> None:
    (only,) = sentences(measured(*made("A", default=100, pin_numa=250)))
    assert re.search(
        r"memory-bandwidth: pin-numa; 2\.\dx default \(2\.\d*x to 2\.\d*x\) \(measured\)", only
    )


def test_machines_whose_layouts_differ_in_several_steps_are_told_as_well() -> None:
    """No two of them differ in one step, and a trial of these three is what README proposes."""
    decided = made("H200", default=100, pin_numa_pci=400)
    said = [*list_advice(measured(*decided, *made("MI350X", pin=100)))]
    assert [one.machine for one in said] == ["H200"]
    assert said[0].action == "pin-numa-pci" and "4x default" in said[0].ground


def test_a_width_that_is_unknown_is_shown_as_unknown() -> None:
    run = simulated_run("pin", {"h2d-bandwidth": ("bytes_per_s", 5e10)}, random.Random(1))
    host = load_host("hgx-h100")
    devices = [
        structs.replace(device, link=structs.replace(device.link, current_width=None))
        for device in host.pci_devices
        if device.link is not None
    ]
    (machine,) = measured(run)
    machine = structs.replace(machine, host=structs.replace(host, pci_devices=tuple(devices)))
    ((_, generations, *_),) = link_speeds([machine]).rows
    assert generations == "Gen 5 x?, as described"


def test_each_sentence_is_a_link_to_a_section_of_the_page(
    published: tuple[ReportedMachine, ...],
) -> None:
    page = build_report(published, (), "now")
    first = page.parts[0]
    assert isinstance(first, Section) and isinstance(first.parts[0], Items)
    ids = {one.id for one in page.parts if isinstance(one, Section)}
    links = [{run.link for run in spans(item)} - {""} for item in first.parts[0].items]
    machines = {one.id for one in page.parts[-1].parts if isinstance(one, Section)}  # type: ignore[union-attr]
    assert len(links) == 4 and all(len(one) == 1 and one <= ids | machines for one in links)


def test_the_picture_has_each_sound_machine_with_a_number_at_each_dot(
    published: tuple[ReportedMachine, ...],
) -> None:
    _, strength, meanings, gallery = answer_section(published, ["x"] * len(published)).parts
    assert isinstance(gallery, Gallery) and isinstance(meanings, Items)
    assert isinstance(strength, Text) and format_plain(strength.words).startswith(
        "provisional, one print"
    )
    assert {"pin: ", "pin-numa: ", "pin-numa-smt: "} <= {
        format_plain(item).partition(" ")[0] + " " for item in meanings.items
    }, "what the picture names is explained next to it"
    drawn = ElementTree.fromstring(gallery.pictures[0].svg)
    texts = [one.text for one in drawn.iter("text")]
    assert {"7.3x", "59 % slower", "57 % slower"} <= set(texts)
    assert not {"RTX 5090", "RTX 4080"} & set(texts), "under review"
    dots = [one for one in drawn.iter("circle") if one.find("title") is not None]
    places = [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in dots]
    values = [_ratio((one.findtext("title") or "").rpartition(": ")[2]) for one in dots]
    ordered = sorted(zip(values, places, strict=True))
    assert [x for _, (x, _) in ordered] == sorted(x for x, _ in places), "one axis"
    close = [
        (a, b)
        for number, a in enumerate(places)
        for b in places[:number]
        if abs(a[0] - b[0]) < 9 and abs(a[1] - b[1]) < 9
    ]
    assert not close, "dots that overlap are drawn apart"


def _ratio(text: str) -> float:
    """The ratio of "7.3x", "59 % slower", "2 % higher" and "the same"."""
    number = float(text.split()[0].rstrip("x")) if text != "the same" else 0.0
    sign = -1 if text.endswith(("slower", "lower")) else 1
    return number if text.endswith("x") else 1 + sign * number / 100


def test_no_text_of_a_chart_is_a_multiple_below_1(published: tuple[ReportedMachine, ...]) -> None:
    every = (*published, *measured(*made("A", default=100, pin=43, pin_numa=260)))
    gallery = answer_section(every, ["x"] * len(every)).parts[-1]
    assert isinstance(gallery, Gallery)
    charts = [*build_across_pictures(every), *gallery.pictures]
    for machine in every:
        charts += (*build_bar_pictures(machine), *build_forest_pictures(machine))
    assert len(charts) > 20 and any(" % slower [" in one.svg for one in charts)
    for svg in (one.svg for one in charts):
        for one in ElementTree.fromstring(svg).iter():
            assert not re.search(r"\b0\.\d+ ?x\b", one.text or ""), one.text


@pytest.mark.parametrize(("width", "is_said"), [(1.001, False), (1.5, True)])
def test_lines_are_named_where_no_dot_hides_them(width: float, is_said: bool) -> None:
    dot = EffectDot(label="pin", ratio=2.0, low=2 / width, high=2 * width, series=1, text="2x")
    assert has_lines([EffectGroup("x", "more is better", (EffectRow("A", (dot,)),))]) is is_said


def test_the_page_has_five_links_and_its_details_on_a_page_of_their_own(
    published: tuple[ReportedMachine, ...],
) -> None:
    page = build_report(published, (), "now")
    assert page.title == "Which layout to run: 9 machines, published results"
    assert (
        format_title(published[:1])
        == f"Which layout to run: {published[0].name}, published results"
    )
    assert build_report(published, (), "now", title="Ours").title == "Ours"
    sections = [one for one in page.parts if isinstance(one, Section)]
    names = [one.name for one in sections if one.name]
    assert names == ["Answers", "Machines", "Evidence", "Caveats", "Data"]
    assert sections[-1].id == "appendix"
    html = render_page(page)
    assert "#appendix:not(:target):not(:has(:target)) { display: none; }" in html
    assert 'class="grade' not in html and 'class="sure' not in html, "no badges"
