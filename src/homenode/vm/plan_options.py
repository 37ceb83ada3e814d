"""PlanOptions: the user's options for a placement, with their command-line syntax."""

import re
from collections.abc import Collection
from enum import StrEnum
from functools import partial
from typing import Annotated

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import UsageError, out_of_range
from homenode.objective import Objective
from homenode.option import Flag, Opt, format_size, parse_key_values, parse_whole, size_bytes
from homenode.vm.layout import GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.vm.model import MAX_VCPUS, VmCell

MAX_SPARE_PORTS = 16

AUTO = "auto"
"""The layout name that lets the objective choose."""

VM = "The VM (instead of the definition's)"
PLACEMENT = "Placement"
SWITCHES = "Layout switches (override the preset)"
BY_HAND = "Manual CPU lists"

_of_vm, _vm_flag = partial(Opt, panel=VM), partial(Flag, panel=VM)
_placing = partial(Opt, panel=PLACEMENT, rare=True)
_placing_flag = partial(Flag, panel=PLACEMENT, rare=True)
_switch, _by_hand = partial(Opt, panel=SWITCHES, rare=True), partial(Opt, panel=BY_HAND, rare=True)


class Policy(StrEnum):
    """The cores that nodes must have. XAPI's names: best effort, prio_mem_only, any."""

    CORES_FIRST = "cores-first"
    MEMORY_FIRST = "memory-first"
    SPREAD = "spread"
    ANY = "any"


class Balance(StrEnum):
    """The choice among otherwise equal placements."""

    SPREAD = "spread"  # most free whole cores, then most free memory
    PACK = "pack"  # tightest fit


class MemoryMode(StrEnum):
    """libvirt's numatune modes."""

    STRICT = "strict"
    INTERLEAVE = "interleave"
    PREFERRED = "preferred"


class EmulatorPolicy(StrEnum):
    """The CPUs of QEMU's own threads."""

    AUTO = "auto"  # cores without vCPUs near the devices; idle siblings of vCPU cores last
    HOUSEKEEPING = "housekeeping"  # the host's named cores, shared by the emulators of several VMs
    SHARE = "share"  # on the vCPUs' own CPUs
    NONE = "none"  # not pinned


class PciGranularity(StrEnum):
    """The unit that gets its own expander bus."""

    CELL = "cell"
    ROOT_COMPLEX = "root-complex"
    SWITCH = "switch"  # and the switches are mirrored


class DefinitionSiblings(StrEnum):
    """The condition for a definition's siblings (<topology threads='2'>) to replace whole cores."""

    IGNORED = "ignored"  # the layout decides
    WHEN_SHORT = "when-short"  # before whole cores cost the host its last core, or mix kinds
    ALWAYS = "always"


class DeviceLocality(StrEnum):
    """The treatment of GPUs outside the chosen nodes."""

    REQUIRE = "require"  # reject the placement
    PREFER = "prefer"  # compare placements by it
    IGNORE = "ignore"  # place the VM as if it had no devices


def make_cell(vcpus: int, memory_bytes: int, node: int | None = None) -> VmCell:
    """Return a cell of --guest-node. node: host node, None = any, in order."""
    nodes = () if node is None else (NodeIndex(node),)
    count = CpuSet(range(vcpus))
    return VmCell(id=0, vcpus=count, memory_bytes=memory_bytes, host_nodes=nodes)


def sum_cells(cells: Collection[VmCell]) -> tuple[int, int]:
    """Return the total vCPUs and bytes of memory."""
    return sum(len(cell.vcpus) for cell in cells), sum(cell.memory_bytes for cell in cells)


class PartialReserve(Struct, frozen=True):
    """The user's reserve for the host; None = the description's or the default."""

    cores: int | None = None
    memory_bytes: int | None = None


def parse_guest_node(text: str, option: str = "--guest-node") -> VmCell:
    """Parse a --guest-node value. Raises UsageError."""
    parts = parse_key_values(option, text, ("vcpus", "memory"), ("node",))
    vcpus = parse_whole(f"{option}: vcpus", parts["vcpus"])
    if vcpus > MAX_VCPUS:
        raise out_of_range(f"{option} vcpus", str(vcpus), 1, MAX_VCPUS)
    memory_bytes = size_bytes(parts["memory"], f"{option}: memory")
    node = parse_whole(f"{option}: node", parts["node"]) if "node" in parts else None
    return make_cell(vcpus, memory_bytes, node)


