"""Hooks: the scripts that keep what each job had on a node, for when the job is gone.

slurmd runs Prolog and Epilog as root and TaskProlog as the job's user. The user's part goes to a
file of its own, of which Epilog takes only lines of its form. None of them ever fails: a Prolog
that does drains its node, a TaskProlog that does ends the task, and what a TaskProlog prints would
be taken for settings.
Source: slurm.conf(5), Prolog, Epilog, TaskProlog; https://slurm.schedmd.com/prolog_epilog.html.
"""

from homenode.cluster.slurm.options import SPOOL
from homenode.cluster.slurm.record import KIND, VERSION
from homenode.errors import UsageError

_MOST_BYTES = 512 << 10
"""Of the user's part; more is read, so that no line is cut where all tasks write at once."""

_MOST_S = 5
"""Of Prolog and Epilog; both take a tenth of a second."""

_HEAD = """\
#!/bin/sh
# homenode: {what}
# It never fails: {why}.
spool={spool}
case ${{SLURM_JOB_ID:-}} in '' | *[!0-9]*) exit 0 ;; esac
case ${{SLURMD_NODENAME:=$(hostname -s)}} in '' | *[!A-Za-z0-9._-]*) exit 0 ;; esac
name=$SLURM_JOB_ID.$SLURMD_NODENAME
"""

_ROOTS = """\
# Slurm gives no PATH.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH

# A folder that others could have made, or may write to, is not used: links in it lead anywhere.
mine() {{
  [ -d "$1" ] && [ ! -L "$1" ] &&
    [ -z "$(find "$1" -prune \\( ! -user "$(id -u)" -o -perm -020 -o -perm -002 \\))" ]
}}

# The record of a job, next to those of its earlier starts. $1: the line that says when it ended.
finish() {{
  record=$spool/done/$name.rec
  start=0
  while [ -e "$record" ]; do
    start=$((start + 1))
    record=$spool/done/$name.$start.rec
  done
  {{
    cat "$spool/live/$name.job"
    # Other letters would make it a binary file to grep.
    head -c {most_read} "$spool/live/$name.tasks" | tr -cd '\\n -~' |
      grep -E -e '^name [A-Za-z0-9._ -]{{1,80}}$' \\
        -e '^task [0-9a-z]+\\.[0-9]+ [0-9,-]+ [0-9,-]+ [a-z0-9:=|,-]+$'
    [ -z "$1" ] || echo "$1"
  }} >"$spool/done/$name.part"
  mv "$spool/done/$name.part" "$record"
  rm -f "$spool/live/$name.job" "$spool/live/$name.tasks"
}}

# No job waits for it longer than {most_s} s, whatever a driver or a disk does.
limited() {{
  keep &
  work=$!
  (
    trap 'kill "$nap"; exit 0' TERM
    sleep {most_s} &
    nap=$!
    wait "$nap"
    kill -TERM $$
  ) &
  watch=$!
  trap 'exit 0' TERM
  wait "$work"
  kill "$watch"
}}
"""

