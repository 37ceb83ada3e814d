"""A booted Linux sees the L3 that its pins have, or none, and a CPU in every cell.

QEMU emulates a CPU of either vendor. TCG knows no topoext, so the feature is forced on the AMD one:
the leaves are then those of a guest under KVM.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.check.verify.boot.guest_files import pack_initramfs
from homenode.check.verify.boot.stand_in_boot import build_kernel_command
from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest
from homenode.plan.shape.caches import guest_cpu, guest_l3_groups
from homenode.units import GIB
from homenode.vm.model import GuestCache, GuestTopology
from homenode.vm.plan import Plan, with_vm
from homenode.vm.targets.qemu_command import format_cpu, format_smp
from tests.small_hosts import even_host, small_request
from tests.verify_guests import guest_files

pytestmark = pytest.mark.qemu

MODELS = {
    "GenuineIntel": "Skylake-Server",
    "AuthenticAMD": "max,vendor=AuthenticAMD,family=25,model=1,stepping=1,x-force-features=on,"
    "xlevel=0x8000001e,svm=off",
}
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
cd /sys/devices/system
for cpu in cpu/cpu[0-9]*; do
  [ -d $cpu/topology ] || continue
  echo "cpu ${cpu##*cpu}"
  for cache in $cpu/cache/index*; do
    [ "$(cat $cache/level)" = 3 ] && echo "l3 $(cat $cache/shared_cpu_list)"
  done
done
for node in node/node[0-9]*; do echo "node $(cat $node/cpulist)"; done
dmesg -r | grep '^<[0-4]>'
echo end
poweroff -f
"""


@dataclass(frozen=True)
class Seen:
    """What a guest saw of its caches."""

    cpus: CpuSet  # numbers
    nodes: tuple[CpuSet, ...]  # CPUs of each
    l3: frozenset[CpuSet]  # CPUs of each L3
    warnings: tuple[str, ...]  # of the topology


def booted(made: Plan, model: str, online: int, directory: Path) -> Seen:
    files = guest_files()
    (directory / "initramfs").write_bytes(pack_initramfs(files.busybox, INIT))
    smp = format_smp(made).removeprefix(f"{made.vm.vcpus},")
    cells = []
    for cell in made.cells:
        cells += ["-object", f"memory-backend-ram,id=m{cell.id},size=128M"]
        cells += ["-numa", _node(cell.id, cell.vcpus)]
    done = subprocess.run(
        [
            "qemu-system-x86_64",
            *("-machine", "q35", "-accel", "tcg,thread=single"),
            *("-cpu", format_cpu(replace(made, aperture=None), model)),
            *("-smp", f"{online},maxcpus={made.vm.vcpus},{smp}"),
            *("-m", f"{128 * len(made.cells)}M"),
            *cells,
            *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
            *("-kernel", str(files.kernel), "-initrd", str(directory / "initramfs")),
            *("-append", build_kernel_command(made.vm.vcpus, kvm=False)),
        ],
        capture_output=True,
        check=False,
        timeout=500,
    )
    said = done.stdout.decode(errors="replace").replace("\r", "")
    assert "\nend\n" in said, (done.stderr[-1000:], said[-2000:])

    def sets(word: str) -> list[CpuSet]:
        return [CpuSet.parse(m) for m in re.findall(rf"^{word} ([0-9,-]*)$", said, re.MULTILINE)]

    return Seen(
        CpuSet.union(sets("cpu")),
        tuple(sets("node")),
        frozenset(sets("l3")),
        tuple(re.findall(r"<[0-4]>.*(?:same node|smpboot|sched: |topolog|sibling).*", said)),
    )


def _node(cell: int, vcpus: CpuSet) -> str:
    runs = "".join(f",cpus={run}" for run in str(vcpus).split(","))
    return f"node,nodeid={cell}{runs},memdev=m{cell}"


def under_the_pins(host: Host, made: Plan, online: CpuSet) -> frozenset[CpuSet]:
    """The online vCPUs on each LLC of the host."""
    groups: dict[object, set[int]] = {}
    for vcpu, pins in enumerate(made.vcpu_pins):
        (pu,) = pins
        groups.setdefault(host.pu_at[pu].llc, set()).add(vcpu)
    return frozenset(CpuSet(group) & online for group in groups.values() if CpuSet(group) & online)


