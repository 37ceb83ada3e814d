"""Claims: devices of Dynamic Resource Allocation, from ResourceSlices and ResourceClaims.

Source: resource.k8s.io/v1; k8s.io/dynamic-resource-allocation/deviceattribute for the standard
attributes pcieRoot and pciBusID. The NUMA node has no standard name: any driver's numaNode counts.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cluster.pods.objects import down
from homenode.errors import InputError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host

PCI_BUS_ID = "resource.kubernetes.io/pciBusID"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
_NUMA_NAMES = ("numaNode", "numa")

DeviceKey = tuple[str, str, str]
"""Driver, pool and name."""


class ClaimedDevice(Struct, frozen=True, kw_only=True):
    """A device that a driver publishes. node: the cluster's; None = not of one node. numa_attribute:
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
