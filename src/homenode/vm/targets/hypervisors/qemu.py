"""QEMU: the plan as a script that starts QEMU with every option, and pins its threads.

Each row writes options under a name of its own, in the order of the rows.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import InputError, ParseError
from homenode.machine.pci import normalize_uuid
from homenode.package_data import read_package_text
from homenode.text import plural, printable
from homenode.vm.layout import GuestCells
from homenode.vm.model import GuestAddress, GuestPciController, Vm
from homenode.vm.plan import Plan
from homenode.vm.targets.codec import Codec, FormatRow, TargetEdit
from homenode.vm.targets.qemu_command import (
    Options,
    QemuPciTree,
    escape_commas,
    format_cpu,
    format_size,
    format_smp,
    has_backend,
    list_device_words,
    list_numa_words,
    list_shared_slots,
    list_uuid_words,
    parse_options,
    read_command,
    split_fields,
)
from homenode.vm.targets.target import (
    PIN,
    PREPARE,
    Feature,
    find_array,
    indirect_support,
    make_native,
    parse_pins,
    plan_values,
    quote_word,
)

_HOLE = "q35-pcihost.pci-hole64-size="
_FIRMWARE_WINDOW = "name=opt/ovmf/X-PciMmio64Mb,string="

_HEAD = """#!/usr/bin/env bash
# homenode: VM {name} on host {host}, layout {layout}, for QEMU.
#
#   {file} prepare        reserve huge pages, give the devices to vfio-pci (root)
#   {file} start [WORD]...  start QEMU and pin its threads; more words go to QEMU
#   {file} pin PID        pin the threads of a QEMU that runs
#   {file} command        print the command line, a word on each line
#
# Disks, network, display and firmware of the VM are not in this file: they are words of start.
# Name the bus of each PCI device: of several root buses QEMU takes the newest, and an expander bus
# takes bridges alone. For example:
#   {file} start
#     {words}
set -euo pipefail

