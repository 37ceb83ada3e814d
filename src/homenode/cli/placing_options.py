"""Records of the options that say how a VM is placed, which plan, apply and trial share. [I/O]"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.completion import domain_names, layouts
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.indices import NodeIndex
from homenode.input_files import read_input
from homenode.objective import Objective
from homenode.plan.options import (
    Balance,
    DeviceLocality,
    EmulatorPolicy,
    MemoryMode,
    PartialReserve,
    PciGranularity,
    PlanOptions,
    Policy,
    SiblingsSource,
    cell_of,
    host_device,
    refuse_objective,
    reserve_of,
)
from homenode.units import parse_bytes
from homenode.vm.layout import (
    AUTO_SUMMARY,
    SUMMARIES,
    GuestCells,
    GuestPcie,
    MemoryBinding,
    Pinning,
    Siblings,
    ThreadPolicy,
)

if TYPE_CHECKING:
    from homenode.plan.options import ManualRanges, PlanOptions
    from homenode.topology import Host

_vm = partial(typer.Option, rich_help_panel="The VM (instead of what its document says)")
_placement = partial(typer.Option, rich_help_panel="Placement")
_switch = partial(typer.Option, rich_help_panel="Layout switches (override the preset)")
_manual = partial(typer.Option, rich_help_panel="PU lists by hand")

_LAYOUT_LINES = "\n".join(
    f"{name:<17} {summary}" for name, summary in (("auto", AUTO_SUMMARY), *SUMMARIES.items())
)

PageSizeOption = Annotated[
    str | None, _vm("--page-size", metavar="SIZE", help="Huge pages for its memory: 2MiB, 1GiB.")
]

PciGranularityOption = Annotated[
    PciGranularity, _switch("--pci-granularity", help="What gets an expander bus of its own.")
]


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """Which layout, and on what evidence `auto` decides."""

    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            "-l",
            metavar="NAME",
            help=f"How the guest is laid out on the host. Default: auto.\n{_LAYOUT_LINES}\n"
            "homenode layouts shows what each changes.",
            autocompletion=layouts,
        ),
    ] = "auto"
    objective: Annotated[
        Objective | None,
        typer.Option(
            "--objective",
            help="With --layout auto: what the VM is for. Default: what its devices suggest.",
        ),
    ] = None
    results: Annotated[
        tuple[str, ...],
        typer.Option(
            "--results",
            metavar="DIR",
            help="With --layout auto: results to use besides the published figures.",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class VmOptions:
    """What the VM has, where that is not what its document says."""

    vcpus: Annotated[int | None, _vm("--vcpus", metavar="N", help="vCPUs.")] = None
    memory: Annotated[str | None, _vm("--memory", metavar="SIZE", help="Memory: 64GiB.")] = None
    page_size: PageSizeOption = None
    device: Annotated[
        tuple[str, ...],
        _vm(
            "--device",
            metavar="BDF|UUID",
            help="Pass this host device, or mediated device, through as well.",
        ),
    ] = ()
    gpus: Annotated[
        int | None, _vm("--gpus", metavar="N", help="Choose N GPUs of the host for the VM.")
    ] = None
    gpu_profile: Annotated[
        str | None,
        _vm(
            "--gpu-profile",
            metavar="NAME",
            help="With --gpus: parts of GPUs of this vGPU type, such as H100-1-10C.",
        ),
    ] = None
    with_nics: Annotated[
        bool, _vm("--with-nics", help="Pass the NIC next to each of its GPUs as well.")
    ] = False
    with_nvswitches: Annotated[
        bool,
        _vm("--with-nvswitches", help="With all GPUs of a board: pass its NVSwitches as well."),
    ] = False


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Which nodes, cores and PUs the planner may choose."""

    policy: Annotated[
        Policy, _placement("--policy", help="How many cores the nodes must have.")
    ] = Policy.CORES_FIRST
    balance: Annotated[
        Balance | None,
        _placement(
            "--balance",
            help="Among equals: the emptiest nodes, or the tightest fit. Default: pack with GPUs.",
        ),
    ] = None
    max_nodes: Annotated[
        int | None, _placement("--max-nodes", metavar="N", help="At most N host nodes.")
    ] = None
    device_locality: Annotated[
        DeviceLocality,
        _placement("--device-locality", help="What to do about GPUs whose own node is not chosen."),
    ] = DeviceLocality.PREFER
    cell: Annotated[
        tuple[str, ...],
        _placement(
            "--cell",
            metavar="vcpus=N,memory=SIZE[,node=N]",
            help="One guest cell as you want it; once for each cell.",
        ),
    ] = ()
    after: Annotated[
        tuple[Path, ...],
        _placement(
            "--after",
            metavar="PLAN.json",
            help="The VM of this saved plan counts as running on the host.",
        ),
    ] = ()
    replaces: Annotated[
        tuple[str, ...],
        _placement(
            "--replaces",
            metavar="DOMAIN",
            help="Plan as if this domain of the host were gone.",
            autocompletion=domain_names,
        ),
    ] = ()
    keep_vcpus: Annotated[
        bool, _placement("--keep-vcpus", help="With SMT: keep the vCPU count, use half the cores.")
    ] = False
    without_nvlink: Annotated[
        bool, _placement("--without-nvlink", help="Allow GPU sets that have no NVLink.")
    ] = False
    unequal_cells: Annotated[
        bool, _placement("--unequal-cells", help="vCPUs next to devices, in cells of any size.")
    ] = False
    mixed_kinds: Annotated[
        bool, _placement("--mixed-kinds", help="Allow P and E cores in one VM without a warning.")
    ] = False
    memory_mode: Annotated[
        MemoryMode, _placement("--memory-mode", help="How numatune binds memory.")
    ] = MemoryMode.STRICT
    allow_memory_node: Annotated[
        tuple[int, ...],
        _placement(
            "--allow-memory-node",
            metavar="N",
            help="This CPU-less node may serve as ordinary memory.",
        ),
    ] = ()
    reserve_pus: Annotated[
        str,
        _placement(
            "--reserve-pus", metavar="PUS", help="PUs that the VM must leave free: 0-3,64-67."
        ),
    ] = ""
    reserve_defined: Annotated[
        bool,
        _placement("--reserve-defined", help="Pinned domains that are shut off keep their PUs."),
    ] = False
    host_reserve: Annotated[
        str | None,
        _placement(
            "--host-reserve",
            metavar="cores=N,memory=SIZE",
            help="What stays with the host: whole cores, and memory of each node. Default: 1 core "
            "and the larger of 2 GiB and 2 %.",
        ),
    ] = None
    emulator: Annotated[
        EmulatorPolicy, _placement("--emulator", help="Where QEMU's own threads go.")
    ] = EmulatorPolicy.AUTO
    emulator_pus: Annotated[
        str | None,
        _placement(
            "--emulator-pus", metavar="PUS", help="Exactly these PUs for QEMU's own threads."
        ),
    ] = None
    housekeeping_pus: Annotated[
        str,
        _placement(
            "--housekeeping-pus",
            metavar="PUS",
            help="PUs for the emulators of several VMs, with --emulator housekeeping.",
        ),
    ] = ""


