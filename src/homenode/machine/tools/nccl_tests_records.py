"""Records of nccl-tests and rccl-tests: one run, its ranks and its rows."""

from enum import StrEnum

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.gap import Gap

SOURCE = "nccl-tests"
MAX_ROWS = 4096


class Family(StrEnum):
    """Whose library was measured."""

    NCCL = "nccl"
    RCCL = "rccl"


class NcclRank(Struct, frozen=True):
    """One rank. host: numbered from 0 as they appear. address: None where printed as [0x19]."""

    rank: int
    host: int
    device: int
    address: Bdf | None
    name: str


class NcclHalf(Struct, frozen=True):
    """One half of a row. wrong: elements that came out wrong; None where not checked."""

    time_ns: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    wrong: int | None


class NcclRow(Struct, frozen=True):
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


class NcclTests(Struct, frozen=True):
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
