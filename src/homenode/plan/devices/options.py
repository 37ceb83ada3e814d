"""Devices: the devices that a VM should be near, and the GPUs to choose from.

GPUs count, and so do the VM's NICs that are paired with its GPUs: those on a GPU's switch or root
complex. GPUs are chosen together with the nodes, in solve.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import NodeIndex, list_members
from homenode.errors import InputError
from homenode.findings import Finding, Gap, Rejection
from homenode.machine.pci import KIND_NAMES, DeviceKind, PciDevice
from homenode.machine.topology import Host, reject_unshown
from homenode.plan.allocations import Allocations
from homenode.plan.devices.brought import CompanionDevices, are_paired, link_groups
from homenode.plan.devices.fabric import Fabric, find_fabric
from homenode.plan.request import GuestRequest
from homenode.text import format_subjects, plural
from homenode.vm.gpu_parts import format_profiles, is_divided, list_free_parts
from homenode.vm.plan import Unplannable

MAX_COMPARED_STATES = 5_000
"""Limit of states compared at a time; GPUs in a tree of sets have far fewer."""

KEPT_STATES = 200
"""Number of best states kept beyond that limit."""

_State = tuple[int, int, int]
"""(GPUs still to choose, sets begun (bits), sets with a GPU left over (bits))."""

_Value = tuple[int, int, int]
"""(sets broken, rank, GPUs (bits)); each state keeps its least value."""


_EqualGpus = tuple[int, tuple[tuple[int, int], ...]]
"""GPUs of the same sets (bits): (sets, (rank, GPUs (bits)) of the first 0, 1, 2 ... of them)."""


class GpuTies(Struct, frozen=True):
    """The GPU sets of a search; GPUs are bits."""

    sets: tuple[int, ...]  # GPU sets that a VM should take as a whole or not at all
    ranks: tuple[int, ...]  # rank of each GPU; ties go to the least sum

    def fewest_broken(self, sure: int, tied: Sequence[tuple[int, int]]) -> tuple[int, bool]:
        """Return (GPUs chosen of the `tied` sets (GPUs, number), whether all choices were
        compared).

        The choice breaks the fewest sets together with the GPUs `sure`. Groups of GPUs are decided
        one after the other; of choices that lead to the same state only the best is kept. So the
        work is quadratic in the GPUs if the sets form a tree, as for switches and nodes.
        """
        reach = sum(gpus for gpus, _ in tied)
        if all(gpus.bit_count() == number for gpus, number in tied):
            return reach, True
        begun = left_out = 0
        gpu_sets: list[int] = []
        outside = ~(sure | reach)
        for gpu_set in self.sets:
            if gpu_set & reach and not (gpu_set & sure and gpu_set & outside):
                begun |= bool(gpu_set & sure) << len(gpu_sets)
                left_out |= bool(gpu_set & outside) << len(gpu_sets)
                gpu_sets.append(gpu_set)
        ordered_groups = [list(self._group_by_sets(gpus, gpu_sets)) for gpus, _ in tied]
        unions = [0]
        for sets, _ in (group for some in reversed(ordered_groups) for group in reversed(some)):
            unions.append(unions[-1] | sets)
        states: dict[_State, _Value] = {(0, begun, left_out): (0, 0, 0)}
        is_complete = True
        for some, (gpus, number) in zip(ordered_groups, tied, strict=True):
            states = {(number, *state[1:]): value for state, value in states.items()}
            remaining = gpus.bit_count()
            for group in some:
                remaining -= len(group[1]) - 1
                unions.pop()
                states = _extend_states(group, states, remaining, unions[-1])
                if len(states) > (MAX_COMPARED_STATES if is_complete else KEPT_STATES):
                    is_complete = False
                    states = dict(nsmallest(KEPT_STATES, states.items(), key=itemgetter(1)))
        return min(states.values())[2], is_complete

    def _group_by_sets(self, gpus: int, gpu_sets: Sequence[int]) -> Iterator[_EqualGpus]:
        """Group these GPUs by their sets; GPUs of a set, and of a set within it, are adjacent."""
        sets_of_gpus = [(1 << i, gpu_set) for i, gpu_set in enumerate(gpu_sets) if gpu_set & gpus]
        of_sets: dict[int, list[int]] = {}
        for number in list_members(gpus):
            sets = sum([bit for bit, gpu_set in sets_of_gpus if gpu_set >> number & 1])
            of_sets.setdefault(sets, []).append(number)

        def largest_first(sets: int) -> list[tuple[int, int]]:
            return sorted((-gpu_sets[i].bit_count(), i) for i in list_members(sets))

        for sets in sorted(of_sets, key=largest_first):
            rank, bits = 0, 0
            firsts = [(rank, bits)]
            for number in sorted(of_sets[sets], key=self.ranks.__getitem__):
                rank, bits = rank + self.ranks[number], bits | 1 << number
                firsts.append((rank, bits))
            yield sets, tuple(firsts)


def _extend_states(
    group: _EqualGpus, states: dict[_State, _Value], remaining: int, union: int
) -> dict[_State, _Value]:
    """Extend the states by each possible number of these GPUs. remaining: number of later GPUs.
    union: their sets."""
    result: dict[_State, _Value] = {}
    sets, firsts = group
    all_of_them = len(firsts) - 1
    for (missing, begun, left_out), (broken, rank, gpus) in states.items():
        for number in range(max(0, missing - remaining), min(all_of_them, missing) + 1):
            more_rank, bits = firsts[number]
            now_begun = begun | sets if number else begun
            now_left = left_out | sets if number < all_of_them else left_out
            value = (
                broken + (now_begun & now_left & ~(begun & left_out)).bit_count(),
                rank + more_rank,
                gpus | bits,
            )
            state = missing - number, now_begun & union, now_left & union
            best = result.get(state)
            if best is None or value < best:
                result[state] = value
    return result


class GpuCandidate(Struct, frozen=True):
    """A free GPU of the host."""

    bdf: Bdf
    number: int  # its position among the candidates, and its bit
    position: int  # position among the host's GPUs, GPUs next to a NIC of the VM first
    home: NodeIndex | None  # its NUMA node, None if the firmware reports no node
    weight: int  # number of functions that come with it
    companions: tuple[Bdf, ...]
    nic_nodes: frozenset[NodeIndex]  # known nodes of the VM's NICs that are paired with it


class GpuChoice(NamedTuple):
    """GPUs (bits), the GPU sets that they break, and whether all equals were compared."""

    gpus: int
    sets_lost: int
    is_complete: bool


class DeviceOptions(Struct, frozen=True, dict=True):
    """The functions that a VM gets, and the GPUs to choose from."""

    named: tuple[Bdf, ...]  # functions that the VM gets in any case, host order
    named_gpus: int  # the named GPUs that are in `gpus`, as bits
    named_positions: tuple[int, ...]
    # for each named device with a known node: (node, whether it is a GPU or a NIC paired with a
    # named GPU, whether it is a GPU)
    homes: tuple[tuple[NodeIndex, bool, bool], ...]
    gpus: tuple[GpuCandidate, ...]
    count: int  # how many GPUs to choose
    # groups of GPUs (bits), all chosen from one group: NVLink partitions, packages, or all free
    # GPUs
    groups: tuple[int, ...]
    sets: tuple[int, ...]  # GPU sets (bits) that are wholly free now
    without_node: frozenset[Bdf]  # functions whose node is unknown
    findings: tuple[Finding, ...]
    gaps: tuple[Gap, ...]
    brought: CompanionDevices  # devices that come with the GPUs

    @property
    def has_gpus(self) -> bool:
        return bool(self.count or self.named_positions)

    def list_functions(self, gpus: int) -> tuple[Bdf, ...]:
        """Return all functions of the VM with these GPUs (bits) chosen; host order."""
        functions = set(self.named)
        picked_gpus = [gpu for gpu in self.gpus if gpus >> gpu.number & 1]
        for gpu in picked_gpus:
            functions |= {gpu.bdf, *gpu.companions}
        return tuple(
            sorted(functions.union(self.brought.list_companions(gpu.bdf for gpu in picked_gpus)))
        )

    def among(self, groups: Iterable[int]) -> "DeviceOptions | None":
        """Return the options for these groups of GPUs; None if each group is too small."""
        enough = tuple(group for group in groups if group.bit_count() >= self.count)
        return replace(self, groups=enough) if enough else None

    def positions(self, gpus: int) -> tuple[int, ...]:
        """Return the positions of the named and these chosen GPUs among the host's GPUs."""
        gpu_positions = (gpu.position for gpu in self.gpus if gpus >> gpu.number & 1)
        return tuple(sorted({*self.named_positions, *gpu_positions}))

    def sets_lost(self, gpus: int) -> int:
        """Return the number of GPU sets that these and the named GPUs break."""
        all_gpus = gpus | self.named_gpus
        return sum(bool(gpu_set & all_gpus) and bool(gpu_set & ~all_gpus) for gpu_set in self.sets)

    def node_gaps(self, devices: Iterable[Bdf]) -> Iterator[Gap]:
        """Yield a gap for each of these functions whose node is unknown."""
        for bdf in devices:
            if bdf in self.without_node:
                yield Gap(
                    f"{bdf} node", "the firmware reports no node, so placement does not consider it"
                )

    def choose_least_lost(self, sure: int, tied: Sequence[tuple[int, int]]) -> "GpuChoice":
        """Choose the GPUs `sure` and some of each `tied` set, such that the host loses the fewest
        GPU sets; ties go to the first."""
        picked_gpus, is_complete = self._ties.fewest_broken(sure | self.named_gpus, tied)
        gpus = sure | picked_gpus
        return GpuChoice(gpus, self.sets_lost(gpus), is_complete)

    @cached_property
    def _ties(self) -> GpuTies:
        # Of the positions in which two choices differ, the lowest is the better one's.
        last = max([gpu.position for gpu in self.gpus], default=0)
        return GpuTies(self.sets, tuple([-1 << last - gpu.position for gpu in self.gpus]))

    def choose_least_loss(self) -> int:
        """Choose the GPUs of a VM that is not on fixed nodes."""
        if not self.count:
            return 0
        picks = (
            self._ties.fewest_broken(self.named_gpus, ((group, self.count),))[0]
            for group in self.groups
        )
        return min(picks, key=lambda gpus: (self.sets_lost(gpus), self.positions(gpus)))


