"""Gpus: which devices pull the VM towards their nodes, and which GPUs to take where any will do.

GPUs pull, and so do the NICs paired with them: those on a GPU's switch, else on its root complex.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.errors import InputError
from homenode.gap import Gap
from homenode.pci import DeviceKind, LinkKind, PciDevice
from homenode.plan.model import Rejection, Unplannable
from homenode.plan.request import GuestRequest
from homenode.plan.search.fabric import fabric_of
from homenode.plan.search.fewest import fewest
from homenode.plan.search.taken import Taken
from homenode.topology import Host

MOST_SETS = 8
"""Sets of GPUs that are tried against the nodes; each starts on a node of its own."""


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """Functions for the VM, host order.

    pulls, others: the nodes that pulling and other devices lie on, distinct, ascending.
    gaps: devices whose node or NVLink partition is unknown. spread: (nodes, NVLink groups,
    switches, groups broken) of the chosen GPUs, each a count, smaller is better; () where none
    were to choose. On a board with NVSwitches the partitions broken come first.
    """

    devices: tuple[Bdf, ...]
    pulls: tuple[int, ...]
    others: tuple[int, ...]
    gaps: tuple[Gap, ...]
    spread: tuple[int, ...] = ()


def device_sets(host: Host, request: GuestRequest, taken: Taken) -> tuple[DeviceSet, ...]:
    """The sets of devices to try, best first: one, or several where gpu_count leaves a choice.

    Raises InputError for a function that the host has not; Unplannable for too few free GPUs, and
    for GPUs that Fabric Manager cannot join.
    """
    by_bdf = {device.bdf: device for device in host.pci_devices}
    for bdf in request.devices:
        if bdf not in by_bdf:
            raise _unknown(bdf, host)
        if by_bdf[bdf].bridge is not None or by_bdf[bdf].kind is DeviceKind.BRIDGE:
            raise InputError(
                f"device {bdf}: expected an endpoint, found a bridge or switch port",
                hint="bridges are not passed through; name the devices below it",
            )
    fabric = fabric_of(host, request)
    named = [by_bdf[bdf] for bdf in request.devices if by_bdf[bdf].kind is DeviceKind.GPU]
    if not request.gpu_count:
        odd = () if fabric is None else fabric.refuse_odd(named)
        return (_device_set(host, by_bdf, request.devices, more_gaps=odd),)
    free = _free_gpus(host, request, taken)
    if len(free) < request.gpu_count:
        raise _too_few(host, request, taken, len(free))
    allowed = None if fabric is None else fabric.sets(named, free, request.gpu_count, taken)
    result = []
    for chosen, spread in _gpu_sets(host, free, request.gpu_count, allowed):
        odd = () if fabric is None else fabric.gap([gpu.bdf for gpu in (*named, *chosen)])
        companions = [b for gpu in chosen for b in _companions(by_bdf, gpu)]
        devices = tuple(sorted({*request.devices, *(gpu.bdf for gpu in chosen), *companions}))
        result.append(_device_set(host, by_bdf, devices, spread, odd))
    return tuple(result)


def _device_set(
    host: Host,
    by_bdf: dict[Bdf, PciDevice],
    bdfs: Iterable[Bdf],
    spread: tuple[int, ...] = (),
    more_gaps: tuple[Gap, ...] = (),
) -> DeviceSet:
    devices = [by_bdf[bdf] for bdf in sorted(set(bdfs))]
    pulling = _pulling(host, devices)
    known = {node.index for node in host.nodes}
    gaps = tuple(
        Gap(f"{device.bdf} node", "the firmware gives none, so the device pulls nowhere")
        for device in devices
        if device.node not in known
    )
    nodes = {device.bdf: device.node for device in devices if device.node in known}
    return DeviceSet(
        tuple(device.bdf for device in devices),
        tuple(sorted({node for bdf, node in nodes.items() if node is not None and bdf in pulling})),
        tuple(
            sorted({node for bdf, node in nodes.items() if node is not None and bdf not in pulling})
        ),
        (*gaps, *more_gaps),
        spread,
    )


def _pulling(host: Host, devices: Sequence[PciDevice]) -> frozenset[Bdf]:
    gpus = [device for device in devices if device.kind is DeviceKind.GPU]
    switches = {host.switch_above(gpu.bdf) for gpu in gpus} - {None}
    roots = {gpu.root_complex for gpu in gpus}
    paired = set()
    for device in devices:
        if device.kind is DeviceKind.NIC:
            switch = host.switch_above(device.bdf)
            if switch in switches or device.root_complex in roots:
                paired.add(device.bdf)
    return frozenset({gpu.bdf for gpu in gpus} | paired)


def _companions(by_bdf: dict[Bdf, PciDevice], gpu: PciDevice) -> list[Bdf]:
    """The other functions of the GPU's slot (its audio, USB): they leave the host together."""
    functions = (
        Bdf(gpu.bdf.domain, gpu.bdf.bus, gpu.bdf.device, number)
        for number in range(8)
        if number != gpu.bdf.function
    )
    return [
        bdf
        for bdf in functions
        if bdf in by_bdf and by_bdf[bdf].kind not in (DeviceKind.BRIDGE, DeviceKind.GPU)
    ]


