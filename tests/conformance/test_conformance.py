"""Each program that is here reads a few cases as planned; many of a new seed: make nightly."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.judge import Answer, Judge
from tests.conformance.table import JUDGES

SEED = 20261123


def _marked(judge: Judge) -> object:
    marks = [getattr(pytest.mark, judge.marker)] if judge.marker else []
    return pytest.param(judge, marks=marks, id=judge.name)


@pytest.mark.parametrize("judge", list(map(_marked, JUDGES)))
def test_the_program_reads_what_was_planned(judge: Judge) -> None:
    reason = judge.missing()
    if reason is not None:
        pytest.skip(reason)
    answers = list(judge.answers(SEED, judge.short))
    assert len(answers) == judge.short
    differences = [f"{a.case}: {a.about}: {a.difference()}" for a in answers if a.difference()]
    assert not differences, "\n".join(differences)
    assert judge.version()


def test_a_fact_that_was_read_otherwise_or_not_at_all_is_a_difference() -> None:
    same = Answer(case="1-0", about="x", planned={"vCPUs": 4}, read={"vCPUs": 4, "more": 1})
    assert same.difference() is None
    assert replace(same, read={"vCPUs": 5}).difference() == "vCPUs: planned 4, read 5"
    assert replace(same, read={}).difference() == "vCPUs: planned 4, read nothing"
    assert replace(same, refusal="no  such\nkey").difference() == "refused: no such key"


def test_too_few_planned_cases_are_an_error() -> None:
    judge = replace(JUDGES[0], ask=lambda _: iter(()))
    with pytest.raises(AssertionError, match="0 of 3 cases planned"):
        list(judge.answers(1, 3))


def test_names_of_judges_are_their_own() -> None:
    names = [judge.name for judge in JUDGES]
    assert len(set(names)) == len(names)
    assert all("|" not in f"{j.program}{j.reads}{j.setup}" for j in JUDGES)
    assert all((Path(__file__).parent / "programs" / name).exists() for name in ("taskset",))
