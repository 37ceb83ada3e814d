"""Every finding has a machine that has it and one that nearly has it."""

import ast
from pathlib import Path

import pytest

from homenode.findings import catalogue
from tests.doctor_cases import HOST_CASES
from tests.doctor_guest_cases import GUEST_CASES
from tests.doctor_health_cases import HEALTH_CASES
from tests.doctor_quiet_cases import QUIET_CASES
from tests.source_trees import nodes

ROOT = Path(__file__).resolve().parents[2]
CASES = {**HOST_CASES, **HEALTH_CASES, **GUEST_CASES, **QUIET_CASES}
DOMAINS_FILES = ("pins", "cores", "memory", "devices")
"""Of check/domain/, whose findings the doctor shows."""


def _ids() -> set[str]:
    source = ROOT / "src" / "homenode"
    files = [*(source / "check/doctor").rglob("*.py"), *(source / "change/retrain").rglob("*.py")]
    files += [source / "check/domain" / f"{name}.py" for name in DOMAINS_FILES]
    texts = (node.value for file in files for node in nodes(file) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str)} & catalogue().keys()


def test_every_finding_has_its_case() -> None:
    assert _ids() == set(CASES)


@pytest.mark.parametrize("id", CASES)
def test_a_machine_that_has_it_is_found(id: str) -> None:
    assert id in {finding.id for finding in CASES[id].found()}, CASES[id].has


@pytest.mark.parametrize("id", CASES)
def test_a_machine_that_nearly_has_it_is_not(id: str) -> None:
    assert id not in {finding.id for finding in CASES[id].silent()}, CASES[id].has
