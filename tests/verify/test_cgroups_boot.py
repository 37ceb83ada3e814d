"""Limits of cgroups of version 2 as a real kernel writes them, read in a booted guest."""

import subprocess
from pathlib import Path

import pytest

from homenode.check.verify.boot.guest_files import pack_initramfs
from homenode.check.verify.live.capture import ProcFiles, capture_running_vm
from homenode.check.verify.live.checks import check_groups, check_limits
from homenode.vm.domain.read import read_vm
from tests.proc_trees import BARE, PID, UUID, ProcTree
from tests.verify_guests import guest_files

pytestmark = [pytest.mark.qemu, pytest.mark.nightly]

VM = "/machine.slice/machine-qemu-1.scope"
TWO = b"<domain type='kvm'><name>vm</name><memory unit='MiB'>128</memory><vcpu>2</vcpu></domain>"

INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec >/dev/console 2>&1
C=/sys/fs/cgroup
mount -t cgroup2 none $C
on() {{ echo "+cpu +cpuset +io +memory" >$C$1/cgroup.subtree_control; }}
on
mkdir $C/machine.slice && on /machine.slice
mkdir $C{VM} && on {VM}
mkdir $C{VM}/libvirt
for one in emulator vcpu0 vcpu1; do
  mkdir $C{VM}/libvirt/$one
  echo threaded >$C{VM}/libvirt/$one/cgroup.type
done
echo "+cpu +cpuset" >$C{VM}/libvirt/cgroup.subtree_control
N=0
for one in emulator vcpu0 vcpu1; do
  sleep 900 &
  echo $! >$C{VM}/libvirt/cgroup.procs
  echo $! >$C{VM}/libvirt/$one/cgroup.threads
  eval P$N=$!
  N=$((N + 1))
done
show() {{
  echo "HOMENODE $1"
  N=0
  for one in $P0 $P1 $P2; do
    echo "F task/$N"; sed 's/^/ /' /proc/$one/cgroup
    grep Cpus_allowed_list /proc/$one/status | sed 's/^/ /'
    N=$((N + 1))
  done
  for directory in "" /libvirt /libvirt/emulator /libvirt/vcpu0 /libvirt/vcpu1; do
    for file in $C{VM}$directory/cpu.* $C{VM}$directory/io.* $C{VM}$directory/memory.*; do
      case $file in *.max | *.high | *.weight | *.idle)
        echo "F ${{file#/}}"; sed 's/^/ /' $file ;;
      esac
    done
  done
}}
show as-made
echo "20000 100000" >$C{VM}/libvirt/vcpu0/cpu.max
echo 0 >$C{VM}/libvirt/vcpu0/cpuset.cpus
echo 1 >$C{VM}/libvirt/vcpu1/cpu.idle
echo 50 >$C{VM}/cpu.weight
echo 64M >$C{VM}/memory.high
echo "$(cat /sys/block/nvme0n1/dev) rbps=1048576 wiops=120" >$C{VM}/io.max
show changed
poweroff -f
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The kernel's files by path, before and after limits were set."""
    files = guest_files()
    initrd = tmp_path_factory.mktemp("guest") / "initrd"
    initrd.write_bytes(pack_initramfs(files.busybox, INIT))
    disk = ("-drive", "driver=null-co,size=1M,if=none,id=d", "-device", "nvme,drive=d,serial=1")
    words = (
        *("qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=single", "-smp", "2"),
        *("-m", "256", "-kernel", str(files.kernel), "-initrd", str(initrd), *disk),
        *("-append", "console=ttyS0 quiet panic=-1", "-nodefaults", "-no-reboot"),
        *("-display", "none", "-serial", "stdio"),
    )
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    found: dict[str, dict[str, str]] = {}
    path = ""
    for line in done.stdout.splitlines():
        if line.startswith("HOMENODE "):
            found[line.split()[1]] = {}
        elif line.startswith("F ") and found:
            path = line[2:]
            found[[*found][-1]][path] = ""
        elif line.startswith(" ") and path:
            found[[*found][-1]][path] += line[1:] + "\n"
    assert [*found] == ["as-made", "changed"], done.stdout[-2000:]
    return found


def findings(files: dict[str, str], root: Path) -> list[tuple[str, str, str]]:
    tree = ProcTree(root)
    allowed = [files[f"task/{n}"].rpartition("Cpus_allowed_list:")[2].strip() for n in range(3)]
    names = ("qemu", "CPU 0/KVM", "CPU 1/KVM")
    tree.qemu(dict(zip(names[1:], allowed[1:], strict=True)), ((64, "0"), (64, "1")))
    for path, text in files.items():
        tree.put(path, text)
    for number in range(3):
        cgroup = files[f"task/{number}"].partition("\n")[0] + "\n"
        tree.put(f"proc/{PID}/task/{PID + number}/cgroup", cgroup)
        if number == 0:
            tree.put(f"proc/{PID}/cgroup", cgroup)
    seen = capture_running_vm(UUID, BARE, ProcFiles(str(root)), watched_s=0)
    vm = read_vm(TWO, "vm.xml")
    found = [*check_limits(vm, seen), *check_groups(vm, seen)]
    return [(one.id, one.subject, one.observed) for one in found]


def test_new_groups_hold_nothing_back(shown: dict[str, dict[str, str]], tmp_path: Path) -> None:
    assert findings(shown["as-made"], tmp_path) == []


def test_each_limit_is_named(shown: dict[str, dict[str, str]], tmp_path: Path) -> None:
    device = shown["changed"][f"sys/fs/cgroup{VM}/io.max"].split()[0]
    own, limit = f"cgroup {VM}", f"{device} rbps=1048576 wbps=max riops=max wiops=120"
    assert shown["changed"]["task/1"].endswith("Cpus_allowed_list:\t0\n")
    named = [
        ("live-quota", "vCPU 0", f"20% of a CPU, by {own}/libvirt/vcpu0"),
        ("live-memory-limit", "vm", f"64 MiB, by memory.high of {own}"),
        ("live-shares", "vm", f"50, by cpu.weight of {own}"),
        ("live-scheduler", "vm", f"cpu.idle of {own}/libvirt/vcpu1"),
        ("live-io-limit", "vm", f"{limit}, by io.max of {own}"),
    ]
    assert sorted(findings(shown["changed"], tmp_path)) == sorted(named)
