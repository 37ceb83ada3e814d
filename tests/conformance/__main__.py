"""`make conformance`: each program that is here reads so many cases; docs/supported-versions.md."""

import argparse
import datetime
import random
import sys
import time

from tests.conformance.judge import Answer, Judge
from tests.conformance.page import PAGE, Row, merged, page_of, read_rows, row_of
from tests.conformance.table import JUDGES

_SHOWN = 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make conformance")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=30, help="cases for each program")
    parser.add_argument("--judge", action="append", choices=[judge.name for judge in JUDGES])
    parser.add_argument("--case", help="SEED-NUMBER: one case again, in full; needs --judge")
    return parser.parse_args()


def _again(judge: Judge, case: str) -> int:
    answers = list(judge.ask([case]))
    for answer in answers:
        print(f"{judge.name} {case}: {answer.about}")
        for name in answer.planned:
            print(f"  {name}: planned {answer.planned[name]}")
            print(f"  {' ' * len(name)}     read {answer.read.get(name, 'nothing')}")
        print(answer.difference() or "no difference")
    if not answers:
        print(f"{judge.name} {case}: homenode plans nothing for it")
    return int(any(answer.difference() for answer in answers))


def _run(judge: Judge, seed: int, count: int) -> tuple[list[Answer], int]:
    """The answers that differ, and how many there were."""
    different: list[Answer] = []
    done, start = 0, time.monotonic()
    for answer in judge.answers(seed, count):
        done += 1
        if answer.difference() is not None:
            different.append(answer)
        if sys.stderr.isatty():
            print(f"\r{judge.name}: {done}/{count} ", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    end = "\r" if sys.stderr.isatty() else ""
    print(
        f"{end}{judge.name}: {done} cases, {len(different)} differences, {seconds:.0f} s",
        file=sys.stderr,
    )
    return different, done


def main() -> int:
    given = _arguments()
    judges = [judge for judge in JUDGES if given.judge is None or judge.name in given.judge]
    if given.case is not None:
        return _again(judges[0], given.case)
    print(f"seed {given.seed}, {given.count} cases each", file=sys.stderr)
    date = datetime.date.today().isoformat()
    rows: list[Row] = []
    lines: list[str] = []
    for judge in judges:
        reason = judge.missing()
        if reason is not None:
            print(f"{judge.name}: not run: {reason}", file=sys.stderr)
            continue
        different, done = _run(judge, given.seed, given.count)
        rows.append(row_of(judge, judge.version(), done, different, date))
        for answer in different[:_SHOWN]:
            lines.append(f"{judge.name} {answer.case}: {answer.about}: {answer.difference()}")
            lines.append(f"  again: make conformance JUDGE={judge.name} CASE={answer.case}")
    before = read_rows(PAGE.read_text()) if PAGE.exists() else []
    PAGE.write_text(page_of(merged(before, rows, JUDGES)))
    width = max((len(f"{row.program} {row.version}") for row in rows), default=0)
    for row in rows:
        name = f"{row.program} {row.version}"
        count = row.differences.partition(":")[0]
        print(f"{name:{width}}  {row.cases:>5} cases  {count:>3} differences")
    print("\n".join(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