def wish(vcpus: int, layout: str = "pin-numa", online: int | None = None) -> GuestRequest:
    request = small_request(vcpus, 8 * GIB, layout=layout)
    offline = CpuSet(range(vcpus if online is None else online, vcpus))
    guest = structs.replace(request.guest, offline_vcpus=offline)
    return replace(request, guest=guest)


AMD, INTEL = "AuthenticAMD", "GenuineIntel"


def sub_numa(vendor: str) -> Host:
    """A package of two nodes with one LLC."""
    host = even_host(1, 2, 1, 4, 1, vendor=vendor)
    both = structs.replace(host.llcs[0], pus=CpuSet.union(llc.pus for llc in host.llcs))
    pus = tuple(structs.replace(pu, llc=both.index) for pu in host.pus)
    return structs.replace(host, llcs=(both,), pus=pus)


SHOWN, HIDDEN = GuestCache.EMULATED, GuestCache.DISABLED
CASES = {
    "two-llcs-a-cell-amd": (even_host(2, 1, 2, 3, 1, vendor=AMD), wish(8), SHOWN),
    "two-llcs-a-cell-intel": (even_host(2, 1, 2, 3, 1, vendor=INTEL), wish(8), SHOWN),
    "3-and-2-amd": (even_host(1, 1, 2, 3, 1, vendor=AMD), wish(5), HIDDEN),
    "3-and-2-intel": (even_host(1, 1, 2, 3, 1, vendor=INTEL), wish(5), HIDDEN),
    "siblings-amd": (even_host(1, 1, 2, 3, 2, vendor=AMD), wish(4, "pin-numa-smt"), SHOWN),
    "one-llc-of-two-cells-intel": (sub_numa(INTEL), wish(6), SHOWN),
    "one-llc-of-two-cells-amd": (sub_numa(AMD), wish(6), HIDDEN),
    # Of vCPUs that are offline at the start: the cells take turns.
    "an-llc-at-a-time-amd": (even_host(2, 1, 2, 3, 1, vendor=AMD), wish(8, online=4), SHOWN),
    "half-an-llc-at-a-time-amd": (even_host(2, 1, 1, 5, 1, vendor=AMD), wish(8, online=4), HIDDEN),
    "one-socket-intel": (even_host(2, 1, 1, 9, 1, vendor=INTEL), wish(16, online=6), HIDDEN),
}


LAB = {"two-llcs-a-cell-intel", "3-and-2-amd", "3-and-2-intel", "half-an-llc-at-a-time-amd"}
"""Cases of a vendor and a cache that another case boots with."""


MARKS = {name: pytest.mark.lab if name in LAB else pytest.mark.nightly for name in CASES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in CASES])
def test_a_guest_sees_its_pins_caches_and_a_cpu_per_cell(name: str, tmp_path: Path) -> None:
    host, request, cache = CASES[name]
    made = plan(host, request)
    assert made.vm.cpu_cache is cache
    offline = request.guest.offline_vcpus
    seen = booted(made, MODELS[str(host.cpu.vendor)], made.vm.vcpus - len(offline), tmp_path)
    assert seen.cpus == CpuSet(range(made.vm.vcpus)) - offline
    assert seen.nodes == tuple(cell.vcpus - offline for cell in made.cells)
    assert all(seen.nodes) and len(seen.nodes) == len(made.cells)
    shown = under_the_pins(host, made, seen.cpus) if cache is GuestCache.EMULATED else frozenset()
    assert seen.l3 == shown
    assert seen.warnings == ()


@pytest.mark.nightly
def test_with_topoext_amd_has_an_l3_that_was_switched_off(tmp_path: Path) -> None:
    host, request, _ = CASES["3-and-2-amd"]
    made = plan(host, request)
    cache, topology = made.vm.cpu_cache, made.vm.cpu_topology
    assert made.vm.topoext is False and topology is not None and cache is not None
    seen = booted(with_vm(made, topoext=True), MODELS[AMD], 5, tmp_path)
    told = guest_l3_groups(cache, topology, guest_cpu(host, request.guest, topoext=True))
    assert told is not None and seen.l3 == set(told) == {CpuSet(range(5))}


@pytest.mark.nightly
def test_a_cell_that_cuts_a_socket_of_amd_is_among_the_warnings_looked_for(tmp_path: Path) -> None:
    host, request, _ = CASES["two-llcs-a-cell-amd"]
    made = with_vm(plan(host, request), cpu_topology=GuestTopology(1, 1, 8, 1))
    assert booted(made, MODELS[AMD], 8, tmp_path).warnings