"""

_TAIL = read_package_text("vm", "targets", "scripts", "qemu_start.sh")


class QemuScript(NamedTuple):
    """A script that this module wrote: its command, program first, and the options of that."""

    text: str
    words: tuple[str, ...]
    options: Options
    source: str

    @property
    def is_arm(self) -> bool:
        return self.words[0].endswith("aarch64")

    def value(self, option: str) -> str:
        """Return the value of the last option of that name, or ""."""
        return dict(self.options).get(option) or ""


def parse(content: bytes, source: str) -> QemuScript:
    """Parse a script of this module. Raises ParseError for other files."""
    text = content.decode("utf-8", "replace")
    words = find_array(text, "qemu")
    if not words:
        raise ParseError(source, "a script of homenode with a qemu=( ) array")
    return QemuScript(text, words, parse_options(words[1:], source), source)


def _create_script(guest: Vm, plan: Plan) -> str:
    return f"\nqemu=(\n  qemu-system-{guest.architecture}\n)\n"


def _reject_unsupported(edit: TargetEdit[QemuScript]) -> None:
    if edit.guest.architecture not in ("x86_64", "aarch64"):
        raise InputError(
            f"qemu: expected a guest of x86_64 or aarch64, found {edit.guest.architecture}"
        )


Pairs = list[tuple[str, str | None]]
"""Options with their dash, and their values."""


def _render_script(edit: TargetEdit[QemuScript], options: Mapping[str, Pairs]) -> str:
    """Return the complete script: same plan, same bytes."""
    plan, guest = edit.plan, edit.guest
    locked_kib = 0 if plan.aperture is None else plan.aperture.memlock_bytes // 1024
    pairs = (pair for pairs_of_row in options.values() for pair in pairs_of_row)
    command = (
        f"qemu-system-{guest.architecture}",
        *(part for pair in pairs for part in pair if part is not None),
    )
    head = _HEAD.format(
        name=printable(guest.name),
        host=printable(plan.host_name or "unknown"),
        layout=plan.layout.name,
        file="SCRIPT",
        words="\n#     ".join(_list_user_arguments(plan, guest)),
    )
    values = f"{plan_values(plan)}locked_kib={locked_kib}\n{_format_qemu_array(command)}"
    return f"{head}{values}{PREPARE}{PIN}{_TAIL}"


def _format_qemu_array(words: tuple[str, ...]) -> str:
    """Return the command as an array, an option with its value on each line."""
    lines = [quote_word(words[0])]
    remaining = list(words[1:])
    while remaining:
        option = remaining.pop(0)
        has_value = remaining and not remaining[0].startswith("-")
        lines.append(f"{option} {quote_word(remaining.pop(0))}" if has_value else option)
    return "qemu=(\n" + "".join(f"  {line}\n" for line in lines) + ")\n"


def _list_user_arguments(plan: Plan, guest: Vm) -> tuple[str, ...]:
    """Return a disk, a NIC and a display as this command takes them, an option each."""
    bus = f"bus={_find_root_bus(guest)}"
    thread = ",iothread=iothread1" if plan.iothread_pus else ""
    display = "virtio-gpu-pci" if guest.architecture == "aarch64" else "VGA"
    return (
        "-drive file=disk.qcow2,if=none,id=disk0",
        f"-device virtio-blk-pci,drive=disk0{thread},{bus}",
        "-netdev user,id=net0",
        f"-device virtio-net-pci,netdev=net0,{bus}",
        f"-device {display},{bus}",
        "-vnc 127.0.0.1:0",
    )


def _find_root_bus(guest: Vm) -> str:
    """Return the bus of the chipset."""
    return "pcie.0" if guest.is_q35 or guest.is_virt else "pci.0"


def _read_head(script: QemuScript) -> Mapping[str, Any]:
    machine = script.value("machine").partition(",")[0]
    is_max = script.value("cpu").startswith("max")
    return {
        "name": dict(split_fields(script.value("name"))[1]).get("guest", "vm"),
        "uuid": normalize_uuid(script.value("uuid")),
        "domain_type": "qemu" if script.value("accel") == "tcg" else "kvm",
        "architecture": "aarch64" if script.is_arm else "x86_64",
        "machine": machine or ("virt" if script.is_arm else "pc"),
        "cpu_mode": "maximum" if is_max else "host-passthrough",
    }


def _write_head(edit: TargetEdit[QemuScript]) -> Mapping[str, Pairs]:
    guest, is_kvm = edit.guest, edit.guest.domain_type == "kvm"
    name = f"guest={escape_commas(guest.name)},debug-threads=on"
    accelerator = ("-accel", "kvm" if is_kvm else "tcg")
    return {"head": [("-name", name), ("-machine", _format_machine(edit.plan, guest)), accelerator]}


def _write_cpu(edit: TargetEdit[QemuScript]) -> Mapping[str, Pairs]:
    model = "host" if edit.guest.domain_type == "kvm" else "max"
    return {"cpu": [("-cpu", format_cpu(edit.plan, model)), ("-smp", format_smp(edit.plan))]}


def _read_command(script: QemuScript) -> Mapping[str, Any]:
    fields = read_command(script.options, script.source)
    model = "smmuv3" if script.is_arm else "intel"
    return {**fields, "iommu_model": model if fields["has_iommu"] else None}


def _write_memory(edit: TargetEdit[QemuScript]) -> Mapping[str, Pairs]:
    size = f"size={format_size(edit.plan.vm.memory_bytes)}"
    return {"memory": [("-m", size), *list_numa_words(edit.plan)]}


def _write_iommu(edit: TargetEdit[QemuScript]) -> Mapping[str, Pairs]:
    has_own = edit.plan.vm.has_iommu and edit.guest.architecture == "x86_64"
    device = "intel-iommu,intremap=on,eim=on,caching-mode=on"
    return {"iommu": [("-device", device)] if has_own else []}


def _write_devices(edit: TargetEdit[QemuScript]) -> Mapping[str, Pairs]:
    plan, guest = edit.plan, edit.guest
    controllers, places = _build_tree(plan, guest)
    used = (*places.values(), *(c.address for c in controllers if c.address is not None))
    tree = QemuPciTree(root=_find_root_bus(guest), shared_slots=list_shared_slots(used))
    bridges = (("-device", tree.format_controller(controller)) for controller in controllers)
    devices = list_device_words(plan, tree, places, device_id="hostdev", initiator_id="gi")
    return {"devices": [*bridges, *devices, *list_uuid_words(plan, guest)]}


def _read_pins(script: QemuScript) -> Mapping[str, Any]:
    vcpus, emulator, iothreads = parse_pins(script.text)
    return {
        "vcpu_pins": vcpus,
        "emulator_pus": emulator,
        "iothread_ids": tuple(range(1, len(iothreads) + 1)),
        "iothread_pins": tuple((n, pus) for n, pus in enumerate(iothreads, 1) if pus),
    }


def _write_iothreads(edit: TargetEdit[QemuScript]) -> Mapping[str, Pairs]:
    """The pins themselves are values of the script."""
    numbers = range(1, len(edit.plan.iothread_pus) + 1)
    return {"iothreads": [("-object", f"iothread,id=iothread{number}") for number in numbers]}


def _write_window(edit: TargetEdit[QemuScript]) -> Mapping[str, Pairs]:
    """Return the plan's window, or the file's."""
    window = {
        option: value
        for option, value in edit.file.options
        if (option == "global" and (value or "").startswith(_HOLE))
        or (option == "fw_cfg" and (value or "").startswith(_FIRMWARE_WINDOW))
    }
    aperture = edit.plan.aperture
    if aperture is not None and aperture.pcihole64_bytes is not None and edit.guest.is_q35:
        window["global"] = _HOLE + format_size(aperture.pcihole64_bytes)
    if aperture is not None and aperture.firmware_mmio64_mib is not None:
        window["fw_cfg"] = f"{_FIRMWARE_WINDOW}{aperture.firmware_mmio64_mib}"
    words: Pairs = [(f"-{o}", window[o]) for o in ("global", "fw_cfg") if o in window]
    alone: Pairs = [("-nodefaults", None), ("-no-user-config", None), ("-display", "none")]
    return {"window": [*words, *alone]}


def _format_machine(plan: Plan, guest: Vm) -> str:
    words = [guest.machine or "q35"]
    if guest.architecture == "aarch64":
        words.append("gic-version=max")
        if plan.vm.has_iommu:
            words.append("iommu=smmuv3")
    if plan.vm.has_iommu and guest.architecture == "x86_64":
        words.append("kernel-irqchip=split")
    if plan.layout.cells is GuestCells.SINGLE and has_backend(plan):
        words.append("memory-backend=ram-node0")
    return ",".join(words)


def _build_tree(
    plan: Plan, guest: Vm
) -> tuple[tuple[GuestPciController, ...], dict[Bdf, GuestAddress]]:
    """Return the bridges, parents first, and the address of each device; a device without a port
    gets a root port on pcie.0."""
    # Cells of the document are no more, but for those that the plan mirrors.
    # Long because places of the plan, the document and new ports share one set of slots.
    cells = len(plan.cells) if plan.is_mirrored else 0
    controller_of = {
        c.index: c if c.cell is None or c.cell < cells else replace(c, cell=None)
        for c in guest.controllers
        if c.model != "pcie-root"
    }
    controller_of |= {c.index: c for c in plan.vm.controllers}
    used: dict[int, GuestPciController] = {}

    def use(index: int, path: tuple[int, ...] = ()) -> bool:
        if not index or index in used:
            return True
        controller = controller_of.get(index)
        if controller is None or controller.address is None or index in path:  # a loop
            return False
        if not use(controller.address.bus, (*path, index)):
            return False
        used[index] = controller
        return True

    for controller in plan.vm.controllers:
        use(controller.index)
    places: dict[Bdf, GuestAddress] = {}
    for device in plan.vm.hostdevs:
        if device.address is not None and use(device.address.bus):
            places[device.bdf] = device.address
    slots = {c.address.device for c in used.values() if c.address and not c.address.bus}
    slots |= {a.device for a in places.values() if not a.bus}
    # The last ones: QEMU gives the first to its -vga and -nic before it makes any -device.
    unplaced_devices = [device for device in plan.vm.hostdevs if device.bdf not in places]
    shares = guest.is_q35 or guest.is_virt
    slot_count = len({device.group if shares else device.bdf for device in unplaced_devices})
    slots_left = [slot for slot in range(2, 0x1A) if slot not in slots]
    if slot_count > len(slots_left):
        raise InputError(
            f"qemu: expected at most {plural(len(slots_left), 'device')} on the root bus, "
            f"found {slot_count}",
            hint="choose a layout with -pci" if shares else "choose fewer devices, or machine q35",
        )
    free = iter(slots_left[-slot_count:])
    ports: dict[object, GuestAddress] = {}
    for device in unplaced_devices:
        if device.bdf in places:
            continue
        if not shares:
            places[device.bdf] = GuestAddress(0, 0, next(free), 0)
            continue
        # Functions of one card stay in one slot: the group's first has the port.
        if device.group not in ports:
            index = max(used, default=0) + 1
            controller_of[index] = used[index] = GuestPciController(
                index, "pcie-root-port", GuestAddress(0, 0, next(free), 0)
            )
            ports[device.group] = GuestAddress(0, index, 0, 0)
            places[device.bdf] = ports[device.group]
        else:
            base = ports[device.group]
            places[device.bdf] = GuestAddress(0, base.bus, 0, device.bdf.function)
    return tuple(used.values()), places


def parse_script(content: bytes, source: str) -> tuple[str, ...]:
    """Parse the command line in a script from `render`. Raises ParseError."""
    return parse(content, source).words


def is_script(content: bytes) -> bool:
    """Return whether this is a script of `render`."""
    return content.startswith(b"#!") and b"\nqemu=(" in content[:1_000_000]


ROWS = (
    FormatRow(read=_read_head, write=_write_head),
    FormatRow(
        says={
            Feature.TOPOLOGY: make_native("-smp"),
            Feature.THREADS: make_native("-smp threads="),
            Feature.DIES: make_native("-smp dies="),
            Feature.CACHE: make_native("-cpu l3-cache=, host-cache-info="),
        },
        read=_read_command,
        write=_write_cpu,
    ),
    FormatRow(
        says={
            Feature.CELLS: make_native("-numa node"),
            Feature.DISTANCES: make_native("-numa dist"),
            Feature.MEMORY_NODES: make_native("-object memory-backend-*,host-nodes="),
            Feature.MEMORY_MODE: make_native("-object memory-backend-*,policy="),
            Feature.HUGE_PAGES: make_native("-object memory-backend-memfd,hugetlb=on"),
        },
        read=_read_command,
        write=_write_memory,
    ),
    FormatRow(
        says={Feature.IOMMU: make_native("-device intel-iommu; of aarch64 -machine iommu=smmuv3")},
        read=_read_command,
        write=_write_iommu,
    ),
    FormatRow(
        says={
            Feature.DEVICES: indirect_support(
                "-device vfio-pci; the script's `prepare` binds them to vfio-pci",
                "nothing keeps another VM from taking the same device",
            ),
            Feature.DEVICE_CELLS: make_native("-device pxb-pcie,numa_node="),
            Feature.DEVICE_TREE: make_native("-device x3130-upstream, xio3130-downstream"),
            Feature.INITIATORS: indirect_support(
                "-object acpi-generic-initiator (QEMU 9.0)",
                "no accelerated SMMUv3 is written, so that the GPU's driver has no address "
                "translation",
            ),
            Feature.VGPUS: indirect_support(
                "-device vfio-pci,sysfsdev= of mediated devices, host= of functions; -uuid, by "
                "which NVIDIA's vGPU manager identifies the VM",
                "nothing keeps another VM from taking the same vGPU",
            ),
        },
        read=_read_command,
        write=_write_devices,
    ),
    FormatRow(
        says={
            Feature.VCPU_PINS: indirect_support(
                "QEMU has no option: the script pins its threads by taskset after the start",
                "vCPUs float for the first moments, and later threads are not pinned",
            ),
            Feature.EMULATOR_PINS: make_native("taskset around QEMU"),
        },
        read=_read_pins,
    ),
    FormatRow(  # of a test guest, which has as many IOThreads as its plan
        says={
            Feature.IOTHREAD_PINS: indirect_support(
                "taskset after the start, of threads named iothreadN",
                "disks must be assigned to an IOThread manually",
            )
        },
        write=_write_iothreads,
        is_compared=False,
    ),
    FormatRow(
        says={
            Feature.WINDOW: make_native(
                "-global q35-pcihost.pci-hole64-size, -cpu phys-bits, -fw_cfg"
            )
        },
        read=_read_command,
        write=_write_window,
    ),
)

CODEC = Codec(
    name="qemu",
    rows=ROWS,
    parse=parse,
    new=_create_script,
    edited=_render_script,
    refuse=_reject_unsupported,
)
TARGET = CODEC.build_target(
    title="QEMU",
    source="qemu-system(1) of QEMU 7.2 and 10.1; options tried by starting QEMU 7.2",
    recognises=is_script,
    users_own=r"(.* )?-(drive|blockdev|netdev|nic|display|vga|vnc|spice|serial|monitor|qmp|chardev"
    r"|rtc|boot|name|pidfile|daemonize|device(virtio|usb|qemu-xhci|VGA|nvme|scsi|e1000|ide))",
    one_socket=True,
    runs_qemu=True,
    keeps_addresses=True,
    says_emulator=True,
    words_of=parse_script,
)
