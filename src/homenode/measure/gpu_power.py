"""GpuPower: the power of each GPU while a step runs, by the first installed tool. [I/O]

nvidia-smi and rocm-smi print addresses; amd-smi numbers GPUs in its own order. Each prints a table
with a head; "N/A" is not a value. Other columns have power in their names, too: power_management.
Sources: nvidia-smi(1); ROCm/rocm_smi_lib, python_smi_tools/rocm_smi.py, showPower; ROCm/amdsmi,
amdsmi_cli/amdsmi_commands.py, metric_gpu, and amdsmi_logger.py, flatten_dict. amd-smi of ROCm 6 has
no --power in a VM (amdsmi_parser.py): there nothing is known without rocm-smi.
"""

import csv
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from statistics import median

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import ParseError, ToolError
from homenode.measure.access.machine import Machine

COMMANDS = {
    argv[0]: argv
    for argv in (
        ("nvidia-smi", "--query-gpu=pci.bus_id,power.draw", "--format=csv,nounits"),
        ("rocm-smi", "--showbus", "--showpower", "--csv"),
        ("amd-smi", "metric", "--power", "--csv"),
    )
}
EVERY_S = 1.0
"""Shorter steps have no result: their GPUs have hardly started."""

_DRAWN = re.compile(r"power\.draw( \[w\])?|socket_power|.*graphics package power \(w\)")
"""Heads of the columns that have it, in small letters."""

_MAX_S = 10.0
_MAX_WATTS = 1e5


class GpuPower(Struct, frozen=True):
    """Power of the GPUs while a test ran."""

    watts: float  # median over a step
    device: Bdf | None = None
    index: int | None = None  # position in the tool's order, if it has no address


def parse_power(text: str) -> Iterator[GpuPower]:
    """Yield the present power of each GPU that reports it.

    >>> [one.watts for one in parse_power("gpu,socket_power\\n0,141\\n1,N/A\\n")]
    [141.0]
    """
    lines = [line for line in text.splitlines() if "," in line]
    for row in csv.DictReader(lines, skipinitialspace=True):
        fields = {name.lower(): value for name, value in row.items() if name and value}
        address = next((fields[name] for name in fields if name.startswith("pci")), None)
        watts = next((fields[name] for name in fields if _DRAWN.fullmatch(name)), "")
        with suppress(ValueError, ParseError):
            drawn_watts = float(watts)
            if not 0 < drawn_watts < _MAX_WATTS:
                continue
            if address is not None:
                yield GpuPower(drawn_watts, Bdf.parse(address))
            else:
                yield GpuPower(drawn_watts, index=int(fields.get("gpu", "")))


@contextmanager
def sample_power(machine: Machine) -> Iterator[list[GpuPower]]:
    """Sample the power repeatedly; the list has the medians after the block."""
    powers: list[GpuPower] = []
    taken: dict[tuple[Bdf | None, int | None], list[float]] = {}
    programs = machine.find_installed(COMMANDS)
    tool = next((name for name in COMMANDS if name in programs), None)
    if tool is None:
        yield powers
        return
    end_event = threading.Event()

    def sample() -> None:
        # If a tool fails, there is no result, and the step continues.
        with suppress(ToolError, csv.Error):
            while not end_event.wait(EVERY_S):
                text = machine.run(COMMANDS[tool], _MAX_S).stdout_or_raise()
                for reading in () if end_event.is_set() else parse_power(text):
                    taken.setdefault((reading.device, reading.index), []).append(reading.watts)

    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            yield powers
        finally:
            end_event.set()
        sampler.result()
    powers += [GpuPower(median(watts), *key) for key, watts in taken.items()]
