"""Cloud Hypervisor reads the command that the script starts: its own parser and its own checks."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from homenode.vm.plan_model import Plan
from tests.conformance.builds import PROGRAMS, absent, first_line, folder
from tests.conformance.judge import Answer, Example, Facts, Judge
from tests.conformance.vms import Planned, cells_of, planned_cases

EXAMPLE = Example(
    file=b"""#!/bin/sh
# start it
cloud-hypervisor --kernel /boot/vmlinux --cmdline "console=hvc0 root=/dev/vda1" \\
  --cpus boot=8,max=8,features=amx \\
  --memory size=32G,shared=on \\
  --disk path=/srv/focal.raw path=/srv/seed.img \\
  --device path=/sys/bus/pci/devices/0000:19:00.0/,x_nv_gpudirect_clique=0 \\
  --net tap=,mac=12:34:56:78:90:ab
""",
    owned=r"  --(cpus|memory|memory-zone|numa|platform|device) ",
    free=r'#|set -euo|"\$@"',
    refused_for=("one host node", "threads a core"),
)

VARIABLE = "HOMENODE_CLOUD_HYPERVISOR"
"""The folder that programs/cloud_hypervisor/build made."""


def _program() -> Path | None:
    built = os.environ.get(VARIABLE)
    return None if built is None else Path(built) / "cloud-hypervisor"


def missing() -> str | None:
    return absent("bash") or (None if _program() else f"{VARIABLE} names no folder")


def version() -> str:
    program = _program()
    assert program is not None
    return first_line(program, "--version").split()[1].removeprefix("v").removesuffix("-dirty")


def _started(document: bytes) -> list[str]:
    """The words that the script gives to the program, as bash reads them."""
    programs = folder() / "cloud-hypervisor"
    programs.mkdir(exist_ok=True)
    (programs / "taskset").write_bytes((PROGRAMS / "taskset").read_bytes())
    said = programs / "words"
    stand_in = f"#!/bin/bash\nprintf '%s\\0' cloud-hypervisor \"$@\" >'{said}'\n"
    (programs / "cloud-hypervisor").write_text(stand_in)
    for name in ("taskset", "cloud-hypervisor"):
        (programs / name).chmod(0o755)
    script = folder() / "vm.sh"
    script.write_bytes(document)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "TASKSET_CALLS": "/dev/null"}
    more = ["--kernel", "/boot/vmlinux"] if b'"$@"' in document else []
    subprocess.run(["bash", str(script), *more], check=True, timeout=60, env=environment)
    return said.read_text().split("\0")[:-1]


def _read_all(cases: Sequence[Planned]) -> list[dict[str, Any]]:
    """For each case, its configuration or the words of the refusal."""
    program = _program()
    assert program is not None
    path = folder() / "commands.json"
    path.write_text(json.dumps([_started(case.document) for case in cases]))
    done = subprocess.run(
        [program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"HOMENODE_COMMANDS": str(path)},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _read(config: dict[str, Any]) -> Facts:
    cpus, memory = config["cpus"], config["memory"]
    zones = {zone["id"]: zone for zone in memory.get("zones") or []}
    numa = sorted(config.get("numa") or [], key=lambda node: node["guest_numa_id"])
    cell_of = {
        one: node["guest_numa_id"] for node in numa for one in node.get("pci_segments") or []
    }
    segments = config["platform"]["num_pci_segments"] if config.get("platform") else 1
    shape = cpus.get("topology") or {}
    return {
        "vCPUs": cpus["boot_vcpus"],
        "topology": tuple(
            shape.get(key)
            for key in ("packages", "dies_per_package", "cores_per_die", "threads_per_core")
        ),
        "pins": {one["vcpu"]: set(one["host_cpus"]) for one in cpus.get("affinity") or []},
        "memory": memory["size"] + sum(zone["size"] for zone in zones.values()),
        "host nodes": Counter({z["host_numa_node"]: 1 for z in zones.values() if _bound(z)}),
        "page bytes": {
            zone.get("hugepage_size") or 0
            for zone in (*zones.values(), memory)
            if zone["hugepages"]
        },
        "cells": [
            (
                set(node.get("cpus") or []),
                sum(zones[name]["size"] for name in node.get("memory_zones") or []),
                {zones[name].get("host_numa_node") for name in node.get("memory_zones") or []},
                {one["destination"]: one["distance"] for one in node.get("distances") or []},
            )
            for node in numa
        ],
        "devices": {
            Path(device["path"]).name: cell_of.get(device["pci_segment"])
            for device in config.get("devices") or []
        },
        "segments": all(device["pci_segment"] < segments for device in config.get("devices") or []),
    }


def _bound(zone: dict[str, Any]) -> bool:
    return zone.get("host_numa_node") is not None


def _planned(plan: Plan) -> Facts:
    cells, bound = cells_of(plan), plan.memory_mode is not None
    facts: dict[str, object] = {
        "vCPUs": plan.vm.vcpus,
        "pins": {vcpu: set(pin) for vcpu, pin in enumerate(plan.vcpu_pins)},
        "memory": plan.vm.memory_bytes,
        "host nodes": Counter({int(node): 1 for node in plan.memory_nodes} if bound else {}),
        "page bytes": set() if plan.vm.page_bytes is None else {plan.vm.page_bytes},
        "cells": [
            (
                set(cell.vcpus),
                cell.memory_bytes,
                {int(cell.host_nodes[0]) if bound else None},
                {i: distance for i, distance in enumerate(cell.distances) if i != cell.id},
            )
            for cell in cells
        ],
        "devices": {str(device.bdf): device.cell for device in plan.vm.hostdevs},
        "segments": True,
    }
    if plan.vm.cpu_topology is not None:
        facts["topology"] = tuple(plan.vm.cpu_topology)
    return facts


def ask(names: Sequence[str]) -> Iterator[Answer]:
    cases = list(planned_cases(names, "cloud-hypervisor", (EXAMPLE.file,)))
    for case, said in zip(cases, _read_all(cases), strict=True):
        yield Answer(
            case=case.case,
            about=case.about,
            planned=_planned(case.plan),
            read={} if said["config"] is None else _read(said["config"]),
            refusal=said["refusal"],
        )


CLOUD_HYPERVISOR = Judge(
    name="cloud-hypervisor",
    program="Cloud Hypervisor",
    reads="the command that the script starts, by the program's own parser and checks: vCPUs, "
    "topology, pins, memory, pages and host nodes, cells, distances, devices and their cells",
    setup="tests/conformance/programs/cloud_hypervisor/build with a checkout and cargo; "
    "HOMENODE_CLOUD_HYPERVISOR names its folder",
    version=version,
    missing=missing,
    ask=ask,
)
