"""AMD's tools: links between GPUs, their nodes and addresses, and how each GPU is divided.

`amd-smi topology --json`, since ROCm 6.2 with addresses:

    [{"gpu": 0, "bdf": "0000:05:00.0",
      "links": [{"gpu": 0, "bdf": "0000:05:00.0", "link_type": "SELF", "num_hops": 0},
                {"gpu": 1, "bdf": "0000:15:00.0", "link_type": "XGMI", "num_hops": 1}]}]

Some releases put the list into {"gpu_data": [...]}, and print warnings before it.

`rocm-smi --showbus --showtopo --json`, of ROCm 5.2 to 7.1; each pair is given once, and releases
differ in capitals:

    {"card0": {"PCI Bus": "0000:C1:00.0", "(Topology) Numa Node": "0"},
     "card1": {"PCI Bus": "0000:C6:00.0", "(Topology) Numa Node": "1"},
     "system": {"(Topology) Hops between DRM devices 0 and 1": "1",
                "(Topology) Link type between DRM devices 0 and 1": "XGMI"}}

`amd-smi partition --current --json`:

    {"current_partition": [
      {"gpu_id": 0, "memory": "NPS1", "accelerator_type": "CPX", "accelerator_profile_index": 3,
       "partition_id": "0"},
      {"gpu_id": 1, "memory": "N/A", "accelerator_type": "N/A", "partition_id": "1"}]}

Each partition is a GPU of its own to the tool: the first of each GPU gives the modes, those after
it "N/A". Early releases give one row a GPU and the partitions as "0,1,2,3". Without root the types
may be "N/A", and the current one may be marked "CPX*".

Source: CHANGELOG.md of ROCm/amdsmi (6.2: topology --json); amdsmi_commands.py;
ROCm/legacy-rocm-build issue 4477; rocm_smi.py of ROCm/rocm_smi_lib.
"""

import re
from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import NodeIndex
from homenode.errors import ParseError
from homenode.machine.tools.lines import decode_first_json
from homenode.units import parse_whole

MAX_GPUS = 512

_TOPOLOGY = "amd-smi topology --json"
_ROCM = "rocm-smi --showtopo --json"
_PARTITIONS = "amd-smi partition --current --json"
_CARD = re.compile(r"(?:card|gpu)(\d{1,4})", re.ASCII)
_PAIR = re.compile(
    r"\(topology\) (hops|link type) between drm devices (\d{1,4}) and (\d{1,4})", re.ASCII
)
_KINDS = ("XGMI", "PCIE")
_MAX_PARTITIONS = 16


class AmdLink(Struct, frozen=True, order=True):
    """The connection of two GPUs."""

    a: int  # the tool's indices (not BDFs)
    b: int
    kind: str  # "XGMI" or "PCIE"
    hops: int | None


class AmdTopology(Struct, frozen=True):
    """The GPUs of a tool by its indices, and the links between them."""

    bdf_of_gpu: dict[int, Bdf]
    node_of_gpu: dict[int, NodeIndex]  # if the tool has a node; it prints -1 otherwise
    links: tuple[AmdLink, ...]  # ascending; a pair from either side if the tool prints both


class AmdPartitions(Struct, frozen=True):
    number: int  # the tool's, of its first partition
    compute: str | None  # "CPX"; None if the tool prints N/A
    memory: str | None  # "NPS4"; None if the tool prints N/A
    count: int  # its partitions


def parse_topology(text: str) -> AmdTopology:
    """Return the links of `amd-smi topology`; nodes are not in it. Raises ParseError if the text is
    no such list, gives a GPU no address or names it twice."""
    value = decode_first_json(text, _TOPOLOGY)
    entries = value.get("gpu_data") if isinstance(value, dict) else value
    bdf_of_gpu: dict[int, Bdf] = {}
    links: list[AmdLink] = []
    for entry in entries if isinstance(entries, list) else ():
        number = _number(entry.get("gpu")) if isinstance(entry, dict) else None
        if number is None or number in bdf_of_gpu:
            raise ParseError(_TOPOLOGY, "each GPU once, with its number", str(entry)[:80])
        bdf_of_gpu[number] = Bdf.parse(str(entry.get("bdf")), _TOPOLOGY)
        link_list = entry.get("links")
        for link in link_list if isinstance(link_list, list) else ():
            if isinstance(link, dict):
                other, hops = _number(link.get("gpu")), _number(link.get("num_hops"))
                links += _link(number, other, link.get("link_type"), hops)
    return AmdTopology(_check_count(bdf_of_gpu, _TOPOLOGY, text), {}, tuple(sorted(links)))


