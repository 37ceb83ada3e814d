"""What a target's file is read as is what was planned, for random plans of every target."""

import pytest

from homenode.check.verify.target_file import verify_target
from homenode.findings import Severity
from homenode.vm.targets.registry import TARGETS, target_named
from tests.conformance.vms import planned_cases
from tests.targets.examples import FILES

CASES = 12


@pytest.mark.parametrize("target", TARGETS)
def test_a_written_file_is_read_as_it_was_planned(target: str) -> None:
    suffix = target_named(target).hook_suffix
    files = (FILES[target],) if target in FILES else ()
    compared = 0
    for case in planned_cases([f"read-{n}" for n in range(CASES)], target, files):
        rendering = case.target_plan.rendering
        hook = dict(rendering.companions).get(suffix or "")
        found = verify_target(
            rendering.document, "vm", target, case.plan, host=case.host, hook=hook
        ).findings
        bad = [one for one in found if one.severity is not Severity.INFO]
        assert bad == [], (case.case, case.about, found)
        compared += 1
    assert compared >= CASES // 4
