"""HostCounts: a host, its nodes and its settings in single lines."""

from homenode.pci import DeviceKind
from homenode.topology import Host, HostSettings, MemoryKind, NumaNode, summarise
from homenode.units import format_bytes
from homenode.wording import plural


def host_counts(host: Host) -> str:
    """The host in one line: how many of each thing."""
    summary = summarise(host)
    parts = [
        plural(summary.packages, "package"),
        plural(summary.numa_nodes, "NUMA node"),
        plural(summary.cores, "core"),
        plural(summary.pus, "PU"),
        plural(summary.llcs, "LLC"),
    ]
    if summary.cpuless_nodes:
        parts[1] += f" ({summary.cpuless_nodes} without PUs)"
    if summary.pus_offline:
        parts[3] += f" ({summary.pus_offline} more offline)"
    if summary.pus_disallowed:
        parts[3] += f" ({summary.pus_disallowed} not allowed)"
    size = summary.memory_bytes
    parts.append("memory unknown" if size is None else format_bytes(size))
    for kind, noun, nouns in (
        (DeviceKind.GPU, "GPU", "GPUs"),
        (DeviceKind.NIC, "NIC", "NICs"),
        (DeviceKind.NVSWITCH, "NVSwitch", "NVSwitches"),
    ):
        devices = host.devices_of_kind(kind)
        functions = sum(device.physical_function is not None for device in devices)
        if devices:
            text = plural(len(devices) - functions, noun, nouns)
            parts.append(f"{text} with {plural(functions, 'VF')}" if functions else text)
    parts.append(plural(summary.pci_functions, "PCI function"))
    return ", ".join(parts)


def other_node_text(node: NumaNode) -> str:
    """A node without PUs in a few words; equal nodes have equal texts."""
    if node.memory_bytes == 0:
        text = "no memory"
    elif node.memory_bytes is None:
        text = "memory unknown"
    else:
        text = format_bytes(node.memory_bytes)
        if node.memory_free_bytes is not None:
            text += f", {format_bytes(node.memory_free_bytes)} free"
    if node.memory_kind is MemoryKind.GPU:
        text += f", memory of GPU {node.gpu}" if node.gpu is not None else ", GPU memory"
    elif node.memory_kind is MemoryKind.OTHER:
        text += ", not plain DRAM"
    if node.generic_initiator:
        text += ", generic initiator"
    return text


def settings_lines(settings: HostSettings) -> tuple[str, ...]:
    """Settings that placement depends on, those that are known."""
    lines: list[str] = []
    for name, value in (
        ("kernel", settings.kernel_release),
        ("on the kernel command line", _placement_parameters(settings.kernel_command_line)),
        ("SMT control", settings.smt_control),
        (
            "CPU frequency governor",
            None if settings.governors is None else ", ".join(settings.governors) or "none",
        ),
        ("transparent huge pages", settings.transparent_hugepages),
        (
            "automatic NUMA balancing",
            {None: None, 0: "off", 1: "on"}.get(
                settings.numa_balancing, str(settings.numa_balancing)
            ),
        ),
        ("libvirt", _version(settings.libvirt_version)),
        ("QEMU", _version(settings.qemu_version)),
    ):
        if value:
            lines.append(f"{name}: {value}")
    return tuple(lines)


# What decides where threads and pages may lie, and how devices are mapped.
_PARAMETERS = tuple(
    """
    isolcpus nohz_full rcu_nocbs irqaffinity nosmt maxcpus nr_cpus numa numa_balancing
    hugepagesz hugepages default_hugepagesz transparent_hugepage iommu intel_iommu amd_iommu
    vfio-pci vfio_iommu_type1 pci mitigations
""".split()
)


def _placement_parameters(command_line: str | None) -> str | None:
    """The parameters that matter here; the rest is long and may name disks or passwords."""
    words = (command_line or "").split()
    kept = [w for w in words if w.partition("=")[0].partition(".")[0] in _PARAMETERS]
    return " ".join(kept) or None


def _version(version: tuple[int, int, int] | None) -> str | None:
    return None if version is None else ".".join(str(part) for part in version)
