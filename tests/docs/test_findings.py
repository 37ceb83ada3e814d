"""The pages of findings, results, caveats and published evidence against the program."""

import ast
import re
from collections.abc import Iterator

import msgspec
import pytest

from homenode import formats
from homenode.findings import (
    GROUPS,
    FindingTexts,
    Severity,
    catalogue,
    finding,
    format_plain,
    page,
)
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
from tests.command_line import NEEDS_CLUSTER
from tests.doc_pages import ROOT, first_column, read_page
from tests.doc_tree import made_pages
from tests.finding_ids import all_ids, calls, ids_given, ids_of, severities_given, words_of_source
from tests.source_trees import FILES, nodes


@NEEDS_CLUSTER
def test_every_finding_that_homenode_makes_has_its_texts() -> None:
    made = all_ids()
    assert len(made) > 250
    missing = sorted(made - catalogue().keys())
    assert not missing, f"add a table to a page of src/homenode/findings: {missing}"


def test_findings_are_made_from_their_texts_and_none_while_a_module_is_imported() -> None:
    """So that no start reads the pages."""
    for path in FILES:
        inside = {
            call
            for function in nodes(path)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for call in ast.walk(function)
        }
        for call in calls(path, {"Finding"}):
            assert path.name == "findings.py", f"{path}:{call.lineno}"
        for call in calls(path, {"finding"}):
            assert call in inside, f"{path}:{call.lineno}"


@NEEDS_CLUSTER
def test_there_are_no_texts_of_a_finding_that_homenode_does_not_make() -> None:
    assert not sorted(catalogue().keys() - words_of_source())


def test_no_cost_or_fix_is_a_placeholder_alone() -> None:
    """`homenode list findings` would print WAYS for a fix."""
    for name, texts in catalogue().items():
        for text in (texts.cost, texts.fix, *texts.cost_of.values(), *texts.fix_of.values()):
            assert not re.fullmatch(r"`?\{\w+\}`?", text), name


def test_findings_have_the_severities_of_their_texts() -> None:
    for path in FILES:
        for name, severity in severities_given(path):
            assert severity in catalogue()[name].severity, f"{path}: {name}"


MAKERS = frozenset({"finding", "check"})


def _made() -> Iterator[tuple[ast.Call, str]]:
    for path in FILES:
        prefix = "guest-" if "verify/guest" in path.as_posix() else ""
        for call in calls(path, MAKERS):
            for name in ids_of(call):
                yield call, name if name in catalogue() else prefix + name


def _texts(value: ast.expr) -> Iterator[str]:
    """The texts that an argument is or chooses from."""
    if isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg == name), None)


def test_costs_and_fixes_that_depend_on_no_value_stand_among_the_texts() -> None:
    constant = [
        f"{path}:{call.lineno}: {name}="
        for path in FILES
        for call in calls(path, MAKERS)
        for name in ("cost", "fix")
        if (value := _argument(call, name)) is not None and list(_texts(value))
    ]
    assert not constant


@NEEDS_CLUSTER
def test_each_case_that_the_code_names_has_a_text_and_each_text_of_a_case_is_used() -> None:
    on_pages = {
        (name, case)
        for name, texts in catalogue().items()
        for case in (*texts.cost_of, *texts.fix_of)
    }
    named = {
        (name, case)
        for call, name in _made()
        if (value := _argument(call, "case")) is not None
        for case in _texts(value)
    }
    assert named <= on_pages
    assert {case for _, case in on_pages} <= words_of_source()


@NEEDS_CLUSTER
def test_each_word_of_a_text_is_filled_and_each_value_is_used() -> None:
    on_pages = {
        (texts.meaning, word)
        for texts in catalogue().values()
        for text in (
            texts.headline,
            texts.cost,
            texts.fix,
            *texts.cost_of.values(),
            *texts.fix_of.values(),
        )
        for word in re.findall(r"\{([a-z_]+)\}", text)
    }
    given = {
        (catalogue()[name].meaning, str(key.value))
        for call, name in _made()
        if isinstance(value := _argument(call, "values"), ast.Dict)
        for key in value.keys
        if isinstance(key, ast.Constant)
    }
    assert given <= on_pages
    assert {word for _, word in on_pages} <= words_of_source()


def test_an_id_is_on_one_page_only() -> None:
    assert sum(len(page(name)) for name in GROUPS) == len(catalogue())


@pytest.mark.parametrize("name", GROUPS)
def test_each_finding_says_what_it_means_and_how_to_fix_it(name: str) -> None:
    for key, texts in page(name).items():
        assert texts.meaning.endswith("."), key
        assert texts.fix or texts.more or texts.severity == (Severity.INFO,), key
        for text in (
            texts.headline,
            texts.cost,
            texts.fix,
            *texts.cost_of.values(),
            *texts.fix_of.values(),
        ):
            assert len(format_plain(text, {}) or "") < 200, key
            assert not text.endswith("."), key
        if texts.cause:
            assert texts.source, key


def test_the_index_names_every_page() -> None:
    assert {f"docs/reference/findings/{name}.md" for name in GROUPS} == {
        p for p in made_pages() if p.startswith("docs/reference/findings/")
    }


def test_a_text_of_another_name_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="kost"):
        msgspec.toml.decode("severity = ['info']\nmeaning = 'It is.'\nkost = ''", type=FindingTexts)


def test_a_finding_is_printed_on_one_line_and_stands_as_sentences_on_its_page() -> None:
    texts = FindingTexts(
        severity=(Severity.INFO, Severity.CRITICAL),
        meaning="It is.",
        cost="half of {link}",
        fix="set `x=1`\nin {file}",
        fix_of={"late": ""},
        more="Check: `cat x`.",
    )
    assert format_plain(texts.fix, {"file": "/f"}) == "set x=1 in /f"
    assert format_plain(texts.fix_of["late"], {}) is None
    assert texts.format_markdown("## a").split("\n\n") == [
        "## a",
        "**Info, critical.** It is.",
        "**Cost.** Half of LINK.",
        "**Fix.** Set `x=1`\nin FILE.",
        "Check: `cat x`.\n",
    ]


def test_what_depends_on_the_case_takes_the_place_of_the_texts() -> None:
    usual = finding("core-taken", "CPU 3", "1 vCPU", "2", "x.xml")
    assert usual.severity is Severity.WARNING and usual.cost and usual.fix
    other = finding(
        "core-taken", "CPU 3", "1 vCPU", "2", "x.xml",
        severity=Severity.INCONCLUSIVE, cost=None, fix="wait",
    )  # fmt: skip
    assert (other.severity, other.cost, other.fix) == (Severity.INCONCLUSIVE, None, "wait")
    with pytest.raises(KeyError):
        finding("no-such-finding", "CPU 3", "1 vCPU", "2", "x.xml")


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


def test_the_page_of_comparisons_explains_every_caveat() -> None:
    sources = (ROOT / "src/homenode/decide").glob("*.py")
    ids = {one for source in sources for one in ids_given(source, {"make_caveat"})}
    assert len(ids) > 12
    assert ids <= read_page("docs/reference/formats/comparison.md").words_in_code()


def test_the_examples_of_the_pages_are_read() -> None:
    (lines,) = [b.text for b in read_page("docs/reference/formats/results.md").blocks() if b.text]
    run = parse_run((lines + "\n").encode(), "the page")
    assert run.head.switches.name == "pin-numa"
