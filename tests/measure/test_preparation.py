"""What orders come to on a machine: its head, its tests, the plan of a guest."""

from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.measure import runner
from homenode.measure.model import (
    PROBE,
    TORCH,
    AppCommand,
    BenchOptions,
    Reader,
    SuiteDepth,
    SuiteGroup,
    SuiteOptions,
    choose_cpus,
)
from homenode.measure.preparation import prepare_run
from homenode.measure.results.model import Condition, Switches
from homenode.measure.results.vantage import Vantage
from homenode.measure.run_directory import DOMAIN, PLAN
from homenode.plan.stored import read_plan
from homenode.vm.layout import PRESETS
from homenode.vm.plan import with_vm
from tests.bench_machines import FakeMachine
from tests.small_hosts import DeviceSpec, even_host
from tests.verify_documents import tuned
from tests.verify_guests import guest_host

QUICK = SuiteOptions(depth=SuiteDepth.QUICK)
INSTALLED = frozenset({PROBE, "taskset"})
HOST_ORDERS = BenchOptions("x", QUICK, vantage=Vantage.HOST)


def guest_orders(layout: str = "pin-numa-pci") -> BenchOptions:
    made = tuned(layout)
    return BenchOptions("x", QUICK, plan=made.plan, domain_xml=made.document)


def test_a_guest_as_planned_is_measured_under_the_layout_of_its_plan() -> None:
    orders = guest_orders()
    assert orders.plan is not None
    ready = prepare_run(orders, guest_host(), INSTALLED, "boot-1")
    head = ready.record.head
    assert ready.mismatch == ()
    assert head.switches == Switches.from_layout(PRESETS["pin-numa-pci"])
    assert (head.vcpus, head.boots) == (4, ("boot-1",))
    assert head.host == orders.plan.host_fingerprint
    assert head.host_kind is None, "a guest's own view of its processor says nothing of the host"
    pinned = CpuSet(pu for pins in orders.plan.vcpu_pins for pu in pins)
    assert head.pus == pinned
    assert head.nodes == tuple(map(int, orders.plan.nodes))
    assert Condition("machine type", "q35") in head.conditions


def test_gpus_of_a_guest_have_their_hosts_addresses() -> None:
    orders = guest_orders()
    assert orders.plan is not None
    head = prepare_run(orders, guest_host(), INSTALLED, "b").record.head
    planned = {device.bdf for device in orders.plan.vm.hostdevs}
    assert head.gpus
    assert {gpu.device for gpu in head.gpus} <= planned
    assert head.host_addresses
    assert {gpu.node for gpu in head.gpus} == {0, 1}


def test_another_guest_only_if_forced(tmp_path: Path, no_waiting: None) -> None:
    machine = FakeMachine()
    orders = replace(guest_orders(), repeats=1)
    refused = runner.run_bench(machine, orders, tmp_path, lambda progress: None)
    assert (refused.directory, refused.run) == (None, None)
    assert refused.findings
    assert machine.calls == []
    assert not list(tmp_path.iterdir())
    forced = replace(orders, force=True)
    outcome = runner.run_bench(machine, forced, tmp_path, lambda progress: None)
    assert outcome.run is not None
    assert any("not as planned" in reason for reason in outcome.run.head.unusable)
    assert outcome.directory is not None
    stored = read_plan((Path(outcome.directory) / PLAN).read_bytes(), PLAN)
    assert stored == orders.plan
    assert (Path(outcome.directory) / DOMAIN).read_bytes() == orders.domain_xml


def test_a_host_is_distinguished_from_every_other_one() -> None:
    host = even_host()
    head = prepare_run(HOST_ORDERS, host, INSTALLED, "b").record.head
    assert head.host == host.fingerprint
    assert head.host_kind is not None and head.host_kind.startswith("2x ")
    assert head.host_addresses
    assert head.system == "cpu-only"


def test_the_directory_is_the_gpus() -> None:
    host = even_host(devices=(DeviceSpec("0000:19:00.0"),))
    devices = (structs.replace(one, name="NVIDIA H200 <b>") for one in host.pci_devices)
    named = structs.replace(host, pci_devices=tuple(devices))
    assert prepare_run(HOST_ORDERS, named, INSTALLED, "b").record.head.system == "nvidia-h200-b"
    other = replace(HOST_ORDERS, system="own")
    assert prepare_run(other, named, INSTALLED, "b").record.head.system == "own"


def test_bare_metal_is_measured_on_the_pus_of_the_plan() -> None:
    plan = guest_orders().plan
    assert plan is not None
    orders = replace(HOST_ORDERS, plan=plan)
    assert choose_cpus(orders) == CpuSet(pu for pins in plan.vcpu_pins for pu in pins)
    with pytest.raises(UsageError, match="pins no vCPUs"):
        choose_cpus(replace(orders, plan=with_vm(plan, vcpu_pins=())))


def test_programs_that_pin_nothing_are_kept_to_the_pus_of_the_run() -> None:
    app = AppCommand(("./train",), "([0-9]+)")
    orders = replace(HOST_ORDERS, app=app, pus=CpuSet.parse("0-1"))
    tests = prepare_run(orders, even_host(), INSTALLED, "b").record.tests
    (test,) = (one for one in tests if one.reads is Reader.APP)
    assert test.argv == ("taskset", "-c", "0-1", "./train")
    without = prepare_run(orders, even_host(), {PROBE}, "b").record
    assert not any(one.reads is Reader.APP for one in without.tests)
    assert any("taskset: command not found" in gap.reason for gap in without.omitted)