def build_device_options(
    host: Host, request: GuestRequest, allocations: Allocations
) -> DeviceOptions:
    """Return the devices to choose from.

    GPUs of unknown node are omitted if the other GPUs suffice. Raises InputError for a function
    that the host lacks; Unplannable for too few free GPUs.
    """
    # Long because it fills a record whose fields need one another: GPUs, then their sets.
    by_bdf = host.device_at
    for bdf in request.devices:
        if bdf not in by_bdf:
            raise _make_unknown_device(bdf, host, request)
        if by_bdf[bdf].bridge is not None or by_bdf[bdf].kind is DeviceKind.BRIDGE:
            raise InputError(
                f"device {bdf}: expected an endpoint, found a bridge or switch port",
                hint="bridges are not passed through; name the devices below it",
            )
    host_fabric, all_gpus = find_fabric(host), host.devices_of_kind(DeviceKind.GPU)
    # Without NVLink the GPUs need be no partition.
    fabric = None if request.options.without_nvlink else host_fabric
    node_indices = {node.index for node in host.nodes}
    free = _free_gpus(host, request, allocations)
    named_devices = [by_bdf[bdf] for bdf in request.devices]
    named_gpus = [device for device in named_devices if device.kind is DeviceKind.GPU]
    count = request.options.gpu_count or 0
    if len(free) < count:
        raise _too_few(host, request, allocations, len(free))
    unheld = _free_gpus(host, request, allocations, also=request.devices)
    named_nics = [device for device in named_devices if device.kind is DeviceKind.NIC]
    brought = CompanionDevices(host, request, allocations)
    nics_of = {
        gpu.bdf: (
            *(nic.bdf for nic in named_nics if are_paired(gpu, nic)),
            *brought.list_nearby_nics(gpu),
        )
        for gpu in (*unheld, *named_gpus)
    }
    # GPUs next to a NIC of the VM come before the others.
    by_nic = sorted(all_gpus, key=lambda gpu: not nics_of.get(gpu.bdf))
    position = {gpu.bdf: i for i, gpu in enumerate(by_nic)}
    gpus = tuple(
        GpuCandidate(
            bdf=gpu.bdf,
            number=number,
            position=position[gpu.bdf],
            home=gpu.node if gpu.node in node_indices else None,
            weight=1 + sum(by_bdf[b].node in node_indices for b in companions),
            companions=companions,
            nic_nodes=frozenset(
                node
                for nic in nics_of[gpu.bdf]
                if (node := by_bdf[nic].node) is not None and node in node_indices
            ),
        )
        for number, gpu in enumerate(unheld)
        for companions in (_list_companions(by_bdf, gpu) if count else (),)
    )
    bit_of = {gpu.bdf: 1 << gpu.number for gpu in gpus}
    groups, findings, gaps = _list_choices(
        host,
        request.guest.name,
        fabric,
        named_devices=named_gpus,
        free=free,
        count=count,
        allocations=allocations,
        bit_of=bit_of,
    )
    if request.options.with_nvswitches:
        boards = brought.board_choices(
            [gpu.bdf for gpu in named_gpus], [gpu.bdf for gpu in free], count
        )
        of_boards = tuple(sum(bit_of[bdf] for bdf in gpu_set) for gpu_set in boards)
        groups = of_boards if count else None
    open_gpus = sum(bit_of[gpu.bdf] for gpu in free)
    if groups is None:
        placed_bits = sum(bit_of[gpu.bdf] for gpu in free if gpu.node in node_indices)
        if placed_bits.bit_count() >= count:
            open_gpus = placed_bits
    paired_nics = {nic for gpu in named_gpus for nic in nics_of[gpu.bdf]}
    homes = tuple(
        (
            device.node,
            device.kind is DeviceKind.GPU or device.bdf in paired_nics,
            device.kind is DeviceKind.GPU,
        )
        for device in named_devices
        if device.node in node_indices and device.node is not None
    )
    has_gpus = bool(count or named_gpus)
    # Sets all of whose GPUs are free.
    masks = {
        sum(bit_of[bdf] for bdf in gpu_set)
        for gpu_set in (_list_gpu_sets(host, all_gpus, host_fabric) if has_gpus else ())
        if bit_of.keys() >= gpu_set
    }
    return DeviceOptions(
        named=tuple(sorted(set(request.devices))),
        named_gpus=sum(bit_of.get(gpu.bdf, 0) for gpu in named_gpus),
        named_positions=tuple(sorted(position[gpu.bdf] for gpu in named_gpus)),
        homes=homes,
        gpus=gpus,
        count=count,
        groups=(open_gpus,) if groups is None else groups,
        sets=tuple(sorted(masks)),
        without_node=frozenset(d.bdf for d in host.pci_devices if d.node not in node_indices),
        findings=findings,
        gaps=(*gaps, *_list_foreign(host, request)),
        brought=brought,
    )


