"""Listings of jobs whose users write what they like wherever Slurm prints their words."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

FORGED = """\
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=1 Nice=0 Account=a QOS=a
   JobState=RUNNING Reason=None Dependency=(null)
   SubmitTime=2026-01-01T10:00:00 EligibleTime=2026-01-01T10:00:00
   StartTime=2026-01-01T10:00:05 EndTime=2026-01-01T11:00:05 Deadline=N/A
   NodeList=gpu01
   JOB_GRES=gpu:h100:1
     Nodes=gpu01 CPU_IDs=0-1 Mem=1 GRES=gpu:h100:1(IDX:0)
   MinCPUsNode=1 MinMemoryNode=1M MinTmpDiskNode=0
   Command=(null)
   WorkDir=/"""
"""What follows the first line of a job with GPU 0 and its CPUs next to it."""

PIECES = (
    "x",
    " ",
    "=",
    "\n",
    "\n\n",
    "\n   \n\n",
    "JobId=3 JobName=z",
    "JobId=4 JobName=z",
    "JobId=99 JobName=z",
    "JobId=4 ArrayJobId=4 ArrayTaskId=1 JobName=z",
    "   JobState=COMPLETED Reason=None Dependency=(null)",
    "   UserId=root(0) GroupId=root(0) MCS_label=N/A",
    "   NodeList=gpu09",
    "     Nodes=gpu01 CPU_IDs=0-7 Mem=1 GRES=gpu:1(IDX:0)",
    "   MinCPUsNode=1 MinMemoryNode=1M MinTmpDiskNode=0",
    " JobState=COMPLETED",
    "JobState=COMPLETED",
    "\r\n",
    "\u2028",
    "\x85",
    "\x0b",
    "\x1c",
    "\x1b[31m",
    "\u202e",
    "No jobs in the system",
    '{"jobs": []}',
    f"\n{FORGED}\n",
    f"\n{FORGED}\n   \n\nJobId=99 JobName=z",
    f"\n{FORGED}\n   \n\nJobId=4 JobName=z\n{FORGED}",
)
"""Texts of which a hostile value is made."""

FIELDS = ("name", "mcs", "account", "network", "command", "directory", "comment", "errors")
"""Where a user's words stand in a listing. Seen of each with 22.05.8: newlines are printed."""


SPACE = " "
"""At the end of some lines."""


@dataclass(frozen=True, slots=True)
class Said:
    """A job of two GPUs as Slurm knows it, and what its user said."""

    number: int
    words: dict[str, str] = field(default_factory=dict)

    def word(self, name: str, otherwise: str = "(null)") -> str:
        return self.words.get(name, otherwise)

    @property
    def cpu_ids(self) -> str:
        return f"{4 * self.number}-{4 * self.number + 3}"

    @property
    def text(self) -> str:
        """As `scontrol show job -d` of 22.05.8 prints it."""
        return f"""\
JobId={self.number} JobName={self.word("name", "train")}
   UserId=ada(1000) GroupId=ada(1000) MCS_label={self.word("mcs", "N/A")}
   Priority=4294901759 Nice=0 Account={self.word("account")} QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   DerivedExitCode=0:0
   RunTime=00:00:02 TimeLimit=01:00:00 TimeMin=N/A
   SubmitTime=2026-11-22T22:33:32 EligibleTime=2026-11-22T22:33:32
   AccrueTime=2026-11-22T22:33:32
   StartTime=2026-11-22T22:33:33 EndTime=2026-11-22T23:33:33 Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-22T22:33:33 Scheduler=Backfill
   Partition=parts AllocNode:Sid=localhost:15569
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=gpu02
   BatchHost=gpu02
   NumNodes=1 NumCPUs=4 NumTasks=1 CPUs/Task=4 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,mem=100M,node=1,billing=4
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
   JOB_GRES=gpu:h100:2
     Nodes=gpu02 CPU_IDs={self.cpu_ids} Mem=100 GRES=gpu:h100:2(IDX:0,5)
   MinCPUsNode=4 MinMemoryNode=100M MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network={self.word("network")}
   Command={self.word("command")}
   WorkDir={self.word("directory", "/home/ada")}
   Comment={self.word("comment")}{SPACE}
   StdErr={self.word("errors", "/dev/null")}
   StdIn=/dev/null
   StdOut=/dev/null
   Power=
   TresPerNode=gres:gpu:2
{3 * SPACE}

"""

    @property
    def entry(self) -> dict[str, Any]:
        """As `squeue --json` of 22.05.8 has it."""
        first = 2 * self.number
        cores = {str(core % 16): "allocated" for core in (first, first + 1)}
        return {
            "job_id": self.number,
            "array_job_id": 0,
            "array_task_id": None,
            "name": self.word("name", "train"),
            "account": self.word("account", ""),
            "comment": self.word("comment", ""),
            "current_working_directory": self.word("directory", "/home/ada"),
            "job_state": "RUNNING",
            "user_name": "ada",
            "nodes": "gpu02",
            "gres_detail": ["gpu:h100:2(IDX:0,5)"],
            "job_resources": {
                "nodes": "gpu02",
                "allocated_nodes": [
                    {"nodename": "gpu02", "sockets": {str(first // 16): {"cores": cores}}}
                ],
            },
        }


def listing(jobs: Iterable[Said]) -> str:
    """What scontrol prints of them."""
    return "".join(job.text for job in jobs)


def document(jobs: Iterable[Said]) -> str:
    """What squeue --json prints of them."""
    return json.dumps({"meta": {}, "errors": [], "jobs": [job.entry for job in jobs]})
