
# Pin the threads of a running QEMU: its own, then each IOThread and each vCPU.
pin() {
  local pid=$1 task comm found=0 deadline=$((SECONDS + 120))
  if ((${#vcpu_pus[@]} == 0)); then return 0; fi
  if [[ -n $emulator_pus ]]; then
    for task in /proc/"$pid"/task/*; do
      taskset -pc "$emulator_pus" "${task##*/}" >/dev/null || true
    done
  fi
  while ((found < ${#vcpu_pus[@]})); do
    found=0
    for task in /proc/"$pid"/task/*; do
      read -r comm <"$task/comm" || continue
      if [[ $comm =~ ^CPU\ ([0-9]+)/ ]]; then
        taskset -pc "${vcpu_pus[BASH_REMATCH[1]]}" "${task##*/}" >/dev/null || return 1
        found=$((found + 1))
      elif [[ $comm =~ ^IO\ iothread([0-9]+)$ ]]; then
        if [[ -n ${iothread_pus[BASH_REMATCH[1] - 1]:-} ]]; then
          taskset -pc "${iothread_pus[BASH_REMATCH[1] - 1]}" "${task##*/}" >/dev/null || return 1
        fi
      fi
    done
    if ((found >= ${#vcpu_pus[@]})); then break; fi
    if [[ ! -d /proc/$pid ]] || ((SECONDS > deadline)); then
      echo "process $pid: expected ${#vcpu_pus[@]} vCPU threads, found $found" >&2
      return 1
    fi
    sleep 0.1
  done
}