def _free_gpus(host: Host, request: GuestRequest, taken: Taken) -> list[PciDevice]:
    held = {bdf for bdf, _ in taken.devices} | set(request.devices)
    return [
        gpu
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        # A physical function with virtual ones in use cannot leave the host.
        if gpu.bdf not in held and not gpu.sriov_num_vfs
    ]


def _gpu_sets(
    host: Host,
    free: Sequence[PciDevice],
    count: int,
    allowed: Mapping[tuple[Bdf, ...], int] | None,
) -> list[tuple[tuple[PciDevice, ...], tuple[int, ...]]]:
    """Sets of `count` GPUs with their spread, best first.

    allowed: the only ones, None = any; each with the NVLink partitions that it breaks, which count
    before all else.
    """
    links = _nvlink_groups(host)
    group_of = {
        gpu.bdf: (
            -1 if gpu.node is None else int(gpu.node),
            links.get(gpu.bdf),
            host.switch_above(gpu.bdf),
        )
        for gpu in host.devices_of_kind(DeviceKind.GPU)
    }
    found: dict[tuple[PciDevice, ...], tuple[int, ...]]
    if allowed is None:
        found = dict.fromkeys(_outwards(host, free, count, group_of), ())
    else:
        by_bdf = {gpu.bdf: gpu for gpu in free}
        found = {tuple(by_bdf[b] for b in sorted(one)): (n,) for one, n in allowed.items()}
    ranked = sorted(
        ((chosen, (*first, *_spread(chosen, free, group_of))) for chosen, first in found.items()),
        key=lambda item: (item[1], [gpu.bdf for gpu in item[0]]),
    )
    return ranked[:MOST_SETS]


def _outwards(
    host: Host,
    free: Sequence[PciDevice],
    count: int,
    group_of: dict[Bdf, tuple[int, Bdf | None, Bdf | None]],
) -> set[tuple[PciDevice, ...]]:
    """Sets from each node outwards: the fewest nodes, in a node the fewest NVLink groups and
    switches, each time those that fit tightest."""
    position = {int(node.index): i for i, node in enumerate(host.nodes)}
    by_node: dict[int, list[PciDevice]] = {}
    for gpu in free:
        by_node.setdefault(group_of[gpu.bdf][0], []).append(gpu)

    def distance(a: int, b: int) -> int:
        if host.distances is None or a not in position or b not in position:
            return 0 if a == b else 20
        return host.distances[position[a]][position[b]]

    found: set[tuple[PciDevice, ...]] = set()
    for start in sorted(by_node):
        order = sorted(by_node, key=lambda n: (distance(start, n), -len(by_node[n]), n))
        chosen: list[PciDevice] = []
        while len(chosen) < count:
            rest = [node for node in order if not {g.bdf for g in by_node[node]} & _bdfs(chosen)]
            left = count - len(chosen)
            # Of the nodes next nearest the tightest that holds all that is left; else the next.
            nearest = distance(start, rest[0])
            tight = [
                node
                for node in rest
                if distance(start, node) == nearest and len(by_node[node]) >= left
            ]
            node = min(tight, key=lambda n: (len(by_node[n]), n)) if tight else rest[0]
            node = start if not chosen else node
            chosen += _from_node(by_node[node], group_of, left)
        found.add(tuple(sorted(chosen, key=lambda gpu: gpu.bdf)))
    return found


