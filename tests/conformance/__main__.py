"""Each program that is here reads so many cases: supported-versions.md, make nightly."""

import argparse
import datetime
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.conformance.judge import Answer, Judge
from tests.conformance.page import NOT_RUN, PAGE, Row, merged, not_run, page_of, read_rows, row_of
from tests.conformance.table import JUDGES

_SHOWN = 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance")
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


def row_and_differences(
    judge: Judge, seed: int, count: int, date: str
) -> tuple[Row, list[Answer], bool]:
    """The row of the page, the answers that differ, and whether the judge failed: it could not be
    built in its time, or ended or hung while it was asked, which ends no run."""
    try:
        reason = judge.missing()
        if reason is not None:
            return not_run(judge, reason), [], False
        different, done = _run(judge, seed, count)
        return row_of(judge, judge.version(), done, different, date), different, False
    except subprocess.TimeoutExpired as error:
        reason = f"{Path(error.cmd[0]).name} {error.cmd[1]} did not end in {error.timeout:.0f} s"
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        reason = f"{type(error).__name__}: {error}"
    return not_run(judge, reason), [], True


def main() -> int:
    given = _arguments()
    judges = [judge for judge in JUDGES if given.judge is None or judge.name in given.judge]
    if given.case is not None:
        return _again(judges[0], given.case)
    print(f"seed {given.seed}, {given.count} cases each", file=sys.stderr)
    date = datetime.date.today().isoformat()
    rows: list[Row] = []
    lines: list[str] = []
    failed = False
    for judge in judges:
        row, different, ended = row_and_differences(judge, given.seed, given.count, date)
        failed |= ended
        rows.append(row)
        if row.version == NOT_RUN:
            print(f"{judge.name}: {row.differences}", file=sys.stderr)
        for answer in different[:_SHOWN]:
            lines.append(f"{judge.name} {answer.case}: {answer.about}: {answer.difference()}")
            again = f"--judge {judge.name} --case {answer.case}"
            lines.append(f"  again: python -m tests.conformance {again}")
    before = read_rows(PAGE.read_text()) if PAGE.exists() else []
    PAGE.write_text(page_of(merged(before, rows, JUDGES)))
    width = max((len(f"{row.program} {row.version}") for row in rows), default=0)
    for row in rows:
        name = f"{row.program} {row.version}"
        count = row.differences.partition(":")[0]
        if row.version == NOT_RUN:
            print(f"{name:{width}}  {row.differences}")
        else:
            print(f"{name:{width}}  {row.cases:>5} cases  {count:>3} differences")
    print("\n".join(lines))
    return int(bool(lines) or failed)


if __name__ == "__main__":
    sys.exit(main())
