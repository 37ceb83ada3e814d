"""VMIs are refused by the check where KubeVirt's own admission refuses them."""

import ast
import json
import subprocess
from pathlib import Path
from random import Random

import pytest

from homenode.catalogue import entry_of
from homenode.cluster.kubevirt.admission_rules import _EXPECTED, admission_findings, read_cluster
from homenode.cluster.kubevirt.vmi import vmi_of
from tests.kubevirt.kubevirt_code import build
from tests.kubevirt.vmis import Case, random_case

FOLDER = Path(__file__).parent
SEED, COUNT = 18, 200
REFUSED = FOLDER / "refused.txt"
"""Of the cases of SEED, one character each: 1 where the admitter of KubeVirt 1.8.4 refused it."""


def cases(seed: int, count: int) -> list[Case]:
    random = Random(seed)
    return [random_case(random) for _ in range(count)]


def refusals(case: Case) -> list[str]:
    cr = {"kind": "KubeVirt", "spec": {"configuration": case["config"]}}
    found = admission_findings(vmi_of(case["vmi"], "vmi"), read_cluster(json.dumps(cr), "cr"))
    return [finding.id for finding in found]


def differences(asked: list[Case], refused: list[bool]) -> list[str]:
    return [
        f"{refusals(case)} {json.dumps(case)}"
        for case, is_refused in zip(asked, refused, strict=True)
        if bool(refusals(case)) != is_refused
    ]


def test_two_hundred_vmis_are_judged_as_kubevirts_admitter_did() -> None:
    recorded = [mark == "1" for mark in REFUSED.read_text().strip()]
    assert 50 < sum(recorded) < 150
    assert differences(cases(SEED, COUNT), recorded) == []


def test_every_rule_is_broken_by_some_of_them() -> None:
    broken = {one for case in cases(SEED, 1000) for one in refusals(case)}
    source = (FOLDER.parents[1] / "src/homenode/cluster/kubevirt/admission_rules.py").read_text()
    calls = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call)]
    rules = {
        word.value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("finding", "_refused")
        for word in [*call.args[:1], *(k.value for k in call.keywords if k.arg == "id")]
        if isinstance(word, ast.Constant)
    }
    # Not the admitter's: of its schema, which the oracle does not ask, and of what comes later.
    schema = {"key-unknown"}
    later = {"device-not-permitted", "machine-misspelt", "cpu-model-misspelt"}
    assert len(rules) > 15
    said = {one for one in rules if _EXPECTED.search(" ".join(entry_of(one).meaning.split()))}
    assert rules - schema - later - said == {"huge-pages-not-whole"}  # of other guests as well
    # Not that of the oracle's version.
    assert rules - broken - schema - later == {"claim-source"}


@pytest.mark.lab
def test_the_recorded_answers_are_those_of_kubevirts_admitter(tmp_path: Path) -> None:
    build(tmp_path, oracle=".")
    done = subprocess.run(
        [tmp_path / "oracle"],
        input="\n".join(map(json.dumps, cases(SEED, COUNT))),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    marks = "".join("01"[bool(json.loads(line))] for line in done.stdout.splitlines())
    assert marks == REFUSED.read_text().strip()
