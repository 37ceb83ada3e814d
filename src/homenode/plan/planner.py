"""Planner: from a host and a request to the plan of one VM, and the hosts that could take it."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import InputError, NotKnownError
from homenode.machine.topology import Host, refuse_unshown, with_certain_nodes
from homenode.plan.allocations import own_is_unknown
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.vm.plan import Plan, Unplannable


def plan(host: Host, request: GuestRequest, *, brief: bool = False) -> Plan:
    """The plan of least cost on the first fallback that holds the VM. brief: without explanations.

    Raises Unplannable with every rejection, UsageError for options that contradict each other,
    InputError for what the host has not, NotKnownError if its cores are unknown.
    """
    certain = with_certain_nodes(host)
    try:
        placed = place(certain, request, brief=brief)
    except Unplannable as error:
        refuse_unshown(certain, "CPUs")
        if request.options.gpu_count:
            refuse_unshown(certain, "PCI")
        if certain.pus and not certain.cores:
            raise NotKnownError(
                f"{host.name}: which CPUs share a core is not known, and it decides the plan",
                hint="lscpu -e on the host, or homenode capture, is a source that shows cores",
            ) from None
        unknown = own_is_unknown(certain, request)
        if unknown is None:
            raise
        hint = f"{unknown}" if error.hint is None else f"{error.hint}; {unknown}"
        raise Unplannable(
            error.message, error.rejections, hint=hint, nearest=error.nearest
        ) from None
    return assemble(certain, as_placed(request, placed), placed)


def as_placed(request: GuestRequest, placed: Placement) -> GuestRequest:
    """The request with the layout that the VM gets, where siblings have to share cores."""
    if placed.layout is None:
        return request
    return replace(request, layout=placed.layout, keep_vcpus=True)


class RankedHost(Struct, frozen=True):
    """A host and what it could do: either a placement or the refusal."""

    position: int  # in the order in which the hosts were given
    host: Host
    placement: Placement | None
    refusal: Unplannable | InputError | None


def rank(requests: Sequence[tuple[Host, GuestRequest]]) -> tuple[RankedHost, ...]:
    """The hosts, each with the request as it stands there, the best first; those that cannot hold
    the VM last.

    A host where nothing had to give way comes first, one with a whole core for each vCPU before one
    with siblings; then the policy's order of concerns decides without the node numbers: where those
    are alike the balance rule does (most free cores, then memory; or the tightest), and at last the
    order given. A host that lacks a device of the document refuses by name. Raises UsageError as
    `place` does.
    """
    ranked = []
    for position, (host, request) in enumerate(requests):
        try:
            ranked.append(RankedHost(position, host, place(host, request), None))
        except (Unplannable, InputError) as refusal:
            ranked.append(RankedHost(position, host, None, refusal))
    return tuple(sorted(ranked, key=_key))


def _key(ranked: RankedHost) -> tuple[object, ...]:
    placement = ranked.placement
    if placement is None:
        return True, (), ranked.position
    return False, tuple(value for _, value in placement.concerns), ranked.position
