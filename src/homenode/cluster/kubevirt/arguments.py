"""Arguments of the commands of kubevirt. [I/O]"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import ExplainOption, JsonOption
from homenode.errors import UsageError
from homenode.option import Arg, Opt, size_bytes
from homenode.units import GIB, parse_whole
from homenode.vm.plan_options import PciGranularity


class OnError(StrEnum):
    """Handling of a VM whose devices could not be placed: values of options and annotations."""

    FAIL = "fail"  # it does not start, and KubeVirt tries again
    PASSTHROUGH = "passthrough"  # it starts as KubeVirt made it


NATIVE_GATE = "PCINUMAAwareTopology"
"""KubeVirt's own placement of devices, Alpha in 1.8 and 1.9."""
NATIVE_SINCE = (1, 8)
TESTED_VERSIONS = ((1, 6), (1, 9))
"""The oldest and the newest KubeVirt that homenode was tested with."""
SIDECAR_IMAGE = "registry.example/homenode-sidecar:1"
"""An example of the name of the hook's image."""


class HookVersion(StrEnum):
    """Versions of the hook's protocol. v1alpha3 ends the sidecar with the VM."""

    V1ALPHA1 = "v1alpha1"
    V1ALPHA2 = "v1alpha2"
    V1ALPHA3 = "v1alpha3"


def parse_version(value: object) -> tuple[int, int] | None:
    """Return (major, minor) of a version such as v1.9.0, None for another text.

    >>> parse_version("v1.9.0"), parse_version("latest")
    ((1, 9), None)
    """
    parts = str(value or "").removeprefix("v").split(".")
    match [parse_whole(part, digits=5) for part in parts[:2]]:
        case [int(major), int(minor)]:
            return major, minor
    return None


def parse_whole_gib(text: str, option: str) -> int:
    """Return the GiB of a size. Raises UsageError for fractions."""
    suffix = "B" if text.endswith(("Ki", "Mi", "Gi", "Ti")) else ""  # as Kubernetes writes them
    gib, remainder = divmod(size_bytes(text + suffix, option), GIB)
    if remainder or not gib:
        raise UsageError(f"{option} {text}: expected whole GiB, such as 64GiB")
    return gib


class ManifestOptions(Struct, frozen=True, kw_only=True):
    """Options of a cluster's manifests.

    Options:
      image: The hook's image in your registry. Default: a ConfigMap.
      bench_image: The image of the measuring jobs in your registry.
      vm: Name of the example VM.
      namespace: Namespace of the VM, the ConfigMap and the jobs.
      gpu: The GPU's resource name in the cluster.
      gpu_id: The GPU's PCI ids (lspci -n), for permittedHostDevices. Default: the A100's, for the
        default --gpu.
      gpus: Number of GPUs of the VM.
      vcpus: Number of vCPUs of the VM.
      memory_gib: Memory of the VM in GiB.
      hook_version: Version of the hook's interface: v1alpha1, v1alpha2, v1alpha3. Default:
        v1alpha3, which ends the sidecar with the VM.
      kubevirt: KubeVirt's version in the cluster, v1.6 or newer. From v1.8 on, the steps also name
        the feature gate PCINUMAAwareTopology.
      guest: The guest to measure in, over ssh. Default: cloud@, and the name of --vm.
    """

    image: Annotated[str | None, Opt("--image", "IMAGE")] = None
    bench_image: Annotated[str, Opt("--bench-image", "IMAGE")] = (
        "registry.example/homenode-bench:latest"
    )
    vm: Annotated[str, Opt("--vm", "NAME")] = "gpu-vm"
    namespace: Annotated[str, Opt("--namespace", "NAME")] = "default"
    gpu: Annotated[str, Opt("--gpu", "RESOURCE")] = "nvidia.com/GA100_A100_SXM4_40GB"
    gpu_id: Annotated[str | None, Opt("--gpu-id", "VENDOR:DEVICE")] = None
    gpus: Annotated[int, Opt("--gpus", "N")] = 8
    vcpus: Annotated[int, Opt("--vcpus", "N")] = 192
    memory_gib: Annotated[
        int, Opt("--memory", "SIZE", parse=parse_whole_gib, show=lambda gib: f"{gib}GiB")
    ] = 512
    hook_version: Annotated[HookVersion, Opt("--hook-version", "NAME")] = HookVersion.V1ALPHA3
    kubevirt: Annotated[str, Opt("--kubevirt", "VERSION")] = "v1.6.0"
    guest: Annotated[str | None, Opt("--guest", "USER@HOST")] = None


