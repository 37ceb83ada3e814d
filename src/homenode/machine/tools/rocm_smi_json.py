"""rocm-smi --showbus --showtopo --json: links, nodes and addresses of AMD GPUs.

    {"card0": {"PCI Bus": "0000:C1:00.0", "(Topology) Numa Node": "0"},
     "card1": {"PCI Bus": "0000:C6:00.0", "(Topology) Numa Node": "1"},
     "system": {"(Topology) Weight between DRM devices 0 and 1": "15",
                "(Topology) Hops between DRM devices 0 and 1": "1",
                "(Topology) Link type between DRM devices 0 and 1": "XGMI"}}

Each pair is given once. Releases differ in capitals, and print warnings before it. Source:
rocm_smi.py of ROCm/rocm_smi_lib, ROCm 5.2 to 7.1.
"""

import re
from typing import Any

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.indices import NodeIndex
from homenode.machine.tools.json_documents import first_value
from homenode.machine.tools.rocm_smi_topo import MAX_GPUS, RocmTopology

COMMAND = ("rocm-smi", "--showbus", "--showtopo", "--json")

_SOURCE = "rocm-smi --showtopo --json"
_CARD = re.compile(r"(?:card|gpu)(\d{1,4})", re.ASCII)
_PAIR = re.compile(
    r"\(topology\) (weight|hops|link type) between drm devices (\d{1,4}) and (\d{1,4})",
    re.ASCII,
)


def parse(text: str) -> RocmTopology:
    """The tables, symmetric, as of `rocm-smi --showtopo`. Other keys are skipped.

    Raises ParseError where the text is no such object or holds no GPU.
    """
    value = first_value(text, _SOURCE)
    if not isinstance(value, dict):
        raise ParseError(_SOURCE, "a JSON object", text.strip()[:80])
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
            found = _PAIR.fullmatch(key)
            if found is not None:
                a, b = int(found[2]), int(found[3])
                pairs[found[1], a, b] = pairs[found[1], b, a] = str(field).upper()
    gpus = tuple(sorted({*cards, *(gpu for _, a, b in pairs for gpu in (a, b))}))
    if not gpus or len(gpus) > MAX_GPUS:
        expected = "cards, or links between devices" if not gpus else f"at most {MAX_GPUS} GPUs"
        raise ParseError(_SOURCE, expected, text.strip()[:80])

    def table(kind: str) -> tuple[tuple[str, ...], ...]:
        if not any(of == kind for of, _, _ in pairs):
            return ()
        return tuple(
            tuple("0" if a == b else pairs.get((kind, a, b), "") for b in gpus) for a in gpus
        )

    return RocmTopology(
        gpus,
        tuple(tuple(_number(cell) for cell in row) for row in table("weight")),
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
            (gpu, Bdf.parse(str(bus), _SOURCE))
            for gpu in sorted(cards)
            if (bus := cards[gpu].get("pci bus")) not in (None, "", "N/A")
        ),
    )


def _number(cell: str) -> int | None:
    return int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 10 else None
