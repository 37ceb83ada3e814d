"""From a host and a document to a tuned document: the planner's own plans, written and read."""

from itertools import product

import pytest

from homenode.bdf import Bdf
from homenode.errors import HomenodeError, InputError
from homenode.machine.description.parse import load_shipped
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.plan.planner import plan
from homenode.plan.request import request_for
from homenode.vm.domain.crosscheck import check_references
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.read import read_vm
from homenode.vm.domain.schema import validate
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Plan
from homenode.vm.plan_options import PciGranularity, PlanOptions
from homenode.vm.targets.libvirt import rewrite
from tests.domain_corpus import NAMES, sample
from tests.seeds import part

ELSEWHERE = ("aarch64-virt", "gpu-with-audio-and-nics")
"""Samples that pass devices through which no HGX H100 has."""

GPUS = ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")


@pytest.fixture(scope="module")
def hgx() -> Host:
    return load_shipped("hgx-h100").host


def document_with(devices: list[Bdf], vcpus: int = 64) -> bytes:
    """A flat VM with these host devices."""
    hostdevs = "".join(
        f"""
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source>
        <address domain='0x{bdf.domain:04x}' bus='0x{bdf.bus:02x}' slot='0x{bdf.device:02x}' \
function='0x{bdf.function:x}'/>
      </source>
    </hostdev>"""
        for bdf in devices
    )
    return f"""<domain type='kvm'>
  <name>hgx</name>
  <memory unit='GiB'>512</memory>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
  </os>
  <cpu mode='host-passthrough'/>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='pci' index='0' model='pcie-root'/>{hostdevs}
    <memballoon model='none'/>
  </devices>
</domain>
""".encode()


def gpus_and_nics(host: Host) -> list[Bdf]:
    """The 8 GPUs and the NIC next to each, on the next bus."""
    gpus = [Bdf.parse(f"{bus}:00.0") for bus in GPUS]
    nics = [device.bdf for device in host.devices_of_kind(DeviceKind.NIC)]
    return sorted(gpus + [nic for nic in nics if Bdf(nic.domain, nic.bus - 1, 0, 0) in gpus])


def plan_of(host: Host, xml: bytes, layout: str) -> Plan:
    request = request_for(read_vm(xml, "vm.xml"), PlanOptions(layout=layout), host)
    return plan(host, request)


def addresses(xml: bytes) -> dict[str, str]:
    return {str(h.bdf): str(h.address) for h in read_vm(xml, "after").hostdevs}


def test_an_hgx_h100_becomes_two_expander_buses_with_sixteen_root_ports(hgx: Host) -> None:
    xml = document_with(gpus_and_nics(hgx))
    after = rewrite(xml, plan_of(hgx, xml, "pin-numa-pci"))
    guest = read_vm(after, "after")
    models = [controller.model for controller in guest.controllers]
    assert models.count("pcie-expander-bus") == 2
    assert models.count("pcie-root-port") == 16
    by_index = {controller.index: controller for controller in guest.controllers}
    cell_of: dict[str, int | None] = {}
    for hostdev in guest.hostdevs:
        assert hostdev.address is not None
        port = by_index[hostdev.address.bus].address
        assert port is not None
        cell_of[f"{hostdev.bdf.bus:02x}"] = by_index[port.bus].cell
    assert {cell_of[bus] for bus in GPUS[:4]} == {0}
    assert {cell_of[bus] for bus in GPUS[4:]} == {1}
    assert validate(after)[0] == ()


@pytest.mark.parametrize("layout", PRESETS)
@pytest.mark.parametrize("name", ["hgx-h100", "rtx4090-epyc7702"])
def test_a_second_run_changes_nothing_without_a_cpu_model_either(name: str, layout: str) -> None:
    host = load_shipped(name).host
    xml = document_with([], vcpus=8).replace(b"  <cpu mode='host-passthrough'/>\n", b"")
    xml = xml.replace(b">512</memory>", b">16</memory>")
    if name == "rtx4090-epyc7702" and PRESETS[layout].siblings == "exposed":
        with pytest.raises(InputError, match="missing <cpu> with a mode or a model"):
            plan_file(xml, "vm.xml", PlanOptions(layout), host)
        return
    once = plan_file(xml, "vm.xml", PlanOptions(layout), host).document
    assert plan_file(once, "vm.xml", PlanOptions(layout), host).document == once


@pytest.mark.parametrize("granularity", PciGranularity)
@pytest.mark.parametrize("name", ["hgx-h100", "epyc-nps4-gpu-nic"])
def test_every_granularity_is_written_and_read_back(name: str, granularity: PciGranularity) -> None:
    host = load_shipped(name).host
    kinds = (DeviceKind.GPU, DeviceKind.NIC)
    xml = document_with(sorted(d.bdf for kind in kinds for d in host.devices_of_kind(kind)), 32)
    options = PlanOptions(layout="pin-numa-pci", pci_granularity=granularity, spare_ports=2)
    request = request_for(read_vm(xml, "vm.xml"), options, host)
    after = rewrite(xml, plan(host, request))
    assert validate(after)[0] == ()
    assert check_references(parse_document(after, "after")) == ()
    request = request_for(read_vm(after, "after"), options, host)
    assert rewrite(after, plan(host, request)) == after


def test_a_fresh_plan_numbers_only_the_ports_of_the_vms_own_devices(hgx: Host) -> None:
    devices = gpus_and_nics(hgx)
    for some in (devices, devices[:-1], devices[5:6]):
        xml = document_with(some)
        tuned = rewrite(xml, plan_of(hgx, xml, "pin-numa-pci"))
        ports = tuned.count(b"model='pcie-root-port'")
        assert ports == len(addresses(tuned)) == len(some)


@pytest.mark.parametrize(
    ("name", "layout"),
    part([*product([name for name in NAMES if name not in ELSEWHERE], PRESETS)], 0),
)
def test_every_sample_takes_the_planners_own_plan(hgx: Host, name: str, layout: str) -> None:
    xml = sample(name)
    try:
        chosen = plan_of(hgx, xml, layout)
    except HomenodeError as error:
        assert "expected" in str(error)
        return
    try:
        after = rewrite(xml, chosen, name)
    except InputError as error:
        assert "expected" in str(error)
        return
    assert validate(after)[0] == ()
    assert check_references(parse_document(after, name)) == ()
    assert rewrite(after, chosen, name) == after


def test_a_guest_of_another_architecture_and_one_without_vcpus_are_refused(hgx: Host) -> None:
    grace = load_shipped("gh200x4").host
    with pytest.raises(InputError, match=r"x86_64.*aarch64"):
        plan_file(document_with([], 8), "vm.xml", PlanOptions("pin"), grace)
    bare = b"<domain type='kvm'><name>x</name><memory>1048576</memory></domain>"
    with pytest.raises(InputError, match=r"vm\.xml.*<vcpu>"):
        plan_file(bare, "vm.xml", PlanOptions("pin"), hgx)
