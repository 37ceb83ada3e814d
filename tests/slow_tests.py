"""Slow tests, of half a second of processor time or more: tests/slow.txt, which `make quick` omits.

HOMENODE_TEST_TIMES=TIMES pytest, then python -m tests.slow_tests TIMES: writes the list from the
seconds that were kept. What was not run stays as it is.
"""

import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parent / "slow.txt"
MIN_S = 0.5


def slow(times: str, before: frozenset[str]) -> list[str]:
    """Names of tests, all parameters of one together. times: SECONDS NAME a line."""
    took: defaultdict[str, float] = defaultdict(float)
    for line in times.splitlines():
        seconds, _, name = line.partition(" ")
        took[name.partition("[")[0].partition("@")[0]] += float(seconds)
    kept = {name for name in before if name not in took}
    return sorted(kept | {name for name, seconds in took.items() if seconds >= MIN_S})


if __name__ == "__main__":
    known = frozenset(LIST.read_text().split())
    names = slow(Path(sys.argv[1]).read_text(), known)
    LIST.write_text("".join(f"{name}\n" for name in names))
