"""The PCI part of a host.toml as read: root complexes, ports, switches, devices; no buses yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from homenode.bdf import Bdf
from homenode.description.models import DeviceModel, parse_division, parse_link
from homenode.description.table import Table
from homenode.pci import PciLink

ROOT_KEYS = ("node", "domain", "bus", "ports", "integrated", "port_link")
MAX_DEPTH = 8
"""Switches below one another; deeper nesting is refused, so that no file exhausts the stack."""
UNKNOWN_NODE = "unknown"

_DEVICE_KEYS = tuple(
    """
    model name bdf node link trained driver iommu_group vfs divided_by parts memory_mode
""".split()
)
_SWITCH_KEYS = ("switch", "link", "trained")
_ELEMENT_KEYS = (*_DEVICE_KEYS, "switch", "port_link", "empty")
_EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A device at one place. node: -1 = unknown as sysfs says it, None = as its root complex."""

    where: str
    model: DeviceModel
    functions: tuple[DeviceModel, ...]
    name: str | None
    bdf: Bdf | None
    node: int | None
    iommu_group: int | None


@dataclass(frozen=True, slots=True)
class Switch:
    """A PCIe switch: an upstream port and one downstream port per child.

    link: what its upstream port could do, None = what the port above can; trained: what is up.
    """

    where: str
    link: PciLink | None
    trained: PciLink | None
    children: tuple["Port", ...]


@dataclass(frozen=True, slots=True)
class Port:
    """A root port or a switch's downstream port, and what is plugged in; None = nothing.

    link: what the port itself could do; None = whatever the device can.
    """

    where: str
    link: PciLink | None
    child: "Endpoint | Switch | None"


@dataclass(frozen=True, slots=True)
class Root:
    """One root complex. node: None = the firmware gives none. bus: None = the next free one."""

    where: str
    domain: int
    bus: int | None
    node: int | None
    ports: tuple[Port, ...]
    integrated: tuple[Endpoint, ...]


def parse_roots(
    file: Table, models: Mapping[str, DeviceModel], nodes: Sequence[int]
) -> tuple[Root, ...]:
    """The root complexes of [[root]]; `node = [0, 0, 1]` stands for three alike."""
    roots = []
    for table in file.tables("root", ROOT_KEYS):
        placed = _placed(table, nodes)
        buses = table.integers("bus", most=0xFF)
        domains = table.integers("domain", most=0xFFFFFFFF) or (0,)
        domains = domains * len(placed) if len(domains) == 1 else domains
        for key, values in (("bus", buses), ("domain", domains)):
            if values is not None and len(values) != len(placed):
                raise table.refusal(key, f"{len(placed)} numbers, one per node", list(values))
        reader = _Elements(models, nodes)
        ports = reader.ports(table, "ports", parse_link(table, "port_link"), 0)
        integrated = tuple(
            reader.endpoint(each, _DEVICE_KEYS) for each in reader.elements(table, "integrated")
        )
        for i, node in enumerate(placed):
            bus = buses[i] if buses is not None else None
            roots.append(Root(table.where, domains[i], bus, node, ports, integrated))
    return tuple(roots)


def _placed(table: Table, nodes: Sequence[int]) -> tuple[int | None, ...]:
    value = table.values.get("node", UNKNOWN_NODE)
    listed = value if isinstance(value, list) else [value]
    return tuple(_node(table, "node", each, nodes) for each in listed)


def _node(table: Table, key: str, value: object, nodes: Sequence[int]) -> int | None:
    if value == UNKNOWN_NODE:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value not in nodes:
        shown = ", ".join(map(str, nodes[:40]))
        raise table.refusal(key, f'one of the nodes {shown} or "{UNKNOWN_NODE}"', value)
    return value


@dataclass(frozen=True, slots=True)
class _Elements:
    models: Mapping[str, DeviceModel]
    nodes: Sequence[int]

    def elements(self, table: Table, key: str) -> tuple[Table, ...]:
        """The entries of a list as tables: "gpu" is short for { model = "gpu" }."""
        found = []
        for i, value in enumerate(table.list(key)):
            where = f"{table.key(key)}[{i}]"
            full = _from_text(value) if isinstance(value, str) else value
            found.append(Table.of(table.source, where, full, _ELEMENT_KEYS))
        return tuple(found)

    def ports(self, table: Table, key: str, link: PciLink | None, depth: int) -> tuple[Port, ...]:
        if depth > MAX_DEPTH:
            raise table.refusal(key, f"at most {MAX_DEPTH} switches below one another", "more")
        return tuple(self._port(each, link, depth) for each in self.elements(table, key))

    def _port(self, table: Table, link: PciLink | None, depth: int) -> Port:
        own = parse_link(table, "port_link") or link
        if table.truth("empty", False):
            _only(table, (_EMPTY, "port_link"), "an empty port")
            return Port(table.where, own, None)
        if "switch" not in table:
            return Port(table.where, own, self.endpoint(table, (*_DEVICE_KEYS, "port_link")))
        _only(table, (*_SWITCH_KEYS, "port_link"), "a switch")
        switch = Switch(
            table.where,
            parse_link(table, "link"),
            parse_link(table, "trained"),
            self.ports(table, "switch", None, depth + 1),
        )
        return Port(table.where, own, switch)

    def endpoint(self, table: Table, keys: Sequence[str]) -> Endpoint:
        _only(table, keys, "a device here")
        name = table.text("model")
        if name not in self.models:
            near = get_close_matches(name, self.models, n=1)
            error = table.refusal("model", f"one of {', '.join(sorted(self.models))}", name)
            error.hint = f"did you mean {near[0]!r}?" if near else "describe it under [model.NAME]"
            raise error
        model = self.models[name]
        node = None
        if "node" in table:
            stated = _node(table, "node", table.values["node"], self.nodes)
            node = -1 if stated is None else stated
        vfs = table.integer("vfs", model.vfs, most=model.total_vfs or 0)
        division = {}
        if "divided_by" in table or "parts" in table:
            division = parse_division(table, model.kind, vfs)
        return Endpoint(
            where=table.where,
            model=replace(
                model,
                **division,
                link=parse_link(table, "link") if "link" in table else model.link,
                trained=parse_link(table, "trained") or model.trained,
                driver=table.text("driver") or None if "driver" in table else model.driver,
                vfs=vfs,
            ),
            functions=tuple(self.models[each] for each in model.functions),
            name=table.optional_text("name"),
            bdf=table.bdf("bdf"),
            node=node,
            iommu_group=table.optional_integer("iommu_group", most=0xFFFF),
        )


def _only(table: Table, keys: Sequence[str], what: str) -> None:
    """Refuses keys that mean nothing for what an entry is."""
    for key in table.values:
        if key not in keys:
            raise table.refusal(key, f"no such key on {what}", table.values[key])


def _from_text(text: str) -> dict[str, object]:
    """{ model, bdf } of "h200" or "h200@19:00.0"; { empty } of "empty"."""
    if text == _EMPTY:
        return {"empty": True}
    model, at, bdf = text.partition("@")
    return {"model": model, "bdf": bdf} if at else {"model": model}
