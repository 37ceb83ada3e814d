"""Guests of hosts that we know, and their topology files, for tests of NCCL's."""

from functools import cache

from homenode.bdf import Bdf
from homenode.check.verify.boot.stand_in_boot import BootOutcome
from homenode.machine.topology import Host
from homenode.nccl.assemble import TopologyFile, assemble_topology
from homenode.nccl.guest_side import (
    GuestSide,
    build_guest_side,
    find_kernel_address,
    list_bus_numbers,
    make_pending,
)
from homenode.nccl.topology import NcclVariant, write_topology
from homenode.plan.pipeline import plan_file
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.guest_observation import find_guest_path, map_guest_paths
from homenode.vm.plan import Plan
from homenode.vm.plan_options import PlanOptions, Policy
from homenode.vm.sources import load_host

TWO_CPUS = """<system version="1">
  <cpu numaid="0" affinity="0000000f" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="ffff:ff:01.0" class="0x060400" vendor="0xffff" device="0xffff" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:81:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/>
      <pci busid="0000:82:00.0" class="0x020000" link_speed="16 GT/s" link_width="8"/>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="000000f0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:c1:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/>
  </cpu>
</system>
"""  # noqa: E501
"""A correct file: tests break one thing in it at a time."""


X86 = "arch='x86_64' machine='q35'"


def vm(devices: tuple[str, ...], *, vcpus: int = 8, inside: str = "", type_: str = X86) -> bytes:
    """A document that passes the devices; inside: more elements of <devices>."""
    hostdevs = "".join(
        "<hostdev mode='subsystem' type='pci' managed='yes'><source>"
        f"<address domain='{b.domain:#06x}' bus='{b.bus:#04x}' slot='{b.device:#04x}' "
        f"function='{b.function:#x}'/></source></hostdev>\n"
        for b in map(Bdf.parse, devices)
    )
    return (
        "<domain type='kvm'><name>vm</name><memory unit='GiB'>4</memory>"
        f"<vcpu placement='static'>{vcpus}</vcpu>"
        f"<os><type {type_}>hvm</type></os>"
        "<cpu mode='host-passthrough'/>\n<devices>"
        f"<controller type='pci' index='0' model='pcie-root'/>\n{inside}{hostdevs}"
        "</devices></domain>"
    ).encode()


def side(xml: bytes, *, plan: Plan | None = None, guest: Host | None = None) -> GuestSide:
    document = open_domain(xml, "vm.xml")
    return build_guest_side(build_vm(document), make_pending(document), plan=plan, guest=guest)


def assembled(host: Host, xml: bytes, flavour: NcclVariant = NcclVariant.NCCL) -> TopologyFile:
    return assemble_topology(host, side(xml), flavour, "vm.xml")


@cache
def tuned_for(
    host: str,
    devices: tuple[str, ...],
    layout: str = "pin-numa-pci",
    vcpus: int = 8,
    type_: str = X86,
) -> bytes:
    """The document of a VM that is spread over all nodes of a shipped host."""
    options = PlanOptions(layout, policy=Policy.SPREAD)
    return plan_file(
        vm(devices, vcpus=vcpus, type_=type_), "vm.xml", options, load_host(host)
    ).document


def text_of(made: TopologyFile) -> str:
    return write_topology(made.topology)


def check_bus_numbers(xml: bytes, outcome: BootOutcome, device_count: int) -> None:
    """A booted test guest's kernel numbers the buses of its document's devices as derived."""
    assert outcome.guest is not None, outcome.findings
    stand_in, seen = outcome.stand_in, map_guest_paths(outcome.guest)
    buses = list_bus_numbers(stand_in.vm.controllers)
    derived = dict(side(xml).bus_ids)
    compared = 0
    for address, bdf in stand_in.devices:
        path = find_guest_path(address, stand_in.vm.controllers)
        assert path is not None
        assert seen[path] == find_kernel_address(address, buses), path
        if bdf is not None:
            assert seen[path] == derived[bdf], bdf
            compared += 1
    assert compared == len(derived) == device_count
    assert side(xml, guest=outcome.guest).bus_ids == side(xml).bus_ids
