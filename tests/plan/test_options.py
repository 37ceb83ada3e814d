"""From the user's options to a request."""

from contextlib import nullcontext

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError, UsageError
from homenode.machine.topology import HostReserve
from homenode.objective import Objective
from homenode.plan.planner import plan
from homenode.plan.request import build_layout, request_for
from homenode.units import GIB, KIB, MIB
from homenode.vm.layout import (
    PRESETS,
    GuestCells,
    GuestPcie,
    MemoryBinding,
    Pinning,
    Siblings,
)
from homenode.vm.model import GuestHostdev, GuestTopology, Vm
from homenode.vm.plan_options import (
    EmulatorPolicy,
    PartialReserve,
    PlanOptions,
    format_cell,
    make_cell,
    parse_guest_node,
    reject_objective,
    reserve_of,
    reserve_text,
)
from homenode.vm.sources import load_host
from tests.small_hosts import asking, even_host, pinned_domain, small_request


def guest(machine: str = "q35", gpus: int = 0, page_bytes: int | None = None) -> Vm:
    return Vm(
        name="vm",
        uuid=None,
        domain_type="kvm",
        architecture="x86_64",
        machine=machine,
        vcpus=8,
        memory_bytes=16 * GIB,
        page_bytes=page_bytes,
        iothread_ids=(),
        cpu_mode="host-passthrough",
        cpu_topology=None,
        hostdevs=tuple(GuestHostdev(Bdf(0, 16 + i, 0, 0), None) for i in range(gpus)),
        controllers=(),
        addresses=(),
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_itself(name: str) -> None:
    assert build_layout(PlanOptions(name)) == PRESETS[name]


def test_switches_that_make_another_preset_take_its_name() -> None:
    layout = build_layout(PlanOptions("pin-numa", pcie=GuestPcie.HOST))
    assert layout == PRESETS["pin-numa-pci"]


def test_switches_that_make_no_preset_are_called_custom() -> None:
    layout = build_layout(PlanOptions("pin-numa", memory_binding=MemoryBinding.BOUND))
    assert layout.name == "custom"
    assert layout.memory is MemoryBinding.BOUND


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PlanOptions("nonsense"), "unknown layout"),
        (PlanOptions("auto"), "unknown layout"),
        (PlanOptions("pin", siblings=Siblings.EXPOSED), "no siblings can be exposed"),
        (PlanOptions("default", siblings=Siblings.HIDDEN), "if vCPUs are pinned"),
        (PlanOptions("default", cells=GuestCells.HOST), "pinned to their host nodes"),
        (PlanOptions("pin", pcie=GuestPcie.HOST), "buses of guest NUMA nodes"),
        (
            PlanOptions("pin", memory_binding=MemoryBinding.BOUND_PER_CELL),
            "the guest has one node",
        ),
    ],
)
def test_contradictions_are_refused_by_name(options: PlanOptions, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        build_layout(options)


def test_an_objective_only_goes_with_auto() -> None:
    reject_objective(PlanOptions("auto", objective=Objective.LATENCY))
    with pytest.raises(UsageError, match="requires --layout auto"):
        reject_objective(PlanOptions("pin", objective=Objective.LATENCY))


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("vcpu_pin", "pin"),
        ("vcpu_pin_numa", "pin-numa"),
        ("vcpu_pin_numa_smt", "pin-numa-smt"),
        ("A", "pin"),
        ("B", "pin-numa"),
        ("C", "pin-numa-smt"),
    ],
)
def test_the_studys_names_are_layouts(name: str, preset: str) -> None:
    assert build_layout(PlanOptions(name)) == PRESETS[preset]


def test_a_request_takes_the_documents_own_values() -> None:
    request = request_for(guest(gpus=2), PlanOptions("pin", devices=(Bdf(0, 1, 0, 0),)), None)
    assert (request.vcpus, request.memory_bytes) == (8, 16 * GIB)
    assert request.devices == (Bdf(0, 1, 0, 0), Bdf(0, 16, 0, 0), Bdf(0, 17, 0, 0))


def test_huge_pages_without_a_size_are_the_kernels_default() -> None:
    request = request_for(guest(page_bytes=0), PlanOptions("pin"), None)
    assert request.page_bytes == 2 * MIB


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions("pin", vcpus=0),
        PlanOptions("pin", memory_bytes=0),
        PlanOptions("pin", gpu_count=0),
        PlanOptions("pin", max_nodes=-1),
        PlanOptions("pin", spare_ports=-1),
        PlanOptions("pin", spare_ports=17),
    ],
)
def test_counts_must_be_counts(options: PlanOptions) -> None:
    with pytest.raises(UsageError, match="is out of range"):
        request_for(guest(), options, None)


