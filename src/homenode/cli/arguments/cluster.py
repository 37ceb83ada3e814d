"""What is asked of pod, kubevirt and nccl-topo. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import (
    DeviceOption,
    ForceOption,
    HostOption,
    JsonOption,
    KubeletOption,
    LspciOption,
)
from homenode.cluster.kubevirt.manifest_options import ManifestOptions, OnError
from homenode.opt import Arg, Flag, Opt
from homenode.vm.plan_options import PciGranularity

MAKE = "Make a file"
JUDGE = "Check a file"
EXPLAIN = "Explain"


class NodeOptions(Struct, frozen=True, kw_only=True):
    """The node or nodes that a pod is for, and what runs there."""

    host: Annotated[
        str | None,
        Opt("--host", "SOURCE", "The node: a capture made there, or any other source of a host."),
    ] = None
    pool: Annotated[
        tuple[str, ...],
        Opt("--pool", "POOL", "Nodes as in `pool show`: which of them admit the pod."),
    ] = ()
    kubelet: KubeletOption = None
    state: Annotated[
        Path | None,
        Opt(
            "--state",
            "DIR",
            "What runs: a folder with the node's cpu_manager_state, memory_manager_state and "
            "kubelet_internal_checkpoint (of /var/lib/kubelet); with --pool a folder of such "
            "folders, by node. Default: nothing runs.",
        ),
    ] = None
    device: DeviceOption = ()


class PodFitArguments(Struct, frozen=True, kw_only=True):
    """Say whether a node's kubelet admits a pod, why not, and the smallest change that helps.

    Examples:
      homenode pod fit pod.yaml --host node-7.tar.gz --kubelet configz.json --state kubelet/
      homenode pod fit job.yaml --pool 'hgx-h100*4'
    """

    pod: Annotated[Path, Arg("POD.yaml", "A Pod, Deployment, Job or their like.")]
    node: NodeOptions = NodeOptions()
    claims: Annotated[
        Path | None,
        Opt("--claims", "FILE", "With --host: kubectl get resourceclaims,resourceslices -o json."),
    ] = None
    json: JsonOption = False


class OnDefineDomainArguments(Struct, frozen=True, kw_only=True):
    """Place a VM's devices on its cells, and print the new document.

    The file onDefineDomain that manifest writes does the same without homenode, and starts faster.

    Examples:
      homenode kubevirt on-define-domain --vmi "$VMI" --domain "$DOMAIN"
      homenode kubevirt on-define-domain --vmi "$VMI" --domain "$DOMAIN" --root node
    """

    vmi: Annotated[str, Opt("--vmi", "JSON", "The VirtualMachineInstance, as the shim gives it.")]
    domain: Annotated[str, Opt("--domain", "XML", "The domain document, as the shim gives it.")]
    on_error: Annotated[
        OnError | None,
        Opt(
            "--on-error",
            "NAME",
            "What happens to the VM if its devices cannot be placed. Default: the VM's annotation "
            "homenode/on-error, else fail.",
        ),
    ] = None
    pci_granularity: Annotated[
        PciGranularity | None,
        Opt(
            "--pci-granularity",
            "NAME",
            "What gets an expander bus of its own. Default: the VM's annotation "
            "homenode/pci-granularity, else cell.",
        ),
    ] = None
    root: Annotated[str, Opt("--root", "DIR", "Folder with the host's /sys, such as /host.")] = "/"


class KubevirtReceiveArguments(Struct, frozen=True, kw_only=True):
    """Store a run that a guest sends as a tar on standard input.

    Anything else in the tar, links, and a run that exists already are refused.

    Examples:
      homenode kubevirt receive run-1 --results results < run.tar
      ssh guest 'tar -C results -c run-1' | homenode kubevirt receive run-1 --results results
    """

    name: Annotated[str, Arg("NAME", "The run that the guest measured.")]
    results: Annotated[Path, Opt("--results", "DIR", "Where runs of all VMs are kept.")]


class KubevirtCheckArguments(Struct, frozen=True, kw_only=True):
    """Check whether a VM's CPUs, huge pages, GPUs and cells fit together on a node.

    Examples:
      homenode kubevirt check vmi.json --host node.tar.gz
      homenode kubevirt check vmi.json --kubelet configz.json --kubevirt kubevirt.json
    """

    vmi: Annotated[Path, Arg("VMI.json", "kubectl get vmi NAME -o json, or a VirtualMachine's.")]
    kubelet: Annotated[
        Path | None,
        Opt("--kubelet", "FILE", "kubectl get --raw /api/v1/nodes/NODE/proxy/configz, as a file."),
    ] = None
    kubevirt: Annotated[
        Path | None,
        Opt("--kubevirt", "FILE", "kubectl get kubevirt -A -o json, as a file: its feature gates."),
    ] = None
    planned: Annotated[
        Path | None,
        Opt("--planned", "FILE", "The VM as it was planned: whatever differs of it is a finding."),
    ] = None
    host: Annotated[
        str | None,
        Opt(
            "--host",
            "SOURCE",
            "The node: a capture made there, or any other source of a host. Without it the node "
            "is not checked.",
        ),
    ] = None
    json: JsonOption = False


class KubevirtFitArguments(Struct, frozen=True, kw_only=True):
    """Say whether a node's kubelet admits a VM's pod, why not, and the smallest change that helps.

    Examples:
      homenode kubevirt fit vm.yaml --host node-7.tar.gz --kubelet configz.json
      homenode kubevirt fit vm.yaml --pool captures/
    """

    vmi: Annotated[Path, Arg("VMI.yaml", "A VirtualMachineInstance or a VirtualMachine.")]
    node: NodeOptions = NodeOptions()
    json: JsonOption = False


class KubevirtManifestArguments(Struct, frozen=True, kw_only=True):
    """Write the hook (image or ConfigMap), the gates, a VM with the hook, and measuring jobs.

    Examples:
      homenode kubevirt manifest --configmap -o manifests
      homenode kubevirt manifest -o manifests --gpus 2 --memory 128GiB
    """

    output: Annotated[Path, Opt("--output -o", "DIR", "Folder to write to.")]
    manifest: ManifestOptions = ManifestOptions()


class NcclTopoArguments(Struct, frozen=True, kw_only=True):
    """Write the PCIe topology file for NCCL or RCCL in a guest.

    It gives them the host's PCIe tree. A guest sees neither the host's PCIe switches nor real link
    speeds: NCCL then pairs GPUs with far NICs, and computes bandwidths from virtual ports.

    Examples:
      homenode nccl-topo --domain VM.xml --plan plan.json -o topo.xml
      homenode nccl-topo --explain --domain VM.xml
    """

    host: HostOption = None
    lspci: LspciOption = None
    domain: Annotated[
        Path | None,
        Opt("--domain", "FILE", "The domain document that the VM runs with.", panel=MAKE),
    ] = None
    plan: Annotated[
        Path | None,
        Opt(
            "--plan",
            "PLAN.json",
            "The saved plan of this document: its pins and cells are used.",
            panel=MAKE,
        ),
    ] = None
    guest: Annotated[
        str | None,
        Opt(
            "--guest",
            "SOURCE",
            "The guest's own view, a capture made inside it or ssh:HOST: its bus numbers.",
            panel=MAKE,
        ),
    ] = None
    nvidia_smi: Annotated[
        Path | None,
        Opt(
            "--nvidia-smi",
            "FILE",
            "The host's nvidia-smi -q -x: whether these GPUs are a Fabric Manager partition.",
            panel=MAKE,
            rare=True,
        ),
    ] = None
    output: Annotated[
        Path | None,
        Opt("--output -o", "FILE", "Write the file here. Default: standard output.", panel=MAKE),
    ] = None
    rccl: Annotated[bool, Flag("--rccl", "Write the file's version for AMD's RCCL.", rare=True)] = (
        False
    )
    cloud_init: Annotated[
        Path | None,
        Opt(
            "--cloud-init",
            "FILE",
            "Write a cloud-init snippet here that puts the file in its place in the guest.",
            panel=MAKE,
            rare=True,
        ),
    ] = None
    check: Annotated[
        Path | None,
        Opt(
            "--check",
            "FILE",
            "Check a file by the rules of NCCL's parser; with --domain also against the VM.",
            panel=JUDGE,
        ),
    ] = None
    log: Annotated[
        Path | None,
        Opt(
            "--log",
            "FILE",
            "A job's log with NCCL_DEBUG=INFO: its network, and whether NCCL took the file.",
            panel=JUDGE,
        ),
    ] = None
    explain: Annotated[
        bool,
        Flag(
            "--explain",
            "What NCCL will do: nodes, paths, P2P, threads, buffers, the ceiling of memory. Of "
            "--guest, --domain or --plan, else of the host; --check names the file it gets.",
            panel=EXPLAIN,
        ),
    ] = False
    stream: Annotated[
        str | None,
        Opt(
            "--stream",
            "GB/S[,...]",
            "For --explain: STREAM of each guest node. Default: a published figure.",
            panel=EXPLAIN,
            rare=True,
        ),
    ] = None
    port_rate: Annotated[
        float | None,
        Opt(
            "--port-rate",
            "GBIT/S",
            "For --explain: the rate of each NIC's port. Default: the most that its model can.",
            panel=EXPLAIN,
            rare=True,
        ),
    ] = None
    force: ForceOption = False
    json: JsonOption = False
