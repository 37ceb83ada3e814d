"""rocm-smi --showtopo: hops and links between AMD GPUs, and their nodes.

    =============================== Link Type between two GPUs ===============================
           GPU0         GPU1
    GPU0   0            XGMI
    GPU1   XGMI         0

    ======================================= Numa Nodes =======================================
    GPU[0]          : (Topology) Numa Node: 0
    GPU[0]          : (Topology) Numa Affinity: 0

Seen of ROCm 5.2 to 7.1. Source: rocm_smi.py of ROCm/rocm_smi_lib.

rocm-smi --showbus --showtopo --json: links, nodes and addresses of AMD GPUs.

    {"card0": {"PCI Bus": "0000:C1:00.0", "(Topology) Numa Node": "0"},
     "card1": {"PCI Bus": "0000:C6:00.0", "(Topology) Numa Node": "1"},
     "system": {"(Topology) Weight between DRM devices 0 and 1": "15",
                "(Topology) Hops between DRM devices 0 and 1": "1",
                "(Topology) Link type between DRM devices 0 and 1": "XGMI"}}

Each pair is given once. Releases differ in capitals, and print warnings before it. Source:
rocm_smi.py of ROCm/rocm_smi_lib, ROCm 5.2 to 7.1.

amd-smi: links between AMD GPUs, and how each is divided.

`amd-smi topology --json`:

    [{"gpu": 0, "bdf": "0000:05:00.0",
      "links": [{"gpu": 0, "bdf": "0000:05:00.0", "link_type": "SELF", "num_hops": 0},
                {"gpu": 1, "bdf": "0000:15:00.0", "link_type": "XGMI", "num_hops": 1}]}]

Before ROCm 6.2 without addresses, each kind of figure by "gpu_0", "gpu_1". Some releases put the
list into {"gpu_data": [...]}, and print warnings before it.

`amd-smi partition --current --json`:

    {"current_partition": [
      {"gpu_id": 0, "memory": "NPS1", "accelerator_type": "CPX", "accelerator_profile_index": 3,
       "partition_id": "0"},
      {"gpu_id": 1, "memory": "N/A", "accelerator_type": "N/A", "partition_id": "1"}]}

Each partition is a GPU of its own to the tool: the first of each GPU gives the modes, those after
it "N/A". Early releases give one row a GPU and the partitions as "0,1,2,3". Without root the types
may be "N/A", and the current one may be marked "CPX*".

Seen of ROCm 6.2 to 7.1. Source: CHANGELOG.md of ROCm/amdsmi (6.2: topology --json);
amdsmi_commands.py; ROCm/legacy-rocm-build issue 4477.
"""

import re
from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.indices import NodeIndex
from homenode.machine.tools.lines import Line, Lines, first_json

MAX_GPUS = 512

_ROCM = "rocm-smi --showtopo"
_ROCM_GPU = re.compile(r"GPU(\d{1,4})", re.ASCII)
_NUMA = re.compile(
    r"GPU ?\[?(\d{1,4})\]?\s*: \(Topology\) Numa (Node|Affinity): (-?\d{1,5}|N/A)", re.ASCII
)
_SECTIONS = {
    "Weight between two GPUs": "weights",
    "Hops between two GPUs": "hops",
    "Link Type between two GPUs": "links",
}


class RocmTopology(Struct, frozen=True):
    """The GPUs of rocm-smi and the links between them."""

    gpus: tuple[int, ...]  # the tool's indices (not BDFs), ascending
    # shape (gpus, gpus), [from][to]; None where the tool says N/A; 0 on the diagonal
    hops: tuple[tuple[int | None, ...], ...]
    # "XGMI" or "PCIE", None on the diagonal and where unknown. Each is empty where its section is
    # missing.
    links: tuple[tuple[str | None, ...], ...]
    # (GPU, node) where the tool knows one: it says -1 where it does not
    node_of_gpu: tuple[tuple[int, NodeIndex], ...]
    bdf_of_gpu: tuple[tuple[int, Bdf], ...] = ()  # (GPU, address), of outputs that print addresses


