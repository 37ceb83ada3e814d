"""Output of rocm-bandwidth-test."""

import pytest

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.machine.tools.rocm_bandwidth_test import parse
from tests.mutations import MUTATIONS, survives

MATRICES = """\
.......................................
          RocmBandwidthTest Version: 2.6.0

          Launch Command is: rocm-bandwidth-test (rocm_bandwidth -a + rocm_bandwidth -A)


          Device: 0,  AMD EPYC 9575F 64-Core Processor
          Device: 1,  AMD Instinct MI350X,  GPU-9f50716172fd5d40,  0d:0.0

          Inter-Device Access

          D/D       0         1

          0         1         1

          1         1         1


          Inter-Device Numa Distance

          D/D       0         1

          0         0         N/A

          1         20        0


          Unidirectional copy peak bandwidth GB/s

          D/D       0           1

          0         N/A         55.177

          1         56.151      1594.097


          Bdirectional copy peak bandwidth GB/s

          D/D       0           1

          0         N/A         93.053

          1         93.053      N/A
"""

PAIR = """\
================    Bidirectional Benchmark Result    ================
================ Src Device Id: 0 Src Device Type: Cpu ================
================ Dst Device Id: 2 Dst Device Type: Gpu ================

Data Size      Avg Time(us)   Avg BW(GB/s)   Min Time(us)   Peak BW(GB/s)
1 KB           4.920          0.416          4.640          0.441
512 MB         10485.760      102.4          10240.000      104.858
"""


def test_rows_are_sources_and_columns_destinations() -> None:
    one_way, both_ways = parse(MATRICES).matrices
    assert one_way.cells[0][0] is None
    assert one_way.cells[0][1] == pytest.approx(55.177e9)
    assert list(one_way.cells[1]) == pytest.approx([56.151e9, 1594.097e9])
    assert (one_way.is_bidirectional, both_ways.is_bidirectional) == (False, True)


def test_a_gpu_keeps_its_address_and_not_its_identity() -> None:
    run = parse(MATRICES)
    assert run.devices[1].address == Bdf(0, 0x0D, 0, 0)
    assert run.devices[0].address is None
    assert "9f50716172fd5d40" not in repr(run)
    assert not run.gaps


def test_a_pair_is_read_by_size() -> None:
    small, large = parse(PAIR).copies
    assert (small.size_bytes, large.size_bytes) == (1 << 10, 512 << 20)
    assert (large.source, large.destination, large.source_is_cpu) == (0, 2, True)
    assert large.peak_bytes_per_s == pytest.approx(104.858e9)
    assert large.is_bidirectional


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a matrix"),
        (MATRICES.replace("56.151      1594.097", "56.151"), "the row of device 1 with 2 values"),
        (MATRICES[: MATRICES.index("1         56.151")], "2 rows"),
        (PAIR.replace("104.858", "0.000"), "above 0"),
        (PAIR[PAIR.index("Data") :], "a source and a destination"),
        (MATRICES + MATRICES, "one run"),
    ],
)
def test_output_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(text)


@pytest.mark.parametrize("text", [MATRICES, PAIR])
def test_damaged_output_is_read_or_refused_and_nothing_else(text: str) -> None:
    assert survives(parse, text, MUTATIONS) > 0
