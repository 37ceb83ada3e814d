"""Cluster: what a cluster's KubeVirt CR says: its version, feature gates and permitted devices.

Source: kubevirt.io/v1, KubeVirtConfiguration; pkg/virt-config/featuregate of v1.6.1 to v1.9.0.
"""

from dataclasses import dataclass

from homenode.errors import InputError
from homenode.pods.objects import down, read_object

FIRST_VERSION = {
    "GPUsWithDRA": (1, 6),
    "HostDevicesWithDRA": (1, 6),
    "PCINUMAAwareTopology": (1, 8),
    "NetworkDevicesWithDRA": (1, 9),
    "GraceIOVirtualization": (1, 9),
    "IOMMUFD": (1, 9),
    "Plugins": (1, 9),
}
"""Gates of interest and the first KubeVirt that has them; older ones ignore them silently."""

ON_SINCE = {"GPUsWithDRA": (1, 9), "HostDevicesWithDRA": (1, 9)}
"""Beta gates: on unless they are disabled."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """gates: that are on. version: as observed, None where the CR says none. permitted: resource
    names of permittedHostDevices, None where there is no such list."""

    gates: frozenset[str]
    version: tuple[int, int] | None = None
    permitted: frozenset[str] | None = None

    def has_gate(self, name: str) -> bool:
        """On, and known to the version: KubeVirt ignores a gate that it does not have."""
        return name in self.gates and not self.is_unknown(name)

    def is_unknown(self, name: str) -> bool:
        first = FIRST_VERSION.get(name)
        return first is not None and self.version is not None and self.version < first


def read_cluster(text: str | bytes, source: str) -> Cluster:
    """The KubeVirt CR as JSON, or a list of one. Raises InputError."""
    document = read_object(text, source, "a KubeVirt CR")
    items = document.get("items")
    cr = items[0] if isinstance(items, list) and len(items) == 1 else document
    kind = down(cr, "kind")
    if kind != "KubeVirt":
        raise InputError(
            f"{source}: expected one object of kind KubeVirt, found {kind!r}",
            hint="try: kubectl get kubevirt -A -o json",
        )
    config = down(cr, "spec", "configuration")
    developer = down(config, "developerConfiguration")
    permitted = down(config, "permittedHostDevices")
    version = _version(down(cr, "status", "observedKubeVirtVersion"))
    by_default = {name for name, since in ON_SINCE.items() if version and version >= since}
    off = _texts(down(developer, "disabledFeatureGates"))
    return Cluster(
        _texts(down(developer, "featureGates")) | (by_default - off),
        version,
        None
        if permitted is None
        else frozenset(
            name
            for kind in ("pciHostDevices", "mediatedDevices", "usb")
            for name in _names(down(permitted, kind))
        ),
    )


def _texts(value: object) -> frozenset[str]:
    return (
        frozenset(t for t in value if isinstance(t, str))
        if isinstance(value, list)
        else (frozenset())
    )


def _names(value: object) -> frozenset[str]:
    listed = value if isinstance(value, list) else []
    return _texts([down(one, "resourceName") for one in listed])


def _version(value: object) -> tuple[int, int] | None:
    parts = str(value or "").removeprefix("v").split(".")
    if len(parts) < 2 or not all(p.isdecimal() and len(p) < 6 for p in parts[:2]):
        return None
    return int(parts[0]), int(parts[1])
