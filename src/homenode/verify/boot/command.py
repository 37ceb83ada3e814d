"""Command: a rendered QEMU command line as one that boots here, with stand-ins for its devices.

Everything that says where a part of the guest is stays as it was: -smp, -numa, bridges, addresses.
What needs the real host goes: KVM, host nodes, huge pages, vfio-pci, firmware.
"""

from collections.abc import Sequence

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.targets.qemu_command import (
    Options,
    device_tree,
    facts_of,
    fields_of,
    options_of,
    size_of,
)
from homenode.units import MIB
from homenode.verify.boot.cpu_choice import SUBSTITUTE, CpuChoice
from homenode.verify.boot.stand_in import MOST_BYTES, StandIn, StandInCell, memory_ratio

_LEFT_OUT = {
    "fw_cfg": "the firmware's window",
    "global": "the address space for BARs",
    "pidfile": None,
    "daemonize": None,
    "id": None,
    "accel": None,
    "enable-kvm": None,
    "nodefaults": None,
    "no-user-config": None,
    "display": None,
    "vnc": None,
    "smbios": None,
}
"""Options that the boot does not take, and what they are where they say something of the guest."""

_NOT_HERE = {
    "intel-iommu": "the vIOMMU",
    "acpi-generic-initiator": "generic initiators (QEMU 9.0)",
}


def stand_in_of_command(
    words: Sequence[str], source: str, machine: str
) -> tuple[StandIn, tuple[str, ...]]:
    """The test guest of a command line, and the options to boot it with.

    words: program first. machine: a type that this QEMU has. Raises ParseError.
    """
    options = options_of(words[1:], source)
    facts = facts_of(options, source)
    tree = device_tree(options, source)
    if facts.vcpus is None or facts.memory_bytes is None:
        raise ParseError(source, "-smp and -m", "none")
    sizes = [cell.memory_bytes or 0 for cell in facts.cells if cell.vcpus]
    ratio = memory_ratio(sizes or [facts.memory_bytes])
    left = [f"mediated device {d.host}" for d in tree.devices if isinstance(d.host, str)]
    bare = StandIn(
        machine,
        facts.vcpus,
        0,
        ratio,
        (),
        facts.topology,
        CpuChoice("custom", SUBSTITUTE, (), None, f"model substituted: {SUBSTITUTE}"),
        tree.controllers,
        tuple(
            sorted(
                (
                    (d.address, d.host)
                    for d in tree.devices
                    if d.address is not None and isinstance(d.host, Bdf)
                ),
                key=lambda pair: pair[0],
            )
        ),
        (),
    )
    cells = (
        tuple(
            StandInCell(cell.vcpus, bare.scaled(cell.memory_bytes or 0), cell.distances)
            for cell in facts.cells
            if cell.vcpus or cell.memory_bytes
        )
        if sizes
        else ()
    )
    total = sum(c.memory_bytes for c in cells) or bare.scaled(facts.memory_bytes)
    booted = _booted(options, source, machine, bare, total, left)
    stand_in = StandIn(
        machine,
        bare.vcpus,
        min(total, MOST_BYTES),
        ratio,
        cells,
        bare.topology,
        bare.cpu,
        bare.controllers,
        bare.devices,
        tuple(dict.fromkeys(left)),
    )
    return stand_in, booted


def _booted(
    options: Options, source: str, machine: str, bare: StandIn, total: int, left: list[str]
) -> tuple[str, ...]:
    words: list[str] = ["-cpu", SUBSTITUTE]
    for option, text in options:
        value = text or ""
        first, pairs = fields_of(value)
        if option in _LEFT_OUT or option == "cpu" or first in _NOT_HERE:
            what = _LEFT_OUT.get(option) or _NOT_HERE.get(first)
            left += [what] if what else []
            continue
        if option == "machine":
            kept = [f"{k}={v}" for k, v in pairs if k == "memory-backend"]
            value = ",".join([machine, *kept])
        elif option == "m":
            value = f"{total // MIB}M"
        elif first.startswith("memory-backend-"):
            keys = dict(pairs)
            size = bare.scaled(size_of(keys.get("size", ""), source)) // MIB
            value = f"memory-backend-ram,id={keys.get('id', '')},size={size}M"
        elif first == "vfio-pci":
            kept = [f"{k}={v}" for k, v in pairs if k in ("bus", "addr", "multifunction")]
            value = ",".join(["virtio-serial-pci", *kept])
        words += [f"-{option}"] if text is None else [f"-{option}", value]
    return tuple(words)
