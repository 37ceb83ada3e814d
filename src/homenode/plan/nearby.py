"""Nearby: sizes near the one asked for that give the guest what this one cannot have.

Each is planned as the VM itself is: nothing here knows which numbers fill LLCs or cells. That costs
as much as a dozen small plans at most, so it is done where people read it, and nowhere else. All of
them share the steps of half a search: where those do not suffice, what was found has to do.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Literal

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import HomenodeError
from homenode.machine.topology import Host, with_certain_nodes
from homenode.plan.devices.options import DeviceInventory
from homenode.plan.planner import as_placed
from homenode.plan.request import GuestRequest, resized
from homenode.plan.search.ladder import Concession
from homenode.plan.search.place import Inventory, place
from homenode.plan.search.problem import MOST_STEPS, Work
from homenode.plan.shape.assemble import assemble
from homenode.vm.layout import Pinning
from homenode.vm.plan_model import Plan

MOST_SIZES = 4
"""Sizes that are tried on either side: three of four lie next to a number that fills LLCs of four
cores, or two of eight."""


class Gain(StrEnum):
    """What a size can win."""

    CORES = "a whole core for each vCPU"
    CELLS = "equal cells"
    CACHES = "true L3 caches"
    GPU_SETS = "unbroken GPU sets"


class NearbySize(Struct, frozen=True):
    """Another number of vCPUs, or of GPUs, and what it wins."""

    count: int
    of: Literal["vCPU", "GPU"]
    wins: tuple[Gain, ...]


def nearby_sizes(host: Host, request: GuestRequest, made: Plan) -> tuple[NearbySize, ...]:
    """For what this plan of the request lacks, the nearest size below and above that has it, and
    lacks nothing, spans nothing and gives up nothing that this one does not. () where it lacks
    nothing.

    Same input, same answer.
    """
    inventory = Inventory(with_certain_nodes(host), Work(MOST_STEPS // 2))
    here = _shortfall(made, inventory.devices)
    if request.layout.pinning is Pinning.NONE or request.options.explicit_cells or not here.gains:
        return ()
    found = []
    if here.gains - {Gain.GPU_SETS}:
        # Siblings go together.
        step = made.vm.threads_per_core if made.vm.vcpus == request.vcpus else 1
        for way in (-1, 1):
            sizes = (request.vcpus + way * one for one in range(1, MOST_SIZES * step + 1))
            asked = ((n, resized(request, n)) for n in sizes if n > 0 and n % step == 0)
            found += [
                NearbySize(size, "vCPU", wins)
                for size, wins in _nearest(inventory, asked, here, Gain.GPU_SETS)
            ]
    if Gain.GPU_SETS in here.gains and request.options.gpu_count:
        for way in (-1, 1):
            counts = (request.options.gpu_count + way * one for one in range(1, MOST_SIZES + 1))
            wanted = ((n, structs.replace(request.options, gpu_count=n)) for n in counts if n > 0)
            asked = ((n, replace(request, options=options)) for n, options in wanted)
            found += [
                NearbySize(count, "GPU", wins)
                for count, wins in _nearest(inventory, asked, here, None)
                if Gain.GPU_SETS in wins
            ]
    return tuple(found)


class _Shortfall(Struct, frozen=True):
    """What a plan lacks, what gave way for it, and what it spans: (packages, nodes)."""

    gains: frozenset[Gain]
    given: frozenset[str]
    spans: tuple[int, int]

    def wins(self, other: "_Shortfall") -> tuple[Gain, ...]:
        """What the other has of what this one lacks; () where it is worse in anything."""
        worse = (
            other.gains - self.gains
            or other.given - self.given
            or any(theirs > own for theirs, own in zip(other.spans, self.spans, strict=True))
        )
        return () if worse else tuple(gain for gain in Gain if gain in self.gains - other.gains)


def _nearest(
    inventory: Inventory,
    requests: Iterator[tuple[int, GuestRequest]],
    here: _Shortfall,
    without: Gain | None,
) -> Iterator[tuple[int, tuple[Gain, ...]]]:
    """The nearest size that wins all, or else most of what is lacking; nearest first."""
    best: tuple[int, tuple[Gain, ...]] | None = None
    for size, asked in requests:
        wins: tuple[Gain, ...] = ()
        try:
            placed = place(inventory.host, asked, inventory, brief=True)
            plan = assemble(inventory.host, as_placed(asked, placed), placed)
            wins = here.wins(_shortfall(plan, inventory.devices))
        except HomenodeError:
            pass
        if inventory.work is not None and inventory.work.left <= 0:
            break  # a search that has not ended may have missed what the size loses
        if len(wins) > len(best[1] if best else ()):
            best = size, wins
        if here.gains - {without} <= set(wins):
            break
    if best is not None:
        yield best


def _shortfall(plan: Plan, devices: DeviceInventory) -> _Shortfall:
    gains = set()
    given = set(plan.fallback.split(", ")[1:])
    if Concession.SHARED_CORES in given:
        gains.add(Gain.CORES)
    if Concession.UNEQUAL_CELLS in given:
        gains.add(Gain.CELLS)
    if any(finding.id == "guest-l3-not-mirrored" for finding in plan.findings):
        gains.add(Gain.CACHES)
    if _breaks_sets(plan, devices):
        gains.add(Gain.GPU_SETS)
    spans = {term.name: term.value for term in plan.cost}
    return _Shortfall(
        frozenset(gains),
        frozenset(given),
        (_number(spans.get("packages_spanned")), _number(spans.get("nodes_spanned"))),
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _breaks_sets(plan: Plan, devices: DeviceInventory) -> bool:
    """Whether several GPUs of the VM are no GPU set, nor several whole ones: of a board with
    NVSwitches one of its partitions."""
    known = {gpu.bdf for gpu in devices.gpus if gpu.physical_function is None}
    gpus = {device.bdf for device in plan.vm.hostdevs} & known
    if len(gpus) < 2 or not devices.sets:
        return False
    if devices.fabric is not None:
        return len(gpus) not in devices.fabric.sizes()
    whole: set[Bdf] = set().union(*(one for one in devices.sets if one <= gpus))
    return gpus != whole
