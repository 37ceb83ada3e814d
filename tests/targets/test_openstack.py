"""OpenStack Nova itself accepts the extra specs and places the flavor on the plan's host.

Needs a Python with Nova from PyPI: HOMENODE_NOVA_PYTHON names it.
"""

from collections.abc import Sequence

import pytest
from msgspec import structs

from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.vm_file import TargetPlan, plan_for_target, vm_of_options
from homenode.units import GIB
from homenode.vm.plan_options import PlanOptions
from tests.conformance.openstack import (
    EXAMPLE,
    answers_to,
    asked_of,
    host_cells,
    missing,
    planned_facts,
    read_facts,
)
from tests.conformance.vms import planned_cases
from tests.targets.written import host_named, options, written

pytestmark = pytest.mark.nova


@pytest.fixture(autouse=True)
def _nova() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


def placed(plans: Sequence[tuple[Host, TargetPlan]]) -> None:
    """Nova takes every flavor, and places it as planned."""
    asked = [asked_of(*one) for one in plans]
    for (_, planned), answer in zip(plans, answers_to(asked), strict=True):
        read = read_facts(answer)
        wanted = planned_facts(planned)
        assert {name: read[name] for name in wanted} == wanted


def sriov_host() -> Host:
    """An HGX H100 whose GPUs and NICs can do SR-IOV, as real ones can, and have no VFs."""
    host = host_named("hgx-h100")
    devices = tuple(
        structs.replace(one, sriov_total_vfs=16, sriov_num_vfs=0)
        if one.kind in (DeviceKind.GPU, DeviceKind.NIC)
        else one
        for one in host.pci_devices
    )
    return structs.replace(host, pci_devices=devices)


def test_nova_gives_the_devices_of_the_printed_alias_and_device_spec() -> None:
    cases: list[tuple[Host, PlanOptions]] = []
    for gpus in (1, 4):
        wanted = options("pin-numa", vcpus=8, memory_bytes=16 * GIB, gpu_count=gpus)
        cases += [(host_named("hgx-h100"), wanted), (sriov_host(), wanted)]
        cases.append((sriov_host(), structs.replace(wanted, with_nics=True)))
        cases.append((sriov_host(), structs.replace(wanted, layout="default")))
    divided = options("pin", vcpus=2, gpu_count=1, gpu_profile="H200X-1-18C")
    cases.append((host_named("x86-2p2n8c8t-divided-gpus"), divided))
    plans = [(host, of_host(host, wanted)) for host, wanted in cases]
    placed(plans)
    asked = [asked_of(*one) for one in plans]
    assert any('"type-PF"' in alias for one in asked for alias in one["alias"])
    assert any('"type-VF"' in alias for one in asked for alias in one["alias"])
    untyped = {
        **asked[1],
        "alias": [a.replace('"device_type": "type-PF", ', "") for a in asked[1]["alias"]],
    }
    unlisted = {**asked[1], "device_spec": []}
    assert [one["devices"] for one in answers_to([untyped, unlisted])] == [False, False]


def test_nova_places_a_vm_with_a_gpu_of_which_sysfs_gives_no_node() -> None:
    """Nova takes it for no node at all where the policy is `required`."""
    host = host_named("rtx4080-i9-14900k")
    assert all(one.reported_node is None for one in host.devices_of_kind(DeviceKind.GPU))
    planned = of_host(host, options("pin-numa", gpu_count=1))
    placed([(host, planned)])
    required = asked_of(host, planned)
    required["extra_specs"] |= {"hw:pci_numa_affinity_policy": "required"}
    assert answers_to([required])[0]["cells"] is None


def of_host(host: Host, wanted: PlanOptions) -> TargetPlan:
    return plan_for_target(vm_of_options(wanted, host.architecture), wanted, host, "openstack")


@pytest.mark.parametrize("layout", ["pin", "pin-numa"])
def test_nova_finds_every_pu_of_the_plan_in_the_printed_set(layout: str) -> None:
    plans = []
    for name in ("x86-1p1n8c16t-gpu-audio", "x86-2p2n16c32t-isolated-pus"):
        host = host_named(name)
        wanted = options(layout, memory_bytes=2 * GIB, max_nodes=1)
        for vcpus in (2, 7, 8):
            planned = written("openstack", name, structs.replace(wanted, vcpus=vcpus))
            given = {pu for cell in host_cells(host, planned) for pu in cell["pus"]}
            assert set(planned.plan.vm.pinned_pus) <= given
            plans.append((host, planned))
    placed(plans)


def test_nova_refuses_a_value_that_it_does_not_know() -> None:
    flavor = asked_of(host_named("hgx-h100"), written("openstack", "hgx-h100", options("pin-numa")))
    flavor["extra_specs"] = {"hw:cpu_sockets": "many"}
    (answer,) = answers_to([flavor])
    assert answer["errors"]


def test_siblings_are_not_required_where_a_node_of_the_plan_has_none() -> None:
    """SMT is off in one package: Nova would find no place for the vCPUs there."""
    (case,) = planned_cases(["814566-56"], "openstack", (EXAMPLE.file,))
    assert case.host.name == "x86-2p2n16c24t-smt-off-in-one-package"
    assert b'"hw:cpu_thread_policy": "prefer"' in case.document
