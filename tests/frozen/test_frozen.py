"""Answers stay as they were frozen, but for those that differences.txt lists.

python -m tests.frozen.compare tries all of them, also in make nightly: five minutes of a processor.
"""

import random

import pytest

from tests.frozen.compare import accepted, differences, frozen
from tests.frozen.requests import KINDS

SAMPLED = {"shipped": 6, "auto": 6, "made": 3, "rewritten": 6}
"""Requests of each kind that a short run tries; all of a kind that is not here."""


DRAWN = {"planned": 5, "asked": 8, "decided": 10}
"""Parts of kinds whose requests take milliseconds, so that all are tried."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DRAWN])
def test_a_sample_of_answers_is_as_it_was_frozen(kind: str) -> None:
    requests = list(KINDS[kind]())
    sample = random.Random(len(frozen(kind))).sample(requests, SAMPLED.get(kind, len(requests)))
    answers = {request.key: request.answer() for request in sample}
    assert list(differences(kind, answers, is_sample=True)) == []


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind, parts in DRAWN.items() for part in range(parts)]
)
def test_every_value_of_a_drawn_answer_is_as_it_was_frozen(kind: str, part: int) -> None:
    requests = list(KINDS[kind]())[part :: DRAWN[kind]]
    answers = {request.key: request.answer() for request in requests}
    assert list(differences(kind, answers, is_sample=True)) == []


@pytest.mark.nightly
def test_each_accepted_difference_names_a_frozen_answer() -> None:
    assert all(key in frozen(kind) for kind, key in accepted())
