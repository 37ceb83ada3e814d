"""However deep it is called, a search takes no memory from the kernel at each of its calls."""

import resource
from collections.abc import Callable

from homenode.plan.search import place

CALLS = 2000


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def called() -> None:
    """Its frame is larger than that of at_depth: at some depth it alone is in another piece."""


called.__code__ = called.__code__.replace(co_stacksize=300)


def calls() -> None:
    for _ in range(CALLS):
        called()


def at_depth(depth: int, call: Callable[[], object]) -> object:
    return call() if depth == 0 else at_depth(depth - 1, call)


def test_frames_are_in_one_piece_of_memory_at_any_depth() -> None:
    most = 0
    for depth in range(200):
        before = page_faults()
        at_depth(depth, lambda: place.in_one_piece(calls))
        most = max(most, page_faults() - before)
    assert most < CALLS / 4
