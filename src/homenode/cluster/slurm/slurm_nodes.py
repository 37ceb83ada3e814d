"""Nodes: hostlists such as gpu[01-36,40],login1, and the shape of each node in Slurm.

    sinfo --noheader --Node --format="%N|%P|%T|%c|%m|%G"
    sinfo --all --noheader --Node --format="%X|%Y|%Z|%c|%G|%N"

Plain columns, whose layout is the same in all versions, not --json; none is a comment, a reason or
a feature. Seen: 22.05.8. Source: slurm.conf(5), NodeName; scontrol(1), show hostnames; sinfo(1).
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from msgspec import Struct

from homenode.errors import ParseError
from homenode.machine.tools.lines import json_object
from homenode.units import parse_whole

MAX_NAMES = 65_536
"""Limit of names, so that a hostile n[0-999999999] costs nothing."""

MAX_ALL_NAMES = 250_000
"""Limit for all expressions of a text, because each can name the same thousands again."""

MAX_NAME_CHARS = 256

_PLAIN = re.compile(r"[^\[\],\s]+")
_NUMBER_AT_END = re.compile(r"(.*?)([0-9]{1,9})\Z", re.DOTALL)


def expand_hostlist(
    text: str, source: str = "host list", *, line: int | None = None, limit: int = MAX_NAMES
) -> tuple[str, ...]:
    """Return the names of an expression, in its order.

    >>> expand_hostlist("gpu[01-03,07],login")
    ('gpu01', 'gpu02', 'gpu03', 'gpu07', 'login')
    >>> expand_hostlist("/dev/nvidia[0-1]")
    ('/dev/nvidia0', '/dev/nvidia1')

    Raises ParseError for brackets that do not close, ranges that fall, and too many names.
    """
    names: list[str] = []
    for part in _split_parts(text, source, line):
        names += _expand(part, source, line, limit - len(names))
    return tuple(names)


class Hostlists:
    """The expressions of one text, which have a limit together."""

    def __init__(self) -> None:
        self._left = MAX_ALL_NAMES

    def expand(self, text: str, source: str, *, line: int | None = None) -> tuple[str, ...]:
        """Return names as `expand_hostlist` does."""
        names = expand_hostlist(text, source, line=line, limit=min(MAX_NAMES, self._left))
        self._left -= len(names)
        return names


def compress_hostlist(names: Iterable[str]) -> str:
    """Return the expression of names; runs of numbers of one width become ranges.

    >>> compress_hostlist(("gpu01", "gpu02", "gpu04", "login"))
    'gpu[01-02,04],login'
    """
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in dict.fromkeys(names):
        match = _NUMBER_AT_END.match(name)
        if match is None:
            plain.append(name)
        else:
            groups.setdefault((match[1], len(match[2])), []).append(int(match[2]))
    texts = [
        f"{prefix}{_format_bracket(sorted(numbers), width)}"
        for (prefix, width), numbers in groups.items()
    ]
    return ",".join([*texts, *plain])


def _format_bracket(numbers: list[int], width: int) -> str:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in runs]
    return texts[0] if len(numbers) == 1 else f"[{','.join(texts)}]"


def _split_parts(text: str, source: str, line: int | None) -> Iterator[str]:
    """Return the expressions between commas outside brackets."""
    start = 0
    is_inside = False
    for at, letter in enumerate(text):
        if letter == "[" and not is_inside:
            is_inside = True
        elif letter == "]" and is_inside:
            is_inside = False
        elif letter in "[]":
            raise ParseError(source, "brackets that pair", text, line=line)
        elif letter == "," and not is_inside:
            yield text[start:at]
            start = at + 1
    if is_inside:
        raise ParseError(source, "a closing bracket", text, line=line)
    yield text[start:]


def _expand(part: str, source: str, line: int | None, space: int) -> list[str]:
    """Return all names of one expression; it may have several brackets."""
    names = [""]
    at = 0
    while at < len(part):
        if part[at] == "[":
            end = part.index("]", at)
            numbers = list(_expand_range(part[at + 1 : end], source, line, space))
            if len(names) * len(numbers) > space:
                raise ParseError(source, f"at most {space} more names", part, line=line)
            names = [name + number for name in names for number in numbers]
            at = end + 1
            continue
        plain = _PLAIN.match(part, at)
        if plain is None:
            raise ParseError(source, "a name without blanks", part, line=line)
        if len(names[0]) + len(plain[0]) > MAX_NAME_CHARS:
            raise ParseError(source, f"names of at most {MAX_NAME_CHARS} letters", part, line=line)
        names = [name + plain[0] for name in names]
        at = plain.end()
    if names == [""] or not space:
        raise ParseError(source, "a name" if space else "fewer names", part, line=line)
    return names


def _expand_range(text: str, source: str, line: int | None, space: int) -> Iterator[str]:
    """Yield the numbers of a bracket, with the leading zeros that they have."""
    for item in text.split(","):
        first, dash, last = item.partition("-")
        lowest, highest = (parse_whole(end, 9) for end in (first, last if dash else first))
        if lowest is None or highest is None:
            raise ParseError(source, "numbers such as [01-36,40]", item, line=line)
        if highest < lowest or highest - lowest >= space:
            raise ParseError(
                source, f"an ascending range of at most {space} names", item, line=line
            )
        for number in range(lowest, highest + 1):
            yield f"{number:0{len(first)}}"


def plain_number(value: Any) -> int | None:
    """Return a number of Slurm's JSON: plain, or of {"set", "infinite", "number"}; None if not set.

    >>> plain_number({"number": 7}), plain_number(10**400)
    (7, None)
    """
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and abs(value) < 2**64 else None


class NodeShape(Struct, frozen=True):
    """Sockets x cores x threads.

    A core has as many abstract ids as threads either way (seen: 22.05.8, CPUs=32 of 2 x 16 x 2,
    where a job of 4 CPUs is given as CPU_IDs=0-7; scontrol counts by ThreadsPerCore alone).
    """

    sockets: int
    cores_per_socket: int
    threads_per_core: int
    cpus: int  # Slurm's CPUs; equal to cores if it schedules cores
    has_slices: bool = False  # MIG slices are among its GPUs

    @property
    def cores(self) -> int:
        return self.sockets * self.cores_per_socket

    def __str__(self) -> str:
        return f"{self.sockets} x {self.cores_per_socket} x {self.threads_per_core}"


_SHAPE = {
    "sockets": re.compile(r"(?:^|\s)Sockets=(\S*)"),
    "corespersocket": re.compile(r"(?:^|\s)CoresPerSocket=(\S*)"),
    "threadspercore": re.compile(r"(?:^|\s)ThreadsPerCore=(\S*)"),
    "cpus": re.compile(r"(?:^|\s)CPUTot=(\S*)"),
    "gres": re.compile(r"(?:^|\s)Gres=(\S*)"),
}


def read_shapes(text: str, source: str) -> dict[str, NodeShape | None]:
    """Shapes by node name from `scontrol show node`: as text, with --oneliner too, or with --json.

    None for a repeated node, or for a repeated or empty field: comments, reasons and features of
    nodes are free text. Raises ParseError for a text that shows no node.
    """
    shown_nodes: list[tuple[str, dict[str, str] | None]]
    if text.lstrip().startswith("{"):
        shown_nodes = list(_json_nodes(text, source))
    else:
        # gres.conf has lines with NodeName=, too.
        blocks = re.split(r"^NodeName=", text, flags=re.MULTILINE)[1:] if "CPUTot=" in text else []
        shown_nodes = [(b.split(maxsplit=1)[0], _text_shape(b)) for b in blocks if b[:1].strip()]
    if not shown_nodes:
        expected = "nodes as scontrol show node prints them"
        raise ParseError(source, expected, text.strip().partition("\n")[0][:80], line=1)
    shapes: dict[str, NodeShape | None] = {}
    for name, values in shown_nodes:
        shape = None
        if values is not None:
            with suppress(ParseError):
                shape = node_shape(values, source, None)
        shapes[name] = None if name in shapes else shape
    return shapes


def _text_shape(block: str) -> dict[str, str] | None:
    matches = {key: pattern.findall(block) for key, pattern in _SHAPE.items()}
    if any(len(values) != 1 for values in matches.values()):
        return None
    return {key: values[0] for key, values in matches.items()}


def _json_nodes(text: str, source: str) -> Iterator[tuple[str, dict[str, str] | None]]:
    nodes = json_object(text, source).get("nodes")
    keys = {
        "sockets": "sockets",
        "corespersocket": "cores",
        "threadspercore": "threads",
        "cpus": "cpus",
    }
    for node in nodes if isinstance(nodes, list) else ():
        if isinstance(node, dict) and isinstance(node.get("name"), str):
            numbers = {field: str(plain_number(node.get(key))) for field, key in keys.items()}
            yield node["name"], {**numbers, "gres": str(node.get("gres"))}


def node_shape(values: dict[str, str], source: str, line: int | None) -> NodeShape | None:
    """Return the shape of a node's keys, in lower case; None if they are incomplete."""

    def number(*keys: str) -> int | None:
        text = next((values[key] for key in keys if values.get(key)), None)
        if text is None:
            return None
        count = parse_whole(text)
        if count is None or not 0 < count <= 65_536:
            raise ParseError(source, f"{keys[0]}= with a number from 1", text, line=line)
        return count

    sockets = number("sockets")
    if sockets is None and (of_board := number("socketsperboard")) is not None:
        sockets = of_board * (number("boards") or 1)
    cores, threads = number("corespersocket"), number("threadspercore")
    cpus = number("cpus", "procs")
    is_cut = has_slices(values.get("gres", ""))
    if cores is None and sockets is None:
        # Seen: 22.05.8 then treats every CPU as a socket with one core.
        return None if cpus is None else NodeShape(cpus, 1, 1, cpus, is_cut)
    cores, threads = cores or 1, threads or 1
    if sockets is None:
        sockets = max(1, (cpus or cores * threads) // (cores * threads))
    return NodeShape(sockets, cores, threads, cpus or sockets * cores * threads, is_cut)


COMMAND = ("sinfo", "--noheader", "--Node", "--format=%N|%P|%T|%c|%m|%G")
SHAPES_COMMAND = ("sinfo", "--all", "--noheader", "--Node", "--format=%X|%Y|%Z|%c|%G|%N")
MAX_LINES = 1_000_000

_NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)
_GRES = re.compile(r"([A-Za-z0-9_.-]+)(?::([A-Za-z0-9_.+-]+))?:(\d{1,6})(?:\(.*\))?", re.ASCII)
# As drivers name profiles: 1g.10gb, 1g.10gb+me, 3g.40gb; Slurm's AutoDetect: a100_1g.10gb.
_SLICE = re.compile(r"(?<![0-9])[0-9]+g\.[0-9]+gb", re.IGNORECASE | re.ASCII)
# As sinfo(1) marks states: "idle*" does not respond, "idle~" is powered down, and so on.
_MARKS = "*~#!%$@^-+"


