"""Which GPU tests a machine gets, with which tools, under which bindings."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from homenode.errors import UsageError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.measure.gpu_tests import ON_GPU_NODES
from homenode.measure.model import (
    CONTROLS,
    PYTHON,
    TORCH,
    BenchTest,
    Reader,
    Suite,
    SuiteDepth,
    SuiteGroup,
    SuiteOptions,
)
from homenode.measure.suite import ALL_AT_ONCE, HOST_COPIES, build_suite
from tests.small_hosts import DeviceSpec, even_host

NVIDIA = frozenset({"numactl", "nvbandwidth", "all_reduce_perf"})
TWO = (DeviceSpec("0000:19:00.0"), DeviceSpec("0000:9b:00.0", node=1, root=1))
SAME = (DeviceSpec("0000:19:00.0", node=1), DeviceSpec("0000:1a:00.0", node=1))
GPU_GROUPS = (
    SuiteGroup.GPU_COPY,
    SuiteGroup.MATMUL,
    SuiteGroup.GPU_BANDWIDTH,
    SuiteGroup.GPU_SMALL,
    SuiteGroup.GPU_PEER,
    SuiteGroup.NCCL,
)


def host_with(*devices: DeviceSpec, vendor: int = 0x10DE, driver: str | None = None) -> Host:
    host = even_host(devices=devices)
    functions = tuple(
        structs.replace(one, vendor_id=vendor, driver=driver) if one.kind is DeviceKind.GPU else one
        for one in host.pci_devices
    )
    return structs.replace(host, pci_devices=functions)


def suite(
    host: Host,
    installed: frozenset[str],
    groups: Sequence[SuiteGroup] = GPU_GROUPS,
    depth: SuiteDepth = SuiteDepth.NORMAL,
) -> Suite:
    return build_suite(host, installed, SuiteOptions(tuple(groups), depth))


def by_id(made: Suite) -> dict[str, BenchTest]:
    return {test.id: test for test in made.tests}


def test_ids_are_unique_among_tests_and_their_stand_ins() -> None:
    made = suite(host_with(*TWO), NVIDIA | {TORCH})
    ids = [one.id for test in made.tests for one in test.attempts]
    assert len(ids) == len(set(ids))


def test_installed_tools_come_first_and_pytorch_stands_in_by_name() -> None:
    tests = by_id(suite(host_with(*TWO), NVIDIA | {TORCH}))
    for name in ("gpu-copy", "gpu-bandwidth", "gpu-bandwidth from node 1", "gpu-peer"):
        assert [one.reads for one in tests[name].attempts] == [Reader.NVBANDWIDTH, Reader.TORCH]
        assert tests[name].attempts[1].id == f"{name} (torch)"
    assert tests["nccl"].attempts[1].program == "torch_collectives"
    row = tests["gpu-bandwidth from node 1"]
    assert {one.node for one in row.attempts} == {1}
    assert row.attempts[1].argv[-2:] == ("--node", "1")


def test_pytorch_alone_measures_everything() -> None:
    made = suite(host_with(*TWO), frozenset({TORCH}))
    assert {test.reads for test in made.tests} == {Reader.TORCH}
    assert {test.group for test in made.tests} == set(GPU_GROUPS)
    assert all(test.program is not None and "-" in test.argv for test in made.tests)


def test_without_pytorch_the_package_is_named() -> None:
    made = suite(host_with(*TWO), NVIDIA)
    reasons = {gap.subject: gap.reason for gap in made.omitted}
    assert "package torch" in reasons[SuiteGroup.MATMUL]
    assert "package torch" in reasons[SuiteGroup.GPU_SMALL]
    with pytest.raises(UsageError, match="gpu-compute") as refused:
        suite(host_with(*TWO), NVIDIA, [SuiteGroup.MATMUL])
    assert "package torch" in str(refused.value) and "--python" not in str(refused.value)


def test_host_copies_go_both_ways_and_on_all_gpus_at_once() -> None:
    own = by_id(suite(host_with(*TWO), NVIDIA))["gpu-bandwidth"]
    assert set(HOST_COPIES) | set(ALL_AT_ONCE) <= set(own.argv)
    alone = by_id(suite(host_with(TWO[0]), NVIDIA))["gpu-bandwidth"]
    assert not set(ALL_AT_ONCE) & set(alone.argv)


def test_without_numactl_pytorch_binds_itself() -> None:
    made = suite(host_with(*TWO), (NVIDIA | {TORCH}) - {"numactl"}, [SuiteGroup.GPU_BANDWIDTH])
    assert [test.reads for test in made.tests] == [Reader.NVBANDWIDTH, Reader.TORCH, Reader.TORCH]
    poor = suite(host_with(*TWO), frozenset({"nvbandwidth"}), [SuiteGroup.GPU_BANDWIDTH])
    assert [test.id for test in poor.tests] == ["gpu-bandwidth"]
    reasons = [f"from node {node}: numactl: command not found" for node in (0, 1)]
    assert [gap.reason for gap in poor.omitted] == reasons


def test_gpus_on_two_nodes_run_all_three_bindings_with_a_process_each() -> None:
    tests = by_id(suite(host_with(*TWO), NVIDIA | {TORCH}, [SuiteGroup.NCCL]))
    each = [test for name, test in tests.items() if "a process for each GPU" in name]
    assert len(each) == 6
    bindings = {"nothing bound", ON_GPU_NODES, "everything on node 0"}
    assert {test.binding for test in each} == bindings
    assert {test.argv[test.argv.index("--bind") + 1] for test in each} == {"none", "gpu", "0"}
    assert sum("--no-peers" in test.argv for test in each) == 3
    assert all(test.variant for test in each)
    assert tests["nccl"].variant is None


def test_gpus_on_one_node_are_bound_to_it_by_numactl() -> None:
    tests = by_id(suite(host_with(*SAME), NVIDIA, [SuiteGroup.NCCL]))
    assert list(tests) == [
        "nccl",
        "nccl: P2P off",
        f"nccl: {ON_GPU_NODES}",
        f"nccl: P2P off, {ON_GPU_NODES}",
        "nccl: everything on node 0",
        "nccl: P2P off, everything on node 0",
    ]
    assert tests[f"nccl: {ON_GPU_NODES}"].argv[:2] == ("numactl", "--cpunodebind=1")


def test_gpus_without_a_node_cannot_be_bound_to_it() -> None:
    lost = [replace(spec, node=None) for spec in TWO]
    made = suite(host_with(*lost), NVIDIA | {TORCH}, [SuiteGroup.NCCL])
    assert not any(test.binding == ON_GPU_NODES for test in made.tests)
    assert any("has no node that a process can be bound to" in gap.reason for gap in made.omitted)


def test_one_variant_speaks_for_each_metric_of_collectives() -> None:
    for installed in (NVIDIA, NVIDIA | {TORCH}, frozenset({TORCH})):
        made = suite(host_with(*TWO), installed, [SuiteGroup.NCCL])
        variants = [test.variant for test in made.tests]
        assert variants.count(None) == 1
        assert len(set(variants)) == len(variants)


def test_amds_tools_are_tried_in_order_and_their_quirks_are_known() -> None:
    installed = frozenset({"rocm-bandwidth-test", "all_reduce_perf", TORCH})
    tests = by_id(suite(host_with(*TWO, vendor=0x1002), installed))
    by_node = tests["gpu-bandwidth by node"].attempts
    assert [one.reads for one in by_node] == [Reader.ROCM, Reader.TORCH]
    assert "--each-node" in by_node[-1].argv
    both = tests["gpu-bandwidth both ways"]
    assert both.argv == ("rocm-bandwidth-test", "-A")
    assert [one.reads for one in both.alternatives] == [Reader.TORCH]
    for test in (tests["nccl"], tests["nccl"].attempts[1]):
        assert ("HSA_NO_SCRATCH_RECLAIM", "1") in test.environment
    assert "NCCL_P2P_DISABLE=1" in (tests["nccl"].if_stopped or "")
    assert tests["nccl: P2P off"].if_stopped is None
    assert all("hangs" in (one.if_stopped or "") for one in tests["gpu-peer"].attempts)


def test_gpus_that_guests_hold_are_not_measured() -> None:
    host = host_with(*TWO, driver="vfio-pci")
    made = build_suite(host, NVIDIA | {"homenode-probe"}, SuiteOptions())
    assert not any(test.group in GPU_GROUPS for test in made.tests)
    assert any("passed through (vfio-pci)" in gap.reason for gap in made.omitted)


def test_gpus_of_two_vendors_are_not_mixed() -> None:
    host = host_with(*TWO)
    devices = [
        structs.replace(one, vendor_id=0x1002) if str(one.bdf) == TWO[1].bdf else one
        for one in host.pci_devices
    ]
    made = suite(structs.replace(host, pci_devices=tuple(devices)), NVIDIA)
    assert any("another vendor" in gap.reason for gap in made.omitted)
    assert not any(test.group is SuiteGroup.NCCL for test in made.tests)


def test_controls_that_no_layout_moves_are_of_the_gpu_too() -> None:
    assert {SuiteGroup.GPU_COPY, SuiteGroup.MATMUL} < CONTROLS
    tests = suite(host_with(*TWO), NVIDIA | {TORCH}).tests
    assert [test.id for test in tests if test.is_control] == ["gpu-copy", "gpu-compute"]


def test_every_test_ends_by_itself_or_is_stopped() -> None:
    for depth in SuiteDepth:
        tests = suite(host_with(*TWO), NVIDIA | {TORCH}, depth=depth).tests
        for one in (attempt for test in tests for attempt in test.attempts):
            assert one.seconds < one.timeout_s
            assert one.seconds <= 30 or 60 <= 2 * one.seconds < one.timeout_s < 7200


def test_a_tool_that_binds_itself_is_watched_where_there_is_a_python() -> None:
    tests = by_id(suite(host_with(*TWO), NVIDIA | {PYTHON}, [SuiteGroup.GPU_BANDWIDTH]))
    own = tests["gpu-bandwidth"]
    assert (own.program, own.argv[:3]) == ("watched", ("python3", "-", "nvbandwidth"))
    assert tests["gpu-bandwidth from node 0"].program is None
    assert by_id(suite(host_with(*TWO), NVIDIA))["gpu-bandwidth"].program is None


@pytest.mark.parametrize("depth", [SuiteDepth.QUICK, SuiteDepth.NORMAL, SuiteDepth.FULL])
def test_a_slow_machine_has_the_time_for_all_calls_of_its_collectives(depth: SuiteDepth) -> None:
    """The study's 8 RTX 5090 behind Gen 2 links: 0.53 GB/s of bus bandwidth, whatever the size."""
    eight = [DeviceSpec(f"0000:{0x10 + n:02x}:00.0") for n in range(8)]
    (test, *_) = suite(host_with(*eight), NVIDIA, [SuiteGroup.NCCL], depth).tests
    words = dict(zip(test.argv[1::2], test.argv[2::2], strict=True))
    calls = 2 * (int(words["-w"]) + int(words["-n"]))  # out of place and in place
    seconds = sum((8 << n) * 2 * 7 / 8 / 0.53e9 for n in range(28)) * calls
    assert int(words["-e"]) == 8 << 27
    assert seconds < test.timeout_s


