"""StandInArgv: a stand-in as QEMU's command line, where no libvirt answers."""

from homenode.targets.qemu_command import Tree, escaped, ranges_text
from homenode.units import MIB
from homenode.verify.boot.cpu_choice import CpuChoice
from homenode.verify.boot.stand_in import StandIn
from homenode.verify.boot.stand_in_xml import BootFiles

PROGRAM = "qemu-system-x86_64"


def stand_in_argv(
    stand_in: StandIn, name: str, files: BootFiles, command: str, *, kvm: bool
) -> tuple[str, ...]:
    """The command line; QEMU ends when the guest powers off, panics or reboots."""
    tree = Tree("pcie.0" if "q35" in stand_in.machine else "pci.0", "pci.", stand_in.shared_slots)
    return (
        PROGRAM,
        *("-name", name),
        *("-machine", stand_in.machine + ("" if stand_in.acpi else ",acpi=off")),
        *("-cpu", _cpu(stand_in.cpu)),
        *("-m", f"{stand_in.memory_bytes // MIB}M"),
        *("-smp", _smp(stand_in)),
        *_numa(stand_in),
        *(word for c in stand_in.controllers for word in ("-device", tree.controller(c))),
        *(
            word
            for address, _ in stand_in.devices
            for word in ("-device", f"virtio-serial-pci{tree.at(address)}")
        ),
        *boot_words(files, command, kvm=kvm),
    )


def boot_words(files: BootFiles, command: str, *, kvm: bool = False) -> tuple[str, ...]:
    """What starts the stand-in's own kernel and has it report."""
    # One thread for all vCPUs: with more vCPUs than PUs they only wait for each other.
    return (
        *("-accel", "kvm" if kvm else "tcg,thread=single"),
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
        vcpus = ranges_text("cpus", cell.vcpus)
        words += ["-numa", f"node,nodeid={i}{vcpus},memdev=m{i}"]
    for i, cell in enumerate(stand_in.cells):
        for j, distance in enumerate(cell.distances):
            words += ["-numa", f"dist,src={i},dst={j},val={distance}"]
    return words


def _serial(id: str, path: str) -> list[str]:
    return ["-chardev", f"file,id={id},path={escaped(path)}", "-serial", f"chardev:{id}"]
