"""Claims: devices of Dynamic Resource Allocation, from ResourceSlices and ResourceClaims.

Source: resource.k8s.io/v1; k8s.io/dynamic-resource-allocation/deviceattribute for the standard
attributes pcieRoot and pciBusID. The NUMA node has no standard name: any driver's numaNode counts.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cluster.kubevirt.object import down, read_object
from homenode.cluster.pool.export import dns_word
from homenode.cluster.pool.flavour import Flavour
from homenode.errors import InputError
from homenode.machine.pci import DeviceKind
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


def read_slices(content: bytes, source: str) -> tuple[ClaimedDevice, ...]:
    """Of `kubectl get resourceslices -o json`. Raises InputError."""
    document = read_object(content, source, "a list of ResourceSlices")
    items = _dicts(document.get("items")) or [document]
    found = tuple(device for one in items for device in read_slice(one))
    if not found:
        raise InputError(f"{source}: expected devices of ResourceSlices, found none")
    return found


def claim_templates(
    devices: Sequence[ClaimedDevice], flavours: Iterable[Flavour]
) -> tuple[str, tuple[str, ...]]:
    """For each driver and flavour a ResourceClaimTemplate whose devices share a NUMA node, where a
    node of each cluster's node has so many; else, of drivers that do not say it, a PCIe root. The
    names of those without either come second. The device class has the driver's name."""
    items, loose = [], []
    for driver in sorted({one.key[0] for one in devices}):
        own = [one for one in devices if one.key[0] == driver]
        for flavour in flavours:
            if not flavour.gpus:
                continue
            name = f"{dns_word(driver)}-{dns_word(flavour.name)}"
            request = {
                "name": "gpus",
                "exactly": {"deviceClassName": driver, "count": flavour.gpus},
            }
            spec: dict[str, Any] = {"requests": [request]}
            shared = _shared_by(own, flavour.gpus)
            if flavour.gpus > 1 and shared is not None:
                spec["constraints"] = [{"requests": ["gpus"], "matchAttribute": shared}]
            elif flavour.gpus > 1:
                loose.append(name)
            items.append(
                {
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "ResourceClaimTemplate",
                    "metadata": {"name": name},
                    "spec": {"spec": {"devices": spec}},
                }
            )
    document = {"apiVersion": "v1", "kind": "List", "items": items}
    return json.dumps(document, indent=2) + "\n", tuple(loose)


def _shared_by(devices: Sequence[ClaimedDevice], count: int) -> str | None:
    """The attribute that so many devices of a node share, on each node that has so many."""
    numa = next((one.numa_attribute for one in devices if one.numa_attribute is not None), None)
    by_node: dict[str | None, list[ClaimedDevice]] = {}
    for one in devices:
        by_node.setdefault(one.node, []).append(one)
    large = [own for own in by_node.values() if len(own) >= count]
    for name, values in (
        (numa, [[one.numa_node for one in own] for own in large]),
        (PCIE_ROOT, [[one.pcie_root for one in own] for own in large]),
    ):
        most = [Counter(one for one in of if one is not None).most_common(1) for of in values]
        if name is not None and most and all(one and one[0][1] >= count for one in most):
            return name
        if name == numa and numa is not None:
            return None
    return None


def allocated(claim: Mapping[str, Any]) -> tuple[DeviceKey, ...]:
    """What a ResourceClaim has got."""
    results = _dicts(down(claim, "status", "allocation", "devices", "results"))
    return tuple(
        (str(one.get("driver")), str(one.get("pool")), str(one.get("device")))
        for one in results
        if not one.get("adminAccess")
    )


def asked(claim: Mapping[str, Any]) -> int:
    """How many devices a ResourceClaim or its template asks for; all of a node count as one."""
    spec = down(claim, "spec", "spec") or claim.get("spec")
    count = 0
    for request in _dicts(down(spec, "devices", "requests")):
        exactly = request.get("exactly") or next(iter(_dicts(request.get("firstAvailable"))), {})
        own = down(exactly, "count")
        count += own if isinstance(own, int) and own > 0 else 1
    return count


def bdfs_on(host: Host, devices: Iterable[ClaimedDevice]) -> tuple[Bdf, ...]:
    """The host's functions that these devices are: by address, else any free one with the same root
    complex and node. Devices that are none of its GPUs are left out."""
    devices = tuple(devices)
    gpus = {gpu.bdf: gpu for gpu in host.devices_of_kind(DeviceKind.GPU)}
    found = [one.bdf for one in devices if one.bdf in gpus and one.bdf is not None]
    for one in devices:
        if one.bdf is None and (one.pcie_root is not None or one.numa_node is not None):
            like = (
                bdf
                for bdf, gpu in gpus.items()
                if bdf not in found
                and one.pcie_root in (None, gpu.root_complex)
                and one.numa_node in (None, gpu.reported_node)
            )
            found += islice(like, 1)
    return tuple(found)


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
