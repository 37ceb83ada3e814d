"""amd-smi partition --current --json: how AMD's GPUs are divided.

    {"current_partition": [
      {"gpu_id": 0, "memory": "NPS1", "accelerator_type": "CPX", "accelerator_profile_index": 3,
       "partition_id": "0"},
      {"gpu_id": 1, "memory": "N/A", "accelerator_type": "N/A", "partition_id": "1"}]}

Each partition is a GPU of its own to the tool: the first of each GPU gives the modes, those after
it "N/A". Early releases give one row a GPU and the partitions as "0,1,2,3". Without root the types
may be "N/A", and the current one may be marked "CPX*".

Seen of ROCm 6.3 to 7.1. Source: amdsmi_commands.py; ROCm/legacy-rocm-build issue 4477.
"""

from dataclasses import dataclass
from typing import Any

from homenode.errors import ParseError
from homenode.tools.json_documents import first_value
from homenode.tools.rocm_smi_topo import MAX_GPUS

COMMAND = ("amd-smi", "partition", "--current", "--json")

_SOURCE = "amd-smi partition --current --json"
_MOST_PARTITIONS = 16


@dataclass(frozen=True, slots=True)
class AmdPartitions:
    """One GPU. number: the tool's, of its first partition. compute, memory: "CPX", "NPS4"; None
    where the tool says N/A. count: its partitions."""

    number: int
    compute: str | None
    memory: str | None
    count: int


def parse(text: str) -> tuple[AmdPartitions, ...]:
    """The GPUs, in the tool's order. Raises ParseError."""
    value = first_value(text, _SOURCE)
    rows = value.get("current_partition") if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ParseError(_SOURCE, "a list current_partition", text.strip()[:80])
    if len(rows) > MAX_GPUS:
        raise ParseError(_SOURCE, f"at most {MAX_GPUS} rows", str(len(rows)))
    found: list[AmdPartitions] = []
    for row in rows:
        number = row.get("gpu_id", row.get("gpu"))
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10_000:
            raise ParseError(_SOURCE, "the number of a GPU", str(number)[:80])
        ids = _ids(row.get("partition_id"))
        compute, memory = _mode(row.get("accelerator_type")), _mode(row.get("memory"))
        if found and compute is None and ids and ids[0] == found[-1].count:
            last = found.pop()
            count = last.count + len(ids)
            found.append(AmdPartitions(last.number, last.compute, last.memory, count))
        else:
            found.append(AmdPartitions(number, compute, memory, max(1, len(ids))))
        if found[-1].count > _MOST_PARTITIONS:
            raise ParseError(_SOURCE, f"at most {_MOST_PARTITIONS} partitions a GPU", "more")
    return tuple(found)


def _mode(value: Any) -> str | None:
    word = value.strip().rstrip("*") if isinstance(value, str) else ""
    return word if word.isascii() and word.isalnum() and len(word) <= 8 else None


def _ids(value: Any) -> tuple[int, ...]:
    words = str(value).split(",") if isinstance(value, int | str) else []
    numbers = [word.strip() for word in words]
    if not all(word.isascii() and word.isdigit() and len(word) < 4 for word in numbers):
        return ()
    return tuple(map(int, numbers))
