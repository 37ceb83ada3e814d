"""The nodes of devices where the firmware names a GPU's own node, or none: what tools say then."""

import re
from collections.abc import Callable

import pytest
from msgspec import structs

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import diagnose
from homenode.machine.discover.host import discover
from homenode.machine.pci import DeviceKind
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.topology import Host
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.units import GIB
from tests.kubevirt_documents import shipped
from tests.small_hosts import asking, small_request

NODE = "/sys/devices/system/node"
OWN_NODES = {"0": "4", "1": "12", "2": "20", "3": "28"}
"""The node of the memory of each CPU node's GPU, on 4x GH200."""


def with_nodes(
    name: str, below: str, node: Callable[[str], str], commands: dict[str, str] | None = None
) -> MemorySnapshot:
    """A shipped host with other numa_node files in the directories that match, and the local CPUs
    that the kernel gives then: all for -1. lspci, which reads these, is omitted."""
    whole = shipped(name)
    files = dict(whole.files)
    for path, text in whole.files.items():
        if path.endswith("/numa_node") and re.search(below, path):
            named, directory = node(text.strip()), path.removesuffix("numa_node")
            where = (
                "/sys/devices/system/cpu/online" if named == "-1" else f"{NODE}/node{named}/cpulist"
            )
            files[path] = f"{named}\n"
            files[f"{directory}local_cpulist"] = whole.files[where]
            files.pop(f"{directory}local_cpus", None)
    said = {tool: text for tool, text in whole.commands.items() if tool != "lspci"}
    return MemorySnapshot(name, files, whole.links, {**said, **(commands or {})})


def gpus_on_their_own_nodes() -> MemorySnapshot:
    """As GB200 firmware names them: a GPU and the port above are on the node of its memory."""
    return with_nodes("gh200x4", r"/pci00[0-3]9:00/", OWN_NODES.__getitem__)


def gpus_on_the_cpus_nodes() -> MemorySnapshot:
    return with_nodes("gh200x4", "nowhere", str)


def new(host: Host) -> Host:
    """With a libvirt and a QEMU that know generic initiators."""
    settings = structs.replace(host.settings, libvirt_version=(11, 8, 0), qemu_version=(10, 0, 0))
    return structs.replace(host, settings=settings, domains=())


def test_a_gpu_on_a_node_of_its_own_is_near_to_the_cpus_that_are_nearest_to_that() -> None:
    host, usual = discover(gpus_on_their_own_nodes()), discover(gpus_on_the_cpus_nodes())
    gpus = host.devices_of_kind(DeviceKind.GPU)
    assert [(gpu.node, gpu.firmware_node) for gpu in gpus] == [(0, 4), (1, 12), (2, 20), (3, 28)]
    assert host.root_complexes == usual.root_complexes
    assert host.links == usual.links
    assert [gpu.reported_node for gpu in gpus] == [4, 12, 20, 28]
    assert host.gaps == usual.gaps


