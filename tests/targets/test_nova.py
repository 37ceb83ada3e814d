"""OpenStack Nova itself accepts the extra specs and places the flavor on the plan's host.

Needs a Python with Nova from PyPI: HOMENODE_NOVA_PYTHON names it.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.plan.layout import PRESETS
from homenode.plan.model import Plan
from homenode.targets.planned import TargetPlan
from homenode.targets.target import features_of
from homenode.topology import Host
from homenode.units import GIB, KIB, MIB
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


def flavor_of(document: bytes) -> dict[str, Any]:
    whole = json.loads(document)
    flavor = whole["flavor"]
    # An alias is resolved by the operator's nova.conf, which is not there.
    specs = {k: v for k, v in flavor["extra_specs"].items() if not k.startswith("pci_passthrough")}
    return {
        "vcpus": flavor["vcpus"],
        "ram": flavor["ram"],
        "extra_specs": specs,
        "properties": whole["image"]["properties"],
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


def test_nova_refuses_a_value_that_it_does_not_know(nova: str) -> None:
    planned = written("openstack", "hgx-h100", options("pin-numa"))
    flavor = flavor_of(planned.rendering.document)
    flavor["host"] = cells_of(host_named("hgx-h100"), planned)
    flavor["extra_specs"] = {"hw:cpu_sockets": "many"}
    (answer,) = answers_to(nova, [flavor])
    assert answer["errors"]
