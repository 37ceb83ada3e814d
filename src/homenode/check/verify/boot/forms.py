"""Forms: a test guest as a libvirt domain definition, or as QEMU's command line without libvirt;
and a rendered command line changed so that it boots here, with substitutes for its devices. Its
options for the guest's topology stay: -smp, -numa, bridges, addresses. Options that need the real
host are removed: KVM, host nodes, huge pages, vfio-pci, firmware.
"""

from collections.abc import Sequence
from itertools import chain
from xml.sax.saxutils import escape, quoteattr

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.verify.boot.stand_in import (
    MAX_BYTES,
    SUBSTITUTE_CPU_MODEL,
    CpuChoice,
    MinimalGuest,
    compute_memory_ratio,
)
from homenode.units import MIB
from homenode.vm.domain.document import address_attributes, format_set
from homenode.vm.model import QEMU_DEVICE, GuestAddress
from homenode.vm.targets.qemu_command import (
    CACHE_WORDS,
    Options,
    QemuPciTree,
    build_command_vm,
    build_device_tree,
    escape_commas,
    format_ranges,
    join_option,
    list_distance_words,
    parse_options,
    parse_size,
    split_fields,
)


class BootFiles(Struct, frozen=True):
    """Paths of a boot's files: the inputs and the two output texts."""

    kernel: str
    initramfs: str
    console: str
    report: str
    ovmf: str = ""
    ovmf_variables: str = ""


def stand_in_xml(
    stand_in: MinimalGuest, name: str, files: BootFiles, command: str, *, kvm: bool
) -> str:
    """Return the document of a transient domain. command: the kernel's command line."""
    switches = (f"<{n} state='{_format_switch(is_on)}'/>" for n, is_on in stand_in.switches)
    acpi = "<acpi/>" if stand_in.vm.has_acpi else ""
    lines = [
        f"<domain type={quoteattr('kvm' if kvm else 'qemu')}>",
        f"  <name>{escape(name)}</name>",
        f"  <memory unit='MiB'>{stand_in.vm.memory_bytes // MIB}</memory>",
        *([_SHARED] if stand_in.is_shared else []),
        *_format_vcpus(stand_in),
        "  <os>",
        f"    <type arch='x86_64' machine={quoteattr(stand_in.machine)}>hvm</type>",
        f"    <kernel>{escape(files.kernel)}</kernel>",
        f"    <initrd>{escape(files.initramfs)}</initrd>",
        f"    <cmdline>{escape(command)}</cmdline>",
        "  </os>",
        f"  <features>{acpi}<apic/>{''.join(switches)}</features>",
        *_format_cpu_element(stand_in),
        "  <on_poweroff>destroy</on_poweroff>",
        "  <on_reboot>destroy</on_reboot>",
        "  <on_crash>destroy</on_crash>",
        "  <devices>",
        "    <controller type='usb' model='none'/>",
        *_format_controllers(stand_in),
        *_format_devices(stand_in),
        *_format_serial(0, files.console),
        *_format_serial(1, files.report),
        "    <memballoon model='none'/>",
        "  </devices>",
        "</domain>",
    ]
    return "\n".join(lines) + "\n"


_SHARED = "  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"


def _format_vcpus(stand_in: MinimalGuest) -> list[str]:
    """<vcpu>: offline vCPUs, and all vCPUs after the first offline one, can be plugged later."""
    if not stand_in.vm.offline_vcpus:
        return [f"  <vcpu placement='static'>{stand_in.vm.vcpus}</vcpu>"]
    online = stand_in.vm.vcpus - len(stand_in.vm.offline_vcpus)
    lines = [
        f"  <vcpu placement='static' current='{online}'>{stand_in.vm.vcpus}</vcpu>",
        "  <vcpus>",
    ]
    order = 0
    for vcpu in range(stand_in.vm.vcpus):
        is_on = vcpu not in stand_in.vm.offline_vcpus
        order += is_on
        state = f"enabled='{'yes' if is_on else 'no'}'"
        state += f" hotpluggable='{'no' if vcpu < stand_in.first_vcpus else 'yes'}'"
        state += f" order='{order}'" if is_on else ""
        lines.append(f"    <vcpu id='{vcpu}' {state}/>")
    return [*lines, "  </vcpus>"]


