"""PlacingOptions: options that say how a VM is placed, which plan, apply and trial share. [I/O]"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.errors import InputError, UsageError
from homenode.indices import NodeIndex
from homenode.objective import Objective
from homenode.plan.request import (
    Balance,
    CellRequest,
    DeviceLocality,
    EmulatorPolicy,
    MemoryMode,
    PciGranularity,
    Policy,
)
from homenode.units import parse_bytes

if TYPE_CHECKING:
    from homenode.topology import Host

VM = "The VM (instead of what the document says)"
PLACING = "Placement"
LAYOUT = "Layout switches (override the preset)"

LayoutOption = Annotated[
    str,
    typer.Option(
        "--layout",
        "-l",
        metavar="PRESET",
        help="default, pin, pin-bound, pin-numa, pin-numa-smt, pin-numa-pci, pin-numa-pci-smt; the "
        "study's names; or auto: what the evidence recommends.",
    ),
]

ObjectiveOption = Annotated[
    Objective | None,
    typer.Option(
        "--objective",
        help="With --layout auto: what the VM is for. Default: what its devices suggest.",
    ),
]

ResultsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--results",
        metavar="DIR",
        help="With --layout auto: results that decide as well, beside published figures.",
    ),
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
        help="With SMT: keep the vCPU count, use half the cores.",
        rich_help_panel=PLACING,
    ),
]

WithoutNvlinkOption = Annotated[
    bool,
    typer.Option(
        "--without-nvlink", help="Allow GPU sets that have no NVLink.", rich_help_panel=PLACING
    ),
]

UnequalCellsOption = Annotated[
    bool,
    typer.Option(
        "--unequal-cells",
        help="Take unequal cells for as good as equal ones.",
        rich_help_panel=PLACING,
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

HostReserveOption = Annotated[
    str | None,
    typer.Option(
        "--host-reserve",
        metavar="cores=N,memory=SIZE",
        help="What stays with the host: whole cores, and memory of each node. Default: 1 core and "
        "the larger of 2 GiB and 2 %.",
        rich_help_panel=PLACING,
    ),
]

HousekeepingOption = Annotated[
    str,
    typer.Option(
        "--housekeeping-pus",
        metavar="PUS",
        help="PUs for the emulators of several VMs, with --emulator housekeeping.",
        rich_help_panel=PLACING,
    ),
]

DeviceLocalityOption = Annotated[
    DeviceLocality,
    typer.Option(
        "--device-locality",
        help="What to do about GPUs whose own node is not chosen.",
        rich_help_panel=PLACING,
    ),
]

CellOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cell",
        metavar="vcpus=N,memory=SIZE[,node=N]",
        help="One guest cell as you want it; once for each cell.",
        rich_help_panel=PLACING,
    ),
]

AfterOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--after",
        metavar="PLAN.json",
        help="This saved plan of another VM counts as if that VM ran on the host.",
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


def cells_of(texts: list[str] | None) -> tuple[CellRequest, ...]:
    """The cells of --cell, in the order given. Raises UsageError."""
    told = [_parts("--cell", text, ("vcpus", "memory"), ("node",)) for text in texts or ()]
    return tuple(
        CellRequest(
            _count("--cell: vcpus", parts["vcpus"]),
            size_bytes("--cell: memory", parts["memory"]) or 0,
            NodeIndex(_count("--cell: node", parts["node"])) if "node" in parts else None,
        )
        for parts in told
    )


def host_reserve_of(text: str | None) -> tuple[int | None, int | None]:
    """(cores, bytes of each node) of --host-reserve; None for what it leaves out."""
    if text is None:
        return None, None
    parts = _parts("--host-reserve", text, (), ("cores", "memory"))
    if not parts:
        raise UsageError(
            "--host-reserve: expected cores=N or memory=SIZE, found neither",
            hint="--host-reserve cores=2,memory=8GiB",
        )
    cores = _count("--host-reserve: cores", parts["cores"]) if "cores" in parts else None
    memory = parts.get("memory")
    return cores, 0 if memory == "0" else size_bytes("--host-reserve: memory", memory)


def hosts_after(hosts: "tuple[Host, ...]", plans: Sequence[Path] | None) -> "tuple[Host, ...]":
    """The hosts with the VMs of the saved plans of --after. Raises InputError, UsageError."""
    if not plans:
        return hosts
    from homenode.cli.terminal import read_file
    from homenode.plan.stored import read_plan, with_planned

    hint = "homenode plan --save-plan writes one"
    read = [(str(path), read_file(path, "a saved plan", hint=hint)) for path in plans]
    return with_planned(hosts, [(source, read_plan(text, source)) for source, text in read])


def _parts(
    option: str, text: str, needed: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, str]:
    """The key=value parts of an option, each key once."""
    known = (*needed, *optional)
    parts: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        key, _, value = (half.strip() for half in part.partition("="))
        if key not in known or not value or key in parts:
            raise UsageError(
                f"{option}: expected {', '.join(f'{one}=...' for one in known)}, each once, "
                f"found {part!r}"
            )
        parts[key] = value
    missing = [one for one in needed if one not in parts]
    if missing:
        raise UsageError(
            f"{option} {text!r}: expected {' and '.join(f'{one}=...' for one in missing)}, "
            "found none"
        )
    return parts


def _count(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{option}: expected a whole number, found {text!r}")
    return int(text)


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
