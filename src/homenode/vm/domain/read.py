"""Read: the VM of a definition, the host resources of a running domain, and the parts of a tuned
definition that the plan keeps and relies on."""

from collections.abc import Iterator

from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError
from homenode.machine.pci import normalize_uuid
from homenode.machine.topology import RunningDomain
from homenode.vm.domain.cells import cell_elements
from homenode.vm.domain.codec import ROWS
from homenode.vm.domain.controllers import QEMU_NAMESPACE
from homenode.vm.domain.document import (
    Document,
    Element,
    host_address,
    parse_document,
    pu_set,
    size_bytes,
)
from homenode.vm.domain.hostdevs import is_pci_function, map_hostdevs
from homenode.vm.domain.memory import read_mark
from homenode.vm.facts import FACTS
from homenode.vm.model import Vm
from homenode.vm.plan import KEPT, Plan

_OTHER_HYPERVISORS = {
    "xen": "Xen",
    **dict.fromkeys(("vmware", "esx", "gsx"), "VMware"),
    **dict.fromkeys(("lxc", "exe"), "LXC"),
    "bhyve": "bhyve",
    "vbox": "VirtualBox",
    "hyperv": "Hyper-V",
    "openvz": "OpenVZ",
    "vz": "Virtuozzo",
    "parallels": "Parallels",
    "phyp": "IBM PowerVM",
    "xenapi": "XenServer",
    "linux": "Xen",
    "uml": "User-mode Linux",
    "jailhouse": "Jailhouse",
}
"""Domain types of libvirt's other drivers. Source: conf/domain_conf.c and formatdomain.html.
In Python: KubeVirt's hook is one file, and has it too."""


def read_vm(xml: bytes, source: str) -> Vm:
    """Return the VM of a definition, memory_bytes without DIMMs. Without an architecture it is the
    emulator's or the machine type's, else x86_64. Raises ParseError or InputError."""
    return build_vm(open_domain(xml, source))


