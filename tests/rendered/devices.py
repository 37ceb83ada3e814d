"""The PCI tree of a described host: /sys/devices/pciDDDD:BB, links to it, config space.

Source: Documentation/ABI/testing/sysfs-bus-pci, Documentation/PCI/sysfs-pci.rst.

What tools would print on a host: names of devices, links between GPUs, versions.

Source: lspci -D -nn of pciutils 3.9, first lines alone; nvidia-smi -q -x of driver 580, topo -m of
driver 560 (a public 4x GH200 listing); rocm-smi --showbus --showtopo --json of ROCm 6; virsh
version of libvirt 10; qemu --version of QEMU 8. nvidia-smi and rocm-smi
number GPUs by their addresses, ascending.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import combinations, takewhile

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.description.devices import NVIDIA_DRIVER
from homenode.machine.pci import (
    AMD,
    NVIDIA,
    DeviceKind,
    LinkKind,
    PartKind,
    PciBar,
    PciDevice,
    PciLink,
    PortType,
)
from homenode.machine.topology import Host, MemoryKind
from homenode.units import MIB

PCI = "/sys/bus/pci"

# Source: include/linux/ioport.h. A device has 6 BARs, a ROM and 6 SR-IOV BARs; a bridge 4 windows.
_IO, _MEMORY, _PREFETCH, _SIZE_ALIGNED, _MEMORY_64 = 0x100, 0x200, 0x2000, 0x40000, 0x100000
_RESOURCES, _BRIDGE_RESOURCES = 13, 17
_FIRST_ADDRESS, _FIRST_ADDRESS_64 = 0x8000_0000, 0x2000_0000_0000


def mask(pus: CpuSet, width_bits: int) -> str:
    """Hexadecimal groups of 32 bits, the highest first, as wide as the kernel's set.

    >>> mask(CpuSet([0, 33]), 40), mask(CpuSet([0, 1, 2, 3]), 8)
    ('02,00000001', '0f')

    Source: lib/vsprintf.c of the Linux kernel, %*pb.
    """
    groups = max(1, -(-width_bits // 32))
    words = [f"{pus.bits >> 32 * i & 0xFFFFFFFF:08x}" for i in reversed(range(groups))]
    top_bits = width_bits - 32 * (groups - 1)
    words[0] = words[0][8 - -(-top_bits // 4) :]
    return ",".join(words)


class RenderedDevices(Struct, frozen=True):
    """Files by path, and targets by link."""

    files: Mapping[str, str]
    links: Mapping[str, str]


def render_devices(host: Host) -> RenderedDevices:
    """Every function's directory, at the place in the tree that it has on a real machine."""
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    directory_of: dict[Bdf, str] = {}
    width = max(pu.index for pu in host.pus) + 1
    regions = _regions(host.pci_devices)
    for device in sorted(host.pci_devices, key=lambda each: _depth(host, each)):
        parent = device.parent
        above = f"/sys/devices/{device.root_complex}" if parent is None else directory_of[parent]
        directory_of[device.bdf] = directory = f"{above}/{device.bdf}"
        files |= {f"{directory}/{name}": text for name, text in _texts(device, width).items()}
        files[f"{directory}/resource"] = _resource(device, regions)
        _link(links, f"{PCI}/devices/{device.bdf}", directory)
        if device.driver is not None:
            _link(links, f"{directory}/driver", f"{PCI}/drivers/{device.driver}")
            _link(links, f"{PCI}/drivers/{device.driver}/{device.bdf}", directory)
        if device.iommu_group is not None:
            group = f"/sys/kernel/iommu_groups/{device.iommu_group}"
            _link(links, f"{directory}/iommu_group", group)
            _link(links, f"{group}/devices/{device.bdf}", directory)
    following: dict[Bdf, int] = {}
    for device in host.pci_devices:
        physical = device.physical_function
        if physical is not None:
            position = following.setdefault(physical, 0)
            following[physical] += 1
            _link(links, f"{directory_of[device.bdf]}/physfn", directory_of[physical])
            _link(links, f"{directory_of[physical]}/virtfn{position}", directory_of[device.bdf])
    _render_parts(host, directory_of, files, links)
    return RenderedDevices(files, links)


