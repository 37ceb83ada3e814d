"""StandInXml: a test guest as a libvirt domain document."""

from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

from homenode.domain.fields import address_attributes, format_set
from homenode.units import MIB
from homenode.verify.boot.cpu_choice import CpuChoice
from homenode.verify.boot.stand_in import StandIn
from homenode.vm.model import GuestAddress


@dataclass(frozen=True, slots=True)
class BootFiles:
    """Where a boot's files lie: what goes in, and the two texts that come out."""

    kernel: str
    initramfs: str
    console: str
    report: str
    ovmf: str = ""
    ovmf_variables: str = ""


def stand_in_xml(stand_in: StandIn, name: str, files: BootFiles, command: str, *, kvm: bool) -> str:
    """The document of a transient domain. command: the kernel's command line."""
    lines = [
        f"<domain type={quoteattr('kvm' if kvm else 'qemu')}>",
        f"  <name>{_text(name)}</name>",
        f"  <memory unit='MiB'>{stand_in.vm.memory_bytes // MIB}</memory>",
        *([_SHARED] if stand_in.is_shared else []),
        *_vcpus(stand_in),
        "  <os>",
        f"    <type arch='x86_64' machine={quoteattr(stand_in.machine)}>hvm</type>",
        f"    <kernel>{_text(files.kernel)}</kernel>",
        f"    <initrd>{_text(files.initramfs)}</initrd>",
        f"    <cmdline>{_text(command)}</cmdline>",
        "  </os>",
        f"  <features>{_features(stand_in)}</features>",
        *_cpu(stand_in),
        "  <on_poweroff>destroy</on_poweroff>",
        "  <on_reboot>destroy</on_reboot>",
        "  <on_crash>destroy</on_crash>",
        "  <devices>",
        "    <controller type='usb' model='none'/>",
        *_controllers(stand_in),
        *_devices(stand_in),
        *_serial(0, files.console),
        *_serial(1, files.report),
        "    <memballoon model='none'/>",
        "  </devices>",
        "</domain>",
    ]
    return "\n".join(lines) + "\n"


_SHARED = "  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"


def _features(stand_in: StandIn) -> str:
    switches = (f"<{n} state='{'on' if is_on else 'off'}'/>" for n, is_on in stand_in.switches)
    return f"{'<acpi/>' if stand_in.vm.has_acpi else ''}<apic/>{''.join(switches)}"


def _vcpus(stand_in: StandIn) -> list[str]:
    """Those that are offline can be plugged later, and so those behind the first of them."""
    if not stand_in.vm.offline_vcpus:
        return [f"  <vcpu placement='static'>{stand_in.vm.vcpus}</vcpu>"]
    there = stand_in.vm.vcpus - len(stand_in.vm.offline_vcpus)
    lines = [
        f"  <vcpu placement='static' current='{there}'>{stand_in.vm.vcpus}</vcpu>",
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


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cpu(stand_in: StandIn) -> list[str]:
    lines = [_cpu_start(stand_in.cpu)]
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


def _cpu_start(cpu: CpuChoice) -> str:
    if cpu.mode == "custom":
        return "  <cpu mode='custom' match='exact' check='none'>"
    return f"  <cpu mode='{cpu.mode}' check='none'>"


def _controllers(stand_in: StandIn) -> list[str]:
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
            lines.append(f"      {_address(stand_in, controller.address)}")
        lines.append("    </controller>")
    return lines


def _devices(stand_in: StandIn) -> list[str]:
    lines = []
    for number, (address, _) in enumerate(stand_in.devices):
        lines += [
            f"    <controller type='virtio-serial' index='{number}'>",
            f"      {_address(stand_in, address)}",
            "    </controller>",
        ]
    return lines


def _address(stand_in: StandIn, address: GuestAddress) -> str:
    given = " ".join(f"{name}='{value}'" for name, value in address_attributes(address).items())
    shared = (address.bus, address.device) in stand_in.shared_slots and not address.function
    return f"<address type='pci' {given}{' multifunction=' + repr('on') if shared else ''}/>"


def _serial(port: int, path: str) -> list[str]:
    return [
        "    <serial type='file'>",
        f"      <source path={quoteattr(path)} append='on'/>",
        f"      <target port='{port}'/>",
        "    </serial>",
    ]
