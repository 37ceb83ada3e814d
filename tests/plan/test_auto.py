"""`--layout auto`: a table decides what the guest sees; its memory is always bound."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import diagnose
from homenode.decide.machine_facts import collect_run_facts
from homenode.decide.recommendation import ReasonId, decide
from homenode.decide.sentences import choose_by_results
from homenode.findings import Finding, Severity
from homenode.machine.description.parse import list_shipped_hosts
from homenode.machine.pci import MELLANOX, DeviceKind, PciDevice, has_verbs
from homenode.machine.topology import Host, PagePool
from homenode.objective import Objective
from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.plan.planner import build_host_inputs, plan, resolve_layout
from homenode.plan.planner import choose_layout as table_layout
from homenode.plan.request import build_layout, request_for
from homenode.units import GIB
from homenode.vm.domain.memory import read_binding, read_record
from homenode.vm.domain.read import open_domain, read_vm
from homenode.vm.layout import (
    PRESETS,
    GuestCells,
    GuestPcie,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
)
from homenode.vm.model import PortModel
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import DeviceLocality, MemoryMode, PciGranularity, PlanOptions
from homenode.vm.sources import load_host
from tests.seeds import part
from tests.simulated_runs import simulated_run
from tests.small_hosts import DeviceSpec, NodeSpec, even_host, host_of, small_guest

DOCUMENT = (
    (Path(__file__).parents[2] / "demo" / "gpu-vm.xml")
    .read_bytes()
    .replace(
        b"<hugepages>\n      <page size='1' unit='GiB'/>\n    </hugepages>", b"<nosharepages/>"
    )
)
LARGE = "x86-2p8n128c256t-64gpu"


@cache
def host_named(name: str) -> Host:
    return load_host(name)


def document_for(host: Host) -> bytes:
    if host.architecture != "aarch64":
        return DOCUMENT
    return DOCUMENT.replace(b"x86_64' machine='q35'", b"aarch64' machine='virt'")


def auto(host: Host, options: PlanOptions) -> PlanOptions:
    return resolve_layout(read_vm(document_for(host), "vm.xml"), options, host).options


def tuned(host: Host, options: PlanOptions, document: bytes | None = None) -> PlannedFile:
    return plan_file(document or document_for(host), "vm.xml", options, host)


def seen(layout: Layout) -> tuple[GuestCells, GuestPcie]:
    """What a guest sees of its host; siblings follow from the pins."""
    return layout.cells, layout.pcie


# What is decided.

_CELLS = ("pin-bound", "pin-numa", "pin-numa", "pin-numa-pci", "pin-bound")
_FLAT = ("pin-bound",) * 6
OTHER_ANSWERS = {
    (*_CELLS, "pin-bound"): (
        "small-2n8c-2gpu",
        "x86-2p2n16c16t-smt-off",
        "x86-2p2n8c8t-divided-gpus",
        "x86-2p2n8c8t-nodes-0-and-8",
    ),
    ("pin-numa-pci", *_CELLS[1:], "pin-bound"): ("gb200-nvl-tray", "gh200x4"),
    (*_FLAT[:5], "pin-numa-smt"): (
        "epyc9654-2p-1node",
        "rtx4080-i9-14900k",
        "rtx5090x2-9950x3d",
        "rtxpro6000x4-tr9985wx",
        "x86-1p1n4c8t-vmd",
        "x86-1p1n6c8t-hybrid",
        "x86-1p1n8c16t-gpu-audio",
    ),
    _FLAT: ("gb300-station", "x86-1p1n4c4t"),
}
"""By objective, of hosts that differ from most."""


def test_the_answers_of_every_shipped_host_and_objective() -> None:
    rest = set(list_shipped_hosts()).difference(*OTHER_ANSWERS.values())
    assert len(rest) == 36
    for answers, names in {**OTHER_ANSWERS, (*_CELLS, "pin-numa-smt"): rest}.items():
        for name in names:
            inputs = build_host_inputs(host_named(name))
            found = tuple(table_layout(objective, inputs).layout for objective in Objective)
            assert found == answers, name


def test_a_plan_without_results_loads_nothing_that_measures_or_decides(tmp_path: Path) -> None:
    words = ["plan", "--host", "hgx-h100", "--gpus", "2", "--vcpus", "8", "--memory", "8GiB"]
    program = (
        "import sys; from homenode.cli.main import main; code = 0\n"
        "try: main()\n"
        "except SystemExit as error: code = error.code\n"
        "rooms = ('homenode.decide', 'homenode.measure')\n"
        "loaded = [name for name in sys.modules if name.startswith(rooms)]\n"
        "sys.exit(code or ' '.join(loaded) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "-o", str(tmp_path / "vm.xml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "vm.xml").is_file()


@pytest.mark.parametrize("name", part(list_shipped_hosts(), 0))
@pytest.mark.parametrize("with_nics", [True, False])
def test_gpus_and_rdma_nics_of_one_switch_stay_pairs_in_the_guest_and_no_others_get_switches(
    name: str, with_nics: bool
) -> None:
    host = host_named(name)
    gpus = [one.bdf for one in host.devices_of_kind(DeviceKind.GPU)]
    try:
        gpu_count = min(4, len(gpus)) or None
        options = PlanOptions("auto", gpu_count=gpu_count, with_nics=with_nics and bool(gpus))
        plan = tuned(host, auto(host, options)).plan
    except Unplannable:
        return
    assert plan is not None
    port_of = {c.index: c.address for c in plan.vm.controllers}
    upstreams = {c.index for c in plan.vm.controllers if c.model == PortModel.SWITCH_UPSTREAM}
    switch_of = {}  # of the guest, by device
    for device in plan.vm.hostdevs:
        port = port_of.get(device.address.bus) if device.address else None
        switch_of[device.bdf] = port.bus if port is not None and port.bus in upstreams else None
    nics = [one for one in host.devices_of_kind(DeviceKind.NIC) if one.bdf in switch_of]
    pairs = [
        (gpu, nic.bdf)
        for gpu in gpus
        for nic in nics
        if gpu in switch_of and has_verbs(nic)
        if host.switch_above(nic.bdf) == host.switch_above(gpu) is not None
    ]
    assert bool(upstreams) is bool(pairs)
    assert all(switch_of[gpu] == switch_of[nic] is not None for gpu, nic in pairs)


def test_a_virtual_function_whose_physical_function_is_not_listed_has_its_own_switch() -> None:
    specs = (("01:00.0", DeviceKind.GPU), ("02:00.1", DeviceKind.NIC))
    host = even_host(2, devices=[DeviceSpec(bdf, 0, kind, 0, 1) for bdf, kind in specs])
    gpu, nic, *ports = host.pci_devices
    nic = replace(nic, vendor_id=MELLANOX, physical_function=Bdf.parse("09:00.0"))
    host = replace(host, pci_devices=(gpu, nic, *ports))
    options = PlanOptions("auto", devices=(gpu.bdf, nic.bdf))
    resolved = resolve_layout(small_guest(), options, host).options
    assert resolved.pci_granularity is PciGranularity.SWITCH


@pytest.mark.parametrize("name", list_shipped_hosts())
def test_every_answer_binds_memory_and_shows_the_guest_what_the_table_chose(name: str) -> None:
    host = host_named(name)
    for objective in Objective:
        inputs = replace(build_host_inputs(host), has_gpus=False)
        layout = build_layout(auto(host, PlanOptions("auto", objective=objective)))
        assert layout.memory is not MemoryBinding.KEEP
        assert layout.pinning is not Pinning.NONE
        assert seen(layout) == seen(PRESETS[table_layout(objective, inputs).layout])


@settings(max_examples=60, deadline=None)
@given(
    layouts=st.lists(st.sampled_from(sorted(PRESETS)), min_size=2, max_size=4, unique=True),
    objective=st.sampled_from(Objective),
    data=st.data(),
)
def test_whatever_was_measured_memory_is_bound_and_no_worse_pins_are_taken(
    layouts: list[str], objective: Objective, data: st.DataObject
) -> None:
    rng = random.Random(len(layouts))
    metric, unit = {
        Objective.MULTI_GPU: ("allreduce-busbw-peak", "bytes_per_s"),
        Objective.LATENCY: ("memory-latency", "s"),
    }.get(objective, ("memory-bandwidth", "bytes_per_s"))
    runs = tuple(
        simulated_run(one, {metric: (unit, data.draw(st.sampled_from((1.0, 1.3, 2.0))))}, rng)
        for one in layouts
    )
    machine = collect_run_facts("H200", runs)
    made = decide((runs), machine, objective)
    assert made.layout is not None
    preset = PRESETS[made.layout]
    assert made.floats or preset.memory is not MemoryBinding.KEEP
    if not made.tells:
        return
    if made.choice in PRESETS:
        assert seen(preset) == seen(PRESETS[made.choice])
    flat = {one for one in layouts if seen(PRESETS[one]) == seen(PRESETS["pin"])}
    pins = {one for one in flat if PRESETS[one].pinning is Pinning.ONE_PER_CORE}
    floats = made.choice == "default" and bool(pins) and not pins & {*made.also}
    assert made.floats is floats
    chosen = PRESETS.get(made.choice or "")
    unbound = (
        chosen is not None
        and chosen.cells is GuestCells.SINGLE
        and chosen.memory is MemoryBinding.KEEP
    )
    assert (made.find_reason(ReasonId.BOUND) is not None) is unbound


def test_of_equals_the_layout_that_binds_memory_is_chosen_with_its_own_figures() -> None:
    rng = random.Random(1)
    of = {"memory-bandwidth": ("bytes_per_s", 1e11)}
    noisy = {"memory-bandwidth": ("bytes_per_s", 0.5e11)}
    runs = [simulated_run(one, of, rng) for one in ("pin", "pin-bound")]
    runs.append(simulated_run("default", noisy, rng))
    machine = collect_run_facts("H200", runs)
    made = decide((tuple(runs)), machine, Objective.MEMORY_BANDWIDTH)
    assert (made.choice, made.layout) == ("pin-bound", "pin-bound")
    assert made.find_reason(ReasonId.BOUND) is None


# What the user says next to it.


def test_a_switch_of_the_user_wins_and_the_others_follow() -> None:
    host = host_named("hgx-h100")

    def switched(**switches: object) -> Layout:
        return build_layout(auto(host, PlanOptions("auto", gpu_count=2, **switches)))  # type: ignore[arg-type]

    assert switched() == PRESETS["pin-bound"]
    assert switched(memory_binding=MemoryBinding.KEEP) == PRESETS["pin"]
    assert switched(cells=GuestCells.HOST) == PRESETS["pin-numa"]
    assert switched(pcie=GuestPcie.HOST) == PRESETS["pin-numa-pci"]
    one = {"objective": Objective.GPU_COPY}
    assert switched(**one) == PRESETS["pin-numa-pci"]
    assert switched(**one, cells=GuestCells.SINGLE) == PRESETS["pin-bound"]
    assert switched(**one, memory_binding=MemoryBinding.BOUND).memory is MemoryBinding.BOUND
    # The layout is the objective's as long as the user sets neither of its two main switches.
    options = PlanOptions("auto", gpu_count=2)
    for switches, objective in (
        ({"pinning": Pinning.ALL_PUS}, Objective.MULTI_GPU),
        ({"cells": GuestCells.HOST}, None),
        ({"pcie": GuestPcie.HOST}, None),
    ):
        assert auto(host, replace(options, **switches)).objective is objective


def test_results_overrule_the_table_and_where_pins_were_worse_vcpus_float() -> None:
    host = host_named("hgx-h100")
    rng = random.Random(1)
    rates = {"default": 1.6e5, "pin": 1e5, "pin-numa": 1e5}
    runs = [
        simulated_run(
            layout,
            {"cpu-throughput": ("events_per_s", rate)},
            rng,
            host=host.fingerprint,
        )
        for layout, rate in rates.items()
    ]
    guest = read_vm(document_for(host), "vm.xml")
    wanted = PlanOptions("auto", vcpus=8, memory_bytes=8 * GIB, objective=Objective.THROUGHPUT)
    resolved = resolve_layout(guest, wanted, host, choose_by_results(runs))
    assert resolved.reasons[0].startswith(
        "default with bound memory (auto, throughput): provisional"
    )
    made = tuned(host, resolved.options).plan
    assert (made.layout.pinning, made.layout.siblings) == (Pinning.NODE, Siblings.KEEP)
    assert (made.memory_mode, made.memory_nodes) == (MemoryMode.STRICT, (0,))
    fixed = replace(wanted, pinning=Pinning.NONE)
    pinned = resolve_layout(guest, fixed, host, choose_by_results(runs)).options
    assert build_layout(pinned).pinning is Pinning.NONE
    other = resolve_layout(guest, wanted, host_named("hgx-h200"), choose_by_results(runs))
    assert other.options == auto(host_named("hgx-h200"), wanted)
    assert other.reasons[0].startswith("pin-bound (auto, throughput)")
    assert other.reasons[0].endswith("; a rule, not measured on this machine")


@pytest.mark.parametrize(
    "numatune",
    [
        b"",
        b"<numatune><memory mode='strict' nodeset='1'/></numatune>",
        b"<numatune><memory mode='preferred' nodeset='0'/></numatune>",
        b"<numatune><memory mode='interleave' nodeset='0-1'/></numatune>",
        b"<numatune><memory mode='restrictive' nodeset='0-1'/></numatune>",
        b"<numatune><memory mode='strict' placement='auto'/></numatune>",
    ],
)
def test_memory_is_bound_strictly_to_the_chosen_nodes_whatever_the_document_said(
    numatune: bytes,
) -> None:
    host = host_named("hgx-h100")
    given_document = DOCUMENT.replace(b"<os ", numatune + b"<os ", 1)
    options = auto(host, PlanOptions("auto", gpu_count=2, vcpus=8, memory_bytes=8 * GIB))
    document = open_domain(tuned(host, options, given_document).document, "vm.xml")
    binding = read_binding(document)
    assert binding is not None and (binding[0], str(binding[1])) == ("strict", "0")


def test_what_auto_wrote_records_its_objective_and_is_planned_again_unchanged() -> None:
    host = host_named("hgx-h100")
    options = PlanOptions("auto", gpu_count=5, vcpus=48, memory_bytes=64 * GIB)
    first = tuned(host, auto(host, options)).document
    record = read_record(open_domain(first, "vm.xml"))
    assert record is not None and record.objective is Objective.MULTI_GPU
    guest = read_vm(first, "vm.xml")
    again = resolve_layout(guest, PlanOptions("auto"), host).options
    assert tuned(host, again, first).document == first
    named = tuned(host, PlanOptions("pin-bound"), first).document
    record = read_record(open_domain(named, "vm.xml"))
    assert record is not None and record.objective is None


# What comes of it on every shipped host.


def whole_gpus(host: Host) -> list[PciDevice]:
    """GPUs that a VM gets whole: not divided, and virtual functions in place of their GPU."""
    gpus = host.devices_of_kind(DeviceKind.GPU)
    divided = {gpu.bdf for gpu in gpus if gpu.parts}
    parents = {gpu.physical_function for gpu in gpus} | divided
    return [one for one in gpus if not {one.bdf, one.physical_function} & (parents - {None})]


def sizes(host: Host) -> Iterator[tuple[int, int, int]]:
    """(GPUs, vCPUs, bytes of memory) of VMs that a node with so many GPUs holds, if one has them;
    without any, of a quarter of a node."""
    gpus = whole_gpus(host)
    nodes = [node for node in host.nodes if node.pus and node.memory_bytes]
    cores = min(sum(not core.pus.isdisjoint(node.pus) for core in host.cores) for node in nodes)
    memory = min(node.memory_bytes or 0 for node in nodes)
    counts = (1, 2, 8) if host.name == LARGE else range(1, min(len(gpus), 8) + 1)
    for count in (0, *counts):
        yield count, max(1, cores // 3), max(GIB, memory // 4 // GIB * GIB)


@pytest.mark.parametrize("name", part(list_shipped_hosts(), 1, every=6))
def test_doctor_finds_nothing_in_pins_and_memory_of_the_layout(name: str) -> None:
    host = host_named(name)
    known = {one.id for one in diagnose(host).findings}
    for count, vcpus, memory in sizes(host):
        wanted = PlanOptions("auto", vcpus=vcpus, memory_bytes=memory, gpu_count=count or None)
        made = tuned(host, auto(host, wanted))
        found = {one.id for one in diagnosed(host, made.document)} - known
        assert not found & {"memory-unbound", "unpinned", "sockets-implicit"}
        assert made.plan.objective is not None


def diagnosed(host: Host, document: bytes) -> tuple[Finding, ...]:
    return diagnose(host, open_domain(document, "vm.xml")).findings


@pytest.mark.parametrize("kind", ["sev-snp", "tdx"])
@pytest.mark.parametrize("gpus", [None, 1, 2])
def test_encrypted_guests_over_several_nodes_are_planned_flat(kind: str, gpus: int | None) -> None:
    host = host_named("epyc-nps4-gpu-nic")
    security = b"<launchSecurity type='%s'><policy>0</policy></launchSecurity></domain>"
    document = DOCUMENT.replace(b"</domain>", security % kind.encode())
    wanted = PlanOptions("auto", vcpus=40, memory_bytes=64 * GIB, gpu_count=gpus)
    options = resolve_layout(read_vm(document, "vm.xml"), wanted, host).options
    made = tuned(host, options, document).plan
    assert (made.layout.cells, made.layout.memory) == (GuestCells.SINGLE, MemoryBinding.BOUND)
    assert len(made.memory_nodes) == 2


CORES = ((1,) * 8,)


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ((NodeSpec(CORES), NodeSpec(CORES, free_bytes=0)), {}),
        ((NodeSpec(CORES), NodeSpec(CORES, memory_bytes=0)), {}),
        (
            (NodeSpec(CORES, pools=(PagePool(GIB, 40, 40),)), NodeSpec(CORES, free_bytes=0)),
            {"page_bytes": GIB},
        ),
        ((NodeSpec(CORES), NodeSpec(CORES)), {"vcpus": 1, "memory_bytes": 80 * GIB}),
        ((NodeSpec(CORES),) * 3, {"vcpus": 18, "memory_bytes": 2 * GIB, "page_bytes": GIB}),
        (
            (NodeSpec(CORES), NodeSpec(CORES, free_bytes=0)),
            {"vcpus": 4, "gpu_count": 1, "device_locality": DeviceLocality.REQUIRE},
        ),
    ],
)
def test_a_vm_that_cells_do_not_hold_is_planned_flat(
    nodes: tuple[NodeSpec, ...], wanted: dict[str, object]
) -> None:
    host = host_of(nodes, devices=[DeviceSpec("11:00.0", node=1)])
    size = {"vcpus": 12, "memory_bytes": 16 * GIB, **wanted}
    resolved = resolve_layout(small_guest(), PlanOptions("auto", **size), host)  # type: ignore[arg-type]
    assert "does not fit" in resolved.reasons[0]
    made = plan(host, request_for(small_guest(), resolved.options, host))
    assert made.layout == PRESETS["pin-bound"]
    named = replace(resolved.options, layout="auto", cells=GuestCells.HOST, memory_binding=None)
    with pytest.raises(Unplannable):  # whoever asks for cells gets cells or none
        asked = resolve_layout(small_guest(), named, host)
        assert asked.options.cells is GuestCells.HOST
        plan(host, request_for(small_guest(), asked.options, host))


def test_cells_never_take_memory_of_the_host_that_a_flat_guest_leaves(tmp_path: Path) -> None:
    described = tmp_path / "host.toml"
    described.write_text(
        """name = "low"\npackages = 2\ncores_per_package = 4\nnodes_per_package = 4
        memory_per_node = "64GiB"
        node = [{ index = 0, memory_free = 0 }, { index = 2, memory_free = "5GiB" },
                { index = "4-5", memory_free = "1GiB" }, { index = 6, memory = 0 }]"""
    )
    host = load_host(str(described))
    options = PlanOptions("auto", vcpus=6, memory_bytes=16 * GIB)
    for named, layout, is_critical in ((None, "pin-bound", False), (GuestCells.HOST, "-", True)):
        asked = resolve_layout(small_guest(), replace(options, cells=named), host).options
        made = plan(host, request_for(small_guest(), asked, host))
        assert (made.layout == PRESETS["pin-bound"]) is (layout == "pin-bound")
        assert any(found.severity is Severity.CRITICAL for found in made.findings) is is_critical


def test_a_vm_that_no_layout_holds_is_refused_in_the_layout_of_the_table() -> None:
    host = host_named("epyc-nps4-gpu-nic")
    options = auto(host, PlanOptions("auto", vcpus=1, memory_bytes=9000 * GIB))
    assert options.layout == "pin-numa"


@pytest.mark.parametrize("name", part(list_shipped_hosts(), 2))
def test_a_vm_that_the_node_of_its_gpus_holds_alone_is_placed_there(name: str) -> None:
    host = host_named(name)
    gpus = {gpu.bdf: gpu.node for gpu in whole_gpus(host)}
    gpus_of_node = Counter(gpus.values())
    homes = [
        node.index
        for node in host.nodes
        if node.pus and node.memory_bytes and node.index in gpus_of_node
    ]
    for count, vcpus, memory in sizes(host):
        most = max((gpus_of_node[node] for node in homes), default=0)
        if not 0 < count <= most:
            continue
        wanted = PlanOptions("auto", vcpus=vcpus, memory_bytes=memory, gpu_count=count)
        made = tuned(host, auto(host, wanted)).plan
        (node,) = made.nodes
        assert made.memory_nodes == (node,)
        chosen = [gpus[one.bdf] for one in made.vm.hostdevs if one.bdf in gpus]
        assert chosen == [node] * count


FLAT = PlanOptions("auto", gpu_count=8, vcpus=48, memory_bytes=64 * GIB)


def over_nodes(host: Host, document: bytes) -> bool:
    return "flat-over-nodes" in {one.id for one in diagnosed(host, document)}


def test_doctor_does_not_contradict_the_table_on_guests_over_several_nodes() -> None:
    host = host_named("mi350x-epyc9575f")
    chosen = tuned(host, auto(host, FLAT)).document
    assert not over_nodes(host, chosen)
    (said,) = [
        one
        for one in diagnose(host, open_domain(chosen, "vm.xml")).checked
        if "table of layouts" in one
    ]
    assert "nodes 0-1" in said and "multi-gpu" in said
    # Nobody chose it for the user, or for this host.
    named = PlanOptions("pin-bound", gpu_count=8, vcpus=48, memory_bytes=64 * GIB)
    assert over_nodes(host, tuned(host, named).document)
    assert over_nodes(host, chosen.replace(b" host='", b" host='0"))
