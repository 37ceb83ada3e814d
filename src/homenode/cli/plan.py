"""homenode plan: where a VM goes on a host, why, and its tuned document. [I/O]"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.bdf import Bdf
from homenode.cli.options import JsonOption, LspciOption
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.plan.layout import (
    GuestCells,
    GuestPcie,
    MemoryBinding,
    Pinning,
    Siblings,
    ThreadPolicy,
)
from homenode.plan.published import Objective
from homenode.plan.request import (
    Balance,
    EmulatorPolicy,
    MemoryMode,
    PciGranularity,
    Policy,
)
from homenode.units import MIB, parse_bytes

if TYPE_CHECKING:
    from homenode.plan.manual import ManualRanges
    from homenode.plan.wishes import Wishes

_VM = "The VM (instead of what the document says)"
_PLACING = "Placement"
_LAYOUT = "Layout switches (override the preset)"
_MANUAL = "Manual mode (explicit PU lists; needs no host)"
_OUTPUT = "Output"


def plan(
    document: Annotated[
        str, typer.Argument(metavar="VM.xml", help="The domain document; - for standard input.")
    ],
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            "-l",
            metavar="PRESET",
            help="default, pin, pin-bound, pin-numa, pin-numa-smt, pin-numa-pci, "
            "pin-numa-pci-smt, or auto with --objective.",
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="SOURCE",
            help="The host: a snapshot, /sys tree, hwloc XML, host.toml, or a shipped host's name. "
            "Default: this machine. Given several times, the hosts are ranked.",
        ),
    ] = None,
    lspci: LspciOption = None,
    objective: Annotated[
        Objective | None, typer.Option(help="With --layout auto: what the VM is for.")
    ] = None,
    vcpus: Annotated[
        int | None, typer.Option(help="vCPUs, instead of the document's.", rich_help_panel=_VM)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory, instead of the document's: 64GiB.", rich_help_panel=_VM
        ),
    ] = None,
    page_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Huge pages to back it: 2MiB, 1GiB.", rich_help_panel=_VM
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BDF", help="Pass this host device through as well.", rich_help_panel=_VM
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Choose N GPUs of the host for the VM.", rich_help_panel=_VM
        ),
    ] = None,
    policy: Annotated[
        Policy, typer.Option(help="How many cores the nodes must have.", rich_help_panel=_PLACING)
    ] = Policy.CORES_FIRST,
    balance: Annotated[
        Balance,
        typer.Option(
            help="Among equals: the emptiest nodes, or the tightest fit.", rich_help_panel=_PLACING
        ),
    ] = Balance.SPREAD,
    max_nodes: Annotated[
        int | None, typer.Option(help="At most so many host nodes.", rich_help_panel=_PLACING)
    ] = None,
    keep_vcpus: Annotated[
        bool,
        typer.Option(
            "--keep-vcpus",
            help="With siblings exposed: halve the cores, not double.",
            rich_help_panel=_PLACING,
        ),
    ] = False,
    without_nvlink: Annotated[
        bool,
        typer.Option(
            "--without-nvlink", help="Take GPUs that are no partition.", rich_help_panel=_PLACING
        ),
    ] = False,
    unequal_cells: Annotated[
        bool,
        typer.Option(
            "--unequal-cells",
            help="Allow cells with different vCPU counts.",
            rich_help_panel=_PLACING,
        ),
    ] = False,
    mixed_kinds: Annotated[
        bool,
        typer.Option(
            "--mixed-kinds",
            help="Allow P and E cores in one VM, in own cells.",
            rich_help_panel=_PLACING,
        ),
    ] = False,
    memory_mode: Annotated[
        MemoryMode, typer.Option(help="How numatune binds memory.", rich_help_panel=_PLACING)
    ] = MemoryMode.STRICT,
    allow_memory_node: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="This CPU-less node may serve as ordinary memory.",
            rich_help_panel=_PLACING,
        ),
    ] = None,
    reserve_pus: Annotated[
        str,
        typer.Option(
            metavar="PUS",
            help="PUs that the VM must leave alone: 0-3,64-67.",
            rich_help_panel=_PLACING,
        ),
    ] = "",
    reserve_defined: Annotated[
        bool,
        typer.Option(
            "--reserve-defined",
            help="Pinned domains that are shut off keep their PUs.",
            rich_help_panel=_PLACING,
        ),
    ] = False,
    replaces: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DOMAIN",
            help="This domain of the host makes room: the VM takes its place.",
            rich_help_panel=_PLACING,
        ),
    ] = None,
    emulator: Annotated[
        EmulatorPolicy, typer.Option(help="Where QEMU's own threads go.", rich_help_panel=_PLACING)
    ] = EmulatorPolicy.AUTO,
    emulator_pus: Annotated[
        str | None,
        typer.Option(
            metavar="PUS",
            help="Exactly these PUs for QEMU's own threads.",
            rich_help_panel=_PLACING,
        ),
    ] = None,
    thread_policy: Annotated[
        ThreadPolicy | None,
        typer.Option(help="OpenStack's spelling of the pinning switch.", rich_help_panel=_PLACING),
    ] = None,
    pci_granularity: Annotated[
        PciGranularity,
        typer.Option(help="What gets an expander bus of its own.", rich_help_panel=_LAYOUT),
    ] = PciGranularity.CELL,
    spare_ports: Annotated[
        int,
        typer.Option(
            metavar="N", help="Empty root ports on each expander bus.", rich_help_panel=_LAYOUT
        ),
    ] = 0,
    pinning: Annotated[
        Pinning | None, typer.Option(help="Override the preset's pinning.", rich_help_panel=_LAYOUT)
    ] = None,
    siblings: Annotated[
        Siblings | None,
        typer.Option(help="Override what the guest sees of SMT.", rich_help_panel=_LAYOUT),
    ] = None,
    cells: Annotated[
        GuestCells | None, typer.Option(help="Override the guest's cells.", rich_help_panel=_LAYOUT)
    ] = None,
    pcie: Annotated[
        GuestPcie | None,
        typer.Option(help="Override the guest's PCIe tree.", rich_help_panel=_LAYOUT),
    ] = None,
    memory_binding: Annotated[
        MemoryBinding | None,
        typer.Option(help="Override how memory is bound.", rich_help_panel=_LAYOUT),
    ] = None,
    node_pus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PUS",
            help="Manual mode: PUs of one node; once for each node.",
            rich_help_panel=_MANUAL,
        ),
    ] = None,
    sibling_pus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PUS",
            help="Manual mode: their SMT siblings, in the same order.",
            rich_help_panel=_MANUAL,
        ),
    ] = None,
    memory_mib: Annotated[
        int | None,
        typer.Option(
            metavar="MIB", help="Memory in MiB, instead of the document's.", rich_help_panel=_VM
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT.xml",
            help="Write the tuned document here.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="COPY",
            help="Tune a copy with its own name, UUID, NVRAM and MACs.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print the change as a diff.", rich_help_panel=_OUTPUT)
    ] = False,
    save_plan: Annotated[
        Path | None,
        typer.Option(metavar="P.json", help="Write the plan here.", rich_help_panel=_OUTPUT),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw host and plan here.", rich_help_panel=_OUTPUT),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Do not print the explanation.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Plan a VM's placement on a host, explain it, and write the tuned domain document.

    Nothing on any machine changes: the tuned document is a file. `homenode restore OUT.xml` gives
    the original back.
    """
    from homenode.cli import planning
    from homenode.plan.wishes import Wishes

    if memory is not None and memory_mib is not None:
        raise UsageError("--memory and --memory-mib: expected one of the two, found both")
    wishes = Wishes(
        layout=layout,
        objective=objective,
        pinning=pinning,
        siblings=siblings,
        cells=cells,
        pcie=pcie,
        memory_binding=memory_binding,
        thread_policy=thread_policy,
        vcpus=vcpus,
        memory_bytes=_size("--memory", memory) if memory_mib is None else memory_mib * MIB,
        page_bytes=_size("--page-size", page_size),
        devices=tuple(Bdf.parse(text, "--device") for text in device or ()),
        gpu_count=gpus,
        policy=policy,
        balance=balance,
        max_nodes=max_nodes,
        keep_vcpus=keep_vcpus,
        mixed_kinds=mixed_kinds,
        unequal_cells=unequal_cells,
        memory_mode=memory_mode,
        memory_nodes_allowed=tuple(allow_memory_node or ()),
        reserved_pus=CpuSet.parse(reserve_pus, "--reserve-pus"),
        reserve_defined=reserve_defined,
        replaces=tuple(replaces or ()),
        emulator_policy=emulator,
        emulator_pus=None if emulator_pus is None else CpuSet.parse(emulator_pus, "--emulator-pus"),
        pci_granularity=pci_granularity,
        spare_ports=spare_ports,
        without_nvlink=without_nvlink,
    )
    planning.run(
        document,
        wishes,
        planning.Sources(tuple(host or ()), lspci, _ranges(node_pus, sibling_pus, wishes)),
        planning.Outputs(output, name, diff, save_plan, svg, quiet, json),
    )


def _size(option: str, text: str | None) -> int | None:
    """Bytes of a size that must name its unit: "64" could mean MiB or GiB to whoever types it."""
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


def _ranges(
    node_pus: list[str] | None, sibling_pus: list[str] | None, wishes: "Wishes"
) -> "ManualRanges | None":
    if not node_pus:
        if sibling_pus:
            raise UsageError("--sibling-pus: expected --node-pus beside it, found none")
        return None
    from homenode.plan.manual import ManualRanges

    return ManualRanges(
        tuple(CpuSet.parse(text, "--node-pus") for text in node_pus),
        tuple(CpuSet.parse(text, "--sibling-pus") for text in sibling_pus or ()),
        wishes.emulator_pus,
    )
