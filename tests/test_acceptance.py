"""What homenode promises, on real machines: from a document and a host to a tuned document."""

from functools import cache
from pathlib import Path

import pytest
from lxml import etree

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import CoreKind, Host
from homenode.plan.pipeline import plan_file
from homenode.units import GIB
from homenode.vm.domain.schema import validate
from homenode.vm.layout import PRESETS
from homenode.vm.model import PortModel
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import PlanOptions, Policy
from homenode.vm.sources import load_host
from tests.shared_data import needs_shared, shared

GPUS_OF_NODE = (("19", "3b", "4c", "5d"), ("9b", "bb", "cb", "db"))
GPUS = tuple(Bdf.parse(f"{bus}:00.0") for row in GPUS_OF_NODE for bus in row)
NICS = tuple(Bdf(0, gpu.bus + 1, 0, 0) for gpu in GPUS)


def document(
    vcpus: int,
    memory_gib: int,
    devices: tuple[Bdf, ...] = (),
    machine: str = "q35",
    architecture: str = "x86_64",
) -> bytes:
    hostdevs = "".join(
        "    <hostdev mode='subsystem' type='pci' managed='yes'>\n      <source>\n"
        f"        <address domain='{bdf.domain:#06x}' bus='{bdf.bus:#04x}' "
        f"slot='{bdf.device:#04x}' "
        f"function='{bdf.function:#x}'/>\n      </source>\n    </hostdev>\n"
        for bdf in devices
    )
    return (
        "<domain type='kvm'>\n  <name>vm</name>\n"
        f"  <memory unit='GiB'>{memory_gib}</memory>\n  <vcpu placement='static'>{vcpus}</vcpu>\n"
        f"  <os><type arch='{architecture}' machine='{machine}'>hvm</type></os>\n"
        "  <cpu mode='host-passthrough' check='none' migratable='on'/>\n"
        f"  <devices>\n    <emulator>/usr/bin/qemu-system-x86_64</emulator>\n{hostdevs}"
        "  </devices>\n</domain>\n"
    ).encode()


def planned(host: Host, vcpus: int, options: PlanOptions, memory_gib: int = 16) -> Plan:
    return plan_file(document(vcpus, memory_gib), "vm.xml", options, host).plan


@cache
def hgx() -> Host:
    listing = shared("machines/lspci/gpud-hgx-h100x8-lspci-vvv.txt")
    return load_host("xeon-2p-cpus", lspci=listing)


def places(xml: bytes) -> dict[str, str]:
    """Guest address, with the slot of its root port, of each passed-through device."""
    root = etree.fromstring(xml)
    ports: dict[str, str] = {}
    for port in root.iterfind("devices/controller[@model='pcie-root-port']"):
        ports[str(port.get("index"))] = _text(port.find("address"))
    found: dict[str, str] = {}
    for hostdev in root.iterfind("devices/hostdev"):
        source, address = hostdev.find("source/address"), hostdev.find("address")
        assert source is not None and address is not None
        port_index = int(str(address.get("bus")), 16)
        found[str(source.get("bus"))] = f"{_text(address)} on {ports[str(port_index)]}"
    return found


def _text(element: etree._Element | None) -> str:
    assert element is not None
    return etree.tostring(element, encoding="unicode", with_tail=False)


# ---- HGX H100: the lspci capture laid over a 2-package CPU description


@needs_shared
def test_hgx_h100_gets_two_expander_buses_and_sixteen_root_ports() -> None:
    tuning = plan_file(
        document(96, 512, (*GPUS, *NICS)), "vm.xml", PlanOptions("pin-numa-pci"), hgx()
    )
    models = [controller.model for controller in tuning.plan.vm.controllers]
    assert models.count(PortModel.EXPANDER_BUS) == 2
    assert models.count(PortModel.ROOT_PORT) == 16
    cell_of = {device.bdf: device.cell for device in tuning.plan.vm.hostdevs}
    assert [cell_of[bdf] for bdf in GPUS] == [0] * 4 + [1] * 4
    assert [cell_of[bdf] for bdf in NICS] == [0] * 4 + [1] * 4
    assert validate(tuning.document)[0] == ()


@needs_shared
@pytest.mark.parametrize("layout", PRESETS)
def test_a_second_run_changes_nothing(layout: str) -> None:
    once = plan_file(
        document(64, 512, (*GPUS, *NICS)), "vm.xml", PlanOptions(layout), hgx()
    ).document
    assert plan_file(once, "vm.xml", PlanOptions(layout), hgx()).document == once


@needs_shared
@pytest.mark.parametrize("dropped", [*GPUS, *NICS], ids=str)
def test_dropping_one_device_of_a_tuned_document_moves_no_other(dropped: Bdf) -> None:
    everything = (*GPUS, *NICS)
    options = PlanOptions("pin-numa-pci")
    whole = plan_file(document(96, 512, everything), "vm.xml", options, hgx()).document
    before = places(whole)
    del before[f"{dropped.bus:#04x}"]

    root = etree.fromstring(whole)
    for hostdev in root.findall("devices/hostdev"):
        source = hostdev.find("source/address")
        if source is not None and source.get("bus") == f"{dropped.bus:#04x}":
            parent = hostdev.getparent()
            assert parent is not None
            parent.remove(hostdev)
    tuned_again = plan_file(etree.tostring(root), "vm.xml", options, hgx()).document
    assert places(tuned_again) == before


