"""Tables of a host.toml: keys and the types of their values; docs/reference/formats/host-toml.md.

A TomlTable's fields are the allowed keys of its table. msgspec checks and converts; errors name the
key: file: key: expected, found.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, defstruct, field
from msgspec.structs import fields

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError, find_near
from homenode.formats import TYPES
from homenode.machine.link_path import SPEEDS
from homenode.machine.pci import LinkKind, PartKind, PciLink
from homenode.machine.topology import LOCAL_DISTANCE, CoreKind, Host, HostSummary
from homenode.units import parse_bytes

T = TypeVar("T")

PAGE = "docs/reference/formats/host-toml.md"
NO_LIMIT = 1 << 62
Line = Annotated[str, Meta(pattern=r"\A[^\n\r\0]*\Z")]
Count = Annotated[int, Meta(ge=0, le=NO_LIMIT)]

_MAX_CHARACTERS = 1 << 20
_MAX_DOTS = 20_000_000
"""Sum over lines of the squares of their dots: to read a key of n parts takes n^2 steps and as much
memory (Python's tomllib, 3.11 to 3.14). Maximum of values in a line of addresses or sizes."""

_LONG_NUMBER = re.compile(r"\b0[xob][0-9a-fA-F_]{99}")
"""Digits of a whole number: Python can parse longer numbers but cannot print them."""

_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$([^`]*)`)?", re.DOTALL)
_MISFIT = re.compile(r"(.*?)(?: - at `\$([^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
"""A step of the path in msgspec's messages."""


class Size(int):
    """Bytes of a text such as "512GiB"; only 0 may be a number: 512 could mean bytes or GiB."""


class TomlTable(Struct, forbid_unknown_fields=True, dict=True):
    """A table with its location in the file."""

    @property
    def source(self) -> str:
        """The name of the file, for messages."""
        return str(self.__dict__["source"])

    @property
    def location(self) -> str:
        """The table's key in the file; "" for the file itself."""
        return str(self.__dict__["location"])

    def locate(self, source: str, location: str) -> None:
        """Record the location of the table and its subtables."""
        self.__dict__.update(source=source, location=location)
        for name, key in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True):
            value = getattr(self, name)
            for i, element in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(element, TomlTable):
                    index = f"[{i}]" if isinstance(value, tuple) else ""
                    element.locate(source, f"{self.name_of(key)}{index}")

    def name_of(self, key: str) -> str:
        """Return the whole name of a key, as messages give it."""
        return _join(self.location, key)

    def make_error(self, key: str, expected: str, value: object) -> InputError:
        return make_value_error(self.source, self.name_of(key), expected, value)

    def check_bounds(self, key: str, value: int, least: int, limit: int) -> int:
        """Return the value of a key whose limits depend on other keys. Raises InputError."""
        if not least <= value <= limit:
            raise self.make_error(key, f"a whole number, {least} to {limit}", value)
        return value


def decode_toml(text: str, table_type: type[T], source: str) -> T:
    """Return the table of a whole file. source: its name, for messages. Raises InputError."""
    try:
        values = read_toml(text)
    except ValueError as error:
        raise InputError(f"{source}: expected TOML, found: {error}") from None
    return decode_value(values, table_type, source, "")


def read_toml(text: str) -> dict[str, Any]:
    """Parse a file. Raises ValueError for invalid TOML, or TOML that is too expensive to read."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {_MAX_CHARACTERS}")
    if sum(line.count(".") ** 2 for line in text.split("\n")) > _MAX_DOTS:
        raise ValueError("lines with too many dots: keys of thousands of parts")
    if _LONG_NUMBER.search(text):
        raise ValueError("a number of more than 99 digits")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("values nested too deeply") from None


def decode_value(value: object, value_type: type[T], source: str, location: str) -> T:
    """Return the value of a key, as a table or another type. Raises InputError."""
    try:
        with TYPES:
            decoded_value = msgspec.convert(value, value_type, dec_hook=_convert_text)
    except msgspec.ValidationError as error:
        raise _explain(error, value, source, location) from None
    except RecursionError:
        raise make_value_error(source, location, "tables nested less deeply", "too many") from None
    if isinstance(decoded_value, TomlTable):
        decoded_value.locate(source, location)
    return decoded_value


def make_value_error(source: str, location: str, expected: str, value: object) -> InputError:
    """Return the error for an invalid value at a key."""
    value = list(value) if isinstance(value, tuple) else value
    text = "nothing" if value is None else repr(value)
    if len(text) > 120:
        text = f"{len(value)} of them" if isinstance(value, list) else text[:117] + "..."
    place = f"{source}: {location}" if location else source
    return InputError(f"{place}: expected {expected}, found {text}")


def _join(location: str, key: str) -> str:
    return f"{location}.{key}" if location and key else location or key


def _convert_text(value_type: type, value: Any) -> Any:
    """Convert sizes, CPU sets, addresses and other types with `from_toml`. Raises ValueError."""
    read = getattr(value_type, "from_toml", None)
    if read is not None:
        return read(value)
    if value_type is Size and value == 0 and type(value) is int:
        return Size(0)
    if isinstance(value, str):
        try:
            if value_type is Size and not value.strip().isdigit():
                return Size(parse_bytes(value))
            if value_type is CpuSet or value_type is Bdf:
                parser: Any = value_type
                return parser.parse(value)
        except ParseError as error:
            raise ValueError(error.expected) from None
        except InputError:
            pass
    raise ValueError(_EXPECTED.get(value_type, value_type.__name__))


_EXPECTED = {
    Size: 'a size with its unit, such as "512GiB"',
    CpuSet: 'CPUs such as "0-3,8"',
    Bdf: 'an address such as "3b:00.0"',
}


def _explain(error: msgspec.ValidationError, value: Any, source: str, location: str) -> InputError:
    """Return msgspec's error with the key's full name and its value."""
    unknown = _UNKNOWN_KEY.fullmatch(str(error))
    if unknown is not None:
        key, path = unknown.groups("")
        match = find_near(key, set(_list_keys(TomlTable)))
        meant = f" (did you mean {match}?)" if match else ""
        place = _join((location + path).lstrip("."), key)
        return InputError(f"{source}: {place}: unknown key{meant}", hint=f"{PAGE} lists the keys")
    misfit = _MISFIT.fullmatch(str(error))
    assert misfit is not None, "it matches any text"
    message, path = misfit.groups("")
    for name, index in _STEP.findall(path.partition("[...]")[0]):  # [...]: a value of a mapping
        value = value[name or int(index)]
    place = (location + path).lstrip(".")
    if isinstance(error.__cause__, ValueError):
        return make_value_error(source, place, str(error.__cause__), value)
    if message.startswith("Expected "):
        expected = message.removeprefix("Expected ").partition(", got ")[0]
        return make_value_error(
            source, place, expected.replace("`", "").replace(" | null", ""), value
        )
    refusal = f"{place}: {message}" if place else message
    return InputError(f"{source}: {refusal}", hint=f"{PAGE} lists keys and values")


def _list_keys(table: type[Struct]) -> Iterator[str]:
    yield from table.__struct_encode_fields__
    for subclass in table.__subclasses__():
        yield from _list_keys(subclass)


class HostDescription(Struct, frozen=True):
    """The machine of a host.toml."""

    about: str  # one line for people
    host: Host


VERSION = 1
"""Newest version of the format that this program reads."""
MAX_PUS = 8192
"""Most CPUs of a described host. Source: NR_CPUS_RANGE_END of arch/x86/Kconfig."""
MAX_NODES = 1024
"""Source: NODES_SHIFT up to 10 in arch/x86/Kconfig."""
UNKNOWN_NODE = "unknown"

_MAX_DISTANCE = 255  # ACPI 6.5, 5.2.17: 255 = unreachable
_LINK = re.compile(r"\s*(\d{1,4}(?:\.\d{1,4})?)\s*GT/s\s*x(\d{1,2})\s*\Z", re.ASCII)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})\Z", re.ASCII)


class LinkText:
    """A link such as "32GT/s x16", current and maximum equal; None for "none": no link."""

    __slots__ = ("link",)  # no dataclass, which msgspec would expect to be a table

    def __init__(self, link: PciLink | None) -> None:
        self.link = link

    @classmethod
    def from_toml(cls, value: object) -> "LinkText":
        if value == "none":
            return cls(None)
        match = _LINK.match(value) if isinstance(value, str) else None
        speed, width = (float(match[1]), int(match[2])) if match else (0.0, 0)
        if speed not in SPEEDS or not 1 <= width <= 32:
            speeds = ", ".join(f"{speed_choice:g}" for speed_choice in SPEEDS)
            raise ValueError(f"a link such as 32GT/s x16 ({speeds} GT/s)")
        return cls(PciLink(speed, width, speed, width))


Numbering = Literal[
    "siblings-far", "siblings-adjacent", "siblings-far-in-package", "nodes-interleaved"
]
"""CPU numberings of firmware; docs/reference/formats/host-toml.md shows each."""
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
HugePages = dict[str, Any]
"""Page counts by size, such as { "1GiB" = 64 }."""


class CpuTable(TomlTable):
    vendor: Line | None = None
    name: Line | None = None
    family: Count | None = None
    model: Count | None = None


class CoreGroupTable(TomlTable, kw_only=True):
    kind: CoreKind = CoreKind.PERFORMANCE
    cores: Cores
    threads_per_core: Threads | None = None


class PackageTable(TomlTable, kw_only=True):
    index: Count
    cores: Cores | None = None
    threads_per_core: Threads | None = None
    core_groups: tuple[CoreGroupTable, ...] | None = None
    llcs: Count | None = None
    dies: Positive | None = None


class PagesTable(TomlTable):
    total: Count
    free: Count | None = None


class NodeTable(TomlTable):
    index: int | str | tuple[NodeNumber, ...]
    package: Count | None = None
    cores: Annotated[int, Meta(ge=0, le=MAX_PUS)] | None = None
    memory: Size | None = None
    memory_free: Size | None = None
    hugepages: HugePages | None = None
    kind: Literal["other", ""] = ""
    gpu: Line | None = None
    generic_initiator: bool = False


class DistancesTable(TomlTable):
    """Source of the first two: most two-package x86 hosts (Intel 10/12/21); others are guesses."""

    same_package: Remote = 12
    other_package: Remote = 21
    memory_same_package: Remote = 20
    memory_other_package: Remote = 30
    between_memory: Remote = 40


class ElementTable(TomlTable):
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


class RootTable(TomlTable):
    node: Count | Literal["unknown"] | tuple[Count | Literal["unknown"], ...] = "unknown"
    domain: DomainNumber | tuple[DomainNumber, ...] = 0
    bus: Byte | tuple[Byte, ...] | None = None
    ports: tuple[str | ElementTable, ...] = ()
    integrated: tuple[str | ElementTable, ...] = ()
    port_link: LinkText | None = None


class ModelTable(TomlTable):
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


class LinkTable(TomlTable, kw_only=True):
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


class SettingsTable(TomlTable):
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


class VmTable(TomlTable, kw_only=True):
    name: Line
    vcpus: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    page_size: Size | None = None
    state: Literal["planned", "running", "shut-off"] = "planned"
    pins: str | tuple[CpuSet, ...] | None = None
    nodes: Count | tuple[Count, ...] = ()
    memory: int | str | dict[str, Any] | None = None
    emulator: CpuSet = CpuSet()
    iothreads: tuple[CpuSet, ...] = ()
    devices: tuple[Line, ...] = ()


class ReserveTable(TomlTable):
    cores: Count | None = None
    memory: Size | None = None
    housekeeping_pus: CpuSet = CpuSet()


class FactsTable(TomlTable):
    published: dict[str, str] = field(default_factory=dict)  # such as "48 cores" = "source"
    assumed: tuple[str, ...] = ()


ExpectTable = defstruct(
    "ExpectTable",
    [
        (summary_field.name, (Size if summary_field.name == "memory_bytes" else Count) | None, None)
        for summary_field in fields(HostSummary)
    ],
    bases=(TomlTable,),
)


class HostDocument(TomlTable):
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
