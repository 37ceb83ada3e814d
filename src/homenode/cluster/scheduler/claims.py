"""Claims: devices of Dynamic Resource Allocation, from ResourceSlices and ResourceClaims.

Source: resource.k8s.io/v1; k8s.io/dynamic-resource-allocation/deviceattribute for the standard
attributes pcieRoot and pciBusID. The NUMA node has no standard name: any driver's numaNode counts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cluster.kubevirt.object import down, read_object
from homenode.errors import InputError
from homenode.machine.topology import Host

PCI_BUS_ID = "resource.kubernetes.io/pciBusID"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
_NUMA_NAMES = ("numaNode", "numa")

DeviceKey = tuple[str, str, str]
"""Driver, pool and name."""


class ClaimedDevice(Struct, frozen=True, kw_only=True):
    """A device of a driver. node: the cluster's; None = not of one node. numa_attribute:
    what the driver calls the NUMA node. None where it says nothing."""

    key: DeviceKey
    node: str | None
    bdf: Bdf | None
    numa_node: int | None
    pcie_root: str | None
    numa_attribute: str | None


def read_slice(document: Mapping[str, Any]) -> tuple[ClaimedDevice, ...]:
    """The devices of a ResourceSlice; those without a name are left out."""
    driver, pool = down(document, "spec", "driver"), down(document, "spec", "pool", "name")
    node = down(document, "spec", "nodeName")
    found = []
    for device in _dicts(down(document, "spec", "devices")):
        name, attributes = device.get("name"), _dict(device.get("attributes"))
        if not all(isinstance(one, str) for one in (driver, pool, name)):
            continue
        numa = next((key for key in attributes if key.rpartition("/")[2] in _NUMA_NAMES), None)
        number = None if numa is None else down(attributes[numa], "int")
        found.append(
            ClaimedDevice(
                key=(str(driver), str(pool), str(name)),
                node=node if isinstance(node, str) else None,
                bdf=_bdf(down(attributes.get(PCI_BUS_ID), "string")),
                numa_node=number if isinstance(number, int) and number >= 0 else None,
                pcie_root=_text(down(attributes.get(PCIE_ROOT), "string")),
                numa_attribute=None
                if numa is None
                else numa
                if "/" in numa
                else f"{driver}/{numa}",
            )
        )
    return tuple(found)


def allocated(claim: Mapping[str, Any]) -> tuple[DeviceKey, ...]:
    """What a ResourceClaim has got."""
    results = _dicts(down(claim, "status", "allocation", "devices", "results"))
    return tuple(
        (str(one.get("driver")), str(one.get("pool")), str(one.get("device")))
        for one in results
        if not one.get("adminAccess")
    )


def claim_names(pod: Mapping[str, Any]) -> Iterator[str]:
    """The ResourceClaims of a pod, those made of a template among them once they are made."""
    made = {
        one.get("name"): one.get("resourceClaimName")
        for one in _dicts(down(pod, "status", "resourceClaimStatuses"))
    }
    for one in _dicts(down(pod, "spec", "resourceClaims")):
        name = one.get("resourceClaimName") or made.get(one.get("name"))
        if isinstance(name, str):
            yield name


def claimed(
    pod: Mapping[str, Any], content: bytes, source: str, host: Host
) -> tuple[tuple[str, int | None], ...]:
    """The devices that a pod's claims have got, with the driver's NUMA nodes or the host's. Of
    `kubectl get resourceclaims,resourceslices -o json`. Raises InputError."""
    items = _dicts(read_object(content, source, "ResourceClaims and ResourceSlices").get("items"))
    known = {device.key: device for item in items for device in read_slice(item)}
    nodes = {device.bdf: device.node for device in host.pci_devices}
    names = set(claim_names(pod))
    keys = [
        key for one in items if down(one, "metadata", "name") in names for key in allocated(one)
    ]
    if not keys:
        raise InputError(f"{source}: expected allocations of the pod's claims, found none")
    found: list[tuple[str, int | None]] = []
    for key in keys:
        one = known.get(key)
        node = None if one is None or one.bdf is None else nodes.get(one.bdf)
        words = str(one.bdf) if one is not None and one.bdf is not None else "/".join(key)
        found.append((words, node if one is None or one.numa_node is None else one.numa_node))
    return tuple(found)


def _bdf(text: Any) -> Bdf | None:
    try:
        return Bdf.parse(text) if isinstance(text, str) else None
    except InputError:
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
