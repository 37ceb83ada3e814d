#!/bin/sh
# homenode: Prolog, run by slurmd as root: what the job was given, and the machine
# It never fails: a Prolog that fails drains the node.
spool=@SPOOL@
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac
case ${SLURMD_NODENAME:=$(hostname -s)} in '' | *[!A-Za-z0-9._-]*) exit 0 ;; esac
name=$SLURM_JOB_ID.$SLURMD_NODENAME
@ROOT@
root=

# Of a file that holds one line: the kernel gives none of a cpulist to a shell that reads by bytes.
line_of() { line=$(cat "$1") && echo "$2 $line"; }

nvidia() {
  for info in "$root"/proc/driver/nvidia/gpus/*/information; do
    [ -e "$info" ] || continue
    gpu=${info%/information} gpu=${gpu##*/}
    minor=0
    while IFS=: read -r key value; do
      case $key in 'Device Minor') minor=${value##*[!0-9]} ;; esac
    done <"$info"
    line_of "$root/sys/bus/pci/devices/$gpu/numa_node" "gpu $minor $gpu"
    while IFS=: read -r key value; do
      [ "$key" = Node ] || continue
      value=${value##*[!0-9-]}
      [ "$value" -lt 0 ] || echo "gpumemory ${value:?}"
    done <"$root/proc/driver/nvidia/gpus/$gpu/numa_status"
    # A place in Slurm's list of devices is that of a MIG slice, where there are some.
    slices=0
    for slice in "$root/proc/driver/nvidia/capabilities/gpu$minor"/mig/gi*/ci*/access; do
      [ ! -e "$slice" ] || slices=$((slices + 1))
    done
    [ $slices -eq 0 ] || echo "slices $minor $slices"
  done
}

amd() {
  number=0
  for device in "$root"/sys/bus/pci/drivers/amdgpu/*:*; do
    [ -e "$device" ] || continue
    line_of "$device/numa_node" "gpu $number ${device##*/}"
    number=$((number + 1))
  done
}

keep() {
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
  {
    echo 'homenode-slurm-record 1'
    echo "job $SLURM_JOB_ID"
    echo "node $SLURMD_NODENAME"
    echo "user ${SLURM_JOB_USER:-${SLURM_JOB_UID:-}}"
    echo "start $(date +%s)"
    case ${SLURM_JOB_RESTART_COUNT:-} in '' | *[!0-9]*) ;; *)
      echo "restart $SLURM_JOB_RESTART_COUNT" ;;
    esac
    for node in "$root"/sys/devices/system/node/node[0-9]*; do
      line_of "$node/cpulist" "numa ${node##*/node}"
    done | sort -k2n
    for node in "$root"/sys/devices/system/node/node[0-9]*; do
      line_of "$node/distance" "distances ${node##*/node}"
    done | sort -k2n
    (nvidia)
    (amd)
    echo "held ${SLURM_JOB_GPUS:-}"
  } >"$spool/live/$name.job"
  : >"$spool/live/$name.tasks" && chown "${SLURM_JOB_UID:-0}" "$spool/live/$name.tasks"
}
# Not as words of a command: a shell would keep what they replace, and slurmd waits for its end.
exec </dev/null >/dev/null 2>&1
limited
exit 0
