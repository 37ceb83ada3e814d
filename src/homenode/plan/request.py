"""Request: what the user wants of a placement, in addition to what the document says."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.host_reserve import DEFAULT_HOST_RESERVE, HostReserve
from homenode.indices import NodeIndex
from homenode.objective import Objective
from homenode.vm.layout import Layout

if TYPE_CHECKING:
    from homenode.vm.model import Vm


class Policy(StrEnum):
    """How many cores the nodes must have. XAPI's names: best effort, prio_mem_only, any."""

    CORES_FIRST = "cores-first"
    MEMORY_FIRST = "memory-first"
    SPREAD = "spread"
    ANY = "any"


class Balance(StrEnum):
    """Which of otherwise equal placements to take."""

    SPREAD = "spread"  # most free whole cores, then most free memory
    PACK = "pack"  # tightest fit


class MemoryMode(StrEnum):
    """libvirt's numatune modes."""

    STRICT = "strict"
    INTERLEAVE = "interleave"
    PREFERRED = "preferred"


class EmulatorPolicy(StrEnum):
    """Where QEMU's own threads go."""

    AUTO = "auto"  # cores without vCPUs near the devices; idle siblings of vCPU cores last
    HOUSEKEEPING = "housekeeping"  # the host's named cores, shared by the emulators of several VMs
    SHARE = "share"  # on the vCPUs' own PUs
    NONE = "none"  # not pinned


class PciGranularity(StrEnum):
    """What gets an expander bus of its own."""

    CELL = "cell"
    ROOT_COMPLEX = "root-complex"
    SWITCH = "switch"  # and the switches are mirrored


class DocumentSiblings(StrEnum):
    """What the siblings that a document shows (<topology threads='2'>) count for."""

    IGNORED = "ignored"  # the layout decides
    WHEN_SHORT = "when-short"  # before whole cores cost the host its last core, or mix kinds
    ALWAYS = "always"


class DeviceLocality(StrEnum):
    """What to do about GPUs whose own node is not chosen."""

    REQUIRE = "require"  # reject the placement
    PREFER = "prefer"  # compare placements by it
    IGNORE = "ignore"  # place the VM as if it had no devices


@dataclass(frozen=True, slots=True)
class CellRequest:
    """One guest cell as the user wants it (--cell). node: the host node; None = any, in order."""

    vcpus: int
    memory_bytes: int
    node: NodeIndex | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a user may ask of a placement: options of `homenode plan` that the search reads as is.

    devices: host functions that the VM gets, host order: those of the document, or of --gpus.
    gpu_profile: the GPUs to choose are parts of this profile ("NVIDIA A40-12Q").
    gpu_count: choose so many GPUs of the host (then `devices` holds the others only).
    with_nics, with_nvswitches: the VM's GPUs bring their own NICs, and their board's NVSwitches.
    policy, balance: docs/layouts.md; balance None = pack with GPUs, else spread.
    max_nodes: at most so many host nodes; None = no limit. device_locality: see there.
    explicit_cells: the guest's cells one by one, () = as the layout and the nodes give them.
    keep_vcpus: with siblings exposed keep the vCPUs and halve the cores, rather than double.
    document_siblings: whether siblings as the document shows them take the place of whole cores.
    mixed_kinds: performance and efficiency cores in one VM are wanted, so no warning.
    unequal_cells: vCPUs go next to the devices, however unequal the nodes' shares become.
    memory_nodes_allowed: CPU-less nodes that may serve as ordinary memory.
    reserved_pus: PUs that nothing of this VM may use.
    reserve_defined: shut-off domains with pins count as running.
    replaces: names of domains of the host that this VM takes the place of, next to its own.
    emulator_pus: exactly these (manual); None = by emulator_policy.
    spare_ports: empty root ports to add on each expander bus.
    without_nvlink: the GPUs need no NVLink among them, so that they need be no partition.
    objective: what the layout was chosen for by the evidence; None: the user named the layout.
    """

    devices: tuple[Bdf, ...] = ()
    gpu_count: int | None = None
    gpu_profile: str | None = None
    with_nics: bool = False
    with_nvswitches: bool = False
    policy: Policy = Policy.CORES_FIRST
    balance: Balance | None = None
    max_nodes: int | None = None
    device_locality: DeviceLocality = DeviceLocality.PREFER
    explicit_cells: tuple[CellRequest, ...] = ()
    keep_vcpus: bool = False
    document_siblings: DocumentSiblings = DocumentSiblings.IGNORED
    mixed_kinds: bool = False
    unequal_cells: bool = False
    memory_mode: MemoryMode = MemoryMode.STRICT
    memory_nodes_allowed: tuple[NodeIndex, ...] = ()
    reserved_pus: CpuSet = CpuSet()
    reserve_defined: bool = False
    replaces: tuple[str, ...] = ()
    emulator_policy: EmulatorPolicy = EmulatorPolicy.AUTO
    emulator_pus: CpuSet | None = None
    pci_granularity: PciGranularity = PciGranularity.CELL
    spare_ports: int = 0
    without_nvlink: bool = False
    objective: Objective | None = None


@dataclass(frozen=True, slots=True)
class GuestRequest(Demands):
    """One VM to be placed.

    guest: the document's own facts. layout: docs/layouts.md.
    vcpus: count; the guest's own unless the user overrides. memory_bytes likewise.
    page_bytes: huge pages to back the memory; None = ordinary pages.
    host_reserve: what is left to the host. housekeeping_pus: the PUs that serve the emulators of
    several VMs, empty = the host names none. mediated: (function, UUID) of mediated devices.
    most_threads: with siblings exposed, so many of a core at most; None = all that it has.
    """

    guest: "Vm"
    layout: Layout
    vcpus: int
    memory_bytes: int
    page_bytes: int | None = None
    host_reserve: HostReserve = DEFAULT_HOST_RESERVE
    housekeeping_pus: CpuSet = CpuSet()
    mediated: tuple[tuple[Bdf, str], ...] = ()
    most_threads: int | None = None