class OnDefineDomainArguments(Struct, frozen=True, kw_only=True):
    """Place a VM's devices on its cells, and print the new definition.

    The script in the ConfigMap that manifest writes makes the same tree without homenode.

    Options:
      vmi: The VirtualMachineInstance, as the shim passes it.
      domain: The domain XML, as the shim passes it.
      on_error: After an error; fail: the VM does not start, and KubeVirt tries again; passthrough:
        it starts with KubeVirt's definition, and the log reports the error. Default: the VM's
        annotation, else fail.
      pci_granularity: Create an expander bus for each cell, root-complex or switch. Default: the
        VM's annotation, else cell.
      root: Path of the host's /sys in the container.

    Examples:
      homenode kubevirt on-define-domain --vmi "$VMI" --domain "$DOMAIN"
      homenode kubevirt on-define-domain --vmi "$VMI" --domain "$DOMAIN" --root node
    """

    vmi: Annotated[str, Opt("--vmi", "JSON")]
    domain: Annotated[str, Opt("--domain", "XML")]
    on_error: Annotated[OnError | None, Opt("--on-error", "NAME")] = None
    pci_granularity: Annotated[PciGranularity | None, Opt("--pci-granularity", "NAME")] = None
    root: Annotated[str, Opt("--root", "DIR")] = "/"


class KubevirtReceiveArguments(Struct, frozen=True, kw_only=True):
    """Store a run that a guest sends as a tar on standard input.

    Other content in the tar, links, and existing runs are rejected.

    Options:
      name: Name of the run, RUN of results/SYSTEM/RUN in the guest; the tar has SYSTEM/RUN.
      results: Results directory to write the run to.

    Examples:
      homenode kubevirt receive run-1 --results results < run.tar
      ssh vm 'tar -C results -c vm/run-1' | homenode kubevirt receive run-1 --results results
    """

    name: Annotated[str, Arg("NAME")]
    results: Annotated[Path, Opt("--results", "DIR")]


class KubevirtCheckArguments(Struct, frozen=True, kw_only=True):
    """Check whether a VM's CPUs, huge pages, guest nodes and GPUs fit together on a node.

    Options:
      vmi: Output of kubectl get vmi NAME -o json, or of a VirtualMachine; also YAML.
      host: The host of the node, as for show, for example a capture made there; without it the node
        is not checked.
      kubevirt: Output of kubectl get kubevirt -A -o yaml (or json), as a file: KubeVirt's
        version, feature gates and permitted devices.

    Examples:
      homenode kubevirt check vmi.json --host node.tar.gz
      homenode kubevirt check vmi.json --kubevirt kubevirt.json
    """

    vmi: Annotated[Path, Arg("VMI.json")]
    host: Annotated[str | None, Opt("--host", "SOURCE", complete="host_sources")] = None
    kubevirt: Annotated[Path | None, Opt("--kubevirt", "FILE")] = None
    explain: ExplainOption = False
    json: JsonOption = False


class KubevirtManifestArguments(Struct, frozen=True, kw_only=True):
    """Write the hook (image or ConfigMap), the gates, a VM with the hook, and measuring jobs.

    Options:
      output: Directory to write to; existing files are not overwritten.

    Examples:
      homenode kubevirt manifest -o manifests --image registry.example/sidecar:1
      homenode kubevirt manifest -o manifests --gpus 2 --memory 128GiB
    """

    output: Annotated[Path, Opt("--output -o", "DIR")]
    manifest: ManifestOptions = ManifestOptions()
