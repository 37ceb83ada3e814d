"""nvbandwidth: copies and latencies between host and GPUs, as matrices.

    nvbandwidth -j -t host_to_device_memcpy_ce device_to_host_memcpy_ce

Seen of v0.5 to v0.10, text and JSON; JSON is there since v0.5. Source: nvbandwidth.cpp, output.cpp
and json_output.cpp of v0.8; public logs of v0.6 and v0.10.

* The exit status is 0 even when tests fail: look at each test's status.
* Rows are CPUs (one row: the CPU that the process runs on) or GPUs; columns are GPUs.
* A cell of the diagonal is N/A, absent here. Because of it the tool's own minimum is 0: not used.
* Both ways at once between GPUs are three matrices (one direction, the other, both together). In
  JSON they are one matrix of three times the rows, whose description and sum are the total's.
* In text a waived test has no name.
* In JSON an error is a second entry of the same test, after one that says "Running".
* -h and -l ignore -j; a second document may follow the first; warnings of drivers surround them.
"""

from collections.abc import Iterable

from homenode.machine.tools.nvbandwidth_json import parse_json
from homenode.machine.tools.nvbandwidth_records import NvbandwidthRun
from homenode.machine.tools.nvbandwidth_text import parse_text


def argv(tests: Iterable[str] = (), *, samples: int | None = None) -> tuple[str, ...]:
    """The command: all tests, or those named; JSON."""
    names = tuple(tests)
    chosen = ("-t", *names) if names else ()
    repeats = () if samples is None else ("-i", str(samples))
    return ("nvbandwidth", "-j", *repeats, *chosen)


def parse(text: str) -> NvbandwidthRun:
    """The one run of an output, text or JSON: its content decides. Raises ParseError."""
    if any(line.strip() == "{" for line in text.split("\n")):
        return parse_json(text)
    return parse_text(text)
