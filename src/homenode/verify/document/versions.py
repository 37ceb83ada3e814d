"""Versions: what of a document the host is too old for, or of another architecture."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.domain.document import Document
from homenode.domain.requirements import (
    ADDRESS_BITS,
    CACHE,
    CELLS,
    DIES,
    DISTANCES,
    EXPANDER,
    EXPANDER_VIRT,
    HOLE,
    HUGE_PAGES,
    IOMMU,
    IOTHREAD_PINS,
    MEMNODE,
    SMMU,
    SWITCH,
    TOPOEXT,
    Requirement,
)
from homenode.findings import Finding
from homenode.topology import Host
from homenode.vm.model import Vm

_ALSO_RUN = {"x86_64": ("i686",), "aarch64": ("armv7l", "armv6l"), "ppc64le": ("ppc64",)}
"""Guests that KVM runs besides those of the host's own architecture."""


def versions_on_host(document: Document, guest: Vm, host: Host) -> Iterator[Finding]:
    """A finding for each element that is newer than the host's programs, and for a machine that
    KVM cannot run there; none where those are unknown."""
    run = (host.architecture, *_ALSO_RUN.get(host.architecture or "", ()))
    is_known = host.architecture is not None and guest.domain_type == "kvm"
    if is_known and guest.architecture not in run:
        yield finding(
            "other-architecture",
            "<type arch>",
            expected=f"{host.architecture}, the host's",
            observed=guest.architecture,
            values={"architecture": host.architecture},
            source=document.source,
        )
    settings = host.settings
    for need in _needed(document, guest):
        for program, have, want in (
            ("libvirt", settings.libvirt_version, need.libvirt),
            ("QEMU", settings.qemu_version, need.qemu),
        ):
            if have is not None and want is not None and have < want:
                yield finding(
                    "too-old",
                    need.element,
                    expected=f"{program} {'.'.join(map(str, want))} or newer",
                    observed=f"{program} {'.'.join(map(str, have))}",
                    values={"program": program, "element": need.element},
                    source=document.source,
                )


def _needed(document: Document, guest: Vm) -> Iterator[Requirement]:
    root = document.root
    if root.at("cpu", "numa") is not None:
        yield CELLS
    if root.at("cpu", "numa", "cell", "distances") is not None:
        yield DISTANCES
    topology = root.at("cpu", "topology")
    if topology is not None and (topology.get("dies") or "1") != "1":
        yield DIES
    cpu = root.child("cpu")
    features = () if cpu is None else cpu.all("feature")
    if any(feature.get("name") == "topoext" for feature in features):
        yield TOPOEXT
    if root.at("cpu", "cache") is not None:
        yield CACHE
    if root.at("cpu", "maxphysaddr") is not None:
        yield ADDRESS_BITS
    if root.at("cputune", "iothreadpin") is not None:
        yield IOTHREAD_PINS
    if root.at("numatune", "memnode") is not None:
        yield MEMNODE
    if root.at("memoryBacking", "hugepages", "page") is not None:
        yield HUGE_PAGES
    models = {controller.model for controller in guest.controllers}
    if "pcie-expander-bus" in models:
        yield EXPANDER_VIRT if guest.is_virt else EXPANDER
    if "pcie-switch-upstream-port" in models:
        yield SWITCH
    if guest.pcihole64_bytes is not None:
        yield HOLE
    devices = root.child("devices")
    for iommu in () if devices is None else devices.all("iommu"):
        driver = iommu.child("driver")
        if driver is not None:
            yield SMMU if driver.get("accel") == "on" else IOMMU
