"""`xl -N create` reads the configuration of a VM, and prints it as libxl would take it."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from homenode.machine.topology import Host
from homenode.units import KIB
from tests.conformance.builds import absent, directory, library
from tests.conformance.judge import Answer, Example, Facts, Judge
from tests.conformance.vms import Planned, bdfs_of, cells_of, planned_cases
from tests.processes import run_text

EXAMPLE = Example(
    file=b"""# a guest
name="g1"; type='hvm'
memory = 32768   # MiB
maxmem = 32768
vcpus=8
disk = [ 'format=raw, vdev=xvda, access=rw, target=/dev/vg/g1',
         'format=raw, vdev=xvdb, access=ro, target=/dev/vg/g2' ]
pci = [ '19:00.0,permissive=1',
        '0000:9b:00.0' ]
vif = [ 'mac=00:16:3e:00:00:01,bridge=xenbr0' ]
""",
    owned=r"(memory|maxmem|vcpus|cpus|vnuma|pci|        '0000:9b)|# homenode",
    free=r"#|name|type",
    refused_for=("x86_64",),
)

VARIABLE = "HOMENODE_XEN"
"""A directory with the files of Debian's xen-utils and its libraries; / where it is not set."""


def _xl() -> Path | None:
    return max(Path(os.environ.get(VARIABLE, "/")).glob("usr/lib/xen-*/bin/xl"), default=None)


def missing() -> str | None:
    return absent("cc") or (
        None if _xl() else f"no xl; {VARIABLE} names a directory with xen-utils"
    )


def version() -> str:
    """xl says it only to who has a hypervisor; Debian's directory and library are named by it."""
    found = _xl()
    assert found is not None
    return found.parents[1].name.removeprefix("xen-")


def _printed(document: bytes, host: Host) -> tuple[dict[str, Any] | None, str]:
    xl = _xl()
    assert xl is not None
    root = xl.parents[4]
    path = directory() / "vm.cfg"
    path.write_bytes(document)
    libraries = [root / "usr/lib/x86_64-linux-gnu", *root.glob("usr/lib/xen-*/lib")]
    environment = {
        "LD_PRELOAD": str(library("xen_stand_in")),
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "XEN_CPUS": str(1 + max(pu.index for pu in host.pus)),
        "XEN_NODES": str(1 + max(node.index for node in host.nodes)),
    }
    done = run_text([xl, "-N", "create", path], timeout=60, env=environment)
    said = re.sub(
        r"Failed to read config file: \S+xl\.conf.*|Parsing config from.*", "", done.stderr
    )
    return (json.loads(done.stdout) if done.returncode == 0 else None), said or str(done.returncode)


def _read(config: dict[str, Any]) -> Facts:
    """libxl prints no value that is its default: node 0, bus 0."""
    info = config["b_info"]
    return {
        "vCPUs": info["max_vcpus"],
        "memory": info["max_memkb"] * KIB,
        "pins": [set(pus) for pus in info.get("vcpu_hard_affinity", [])],
        "preferred": [set(pus) for pus in info.get("vcpu_soft_affinity", [])],
        "cells": [
            (set(node["vcpus"]), node["memkb"] * KIB, node.get("pnode", 0), node["distances"])
            for node in info.get("vnuma_nodes", [])
        ],
        "devices": sorted(
            "{:04x}:{:02x}:{:02x}.{:x}".format(
                *(one.get(key, 0) for key in ("domain", "bus", "dev", "func"))
            )
            for one in config.get("pcidevs", [])
        ),
    }


def _planned(case: Planned) -> Facts:
    plan = case.plan
    return {
        "vCPUs": plan.vm.vcpus,
        "memory": plan.vm.memory_bytes,
        "pins": [set(pin) for pin in plan.vcpu_pins],
        "preferred": [],
        "cells": [
            (
                set(cell.vcpus),
                cell.memory_bytes,
                int(cell.host_nodes[0]),
                list(cell.distances[: len(cells_of(plan))])
                or [10 if cell is other else 20 for other in cells_of(plan)],
            )
            for cell in cells_of(plan)
        ],
        "devices": list(map(str, bdfs_of(plan))),
    }


def ask(names: Sequence[str]) -> Iterator[Answer]:
    for case in planned_cases(names, "xen", (EXAMPLE.file,)):
        config, said = _printed(case.document, case.host)
        yield Answer(
            case=case.case,
            about=case.about,
            planned=_planned(case),
            read={} if config is None else _read(config),
            refusal=said if config is None else None,
        )


XEN = Judge(
    name="xen",
    program="xl -N create",
    reads="the configuration: vCPUs, memory, pins, vnuma, PCI devices",
    setup="xen-utils of Debian, or its files in a directory that HOMENODE_XEN names",
    version=version,
    missing=missing,
    ask=ask,
    short=5,
)
