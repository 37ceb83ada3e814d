"""homenode kubevirt: the hook, what must fit around it, and its manifests. [I/O]"""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.help import HelpCommand, HelpGroup
from homenode.cli.options import JsonOption, with_records
from homenode.cli.pod import NodeOptions, answer_fit
from homenode.cli.terminal import (
    check_can_write,
    exit_if_bad,
    note,
    print_findings,
    write_text,
)
from homenode.errors import HostError, UsageError
from homenode.input_files import read_input
from homenode.kubevirt.manifest_options import ClaimScope, HookVersion, ManifestOptions, OnError
from homenode.plan.options import PciGranularity
from homenode.units import GIB

app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    help="""Put the GPUs of KubeVirt VMs on their nodes: the sidecar's hook, checks, manifests.

    Examples:
      homenode kubevirt manifest -o manifests
      homenode kubevirt check vmi.json --host node.tar.gz
    """,
)

_MANIFEST = ManifestOptions()


@app.command("on-define-domain", cls=HelpCommand)
def on_define_domain(
    vmi: Annotated[
        str, typer.Option(metavar="JSON", help="The VirtualMachineInstance, as the shim gives it.")
    ],
    domain: Annotated[
        str, typer.Option(metavar="XML", help="The domain document, as the shim gives it.")
    ],
    on_error: Annotated[
        OnError | None,
        typer.Option(
            help="What happens to the VM if its devices cannot be placed. Default: the VM's "
            "annotation homenode/on-error, else fail."
        ),
    ] = None,
    pci_granularity: Annotated[
        PciGranularity | None,
        typer.Option(
            help="What gets an expander bus of its own. Default: the VM's annotation "
            "homenode/pci-granularity, else cell."
        ),
    ] = None,
    root: Annotated[
        str, typer.Option(metavar="DIR", help="Folder with the host's /sys, such as /host.")
    ] = "/",
) -> None:
    """Place a VM's devices on its cells, and print the new document.

    The executable onDefineDomain does the same, and starts faster.

    Examples:
      homenode kubevirt on-define-domain --vmi "$VMI" --domain "$DOMAIN"
      onDefineDomain --vmi "$VMI" --domain "$DOMAIN"
    """
    from homenode.cli.on_define_domain import ask, write

    raise SystemExit(write(ask(vmi, domain, on_error, pci_granularity, root)))


@app.command("receive", cls=HelpCommand)
def receive(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The run that the guest measured.")],
    results: Annotated[Path, typer.Option(metavar="DIR", help="Where runs of all VMs are kept.")],
) -> None:
    """Store a run that a guest sends as a tar on standard input.

    Anything else in the tar, links, and a run that exists already are refused.

    Examples:
      homenode kubevirt receive run-1 --results results < run.tar
      ssh guest 'tar -C results -c run-1' | homenode kubevirt receive run-1 --results results
    """
    import sys

    from homenode.results.received import receive_run

    note(f"wrote {receive_run(sys.stdin.buffer, results, name)}")


