"""A virtual function is a part of its GPU: on its node, and shared with its siblings."""

from homenode.bdf import Bdf
from homenode.description.parse import parse_description
from homenode.description.render import render
from homenode.discover import discover
from homenode.domain.read import read_guest
from homenode.pci import DeviceKind
from homenode.plan.model import Plan
from homenode.plan.options import PlanOptions, request_for
from homenode.plan.planner import plan
from homenode.topology import Host
from tests.verify_documents import PLAIN

HOST = """
format = 1
name = "parts"
packages = 2
cores_per_package = 8
threads_per_core = 1
llc_size = "16MiB"
memory_per_node = "64GiB"
distances = { other_package = 20 }

[model.gpu]
class = "gpu"
bars = ["16MiB", "32GiB prefetchable"]
total_vfs = 4
vfs = 4

[[root]]
node = [0, 1]
bus = [0x10, 0x80]
ports = ["gpu"]
"""


def host() -> Host:
    return discover(render(parse_description(HOST, "parts")))


def planned(*devices: Bdf) -> Plan:
    start = PLAIN.index(b"    <hostdev")
    bare = PLAIN[:start] + b"  </devices>\n</domain>\n"
    options = PlanOptions(layout="pin-numa-pci", devices=devices, vcpus=4)
    machine = host()
    return plan(machine, request_for(read_guest(bare, "vm"), options, machine))


def ids(made: Plan) -> list[str]:
    return [f.id for f in made.findings if f.id.startswith("gpu-")]


def gpus(*, virtual: bool, node: int) -> list[Bdf]:
    return [
        gpu.bdf
        for gpu in host().devices_of_kind(DeviceKind.GPU)
        if (gpu.physical_function is not None) == virtual and gpu.node == node
    ]


def test_a_part_is_placed_on_its_gpus_node_and_the_finding_names_what_it_shares() -> None:
    part = gpus(virtual=True, node=1)[0]
    made = planned(part)
    assert made.nodes == (1,)
    assert made.devices[0].cell == 0
    (found,) = [f for f in made.findings if f.id == "gpu-shared"]
    assert str(gpus(virtual=False, node=1)[0]) in found.detail
    assert "3 other" in found.detail


def test_all_parts_of_a_gpu_are_shared_with_no_other() -> None:
    parts = gpus(virtual=True, node=0)
    (found,) = [f for f in planned(*parts).findings if f.id == "gpu-shared"]
    assert "0 other" in found.detail


def test_a_whole_gpu_that_has_parts_is_a_warning_and_one_without_is_none() -> None:
    assert ids(planned(gpus(virtual=False, node=0)[0])) == ["gpu-and-its-parts"]
    assert ids(planned()) == []
