"""homenode plan: where a VM goes on a host, why, and its tuned document. [I/O]"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.bdf import Bdf
from homenode.cli.options import JsonOption, LspciOption
from homenode.cli.placing_options import (
    LAYOUT,
    PLACING,
    VM,
    AfterOption,
    BalanceOption,
    CellOption,
    DeviceLocalityOption,
    DeviceOption,
    EmulatorOption,
    GpusOption,
    HostReserveOption,
    HousekeepingOption,
    KeepVcpusOption,
    LayoutOption,
    MaxNodesOption,
    MemoryModeOption,
    ObjectiveOption,
    PageSizeOption,
    PciGranularityOption,
    PolicyOption,
    ReserveDefinedOption,
    ReservePusOption,
    ResultsOption,
    SparePortsOption,
    UnequalCellsOption,
    WithoutNvlinkOption,
    cells_of,
    host_reserve_of,
    size_bytes,
)
from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.indices import NodeIndex
from homenode.plan.layout import (
    GuestCells,
    GuestPcie,
    MemoryBinding,
    Pinning,
    Siblings,
    ThreadPolicy,
)
from homenode.plan.request import (
    DeviceLocality,
    EmulatorPolicy,
    MemoryMode,
    PciGranularity,
    Policy,
)
from homenode.units import MIB

if TYPE_CHECKING:
    from homenode.plan.manual import ManualRanges
    from homenode.plan.options import PlanOptions

_MANUAL = "Manual mode (explicit PU lists; needs no host)"
_OUTPUT = "Output"


def plan(
    document: Annotated[
        str, typer.Argument(metavar="VM.xml", help="The domain document; - for standard input.")
    ],
    layout: LayoutOption = "auto",
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
    objective: ObjectiveOption = None,
    results: ResultsOption = None,
    vcpus: Annotated[
        int | None, typer.Option(help="vCPUs, instead of the document's.", rich_help_panel=VM)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory, instead of the document's: 64GiB.", rich_help_panel=VM
        ),
    ] = None,
    page_size: PageSizeOption = None,
    device: DeviceOption = None,
    gpus: GpusOption = None,
    policy: PolicyOption = Policy.CORES_FIRST,
    balance: BalanceOption = None,
    max_nodes: MaxNodesOption = None,
    device_locality: DeviceLocalityOption = DeviceLocality.PREFER,
    cell: CellOption = None,
    after: AfterOption = None,
    keep_vcpus: KeepVcpusOption = False,
    without_nvlink: WithoutNvlinkOption = False,
    unequal_cells: UnequalCellsOption = False,
    mixed_kinds: Annotated[
        bool,
        typer.Option(
            "--mixed-kinds",
            help="Mixing P and E cores in one VM needs no warning.",
            rich_help_panel=PLACING,
        ),
    ] = False,
    memory_mode: MemoryModeOption = MemoryMode.STRICT,
    allow_memory_node: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="This CPU-less node may serve as ordinary memory.",
            rich_help_panel=PLACING,
        ),
    ] = None,
    reserve_pus: ReservePusOption = "",
    reserve_defined: ReserveDefinedOption = False,
    host_reserve: HostReserveOption = None,
    housekeeping_pus: HousekeepingOption = "",
    replaces: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DOMAIN",
            help="This domain of the host makes room: the VM takes its place.",
            rich_help_panel=PLACING,
        ),
    ] = None,
    emulator: EmulatorOption = EmulatorPolicy.AUTO,
    emulator_pus: Annotated[
        str | None,
        typer.Option(
            metavar="PUS",
            help="Exactly these PUs for QEMU's own threads.",
            rich_help_panel=PLACING,
        ),
    ] = None,
    thread_policy: Annotated[
        ThreadPolicy | None,
        typer.Option(help="OpenStack's spelling of the pinning switch.", rich_help_panel=PLACING),
    ] = None,
    pci_granularity: PciGranularityOption = PciGranularity.CELL,
    spare_ports: SparePortsOption = 0,
    pinning: Annotated[
        Pinning | None, typer.Option(help="Override the preset's pinning.", rich_help_panel=LAYOUT)
    ] = None,
    siblings: Annotated[
        Siblings | None,
        typer.Option(help="Override what the guest sees of SMT.", rich_help_panel=LAYOUT),
    ] = None,
    cells: Annotated[
        GuestCells | None, typer.Option(help="Override the guest's cells.", rich_help_panel=LAYOUT)
    ] = None,
    pcie: Annotated[
        GuestPcie | None,
        typer.Option(help="Override the guest's PCIe tree.", rich_help_panel=LAYOUT),
    ] = None,
    memory_binding: Annotated[
        MemoryBinding | None,
        typer.Option(help="Override how memory is bound.", rich_help_panel=LAYOUT),
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
            metavar="MIB", help="Memory in MiB, instead of the document's.", rich_help_panel=VM
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
    from homenode.plan.options import PlanOptions

    if memory is not None and memory_mib is not None:
        raise UsageError("--memory and --memory-mib: expected one of the two, found both")
    host_cores, host_memory_bytes = host_reserve_of(host_reserve)
    options = PlanOptions(
        layout=layout,
        objective=objective,
        pinning=pinning,
        siblings=siblings,
        cells=cells,
        pcie=pcie,
        memory_binding=memory_binding,
        thread_policy=thread_policy,
        vcpus=vcpus,
        memory_bytes=size_bytes("--memory", memory) if memory_mib is None else memory_mib * MIB,
        page_bytes=size_bytes("--page-size", page_size),
        devices=tuple(Bdf.parse(text, "--device") for text in device or ()),
        gpu_count=gpus,
        policy=policy,
        balance=balance,
        max_nodes=max_nodes,
        device_locality=device_locality,
        explicit_cells=cells_of(cell),
        host_cores=host_cores,
        host_memory_bytes=host_memory_bytes,
        housekeeping_pus=CpuSet.parse(housekeeping_pus, "--housekeeping-pus"),
        keep_vcpus=keep_vcpus,
        mixed_kinds=mixed_kinds,
        unequal_cells=unequal_cells,
        memory_mode=memory_mode,
        memory_nodes_allowed=tuple(map(NodeIndex, allow_memory_node or ())),
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
        options,
        planning.Sources(
            tuple(host or ()),
            lspci,
            tuple(after or ()),
            _ranges(node_pus, sibling_pus, options),
            tuple(results or ()),
        ),
        planning.Outputs(output, name, diff, save_plan, svg, quiet, json),
    )


def _ranges(
    node_pus: list[str] | None, sibling_pus: list[str] | None, options: "PlanOptions"
) -> "ManualRanges | None":
    if not node_pus:
        if sibling_pus:
            raise UsageError("--sibling-pus: expected --node-pus beside it, found none")
        return None
    from homenode.plan.manual import ManualRanges

    return ManualRanges(
        tuple(CpuSet.parse(text, "--node-pus") for text in node_pus),
        tuple(CpuSet.parse(text, "--sibling-pus") for text in sibling_pus or ()),
        options.emulator_pus,
    )
