"""LinkHook: what is done with the links of a domain's GPUs when libvirt starts it.

At start/begin, with managed devices on vfio-pci and no guest running yet, the links are raised. At
`started` they are only read: QEMU resets the bus on its way, which can drop a link, and that is
said, and never healed under a running guest.
"""

from collections.abc import Iterator, Mapping

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.machine.link_path import LinkRate, device_paths, gigabytes
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.vm.domain.hostdevs import read_hostdevs
from homenode.vm.domain.read import open_domain

START, STARTED = "start", "started"


def gpus_of_domain(xml: bytes, host: Host) -> tuple[Bdf, ...]:
    """The domain's passed-through GPUs, one for each link; audio functions, NICs and drives not.

    Virtual functions are left out: their link belongs to all that share it. Raises ParseError or
    InputError for a document that is none.
    """
    passed = {hostdev.bdf for hostdev in read_hostdevs(open_domain(xml, "domain"))}
    return tuple(
        path.device.bdf
        for path in device_paths(host)
        if path.device.kind is DeviceKind.GPU and path.device.bdf in passed
    )


def has_devices(xml: bytes) -> bool:
    """Whether the domain has any PCI device of the host. Raises as gpus_of_domain does."""
    return bool(read_hostdevs(open_domain(xml, "domain")))


def slot_links(host: Host, gpus: tuple[Bdf, ...]) -> dict[Bdf, LinkRate]:
    """What the link at each GPU's slot has now; those that do not say are left out."""
    return {
        path.device.bdf: path.links[0].current
        for path in device_paths(host)
        if path.device.bdf in gpus and path.links and path.links[0].current is not None
    }


def dropped_links(
    host: Host, gpus: tuple[Bdf, ...], domain: str, before: Mapping[Bdf, LinkRate]
) -> Iterator[Finding]:
    """A critical finding for each GPU whose link is below what it was, the guest running.

    before: what the links had when the start began. Of a link that is not in there the speed is
    compared with what both ends can; its width may be the slot's.
    """
    now = slot_links(host, gpus)
    for path in device_paths(host):
        current = now.get(path.device.bdf)
        if current is None:
            continue
        link = path.links[0]
        wanted = before.get(path.device.bdf) or link.capable
        if wanted is None:
            continue
        if path.device.bdf not in before:
            wanted = LinkRate(wanted.gt_per_s, current.width)
        if current.bytes_per_s >= wanted.bytes_per_s:
            continue
        lost = 1 - current.bytes_per_s / wanted.bytes_per_s
        when = "at start/begin" if path.device.bdf in before else "what both ends can"
        yield finding(
            "pcie-link-dropped",
            f"GPU {path.device.bdf} of domain {domain} below port {link.upper.bdf}",
            expected=f"{wanted.with_rate()}, {when}",
            observed=current.with_rate(),
            cost=f"{lost * 100:.0f} % of the link: {gigabytes(current.bytes_per_s)}",
            fix="shut the guest down, then homenode doctor retrain "
            f"{path.device.bdf} --apply; nothing is retrained under a running guest",
            source="LnkSta at libvirt's `started`, before the guest's driver can idle the link",
        )