def _list_foreign(host: Host, request: GuestRequest) -> Iterator[Gap]:
    """Yield a gap if another host's addresses may name other devices here: a NIC for a GPU."""
    record, guest = request.guest.record, request.guest
    if record is None or record.host is None or host.has_fingerprint(record.host):
        return
    bdfs_of_kind: dict[str, list[str]] = {}
    for bdf in (hostdev.bdf for hostdev in guest.hostdevs if hostdev.bdf in request.devices):
        function = host.device_at.get(bdf)
        kind = "device" if function is None else KIND_NAMES.get(function.kind, "device")
        bdfs_of_kind.setdefault(kind, []).append(str(bdf))
    for kind, bdfs in bdfs_of_kind.items():
        yield Gap(
            f"whether the definition means {kind} {format_subjects(bdfs)} of {host.name}",
            "homenode tuned it for another host; if not, remove its <hostdev>",
        )


def _list_choices(
    host: Host,
    name: str,
    fabric: Fabric | None,
    named_devices: Sequence[PciDevice],
    free: Sequence[PciDevice],
    count: int,
    allocations: Allocations,
    bit_of: dict[Bdf, int],
) -> tuple[tuple[int, ...] | None, tuple[Finding, ...], tuple[Gap, ...]]:
    """Return (groups of GPUs (bits) to choose from, None = all GPUs; findings; gaps)."""
    if fabric is None:
        return None, (), ()
    if not count:
        finding = fabric.no_partition(named_devices)
        return None, () if finding is None else (finding,), fabric.unknown_partition(named_devices)
    sets, finding = fabric.partitions(named_devices, free, count, allocations)
    findings = () if finding is None else (finding,)
    gaps: tuple[Gap, ...] = ()
    if sets is None:
        total = [*named_devices, *free][: count + len(named_devices)]
        gaps = () if findings else fabric.unknown_partition(total)
        sets = _choose_one_package(host, named_devices, free, count)
        if sets is None:
            return None, findings, gaps
        if not sets:
            raise _make_package_error(host, allocations, count, len(free), name)
    return tuple(sum(bit_of[bdf] for bdf in gpu_set) for gpu_set in sets), findings, gaps