def _render_parts(
    host: Host, directory_of: Mapping[Bdf, str], files: dict[str, str], links: dict[str, str]
) -> None:
    """Mediated devices, and what the drivers add to the directories of divided GPUs."""
    for gpu in host.pci_devices:
        parts = gpu.parts
        mediated = [part for part in parts if part.kind is PartKind.MEDIATED]
        virtual = (
            [one.bdf for one in host.pci_devices if one.physical_function == gpu.bdf]
            if parts
            else []
        )
        names = sorted({part.profile for part in parts if part.profile and part.bdf})
        number_of = {name: str(number) for number, name in enumerate(names, start=100)}
        for bdf in (virtual or [gpu.bdf]) if mediated else ():
            _link(links, f"/sys/class/mdev_bus/{bdf}", directory_of[bdf])
        for part in mediated:
            assert part.bdf is not None and part.profile is not None
            function = directory_of[part.bdf]
            types = f"{function}/mdev_supported_types/nvidia-{number_of[part.profile]}"
            _link(links, f"/sys/bus/mdev/devices/{part.uuid}", f"{function}/{part.uuid}")
            _link(links, f"{function}/{part.uuid}/mdev_type", types)
            files[f"{types}/name"] = f"{part.profile}\n"
            if part.memory_bytes is not None:
                size = part.memory_bytes // MIB
                files[f"{types}/description"] = (
                    f"num_heads=4, framebuffer={size}M, max_instance=7\n"
                )
        type_of = {one.bdf: one.profile for one in parts if one.profile} if not mediated else {}
        for bdf in virtual if any(type_of) else ():
            vgpu = f"{directory_of[bdf]}/nvidia"
            files[f"{vgpu}/current_vgpu_type"] = f"{number_of.get(type_of.get(bdf) or '', '0')}\n"
            listed = "".join(f"{number:<5} : {name}\n" for name, number in number_of.items())
            files[f"{vgpu}/creatable_vgpu_types"] = f"ID    : vGPU Name\n{listed}"
        if gpu.partition_mode is not None and gpu.partition_mode != "mig":
            files[f"{directory_of[gpu.bdf]}/current_compute_partition"] = f"{gpu.partition_mode}\n"
        if gpu.memory_partition_mode is not None:
            mode = f"{gpu.memory_partition_mode}\n"
            files[f"{directory_of[gpu.bdf]}/current_memory_partition"] = mode


def _depth(host: Host, device: PciDevice) -> tuple[int, Bdf]:
    return len(host.bridges_above(device.bdf)), device.bdf


def _link(links: dict[str, str], path: str, target: str) -> None:
    """A relative link, as sysfs has them."""
    here, there = path.split("/")[1:-1], target.split("/")[1:]
    shared = 0
    while shared < min(len(here), len(there)) and here[shared] == there[shared]:
        shared += 1
    links[path] = "/".join([".."] * (len(here) - shared) + there[shared:])


def _texts(device: PciDevice, width: int) -> dict[str, str]:
    numbers = {
        "class": (device.class_code, 6),
        "vendor": (device.vendor_id, 4),
        "device": (device.device_id, 4),
        "subsystem_vendor": (device.subsystem_vendor_id, 4),
        "subsystem_device": (device.subsystem_device_id, 4),
    }
    texts = {
        name: f"0x{number:0{digits}x}\n"
        for name, (number, digits) in numbers.items()
        if number is not None
    }
    node = device.reported_node
    texts["numa_node"] = f"{-1 if node is None else node}\n"
    local = device.local_pus
    if local is not None:
        texts["local_cpulist"], texts["local_cpus"] = f"{local}\n", f"{mask(local, width)}\n"
    link = device.link
    if link is not None:
        texts["current_link_speed"] = _speed(link.current_gt_per_s)
        texts["max_link_speed"] = _speed(link.max_gt_per_s)
        texts["current_link_width"] = f"{link.current_width or 0}\n"
        texts["max_link_width"] = f"{link.max_width or 0}\n"
    if device.bridge is not None:
        texts["secondary_bus_number"] = f"{device.bridge.secondary_bus}\n"
        texts["subordinate_bus_number"] = f"{device.bridge.subordinate_bus}\n"
    if device.sriov_total_vfs is not None:
        texts["sriov_totalvfs"] = f"{device.sriov_total_vfs}\n"
        texts["sriov_numvfs"] = f"{device.sriov_num_vfs or 0}\n"
    texts["config"] = config_space(device).decode("utf-8", "surrogateescape")
    return texts


def _speed(gt_per_s: float | None) -> str:
    return "Unknown\n" if gt_per_s is None else f"{gt_per_s:.1f} GT/s PCIe\n"


