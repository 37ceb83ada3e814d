"""homenode-probe: the measuring program of homenode; homenode.probe/1.

    homenode-probe bandwidth --pus 0-3 --seconds 2

Written by native/src; docs/reference/formats/probe.md has every field. Only fields that become
results are read, and they are read strictly: a measured guest may print anything.
"""

import math

import msgspec
from msgspec import Struct, field

from homenode.errors import ParseError
from homenode.machine.tools.lines import record

SOURCE = "homenode-probe"
FORMAT = "homenode.probe"
VERSION = 1
MAX_SAMPLES = 1_000_000
"""Limit of samples in a document: an hour of samples of 1 ms; suites request fewer."""

Latencies = tuple[float | None, ...]


class ProbeCaveat(Struct, frozen=True):
    """A limitation of the document's results."""

    id: str
    detail: str
    fix: str


class Contention(Struct, frozen=True):
    """Other work on the CPUs during the measurement."""

    busy_neighbour: bool | None = None  # None = unknown


class ProbeNode(Struct, frozen=True):
    node: int
    pus: str


class ProbeMachine(Struct, frozen=True):
    architecture: str
    nodes: tuple[ProbeNode, ...] = ()
    # instructions are translated (QEMU's TCG): results are meaningless
    emulated: bool | None = None


class Pages(Struct, frozen=True):
    """The pages of a buffer. huge_bytes of bytes are on huge pages; None = unknown."""

    bytes: int
    huge_bytes: int | None = None
    pages_of_node: dict[str, int] = field(default_factory=dict)


class BandwidthSample(Struct, frozen=True):
    """A pass of one kernel. cas_*: of neighbouring CPUs, around it; () if one thread ran."""

    at_ns: int
    bytes_per_s: float
    disturbed: bool = False
    cas_before_ns: Latencies = ()
    cas_after_ns: Latencies = ()


class BandwidthKernel(Struct, frozen=True):
    kernel: str
    stores: str
    reported_bytes_per_element: int
    moved_bytes_per_element: int
    raw: tuple[BandwidthSample, ...]


class BandwidthRun(Struct, frozen=True):
    """Kernels of the same threads on the same memory."""

    pus: str
    threads: int
    node: int | None  # that the memory was bound to
    pages: Pages
    kernels: tuple[BandwidthKernel, ...]


class LatencyPoint(Struct, frozen=True):
    bytes: int
    samples_ns: tuple[float, ...]


class LatencyCurve(Struct, frozen=True):
    pu: int
    node: int | None  # that the memory was bound to
    pages_wanted: str  # auto, base, ..
    order: str  # local or random
    pages: Pages
    points: tuple[LatencyPoint, ...]


class LatencyLevel(Struct, frozen=True):
    """A section of the curve."""

    level: str
    latency_ns: float
    capacity_bytes: int | None  # None of memory


class HandoffTimes(Struct, frozen=True):
    """Times of half a round trip of a line between two CPUs."""

    pus: tuple[int, int]
    samples_ns: tuple[float, ...]


class ThreadRate(Struct, frozen=True):
    pu: int
    samples_events_per_s: tuple[float, ...]
    fairness_ratio: float | None = None


class Rates(Struct, frozen=True):
    """Rates of threads that run at once. samples: of all together, () if only threads report."""

    threads: tuple[ThreadRate, ...]
    fairness_index: float | None = None


class SmtCore(Struct, frozen=True):
    """One sibling compared with all siblings of a core."""

    pus: str
    work: str
    gain_ratio: float  # 1 means that siblings add nothing


class LoadedPoint(Struct, frozen=True):
    delay_cycles: int | None  # pause of the injectors between two loads; None = they rest
    samples_ns: tuple[float, ...]
    samples_injected_bytes_per_s: tuple[float, ...]


class PairLatency(Struct, frozen=True):
    """A measurement of a pair of CPUs."""

    at_ns: int
    pair: int
    cas_before_ns: Latencies
    cas_after_ns: Latencies
    fill_ratio: float | None = None  # rate of both over that of one; None if not had
    disturbed: bool = False


class ObservedPair(Struct, frozen=True):
    pair: int
    pus: tuple[int, int]