CELLS = (make_cell(6, 12 * GIB, NodeIndex(1)), make_cell(2, 4 * GIB))


def test_explicit_cells_say_the_vcpus_and_the_memory() -> None:
    request = request_for(guest(), PlanOptions("pin-numa", explicit_cells=CELLS), even_host(2))
    assert (request.vcpus, request.memory_bytes) == (8, 16 * GIB)
    assert request.options.explicit_cells == CELLS and not request.keep_vcpus
    options = PlanOptions("pin-numa-smt", explicit_cells=CELLS, vcpus=8, memory_bytes=16 * GIB)
    assert request_for(guest(), options, even_host(2)).keep_vcpus


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            PlanOptions("pin", explicit_cells=CELLS),
            "--guest-node: expected a layout with guest NUMA nodes",
        ),
        (
            PlanOptions("pin-numa", explicit_cells=CELLS, vcpus=9),
            "the sum of the guest NUMA nodes, 8, found 9",
        ),
        (
            PlanOptions("pin-numa", explicit_cells=CELLS, memory_bytes=GIB),
            "the sum of the guest NUMA nodes, 16 GiB, found 1 GiB",
        ),
        (
            PlanOptions("pin-numa", explicit_cells=CELLS[:1] * 2),
            "each node once, found node 1 twice",
        ),
        (
            PlanOptions("pin-numa", explicit_cells=(make_cell(1, GIB, NodeIndex(7)),)),
            r"a node of even with CPUs \(0-1\), found 7",
        ),
        (PlanOptions("pin-numa", explicit_cells=CELLS[1:] * 3), "at most 2 guest NUMA nodes"),
        (
            PlanOptions("pin-numa", explicit_cells=(make_cell(0, GIB),)),
            "missing vCPUs",
        ),
        (PlanOptions("pin-numa", host_reserve=PartialReserve(cores=-1)), "is out of range"),
        (
            PlanOptions("pin", emulator_policy=EmulatorPolicy.HOUSEKEEPING),
            "requires housekeeping CPUs",
        ),
        (
            PlanOptions(
                "default",
                emulator_policy=EmulatorPolicy.HOUSEKEEPING,
                housekeeping_pus=CpuSet([0]),
            ),
            "pins nothing",
        ),
        (
            PlanOptions("pin", housekeeping_pus=CpuSet([99])),
            "--housekeeping-cpus: expected online CPUs",
        ),
        (
            PlanOptions("pin-numa-smt", pinning=Pinning.NODE),
            "float over a node's CPUs have no siblings to expose",
        ),
    ],
)
def test_options_that_no_host_can_meet_are_refused(options: PlanOptions, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        request_for(guest(), options, even_host(2))


def test_kept_siblings_of_vcpus_that_float_over_a_node_are_the_documents() -> None:
    shown = structs.replace(guest(), cpu_topology=GuestTopology(1, 1, 4, 2))
    options = PlanOptions("pin-numa", pinning=Pinning.NODE, siblings=Siblings.KEEP)
    layout = request_for(shown, options, even_host(2)).layout
    assert (layout.pinning, layout.siblings) == (Pinning.NODE, Siblings.KEEP)


def test_huge_pages_of_arm64_are_powers_of_two_from_64_kib() -> None:
    shown = structs.replace(guest(), architecture="aarch64")
    for size in (4 * KIB, 96 * KIB):
        with pytest.raises(UsageError):
            request_for(shown, PlanOptions("pin", page_bytes=size), None)
    options = PlanOptions("pin", page_bytes=64 * KIB)
    assert request_for(shown, options, None).page_bytes == 64 * KIB


def test_vcpus_that_do_not_fill_cores_are_offered_the_next_number_that_does() -> None:
    with pytest.raises(UsageError) as refused:
        request_for(guest(), PlanOptions("pin-numa-smt", vcpus=5), even_host(2, threads=4))
    assert refused.value.hint == "--vcpus 8"


@pytest.mark.parametrize(
    ("architecture", "of_host", "runs"),
    [
        ("armv7l", "aarch64", True),
        ("i686", "x86_64", True),
        ("x86_64", "i686", False),
        ("aarch64", "x86_64", False),
    ],
)
def test_kvm_runs_a_guest_on_hosts_that_have_its_instructions(
    architecture: str, of_host: str, runs: bool
) -> None:
    host = structs.replace(even_host(2), architecture=of_host)
    other = structs.replace(guest(), architecture=architecture)
    with nullcontext() if runs else pytest.raises(InputError, match="on a host of"):
        request_for(other, PlanOptions("pin"), host)


def test_what_the_host_keeps_is_said_by_the_user_the_description_or_the_default() -> None:
    host = even_host(2)
    described = replace(host, reserve=HostReserve(2, 8 * GIB), housekeeping_pus=CpuSet([0]))
    options = PlanOptions("pin", host_reserve=PartialReserve(cores=0), housekeeping_pus=CpuSet([1]))
    for machine, asked, expected in (
        (host, PlanOptions("pin"), HostReserve(1, None)),
        (described, PlanOptions("pin"), HostReserve(2, 8 * GIB)),
        (described, options, HostReserve(0, 8 * GIB)),
    ):
        assert request_for(guest(), asked, machine).host_reserve == expected
    assert request_for(guest(), options, described).housekeeping_pus == CpuSet([0, 1])


def test_a_planned_vm_of_the_same_name_is_refused() -> None:
    planned = replace(pinned_domain("0-1", name="vm", running=False), planned=True)
    host = even_host(2, domains=(planned,))
    with pytest.raises(UsageError, match="a VM named vm is planned already") as error:
        request_for(guest(), PlanOptions("pin"), host)
    assert "--name" in str(error.value.hint)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vcpus=8", "missing memory="),
        ("vcpus=8,memory=32", "unit missing"),
        ("vcpus=x,memory=32GiB", "a whole number, found 'x'"),
        ("vcpus=8,vcpus=8,memory=1GiB", "each once"),
        ("vcpus=8,memory=1GiB,cpu=3", "each once, found 'cpu=3'"),
        ("8vcpus,memory=1GiB", "hint: --guest-node vcpus=8"),
    ],
)
def test_a_cell_option_that_says_too_little_or_too_much_is_refused(
    text: str, expected: str
) -> None:
    with pytest.raises(UsageError) as error:
        parse_guest_node(text)
    assert expected in f"{error.value} hint: {error.value.hint}"


