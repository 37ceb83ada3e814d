"""The commands of this room: the command line imports them when the name of a group is typed."""

from homenode.cli.command import Command

_POOL = ".cluster.pool.arguments:"
_KUBEVIRT = ".cluster.kubevirt.arguments:"
_SLURM = ".cluster.slurm.arguments:"

POOL = Command(
    "pool",
    about="""See what fits on many hosts, and where VMs go.

    Examples:
      homenode pool show --pool 'hgx-h100*40'
      homenode pool place VM.xml --pool pool/ --gpus 2 -o tuned.xml
    """,
    commands=(
        Command("show", f"{_POOL}PoolShowArguments", ".cluster.pool.commands:show"),
        Command("place", f"{_POOL}PoolPlaceArguments", ".cluster.pool.commands:place"),
        Command("capture", f"{_POOL}PoolCaptureArguments", ".cluster.pool.commands:capture"),
    ),
)
KUBEVIRT = Command(
    "kubevirt",
    about="""Put GPUs of KubeVirt VMs on their nodes: hook, checks, manifests.

    Examples:
      homenode kubevirt manifest -o manifests
      homenode kubevirt check vmi.json --host node.tar.gz
    """,
    commands=(
        Command(
            "on-define-domain",
            f"{_KUBEVIRT}OnDefineDomainArguments",
            ".cluster.kubevirt.commands:on_define_domain",
        ),
        Command(
            "receive", f"{_KUBEVIRT}KubevirtReceiveArguments", ".cluster.kubevirt.commands:receive"
        ),
        Command("check", f"{_KUBEVIRT}KubevirtCheckArguments", ".cluster.kubevirt.commands:check"),
        Command(
            "manifest",
            f"{_KUBEVIRT}KubevirtManifestArguments",
            ".cluster.kubevirt.commands:manifest",
        ),
    ),
)
SLURM = Command(
    "slurm",
    about="""Check GPU jobs: where they run, Slurm's configuration, what binding is worth.

    Examples:
      homenode slurm audit
      homenode slurm check gres.conf slurm.conf --host node.tar.gz
    """,
    commands=(
        Command("audit", f"{_SLURM}SlurmAuditArguments", ".cluster.slurm.commands:audit"),
        Command("study", f"{_SLURM}SlurmStudyArguments", ".cluster.slurm.study.commands:study"),
        Command("report", f"{_SLURM}SlurmReportArguments", ".cluster.slurm.study.commands:report"),
        Command("check", f"{_SLURM}SlurmCheckArguments", ".cluster.slurm.commands:check"),
    ),
)
