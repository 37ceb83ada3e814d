"""The answer of a plan, word by word, and everything behind it with --explain."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cli import terminal
from homenode.cpuset import CpuSet, NodeIndex
from homenode.doc import Text, format_plain
from homenode.findings import Finding, Rejection, Severity
from homenode.machine.topology import Host
from homenode.plan.planner import plan as plan_on
from homenode.plan.stored import domain_of_plan
from homenode.show.explain import explain, format_term
from homenode.show.plan_text import answer_line, format_plan
from homenode.units import GIB
from homenode.vm.layout import PRESETS
from homenode.vm.plan import (
    PageReservation,
    Plan,
    Relaxation,
    RunnerUp,
    is_critical,
)
from tests.command_line import homenode
from tests.explained import Explained, explained
from tests.picture_hosts import h200_host, planned
from tests.small_hosts import NodeSpec, asking, even_host, host_of, small_request

VM = Path(__file__).parents[2] / "demo" / "gpu-vm.xml"
SCREENS = {
    f"{VM} --host hgx-h100 --gpus 8 --layout pin-numa-pci": """\
gpu-vm fits hgx-h100: 88 vCPUs, 1 TiB, 8 GPUs on nodes 0-1; all GPUs local

guest node  vCPUs       host CPUs  host node   memory  GPUs
0           0-43 (44)   0-43       0          512 GiB  gpu0-3
1           44-87 (44)  56-99      1          512 GiB  gpu4-7

layout   pin-numa-pci, as requested
host     24 of 112 cores run no vCPU; QEMU on CPUs 44,100,156,212; IOThread 1 on
         CPU 45
before   reserve 512 huge pages of 1 GiB on each of nodes 0-1; memlock 1025 GiB
warning  4 NVSwitches (0000:83:00.0 and 3 more): they stay on the host, and the
         VM gets all 8 GPUs that they join: CUDA fails with error 802 unless a
         Fabric Manager there activates the partition of all GPUs; fix: the same
         command with --with-nvswitches, unless a Fabric Manager outside serves
         all VMs (FABRIC_MODE=1)
info     qemu-commandline (--explain)
unknown  free huge pages; QEMU's version (6.0 or newer is assumed)
next     the same command with -o tuned.xml
""",
    f"{VM} --host hgx-h100 --gpus 4 --vcpus 48 --memory 512GiB": """\
gpu-vm fits hgx-h100: 48 vCPUs, 512 GiB, 4 GPUs on node 0; all GPUs local

guest node  vCPUs      host CPUs  host node   memory  GPUs
single      0-47 (48)  0-47       0          512 GiB  gpu0-3

layout   pin-bound (auto, multi-gpu): all-reduce with pin is 2.1x pin-numa on
         H200, 2.7x on RTX PRO 6000, 1.04x on MI350X (study); a rule, not
         measured on this machine
host     8 of 56 cores of node 0 run no vCPU; QEMU on CPUs 48,160; IOThread 1 on
         CPU 49
before   reserve 512 huge pages of 1 GiB on node 0; memlock 513 GiB
info     qemu-commandline (--explain)
unknown  free huge pages; whether a Fabric Manager can join the 4 GPUs
         (nvidia-smi -q -x shows no module ids); QEMU's version (6.0 or newer is
         assumed)
next     the same command with -o tuned.xml
""",
    "--host xapi-2n16c2t --vcpus 33 --memory 64GiB": """\
vm fits xapi-2n16c2t with a fallback: 2 of 33 vCPUs share a core

guest node  vCPUs       host CPUs             host node     memory  GPUs
0           0-16 (17)   0-2,4,6, ... ,28,30   0          32.97 GiB  -
1           17-32 (16)  32,34,36, ... ,60,62  1          31.03 GiB  -

layout   pin-numa (auto, memory-bandwidth): STREAM with pin-numa is 1.9x to 7.3x
         default on 4 machines (study); a rule, not measured on this machine
