"""LoadSampling: links of GPUs under a copy load, and the power of GPUs while a step runs. [I/O]

Idle GPUs lower the speed of their links. The load is the first available program: nvbandwidth,
rocm-bandwidth-test, homenode's program in a Python with PyTorch.

The power is read by the first installed tool. nvidia-smi and rocm-smi print addresses; amd-smi
numbers GPUs in its own order. Each prints a table with a head; "N/A" is not a value. Other columns
have power in their names, too: power_management.
Sources: nvidia-smi(1); ROCm/rocm_smi_lib, python_smi_tools/rocm_smi.py, showPower; ROCm/amdsmi,
amdsmi_cli/amdsmi_commands.py, metric_gpu, and amdsmi_logger.py, flatten_dict. amd-smi of ROCm 6 has
no --power in a VM (amdsmi_parser.py): there nothing is known without rocm-smi.
"""

import csv
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import ParseError, ToolError, UsageError
from homenode.machine.discover.readings import parse_link_speed, read_link_width
from homenode.machine.pci import PciDevice, PciLink
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools import torch_report
from homenode.machine.topology import Host
from homenode.measure.access.machine import LocalMachine, Machine
from homenode.measure.gpu_tests import COPIES
from homenode.measure.tool_setup import ask_for_torch, run_program
from homenode.process import ProgramResult, find_program, run

LOADS: tuple[tuple[str, ...], ...] = (
    ("nvbandwidth", "-t", "host_to_device_memcpy_ce", "-b", "1024", "-i", "20"),
    ("rocm-bandwidth-test", "-H"),
)
"""Programs that copy to every GPU in turn."""

PYTHON = "python3"
_TORCH_LOAD = (PYTHON, "-", "host-copies", "--seconds", "2")
_H2D = "h2d-bandwidth"
_ASK_S = 60.0


class LoadProgram(Struct, frozen=True):
    argv: tuple[str, ...]
    # argv is of a Python that runs torch_copies, and prints homenode.torch/1
    is_torch: bool = False

    def run(self, timeout_s: float) -> ProgramResult:
        """Run it on this machine to its end. Raises like process.run."""
        if self.is_torch:
            return run_program(LocalMachine(), self.argv, timeout_s, COPIES)
        return run(self.argv, timeout_s)


class LoadCopies(Struct, frozen=True):
    gpus: frozenset[Bdf] | None = None  # to which it copied, None if it does not report it
    h2d: Mapping[Bdf, float] = field(default_factory=dict)  # bytes/s, host to device


def load_program(command: Sequence[str] | None) -> LoadProgram:
    """Return the program that makes the load. Raises UsageError if none is installed."""
    for argv in (tuple(command),) if command else LOADS:
        if find_program(argv[0]) is not None:
            return LoadProgram(argv)
    if not command and _has_torch():
        return LoadProgram(_TORCH_LOAD, is_torch=True)
    names = " or ".join(argv[0] for argv in LOADS)
    expected = command[0] if command else f"{names}, or {PYTHON} with PyTorch"
    raise UsageError(
        f"--under-load: {expected} not found",
        hint='name a program that copies to the GPUs: --load-command "PROGRAM ARGUMENTS"',
    )


def parse_load_report(program: LoadProgram, output: str) -> LoadCopies:
    """Return the program's report on its GPUs. Raises ToolError if it copied to no GPU."""
    if not program.is_torch:
        return LoadCopies()
    h2d: dict[Bdf, list[float]] = {}
    for document in torch_report.parse(output):
        address_of = {device.index: device.address for device in document.devices}
        for result in document.results:
            address = address_of.get(result.device)
            if result.metric == _H2D and result.variant is None and address is not None:
                h2d.setdefault(Bdf.parse(address), []).extend(result.samples)
    if not h2d:
        raise ToolError(
            f"{' '.join(program.argv)}: it copied nothing to a GPU",
            hint='name a program that copies to the GPUs: --load-command "PROGRAM ARGUMENTS"',
        )
    return LoadCopies(frozenset(h2d), {gpu: median(rates) for gpu, rates in h2d.items() if rates})


def _has_torch() -> bool:
    try:
        return ask_for_torch(LocalMachine(), PYTHON, _ASK_S).stdout.strip() == "True"
    except ToolError:
        return False


_EVERY_S = 0.05
_MAX_S = 600.0


def sample_under_load(
    host: Host, snapshot: Snapshot, program: LoadProgram
) -> tuple[Host, LoadCopies]:
    """Return the host with the fastest link of each function during the program. Raises ToolError
    if the program fails, because an idle machine would count as busy."""
    devices = [device.bdf for device in host.pci_devices if device.link is not None]
    fastest: dict[Bdf, tuple[float, int]] = {}
    end_event = threading.Event()

    def sample() -> None:
        while not end_event.is_set():
            for bdf in devices:
                now = _read_current_link(snapshot, bdf)
                if now is not None:
                    best = fastest.get(bdf, now)
                    fastest[bdf] = (max(best[0], now[0]), max(best[1], now[1]))
            end_event.wait(_EVERY_S)

    # The program is run here and not there: only the main thread hears Ctrl-C, and ends it.
    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            output = program.run(_MAX_S).stdout_or_raise()
        finally:
            end_event.set()
        sampler.result()
    busy = replace(
        host, pci_devices=tuple(_set_link(device, fastest) for device in host.pci_devices)
    )
    return busy, parse_load_report(program, output)


def _set_link(device: PciDevice, fastest: dict[Bdf, tuple[float, int]]) -> PciDevice:
    seen_link = fastest.get(device.bdf)
    if seen_link is None or device.link is None:
        return device
    link = PciLink(seen_link[0], seen_link[1], device.link.max_gt_per_s, device.link.max_width)
    return replace(device, link=link)


def _read_current_link(snapshot: Snapshot, bdf: Bdf) -> tuple[float, int] | None:
    directory = f"/sys/bus/pci/devices/{bdf}"
    speed = parse_link_speed((snapshot.read_text(f"{directory}/current_link_speed") or "").strip())
    width = read_link_width(snapshot, f"{directory}/current_link_width")
    return None if speed is None or width is None else (speed, width)


POWER_COMMANDS = {
    argv[0]: argv
    for argv in (
        ("nvidia-smi", "--query-gpu=pci.bus_id,power.draw", "--format=csv,nounits"),
        ("rocm-smi", "--showbus", "--showpower", "--csv"),
        ("amd-smi", "metric", "--power", "--csv"),
    )
}
POWER_EVERY_S = 1.0
"""Shorter steps have no result: their GPUs have hardly started."""

_DRAWN = re.compile(r"power\.draw( \[w\])?|socket_power|.*graphics package power \(w\)")
"""Heads of the columns that have it, in small letters."""

_MAX_READING_S = 10.0
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
    readings: dict[tuple[Bdf | None, int | None], list[float]] = {}
    programs = machine.find_installed(POWER_COMMANDS)
    tool = next((name for name in POWER_COMMANDS if name in programs), None)
    if tool is None:
        yield powers
        return
    end_event = threading.Event()

    def sample() -> None:
        # If a tool fails, there is no result, and the step continues.
        with suppress(ToolError, csv.Error):
            while not end_event.wait(POWER_EVERY_S):
                text = machine.run(POWER_COMMANDS[tool], _MAX_READING_S).stdout_or_raise()
                for reading in () if end_event.is_set() else parse_power(text):
                    readings.setdefault((reading.device, reading.index), []).append(reading.watts)

    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            yield powers
        finally:
            end_event.set()
        sampler.result()
    powers += [GpuPower(median(watts), *key) for key, watts in readings.items()]
