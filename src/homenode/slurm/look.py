"""Look: the memory policy of a job's processes while it runs, which Slurm itself does not say.

A step of one task in the job's own allocation (it takes nothing from it) lists the job's processes
with scontrol and reads /proc of each. Only the job's owner and root may start one.
Source: srun(1), --overlap; scontrol(1), listpids; proc(5).
"""

from homenode.errors import ParseError
from homenode.slurm.record import TaskRecord, parse_task

MAX_PROCESSES = 256
"""Of a job on a node; more give nothing new."""

_SCRIPT = f"""\
scontrol listpids "$SLURM_JOB_ID" "$SLURMD_NODENAME" | head -n {MAX_PROCESSES} |
while read -r pid _ step _; do
  case $pid in *[!0-9]*) continue ;; esac
  [ "$step" != "$SLURM_STEP_ID" ] && [ "$step" != extern ] || continue
  pus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$pid/status") || continue
  nodes=$(sed -n 's/^Mems_allowed_list:[[:space:]]*//p' "/proc/$pid/status") || continue
  read -r _ policy _ <"/proc/$pid/numa_maps"
  parent=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status") || continue
  echo "task $step.$pid $pus $nodes ${{policy:--}} $parent"
  policy=
done 2>/dev/null
"""


def look_command(job: str, node: str) -> tuple[str, ...]:
    """What to run for a job, by its number, on one of its nodes."""
    return (
        "srun",
        "--overlap",
        f"--jobid={job}",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--quiet",
        "sh",
        "-c",
        _SCRIPT,
    )


def parse_look(text: str, source: str) -> tuple[TaskRecord, ...]:
    """The processes of an answer that started none of the others: shells and numactl bind nothing
    by themselves. Raises ParseError for a line that is none of its."""
    tasks = []
    parents = set()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        if words[0] != "task" or len(words) != 6:
            raise ParseError(source, "lines about tasks", line, line=number)
        tasks.append(parse_task(words[1:5], source, number))
        parents.add(words[5])
    return tuple(task for task in tasks if task.task.rpartition(".")[2] not in parents)
