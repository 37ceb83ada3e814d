"""Compare this checkout's answers with the frozen ones: python -m tests.frozen.compare [KIND...]

Kinds: shipped (2,142 plans on the shipped hosts), auto (3,672), made (300 made hosts of 9 to 64
nodes), rewritten (200 definitions), published (148 samples), planned (240 drawn hosts), asked (300
drawn options) and decided (120 drawn results). Each difference is printed with both answers; the
exit code is 1 if there is one that differences.txt does not accept.

A difference that a change means to make is a line of differences.txt, four fields with tabs between
them: kind, key, digest of the new answer, cause. The cause names what changed and why it is right.
--accept CAUSE appends such lines for all differences that are printed; lines that no difference
needs any more are errors.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.frozen.freeze import ANSWERS, answers_of
from tests.frozen.projection import digest
from tests.frozen.requests import KINDS

ACCEPTED = Path(__file__).parent / "differences.txt"


class Difference(NamedTuple):
    kind: str
    key: str
    frozen: str | None
    answer: str | None


def frozen(kind: str) -> dict[str, tuple[str, str]]:
    """Digest and shortened answer by key."""
    lines = (ANSWERS / f"{kind}.txt").read_text(encoding="utf-8").splitlines()
    fields = (line.split("\t", 2) for line in lines)
    return {key: (stored, text) for key, stored, text in fields}


def accepted() -> dict[tuple[str, str], str]:
    """The digest that is right by now, by kind and key."""
    lines = ACCEPTED.read_text(encoding="utf-8").splitlines()
    fields = (line.split("\t") for line in lines if line and not line.startswith("#"))
    return {(kind, key): stored for kind, key, stored, _ in fields}


def differences(
    kind: str, answers: Mapping[str, str], *, is_sample: bool = False
) -> Iterator[Difference]:
    """Answers that are neither the frozen nor an accepted one. is_sample: others may be missing."""
    stored, right = frozen(kind), accepted()
    for key, answer in answers.items():
        before = stored.get(key)
        expected = right.get((kind, key), before[0] if before else None)
        if digest(answer) != expected:
            yield Difference(kind, key, before[1] if before else None, answer)
    if is_sample:
        return
    for key in stored.keys() - answers.keys():
        if right.get((kind, key)) != "-":
            yield Difference(kind, key, stored[key][1], None)


def needless(kind: str, answers: Mapping[str, str]) -> Iterator[str]:
    """Keys that are accepted as different and are as they were."""
    stored = frozen(kind)
    for (accepted_kind, key), _ in accepted().items():
        is_answered = accepted_kind == kind and key in answers and key in stored
        if is_answered and digest(answers[key]) == stored[key][0]:
            yield key


def main(words: Sequence[str]) -> int:
    cause = ""
    if "--accept" in words:
        at = words.index("--accept")
        cause = words[at + 1]
        words = (*words[:at], *words[at + 2 :])
    found = 0
    for kind in words or KINDS:
        before = time.monotonic()
        answers = answers_of(tuple(KINDS[kind]()))
        differing = list(differences(kind, answers))
        for each in differing:
            print(f"{kind}\t{each.key}\n  frozen: {each.frozen}\n  now:    {each.answer}")
        for key in needless(kind, answers):
            print(f"{kind}\t{key}: differences.txt accepts a change that is not there")
            found += 1
        seconds = time.monotonic() - before
        print(f"{kind}: {len(differing)} of {len(answers)} differ, {seconds:.0f} s")
        found += len(differing)
        if cause:
            _accept(differing, cause)
    return 1 if found else 0


def _accept(differing: Sequence[Difference], cause: str) -> None:
    again = {(each.kind, each.key) for each in differing}
    lines = ACCEPTED.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if tuple(line.split("\t")[:2]) not in again]
    added = [
        f"{each.kind}\t{each.key}\t{'-' if each.answer is None else digest(each.answer)}\t{cause}"
        for each in differing
    ]
    ACCEPTED.write_text("\n".join([*kept, *added]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
