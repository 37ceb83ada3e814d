"""Which sets of GPUs Fabric Manager can join by NVLink; others are refused by name."""

import pytest

from homenode.bdf import Bdf
from homenode.findings import Finding, Severity
from homenode.machine.tools.nvidia_smi import NvidiaQuery
from homenode.machine.tools.nvidia_smi import parse_query as parse
from homenode.nccl.assemble import check_fabric
from homenode.plan.devices.fabric import (
    PARTITIONS,
    Board,
    find_board,
    is_partition,
    partitions_of_size,
)
from tests.shared_data import needs_shared, shared

SIZES = {
    Board.HGX_A100: {16: 1, 8: 6, 4: 4, 2: 8, 1: 16},
    Board.HGX_H100: {8: 1, 4: 2, 2: 4, 1: 8},
    Board.HGX_B200: {8: 1, 4: 2, 2: 4, 1: 8},
}
"""Partitions of each size, and so 35, 15 and 15 in all."""


@pytest.mark.parametrize("board", Board)
def test_the_table_has_each_boards_partitions(board: Board) -> None:
    table = PARTITIONS[board]
    assert len(set(table)) == len(table)
    sizes = list(map(len, table))
    assert {size: sizes.count(size) for size in set(sizes)} == SIZES[board]


def test_pairs_differ_from_board_to_board() -> None:
    assert is_partition(Board.HGX_H100, (3, 1)) and not is_partition(Board.HGX_H100, (1, 2))
    assert is_partition(Board.HGX_B200, (1, 2)) and not is_partition(Board.HGX_B200, (1, 3))
    assert is_partition(Board.HGX_A100, (16,))


@pytest.mark.parametrize(
    ("name", "board"),
    [
        ("NVIDIA A100-SXM4-80GB", Board.HGX_A100),
        *((f"NVIDIA {name}", Board.HGX_H100) for name in ("H100 80GB HBM3", "H200", "H20")),
        ("NVIDIA B200", Board.HGX_B200),
        *((f"NVIDIA {name}", None) for name in ("A100-PCIE-40GB", "A100 80GB PCIe", "H200 NVL")),
        *((f"NVIDIA {name}", None) for name in ("H100 PCIe", "GH200 480GB", "GB200")),
        *((name, None) for name in ("NVIDIA GeForce RTX 4090", None)),
    ],
)
def test_the_board_follows_from_the_gpus_name(name: str | None, board: Board | None) -> None:
    assert find_board([name] * 8) is board
    assert find_board([name, "NVIDIA Tesla"]) is None


def query(modules: tuple[int | None, ...], name: str = "NVIDIA H100 80GB HBM3") -> NvidiaQuery:
    gpus = "".join(
        f'<gpu id="00000000:{0x10 + i:02X}:00.0"><product_name>{name}</product_name>'
        + ("" if m is None else f"<platformInfo><module_id>{m}</module_id></platformInfo>")
        + "</gpu>"
        for i, m in enumerate(modules)
    )
    return parse(f"<nvidia_smi_log>{gpus}</nvidia_smi_log>")


def gpu(index: int) -> Bdf:
    return Bdf(0, 0x10 + index, 0, 0)


def found(gpus: tuple[int, ...], asked: NvidiaQuery) -> list[Finding]:
    return list(check_fabric(map(gpu, gpus), asked, "qx.xml"))


SHUFFLED = query((7, 5, 6, 8, 1, 3, 4, 2))
"""Modules of the published HGX H100, in the order of its bus addresses."""


def test_neighbours_on_the_bus_need_not_be_a_partition() -> None:
    assert not found((0, 1), SHUFFLED)  # modules 7 and 5
    (finding,) = found((1, 2), SHUFFLED)  # modules 5 and 6
    assert (finding.id, finding.severity) == ("nccl-no-partition", Severity.WARNING)
    assert "0000:10:00.0, 0000:11:00.0" in finding.expected and "modules 5,6" in finding.observed


def test_whole_boards_halves_and_single_gpus_are_partitions() -> None:
    for gpus in (tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7), (6,)):
        assert not found(gpus, SHUFFLED)
    (finding,) = found((0, 1, 2), SHUFFLED)
    assert "none of that size" in finding.expected


def test_sets_of_a_size_are_named_by_address() -> None:
    free = {gpu(i): m for i, m in enumerate((7, 5, 6, 8))}
    assert partitions_of_size(Board.HGX_H100, 2, free) == ((gpu(0), gpu(1)), (gpu(2), gpu(3)))
    assert partitions_of_size(Board.HGX_H100, 8, free) == ()


def test_gpus_without_a_module_are_inconclusive_and_other_boards_say_nothing() -> None:
    assert [f.severity for f in found((0, 1), query((None, None)))] == [Severity.INCONCLUSIVE]
    assert not found((0, 1), query((1, 2), "NVIDIA H100 PCIe"))


@needs_shared
def test_the_published_query_of_an_hgx_h100_gives_its_partitions() -> None:
    asked = parse(shared("machines/nvidia-smi/qx-h100.xml").read_text())
    bdfs = [g.bdf for g in asked.gpus]
    assert not list(check_fabric(bdfs[:4], asked, "qx"))
    assert [f.id for f in check_fabric(bdfs[2:6], asked, "qx")] == ["nccl-no-partition"]