_PROLOG = """\
root=

# Of a file that holds one line.
line_of() {{ read -r line <"$1"; echo "$2 $line"; }}

nvidia() {{
  for info in "$root"/proc/driver/nvidia/gpus/*/information; do
    [ -e "$info" ] || continue
    gpu=${{info%/information}} gpu=${{gpu##*/}}
    minor=0
    while IFS=: read -r key value; do
      case $key in 'Device Minor') minor=${{value##*[!0-9]}} ;; esac
    done <"$info"
    line_of "$root/sys/bus/pci/devices/$gpu/numa_node" "gpu $minor $gpu"
    while IFS=: read -r key value; do
      case $key in Node) value=${{value##*[!0-9]}} && echo "gpumemory ${{value:?}}" ;; esac
    done <"$root/proc/driver/nvidia/gpus/$gpu/numa_status"
    # A place in Slurm's list of devices is that of a MIG slice, where there are some.
    slices=0
    for slice in "$root/proc/driver/nvidia/capabilities/gpu$minor"/mig/gi*/ci*/access; do
      [ ! -e "$slice" ] || slices=$((slices + 1))
    done
    [ $slices -eq 0 ] || echo "slices $minor $slices"
  done
}}

amd() {{
  number=0
  for device in "$root"/sys/bus/pci/drivers/amdgpu/*:*; do
    [ -e "$device" ] || continue
    line_of "$device/numa_node" "gpu $number ${{device##*/}}"
    number=$((number + 1))
  done
}}

keep() {{
  set -u
  umask 022
  mkdir -p "$spool"
  mine "$spool" || exit
  mkdir -p "$spool/live" "$spool/done"
  mine "$spool/live" && mine "$spool/done" || exit
  # Names of jobs and of users are no one else's business.
  chmod 711 "$spool/live"
  chmod 700 "$spool/done"
  umask 077
  # Left by a start whose Epilog never ran: the node went down.
  [ ! -e "$spool/live/$name.job" ] || finish ''
  set -C
  {{
    echo '{kind} {version}'
    echo "job $SLURM_JOB_ID"
    echo "node $SLURMD_NODENAME"
    echo "user ${{SLURM_JOB_USER:-${{SLURM_JOB_UID:-}}}}"
    echo "start $(date +%s)"
    case ${{SLURM_JOB_RESTART_COUNT:-}} in '' | *[!0-9]*) ;; *)
      echo "restart $SLURM_JOB_RESTART_COUNT" ;;
    esac
    for node in "$root"/sys/devices/system/node/node[0-9]*; do
      line_of "$node/cpulist" "numa ${{node##*/node}}"
    done | sort -k2n
    for node in "$root"/sys/devices/system/node/node[0-9]*; do
      line_of "$node/distance" "distances ${{node##*/node}}"
    done | sort -k2n
    (nvidia)
    (amd)
    echo "held ${{SLURM_JOB_GPUS:-}}"
  }} >"$spool/live/$name.job"
  : >"$spool/live/$name.tasks" && chown "${{SLURM_JOB_UID:-0}}" "$spool/live/$name.tasks"
}}
# Not as words of a command: a shell would keep what they replace, and slurmd waits for its end.
exec </dev/null >/dev/null 2>&1
limited
exit 0
"""

_TASK_PROLOG = """\
root=
(
  tasks=$spool/live/$name.tasks
  [ -f "$tasks" ] && [ "$(wc -c <"$tasks")" -lt {most_bytes} ] || exit
  # slurmd gives Prolog no name.
  if [ ! -s "$tasks" ]; then
    said=$(printf %s "${{SLURM_JOB_NAME:-}}" | tr -cd 'A-Za-z0-9._ -' | head -c 80)
    echo "name $said" >>"$tasks"
  fi
  read -r _ policy _ <"$root/proc/self/numa_maps"
  pus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "$root/proc/self/status")
  nodes=$(sed -n 's/^Mems_allowed_list:[[:space:]]*//p' "$root/proc/self/status")
  echo "task ${{SLURM_STEP_ID:-batch}}.${{SLURM_PROCID:-0}} $pus $nodes ${{policy:--}}" >>"$tasks"
) </dev/null >/dev/null 2>&1
exit 0
"""

_EPILOG = """\
keep() {{
  umask 077
  mine "$spool" && mine "$spool/live" && mine "$spool/done" || exit
  [ ! -f "$spool/live/$name.job" ] || finish "end $(date +%s)"
}}
# Not as words of a command: a shell would keep what they replace, and slurmd waits for its end.
exec </dev/null >/dev/null 2>&1
limited
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
now and then (as root: they name users and jobs) into one folder and look at them with

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
    bodies = {
        "prolog.sh": (
            "Prolog, run by slurmd as root: what the job was given, and the machine",
            "a Prolog that fails drains the node",
            _ROOTS + _PROLOG,
        ),
        "task_prolog.sh": (
            "TaskProlog, run as the user in each task: where it may run and have memory",
            "a TaskProlog that fails ends the task",
            _TASK_PROLOG,
        ),
        "epilog.sh": (
            "Epilog, run by slurmd as root: closes the record",
            "an Epilog that fails drains the node",
            _ROOTS + _EPILOG,
        ),
    }
    written = {
        name: (_HEAD + body).format(
            what=what,
            why=why,
            spool=spool,
            kind=KIND,
            version=VERSION,
            most_bytes=_MOST_BYTES,
            most_read=_MOST_BYTES * 3 // 2,
            most_s=_MOST_S,
        )
        for name, (what, why, body) in bodies.items()
    }
    return {**written, "README": _README.format(folder=folder, spool=spool)}
