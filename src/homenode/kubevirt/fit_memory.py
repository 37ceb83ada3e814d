"""Fit of memory: huge pages on the nodes that the VM takes, as KubeVirt shares them out."""

from collections.abc import Iterator

from homenode.findings import Finding, Severity
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
        yield Finding(
            "memory-unknown", Severity.INCONCLUSIVE, "spec.domain.memory.guest", "a size",
            "none: huge pages could not be counted", None, "set spec.domain.memory.guest",
            "the VMI",
        )  # fmt: skip
        return
    if page == 0 or size % page:
        return  # admission refuses it
    pools = [pool for node in host.nodes for pool in node.page_pools]
    if not pools:
        yield Finding(
            "huge-pages-unknown", Severity.INCONCLUSIVE, subject, "page pools of the node",
            "none in the source", None, "capture the node: homenode capture", host.name,
        )  # fmt: skip
        return
    free = sorted((pool.free_pages for pool in pools if pool.page_bytes == page), reverse=True)
    if not any(pool.total_pages for pool in pools if pool.page_bytes == page):
        yield Finding(
            "huge-page-size", Severity.CRITICAL, subject, "a pool of that size on the node",
            "none reserved: the VMI is scheduled nowhere", None,
            f"reserve {size // page} pages at boot: hugepagesz= and hugepages= on the kernel's "
            "command line, then restart kubelet", host.name,
        )  # fmt: skip
        return
    pages = size // page
    least, rest = divmod(pages, nodes)  # KubeVirt gives the first cells one more
    if sum(free) < pages:
        yield Finding(
            "huge-pages-short", Severity.CRITICAL, subject, f"{pages} free pages",
            f"{sum(free)} free", None, "reserve more, or make the VM smaller", host.name,
        )  # fmt: skip
    elif sum(count >= least for count in free) < nodes or sum(c > least for c in free) < rest:
        yield Finding(
            "huge-pages-uneven", Severity.CRITICAL, subject,
            f"{least} free pages on each of {nodes} nodes"
            + (f", and one more on {rest} of them" if rest else ""),
            f"{', '.join(map(str, free))} free", None,
            "reserve pages evenly: KubeVirt gives every cell the same memory", _SPLIT,
        )  # fmt: skip
    most = -(-(demand.most_memory_bytes or 0) // page)
    if sum(free) < most and sum(free) >= pages:
        yield Finding(
            "huge-pages-for-growth", Severity.WARNING, subject,
            f"{most} free pages, for the memory that may be plugged in (maxGuest)",
            f"{sum(free)} free: the VM starts, and cannot grow so far", None,
            "reserve more, or lower maxGuest", host.name,
        )  # fmt: skip
