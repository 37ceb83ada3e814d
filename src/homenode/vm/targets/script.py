"""Script: shell text for hosts, written from values that others may have chosen.

Every value is one word of the shell by `quoted`; scripts need bash, coreutils and util-linux.
"""

import re
import shlex
from collections.abc import Iterable, Iterator

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.vm.plan_model import Plan
from homenode.vm.targets.target import is_vgpu


def quoted(word: str) -> str:
    """One word of a shell. Raises InputError for control characters, which no value of ours has."""
    if not word.isprintable():
        raise InputError(
            f"script: expected printable words, found {word!r}",
            hint="rename the VM or the file that holds it",
        )
    # A comma outside of quotes looks like a slip to whoever checks an array of bash.
    return shlex.quote(word) if "," not in word else "'" + word.replace("'", "'\"'\"'") + "'"


def array(name: str, words: Iterable[str]) -> str:
    """An array of bash, a line for each element."""
    lines = "".join(f"  {quoted(word)}\n" for word in words)
    return f"{name}=(\n{lines})\n" if lines else f"{name}=()\n"


def assigned(name: str, word: str) -> str:
    return f"{name}={quoted(word)}\n"


def plan_values(plan: Plan) -> str:
    """What `PIN` and `PREPARE` read: pins, devices, huge pages."""
    return "".join(
        (
            assigned(
                "emulator_pus", "" if plan.vm.emulator_pus is None else str(plan.vm.emulator_pus)
            ),
            array("vcpu_pus", map(str, plan.vcpu_pins)),
            array("iothread_pus", (str(pus) for pus in plan.iothread_pus)),
            array(
                "devices", (str(device.bdf) for device in plan.vm.hostdevs if not is_vgpu(device))
            ),
            "# host node, page size in kB, pages\n",
            array(
                "huge_pages",
                (f"{r.node} {r.page_bytes // 1024} {r.pages}" for r in plan.page_reservations),
            ),
        )
    )


PREPARE = r"""
# Reserve the huge pages and give the devices to vfio-pci. Needs root.
prepare() {
  local line node size pages folder free device driver
  for line in "${huge_pages[@]}"; do
    read -r node size pages <<<"$line"
    folder=/sys/devices/system/node/node$node/hugepages/hugepages-${size}kB
    free=$(<"$folder/free_hugepages")
    if ((free < pages)); then
      echo $(($(<"$folder/nr_hugepages") + pages - free)) >"$folder/nr_hugepages"
      free=$(<"$folder/free_hugepages")
    fi
    if ((free < pages)); then
      echo "node $node: expected $pages free pages of $size kB, found $free" >&2
      return 1
    fi
  done
  if ((${#devices[@]})); then modprobe vfio-pci; fi
  for device in "${devices[@]}"; do
    folder=/sys/bus/pci/devices/$device
    if [[ ! -d $folder ]]; then
      echo "device $device: expected it on this host, found none" >&2
      return 1
    fi
    driver=
    if [[ -e $folder/driver ]]; then driver=$(basename "$(readlink -f "$folder/driver")"); fi
    if [[ $driver == vfio-pci ]]; then continue; fi
    echo vfio-pci >"$folder/driver_override"
    if [[ -n $driver ]]; then echo "$device" >"$folder/driver/unbind"; fi
    echo "$device" >/sys/bus/pci/drivers_probe
  done
}
"""

PIN = r"""
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
        taskset -pc "${vcpu_pus[BASH_REMATCH[1]]}" "${task##*/}" >/dev/null
        found=$((found + 1))
      elif [[ $comm =~ ^IO\ iothread([0-9]+)$ ]]; then
        if [[ -n ${iothread_pus[BASH_REMATCH[1] - 1]:-} ]]; then
          taskset -pc "${iothread_pus[BASH_REMATCH[1] - 1]}" "${task##*/}" >/dev/null
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
"""


def words_of(text: str, where: str) -> tuple[str, ...]:
    """The words of a shell. Raises ParseError for a quote that does not end."""
    try:
        return tuple(shlex.split(text))
    except ValueError:
        raise ParseError(where, "words of a shell", text.strip()[:60]) from None


def array_in(text: str, name: str) -> tuple[str, ...] | None:
    """The words of an array in one of our scripts; None where it has none. Raises ParseError."""
    start = f"\n{name}=("
    at = text.find(start)
    if at < 0:
        return None
    end = text.find("\n)", at) if not text.startswith(")", at + len(start)) else at + len(start)
    return words_of(text[at + len(start) : end], name) if end >= 0 else None


def value_in(text: str, name: str) -> str | None:
    """The word of a variable in one of our scripts; None where it has none. Raises ParseError."""
    at = text.find(f"\n{name}=")
    if at < 0:
        return None
    line = text[at + len(name) + 2 :].partition("\n")[0]
    words = words_of(line, name)
    return words[0] if words else ""


def pins_in(text: str) -> tuple[tuple[CpuSet, ...], CpuSet | None, tuple[CpuSet, ...]]:
    """vCPU, emulator and IOThread pins of a script's values."""
    emulator = value_in(text, "emulator_pus")
    return (
        tuple(CpuSet.parse(pus, "vcpu_pus") for pus in array_in(text, "vcpu_pus") or ()),
        CpuSet.parse(emulator, "emulator_pus") if emulator else None,
        tuple(CpuSet.parse(pus, "iothread_pus") for pus in array_in(text, "iothread_pus") or ()),
    )


def without_continuation(text: str) -> str:
    """The text without the blanks and continued line ends at its end."""
    end = len(text)
    while end and (text[end - 1] in " \t" or text[max(0, end - 2) : end] == "\\\n"):
        end -= 2 if text[end - 1] == "\n" else 1
    return text[:end]


_WORD = re.compile(r"""(?:[^\s"'\\]|\\[^\n]|"(?:[^"\\]|\\.)*+"|'[^']*+')++""")


def shell_words(text: str, source: str) -> Iterator[tuple[str, int, int]]:
    """Words of a shell with their places; comments are left out. Raises ParseError."""
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text.startswith("\\\n", at) or text.startswith("\\\r\n", at):
            at = text.index("\n", at) + 1
        elif text[at] == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            match = _WORD.match(text, at)
            if match is None:
                raise ParseError(source, "words of a shell", text[at : at + 40])
            yield match[0], at, match.end()
            at = match.end()