class SiblingsOption(StrEnum):
    """The siblings switch, and what only a document can say."""

    AS_THEY_WERE = Siblings.AS_THEY_WERE.value
    HIDDEN = Siblings.HIDDEN.value
    EXPOSED = Siblings.EXPOSED.value
    AS_DOCUMENT = "as-document"


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """The layout's switches one by one."""

    pinning: Annotated[Pinning | None, _switch("--pinning", help="Override the pinning.")] = None
    thread_policy: Annotated[
        ThreadPolicy | None,
        _switch("--thread-policy", help="The pinning, in OpenStack's spelling."),
    ] = None
    siblings: Annotated[
        SiblingsOption | None,
        _switch(
            "--siblings",
            help="Override what the guest sees of SMT; as-document: the threads of its topology.",
        ),
    ] = None
    cells: Annotated[GuestCells | None, _switch("--cells", help="Override the guest's cells.")] = (
        None
    )
    pcie: Annotated[GuestPcie | None, _switch("--pcie", help="Override the guest's PCIe tree.")] = (
        None
    )
    memory_binding: Annotated[
        MemoryBinding | None, _switch("--memory-binding", help="Override how memory is bound.")
    ] = None
    pci_granularity: PciGranularityOption = PciGranularity.CELL
    spare_ports: Annotated[
        int, _switch("--spare-ports", metavar="N", help="Empty root ports on each expander bus.")
    ] = 0


