"""Seeds of random cases: a run tries some of them, `make nightly` all."""

import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

THOROUGH = "HOMENODE_FUZZ" in os.environ


def seeds(count: int, every: int = 12) -> range:
    """Every twelfth of the seeds from 0 to count; with HOMENODE_FUZZ all."""
    return range(0, count, 1 if THOROUGH else every)


def draws(count: int) -> int:
    """One in five of the simulated experiments; with HOMENODE_FUZZ all."""
    return count if THOROUGH else count // 5


def part(cases: Sequence[Case], first: int, every: int = 3) -> Sequence[Case]:
    """Every third of the cases that take long, from `first` on, which differs from test to test, so
    that each case is in some of them; with HOMENODE_FUZZ all."""
    return cases if THOROUGH else cases[first % every :: every]