def test_gpu_tools_bound_to_a_node_are_kept_to_the_pus_of_the_run_there() -> None:
    """numactl takes all CPUs of a node; nvbandwidth moves itself to those of the GPU."""
    host = even_host(devices=(DeviceSpec("0000:19:00.0"),))
    orders = replace(
        HOST_ORDERS, pus=CpuSet.parse("0-1,4"), suite=SuiteOptions((SuiteGroup.GPU_BANDWIDTH,))
    )
    assert {0, 1, 4} <= {int(pu.index) for pu in host.pus}
    ours = {int(node.index): str(node.pus & orders.pus) for node in host.nodes if orders.pus}
    installed = INSTALLED | {"nvbandwidth", "numactl", TORCH}
    tests = {one.id: one for one in prepare_run(orders, host, installed, "b").record.tests}
    assert tests["gpu-bandwidth"].argv[:5] == ("taskset", "-c", "0-1,4", "nvbandwidth", "-d")
    row = tests["gpu-bandwidth from node 0"]
    bound = f"numactl --cpunodebind=0 --membind=0 taskset -c {ours[0]} nvbandwidth"
    assert row.argv[:7] == tuple(bound.split())
    assert row.argv.count("-d") == 1
    (torch,) = row.alternatives
    assert torch.argv[:4] == ("taskset", "-c", "0-1,4", "python3")  # binds itself within these


def test_a_program_alone_needs_no_other_tool() -> None:
    app = AppCommand(("./train",), "([0-9]+)")
    record = prepare_run(replace(HOST_ORDERS, app=app), even_host(), (), "b").record
    assert [test.id for test in record.tests] == ["app"]
    both = replace(HOST_ORDERS, app=app, suite=replace(QUICK, groups=(SuiteGroup.CPU_ALL,)))
    asked = prepare_run(both, even_host(), INSTALLED, "b").record
    assert [test.id for test in asked.tests] == ["cpu-all", "app"]


def test_memory_that_a_cpuset_keeps_from_a_job_is_not_measured() -> None:
    host = even_host()
    whole = prepare_run(HOST_ORDERS, host, INSTALLED, "b", (0, 1)).record
    assert any("--matrix" in test.argv for test in whole.tests)
    job = prepare_run(HOST_ORDERS, host, INSTALLED, "b", (0,)).record
    assert not any("--matrix" in test.argv for test in job.tests)
    assert job.head.nodes == (0,)
    assert job.head.pus == whole.head.pus, "the CPUs are ours, wherever memory may be"
    with pytest.raises(UsageError, match="cpuset allows, found 1"):
        prepare_run(replace(HOST_ORDERS, nodes=(1,)), host, INSTALLED, "b", (0,))


def test_matrices_of_the_probe_are_left_out_where_some_nodes_are_asked_for() -> None:
    host = even_host(nodes_per_package=2)
    record = prepare_run(replace(HOST_ORDERS, nodes=(0, 1)), host, INSTALLED, "b").record
    assert not any("--matrix" in test.argv for test in record.tests)
    assert "a cpuset excludes nodes" in {gap.reason for gap in record.omitted}


def test_a_guest_has_all_its_vcpus_however_few_we_may_use() -> None:
    host = guest_host()
    pus = tuple(structs.replace(pu, allowed=pu is host.pus[0]) for pu in host.pus)
    kept = structs.replace(host, pus=pus)
    ready = prepare_run(BenchOptions("x", QUICK), kept, INSTALLED, "b")
    assert ready.record.head.vcpus == 4
    assert len(ready.pus) == 1


def test_the_hypervisor_that_a_guest_has_installed_is_not_its_own() -> None:
    versions = {"libvirt_version": (9, 0, 0), "qemu_version": (7, 2, 22)}
    settings = structs.replace(guest_host().settings, **versions)
    inside = structs.replace(guest_host(), settings=settings)
    head = prepare_run(guest_orders(), inside, INSTALLED, "b").record.head
    assert not {one.name for one in head.conditions} & {"libvirt", "qemu"}
    outside = structs.replace(even_host(), settings=settings)
    head = prepare_run(HOST_ORDERS, outside, INSTALLED, "b").record.head
    assert Condition("qemu", "7.2.22") in head.conditions


def test_an_affinity_leaves_its_pus_alone_to_a_run() -> None:
    """taskset narrows no cgroup: the machine still shows all CPUs as allowed."""
    status = "Cpus_allowed_list:\t2-3\nMems_allowed_list:\t0\n"
    groups = {"/proc/self/cgroup": "3:cpuset:/\n", "/sys/fs/cgroup/cpuset/cpuset.cpus": "0-3\n"}
    machine = FakeMachine(changed={"/proc/self/status": status, **groups})
    ready, _ = runner.inspect(machine, HOST_ORDERS)
    assert ready.pus == CpuSet.parse("2-3")
    with pytest.raises(UsageError, match="expected CPUs of 2-3"):
        runner.inspect(machine, replace(HOST_ORDERS, pus=CpuSet.parse("0")))