def has_slices(text: str) -> bool:
    """Return whether a node's Gres=, or a GPU's type, names MIG slices ("gpu:1g.10gb:7")."""
    return _SLICE.search(text) is not None


class ClusterNode(Struct, frozen=True):
    name: str
    partition: str
    is_default: bool
    state: str  # as sinfo prints it, in lower case, without its marks
    cpus: int
    memory_mib: int
    gpus: int | None  # whole ones; None if it declares none
    # type of the whole GPUs if the node also has MIG slices: without a type, a job that requests a
    # GPU may get a slice
    gpu_type: str | None = None


def parse_nodes(text: str) -> tuple[ClusterNode, ...]:
    """Return a record for each node and partition. Other lines are skipped."""
    nodes = []
    for line in text.split("\n")[:MAX_LINES]:
        fields = line.strip().split("|")
        if len(fields) != 6 or not _NODE_NAME.fullmatch(fields[0]):
            continue
        name, partition, state, cpus, memory, gres_text = fields
        cpu_count, memory_mib = parse_whole(cpus), parse_whole(memory.rstrip("+"))
        if cpu_count is None or memory_mib is None:
            continue
        gpus, gpu_type = _parse_gpus(gres_text)
        nodes.append(
            ClusterNode(
                name=name,
                partition=partition.rstrip("*"),
                is_default=partition.endswith("*"),
                state=state.rstrip(_MARKS).lower(),
                cpus=cpu_count,
                memory_mib=memory_mib,
                gpus=gpus,
                gpu_type=gpu_type,
            )
        )
    return tuple(nodes)


