"""Log: what NCCL's own log says of the topology file. RCCL's has the same words.

Source: INFO and WARN messages in src/graph/{xml.cc,xml.h,topo.cc}.
"""

import re
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from homenode.catalogue import finding
from homenode.findings import Finding, in_order

DEBUG = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH"
"""What to run a job with, so that its log says all that is looked for here."""

_NCCL = re.compile(r"NCCL (INFO|WARN|TRACE) (.*)")
_LOADED = re.compile(r"Loading topology file (.*)")
_WANTED = re.compile(r"NCCL_TOPO_FILE set by environment to (.*)")
_NOT_OPENED = re.compile(r"Could not open XML topology file (.*)")
_NO_PATH = re.compile(
    r"Could not find real path of \S*/([0-9a-fA-F]{4,8}(?::[0-9a-fA-F]{2}){2}\.\S)"
)
_NO_WORD = re.compile(r"KV Convert to int : could not find value of '([^']*)' in dictionary")
_BROKEN = re.compile(
    r"(XML Parse.*|XML Mismatch.*|XML Topology has wrong version.*"
    r"|Error : (?:XML parser|value|name|too many XML).*|Attribute \S+ of node \S+ not found.*)"
)
_IGNORED = re.compile(r"(Ignoring element .*|XML Parse : Ignoring extra attributes.*)")
_OF_GRAPH = re.compile(
    r"(=== System : maxBw|Pattern \d|Topology detection|Loading (?:un)?named topology|Trimming)"
)
_VIRTUAL = "ffff:ff:"
_MOST_SHOWN = 160


class LogVerdict(Struct, frozen=True, kw_only=True):
    """loaded: the files that NCCL read, each once. checked: what was looked at, for people."""

    loaded: tuple[str, ...]
    checked: tuple[str, ...]
    findings: tuple[Finding, ...]


def read_log(text: str, source: str) -> LogVerdict:
    """What a log says. A log that says nothing either way is `inconclusive`."""
    lines = [match for line in text.splitlines() if (match := _NCCL.search(line))]
    said = [line[2].strip() for line in lines]
    warned = [line[2].strip() for line in lines if line[1] == "WARN"]
    loaded = Counter(match[1].strip() for line in said if (match := _LOADED.match(line)))
    findings = in_order([*_use(said, loaded, source), *_troubles(said, warned, source)])
    times = sum(loaded.values())
    stated = f"{source}: {len(said)} lines of NCCL's, topology files loaded {times} times"
    return LogVerdict(
        loaded=tuple(loaded),
        checked=(stated, *(f"loaded: {path}" for path in loaded)),
        findings=findings,
    )


def _use(said: list[str], loaded: Counter[str], source: str) -> Iterator[Finding]:
    for path in _distinct(said, _NOT_OPENED):
        yield finding(
            "nccl-log-not-opened",
            path.partition(" : ")[0],
            expected="a file that NCCL can open",
            observed=path,
            source=source,
        )
    for path in _distinct(said, _WANTED):
        if loaded and path not in loaded:
            yield finding(
                "nccl-log-other-file",
                "NCCL_TOPO_FILE",
                expected=path,
                observed=f"loaded {', '.join(loaded)}",
                source=source,
            )
    if loaded or any(_NOT_OPENED.match(line) for line in said):
        return
    if any(_OF_GRAPH.match(line) for line in said):
        yield finding(
            "nccl-log-not-used",
            "topology file",
            expected="one that NCCL loads",
            observed="NCCL looked at its topology and loaded none",
            source=source,
        )
        return
    found = "no line about the topology" if said else "no line of NCCL's at all"
    yield finding(
        "nccl-log-silent",
        "topology file",
        expected="lines on NCCL's topology",
        observed=found,
        source=source,
    )


def _troubles(said: list[str], warned: list[str], source: str) -> Iterator[Finding]:
    # As INFO, NCCL says some of these of attributes that it can do without.
    for line in _distinct(warned, _BROKEN):
        yield finding(
            "nccl-log-broken",
            "topology file",
            expected="a file that NCCL reads",
            observed=line,
            source=source,
        )
    for bus_id in _distinct(said, _NO_PATH):
        if not bus_id.lower().startswith(_VIRTUAL):  # no guest has a virtual switch
            yield finding(
                "nccl-log-no-device",
                bus_id,
                expected="a device of the guest",
                observed="none at that bus id",
                source=source,
            )
    for word in _distinct(said, _NO_WORD):
        yield finding(
            "nccl-log-no-word",
            repr(word),
            expected="a speed or class that NCCL knows",
            observed="one that it does not",
            source=source,
        )
    for line in _distinct(said, _IGNORED):
        yield finding(
            "nccl-log-ignored",
            "topology file",
            expected="elements that NCCL reads",
            observed=line,
            source=source,
        )


def _distinct(said: list[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    """What a pattern finds, each once: every rank says it."""
    found = (match[1].strip()[:_MOST_SHOWN] for line in said if (match := pattern.match(line)))
    return tuple(dict.fromkeys(found))