def _from_node(
    gpus: Sequence[PciDevice],
    group_of: dict[Bdf, tuple[int, Bdf | None, Bdf | None]],
    wanted: int,
) -> list[PciDevice]:
    """Up to `wanted` GPUs of one node: the fewest NVLink groups, in each the fewest switches."""
    if len(gpus) <= wanted:
        return list(gpus)
    chosen: list[PciDevice] = []
    for group in _fewest_groups(gpus, [group_of[gpu.bdf][1] for gpu in gpus], wanted):
        left = wanted - len(chosen)
        if len(group) <= left:
            chosen += group
            continue
        for part in _fewest_groups(group, [group_of[gpu.bdf][2] for gpu in group], left):
            chosen += part[: wanted - len(chosen)]
    return chosen


def _fewest_groups(
    gpus: Sequence[PciDevice], keys: Sequence[Bdf | None], wanted: int
) -> list[list[PciDevice]]:
    """The groups to draw `wanted` from. A GPU without a group (None) is a group of its own."""
    groups: dict[Bdf, list[PciDevice]] = {}
    for gpu, key in zip(gpus, keys, strict=True):
        groups.setdefault(gpu.bdf if key is None else key, []).append(gpu)
    ordered = [groups[key] for key in sorted(groups)]
    picked = [ordered[i] for i in fewest([len(group) for group in ordered], wanted)]
    return sorted(picked, key=lambda group: (-len(group), group[0].bdf))


def _spread(
    chosen: Sequence[PciDevice],
    free: Sequence[PciDevice],
    group_of: dict[Bdf, tuple[int, Bdf | None, Bdf | None]],
) -> tuple[int, ...]:
    """(nodes, NVLink groups, switches, groups left in part) of the chosen GPUs."""
    taken = _bdfs(chosen)
    broken = 0
    counts = []
    for level in range(3):
        keys: dict[object, set[Bdf]] = {}
        for gpu in free:
            group = group_of[gpu.bdf][level]
            keys.setdefault(gpu.bdf if group is None else group, set()).add(gpu.bdf)
        touched = [members for members in keys.values() if members & taken]
        counts.append(len(touched))
        broken += sum(not members <= taken for members in touched)
    return (*counts, broken)


def _bdfs(gpus: Iterable[PciDevice]) -> set[Bdf]:
    return {gpu.bdf for gpu in gpus}


def _nvlink_groups(host: Host) -> dict[Bdf, Bdf]:
    """For each GPU with NVLink or xGMI, the lowest function that its links reach, NVSwitches
    included."""
    linked: dict[Bdf, set[Bdf]] = {}
    for link in host.links:
        if link.b is not None and link.kind in (LinkKind.NVLINK, LinkKind.XGMI):
            linked.setdefault(link.a, set()).add(link.b)
            linked.setdefault(link.b, set()).add(link.a)
    group_of: dict[Bdf, Bdf] = {}
    for start in sorted(linked):
        waiting = [] if start in group_of else [start]
        while waiting:
            bdf = waiting.pop()
            if bdf not in group_of:
                group_of[bdf] = start
                waiting += linked[bdf]
    return group_of


def _unknown(bdf: Bdf, host: Host) -> InputError:
    known = [d.bdf for d in host.pci_devices if d.kind is not DeviceKind.BRIDGE]

    def difference(other: Bdf) -> tuple[int, int, int, Bdf]:
        return (
            other.domain != bdf.domain, abs(other.bus - bdf.bus), abs(other.device - bdf.device),
            other,
        )  # fmt: skip

    nearest = ", ".join(str(other) for other in sorted(known, key=difference)[:3])
    gpus = ", ".join(str(gpu.bdf) for gpu in host.devices_of_kind(DeviceKind.GPU)[:16])
    return InputError(
        f"device {bdf}: expected a PCI function of host {host.name!r}, which has "
        + (f"none there; nearest: {nearest}" if nearest else "no PCI functions"),
        hint=f"GPUs of the host: {gpus}" if gpus else "capture the host again with its PCI devices",
    )


def _too_few(host: Host, request: GuestRequest, taken: Taken, free: int) -> Unplannable:
    total = len(host.devices_of_kind(DeviceKind.GPU))
    held = [
        f"{gpu.bdf} by {domain!r}"
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if (domain := taken.holder(gpu.bdf)) is not None
    ]
    detail = f"needs {request.gpu_count} free GPUs, {free} of {total} free" + (
        f"; held: {', '.join(held)}" if held else ""
    )
    hint = f"ask for at most {free} GPUs" if free else None
    return Unplannable(
        f"no placement on host {host.name!r}: {detail}",
        (Rejection("gpus", (), detail, hint),),
        hint=hint,
    )
