"""Cluster: what a cluster's KubeVirt CR says: its version, feature gates and permitted devices.

Source: kubevirt.io/v1, KubeVirtConfiguration; pkg/virt-config/featuregate of v1.6.1 to v1.9.0.
"""

from collections.abc import Mapping

from msgspec import Struct, field

from homenode.cluster.pods.objects import down, read_object
from homenode.errors import InputError

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


MACHINES = {
    "amd64": ("q35", "q35*", "pc-q35*"),
    "arm64": ("virt", "virt*"),
    "s390x": ("s390-ccw-virtio", "s390-ccw-virtio*"),
}
"""By architecture the machine of VMIs that name none, and the patterns of those that are allowed,
where the CR says neither: pkg/virt-config."""


class Cluster(Struct, frozen=True):
    """gates: that are on. version: as observed, None where the CR says none. permitted: resource
    names of permittedHostDevices, None where there is no such list. machines: what
    emulatedMachines allows by architecture, default_machines: its machineType; by "" for all.
    """

    gates: frozenset[str]
    version: tuple[int, int] | None = None
    permitted: frozenset[str] | None = None
    machines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_machines: Mapping[str, str] = field(default_factory=dict)

    def machines_of(self, architecture: str) -> tuple[str, ...]:
        """Patterns of the machine types that admission takes."""
        _, *default = MACHINES.get(architecture, MACHINES["amd64"])
        return self.machines.get("") or self.machines.get(architecture) or tuple(default)

    def default_machine(self, architecture: str) -> str:
        """The machine of a VMI that names none."""
        default, *_ = MACHINES.get(architecture, MACHINES["amd64"])
        given = self.default_machines
        return given.get("") or given.get(architecture) or default

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
    lists, defaults = (_by_architecture(config, key) for key in ("emulatedMachines", "machineType"))
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
        {name: tuple(sorted(found)) for name, one in lists.items() if (found := _texts(one))},
        {name: one for name, one in defaults.items() if isinstance(one, str) and one},
    )


def _by_architecture(config: object, key: str) -> dict[str, object]:
    """A setting of the whole cluster, by "", and those of its architectures."""
    of_all = {"": down(config, key)}
    own = {name: down(config, "architectureConfiguration", name, key) for name in MACHINES}
    return of_all | own


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
