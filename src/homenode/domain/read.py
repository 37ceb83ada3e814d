"""Read: the VM of a domain document."""

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.domain.addresses import read_addresses
from homenode.domain.aperture import read_hole
from homenode.domain.cells import cell_bytes, cell_elements, read_cells, read_distances
from homenode.domain.controllers import read_controllers
from homenode.domain.cpu import read_topoext, read_topology
from homenode.domain.cputune import iothread_ids, read_pins
from homenode.domain.document import Document, Element, parse_document
from homenode.domain.elements import ELEMENTS
from homenode.domain.fields import decimal, host_address, needed, pu_set, size_bytes
from homenode.domain.hostdevs import read_hostdevs, read_mediated
from homenode.domain.memory import (
    memory_device_bytes,
    memory_devices,
    read_current_memory,
    read_memory,
    read_memory_devices,
)
from homenode.domain.memory_backing import page_bytes_of_cell, read_page_bytes
from homenode.domain.metadata import read_record
from homenode.domain.numatune import read_binding, read_bound_nodes, read_memnodes
from homenode.domain.vcpu import read_offline_vcpus, read_vcpus
from homenode.errors import InputError, ParseError
from homenode.indices import NodeIndex
from homenode.topology import RunningDomain
from homenode.vm.model import Vm, VmCell

_OTHER_HYPERVISORS = {
    "xen": "Xen",
    "vmware": "VMware",
    "lxc": "LXC",
    "bhyve": "bhyve",
    "vbox": "VirtualBox",
    "hyperv": "Hyper-V",
    "openvz": "OpenVZ",
    "vz": "Virtuozzo",
    "parallels": "Parallels",
    "phyp": "IBM PowerVM",
    "xenapi": "XenServer",
    "esx": "VMware ESX",
    "gsx": "VMware GSX",
    "linux": "Xen",
    "uml": "User-mode Linux",
    "exe": "LXC",
    "jailhouse": "Jailhouse",
}
"""Domain types of libvirt's other drivers. Source: conf/domain_conf.c and formatdomain.html."""


def read_vm(xml: bytes, source: str) -> Vm:
    """The VM of a domain document in any spelling that libvirt takes.

    Where the document leaves the architecture out it is that of the emulator or of the machine
    type, else x86_64. memory_bytes is without the DIMMs that are plugged at boot.
    Raises ParseError or InputError; each names the place, what was expected and what was found.
    """
    return vm_of(open_domain(xml, source))


def open_domain(xml: bytes, source: str) -> Document:
    """The document of a domain.

    Raises InputError where it is some other XML, or holds twice what a domain has once: libvirt
    takes now the first of two, now both, and an edit of one would be half an edit.
    """
    document = parse_document(xml, source)
    root = document.root
    if root.name != "domain":
        inside = next((e for e in root.walk() if e.name == "domain"), None)
        hint = "try: virsh dumpxml --inactive NAME"
        if inside is not None:
            hint = f"it holds a <domain> at line {inside.line}: give that part alone; {hint}"
        raise InputError(f"{source}:{root.line}: expected <domain>, found <{root.tag}>", hint=hint)
    hypervisor = _OTHER_HYPERVISORS.get((root.get("type") or "").strip())
    if hypervisor is not None:
        raise InputError(
            f"{source}:{root.line}: expected a domain of QEMU (type kvm or qemu), found one of "
            f"{hypervisor} (type {(root.get('type') or '').strip()})",
            hint="plan a document of type kvm with the same vCPUs, memory and devices, and carry "
            "its pins and nodes over by hand",
        )
    for element in ELEMENTS:
        *path, name = element.path.split("/")
        parent = root.at(*path) if element.once else None
        several = () if parent is None else parent.all(name)
        if len(several) > 1:
            around = path[-1] if path else "domain"
            raise InputError(
                f"{source}:{several[1].line}: expected one <{name}> in <{around}>, "
                f"found {len(several)}, the first at line {several[0].line}",
                hint="remove all but one",
            )
    return document


