"""KubeVirt's own webhooks take VMIs, or refuse them, as `homenode kubevirt check` says."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.conformance.builds import absent, folder
from tests.conformance.judge import Answer, Judge
from tests.kubevirt.kubevirt_code import PINNED, build
from tests.kubevirt.test_admission import refusals
from tests.kubevirt.vmis import random_case


@cache
def _program() -> Path | str:
    """The webhooks; words where they cannot be built."""
    try:
        build(folder(), oracle=".")
    except pytest.skip.Exception as reason:
        return str(reason)
    return folder() / "oracle"


def missing() -> str | None:
    lacking = absent("go")
    if lacking is not None:
        return lacking
    found = _program()
    return found if isinstance(found, str) else None


def ask(names: Sequence[str]) -> Iterator[Answer]:
    cases = [random_case(Random(f"kubevirt {name}")) for name in names]
    done = subprocess.run(
        [_program()],
        input="\n".join(map(json.dumps, cases)),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    for name, case, line in zip(names, cases, done.stdout.splitlines(), strict=True):
        ours = refusals(case)
        yield Answer(
            case=name,
            about=f"check says {', '.join(ours) or 'nothing'}, KubeVirt {line[:200]}",
            planned={"refused": bool(ours)},
            read={"refused": bool(json.loads(line))},
        )


KUBEVIRT = Judge(
    name="kubevirt",
    program="KubeVirt: mutating and validating webhooks",
    reads="VMIs, with DRA claims too, in clusters: refused or taken as kubevirt check says",
    setup="go, with the module kubevirt.io/kubevirt",
    version=lambda: PINNED.removeprefix("v"),
    missing=missing,
    ask=ask,
    marker="lab",
    short=1000,
)
