"""App metric: the result of the user's own program, found by a regular expression. [I/O]

The search runs in a separate process, because a pattern such as (a+)+$ may never end on one line.
"""

import re
import sys

from homenode.errors import ParseError, UsageError
from homenode.measure.options import AppCommand
from homenode.process import ToolTimeoutError, run

SEARCH_S = 20.0
MAX_LINE = 4096
"""Characters of a line that are looked at."""

MAX_KEPT = 16 << 20
"""Characters of an output that are kept and searched, its end: a long run prints the result
there."""

_SOURCE = "--metric"
_COMMA_OF_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SEARCH = (
    "import re, sys\n"
    "pattern = re.compile(sys.argv[1])\n"
    "found = None\n"
    "for line in sys.stdin:\n"
    f"    match = pattern.search(line[:{MAX_LINE}].rstrip('\\n'))\n"
    "    if match and match[1] is not None:\n"
    "        found = match[1]\n"
    "print('' if found is None else found)\n"
)


def check_metric(pattern: str) -> None:
    """Raise UsageError unless the pattern is a regular expression with one group."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--metric: expected a regular expression, found: {error}") from None
    if groups != 1:
        raise UsageError(
            f"--metric {pattern}: expected one group around the number, found {groups}",
            hint=r"such as --metric 'images/s: ([0-9.]+)'",
        )


def read_metric(order: AppCommand, output: str) -> float:
    """Return the last match in an output. Raises ParseError for no match, no number, no end."""
    text = output[-MAX_KEPT:]
    try:
        # isolated: modules of the working directory are not imported
        argv = [sys.executable, "-I", "-c", _SEARCH, order.metric]
        ended = run(argv, SEARCH_S, text, environment={"PYTHONIOENCODING": "utf-8:surrogateescape"})
    except ToolTimeoutError:
        raise ParseError(
            _SOURCE,
            f"a match within {SEARCH_S:g} s",
            "none so far",
            hint="repeats within repeats, such as (a+)+, take exponential time",
        ) from None
    word = _COMMA_OF_THOUSANDS.sub("", ended.stdout_or_raise().strip())
    if not word:
        raise ParseError(_SOURCE, f"a line that matches {order.metric}", output[-200:].strip())
    try:
        value = float(word)
    except ValueError:
        raise ParseError(_SOURCE, "a number in its group", word) from None
    if not 0 < value < float("inf"):
        raise ParseError(_SOURCE, "a number above zero", word)
    return value
