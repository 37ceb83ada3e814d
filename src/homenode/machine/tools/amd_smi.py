"""amd-smi: links between AMD GPUs, and how each is divided.

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

from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.machine.tools.json_documents import first_value
from homenode.machine.tools.rocm_smi_topo import MAX_GPUS, RocmTopology

TOPOLOGY_COMMAND = ("amd-smi", "topology", "--json")
PARTITION_COMMAND = ("amd-smi", "partition", "--current", "--json")

_TOPOLOGY = "amd-smi topology --json"
_PARTITIONS = "amd-smi partition --current --json"
_MOST_PARTITIONS = 16


class AmdPartitions(Struct, frozen=True):
    """One GPU. number: the tool's, of its first partition. compute, memory: "CPX", "NPS4"; None
    where the tool says N/A. count: its partitions."""

    number: int
    compute: str | None
    memory: str | None
    count: int


def parse_topology(text: str) -> RocmTopology:
    """The links, as of `rocm-smi --showtopo`; nodes are not in it.

    Raises ParseError where the text is no such list, or names a GPU twice.
    """
    value = first_value(text, _TOPOLOGY)
    if isinstance(value, dict):
        value = value.get("gpu_data")
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ParseError(_TOPOLOGY, "a list of GPUs", text.strip()[:80])
    if len(value) > MAX_GPUS:
        raise ParseError(_TOPOLOGY, f"at most {MAX_GPUS} GPUs", str(len(value)))
    of_gpu = {_index(one.get("gpu")): one for one in value}
    if len(of_gpu) < len(value):
        raise ParseError(_TOPOLOGY, "each GPU once", ", ".join(map(str, sorted(of_gpu))))
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
    value = first_value(text, _PARTITIONS)
    rows = value.get("current_partition") if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ParseError(_PARTITIONS, "a list current_partition", text.strip()[:80])
    if len(rows) > MAX_GPUS:
        raise ParseError(_PARTITIONS, f"at most {MAX_GPUS} rows", str(len(rows)))
    found: list[AmdPartitions] = []
    for row in rows:
        number = row.get("gpu_id", row.get("gpu"))
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10_000:
            raise ParseError(_PARTITIONS, "the number of a GPU", str(number)[:80])
        ids = _ids(row.get("partition_id"))
        compute, memory = (
            _partition_mode(row.get("accelerator_type")),
            _partition_mode(row.get("memory")),
        )
        if found and compute is None and ids and ids[0] == found[-1].count:
            last = found.pop()
            count = last.count + len(ids)
            found.append(AmdPartitions(last.number, last.compute, last.memory, count))
        else:
            found.append(AmdPartitions(number, compute, memory, max(1, len(ids))))
        if found[-1].count > _MOST_PARTITIONS:
            raise ParseError(_PARTITIONS, f"at most {_MOST_PARTITIONS} partitions a GPU", "more")
    return tuple(found)


def _partition_mode(value: Any) -> str | None:
    word = value.strip().rstrip("*") if isinstance(value, str) else ""
    return word if word.isascii() and word.isalnum() and len(word) <= 8 else None


def _ids(value: Any) -> tuple[int, ...]:
    words = str(value).split(",") if isinstance(value, int | str) else []
    numbers = [word.strip() for word in words]
    if not all(word.isascii() and word.isdigit() and len(word) < 4 for word in numbers):
        return ()
    return tuple(map(int, numbers))
