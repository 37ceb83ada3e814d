"""The report of what others have published: each table and figure of theirs has its counterpart."""

import html
import re
from xml.etree import ElementTree

import pytest

from homenode.analyse.verdict import ReasonId
from homenode.evidence.documents import publications
from homenode.objective import Objective
from homenode.report.page.document import Document, MachinePart, document_of
from homenode.report.page.gathered import gather
from homenode.report.page.machine import Machine, machines_of
from homenode.report.page.render import report_html
from homenode.sources import load_host
from tests.shared_data import needs_shared, shared

ARTICLE = ["H200", "MI350X", "RTX PRO 6000", "RTX 4090", "RTX 4080", "RTX 5090"]
"""In its own order."""


@pytest.fixture(scope="module")
def machines() -> tuple[Machine, ...]:
    evidence = publications()
    names = [s.name for one in evidence for s in one.systems if s.host is not None]
    found = gather([f"published:{name}" for name in names], evidence, [])
    return machines_of(found.runs, found.stored, evidence, found.hosts)


@pytest.fixture(scope="module")
def document(machines: tuple[Machine, ...]) -> Document:
    return document_of(machines, (), "now", publications=publications())


@pytest.fixture(scope="module")
def sections(document: Document) -> dict[str, str]:
    """The text of each section of the page, by its title."""
    found = {}
    for part in re.split(r"(?=<section )", report_html(document))[1:]:
        title = re.search(r"<h2[^>]*>([^<]*)", part)
        assert title is not None
        found[title[1].strip()] = plain(html.unescape(re.sub(r"<[^>]*>", " ", part)))
    return found


def part_of(document: Document, name: str) -> MachinePart:
    return next(part for part in document.parts if part.card.name == name)


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter("text")]


def test_the_machine_that_the_article_puts_first_comes_first(document: Document) -> None:
    assert [part.card.name for part in document.parts][:6] == ARTICLE


def test_the_first_table_says_what_to_run_how_sure_and_where_authors_differ(
    document: Document,
) -> None:
    answers = {
        (part.card.name, one.objective): one for part in document.parts for one in part.card.answers
    }
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
    sick = part_of(document, "RTX 5090").card
    assert sick.is_stopped
    assert sick.authors == (
        "Not production-ready | Fix PCIe Gen 2 link first, then fix vCPU NUMA scatter",
    )
    assert sick.stop.startswith(
        "GPU 0000:41:00.0: link below port 0000:40:01.0 and 7 more like it: "
        "found 5 GT/s x16 (8.0 GB/s), expected 16 GT/s x16 (31.5 GB/s). Fix: "
    )
    assert [name for name, _, _ in document.objectives] == [str(one) for one in Objective]


def test_a_printed_range_makes_a_range_of_multiples(document: Document) -> None:
    (losses,) = [
        one
        for one in part_of(document, "Xen, 2 nodes of 16 cores").card.answers
        if one.objective == "throughput"
    ]
    assert (losses.choice, losses.layout) == ("cores-first", "in a VM: pin-bound")
    assert losses.effect.endswith("1.67 to 4 x memory-first"), "40 to 75 % lost"
    reason = part_of(document, "GH200 x4").card.reason
    assert reason.endswith("best for device-transfer; is no worse for collective")
    assert all(any(cell.text for cell in row[5:]) for row in document.summary.rows)


def test_no_page_prints_a_percentage_for_a_multiple(document: Document) -> None:
    html = report_html(document)
    first = html[html.index('id="verdicts"') : html.index('id="effects"')]
    assert not re.search(r"[-+\u2212]\d+\u00a0%", first)
    assert "7.3 x default" in first


def test_a_lead_that_single_figures_cannot_show_is_said_and_not_hidden(
    machines: tuple[Machine, ...],
) -> None:
    (mi350x,) = [one for one in machines if one.name == "MI350X"]
    (latency,) = [one for one in mi350x.verdicts if one.objective is Objective.LATENCY]
    reason = latency.why(ReasonId.MAY_BE_BETTER)
    assert reason is not None
    assert (latency.choice, reason.alternative) == ("pin", "pin-numa")
    assert reason.ratio == pytest.approx(135 / 145)
    (h200,) = [one for one in machines if one.name == "H200"]
    (latency,) = [one for one in h200.verdicts if one.objective is Objective.LATENCY]
    assert latency.why(ReasonId.MAY_BE_BETTER) is None, "1 % is less than matters"


def test_best_is_marked_only_where_every_other_layout_is_worse(document: Document) -> None:
    marked = {
        (row[0].text, row[1].text, document.summary.columns[number].partition(",")[0])
        for row in document.summary.rows
        for number, cell in enumerate(row)
        if cell.is_best
    }
    assert ("H200", "pin-numa", "memory bandwidth") in marked
    assert ("RTX PRO 6000", "pin", "all-reduce") in marked
    assert not [one for one in marked if one[0] == "H200" and one[2] == "all-reduce"]
    assert not [one for one in marked if one[2] == "memory latency"]


