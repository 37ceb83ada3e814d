"""Pod: what a pod asks of its node, as the kubelet's managers count it.

Source: Kubernetes core/v1 PodSpec; component-helpers/resource for sums over containers;
pkg/apis/core/v1/helper/qos for the class.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from homenode.cluster.kubevirt.object import down, is_whole, parse_milli, parse_quantity
from homenode.errors import InputError

MEMORY = "memory"
HUGE_PAGES = "hugepages-"
_OTHERS = ("ephemeral-storage", "storage")


class Container(Struct, frozen=True, kw_only=True):
    """cpu_milli: thousandths of a CPU that it requests. memory_bytes: by resource, `memory` and
    `hugepages-SIZE`. devices: by resource name. is_init: it runs before the others; restarts: an
    init container that stays (restartPolicy Always). is_guaranteed: CPU and memory have limits that
    equal the requests. has_whole_bytes: the static memory manager refuses fractions of a byte.
    """

    name: str
    cpu_milli: int = 0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    is_init: bool = False
    restarts: bool = False
    is_guaranteed: bool = True
    has_whole_bytes: bool = True


class Pod(Struct, frozen=True, kw_only=True):
    """containers: init containers first, in the order in which the kubelet admits them.

    pod_level: resources of the pod as a whole are set, which the managers of Kubernetes up to 1.35
    do not align. claims: names of its resource claims, whose devices its requests do not name.
    claimed: the devices that they have got, with their NUMA nodes.
    """

    name: str
    containers: tuple[Container, ...]
    pod_level: bool = False
    claims: tuple[str, ...] = ()
    claimed: tuple[tuple[str, int | None], ...] = ()

    @property
    def is_guaranteed(self) -> bool:
        """Quality of service `Guaranteed`: the class whose CPUs and memory are its own."""
        return bool(self.containers) and all(c.is_guaranteed for c in self.containers)

    def cpus_of(self, container: Container) -> int:
        """CPUs of its own that a container gets; 0 where it shares those of the node."""
        whole, rest = divmod(container.cpu_milli, 1000)
        return 0 if rest or not self.is_guaranteed else whole

    @property
    def cpu_milli(self) -> int:
        """What the scheduler counts, an init container that asks for more among it."""
        return self._together(lambda c: {"cpu": c.cpu_milli}).get("cpu", 0)

    @property
    def cpus(self) -> int:
        return self._together(lambda c: {"cpu": self.cpus_of(c)}).get("cpu", 0)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Of the containers that stay, or of an init container where that is more."""
        staying = {name for c in self.containers if not c.is_init for name in c.memory_bytes}
        every = self._together(lambda c: c.memory_bytes)
        return {name: size for name, size in every.items() if name in staying}

    @property
    def devices(self) -> dict[str, int]:
        return self._together(lambda c: c.devices)

    def _together(self, of: Callable[[Container], Mapping[str, int]]) -> dict[str, int]:
        staying: dict[str, int] = {}
        most: dict[str, int] = {}
        for container in self.containers:
            for name, size in of(container).items():
                if not container.is_init or container.restarts:
                    staying[name] = staying.get(name, 0) + size
                if container.is_init:
                    before = staying.get(name, 0) + (0 if container.restarts else size)
                    most[name] = max(most.get(name, 0), before)
        return {name: max(staying.get(name, 0), most.get(name, 0)) for name in {**staying, **most}}


def read_pod(document: Mapping[str, Any], source: str) -> Pod:
    """A Pod, or the template of a Deployment, Job and their like. Raises InputError, ParseError."""
    spec, name = _pod_spec(document, source)
    containers = [
        *(_container(c, source, True) for c in _list(spec, "initContainers", source)),
        *(_container(c, source, False) for c in _list(spec, "containers", source)),
    ]
    if not any(not c.is_init for c in containers):
        raise InputError(f"{source}: expected containers in the pod's spec, found none")
    return Pod(
        name=name,
        containers=tuple(containers),
        pod_level=down(spec, "resources") is not None,
        claims=tuple(str(one.get("name")) for one in _list(spec, "resourceClaims", source)),
    )


def _pod_spec(document: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], str]:
    kind = document.get("kind")
    name = down(document, "metadata", "name") or down(document, "metadata", "generateName")
    spec = document.get("spec")
    if kind == "CronJob":
        spec = down(spec, "jobTemplate", "spec")
    template = down(spec, "template", "spec")
    found = spec if kind == "Pod" else template
    if not isinstance(found, Mapping):
        raise InputError(
            f"{source}: expected a Pod, or a workload with a pod template, found kind {kind!r}",
            hint="a KubeVirt VM is judged by: homenode kubevirt fit",
        )
    return found, str(name or "unnamed")


def _list(spec: Mapping[str, Any], name: str, source: str) -> list[Mapping[str, Any]]:
    found = spec.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise InputError(f"{source}: expected {name} to be a list of objects")
    return found


def _container(value: Mapping[str, Any], source: str, is_init: bool) -> Container:
    name = str(value.get("name") or "unnamed")
    where = f"{source}: container {name}"
    limits = _resources(value, "limits", where)
    requests = {**limits, **_resources(value, "requests", where)}
    memory = {
        resource: parse_quantity(size, f"{where}: {resource}")
        for resource, size in requests.items()
        if resource == MEMORY or resource.startswith(HUGE_PAGES)
    }
    devices = {
        resource: parse_quantity(count, f"{where}: {resource}")
        for resource, count in limits.items()
        if "/" in resource and resource not in _OTHERS
    }
    return Container(
        name=name,
        cpu_milli=parse_milli(requests.get("cpu", 0), f"{where}: cpu"),
        memory_bytes=memory,
        devices={resource: count for resource, count in devices.items() if count},
        is_init=is_init,
        restarts=is_init and value.get("restartPolicy") == "Always",
        is_guaranteed=_is_guaranteed(limits, requests, where),
        has_whole_bytes=all(
            is_whole(requests[resource], f"{where}: {resource}") for resource in memory
        ),
    )


def _is_guaranteed(limits: Mapping[str, Any], requests: Mapping[str, Any], where: str) -> bool:
    for resource in ("cpu", MEMORY):
        limit = parse_milli(limits.get(resource, 0), f"{where}: {resource}")
        if limit == 0 or limit != parse_milli(requests[resource], f"{where}: {resource}"):
            return False
    return True


def _resources(value: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    found = down(value, "resources", kind)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InputError(f"{where}: expected resources.{kind} to be an object")
    return {str(name): size for name, size in found.items()}
