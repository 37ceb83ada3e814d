"""QEMU starts from the script, with the disk, NIC and display that it advises; its ACPI tables."""

import random
import re
import shlex
from collections.abc import Iterator, Sequence

from msgspec import structs

from homenode.cpuset import CpuSet
from homenode.vm.model import Vm
from homenode.vm.plan import Plan
from tests.conformance.builds import absent, directory, first_line
from tests.conformance.judge import Answer, Example, Facts, Judge
from tests.conformance.qemu_machine import QEMU, Machine, QemuError, for_this_machine, machine_of
from tests.conformance.vms import Planned, cells_of, planned_cases

EXAMPLE = Example(free=r"#")

_POLICY = {"strict": "bind", "interleave": "interleave", "preferred": "preferred"}
_ADVISED = {
    0x1001: "virtio-blk",
    0x1000: "virtio-net",
    0x1111: "VGA",
    0x00B8: "-vga cirrus",
    0x100E: "-nic e1000",
}
"""By their numbers: those of the script's example, and those that other options add."""


def missing() -> str | None:
    return absent("cc", QEMU, "bash")


def version() -> str:
    return first_line(QEMU, "--version").partition("version ")[2].split()[0]


def planned_facts(plan: Plan) -> Facts:
    """What a machine of QEMU says where the plan holds."""
    bound = [] if plan.memory_mode is None else [_POLICY[plan.memory_mode]]
    cells = cells_of(plan)
    flat = [(0, set(map(int, plan.memory_nodes)), *bound)]
    facts: dict[str, object] = {
        "vCPUs": plan.vm.vcpus,
        "memory": plan.vm.memory_bytes,
        "cells": {i: (set(cell.vcpus), cell.memory_bytes) for i, cell in enumerate(cells)},
        "distances": [list(c.distances[: len(cells)]) for c in cells if c.distances],
        "HMAT": False,
        "bound memory": []
        if not bound
        else [(i, set(map(int, cell.host_nodes)), *bound) for i, cell in enumerate(cells)] or flat,
        "huge pages": [plan.vm.page_bytes] * max(1, len(cells)) if plan.vm.page_bytes else [],
        "cell of each device": [device.cell for device in plan.vm.hostdevs],
    }
    if plan.vm.cpu_topology is not None:
        facts["topology"] = tuple(plan.vm.cpu_topology)
    return facts


def read_facts(machine: Machine) -> Facts:
    return {
        "vCPUs": len(machine.cpus),
        "memory": machine.memory_bytes,
        "topology": machine.topology,
        "cells": machine.cells(),
        "distances": machine.distances(),
        "HMAT": "HMAT" in machine.tables,
        "bound memory": sorted(
            (int(one["id"].removeprefix("ram-node")), set(one["host-nodes"]), one["policy"])
            for one in machine.memdevs
            if one["host-nodes"]
        ),
        "huge pages": [size for size in machine.page_bytes.values() if size],
        "cell of each device": [machine.cell_of(device) for device in machine.roots],
    }


def advised_words(script: str) -> list[str]:
    """The words of the example in a script's head."""
    example = script.partition(" start\n#     -")[2].partition("\nset ")[0]
    return shlex.split("-" + example.replace("\n#     ", " "))


def _varied(draw: random.Random, guest: Vm) -> Vm:
    machine = draw.choice(("q35", "q35", "pc"))
    return structs.replace(
        guest, machine=machine, iothread_ids=tuple(range(draw.choice((0, 0, 1, 2))))
    )


def cases(names: Sequence[str]) -> Iterator[Planned]:
    return planned_cases(names, "qemu", varied=_varied)


def planned_of_script(plan: Plan) -> Facts:
    return {
        **planned_facts(plan),
        "pins": list(plan.vcpu_pins),
        "IOThreads": list(plan.iothread_pus),
        "emulator": plan.vm.emulator_pus,
        "devices there": set(_ADVISED.values()),
    }


def read_of_script(text: str, devices: int) -> Facts:
    """What QEMU says when this script starts it. Raises QemuError."""
    script = directory() / "vm.sh"
    script.write_text(re.sub(r"\nlocked_kib=.*", "\nlocked_kib=0", for_this_machine(text)))
    words = [word.replace("127.0.0.1:0", "unix:vnc") for word in advised_words(text)]
    words += ["-vga", "cirrus", "-nic", "user,model=e1000"]  # which QEMU makes first
    argv = ["bash", str(script), "start", *words]
    machine = machine_of(argv, [f"hostdev{i}" for i in range(devices)])
    pins = {name: CpuSet.parse(pus) for name, pus in machine.pins.items()}
    names = [f"CPU {i}/TCG" for i in range(len(machine.cpus))]
    threads = [name for name in pins if name.startswith("IO iothread")]
    return {
        **read_facts(machine),
        "pins": [pins[name] for name in names if name in pins],
        "IOThreads": [pins[name] for name in sorted(threads)],
        "emulator": pins.get("launch"),
        "devices there": {name for number, name in _ADVISED.items() if machine.functions[number]},
    }


def ask(names: Sequence[str]) -> Iterator[Answer]:
    for case in cases(names):
        read: Facts = {}
        refusal = None
        try:
            read = read_of_script(case.document.decode(), len(case.plan.vm.hostdevs))
        except QemuError as error:
            refusal = str(error)
        yield Answer(
            case=case.case,
            about=case.about,
            planned=planned_of_script(case.plan),
            read=read,
            refusal=refusal,
        )


QEMU_JUDGE = Judge(
    name="qemu",
    program="QEMU",
    reads="the script: pins as it calls taskset; started under TCG with other devices in place of "
    "the host's, and the advised disk, NIC and display: SRAT, SLIT and _PXM of its ACPI tables, "
    "host nodes, policy and page size of memory, topology",
    setup="qemu-system-x86, cc",
    version=version,
    missing=missing,
    ask=ask,
    marker="qemu",
)
