"""Published evidence: every figure with its sentence, every contradiction with its arithmetic."""

import ast
import operator
import re
from collections.abc import Iterator

import pytest

from homenode.decide.evidence.documents import publications
from homenode.decide.evidence.model import Certainty, Claim, Publication
from homenode.decide.evidence.parse import parse_publications
from homenode.errors import InputError
from homenode.measure.results.model import Origin, Run, Sample, Statistic
from tests.mutations import survives
from tests.shared_data import needs_shared, shared

SEEDS = {
    "study": "000_2d6e43fb326d5310.txt",
    "study-scripts": "001_0e7d6af3fa4b28bb.txt",
    "ibm": "002_3ec5936733e7fa59.txt",
    "sdumont": "003_babfeca1c0efd1b9.txt",
    "xapi": "004_abbde5934c03793c.txt",
}
EVIDENCE = {one.id: one for one in publications()}
CLAIMS = [(one, claim) for one in EVIDENCE.values() for claim in one.claims]
NOTES = [(one, note) for one in EVIDENCE.values() for note in (*one.notes, *one.field_reports)]


def samples(evidence: str, system: str, choice: str, metric: str) -> list[Sample]:
    (run,) = [
        run
        for run in EVIDENCE[evidence].runs
        if (run.head.system, run.head.name) == (system, choice)
    ]
    return [sample for sample in run.samples if sample.metric == metric]


def test_the_five_documents_are_there_and_every_run_is_marked_as_published() -> None:
    assert set(EVIDENCE) - {"field", "nccl"} == set(SEEDS)
    for evidence in EVIDENCE.values():
        assert all(run.head.origin is Origin.PUBLISHED for run in evidence.runs)
        assert all(
            sample.statistic is not Statistic.SAMPLE
            for run in evidence.runs
            for sample in run.samples
        )


def test_every_sample_has_its_sentence_and_its_printed_text() -> None:
    for evidence in EVIDENCE.values():
        printed = {
            (one.system, one.metric, one.variant, choice)
            for one in evidence.figures
            for choice, text in one.texts
            if one.source and text
        }
        for run in evidence.runs:
            for sample in run.samples:
                key = run.head.system, sample.metric, sample.variant, run.head.name
                assert key in printed


def test_printed_figures_keep_their_digits_and_ranges() -> None:
    texts = {
        (one.system, one.metric, one.variant, choice): text
        for one in EVIDENCE["study"].figures
        for choice, text in one.texts
    }
    assert texts["H200", "d2h-bandwidth", None, "any"] == "41.5–55.3 GB/s"
    assert texts["RTX 5090", "h2d-bandwidth", None, "any"] == "5.0–5.3 GB/s"
    assert texts["H200", "memory-bandwidth", None, "vcpu_pin_numa"] == "561,170 MB/s"
    assert texts["RTX 5090", "allreduce-busbw-peak", None, "any"] == "~0.53 GB/s"
    (a100,) = EVIDENCE["ibm"].figures
    assert dict(a100.texts)["after"].startswith("15.60 15.64 15.75")


def test_what_no_document_prints_is_marked_inferred() -> None:
    assert {one.id for one in EVIDENCE.values() if one.is_date_inferred} == {
        "study",
        "study-scripts",
        "ibm",
        "field",
    }
    h200 = EVIDENCE["study"].system("H200")
    assert h200 is not None
    assert h200.inferred_vcpus == ("vcpu_pin_numa",)
    assert EVIDENCE["study"].dated.endswith("(inferred)")


def test_xens_programs_are_not_filed_as_sysbench() -> None:
    metrics = {one.metric for one in EVIDENCE["xapi"].figures}
    assert metrics == {"program-throughput", "memory-latency"}


def test_a_use_that_is_no_objective_answers_none() -> None:
    (one,) = [one for one in EVIDENCE["sdumont"].verdicts if one.work is not None]
    assert (one.work, one.objective, one.choices) == ("Development/testing", None, ("shared",))


def test_field_reports_name_their_confounders_and_hold_adverse_ones() -> None:
    reports = EVIDENCE["field"].field_reports
    assert len(reports) == 11
    assert all(one.confounders for one in reports)
    assert sum(one.change is not None and one.change[0] < 1 for one in reports) >= 5
    assert sum(one.change is not None and one.change[0] > 1 for one in reports) >= 2
    for one in reports:
        if one.change is not None:
            for line in one.arithmetic:
                assert any(abs(float(line.rpartition(" = ")[2]) - end) < 0.01 for end in one.change)


