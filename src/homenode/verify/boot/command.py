"""Command: a rendered QEMU command line as one that boots here, with stand-ins for its devices.

Everything that says where a part of the guest is stays as it was: -smp, -numa, bridges, addresses.
What needs the real host goes: KVM, host nodes, huge pages, vfio-pci, firmware.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.targets.qemu_command import (
    DEVICE_OF_MODEL,
    Options,
    device_tree,
    fields_of,
    joined,
    options_of,
    size_of,
    vm_of_command,
)
from homenode.units import MIB
from homenode.verify.boot.cpu_choice import SUBSTITUTE, CpuChoice
from homenode.verify.boot.stand_in import MOST_BYTES, StandIn, memory_ratio

_AS_GIVEN = ("smp", "numa")
_NO_PART_OF_THE_GUEST = frozenset(
    """
    name uuid pidfile daemonize id accel enable-kvm nodefaults no-user-config display vnc smbios cpu
""".split()
)
_NAMED = {"fw_cfg": "the firmware's window", "global": "the address space for BARs"}
"""What an option says of the guest that is left out; others are named as they are."""

_NOT_HERE = {
    "intel-iommu": "the vIOMMU",
    "acpi-generic-initiator": "generic initiators (QEMU 9.0)",
}
_BRIDGE_KEYS = frozenset(
    """
    id bus addr multifunction chassis chassis_nr slot port bus_nr numa_node hotplug bus-reserve
    io-reserve mem-reserve pref32-reserve pref64-reserve x-speed x-width
""".split()
)
"""Of a device that is booted as it is. Others may name files of the host: romfile."""


def stand_in_of_command(
    words: Sequence[str], source: str, machine: str
) -> tuple[StandIn, tuple[str, ...]]:
    """The test guest of a command line, and the options to boot it with.

    words: program first. machine: a type that this QEMU has. Raises ParseError.
    """
    options = options_of(words[1:], source)
    facts = vm_of_command(options, source)
    tree = device_tree(options, source)
    sizes = [cell.memory_bytes for cell in facts.cells if cell.vcpus]
    ratio = memory_ratio(sizes or [facts.memory_bytes])
    left = [f"mediated device {d.host}" for d in tree.devices if isinstance(d.host, str)]
    endpoints = sorted(
        (device.address, device.host)
        for device in tree.devices
        if device.address is not None and isinstance(device.host, Bdf)
    )
    vm = replace(
        facts,
        machine=machine,
        memory_bytes=0,
        cells=(),
        controllers=tree.controllers,
        hostdevs=(),
        mediated=(),
    )
    bare = StandIn(
        vm=vm,
        memory_ratio=ratio,
        cpu=CpuChoice("custom", SUBSTITUTE, (), None, f"model substituted: {SUBSTITUTE}"),
        devices=tuple(endpoints),
    )
    cells = tuple(
        bare.scaled_cell(cell)
        for cell in facts.cells
        if sizes and (cell.vcpus or cell.memory_bytes)
    )
    total = sum(c.memory_bytes for c in cells) or bare.scaled(facts.memory_bytes)
    booted = _booted(options, source, machine, bare, total, left)
    vm = replace(vm, memory_bytes=min(total, MOST_BYTES), cells=cells)
    return replace(bare, vm=vm, left_out=tuple(dict.fromkeys(left))), booted


def _booted(
    options: Options, source: str, machine: str, bare: StandIn, total: int, left: list[str]
) -> tuple[str, ...]:
    """Only what is known to say where a part of the guest is: any other option could have QEMU,
    which root may have started, open a file, connect to a place or run a program."""
    words: list[str] = ["-cpu", SUBSTITUTE]
    for option, text in options:
        value = text or ""
        first, pairs = fields_of(value)
        keys = dict(pairs)
        if option in _AS_GIVEN:
            pass
        elif option == "machine":
            value = joined(machine, [pair for pair in pairs if pair[0] == "memory-backend"])
        elif option == "m":
            value = f"{total // MIB}M"
        elif option == "object" and first.startswith("memory-backend-"):
            size = bare.scaled(size_of(keys.get("size", ""), source)) // MIB
            named = [("id", keys.get("id", "")), ("size", f"{size}M")]
            value = joined("memory-backend-ram", named)
        elif option == "device" and first == "vfio-pci":
            place = [pair for pair in pairs if pair[0] in ("bus", "addr", "multifunction")]
            value = joined("virtio-serial-pci", place)
        elif option == "device" and first in DEVICE_OF_MODEL.values():
            value = joined(first, [pair for pair in pairs if pair[0] in _BRIDGE_KEYS])
        else:
            if option not in _NO_PART_OF_THE_GUEST and first != "iothread":
                what = f"-{option} {first}" if option in ("device", "object") else f"-{option}"
                left.append(_NOT_HERE.get(first) or _NAMED.get(option, what))
            continue
        words += [f"-{option}", value]
    return tuple(words)
