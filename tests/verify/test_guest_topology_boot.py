"""A booted Linux prints no warning about the topology that unequal cells get.

The kernel starts its CPUs, builds its scheduling domains, and panics for want of a first process.
"""

import subprocess
from itertools import accumulate

import pytest

from homenode.check.verify.boot.stand_in_boot import build_kernel_command
from homenode.plan.shape.assemble import assemble
from homenode.units import GIB
from homenode.vm.model import GuestTopology
from tests.guest_shapes import placed
from tests.small_hosts import even_host, small_request
from tests.verify_guests import guest_files

pytestmark = pytest.mark.qemu

VENDORS = {"GenuineIntel": "Skylake-Server", "AuthenticAMD": "EPYC-Milan"}


def console(model: str, topology: GuestTopology, cells: tuple[int, ...]) -> str:
    """What the kernel says until it panics."""
    kernel = guest_files().kernel
    shape = ",".join(f"{name}={value}" for name, value in topology._asdict().items())
    argv = [
        *("qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=single", "-cpu", model),
        *("-smp", f"{topology.vcpus},{shape}", "-m", f"{96 * len(cells)}M", "-nodefaults"),
        *("-display", "none", "-serial", "stdio", "-no-reboot", "-kernel", str(kernel), "-append"),
        # What it says of its CPUs is no error, and is not silenced.
        build_kernel_command(topology.vcpus, kvm=False).replace(" quiet", ""),
    ]
    for cell, (count, end) in enumerate(zip(cells, accumulate(cells), strict=True)):
        argv += ["-object", f"memory-backend-ram,id=m{cell},size=96M"]
        argv += ["-numa", f"node,nodeid={cell},cpus={end - count}-{end - 1},memdev=m{cell}"]
    try:
        done = subprocess.run(argv, capture_output=True, check=False, timeout=150)
    except subprocess.TimeoutExpired:  # under TCG a guest of several vCPUs hangs once in a while
        done = subprocess.run(argv, capture_output=True, check=False, timeout=300)
    said = done.stdout.decode(errors="replace")
    assert f"smp: Brought up {len(cells)} nodes, {topology.vcpus} CPUs" in said, said[-2000:]
    return said


@pytest.mark.nightly
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize(("cells", "threads"), [((4, 3), 1), ((8, 4, 6), 2)])
def test_unequal_cells_boot_quietly(vendor: str, cells: tuple[int, ...], threads: int) -> None:
    layout = "pin-numa" if threads == 1 else "pin-numa-smt"
    request = small_request(sum(cells), sum(cells) * GIB, layout=layout)
    plan = assemble(even_host(len(cells), vendor=vendor), request, placed(cells, threads=threads))
    assert plan.vm.cpu_topology is not None and (plan.vm.cpu_topology.sockets == 1) == (
        vendor == "GenuineIntel"
    )
    model = VENDORS[vendor] + (",topoext=on" if plan.vm.topoext else "")
    said = console(model, plan.vm.cpu_topology, cells)
    assert "is not on the same node" not in said and "smpboot.c" not in said


@pytest.mark.nightly
def test_cells_that_cut_a_socket_of_an_amd_guest_do_make_it_warn() -> None:
    said = console("EPYC-Milan", GuestTopology(1, 1, 7, 1), (4, 3))
    assert "is not on the same node" in said
