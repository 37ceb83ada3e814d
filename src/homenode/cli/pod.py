"""homenode pod: whether a node's kubelet admits a pod. [I/O]"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.help import HelpCommand, HelpGroup
from homenode.cli.options import JsonOption
from homenode.cli.terminal import console, print_json, read_file
from homenode.errors import UsageError

if TYPE_CHECKING:
    from homenode.bdf import Bdf
    from homenode.pods.pod import Pod

app = typer.Typer(
    cls=HelpGroup,
    no_args_is_help=True,
    help="""Say what the kubelet answers to pods with CPUs, memory and devices of NUMA nodes.

    Examples:
      homenode pod fit pod.yaml --host node-7.tar.gz --kubelet configz.json
      homenode pod fit pod.yaml --host hgx-h100
    """,
)

NodeHostOption = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="SOURCE",
        help="The node: a capture made there, or any other source of a host.",
    ),
]
KubeletOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="kubectl get --raw /api/v1/nodes/NODE/proxy/configz, as a file. Default: static CPU "
        "and memory managers, whole cores, single-numa-node, one core reserved.",
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="What runs: a folder with the node's cpu_manager_state, memory_manager_state and "
        "kubelet_internal_checkpoint (of /var/lib/kubelet). Default: nothing runs.",
    ),
]
DeviceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="RESOURCE=BDF,...",
        help="Devices of the host that a resource stands for, such as rdma/vf=3b:00.2,3b:00.3. "
        "nvidia.com/..., amd.com/... and gpu.intel.com/... stand for that vendor's GPUs.",
    ),
]


@app.command("fit", cls=HelpCommand)
def pod_fit(
    pod: Annotated[
        Path,
        typer.Argument(metavar="POD.yaml", help="A Pod, Deployment, Job or their like."),
    ],
    host: NodeHostOption,
    kubelet: KubeletOption = None,
    state: StateOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Say whether a node's kubelet admits a pod, why not, and the smallest change that helps.

    Examples:
      homenode pod fit pod.yaml --host node-7.tar.gz --kubelet configz.json --state kubelet/
      homenode pod fit job.yaml --host hgx-h100 --device rdma/nic=0000:19:00.0
    """
    from homenode.pods.manifest import read_manifest
    from homenode.pods.pod import read_pod

    document = read_manifest(read_file(pod, "a Pod"), str(pod), "a Pod")
    answer_fit(read_pod(document, str(pod)), host, kubelet, state, device, json)


def answer_fit(
    pod: "Pod",
    host: str,
    kubelet: Path | None,
    state: Path | None,
    device: list[str] | None,
    json: bool,
) -> None:
    """Print the answer; exit with 1 where the pod is refused or not aligned."""
    from homenode.findings import are_bad
    from homenode.pods.checkpoints import FILES, read_checkpoints
    from homenode.pods.fit import fit, fit_findings
    from homenode.pods.kubelet import read_kubelet, usual_kubelet
    from homenode.pods.machine import node_of_host, with_known_memory
    from homenode.sources import load_host

    machine = load_host(host)
    config = (
        usual_kubelet(machine)
        if kubelet is None
        else read_kubelet(read_file(kubelet, "a KubeletConfiguration as JSON"), str(kubelet))
    )
    texts: dict[str, str] = {}
    if state is not None:
        if not state.is_dir():
            raise UsageError(f"{state}: expected a folder with the kubelet's checkpoints")
        for name in FILES:
            if (state / name).is_file():
                content = read_file(state / name, "a checkpoint of the kubelet")
                texts[name] = content.decode("utf-8", "replace")
        if not texts:
            raise UsageError(f"{state}: expected {', '.join(FILES)} there, found none of them")
    pod, unknown = with_known_memory(pod, machine)
    node, gaps = node_of_host(
        machine, config, pod.devices, _named_devices(device), read_checkpoints(texts, str(state))
    )
    found = fit(pod, node, (*unknown, *gaps))
    findings = fit_findings(found, machine.name)
    if json:
        from homenode.formats import encode

        print_json(encode("findings", findings))
    else:
        from homenode.report.findings_text import findings_text
        from homenode.report.fit_text import fit_text

        console().print(fit_text(found))
        console().print(findings_text(findings))
    if are_bad(findings.findings):
        raise SystemExit(1)


def _named_devices(texts: list[str] | None) -> "dict[str, tuple[Bdf, ...]]":
    from homenode.bdf import Bdf

    found: dict[str, tuple[Bdf, ...]] = {}
    for text in texts or ():
        resource, is_one, listed = text.partition("=")
        if not is_one or not resource:
            raise UsageError(f"--device: expected RESOURCE=BDF,BDF, found {text[:60]!r}")
        found[resource] = tuple(Bdf.parse(one, "--device") for one in listed.split(","))
    return found
