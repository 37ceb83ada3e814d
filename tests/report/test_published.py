"""The report of what others have published: each table and figure of theirs has its counterpart."""

import html
import re
from xml.etree import ElementTree

import pytest

from homenode.decide.evidence.documents import publications
from homenode.decide.verdict import ReasonId
from homenode.doc import Cell, Doc, Section, plain
from homenode.metrics import METRICS
from homenode.objective import Objective
from homenode.show.html import html_page
from homenode.show.page.document import document_of
from homenode.show.page.gathered import gather
from homenode.show.page.machine import ReportedMachine, machines_of
from homenode.show.page.verdict_card import VerdictCard, verdict_card
from homenode.vm.sources import load_host
from tests.explained import items, pictures, rows, section, tables
from tests.shared_data import needs_shared, shared

ARTICLE = ["H200", "MI350X", "RTX PRO 6000", "RTX 4090", "RTX 4080", "RTX 5090"]
"""In its own order."""


@pytest.fixture(scope="module")
def machines() -> tuple[ReportedMachine, ...]:
    evidence = publications()
    names = [s.name for one in evidence for s in one.systems if s.host is not None]
    found = gather([f"published:{name}" for name in names], evidence, [])
    return machines_of(found.runs, found.stored, evidence, found.hosts)


@pytest.fixture(scope="module")
def document(machines: tuple[ReportedMachine, ...]) -> Doc:
    return document_of(machines, (), "now", publications=publications())


@pytest.fixture(scope="module")
def sections(document: Doc) -> dict[str, str]:
    """The text of each section of the page, by its title."""
    found = {}
    for part in re.split(r"(?=<section )", html_page(document))[1:]:
        title = re.search(r"<h2[^>]*>([^<]*)", part)
        assert title is not None
        found[title[1].strip()] = usual(html.unescape(re.sub(r"<[^>]*>", " ", part)))
    return found


@pytest.fixture(scope="module")
def cards(machines: tuple[ReportedMachine, ...]) -> dict[str, VerdictCard]:
    return {machine.name: verdict_card(machine, "x") for machine in machines}


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter("text")]


def test_the_machine_that_the_article_puts_first_comes_first(document: Doc) -> None:
    assert [row["machine"].partition(" ")[0] for row in rows(document, "verdicts")][:6] == [
        name.partition(" ")[0] for name in ARTICLE
    ]


def test_the_first_table_says_what_to_run_how_sure_and_where_authors_differ(
    cards: dict[str, VerdictCard], document: Doc
) -> None:
    answers = {(name, one.objective): one for name, card in cards.items() for one in card.answers}
    host = answers["H200", "host-bandwidth"]
    assert (host.choice, host.effect, host.sure) == (
        "pin-numa",
        "561.2 GB/s, 7.3 x default",
        "published",
    )
    collective = answers["H200", "collective"]
    assert collective.effect == "18.4 GB/s, like default (20.2 GB/s)", "which is no better"
    assert collective.authors == ""
    assert answers["MI350X", "host-bandwidth"].authors.endswith("study: pin")
    assert answers["RTX PRO 6000", "latency"].sure == "reasoned"
    sick = cards["RTX 5090"]
    assert sick.is_stopped
    assert sick.authors == (
        "Not production-ready: Fix PCIe Gen 2 link first, then fix vCPU NUMA scatter",
    )
    assert sick.stop.startswith(
        "GPU 0000:41:00.0 and 7 like it: "
        "found 5 GT/s x16 (8.0 GB/s), expected 16 GT/s x16 (31.5 GB/s). Fix: "
    )
    assert list(rows(document, "verdicts")[0])[1:-1] == [str(one) for one in Objective]


def test_each_picture_of_a_machine_says_what_its_source_prints(sections: dict[str, str]) -> None:
    assert 'study: 77,243 MB/s; 75,311 MB/s; 561,170 MB/s; "H200' in sections["H200"]
    assert "sdumont: 411.6 GB/s; 88.6 GB/s" in sections["GH200 x4"]
    assert sections["GH200 x4"].count("the source prints the two means") == 3, "and no cell"


def test_a_printed_range_makes_a_range_of_multiples(
    cards: dict[str, VerdictCard], document: Doc
) -> None:
    xen = cards["Xen, 2 nodes of 16 cores"].answers
    (losses,) = [one for one in xen if one.objective == "throughput"]
    assert (losses.choice, losses.layout) == ("cores-first", "in a VM: pin-bound")
    assert losses.effect.endswith("1.67 to 4 x memory-first"), "40 to 75 % lost"
    reason = cards["GH200 x4"].reason
    assert reason.endswith("best for device-transfer; is no worse for collective")
    assert all(any(list(row.values())[5:]) for row in rows(document, "summary"))


