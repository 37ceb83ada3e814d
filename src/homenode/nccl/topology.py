"""NcclTopology: CPUs, PCIe switches, GPUs and NICs as NCCL's topology file gives a guest them.

Source: src/graph/{xml.h,xml.cc,topo.cc} of NVIDIA/nccl and ROCm/rccl. Its parser
reads characters, not XML: no declaration, no tabs, one space between attributes, a tag on one line.
"""

from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from homenode.cpuset import CpuSet

LINK_SPEEDS = {
    2.5: "2.5 GT/s PCIe",
    5.0: "5.0 GT/s PCIe",
    8.0: "8.0 GT/s PCIe",
    16.0: "16.0 GT/s PCIe",
    32.0: "32.0 GT/s PCIe",
    64.0: "64.0 GT/s PCIe",
}
"""GT/s per lane and the text that NCCL parses, as kernels since 5.7 print it."""

OLD_LINK_SPEEDS = ("2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s")
"""The texts of kernels up to 5.6. NCCL compares prefixes."""

SWITCH_CLASS = 0x060400
ADDED_FOR_GPU = 2  # NCCL adds <gpu>, and at least one <nvlink>
ADDED_FOR_NIC = 2  # <nic> and <net>
NO_DEVICE = 0xFFFF
"""Vendor and device of a virtual switch. Broadcom's 0x1000 makes NCCL search for peer links."""


class NcclVariant(StrEnum):
    """The library that reads the file."""

    NCCL = "nccl"
    RCCL = "rccl"

    @property
    def version(self) -> str:
        """The only <system version> that it accepts. Source: NCCL_TOPO_XML_VERSION of each."""
        return "1" if self is NcclVariant.NCCL else "2"

    @property
    def most_nodes(self) -> int:
        """Limit of elements in a file: of 256 slots (8,192 in RCCL) one is for the closing tag.
        Source: NCCL_TOPO_XML_MAX_NODES, RCCL's MAX_NODES, xmlLoadSub."""
        return 255 if self is NcclVariant.NCCL else 8191


class NcclPci(Struct, frozen=True, kw_only=True):
    """A <pci>: a switch with children, or a GPU or NIC without."""

    bus_id: str  # address in the guest's kernel; an unused one for a virtual switch
    class_code: int  # 24 bits
    gt_per_s: float | None  # a lane
    width: int | None  # lanes; None = the guest's sysfs decides
    children: tuple["NcclPci", ...] = ()

    def walk(self) -> Iterator["NcclPci"]:
        """Yield this element and all elements below it, in document order."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def is_virtual(self) -> bool:
        return self.bus_id.startswith("ffff:ff:")


class NcclCpu(Struct, frozen=True, kw_only=True):
    """A <cpu>: the guest's vCPUs that run on one host node, and the devices of that node."""

    numa_id: int  # the guest's node, if it has one for the host node
    affinity: CpuSet  # vCPUs
    architecture: str | None  # NCCL's word ("x86_64", "arm64", "ppc64")
    vendor: str | None  # CPUID vendor of the host's CPU; None if unknown
    family: int | None  # CPUID family of the host's CPU; None if unknown
    model: int | None  # CPUID model of the host's CPU; None if unknown
    children: tuple[NcclPci, ...]


class NcclTopology(Struct, frozen=True):
    flavour: NcclVariant
    cpus: tuple[NcclCpu, ...]  # ascending by host node

    @property
    def nodes(self) -> int:
        """Elements of the file."""
        return 1 + len(self.cpus) + sum(1 for _ in self.list_pcis())

    def list_pcis(self) -> Iterator[NcclPci]:
        """Yield every <pci>, in document order."""
        for cpu in self.cpus:
            for child in cpu.children:
                yield from child.walk()


def write_topology(topology: NcclTopology) -> str:
    """Return the file's text: ASCII, with a newline at the end."""
    lines = [f'<system version="{topology.flavour.version}">']
    vcpus = max((cpu.affinity.bits.bit_length() for cpu in topology.cpus), default=0)
    for cpu in topology.cpus:
        lines += _format_element(
            "  ", "cpu", _list_cpu_attributes(cpu, vcpus), _format_children(cpu.children, "    ")
        )
    lines.append("</system>")
    return "\n".join(lines) + "\n"