def reserve_of(text: str, option: str = "--host-reserve") -> PartialReserve:
    """Parse a --host-reserve value. Raises UsageError."""
    parts = parse_key_values(option, text, (), ("cores", "memory"))
    if not parts:
        raise UsageError(
            f"{option}: missing cores=N or memory=SIZE",
            hint=f"{option} cores=2,memory=8GiB",
        )
    cores = parse_whole(f"{option}: cores", parts["cores"]) if "cores" in parts else None
    memory = parts.get("memory")
    if memory is None:
        return PartialReserve(cores)
    return PartialReserve(cores, 0 if memory == "0" else size_bytes(memory, f"{option}: memory"))


def format_cell(cell: VmCell) -> str:
    """Format a cell as an option value."""
    node = "".join(f",node={index}" for index in cell.host_nodes)
    return f"vcpus={len(cell.vcpus)},memory={cell.memory_bytes}B{node}"


def reserve_text(reserve: PartialReserve) -> str:
    """Format a reserve as an option value."""
    cores = [] if reserve.cores is None else [f"cores={reserve.cores}"]
    memory = [] if reserve.memory_bytes is None else [f"memory={reserve.memory_bytes}B"]
    return ",".join([*cores, *memory])


def parse_host_device(text: str, option: str = "--device") -> Bdf | str:
    """Parse an address, a mediated device's UUID, or gpu0. Raises UsageError and ParseError."""
    from homenode.machine.pci import normalize_uuid  # the records of PCI devices, for a UUID alone

    if text.startswith("MIG-"):
        raise UsageError(
            f"{option} {text}: a MIG instance serves processes of the host, not VMs",
            hint="create a vGPU on it, and name that: virsh nodedev-list --cap mdev",
        )
    if re.fullmatch("gpu[0-9]{1,4}", text):
        return text
    return normalize_uuid(text) or Bdf.parse(text, option)


