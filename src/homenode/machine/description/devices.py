"""The PCI part of a host.toml as read: device models, ports, switches; no buses yet."""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, toml
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import InputError
from homenode.machine.description.tables import (
    UNKNOWN_NODE,
    ElementTable,
    HostDocument,
    LinkText,
    ModelTable,
    RootTable,
    TomlTable,
    decode_value,
)
from homenode.machine.pci import DeviceKind, PartKind, PciBar, PciLink
from homenode.package_data import read_package_text
from homenode.text import did_you_mean, plural
from homenode.units import parse_bytes

NVIDIA_DRIVER = "nvidia"

_BAR_WORDS = {"prefetchable", "64bit", "32bit", "io"}


class DeviceModel(Struct, frozen=True):
    name: str
    label: str  # what lspci would call it
    kind: DeviceKind
    class_code: int
    vendor_id: int
    device_id: int
    subsystem_vendor_id: int | None = None
    subsystem_device_id: int | None = None
    link: PciLink | None = None
    # the trained link, if below the capability of device and port
    trained: PciLink | None = None
    bars: tuple[PciBar, ...] = ()
    functions: tuple[str, ...] = ()  # models of functions 1, 2 ..
    driver: str | None = None
    total_vfs: int | None = None
    vfs: int = 0
    vf_device_id: int | None = None
    vf_driver: str | None = None
    divided_by: PartKind | None = None  # how a GPU is divided
    parts: tuple[str, ...] = ()  # into which parts, by their profiles
    memory_mode: str | None = None


_TEXT = read_package_text("machine", "description", "widespread.toml")
_ROWS = toml.decode(_TEXT, type=dict[str, tuple[DeviceModel, ...]])["model"]
_BY_CLASS = {row.name: row for row in _ROWS}
"""Defaults by class: a widespread part."""

ROOT_PORT, SWITCH_PORT = "root-port", "switch-port"
"""Names under which a file may give the ids of its own bridges."""

_BRIDGE_CLASS = 0x060400
_ROOT_PORT_IDS = {  # one root port of each maker; pci.ids
    "GenuineIntel": (0x8086, 0x352A),
    "AuthenticAMD": (0x1022, 0x14AB),
    "ARM": (0x10DE, 0x22B2),
}
_GENERIC_ROOT_PORT_IDS = (0x1B36, 0x000C)
_SWITCH_PORT_IDS = (0x1000, 0xC030)


def parse_models(file: HostDocument, cpu_vendor: str | None) -> Mapping[str, DeviceModel]:
    """Return every model by name: the classes, the bridges, and the file's [model.NAME]."""
    root = _ROOT_PORT_IDS.get(cpu_vendor or "", _GENERIC_ROOT_PORT_IDS)
    models = {name: replace(model, name=name) for name, model in _BY_CLASS.items()}
    for name, label, ids in (
        (ROOT_PORT, "PCI Express root port", root),
        (SWITCH_PORT, "PCI Express switch port", _SWITCH_PORT_IDS),
    ):
        models[name] = DeviceModel(name, label, DeviceKind.BRIDGE, _BRIDGE_CLASS, *ids)
    for name, values in file.model.items():
        table = decode_value(values, ModelTable, file.source, f"model.{name}")
        models[name] = _build_model(table, name, models)
    for model in models.values():
        for function in model.functions:
            if function not in models or models[function].functions:
                raise InputError(
                    f"{file.source}: model.{model.name}.functions: expected models without "
                    f"functions of their own, found {function!r}"
                )
    return models


def _build_model(table: ModelTable, name: str, models: Mapping[str, DeviceModel]) -> DeviceModel:
    port_model = models[name] if name in (ROOT_PORT, SWITCH_PORT) else None
    if port_model is None and table.class_ is None:
        raise table.make_error("class", f"one of {', '.join(_BY_CLASS)}", None)
    start = port_model or models[table.class_ or "other"]
    if len(table.functions) > 7:
        raise table.make_error("functions", "at most 7 names of models", table.functions)
    vendor_id = _value_or(table.vendor, start.vendor_id)
    class_code = _value_or(table.class_code, start.class_code)
    # AMD's accelerators are no displays: Source: lspci of an MI300X, class 1200.
    if start.kind is DeviceKind.GPU and vendor_id == 0x1002 and table.class_code is None:
        class_code = 0x120000
    vfs = table.check_bounds("vfs", table.vfs or 0, 0, table.total_vfs or 0)
    return DeviceModel(
        name=name,
        label=table.label.strip() or (name if port_model is None else port_model.label),
        kind=start.kind,
        class_code=class_code,
        vendor_id=vendor_id,
        device_id=_value_or(table.device, start.device_id),
        subsystem_vendor_id=table.subsystem_vendor,
        subsystem_device_id=table.subsystem_device,
        link=_link(table.link) or start.link,
        trained=_link(table.trained),
        bars=start.bars if table.bars is None else _parse_bars(table, table.bars),
        functions=tuple(table.functions),
        driver=table.driver,
        total_vfs=table.total_vfs,
        vfs=vfs,
        vf_device_id=table.vf_device,
        vf_driver=table.vf_driver,
        divided_by=table.divided_by,
        parts=check_division(table, start.kind, vfs),
        memory_mode=table.memory_mode,
    )


