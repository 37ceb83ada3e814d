"""Place: the hosts of a pool on which a VM fits, best first."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.pool.fits import NodeResources, free_by_node, make_equivalence_key, sum_of
from homenode.errors import UNPLANNABLE, HomenodeError, InputError, NotKnownError, UsageError
from homenode.findings import Rejection
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import complete_nodes
from homenode.plan.placement import Placement
from homenode.plan.planner import apply_placement, find_placement
from homenode.plan.request import request_for
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_plan
from homenode.show.device_groups import KIND_NAMES
from homenode.vm.host_sources import NamedHost, Progress, natural_key
from homenode.vm.model import Vm
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Balance, PlanOptions

_OF_NODES = "balance_cores"
"""First term of a cost that compares nodes of one host."""


class PoolPlace(Struct, frozen=True, kw_only=True):
    """A host on which the VM fits."""

    entry: NamedHost
    options: PlanOptions  # with the layout that the VM gets there
    placement: Placement
    free: NodeResources  # what is left on the host, with the VM on it
    gpus: int  # that the VM gets
    decided: str = ""  # the first term in which it is behind the host before it; "" of the first

    @property
    def packs(self) -> bool:
        """Whether hosts with the least free come first."""
        balance = self.options.balance
        return self.gpus > 0 if balance is None else balance is Balance.PACK


class RejectingHosts(Struct, frozen=True, kw_only=True):
    """Hosts on which the VM does not fit, for one kind of reason."""

    names: tuple[str, ...]
    reason: str  # reason of the first host
    hint: str | None
    refusal: Unplannable | None = None  # exception of the first host
    exit_code: int = UNPLANNABLE  # exit code of the first host


class PoolRanking(Struct, frozen=True, kw_only=True):
    """The hosts on which a VM fits, best first, and the others by frequency of the reason."""

    hosts: tuple[PoolPlace, ...]
    refusing: tuple[RejectingHosts, ...]


def rank_hosts(
    hosts: Sequence[NamedHost],
    guest: Vm,
    options_on: Callable[[NamedHost], PlanOptions],
    progress: Progress = lambda count, total: None,
) -> PoolRanking:
    """Plan the VM on each host; identical hosts are planned once. options_on: with the VM's layout
    on a host. Order: the placement, by the planner's comparison; then the free whole cores and the
    free memory of the host, most first or, with `pack`, least first (pack: the default for VMs with
    GPUs); then the name.

    Raises UsageError for options that contradict each other.
    """
    results: dict[object, PoolPlace | HomenodeError] = {}
    taking: list[PoolPlace] = []
    refusals: dict[str, tuple[list[str], HomenodeError]] = {}
    for number, entry in enumerate(hosts, start=1):
        key = make_equivalence_key(entry.host, guest.name)
        if key not in results:
            results[key] = _plan_on(entry, guest, options_on)
        progress(number, len(hosts))
        answer = results[key]
        if isinstance(answer, PoolPlace):
            taking.append(replace(answer, entry=entry))
            continue
        nearest = _find_closest(answer)
        message = answer.message.removeprefix(f"{entry.host.name}: ")
        kind = message if nearest is None else nearest.constraint
        refusals.setdefault(kind, ([], answer))[0].append(entry.name)
    refusing = [
        RejectingHosts(
            names=tuple(names),
            reason=kind if (nearest := _find_closest(first)) is None else nearest.detail,
            hint=first.hint,
            refusal=first if isinstance(first, Unplannable) else None,
            exit_code=first.exit_code,
        )
        for kind, (names, first) in refusals.items()
    ]
    refusing.sort(key=lambda refused: -len(refused.names))
    return PoolRanking(hosts=_rank(taking), refusing=tuple(refusing))


def reject_ambiguous_devices(hosts: Sequence[NamedHost], guest: Vm) -> None:
    """Raise UsageError for a device of the definition that is of different kinds on the hosts: the
    definition means only one of them."""
    for hostdev in guest.hostdevs:
        host_of_kind: dict[DeviceKind, str] = {}
        for entry in hosts:
            function = entry.host.device_at.get(hostdev.bdf)
            if function is not None:
                host_of_kind.setdefault(function.kind, entry.name)
        if len(host_of_kind) > 1:
            kinds = [f"{KIND_NAMES[kind]} of {name}" for kind, name in host_of_kind.items()]
            raise UsageError(
                f"device {hostdev.bdf}: expected one kind of device on all hosts, found "
                f"{' and '.join(kinds)}",
                hint=f"remove its <hostdev> and add --gpus, or --on {hosts[0].name}",
            )


def _find_closest(refusal: HomenodeError) -> Rejection | None:
    return refusal.nearest if isinstance(refusal, Unplannable) else None


def _plan_on(
    entry: NamedHost, guest: Vm, options_on: Callable[[NamedHost], PlanOptions]
) -> PoolPlace | HomenodeError:
    host = complete_nodes(entry.host)
    try:
        options = options_on(entry)
        request = request_for(guest, options, host)
        try:
            placement = place(host, request, brief=True)
        except Unplannable:
            placement = find_placement(host, request)  # rejects again, with its reasons
        domain = domain_of_plan(assemble(host, apply_placement(request, placement), placement))
    except (Unplannable, InputError, NotKnownError) as refusal:
        return refusal
    domains = tuple(other for other in host.domains if other.name != guest.name)
    free = sum_of(free_by_node(replace(host, domains=(*domains, domain))))
    gpus = sum(gpu.bdf in placement.devices for gpu in host.devices_of_kind(DeviceKind.GPU))
    return PoolPlace(entry=entry, options=options, placement=placement, free=free, gpus=gpus)


def _rank(hosts: Sequence[PoolPlace]) -> tuple[PoolPlace, ...]:
    if not hosts:
        return ()
    names = [name for name, _ in hosts[0].placement.concerns]
    names = names[: names.index(_OF_NODES)] if _OF_NODES in names else names

    def list_terms(ranked: PoolPlace) -> list[tuple[str, int]]:
        concerns = dict(ranked.placement.concerns)
        sign = 1 if ranked.packs else -1
        return [
            *((name, concerns.get(name, 0)) for name in names),
            ("free_cores", sign * ranked.free.free_cores),
            ("free_memory", sign * (ranked.free.free_memory_bytes or 0)),
        ]

    keyed = [(list_terms(pool_place), pool_place) for pool_place in hosts]
    keyed.sort(key=lambda pair: (*(value for _, value in pair[0]), natural_key(pair[1].entry.name)))
    ordered_places = [keyed[0][1]]
    for (before, _), (after, pool_place) in pairwise(keyed):
        deciding_term = next((name for name, value in after if value != dict(before)[name]), "name")
        ordered_places.append(replace(pool_place, decided=deciding_term))
    return tuple(ordered_places)