def test_figures_are_in_the_units_of_results() -> None:
    (stream,) = samples("study", "H200", "vcpu_pin_numa", "memory-bandwidth")
    assert (stream.value, stream.unit) == (561170e6, "bytes_per_s")
    low, high = samples("study", "H200", "any", "d2h-bandwidth")
    assert (low.value, high.value, low.count) == (41.5e9, 55.3e9, 5)
    assert (low.statistic, high.statistic) == (Statistic.LOW, Statistic.HIGH)
    (matmul,) = samples("study", "RTX 5090", "any", "matmul-time")
    assert matmul.value == pytest.approx(16.6e6)
    assert matmul.unit == "ns"


def test_the_study_has_its_tables_whole() -> None:
    runs = EVIDENCE["study"].runs
    counted = {
        metric: sum(sample.metric == metric for run in runs for sample in run.samples)
        for metric in ("memory-bandwidth", "allreduce-busbw-peak", "cpu-throughput")
    }
    assert counted == {"memory-bandwidth": 15, "allreduce-busbw-peak": 13, "cpu-throughput": 6}
    dram = [s.value for run in runs for s in run.samples if s.variant == "dram" and s.value]
    assert sorted(dram) == [100, 101, 112, 135, 137, 140, 144, 145]


def test_ibms_figures_are_by_index_and_have_no_address() -> None:
    before = samples("ibm", "HGX A100", "before", "h2d-bandwidth")
    after = samples("ibm", "HGX A100", "after", "h2d-bandwidth")
    assert (len(before), len(after)) == (16, 8)
    assert {sample.device for sample in before + after} == {None}
    assert {sample.index for sample in after} == set(range(8))


def test_no_matrix_is_invented_for_sdumont() -> None:
    runs = EVIDENCE["sdumont"].runs
    assert sum(len(run.samples) for run in runs) == 8
    assert {sample.node for run in runs for sample in run.samples} == {None}


def _figures(text: str) -> set[str]:
    return {number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}


@needs_shared
@pytest.mark.parametrize("id", SEEDS)
def test_every_source_sentence_prints_what_its_document_prints(id: str) -> None:
    printed = _figures(shared(f"seeds/{SEEDS[id]}").read_text(encoding="utf-8"))
    for sentence in _sentences(EVIDENCE[id]):
        missing = _figures(sentence) - printed
        assert not missing, f"{sentence}: {missing} is not in the document"


@needs_shared
@pytest.mark.parametrize(
    ("id", "start", "end"),
    [
        ("study", "Memory Bandwidth: the Headline", "Applying the Configs"),
        ("sdumont", "Metric      Value", "0.5 5. Conclusions"),
    ],
)
def test_every_row_with_units_in_the_tables_of_a_document_is_in_the_data(
    id: str, start: str, end: str
) -> None:
    text = shared(f"seeds/{SEEDS[id]}").read_text(encoding="utf-8")
    tables = text[text.index(start) : text.index(end)]
    rows = [row for row in tables.splitlines() if re.match(r"\||\d ", row)]
    kept = set().union(*(_figures(sentence) for sentence in _sentences(EVIDENCE[id])))
    kept |= set().union(*(_figures(note.text) for note in EVIDENCE[id].notes))
    for row in rows:
        measured = re.findall(r"(\d[\d,.–]*)(?: ?(?:MB/s|GB/s|ns)\b| \||×)", row.replace("~", ""))
        figures = {f for part in measured for f in _figures(part.replace("–", " "))}
        assert figures - {"1", "4"} <= kept, f"{row}: {figures - kept} is not in the data"


def _sentences(evidence: Publication) -> Iterator[str]:
    yield from (one.source for one in evidence.figures)
    yield from (text for one in evidence.figures for _, text in one.texts)
    yield from (claim.source for claim in evidence.claims)
    yield from (one.source for one in evidence.verdicts)
    yield from (one.source for one in evidence.remarks)
    for one in evidence.effects:
        yield from (one.pinning, one.cells, one.siblings, one.risk)
    yield from (text for one in evidence.systems for text in one.facts.values())


@pytest.mark.parametrize(("evidence", "claim"), CLAIMS, ids=lambda value: getattr(value, "id", ""))
def test_a_claim_follows_from_the_figures_or_a_note_disputes_it(
    evidence: Publication, claim: Claim
) -> None:
    of = _figure(evidence, claim.system, claim.metric, claim.choice)
    against = _figure(evidence, claim.against_system, claim.metric, claim.against)
    if of is None or against is None:
        assert claim.disputed_by is None
        return
    holds = claim.ratio[0] <= of / against <= claim.ratio[1]
    assert holds is (claim.disputed_by is None), f"{of} / {against} = {of / against:.4f}"