def check_division(table: ModelTable | ElementTable, kind: DeviceKind, vfs: int) -> tuple[str, ...]:
    """Return the parts into which a GPU is divided, by their profiles. Raises InputError."""
    divided_by, parts = table.divided_by, tuple(table.parts or ())
    for part in parts:
        if not 0 < len(part) <= 80 or not part.isascii() or not part.isprintable():
            raise table.make_error("parts", "names of profiles, at most 80 letters", part)
    if bool(parts) != (divided_by is not None) or (parts and kind is not DeviceKind.GPU):
        raise table.make_error("parts", "profiles and `divided_by`, on a GPU", list(parts))
    _check_part_count(table, divided_by, parts, vfs)
    return parts


def _check_part_count(
    table: ModelTable | ElementTable, divided_by: PartKind | None, parts: Sequence[str], vfs: int
) -> None:
    limits = {PartKind.VIRTUAL_FUNCTION: vfs, PartKind.MEDIATED: vfs or 64, PartKind.PARTITION: 1}
    if divided_by is not None and len(parts) > limits.get(divided_by, 14):
        raise table.make_error("parts", f"at most {limits.get(divided_by, 14)}", list(parts))


def _link(text: LinkText | None) -> PciLink | None:
    return None if text is None else text.link


def _value_or(value: int | None, default: int) -> int:
    return default if value is None else value


def _parse_bars(table: ModelTable, texts: Sequence[str]) -> tuple[PciBar, ...]:
    """Parse BARs from texts such as "128GiB prefetchable"; "" omits a BAR. Index 0 to 5.

    Prefetchable BARs are 64-bit unless marked 32bit, others 32-bit unless marked 64bit; a 64-bit
    BAR uses two indices. Source: PCI 3.0, 6.2.5.1.
    """
    bars: list[PciBar] = []
    index = 0
    for text in texts:
        words = text.split()
        if not words:
            index += 1
            continue
        options = set(words[1:])
        try:
            size = parse_bytes(words[0])
        except InputError as error:
            raise table.make_error("bars", 'sizes such as "16MiB"', text) from error
        if options - _BAR_WORDS or len(options) != len(words) - 1 or size & (size - 1) or not size:
            raise table.make_error(
                "bars", f"a power of two and words of {', '.join(sorted(_BAR_WORDS))}", text
            )
        prefetchable = "prefetchable" in options
        wide = "64bit" in options or (prefetchable and "32bit" not in options)
        if index + wide > 5:
            raise table.make_error("bars", "at most 6 BARs, 64-bit ones counted twice", text)
        bars.append(PciBar(index, size, wide, prefetchable, "io" not in options))
        index += 1 + wide
    return tuple(bars)


MAX_DEPTH = 8
"""Switches below one another; deeper nesting is rejected, so that no file exhausts the stack."""

_SWITCH_KEYS = ("switch", "link", "trained", "port_link")
_EMPTY = "empty"


class Endpoint(Struct, frozen=True):
    location: str
    model: DeviceModel
    functions: tuple[DeviceModel, ...]
    name: str | None
    bdf: Bdf | None
    node: int | None  # -1 = unknown, as in sysfs; None = the node of its root complex
    iommu_group: int | None


class Switch(Struct, frozen=True):
    """A PCIe switch: an upstream port and one downstream port per child."""

    location: str
    link: PciLink | None  # capability of its upstream port, None = as the port above
    trained: PciLink | None  # the trained link
    children: tuple["Port", ...]


class Port(Struct, frozen=True):
    """A root port or a switch's downstream port, and its device; None = empty."""

    location: str
    link: PciLink | None  # capability of the port; None = as the device
    child: "Endpoint | Switch | None"


class Root(Struct, frozen=True):
    location: str
    domain: int
    bus: int | None  # None = the next free one
    node: int | None  # None = the firmware reports none
    ports: tuple[Port, ...]
    integrated: tuple[Endpoint, ...]


def parse_roots(
    file: HostDocument, models: Mapping[str, DeviceModel], nodes: Sequence[int]
) -> tuple[Root, ...]:
    """Return the root complexes of [[root]]; `node = [0, 0, 1]` means three equal ones."""
    roots = []
    for table in file.root:
        node_elements = table.node if isinstance(table.node, tuple) else (table.node,)
        root_nodes = [_parse_node(table, element, nodes) for element in node_elements]
        domains = table.domain if isinstance(table.domain, tuple) else (table.domain,)
        domains = domains * len(root_nodes) if len(domains) == 1 else domains
        buses: Sequence[int | None] = (None,) * len(root_nodes)
        if table.bus is not None:
            buses = table.bus if isinstance(table.bus, tuple) else (table.bus,)
        for key, values in (("bus", buses), ("domain", domains)):
            if len(values) != len(root_nodes):
                raise table.make_error(
                    key, f"{plural(len(root_nodes), 'number')}, one per node", [*values]
                )
        reader = _Elements(models, nodes)
        ports = reader.build_ports(table, "ports", table.ports, _link(table.port_link), 0)
        integrated_endpoints = tuple(
            reader.build_endpoint(element, {"port_link"})
            for element in _convert_to_tables(table, "integrated", table.integrated)
        )
        for bus, domain, node in zip(buses, domains, root_nodes, strict=True):
            roots.append(Root(table.location, domain, bus, node, ports, integrated_endpoints))
    return tuple(roots)


