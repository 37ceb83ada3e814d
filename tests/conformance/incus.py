"""Incus' own code reads the instance: its checks of keys and devices, and the QEMU it would start.

What the daemon makes of it is asked of the functions that make it. They take the host's CPUs from
sysfs, of which they get a tree with this host in it.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.units import MIB
from homenode.vm.model import Vm
from homenode.vm.targets.registry import target_named
from tests.conformance.builds import PROGRAMS, absent, folder
from tests.conformance.judge import Answer, Example, Facts, Judge
from tests.conformance.vms import Planned, bdfs_of, planned_cases

EXAMPLE = Example(
    file=b"""architecture: x86_64
config:
  image.os: Ubuntu
  limits.cpu: "8"
  limits.memory: 32GiB
  raw.qemu.conf: |-
    [device "qemu_balloon"]
    [global][2]
    driver = "ICH9-LPC"
    property = "disable_s4"
    value = "0"
  volatile.uuid: 2d5a0b2e-3b0f-4c53-8f51-1b0f2c3d4e5f
devices:
  gpu:
    gputype: physical
    pci: 0000:19:00.0
    type: gpu
  root:
    path: /
    pool: default
    type: disk
ephemeral: false
profiles:
- default
description: ""
""",
    owned=r"  (limits\.|raw\.qemu\.conf|user\.homenode)|    (\[numa\]|(type|src|dst|val) =)",
    free=r"#|name:|type:|homenode[0-9]:|gputype:",
    refused_for=(
        "x86_64",
        "a guest cell for each host node",
        "random order",
        "equal shares",
    ),
)

_MODULE = "github.com/lxc/incus/v6"
_SERVER = "internal/server"
_WHOLE = (
    "instance/drivers/driver_qemu_config_override.go",
    "instance/drivers/driver_qemu_templates.go",
)
_TAKEN = {
    "instance/drivers/driver_qemu.go": (
        "type cpuTopology struct",
        "func (d *qemu) cpuTopology(",
        "func (d *qemu) getCPUOpts(",
    ),
    "instance/drivers/util.go": ("func ParseMemoryStr(",),
    "device/device_utils_instance.go": ("func instanceSupported(",),
    "device/device_utils_unix.go": ("func unixValidUserID(", "func unixValidOctalFileMode("),
    "device/device_utils_gpu.go": ("func gpuValidMigUUID(",),
    "device/gpu.go": ("func gpuValidationRules(",),
    "device/gpu_physical.go": ("func (d *gpuPhysical) validateConfig(",),
    "device/pci.go": ("func (d *pci) validateConfig(",),
}
"""Functions of packages that need all of the daemon: they are taken out, and nothing else."""

_IMPORTS = {
    "errors": "errors",
    "fmt": "fmt",
    "slices": "slices",
    "strconv": "strconv",
    "strings": "strings",
    "linux": f"{_MODULE}/internal/linux",
    "pcidev": f"{_MODULE}/{_SERVER}/device/pci",
    "resources": f"{_MODULE}/{_SERVER}/resources",
    "instancetype": f"{_MODULE}/{_SERVER}/instance/instancetype",
    "version": f"{_MODULE}/internal/version",
    "units": f"{_MODULE}/shared/units",
    "util": f"{_MODULE}/shared/util",
    "validate": f"{_MODULE}/shared/validate",
}
"""Packages by their names in what is taken."""

_SYSFS = "sys/devices/system/cpu"


def _go(*argv: str, at: Path) -> str:
    done = subprocess.run(
        ["go", *argv], cwd=at, capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout.strip()


def _function(text: str, head: str) -> str:
    """From its first line to the brace that closes it, at the start of a line."""
    start = text.index(f"\n{head}")
    return text[start : text.index("\n}", start) + 3]


def _taken(server: Path) -> str:
    text = "".join(
        _function((server / path).read_text(), head)
        for path, heads in _TAKEN.items()
        for head in heads
    ).replace("instance.ConfigReader", "configReader")
    used = {name: path for name, path in _IMPORTS.items() if re.search(rf"\b{name}\.", text)}
    imports = "".join(f'\t{name} "{path}"\n' for name, path in used.items())
    return f"package main\n\nimport (\n{imports})\n{text}"


@cache
def _program() -> Path | str:
    """The program; words where it cannot be built, as where the module cannot be had."""
    made = folder() / "incus"
    shutil.copytree(PROGRAMS / "incus", made)
    try:
        _go("mod", "download", _MODULE, at=made)
        server = Path(_go("list", "-m", "-f", "{{.Dir}}", _MODULE, at=made)) / _SERVER
        (made / "taken.go").write_text(_taken(server))
        for path in _WHOLE:
            text = (server / path).read_text()
            renamed = text.replace("package drivers", "package main", 1)
            (made / Path(path).name).write_text(renamed)
        variable = f"{_MODULE}/{_SERVER}/resources.sysDevicesCPU"
        _go("build", "-ldflags", f"-X {variable}={_SYSFS}", "-o", "judge", ".", at=made)
    except RuntimeError as error:
        return f"Incus' code cannot be built: {error}"
    return made / "judge"


def missing() -> str | None:
    lacking = absent("go")
    if lacking is not None:
        return lacking
    found = _program()
    return found if isinstance(found, str) else None


def version() -> str:
    text = (PROGRAMS / "incus" / "go.mod").read_text()
    (found,) = re.findall(rf"\s{_MODULE} v([0-9.]+)", text)
    return str(found)


def _tree(host: Host, at: Path) -> None:
    """The CPUs of a host as Linux' sysfs has them, as far as Incus reads it."""
    cores = {pu: core for core in host.cores for pu in core.pus}
    for pu in host.pus:
        if pu.index not in cores:
            continue
        cpu = at / _SYSFS / f"cpu{pu.index}"
        (cpu / "topology").mkdir(parents=True)
        names = {
            "physical_package_id": cores[pu.index].id.package,
            "core_id": cores[pu.index].id.core,
            "die_id": pu.die or 0,
        }
        for name, number in names.items():
            (cpu / "topology" / name).write_text(f"{number}\n")
        if pu.node is not None:
            (cpu / f"node{pu.node}").mkdir()
            (cpu / f"node{pu.node}" / "numastat").touch()