@pytest.mark.parametrize("layout", ["pin", "pin-numa", "pin-numa-pci"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_both_names_of_a_gpus_node_give_the_same_plan(count: int, layout: str) -> None:
    request = small_request(16 * count, 64 * GIB, layout=layout)
    guest = structs.replace(request.guest, architecture="aarch64", machine="virt")
    request = asking(request, guest=guest, gpu_count=count)
    plans = []
    for snapshot in (gpus_on_their_own_nodes(), gpus_on_the_cpus_nodes()):
        host = new(discover(snapshot))
        plans.append(assemble(host, request, place(host, request)))
    assert plans[0] == plans[1]
    initiators = sum(not cell.vcpus for cell in plans[0].cells)
    assert initiators == (8 * count if layout == "pin-numa-pci" else 0)
    assert {device.host_node for device in plans[0].vm.hostdevs} == set(range(count))


def test_both_names_of_a_gpus_node_give_the_same_diagnosis() -> None:
    own, usual = (
        diagnose(discover(snapshot))
        for snapshot in (gpus_on_their_own_nodes(), gpus_on_the_cpus_nodes())
    )
    assert own == usual


def test_a_node_of_ordinary_memory_whose_cpus_are_offline_stays_what_it_is() -> None:
    whole = shipped("hgx-h100")
    files = dict(whole.files)
    files[f"{NODE}/node1/cpulist"] = "\n"
    files.pop(f"{NODE}/node1/cpumap", None)
    files["/sys/devices/system/cpu/online"] = "0-55,112-167\n"
    host = discover(MemorySnapshot("half", files, whole.links, {}))
    gpus = host.devices_of_kind(DeviceKind.GPU)
    assert [(gpu.node, gpu.firmware_node) for gpu in gpus[4:]] == [(1, None)] * 4


def test_a_node_of_its_own_that_is_as_near_to_two_packages_says_nothing() -> None:
    whole = gpus_on_their_own_nodes()
    files = dict(whole.files)
    for path, text in whole.files.items():
        if re.fullmatch(rf"{NODE}/node\d+/distance", path):
            files[path] = " ".join("10" if d == "10" else "20" for d in text.split())
    host = discover(MemorySnapshot("single", files, whole.links, {}))
    gpu = host.devices_of_kind(DeviceKind.GPU)[0]
    assert (gpu.node, gpu.firmware_node) == (None, 4)
    assert any("equally near to several" in gap.reason for gap in host.gaps)
    finding, *_ = (one for one in diagnose(host).findings if one.id == "gpu-node-unknown")
    assert "numa_node is 4, which has no CPUs" in finding.observed


def test_where_the_firmware_gives_no_node_that_of_nvidia_smi_is_used() -> None:
    """Also of what is below the same root complex: it belongs to one CPU."""
    host = discover(with_nodes("hgx-h100", "/pci0000:(15|97)/", lambda _: "-1"))
    usual = discover(with_nodes("hgx-h100", "nowhere", str))
    assert [d.node for d in host.pci_devices] == [d.node for d in usual.pci_devices]
    assert host.root_complexes == usual.root_complexes
    gaps = {gap.subject: gap.reason for gap in host.gaps}
    said = "firmware reports no node; nvidia-smi topo -m reports 0: used"
    assert gaps["node of 0000:19:00.0"] == said
    assert any("node 1, as the GPUs of pci0000:97" in reason for reason in gaps.values())
    assert not any("numa_node is -1" in reason for reason in gaps.values())


def test_the_cpus_of_nvidia_smi_say_it_where_its_nodes_do_not() -> None:
    matrix = shipped("hgx-h100").command_output("nvidia-smi-topo") or ""
    matrix = matrix.replace("\t0\t\tN/A", "\tN/A\t\tN/A").replace("\t1\t\tN/A", "\tN/A\t\tN/A")
    commands = {"nvidia-smi-topo": matrix}
    host = discover(with_nodes("hgx-h100", "/pci", lambda _: "-1", commands))
    assert [gpu.node for gpu in host.devices_of_kind(DeviceKind.GPU)] == [0] * 4 + [1] * 4


def test_affinities_that_contradict_each_other_or_sysfs_are_gaps() -> None:
    matrix = shipped("hgx-h100").command_output("nvidia-smi-topo") or ""
    lines = matrix.split("\n")
    lines[1] = lines[1].replace("\t0\t\tN/A", "\t1\t\tN/A")
    lines[5] = lines[5].replace("56-111,168-223\t1", "0-55,112-167\t0")
    commands = {"nvidia-smi-topo": "\n".join(lines)}
    host = discover(with_nodes("hgx-h100", "/pci0000:15/", lambda _: "-1", commands))
    nodes = {str(gpu.bdf): gpu.node for gpu in host.devices_of_kind(DeviceKind.GPU)}
    assert (nodes["0000:19:00.0"], nodes["0000:9b:00.0"]) == (None, 1)
    reasons = [gap.reason for gap in host.gaps if gap.subject == "node of 0000:19:00.0"]
    assert any("says node 1 and the CPUs of node 0; used neither" in one for one in reasons)
    [reason] = [gap.reason for gap in host.gaps if gap.subject == "node of 0000:9b:00.0"]
    assert reason == "nvidia-smi topo -m says 0, sysfs says 1; used sysfs"


def test_a_vm_goes_next_to_a_gpu_whose_node_only_nvidia_smi_says() -> None:
    host = discover(with_nodes("hgx-h100", "/pci0000:97/", lambda _: "-1"))
    request = small_request(8, 16 * GIB, layout="pin-numa-pci", devices=["0000:9b:00.0"])
    assert place(host, request).nodes == (1,)
    assert host.device_at[Bdf.parse("9b:00.0")].node == 1
