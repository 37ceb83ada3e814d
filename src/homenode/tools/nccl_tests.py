"""nccl-tests and rccl-tests: collectives over message sizes.

    all_reduce_perf -b 8 -e 8G -f 2 -g 8 -w 10 -n 100 [-J out.json]

Seen of nccl-tests 2.0 to 2.19.6 and rccl-tests ae3e635; JSON of versions 1 to 3 (-J, since 2.17.3).
Source: src/common.cu and src/util.cu of both.

* The columns are time, algbw, busbw and #wrong, out of place and in place. Bus bandwidth is what is
  comparable across numbers of GPUs; algorithm bandwidth stands before it.
* There was no root column before 2.11, and a column "error" in place of "#wrong".
* -O 0 of rccl-tests prints one half; newer nccl-tests leave a half blank.
* "Avg bus bandwidth" is over all sizes, small ones included.
* The JSON holds the whole environment, secrets included: `env` and `args` are not read.
* Host names are not kept; hosts are numbered as they appear.
"""

from dataclasses import dataclass
from enum import StrEnum

from homenode.bdf import Bdf
from homenode.gap import Gap

SOURCE = "nccl-tests"
MAX_ROWS = 4096


class Family(StrEnum):
    """Whose library was measured."""

    NCCL = "nccl"
    RCCL = "rccl"


@dataclass(frozen=True, slots=True)
class NcclRank:
    """One rank. host: numbered from 0 as they appear. address: None where printed as [0x19]."""

    rank: int
    host: int
    device: int
    address: Bdf | None
    name: str


@dataclass(frozen=True, slots=True)
class NcclHalf:
    """One half of a row. wrong: elements that came out wrong; None where not checked."""

    time_ns: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    wrong: int | None


@dataclass(frozen=True, slots=True)
class NcclRow:
    """One message size. root: None where there is none. A half that was not run is None."""

    size_bytes: int
    count: int
    type: str
    operation: str
    root: int | None
    out_of_place: NcclHalf | None
    in_place: NcclHalf | None

    def halves(self) -> tuple[NcclHalf, ...]:
        """Those that were run."""
        return tuple(half for half in (self.out_of_place, self.in_place) if half is not None)


@dataclass(frozen=True, slots=True)
class NcclTests:
    """One run. None where the tool does not say.

    collective: "all_reduce" and so on. library_version: as NCCL numbers it (22809).
    iterations, warmups: of each size. ranks: JSON lists the first rank of each process only.
    is_correct: whether data were checked and all of it was right; None where not checked.
    average_bus_bytes_per_s: the tool's own, over all sizes and halves.
    """

    family: Family
    version: str | None
    library_version: str | None
    collective: str | None
    gpus: int | None
    warmups: int | None
    iterations: int | None
    ranks: tuple[NcclRank, ...]
    rows: tuple[NcclRow, ...]
    is_correct: bool | None
    average_bus_bytes_per_s: float | None
    gaps: tuple[Gap, ...]

    def peak_bus_bytes_per_s(self) -> float:
        """The greatest of all sizes and halves."""
        return max(half.bus_bytes_per_s for row in self.rows for half in row.halves())


def argv(
    gpus: int, *, largest_bytes: int, warmups: int = 10, iterations: int = 100
) -> tuple[str, ...]:
    """The command of an all-reduce from 8 bytes up, doubling; data are checked."""
    return (
        "all_reduce_perf", "-b", "8", "-e", str(largest_bytes), "-f", "2", "-g", str(gpus),
        "-w", str(warmups), "-n", str(iterations), "-c", "1",
    )  # fmt: skip


def parse(text: str) -> NcclTests:
    """The one run of an output, text or the file of -J. Raises ParseError."""
    from homenode.tools.nccl_tests_json import parse_json
    from homenode.tools.nccl_tests_text import parse_text

    return parse_json(text) if text.lstrip().startswith("{") else parse_text(text)