def _choose_one_package(
    host: Host, named_devices: Sequence[PciDevice], free: Sequence[PciDevice], count: int
) -> tuple[tuple[Bdf, ...], ...] | None:
    """Return the free GPUs of each package with `count` of them; named GPUs fix the package.

    Each package has half of a board, and NVLink joins only GPUs of one half. None if no package of
    the host has `count` GPUs, free or not, or if a GPU's package is unknown.
    """
    home = _map_gpu_packages(host)
    total = count + len(named_devices)
    packages = {package for package in home.values() if package is not None}
    largest = max((list(home.values()).count(package) for package in packages), default=0)
    chosen_packages = {home.get(gpu.bdf) for gpu in named_devices} or packages
    is_known = all(home.get(gpu.bdf) is not None for gpu in (*named_devices, *free))
    if not is_known or not 1 < total <= largest or (named_devices and len(chosen_packages) > 1):
        return None
    sets = (
        tuple(gpu.bdf for gpu in free if home[gpu.bdf] == package)
        for package in sorted(package for package in chosen_packages if package is not None)
    )
    return tuple(gpu_set for gpu_set in sets if len(gpu_set) >= count)


def _list_gpu_sets(
    host: Host, gpus: Sequence[PciDevice], fabric: Fabric | None
) -> set[frozenset[Bdf]]:
    """Return GPU sets of two or more: by node, switch, NVLink or xGMI, or partition."""
    links = link_groups(host)
    groups: dict[tuple[str, object], list[Bdf]] = {}
    for gpu in gpus:
        switch = host.switch_above(gpu.bdf)
        for kind, key in (("node", gpu.node), ("switch", switch), ("link", links.get(gpu.bdf))):
            if key is not None:
                groups.setdefault((kind, key), []).append(gpu.bdf)
    sets = {frozenset(bdfs) for bdfs in groups.values() if len(bdfs) > 1}
    return sets if fabric is None else sets | set(map(frozenset, fabric.all_partitions()))


