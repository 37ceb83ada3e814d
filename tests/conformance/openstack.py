"""OpenStack Nova validates the flavor's extra specs, and fits it to the plan's host."""

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.plan.vm_file import TargetPlan
from homenode.units import KIB, MIB
from tests.conformance.builds import PROGRAMS, first_line
from tests.conformance.judge import Answer, Example, Facts, Judge
from tests.conformance.vms import Planned, cells_of, planned_cases

EXAMPLE = Example(
    file=b"""{
    "OS-FLV-DISABLED:disabled": false,
    "name": "gpu.large",
    "disk": 80,
    "ram": 32768,
    "properties": {
        "hw:cpu_policy": "shared",
        "aggregate_instance_extra_specs:gpu": "true"
    },
    "vcpus": 8
}
""",
    owned=r' *"(hw:|pci_passthrough|ram|vcpus)|.*instance_extra_specs',
    free=r'.*"(format|name|pci_passthrough:alias)"|[{}]',
    refused_for=(
        "one host node",
        "a host node of its own",
    ),
)

VARIABLE = "HOMENODE_NOVA_PYTHON"
_VERSION = "from importlib.metadata import version; print(version('nova'))"


def _python() -> str:
    return os.environ.get(VARIABLE, "")


def missing() -> str | None:
    return None if _python() else f"{VARIABLE} names no Python with Nova"


def version() -> str:
    return first_line(_python(), "-c", _VERSION)


def host_cells(host: Host, planned: TargetPlan) -> list[dict[str, Any]]:
    """The host as Nova's compute service reports it, with the nova.conf that the findings name;
    every page is free, and as large as the plan's."""
    page = planned.plan.vm.page_bytes or 4 * KIB
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
        found.append(
            {
                "node": node.index,
                "pus": sorted(own),
                "cores": cores,
                "memory_mib": memory // MIB,
                "package": 0,
                "pages": [[page // KIB, memory // page]],
            }
        )
    return found


def flavor_of(document: bytes) -> dict[str, Any]:
    """The flavor of a new file, or of what `openstack flavor show -f json` prints."""
    whole = json.loads(document)
    flavor = whole.get("flavor", whole)
    return {
        "vcpus": flavor["vcpus"],
        "ram": flavor["ram"],
        "extra_specs": flavor.get("extra_specs", flavor.get("properties")),
        "properties": whole.get("image", {"properties": {}})["properties"],
    }


def asked_of(host: Host, planned: TargetPlan) -> dict[str, Any]:
    """The flavor, the nova.conf that the findings name, and the functions as libvirt reports them:
    it calls each with an SR-IOV capability a PF, also without VFs."""
    fixes = [f.fix or "" for f in planned.findings if f.id == "target-alias"]
    pci = [fix.partition("[pci]: ")[2].partition("; device_spec = ") for fix in fixes]
    return {
        **flavor_of(planned.rendering.document),
        "host": host_cells(host, planned),
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
            if one.bridge is None
            and one.vendor_id is not None
            and one.device_id is not None
            and one.bdf.domain < 1 << 16  # Nova leaves others out
        ],
    }


def answers_to(flavors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Nova says of each: it takes seconds to start, and is asked again until we end."""
    nova, errors = _nova()
    assert nova.stdin is not None and nova.stdout is not None
    nova.stdin.write(f"{json.dumps(flavors)}\n")
    nova.stdin.flush()
    for line in nova.stdout:
        if line.startswith("@@"):
            answers: list[dict[str, Any]] = json.loads(line[2:])
            return answers
    _nova.cache_clear()
    errors.seek(0)
    raise AssertionError(errors.read()[-2000:])


@functools.cache
def _nova() -> tuple["subprocess.Popen[str]", TextIO]:
    """The process, and what it says on its standard error."""
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is there as long as the process
    command: list[str | Path] = [_python(), PROGRAMS / "nova_fit.py"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True), errors


def planned_facts(planned: TargetPlan) -> Facts:
    """Nova chooses which nodes and PUs: the plan is one answer of several."""
    plan = planned.plan
    facts: dict[str, object] = {"invalid": [], "devices": True}
    if plan.vcpu_pins:
        facts["vCPUs with a PU of their own"] = plan.vm.vcpus
        if cells_of(plan):
            facts["cells"] = [(sorted(c.vcpus), c.memory_bytes) for c in cells_of(plan)]
            facts["host nodes"] = len(cells_of(plan))
        if plan.vm.cpu_topology is not None:
            sockets, dies, cores, threads = plan.vm.cpu_topology
            facts["topology"] = [sockets, dies * cores, threads]
    return facts


def read_facts(answer: dict[str, Any]) -> Facts:
    cells = answer["cells"] or []
    pins = [(vcpu, pu) for cell in cells for vcpu, pu in cell["pins"].items()]
    return {
        "invalid": answer["errors"],
        "devices": answer["devices"],
        "vCPUs with a PU of their own": min(len({v for v, _ in pins}), len({p for _, p in pins})),
        "cells": [(cell["vcpus"], cell["memory"] * MIB) for cell in cells],
        "host nodes": len({cell["node"] for cell in cells}),
        "topology": answer["topology"],
    }


def ask(names: Sequence[str]) -> Iterator[Answer]:
    cases: list[Planned] = list(planned_cases(names, "openstack", (EXAMPLE.file,)))
    given = [asked_of(case.host, case.target_plan) for case in cases]
    for case, answer in zip(cases, answers_to(given) if given else (), strict=True):
        yield Answer(
            case=case.case,
            about=case.about,
            planned=planned_facts(case.target_plan),
            read=read_facts(answer),
        )


NOVA = Judge(
    name="nova",
    program="OpenStack Nova",
    reads="the flavor, with the nova.conf of its findings: validators of extra specs, "
    "numa_fit_instance_to_host on the plan's host, PciDeviceStats.support_requests, CPU topology",
    setup="nova of PyPI in a Python that HOMENODE_NOVA_PYTHON names",
    version=version,
    missing=missing,
    ask=ask,
    marker="nova",
    short=30,
)
