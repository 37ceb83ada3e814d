"""Queue client: runs Slurm's own programs: sinfo, squeue, sbatch. [I/O]"""

import os
import re
import secrets
from pathlib import Path

from homenode.cluster.slurm.client import ask
from homenode.errors import NoAnswerError, ToolError
from homenode.machine.tools import slurm_nodes
from homenode.machine.tools.slurm_nodes import ClusterNode
from homenode.machine.tools.squeue import QueuedJob, parse_states, states_command

_JOB_ID = re.compile(r"(\d{1,10})(?:;\S+)?", re.ASCII)


def nodes() -> tuple[ClusterNode, ...]:
    """Every node of every partition. Raises NoAnswerError, ToolError."""
    return slurm_nodes.parse_nodes(ask(slurm_nodes.COMMAND))


def jobs() -> tuple[QueuedJob, ...]:
    """This user's jobs, also those that ended lately. Raises NoAnswerError, ToolError."""
    mark = secrets.token_hex(8)
    return parse_states(ask(states_command(os.getuid(), mark)), mark)


def submit(
    folder: Path, script: str, after: tuple[str, ...], kept_open: tuple[int, ...] = ()
) -> str:
    """Submit a script of a study, to run in the study's folder; the job's id.

    after: ids of jobs that must have ended. kept_open: the study's lock: sbatch goes on where we
    are killed, and whoever continues the study must see its job. Raises NoAnswerError: then it
    may have been accepted all the same; and ToolError where Slurm refused it.
    """
    words = ["sbatch", "--parsable", f"--chdir={folder}"]
    if after:
        words.append(f"--dependency=afterany:{':'.join(after)}")
    text = ask((*words, f"{folder}/{script}"), _passed_to_jobs(), kept_open)
    found = _JOB_ID.fullmatch(text.strip().splitlines()[-1] if text.strip() else "")
    if found is None:
        raise ToolError(f"sbatch: expected a job's id, found {text.strip()[:80]!r}")
    return found[1]


def cancel(job: str) -> None:
    """Cancel a job, all tasks of an array. Raises NoAnswerError.

    That Slurm no longer knows it is no error: then it is gone, as it should be.
    """
    try:
        ask(("scancel", job))
    except NoAnswerError:
        raise
    except ToolError:
        return


def _passed_to_jobs() -> dict[str, str]:
    """The user's environment: sbatch hands it on, and modules and libraries are found by it.

    Without the variables of a job that we run in: a study may be started from one. Without sbatch's
    own, which count more than what the script says: SBATCH_PARTITION would move every job.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SLURMD_", "SBATCH_")) and name not in ("PATH", "LC_ALL")
    }


def account() -> str | None:
    """The account that the user's environment names for sbatch."""
    return os.environ.get("SBATCH_ACCOUNT") or os.environ.get("SLURM_ACCOUNT") or None


def is_full(error: str) -> bool:
    """True where sbatch takes no more jobs of this user for now.

    >>> is_full("AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS")
    True
    """
    return "SubmitJob" in error or "MaxJobCount" in error or "Slurm temporarily" in error
