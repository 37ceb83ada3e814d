"""What tools would print on a host: names of devices, links between GPUs, versions.

Source: lspci -D -nn of pciutils 3.9, first lines alone; nvidia-smi -q -x of driver 580, topo -m of
driver 560 (a public 4x GH200 listing); rocm-smi --showtopo of ROCm 6; virsh version of libvirt 10;
qemu --version of QEMU 8. nvidia-smi and rocm-smi number GPUs by their addresses, ascending.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import takewhile

from homenode.bdf import Bdf
from homenode.machine.description.models import NVIDIA_DRIVER
from homenode.machine.discover.device_kinds import AMD, NVIDIA
from homenode.machine.pci import DeviceKind, LinkKind, PartKind, PciDevice
from homenode.machine.topology import Host, MemoryKind
from homenode.units import MIB

_CLASS_NAMES = {
    0x0108: "Non-Volatile memory controller",
    0x0200: "Ethernet controller",
    0x0300: "VGA compatible controller",
    0x0302: "3D controller",
    0x0403: "Audio device",
    0x0604: "PCI bridge",
    0x0680: "Bridge",
    0x1200: "Processing accelerators",
}
_ROCM_WIDTH = 90
_ROCM_COLUMN = 13


def render_tools(host: Host) -> dict[str, str]:
    """Output by the tool's name in snapshot/contents.py; nothing of a tool that would not be there.

    The tools of GPUs see those that their maker's driver has.
    """
    # A described host runs no domains: virsh would print none.
    outputs = {"virsh-domains": ""}
    if host.pci_devices:
        outputs["lspci"] = "".join(map(_lspci_line, host.pci_devices))
    nvidia = [gpu for gpu in _gpus(host, NVIDIA) if gpu.driver in (None, NVIDIA_DRIVER)]
    if nvidia:
        outputs["nvidia-smi-query"] = _nvidia_query(host, nvidia)
        if any(gpu.partition_mode == "mig" for gpu in nvidia):
            outputs["nvidia-smi-mig"] = _mig_instances(nvidia)
        outputs["nvidia-smi-topo"] = _nvidia_topology(host, nvidia)
    amd = _gpus(host, AMD)
    if amd:
        outputs["rocm-smi-topo"] = _rocm_topology(host, amd)
    libvirt, qemu = host.settings.libvirt_version, host.settings.qemu_version
    if libvirt is not None:
        version = ".".join(map(str, libvirt))
        outputs["virsh-version"] = (
            f"Compiled against library: libvirt {version}\nUsing library: libvirt {version}\n"
            f"Using API: QEMU {version}\n"
        )
    if qemu is not None:
        outputs["qemu-version"] = f"QEMU emulator version {'.'.join(map(str, qemu))}\n"
    return outputs


def _lspci_line(device: PciDevice) -> str:
    code = device.class_code >> 8
    ids = f"[{device.vendor_id or 0:04x}:{device.device_id or 0:04x}]"
    name = f"{_CLASS_NAMES.get(code, 'Device')} [{code:04x}]: {device.name or 'Device'} {ids}"
    interface = device.class_code & 0xFF
    return f"{device.bdf} {name}{f' (prog-if {interface:02x})' if interface else ''}\n"


def _gpus(host: Host, vendor_id: int) -> tuple[PciDevice, ...]:
    return tuple(
        device
        for device in host.devices_of_kind(DeviceKind.GPU)
        if device.vendor_id == vendor_id and device.physical_function is None
    )


def _counts(host: Host, kind: LinkKind) -> Mapping[frozenset[Bdf], int | None]:
    return {
        frozenset((link.a, link.b)): link.count
        for link in host.links
        if link.kind is kind and link.b is not None
    }


def _nvidia_query(host: Host, gpus: Sequence[PciDevice]) -> str:
    """The few elements that say what GPUs are; the tool prints 300 of each."""
    with_c2c = {link.a for link in host.links if link.kind is LinkKind.C2C}
    lines = ['<?xml version="1.0" ?>', "<nvidia_smi_log>"]
    for gpu in gpus:
        mode = "Enabled" if gpu.bdf in with_c2c else "Disabled"
        lines += [
            f'\t<gpu id="{gpu.bdf.domain:08X}:{str(gpu.bdf).partition(":")[2].upper()}">',
            f"\t\t<product_name>{escape(gpu.name or 'GPU', quote=False)}</product_name>",
            f"\t\t<c2c_mode>{mode}</c2c_mode>",
            *_mig_devices(gpu),
            "\t</gpu>",
        ]
    return "\n".join((*lines, "</nvidia_smi_log>")) + "\n"


def _mig_devices(gpu: PciDevice) -> Iterator[str]:
    """A compute instance on each GPU instance; nothing where MIG is off."""
    if gpu.partition_mode != "mig":
        return
    yield "\t\t<mig_mode><current_mig>Enabled</current_mig></mig_mode>"
    yield "\t\t<mig_devices>"
    for index, part in enumerate(gpu.parts):
        if part.kind is PartKind.MIG and part.memory_bytes is not None:
            yield (
                f"\t\t\t<mig_device><index>{index}</index><gpu_instance_id>{part.number}"
                "</gpu_instance_id><compute_instance_id>0</compute_instance_id><fb_memory_usage>"
                f"<total>{part.memory_bytes // MIB} MiB</total></fb_memory_usage></mig_device>"
            )
    yield "\t\t</mig_devices>"


def _mig_instances(gpus: Sequence[PciDevice]) -> str:
    rule = f"+{'-' * 55}+\n"
    heading = f"|{' GPU instances:':<55}|\n|{' GPU   Name   Profile  Instance   Placement':<55}|\n"
    lines = [rule, heading, f"|{'=' * 55}|\n"]
    for index, gpu in enumerate(gpus):
        for start, part in enumerate(one for one in gpu.parts if one.kind is PartKind.MIG):
            row = f" {index:>3}  MIG {part.profile:<16} 19 {part.number:>8} {start:>10}:1"
            lines += [f"|{row:<55}|\n", rule]
    return "".join(lines)


def _nvidia_topology(host: Host, gpus: Sequence[PciDevice]) -> str:
    counts = _counts(host, LinkKind.NVLINK)
    names = [f"GPU{i}" for i in range(len(gpus))]
    memory_nodes = {
        node.gpu: node.index for node in host.nodes if node.memory_kind is MemoryKind.GPU
    }
    lines = ["\t".join(("", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"))]
    for name, gpu in zip(names, gpus, strict=True):
        cells = [name]
        for other in gpus:
            pair = frozenset((gpu.bdf, other.bdf))
            if gpu is other:
                cells.append(" X ")
            elif pair in counts:
                cells.append(f"NV{counts[pair]}")
            else:
                cells.append(_pcie_relation(host, gpu, other))
        cells.append("" if gpu.local_pus is None else str(gpu.local_pus))
        cells.append("N/A" if gpu.node is None else str(gpu.node))
        # The driver pads this column with a tab.
        cells += ["", str(memory_nodes.get(gpu.bdf, "N/A"))]
        lines.append("\t".join(cells))
    return "\n".join(lines) + "\n"


def _pcie_relation(host: Host, a: PciDevice, b: PciDevice) -> str:
    """PIX, PXB, PHB, NODE or SYS, as the legend of nvidia-smi topo -m explains them."""
    if a.root_complex == b.root_complex:
        above_a = [bridge.bdf for bridge in host.bridges_above(a.bdf)]
        above_b = [bridge.bdf for bridge in host.bridges_above(b.bdf)]
        shared = set(above_a) & set(above_b)
        if not shared:
            return "PHB"
        # A switch is one bridge to the driver, though each of its ports is one to the kernel.
        ways = (takewhile(lambda bdf: bdf not in shared, above) for above in (above_a, above_b))
        return "PIX" if all(len(list(way)) <= 1 for way in ways) else "PXB"
    return "NODE" if a.node is not None and a.node == b.node else "SYS"


def _rocm_topology(host: Host, gpus: Sequence[PciDevice]) -> str:
    linked = _counts(host, LinkKind.XGMI)
    names = [f"GPU{i}" for i in range(len(gpus))]
    tables = (
        ("Weight between two GPUs", "15", "72"),
        ("Hops between two GPUs", "1", "2"),
        ("Link Type between two GPUs", "XGMI", "PCIE"),
    )
    lines = [" ROCm System Management Interface ".center(_ROCM_WIDTH, "=")]
    for title, xgmi, pcie in tables:
        lines += [f" {title} ".center(_ROCM_WIDTH, "="), _rocm_row("", names)]
        for name, gpu in zip(names, gpus, strict=True):
            cells = []
            for other in gpus:
                joined = frozenset((gpu.bdf, other.bdf)) in linked
                cells.append("0" if gpu is other else xgmi if joined else pcie)
            lines.append(_rocm_row(name, cells))
        lines.append("")
    lines.append(" Numa Nodes ".center(_ROCM_WIDTH, "="))
    for i, gpu in enumerate(gpus):
        node = -1 if gpu.node is None else gpu.node
        lines.append(f"GPU[{i}]\t\t: (Topology) Numa Node: {node}")
        lines.append(f"GPU[{i}]\t\t: (Topology) Numa Affinity: {node}")
    lines.append(" End of ROCm SMI Log ".center(_ROCM_WIDTH, "="))
    return "\n".join(lines) + "\n"


def _rocm_row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<7}" + "".join(f"{cell:<{_ROCM_COLUMN}}" for cell in cells)
