"""Read: the VM of a domain document."""

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.machine.topology import RunningDomain
from homenode.vm.domain.cells import cell_bytes, cell_elements, read_page_bytes
from homenode.vm.domain.codec import ROWS, read_name
from homenode.vm.domain.cpu import read_vcpus
from homenode.vm.domain.cputune import iothread_ids, read_pins
from homenode.vm.domain.document import Document, parse_document
from homenode.vm.domain.fields import host_address, pu_set
from homenode.vm.domain.hostdevs import is_pci_function, read_mediated
from homenode.vm.domain.memory import (
    read_binding,
    read_memnodes,
    read_memory,
)
from homenode.vm.model import Vm

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
    for row in ROWS:
        several = root.all(row.path) if row.once else ()
        if len(several) > 1:
            name, around = several[0].name, document.parent_of[several[0].start].name
            raise InputError(
                f"{source}:{several[1].line}: expected one <{name}> in <{around}>, "
                f"found {len(several)}, the first at line {several[0].line}",
                hint="remove all but one",
            )
    return document


def vm_of(document: Document) -> Vm:
    """The VM of a domain document that is open already. Raises as read_vm."""
    said = {row.field: row.read(document) for row in ROWS if row.field and row.read is not None}
    return Vm(source=document.source, **said)


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
    fallback = None if vcpu is None else pu_set(vcpu, "cpuset")
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
            size = min(cell_bytes(element), rest)
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
    found = set()
    for element in filter(is_pci_function, document.root.all("devices/*")):
        source = element.at("source/address")
        if source is not None and source.get("type") in (None, "pci"):
            found.add(host_address(source))
    return tuple(sorted(found))