@app.command("check", cls=HelpCommand)
def check(
    vmi: Annotated[
        Path,
        typer.Argument(
            metavar="VMI.json", help="kubectl get vmi NAME -o json, or a VirtualMachine's."
        ),
    ],
    kubelet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="kubectl get --raw /api/v1/nodes/NODE/proxy/configz, as a file."
        ),
    ] = None,
    kubevirt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="kubectl get kubevirt -A -o json, as a file: its feature gates."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="The node: a capture made there, or any other source of a host. Without it the "
            "node is not checked.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check whether a VM's CPUs, huge pages, GPUs and cells fit together on a node.

    Examples:
      homenode kubevirt check vmi.json --host node.tar.gz
      homenode kubevirt check vmi.json --kubelet configz.json --kubevirt kubevirt.json
    """
    from homenode.kubevirt.cluster import read_cluster
    from homenode.kubevirt.fit import check_fit
    from homenode.kubevirt.vmi import vmi_of
    from homenode.pods.kubelet import read_kubelet
    from homenode.pods.manifest import read_manifest
    from homenode.sources import load_host

    what = "a VirtualMachineInstance"
    read = vmi_of(read_manifest(read_input(vmi, what), str(vmi), what), str(vmi), needs_domain=True)
    config = (
        None
        if kubelet is None
        else read_kubelet(read_input(kubelet, "a KubeletConfiguration as JSON"), str(kubelet))
    )
    cluster = (
        None
        if kubevirt is None
        else read_cluster(read_input(kubevirt, "a KubeVirt CR as JSON"), str(kubevirt))
    )
    findings = check_fit(read, config, None if host is None else load_host(host), cluster)
    print_findings(findings, as_json=json)
    exit_if_bad(findings.findings)


@app.command("fit", cls=HelpCommand)
@with_records
def fit(
    vmi: Annotated[
        Path,
        typer.Argument(metavar="VMI.yaml", help="A VirtualMachineInstance or a VirtualMachine."),
    ],
    node: NodeOptions,
    json: JsonOption = False,
) -> None:
    """Say whether a node's kubelet admits a VM's pod, why not, and the smallest change that helps.

    Examples:
      homenode kubevirt fit vm.yaml --host node-7.tar.gz --kubelet configz.json
      homenode kubevirt fit vm.yaml --pool captures/
    """
    from homenode.kubevirt.vmi import launcher_pod, vmi_of
    from homenode.pods.manifest import read_manifest

    what = "a VirtualMachineInstance"
    document = read_manifest(read_input(vmi, what), str(vmi), what)
    pod = launcher_pod(vmi_of(document, str(vmi), needs_domain=True))
    answer_fit(pod, node, json)


@app.command("manifest", cls=HelpCommand)
def manifest(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to.")
    ],
    configmap: Annotated[
        bool,
        typer.Option(
            "--configmap",
            help="Put the hook into a ConfigMap, on KubeVirt's own sidecar image: none is built.",
        ),
    ] = _MANIFEST.configmap,
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Where the sidecar's image will be.")
    ] = _MANIFEST.image,
    bench_image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Where the image of the jobs will be.")
    ] = _MANIFEST.bench_image,
    vm: Annotated[str, typer.Option(metavar="NAME", help="Of the example VM.")] = _MANIFEST.vm,
    namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Of the VM and the jobs.")
    ] = _MANIFEST.namespace,
    gpu: Annotated[
        str, typer.Option(metavar="RESOURCE", help="The GPU's resource name in the cluster.")
    ] = _MANIFEST.gpu,
    gpu_id: Annotated[
        str, typer.Option(metavar="VENDOR:DEVICE", help="The GPU's PCI ids (lspci -n).")
    ] = _MANIFEST.gpu_id,
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs of the VM.")] = _MANIFEST.gpus,
    vcpus: Annotated[int, typer.Option(metavar="N", help="vCPUs of the VM.")] = _MANIFEST.vcpus,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory of the VM, in whole GiB.")
    ] = f"{_MANIFEST.memory_gib}GiB",
    hook_version: Annotated[
        HookVersion, typer.Option(help="Version of the hook's protocol.")
    ] = _MANIFEST.hook_version,
    kubevirt: Annotated[
        str, typer.Option(metavar="VERSION", help="KubeVirt of the cluster: the shim's image.")
    ] = _MANIFEST.kubevirt,
    guest: Annotated[
        str, typer.Option(metavar="USER@HOST", help="The guest, for the job that measures in it.")
    ] = _MANIFEST.guest,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="The node, for the job that measures there.")
    ] = None,
    claims: Annotated[
        ClaimScope | None,
        typer.Option(help="Take the GPUs from DRA claims: what a claim's devices have in common."),
    ] = _MANIFEST.claims,
    gpu_class: Annotated[
        str, typer.Option(metavar="CLASS", help="The DeviceClass of GPUs in claims.")
    ] = _MANIFEST.gpu_class,
    nic_class: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="With claims: a NIC of this DeviceClass for each GPU."),
    ] = _MANIFEST.nic_class,
) -> None:
    """Write the hook (image or ConfigMap), the gates, a VM with the hook, and measuring jobs.

    Examples:
      homenode kubevirt manifest --configmap -o manifests
      homenode kubevirt manifest -o manifests --gpus 2 --memory 128GiB
    """
    from homenode import __version__
    from homenode.kubevirt.hook_file import hook_file
    from homenode.kubevirt.manifests import manifests, next_steps
    from homenode.package_files import package_text

    options = ManifestOptions(
        configmap=configmap,
        image=image,
        bench_image=bench_image,
        namespace=namespace,
        vm=vm,
        gpu=gpu,
        gpu_id=gpu_id,
        gpus=gpus,
        vcpus=vcpus,
        memory_gib=_whole_gib(memory),
        hook_version=hook_version,
        kubevirt=kubevirt,
        guest=guest,
        node=node,
        claims=claims,
        gpu_class=gpu_class,
        nic_class=nic_class,
    )
    written = manifests(options, hook_file(_own_source, __version__))
    written |= {"requirements.lock": package_text("kubevirt", "requirements.lock")}
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: expected a folder, found a file")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{output}: expected to make a folder, found: {error.strerror}") from None
    paths = {output / name: text for name, text in written.items()}
    there = [path for path in paths if path.exists()]
    if there:
        raise UsageError(
            f"{there[0]}: expected nothing there yet, found a file",
            hint="name another folder; what you have edited is not overwritten",
        )
    check_can_write(*paths)
    for path, text in paths.items():
        write_text(path, text)
        note(f"wrote {path}")
    for step in next_steps(options):
        note(step)


def _own_source(name: str) -> str | None:
    """The text of one of the package's modules; None where it has none of that name."""
    top, *rest = name.split(".")
    if top != "homenode":
        return None
    from homenode.package_files import package_text

    for path in ((*rest, "__init__.py"), (*rest[:-1], "".join((*rest[-1:], ".py")))):
        with contextlib.suppress(OSError):
            return package_text(*path)
    return None


def _whole_gib(memory: str) -> int:
    """GiB of a size. Raises UsageError for a fraction of one."""
    from homenode.cli.placing_options import size_bytes

    gib, rest = divmod(size_bytes("--memory", memory) or 0, GIB)
    if rest or not gib:
        raise UsageError(f"--memory {memory}: expected whole GiB, such as 64GiB")
    return gib
