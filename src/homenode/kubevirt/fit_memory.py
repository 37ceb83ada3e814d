"""Fit of memory: huge pages on the nodes that the VM takes, as KubeVirt shares them out."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.kubevirt.demand import Demand
from homenode.topology import Host
from homenode.units import format_bytes

_SPLIT = "KubeVirt, virtwrap/converter/vcpu: memory is shared evenly over the cells"


def memory_findings(demand: Demand, nodes: int, host: Host) -> Iterator[Finding]:
    """Huge pages that are missing. nodes: NUMA nodes that the VM takes at least."""
    size, page = demand.memory_bytes, demand.page_bytes
    if page is None:
        return
    subject = f"huge pages of {format_bytes(page)}"
    if size is None:
        yield finding(
            "memory-unknown",
            "spec.domain.memory.guest",
            expected="a size",
            observed="none: huge pages could not be counted",
            source="the VMI",
        )
        return
    if page == 0 or size % page:
        return  # admission refuses it
    pools = [pool for node in host.nodes for pool in node.page_pools]
    if not pools:
        yield finding(
            "huge-pages-unknown",
            subject,
            expected="page pools of the node",
            observed="none in the source",
            source=host.name,
        )
        return
    free = sorted((pool.free_pages for pool in pools if pool.page_bytes == page), reverse=True)
    if not any(pool.total_pages for pool in pools if pool.page_bytes == page):
        yield finding(
            "huge-page-size",
            subject,
            expected="a pool of that size on the node",
            observed="none reserved: the VMI is scheduled nowhere",
            case="under KubeVirt",
            values={"pages": size // page},
            source=host.name,
        )
        return
    pages = size // page
    least, rest = divmod(pages, nodes)  # KubeVirt gives the first cells one more
    if sum(free) < pages:
        yield finding(
            "huge-pages-short",
            subject,
            expected=f"{pages} free pages",
            observed=f"{sum(free)} free",
            case="under KubeVirt",
            source=host.name,
        )
    elif sum(count >= least for count in free) < nodes or sum(c > least for c in free) < rest:
        yield finding(
            "huge-pages-uneven",
            subject,
            expected=f"{least} free pages on each of {nodes} nodes"
            + (f", and one more on {rest} of them" if rest else ""),
            observed=f"{', '.join(map(str, free))} free",
            source=_SPLIT,
        )
    most = -(-(demand.most_memory_bytes or 0) // page)
    if sum(free) < most and sum(free) >= pages:
        yield finding(
            "huge-pages-for-growth",
            subject,
            expected=f"{most} free pages, for the memory that may be plugged in (maxGuest)",
            observed=f"{sum(free)} free: the VM starts, and cannot grow so far",
            source=host.name,
        )
