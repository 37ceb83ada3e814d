"""The report: what is compared, what is said first, what is omitted, and that names stay names."""

import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.decide.sentences import format_review
from homenode.decide.switch_effects import StudySwitch
from homenode.doc import Doc, format_plain
from homenode.errors import HostError
from homenode.machine.snapshot.capture import capture_host
from homenode.measure.results.model import UNKNOWN_SWITCHES, Run, Sample
from homenode.measure.results.store import write_run
from homenode.measure.results.vantage import Vantage
from homenode.plan.pipeline import plan_file
from homenode.plan.stored import encode_plan
from homenode.show.html import render_page, render_pdf
from homenode.show.report.answer import stop_of
from homenode.show.report.document import build_report
from homenode.show.report.inputs import gather
from homenode.show.report.machine import ReportedMachine, build_machines
from homenode.show.report.pictures import build_product_picture
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.explained import pictures, rows, section
from tests.published_runs import DIRECTORY
from tests.report_runs import full_results, full_run, report
from tests.simulated_runs import simulated_run
from tests.study_directories import write_study_directories


def machines(*arguments: object) -> tuple[ReportedMachine, ...]:
    found = gather([str(one) for one in arguments], [])
    return build_machines(found.runs, found.stored, found.hosts)


@pytest.fixture(scope="module")
def published() -> dict[str, ReportedMachine]:
    return {one.name: one for one in machines(DIRECTORY)}


@pytest.fixture(scope="module")
def document(published: dict[str, ReportedMachine]) -> Doc:
    return build_report(list(published.values()), (), "now")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReportedMachine, ...]:
    return machines(full_results(tmp_path_factory.mktemp("full")))


