"""The file that we write: the host's tree and CPUs, the guest's addresses, each device once."""

from collections.abc import Callable
from functools import cache

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import are_bad
from homenode.machine.pci import DeviceKind, PciDevice, PciLink
from homenode.machine.topology import Host
from homenode.nccl.assemble import TopologyFile, assemble_topology
from homenode.nccl.check import check_topology, compare_topology
from homenode.nccl.topology import (
    DEFAULT_PATH,
    KEPT_PATH,
    NcclPci,
    NcclTopology,
    NcclVariant,
    read_topology,
    render_cloud_config,
    write_topology,
)
from homenode.plan.pipeline import plan_file
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.nccl_documents import assembled, side, text_of, tuned_for, vm
from tests.shared_data import needs_shared, shared

GPUS = tuple(f"0000:{bus}:00.0" for bus in ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db"))
NICS = tuple(f"0000:{bus}:00.0" for bus in ("1a", "3c", "4d", "5e", "9c", "bc", "cc", "dc"))
NPS4 = tuple(f"0000:{bus}3:00.0" for bus in "02468ace")
NPS4_NICS = tuple(f"0000:{bus}4:00.0" for bus in "02468ace")
SMALL = ("0000:11:00.0", "0000:81:00.0")


@cache
def hgx() -> Host:
    return load_host("xeon-2p-cpus", lspci=shared("machines/lspci/gpud-hgx-h100x8-lspci-vvv.txt"))


@cache
def hgx_file() -> TopologyFile:
    xml = vm((*GPUS, *NICS), vcpus=96)
    return assembled(hgx(), plan_file(xml, "vm.xml", PlanOptions("pin-numa-pci"), hgx()).document)


@cache
def small() -> tuple[Host, bytes]:
    """A host of two nodes, and a VM with the GPU of each."""
    return load_host("small-2n8c-2gpu"), tuned_for("small-2n8c-2gpu", SMALL, vcpus=4)


def with_devices(host: Host, change: Callable[[PciDevice], PciDevice]) -> Host:
    return replace(host, pci_devices=tuple(map(change, host.pci_devices)))


def switches(topology: NcclTopology) -> list[NcclPci]:
    return [pci for pci in topology.list_pcis() if pci.children]


def doubts(made: TopologyFile) -> list[str]:
    """Ids of findings; the small host's CPU is unknown in every test that has it."""
    return [f.id for f in made.findings if f.id != "nccl-cpu-unknown"]


def judged(made: TopologyFile) -> None:
    """What every file of ours must be: right by the rules, and as the guest has it."""
    text = text_of(made)
    found = {f.id for f in check_topology(text.encode("ascii"), "t.xml", made.topology.flavour)}
    assert found <= {"nccl-affinity-shared"}
    read = read_topology(text.encode("ascii"), "t.xml")
    assert read.nodes == made.topology.nodes
    assert not compare_topology(read, made.topology)
    leaves = [pci.bus_id for pci in made.topology.list_pcis() if not pci.children]
    assert sorted(leaves) == sorted({device.bus_id for device in made.devices})


# ---- HGX H100: the lspci capture laid over a 2-package CPU description


@needs_shared
def test_the_hgx_h100_has_2_cpus_8_switch_groups_8_gpus_and_8_nics() -> None:
    made = hgx_file()
    judged(made)
    topology = made.topology
    assert len(topology.cpus) == 2 and len(switches(topology)) == 8
    kinds = [device.kind for device in made.devices]
    assert (kinds.count(DeviceKind.GPU), kinds.count(DeviceKind.NIC)) == (8, 8)
    # the text of a file that was worked out by hand has the same shape
    example = shared("machines/nccl/EXAMPLE-8gpu-2numa-guest.xml").read_bytes()
    theirs, ours = (read_topology(x, "t.xml") for x in (example, text_of(made).encode()))
    cpus = [[cpu.attributes for cpu in read.systems[0].children] for read in (theirs, ours)]
    assert cpus[0] == cpus[1]
    assert not made.findings


@needs_shared
def test_each_switch_group_holds_a_gpu_and_the_nic_next_to_it_on_the_host() -> None:
    made = hgx_file()
    host_of = {device.bus_id: str(device.bdf) for device in made.devices}
    groups = [tuple(host_of[c.bus_id] for c in s.children) for s in switches(made.topology)]
    assert groups == list(zip(GPUS, NICS, strict=True))
    nodes = [device.node for device in made.devices]
    assert nodes == [0] * 8 + [1] * 8


@needs_shared
def test_links_have_nccls_exact_words_and_switches_no_vendor_of_note() -> None:
    text = text_of(hgx_file())
    assert text.count('link_speed="32.0 GT/s PCIe" link_width="16"') == 24
    assert text.count('vendor="0xffff" device="0xffff"') == 8
    assert "0x1000" not in text and "<?xml" not in text and "\t" not in text
    assert not any(word in text for word in ("<gpu", "<nic", "<net", "host_hash"))


# ---- other hosts


def test_an_nps4_host_has_a_cpu_for_each_of_its_8_nodes() -> None:
    made = assembled(
        load_host("epyc-nps4-gpu-nic"), tuned_for("epyc-nps4-gpu-nic", NPS4 + NPS4_NICS, vcpus=64)
    )
    judged(made)
    assert [cpu.numa_id for cpu in made.topology.cpus] == list(range(8))
    assert {cpu.vendor for cpu in made.topology.cpus} == {"AuthenticAMD"}
    assert len(switches(made.topology)) == 8
    assert [len(cpu.affinity) for cpu in made.topology.cpus] == [8] * 8


def test_virtual_functions_have_the_place_and_link_of_their_physical_function() -> None:
    host = load_host("mi350x-epyc9575f")
    vfs = tuple(
        str(d.bdf)
        for d in host.pci_devices
        if d.physical_function is not None and d.kind is DeviceKind.GPU
    )
    made = assembled(host, tuned_for("mi350x-epyc9575f", vfs, vcpus=64), NcclVariant.RCCL)
    judged(made)
    assert len(vfs) == 8 and len(switches(made.topology)) == 8
    links = {(p.gt_per_s, p.width) for p in made.topology.list_pcis() if not p.children}
    assert links == {(32.0, 16)}
    assert text_of(made).startswith('<system version="2">')


def test_gpus_of_the_other_library_are_refused_by_name() -> None:
    amd = load_host("mi350x-epyc9575f")
    gpus = tuple(str(d.bdf) for d in amd.devices_of_kind(DeviceKind.GPU))[:1]
    with pytest.raises(InputError, match=r"NVIDIA GPUs.*AMD's") as caught:
        assembled(amd, tuned_for("mi350x-epyc9575f", gpus))
    assert "--rccl" in (caught.value.hint or "")
    with pytest.raises(InputError, match=r"AMD GPUs for RCCL.*10de"):
        assembled(*small(), NcclVariant.RCCL)


def test_a_flat_guest_still_gets_a_cpu_for_each_host_node_with_the_vcpus_pinned_there() -> None:
    host = load_host("epyc-nps4-gpu-nic")
    document = tuned_for("epyc-nps4-gpu-nic", (NPS4[0], NPS4[7]), "pin", vcpus=16)
    with pytest.raises(InputError, match="no guest address"):
        assembled(host, document)
    ports = "".join(
        f"<controller type='pci' index='{i}' model='pcie-root-port'>"
        f"<address type='pci' slot='{i:#x}'/></controller>"
        for i in (1, 2)
    )
    ports += "<controller type='usb' model='none'/><memballoon model='none'/><hostdev"
    xml = document.replace(b"<hostdev", ports.encode(), 1)
    for i in (1, 2):
        address = f"</source><address type='pci' bus='{i}'/></hostdev >".encode()
        xml = xml.replace(b"</source></hostdev>", address, 1)
    made = assembled(host, xml)
    judged(made)
    assert [device.bus_id for device in made.devices] == ["0000:01:00.0", "0000:02:00.0"]
    assert [cpu.numa_id for cpu in made.topology.cpus] == list(range(len(made.topology.cpus)))
    masks = [cpu.affinity for cpu in made.topology.cpus]
    assert sum(len(mask) for mask in masks) == 16 and all(masks)


def test_gh200_is_arm64_without_a_vendor() -> None:
    gpus = ("0009:01:00.0", "0019:01:00.0")
    xml = tuned_for("gh200x4", gpus, type_="arch='aarch64' machine='virt'", vcpus=16)
    made = assembled(load_host("gh200x4"), xml)
    judged(made)
    assert {cpu.architecture for cpu in made.topology.cpus} == {"arm64"}
    assert "vendor=" not in text_of(made)


def test_a_device_that_is_alone_on_its_node_gets_the_nearest_vcpus() -> None:
    host, _ = small()
    xml = vm((SMALL[0],), vcpus=4)
    near = plan_file(xml, "vm.xml", PlanOptions("pin-numa-pci"), host).document
    made = assembled(host, near.replace(b"bus='0x11'", b"bus='0x81'", 1))
    judged(made)
    far = made.topology.cpus[1]
    assert (far.numa_id, far.affinity) == (1, CpuSet(range(4)))


def test_a_device_of_unknown_node_is_left_out_with_a_finding() -> None:
    host, xml = small()
    lost = with_devices(host, lambda d: replace(d, node=None) if str(d.bdf) == SMALL[1] else d)
    made = assembled(lost, xml)
    assert [str(device.bdf) for device in made.devices] == [SMALL[0]]
    assert [f.id for f in made.findings if f.subject == SMALL[1]] == ["nccl-device-without-node"]
    assert are_bad(made.findings)


def test_unknown_links_are_left_to_the_guest_and_those_of_switches_assumed_aloud() -> None:
    bare = with_devices(load_host("epyc-nps4-gpu-nic"), lambda d: replace(d, link=None))
    made = assembled(bare, tuned_for("epyc-nps4-gpu-nic", (NPS4[0], NPS4_NICS[0])))
    judged(made)
    ids = [f.id for f in made.findings]
    assert ids.count("nccl-link-unknown") == 2 and ids.count("nccl-switch-link-unknown") == 1
    assert text_of(made).count("link_speed") == 1


def test_a_link_is_the_lesser_of_both_its_ends_and_not_what_an_idle_device_shows() -> None:
    host, xml = small()
    gpu = host.device_at[Bdf.parse(SMALL[0])]
    links = {gpu.bdf: PciLink(2.5, 16, 32.0, 16), gpu.parent: PciLink(2.5, 16, 16.0, 8)}
    idle = with_devices(host, lambda d: replace(d, link=links.get(d.bdf, d.link)))
    first = next(assembled(idle, xml).topology.list_pcis())
    assert (first.gt_per_s, first.width) == (16.0, 8)


def test_nested_switches_stay_nested() -> None:
    host = load_host("epyc-nps4-gpu-nic")
    gpu = host.device_at[Bdf.parse(NPS4[0])]
    # the GPU of node 4 moves, with its switch, below the downstream port of node 0's NIC
    other = host.switch_above(Bdf.parse(NPS4[4]))
    moved = with_devices(host, lambda d: replace(d, parent=gpu.parent) if d.bdf == other else d)
    moved = with_devices(moved, lambda d: replace(d, node=gpu.node) if str(d.bdf) == NPS4[4] else d)
    xml = tuned_for("epyc-nps4-gpu-nic", (NPS4[0], NPS4_NICS[0], NPS4[4]))
    made = assemble_topology(moved, side(xml), NcclVariant.NCCL, "vm.xml")
    outer, inner = switches(made.topology)
    assert inner in outer.children and len(outer.children) == 3
    judged(made)


def test_the_machines_own_cpu_decides_and_a_gap_is_said() -> None:
    host, xml = small()
    made = assembled(replace(host, cpu=replace(host.cpu, model=None)), xml)
    judged(made)
    assert "nccl-cpu-unknown" in {f.id for f in made.findings}
    assert "familyid" not in text_of(made) and "modelid" not in text_of(made)


@pytest.mark.parametrize("vendor", ['x" numaid="9', "<!--", "a\tb", "a vendor of many letters"])
def test_a_hosts_odd_vendor_stays_out_of_the_file(vendor: str) -> None:
    host = load_host("epyc-nps4-gpu-nic")
    odd = replace(host, cpu=replace(host.cpu, vendor=vendor))
    made = assembled(odd, tuned_for("epyc-nps4-gpu-nic", (NPS4[0],)))
    judged(made)
    assert vendor not in text_of(made) and [f.id for f in made.findings] == ["nccl-cpu-unknown"]


def test_floating_vcpus_belong_to_every_node_with_a_warning() -> None:
    host, xml = small()
    floating = replace(side(xml), vcpu_pins=(None,) * 4, cells=(), node_of_cell=())
    made = assemble_topology(host, floating, NcclVariant.NCCL, "vm.xml")
    assert [cpu.affinity for cpu in made.topology.cpus] == [CpuSet(range(4))] * 2
    assert doubts(made) == ["nccl-vcpus-float"]


def test_cells_with_bound_memory_say_where_unpinned_vcpus_are() -> None:
    host, xml = small()
    unpinned = replace(side(xml), vcpu_pins=(None,) * 4)
    made = assemble_topology(host, unpinned, NcclVariant.NCCL, "vm.xml")
    assert [str(cpu.affinity) for cpu in made.topology.cpus] == ["0-1", "2-3"]
    assert not doubts(made)


def test_nodes_are_numbered_as_linux_meets_their_vcpus() -> None:
    _, xml = small()
    swapped = xml.replace(b"cpus='0,1'", b"cpus='@'").replace(b"cpus='2,3'", b"cpus='0,1'")
    swapped = swapped.replace(b"cpus='@'", b"cpus='2,3'")
    assert swapped != xml
    assert side(swapped).node_of_cell == (1, 0)


# ---- what cannot be


def test_a_device_that_the_host_lacks_is_named() -> None:
    with pytest.raises(InputError, match=r"no device 0000:11:00\.0 on host 'h200-xeon8558'"):
        assembled(load_host("h200-xeon8558"), small()[1])


def test_a_guest_without_gpu_and_nic_needs_no_file() -> None:
    with pytest.raises(InputError, match="no passed-through GPU or NIC"):
        assembled(small()[0], vm(()))


def test_a_host_without_a_pci_tree_is_refused_with_the_way_to_give_it_one() -> None:
    host, xml = small()
    with pytest.raises(InputError, match="no PCI tree") as caught:
        assembled(replace(host, pci_devices=()), xml)
    assert "--lspci" in (caught.value.hint or "")


def test_more_devices_than_nccl_reads_are_refused_or_warned_of() -> None:
    host, xml = small()
    bdfs = [Bdf(0, bus, device, 0) for bus in range(0x90, 0x9A) for device in range(32)]
    nic = replace(host.device_at[Bdf.parse(SMALL[0])], kind=DeviceKind.NIC, class_code=0x020000)
    crowd = [replace(nic, bdf=bdf) for bdf in bdfs]
    many = replace(host, pci_devices=(*host.pci_devices, *crowd))

    def made(count: int) -> TopologyFile:
        crowded = replace(side(xml), bus_ids=tuple((bdf, bdf) for bdf in bdfs[:count]))
        return assemble_topology(many, crowded, NcclVariant.NCCL, "vm.xml")

    assert (doubts(made(80)), doubts(made(90))) == ([], ["nccl-too-many-nodes"])
    with pytest.raises(InputError, match="at most 255 elements"):
        made(len(bdfs))


# ---- judged against the VM


def test_a_file_for_another_vm_is_distinguished() -> None:
    host = load_host("epyc-nps4-gpu-nic")
    devices = (NPS4[0], NPS4_NICS[0], NPS4[4], NPS4_NICS[4])
    expected = assembled(host, tuned_for("epyc-nps4-gpu-nic", devices, vcpus=16)).topology
    good = write_topology(expected)
    ids = [pci.bus_id for pci in expected.list_pcis() if not pci.children]

    def found(text: str) -> set[str]:
        assert text != good
        return {f.id for f in compare_topology(read_topology(text.encode(), "t.xml"), expected)}

    line = next(each for each in good.splitlines() if ids[0] in each)
    assert found(good.replace(line + "\n", "")) == {"nccl-device-missing"}
    swapped = good.replace(ids[0], "@").replace(ids[2], ids[0]).replace("@", ids[2])
    assert found(swapped) == {"nccl-device-on-other-cpu", "nccl-switch-group"}
    misnamed = good.replace(ids[0], "0000:fe:00.0")
    assert found(misnamed) == {"nccl-device-missing"}
    both = misnamed.replace(ids[2], "0000:fd:00.0")
    assert found(both) == {"nccl-device-missing", "nccl-busid-unknown"}
    assert found(good.replace("affinity=", "affinity='1' x=")) == {"nccl-other-vcpus"}


# ---- the text, and how it gets there


def test_the_snippet_holds_the_file_unchanged_and_copies_it_at_each_boot() -> None:
    text = text_of(assembled(*small()))
    snippet = render_cloud_config(text)
    assert snippet.startswith("#cloud-config\nwrite_files:\n")
    block = snippet.partition("content: |\n")[2].partition("  - path:")[0]
    assert "".join(line[6:] for line in block.splitlines(keepends=True)) == text
    assert f"C {DEFAULT_PATH.removeprefix('/var')} 0644 root root - {KEPT_PATH}" in snippet
    at_once = snippet.partition("runcmd:\n")[2]
    assert at_once == f"  - [install, -D, -m, '0644', {KEPT_PATH}, {DEFAULT_PATH}]\n"
    assert "\t" not in snippet and snippet.isascii()
