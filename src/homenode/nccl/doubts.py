"""Doubts: what is not known, or not good, of a topology that was assembled."""

import re
from collections.abc import Iterable, Iterator, Sequence

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import Host
from homenode.nccl.guest_side import GuestSide
from homenode.nccl.topology import NcclTopology
from homenode.vm.fingerprint import host_fingerprint
from homenode.vm.model import LayoutRecord

_VENDOR = re.compile(r"[A-Za-z0-9 ]{1,12}\Z", re.ASCII)
_ADDED_FOR_GPU = 2  # <gpu>, and at least one <nvlink>
_ADDED_FOR_NIC = 2  # <nic> and <net>


def tuned_elsewhere(record: LayoutRecord | None, host: Host, source: str) -> Iterator[Finding]:
    """A finding where homenode has tuned the document for another host: the same addresses may be
    other devices there."""
    here = host_fingerprint(host)
    if record is not None and record.host is not None and not here.startswith(record.host):
        yield finding(
            "tuned-for-other-host",
            source,
            expected=f"a document tuned for host {host.name!r} (topology {here[:12]})",
            observed=f"one tuned for another (topology {record.host[:12]})",
            case="of a topology file",
            source=source,
        )


def device_without_node(device: PciDevice, host: Host) -> Finding:
    return finding(
        "nccl-device-without-node",
        str(device.bdf),
        expected="a NUMA node of the host",
        observed=f"none known on host {host.name!r}: it is left out of the file",
        source="host",
    )


def link_unknown(device: PciDevice) -> Finding:
    return finding(
        "nccl-link-unknown",
        str(device.bdf),
        expected="its link's speed and width",
        observed="unknown to the host's source",
        source="host",
    )


def switch_link_unknown(switch: PciDevice, gt_per_s: float, width: int) -> Finding:
    return finding(
        "nccl-switch-link-unknown",
        f"switch {switch.bdf}",
        expected="the speed and width of its link to the root",
        observed=f"unknown: {gt_per_s:g} GT/s x{width} assumed",
        source="host",
    )


def floating_vcpus(guest: GuestSide, used: Sequence[NodeIndex], source: str) -> Iterator[Finding]:
    """A finding where vCPUs may run anywhere on several nodes."""
    is_pinned = any(pin is not None for pin in guest.vcpu_pins)
    if is_pinned or any(cell.nodes for cell in guest.cells) or len(used) < 2:
        return
    yield finding(
        "nccl-vcpus-float",
        "vCPUs",
        expected="pins, or cells bound to host nodes",
        observed=f"neither: any vCPU may run on any of nodes {CpuSet(used)}",
        source=source,
    )


def known_vendor(host: Host) -> str | None:
    """The CPU's vendor where it can be one: 12 letters of CPUID, from a source that we distrust."""
    vendor = host.cpu.vendor
    return vendor if vendor is not None and _VENDOR.match(vendor) else None


def cpu_unknown(host: Host) -> Iterator[Finding]:
    """A finding where the host does not give its CPU; other architectures need not."""
    stated = (known_vendor(host), host.cpu.family, host.cpu.model)
    if host.architecture == "x86_64" and None in stated:
        yield finding(
            "nccl-cpu-unknown",
            "CPU",
            expected="vendor, family and model of the host's CPU",
            observed="the host's source does not give all three",
            source="host",
        )


def too_many_nodes(
    topology: NcclTopology, kinds: Sequence[DeviceKind], source: str
) -> Iterable[Finding]:
    """A finding where the file itself is small enough, but not with what NCCL adds to it."""
    after = topology.nodes + _ADDED_FOR_GPU + _ADDED_FOR_NIC * kinds.count(DeviceKind.NIC)
    most = topology.flavour.most_nodes
    if after > most:
        yield finding(
            "nccl-too-many-nodes",
            "file",
            expected=f"at most {most} elements with those that NCCL adds",
            observed=f"{topology.nodes}, and {after} with a <nic> and a <net> for each NIC",
            source=source,
        )
