"""rocm-smi --showtopo: hops and links between AMD GPUs, and their nodes.

    =============================== Link Type between two GPUs ===============================
           GPU0         GPU1
    GPU0   0            XGMI
    GPU1   XGMI         0

    ======================================= Numa Nodes =======================================
    GPU[0]          : (Topology) Numa Node: 0
    GPU[0]          : (Topology) Numa Affinity: 0

Seen of ROCm 5.2 to 7.1. Source: rocm_smi.py of ROCm/rocm_smi_lib.
"""

import re

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.indices import NodeIndex

COMMAND = ("rocm-smi", "--showtopo")
MAX_GPUS = 512

_SOURCE = "rocm-smi --showtopo"
_GPU = re.compile(r"GPU(\d{1,4})", re.ASCII)
_NUMA = re.compile(
    r"GPU ?\[?(\d{1,4})\]?\s*: \(Topology\) Numa (Node|Affinity): (-?\d{1,5}|N/A)", re.ASCII
)
_SECTIONS = {
    "Weight between two GPUs": "weights",
    "Hops between two GPUs": "hops",
    "Link Type between two GPUs": "links",
}


class RocmTopology(Struct, frozen=True):
    """gpus: the tool's indices (not BDFs), ascending.

    weights, hops: shape (gpus, gpus), [from][to]; None where the tool says N/A; 0 on the diagonal.
    links: "XGMI" or "PCIE", None on the diagonal and where unknown. Each is empty where its
    section is missing.
    node_of_gpu: (GPU, node) where the tool knows one: it says -1 where it does not.
    bdf_of_gpu: (GPU, address), of outputs that print addresses.
    """

    gpus: tuple[int, ...]
    weights: tuple[tuple[int | None, ...], ...]
    hops: tuple[tuple[int | None, ...], ...]
    links: tuple[tuple[str | None, ...], ...]
    node_of_gpu: tuple[tuple[int, NodeIndex], ...]
    bdf_of_gpu: tuple[tuple[int, Bdf], ...] = ()


def parse(text: str) -> RocmTopology:
    """The sections that we know; others are skipped, as later versions add some.

    Raises ParseError where a table is not square, or two tables have different GPUs.
    """
    section = ""
    columns: list[int] = []
    gpus: tuple[int, ...] = ()
    tables: dict[str, list[list[str]]] = {name: [] for name in _SECTIONS.values()}
    nodes: dict[int, NodeIndex] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        title = _title(line.strip())
        if title is not None:
            _check_whole(section, columns, tables, number)
            section, columns = _SECTIONS.get(title, title), []
        elif words and section in tables:
            if not columns:
                columns = _columns(words, line, number)
                if gpus and tuple(columns) != gpus:
                    raise ParseError(
                        _SOURCE, f"GPUs as in the table above: {gpus}", line, line=number
                    )
                gpus = tuple(columns)
                tables[section].clear()
            else:
                tables[section].append(_row(words, columns, len(tables[section]), line, number))
        elif words and section == "Numa Nodes":
            found = _NUMA.fullmatch(line.strip())
            if found is None:
                raise ParseError(_SOURCE, "GPU[0]: (Topology) Numa Node: 0", line, line=number)
            if found[2] == "Node" and found[3].isdigit():
                nodes[int(found[1])] = NodeIndex(int(found[3]))
        elif words and not section:
            raise ParseError(_SOURCE, "a title between equals signs", line, line=number)
    _check_whole(section, columns, tables, text.count("\n") + 1)
    if not gpus and not nodes:
        raise ParseError(_SOURCE, "a table of GPUs", text.strip()[:80])
    return RocmTopology(
        gpus or tuple(sorted(nodes)),
        _numbers(tables["weights"]),
        _numbers(tables["hops"]),
        tuple(tuple(cell if cell.isalpha() else None for cell in row) for row in tables["links"]),
        tuple(sorted(nodes.items())),
    )


def _columns(words: list[str], line: str, number: int) -> list[int]:
    found = [_GPU.fullmatch(word) for word in words]
    columns = [int(gpu[1]) for gpu in found if gpu is not None]
    if len(columns) != len(words) or columns != sorted(set(columns)) or len(columns) > MAX_GPUS:
        raise ParseError(_SOURCE, "columns GPU0 GPU1 ...", line, line=number)
    return columns


def _row(words: list[str], columns: list[int], position: int, line: str, number: int) -> list[str]:
    good = position < len(columns) and words[0] == f"GPU{columns[position]}"
    if not good or len(words) != len(columns) + 1:
        raise ParseError(_SOURCE, f"a row of {len(columns)} values for each GPU", line, line=number)
    if not all(word == "N/A" or (word.isascii() and word.isalnum()) for word in words[1:]):
        raise ParseError(_SOURCE, "numbers or kinds of link", line, line=number)
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
    section: str, columns: list[int], tables: dict[str, list[list[str]]], number: int
) -> None:
    if section in tables and len(tables[section]) != len(columns):
        raise ParseError(
            _SOURCE, f"{len(columns)} rows", f"{len(tables[section])} rows", line=number
        )


def _numbers(table: list[list[str]]) -> tuple[tuple[int | None, ...], ...]:
    return tuple(
        tuple(int(cell) if cell.isdigit() and len(cell) < 10 else None for cell in row)
        for row in table
    )