EIGHT = [DeviceSpec(f"0000:{bus:02x}:00.0", node=bus % 2, root=bus % 2) for bus in range(1, 9)]


def test_what_may_hang_is_waited_for_in_minutes_not_hours() -> None:
    installed = frozenset({"rocm-bandwidth-test", "all_reduce_perf", TORCH})
    tests = suite(host_with(*EIGHT, vendor=0x1002), installed).tests
    attempts = [one for test in tests for one in test.attempts]
    assert all(one.timeout_s <= 400 or one.if_stopped is None for one in attempts)


def test_a_quick_look_at_eight_gpus_takes_a_few_minutes_a_round() -> None:
    made = suite(host_with(*EIGHT), NVIDIA | {TORCH}, depth=SuiteDepth.QUICK)
    assert sum(test.seconds for test in made.tests) < 420


def test_what_is_unbound_is_measured_with_the_topology_file_too_where_there_is_one() -> None:
    installed = NVIDIA | {TORCH, PYTHON}
    without = build_suite(host_with(*TWO), installed, SuiteOptions((SuiteGroup.NCCL,)))
    options = SuiteOptions((SuiteGroup.NCCL,), topology="<system/>")
    found = build_suite(host_with(*TWO), installed, options)
    more = [test for test in found.tests if "topology file" in (test.variant or "")]
    assert [test for test in found.tests if test not in more] == list(without.tests)
    unbound = {None, "P2P off", "a process for each GPU", "a process for each GPU, P2P off"}
    named = {", ".join(filter(None, (variant, "topology file"))) for variant in unbound}
    assert {test.variant for test in more} == named
    for test in more:
        for attempt in test.attempts:
            assert attempt.argv[0] == "sh" and attempt.argv[4] == "<system/>"
    failed = SuiteOptions((SuiteGroup.NCCL,), why_no_topology="it cannot be made")
    gaps = build_suite(host_with(*TWO), installed, failed).omitted
    assert [gap.reason for gap in gaps] == ["topology file: it cannot be made"]