def _regions(devices: tuple[PciDevice, ...]) -> dict[tuple[Bdf, int], int]:
    """First address of each BAR: they lie one after the other, aligned to their size."""
    following = {False: _FIRST_ADDRESS, True: _FIRST_ADDRESS_64}
    first: dict[tuple[Bdf, int], int] = {}
    for device in devices:
        for bar in device.bars:
            start = -(-following[bar.is_64bit] // bar.size_bytes) * bar.size_bytes
            first[device.bdf, bar.index] = start
            following[bar.is_64bit] = start + bar.size_bytes
    return first


def _resource(device: PciDevice, regions: Mapping[tuple[Bdf, int], int]) -> str:
    bars = {bar.index: bar for bar in device.bars}
    lines = []
    for index in range(_BRIDGE_RESOURCES if device.bridge else _RESOURCES):
        first = last = flags = 0
        if index in bars:
            first = regions[device.bdf, index]
            last, flags = first + bars[index].size_bytes - 1, _flags(bars[index])
        lines.append(f"0x{first:016x} 0x{last:016x} 0x{flags:016x}\n")
    return "".join(lines)


def _flags(bar: PciBar) -> int:
    flags = _SIZE_ALIGNED | (_MEMORY if bar.is_memory else _IO)
    flags |= _PREFETCH if bar.is_prefetchable else 0
    return flags | (_MEMORY_64 if bar.is_64bit else 0)


_BYTES = 256
_CAPABILITY_AT = 0x40
_PCIE_CAPABILITY = 0x10
_HAS_CAPABILITIES = 0x10
_ENDPOINT, _INTEGRATED_ENDPOINT = 0x0, 0x9
_PORT_CODE = {
    PortType.ROOT_PORT: 0x4,
    PortType.SWITCH_UPSTREAM: 0x5,
    PortType.SWITCH_DOWNSTREAM: 0x6,
    PortType.PCI_BRIDGE: 0x7,
}
_SPEED_CODE = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def config_space(device: PciDevice) -> bytes:
    """The first 256 bytes, as root reads them from the function's `config` file."""
    space = bytearray(_BYTES)
    struct.pack_into("<HH", space, 0x00, device.vendor_id or 0, device.device_id or 0)
    struct.pack_into("<H", space, 0x06, _HAS_CAPABILITIES)
    space[0x09:0x0C] = device.class_code.to_bytes(3, "little")
    space[0x34] = _CAPABILITY_AT
    bridge = device.bridge
    if bridge is None:
        struct.pack_into(
            "<HH", space, 0x2C, device.subsystem_vendor_id or 0, device.subsystem_device_id or 0
        )
        kind = _INTEGRATED_ENDPOINT if device.parent is None else _ENDPOINT
    else:
        space[0x0E] = 1
        space[0x18:0x1B] = bytes((device.bdf.bus, bridge.secondary_bus, bridge.subordinate_bus))
        kind = _PORT_CODE[bridge.port_type]
    maximum, current = _link_words(device.link)
    struct.pack_into("<BBH", space, _CAPABILITY_AT, _PCIE_CAPABILITY, 0, kind << 4 | 2)
    struct.pack_into("<I", space, _CAPABILITY_AT + 0x0C, maximum)
    struct.pack_into("<H", space, _CAPABILITY_AT + 0x12, current)
    return bytes(space)


def _link_words(link: PciLink | None) -> tuple[int, int]:
    """Link Capabilities and Link Status."""
    if link is None:
        return 0, 0
    return (
        _word(link.max_gt_per_s, link.max_width),
        _word(link.current_gt_per_s, link.current_width),
    )


def _word(gt_per_s: float | None, width: int | None) -> int:
    """Speed in bits 0-3, width in bits 4-9; both registers agree on that."""
    return _SPEED_CODE.get(gt_per_s or 0.0, 0) | (width or 0) << 4


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
        outputs["rocm-smi-json"] = _rocm_topology(host, amd)
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
    document: dict[str, dict[str, str]] = {
        f"card{i}": {
            "PCI Bus": str(gpu.bdf).upper(),
            "(Topology) Numa Node": str(-1 if gpu.node is None else gpu.node),
        }
        for i, gpu in enumerate(gpus)
    }
    system = document["system"] = {}
    for (a, gpu), (b, other) in combinations(enumerate(gpus), 2):
        joined = frozenset((gpu.bdf, other.bdf)) in linked
        pair = f"between DRM devices {a} and {b}"
        system[f"(Topology) Hops {pair}"] = "1" if joined else "2"
        system[f"(Topology) Link type {pair}"] = "XGMI" if joined else "PCIE"
    return json.dumps(document) + "\n"
