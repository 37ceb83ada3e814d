"""ManifestOptions: choices of the hook and of the manifests that a cluster gets."""

from dataclasses import dataclass
from enum import StrEnum


class OnError(StrEnum):
    """What becomes of a VM whose devices could not be placed, as options and annotations say it."""

    FAIL = "fail"  # it does not start, and KubeVirt tries again
    PASSTHROUGH = "passthrough"  # it starts as KubeVirt made it


class HookVersion(StrEnum):
    """Versions of the hook's protocol. v1alpha3 ends the sidecar with the VM."""

    V1ALPHA1 = "v1alpha1"
    V1ALPHA2 = "v1alpha2"
    V1ALPHA3 = "v1alpha3"


class ClaimScope(StrEnum):
    """What the devices of a claim have in common, by the attribute that DRA drivers publish."""

    PCIE_ROOT = "pcie-root"
    NUMA_NODE = "numa-node"

    @property
    def attribute(self) -> str:
        name = "pcieRoot" if self is ClaimScope.PCIE_ROOT else "numaNode"
        return f"resource.kubernetes.io/{name}"


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """configmap: the hook comes from a ConfigMap, on KubeVirt's own sidecar image. image: where the
    sidecar's image will be. bench_image: that of the jobs that measure. gpu: the resource's name.
    gpu_id: the GPU's PCI vendor and device. memory_gib, vcpus, gpus: of the example VM. guest:
    user@host of the VM to measure over ssh. claims: the GPUs come from DRA claims, with as many
    NICs where nic_class is given; None = from a device plugin."""

    configmap: bool = False
    image: str = "registry.example/homenode-sidecar:latest"
    bench_image: str = "registry.example/homenode-bench:latest"
    namespace: str = "default"
    vm: str = "gpu-vm"
    gpu: str = "nvidia.com/GA100_A100_SXM4_40GB"
    gpu_id: str = "10DE:20B0"
    gpus: int = 8
    vcpus: int = 96
    memory_gib: int = 512
    hook_version: HookVersion = HookVersion.V1ALPHA3
    kubevirt: str = "v1.6.0"
    guest: str = "cloud@gpu-vm"
    node: str | None = None
    claims: ClaimScope | None = None
    gpu_class: str = "vfio.gpu.nvidia.com"
    nic_class: str | None = None
