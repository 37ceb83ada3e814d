"""UnknownLinks: devices of which nothing can be said: silence is not to pass for health."""

from collections.abc import Iterator

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.machine.device_path import JUDGED
from homenode.machine.discover.lspci import AFTER_A_CUT, NO_ANSWER
from homenode.machine.link_path import Link, links_above
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import Host

_MOST_NAMED = 8


def cut_listing_findings(host: Host) -> Iterator[Finding]:
    """A listing that ends too early: what it lacks may be sick."""
    for gap in host.gaps:
        if gap.subject.startswith(AFTER_A_CUT):
            yield finding(
                "listing-cut",
                host.name,
                expected="the output of lspci to its end",
                observed=f"not known: {gap.subject}",
                source=gap.reason,
            )


def silent_device_findings(host: Host) -> Iterator[Finding]:
    """Devices that the kernel still lists and that no longer answer."""
    for device in _silent(host):
        yield finding(
            "device-silent",
            f"{JUDGED[device.kind]} {device.bdf}",
            expected="configuration space that answers",
            observed="ones only: lspci says rev ff and unknown header type 7f",
            source=f"{host.name}: lspci -vvv; PCIe 6.0, 2.3.2 (reads that no one answers are "
            "all ones)",
        )


def _silent(host: Host) -> Iterator[PciDevice]:
    """Devices that are judged, are said to read as ones, and do not just sleep."""
    subjects = {gap.subject for gap in host.gaps}
    for device in host.pci_devices:
        is_silent = f"{NO_ANSWER} {device.bdf}" in subjects
        if is_silent and device.kind in JUDGED and not _sleeps(device):
            yield device


def _sleeps(device: PciDevice) -> bool:
    return (device.power_state or "").startswith("D3")


def unknown_link_findings(host: Host) -> Iterator[Finding]:
    """One finding for all GPUs whose own link or port does not say what it can and has.

    A GPU that is a part of the root complex has no link, and a virtual function none of its own.
    """
    by_bdf = {device.bdf: device for device in host.pci_devices}
    silent = {device.bdf for device in _silent(host)}
    blind = [
        gpu.bdf
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.physical_function is None and gpu.bdf not in silent and _is_blind(gpu, by_bdf)
    ]
    if not blind:
        return
    more = len(blind) - _MOST_NAMED
    named = ", ".join(map(str, blind[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
    yield finding(
        "pcie-link-unknown",
        f"GPU {named}",
        expected="speed and width of both ends of the link, maximum and current",
        observed=f"{host.name} does not give them",
        source="LnkCap and LnkSta of lspci -vvv, which it shows to root only",
    )


def _is_blind(gpu: PciDevice, by_bdf: dict[Bdf, PciDevice]) -> bool:
    """Whether the link at the GPU's slot is unknown: the first that is not inside its card.

    A GPU with a link, on another bus than the first, and without a port above it: the source lists
    the device alone, as `lspci -s` does. Guests on other machines than q35 have theirs on bus 0.
    """
    if gpu.parent is None:
        return gpu.link is not None and gpu.bdf.bus != 0
    links = (link for link in links_above(gpu, by_bdf) if not link.is_inside_a_card)
    slot = next(links, None)
    return slot is not None and not slot.is_virtual and not _is_known(slot)


def _is_known(link: Link) -> bool:
    """Both ends say what they can, and the lower what it has: 0 lanes are no link."""
    own = link.lower.link
    has = own is not None and own.current_gt_per_s is not None and own.current_width is not None
    return link.capable is not None and has
