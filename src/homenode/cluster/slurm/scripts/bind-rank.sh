#!/bin/sh
# homenode: run a rank on the NUMA node of its GPU.
#
#   srun --gpus-per-task=1 --cpus-per-task=8 bind-rank.sh COMMAND [ARGUMENT...]
#
# HOMENODE_MEMORY=strict|preferred|none   how memory is bound; default strict, where it is allowed
# HOMENODE_VERBOSE=1                      say on standard error what was done
# What cannot be found out or is not allowed is left as it was, and said.

[ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARGUMENT...]" >&2; exit 2; }
root=${HOMENODE_ROOT:-}
rank=${SLURM_PROCID:-${SLURM_LOCALID:-0}}

say() { echo "homenode: rank $rank: $*" >&2; }
verbose() { [ -z "${HOMENODE_VERBOSE:-}" ] || say "$@"; }
plainly() { say "$1: not bound"; shift; exec "$@"; }

# The rank's GPU: its first one, or of those that all ranks of the node see the one of its turn.
visible=${CUDA_VISIBLE_DEVICES-${ROCR_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-}}}
[ -n "$visible" ] || plainly "no CUDA_VISIBLE_DEVICES and no ROCR_VISIBLE_DEVICES" "$@"
turn=0
count=$(echo "$visible" | tr , '\n' | grep -c .)
local=${SLURM_LOCALID:-0}
case ${SLURM_GPUS_PER_TASK:-}${SLURM_TRES_PER_TASK:-}:$count:$local in
  :0:* | *:*[!0-9]*:* | *:*:*[!0-9]*) ;;
  :*)
    tasks=${SLURM_STEP_TASKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-1}}
    tasks=${tasks%%[!0-9]*}
    [ "${tasks:-0}" -gt 1 ] && turn=$((local * count / tasks % count))
    ;;
esac
gpu=$(echo "$visible" | cut -d, -f$((turn + 1)))

# A MIG slice is on its GPU's node.
nvidia_address() {
  case $1 in
    MIG-*) set -- "$(nvidia-smi -L 2>/dev/null |
      awk -v slice="$1" '/^GPU / { gpu = $2 + 0 } index($0, slice) { print gpu; exit }')" ;;
  esac
  [ -n "$1" ] || return
  nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader -i "$1" 2>/dev/null |
    head -n 1 | tr 'A-F' 'a-f' | sed -n 's/^0000\([0-9a-f]\{4\}:[0-9a-f:.]*\)$/\1/p'
}

# The n-th GPU of the KFD's list, or the one of an id such as GPU-0123456789abcdef; those of other
# jobs cannot be read and are not counted.
amd_address() {
  left=$1
  place=0
  while [ -d "$root/sys/class/kfd/kfd/topology/nodes/$place" ]; do
    file=$root/sys/class/kfd/kfd/topology/nodes/$place/properties
    place=$((place + 1))
    location=$(sed -n 's/^location_id //p' "$file" 2>/dev/null)
    [ "${location:-0}" -gt 0 ] 2>/dev/null || continue
    case $left in
      GPU-*)
        unique=$(sed -n 's/^unique_id //p' "$file")
        [ "GPU-$(printf '%016x' "${unique:-0}")" = "$left" ] || continue
        ;;
      0) ;;
      *) left=$((left - 1)) && continue ;;
    esac
    domain=$(sed -n 's/^domain //p' "$file")
    printf '%04x:%02x:%02x.%x\n' "${domain:-0}" $((location >> 8 & 255)) \
      $((location >> 3 & 31)) $((location & 7))
    return
  done
}

case $gpu in
  '' | *[!0-9A-Za-z/_-]*) plainly "GPU '$gpu' is no number and no UUID" "$@" ;;
esac
address=
if [ -n "${CUDA_VISIBLE_DEVICES-}" ] && command -v nvidia-smi >/dev/null; then
  address=$(nvidia_address "$gpu")
