"""Kubelet: the settings of a node's kubelet that decide whether CPUs, memory and devices align.

Source: kubelet.config.k8s.io/v1beta1, KubeletConfiguration;
`kubectl get --raw /api/v1/nodes/NODE/proxy/configz` prints it as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.kubevirt.vmi import down, read_object

_HINT = "try: kubectl get --raw /api/v1/nodes/NODE/proxy/configz"


@dataclass(frozen=True, slots=True)
class Kubelet:
    """Policies as kubelet names them; its defaults where the configuration says nothing.

    reserved_pus: never given to a container. reserves_cpu: CPU is reserved in any way, without
    which the static policy does not start. seccomp_default: pods that name no seccomp profile run
    under the container runtime's.
    """

    cpu_policy: str
    cpu_options: Mapping[str, str]
    topology_policy: str
    topology_options: Mapping[str, str]
    memory_policy: str
    reserved_pus: CpuSet
    reserves_cpu: bool
    seccomp_default: bool

    def has_cpu_option(self, name: str) -> bool:
        return self.cpu_options.get(name) == "true"

    @property
    def most_nodes(self) -> int:
        """NUMA nodes on which Topology Manager agrees to work; 8 is kubelet's default."""
        text = self.topology_options.get("max-allowable-numa-nodes", "")
        return int(text) if text.isdecimal() and len(text) < 6 else 8


def read_kubelet(text: str | bytes, source: str) -> Kubelet:
    """The settings of a KubeletConfiguration as JSON, bare or as configz wraps it.

    Raises InputError for what is no such object.
    """
    document = read_object(text, source, "a KubeletConfiguration")
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
        reserves_cpu=bool(reserved)
        or any(down(inner, kind, "cpu") for kind in ("systemReserved", "kubeReserved")),
        seccomp_default=inner.get("seccompDefault") is True,
    )


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
