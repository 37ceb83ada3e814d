"""Layout: the five switches of a guest's placement on its host, and their presets."""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import UsageError, unknown


class Pinning(StrEnum):
    NONE = "none"
    NODE = "node"  # every vCPU may float over the CPUs of its nodes: XAPI's and oVirt's way
    ONE_PER_CORE = "one-cpu-per-core"
    ALL_PUS = "all-cpus"


class Siblings(StrEnum):
    KEEP = "keep"
    HIDDEN = "hidden"
    EXPOSED = "exposed"


class GuestCells(StrEnum):
    SINGLE = "single"
    HOST = "host"


class GuestPcie(StrEnum):
    KEEP = "keep"
    HOST = "host"


class MemoryBinding(StrEnum):
    KEEP = "keep"
    BOUND = "bound"
    BOUND_PER_CELL = "bound-per-node"


class Layout(Struct, frozen=True):
    """The five switches. Results are keyed by all five; `name` is the preset's, or "custom"."""

    name: str
    pinning: Pinning
    siblings: Siblings
    cells: GuestCells
    pcie: GuestPcie
    memory: MemoryBinding


_ONE_PER_CORE, _ALL_PUS = Pinning.ONE_PER_CORE, Pinning.ALL_PUS
_KEPT, _HIDDEN, _EXPOSED = Siblings.KEEP, Siblings.HIDDEN, Siblings.EXPOSED
_ONE_NODE, _HOST_NODES = GuestCells.SINGLE, GuestCells.HOST
_KEPT_PCIE, _HOST_PCIE = GuestPcie.KEEP, GuestPcie.HOST
_UNBOUND, _BOUND = MemoryBinding.KEEP, MemoryBinding.BOUND
_PER_CELL = MemoryBinding.BOUND_PER_CELL

_ROWS = {
    "default": (
        "as libvirt starts it: no pinning",
        (Pinning.NONE, _KEPT, _ONE_NODE, _KEPT_PCIE, _UNBOUND),
    ),
    "pin": (
        "each vCPU on a separate core",
        (_ONE_PER_CORE, _HIDDEN, _ONE_NODE, _KEPT_PCIE, _UNBOUND),
    ),
    "pin-bound": (
        "pin, and memory bound to the chosen nodes",
        (_ONE_PER_CORE, _HIDDEN, _ONE_NODE, _KEPT_PCIE, _BOUND),
    ),
    "pin-numa": (
        "pin, and the guest sees the nodes of its memory",
        (_ONE_PER_CORE, _HIDDEN, _HOST_NODES, _KEPT_PCIE, _PER_CELL),
    ),
    "pin-numa-smt": (
        "pin-numa with both threads of each core",
        (_ALL_PUS, _EXPOSED, _HOST_NODES, _KEPT_PCIE, _PER_CELL),
    ),
    "pin-numa-pci": (
        "pin-numa, and the guest sees the nodes of its GPUs",
        (_ONE_PER_CORE, _HIDDEN, _HOST_NODES, _HOST_PCIE, _PER_CELL),
    ),
    "pin-numa-pci-smt": (
        "pin-numa-pci with both threads of each core",
        (_ALL_PUS, _EXPOSED, _HOST_NODES, _HOST_PCIE, _PER_CELL),
    ),
}
"""A row for each preset: what it does, and its switches. From nothing to everything."""

PRESETS = {name: Layout(name, *switches) for name, (_, switches) in _ROWS.items()}
SUMMARIES = {name: summary for name, (summary, _) in _ROWS.items()}

AUTO_SUMMARY = "by the VM's purpose and its host"

STUDY_NAMES = {
    "A": "pin",
    "B": "pin-numa",
    "C": "pin-numa-smt",
    "vcpu_pin": "pin",
    "vcpu_pin_numa": "pin-numa",
    "vcpu_pin_numa_smt": "pin-numa-smt",
}
"""Names of three presets in the study of six GPU systems and its scripts."""


def find_preset(name: str) -> Layout | None:
    """Return the preset of that name, also of the study's names; else None.

    >>> find_preset("pin-numa").name, find_preset("vcpu_pin_numa").name, find_preset("A").name
    ('pin-numa', 'pin-numa', 'pin')
    """
    return PRESETS.get(STUDY_NAMES.get(name, name))


def unknown_layout(name: str, option: str = "--layout") -> UsageError:
    return unknown("layout", name, PRESETS, "homenode list layouts", f"{option}: ")


def add_preset_name(layout: Layout) -> Layout:
    """Return the layout with the name of the equal preset, else "custom"."""
    switches = replace(layout, name="")
    names = (name for name, preset in PRESETS.items() if replace(preset, name="") == switches)
    return replace(layout, name=next(names, "custom"))


def expose_siblings(layout: Layout) -> Layout:
    """Return the layout with vCPUs on all hyper-threads of each core, exposed as siblings.

    >>> expose_siblings(PRESETS["pin-numa"]).name
    'pin-numa-smt'
    """
    return add_preset_name(replace(layout, pinning=Pinning.ALL_PUS, siblings=Siblings.EXPOSED))


def format_layout(layout: Layout) -> str:
    """Return the layout's name for people; for a preset with other siblings with a note.

    >>> format_layout(expose_siblings(PRESETS["pin-bound"])), format_layout(PRESETS["pin"])
    ('pin-bound with siblings', 'pin')
    """
    hidden_layout = add_preset_name(
        replace(layout, pinning=Pinning.ONE_PER_CORE, siblings=Siblings.HIDDEN)
    )
    is_paired = expose_siblings(layout) == add_preset_name(layout)
    plain = layout.name in PRESETS or hidden_layout.name not in PRESETS or not is_paired
    return layout.name if plain else f"{hidden_layout.name} with siblings"
