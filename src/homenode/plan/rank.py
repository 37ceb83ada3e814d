"""Rank: the hosts that could take a VM, the best first, by the same costs as the nodes of one."""

from collections.abc import Sequence

from msgspec import Struct

from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.cost import INDICES
from homenode.plan.search.place import place
from homenode.vm.plan_model import Unplannable


class RankedHost(Struct, frozen=True):
    """A host and what it could do: either a placement or the refusal.

    position: in the order in which the hosts were given.
    """

    position: int
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
        return True, 0, (), ranked.position
    concerns = tuple(term.value for term in placement.cost if term.name not in INDICES)
    return False, len(placement.given_up), concerns, ranked.position
