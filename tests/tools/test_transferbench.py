"""Output of TransferBench p2p."""

import pytest

from homenode.errors import ParseError
from homenode.machine.tools.transferbench import TransferPlace, parse
from homenode.measure.figures.amd import of_transferbench
from homenode.measure.model import Reader
from homenode.measure.step_reading import tool_of
from tests.mutations import MUTATIONS, survives

# Laid out as PeerToPeer.hpp prints it; the figures are made up.
OUTPUT = """\
TransferBench v1.62.00 (with NIC support)
===============================================================
[Common]                              (Suppress by setting HIDE_ENV=1)
ALWAYS_VALIDATE      =            0 : Validating after all iterations
[P2P Related]
USE_GPU_DMA          =            1 : Using GPU-DMA as GPU executor

Bytes Per Direction 67108864
Unidirectional copy peak bandwidth GB/s [Local read / Remote write] (GPU-Executor: DMA)
 SRC+EXE\\DST    CPU 00    CPU 01       GPU 00    GPU 01
  CPU 00  ->     24.37     11.62        22.34     13.25
  CPU 01  ->     11.80     24.62        13.11     22.05

  GPU 00  ->     55.82     31.79      2104.11     48.34
  GPU 01  ->     32.00     54.31        48.42       N/A
                           CPU->CPU  CPU->GPU  GPU->CPU  GPU->GPU
Averages (During UniDir):     11.71     17.69     43.48     48.38

Bidirectional copy peak bandwidth GB/s [Local read / Remote write] (GPU-Executor: DMA)
     SRC\\DST    CPU 00    CPU 01       GPU 00    GPU 01
  CPU 00  ->       N/A     10.00        21.00     12.00
  CPU 00 <-        N/A     10.10        50.00     30.00
  CPU 00 <->       N/A     20.10        71.00     42.00

  CPU 01  ->     10.20       N/A        12.10     20.90
  CPU 01 <-      10.30       N/A        30.10     49.90
  CPU 01 <->     20.50       N/A        42.20     70.80

  GPU 00  ->     50.10     30.20          N/A     45.00
  GPU 00 <-      21.10     12.30          N/A     45.10
  GPU 00 <->     71.20     42.50          N/A     90.10

  GPU 01  ->     30.30     49.80        45.20       N/A
  GPU 01 <-      12.40     20.80        45.30       N/A
  GPU 01 <->     42.70     70.60        90.50       N/A
                           CPU->CPU  CPU->GPU  GPU->CPU  GPU->GPU
Averages (During  BiDir):     10.15     33.27     33.16     45.15
"""


def test_both_matrices_are_read() -> None:
    run = parse(OUTPUT)
    assert (run.version, run.executor, run.reads_remotely) == ("1.62.00", "DMA", False)
    cells = {(c.source, c.destination, c.is_bidirectional): c.bytes_per_s for c in run.cells}
    assert (
        cells[TransferPlace(is_gpu=True, index=0), TransferPlace(is_gpu=False, index=0), False]
        == 55.82e9
    )
    assert (
        cells[TransferPlace(is_gpu=False, index=1), TransferPlace(is_gpu=True, index=0), False]
        == 13.11e9
    )
    assert (
        cells[TransferPlace(is_gpu=True, index=1), TransferPlace(is_gpu=True, index=0), True]
        == 45.2e9
    )
    assert (
        TransferPlace(is_gpu=True, index=1),
        TransferPlace(is_gpu=True, index=1),
        False,
    ) not in cells
    assert run.gaps == ()


def test_commas_and_rows_of_iterations_are_read() -> None:
    lines = []
    for line in OUTPUT.split("\n"):
        lines.append(line)
        if "GPU 00  ->" in line and "2104" in line:
            lines += [line.replace("->", word) for word in ("min", "max", " sd")]
    cells = parse("\n".join(lines)).cells
    assert cells == parse(OUTPUT).cells
    commas = [
        ",".join(line.split())
        .replace("CPU,0", "CPU 0")
        .replace("GPU,0", "GPU 0")
        .replace(",->", " ->")
        .replace(",<", " <")
        if "PU 0" in line
        else line
        for line in OUTPUT.split("\n")
        if "Averages" not in line and "->CPU" not in line
    ]
    assert parse("\n".join(commas)).cells == cells


def test_figures_say_the_node_and_who_copied() -> None:
    figures = of_transferbench(parse(OUTPUT))
    to_host = {
        (s.index, s.node): s.value
        for s in figures.samples
        if (s.metric, s.variant) == ("d2h-bandwidth", None)
    }
    assert to_host == {(0, 0): 55.82e9, (0, 1): 31.79e9, (1, 0): 32.0e9, (1, 1): 54.31e9}
    assert {s.variant for s in figures.samples if s.metric == "h2d-bandwidth"} == {
        "cpu threads",
        "cpu threads both ways",
    }
    assert {s.variant for s in figures.samples if s.metric == "p2p-bandwidth"} == {
        "to GPU 0",
        "to GPU 1",
        "both ways to GPU 0",
        "both ways to GPU 1",
    }
    assert any(gap.subject == "GPU addresses" for gap in figures.gaps)


def test_gpus_that_read_remotely_copy_from_the_host() -> None:
    text = OUTPUT.replace("[Local read / Remote write]", "[Remote read / Local write]")
    text = text.replace("SRC+EXE\\DST", "SRC\\EXE+DST")
    figures = of_transferbench(parse(text))
    variants = {s.variant for s in figures.samples if s.metric == "h2d-bandwidth"}
    assert variants == {None, "both ways"}


def test_its_output_is_known_by_its_words() -> None:
    assert tool_of(OUTPUT) is Reader.TRANSFER_BENCH


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("CPU 01  ->     11.80", "CPU 00  ->     11.80", "each pair once"),
        ("     24.62        13.11", "                  13.11", "4 values"),
        ("55.82", "-5.82", "a bandwidth or N/A"),
        ("CPU 01  ->     11.80", "CPU 07  ->     11.80", "a device of the header"),
        ("copy peak bandwidth", "copy bandwidth", "a matrix"),
    ],
)
def test_what_is_no_such_run_is_reported(old: str, new: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse(OUTPUT.replace(old, new))


def test_damaged_output_gives_a_run_or_a_parse_error() -> None:
    survives(lambda text: of_transferbench(parse(text)), OUTPUT, MUTATIONS)
