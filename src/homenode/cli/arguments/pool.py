"""What is asked of the commands of pool. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    KubeletOption,
    PoolOption,
    ResultsOption,
)
from homenode.cli.command import Without
from homenode.cluster.pool.rules import Availability, Rules, Scheduler
from homenode.opt import Arg, Flag, Opt
from homenode.vm.plan_options import PlanOptions

PoolArgument = Annotated[tuple[str, ...], Arg("POOL...", "The same as --pool.", hidden=True)]

FlavoursOption = Annotated[
    Path | None,
    Opt(
        "--flavours",
        "FILE",
        "Sizes of VM (flavours.toml). Default: 1, 2, 4 and 8 GPUs with their share of a host.",
    ),
]


class PoolShowArguments(Struct, frozen=True, kw_only=True):
    """Show what is free, which VMs still fit, which GPUs are stranded.

    Examples:
      homenode pool show --pool 'hgx-h100*40'
      homenode pool show --pool captures/ --flavours flavours.toml --json
    """

    pool: PoolOption = ()
    sources: PoolArgument = ()
    flavours: FlavoursOption = None
    everything: Annotated[bool, Flag("--all", "A row for each host, however many there are.")] = (
        False
    )
    csv: Annotated[bool, Flag("--csv", "Print a table for other programs.")] = False
    prometheus: Annotated[bool, Flag("--prometheus", "Print Prometheus' text format.")] = False
    page: Annotated[
        Path | None,
        Opt("--output -o", "FILE", "Write a page (HTML) with a map of the hosts.", also="--page"),
    ] = None
    json: JsonOption = False


class PoolVmsArguments(Struct, frozen=True, kw_only=True):
    """List the VMs: host and nodes of each, and its GPUs elsewhere.

    Examples:
      homenode pool vms --pool pool/
      homenode pool vms --pool pool/ --on gpu-7 --json
    """

    pool: PoolOption = ()
    sources: PoolArgument = ()
    among: Annotated[tuple[str, ...], Opt("--on", "HOST", "Only the VMs of this host.")] = ()
    json: JsonOption = False


class PoolCaptureArguments(Struct, frozen=True, kw_only=True):
    """Read many hosts over ssh at once into a folder.

    Nothing is installed on the hosts. A host that fails is named and left out; the same command
    later reads those that are missing. SOURCE: hosts of captures, host.toml files and libvirt URIs,
    which are read once instead of by every command.

    Examples:
      homenode pool capture --hosts hosts.txt -o pool/
      homenode pool capture captures/ qemu+ssh://gpu-9/system -o pool/
    """

    output: Annotated[Path, Opt("--output -o", "POOL/", "The folder to write.")]
    sources: Annotated[
        tuple[str, ...], Arg("SOURCE...", "Instead of --hosts: a pool, as for pool show.")
    ] = ()
    hosts: Annotated[
        Path | None,
        Opt(
            "--hosts",
            "FILE",
            "A list: on each line [USER@]HOST[:PORT], then name=NAME and fault_domain=NAME where "
            "wanted.",
        ),
    ] = None
    jobs: Annotated[int, Opt("--jobs", "N", "Hosts read at the same time.", ge=1, le=256)] = 16
    timeout: Annotated[
        float, Opt("--timeout", "SECONDS", "The longest time for one host.", ge=1)
    ] = 120.0
    again: Annotated[bool, Flag("--again", "Also read the hosts that the folder has already.")] = (
        False
    )


class PoolPlaceArguments(Struct, frozen=True, kw_only=True):
    """Rank the hosts for a VM by its locality; plan for the best.

    Examples:
      homenode pool place gpu-vm.xml --pool pool/ --gpus 2 -o tuned.xml
      echo '{"vm":"a","gpus":4}' | homenode pool place --hook --pool 'hgx-h100*40'
    """

    pool: PoolOption
    options: Annotated[PlanOptions, Without("replaces")] = PlanOptions()
    results: ResultsOption = ()
    document: Annotated[str | None, Arg("VM.xml", "The domain document; - for standard input.")] = (
        None
    )
    flavours: FlavoursOption = None
    among: Annotated[
        tuple[str, ...], Opt("--on", "HOST", "Choose this host of the pool only.")
    ] = ()
    gpu_model: Annotated[
        str | None,
        Opt("--gpu-model", "NAME", "With --gpus: a part of the GPUs' name, such as H200."),
    ] = None
    count: Annotated[
        int, Opt("--count", "N", "Place N such VMs: VM-1 to VM-N.", ge=1, le=10000)
    ] = 1
    output: Annotated[
        Path | None,
        Opt(
            "--output -o", "OUT", "Write the tuned document here. With --count, a folder for them."
        ),
    ] = None
    rules: Rules = Rules()
    record: Annotated[
        bool, Flag("--record", "Reserve in the pool's folder: later commands count the VM.")
    ] = False
    owner: Annotated[
        str,
        Opt(
            "--owner",
            "NAME",
            "With --record: tells VMs of one name apart that have no UUID.",
            rare=True,
        ),
    ] = ""
    ttl_s: Annotated[
        float | None,
        Opt(
            "--ttl",
            "SECONDS",
            "With --record: the VM no longer counts then, unless a capture has shown it.",
            rare=True,
            ge=1,
        ),
    ] = None
    hook: Annotated[
        bool, Flag("--hook", "Answer requests (lines of JSON) from standard input.")
    ] = False
    json: JsonOption = False


class PoolRemoveArguments(Struct, frozen=True, kw_only=True):
    """Remove what pool place, its hook or pool pack has reserved.

    Examples:
      homenode pool remove gpu-vm-1 gpu-vm-2 --pool pool/
      homenode pool remove --packing packed/ --pool pool/
    """

    pool: Annotated[Path, Opt("--pool", "POOL/", "The pool's folder.")]
    vms: Annotated[tuple[str, ...], Arg("VM...", "Their names or UUIDs.")] = ()
    owner: Annotated[str, Opt("--owner", "NAME", "Whose VMs of these names.")] = ""
    packing: Annotated[
        Path | None, Opt("--packing", "DIR", "All VMs of the packing that pool pack wrote there.")
    ] = None


class PoolHostArguments(Struct, frozen=True, kw_only=True):
    """Say whether hosts take VMs: open, cordoned, draining, or gone.

    Examples:
      homenode pool host gpu-7 gpu-8 --state cordoned --pool pool/
      homenode pool host gpu-7 --state open --pool pool/
    """

    hosts: Annotated[tuple[str, ...], Arg("HOST...", "Their names in the pool.")]
    pool: Annotated[Path, Opt("--pool", "POOL/", "The pool's folder.")]
    state: Annotated[Availability, Opt("--state", "STATE", "Only open hosts take VMs.")]


class PoolSimulateArguments(Struct, frozen=True, kw_only=True):
    """Replay arrivals under several policies: what is refused.

    Arrivals and results are simulated. Needs OR-tools (docs/install.md); without it, the error
    names the command that installs it.

    Examples:
      homenode pool simulate random --pool 'hgx-h100*8' --load 0.9 --mix gpu1=8,gpu2=4,gpu8=1
      homenode pool simulate tasks.csv --nodes nodes.csv --policy fgd --policy homenode
    """

    trace: Annotated[
        str,
        Arg(
            "TRACE",
            "Requests as CSV (tasks with parts of GPUs, or VMs of cells), or random: VMs that "
            "arrive and depart on the hosts of --pool.",
        ),
    ]
    nodes: Annotated[
        Path | None, Opt("--nodes", "FILE", "The machines of a CSV trace, as CSV.")
    ] = None
    pool: Annotated[
        tuple[str, ...], Opt("--pool", "POOL", "With random: the hosts, as in pool show.")
    ] = ()
    flavours: FlavoursOption = None
    policy: Annotated[
        tuple[str, ...],
        Opt(
            "--policy",
            "NAME",
            "first-fit, best-fit, homenode; fgd for tasks and random; with random also nova, "
            "xapi; for cells blind-best-fit. Default: all.",
        ),
    ] = ()
    orders: Annotated[int, Opt("--orders", "N", "Number of random orders.", ge=1, le=1000)] = 5
    load: Annotated[
        float,
        Opt("--load", "SHARE", "With random: GPUs requested, as a share of all.", ge=0.01, le=10),
    ] = 0.9
    vms: Annotated[
        int, Opt("--vms", "N", "With random: how many VMs arrive.", ge=1, le=1000000)
    ] = 500
    mix: Annotated[
        str | None,
        Opt(
            "--mix",
            "FLAVOUR=WEIGHT,...",
            "With random: how often each flavour arrives. Default: equally often.",
        ),
    ] = None
    page: Annotated[
        Path | None, Opt("--output -o", "FILE", "Write a page with a chart.", also="--page")
    ] = None
    json: JsonOption = False


class PoolPackArguments(Struct, frozen=True, kw_only=True):
    """Place many VMs at once: most value, fewest packages and hosts.

    Prints the solver's bound and the gap. Every VM has a plan of the ordinary planner. Needs
    OR-tools (docs/install.md); without it, the error names the command that installs it.

    Examples:
      homenode pool pack vms.toml --pool pool/ --record -o packed/
      homenode pool pack vms.toml --pool 'hgx-h100*20' -o packed/ --time-limit 300
    """

    requests: Annotated[Path, Arg("REQUESTS", "The VMs: a TOML file of [[vm]] tables.")]
    pool: PoolOption
    output: Annotated[Path, Opt("--output -o", "DIR", "A folder for the plans, one for each VM.")]
    time_limit: Annotated[float, Opt("--time-limit", "SECONDS", "Time for the solver.", ge=1)] = (
        60.0
    )
    record: Annotated[
        bool, Flag("--record", "Record the VMs in the pool's folder: later commands count them.")
    ] = False
    json: JsonOption = False


class MoveOptions(Struct, frozen=True, kw_only=True):
    """How moves are carried out."""

    apply: Annotated[
        bool, Flag("--apply", "Carry the moves out through libvirt, by stop and start.")
    ] = False
    yes: Annotated[bool, Flag("--yes -y", "Move without asking.")] = False
    dry_run: DryRunOption = False
    uris: Annotated[
        tuple[str, ...],
        Opt("--connect", "HOST=URI", "libvirt of a host. Default: qemu+ssh://HOST/system."),
    ] = ()
    timeout_s: Annotated[
        float,
        Opt("--shutdown-timeout", "SECONDS", "How long a guest may take to shut down.", ge=1),
    ] = 300.0
    destroy: Annotated[
        bool, Flag("--destroy", "End a guest that does not shut down in time.", rare=True)
    ] = False


class PoolDrainArguments(Struct, frozen=True, kw_only=True):
    """List the moves that empty a host, or make them (--apply).

    The host takes no VM from then on, where the pool is a folder: pool host opens it again.

    Examples:
      homenode pool drain gpu-7 --pool pool/
      homenode pool drain gpu-7 --pool pool/ --apply
    """

    host: Annotated[str, Arg("HOST", "Its name in the pool.")]
    pool: PoolOption
    flavours: FlavoursOption = None
    moving: MoveOptions = MoveOptions()
    json: JsonOption = False


class PoolDefragmentArguments(Struct, frozen=True, kw_only=True):
    """List the moves after which more large VMs fit, or make them.

    Examples:
      homenode pool defragment --pool pool/
      homenode pool defragment --pool pool/ --for gpu4 --most 2 --apply
    """

    pool: PoolOption = ()
    sources: PoolArgument = ()
    flavours: FlavoursOption = None
    flavour: Annotated[
        str | None, Opt("--for", "FLAVOUR", "The flavour that should fit. Default: the largest.")
    ] = None
    most: Annotated[int, Opt("--most", "N", "Stop after N additional VMs.", ge=1, le=1000)] = 8
    moving: MoveOptions = MoveOptions()
    json: JsonOption = False


class PoolExportArguments(Struct, frozen=True, kw_only=True):
    """Print what still fits, as a scheduler's labels or features.

    For dra: ResourceClaimTemplates whose GPUs share a NUMA node, for the devices in --slices.

    Examples:
      homenode pool export --pool pool/ --for kubernetes
      homenode pool export --pool pool/ --for slurm
    """

    pool: PoolOption = ()
    sources: PoolArgument = ()
    scheduler: Annotated[
        Scheduler, Opt("--for", "NAME", "The scheduler. For others: pool show --json.")
    ]
    slices: Annotated[
        Path | None,
        Opt("--slices", "FILE", "kubectl get resourceslices -o json, for dra: no --pool then."),
    ] = None
    flavours: FlavoursOption = None


class PoolServeArguments(Struct, frozen=True, kw_only=True):
    """Answer kube-scheduler: which nodes admit a pod, and at what cost.

    An extender (filter, prioritize) over HTTPS, with /healthz and /metrics. What runs is read from
    the API server: nothing is stored. It needs Tornado (the extra `serve`).

    Examples:
      homenode pool serve --pool 'hgx-h100*4' --api-server https://10.0.0.1:6443 \\
        --api-token token --api-ca ca.crt
      homenode pool serve --pool captures/ --kubelet configz/ --cert tls.crt --key tls.key \\
        --client-ca ca.crt --listen 0.0.0.0:8443
    """

    pool: PoolOption = ()
    sources: PoolArgument = ()
    kubelet: KubeletOption = None
    device: DeviceOption = ()
    device_ids: Annotated[
        Path | None,
        Opt(
            "--device-ids",
            "FILE",
            "Lines of a plugin's device name and its address, such as `nvidia-smi "
            "--query-gpu=uuid,pci.bus_id --format=csv,noheader` prints on each node.",
        ),
    ] = None
    flavours: FlavoursOption = None
    listen: Annotated[
        str,
        Opt(
            "--listen",
            "ADDRESS:PORT",
            "Where to answer. For other machines: with --cert, and --client-ca or --token-file.",
        ),
    ] = "127.0.0.1:8443"
    cert: Annotated[Path | None, Opt("--cert", "FILE", "The certificate, as PEM.")] = None
    key: Annotated[Path | None, Opt("--key", "FILE", "Its key, as PEM.")] = None
    client_ca: Annotated[
        Path | None,
        Opt("--client-ca", "FILE", "Callers show a certificate that this authority has signed."),
    ] = None
    token_file: Annotated[
        Path | None, Opt("--token-file", "FILE", "Callers send the token in this file.")
    ] = None
    api_server: Annotated[
        str | None, Opt("--api-server", "URL", "Default: that of the cluster it runs in.")
    ] = None
    api_token: Annotated[
        Path | None, Opt("--api-token", "FILE", "The token for it. Default: the pod's own.")
    ] = None
    api_ca: Annotated[
        Path | None, Opt("--api-ca", "FILE", "Who signs its certificate. Default: the pod's own.")
    ] = None
