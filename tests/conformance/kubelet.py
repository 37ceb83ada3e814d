"""The kubelet's own managers admit pods, or refuse them, as `homenode pod fit` says."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.conformance.builds import absent, folder
from tests.conformance.judge import Answer, Judge
from tests.kubelet import oracle
from tests.kubelet.cases import grace_case, our_answers, random_case

_GRACE = 0.04


@cache
def _program() -> Path | str:
    """The oracle; words where it cannot be built."""
    try:
        return oracle.build(folder())
    except pytest.skip.Exception as reason:
        return str(reason)


def missing() -> str | None:
    lacking = absent("go")
    if lacking is not None:
        return lacking
    found = _program()
    return found if isinstance(found, str) else None


def version() -> str:
    module = (oracle.FOLDER / "go.mod").read_text()
    return re.findall(r"k8s\.io/kubernetes v(\S+)", module)[0]  # type: ignore[no-any-return]


def ask(names: Sequence[str]) -> Iterator[Answer]:
    cases = []
    for name in names:
        draw = Random(f"kubelet {name}")
        cases.append(grace_case(draw) if draw.random() < _GRACE else random_case(draw))
    program = _program()
    assert isinstance(program, Path), program
    for name, case, given in zip(names, cases, oracle.ask(program, cases), strict=True):
        pods = [pod["metadata"]["name"] for pod in case["Pods"]]
        yield Answer(
            case=name,
            about=f"{len(case['Nodes'])} nodes, {case['Kubelet']['TopologyPolicy']}",
            planned=dict(zip(pods, our_answers(case), strict=True)),
            read=dict(zip(pods, given, strict=True)),
        )


KUBELET = Judge(
    name="kubelet",
    program="kubelet: topology, CPU, memory and device managers",
    reads="machines, settings and pods: verdict and reason, CPUs and nodes of each container as "
    "pod fit says them",
    setup="go, with the module k8s.io/kubernetes",
    version=version,
    missing=missing,
    ask=ask,
    marker="lab",
    short=1000,
)