class ProbeDocument(Struct, frozen=True, kw_only=True):
    """A run of the probe. Of the tuples below `contention`, those of its command are filled.
    placement's pairs are `looked_pairs`, core-to-core's are `handoffs`."""

    command: str
    version: str = field(name="probe_version")
    machine: ProbeMachine
    pus: str
    contention: Contention
    caveats: tuple[ProbeCaveat, ...]
    instruction_set: str | None = None
    runs: tuple[BandwidthRun, ...] = ()
    curves: tuple[LatencyCurve, ...] = ()
    levels: tuple[LatencyLevel, ...] = ()
    handoffs: tuple[HandoffTimes, ...] = ()
    one: Rates | None = None
    all: Rates | None = None
    cores: tuple[SmtCore, ...] = ()
    points: tuple[LoadedPoint, ...] = ()
    looked_pairs: tuple[ObservedPair, ...] = ()
    series: tuple[PairLatency, ...] = ()


_OF_EVERY_COMMAND = "command probe_version machine pus contention caveats instruction_set".split()
_FIELDS = {
    "bandwidth": (("runs", "runs"),),
    "latency": (("curves", "curves"),),
    "core-to-core": (("pairs", "handoffs"),),
    "throughput": (("one", "one"), ("all", "all")),
    "smt": (("cores", "cores"),),
    "loaded-latency": (("points", "points"),),
    "placement": (("pairs", "looked_pairs"), ("series", "series")),
}
"""Key of the document and field of the record for each command; all are required."""


def parse(text: str) -> ProbeDocument:
    """Parse the document of one run. Raises ParseError with the place in the document."""
    try:
        document = msgspec.json.decode(text.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ParseError(SOURCE, "JSON", f"{text[:40]} ({error})") from None
    if not isinstance(document, dict):
        raise ParseError(SOURCE, f'"format": "{FORMAT}/{VERSION}"', type(document).__name__)
    _check_format(document.get("format"))
    command = document.get("command")
    if not isinstance(command, str) or command not in _FIELDS:
        raise ParseError(SOURCE, f"one of {', '.join(_FIELDS)}", str(command))
    name_of_key = dict(_FIELDS[command])
    missing = next((key for key in name_of_key if key not in document), None)
    if missing is not None:
        raise ParseError(SOURCE, f"a field {missing}")
    fields = {key: document[key] for key in _OF_EVERY_COMMAND if key in document}
    fields |= {name: document[key] for key, name in name_of_key.items()}
    if command == "latency":
        fields["levels"] = document.get("levels", ())
    parsed = record(fields, ProbeDocument, SOURCE)
    empty = next((key for key, name in name_of_key.items() if getattr(parsed, name) is None), None)
    if empty is not None:
        raise ParseError(SOURCE, f"{empty} as homenode-probe writes it", "null")
    _check_values(document)
    return parsed


def _check_format(stored_format: object) -> None:
    name, _, version = (
        stored_format.partition("/") if isinstance(stored_format, str) else ("", "", "")
    )
    if name != FORMAT or not (version.isascii() and version.isdigit()):
        raise ParseError(SOURCE, f'"format": "{FORMAT}/{VERSION}"', repr(stored_format))
    if len(version) > 6 or int(version) > VERSION:
        raise ParseError(
            SOURCE,
            f"{FORMAT} up to version {VERSION}",
            version,
            hint="it is of a newer homenode-probe: update this homenode",
        )


_ABOVE_ZERO = tuple(
    """
    bytes_per_s samples_ns samples_events_per_s cas_before_ns cas_after_ns fill_ratio
    gain_ratio latency_ns fairness_ratio fairness_index moved_bytes_per_element
    reported_bytes_per_element
""".split()
)


def _check_values(document: object) -> None:
    """Reject results that are zero, negative or infinite, and documents that never end."""
    stack: list[tuple[object, str]] = [(document, "document")]
    seen = 0
    while stack:
        number, name = stack.pop()
        seen += 1
        if seen > 40 * MAX_SAMPLES:
            raise ParseError(SOURCE, f"at most {MAX_SAMPLES} samples", "more")
        if isinstance(number, dict):
            stack += [(child, str(key)) for key, child in number.items()]
        elif isinstance(number, list):
            stack += [(child, name) for child in number]
        elif name in _ABOVE_ZERO and isinstance(number, int | float) and not 0 < number < math.inf:
            raise ParseError(SOURCE, f"{name} above zero", str(number))
