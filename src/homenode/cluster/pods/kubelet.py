"""Kubelet: the settings of a kubelet that decide whether CPUs, memory and devices align.

Source: kubelet.config.k8s.io/v1beta1, KubeletConfiguration;
`kubectl get --raw /api/v1/nodes/NODE/proxy/configz` prints it as JSON.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from homenode.cluster.kubevirt.object import down, parse_milli, parse_quantity, read_manifest
from homenode.cluster.pods.cpu_assignment import AssignmentOptions
from homenode.cluster.pods.node import KubeletPolicies
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.topology import Host

_TRUE = ("1", "t", "true")
_HINT = "try: kubectl get --raw /api/v1/nodes/NODE/proxy/configz"


class Kubelet(Struct, frozen=True, kw_only=True):
    """Policies as kubelet names them; its defaults where the configuration says nothing.

    reserved_pus: never given to a container. reserved_cpu_count: CPUs that are reserved by number;
    without either the static policy does not start. reserved_memory_bytes: node -> resource ->
    bytes. seccomp_default: pods that name no seccomp profile run under the container runtime's.
    """

    cpu_policy: str
    cpu_options: Mapping[str, str]
    topology_policy: str
    topology_options: Mapping[str, str]
    memory_policy: str
    reserved_pus: CpuSet
    seccomp_default: bool
    topology_scope: str = "container"
    reserved_cpu_count: int = 0
    reserved_memory_bytes: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def has_cpu_option(self, name: str) -> bool:
        return self.cpu_options.get(name) in _TRUE

    def policies(self) -> KubeletPolicies:
        """What admission depends on."""
        most = self.topology_options.get("max-allowable-numa-nodes", "")
        return KubeletPolicies(
            topology_policy=self.topology_policy,
            scope=self.topology_scope,
            prefer_closest=self.topology_options.get("prefer-closest-numa-nodes") in _TRUE,
            most_nodes=int(most) if most.isdecimal() and len(most) < 6 else 8,
            cpu_policy=self.cpu_policy,
            assignment=AssignmentOptions(
                full_pcpus_only=self.has_cpu_option("full-pcpus-only"),
                distribute_cpus_across_numa=self.has_cpu_option("distribute-cpus-across-numa"),
                distribute_cpus_across_cores=self.has_cpu_option("distribute-cpus-across-cores"),
                prefer_align_cpus_by_uncorecache=self.has_cpu_option(
                    "prefer-align-cpus-by-uncorecache"
                ),
            ),
            align_by_socket=self.has_cpu_option("align-by-socket"),
            reserved_cpus=frozenset(map(int, self.reserved_pus)) if self.reserved_pus else None,
            reserved_cpu_count=self.reserved_cpu_count,
            memory_policy=self.memory_policy,
            reserved_memory_bytes=self.reserved_memory_bytes,
        )


def usual_kubelet(host: Host) -> Kubelet:
    """A kubelet that aligns, where none is given: one core is reserved."""
    core = min(host.cores, key=lambda core: min(core.pus)).pus if host.cores else CpuSet()
    return Kubelet(
        cpu_policy="static",
        cpu_options={"full-pcpus-only": "true"},
        topology_policy="single-numa-node",
        topology_options={},
        memory_policy="Static",
        reserved_pus=core,
        seccomp_default=False,
    )


def read_kubelet(text: str | bytes, source: str) -> Kubelet:
    """The settings of a KubeletConfiguration as YAML or JSON, bare or as configz wraps it.

    Raises InputError for what is no such object.
    """
    encoded = text.encode() if isinstance(text, str) else text
    document = read_manifest(encoded, source, "a KubeletConfiguration")
    inner = document.get("kubeletconfig", document)
    if not isinstance(inner, dict) or inner.get("kind") not in (None, "KubeletConfiguration"):
        found = inner.get("kind") if isinstance(inner, dict) else type(inner).__name__
        raise InputError(f"{source}: expected a KubeletConfiguration, found {found!r}", hint=_HINT)
    reserved = _text(inner, "reservedSystemCPUs", "", source)
    return Kubelet(
        cpu_policy=_text(inner, "cpuManagerPolicy", "none", source),
        cpu_options=_texts(inner.get("cpuManagerPolicyOptions")),
        topology_policy=_text(inner, "topologyManagerPolicy", "none", source),
        topology_options=_texts(inner.get("topologyManagerPolicyOptions")),
        memory_policy=_text(inner, "memoryManagerPolicy", "None", source),
        reserved_pus=CpuSet.parse(reserved, f"{source}: reservedSystemCPUs"),
        seccomp_default=inner.get("seccompDefault") is True,
        topology_scope=_text(inner, "topologyManagerScope", "container", source),
        reserved_cpu_count=-(-sum(_reserved_milli(inner, source)) // 1000),
        reserved_memory_bytes=_reserved_memory(inner.get("reservedMemory"), source),
    )


def _reserved_milli(config: Mapping[str, Any], source: str) -> Iterator[int]:
    for kind in ("systemReserved", "kubeReserved"):
        cpu = down(config, kind, "cpu")
        yield 0 if cpu is None else parse_milli(cpu, f"{source}: {kind}.cpu")


def _reserved_memory(value: Any, source: str) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    for entry in value if isinstance(value, list) else ():
        number, limits = down(entry, "numaNode"), down(entry, "limits")
        if not isinstance(number, int) or not isinstance(limits, dict):
            raise InputError(f"{source}: expected reservedMemory of numaNode and limits")
        found[number] = {
            str(name): parse_quantity(size, f"{source}: reservedMemory")
            for name, size in limits.items()
        }
    return found


def _text(config: Mapping[str, Any], name: str, default: str, source: str) -> str:
    value = config.get(name)
    if value is None or value == "":
        return default
    if not isinstance(value, str):
        raise InputError(f"{source}: expected {name} to be a text, found {type(value).__name__}")
    return value


def _texts(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict):
        return {}
    return {str(name): str(text).lower() for name, text in value.items()}