def parse_rocm_topology(text: str) -> RocmTopology:
    """The sections that we know; others are skipped, as later versions add some.

    Raises ParseError where a table is not square, or two tables have different GPUs.
    """
    section = ""
    columns: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    tables: dict[str, list[list[str]]] = {name: [] for name in _SECTIONS.values()}
    nodes: dict[int, NodeIndex] = {}
    line = Line("", 1, _ROCM)
    for line in Lines(text, _ROCM):
        words = line.text.split()
        title = _title(line.text)
        if title is not None:
            _check_whole(section, columns, tables, line)
            section, columns = _SECTIONS.get(title, title), ()
        elif section in tables and not columns:
            columns = _columns(words, line)
            if gpus and columns != gpus:
                raise line.error(f"GPUs as in the table above: {gpus}")
            gpus = columns
            tables[section].clear()
        elif section in tables:
            tables[section].append(_row(words, columns, len(tables[section]), line))
        elif section == "Numa Nodes":
            match = _NUMA.fullmatch(line.text)
            if match is None:
                raise line.error("GPU[0]: (Topology) Numa Node: 0")
            if match[2] == "Node" and match[3].isdigit():
                nodes[int(match[1])] = NodeIndex(int(match[3]))
        elif not section:
            raise line.error("a title between equals signs")
    _check_whole(section, columns, tables, line)
    if not gpus and not nodes:
        raise ParseError(_ROCM, "a table of GPUs", text.strip()[:80])
    return RocmTopology(
        gpus or tuple(sorted(nodes)),
        tuple(tuple(_number(cell) for cell in row) for row in tables["hops"]),
        tuple(tuple(cell if cell.isalpha() else None for cell in row) for row in tables["links"]),
        tuple(sorted(nodes.items())),
    )


def _columns(words: list[str], line: Line) -> tuple[int, ...]:
    matches = [_ROCM_GPU.fullmatch(word) for word in words]
    columns = tuple(int(gpu[1]) for gpu in matches if gpu is not None)
    ascending = columns == tuple(sorted(set(columns)))
    if len(columns) != len(words) or not ascending or len(columns) > MAX_GPUS:
        raise line.error("columns GPU0 GPU1 ...")
    return columns


def _row(words: list[str], columns: tuple[int, ...], position: int, line: Line) -> list[str]:
    good = position < len(columns) and words[0] == f"GPU{columns[position]}"
    if not good or len(words) != len(columns) + 1:
        raise line.error(f"a row of {len(columns)} values for each GPU")
    if not all(word == "N/A" or (word.isascii() and word.isalnum()) for word in words[1:]):
        raise line.error("numbers or kinds of link")
    return words[1:]


def _title(line: str) -> str | None:
    """The words between two bars; None where there are none.

    >>> _title("===== Numa Nodes ====="), _title("GPU0"), _title("====")
    ('Numa Nodes', None, '')
    """
    if len(line) < 2 or not line.startswith("=") or not line.endswith("="):
        return None
    return line.strip("=").removeprefix(" ").removesuffix(" ")


def _check_whole(
    section: str, columns: tuple[int, ...], tables: dict[str, list[list[str]]], line: Line
) -> None:
    if section in tables and len(tables[section]) != len(columns):
        raise line.error(f"{len(columns)} rows", f"{len(tables[section])} rows")


_ROCM_JSON = "rocm-smi --showtopo --json"
_CARD = re.compile(r"(?:card|gpu)(\d{1,4})", re.ASCII)
_PAIR = re.compile(
    r"\(topology\) (weight|hops|link type) between drm devices (\d{1,4}) and (\d{1,4})",
    re.ASCII,
)


def parse_rocm_json(text: str) -> RocmTopology:
    """The tables, symmetric, as of `rocm-smi --showtopo`. Other keys are skipped.

    Raises ParseError where the text is no such object or holds no GPU.
    """
    value = first_json(text, _ROCM_JSON)
    if not isinstance(value, dict):
        raise ParseError(_ROCM_JSON, "a JSON object", text.strip()[:80])
    cards: dict[int, dict[str, Any]] = {}
    pairs: dict[tuple[str, int, int], str] = {}
    for name, fields in value.items():
        card = _CARD.fullmatch(name.lower())
        if not isinstance(fields, dict):
            continue
        lowered = {str(key).lower(): field for key, field in fields.items()}
        if card is not None:
            cards[int(card[1])] = lowered
        for key, field in lowered.items():
            match = _PAIR.fullmatch(key)
            if match is not None:
                a, b = int(match[2]), int(match[3])
                pairs[match[1], a, b] = pairs[match[1], b, a] = str(field).upper()
    gpus = tuple(sorted({*cards, *(gpu for _, a, b in pairs for gpu in (a, b))}))
    if not gpus or len(gpus) > MAX_GPUS:
        expected = "cards, or links between devices" if not gpus else f"at most {MAX_GPUS} GPUs"
        raise ParseError(_ROCM_JSON, expected, text.strip()[:80])

    def table(kind: str) -> tuple[tuple[str, ...], ...]:
        if not any(table_kind == kind for table_kind, _, _ in pairs):
            return ()
        return tuple(
            tuple("0" if a == b else pairs.get((kind, a, b), "") for b in gpus) for a in gpus
        )

    return RocmTopology(
        gpus,
        tuple(tuple(_number(cell) for cell in row) for row in table("hops")),
        tuple(
            tuple(cell if cell in ("XGMI", "PCIE") else None for cell in row)
            for row in table("link type")
        ),
        tuple(
            (gpu, NodeIndex(node))
            for gpu in sorted(cards)
            if (node := _number(str(cards[gpu].get("(topology) numa node", "")))) is not None
        ),
        tuple(
            (gpu, Bdf.parse(str(bus), _ROCM_JSON))
            for gpu in sorted(cards)
            if (bus := cards[gpu].get("pci bus")) not in (None, "", "N/A")
        ),
    )