def format_affinity(vcpus: CpuSet, size: int) -> str:
    """Format a mask of at least `size` bits in groups of 32, the highest first, as NCCL reads it.

    >>> format_affinity(CpuSet(range(32, 48)), 64)
    '0000ffff,00000000'
    >>> format_affinity(CpuSet(range(48)), 96), format_affinity(CpuSet(), 0)
    ('00000000,0000ffff,ffffffff', '00000000')
    """
    groups = max(1, -(-max(size, vcpus.bits.bit_length()) // 32))
    return ",".join(
        f"{vcpus.bits >> 32 * group & 0xFFFFFFFF:08x}" for group in reversed(range(groups))
    )


def format_link_speed(gt_per_s: float) -> str:
    """Return NCCL's text for a speed; for an unknown speed that of the next lower one.

    >>> [format_link_speed(speed) for speed in (1.0, 20.0, 32.0, 128.0)]
    ['2.5 GT/s PCIe', '16.0 GT/s PCIe', '32.0 GT/s PCIe', '64.0 GT/s PCIe']
    """
    lower_speeds = [speed for speed in LINK_SPEEDS if speed <= gt_per_s]
    return LINK_SPEEDS[max(lower_speeds, default=min(LINK_SPEEDS))]


def _list_cpu_attributes(cpu: NcclCpu, vcpus: int) -> Iterator[tuple[str, str]]:
    yield "numaid", str(cpu.numa_id)
    yield "affinity", format_affinity(cpu.affinity, vcpus)
    if cpu.architecture is not None:
        yield "arch", cpu.architecture
    if cpu.vendor is not None:
        yield "vendor", cpu.vendor
    # NCCL fills in both if familyid is missing, and fails if only modelid is missing.
    if cpu.family is not None and cpu.model is not None:
        yield "familyid", str(cpu.family)
        yield "modelid", str(cpu.model)


def _format_children(children: tuple[NcclPci, ...], indent: str) -> Iterator[str]:
    for child in children:
        child_lines = _format_children(child.children, indent + "  ")
        yield from _format_element(indent, "pci", _list_pci_attributes(child), child_lines)


def _list_pci_attributes(pci: NcclPci) -> Iterator[tuple[str, str]]:
    yield "busid", pci.bus_id
    yield "class", f"0x{pci.class_code:06x}"
    if pci.is_virtual:
        for name in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
            yield name, f"0x{NO_DEVICE:04x}"
    if pci.gt_per_s is not None:
        yield "link_speed", format_link_speed(pci.gt_per_s)
    if pci.width is not None:
        yield "link_width", str(pci.width)


def _format_element(
    indent: str, name: str, attributes: Iterator[tuple[str, str]], child_lines: Iterator[str]
) -> Iterator[str]:
    tag = " ".join([name, *(f'{key}="{value}"' for key, value in attributes)])
    lines = list(child_lines)
    if not lines:
        yield f"{indent}<{tag}/>"
        return
    yield f"{indent}<{tag}>"
    yield from lines
    yield f"{indent}</{name}>"


DEFAULT_PATH = "/var/run/nvidia-topologyd/virtualTopology.xml"
KEPT_PATH = "/etc/nccl/virtualTopology.xml"
_TMPFILES_PATH = "/etc/tmpfiles.d/nccl-topology.conf"
_RUN_PATH = DEFAULT_PATH.removeprefix("/var")


def render_cloud_config(topology: str) -> str:
    """Return the cloud-config for a file's text; merge it with the VM's other cloud-configs.

    NCCL and RCCL read NCCL_TOPO_FILE, else DEFAULT_PATH. That is on a tmpfs, so the file itself is
    in /etc, and systemd-tmpfiles copies it at each boot. A symbolic link would be broken in a
    container that mounts the directory.

    The text is indented, so it must have no tabs and no control characters, as from write_topology.
    """
    directory = _RUN_PATH.rpartition("/")[0]
    rules = f"d {directory} 0755 root root -\nC {_RUN_PATH} 0644 root root - {KEPT_PATH}\n"
    return (
        "#cloud-config\n"
        "write_files:\n"
        f"{_format_file(KEPT_PATH, topology)}"
        f"{_format_file(_TMPFILES_PATH, rules)}"
        "runcmd:\n"
        f"  - [install, -D, -m, '0644', {KEPT_PATH}, {DEFAULT_PATH}]\n"
    )


def _format_file(path: str, content: str) -> str:
    indented_lines = "".join(f"      {line}\n" for line in content.splitlines())
    return (
        f"  - path: {path}\n    owner: root:root\n    permissions: '0644'\n"
        f"    content: |\n{indented_lines}"
    )