# ---- LLCs and core kinds


@needs_shared
@pytest.mark.parametrize(("vcpus", "llcs"), [(8, 1), (16, 2), (24, 3)])
def test_whole_llcs_of_the_epyc_9654_are_filled(vcpus: int, llcs: int) -> None:
    host = load_host(str(shared("machines/hwloc/AMD-19h-Zen4-2xEpyc-9654.xml")))
    plan = planned(host, vcpus, PlanOptions("pin"))
    pinned = {pu for pins in plan.vcpu_pins for pu in pins}
    assert len(plan.llcs) == llcs
    for index in plan.llcs:
        cores = [core for core in host.cores if core.pus <= host.llcs[index].pus]
        assert len(cores) == 8
        assert all(len(pinned & set(core.pus)) == 1 for core in cores)


@needs_shared
def test_a_hybrid_host_gives_p_cores_and_keeps_the_emulator_on_e_cores() -> None:
    host = load_host(str(shared("machines/hwloc/Intel-RaptorLake-Corei7-1370P.xml")))
    kind = {pu: core.kind for core in host.cores for pu in core.pus}
    plan = planned(host, 6, PlanOptions("pin"), memory_gib=8)
    assert {kind[pu] for pins in plan.vcpu_pins for pu in pins} == {CoreKind.PERFORMANCE}
    assert plan.vm.emulator_pus
    assert {kind[pu] for pu in plan.vm.emulator_pus} == {CoreKind.EFFICIENCY}
    with pytest.raises(Unplannable, match="24 CPUs needed, 20 free"):
        planned(host, 24, PlanOptions("pin"), memory_gib=8)


def test_a_gh200_vm_with_gpu_2_gets_node_2_and_never_hbm() -> None:
    host = load_host("gh200x4")
    gpu = host.devices_of_kind(DeviceKind.GPU)[2]
    for layout in ("pin", "pin-bound", "pin-numa"):
        vm = document(64, 100, (gpu.bdf,), "virt", "aarch64")
        plan = plan_file(vm, "vm.xml", PlanOptions(layout), host).plan
        assert plan.nodes == (2,)
        assert set(plan.memory_nodes) <= {2}
    vm = document(284, 400, (), "virt", "aarch64")
    whole = plan_file(vm, "vm.xml", PlanOptions("pin-numa"), host).plan
    assert whole.nodes == whole.memory_nodes == (0, 1, 2, 3)


# ---- XAPI's case: count cores, not threads


THREADS = PlanOptions("pin-numa-smt", keep_vcpus=True, policy=Policy.MEMORY_FIRST)


@pytest.mark.parametrize(
    ("vcpus", "options", "cores", "nodes"),
    [
        (32, PlanOptions("pin-numa"), 32, (0, 1)),
        (32, THREADS, 16, (0,)),
        (16, PlanOptions("pin-numa"), 16, (0,)),
        (16, THREADS, 8, (0,)),
    ],
)
def test_cores_are_counted_and_not_threads(
    vcpus: int, options: PlanOptions, cores: int, nodes: tuple[int, ...]
) -> None:
    host = load_host("xapi-2n16c2t")
    plan = planned(host, vcpus, options)
    pinned = [pu for pins in plan.vcpu_pins for pu in pins]
    assert plan.nodes == nodes
    assert len(pinned) == len(set(pinned)) == vcpus
    assert sum(not core.pus.isdisjoint(CpuSet(pinned)) for core in host.cores) == cores


# ---- refusals


def test_i440fx_takes_no_pcie_layout() -> None:
    vm = document(8, 8, machine="pc-i440fx-7.2")
    with pytest.raises((InputError, Unplannable), match="q35"):
        plan_file(vm, "vm.xml", PlanOptions("pin-numa-pci"), load_host("xapi-2n16c2t"))


def test_a_kvm_guest_of_another_architecture_is_refused() -> None:
    with pytest.raises(InputError, match=r"x86_64.*aarch64"):
        plan_file(document(8, 8), "vm.xml", PlanOptions("pin"), load_host("gh200x4"))


def test_a_domain_without_vcpus_is_refused_by_name() -> None:
    vm = b"<domain type='kvm'><name>x</name><memory>1048576</memory></domain>"
    with pytest.raises(InputError, match=r"vm\.xml.*<vcpu>"):
        plan_file(vm, "vm.xml", PlanOptions("pin"), load_host("xapi-2n16c2t"))


def test_an_xml_bomb_is_refused_unread() -> None:
    bomb = b"<!DOCTYPE d [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;'>]>" + document(4, 4)
    with pytest.raises(InputError, match=r"DOCTYPE|DTD"):
        plan_file(bomb, "vm.xml", PlanOptions("pin"), load_host("xapi-2n16c2t"))


def test_a_truncated_archive_is_refused_by_name(tmp_path: Path) -> None:
    archive = tmp_path / "host.tar.gz"
    archive.write_bytes(b"\x1f\x8b\x08\x00truncated")
    with pytest.raises(InputError, match=r"host\.tar\.gz"):
        load_host(str(archive))


def test_memory_is_in_bytes_and_sums_exactly() -> None:
    plan = planned(load_host("h200-xeon8558"), 88, PlanOptions("pin-numa"), memory_gib=1001)
    assert sum(cell.memory_bytes for cell in plan.cells) == 1001 * GIB
