"""ManifestWishes: what the manifests of a cluster are asked for."""

from dataclasses import dataclass
from enum import StrEnum


class HookVersion(StrEnum):
    """Versions of the hook's protocol. v1alpha3 ends the sidecar with the VM."""

    V1ALPHA1 = "v1alpha1"
    V1ALPHA2 = "v1alpha2"
    V1ALPHA3 = "v1alpha3"


@dataclass(frozen=True, slots=True)
class ManifestWishes:
    """image: where the sidecar's image will be. gpu: the resource's name. memory_gib, vcpus, gpus:
    of the example VM. guest: user@host of the VM to measure over ssh."""

    image: str = "registry.example/homenode-sidecar:latest"
    namespace: str = "default"
    vm: str = "gpu-vm"
    gpu: str = "nvidia.com/GA100_A100_SXM4_40GB"
    gpus: int = 8
    vcpus: int = 96
    memory_gib: int = 512
    hook_version: HookVersion = HookVersion.V1ALPHA3
    kubevirt: str = "v1.6.0"
    guest: str = "cloud@gpu-vm"
    node: str | None = None
