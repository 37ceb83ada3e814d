"""What findings look like at 80 columns: the answer first, equal findings in one block."""

import pytest

from homenode.doc import Text, plain
from homenode.findings import Findings, Gap, Severity, finding, with_gaps
from homenode.show.findings_text import findings_text, group_findings, subjects_of
from tests.command_line import homenode

SICK = """\
rtx5090-epyc7702: 8 critical: the links of 8 GPUs run at 25 % of their rate

critical  8 GPUs: 0000:41:00.0 and 7 more                         pcie-link-slow
  expected  16 GT/s x16 (31.5 GB/s): the port has 16 GT/s, the GPU 32 GT/s
  found     5 GT/s x16 (8.0 GB/s), at the port and at the GPU
  cost      75 % of the bandwidth of each GPU: 23.5 of 31.5 GB/s
  fix       homenode doctor retrain 0000:41:00.0, then the 7 others; if it stays
            slow: slot speed in the firmware setup, riser, seating

unknown  VMs: the description has none
"""
SOUND = """\
hgx-h100: 0 findings
checked  links, devices of one model, nodes, settings
unknown  VMs: the description has none
"""


@pytest.mark.parametrize(("host", "screen"), [("rtx5090-epyc7702", SICK), ("hgx-h100", SOUND)])
def test_a_host_is_judged_on_one_screen(
    host: str, screen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert homenode("doctor", "--host", host, whole=True).stdout == screen


def test_an_unread_area_is_in_the_first_line() -> None:
    found = Findings(checked=("nodes",), findings=())
    unread = with_gaps(found, [Gap("VMs, pins and allocations", "no daemon")], asks_vms=True)
    first, *labels = lines(unread)
    assert first == "h: 0 findings, but the VMs were not checked"
    assert labels == ["not read  VMs, pins and allocations: no daemon", "checked   nodes"]


def test_what_could_not_be_judged_is_counted_and_has_the_next_command() -> None:
    idle = finding("pcie-link-idle", "GPU 0000:41:00.0", "16 GT/s x16", "2.5 GT/s x16")
    assert lines(Findings(checked=("links",), findings=(idle,))) == [
        "h: 0 findings, 1 unknown",
        "checked  links",
        "unknown  GPU 0000:41:00.0: 2.5 GT/s x16",
        "next     homenode doctor --under-load",
    ]


def test_the_first_line_keeps_the_letters_of_a_setting() -> None:
    select = finding("slurm-select-type", "the cluster", "SelectType=select/cons_tres", "not set")
    first = lines(Findings(checked=("files",), findings=(select,)))[0]
    assert first == "h: 1 critical: SelectType is not select/cons_tres"


def lines(findings: Findings) -> list[str]:
    parts = findings_text(findings, "h").parts
    return [plain(part.words) for part in parts if isinstance(part, Text)]


@pytest.mark.parametrize(
    ("id", "subject", "answer"),
    [
        ("unpinned", "vm", "h: 0 findings"),
        ("live-busy-neighbour", "'a' (process 1)", "h: 1 warning: other processes run on its CPUs"),
    ],
)
def test_line_1_is_the_fact_of_a_finding_not_its_id(id: str, subject: str, answer: str) -> None:
    severity = Severity.INFO if "0 findings" in answer else Severity.WARNING
    findings = (finding(id, subject, "a", "b", severity=severity),)
    assert lines(Findings(checked=("pins",), findings=findings))[0] == answer


def test_a_screen_of_many_findings_counts_what_does_not_fit() -> None:
    ids = ("core-shared", "pu-shared", "memory-unbound", "pin-off-node", "ksm-on", "llc-straddled")
    many = tuple(
        finding(name, f"vCPU {number}", f"e {name}", str(number), severity=Severity.WARNING)
        for name in ids
        for number in range(40)
    )
    text = lines(
        Findings(checked=("pins",), findings=(*many, finding("node-spans-llcs", "node 0")))
    )
    assert len(text) <= 25 and text[0].startswith("h: 240 warning: ")
    assert text[2].startswith("warning   40 vCPUs: 0-39") and text[2].endswith("core-shared")
    assert "(vCPU 0; each: --explain)" in text[4]
    assert text[-2].startswith("warning  ") and "more: " in text[-2] and "llc-strad" in text[-2]
    assert text[-1] == "info     1: node-spans-llcs (--explain)"
    assert len(findings_text(Findings(checked=(), findings=many), "h", explain=True).parts) > 900


@pytest.mark.parametrize(
    ("subjects", "text"),
    [
        (["vm.xml"], "vm.xml"),
        (["GPU a", "GPU b"], "2 GPUs: a and b"),
        (["GPU a", "GPU b", "GPU c", "GPU d"], "4 GPUs: a and 3 more"),
        (["vCPU 3", "vCPU 4", "vCPU 9"], "3 vCPUs: 3-4,9"),
        (["<hostdev>", "cell 1"], "<hostdev> and cell 1"),
    ],
)
def test_subjects_are_named_or_counted(subjects: list[str], text: str) -> None:
    group = [finding("pu-shared", subject, "e", "o") for subject in subjects]
    assert group_findings(group) == [group]
    assert subjects_of(group) == text
