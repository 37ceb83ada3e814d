"""Planner: make the plan of one VM from a host and a request."""

from msgspec.structs import replace

from homenode.errors import NotKnownError
from homenode.machine.topology import Host, refuse_unshown, with_certain_nodes
from homenode.plan.allocations import own_is_unknown
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.vm.plan import Plan, Unplannable


def plan(host: Host, request: GuestRequest, *, brief: bool = False) -> Plan:
    """Return the plan of least cost on the first fallback that fits. brief: without explanations.

    Raises Unplannable with every rejection, UsageError for options that contradict each other,
    InputError for what the host lacks, NotKnownError if its cores are unknown.
    """
    certain = with_certain_nodes(host)
    placed = placement(certain, request, brief=brief)
    return assemble(certain, as_placed(request, placed), placed)


def placement(certain: Host, request: GuestRequest, *, brief: bool = False) -> Placement:
    """Return the placement on a host of certain nodes. Raises as plan does."""
    try:
        return place(certain, request, brief=brief)
    except Unplannable as error:
        refuse_unshown(certain, "CPUs")
        if request.options.gpu_count:
            refuse_unshown(certain, "PCI")
        if certain.pus and not certain.cores:
            raise NotKnownError(
                f"{certain.name}: the CPUs of each core are unknown, so no plan can be made",
                hint="use lscpu -e of the host, or homenode capture, as the source",
            ) from None
        unknown = own_is_unknown(certain, request)
        if unknown is None:
            raise
        hint = f"{unknown}" if error.hint is None else f"{error.hint}; {unknown}"
        raise Unplannable(
            error.message,
            error.rejections,
            hint=hint,
            nearest=error.nearest,
            quotes_nearest=error.quotes_nearest,
        ) from None


def as_placed(request: GuestRequest, placed: Placement) -> GuestRequest:
    """Return the request with the layout that the VM gets, if vCPUs have to share cores."""
    if placed.layout is None:
        return request
    return replace(request, layout=placed.layout, keep_vcpus=True)
