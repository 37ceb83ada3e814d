"""NcclTopology: CPUs, PCIe switches, GPUs and NICs as NCCL's topology file gives a guest them.

Source: src/graph/{xml.h,xml.cc,topo.cc} of NVIDIA/nccl and ROCm/rccl.
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
"""GT/s a lane -> the text that NCCL knows, as kernels since 5.7 print it."""

OLD_LINK_SPEEDS = ("2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s")
"""As kernels up to 5.6 print them. NCCL compares with what a text starts with."""

SWITCH_CLASS = 0x060400
NO_DEVICE = 0xFFFF
"""Vendor and device of a virtual switch. Broadcom's 0x1000 makes NCCL look for peer links."""


class NcclVariant(StrEnum):
    """Which library reads the file."""

    NCCL = "nccl"
    RCCL = "rccl"

    @property
    def version(self) -> str:
        """The only <system version> that it takes. Source: NCCL_TOPO_XML_VERSION of each."""
        return "1" if self is NcclVariant.NCCL else "2"

    @property
    def most_nodes(self) -> int:
        """Elements that a file may have: of 256 places (8,192 in RCCL) the parser needs one for the
        closing tag. Source: NCCL_TOPO_XML_MAX_NODES, RCCL's MAX_NODES, xmlLoadSub."""
        return 255 if self is NcclVariant.NCCL else 8191


class NcclPci(Struct, frozen=True, kw_only=True):
    """A <pci>: a switch with children, or a GPU or NIC without.

    bus_id: the guest kernel's address, or one that no guest has for a virtual switch. class_code:
    24 bits. gt_per_s: a lane; width: lanes; each None where the guest's own sysfs is to say.
    """

    bus_id: str
    class_code: int
    gt_per_s: float | None
    width: int | None
    children: tuple["NcclPci", ...] = ()

    def walk(self) -> Iterator["NcclPci"]:
        """This and everything below it, in document order."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def is_virtual(self) -> bool:
        return self.bus_id.startswith("ffff:ff:")


class NcclCpu(Struct, frozen=True, kw_only=True):
    """A <cpu>: the part of the guest's vCPUs that runs on one host node, and what hangs there.

    numa_id: the guest's node where it has one for it. affinity: vCPUs. architecture: NCCL's word
    ("x86_64", "arm64", "ppc64"). vendor, family, model: of the real CPU, None where not known.
    """

    numa_id: int
    affinity: CpuSet
    architecture: str | None
    vendor: str | None
    family: int | None
    model: int | None
    children: tuple[NcclPci, ...]


class NcclTopology(Struct, frozen=True):
    """A whole file. cpus: ascending by host node."""

    flavour: NcclVariant
    cpus: tuple[NcclCpu, ...]

    @property
    def nodes(self) -> int:
        """Elements of the file."""
        return 1 + len(self.cpus) + sum(1 for _ in self.pcis())

    def pcis(self) -> Iterator[NcclPci]:
        """Every <pci>, in document order."""
        for cpu in self.cpus:
            for child in cpu.children:
                yield from child.walk()
