"""PlacingOptions: options that say how a VM is placed, which plan, apply and trial share."""

from typing import Annotated

import typer

from homenode.errors import InputError, UsageError
from homenode.objective import Objective
from homenode.plan.request import Balance, EmulatorPolicy, MemoryMode, PciGranularity, Policy
from homenode.units import parse_bytes

VM = "The VM (instead of what the document says)"
PLACING = "Placement"
LAYOUT = "Layout switches (override the preset)"

ObjectiveOption = Annotated[
    Objective | None, typer.Option("--objective", help="With --layout auto: what the VM is for.")
]

PageSizeOption = Annotated[
    str | None,
    typer.Option(
        "--page-size", metavar="SIZE", help="Huge pages to back it: 2MiB, 1GiB.", rich_help_panel=VM
    ),
]

DeviceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--device", metavar="BDF", help="Pass this host device through as well.", rich_help_panel=VM
    ),
]

GpusOption = Annotated[
    int | None,
    typer.Option(
        "--gpus", metavar="N", help="Choose N GPUs of the host for the VM.", rich_help_panel=VM
    ),
]

PolicyOption = Annotated[
    Policy,
    typer.Option("--policy", help="How many cores the nodes must have.", rich_help_panel=PLACING),
]

BalanceOption = Annotated[
    Balance | None,
    typer.Option(
        "--balance",
        help="Among equals: the emptiest nodes, or the tightest fit. Default: pack with GPUs.",
        rich_help_panel=PLACING,
    ),
]

MaxNodesOption = Annotated[
    int | None,
    typer.Option("--max-nodes", help="At most so many host nodes.", rich_help_panel=PLACING),
]

KeepVcpusOption = Annotated[
    bool,
    typer.Option(
        "--keep-vcpus",
        help="With siblings exposed: halve the cores, not double.",
        rich_help_panel=PLACING,
    ),
]

WithoutNvlinkOption = Annotated[
    bool,
    typer.Option(
        "--without-nvlink", help="Take GPUs that are no partition.", rich_help_panel=PLACING
    ),
]

UnequalCellsOption = Annotated[
    bool,
    typer.Option(
        "--unequal-cells", help="Allow cells with different vCPU counts.", rich_help_panel=PLACING
    ),
]

MemoryModeOption = Annotated[
    MemoryMode,
    typer.Option("--memory-mode", help="How numatune binds memory.", rich_help_panel=PLACING),
]

ReservePusOption = Annotated[
    str,
    typer.Option(
        "--reserve-pus",
        metavar="PUS",
        help="PUs that the VM must leave alone: 0-3,64-67.",
        rich_help_panel=PLACING,
    ),
]

ReserveDefinedOption = Annotated[
    bool,
    typer.Option(
        "--reserve-defined",
        help="Pinned domains that are shut off keep their PUs.",
        rich_help_panel=PLACING,
    ),
]

EmulatorOption = Annotated[
    EmulatorPolicy,
    typer.Option("--emulator", help="Where QEMU's own threads go.", rich_help_panel=PLACING),
]

PciGranularityOption = Annotated[
    PciGranularity,
    typer.Option(
        "--pci-granularity", help="What gets an expander bus of its own.", rich_help_panel=LAYOUT
    ),
]

SparePortsOption = Annotated[
    int,
    typer.Option(
        "--spare-ports",
        metavar="N",
        help="Empty root ports on each expander bus.",
        rich_help_panel=LAYOUT,
    ),
]


def size_bytes(option: str, text: str | None) -> int | None:
    """Bytes of a size that must name its unit: "64" could mean MiB or GiB to whoever types it.

    Raises UsageError.
    """
    if text is None:
        return None
    if text.strip().isdigit():
        raise UsageError(
            f"{option}: expected a size with its unit, found {text!r}", hint=f"{text}GiB"
        )
    try:
        return parse_bytes(text)
    except InputError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hint) from None