@dataclass(frozen=True, slots=True)
class ManualOptions:
    """PU lists that the user gives, instead of a host to plan for."""

    node_pus: Annotated[
        tuple[str, ...],
        _manual(
            "--node-pus", metavar="PUS", help="Pin to these PUs of one node; once for each node."
        ),
    ] = ()
    sibling_pus: Annotated[
        tuple[str, ...],
        _manual(
            "--sibling-pus",
            metavar="PUS",
            help="Their SMT siblings in the same order, for layouts that pin all PUs.",
        ),
    ] = ()

    def ranges(self) -> "ManualRanges | None":
        """The lists; None where there are none. Raises UsageError."""
        if not self.node_pus:
            if self.sibling_pus:
                raise UsageError("--sibling-pus: expected --node-pus as well, found none")
            return None
        from homenode.plan.options import ManualRanges

        return ManualRanges(
            tuple(CpuSet.parse(text, "--node-pus") for text in self.node_pus),
            tuple(CpuSet.parse(text, "--sibling-pus") for text in self.sibling_pus),
        )


def plan_options(
    layout: LayoutOptions, vm: VmOptions, placement: PlacementOptions, switches: SwitchOptions
) -> "PlanOptions":
    """What the planner is asked for. Raises UsageError, naming the option."""
    emulator_pus = placement.emulator_pus
    options = PlanOptions(
        layout=layout.layout,
        objective=layout.objective,
        pinning=switches.pinning,
        siblings=_siblings(switches.siblings),
        cells=switches.cells,
        pcie=switches.pcie,
        memory_binding=switches.memory_binding,
        thread_policy=switches.thread_policy,
        vcpus=vm.vcpus,
        memory_bytes=size_bytes("--memory", vm.memory),
        page_bytes=size_bytes("--page-size", vm.page_size),
        devices=tuple(host_device(text) for text in vm.device),
        gpu_count=vm.gpus,
        gpu_profile=vm.gpu_profile,
        with_nics=vm.with_nics,
        with_nvswitches=vm.with_nvswitches,
        policy=placement.policy,
        balance=placement.balance,
        max_nodes=placement.max_nodes,
        device_locality=placement.device_locality,
        explicit_cells=tuple(cell_of(text) for text in placement.cell),
        host_reserve=PartialReserve()
        if placement.host_reserve is None
        else reserve_of(placement.host_reserve),
        housekeeping_pus=CpuSet.parse(placement.housekeeping_pus, "--housekeeping-pus"),
        keep_vcpus=placement.keep_vcpus,
        mixed_kinds=placement.mixed_kinds,
        unequal_cells=placement.unequal_cells,
        memory_mode=placement.memory_mode,
        memory_nodes_allowed=tuple(map(NodeIndex, placement.allow_memory_node)),
        reserved_pus=CpuSet.parse(placement.reserve_pus, "--reserve-pus"),
        reserve_defined=placement.reserve_defined,
        replaces=placement.replaces,
        emulator_policy=placement.emulator,
        emulator_pus=None if emulator_pus is None else CpuSet.parse(emulator_pus, "--emulator-pus"),
        pci_granularity=switches.pci_granularity,
        spare_ports=switches.spare_ports,
        without_nvlink=placement.without_nvlink,
    )
    refuse_objective(options)
    return options


def _siblings(typed: SiblingsOption | None) -> Siblings | SiblingsSource | None:
    if typed is None:
        return None
    if typed is SiblingsOption.AS_DOCUMENT:
        return SiblingsSource.AS_DOCUMENT
    return Siblings(typed.value)


def hosts_after(hosts: "tuple[Host, ...]", plans: Sequence[Path]) -> "tuple[Host, ...]":
    """The hosts with the VMs of the saved plans of --after. Raises InputError, UsageError."""
    if not plans:
        return hosts
    from homenode.plan.stored import read_plan, with_planned

    hint = "homenode plan --save-plan writes one"
    read = [(str(path), read_input(path, "a saved plan", hint=hint)) for path in plans]
    return with_planned(hosts, [(source, read_plan(text, source)) for source, text in read])


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
