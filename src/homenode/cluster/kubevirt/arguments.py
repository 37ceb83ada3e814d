"""Arguments of the commands of kubevirt. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import ExplainOption, JsonOption
from homenode.cluster.kubevirt.manifest_options import ManifestOptions, OnError
from homenode.option import Arg, Opt
from homenode.vm.plan_options import PciGranularity


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

    Anything else in the tar, links, and a run that exists already are refused.

    Options:
      name: Name of the run to receive, as bench --name has it in the guest.
      results: Results directory to write the run to.

    Examples:
      homenode kubevirt receive run-1 --results results < run.tar
      ssh guest 'tar -C results -c run-1' | homenode kubevirt receive run-1 --results results
    """

    name: Annotated[str, Arg("NAME")]
    results: Annotated[Path, Opt("--results", "DIR")]


class KubevirtCheckArguments(Struct, frozen=True, kw_only=True):
    """Check whether a VM's CPUs, huge pages, guest nodes and GPUs go together on a node.

    Options:
      vmi: What kubectl get vmi NAME -o json prints, or a VirtualMachine's; YAML as well.
      host: The host of the node, as for show, for example a capture made there; without it the node
        is not checked.
      kubevirt: What kubectl get kubevirt -A -o yaml (or json) prints, as a file: KubeVirt's
        version and feature gates.

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
