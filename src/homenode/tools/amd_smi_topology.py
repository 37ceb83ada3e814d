"""amd-smi topology --json: links between AMD GPUs, by the addresses of both.

    [{"gpu": 0, "bdf": "0000:05:00.0",
      "links": [{"gpu": 0, "bdf": "0000:05:00.0", "link_type": "SELF", "num_hops": 0},
                {"gpu": 1, "bdf": "0000:15:00.0", "link_type": "XGMI", "num_hops": 1}]}]

Before ROCm 6.2 without addresses, each kind of figure by "gpu_0", "gpu_1". Some releases put the
list into {"gpu_data": [...]}, and print warnings before it.

Source: CHANGELOG.md of ROCm/amdsmi (6.2: topology --json); amdsmi_commands.py.
"""

from typing import Any

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.tools.json_documents import first_value
from homenode.tools.rocm_smi_topo import MAX_GPUS, RocmTopology

COMMAND = ("amd-smi", "topology", "--json")

_SOURCE = "amd-smi topology --json"


def parse(text: str) -> RocmTopology:
    """The links, as of `rocm-smi --showtopo`; nodes are not in it.

    Raises ParseError where the text is no such list, or names a GPU twice.
    """
    value = first_value(text, _SOURCE)
    if isinstance(value, dict):
        value = value.get("gpu_data")
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ParseError(_SOURCE, "a list of GPUs", text.strip()[:80])
    if len(value) > MAX_GPUS:
        raise ParseError(_SOURCE, f"at most {MAX_GPUS} GPUs", str(len(value)))
    of_gpu = {_index(one.get("gpu")): one for one in value}
    if len(of_gpu) < len(value):
        raise ParseError(_SOURCE, "each GPU once", ", ".join(map(str, sorted(of_gpu))))
    gpus = tuple(sorted(of_gpu))
    links, hops, weights = (
        tuple(tuple(_cell(of_gpu[a], b, names) for b in gpus) for a in gpus)
        for names in (("link_type",), ("num_hops", "hops"), ("weight",))
    )
    return RocmTopology(
        gpus,
        tuple(tuple(_number(cell) for cell in row) for row in weights),
        tuple(tuple(_number(cell) for cell in row) for row in hops),
        tuple(tuple(_kind(cell) for cell in row) for row in links),
        (),
        tuple((gpu, bdf) for gpu in gpus if (bdf := _address(of_gpu[gpu])) is not None),
    )


def _index(value: Any) -> int:
    number = _number(value)
    if number is None:
        raise ParseError(_SOURCE, "the number of a GPU", str(value))
    return number


def _address(gpu: dict[str, Any]) -> Bdf | None:
    """None where the release prints none, or "N/A". Raises ParseError for what is no address."""
    text = gpu.get("bdf")
    return None if text in (None, "", "N/A") else Bdf.parse(str(text), _SOURCE)


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
