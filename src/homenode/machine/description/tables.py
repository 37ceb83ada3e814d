"""Tables of a host.toml: keys and the types of their values; docs/reference/formats/host-toml.md.

What is described *is* a Host: rendering it to files and discovering those gives it back.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, defstruct, field
from msgspec.structs import fields

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.pci import LinkKind, PartKind, PciLink
from homenode.machine.topology import LOCAL_DISTANCE, CoreKind, Host, HostSummary
from homenode.toml_text import NO_LIMIT, Count, Line, Size, TomlTable, VmSizeTable


class HostDescription(Struct, frozen=True):
    """A machine as its host.toml gives it."""

    about: str  # one line for people
    host: Host


VERSION = 1
"""Newest version of the format that this program reads."""
MAX_PUS = 8192
"""Most PUs of a described host. Source: NR_CPUS_RANGE_END of arch/x86/Kconfig."""
MAX_NODES = 1024
"""Source: NODES_SHIFT up to 10 in arch/x86/Kconfig."""
LINK_SPEEDS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)
"""GT/s a lane. Source: PCIe 6.0, 7.5.3.18 Link Capabilities 2."""
UNKNOWN_NODE = "unknown"

_MAX_DISTANCE = 255  # ACPI 6.5, 5.2.17: 255 = unreachable
_LINK = re.compile(r"\s*(\d{1,4}(?:\.\d{1,4})?)\s*GT/s\s*x(\d{1,2})\s*\Z", re.ASCII)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})\Z", re.ASCII)


class LinkText:
    """A link such as "32GT/s x16", current and maximum alike; None for "none": no link at all."""

    __slots__ = ("link",)  # no dataclass, which msgspec would expect to be a table

    def __init__(self, link: PciLink | None) -> None:
        self.link = link

    @classmethod
    def from_toml(cls, value: object) -> "LinkText":
        if value == "none":
            return cls(None)
        match = _LINK.match(value) if isinstance(value, str) else None
        speed, width = (float(match[1]), int(match[2])) if match else (0.0, 0)
        if speed not in LINK_SPEEDS or not 1 <= width <= 32:
            speeds = ", ".join(f"{speed_choice:g}" for speed_choice in LINK_SPEEDS)
            raise ValueError(f"a link such as 32GT/s x16 ({speeds} GT/s)")
        return cls(PciLink(speed, width, speed, width))


Numbering = Literal[
    "siblings-far", "siblings-adjacent", "siblings-far-in-package", "nodes-interleaved"
]
"""How the firmware numbers PUs; docs/reference/formats/host-toml.md shows each."""
DeviceClass = Literal["gpu", "nic", "nvme", "nvswitch", "audio", "bmc", "other"]

Positive = Annotated[int, Meta(ge=1, le=NO_LIMIT)]
Packages = Annotated[int, Meta(ge=1, le=256)]
Parts = Annotated[int, Meta(ge=1, le=64)]
Threads = Annotated[int, Meta(ge=1, le=8)]
Cores = Annotated[int, Meta(ge=1, le=MAX_PUS)]
NodeNumber = Annotated[int, Meta(ge=0, le=MAX_NODES - 1)]
Distance = Annotated[int, Meta(ge=LOCAL_DISTANCE, le=_MAX_DISTANCE)]
Remote = Annotated[int, Meta(ge=LOCAL_DISTANCE + 1, le=_MAX_DISTANCE)]
Byte = Annotated[int, Meta(ge=0, le=0xFF)]
Word = Annotated[int, Meta(ge=0, le=0xFFFF)]
ClassCode = Annotated[int, Meta(ge=0, le=0xFFFFFF)]
DomainNumber = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
HugePages = Annotated[dict[str, Any], Meta(extra={"expected": 'a table such as { "1GiB" = 64 }'})]


class HostTable(TomlTable):
    page: ClassVar[str] = "docs/reference/formats/host-toml.md"


class CpuTable(HostTable):
    vendor: Line | None = None
    name: Line | None = None
    family: Count | None = None
    model: Count | None = None


class CoreGroupTable(HostTable, kw_only=True):
    kind: CoreKind = CoreKind.PERFORMANCE
    cores: Cores
    threads_per_core: Threads | None = None


class PackageTable(HostTable, kw_only=True):
    index: Count
    cores: Cores | None = None
    threads_per_core: Threads | None = None
    core_groups: tuple[CoreGroupTable, ...] | None = None
    llcs: Count | None = None
    dies: Positive | None = None


class PagesTable(HostTable):
    total: Count
    free: Count | None = None


class NodeTable(HostTable):
    index: Annotated[
        int | str | tuple[NodeNumber, ...],
        Meta(extra={"expected": f'node numbers below {MAX_NODES}, 4 or "5-11"'}),
    ]
    package: Count | None = None
    cores: Annotated[int, Meta(ge=0, le=MAX_PUS)] | None = None
    memory: Size | None = None
    memory_free: Size | None = None
    hugepages: HugePages | None = None
    kind: Literal["other", ""] = ""
    gpu: Line | None = None
    generic_initiator: bool = False


class DistancesTable(HostTable):
    """Source of the first two: most two-package x86 hosts (Intel 10/12/21); others are guesses."""

    same_package: Remote = 12
    other_package: Remote = 21
    memory_same_package: Remote = 20
    memory_other_package: Remote = 30
    between_memory: Remote = 40


class ElementTable(HostTable):
    """A device, a switch or an empty port; a text such as "h200@19:00.0" is short for one."""

    model: Line | None = None
    name: Line | None = None
    bdf: Bdf | None = None
    node: Count | Literal["unknown"] | None = None
    link: LinkText | None = None
    trained: LinkText | None = None
    driver: Line | None = None
    iommu_group: Word | None = None
    vfs: Count | None = None
    divided_by: PartKind | None = None
    parts: tuple[str, ...] | None = None
    memory_mode: Line | None = None
    switch: tuple["str | ElementTable", ...] | None = None
    port_link: LinkText | None = None
    empty: bool | None = None


class RootTable(HostTable):
    node: Count | Literal["unknown"] | tuple[Count | Literal["unknown"], ...] = "unknown"
    domain: DomainNumber | tuple[DomainNumber, ...] = 0
    bus: Byte | tuple[Byte, ...] | None = None
    ports: tuple[str | ElementTable, ...] = ()
    integrated: tuple[str | ElementTable, ...] = ()
    port_link: LinkText | None = None


class ModelTable(HostTable):
    label: Line = ""
    class_: DeviceClass | None = field(name="class", default=None)
    class_code: ClassCode | None = None
    vendor: Word | None = None
    device: Word | None = None
    subsystem_vendor: Word | None = None
    subsystem_device: Word | None = None
    link: LinkText | None = None
    trained: LinkText | None = None
    bars: tuple[str, ...] | None = None
    functions: tuple[str, ...] = ()
    driver: Line | None = None
    total_vfs: Annotated[int, Meta(ge=1, le=0xFF)] | None = None
    vfs: Count | None = None
    vf_device: Word | None = None
    vf_driver: Line | None = None
    divided_by: PartKind | None = None
    parts: tuple[str, ...] | None = None
    memory_mode: Line | None = None


class LinkTable(HostTable, kw_only=True):
    kind: LinkKind = LinkKind.NVLINK
    between: str | tuple[str, ...]
    count: Annotated[int, Meta(ge=1, le=999)] | None = None


class Version:
    """A version such as "10.0.0"."""

    __slots__ = ("numbers",)

    def __init__(self, *numbers: int) -> None:
        self.numbers = (numbers[0], numbers[1], numbers[2])

    @classmethod
    def from_toml(cls, value: object) -> "Version":
        match = _VERSION.match(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError('a version such as "10.0.0"')
        return cls(int(match[1]), int(match[2]), int(match[3]))


class SettingsTable(HostTable):
    kernel_release: Line | None = None
    kernel_command_line: Line | None = None
    isolated: CpuSet = CpuSet()
    nohz_full: CpuSet = CpuSet()
    smt_control: Line | None = None
    governor: Line | None = None
    transparent_hugepages: Line | None = None
    numa_balancing: Annotated[int, Meta(ge=0, le=3)] | None = None
    libvirt: Version | None = None
    qemu: Version | None = None


class VmTable(VmSizeTable, kw_only=True):
    page: ClassVar[str] = HostTable.page
    name: Line
    state: Literal["planned", "running", "shut-off"] = "planned"
    pins: str | tuple[CpuSet, ...] | None = None
    nodes: Count | tuple[Count, ...] = ()
    memory: int | str | dict[str, Any] | None = None
    emulator: CpuSet = CpuSet()
    iothreads: tuple[CpuSet, ...] = ()
    devices: tuple[Line, ...] = ()


class ReserveTable(HostTable):
    cores: Count | None = None
    memory: Size | None = None
    housekeeping_pus: CpuSet = CpuSet()


class FactsTable(HostTable):
    published: Annotated[
        dict[str, str], Meta(extra={"expected": 'lines such as "48 cores" = "source"'})
    ] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


ExpectTable = defstruct(
    "ExpectTable",
    [
        (summary_field.name, (Size if summary_field.name == "memory_bytes" else Count) | None, None)
        for summary_field in fields(HostSummary)
    ],
    bases=(HostTable,),
)


class HostDocument(HostTable):
    """The file itself."""

    format: Positive = VERSION
    name: Line = ""
    about: Line = ""
    architecture: Line = "x86_64"
    cpu: CpuTable = field(default_factory=CpuTable)
    packages: Packages = 1
    package_numbers: NodeNumber | tuple[NodeNumber, ...] | None = None
    nodes_per_package: Parts = 1
    packages_per_node: Positive = 1
    node_numbers: NodeNumber | tuple[NodeNumber, ...] | None = None
    dies_per_package: Positive = 1
    llcs_per_package: Count = 1
    llc_size: Size | None = None
    llc_sizes: tuple[Size, ...] = ()
    llc_level: Annotated[int, Meta(ge=1, le=4)] = 3
    cores_per_package: Cores | None = None
    threads_per_core: Threads = 1
    core_groups: tuple[CoreGroupTable, ...] | None = None
    numbering: Numbering = "siblings-far"
    package: tuple[PackageTable, ...] = ()
    memory_per_node: Size | None = None
    hugepages_per_node: HugePages = field(default_factory=dict)
    node: tuple[NodeTable, ...] = ()
    distances: Literal["none"] | tuple[tuple[Distance, ...], ...] | DistancesTable = field(
        default_factory=DistancesTable
    )
    root: tuple[RootTable, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    link: tuple[LinkTable, ...] = ()
    iommu: bool = True
    settings: SettingsTable = field(default_factory=SettingsTable)
    offline_pus: CpuSet = CpuSet()
    disallowed_pus: CpuSet = CpuSet()
    facts: FactsTable = field(default_factory=FactsTable)
    expect: ExpectTable = field(default_factory=ExpectTable)  # type: ignore[valid-type]
    reserve: ReserveTable = field(default_factory=ReserveTable)
    vm: tuple[VmTable, ...] = ()
