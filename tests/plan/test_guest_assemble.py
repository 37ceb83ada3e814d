"""The plan as a whole, what its user is given, and the host's fingerprint."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import Gap, Rejection
from homenode.machine.pci import PciLink
from homenode.plan.placement import Placement
from homenode.plan.shape.assemble import assemble
from homenode.vm.layout import PRESETS
from homenode.vm.model import GuestHostdev
from homenode.vm.plan import CostTerm, RunnerUp
from homenode.vm.plan_options import PciGranularity, Policy
from tests.figures import numbers
from tests.guest_shapes import HGX_GPUS, HGX_NICS, defined_guest, hgx_host, placed
from tests.small_hosts import DeviceSpec, asking, even_host, small_request


def sentences(layout: str = "pin-numa-pci") -> str:
    devices = tuple(sorted(HGX_GPUS + HGX_NICS))
    request = small_request(4, layout=layout, devices=[str(bdf) for bdf in devices])
    request = replace(request, guest=defined_guest(request.guest))
    return "\n".join(assemble(hgx_host(), request, placed((2, 2), devices=devices)).consequences)


def test_what_the_placement_says_is_in_the_plan() -> None:
    placement = replace(
        placed((2, 2)),
        emulator_pus=CpuSet.parse("8"),
        iothread_pus=(CpuSet.parse("9"),),
        cost=(CostTerm("nodes_spanned", 2),),
        optimal=None,
        runners_up=(RunnerUp((), (), "nodes_spanned"),),
        rejections=(Rejection("memory", (), "expected more"),),
        gaps=(Gap("node 0 free memory", "not given"),),
    )
    request = small_request(4)
    request = replace(request, guest=structs.replace(request.guest, iothread_ids=(1,)))
    plan = assemble(even_host(2), request, placement)
    assert (plan.vm.emulator_pus, plan.iothread_pus) == (CpuSet.parse("8"), (CpuSet.parse("9"),))
    assert (plan.cost, plan.optimal) == (placement.cost, None)
    assert plan.runners_up == placement.runners_up and plan.rejections == placement.rejections
    assert placement.gaps[0] in plan.gaps and plan.fallback == "test"
    assert plan.host_name == "even" and plan.vm.name == "vm"


def test_a_moved_nic_changes_its_name_and_this_is_reported() -> None:
    text = sentences()
    moved = "GPU 0000:19:00.0 moves from guest address 0000:07:00.0 to 0000:19:00.0, on guest"
    assert moved in text
    assert "Names of 8 network interfaces that follow the PCI path (enpXsY) change" in text
    assert "The guest sees 2 NUMA nodes: node 0 with vCPUs 0-1 and 2 GiB" in text
    assert "Per-socket licences see 2 sockets; without <topology> it would be 4." in text
    assert "50 % of the guest's memory is on the node of GPU 0000:19:00.0" in text


def test_gpus_of_two_nodes_are_not_listed_as_of_one() -> None:
    host = hgx_host()
    node_of = {str(device.bdf): device.node for device in host.pci_devices}
    lines = [line for line in sentences().splitlines() if "on the node of GPU" in line]
    named = [
        [word.strip(",;") for word in line.split() if word.startswith("0000:")] for line in lines
    ]
    assert len(lines) == 2 and sum(map(len, named)) == len(HGX_GPUS)
    assert all(len({node_of[bdf] for bdf in bdfs}) == 1 for bdfs in named)


def test_layouts_that_move_nothing_say_nothing_of_moves() -> None:
    text = sentences("pin")
    assert "moves" not in text and "NUMA node" not in text and "sockets" not in text


def test_more_vcpus_are_said() -> None:
    plan = assemble(None, small_request(4, layout="pin-numa-smt"), placed((4, 4), threads=2))
    assert "The guest has 8 vCPUs instead of 4." in plan.consequences
    assert "The guest sees 2 threads per core." in plan.consequences


@pytest.mark.parametrize("granularity", PciGranularity)
def test_empty_ports_are_explained(granularity: PciGranularity) -> None:
    devices = HGX_GPUS[2:4]
    request = small_request(4, layout="pin-numa-pci", devices=[str(bdf) for bdf in devices])
    request = asking(request, spare_ports=1, pci_granularity=granularity)
    plan = assemble(hgx_host(), request, placed((2, 2), devices=devices))
    assert any(text.startswith("2 empty PCIe ports wait") for text in plan.consequences)


def test_functions_that_the_document_has_in_one_slot_stay_a_group() -> None:
    host = even_host(1, devices=[DeviceSpec("41:00.0"), DeviceSpec("41:00.1")])
    request = small_request(4, layout="pin", devices=["41:00.0", "41:00.1"])
    guest = defined_guest(request.guest)
    first = guest.hostdevs[0].address
    assert first is not None
    second = GuestHostdev(guest.hostdevs[1].bdf, type(first)(0, first.bus, 0, 1))
    request = replace(request, guest=structs.replace(guest, hostdevs=(guest.hostdevs[0], second)))
    plan = assemble(host, request, placed((4,), devices=["41:00.0", "41:00.1"]))
    assert {device.group for device in plan.vm.hostdevs} == {guest.hostdevs[0].bdf}


def test_an_unknown_device_is_refused_in_every_layout() -> None:
    for layout in PRESETS:
        with pytest.raises(InputError, match=r"0000:77:00\.0: no such PCI function") as error:
            request = small_request(4, layout=layout)
            assemble(even_host(2), request, placed((2, 2), devices=["77:00.0"]))
        assert error.value.exit_code == 2


def test_manual_mode_needs_no_host() -> None:
    for layout in ("default", "pin", "pin-bound", "pin-numa", "pin-numa-smt"):
        request = small_request(4, layout=layout, devices=["01:00.0"])
        placement: Placement = placed((2, 2), devices=["01:00.0"])
        plan = assemble(None, request, placement)
        assert plan.vm.hostdevs[0].host_node is None and plan.vm.hostdevs[0].cell is None
        assert plan.host_name == "" and plan.gaps == () and plan.aperture is None


def test_the_fingerprint_knows_topology_and_nothing_else() -> None:
    host = hgx_host()
    device = host.pci_devices[5]
    idle = structs.replace(device, driver="vfio-pci", link=PciLink(2.5, 1, 32.0, 16))
    others = tuple(d for d in host.pci_devices if d is not device)
    same = structs.replace(
        host,
        name="renamed",
        nodes=tuple(structs.replace(node, memory_free_bytes=7) for node in host.nodes),
        pci_devices=tuple(sorted((*others, idle), key=lambda d: d.bdf)),
    )
    assert same.fingerprint == host.fingerprint
    assert host.has_fingerprint(host.fingerprint[:16]) and not host.has_fingerprint("")
    moved = structs.replace(device, node=None)
    for other in (
        structs.replace(host, distances=None),
        structs.replace(host, llcs=host.llcs[1:]),
        structs.replace(host, cores=host.cores[1:]),
        structs.replace(host, pci_devices=tuple(sorted((*others, moved), key=lambda d: d.bdf))),
    ):
        assert other.fingerprint != host.fingerprint


def test_memory_first_states_the_price_of_shared_cores() -> None:
    host = even_host(2)
    request = asking(small_request(4, layout="pin-numa-smt"), policy=Policy.MEMORY_FIRST)
    shared = [CpuSet([pu]) for pu in (0, 8, 1, 9)]
    plan = assemble(host, request, placed((4,), pins=shared, threads=2))
    found = {finding.id: finding for finding in plan.findings}["vcpus-share-cores"]
    assert found.severity == "warning"
    assert {2, 40, 75} <= set(numbers(found.observed))
    whole = [CpuSet([pu]) for pu in (0, 1, 2, 3)]
    for plan in (
        assemble(host, request, placed((4,), pins=whole, threads=1)),
        assemble(host, asking(request, policy=Policy.CORES_FIRST), placed((4,), pins=shared)),
    ):
        assert "vcpus-share-cores" not in [finding.id for finding in plan.findings]