def _format_cpu_element(stand_in: MinimalGuest) -> list[str]:
    match = " match='exact'" if stand_in.cpu.mode == "custom" else ""
    lines = [f"  <cpu mode='{stand_in.cpu.mode}'{match} check='none'>"]
    if stand_in.cpu.model is not None:
        lines.append(f"    <model fallback='allow'>{stand_in.cpu.model}</model>")
    if stand_in.vm.cpu_topology is not None:
        sockets, dies, cores, threads = stand_in.vm.cpu_topology
        lines.append(
            f"    <topology sockets='{sockets}' dies='{dies}' cores='{cores}' threads='{threads}'/>"
        )
    if stand_in.cpu.l3 is not None:
        level = " level='3'" if stand_in.cpu.l3 == "emulate" else ""
        lines.append(f"    <cache{level} mode='{stand_in.cpu.l3}'/>")
    for name, is_on in stand_in.cpu.features:
        policy = "require" if is_on else "disable"
        lines.append(f"    <feature policy='{policy}' name={quoteattr(name)}/>")
    if stand_in.vm.cells:
        lines.append("    <numa>")
        for i, cell in enumerate(stand_in.vm.cells):
            vcpus = f" cpus='{format_set(cell.vcpus)}'" if cell.vcpus else ""
            lines.append(
                f"      <cell id='{i}'{vcpus} memory='{cell.memory_bytes // MIB}' unit='MiB'>"
            )
            if cell.distances:
                lines.append("        <distances>")
                lines += [
                    f"          <sibling id='{other}' value='{distance}'/>"
                    for other, distance in enumerate(cell.distances)
                ]
                lines.append("        </distances>")
            lines.append("      </cell>")
        lines.append("    </numa>")
    return [*lines, "  </cpu>"]


def _format_controllers(stand_in: MinimalGuest) -> list[str]:
    root = "pcie-root" if "q35" in stand_in.machine else "pci-root"
    lines = [f"    <controller type='pci' index='0' model='{root}'/>"]
    for controller in stand_in.vm.controllers:
        lines.append(
            f"    <controller type='pci' index='{controller.index}' model='{controller.model}'>"
        )
        if controller.bus_nr is not None:
            node = f"<node>{controller.cell}</node>" if controller.cell is not None else ""
            lines.append(f"      <target busNr='{controller.bus_nr}'>{node}</target>")
        if controller.address is not None:
            lines.append(f"      {_format_address(stand_in, controller.address)}")
        lines.append("    </controller>")
    return lines


def _format_devices(stand_in: MinimalGuest) -> list[str]:
    lines = []
    for number, (address, _) in enumerate(stand_in.devices):
        lines += [
            f"    <controller type='virtio-serial' index='{number}'>",
            f"      {_format_address(stand_in, address)}",
            "    </controller>",
        ]
    return lines


def _format_address(stand_in: MinimalGuest, address: GuestAddress) -> str:
    attributes = " ".join(
        f"{name}='{value}'" for name, value in address_attributes(address).items()
    )
    shared = (address.bus, address.device) in stand_in.shared_slots and not address.function
    return f"<address type='pci' {attributes}{' multifunction=' + repr('on') if shared else ''}/>"


def _format_serial(port: int, path: str) -> list[str]:
    return [
        "    <serial type='file'>",
        f"      <source path={quoteattr(path)} append='on'/>",
        f"      <target port='{port}'/>",
        "    </serial>",
    ]


PROGRAM = "qemu-system-x86_64"


def stand_in_argv(
    stand_in: MinimalGuest, name: str, files: BootFiles, command: str, *, kvm: bool
) -> tuple[str, ...]:
    """Return the command line; QEMU ends when the guest powers off, panics or reboots."""
    iommu = stand_in.iommu
    tree = QemuPciTree(
        "pcie.0" if "q35" in stand_in.machine else "pci.0", "pci.", stand_in.shared_slots
    )
    return (
        PROGRAM,
        *("-name", name),
        *("-machine", _format_machine(stand_in, kvm=kvm)),
        *("-cpu", _format_cpu(stand_in)),
        *("-m", _format_memory(stand_in)),
        *("-smp", _format_smp(stand_in)),
        *_format_numa(stand_in),
        *_list_later_vcpus(stand_in),
        *_format_firmware(stand_in, files),
        *([] if iommu is None else ["-device", ",".join(("intel-iommu", *iommu))]),
        *(word for c in stand_in.vm.controllers for word in ("-device", tree.format_controller(c))),
        *(
            word
            for address, bdf in stand_in.devices
            for word in (
                "-device",
                f"{_format_endpoint(stand_in, bdf)}{tree.format_place(address)}",
            )
        ),
        *boot_words(files, command, kvm=kvm),
    )