def test_no_page_prints_a_percentage_for_a_multiple(document: Doc) -> None:
    html = html_page(document)
    first = html[html.index('id="verdicts"') : html.index('id="effects"')]
    assert not re.search(r"[-+\u2212]\d+\u00a0%", first)
    assert "7.3 x default" in first


def test_a_lead_that_single_figures_cannot_show_is_said_and_not_hidden(
    machines: tuple[ReportedMachine, ...],
) -> None:
    (mi350x,) = [one for one in machines if one.name == "MI350X"]
    (latency,) = [one for one in mi350x.verdicts if one.objective is Objective.LATENCY]
    reason = latency.why(ReasonId.MAY_BE_BETTER)
    assert reason is not None
    assert (latency.choice, reason.alternative) == ("pin", "pin-numa")
    assert reason.ratio == pytest.approx(135 / 145)
    (h200,) = [one for one in machines if one.name == "H200"]
    (latency,) = [one for one in h200.verdicts if one.objective is Objective.LATENCY]
    reason = latency.why(ReasonId.MAY_BE_BETTER)
    assert reason is not None and reason.alternative == "pin-numa-smt"
    assert (latency.choice, latency.avoid) == ("pin", ("default",)), "single runs differ by 1.3 x"
    (throughput,) = [one for one in h200.verdicts if one.objective is Objective.THROUGHPUT]
    assert throughput.why(ReasonId.MAY_BE_BETTER) is None, "2 % is less than matters"


def test_best_is_marked_only_where_every_other_layout_is_worse(document: Doc) -> None:
    (table,) = tables(section(document, "summary").parts)
    marked = {
        (plain(row[0]), plain(row[1]), plain(head).partition(",")[0])
        for row in table.rows
        for head, cell in zip(table.heads, row, strict=True)
        if isinstance(cell, Cell) and cell.look == "best"
    }
    assert ("H200", "pin-numa", "memory bandwidth") in marked
    assert ("RTX PRO 6000", "pin", "all-reduce") in marked
    assert not [one for one in marked if one[0] == "H200" and one[2] == "all-reduce"]
    assert not [one for one in marked if one[2] == "memory latency"]


def test_ranges_are_ranges_in_the_summary_and_in_the_links(document: Doc) -> None:
    cells = {cell for row in rows(document, "summary") for cell in row.values()}
    assert {"41.5\u201355.3", "21.1\u201321.4", "24.0\u201324.1"} <= cells
    assert "48.4" not in cells
    links = {row["machine"]: list(row.values())[1:] for row in rows(document, "PCIe links")}
    assert (links["H200"][0], links["H200"][2]) == ("Gen 5", "41.5\u201355.3 GB/s")
    assert links["RTX 5090"][:2] == ["Gen 2 (bug)", "5.0\u20135.3 GB/s"]


def test_machines_are_compared_on_one_axis_for_each_metric(document: Doc) -> None:
    (drawn, *_) = section(document, "across").parts
    assert isinstance(drawn, Section)
    charts = pictures(drawn)
    assert next(iter(charts)) == "memory bandwidth"
    words = texts(charts["memory bandwidth"].svg)
    assert [word for word in words if word in ARTICLE] == [
        "H200",
        "MI350X",
        "RTX PRO 6000",
        "RTX 4090",
        "RTX 5090",
    ]
    assert {"7.3 x", "3.4 x", "3.2 x", "1.9 x"} <= set(words)
    matmul = next(one for title, one in charts.items() if title.startswith("matrix product"))
    assert {"2.6 x H200", "0.66 x H200", "8.1\u20138.3 ms"} <= set(texts(matmul.svg))
    (reduce,) = [title for title in charts if "GPUs across nodes" in title]
    assert "H200, GPUs on 4 nodes" in texts(charts[reduce].svg)


def test_the_latency_profile_runs_from_l1_to_dram(document: Doc) -> None:
    details = pictures(section(document, "H200"), "In detail")
    words = texts(details["Latency profile, L1 to DRAM"].svg)
    assert words[::3] == ["L1, 4-32 KB", "L2, 64-512 KB", "L3, 1-32 MB", "DRAM, 256-512 MB"]
    assert "1.3\u20131.6 ns" in words


def test_every_gpu_is_drawn_before_and_after_near_and_far(document: Doc) -> None:
    (copies,) = pictures(section(document, "HGX A100"), "In detail").values()
    words = texts(copies.svg)
    assert words.count("GPU 0") == 2
    assert (words.count("far"), words.count("near")) == (4, 12)
    assert "-19%" in plain(copies.note[0])


