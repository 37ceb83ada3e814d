"""The explanation of a plan: everything a reader asks for, in sentences."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.doc import Text, plain
from homenode.findings import Finding, Gap, Rejection, Severity
from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.plan.planner import plan as plan_on
from homenode.show.cost_words import term_lines, term_words
from homenode.show.explain import explain
from homenode.show.explain_guest import CELLS_TITLE
from homenode.show.host_groups import host_counts
from homenode.units import GIB
from homenode.vm.layout import PRESETS
from homenode.vm.plan import (
    Aperture,
    CostTerm,
    PageReservation,
    Plan,
    RunnerUp,
    is_critical,
    with_vm,
)
from tests.explained import Explained, explained
from tests.picture_hosts import gh200_host, h200_host, hand_plan, pictures
from tests.small_hosts import NodeSpec, asking, even_host, host_of, small_request

FOUR = (0, 1, 2, 3)


def _section(plan: Plan, host: Host | None, heading: str) -> Explained:
    sections = explained(explain(plan, host, whole=True))
    found = [s for s in sections if s.heading == heading]
    assert found, [s.heading for s in sections]
    return found[0]


def _plan(layout: str = "pin-numa-pci", memory_bytes: int = 1536 * GIB) -> Plan:
    return hand_plan(h200_host(), layout, 92, FOUR, gpus=7, memory_bytes=memory_bytes)


def test_the_cost_is_said_term_by_term_in_the_order_of_comparison() -> None:
    lines = _section(_plan(), h200_host(), "Why there").lines
    numbered = [line for line in lines if line[0].isdigit()]
    assert [line.partition(".")[0] for line in numbered] == [str(n + 1) for n in range(6)]
    assert numbered[1] == "2. 4 nodes spanned"
    assert numbered[2] == "3. the chosen nodes are at most 12 apart"


def test_people_are_shown_the_spans_and_the_best_runner_up_alone() -> None:
    plan = replace(_plan(), runners_up=_plan().runners_up * 3)
    (brief,) = (s for s in explained(explain(plan, h200_host())) if s.heading == "Why there")
    whole = _section(plan, h200_host(), "Why there").lines
    assert len(brief.lines) < len(whole)
    assert sum("runner-up" in line for line in brief.lines) == 1
    assert set(brief.lines[:-1]) & set(whole) and "--explain" in brief.lines[-1]


def test_the_best_runner_up_is_named_with_the_term_that_decided() -> None:
    lines = _section(_plan(), h200_host(), "Why there").lines
    assert (
        "A runner-up, nodes 1-2: decided by distance between the chosen nodes, "
        "12 here against 20 there." in lines
    )


def test_a_runner_up_with_other_gpus_names_them() -> None:
    other = replace(_plan().runners_up[0], devices=(Bdf.parse("ff:00.0"),))
    lines = _section(replace(_plan(), runners_up=(other,)), h200_host(), "Why there").lines
    assert any("runner-up, nodes 1-2 with 0000:ff:00.0: decided by" in line for line in lines)


def test_memory_left_free_is_compared_in_bytes() -> None:
    cost = (CostTerm("balance_memory", -512 * GIB),)
    other = RunnerUp((NodeIndex(3),), (CostTerm("balance_memory", -64 * GIB),), "balance_memory")
    plan = replace(_plan(), cost=cost, runners_up=(other,))
    assert (
        "A runner-up, node 3: decided by memory left free, 512 GiB here against 64 GiB "
        "there." in _section(plan, h200_host(), "Why there").lines
    )


def test_a_plan_whose_search_ran_out_of_steps_says_so() -> None:
    lines = _section(replace(_plan(), optimal=None), h200_host(), "Why there").lines
    assert any("best placement is unknown" in line for line in lines)


def test_a_plan_without_runners_up_claims_no_more_than_was_shown() -> None:
    plan = replace(_plan(), runners_up=())
    lines = _section(plan, h200_host(), "Why there").lines
    assert any("ruled out by bounds" in line for line in lines)
    assert not any("feasible" in line for line in lines)


def test_iothreads_have_the_ids_of_the_document() -> None:
    plan = with_vm(_plan(), iothread_pins=((2, CpuSet([7])), (9, CpuSet([8]))))
    lines = _section(plan, h200_host(), "Emulator and IOThreads").lines
    assert "IOThread 2 runs on PU 7." in lines and "IOThread 9 runs on PU 8." in lines


def test_a_cost_term_that_has_no_words_keeps_its_name() -> None:
    assert term_lines([CostTerm("cache_colour", 3)]) == ("1. cache colour: 3",)
    assert term_words("cache_colour") == "cache colour"


def test_rejections_are_grouped_by_constraint_the_most_frequent_first() -> None:
    lines = _section(_plan(), h200_host(), "What was rejected").lines
    assert lines == (
        "2 rejected by cores:",
        "  node 0: needs 92 free cores, 24 free",
        "  node 1: needs 92 free cores, 24 free",
        "1 rejected by memory:",
        "  node 0: needs 1.5 TiB, 490 GiB free",
    )


def test_many_rejections_are_counted_rather_than_listed() -> None:
    many = tuple(Rejection("cores", (NodeIndex(n),), "too few") for n in range(30))
    lines = _section(replace(_plan(), rejections=many), h200_host(), "What was rejected").lines
    assert lines[0] == "30 rejected by cores:"
    assert lines[-1] == "  and 26 more (--json lists them)"


@pytest.mark.parametrize(
    ("fallback", "lines"),
    [
        ("one LLC", ["Placement: inside one last-level cache (policy cores-first)."]),
        ("across packages", ["Placement: spans both packages (policy cores-first)."]),
        (
            "one node, mixed core kinds, host's last core",
            [
                "Placement: inside one NUMA node (policy cores-first).",
                "What gave way: performance and efficiency cores are mixed; no core is left "
                "without vCPUs.",
            ],
        ),
        (
            "a new span, a new word",
            ["Placement: a new span (policy cores-first).", "What gave way: a new word."],
        ),
    ],
)
def test_the_fallback_is_said_in_words(fallback: str, lines: list[str]) -> None:
    plan = replace(_plan(), fallback=fallback, cost=())
    assert list(_section(plan, h200_host(), "Where it runs").lines[: len(lines)]) == lines


def test_a_plan_over_four_packages_says_how_many() -> None:
    cost = (CostTerm("packages_spanned", 4),)
    plan = replace(_plan(), fallback="across packages", cost=cost)
    line = _section(plan, None, "Where it runs").lines[0]
    assert line == "Placement: spans 4 packages (policy cores-first)."


def test_critical_findings_come_before_everything_else() -> None:
    critical = Finding(
        id="host-memory-taken",
        severity=Severity.CRITICAL,
        subject="h",
        observed="too little is left",
        fix="lower it",
    )
    plan = replace(_plan(), findings=(*_plan().findings, critical))
    first = explained(explain(plan, h200_host()))[0]
    assert first.heading == "Critical"
    assert first.lines == ("critical: h: too little is left", "  fix: lower it")
    assert is_critical(plan) and not is_critical(_plan())
    others = _section(plan, h200_host(), "Findings").lines
    assert not any("too little" in line for line in others)


def test_one_mirrored_cell_is_a_cell_and_a_flat_guest_is_flat() -> None:
    for layout, name in (("pin-numa", "0"), ("pin", "whole guest")):
        plan = plan_on(even_host(1), small_request(2, layout=layout))
        table = _section(plan, even_host(1), CELLS_TITLE).table
        assert table is not None and table.rows[0][0] == name


def test_terms_of_devices_are_said_and_what_is_nought_is_not() -> None:
    gpus = CostTerm("gpus", (0, 1))
    lost = CostTerm("gpu_sets_lost", 1)
    assert term_lines([lost]) == ("1. 1 chosen node with free GPUs, for a VM without",)
    assert term_lines([CostTerm("gpus_away_from_home", 2), lost, gpus]) == (
        "1. 2 GPUs are on no chosen node",
        "2. 1 set of free GPUs that later VMs can no longer get whole",
    )
    silent = ("gpus_away_from_home", "gpu_sets_lost", "device_distance")
    assert term_lines([CostTerm(name, 0) for name in silent]) == ()
    assert term_lines([CostTerm("pages_to_reserve", 1024)]) == (
        "1. to do: reserve 1024 huge pages",
    )
    assert term_lines([gpus]) == ()
    assert term_lines([gpus], {"gpus"}) == ("1. lowest GPU numbers among equals: 0-1",)


def test_each_cell_has_a_row_with_its_vcpus_pus_node_memory_and_distances() -> None:
    table = _section(_plan(), h200_host(), CELLS_TITLE).table
    assert table is not None
    assert table.rows[1] == ("1", "23-45 (23)", "24-46", "1", "384 GiB", "12 10 32 32")


def test_each_device_has_a_row_with_its_node_cell_and_address() -> None:
    table = _section(_plan(), h200_host(), "Devices").table
    assert table is not None
    assert table.rows[6] == ("0000:cb:00.0", "gpu", "3", "3", "0000:26:00.0")
    flat = _section(_plan("pin"), h200_host(), "Devices").table
    assert flat is not None and flat.rows[0][3:] == ("none", "not planned")


def test_local_and_remote_parts_of_dma_are_said_once_for_equal_devices() -> None:
    lines = _section(_plan(), h200_host(), "Devices").lines
    assert lines[:1] == (
        "7 devices on nodes 0-3: each has 384 GiB (25 %) of the guest's memory on its own node; "
        "DMA to the other 1.12 TiB is remote, at distances up to 32.",
    )


def test_devices_of_unknown_node_and_unbound_memory_are_not_given_figures() -> None:
    plan = _plan("pin")
    devices = (
        structs.replace(plan.vm.hostdevs[0], host_node=None, local_memory_ratio=None),
        structs.replace(plan.vm.hostdevs[1], local_memory_ratio=None),
    )
    lines = _section(with_vm(plan, hostdevs=devices), h200_host(), "Devices").lines
    assert lines == (
        "1 device with no known node: which memory is local to them is unknown.",
        "1 device on node 0: this layout does not bind memory, so the local part of DMA is "
        "unknown.",
    )


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
    host = even_host(2, 1, 1, 8, 1)
    reservations = (
        PageReservation(NodeIndex(0), 2 << 20, 10, None),
        PageReservation(NodeIndex(0), 1 << 30, 4, None),
        PageReservation(NodeIndex(1), 1 << 30, 4, None),
    )
    plan = replace(plan_on(host, small_request(4)), page_reservations=reservations)
    used = CpuSet.union(plan.vcpu_pins)
    rest = CpuSet(range(16)) - used
    assert _section(plan, host, "Kernel parameters").commands == (
        "hugepagesz=1048576K hugepages=0:4,1:4",
        "hugepagesz=2048K hugepages=0:10",
        f"isolcpus=managed_irq,domain,{used} nohz_full={used} rcu_nocbs={used} irqaffinity={rest}",
    )
    # Pages that are there already stay: 448, of which 420 are free.
    own = replace(_plan(), page_reservations=(PageReservation(NodeIndex(0), 1 << 30, 440, 420),))
    assert _section(own, h200_host(), "Kernel parameters").commands[0].endswith(" hugepages=0:468")


def test_enough_free_pages_need_no_command() -> None:
    section = _section(_plan(memory_bytes=64 * GIB), h200_host(), "Huge pages")
    assert section.commands == ()
    assert section.lines == ("Enough huge pages are free; nothing to reserve.",)


def test_an_emulator_on_vcpu_pus_is_said_to_share_them() -> None:
    plan = with_vm(_plan(), emulator_pus=CpuSet.parse("0,23"))
    lines = _section(plan, h200_host(), "Emulator and IOThreads").lines
    assert lines[1] == "It shares PU 0 with vCPUs and may delay them."


def test_cores_and_llcs_are_shown_by_node() -> None:
    table = _section(_plan(), h200_host(), "Where it runs").table
    assert table is not None
    assert table.rows[2] == ("2", "1", "23", "24", "48-70")


@pytest.mark.parametrize("layout", list(PRESETS))
def test_every_preset_is_explained_with_and_without_its_host(layout: str) -> None:
    for host in (h200_host(), None):
        explanation = explain(_plan(layout), host)
        assert explanation.title.endswith(layout)
        sections = explained(explanation)
        headings = [section.heading for section in sections]
        assert len(set(headings)) == len(headings)
        assert all(s.lines or s.table or s.commands for s in sections)
        assert all(
            len(row) == len(s.table.heads) for s in sections if s.table for row in s.table.rows
        )


def test_36_nodes_give_no_rows_for_nodes_that_are_not_chosen() -> None:
    host = gh200_host()
    plan = hand_plan(host, "pin-numa-pci", 70, (2,), gpus=3)
    table = _section(plan, host, "Where it runs").table
    assert table is not None and [row[0] for row in table.rows] == ["2"]


def test_every_picture_plan_is_explained_the_same_twice() -> None:
    for host, plan in pictures().values():
        if plan is not None:
            assert explain(plan, host) == explain(plan, host)


def test_what_the_host_does_not_tell_is_no_term_of_the_choice() -> None:
    host = host_of([NodeSpec(memory_bytes=None)] * 2, tells_llcs=False)
    plan = plan_on(host, small_request(8, layout="pin-numa"))
    lines = " ".join(_section(plan, host, "Why there").lines)
    assert "2 nodes spanned" in lines
    assert "LLC" not in lines
    assert "0 B" not in lines


def test_a_runner_up_is_not_compared_by_memory_that_is_unknown() -> None:
    host = host_of([NodeSpec(), NodeSpec(memory_bytes=None)])
    plan = plan_on(host, small_request(2))
    assert plan.nodes == (0,)
    lines = _section(plan, host, "Why there").lines
    assert any("GiB here against unknown there" in line for line in lines)


@pytest.mark.parametrize(("layout", "threads"), [("pin-numa", False), ("pin-numa-smt", True)])
def test_topoext_is_for_threads_only_where_the_guest_has_some(layout: str, threads: bool) -> None:
    plan = plan_on(even_host(2), small_request(2, layout=layout))
    assert plan.vm.topoext
    stated = " ".join(_section(plan, None, "CPU topology and caches of the guest").lines)
    assert "topoext is required" in stated
    assert ("does not see threads" in stated) is threads


def test_entries_of_the_dma_map_are_an_upper_bound() -> None:
    plan = replace(_plan(), aperture=Aperture(None, None, None, GIB, 4096))
    assert any(
        "DMA map: at most 4,096" in line
        for line in _section(plan, None, "Address space and locked memory").lines
    )


def test_a_host_without_nodes_has_unknown_memory() -> None:
    assert "memory unknown" in host_counts(structs.replace(even_host(1), nodes=()))


def test_a_node_that_holds_two_cells_of_mixed_kinds_is_reported_once() -> None:
    host = host_of([NodeSpec(((2,) * 4 + (1,) * 4,), efficiency_cores=4)])
    plan = plan_on(host, asking(small_request(6, layout="pin-numa"), mixed_kinds=True))
    assert plan.nodes == (0, 0)
    table = _section(plan, host, "Where it runs").table
    assert table is not None
    assert len(table.rows) == 1
    (summary, *_) = explain(plan, host).parts
    assert isinstance(summary, Text) and " on node 0, " in plain(summary.words)


def test_sixteen_devices_without_a_node_are_one_warning_with_their_addresses_and_count() -> None:
    alike = tuple(
        Finding(
            id="device-node-unknown",
            severity=Severity.WARNING,
            subject=f"0000:{bus:02x}:00.0",
            observed="found none",
            fix="fix it",
        )
        for bus in range(1, 17)
    )
    other = Finding(
        id="device-in-use",
        severity=Severity.WARNING,
        subject="0000:01:00.0",
        observed="a domain has it",
    )
    plan = replace(_plan(), findings=(*alike, other))
    lines = _section(plan, None, "Findings").lines
    assert lines == (
        "warning: each of 0000:01:00.0, 0000:02:00.0, 0000:03:00.0, 0000:04:00.0, 0000:05:00.0, "
        "0000:06:00.0 and 10 more: found none",
        "  fix: fix it",
        "warning: 0000:01:00.0: a domain has it",
    )


def test_gaps_of_one_reason_are_reported_once() -> None:
    gaps = (
        Gap("node of 0000:17:00.0", "the firmware gives none"),
        Gap("node of 0000:65:00.0", "the firmware gives none"),
        Gap("free memory", "no meminfo"),
    )
    assert _section(replace(_plan(), gaps=gaps), None, "Not known").lines == (
        "node of 0000:17:00.0 and 0000:65:00.0: the firmware gives none",
        "free memory: no meminfo",
    )
