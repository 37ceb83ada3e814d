"""Templates of OpenNebula: its grammar, and what it would refuse is refused before."""

import pytest

from homenode.errors import InputError, ParseError
from homenode.plan.vm_file import kind_of, target_of
from homenode.units import GIB, MIB
from homenode.vm.plan_options import MemoryMode
from homenode.vm.targets.hypervisors.opennebula import CODEC, parse
from tests.targets.examples import FILES
from tests.targets.test_edited_files import HOST, plain
from tests.targets.written import edited, options, written


def test_names_are_of_any_case_and_values_may_be_quoted() -> None:
    text = b"""vcpu=4#four
Memory = "2048"
NAME="a \\"b\\"
c"
EMPTY=
NIC=[ ]
X=[ a="]" ,
# no
B=2
]
"""
    assert [(one.key, one.value) for one in parse(text, "vm").attributes] == [
        ("VCPU", {"": "4"}),
        ("MEMORY", {"": "2048"}),
        ("NAME", {"": 'a "b"\nc'}),
        ("EMPTY", {"": ""}),
        ("NIC", {}),
        ("X", {"A": "]", "B": "2"}),
    ]
    assert target_of(text) is None and kind_of(text, "vm", "opennebula") == "opennebula"


@pytest.mark.parametrize(
    "text",
    [
        b"MEMORY = 1 VCPU",
        b"MEMORY = [ A = 1",
        b"MEMORY = [ A = 1, ]",
        b"MEMORY = [ [",
        b'MEMORY = "1',
        b"= 1",
        b"MEMORY = 1\r\nVCPU = 2\r\n",
        b"MEMORY = 1\n# no end",
        b"MEMORY = \xff",
        b"MEMORY = 1G\nVCPU = 2",
        b"MEMORY = 1\nVCPU = many",
        b"MEMORY = 1\nNUMA_NODE = [ TOTAL_CPUS = -1 ]",
        b"VCPU = 2",
    ],
)
def test_what_opennebula_would_not_take_is_an_error(text: bytes) -> None:
    with pytest.raises(ParseError):
        CODEC.read_vm(text, "vm")


def test_cells_pages_and_devices_are_read() -> None:
    vm = CODEC.read_vm(
        b"MEMORY = 3072\nVCPU = 3\nTOPOLOGY = [ PIN_POLICY = thread, HUGEPAGE_SIZE = 2 ]\n"
        b'NUMA_NODE = [ TOTAL_CPUS = 1, MEMORY = 1024, DISTANCE = "1:32" ]\n'
        b"NUMA_NODE = [ MEMORY = 2048, TOTAL_CPUS = 2 ]\n"
        b"NUMA_NODE = [ MEMORY = 0, TOTAL_CPUS = 0 ]\n"
        b"PCI = [ SHORT_ADDRESS = 19:00.0, ACPI_NODES = 2 ]\nPCI = [ CLASS = 0302 ]\n",
        "vm",
    )
    assert [str(cell.vcpus) for cell in vm.cells] == ["0", "1-2", ""]
    assert [cell.memory_bytes for cell in vm.cells] == [GIB, 2 * GIB, 0]
    assert [cell.distances for cell in vm.cells] == [(10, 32, 20), (), ()]
    assert (vm.page_bytes, vm.cpu_topology) == (2 * MIB, None)
    assert [(str(d.bdf), str(d.initiator_cells)) for d in vm.hostdevs] == [("0000:19:00.0", "2")]


@pytest.mark.parametrize(
    ("change", "layout", "found"),
    [
        ((b"LOGO=", b"VCPU_MAX = 16"), "pin-numa", "no VCPU_MAX"),
        ((b'SHORT_ADDRESS = "19:00.0"', b'CLASS = "0302"'), "pin", None),
        ((b'VM_BUS = "9" ]', b'VM_BUS = "9" ]\nPCI = [ CLASS = "0302" ]'), "pin", "SHORT_ADDRESS"),
    ],
)
def test_what_a_template_has_next_to_the_plan_may_refuse_it(
    change: tuple[bytes, bytes], layout: str, found: str | None
) -> None:
    text = FILES["opennebula"].replace(*change)
    assert text != FILES["opennebula"]
    if found is None:  # a kind of device, which no layout places
        assert change[1] in edited(text, HOST, plain(layout)).rendering.document
        return
    with pytest.raises(InputError, match=found):
        edited(text, HOST, plain(layout))


def test_a_size_is_not_changed_below_a_topology_that_stays() -> None:
    pinned = edited(FILES["opennebula"], HOST, plain("pin-numa")).rendering.document
    with pytest.raises(InputError, match="TOPOLOGY and NUMA_NODE are for"):
        edited(pinned, HOST, options("default", vcpus=4, memory_bytes=4 * GIB))


def test_a_flat_guest_over_several_nodes_is_refused() -> None:
    with pytest.raises(InputError, match="one host node for pinned vCPUs of a flat guest"):
        written("opennebula", "small-2n8c-2gpu", options("pin", vcpus=8))


def test_policies_follow_the_layout() -> None:
    def policy(layout: str, host: str = "x86-2p2n16c32t-isolated-pus") -> str:
        document = written("opennebula", host, options(layout)).rendering.document
        return parse(document, "vm").list("TOPOLOGY")["PIN_POLICY"]

    assert policy("pin-numa") == "CORE"
    assert policy("pin-numa-smt") == "THREAD"


def test_a_memory_mode_is_lost() -> None:
    wanted = options("pin-numa", memory_mode=MemoryMode.PREFERRED)
    found = written("opennebula", "small-2n8c-2gpu", wanted).findings
    assert any(one.id == "target-lost" and "memory mode" in one.subject for one in found)