def _figure(evidence: Publication, system: str, metric: str, choice: str) -> float | None:
    """The middle of a range."""
    for run in evidence.runs:
        if (run.head.system, run.head.name) == (system, choice):
            found = [
                sample.value
                for sample in run.samples
                if sample.metric == metric and sample.variant in (None, "dram", "FP16 as printed")
            ]
            return sum(found) / len(found) if found else None
    return None


@pytest.mark.parametrize(("evidence", "note"), NOTES, ids=lambda value: getattr(value, "id", ""))
def test_the_arithmetic_of_a_note_is_right(evidence: Publication, note: object) -> None:
    for line in getattr(note, "arithmetic"):  # noqa: B009
        expression, _, printed = line.rpartition(" = ")
        digits = len(printed.partition(".")[2])
        found = _value(ast.parse(expression, mode="eval").body)
        assert abs(found - float(printed)) <= 0.5 * 10.0**-digits + 1e-9, f"{evidence.id}: {line}"


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
}


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int | float)
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand)
    assert isinstance(node, ast.BinOp)
    found: float = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    return found


@pytest.mark.parametrize(
    ("id", "certainty"),
    [
        ("matmul-fp32", Certainty.LIKELY),
        ("pcie-gen", Certainty.FACT),
        ("nccl-algbw", Certainty.LIKELY),
        ("4080-one-llc", Certainty.FACT),
        ("4080-candidates", Certainty.LIKELY),
        ("stream-mi350x", Certainty.FACT),
        ("plus-40", Certainty.FACT),
        ("nccl-sweep", Certainty.FACT),
        ("unit-0x60", Certainty.FACT),
        ("nccl-node-0", Certainty.LIKELY),
    ],
)
def test_known_contradictions_are_notes_with_their_certainty(id: str, certainty: Certainty) -> None:
    (note,) = [note for one in EVIDENCE.values() for note in one.notes if note.id == id]
    assert note.certainty is certainty


_SMALL = """
format = 4
id = "x"
title = "t"
publisher = "p"
published = "2026"
[choice.a]
layout = "pin"
[[system]]
name = "S"
[[figure]]
system = "S"
metric = "memory-bandwidth"
unit = "GB/s"
values = { a = 1 }
source = "s"
"""


def test_a_small_document_is_read() -> None:
    (evidence,) = parse_publications({"x.toml": _SMALL})
    (run,) = evidence.runs
    assert isinstance(run, Run)
    assert run.head.switches.name == "pin"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("format = 4", "format = 2"),
        ('title = "t"', ""),
        ('layout = "pin"', 'layout = "pinned"'),
        ('metric = "memory-bandwidth"', 'metric = "memory-bandwith"'),
        ('unit = "GB/s"', 'unit = "GiB/s"'),
        ('unit = "GB/s"', 'unit = "ns"'),
        ("values = { a = 1 }", "values = { b = 1 }"),
        ("values = { a = 1 }", "value = 1"),
        ('system = "S"', 'system = "T"'),
        ("[[system]]", "[[system"),
        ('source = "s"', ""),
    ],
)
def test_a_misspelled_document_is_refused_and_no_figure_is_dropped(old: str, new: str) -> None:
    assert old in _SMALL
    with pytest.raises(InputError, match="expected"):
        parse_publications({"x.toml": _SMALL.replace(old, new, 1)})


def test_damaged_evidence_is_an_error_and_nothing_else() -> None:
    survives(lambda text: parse_publications({"x.toml": text}), _SMALL, 200)


@pytest.mark.parametrize(
    ("id", "notes"),
    [
        (
            "study",
            {
                "4080-e-cores",
                "5090-one-channel",
                "5090-root-complex",
                "pcie-two-tools",
                "pcie-negligible",
                "nccl-often",
                "example-cores",
            },
        ),
        ("study-scripts", {"stream-arrays", "stream-by-node", "remote-thirty", "remote-latency"}),
        ("sdumont", {"either-of-two", "no-compute-figure"}),
        ("ibm", {"no-latency-table"}),
    ],
)
def test_statements_without_figures_or_against_physics_have_notes(id: str, notes: set[str]) -> None:
    assert notes <= {note.id for note in EVIDENCE[id].notes}