def parse_shapes(text: str) -> dict[str, NodeShape]:
    """Return the shapes by node name. Raises ParseError for a line that shows none.

    >>> str(parse_shapes("2|16|2|64|gpu:8|gpu01\\n2|16|2|64|gpu:8|gpu01\\n")["gpu01"])
    '2 x 16 x 2'
    """
    shapes: dict[str, NodeShape] = {}
    for number, line in enumerate(filter(None, text.split("\n")), start=1):
        *values, name = line.strip().split("|", 5)
        keys = ("sockets", "corespersocket", "threadspercore", "cpus", "gres")
        shape = node_shape(dict(zip(keys, values, strict=False)), "sinfo", number)
        if shape is None or not name:
            raise ParseError("sinfo", "SOCKETS|CORES|THREADS|CPUS|GRES|NODE", line, line=number)
        shapes[name] = shape
    return shapes


def _parse_gpus(gres_text: str) -> tuple[int | None, str | None]:
    """Return whole GPUs of a text, and their type if there are MIG slices too.

    >>> _parse_gpus("gpu:h100:8(S:0-1)"), _parse_gpus("gpu:1g.10gb:7(S:0,1),gpu:a100:6,nic:2")
    ((8, None), (6, 'a100'))
    >>> _parse_gpus("(null)"), _parse_gpus("gpu:4")
    ((None, None), (4, None))
    """
    # A comma inside parentheses lists sockets: gpu:8(S:0,1)
    parts = re.sub(r"\([^()]*\)", "", gres_text).split(",")
    gpus = [match for part in parts if (match := _GRES.fullmatch(part)) and match[1] == "gpu"]
    slices = [gres for gres in gpus if gres[2] and has_slices(gres[2])]
    full = [gres for gres in gpus if gres not in slices]
    types = {gres[2] for gres in full}
    gpu_type = types.pop() if slices and len(types) == 1 else None
    return (sum(int(gres[3]) for gres in full) if gpus else None), gpu_type