def test_options_of_cells_and_of_the_hosts_share_are_read() -> None:
    texts = ["vcpus=6,memory=12GiB,node=1", "memory=4GiB, vcpus=2"]
    assert tuple(map(parse_guest_node, texts)) == CELLS
    assert tuple(parse_guest_node(format_cell(cell)) for cell in CELLS) == CELLS
    assert reserve_of("cores=2,memory=8GiB") == PartialReserve(2, 8 * GIB)
    assert reserve_of("memory=0") == PartialReserve(memory_bytes=0)
    assert reserve_of("cores=0") == PartialReserve(cores=0)
    assert reserve_of(reserve_text(PartialReserve(2, 8 * GIB))) == PartialReserve(2, 8 * GIB)
    with pytest.raises(UsageError, match="missing cores=N or memory=SIZE"):
        reserve_of("")


@pytest.mark.parametrize("node", [None, 1])
def test_runners_up_of_explicit_cells_lie_where_the_cells_may(node: int | None) -> None:
    host = load_host("hgx-h100")
    number = 2 if node is None else 1
    cells = tuple(
        make_cell(8 // number, 16 * GIB // number, None if node is None else NodeIndex(node))
        for _ in range(number)
    )
    options = PlanOptions(layout="pin-numa-pci", gpu_count=2, explicit_cells=cells)
    made = plan(host, request_for(guest(), options, host))
    best = [term.value for term in made.cost]
    assert made.runners_up
    for one in made.runners_up:
        assert [term.value for term in one.cost] > best
        assert node is None or one.nodes == (node,)
        assert len(one.nodes) == number


def test_cells_find_the_only_nodes_that_are_free_of_many() -> None:
    """Four cells on 24 nodes of which the last four are free; of nodes that all are, not all ways
    are compared, which the plan says."""
    cells = (make_cell(3, GIB),) * 4
    host = even_host(24, 1, 1, 4, 1, domains=[pinned_domain("0-79")])
    request = asking(small_request(12, 4 * GIB), explicit_cells=cells)
    made = plan(host, request)
    assert made.nodes == (20, 21, 22, 23)
    assert made.optimal
    assert plan(replace(host, domains=()), request).optimal is None
