# What every job of this study does: write down what Slurm gave it, then measure.
#
# The job script sets these and then reads this file:
#   experiment   its name, and its folder below raw/
#   together     how many jobs of it measure at once (they wait for each other)
#   bind         words before each command that bind it; () = as Slurm binds
#   tests        of homenode bench; () = none
#   app          words of the user's own program; () = none
#   app_folder   where it runs
#   homenode     the program
#   arrangement  how it is bound, as results tell it
#
# shellcheck shell=bash disable=SC2154
set -u
export LC_ALL=C
export TZ=UTC
unset SLURM_TIME_FORMAT

task=${SLURM_ARRAY_TASK_ID:-0}
# An array's last task has the array's own number, which stands for all of them.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$task}
job=${job:-$SLURM_JOB_ID}
attempt=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
here=raw/$experiment/task-$task/$attempt
node=${SLURMD_NODENAME:-$(hostname -s)}
mkdir -p "$here" || exit 3
trap 'echo "$?" >"$here/exit"' EXIT
date +%s >"$here/started"

# Seconds since 1970 with a fraction; bash before 5 has no clock of its own.
now() {
  echo "${EPOCHREALTIME:-$(date +%s.%N)}"
}

# write FILE COMMAND…: its output, and beside it what went wrong.
write() {
  local file=$here/$1
  shift
  needs "$1" 2>"$file.err" || return 0
  "$@" >"$file" 2>"$file.err" || echo "exit status $?" >>"$file.err"
  [ -s "$file.err" ] || rm -f "$file.err"
}

# needs PROGRAM…: whether they are there; says which is not.
needs() {
  local name
  for name in "$@"; do
    command -v "$name" >/dev/null || { echo "$name is not on the PATH" >&2 && return 1; }
  done
}

# bound COMMAND…: as this job binds what it measures.
bound() {
  if ((${#bind[@]})); then "${bind[@]}" "$@"; else "$@"; fi
}

# Where a PCI function is: its address, its NUMA node and its path through the PCI tree.
place_of() {
  local path
  path=$(readlink -f "$1") || return
  echo "$2 ${path##*/} $(cat "$path/numa_node") $path"
}

gpu_places() {
  local id
  needs nvidia-smi || return
  nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader | while read -r id; do
    id=${id,,}
    [ ${#id} -eq 16 ] && id=${id:4}
    place_of "/sys/bus/pci/devices/$id" gpu
  done
}

nic_places() {
  local nic
  for nic in /sys/class/infiniband/*; do
    if [ -e "$nic/device" ]; then place_of "$nic/device" "${nic##*/}"; fi
  done
}

# No UUIDs: they are nobody's business.
gpu_list() {
  needs nvidia-smi || return
  nvidia-smi -L | sed 's/ *(UUID: [^)]*)//'
}

record() {
  echo "$node" >"$here/node"
  write job.txt scontrol show job -d "$job"
  write others.txt squeue --noheader --nodelist="$node" --states=RUNNING --format='%A|%C|%b'
  write allowed.txt grep -E '^(Cpus|Mems)_allowed_list' /proc/self/status
  write numactl-show.txt bound numactl --show
  write numactl-hardware.txt numactl --hardware
  write gpu-places.txt gpu_places
  write nic-places.txt nic_places
  write gpu-list.txt gpu_list
}

# Jobs that measure together start together: each says that it is there, and waits for the rest.
# One that goes on without them says so too, and one that Slurm started again does not take those
# of the first time for its company.
meet() {
  ((together > 1)) || return 0
  local meeting count=0 waited
  meeting=raw/$experiment/meeting-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}.${SLURM_RESTART_COUNT:-0}
  mkdir -p "$meeting"
  : >"$meeting/$task"
  for ((waited = 0; waited < ${meet_seconds:-120}; waited++)); do
    count=$(find "$meeting" -type f ! -name '*.gone' | wc -l)
    ((count >= together)) && break
    sleep 1
  done
  ((count >= together)) || mv "$meeting/$task" "$meeting/$task.gone"
  echo "$count of $together" >"$here/met"
}

# Each package's energy counter and where it wraps around, in microjoules: "12/262143,34/262143";
# "-" where they may not be read. Other zones (psys, dram) hold a part of it again, or more.
energy() {
  local zone name value range all=
  for zone in /sys/class/powercap/intel-rapl:[0-9] /sys/class/powercap/intel-rapl:[0-9][0-9]; do
    { name=$(<"$zone/name"); } 2>/dev/null || continue
    [[ $name == package-* ]] || continue
    { value=$(<"$zone/energy_uj") && range=$(<"$zone/max_energy_range_uj"); } 2>/dev/null ||
      { echo -; return; }
    all+=${all:+,}$value/$range
  done
  echo "${all:--}"
}

# A second of its own for each line, without a program for each where bash is before 5.
stamped() {
  local line time
  while read -r line; do
    time=${EPOCHREALTIME:-}
    [ -n "$time" ] || printf -v time '%(%s)T.5' -1
    echo "$time, $line"
  done
}

# nvbandwidth, one test after the other, each under a head that tells how it was bound.
# -d: else the tool moves itself to the GPU's node, and every binding would measure the same.
measure_copies() {
  # A controller that lost its state may give a number twice.
  rm -f "$here/nvbandwidth.txt" "$here/times.txt"
  needs nvbandwidth 2>"$here/nvbandwidth.txt.err" || return
  local test begin energy_before watcher=
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=pci.bus_id,power.draw --format=csv,noheader,nounits --loop-ms=250 \
      > >(stamped >"$here/power.csv" 2>/dev/null) 2>/dev/null &
    watcher=$!
  fi
  for test in host_to_device_memcpy_ce device_to_host_memcpy_ce host_device_latency_sm \
    device_local_copy device_to_device_memcpy_read_ce; do
    begin=$(now) energy_before=$(energy)
    {
      bound numactl --show
      bound nvbandwidth -d -t "$test"
    } >>"$here/nvbandwidth.txt" 2>>"$here/nvbandwidth.txt.err" ||
      echo "$test: exit status $?" >>"$here/nvbandwidth.txt.err"
    echo "$test $begin $(now) $energy_before $(energy)" >>"$here/times.txt"
  done
  if [ -n "$watcher" ]; then
    kill "$watcher" 2>/dev/null
    wait "$watcher" 2>/dev/null
  fi
  [ -s "$here/nvbandwidth.txt.err" ] || rm -f "$here/nvbandwidth.txt.err"
}

measure_cpus() {
  ((${#tests[@]})) || return 0
  local names
  names=$(IFS=, && echo "${tests[*]}")
  write bench.txt bound "$homenode" bench "$experiment-task$task-$attempt-cpus" \
    --results results --vantage job --quick --tests "$names" --arrangement "$arrangement"
}

# In the folder that the study was started in: its words may name files there.
app_in_its_folder() (
  cd "$app_folder" && bound "${app[@]}"
)

measure_app() {
  ((${#app[@]})) || return 0
  local begin
  begin=$(now)
  write app.txt app_in_its_folder
  echo "app $begin $(now) - -" >>"$here/times.txt"
}

record
meet
measure_copies
measure_cpus
measure_app
date +%s >"$here/ended"
# Last of all, so that whoever finds it finds everything.
: >"$here/done"