def _list_companions(by_bdf: dict[Bdf, PciDevice], gpu: PciDevice) -> tuple[Bdf, ...]:
    """Return the other functions of a GPU's slot (audio, USB): they leave the host together."""
    functions = (
        Bdf(gpu.bdf.domain, gpu.bdf.bus, gpu.bdf.device, number)
        for number in range(8)
        if number != gpu.bdf.function
    )
    return tuple(
        bdf
        for bdf in functions
        if bdf in by_bdf and by_bdf[bdf].kind not in (DeviceKind.BRIDGE, DeviceKind.GPU)
    )


def _free_gpus(
    host: Host, request: GuestRequest, allocations: Allocations, also: Sequence[Bdf] = ()
) -> list[PciDevice]:
    """Return the free GPUs, or free parts of the requested profile; `also`: named functions that
    count as well. A divided GPU cannot be passed as a whole."""
    owned_bdfs = {bdf for bdf, _ in allocations.devices} | set(request.devices) - set(also)
    used_uuids = frozenset(uuid for uuid, _ in allocations.mediated)
    profile = request.options.gpu_profile
    return [
        gpu
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.bdf not in owned_bdfs
        and (
            (profile is None and gpu.physical_function is None and not is_divided(gpu))
            or gpu.bdf in also
            or any(list_free_parts(host.device_at, gpu.bdf, used_uuids, profile))
        )
    ]