class _Html(HTMLParser):
    """Elements that are closed as they are opened, and every attribute."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def parsed(html: str) -> _Html:
    parser = _Html()
    parser.feed(html)
    assert not parser.open
    return parser


def test_systems_under_review_are_named_and_others_are_not(
    published: dict[str, ReportedMachine],
) -> None:
    reviews = {name: format_review(one.recommendations) for name, one in published.items()}
    assert [name for name, review in reviews.items() if review] == ["RTX 4080", "RTX 5090"]
    assert "check the pins of pin" in reviews["RTX 4080"]
    stop = stop_of(published["RTX 5090"])
    assert format_plain(stop[0]) == "repair first" and "homenode doctor" in format_plain(stop[1])


def test_effects_and_risks_say_what_each_switch_did_and_where_it_hurt(document: Doc) -> None:
    cells = {
        (row["metric"].partition(";")[0], switch): row[switch.value]
        for row in rows(document, "Effects and risks")
        for switch in StudySwitch
    }
    cell = cells["memory bandwidth", StudySwitch.CELLS]
    assert cell.startswith("\u25b2 ") and "7.5x (4 machines); no risk shown; 1 more" in cell
    cell = cells["all-reduce, peak bus bandwidth", StudySwitch.CELLS]
    assert cell.startswith("\u25bc ") and "risk: 63 % slower on RTX PRO 6000" in cell
    cell = cells["memory bandwidth", StudySwitch.PINNING]
    assert cell.startswith("cannot tell (") and " slower to " in cell, (
        "as compare has it: one result each"
    )
    cell = cells["all threads", StudySwitch.SIBLINGS]
    assert cell.startswith("cannot tell (2 to 3 % faster)")
    assert cells["memory bandwidth", StudySwitch.PCIE] == "not measured", "no one has"


def test_a_certain_loss_that_is_small_is_no_risk(tmp_path: Path) -> None:
    rng = random.Random(3)
    for layout, value in (("default", 100e9), ("pin", 99e9)):
        figures = {"memory-bandwidth": ("bytes_per_s", value)}
        write_run(tmp_path, simulated_run(layout, figures, rng, between=1e-4, within=1e-4))
    (row,) = rows(build_report(machines(tmp_path), (), "now"), "Effects and risks")
    assert row[StudySwitch.PINNING.value] == "1 % slower (1 machine); no risk shown"


def test_only_runs_of_one_machine_are_compared(tmp_path: Path) -> None:
    for number, host in enumerate(("aa", "bb")):
        for layout in ("default", "pin"):
            run = full_run(layout, number, name=f"{layout}-{host}")
            write_run(tmp_path, Run(replace(run.head, host=host * 32), run.samples))
    found = machines(tmp_path)
    assert [one.name for one in found] == ["H200 on aaaaaaaa", "H200 on bbbbbbbb"]
    for one in found:
        assert len({run.head.host for run in one.runs}) == 1
        assert one.comparison is not None
        assert "other-host" not in {caveat.id for caveat in one.caveats}


def test_every_figure_of_a_machine_is_drawn(full: tuple[ReportedMachine, ...]) -> None:
    made = build_report(full, (), "now")
    part, other = section(made, "machine-1"), section(made, "machine-2")
    assert list(pictures(part, "Effects")) == [
        "pin against default",
        "pin-numa-pci against default",
    ]
    bars = set(pictures(part, "Results by layout"))
    assert {"memory bandwidth", "memory latency", "all-reduce, peak bus bandwidth"} <= bars
    curves = pictures(part, "Curves")
    assert list(curves) == ["memory latency by size", "all-reduce, bus bandwidth by size, in-place"]
    curve = curves["memory latency by size"]
    assert "DRAM" in curve.svg, "levels are marked"
    assert "beyond every cache" not in str(curve.note), "the curve begins within them"
    heats = set(pictures(part, "Matrices"))
    assert {
        "host to device, default",
        "memory bandwidth, read, default",
        "GPU to GPU, default",
        "core to core, default",
    } <= heats
    assert rows(part, "Local and remote")[0]["ratio"] == "2.50x"
    assert pictures(other, "Effects") == {}, "one layout alone is compared with nothing"
    assert "No topology picture: no capture of the host" in render_page(made)


def test_intervals_are_drawn_where_there_are_boots(full: tuple[ReportedMachine, ...]) -> None:
    part = section(build_report(full, (), "now"), "machine-1")
    better = pictures(part, "Effects")["pin-numa-pci against default"]
    assert re.search(r">(3\.9\d|4|4\.0\d)x \[[34]", better.svg)
    assert 'class="whisker lbetter"' in better.svg
    assert "hollow" not in str(better.note)


def test_a_stored_plan_is_drawn_on_the_host(tmp_path: Path) -> None:
    host = load_host("hgx-h100")
    text = (Path(__file__).parents[2] / "demo/gpu-vm.xml").read_bytes()
    plan = plan_file(text, "vm.xml", PlanOptions("pin-numa-pci", gpu_count=8), host).plan
    run = full_run("pin-numa-pci", 1)
    head = replace(run.head, host=host.fingerprint)
    file = write_run(tmp_path, Run(head, run.samples))
    file.with_name("plan.json").write_text(encode_plan(plan), encoding="utf-8")
    found = gather([str(tmp_path)], ["hgx-h100"])
    (one,) = build_machines(found.runs, found.stored, found.hosts)
    made = section(build_report([one], (), "now"), "machine-1")
    (picture,) = pictures(made, "Topology: host, with the VM of pin-numa-pci").values()
    assert picture.svg.count('class="pu cell1') == 44 + 1, "with the legend's"


def test_what_the_suite_saw_is_drawn_though_states_of_runs_are_joined(tmp_path: Path) -> None:
    for layout in ("default", "pin"):
        run = full_run(layout, 1)
        placed = tuple(
            msgspec.structs.replace(one, state=f"2{layout == 'pin':d} ns") for one in run.samples
        )
        file = write_run(tmp_path, Run(run.head, placed))
        file.with_name("host.tar.gz").write_bytes(capture_host().content)
    (one,) = machines(tmp_path)
    assert set(one.guests) == {"default", "pin"}
    page = render_page(build_report([one], (), "now"))
    assert re.findall(r"<summary>Topology: ([^<(]*)", page) == [
        "what the suite detected under default",
        "what the suite detected under pin",
    ]


def test_bare_metal_is_what_guests_are_a_part_of_and_never_a_choice(tmp_path: Path) -> None:
    ground: dict[str, Any] = {"pus": CpuSet.parse("0-7"), "nodes": (0,)}
    for seed, (layout, gain) in enumerate((("pin", 0.5), ("pin-numa-pci", 0.9))):
        run = full_run(layout, seed, gain=gain)
        write_run(tmp_path, Run(replace(run.head, **ground), run.samples))
    host = full_run("default", 5, name="on-the-host")
    head = replace(host.head, vantage=Vantage.HOST, switches=UNKNOWN_SWITCHES, **ground)
    write_run(tmp_path, Run(head, host.samples))
    (one,) = machines(tmp_path)
    assert [alternative.label for alternative in one.chosen] == ["pin", "pin-numa-pci"]
    assert "bare metal" not in {verdict.choice for verdict in one.recommendations}
    part = section(build_report([one], (), "now"), "machine-1")
    forests = {title: one.svg for title, one in pictures(part, "Effects").items()}
    assert re.search(r">(49|50|51)\.\d% of bare metal<", forests["pin against bare metal"])
    assert re.search(r">(89|90|91)\.\d% of bare", forests["pin-numa-pci against bare metal"])
    assert "bare metal" in next(iter(pictures(part, "Results by layout").values())).svg


def test_a_named_host_is_drawn_for_the_one_machine_that_names_none(tmp_path: Path) -> None:
    for count, system in enumerate(("cpu-only", "H200"), start=1):
        run = full_run("pin", 1, system=system)
        write_run(tmp_path, Run(replace(run.head, host=None, host_kind=None), run.samples))
        found = gather([str(tmp_path)], ["hgx-h100"])
        made = build_machines(found.runs, found.stored, found.hosts)
        assert [one.host is not None for one in made] == [count == 1] * count


def test_caveats_of_a_layout_that_stands_alone_are_said(tmp_path: Path) -> None:
    run = full_run("pin", 1)
    write_run(tmp_path, Run(replace(run.head, unusable=("throttled",)), run.samples))
    (one,) = machines(tmp_path)
    assert format_plain(stop_of(one)[0]) == "measure again first"
    assert [(caveat.id, caveat.detail) for caveat in one.caveats] == [("unusable", "throttled")]


def test_broken_half_written_and_foreign_directories_are_skipped_with_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = full_results(tmp_path / "results")
    whole = (results / "H200/pin/results.jsonl").read_text(encoding="utf-8")
    for name, text in (
        ("half", whole[: len(whole) // 2]),
        ("running", whole[: whole.rindex('{"end"')]),
        ("broken", "<html>\n"),
        ("newer", re.sub(r"results/\d", "results/9", whole, count=1)),
    ):
        directory = results / "H200" / name
        directory.mkdir()
        (directory / "results.jsonl").write_text(text, encoding="utf-8")
    (results / "foreign").mkdir()
    (results / "foreign/photo.jpg").write_bytes(b"\xff\xd8")
    bad_plan = results / "H200/pin/plan.json"
    bad_plan.write_text("{", encoding="utf-8")
    path = tmp_path / "report.html"
    assert report(results, tmp_path / "nothing", "-o", path) == 0
    err = capsys.readouterr().err
    html = path.read_text(encoding="utf-8")
    skipped = html[html.index('id="skipped"') :]
    for name, reason in (
        ("half", "half-written"),
        ("running", "no end"),
        ("broken", "a line of JSON"),
        ("newer", "expected homenode.results"),
        ("foreign", "neither a run of homenode"),
        ("nothing", "no such directory"),
        ("plan.json", "plan"),
    ):
        assert re.search(rf"{name}[^\n]*({reason})", skipped), name
        assert name in err
    assert "MI350X" in html


def test_nothing_but_broken_directories_is_an_error_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    assert report(tmp_path / "results", "-o", tmp_path / "x.html") == 2
    assert "not a run of homenode's" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    "arguments", [(), ("-o", "x.html"), ("r",), ("r", "-o", "x.txt"), ("r", "--csv", "--json")]
)
def test_a_call_that_cannot_be_meant_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert report(*arguments) == 2


def test_the_page_is_well_formed_and_each_of_its_names_is_one(document: Doc) -> None:
    parser = parsed(render_page(document))
    assert len(parser.ids) == len(set(parser.ids))
    anchors = {value for name, value in parser.attributes if name == "href"}
    assert {anchor for anchor in anchors if anchor} == {f"#{one}" for one in parser.ids} & anchors
    assert not [value for name, value in parser.attributes if name == "style"], "forbidden"


def test_the_policy_names_the_digests_of_what_is_there(document: Doc) -> None:
    import base64
    import hashlib

    html = render_page(document)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    policy = policy.replace("&#39;", "'")
    assert policy.startswith("default-src 'none'")
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy


def test_the_same_results_give_the_same_page(document: Doc) -> None:
    assert render_page(build_report(machines(DIRECTORY), (), "now")) == render_page(document)


@pytest.mark.parametrize("module", ["jinja2", "weasyprint"])
def test_without_the_extra_the_command_says_how_to_get_it(
    module: str, document: Doc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HostError) as error:
        render_page(document) if module == "jinja2" else render_pdf("<p>")
    assert "pip install 'homenode[report]'" in str(error.value)
    assert error.value.exit_code == 3


def test_without_arguments_it_reports_on_the_studys_own_directory_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    systems = write_study_directories(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the page that is there is homenode's, and no run
        assert report() == 0
        assert "read 20 runs" in capsys.readouterr().err
    html = (tmp_path / "results/report.html").read_text(encoding="utf-8")
    first = html[html.index('id="machines"') : html.index('id="evidence"')]
    assert all(f">{system}</a>" in first for system in systems)
    assert "7.3x default" in first
    assert "repair first" in first, "the RTX 5090"
    assert 'id="skipped"' not in html


def test_logs_next_to_runs_are_read_and_raw_outputs_of_a_run_are_not(tmp_path: Path) -> None:
    file = write_run(tmp_path, full_run("pin", 1))
    study = tmp_path / "study"
    write_study_directories(study)
    raw = file.parent / "raw"
    raw.mkdir()
    stream = (study / "H200/default/stream.txt").read_text()
    (raw / "stream.txt").write_text(stream)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").write_text("buy milk\n")
    found = gather([str(tmp_path)], [])
    assert (len(found.runs), found.imported) == (21, 20)
    assert [one for one in found.skipped if "notes" in one.subject]
    alone = gather([str(study / "H200/default/stream.txt")], [])
    assert (len(alone.runs), alone.imported) == (1, 1)


def test_matrix_products_are_charted_by_data_type(tmp_path: Path) -> None:
    for number, layout in enumerate(("default", "pin")):
        run = full_run(layout, number)
        samples = tuple(
            Sample("matmul-rate", "flop_per_s", rate * 1e12, boot=boot, index=0, variant=name)
            for name, rate in (("fp32", 51.0), ("bf16", 803.0))
            for boot in range(3)
        )
        write_run(tmp_path, Run(run.head, (*run.samples, *samples)))
    (machine,) = machines(tmp_path)
    (picture,) = build_product_picture(machine)
    for said in ("fp32", "bf16", "803", "51", "TFLOP/s"):
        assert said in picture.svg


def test_every_published_number_is_in_the_details_of_its_machine(
    document: Doc, published: dict[str, ReportedMachine]
) -> None:
    parts = re.split(r'<section id="machine-\d+"', render_page(document))[1:]
    for machine, part in zip(published.values(), parts, strict=True):
        texts = re.findall(r"\d[\d,]*\.?\d*", re.sub(r"<[^>]+>", " ", part))
        shown = [float(text.replace(",", "")) for text in texts]
        for sample in (one for run in machine.runs for one in run.samples if one.value):
            values = [sample.value / scale for scale in (1, 1e3, 1e6, 1e9, 1e12)]
            assert any(abs(a - b) <= 0.006 * b for a in shown for b in values), sample