def parse_rocm_topology(text: str) -> AmdTopology:
    """Return the links and nodes of `rocm-smi --showtopo`; other keys are skipped. Raises
    ParseError if the text is no such object or holds no GPU with an address."""
    value = decode_first_json(text, _ROCM)
    bdf_of_gpu: dict[int, Bdf] = {}
    node_of_gpu: dict[int, NodeIndex] = {}
    facts_of_pair: dict[tuple[int, int], dict[str, Any]] = {}
    for name, fields in value.items() if isinstance(value, dict) else ():
        if not isinstance(fields, dict):
            continue
        lower_fields = {key.lower(): field for key, field in fields.items()}
        if (card := _CARD.fullmatch(name.lower())) is not None:
            number, node = int(card[1]), _number(lower_fields.get("(topology) numa node"))
            if lower_fields.get("pci bus") not in (None, "", "N/A"):
                bdf_of_gpu[number] = Bdf.parse(str(lower_fields["pci bus"]), _ROCM)
            if node is not None:
                node_of_gpu[number] = NodeIndex(node)
        for key, field in lower_fields.items():
            if (match := _PAIR.fullmatch(key)) is not None:
                pair = int(match[2]), int(match[3])
                facts_of_pair.setdefault(pair, {})[match[1]] = field
    links = [
        link
        for pair, facts in facts_of_pair.items()
        for link in _link(*pair, facts.get("link type"), _number(facts.get("hops")))
    ]
    return AmdTopology(_check_count(bdf_of_gpu, _ROCM, text), node_of_gpu, tuple(sorted(links)))


def _check_count(bdf_of_gpu: dict[int, Bdf], source: str, text: str) -> dict[int, Bdf]:
    if not 0 < len(bdf_of_gpu) <= MAX_GPUS:
        found_text = text.strip()[:80] if not bdf_of_gpu else str(len(bdf_of_gpu))
        raise ParseError(source, f"1 to {MAX_GPUS} GPUs with their addresses", found_text)
    return bdf_of_gpu


def _link(number: int, other: int | None, kind: object, hops: int | None) -> tuple[AmdLink, ...]:
    """Return the link to another GPU; () to itself ("SELF") and for unknown kinds ("N/A")."""
    word = str(kind).upper()
    return () if other is None or word not in _KINDS else (AmdLink(number, other, word, hops),)


def _number(value: Any) -> int | None:
    if isinstance(value, str):
        return parse_whole(value, digits=9)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < 10**9 else None


def parse_partitions(text: str) -> tuple[AmdPartitions, ...]:
    """Return the GPUs, in the tool's order. Raises ParseError."""
    value = decode_first_json(text, _PARTITIONS)
    rows = value.get("current_partition") if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ParseError(_PARTITIONS, "a list current_partition", text.strip()[:80])
    if len(rows) > MAX_GPUS:
        raise ParseError(_PARTITIONS, f"at most {MAX_GPUS} rows", str(len(rows)))
    partitions: list[AmdPartitions] = []
    for row in rows:
        number = row.get("gpu_id", row.get("gpu"))
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10_000:
            raise ParseError(_PARTITIONS, "the number of a GPU", str(number)[:80])
        ids = _parse_ids(row.get("partition_id"))
        compute = _partition_mode(row.get("accelerator_type"))
        memory = _partition_mode(row.get("memory"))
        if partitions and compute is None and ids and ids[0] == partitions[-1].count:
            last = partitions.pop()
            count = last.count + len(ids)
            partitions.append(AmdPartitions(last.number, last.compute, last.memory, count))
        else:
            partitions.append(AmdPartitions(number, compute, memory, max(1, len(ids))))
        if partitions[-1].count > _MAX_PARTITIONS:
            raise ParseError(_PARTITIONS, f"at most {_MAX_PARTITIONS} partitions a GPU", "more")
    return tuple(partitions)


def _partition_mode(value: Any) -> str | None:
    word = value.strip().rstrip("*") if isinstance(value, str) else ""
    return word if word.isascii() and word.isalnum() and len(word) <= 8 else None


def _parse_ids(value: Any) -> tuple[int, ...]:
    words = str(value).split(",") if isinstance(value, int | str) else []
    numbers = [parse_whole(word.strip(), digits=3) for word in words]
    return () if None in numbers else tuple(number for number in numbers if number is not None)