def _make_unknown_device(bdf: Bdf, host: Host, request: GuestRequest) -> InputError:
    reject_unshown(host, "PCI")
    bdfs = [d.bdf for d in host.pci_devices if d.kind is not DeviceKind.BRIDGE]

    def difference(other: Bdf) -> tuple[int, int, int, Bdf]:
        return (
            other.domain != bdf.domain,
            abs(other.bus - bdf.bus),
            abs(other.device - bdf.device),
            other,
        )

    nearest = ", ".join(str(other) for other in sorted(bdfs, key=difference)[:3])
    gpus = ", ".join(str(gpu.bdf) for gpu in host.devices_of_kind(DeviceKind.GPU)[:16])
    hint = f"GPUs of the host: {gpus}" if gpus else None if bdfs else "homenode capture reads PCI"
    functions = {d.bdf: host.device_at.get(d.bdf) for d in request.guest.hostdevs}
    absent = [other for other in request.devices if other not in host.device_at]
    if bdf in functions and gpus:
        count = sum(f is None or f.kind is DeviceKind.GPU for f in functions.values())
        add = "" if request.options.gpu_count else f" and add --gpus {count}"
        hint = f"remove {'its <hostdev>' if len(absent) == 1 else 'their <hostdev>s'}{add}"
        others = [str(d.bdf) for d in functions.values() if d and d.kind is not DeviceKind.GPU]
        if others:
            hint += f"; not GPUs on this host: {format_subjects(others)}"
    name = f"PCI function{'s' * (len(absent) > 1)} {format_subjects([*map(str, absent)])}"
    return InputError(
        f"host {host.name!r} has no "
        + (f"{name}; nearest: {nearest}" if nearest else f"PCI functions, nor {bdf}"),
        hint=hint,
    )


def _map_gpu_packages(host: Host) -> dict[Bdf, int | None]:
    """Map each whole GPU to its package, None if unknown."""
    package_of = {node.index: node.package for node in host.nodes}
    return {
        gpu.bdf: None if gpu.node is None else package_of.get(gpu.node) for gpu in host.whole_gpus
    }


def _make_package_error(
    host: Host, allocations: Allocations, count: int, free: int, name: str
) -> Unplannable:
    in_use = _format_use(host, allocations)
    detail = (
        f"{count} GPUs of one package needed, as NVLink does not join packages; {free} free, too "
        f"few in each package{in_use}"
    )
    hint = "name GPUs with --device, or accept GPUs without NVLink: --allow-no-nvlink"
    return Unplannable(
        f"{name} does not fit {host.name}: {detail}",
        (Rejection("gpu-packages", (), detail, hint),),
        hint=hint,
    )


def _format_use(host: Host, allocations: Allocations) -> str:
    owned_texts = [
        f"{gpu.bdf} by {allocations.label(domain)}"
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if (domain := allocations.find_holder(gpu.bdf)) is not None
    ]
    return f"; in use: {', '.join(owned_texts)}" if owned_texts else ""


def _too_few(host: Host, request: GuestRequest, allocations: Allocations, free: int) -> Unplannable:
    gpus = host.devices_of_kind(DeviceKind.GPU)
    count, profile = request.options.gpu_count or 0, request.options.gpu_profile
    needs = plural(count, "GPU") if profile is None else f"{count} parts of profile {profile}"
    total = len(host.whole_gpus)
    free_text = f"{free} free" if profile or free > total else f"{free} of {total} free"
    detail = f"{needs} needed, {free_text}{_format_use(host, allocations)}"
    hint = f"--gpus {free}" if free else None
    if profile is None and any(gpu.parts for gpu in gpus):
        hint = hint or f"--gpu-profile, as GPUs are divided; one of {format_profiles(host)}"
    return Unplannable(
        f"{request.guest.name} does not fit {host.name}: {detail}",
        (Rejection("gpus", (), detail, hint),),
        hint=hint,
    )
