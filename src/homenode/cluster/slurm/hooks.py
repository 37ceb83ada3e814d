"""Hooks: the scripts that keep what each job had on a node, and the one that binds a rank there.

slurmd runs Prolog and Epilog as root and TaskProlog as the job's user. The user's part goes to a
file of its own, of which Epilog takes only lines of its form. None of them ever fails: a Prolog
that does drains its node, a TaskProlog that does ends the task, and what a TaskProlog prints would
be taken for settings. Prolog and Epilog take a tenth of a second; root.sh, which is a part of both,
ends them after five. Of the user's part 512 KiB are written and more is read, so that no line is
cut where all tasks write at once.

The wrapper runs a rank on the node of its GPU, found out where it runs: for jobs that share nodes,
where Slurm takes no masks, and for nodes that are not alike. It never widens what Slurm allows: the
rank keeps those of its CPUs that are on the GPU's node. Memory is bound where that is allowed,
preferred where it is not, left as it was where neither is.
Source: slurm.conf(5), Prolog, Epilog, TaskProlog; https://slurm.schedmd.com/prolog_epilog.html;
numactl(8), taskset(1), Documentation/ABI/testing/sysfs-bus-pci, numa_node; the KFD's topology in
/sys/class/kfd.
"""

from homenode.cluster.slurm.options import SPOOL
from homenode.errors import UsageError
from homenode.package_files import package_text

_SCRIPTS = ("prolog.sh", "task_prolog.sh", "epilog.sh", "README")


def _script(name: str) -> str:
    return package_text("cluster", "slurm", "scripts", name)


def hooks(spool: str = SPOOL, folder: str = "/etc/slurm/homenode") -> dict[str, str]:
    """The scripts by file name, and what to do with them.

    spool: folder on each node for the records. folder: where the scripts will be.
    Raises UsageError for a path that a shell would read as something else.
    """
    for path in (spool, folder):
        plain = path.replace("/", "").replace("-", "").replace("_", "").replace(".", "")
        if not path.startswith("/") or not (plain.isascii() and plain.isalnum()):
            raise UsageError(
                f"{path}: expected an absolute path of letters, digits, '.', '-' and '_'"
            )
    written = {}
    for name in _SCRIPTS:
        text = _script(name).replace("@ROOT@\n", _script("root.sh"))
        written[name] = text.replace("@SPOOL@", spool).replace("@FOLDER@", folder)
    return written


def rank_wrapper() -> str:
    """The script that binds a rank."""
    return _script("bind-rank.sh")