def vm_of(document: Document) -> Vm:
    """The VM of a domain document that is open already. Raises as read_vm."""
    root = document.root
    vcpus, _ = read_vcpus(document)
    pins = read_pins(document)
    vcpu = root.child("vcpu")
    everywhere = None if vcpu is None else pu_set(document, vcpu, "cpuset")
    limit = root.at("memtune", "hard_limit")
    dimm_bytes = memory_device_bytes(document)
    stated = read_memory(document)
    memory = stated - dimm_bytes
    if memory <= 0:  # where there are cells, libvirt takes their sum, whatever <memory> says
        memory = sum(cell_bytes(document, cell) for cell in cell_elements(document))
    if memory <= 0:
        raise InputError(
            f"{document.source}: expected more <memory> than the {dimm_bytes} bytes of memory "
            f"devices, found {stated}",
            hint="<memory> counts them in",
        )
    machine_type = root.at("os", "type")
    machine = machine_type.get("machine") if machine_type is not None else None
    topology = root.at("cpu", "topology")
    max_memory = root.child("maxMemory")
    address_bits = root.at("cpu", "maxphysaddr")
    bits = address_bits.get("bits") if address_bits is not None else None
    cpu = root.child("cpu")
    cache = root.at("cpu", "cache")
    security = root.child("launchSecurity")
    iommu = root.at("devices", "iommu")
    access = root.at("memoryBacking", "access")
    return Vm(
        name=read_name(document),
        source=document.source,
        uuid=_stripped(root.child("uuid")),
        domain_type=needed(document, root, "type"),
        architecture=_architecture(root, machine_type, machine),
        machine=machine,
        vcpus=vcpus,
        vcpu_pins=tuple(pins.get(("vcpupin", i), everywhere) for i in range(vcpus)),
        emulator_pus=pins.get(("emulatorpin", 0), everywhere),
        memory_bytes=memory,
        page_bytes=read_page_bytes(document),
        iothread_ids=tuple(iothread_ids(document)),
        iothread_pins=tuple(
            sorted((number, pus) for (name, number), pus in pins.items() if name == "iothreadpin")
        ),
        cpu_mode=_cpu_mode(cpu),
        cpu_topology=None if topology is None else read_topology(document, topology),
        cells=_cells(document),
        hostdevs=read_hostdevs(document),
        controllers=read_controllers(document),
        addresses=read_addresses(document),
        has_iommu=iommu is not None,
        iommu_model=None if iommu is None else iommu.get("model"),
        launch_security=None if security is None else security.get("type") or "unknown",
        has_dimms=bool(memory_devices(document)),
        max_memory_bytes=None
        if max_memory is None
        else size_bytes(document, max_memory, max_memory.text, max_memory.get("unit")),
        firmware=_firmware(root),
        physical_address_bits=None
        if address_bits is None or bits is None
        else decimal(document, address_bits, bits, "address bits"),
        pcihole64_bytes=read_hole(document),
        has_qemu_commandline=any(e.name.endswith("}commandline") for e in root.children),
        memory_access_shared=(access is not None and access.get("mode") == "shared")
        or any(e.get("memAccess") == "shared" for e in cell_elements(document)),
        hard_limit_bytes=None
        if limit is None
        else size_bytes(document, limit, limit.text, limit.get("unit")),
        binding=read_binding(document),
        bound_nodes=read_bound_nodes(document),
        memory_devices=read_memory_devices(document),
        mediated=read_mediated(document),
        cpu_model=None if cpu is None else _stripped(cpu.child("model")),
        cpu_cache=None if cache is None else cache.get("mode"),
        topoext=read_topoext(document),
        offline_vcpus=read_offline_vcpus(document),
        has_acpi=root.at("features", "acpi") is not None,
        record=read_record(document),
        ballooned_bytes=max(0, memory + dimm_bytes - read_current_memory(document)),
    )


def _cells(document: Document) -> tuple[VmCell, ...]:
    memnodes = read_memnodes(document)
    unbound: tuple[str | None, CpuSet] = (None, CpuSet())
    binding = read_binding(document) or unbound
    cells = []
    for i, (element, vcpus) in enumerate(read_cells(document)):
        mode, nodes = memnodes.get(i) or binding
        cells.append(
            VmCell(
                id=i,
                vcpus=vcpus,
                memory_bytes=cell_bytes(document, element),
                nodes=nodes,
                mode=mode,
                page_bytes=page_bytes_of_cell(document, i),
                distances=read_distances(document, element),
            )
        )
    return tuple(cells)


