"""UnknownLinks: GPUs of whose links nothing can be said: silence is not to pass for health."""

from collections.abc import Iterator

from homenode.bdf import Bdf
from homenode.discover.lspci import AFTER_A_CUT
from homenode.doctor.links.path import Link, links_above
from homenode.findings import Finding, Severity
from homenode.pci import DeviceKind, PciDevice
from homenode.topology import Host

_MOST_NAMED = 8


def cut_listing_findings(host: Host) -> Iterator[Finding]:
    """A listing that ends too early: what it lacks may be sick."""
    for gap in host.gaps:
        if gap.subject.startswith(AFTER_A_CUT):
            yield Finding(
                "listing-cut", Severity.INCONCLUSIVE, host.name,
                "the output of lspci to its end", f"not known: {gap.subject}", None,
                "take it again: sudo lspci -D -nn -vvv > FILE", gap.reason,
            )  # fmt: skip


def unknown_link_findings(host: Host) -> Iterator[Finding]:
    """One finding for all GPUs whose own link or port does not say what it can and has.

    A GPU that is a part of the root complex has no link, and a virtual function none of its own.
    """
    by_bdf = {device.bdf: device for device in host.pci_devices}
    blind = [
        gpu.bdf
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.physical_function is None and _is_blind(gpu, by_bdf)
    ]
    if not blind:
        return
    more = len(blind) - _MOST_NAMED
    named = ", ".join(map(str, blind[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
    yield Finding(
        "pcie-link-unknown", Severity.INCONCLUSIVE, f"GPU {named}",
        "speed and width of both ends of the link, maximum and current",
        f"{host.name} does not tell them", None,
        "read it as root: sudo homenode doctor, or sudo lspci -D -nn -vvv; homenode capture takes "
        "all that is needed", "LnkCap and LnkSta of lspci -vvv, which it shows to root only",
    )  # fmt: skip


def _is_blind(gpu: PciDevice, by_bdf: dict[Bdf, PciDevice]) -> bool:
    """Whether the link at the GPU's slot is unknown: the first that is not inside its card."""
    links = (link for link in links_above(gpu, by_bdf) if not link.is_inside_a_card)
    slot = next(links, None)
    return slot is not None and not slot.is_virtual and not _is_known(slot)


def _is_known(link: Link) -> bool:
    """Both ends say what they can, and the lower what it has: 0 lanes are no link."""
    own = link.lower.link
    has = own is not None and own.current_gt_per_s is not None and own.current_width is not None
    return link.capable is not None and has