class PlanOptions(Struct, frozen=True):
    """Every option of `homenode plan` that shapes the placement; None = as in the definition or the
    layout. See docs/reference/commands/plan.md.

    Options:
      layout: The guest's layout; default, pin, pin-bound, pin-numa, pin-numa-smt, pin-numa-pci,
        pin-numa-pci-smt; the study's vcpu_pin, vcpu_pin_numa, vcpu_pin_numa_smt, A, B, C; or auto:
        chosen from results or the built-in table; see layouts.md.
      objective: Objective of --layout auto; multi-gpu, memory-bandwidth, latency,
        gpu-copy, throughput, density. Default: chosen by its devices.
      vcpus: Number of vCPUs. Default: the definition's.
      memory_bytes: Memory of the VM, with a unit: 64GiB. Default: the definition's.
      page_bytes: Size of the VM's huge pages: 2MiB, 1GiB. Default: the definition's.
      devices: Pass through a function, mediated device, or gpu0; may be repeated. gpu0 is the first
        GPU of the host. The definition's devices stay.
      gpu_count: Choose N GPUs of the host; they replace the definition's GPUs. Whole nodes,
        switches and NVSwitch groups stay together. Default: the definition's GPUs.
      gpu_profile: With --gpus: parts of GPUs of this vGPU type (NVIDIA A40-12Q, A40-12Q,
        NVIDIA_A40-12Q). Default: whole GPUs, and virtual functions without a type.
      with_nics: Also pass through the nearest NIC of each GPU; it is on the same switch, else on
        the same root complex. Default: the definition's NICs.
      with_nvswitches: Also pass through the NVSwitches of the board; the VM must have all its GPUs.
        Default: the definition's.
      policy: Rule for choosing nodes; cores-first, memory-first, spread, any.
      balance: Among equal placements: spread takes the emptiest nodes, pack the tightest fit.
        Default: pack for a VM with GPUs, else spread.
      max_nodes: Maximum number of host NUMA nodes. Default: no limit.
      device_locality: If a GPU's own node is not chosen: require rejects the placement, prefer
        ranks it lower, ignore places the VM as if it had no GPUs.
      explicit_cells: Define a guest NUMA node; repeat for each. vcpus counts siblings if the guest
        sees them. Needs a layout with guest NUMA nodes. Default: like the host nodes.
      replaces: Treat this domain's CPUs, memory and devices as free; may be repeated. Default: the
        domain of the same name or UUID.
      keep_vcpus: With -smt, keep the vCPUs and use half the cores.
        Default: on if the definition shows siblings.
      without_nvlink: On a board with NVSwitches, choose any GPUs, also without NVLink between them.
        Default: only partitions.
      unequal_cells: Put vCPUs near the devices, even if the nodes' shares become unequal.
      mixed_kinds: Allow P and E cores in one VM, on separate guest NUMA nodes; no warning if the P
        cores do not suffice.
      memory_mode: Mode of <numatune>: strict, interleave, preferred.
      memory_nodes_allowed: Use this CPU-less node as ordinary memory; may be repeated. GPU memory
        nodes are rejected.
      reserved_pus: CPUs that the VM must leave free: 0-3,64-67.
      reserve_defined: Keep CPUs, memory and devices free for every domain that is shut off.
        Default: only for domains that homenode placed.
      host_reserve: Reserve for the host: whole cores without vCPUs, and memory of each node. Either
        may be omitted. Default: [reserve] of the host.toml; else 1 core, and the larger of 2 GiB
        and 2 %.
      emulator_policy: CPUs for QEMU's own threads: auto (cores without vCPUs that free GPUs do
        not need, near the devices), housekeeping (the host's housekeeping CPUs), share (the vCPUs'
        CPUs), none (not pinned).
      emulator_pus: Pin QEMU's own threads to exactly these CPUs.
      housekeeping_pus: CPUs for the emulators of several VMs, with --emulator housekeeping or if no
        core is left for an emulator; vCPUs do not use them. Default: the CPUs in the host.toml.
      pinning: How vCPUs are pinned: none, node (each vCPU may run on any CPU of its nodes),
        one-cpu-per-core, all-cpus. Default: the layout's.
      siblings: How the guest sees SMT siblings: keep (as the definition's <topology>, pinned to
        siblings), hidden, exposed. Default: the layout's.
      cells: NUMA nodes of the guest: single, host (as the chosen host nodes). Default: the
        layout's.
      pcie: PCIe tree of the guest: keep, host (an expander bus per node). Default: the layout's.
      memory_binding: How the VM's memory is bound: keep, bound, bound-per-node. Default: the
        layout's.
      pci_granularity: Create an expander bus for each cell, root-complex or switch (which also
        mirrors the switches). Default: cell; with --layout auto switch if a GPU and its RDMA NIC
        share a switch.
      spare_ports: Empty root ports on each expander bus, 0 to 16.
    """

    layout: Annotated[str, Opt("--layout -l", "NAME", complete="layouts")] = AUTO
    # also set by `auto`
    objective: Annotated[Objective | None, Opt("--objective", "NAME")] = None
    vcpus: Annotated[int | None, _of_vm("--vcpus", "N")] = None
    memory_bytes: Annotated[
        int | None, _of_vm("--memory", "SIZE", parse=size_bytes, show=format_size)
    ] = None
    page_bytes: Annotated[
        int | None, _of_vm("--page-size", "SIZE", parse=size_bytes, show=format_size)
    ] = None
    devices: Annotated[
        tuple[Bdf | str, ...], _of_vm("--device", "BDF|UUID|gpuN", parse=parse_host_device)
    ] = ()
    gpu_count: Annotated[int | None, _of_vm("--gpus", "N")] = None
    gpu_profile: Annotated[str | None, _of_vm("--gpu-profile", "NAME", rare=True)] = None
    with_nics: Annotated[bool, _vm_flag("--with-nics")] = False
    with_nvswitches: Annotated[bool, _vm_flag("--with-nvswitches", rare=True)] = False
    policy: Annotated[Policy, _placing("--policy", "NAME")] = Policy.CORES_FIRST
    balance: Annotated[Balance | None, _placing("--balance", "NAME")] = None
    max_nodes: Annotated[int | None, _placing("--max-nodes", "N", rare=False)] = None
    device_locality: Annotated[DeviceLocality, _placing("--device-locality", "NAME")] = (
        DeviceLocality.PREFER
    )
    explicit_cells: Annotated[
        tuple[VmCell, ...],
        _placing(
            "--guest-node", "vcpus=N,memory=SIZE[,node=N]", parse=parse_guest_node, show=format_cell
        ),
    ] = ()
    replaces: Annotated[
        tuple[str, ...], _placing("--ignore-domain", "DOMAIN", complete="domain_names")
    ] = ()
    keep_vcpus: Annotated[bool, _placing_flag("--keep-vcpus", rare=False)] = False
    without_nvlink: Annotated[bool, _placing_flag("--allow-no-nvlink")] = False
    unequal_cells: Annotated[bool, _placing_flag("--allow-unequal-nodes")] = False
    mixed_kinds: Annotated[bool, _placing_flag("--allow-hybrid-cores")] = False
    memory_mode: Annotated[MemoryMode, _placing("--memory-mode", "NAME")] = MemoryMode.STRICT
    memory_nodes_allowed: Annotated[
        tuple[NodeIndex, ...], _placing("--allow-memory-node", "N")
    ] = ()
    reserved_pus: Annotated[
        CpuSet, _placing("--reserved-cpus", "CPUS", parse=CpuSet.parse, rare=False)
    ] = CpuSet()
    reserve_defined: Annotated[bool, _placing_flag("--reserve-defined")] = False
    host_reserve: Annotated[
        PartialReserve,
        _placing("--host-reserve", "cores=N,memory=SIZE", parse=reserve_of, show=reserve_text),
    ] = PartialReserve()
    emulator_policy: Annotated[EmulatorPolicy, _placing("--emulator", "NAME")] = EmulatorPolicy.AUTO
    emulator_pus: Annotated[
        CpuSet | None, _placing("--emulator-cpus", "CPUS", parse=CpuSet.parse)
    ] = None
    housekeeping_pus: Annotated[
        CpuSet, _placing("--housekeeping-cpus", "CPUS", parse=CpuSet.parse)
    ] = CpuSet()
    pinning: Annotated[Pinning | None, _switch("--pinning", "NAME")] = None
    siblings: Annotated[Siblings | None, _switch("--siblings", "NAME")] = None
    # whether siblings as the document shows them take the place of whole cores
    document_siblings: DefinitionSiblings = DefinitionSiblings.IGNORED
    cells: Annotated[GuestCells | None, _switch("--guest-nodes", "NAME")] = None
    pcie: Annotated[GuestPcie | None, _switch("--pcie", "NAME")] = None
    memory_binding: Annotated[MemoryBinding | None, _switch("--memory-binding", "NAME")] = None
    pci_granularity: Annotated[PciGranularity | None, _switch("--pci-granularity", "NAME")] = None
    spare_ports: Annotated[int, _switch("--spare-ports", "N")] = 0


def reject_objective(options: PlanOptions) -> None:
    """Reject an objective without layout `auto`. Raises UsageError."""
    if options.objective is not None and options.layout != AUTO:
        raise UsageError(
            f"--objective {options.objective} requires --layout auto, found --layout "
            f"{options.layout}"
        )


class ManualRanges(Struct, frozen=True):
    """CPUs by host node, one of each core, instead of a host to plan for.

    Options:
      node_pus: Pin to these CPUs of one node, one of each core; repeat for each node.
      sibling_pus: SMT siblings of the --node-cpus, in their order; repeat for each node.
    """

    node_pus: Annotated[
        tuple[CpuSet, ...], _by_hand("--node-cpus", "CPUS", parse=CpuSet.parse)
    ] = ()
    sibling_pus: Annotated[
        tuple[CpuSet, ...], _by_hand("--sibling-cpus", "CPUS", parse=CpuSet.parse)
    ] = ()