TOPOLOGY_COMMAND = ("amd-smi", "topology", "--json")

_TOPOLOGY = "amd-smi topology --json"
_PARTITIONS = "amd-smi partition --current --json"
_MOST_PARTITIONS = 16


class AmdPartitions(Struct, frozen=True):
    """One GPU."""

    number: int  # the tool's, of its first partition
    compute: str | None  # "CPX", "NPS4"; None where the tool says N/A
    memory: str | None  # "CPX", "NPS4"; None where the tool says N/A
    count: int  # its partitions


def parse_topology(text: str) -> RocmTopology:
    """The links, as of `rocm-smi --showtopo`; nodes are not in it.

    Raises ParseError where the text is no such list, or names a GPU twice.
    """
    value = first_json(text, _TOPOLOGY)
    if isinstance(value, dict):
        value = value.get("gpu_data")
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(entry, dict) for entry in value)
    ):
        raise ParseError(_TOPOLOGY, "a list of GPUs", text.strip()[:80])
    if len(value) > MAX_GPUS:
        raise ParseError(_TOPOLOGY, f"at most {MAX_GPUS} GPUs", str(len(value)))
    of_gpu = {_index(entry.get("gpu")): entry for entry in value}
    if len(of_gpu) < len(value):
        raise ParseError(_TOPOLOGY, "each GPU once", ", ".join(map(str, sorted(of_gpu))))
    gpus = tuple(sorted(of_gpu))
    links, hops = (
        tuple(tuple(_cell(of_gpu[a], b, names) for b in gpus) for a in gpus)
        for names in (("link_type",), ("num_hops", "hops"))
    )
    return RocmTopology(
        gpus,
        tuple(tuple(_number(cell) for cell in row) for row in hops),
        tuple(tuple(_kind(cell) for cell in row) for row in links),
        (),
        tuple((gpu, bdf) for gpu in gpus if (bdf := _address(of_gpu[gpu])) is not None),
    )


def _index(value: Any) -> int:
    number = _number(value)
    if number is None:
        raise ParseError(_TOPOLOGY, "the number of a GPU", str(value))
    return number


def _address(gpu: dict[str, Any]) -> Bdf | None:
    """None where the release prints none, or "N/A". Raises ParseError for what is no address."""
    text = gpu.get("bdf")
    return None if text in (None, "", "N/A") else Bdf.parse(str(text), _TOPOLOGY)


def _cell(gpu: dict[str, Any], other: int, names: tuple[str, ...]) -> Any:
    """What a GPU says of another one: in its list of links, or by "gpu_1" under the figure."""
    links = gpu.get("links")
    if isinstance(links, list):
        for link in links:
            if isinstance(link, dict) and _number(link.get("gpu")) == other:
                return next((link[name] for name in names if name in link), None)
        return None
    for name in names:
        row = gpu.get(name)
        if isinstance(row, dict):
            return row.get(f"gpu_{other}")
    return None


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < 10**9 else None


def _kind(value: Any) -> str | None:
    """ "XGMI" or "PCIE"; None for the GPU itself and where unknown."""
    word = value.upper() if isinstance(value, str) else ""
    return word if word in ("XGMI", "PCIE") else None


def parse_partitions(text: str) -> tuple[AmdPartitions, ...]:
    """The GPUs, in the tool's order. Raises ParseError."""
    value = first_json(text, _PARTITIONS)
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
        ids = _ids(row.get("partition_id"))
        compute, memory = (
            _partition_mode(row.get("accelerator_type")),
            _partition_mode(row.get("memory")),
        )
        if partitions and compute is None and ids and ids[0] == partitions[-1].count:
            last = partitions.pop()
            count = last.count + len(ids)
            partitions.append(AmdPartitions(last.number, last.compute, last.memory, count))
        else:
            partitions.append(AmdPartitions(number, compute, memory, max(1, len(ids))))
        if partitions[-1].count > _MOST_PARTITIONS:
            raise ParseError(_PARTITIONS, f"at most {_MOST_PARTITIONS} partitions a GPU", "more")
    return tuple(partitions)


def _partition_mode(value: Any) -> str | None:
    word = value.strip().rstrip("*") if isinstance(value, str) else ""
    return word if word.isascii() and word.isalnum() and len(word) <= 8 else None


def _ids(value: Any) -> tuple[int, ...]:
    words = str(value).split(",") if isinstance(value, int | str) else []
    numbers = [word.strip() for word in words]
    if not all(word.isascii() and word.isdigit() and len(word) < 4 for word in numbers):
        return ()
    return tuple(map(int, numbers))