def boot_words(files: BootFiles, command: str, *, kvm: bool = False) -> tuple[str, ...]:
    """Return the options that start the test guest's own kernel and its report."""
    # One thread for all vCPUs: with more vCPUs than CPUs they only wait for each other.
    return (
        *("-accel", "kvm" if kvm else "tcg,thread=single"),
        *_list_serial_words("console", files.console),
        *_list_serial_words("report", files.report),
        *("-kernel", files.kernel),
        *("-initrd", files.initramfs),
        *("-append", command),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-monitor", "none"),
    )


def _format_machine(stand_in: MinimalGuest, *, kvm: bool) -> str:
    words = [stand_in.machine]
    words += [] if stand_in.vm.has_acpi else ["acpi=off"]
    words += [
        f"{n}={_format_switch(is_on)}" for n, is_on in stand_in.switches if n in ("vmport", "smm")
    ]
    if stand_in.iommu is not None and kvm:
        words.append("kernel-irqchip=split")
    if stand_in.is_shared and not stand_in.vm.cells:
        words.append("memory-backend=m0")
    return ",".join(words)


def _format_switch(is_on: bool) -> str:
    return "on" if is_on else "off"


def _format_memory(stand_in: MinimalGuest) -> str:
    """Return the memory options; maxmem moves the PCI window to its place in the real guest."""
    size = f"{stand_in.vm.memory_bytes // MIB}M"
    if stand_in.space is None or stand_in.space.memory_bytes <= stand_in.vm.memory_bytes:
        return size
    return f"{size},slots=1,maxmem={stand_in.space.memory_bytes // MIB}M"


def _format_firmware(stand_in: MinimalGuest, files: BootFiles) -> list[str]:
    words = []
    if stand_in.uefi:
        for unit, path in enumerate((files.ovmf, files.ovmf_variables)):
            mode = ",readonly=on" if unit == 0 else ""
            words += [
                "-drive",
                f"if=pflash,format=raw,unit={unit}{mode},file={escape_commas(path)}",
            ]
    space = stand_in.space
    if space is not None and space.hole_bytes is not None and "q35" in stand_in.machine:
        words += ["-global", f"q35-pcihost.pci-hole64-size={space.hole_bytes}"]
    if space is not None and space.window_mib is not None:
        words += ["-fw_cfg", f"name=opt/ovmf/X-PciMmio64Mb,string={space.window_mib}"]
    return words


def _list_later_vcpus(stand_in: MinimalGuest) -> list[str]:
    """Return the vCPUs from the first offline one on, by their place in the topology."""
    if not stand_in.vm.offline_vcpus:
        return []
    _, dies, cores, threads = stand_in.vm.cpu_topology or (stand_in.vm.vcpus, 1, 1, 1)
    name = stand_in.cpu.model or {"host-passthrough": "host"}.get(stand_in.cpu.mode, "max")
    words = []
    for vcpu in range(stand_in.first_vcpus, stand_in.vm.vcpus):
        if vcpu in stand_in.vm.offline_vcpus:
            continue
        core, thread = divmod(vcpu, threads)
        die, core = divmod(core, cores)
        socket, die = divmod(die, dies)
        place = f"socket-id={socket},die-id={die},core-id={core},thread-id={thread}"
        words += ["-device", f"{name}-x86_64-cpu,{place}"]
    return words


def _format_endpoint(stand_in: MinimalGuest, bdf: Bdf | None) -> str:
    bars = {} if stand_in.space is None else dict(stand_in.space.bars)
    return f"pci-testdev,membar={bars[bdf]}" if bdf in bars else "virtio-serial-pci"


def _format_cpu(stand_in: MinimalGuest) -> str:
    cpu = stand_in.cpu
    words = [cpu.model or {"host-passthrough": "host"}.get(cpu.mode, "max")]
    words += [f"{name}={_format_switch(is_on)}" for name, is_on in cpu.features]
    words += [f"pmu={_format_switch(is_on)}" for name, is_on in stand_in.switches if name == "pmu"]
    words += CACHE_WORDS.get(cpu.l3, ())
    return ",".join(words)


def _format_smp(stand_in: MinimalGuest) -> str:
    sockets, dies, cores, threads = stand_in.vm.cpu_topology or (stand_in.vm.vcpus, 1, 1, 1)
    maximum = f",maxcpus={stand_in.vm.vcpus}" if stand_in.vm.offline_vcpus else ""
    shape = f"sockets={sockets},dies={dies},cores={cores},threads={threads}"
    return f"{stand_in.first_vcpus}{maximum},{shape}"


