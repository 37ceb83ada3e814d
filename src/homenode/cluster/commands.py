"""The commands of this room: the command line imports them when the name of a group is typed."""

from homenode.cli.command import Command

_RECORDS = ".cluster.arguments:"

POOL = Command(
    "pool",
    about="""See what fits on many hosts, and where VMs go.

    Examples:
      homenode pool show --pool 'hgx-h100*40'
      homenode pool place VM.xml --pool pool/ --gpus 2 -o tuned.xml
    """,
    commands=(
        Command("show", f"{_RECORDS}PoolShowArguments", ".cluster.pool.commands:show"),
        Command("place", f"{_RECORDS}PoolPlaceArguments", ".cluster.pool.commands:place"),
        Command("capture", f"{_RECORDS}PoolCaptureArguments", ".cluster.pool.commands:capture"),
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
            f"{_RECORDS}OnDefineDomainArguments",
            ".cluster.kubevirt.commands:on_define_domain",
        ),
        Command(
            "receive", f"{_RECORDS}KubevirtReceiveArguments", ".cluster.kubevirt.commands:receive"
        ),
        Command("check", f"{_RECORDS}KubevirtCheckArguments", ".cluster.kubevirt.commands:check"),
        Command(
            "manifest",
            f"{_RECORDS}KubevirtManifestArguments",
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
        Command("audit", f"{_RECORDS}SlurmAuditArguments", ".cluster.slurm.commands:audit"),
        Command("study", f"{_RECORDS}SlurmStudyArguments", ".cluster.slurm.study.commands:study"),
        Command(
            "report", f"{_RECORDS}SlurmReportArguments", ".cluster.slurm.study.commands:report"
        ),
        Command("check", f"{_RECORDS}SlurmCheckArguments", ".cluster.slurm.commands:check"),
    ),
)