def read_name(document: Document) -> str:
    """The domain's name. Raises ParseError where there is none."""
    name = _stripped(document.root.child("name"))
    if name is None:
        raise ParseError(document.source, "a domain with a <name>", "none")
    return name


def _cpu_mode(cpu: Element | None) -> str | None:
    """The mode; libvirt takes a <model> without one for custom, and neither for no CPU model."""
    if cpu is None:
        return None
    return cpu.get("mode") or (None if cpu.child("model") is None else "custom")


def _stripped(element: Element | None) -> str | None:
    text = "" if element is None else element.text.strip()
    return text or None


def _architecture(root: Element, type_: Element | None, machine: str | None) -> str:
    named = type_.get("arch") if type_ is not None else None
    if named:
        return named
    emulator = _stripped(root.at("devices", "emulator")) or ""
    _, found, suffix = emulator.rpartition("qemu-system-")
    if found and suffix.isidentifier():
        return suffix
    if machine is not None and (machine == "virt" or machine.startswith("virt-")):
        return "aarch64"
    return "x86_64"


def _firmware(root: Element) -> str | None:
    os = root.child("os")
    if os is None:
        return None
    named = os.get("firmware")
    if named:
        return named
    loader = os.child("loader")
    if loader is None:
        return None
    return "efi" if loader.get("type") == "pflash" else "bios"


def read_running_domain(xml: bytes, running: bool, source: str = "domain") -> RunningDomain:
    """What a domain of the host uses: PUs, memory by node, devices.

    `running` says whether it runs; the XML of one that runs is that of `virsh dumpxml`. Memory that
    is bound to several nodes together counts as spread evenly over them, which is what interleave
    does and the best guess for strict. memory_bound is False for mode preferred: it may spill.
    Raises ParseError or InputError.
    """
    document = open_domain(xml, source)
    vcpus, _ = read_vcpus(document)
    vcpu = document.root.child("vcpu")
    fallback = None if vcpu is None else pu_set(document, vcpu, "cpuset")
    pins = read_pins(document)
    memory = read_memory(document)
    binding = read_binding(document)
    in_use: dict[NodeIndex, int] = {}
    rest = memory
    memnodes = read_memnodes(document)
    bound = bool(memnodes) or binding is not None
    for cell, element in enumerate(cell_elements(document)):
        if cell in memnodes:
            mode, nodes = memnodes[cell]
            size = min(cell_bytes(document, element), rest)
            _spread(in_use, nodes, size)
            rest -= size
            bound = bound and mode != "preferred"
    if binding is not None:
        _spread(in_use, binding[1], rest)
        bound = bound and binding[0] != "preferred"
    elif rest:
        bound = False
    return RunningDomain(
        name=read_name(document),
        running=running,
        vcpu_pins=tuple(pins.get(("vcpupin", i), fallback) for i in range(vcpus)),
        emulator_pus=pins.get(("emulatorpin", 0), fallback),
        iothread_pus=tuple(pins.get(("iothreadpin", i), fallback) for i in iothread_ids(document)),
        memory_bytes=memory,
        memory_bound=bound,
        memory_by_node=tuple(sorted(in_use.items())),
        page_bytes=read_page_bytes(document),
        devices=_all_devices(document),
        mediated=tuple(sorted(one.uuid for one in read_mediated(document))),
    )


def _spread(in_use: dict[NodeIndex, int], nodes: CpuSet, size: int) -> None:
    share, more = divmod(size, max(1, len(nodes)))
    for i, node in enumerate(nodes):
        index = NodeIndex(int(node))
        in_use[index] = in_use.get(index, 0) + share + (1 if i < more else 0)


def _all_devices(document: Document) -> tuple[Bdf, ...]:
    """Every host function that the domain holds, those not shown to its guest included."""
    devices = document.root.child("devices")
    found = set()
    for element in () if devices is None else devices.children:
        source = element.at("source", "address")
        is_pci = element.name == "hostdev" and element.get("type") == "pci"
        is_pci = is_pci or (element.name == "interface" and element.get("type") == "hostdev")
        if is_pci and source is not None and source.get("type") in (None, "pci"):
            found.add(host_address(document, source))
    return tuple(sorted(found))
