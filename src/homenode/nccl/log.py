"""Log: what NCCL's own log says of the topology file. RCCL's has the same words.

Source: INFO and WARN messages in src/graph/{xml.cc,xml.h,topo.cc}.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from homenode.findings import Finding, Severity, in_order

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


@dataclass(frozen=True, slots=True)
class LogVerdict:
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
    return LogVerdict(tuple(loaded), (stated, *(f"loaded: {path}" for path in loaded)), findings)


def _use(said: list[str], loaded: Counter[str], source: str) -> Iterator[Finding]:
    for path in _distinct(said, _NOT_OPENED):
        yield Finding(
            "nccl-log-not-opened", Severity.CRITICAL, path.partition(" : ")[0],
            "a file that NCCL can open", path, "NCCL goes by the guest's own tree",
            "put it there, in the container too", source,
        )  # fmt: skip
    for path in _distinct(said, _WANTED):
        if loaded and path not in loaded:
            yield Finding(
                "nccl-log-other-file", Severity.WARNING, "NCCL_TOPO_FILE", path,
                f"loaded {', '.join(loaded)}", None, "look which ranks have the variable", source,
            )  # fmt: skip
    if loaded or any(_NOT_OPENED.match(line) for line in said):
        return
    if any(_OF_GRAPH.match(line) for line in said):
        yield Finding(
            "nccl-log-not-used", Severity.CRITICAL, "topology file", "one that NCCL loads",
            "NCCL looked at its topology and loaded none", "NCCL goes by the guest's own tree",
            "put it at /var/run/nvidia-topologyd/virtualTopology.xml, or set NCCL_TOPO_FILE",
            source,
        )  # fmt: skip
        return
    found = "no line about the topology" if said else "no line of NCCL's at all"
    yield Finding(
        "nccl-log-silent", Severity.INCONCLUSIVE, "topology file", "lines on NCCL's topology",
        found, None, f"run again with {DEBUG}", source,
    )  # fmt: skip


def _troubles(said: list[str], warned: list[str], source: str) -> Iterator[Finding]:
    # As INFO, NCCL says some of these of attributes that it can do without.
    for line in _distinct(warned, _BROKEN):
        yield Finding(
            "nccl-log-broken", Severity.CRITICAL, "topology file", "a file that NCCL reads", line,
            "ncclCommInitRank fails", "homenode nccl-topo --check FILE names the place", source,
        )  # fmt: skip
    for bus_id in _distinct(said, _NO_PATH):
        if not bus_id.lower().startswith(_VIRTUAL):  # no guest has a virtual switch
            yield Finding(
                "nccl-log-no-device", Severity.CRITICAL, bus_id, "a device of the guest",
                "none at that bus id", "NCCL leaves the branch out",
                "make the file again for the document that the VM runs with", source,
            )  # fmt: skip
    for word in _distinct(said, _NO_WORD):
        yield Finding(
            "nccl-log-no-word", Severity.WARNING, repr(word), "a speed or class that NCCL knows",
            "one that it does not", "NCCL counts the link as Gen3",
            "homenode nccl-topo --check FILE names the place", source,
        )  # fmt: skip
    for line in _distinct(said, _IGNORED):
        yield Finding(
            "nccl-log-ignored", Severity.WARNING, "topology file", "elements that NCCL reads",
            line, None, "homenode nccl-topo --check FILE names the place", source,
        )  # fmt: skip


def _distinct(said: list[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    """What a pattern finds, each once: every rank says it."""
    found = (match[1].strip()[:_MOST_SHOWN] for line in said if (match := pattern.match(line)))
    return tuple(dict.fromkeys(found))