def _cells(sections: Sequence[dict[str, Any]], threads: int, cores: int) -> Facts:
    """Cells by their host nodes, and distances between these."""
    objects: dict[str, dict[str, str]] = {}
    node_of: dict[str, int] = {}
    vcpus: dict[str, list[int]] = {}
    distances: dict[tuple[str, str], int] = {}
    for section in sections:
        entries = section["entries"]
        if match := re.match(r'object "(mem[0-9]+)"', section["name"]):
            objects[match[1]] = entries
        elif entries.get("type") == "node":
            key = "host-nodes.0"
            node_of[entries["nodeid"]] = int(objects[entries["memdev"]].get(key, -1))
            vcpus[entries["nodeid"]] = []
        elif entries.get("type") == "cpu":
            socket, core, thread = (int(entries[f"{n}-id"]) for n in ("socket", "core", "thread"))
            vcpus[entries["node-id"]].append((socket * cores + core) * threads + thread)
        elif entries.get("type") == "dist":
            distances[entries["src"], entries["dst"]] = int(entries["val"])
    sizes = {cell: objects[f"mem{cell}"]["size"] for cell in node_of}
    return {
        "cells": sorted(
            (node, set(vcpus[cell]), int(sizes[cell].removesuffix("M")) * MIB)
            for cell, node in node_of.items()
        ),
        "distances": {(node_of[a], node_of[b]): value for (a, b), value in distances.items()},
    }


def _read(found: dict[str, Any]) -> Facts:
    pins = found["Pins"] or {}
    facts = {
        "vCPUs": len(pins) or found["Sockets"] * found["Cores"] * found["Threads"],
        "memory": found["Memory"],
        "pins": [pins[str(vcpu)] for vcpu in range(len(pins))],
        "devices": sorted(found["Devices"].values()),
    }
    if not pins:
        return facts
    shape = (found["Sockets"], found["Cores"], found["Threads"])
    sections = found["Sections"]
    return {**facts, "shape": shape, **_cells(sections, shape[2], shape[1])}


def _planned(case: Planned) -> Facts:
    """As homenode expects it of the file on that host; that this is as planned, verify says."""
    module = target_named("incus")
    assert module.as_started is not None
    vm = module.as_started(module.read_vm(case.document, "vm"), case.host)
    facts = {
        "vCPUs": case.plan.vm.vcpus,
        "memory": case.plan.vm.memory_bytes,
        "pins": [min(pin) for pin in vm.vcpu_pins if pin is not None],
        "devices": list(map(str, bdfs_of(case.plan))),
    }
    if not case.plan.vcpu_pins:
        return facts
    pus = CpuSet.union(case.plan.vcpu_pins)
    return {**facts, "PUs": set(pus), **_shape(vm)}


def _shape(vm: Vm) -> Facts:
    assert vm.cpu_topology is not None
    sockets, dies, cores, threads = vm.cpu_topology
    node_of = {cell.id: min(cell.nodes) for cell in vm.cells}
    return {
        "shape": (sockets, dies * cores, threads),
        "cells": sorted((min(cell.nodes), set(cell.vcpus), cell.memory_bytes) for cell in vm.cells),
        "distances": {
            (node_of[cell.id], node_of[other]): value
            for cell in vm.cells
            for other, value in enumerate(cell.distances)
        },
    }


def ask(names: Sequence[str]) -> Iterator[Answer]:
    cases = list(planned_cases(names, "incus", (EXAMPLE.file,)))
    asked = []
    for case in cases:
        tree = folder() / f"host-{case.case}"
        _tree(case.host, tree)
        asked.append(json.dumps({"Folder": str(tree), "Text": case.document.decode()}))
    done = subprocess.run(
        [_program()],
        input="\n".join(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        found = json.loads(line)
        refusal = found["Refused"] or None
        read = {} if refusal else _read(found)
        if "pins" in read:
            read = {**read, "PUs": set(read["pins"])}  # type: ignore[call-overload]
        yield Answer(
            case=case.case, about=case.about, planned=_planned(case), read=read, refusal=refusal
        )


INCUS = Judge(
    name="incus",
    program="Incus",
    reads="the instance: its checks of keys and devices; vCPUs, pins, shape, cells, memory and "
    "distances of the QEMU that it would start on that host",
    setup="go, with the module github.com/lxc/incus/v6",
    version=version,
    missing=missing,
    ask=ask,
    short=10,
)
