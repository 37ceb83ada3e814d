"""KubeVirt's own webhooks refuse what `homenode kubevirt check` says that they refuse."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest

from homenode.cluster.kubevirt.check import check
from homenode.cluster.kubevirt.object import read_cluster
from homenode.cluster.kubevirt.vmi import build_vmi
from homenode.errors import ParseError
from tests.conformance.builds import absent, directory
from tests.conformance.judge import Answer, Judge
from tests.kubevirt.kubevirt_code import PINNED, build
from tests.kubevirt.vmis import Case, random_case
from tests.processes import run_text


@cache
def _program() -> Path | str:
    """The webhooks; words where they cannot be built."""
    try:
        build(directory(), oracle=".")
    except pytest.skip.Exception as reason:
        return str(reason)
    return directory() / "oracle"


def missing() -> str | None:
    lacking = absent("go")
    if lacking is not None:
        return lacking
    found = _program()
    return found if isinstance(found, str) else None


REFUSED = {
    "emulator-without-dedicated-cpus",
    "mapping-without-dedicated-cpus",
    "mapping-without-huge-pages",
    "huge-pages-not-whole",
    "gate-off",
}
"""Findings of what KubeVirt's admission refuses."""


def refusals(case: Case) -> list[str]:
    cr = {"kind": "KubeVirt", "spec": {"configuration": case["config"]}}
    cluster = read_cluster(json.dumps(cr).encode(), "cr")
    try:
        findings = check(build_vmi(case["vmi"], "vmi"), None, cluster).findings
    except ParseError as error:  # a quantity that is none
        return [error.message]
    return [
        finding.id
        for finding in findings
        if finding.id in REFUSED and finding.subject != "feature gate CPUManager"
    ]


def ask(names: Sequence[str]) -> Iterator[Answer]:
    cases = [random_case(Random(f"kubevirt {name}")) for name in names]
    done = run_text([_program()], input="\n".join(map(json.dumps, cases)), check=True, timeout=600)
    for name, case, line in zip(names, cases, done.stdout.splitlines(), strict=True):
        ours = refusals(case)
        yield Answer(
            case=name,
            about=f"check says {', '.join(ours) or 'nothing'}, KubeVirt {line[:200]}",
            planned={"refused": True} if ours else {},
            read={"refused": bool(json.loads(line))} if ours else {},
        )


KUBEVIRT = Judge(
    name="kubevirt",
    program="KubeVirt: mutating and validating webhooks",
    reads="VMIs, with DRA claims too, in clusters: those that kubevirt check reports as rejected",
    setup="go, with the module kubevirt.io/kubevirt",
    version=lambda: PINNED.removeprefix("v"),
    missing=missing,
    ask=ask,
    marker="lab",
    short=1000,
)
