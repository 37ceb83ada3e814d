"""Hooks: the scripts that keep what each job had on a node, for when the job is gone.

slurmd runs Prolog and Epilog as root and TaskProlog as the job's user. The user's part goes to a
file of its own, of which Epilog takes only lines of its form. None of them ever fails: a Prolog
that does drains its node, a TaskProlog that does ends the task, and what a TaskProlog prints would
be taken for settings.
Source: slurm.conf(5), Prolog, Epilog, TaskProlog; https://slurm.schedmd.com/prolog_epilog.html.
"""

from homenode.errors import UsageError
from homenode.slurm.record import KIND, VERSION
from homenode.slurm.spool import SPOOL

_HEAD = """\
#!/bin/sh
# homenode: {what}
# It never fails: {why}.
spool={spool}
case ${{SLURM_JOB_ID:-}} in '' | *[!0-9]*) exit 0 ;; esac
case ${{SLURMD_NODENAME:=$(hostname -s)}} in '' | *[!A-Za-z0-9._-]*) exit 0 ;; esac
name=$SLURM_JOB_ID.$SLURMD_NODENAME
"""

_PROLOG = """\
root=
(
  set -Cu
  umask 022
  mkdir -p "$spool/live" "$spool/done" || exit
  {{
    echo '{kind} {version}'
    echo "job $SLURM_JOB_ID"
    echo "node $SLURMD_NODENAME"
    echo "user ${{SLURM_JOB_USER:-${{SLURM_JOB_UID:-}}}}"
    echo "start $(date +%s)"
    for node in "$root"/sys/devices/system/node/node[0-9]*; do
      echo "numa ${{node##*/node}} $(cat "$node/cpulist")"
    done | sort -k2n
    for node in "$root"/sys/devices/system/node/node[0-9]*; do
      echo "distances ${{node##*/node}} $(cat "$node/distance")"
    done | sort -k2n
    for info in "$root"/proc/driver/nvidia/gpus/*/information; do
      [ -e "$info" ] || continue
      gpu=${{info%/information}} gpu=${{gpu##*/}}
      minor=$(sed -n 's/^Device Minor:[[:space:]]*//p' "$info")
      echo "gpu ${{minor:-0}} $gpu $(cat "$root/sys/bus/pci/devices/$gpu/numa_node")"
      sed -n 's/^Node:[[:space:]]*\\([0-9][0-9]*\\).*/gpumemory \\1/p' \\
        "$root/proc/driver/nvidia/gpus/$gpu/numa_status" 2>/dev/null
    done
    number=0
    for device in "$root"/sys/bus/pci/drivers/amdgpu/*:*; do
      [ -e "$device" ] || continue
      echo "gpu $number ${{device##*/}} $(cat "$device/numa_node")"
      number=$((number + 1))
    done
    echo "held ${{SLURM_JOB_GPUS:-}}"
  }} >"$spool/live/$name.job"
  : >"$spool/live/$name.tasks" && chown "${{SLURM_JOB_UID:-0}}" "$spool/live/$name.tasks"
) </dev/null >/dev/null 2>&1
exit 0
"""

_TASK_PROLOG = """\
root=
(
  tasks=$spool/live/$name.tasks
  [ -f "$tasks" ] && [ "$(wc -c <"$tasks")" -lt {most_bytes} ] || exit
  # slurmd tells Prolog no name.
  [ -s "$tasks" ] ||
    echo "name $(printf %s "${{SLURM_JOB_NAME:-}}" | tr -cd 'A-Za-z0-9._ -' | head -c 80)" >"$tasks"
  read -r _ policy _ <"$root/proc/self/numa_maps"
  pus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "$root/proc/self/status")
  nodes=$(sed -n 's/^Mems_allowed_list:[[:space:]]*//p' "$root/proc/self/status")
  echo "task ${{SLURM_STEP_ID:-batch}}.${{SLURM_PROCID:-0}} $pus $nodes ${{policy:--}}" >>"$tasks"
) </dev/null >/dev/null 2>&1
exit 0
"""

_EPILOG = """\
(
  umask 022
  [ -f "$spool/live/$name.job" ] || exit
  {{
    cat "$spool/live/$name.job"
    head -c {most_bytes} "$spool/live/$name.tasks" |
      grep -E -e '^name [A-Za-z0-9._ -]{{1,80}}$' \\
        -e '^task [0-9a-z]+\\.[0-9]+ [0-9,-]+ [0-9,-]+ [a-z0-9:=|,-]+$'
    echo "end $(date +%s)"
  }} >"$spool/done/$name.part"
  mv "$spool/done/$name.part" "$spool/done/$name.rec"
  rm -f "$spool/live/$name.job" "$spool/live/$name.tasks"
) </dev/null >/dev/null 2>&1
exit 0
"""

_README = """\
Keep what each job had on its nodes
===================================

Copy prolog.sh, task_prolog.sh and epilog.sh to every node, owned by root, mode 755, and set in
slurm.conf (then: scontrol reconfigure):

    Prolog={folder}/prolog.sh
    Epilog={folder}/epilog.sh
    TaskProlog={folder}/task_prolog.sh
    PrologFlags=Alloc

Where a site has such scripts already, call these from them; since 24.11 several may be named.

Records of jobs that ended are in {spool}/done of each node, one small file each. Collect them
now and then into one folder and look at them with

    homenode slurm audit --records FOLDER

To undo: take the lines out of slurm.conf and remove the folder.
"""


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
    most_bytes = 64 << 10
    bodies = {
        "prolog.sh": (
            "Prolog, run by slurmd as root: what the job was given, and the machine",
            "a Prolog that fails drains the node",
            _PROLOG,
        ),
        "task_prolog.sh": (
            "TaskProlog, run as the user in each task: where it may run and have memory",
            "a TaskProlog that fails ends the task",
            _TASK_PROLOG,
        ),
        "epilog.sh": (
            "Epilog, run by slurmd as root: closes the record",
            "an Epilog that fails drains the node",
            _EPILOG,
        ),
    }
    written = {
        name: (_HEAD + body).format(
            what=what, why=why, spool=spool, kind=KIND, version=VERSION, most_bytes=most_bytes
        )
        for name, (what, why, body) in bodies.items()
    }
    return {**written, "README": _README.format(folder=folder, spool=spool)}
