"""Every finding has a machine that has it and one that nearly has it, and a page that says so."""

import re
from pathlib import Path

import pytest

from tests.doctor_cases import HOST_CASES
from tests.doctor_guest_cases import GUEST_CASES
from tests.doctor_quiet_cases import QUIET_CASES
from tests.finding_ids import ids_given
from tests.nccl.cases import NCCL_CASES

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "findings"
CASES = {**HOST_CASES, **GUEST_CASES, **QUIET_CASES, **NCCL_CASES}
SECTIONS = ("Cause", "Cost", "Fix", "Source", "Seen in")
VERIFYS_FILES = ("pins", "memory", "devices")
"""Of verify/document/, whose findings the doctor shows too."""


def _ids() -> set[str]:
    source = ROOT / "src" / "homenode"
    files = [*(source / "doctor").rglob("*.py")]
    files += [source / "verify/document" / f"{name}.py" for name in VERIFYS_FILES]
    files.append(source / "nccl" / "explanation.py")
    return {one for file in files for one in ids_given(file)}


def test_every_finding_has_its_case() -> None:
    assert _ids() == set(CASES)


@pytest.mark.parametrize("id", CASES)
def test_a_machine_that_has_it_is_found(id: str) -> None:
    assert id in {finding.id for finding in CASES[id].has.findings()}


@pytest.mark.parametrize("id", CASES)
def test_a_machine_that_nearly_has_it_is_not(id: str) -> None:
    assert id not in {finding.id for finding in CASES[id].nearly.findings()}


@pytest.mark.parametrize("id", CASES)
def test_its_page_says_cause_cost_fix_source_and_both_machines(id: str) -> None:
    text = (PAGES / f"{id}.md").read_text()
    assert text.startswith(f"# {id}\n")
    headings = tuple(re.findall(r"^## (.*)$", text, re.MULTILINE))
    assert headings == SECTIONS
    bodies = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    assert all(len(body.strip()) > 10 for body in bodies)
    assert CASES[id].has.words in text and CASES[id].nearly.words in text


def test_no_page_is_left_over() -> None:
    pages = {path.stem for path in PAGES.glob("*.md")} - {"README"}
    of_bench = {name for name in pages if name.startswith(("bench-", "collective-"))}
    of_others = {"plan-of-other-host", "setup-pages-short", "setup-not-isolated"}
    assert pages - of_bench - of_others == set(CASES)
    index = (PAGES / "README.md").read_text()
    assert all(f"]({name}.md)" in index for name in CASES)