relaxed  a whole core for each vCPU: CPUs 0-1 are one core, used by 2 vCPUs
         a core for the host: none is left; QEMU shares CPU 3 with a vCPU's core
         equal guest nodes: 17 and 16 vCPUs; the guest sees 33 sockets of 1
         core; it sees no L3
cost     vCPUs that share a core are 40 to 75 % slower under full load (XAPI)
fix      --vcpus 31 leaves the host a core; or reserve less with --host-reserve
         cores=0
next     the same command with -o tuned.xml
""",
}
REFUSALS = {
    f"{VM} --host hgx-h100 --gpus 9": """\
homenode plan: gpu-vm does not fit hgx-h100: 9 GPUs needed, 8 of 8 free
  hint: --gpus 8
""",
    f"{VM} --host hgx-h100 --memory 4TiB": """\
homenode plan: gpu-vm does not fit hgx-h100: 4 TiB needed, 1.96 TiB free
  nodes 0-1      4 TiB + 960 MiB for QEMU and page tables needed, 1.96 TiB free
  node 0 or 1    88 whole cores needed, 56 free
  node 0 or 1    4 TiB in pages of 1 GiB needed, 1002 GiB free
  hint: --memory 2004GiB
""",
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    terminal.make_console.cache_clear()
    terminal.get_error_console.cache_clear()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("words", SCREENS)
def test_the_answer_comes_first_and_fits_25_lines(words: str) -> None:
    done = homenode("plan", *words.split(), whole=True)
    assert done.stdout == SCREENS[words]
    assert len(done.stdout.splitlines()) <= 25


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("words", REFUSALS)
def test_a_refusal_has_a_line_for_each_kind_and_the_option_to_add(words: str) -> None:
    done = homenode("plan", *words.split(), whole=True)
    assert (done.exit_code, done.stdout, done.stderr) == (4, "", REFUSALS[words])


@pytest.mark.parametrize(
    ("relaxation", "effect", "line"),
    [
        (Relaxation.MIXED_KINDS, "P and E cores are mixed", "one kind of"),
        (Relaxation.HOST_CORE, "no core remains for the host", "a core for the host"),
        (
            Relaxation.EMULATOR_CORE,
            "vCPUs share a core with QEMU's own threads of another VM",
            "a core for QEMU's own threads of other VMs",
        ),
        (
            Relaxation.UNEVEN_MEMORY,
            "each node provides its free memory",
            "memory divided like the vCPUs",
        ),
        (Relaxation.MEMORY_ELSEWHERE, "some is on further nodes", "memory next to"),
        (Relaxation.FEWER_SIBLINGS, "the guest sees fewer", "all threads of each core"),
        (
            Relaxation.SHARED_CORES,
            "vCPUs share a core with CPUs that are reserved or in use",
            "a whole core for each vCPU",
        ),
    ],
)
def test_the_first_relaxation_is_in_the_first_line(
    relaxation: Relaxation, effect: str, line: str
) -> None:
    doc = format_plan(replace(_plan(), relaxations=(relaxation,)), h200_host())
    assert doc.title.endswith(f"with a fallback: {effect}")
    lines = [format_plain(part.words) for part in doc.parts if isinstance(part, Text)]
    assert any(text.startswith(f"relaxed  {line}") for text in lines), lines


def test_vcpus_that_float_share_no_core_in_particular() -> None:
    words = "--host hgx-h100 --vcpus 200 --memory 64GiB --layout pin --pinning node".split()
    done = homenode("plan", *words, whole=True)
    assert done.stdout.startswith("vm fits hgx-h100 with a fallback: some vCPUs share a core\n")


def test_cpus_that_the_vm_has_now_are_free_once_it_moves() -> None:
    plan, host = _plan(), h200_host()
    now = replace(domain_of_plan(plan), vcpu_pins=(CpuSet(pu.index for pu in host.pus),))
    assert format_plan(plan, replace(host, domains=(now,))) == format_plan(plan, host)


def test_findings_are_grouped_by_severity_with_all_their_subjects() -> None:
    def found(id: str, severity: Severity, subject: str) -> Finding:
        return Finding(id=id, severity=severity, subject=subject, observed="found", fix="fix it")

    devices = tuple(
        found("device-node-unknown", Severity.WARNING, f"0000:{bus:02x}:00.0")
        for bus in range(1, 17)
    )
    critical = found("host-memory-taken", Severity.CRITICAL, "host")
    plan = replace(_plan(), findings=(*devices, critical, found("x", Severity.INFO, "y")))
    lines = [
        format_plain(part.words)
        for part in format_plan(plan, h200_host()).parts
        if isinstance(part, Text)
    ]
    assert lines[0] == "critical  host: found; fix: fix it"
    assert (
        "warning   0000:01:00.0, 0000:02:00.0, 0000:03:00.0, 0000:04:00.0, 0000:05:00.0, "
        "0000:06:00.0 and 10 more: found; fix: fix it" in lines
    )
    assert "info      x (--explain)" in lines
    assert is_critical(plan) and not is_critical(_plan())


def _section(plan: Plan, host: Host | None, heading: str) -> Explained:
    sections = explained(explain(plan, host))
    found = [s for s in sections if s.heading == heading]
    assert found, [s.heading for s in sections]
    return found[0]


def _plan(layout: str = "pin-numa-pci", memory_bytes: int = 1536 * GIB) -> Plan:
    """On all four nodes, as if two of them had been the next best and others too small."""
    made = planned(h200_host(), layout, 88, 7, memory_bytes)
    worse = tuple(replace(c, value=30) if c.name == "node_distance" else c for c in made.cost)
    return replace(
        made,
        runners_up=(RunnerUp((NodeIndex(1), NodeIndex(2)), worse, "node_distance"),),
        rejections=(
            Rejection("cores", (NodeIndex(0),), "needs 92 free cores, 24 free", "allow more nodes"),
            Rejection("cores", (NodeIndex(1),), "needs 92 free cores, 24 free"),
            Rejection("memory", (NodeIndex(0),), "needs 1.5 TiB, 490 GiB free"),
        ),
    )


def _terms(plan: Plan, host: Host | None) -> dict[str, tuple[str, ...]]:
    table = _section(plan, host, "Why there").table
    assert table is not None
    return {str(name): tuple(map(str, values)) for name, *values in table.rows}


def test_the_terms_of_the_cost_are_compared_in_their_order_with_the_next_best() -> None:
    terms = _terms(_plan(), h200_host())
    names = [format_term(term.name) for term in _plan().cost]
    assert list(terms) == [name for name in names if name in terms]
    assert terms["nodes"] == ("4", "4")
    assert terms["distance between the chosen nodes"] == ("21", "30")
    assert format_term("cache_colour") == "cache colour"


def test_each_device_has_a_row_with_its_node_cell_and_address() -> None:
    table = _section(_plan(), h200_host(), "Devices").table
    assert table is not None
    assert table.rows[6] == ("0000:ba:00.0", "gpu", "3", "3", "0000:0b:00.0")
    flat = _section(_plan("pin"), h200_host(), "Devices").table
    assert flat is not None and flat.rows[0][3:] == ("none", "not planned")


def test_huge_pages_are_reserved_by_command_above_what_the_pool_has() -> None:
    reservations = (
        PageReservation(NodeIndex(0), 1 << 30, 440, 420),
        PageReservation(NodeIndex(1), 1 << 30, 384, 420),
        PageReservation(NodeIndex(2), 2 << 20, 10, None),
    )
    plan = replace(_plan(), page_reservations=reservations)
    section = _section(plan, h200_host(), "Huge pages")
    # 448 pages are there, 420 of them free: 20 more make 440 free ones.
    assert section.commands == (
        "echo 468 > /sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages",
        "echo 10 > /sys/devices/system/node/node2/hugepages/hugepages-2048kB/nr_hugepages",
    )
    unknown = _section(plan, None, "Huge pages").commands[0]
    assert unknown.startswith("echo $(( $(cat /sys/devices/system/node/node0/")
    assert " + 20 )) > " in unknown


def test_kernel_parameters_reserve_the_pages_and_isolate_the_vcpus_from_every_boot_on() -> None:
    host = even_host(2, 1, 1, 8, 2)
    reservations = (
        PageReservation(NodeIndex(0), 2 << 20, 10, None),
        PageReservation(NodeIndex(0), 1 << 30, 4, None),
        PageReservation(NodeIndex(1), 1 << 30, 4, None),
    )
    plan = replace(plan_on(host, small_request(4)), page_reservations=reservations)
    used = CpuSet.parse("0-3,16-19")  # with the siblings that the plan keeps idle
    rest = CpuSet(range(32)) - used
    assert _section(plan, host, "Kernel parameters").commands == (
        "hugepagesz=1048576K hugepages=0:4,1:4",
        "hugepagesz=2048K hugepages=0:10",
        f"isolcpus=managed_irq,domain,{used} nohz_full={used} rcu_nocbs={used} irqaffinity={rest}",
    )
    beside = replace(plan, vm=replace(plan.vm, emulator_pus=CpuSet([16])))
    assert "isolcpus=managed_irq,domain,0-3,17-19 " in str(
        _section(beside, host, "Kernel parameters")
    )
    # Pages that are there already stay: 448, of which 420 are free.
    own = replace(_plan(), page_reservations=(PageReservation(NodeIndex(0), 1 << 30, 440, 420),))
    assert _section(own, h200_host(), "Kernel parameters").commands[0].endswith(" hugepages=0:468")


@pytest.mark.parametrize("layout", list(PRESETS))
def test_every_preset_is_explained_with_and_without_its_host(layout: str) -> None:
    for host in (h200_host(), None):
        explanation = explain(_plan(layout), host)
        assert explanation.title.startswith("vm fits ")
        sections = explained(explanation)
        headings = [section.heading for section in sections]
        assert len(set(headings)) == len(headings)
        assert all(s.lines or s.table or s.commands for s in sections)
        assert all(
            len(row) == len(s.table.heads) for s in sections if s.table for row in s.table.rows
        )


def test_what_the_host_does_not_tell_is_no_term_of_the_choice() -> None:
    host = host_of([NodeSpec(memory_bytes=None)] * 2, tells_llcs=False)
    plan = plan_on(host, small_request(8, layout="pin-numa"))
    terms = _terms(plan, host)
    assert terms["nodes"][0] == "2"
    assert set(terms["LLCs"]) == {"unknown"} == set(terms["free memory before this VM"])


def test_a_runner_up_is_not_compared_by_memory_that_is_unknown() -> None:
    host = host_of([NodeSpec(), NodeSpec(memory_bytes=None)])
    plan = plan_on(host, small_request(2))
    assert plan.nodes == (0,)
    assert _terms(plan, host)["free memory before this VM"][1] == "unknown"


def test_a_node_that_holds_two_cells_of_mixed_kinds_is_reported_once() -> None:
    host = host_of([NodeSpec(((2,) * 4 + (1,) * 4,), efficiency_cores=4)])
    plan = plan_on(host, asking(small_request(6, layout="pin-numa"), mixed_kinds=True))
    assert plan.nodes == (0, 0)
    table = _section(plan, host, "Where it runs").table
    assert table is not None
    assert len(table.rows) == 1
    assert " on node 0" in answer_line(replace(plan, relaxations=()), host)


@pytest.mark.parametrize(
    ("layout", "gpus", "is_said"),
    [("pin-bound", 8, True), ("pin-numa", 8, True), ("pin-numa-pci", 8, False)],
)
def test_gpus_of_several_nodes_without_a_guest_node_are_a_caveat(
    layout: str, gpus: int, is_said: bool
) -> None:
    done = homenode("plan", *f"{VM} --host hgx-h100 --gpus {gpus} --layout {layout}".split())
    assert ("numa_node of the guest's GPUs is -1" in done.stdout) is is_said