def _format_numa(stand_in: MinimalGuest) -> list[str]:
    words = []
    backend = "memory-backend-memfd,share=on" if stand_in.is_shared else "memory-backend-ram"
    if stand_in.is_shared and not stand_in.vm.cells:
        words += ["-object", f"{backend},id=m0,size={stand_in.vm.memory_bytes}"]
    for cell in stand_in.vm.cells:
        words += ["-object", f"{backend},id=m{cell.id},size={cell.memory_bytes}"]
        vcpus = format_ranges("cpus", cell.vcpus)
        words += ["-numa", f"node,nodeid={cell.id}{vcpus},memdev=m{cell.id}"]
    return [*words, *chain.from_iterable(list_distance_words(stand_in.vm.cells))]


def _list_serial_words(id: str, path: str) -> list[str]:
    return ["-chardev", f"file,id={id},path={escape_commas(path)}", "-serial", f"chardev:{id}"]


_AS_GIVEN = ("smp", "numa")
_NO_PART_OF_THE_GUEST = frozenset(
    """
    name uuid pidfile daemonize id accel enable-kvm nodefaults no-user-config display vnc smbios cpu
""".split()
)
_NAMED = {"fw_cfg": "the firmware's window", "global": "the address space for BARs"}
"""Names of omitted QEMU options in findings; other options are named by themselves."""

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
"""Keys of a device that is booted unchanged. Others may name files of the host: romfile."""


def stand_in_of_command(
    words: Sequence[str], source: str, machine: str
) -> tuple[MinimalGuest, tuple[str, ...]]:
    """Return the test guest of a command line, and the options to boot it with. words: program
    first. machine: a type that this QEMU has. Raises ParseError."""
    options = parse_options(words[1:], source)
    facts = build_command_vm(options, source)
    controllers, devices = build_device_tree(options, source)
    sizes = [cell.memory_bytes for cell in facts.cells if cell.vcpus]
    ratio = compute_memory_ratio(sizes or [facts.memory_bytes])
    omissions = [f"mediated device {d.host}" for d in devices if isinstance(d.host, str)]
    endpoints = sorted(
        (device.address, device.host)
        for device in devices
        if device.address is not None and isinstance(device.host, Bdf)
    )
    vm = replace(
        facts,
        machine=machine,
        memory_bytes=0,
        cells=(),
        controllers=controllers,
        hostdevs=(),
        mediated=(),
    )
    bare = MinimalGuest(
        vm=vm,
        memory_ratio=ratio,
        cpu=CpuChoice(
            "custom", SUBSTITUTE_CPU_MODEL, (), None, f"its CPU model is {SUBSTITUTE_CPU_MODEL}"
        ),
        devices=tuple(endpoints),
    )
    cells = tuple(
        bare.scaled_cell(cell)
        for cell in facts.cells
        if sizes and (cell.vcpus or cell.memory_bytes)
    )
    total = sum(c.memory_bytes for c in cells) or bare.scale(facts.memory_bytes)
    boot_options = _boot_options(options, source, machine, bare, total, omissions)
    vm = replace(vm, memory_bytes=min(total, MAX_BYTES), cells=cells)
    return replace(bare, vm=vm, left_out=tuple(dict.fromkeys(omissions))), boot_options


def _boot_options(
    options: Options, source: str, machine: str, bare: MinimalGuest, total: int, omitted: list[str]
) -> tuple[str, ...]:
    """Keep only options known to place parts: others may open files or start programs."""
    words: list[str] = ["-cpu", SUBSTITUTE_CPU_MODEL]
    for option, text in options:
        value = text or ""
        first, pairs = split_fields(value)
        keys = dict(pairs)
        if option in _AS_GIVEN:
            pass
        elif option == "machine":
            value = join_option(machine, [pair for pair in pairs if pair[0] == "memory-backend"])
        elif option == "m":
            value = f"{total // MIB}M"
        elif option == "object" and first.startswith("memory-backend-"):
            size = bare.scale(parse_size(keys.get("size", ""), source)) // MIB
            properties = [("id", keys.get("id", "")), ("size", f"{size}M")]
            value = join_option("memory-backend-ram", properties)
        elif option == "device" and first == "vfio-pci":
            place = [pair for pair in pairs if pair[0] in ("bus", "addr", "multifunction")]
            value = join_option("virtio-serial-pci", place)
        elif option == "device" and first in QEMU_DEVICE.values():
            value = join_option(first, [pair for pair in pairs if pair[0] in _BRIDGE_KEYS])
        else:
            if option not in _NO_PART_OF_THE_GUEST and first != "iothread":
                name = f"-{option} {first}" if option in ("device", "object") else f"-{option}"
                omitted.append(_NOT_HERE.get(first) or _NAMED.get(option, name))
            continue
        words += [f"-{option}", value]
    return tuple(words)
