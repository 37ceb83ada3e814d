
start() {
  local launch=() pid status=0
  if [[ -n $emulator_pus ]]; then launch=(taskset -c "$emulator_pus"); fi
  if ((locked_kib)); then ulimit -l "$locked_kib"; fi
  "${launch[@]}" "${qemu[@]}" "$@" &
  pid=$!
  trap 'kill "$pid"' INT TERM
  pin "$pid" || { kill "$pid"; return 1; }
  wait "$pid" || status=$?
  return "$status"
}

case ${1:-} in
  prepare) prepare ;;
  start) shift; start "$@" ;;
  pin) pin "${2:?a process id}" ;;
  command) printf '%s\n' "${qemu[@]}" ;;
  *) echo "usage: $0 prepare | start [WORD]... | pin PID | command" >&2; exit 2 ;;
esac
