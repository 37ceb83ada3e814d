"""A stand-in for virsh: a shell script that keeps one domain in a directory, and behaves alike.

It serves where a real daemon is too slow for hundreds of kills. As libvirt it drops comments from a
document and replaces a definition whole or not at all; unlike libvirt it dawdles before and after.
"""

import shlex
from pathlib import Path

UUID = "6e1f6d5e-4a35-4c9c-8f2e-5a0d1c2b3a49"
URI, SESSION = "qemu:///system", "qemu:///session"
"""The first is the default, which a printed command omits."""

_SCRIPT = r"""#!/bin/sh
# virsh --connect URI --quiet COMMAND ARGUMENTS...
state=@STATE@
shift 3
command=$1; shift
echo "$command $*" >>"$state/log"
fail() { echo "error: $*" >&2; exit 1; }
# Both set a variable: no process is started to read a file or an argument.
read_value() { value=; { IFS= read -r value <"$state/$1"; } 2>/dev/null; }
find_argument() {  # the value of an option
  argument= option=$1; shift
  while [ $# -gt 0 ]; do [ "$1" = "$option" ] && { argument=$2; return; }; shift; done
}
if [ -e "$state/at" ]; then  # NUMBER WHAT: what happens at which call
  read_value calls; number=$((value + 1)); echo "$number" >"$state/calls"
  read_value at
  case "$value" in
    "$number edit") sed -i 's,</name>,</name><title>mine</title>,' "$state/definition.xml" ;;
    "$number kill-before") kill -9 $PPID; exit 1 ;;
    "$number kill-after") trap 'kill -9 $PPID' EXIT ;;
  esac
fi
[ -e "$state/down" ] && fail "failed to connect to the hypervisor"
find_argument --domain "$@"; domain=$argument
read_value id; id=$value
read_value name; name=$value
case $command in define|list) ;; *)
  [ -e "$state/undefined" ] && fail "failed to get domain '$domain'"
  case $domain in
    "@UUID@"|"$name"|"$id") ;;
    *) fail "failed to get domain '$domain'" ;;
  esac ;;
esac
case $command in
  domuuid) echo "@UUID@" ;;
  list)  # --all or not --uuid --name
    [ "$1" = --all ] || [ "$id" ] || exit 0
    [ -e "$state/undefined" ] || echo "@UUID@ $name" ;;
  dominfo)
    run_state='shut off'; [ "$id" ] && { read_value run-state; run_state=${value:-running}; }
    printf 'Id:             %s\nName:           %s\nUUID:           %s\nState:          %s\n' \
      "${id:--}" "$name" "@UUID@" "$run_state"
    read_value persistent; printf 'Persistent:     %s\n' "$value"
    read_value saved; printf 'Managed save:   %s\n' "$value" ;;
  dumpxml) cat "$state/definition.xml" && echo ;;
  define)
    find_argument --file "$@"; file=$argument
    [ -e "$state/refuses" ] && fail "Failed to define domain from $file"
    [ -e "$state/slow" ] && { read_value slow; sleep "$value"; }
    # What libvirt prints ends in one newline, and virsh adds another.
    read_value drops
    sed -e '/<!--/d' ${value:+-e} ${value:+"/$value/d"} -e '${/^$/d;}' "$file" >"$state/new.$$" ||
      fail "Failed to open $file"
    # As libvirtd, it goes on when its client is stopped; with "late" there, once that is gone. It
    # says itself that it was given: before, it could still be stopped with its client.
    if [ -e "$state/late" ]; then
      setsid sh -c 'touch "$0/told"; while [ -e "$0/late" ]; do sleep 0.05; done
        mv "$1" "$0/definition.xml"' "$state" "$state/new.$$" </dev/null >/dev/null 2>&1 &
      sleep 600; exit 1
    fi
    mv "$state/new.$$" "$state/definition.xml"; rm -f "$state/undefined"
    ! [ -e "$state/lost" ] || fail "End of file while reading data: Input/output error" ;;
  undefine) touch "$state/undefined" ;;
  start)
    [ -e "$state/id" ] && fail "Requested operation is not valid: domain is already running"
    read_value start-fails; [ "$value" ] && fail "Failed to start domain: $value"
    read_value boots; number=$((value + 1)); echo "$number" >"$state/boots"
    echo "$number" >"$state/new-id"; mv "$state/new-id" "$state/id" ;;
  shutdown|destroy)
    [ -e "$state/id" ] || fail "Requested operation is not valid: domain is not running"
    read_value deaf
    [ "$command-$value" = shutdown-yes ] || rm -f "$state/id" ;;
  snapshot-list) ls "$state/snapshots" ;;
  snapshot-dumpxml) find_argument --snapshotname "$@"; cat "$state/snapshots/$argument" ;;
  vcpupin|emulatorpin|iothreadinfo|iothreadpin)
    case $command in
      vcpupin) find_argument --vcpu "$@"; file=pins/vcpu.$argument ;;
      emulatorpin) file=pins/emulator.0 ;;
      *) find_argument --iothread "$@"; file=pins/iothread.$argument ;;
    esac
    find_argument --cpulist "$@"
    if [ "$argument" ]; then
      [ -e "$state/$file" ] || fail "no such thread"
      read_value refuses-pin  # THREAD or THREAD=CPUS, any number of them
      case " $value " in *" $file "*|*" $file=$argument "*) fail "cannot set $file" ;; esac
      echo "$argument" >"$state/$file"
    else
      for pin in "$state/${file%.*}".*; do
        [ -e "$pin" ] || continue
        number=" ${pin##*.}   "; [ "$command" = emulatorpin ] && number=
        read_value "${pin#"$state/"}"; printf '%s%s\n' "$number" "$value"
      done
    fi ;;
  domifaddr)
    find_argument --source "$@"
    [ -e "$state/addresses-$argument" ] || fail "Failed to query for interfaces addresses"
    cat "$state/addresses-$argument" ;;
  *) fail "unknown command: '$command'" ;;
esac
"""


class StandIn:
    """One stand-in and its only domain. Put `bin` first on PATH."""

    def __init__(self, directory: Path, name: str, definition: bytes, uuid: str = UUID) -> None:
        self.bin = directory / "bin"
        self.state = directory / "state"
        (self.state / "snapshots").mkdir(parents=True)
        (self.state / "pins").mkdir()
        self.bin.mkdir()
        script = self.bin / "virsh"
        script.write_text(
            _SCRIPT.replace("@STATE@", shlex.quote(str(self.state))).replace("@UUID@", uuid)
        )
        script.chmod(0o755)
        self.put("name", name)
        self.put("persistent", "yes")
        self.put("saved", "no")
        (self.state / "definition.xml").write_bytes(definition)

    def put(self, name: str, value: str) -> None:
        (self.state / name).write_text(value)

    def get(self, name: str) -> str:
        return (self.state / name).read_text().strip()

    def happens(self, number: int, what: str) -> None:
        """At the call of that number from now on: "edit", "kill-before" or "kill-after"."""
        (self.state / "calls").unlink(missing_ok=True)
        self.put("at", f"{number} {what}")

    def calls(self) -> int:
        """How many calls there were since `happens`."""
        return int(self.get("calls"))

    def nothing_happens(self) -> None:
        (self.state / "at").unlink()

    def put_definition(self, definition: bytes) -> None:
        (self.state / "definition.xml").write_bytes(definition)

    def definition(self) -> bytes:
        """What the daemon holds."""
        return (self.state / "definition.xml").read_bytes()

    def commands(self) -> list[str]:
        """What it was given, one command a line."""
        return self.get("log").splitlines()
