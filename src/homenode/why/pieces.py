"""Pieces: what a paste holds, one after another: each a file, or the output of one command.

A paste mixes prompts, files and logs. A row of KINDS says how a piece begins, and how it goes on:
with lines that a pattern takes, or up to a text that ends it. What no row takes is left to the
messages, which are looked for in everything.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, islice
from typing import NamedTuple

from msgspec import Struct


class PieceKind(NamedTuple):
    """A row. id: also of the reader. hint: what the first line has, a text or one of some. starts:
    of the first line. goes_on: of those that follow; or ends: a text in the last line. least: lines
    that a piece has. scattered: its lines stand among others, and are one piece of a file."""

    id: str
    title: str
    hint: str | tuple[str, ...]
    starts: str
    goes_on: str = ""
    ends: str = ""
    least: int = 1
    scattered: bool = False


_KEYS = (
    "acpi|affinity|agent|args|arch|balloon|bios|boot|bootdisk|cores|cpu|cpulimit|cpuunits|"
    "description|efidisk0|hookscript|hotplug|hugepages|kvm|lock|machine|memory|meta|name|numa|"
    "onboot|ostype|parent|protection|scsihw|searchdomain|shares|smbios1|sockets|startup|tablet|"
    "tags|template|vcpus|vga|vmgenid|(?:hostpci|ide|ipconfig|net|numa|sata|scsi|serial|tpmstate|"
    r"unused|usb|virtio|audio|rng|virtiofs)\d{1,3}"
)
_ADDRESS = r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] "
_LSCPU = (
    "Architecture|CPU|Byte Order|Address sizes|On-line|Off-line|Thread|Core|Socket|NUMA|Vendor|"
    "Model|BIOS|Stepping|Frequency|BogoMIPS|Virtualization|Hypervisor|L1|L2|L3|Flags|Vulnerab"
)

KINDS = (
    PieceKind("capabilities", "virsh capabilities", "<capabilities", r".", ends="</capabilities>"),
    PieceKind("domcaps", "domcapabilities", "<domainCapab", r".", ends="</domainCapabilities>"),
    PieceKind("domain", "domain XML", "<domain", r".{0,200}<domain(?:\s|>?$)", ends="</domain>"),
    PieceKind("nccl-file", "NCCL topology file", "<system", r".{0,200}<system\s", ends="</system>"),
    PieceKind("hwloc", "lstopo XML", "<topology", r".{0,200}<topology[\s>]", ends="</topology>"),
    PieceKind("smi-xml", "nvidia-smi -q -x", "<nvidia_smi_log", r".", ends="</nvidia_smi_log>"),
    PieceKind(
        "lspci", "lspci", (":00.", ":01.", "1.0 "), rf"{_ADDRESS}\S", rf"{_ADDRESS}\S|[\t ]+\S"
    ),
    PieceKind(
        "iommu-groups",
        "IOMMU groups",
        ("IOMMU Group ", "IOMMU group "),
        r"\s*IOMMU [Gg]roup \d{1,5}[: ]",
        rf"\s*(?:IOMMU [Gg]roup \d|(?:[-*] )?{_ADDRESS})|\s*$",
    ),
    PieceKind("lspci-tree", "lspci -t", "-[", r"-\+?-?\[[0-9a-f]{4}:[0-9a-f]{2}", r"[\s|+\\-]"),
    PieceKind(
        "numactl",
        "numactl -H",
        "available: ",
        r"available: \d{1,4} nodes? \(",
        r"node[\s:]|node distances|\s*\d{1,4}:(?:\s+\d{1,4})+\s*$|No distance",
    ),
    PieceKind("lscpu", "lscpu", "Architecture:", r"Architecture:\s+\S", rf"(?:{_LSCPU})|\s+\S"),
    PieceKind(
        "topo",
        "nvidia-smi topo -m",
        "GPU0",
        r"\s{0,20}(?:\x1b\[4m)?\s{0,20}GPU0\s",
        r"(?:GPU|NIC|mlx|bnxt|ib)\S*\s|\s*$|\s+\S|(?:NIC )?Legend",
    ),
    PieceKind(
        "nccl-tests", "nccl-tests", "# ", r"# (?:Collective test|nThread|Using dev)", r"#|\s+\d"
    ),
    PieceKind(
        "p2p-test",
        "p2pBandwidthLatencyTest",
        "P2P Connectivity Matrix",
        r"P2P Connectivity Matrix",
        r"\s*(?:D\\D|\d)|(?:Uni|Bi)directional P2P=|\s*$",
    ),
    PieceKind(
        "resources", "kubectl describe node", "Allocatable:", r"Allocatable:\s*$", r"\s+\S+:\s+\S+"
    ),
    PieceKind("ib-bw", "perftest", " BW", r"\s*(?:RDMA_(?:Write|Read) BW|Send BW) Test", r"\s|-|#"),
    PieceKind("qm", "qm configuration", ": ", rf"(?:{_KEYS}): \S", rf"(?:{_KEYS}): |#", least=3),
    PieceKind(
        "ch",
        "Cloud Hypervisor",
        "cloud-hypervisor",
        r".{0,200}\bcloud-hypervisor\b.{0,80}\s(?:--|\\)",
        r"\s*-|.{0,400}\\$",
    ),
    PieceKind(
        "qemu",
        "QEMU command",
        ("qemu-system-", "/usr/bin/kvm ", "qemu-kvm "),
        r"[^<]{0,400}(?:\bqemu-system-\w+|/usr/bin/kvm|\bqemu-kvm)\s+(?:-[a-z]|\\)",
        r"\s*-[a-z]|.{0,4000}\\$",
    ),
    PieceKind("json", "JSON document", "{", r"\{"),
    PieceKind(
        "manifest", "Kubernetes object", "apiVersion: ", r"apiVersion: \S", r"[\s-]|[A-Za-z]\w*:"
    ),
    PieceKind(
        "nccl-log", "NCCL log", ("NCCL INFO ", "NCCL WARN "), "NCCL (?:INFO|WARN) ", scattered=True
    ),
    PieceKind("kernel", "kernel log", "] ", r"\[ *\d{1,9}\.\d{6}\] ", scattered=True),
    PieceKind("kernel", "kernel log", "kernel: ", "kernel: ", scattered=True),
    PieceKind(
        "gres", "gres.conf", "Name=", r"(?:NodeName=\S+ )?(?:AutoDetect=|Name=gpu)", r"\w+=|#"
    ),
    PieceKind(
        "slurm-conf",
        "slurm.conf",
        ("ClusterName=", "SlurmctldHost="),
        r"ClusterName=|SlurmctldHost=",
        r"\w+=|#|\s*$",
    ),
    PieceKind("smi", "nvidia-smi", "NVIDIA-SMI ", r"\|\s*NVIDIA-SMI ", r"[|+]"),
    PieceKind(
        "flavor", "flavor", "hw:", r".{0,400}?\bhw:(?:cpu_policy|numa_nodes|mem_page_size|pci_n)"
    ),
    PieceKind("lstopo", "lstopo", "Machine (", r"Machine \(\d", r"\s+\S"),
)
TITLES = {kind.id: kind.title for kind in KINDS}

_STARTS = [re.compile(kind.starts) for kind in KINDS]
_GOES_ON = [re.compile(kind.goes_on) if kind.goes_on else None for kind in KINDS]
_MOST_LINE = 2048
_MOST_PIECES = 256
_MOST_TRIED = 20_000
"""Lines that have the hint of a kind and are none of its first."""
_MOST_BROKEN = 16
"""Beginnings of JSON documents that are none: each is read to where it breaks."""

_MOST_JSON = 16 << 20
_FENCE = re.compile(r"\s{0,3}(?:```|~~~)")


class Piece(Struct, frozen=True, kw_only=True):
    """A part of a file. kind: of KINDS. line: its first, from 1. text: in place of lines between
    scattered ones, empty lines."""

    kind: str
    source: str
    line: int
    text: str

    @property
    def lines(self) -> int:
        """Lines that are not empty."""
        return sum(1 for line in self.text.split("\n") if line)


def pieces(text: str, source: str) -> tuple[Piece, ...]:
    """The pieces of a text, in their order; those whose lines are scattered come last."""
    lines = text.split("\n")
    ends = [*accumulate(len(line) + 1 for line in lines)]  # where the next line begins
    made: list[Piece] = []
    scattered: dict[str, Piece] = {}
    begun: list[tuple[int, int]] = []
    for number, kind in enumerate(KINDS):
        hints = (kind.hint,) if isinstance(kind.hint, str) else kind.hint
        if not any(hint in text for hint in hints):
            continue
        if kind.scattered:
            is_in = _STARTS[number].search(text)
            own = [n for n, line in enumerate(lines) if is_in and _STARTS[number].search(line)]
            if own and kind.id not in scattered:
                between = ["" for _ in range(own[-1] - own[0] + 1)]
                for at in own:
                    between[at - own[0]] = lines[at]
                scattered[kind.id] = _piece(number, source, own[0], between)
        else:
            found = (_lines_of(re.compile(re.escape(hint)), text, ends) for hint in hints)
            having = sorted({at for lines_of in found for at in islice(lines_of, _MOST_TRIED)})
            begun += [(at, number) for at in having if _begins(number, lines[at])]
    free = 0
    broken = 0
    for at, number in sorted(begun):
        if at < free or len(made) >= _MOST_PIECES or broken > _MOST_BROKEN:
            continue
        is_json = KINDS[number].id == "json"
        end = _end_of_json(lines, at) if is_json else _end(number, lines, at)
        broken += is_json and end == at
        if end - at >= KINDS[number].least:
            made.append(_piece(number, source, at, lines[at:end]))
            free = end
    return (*_joined(made), *scattered.values())


def _lines_of(pattern: re.Pattern[str], text: str, ends: Sequence[int]) -> Iterator[int]:
    """The lines in which a pattern is found."""
    found = pattern.search(text)
    while found:
        line = bisect_right(ends, found.start())
        yield line
        found = pattern.search(text, ends[line])


def _begins(number: int, line: str) -> bool:
    return _STARTS[number].match(line, 0, _MOST_LINE) is not None


def _piece(number: int, source: str, at: int, lines: Sequence[str]) -> Piece:
    return Piece(kind=KINDS[number].id, source=source, line=at + 1, text="\n".join(lines))


def _end(number: int, lines: Sequence[str], at: int) -> int:
    """The line behind a piece."""
    ends, goes_on = KINDS[number].ends, _GOES_ON[number]
    if ends:
        return next((n + 1 for n in range(at, len(lines)) if ends in lines[n]), len(lines))
    following = at + 1
    while following < len(lines):
        line = lines[following]
        if goes_on is None or goes_on.match(line, 0, _MOST_LINE) is None or _FENCE.match(line):
            break
        following += 1
    return following


def _end_of_json(lines: Sequence[str], at: int) -> int:
    """The line behind a JSON object of several members or lines; `at` where it is none."""
    text = "\n".join(islice(lines, at, None))[:_MOST_JSON]
    try:
        value, length = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return at
    return (
        at + text.count("\n", 0, length) + 1 if "kubeletconfig" in value or "kind" in value else at
    )


def _joined(made: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces of lspci that only a blank or foreign line parts are one listing."""
    for kind, group in groupby(made, key=lambda one: one.kind):
        same = list(group)
        if kind == "lspci" and len(same) > 1:
            text = "\n".join(one.text for one in same)
            yield Piece(kind=kind, source=same[0].source, line=same[0].line, text=text)
        else:
            yield from same