def _parse_node(table: RootTable | ElementTable, value: object, nodes: Sequence[int]) -> int | None:
    if value == UNKNOWN_NODE:
        return None
    if not isinstance(value, int) or value not in nodes:
        shown_nodes = ", ".join(map(str, nodes[:40]))
        raise table.make_error("node", f'one of the nodes {shown_nodes} or "{UNKNOWN_NODE}"', value)
    return value


def _convert_to_tables(
    table: TomlTable, key: str, elements: Sequence[str | ElementTable]
) -> tuple[ElementTable, ...]:
    """Return the entries of a list as tables: "gpu" is short for { model = "gpu" }."""
    return tuple(
        decode_value(_split_text(element), ElementTable, table.source, f"{table.name_of(key)}[{i}]")
        if isinstance(element, str)
        else element
        for i, element in enumerate(elements)
    )


class _Elements(Struct, frozen=True):
    models: Mapping[str, DeviceModel]
    nodes: Sequence[int]

    def build_ports(
        self,
        table: TomlTable,
        key: str,
        elements: Sequence[str | ElementTable],
        link: PciLink | None,
        depth: int,
    ) -> tuple[Port, ...]:
        if depth > MAX_DEPTH:
            raise table.make_error(key, f"at most {MAX_DEPTH} switches below one another", "more")
        return tuple(
            self._build_port(element, link, depth)
            for element in _convert_to_tables(table, key, elements)
        )

    def _build_port(self, table: ElementTable, link: PciLink | None, depth: int) -> Port:
        port_link = _link(table.port_link) or link
        if table.empty:
            _reject_keys(table, _list_keys(table) - {_EMPTY, "port_link"}, "an empty port")
            return Port(table.location, port_link, None)
        if table.switch is None:
            return Port(table.location, port_link, self.build_endpoint(table, set()))
        _reject_keys(table, _list_keys(table) - {*_SWITCH_KEYS}, "a switch")
        switch = Switch(
            table.location,
            _link(table.link),
            _link(table.trained),
            self.build_ports(table, "switch", table.switch, None, depth + 1),
        )
        return Port(table.location, port_link, switch)

    def build_endpoint(self, table: ElementTable, keys: Collection[str]) -> Endpoint:
        """Parse a device. keys: those that are not allowed in its place."""
        _reject_keys(table, _list_keys(table) & {"switch", _EMPTY, *keys}, "a device here")
        name = table.model or ""
        if name not in self.models:
            error = table.make_error("model", f"one of {', '.join(sorted(self.models))}", name)
            error.hint = did_you_mean(name, self.models).strip() or "describe it under [model.NAME]"
            raise error
        model = self.models[name]
        node = None
        if table.node is not None:
            known_node = _parse_node(table, table.node, self.nodes)
            node = -1 if known_node is None else known_node
        vfs = model.vfs
        if table.vfs is not None:
            vfs = table.check_bounds("vfs", table.vfs, 0, model.total_vfs or 0)
        if table.divided_by is not None or table.parts is not None:
            parts = check_division(table, model.kind, vfs)
            model = replace(model, divided_by=table.divided_by, parts=parts)
        _check_part_count(table, model.divided_by, model.parts, vfs)
        return Endpoint(
            location=table.location,
            model=replace(
                model,
                link=model.link if table.link is None else table.link.link,
                trained=_link(table.trained) or model.trained,
                driver=model.driver if table.driver is None else table.driver or None,
                vfs=vfs,
                memory_mode=table.memory_mode or model.memory_mode,
            ),
            functions=tuple(self.models[function] for function in model.functions),
            name=table.name,
            bdf=table.bdf,
            node=node,
            iommu_group=table.iommu_group,
        )


def _list_keys(table: ElementTable) -> set[str]:
    """Return the keys of an entry; `empty = false` does not count."""
    keys = {key for key in table.__struct_fields__ if getattr(table, key) is not None}
    return keys if table.empty else keys - {_EMPTY}


def _reject_keys(table: ElementTable, foreign: Collection[str], subject: str) -> None:
    """Reject keys that have no meaning for the kind of entry."""
    for key in sorted(foreign):
        raise table.make_error(key, f"no such key on {subject}", "one")


def _split_text(text: str) -> dict[str, object]:
    """{ model, bdf } of "h200" or "h200@19:00.0"; { empty } of "empty"."""
    if text == _EMPTY:
        return {"empty": True}
    model, at, bdf = text.partition("@")
    return {"model": model, "bdf": bdf} if at else {"model": model}
