#!/bin/sh
# homenode: TaskProlog, run as the user in each task: where it may run and have memory
# It never fails: a TaskProlog that fails ends the task.
spool=@SPOOL@
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
case ${SLURMD_NODENAME:=$(hostname -s)} in '' | *[!A-Za-z0-9._-]*) exit 0 ;; esac
name=$SLURM_JOB_ID.$SLURMD_NODENAME
root=
(
  tasks=$spool/live/$name.tasks
  [ -f "$tasks" ] && [ "$(wc -c <"$tasks")" -lt 524288 ] || exit
  # slurmd gives Prolog no name.
  if [ ! -s "$tasks" ]; then
    said=$(printf %s "${SLURM_JOB_NAME:-}" | tr -cd 'A-Za-z0-9._ -' | head -c 80)
    echo "name $said" >>"$tasks"
  fi
  read -r _ policy _ <"$root/proc/self/numa_maps"
  pus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "$root/proc/self/status")
  nodes=$(sed -n 's/^Mems_allowed_list:[[:space:]]*//p' "$root/proc/self/status")
  echo "task ${SLURM_STEP_ID:-batch}.${SLURM_PROCID:-0} $pus $nodes ${policy:--}" >>"$tasks"
) </dev/null >/dev/null 2>&1
exit 0
