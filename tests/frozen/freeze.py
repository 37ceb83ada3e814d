"""Write the answers that later commits are compared with: python -m tests.frozen.freeze [KIND...]

One line a request: key, digest of the whole answer, and the answer, shortened. Run it
only where the answers are right by definition; a later difference belongs in differences.txt.
"""

import os
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from tests.frozen.projection import digest
from tests.frozen.requests import KINDS, Request

ANSWERS = Path(__file__).parent / "answers"
WIDTH = {"auto": 40, "asked": 60, "rewritten": 300}
NORMAL_WIDTH = 160

_requests: list[Request] = []


def line_of(kind: str, key: str, answer: str) -> str:
    width = WIDTH.get(kind, NORMAL_WIDTH)
    short = answer if len(answer) <= width else f"{answer[:width]} ..."
    return f"{key}\t{digest(answer)}\t{short}"


def _answer(index: int) -> str:
    return _requests[index].answer()


def answers_of(requests: Sequence[Request]) -> dict[str, str]:
    """The whole answers by key, from as many processes as there are processors."""
    _requests[:] = requests
    with get_context("fork").Pool(os.cpu_count()) as pool:
        answers = pool.map(_answer, range(len(requests)), chunksize=20)
    by_key = dict(zip((request.key for request in requests), answers, strict=True))
    assert len(by_key) == len(requests), "two requests have one key"
    return by_key


def main(kinds: Sequence[str]) -> None:
    ANSWERS.mkdir(exist_ok=True)
    for kind in kinds or KINDS:
        before = time.monotonic()
        answers = answers_of(tuple(KINDS[kind]()))
        lines = [line_of(kind, key, answer) for key, answer in answers.items()]
        text = "".join(f"{line}\n" for line in lines)
        (ANSWERS / f"{kind}.txt").write_text(text, encoding="utf-8")
        seconds = time.monotonic() - before
        print(f"{kind}: {len(lines)} answers, {len(text) >> 10} KiB, {seconds:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
