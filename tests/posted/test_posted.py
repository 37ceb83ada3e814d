"""Public reports, their facts restated: `why` names what the maintainers answered, first.

A folder is a case: case.toml says where it was posted and which finding is the answer; every other
file in it is given to `why`. No link: a report that was told without one, or a sound machine.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from homenode.catalogue import catalogue
from homenode.why.answer import PasteAnswer, answer

HERE = Path(__file__).parent
CASES = sorted(path.parent.name for path in HERE.glob("*/case.toml"))
_KEYS = {"link", "asked", "answered", "expect", "healthy", "host"}


def read_case(name: str) -> dict[str, Any]:
    case = tomllib.loads((HERE / name / "case.toml").read_text(encoding="utf-8"))
    assert set(case) <= _KEYS, name
    return case


def answer_to(name: str) -> PasteAnswer:
    """What `why` says of the files of a case."""
    from homenode.vm.sources import load_host

    files = sorted(path for path in (HERE / name).iterdir() if path.name != "case.toml")
    hosts = [load_host(str(path)) for path in files if path.suffix == ".toml"]
    if "host" in read_case(name):
        hosts.append(load_host(read_case(name)["host"]))
    texts = [
        (path.name, path.read_text(encoding="utf-8")) for path in files if path.suffix != ".toml"
    ]
    return answer(texts, hosts)


@pytest.mark.parametrize("name", CASES)
def test_a_posted_report_gets_the_answer_that_its_maintainers_gave(name: str) -> None:
    case = read_case(name)
    said = answer_to(name)
    found = [cause.finding.id for cause in said.causes]
    if case.get("healthy"):
        assert not any(cause.finding.is_bad for cause in said.causes), found
        return
    expected = case["expect"]
    assert set(expected) <= catalogue().keys()
    shown = found or [cause.finding.id for cause in said.worth_knowing]
    assert shown[:1] and shown[0] in expected, shown


@pytest.mark.parametrize("name", CASES)
def test_a_case_says_where_it_was_posted_and_what_was_answered(name: str) -> None:
    case = read_case(name)
    assert case["link"] == "" or case["link"].startswith("https://")
    assert case["asked"]
    assert case["answered"]
    assert case.get("healthy") or case["expect"]