def open_domain(xml: bytes, source: str) -> Document:
    """Parse the document of a domain. Raises InputError for other XML, and for duplicates of single
    elements: libvirt may read either or both, so an edit of one would be incomplete."""
    document = parse_document(xml, source)
    root = document.root
    if root.name != "domain":
        domain = next((e for e in root.walk() if e.name == "domain"), None)
        hint = "try: virsh dumpxml --inactive NAME"
        if domain is not None:
            hint = f"it holds a <domain> at line {domain.line}: pass only this element; {hint}"
        raise InputError(f"{source}:{root.line}: expected <domain>, found <{root.tag}>", hint=hint)
    hypervisor = _OTHER_HYPERVISORS.get((root.get("type") or "").strip())
    if hypervisor is not None:
        target = "--target xen " if hypervisor == "Xen" else ""
        raise InputError(
            f"{source}:{root.line}: expected a domain of QEMU (type kvm or qemu), found a "
            f"domain of {hypervisor} (type {(root.get('type') or '').strip()})",
            hint=f"replace the file by {target}--vcpus N --memory SIZE",
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


def build_vm(document: Document) -> Vm:
    """Return the VM of a parsed definition. Raises like read_vm."""
    fields = {row.field: row.read(document) for row in ROWS if row.field and row.read is not None}
    return Vm(source=document.source, **fields)


def read_running_domain(xml: bytes, running: bool, source: str = "domain") -> RunningDomain:
    """Return the CPUs, memory by node and devices that a domain takes from the host.

    running: xml is that of `virsh dumpxml`. Memory bound to several nodes counts as spread evenly;
    memory_bound is False for mode preferred, which may spill. Raises ParseError or InputError.
    """
    document = open_domain(xml, source)
    vm = build_vm(document)
    in_use: dict[NodeIndex, int] = {}
    memory = unbound = vm.memory_bytes + vm.memory_device_bytes
    modes = []
    for cell in vm.cells:
        if cell.nodes:
            _add_in_use(in_use, cell.nodes, cell.memory_bytes)
            unbound -= cell.memory_bytes
            modes.append(cell.mode)
    if vm.binding is not None:
        _add_in_use(in_use, vm.binding[1], unbound)
        modes.append(vm.binding[0])
    elif unbound:
        modes.append("preferred")
    vcpu = document.root.child("vcpu")
    everywhere = None if vcpu is None else pu_set(vcpu, "cpuset")
    iothreads = dict(vm.iothread_pins)
    return RunningDomain(
        name=vm.name,
        running=running,
        vcpu_pins=vm.vcpu_pins,
        emulator_pus=vm.emulator_pus,
        iothread_pus=tuple(iothreads.get(i, everywhere) for i in vm.iothread_ids),
        memory_bytes=memory,
        memory_bound="preferred" not in modes,
        memory_by_node=tuple(sorted(in_use.items())),
        page_bytes=vm.page_bytes,
        devices=_list_devices(document),
        mediated=tuple(sorted(device.uuid for device in vm.mediated)),
        uuid=None if vm.uuid is None or "/" in vm.name else normalize_uuid(vm.uuid),
        mark=read_mark(document),
    )


def _add_in_use(in_use: dict[NodeIndex, int], nodes: CpuSet, size: int) -> None:
    share, remainder = divmod(size, max(1, len(nodes)))
    for i, node in enumerate(nodes):
        index = NodeIndex(int(node))
        in_use[index] = in_use.get(index, 0) + share + (1 if i < remainder else 0)


def _list_devices(document: Document) -> tuple[Bdf, ...]:
    """Return every host function of the domain, also those not shown to its guest."""
    functions = set()
    for element in filter(is_pci_function, document.root.all("devices/*")):
        source = element.find("source/address")
        if source is not None and source.get("type") in (None, "pci"):
            functions.add(host_address(source))
    return tuple(sorted(functions))


_FIELDS = tuple(field for fact in FACTS if fact.id in KEPT for field in fact.fields)
"""Fields of a Vm that no layout sets."""
_SECTIONS = ("memoryBacking", "memtune", "cputune", "features")
_PINS = ("vcpupin", "emulatorpin", "iothreadpin")
_OF_CPU = ("feature", "maxphysaddr")
_SETS = ("vcpus", "nodeset", "cpus")
_SIZES = ("hard_limit", "soft_limit", "swap_hard_limit", "min_guarantee", "maxMemory", "tb-cache")
_WITH_SIZE = ("page", "cache")
_DEFAULTS = {"feature": {"policy": "require"}, "hyperv": {"mode": "custom"}}
_NOT_PRINTED = ("ioapic", "tcg")
"""Elements that libvirt drops if they are empty."""
_VFIO = (None, "vfio")
_PARTITIONS = ("/machine", "/machine.slice")
"""Partitions that libvirt itself sets for a running domain."""


def keep_parts(plan: Plan, document: Document) -> Plan:
    """Return the plan with the kept parts of its definition. Raises ParseError or InputError."""
    guest = build_vm(document)
    fields = {name: getattr(guest, name) for name in _FIELDS}
    return replace(plan, vm=structs.replace(plan.vm, **fields), kept=read_kept(document))


def read_kept(document: Document) -> tuple[str, ...]:
    """Return a line for each element that shares a section with the layout's elements. Raises
    ParseError or InputError."""
    return tuple(sorted(_list_settings(document)))


def _list_settings(document: Document) -> Iterator[str]:
    root = document.root
    elements = [e for name in _SECTIONS for e in root.all(f"{name}/*") if e.name not in _PINS]
    of_cpu = [e for e in root.all("cpu/*") if e.name in _OF_CPU]
    for element in (*elements, *of_cpu, *root.all("maxMemory")[:1]):
        yield from _format_lines(element)
    for i, cell in enumerate(cell_elements(document)):
        for name in ("memAccess", "discard"):
            if cell.get(name) is not None:
                yield f"cell {i} {name}={cell.get(name)}"
    if root.value("cpu/@migratable") == "off":
        yield "cpu migratable=off"
    partition = root.value("resource/partition")
    if partition not in (None, *_PARTITIONS):
        yield f"partition {partition}"
    loader = root.find("os/loader")
    if loader is not None and root.value("os/@firmware") is None:
        # If the definition has only the firmware's kind, libvirt chooses the loader.
        for name in ("readonly", "secure", "type"):
            if loader.get(name) is not None:
                yield f"loader {name}={loader.get(name)}"
    security = root.child("launchSecurity")
    if security is not None:
        yield f"launchSecurity type={security.get('type')}"
    yield from _list_device_settings(document)
    for name in ("commandline", "override"):
        passed = root.child(f"{{{QEMU_NAMESPACE}}}{name}")
        # QEMU decides its meaning, so any change counts, also of the order of words.
        if passed is not None:
            words = (" ".join(v for _, v in e.attributes) for e in passed.walk() if e is not passed)
            yield f"qemu:{name} {' '.join(filter(None, words))}"


def _list_device_settings(document: Document) -> Iterator[str]:
    for element in document.root.all("devices/*"):
        driver = element.child("driver")
        if element.name == "iommu":
            yield f"iommu model={element.get('model')}"
            if driver is not None:
                yield from _format_lines(driver, "iommu ")
        elif driver is not None and driver.get("iothread") is not None:
            name = element.value("target/@dev") or ""
            yield f"{element.tag} {name} iothread={driver.get('iothread')}"
    for bdf, element in map_hostdevs(document).items():
        program, managed = element.value("driver/@name"), element.get("managed") or "no"
        yield f"hostdev {bdf} managed={'yes' if element.name == 'interface' else managed}"
        if program not in _VFIO:
            yield f"hostdev {bdf} driver={program}"


def _format_lines(element: Element, prefix: str = "") -> Iterator[str]:
    """Yield a line for an element and each element below it."""
    values = dict(element.attributes)
    text = element.text.strip()
    if element.name in _SIZES:
        text = f"{size_bytes(element, element.text, values.pop('unit', None))} bytes"
    elif element.name == "tseg":
        text = f"{size_bytes(element, element.text, values.pop('unit', 'MiB'))} bytes"
    elif element.name in _WITH_SIZE and values.get("size") is not None:
        size = values.pop("size")
        values["bytes"] = str(size_bytes(element, size, values.pop("unit", None)))
    for name, value in _DEFAULTS.get(element.name, {}).items():
        values.setdefault(name, value)
    if values.get("state") == "on":  # the default of a feature without a state
        del values["state"]
    for name in _SETS:
        if name in values:
            values[name] = str(CpuSet.parse(values[name], element.source))
    words = [f"{name}={value}" for name, value in sorted(values.items())]
    if words or text or element.name not in _NOT_PRINTED:
        yield " ".join(filter(None, (f"{prefix}{element.tag}", *words, text)))
    for child in element.children:
        yield from _format_lines(child, f"{prefix}{element.tag} ")


def find_nvram_file(document: Document) -> str | None:
    """Return the file of the UEFI variables; None if a definition does not have it."""
    nvram = document.root.find("os/nvram")
    if nvram is None:
        return None
    source = nvram.child("source")
    return (nvram.text if source is None else source.get("file")) or None