fi
case $gpu in
  GPU-* | [0-9] | [0-9][0-9]) [ -n "$address" ] || address=$(amd_address "$gpu") ;;
esac
device=$root/sys/bus/pci/devices/$address
if [ -z "$address" ] || [ ! -e "$device/numa_node" ]; then
  plainly "no address of GPU $gpu" "$@"
fi

# "0-3,8" as one number a line.
numbers() { echo "$1" | tr , '\n' | awk -F- 'NF { for (n = $1; n <= $NF; n++) print n }'; }
cpus_of() { cat "$root/sys/devices/system/node/node$1/cpulist" 2>/dev/null; }

# Of a node without CPUs the nearest with CPUs, where one is.
nearest_to() {
  found=
  least=
  # shellcheck disable=SC2046  # a distance for each node
  set -- $(cat "$root/sys/devices/system/node/node$1/distance" 2>/dev/null)
  for other in $(numbers "$(cat "$root/sys/devices/system/node/online" 2>/dev/null)"); do
    [ $# -gt 0 ] || break
    if [ -n "$(cpus_of "$other")" ]; then
      if [ -z "$least" ] || [ "$1" -lt "$least" ]; then
        least=$1 found=$other
      elif [ "$1" -eq "$least" ]; then
        found=
      fi
    fi
    shift
  done
  echo "$found"
}

# A node without CPUs is memory of a GPU (GH200): its CPUs' node is the one to bind to.
node=$(cat "$device/numa_node")
if [ "$node" -ge 0 ] && [ -z "$(cpus_of "$node")" ]; then
  near=$(nearest_to "$node")
  node=${near:-$node}
fi
if [ "$node" -lt 0 ] || [ -z "$(cpus_of "$node")" ]; then
  node=
  first=$(numbers "$(cat "$device/local_cpulist" 2>/dev/null)" | head -n 1)
  for folder in "$root"/sys/devices/system/node/node[0-9]*; do
    [ -n "$first" ] || break
    numbers "$(cat "$folder/cpulist")" | grep -qx "$first" && node=${folder##*/node}
  done
  # Where the firmware gives nothing, every CPU of several nodes is called local.
  [ "$(numbers "$(cat "$device/local_cpulist")" | wc -l)" -gt \
    "$(numbers "$(cpus_of "${node:-x}")" | wc -l)" ] && node=
  [ -n "$node" ] || plainly "no node of GPU $gpu ($address)" "$@"
fi

allowed=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "$root/proc/self/status")
near=$(numbers "$(cpus_of "$node")")
own=$(numbers "$allowed" | grep -Fx "$near" | tr '\n' , | sed 's/,$//')
[ -n "$own" ] ||
  say "none of its CPUs ($allowed) is on node $node of GPU $gpu: they stay as they are"

# Each policy is tried on `true` first: the command must not run twice.
attempt() { numactl ${own:+--physcpubind="$own"} "$1" true 2>/dev/null; }
memory=${HOMENODE_MEMORY:-strict}
way=
if command -v numactl >/dev/null; then
  if [ "$memory" = strict ]; then
    attempt --membind="$node" && way=--membind=$node
    [ -n "$way" ] || say "memory cannot be bound to node $node: it is only preferred"
  fi
  if [ -z "$way" ] && [ "$memory" != none ]; then
    attempt --preferred="$node" && way=--preferred=$node
    [ -n "$way" ] || say "memory cannot be preferred on node $node: it stays as it was"
  fi
fi
verbose "GPU $gpu ($address) is on node $node: CPUs ${own:-$allowed}, memory ${way:-as it was}"
if [ -n "$way" ]; then
  exec numactl ${own:+--physcpubind="$own"} "$way" -- "$@"
elif [ -n "$own" ] && command -v taskset >/dev/null; then
  exec taskset -c "$own" "$@"
fi
exec "$@"
