"""StandInArgv: a stand-in as QEMU's command line, where no libvirt answers."""

from homenode.plan.guest import GuestAddress, GuestPciController
from homenode.units import MIB
from homenode.verify.boot.cpu_choice import CpuChoice
from homenode.verify.boot.stand_in import StandIn
from homenode.verify.boot.stand_in_xml import BootFiles

PROGRAM = "qemu-system-x86_64"
_DEVICE_OF_MODEL = {
    "pcie-expander-bus": "pxb-pcie",
    "pcie-root-port": "pcie-root-port",
    "pcie-switch-upstream-port": "x3130-upstream",
    "pcie-switch-downstream-port": "xio3130-downstream",
    "pcie-to-pci-bridge": "pcie-pci-bridge",
    "dmi-to-pci-bridge": "i82801b11-bridge",
    "pci-bridge": "pci-bridge",
}
"""QEMU's devices for libvirt's models. Source: virDomainControllerPCIModelName, libvirt 9.0."""

_WITH_CHASSIS = ("pcie-root-port", "pcie-switch-downstream-port")


def stand_in_argv(
    stand_in: StandIn, name: str, files: BootFiles, command: str, *, kvm: bool
) -> tuple[str, ...]:
    """The command line; QEMU ends when the guest powers off, panics or reboots."""
    # One thread for all vCPUs: with more vCPUs than PUs they only wait for each other.
    accelerator = "kvm" if kvm else "tcg,thread=single"
    return (
        PROGRAM,
        *("-name", name),
        *("-machine", stand_in.machine + ("" if stand_in.acpi else ",acpi=off")),
        *("-accel", accelerator),
        *("-cpu", _cpu(stand_in.cpu)),
        *("-m", f"{stand_in.memory_bytes // MIB}M"),
        *("-smp", _smp(stand_in)),
        *_numa(stand_in),
        *(word for c in stand_in.controllers for word in _controller(stand_in, c)),
        *(word for address, _ in stand_in.devices for word in _endpoint(stand_in, address)),
        *_serial("console", files.console),
        *_serial("report", files.report),
        *("-kernel", files.kernel),
        *("-initrd", files.initramfs),
        *("-append", command),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-monitor", "none"),
    )


def _cpu(cpu: CpuChoice) -> str:
    words = [cpu.model or {"host-passthrough": "host"}.get(cpu.mode, "max")]
    words += [f"{name}={'on' if is_on else 'off'}" for name, is_on in cpu.features]
    if cpu.l3 == "emulate":
        words.append("l3-cache=on")
    elif cpu.l3 == "passthrough":
        words += ["host-cache-info=on", "l3-cache=off"]
    return ",".join(words)


def _smp(stand_in: StandIn) -> str:
    sockets, dies, cores, threads = stand_in.topology or (stand_in.vcpus, 1, 1, 1)
    return f"{stand_in.vcpus},sockets={sockets},dies={dies},cores={cores},threads={threads}"


def _numa(stand_in: StandIn) -> list[str]:
    words = []
    for i, cell in enumerate(stand_in.cells):
        words += ["-object", f"memory-backend-ram,id=m{i},size={cell.memory_bytes}"]
        vcpus = "".join(
            f",cpus={first}" if first == last else f",cpus={first}-{last}"
            for first, last in cell.vcpus.ranges()
        )
        words += ["-numa", f"node,nodeid={i}{vcpus},memdev=m{i}"]
    for i, cell in enumerate(stand_in.cells):
        for j, distance in enumerate(cell.distances):
            words += ["-numa", f"dist,src={i},dst={j},val={distance}"]
    return words


def _controller(stand_in: StandIn, controller: GuestPciController) -> list[str]:
    device = f"{_DEVICE_OF_MODEL[controller.model]},id=pci.{controller.index}"
    if controller.bus_nr is not None:
        device += f",bus_nr={controller.bus_nr}"
        if controller.node is not None:
            device += f",numa_node={controller.node}"
    if controller.model in _WITH_CHASSIS:
        device += f",chassis={controller.index}"
    elif controller.model == "pci-bridge":
        device += f",chassis_nr={controller.index}"
    if controller.address is not None:
        device += _at(stand_in, controller.address)
    return ["-device", device]


def _endpoint(stand_in: StandIn, address: GuestAddress) -> list[str]:
    return ["-device", f"virtio-serial-pci{_at(stand_in, address)}"]


def _at(stand_in: StandIn, address: GuestAddress) -> str:
    root = "pcie.0" if "q35" in stand_in.machine else "pci.0"
    bus = f"pci.{address.bus}" if address.bus else root
    place = f",bus={bus},addr={address.device:#x}.{address.function:#x}"
    shared = (address.bus, address.device) in stand_in.shared_slots and not address.function
    return place + (",multifunction=on" if shared else "")


def _serial(id: str, path: str) -> list[str]:
    escaped = path.replace(",", ",,")
    return ["-chardev", f"file,id={id},path={escaped}", "-serial", f"chardev:{id}"]
