"""OpenStack Nova itself accepts the extra specs and places the flavor on the plan's host.

Needs a Python with Nova from PyPI: HOMENODE_NOVA_PYTHON names it.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.pci import DeviceKind
from homenode.plan.model import Plan
from homenode.plan.options import PlanOptions
from homenode.targets.planned import TargetPlan, plan_for_target
from homenode.targets.target import features_of, pus_of
from homenode.targets.vm_file import vm_of_options
from homenode.topology import Host
from homenode.units import GIB, KIB, MIB
from homenode.vm.layout import PRESETS
from tests.targets.written import host_named, options, written

pytestmark = pytest.mark.nova

PROGRAM = Path(__file__).parent / "programs" / "nova_fit.py"
HOSTS = ("hgx-h100", "x86-2p2n16c32t-isolated-pus", "epyc-nps4-gpu-nic")


@pytest.fixture(scope="module")
def nova() -> str:
    python = os.environ.get("HOMENODE_NOVA_PYTHON")
    if python is None:
        pytest.skip("HOMENODE_NOVA_PYTHON names no Python with Nova")
    return python


def cells_of(host: Host, planned: TargetPlan) -> list[dict[str, Any]]:
    """The host as Nova's compute service reports it, with the nova.conf that the findings name;
    every page is free and ordinary or huge."""
    fix = next((f.fix for f in planned.findings if f.id == "target-nova-conf"), None) or ""
    line = fix.partition("cpu_dedicated_set = ")[2].partition(";")[0]
    dedicated = CpuSet.parse(line) if line else CpuSet(pu.index for pu in host.pus if pu.online)
    found = []
    for node in host.nodes:
        if not node.pus:
            continue
        own = node.pus & dedicated
        cores = [sorted(core.pus & own) for core in host.cores if core.pus & own]
        memory = node.memory_bytes or 0
        huge = [(GIB, memory // (2 * GIB)), (2 * MIB, memory // (4 * 2 * MIB))]
        rest = memory - sum(size * count for size, count in huge)
        found.append(
            {
                "node": node.index,
                "pus": sorted(own),
                "cores": cores,
                "memory_mib": memory // MIB,
                "package": 0,
                "pages": [[4, rest // (4 * KIB)], *([size // KIB, n] for size, n in huge)],
            }
        )
    return found


def asked(python: str, host: Host, plans: Sequence[TargetPlan]) -> list[dict[str, Any]]:
    """What Nova says of each flavor, on the host with its nova.conf."""
    flavors = [{**flavor_of(one.rendering.document), "host": cells_of(host, one)} for one in plans]
    return answers_to(python, flavors)


def answers_to(python: str, flavors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python, PROGRAM],
        input=json.dumps(flavors),
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def flavor_of(document: bytes, *, aliases: bool = False) -> dict[str, Any]:
    """aliases: keep these, for a Nova that is given the [pci] of nova.conf too."""
    whole = json.loads(document)
    flavor = whole["flavor"]
    specs = {
        k: v
        for k, v in flavor["extra_specs"].items()
        if aliases or not k.startswith("pci_passthrough")
    }
    return {
        "vcpus": flavor["vcpus"],
        "ram": flavor["ram"],
        "extra_specs": specs,
        "properties": whole["image"]["properties"],
    }


def with_devices(host: Host, planned: TargetPlan) -> dict[str, Any]:
    """The flavor, the [pci] of nova.conf that the findings name, and the functions as libvirt
    reports them: it calls each with an SR-IOV capability a PF, also without VFs."""
    fixes = [f.fix or "" for f in planned.findings if f.id == "target-alias"]
    pci = [fix.partition("[pci]: ")[2].partition("; device_spec = ") for fix in fixes]
    return {
        **flavor_of(planned.rendering.document, aliases=True),
        "host": cells_of(host, planned),
        "alias": [alias.removeprefix("alias = ") for alias, _, _ in pci],
        "device_spec": [spec for _, _, spec in pci],
        "devices": [
            {
                "address": str(one.bdf),
                "vendor_id": f"{one.vendor_id:04x}",
                "product_id": f"{one.device_id:04x}",
                "numa_node": one.reported_node,
                "parent_addr": str(one.physical_function) if one.physical_function else None,
                "dev_type": "type-VF"
                if one.physical_function
                else "type-PF"
                if one.sriov_total_vfs
                else "type-PCI",
            }
            for one in host.pci_devices
            if one.bridge is None and one.vendor_id is not None and one.device_id is not None
        ],
    }


def as_planned(plan: Plan, answer: dict[str, Any]) -> None:
    cells = answer["cells"]
    assert cells is not None, "Nova finds no place"
    planned = [cell for cell in plan.cells if cell.vcpus]
    if "cells" in features_of(plan):
        assert [cell["vcpus"] for cell in cells] == [sorted(cell.vcpus) for cell in planned]
        assert [cell["memory"] * MIB for cell in cells] == [cell.memory_bytes for cell in planned]
    assert len({cell["node"] for cell in cells}) == len(cells)
    pins = {v: p for cell in cells for v, p in cell["pins"].items()}
    assert len(pins) == plan.vcpus
    assert len(set(pins.values())) == plan.vcpus
    if plan.topology is not None:
        sockets, dies, cores, threads = plan.topology
        assert answer["topology"] == [sockets, dies * cores, threads]


@pytest.mark.parametrize("name", HOSTS)
def test_nova_accepts_and_places_what_is_written_for_each_layout(nova: str, name: str) -> None:
    host = host_named(name)
    plans = []
    for layout in PRESETS:
        for pages in (None, 2 * MIB, GIB):
            wanted = options(layout, vcpus=8, memory_bytes=16 * GIB, page_bytes=pages, max_nodes=2)
            try:
                plans.append(written("openstack", name, wanted))
            except HomenodeError as refusal:
                assert "host node" in refusal.message or "page" in refusal.message
    answers = asked(nova, host, plans)
    assert len(answers) >= 9
    for planned, answer in zip(plans, answers, strict=True):
        assert answer["errors"] == []
        if planned.plan.vcpu_pins:
            as_planned(planned.plan, answer)


def sriov_host() -> Host:
    """An HGX H100 whose GPUs and NICs can do SR-IOV, as real ones can, and have no VFs."""
    host = host_named("hgx-h100")
    devices = tuple(
        replace(one, sriov_total_vfs=16, sriov_num_vfs=0)
        if one.kind in (DeviceKind.GPU, DeviceKind.NIC)
        else one
        for one in host.pci_devices
    )
    return replace(host, pci_devices=devices)


def test_nova_gives_the_devices_of_the_printed_alias_and_device_spec(nova: str) -> None:
    cases: list[tuple[Host, PlanOptions]] = []
    for gpus in (1, 4):
        wanted = options("pin-numa", vcpus=8, memory_bytes=16 * GIB, gpu_count=gpus)
        cases += [(host_named("hgx-h100"), wanted), (sriov_host(), wanted)]
        cases.append((sriov_host(), replace(wanted, with_nics=True)))
        cases.append((sriov_host(), replace(wanted, layout="default")))
    divided = options("pin", vcpus=2, gpu_count=1, gpu_profile="H200X-1-18C")
    cases.append((host_named("x86-2p2n8c8t-divided-gpus"), divided))
    plans = [(host, of_host(host, wanted)) for host, wanted in cases]
    asked = [with_devices(*one) for one in plans]
    assert any('"type-PF"' in alias for one in asked for alias in one["alias"])
    assert any('"type-VF"' in alias for one in asked for alias in one["alias"])
    for (_, planned), answer in zip(plans, answers_to(nova, asked), strict=True):
        assert answer["errors"] == [] and answer["devices"]
        if planned.plan.vcpu_pins:
            as_planned(planned.plan, answer)
    untyped = {
        **asked[1],
        "alias": [a.replace('"device_type": "type-PF", ', "") for a in asked[1]["alias"]],
    }
    unlisted = {**asked[1], "device_spec": []}
    assert [one["devices"] for one in answers_to(nova, [untyped, unlisted])] == [False, False]


def of_host(host: Host, wanted: PlanOptions) -> TargetPlan:
    return plan_for_target(vm_of_options(wanted, host.architecture), wanted, host, "openstack")


@pytest.mark.parametrize("layout", ["pin", "pin-numa"])
def test_nova_finds_every_pu_of_the_plan_in_the_printed_set(nova: str, layout: str) -> None:
    for name in ("x86-1p1n8c16t-gpu-audio", "x86-2p2n16c32t-isolated-pus"):
        host = host_named(name)
        wanted = options(layout, memory_bytes=2 * GIB, max_nodes=1)
        plans = [written("openstack", name, replace(wanted, vcpus=count)) for count in (2, 7, 8)]
        for planned, answer in zip(plans, asked(nova, host, plans), strict=True):
            given = {pu for cell in cells_of(host, planned) for pu in cell["pus"]}
            assert set(pus_of(planned.plan.vcpu_pins)) <= given
            as_planned(planned.plan, answer)


def test_nova_refuses_a_value_that_it_does_not_know(nova: str) -> None:
    planned = written("openstack", "hgx-h100", options("pin-numa"))
    flavor = flavor_of(planned.rendering.document)
    flavor["host"] = cells_of(host_named("hgx-h100"), planned)
    flavor["extra_specs"] = {"hw:cpu_sockets": "many"}
    (answer,) = answers_to(nova, [flavor])
    assert answer["errors"]
