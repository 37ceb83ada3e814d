"""Every finding is in the catalogue, which docs/findings is and `homenode explain` prints."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.catalogue import CatalogueEntry, catalogue, entries, finding
from homenode.findings import Severity
from tests.command_line import NEEDS_CLUSTER
from tests.doc_pages import DOCS
from tests.finding_ids import (
    all_ids,
    calls,
    ids_of,
    severities_given,
    words_of_source,
)
from tests.source_trees import FILES, nodes

PAGES = sorted(path for path in (DOCS / "findings").glob("*.md") if path.stem != "README")
LONG = ("Cause", "Cost", "Fix", "Source")


@NEEDS_CLUSTER
def test_every_finding_that_homenode_makes_is_in_the_catalogue() -> None:
    made = all_ids()
    assert len(made) > 250
    missing = sorted(made - catalogue().keys())
    assert not missing, f"add a section to a page of docs/findings: {missing}"


def test_findings_are_made_from_their_pages_and_none_while_a_module_is_imported() -> None:
    """So that no start reads the pages."""
    makers = {"homenode/catalogue.py", "homenode/vm/plan_model.py"}
    for path in FILES:
        inside = {
            call
            for function in nodes(path)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for call in ast.walk(function)
        }
        for call in calls(path, {"Finding", "PlanFinding"}):
            assert path.as_posix().endswith(tuple(makers)), f"{path}:{call.lineno}"
        for call in calls(path, {"finding", "plan_finding"}):
            assert call in inside, f"{path}:{call.lineno}"


@NEEDS_CLUSTER
def test_the_catalogue_has_no_finding_that_homenode_does_not_make() -> None:
    assert not sorted(catalogue().keys() - words_of_source())


def test_findings_have_the_severities_that_the_catalogue_gives_them() -> None:
    known = catalogue()
    wrong = [
        (name, severity)
        for path in FILES
        for name, severity in severities_given(path)
        if severity not in known[name].severities
    ]
    assert not wrong


MAKERS = frozenset({"finding", "plan_finding", "check"})


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


def test_costs_and_fixes_that_depend_on_no_value_stand_on_the_pages() -> None:
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
        (name, part.partition(", ")[2])
        for name, entry in catalogue().items()
        for part in entry.parts
        if "," in part
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
        (entry.ids[0], word)
        for entry in catalogue().values()
        for text in (*entry.texts("Cost").values(), *entry.texts("Fix").values())
        for word in re.findall(r"\{([a-z_]+)\}", text or "")
    }
    given = {
        (catalogue()[name].ids[0], str(key.value))
        for call, name in _made()
        if isinstance(value := _argument(call, "values"), ast.Dict)
        for key in value.keys
        if isinstance(key, ast.Constant)
    }
    assert given <= on_pages
    assert {word for _, word in on_pages} <= words_of_source()


def test_an_id_is_on_one_page_only() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    headings = [
        one for line in re.findall(r"^## (.+)$", text, re.MULTILINE) for one in line.split(", ")
    ]
    assert [name for name, count in Counter(headings).items() if count > 1] == []
    assert set(headings) == catalogue().keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_each_finding_says_what_it_means_and_how_to_fix_it(page: Path) -> None:
    for entry in entries(page.read_text(encoding="utf-8"), page.name):
        assert entry.meaning.endswith("."), entry.ids
        assert entry.parts.get("Fix"), entry.ids
        costs, fixes = entry.texts("Cost"), entry.texts("Fix")
        assert fixes[None] is not None or entry.parts["Fix"].startswith("Nothing to do"), entry.ids
        assert all(len(t) < 200 for t in (*costs.values(), *fixes.values()) if t), entry.ids
        if "Cause" in entry.parts:  # a long one is whole
            usual = tuple(name for name in entry.parts if "," not in name)
            assert usual[: len(LONG)] == LONG, entry.ids
            assert all(len(entry.parts[name]) > 10 for name in usual), entry.ids


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "findings" / "README.md").read_text(encoding="utf-8")
    assert all(f"]({page.name})" in index for page in PAGES)


def test_a_section_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="pcie-link-slow"):
        entries("## pcie-link-slow\n\nA link is slow.\n", "links.md")
    (entry,) = entries("## a, b\n\n**Critical, info.** It is.\n\n**Fix.** Mend it.\n", "x.md")
    assert (
        isinstance(entry, CatalogueEntry)
        and entry.ids == ("a", "b")
        and entry.parts == {"Fix": "Mend it."}
    )


def test_a_finding_has_the_first_severity_and_the_first_paragraphs_of_its_page() -> None:
    (entry,) = entries(
        "## a\n\n**Info, critical.** It is.\n\n"
        "**Cost.** Half of [the link](links.md).\n\nAt most.\n\n"
        "**Fix.** Set `x=1`\nin the file.\n\nCheck: `cat x`.\n",
        "x.md",
    )
    assert entry.severities == (Severity.INFO, Severity.CRITICAL)
    assert entry.printed("Cost") == "half of the link"
    assert entry.printed("Fix") == "set x=1 in the file"
    for text, printed in (
        ("Slurm drains it.", "Slurm drains it"),
        ("NCCL fails.", "NCCL fails"),
        ("`virsh start VM`.", "virsh start VM"),
        ("Nothing to do.", None),
    ):
        (entry,) = entries(f"## a\n\n**Info.** It is.\n\n**Fix.** {text}\n", "x.md")
        assert (entry.printed("Cost"), entry.printed("Fix")) == (None, printed)


def test_what_depends_on_the_case_takes_the_place_of_the_page() -> None:
    page = finding("core-taken", "PU 3", "1 vCPU", "2", "x.xml")
    assert page.severity is Severity.WARNING and page.cost and page.fix
    other = finding(
        "core-taken", "PU 3", "1 vCPU", "2", "x.xml",
        severity=Severity.INCONCLUSIVE, cost=None, fix="wait",
    )  # fmt: skip
    assert (other.severity, other.cost, other.fix) == (Severity.INCONCLUSIVE, None, "wait")
    with pytest.raises(KeyError):
        finding("no-such-finding", "PU 3", "1 vCPU", "2", "x.xml")