def test_ranges_are_ranges_in_the_summary_and_in_the_links(document: Document) -> None:
    cells = {cell.text for row in document.summary.rows for cell in row}
    assert {"41.5\u201355.3", "21.1\u201321.4", "24.0\u201324.1"} <= cells
    assert "48.4" not in cells
    links = {row.machine: row for row in document.link_speeds}
    assert (links["H200"].generation, links["H200"].d2h) == ("Gen 5", "41.5\u201355.3 GB/s")
    assert (links["RTX 5090"].generation, links["RTX 5090"].h2d) == (
        "Gen 2 (bug)",
        "5.0\u20135.3 GB/s",
    )


def test_machines_are_compared_on_one_axis_for_each_metric(document: Document) -> None:
    charts = {one.title: one for one in document.across}
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


def test_the_latency_profile_runs_from_l1_to_dram(document: Document) -> None:
    (profile,) = [one for one in part_of(document, "H200").details if "L1 to DRAM" in one.title]
    words = texts(profile.svg)
    assert words[::3] == ["L1, 4-32 KB", "L2, 64-512 KB", "L3, 1-32 MB", "DRAM, 256-512 MB"]
    assert "1.3\u20131.6 ns" in words


def test_every_gpu_is_drawn_before_and_after_near_and_far(document: Document) -> None:
    (copies,) = part_of(document, "HGX A100").details
    words = texts(copies.svg)
    assert words.count("GPU 0") == 2
    assert (words.count("far"), words.count("near")) == (4, 12)
    assert "-19%" in copies.note


def test_figures_verdicts_facts_and_ratios_stand_as_they_were_printed(document: Document) -> None:
    h200 = part_of(document, "H200").printed
    assert h200.table is not None
    rows = {
        what: dict(zip(h200.table.columns, cells, strict=True)) for what, cells in h200.table.rows
    }
    assert rows["memory bandwidth"]["vcpu_pin_numa"] == "561,170 MB/s"
    assert rows["vCPUs"]["vcpu_pin_numa"] == "94 (inferred)"
    assert h200.verdicts[0].choice == "Good: pin"
    follows = {row.quote: row.follows for row in h200.claims}
    others = {row.quote: row.follows for row in part_of(document, "MI350X").printed.claims}
    assert others["AMD MI350X VF | 8.1\u20138.3 | 2.6\u00d7 faster than H200"] is True
    assert follows["NCCL (cross-node GPUs) | Moderate (vcpu_pin benefit)"] is False
    gh200 = part_of(document, "GH200 x4").printed
    assert [row.use for row in gh200.verdicts][-1] == "Development/testing"
    assert dict(gh200.facts)["CPU Cores"] == "288 (72 per NUMA package)"
    assert any("~737 ns" in remark for remark in gh200.remarks)


def test_the_articles_summary_stands_next_to_our_effects(document: Document) -> None:
    rows = {row.metric.id: row.authors for row in document.effects}
    assert rows["memory-bandwidth"][0][2]["guest cells"] == "2\u20137\u00d7"
    assert [label for _, label, _ in rows["allreduce-busbw-peak"]] == [
        "NCCL (same-node GPUs)",
        "NCCL (cross-node GPUs)",
    ]
    assert {"cpu-single", "h2d-bandwidth", "matmul-time"} <= set(rows)


def test_general_advice_and_confounded_figures_have_their_place(document: Document) -> None:
    (study, scripts, *_) = document.sources
    assert "(inferred)" in study.title
    assert any(ours for _, ours in study.advice)
    assert ("host to device, PCIe 4.0/5.0 x16", "25\u201360 GB/s") in scripts.figures
    changes = {report.source: change for report, change in document.field}
    assert changes["vllm issue 55416"] == "0.57 x to 1.007 x"
    assert all(report.confounders for report, _ in document.field)


def test_what_is_assumed_of_a_described_host_is_said_with_its_pictures(document: Document) -> None:
    part = part_of(document, "H200")
    assert part.host.assumed == load_host("h200-xeon8558").assumed != ()
    assert "Assumed: " in report_html(document)
    assert "Assumed, no source" in part.host.maps[0].svg


def test_the_chain_from_printed_collectives_to_a_cause_names_each_ground(
    document: Document,
) -> None:
    grounds = [one.ground for one in document.chain]
    assert grounds[-1] == "unknown" and grounds.count("reasoned") >= 2
    assert grounds.index("published") < grounds.index("reasoned") < grounds.index("arithmetic")
    h200 = [one.statement for one in document.chain if one.statement.startswith("H200")]
    assert "0.47 x pin" in h200[0]
    assert "= 120 GB/s" in h200[1] and "140 GB/s" in h200[1]
    assert "homenode trial VM --tests collectives" in document.chain[-1].method
    assert 'id="collectives"' in report_html(document)


def plain(text: str) -> str:
    """With one kind of dash, minus and space."""
    for odd, usual in (("\u2013", "-"), ("\u2212", "-"), ("\u00d7", "x"), ("\u2060", "")):
        text = text.replace(odd, usual)
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
    words = [word.strip("()[].,;:|*'<=~\u2018\u2019") for word in plain(part).split()]
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