def test_figures_verdicts_facts_and_ratios_stand_as_they_were_printed(document: Doc) -> None:
    h200 = section(document, "H200")
    printed = {row[""]: row for row in reversed(rows(h200, "As printed"))}
    assert printed["memory bandwidth"]["vcpu_pin_numa"] == "561,170 MB/s"
    assert printed["vCPUs"]["vcpu_pin_numa"] == "94 (inferred)"
    assert rows(h200, "What its authors")[0]["they say"] == "Good: pin"
    follows = {
        row["word for word"].strip('"'): row["follows"].partition(":")[0]
        for name in ("H200", "MI350X")
        for row in rows(section(document, name), "Ratios")
    }
    assert follows["AMD MI350X VF | 8.1\u20138.3 | 2.6\u00d7 faster than H200"] == "yes"
    assert follows["NCCL (cross-node GPUs) | Moderate (vcpu_pin benefit)"] == "no"
    gh200 = section(document, "GH200 x4")
    assert rows(gh200, "What its authors")[-1]["for"] == "Development/testing"
    facts = {row[""]: list(row.values())[1] for row in rows(gh200, "As printed")}
    assert facts["CPU Cores"] == "288 (72 per NUMA package)"
    assert any("~737 ns" in remark for remark in items(gh200, "Remarks"))


def test_the_articles_summary_stands_next_to_our_effects(document: Doc) -> None:
    effects = {row["metric"].partition(";")[0]: row for row in rows(document, "effects")}
    assert effects["memory bandwidth"]["guest cells"].endswith('; "2\u20137\u00d7"')
    collective = effects["all-reduce, peak bus bandwidth"]["metric"]
    assert collective.index("NCCL (same-node GPUs)") < collective.index("NCCL (cross-node GPUs)")
    titles = {METRICS[one].title for one in ("cpu-single", "h2d-bandwidth", "matmul-time")}
    assert titles <= set(effects)


def test_general_advice_and_confounded_figures_have_their_place(document: Doc) -> None:
    (study, scripts, *_) = section(document, "sources").parts
    assert isinstance(study, Section) and isinstance(scripts, Section)
    assert "(inferred)" in plain(study.title)
    assert any(row.get("what homenode does about it") for row in rows(study))
    rules = [tuple(row.values()) for row in rows(scripts)]
    assert ("host to device, PCIe 4.0/5.0 x16", "25\u201360 GB/s") in rules
    field = {row["source"]: row for row in rows(document, "Further figures")}
    assert field["vllm issue 55416"]["change"] == "0.57 x to 1.007 x"
    assert all(row["confounders"] for row in field.values())


def test_what_is_assumed_of_a_described_host_is_said_with_its_pictures(document: Doc) -> None:
    assumed = load_host("h200-xeon8558").assumed
    page = html.unescape(html_page(document))
    assert assumed and f"Assumed: {'; '.join(assumed)}." in page
    assert "Assumed, no source" in pictures(section(document, "H200"), "Topology")[""].svg


def usual(text: str) -> str:
    """With one kind of dash, minus and space."""
    for odd, other in (("\u2013", "-"), ("\u2212", "-"), ("\u00d7", "x"), ("\u2060", "")):
        text = text.replace(odd, other)
    return " ".join(text.split())


STUDY, SCRIPTS = "000_2d6e43fb326d5310.txt", "001_0e7d6af3fa4b28bb.txt"
IBM, SDUMONT, XAPI = (
    "002_3ec5936733e7fa59.txt",
    "003_babfeca1c0efd1b9.txt",
    "004_abbde5934c03793c.txt",
)
SLURM, XEN = ["GH200 x4"], ["Xen, 2 nodes of 16 cores"]

