"""StandInArgv: a test guest as QEMU's command line, where no libvirt answers."""

from homenode.bdf import Bdf
from homenode.targets.qemu_command import Tree, escaped, ranges_text
from homenode.units import MIB
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
        *("-machine", _machine(stand_in, kvm=kvm)),
        *("-cpu", _cpu(stand_in)),
        *("-m", _memory(stand_in)),
        *("-smp", _smp(stand_in)),
        *_numa(stand_in),
        *_later_vcpus(stand_in),
        *_firmware(stand_in, files),
        *_iommu(stand_in),
        *(word for c in stand_in.vm.controllers for word in ("-device", tree.controller(c))),
        *(
            word
            for address, bdf in stand_in.devices
            for word in ("-device", f"{_endpoint(stand_in, bdf)}{tree.at(address)}")
        ),
        *boot_words(files, command, kvm=kvm),
    )


def boot_words(files: BootFiles, command: str, *, kvm: bool = False) -> tuple[str, ...]:
    """What starts the test guest's own kernel and has it report."""
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


def _machine(stand_in: StandIn, *, kvm: bool) -> str:
    words = [stand_in.machine]
    words += [] if stand_in.vm.has_acpi else ["acpi=off"]
    words += [f"{n}={_on(is_on)}" for n, is_on in stand_in.switches if n in ("vmport", "smm")]
    if stand_in.iommu is not None and kvm:
        words.append("kernel-irqchip=split")
    if stand_in.is_shared and not stand_in.vm.cells:
        words.append("memory-backend=m0")
    return ",".join(words)


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"


def _memory(stand_in: StandIn) -> str:
    """Memory that is not there moves the PCI window to where the real guest has it."""
    size = f"{stand_in.vm.memory_bytes // MIB}M"
    if stand_in.space is None or stand_in.space.memory_bytes <= stand_in.vm.memory_bytes:
        return size
    return f"{size},slots=1,maxmem={stand_in.space.memory_bytes // MIB}M"


def _firmware(stand_in: StandIn, files: BootFiles) -> list[str]:
    words = []
    if stand_in.uefi:
        for unit, path in enumerate((files.ovmf, files.ovmf_variables)):
            only = ",readonly=on" if unit == 0 else ""
            words += ["-drive", f"if=pflash,format=raw,unit={unit}{only},file={escaped(path)}"]
    space = stand_in.space
    if space is not None and space.hole_bytes is not None and "q35" in stand_in.machine:
        words += ["-global", f"q35-pcihost.pci-hole64-size={space.hole_bytes}"]
    if space is not None and space.window_mib is not None:
        words += ["-fw_cfg", f"name=opt/ovmf/X-PciMmio64Mb,string={space.window_mib}"]
    return words


def _later_vcpus(stand_in: StandIn) -> list[str]:
    """The vCPUs behind the first that is offline, each by its place in the topology."""
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


def _iommu(stand_in: StandIn) -> list[str]:
    return [] if stand_in.iommu is None else ["-device", ",".join(("intel-iommu", *stand_in.iommu))]


def _endpoint(stand_in: StandIn, bdf: Bdf | None) -> str:
    bars = {} if stand_in.space is None else dict(stand_in.space.bars)
    return f"pci-testdev,membar={bars[bdf]}" if bdf in bars else "virtio-serial-pci"


def _cpu(stand_in: StandIn) -> str:
    cpu = stand_in.cpu
    words = [cpu.model or {"host-passthrough": "host"}.get(cpu.mode, "max")]
    words += [f"{name}={_on(is_on)}" for name, is_on in cpu.features]
    words += [f"pmu={_on(is_on)}" for name, is_on in stand_in.switches if name == "pmu"]
    if cpu.l3 == "emulate":
        words.append("l3-cache=on")
    elif cpu.l3 == "passthrough":
        words += ["host-cache-info=on", "l3-cache=off"]
    elif cpu.l3 == "disable":
        words.append("l3-cache=off")
    return ",".join(words)


def _smp(stand_in: StandIn) -> str:
    sockets, dies, cores, threads = stand_in.vm.cpu_topology or (stand_in.vm.vcpus, 1, 1, 1)
    most = f",maxcpus={stand_in.vm.vcpus}" if stand_in.vm.offline_vcpus else ""
    shape = f"sockets={sockets},dies={dies},cores={cores},threads={threads}"
    return f"{stand_in.first_vcpus}{most},{shape}"


def _numa(stand_in: StandIn) -> list[str]:
    words = []
    backend = "memory-backend-memfd,share=on" if stand_in.is_shared else "memory-backend-ram"
    if stand_in.is_shared and not stand_in.vm.cells:
        words += ["-object", f"{backend},id=m0,size={stand_in.vm.memory_bytes}"]
    for i, cell in enumerate(stand_in.vm.cells):
        words += ["-object", f"{backend},id=m{i},size={cell.memory_bytes}"]
        vcpus = ranges_text("cpus", cell.vcpus)
        words += ["-numa", f"node,nodeid={i}{vcpus},memdev=m{i}"]
    for i, cell in enumerate(stand_in.vm.cells):
        for j, distance in enumerate(cell.distances):
            words += ["-numa", f"dist,src={i},dst={j},val={distance}"]
    return words


def _serial(id: str, path: str) -> list[str]:
    return ["-chardev", f"file,id={id},path={escaped(path)}", "-serial", f"chardev:{id}"]