CHECKLIST: list[tuple[str, str, str, str, list[str]]] = [
    (STUDY, "test setup", "| GPU | Host CPU", "The RTX 4080 entry", ARTICLE),
    (STUDY, "STREAM", "| System | default |", "The H200 host has four", ARTICLE),
    (STUDY, "latency profile", "| Level | Latency", "Effect of vCPU", ["H200"]),
    (STUDY, "DRAM latency of H200", "| H200 config |", "Pinning alone cut", ["H200"]),
    (STUDY, "DRAM latency of MI350X", "| MI350X config |", "That is a useful", ["MI350X"]),
    (STUDY, "sysbench", "| System | Config |", "This is the clearest", ["H200", "MI350X"]),
    (STUDY, "pinning of the RTX 4080", "total CPU EVS from", " compared to", ["RTX 4080"]),
    (STUDY, "matrix product", "| GPU | Time", "Matmul time was", ARTICLE),
    (STUDY, "PCIe", "| GPU | H2D", "Server-class GPUs", ["Machines compared"]),
    (STUDY, "NCCL of RTX PRO", "pinning gives +144%", "For this 8-GPU", ["RTX PRO 6000"]),
    (STUDY, "NCCL of H200", "| Config | NUMA nodes |", "The H200 host has four NUMA", ["H200"]),
    (STUDY, "NCCL of MI350X", "stable across all configs\n|", "The MI350X VF setup", ["MI350X"]),
    (STUDY, "NCCL of RTX 5090", "flat at 0.53", "Summary: What", ["RTX 5090"]),
    (STUDY, "what matters", "| Metric | vcpu_pin", "If you want one", ["Effects and risks"]),
    (
        STUDY,
        "conclusions",
        "| System | Verdict |",
        "The biggest lesson",
        [
            "Which layout to run, for what, and how sure that is",
        ],
    ),
    (SCRIPTS, "latency by size", "| Array size", "For vCPU tuning this", ["Sources"]),
    (SCRIPTS, "slow link", "A newer GPU (e.g.", "Device-to-device (internal", ["Sources"]),
    (IBM, "copies before", "Running host_to", "Notice that four", ["HGX A100"]),
    (
        IBM,
        "copies with threads",
        "Running host_to_device_memcpy_ce.\nThread",
        "The logs are",
        [
            "HGX A100",
        ],
    ),
    (IBM, "near and far, in the mean", "As a result, we observed", "image3", ["HGX A100"]),
    (IBM, "latency, in the mean", "The same pattern appears", "image4", ["HGX A100"]),
    (IBM, "copies after", "We would expect", "We also observe", ["HGX A100"]),
    (SDUMONT, "hardware", "Component\tSpec", "Node Topology", SLURM),
    (SDUMONT, "queues", "Queue\tType", "0.2.3 2.3", SLURM),
    (SDUMONT, "tools", "Tool\tVersion", "0.3 3.", SLURM),
    (SDUMONT, "scenarios", "Scenario\tJobs", "```\n[2]", SLURM),
    (SDUMONT, "heat maps, in the mean", "Key Finding:", "This result is", SLURM),
    (SDUMONT, "latency map, in the mean", "Latency Analysis:", "4.1.2 Shared", SLURM),
    (SDUMONT, "GPU to GPU", "4. **GPU-to-GPU", "Recommendations", SLURM),
    (SDUMONT, "recommendations", "Workload Type\tRec", "```\n[8]", SLURM),
    (SDUMONT, "summary", "0   H2D Bandwidth", "0.5 5. Conclusions", SLURM),
    (XAPI, "gain and loss", "The potential gain", "If the NUMA node is large", XEN),
    (XAPI, "unbalanced hosts", "E.g. if you have 1 large VM", "We probably", XEN),
    (XAPI, "test of the change", "I've tested this on a host", "None of those", XEN),
]
"""Each table and figure of the five sources: from where to where, and our sections with it."""

INSTRUCTIONS = ("| Part | Meaning |", "| Offset | Register |", "| Value | Speed |")
"""Tables without a figure of any machine: how to write PCIe registers, as doctor retrain does."""


@needs_shared
@pytest.mark.parametrize(
    ("source", "what", "start", "end", "where"), CHECKLIST, ids=[one[1] for one in CHECKLIST]
)
def test_every_figure_of_the_sources_stands_in_the_report_as_it_is_printed(
    sections: dict[str, str], source: str, what: str, start: str, end: str, where: list[str]
) -> None:
    text = shared(f"seeds/{source}").read_text(encoding="utf-8")
    begins = text.index(start)
    part = text[begins : text.index(end, begins)]
    if part.startswith("|"):
        part = part.partition("\n")[2]  # without the names of the columns
    report = " ".join(sections[title] for title in where)
    words = [word.strip("()[].,;:|*'<=~\u2018\u2019") for word in usual(part).split()]
    figures = [word for word in words if re.search(r"\d", word)]
    assert figures
    assert not [one for one in figures if one not in report], what


@needs_shared
def test_the_checklist_leaves_out_no_table_of_the_sources() -> None:
    for source in (STUDY, SCRIPTS, IBM, SDUMONT, XAPI):
        text = shared(f"seeds/{source}").read_text(encoding="utf-8")
        ranges = [
            (begins := text.index(start), text.index(end, begins))
            for of, _, start, end, _ in CHECKLIST
            if of == source
        ]
        tables = re.finditer(r"^\|.*\|\n\|[-|]+\|$", text, re.MULTILINE)
        heads = [match.start() for match in tables]
        heads += [match.start() for match in re.finditer(r"^Running \w+\.$", text, re.MULTILINE)]
        for head in heads:
            title = text[head:].partition("\n")[0]
            is_listed = any(begins <= head < ends for begins, ends in ranges)
            assert is_listed or title.startswith(INSTRUCTIONS), title
