"""The PCI part of a host.toml as read: root complexes, ports, switches, devices; no buses yet."""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.machine.description.document import (
    UNKNOWN_NODE,
    ElementTable,
    HostDocument,
    LinkText,
    RootTable,
)
from homenode.machine.description.models import DeviceModel, check_division
from homenode.machine.pci import PciLink
from homenode.toml_text import Table, decode_value
from homenode.wording import did_you_mean

MAX_DEPTH = 8
"""Switches below one another; deeper nesting is refused, so that no file exhausts the stack."""

_SWITCH_KEYS = ("switch", "link", "trained", "port_link")
_EMPTY = "empty"


class Endpoint(Struct, frozen=True):
    """A device at one place. node: -1 = unknown as sysfs says it, None = as its root complex."""

    where: str
    model: DeviceModel
    functions: tuple[DeviceModel, ...]
    name: str | None
    bdf: Bdf | None
    node: int | None
    iommu_group: int | None


class Switch(Struct, frozen=True):
    """A PCIe switch: an upstream port and one downstream port per child.

    link: what its upstream port could do, None = what the port above can; trained: what is up.
    """

    where: str
    link: PciLink | None
    trained: PciLink | None
    children: tuple["Port", ...]


class Port(Struct, frozen=True):
    """A root port or a switch's downstream port, and what is plugged in; None = nothing.

    link: what the port itself could do; None = whatever the device can.
    """

    where: str
    link: PciLink | None
    child: "Endpoint | Switch | None"


class Root(Struct, frozen=True):
    """One root complex. node: None = the firmware gives none. bus: None = the next free one."""

    where: str
    domain: int
    bus: int | None
    node: int | None
    ports: tuple[Port, ...]
    integrated: tuple[Endpoint, ...]


def parse_roots(
    file: HostDocument, models: Mapping[str, DeviceModel], nodes: Sequence[int]
) -> tuple[Root, ...]:
    """The root complexes of [[root]]; `node = [0, 0, 1]` stands for three alike."""
    roots = []
    for table in file.root:
        listed = table.node if isinstance(table.node, tuple) else (table.node,)
        placed = [_node(table, each, nodes) for each in listed]
        domains = table.domain if isinstance(table.domain, tuple) else (table.domain,)
        domains = domains * len(placed) if len(domains) == 1 else domains
        buses: Sequence[int | None] = (None,) * len(placed)
        if table.bus is not None:
            buses = table.bus if isinstance(table.bus, tuple) else (table.bus,)
        for key, values in (("bus", buses), ("domain", domains)):
            if len(values) != len(placed):
                raise table.refusal(key, f"{len(placed)} numbers, one per node", [*values])
        reader = _Elements(models, nodes)
        ports = reader.ports(table, "ports", table.ports, _link(table.port_link), 0)
        integrated = tuple(
            reader.endpoint(each, {"port_link"})
            for each in _elements(table, "integrated", table.integrated)
        )
        for bus, domain, node in zip(buses, domains, placed, strict=True):
            roots.append(Root(table.where, domain, bus, node, ports, integrated))
    return tuple(roots)


def _link(text: LinkText | None) -> PciLink | None:
    return None if text is None else text.link


def _node(table: RootTable | ElementTable, value: object, nodes: Sequence[int]) -> int | None:
    if value == UNKNOWN_NODE:
        return None
    if not isinstance(value, int) or value not in nodes:
        shown = ", ".join(map(str, nodes[:40]))
        raise table.refusal("node", f'one of the nodes {shown} or "{UNKNOWN_NODE}"', value)
    return value


def _elements(
    table: Table, key: str, listed: Sequence[str | ElementTable]
) -> tuple[ElementTable, ...]:
    """The entries of a list as tables: "gpu" is short for { model = "gpu" }."""
    return tuple(
        decode_value(_from_text(one), ElementTable, table.source, f"{table.name_of(key)}[{i}]")
        if isinstance(one, str)
        else one
        for i, one in enumerate(listed)
    )


class _Elements(Struct, frozen=True):
    models: Mapping[str, DeviceModel]
    nodes: Sequence[int]

    def ports(
        self,
        table: Table,
        key: str,
        listed: Sequence[str | ElementTable],
        link: PciLink | None,
        depth: int,
    ) -> tuple[Port, ...]:
        if depth > MAX_DEPTH:
            raise table.refusal(key, f"at most {MAX_DEPTH} switches below one another", "more")
        return tuple(self._port(each, link, depth) for each in _elements(table, key, listed))

    def _port(self, table: ElementTable, link: PciLink | None, depth: int) -> Port:
        own = _link(table.port_link) or link
        if table.empty:
            _only(table, _given(table) - {_EMPTY, "port_link"}, "an empty port")
            return Port(table.where, own, None)
        if table.switch is None:
            return Port(table.where, own, self.endpoint(table, set()))
        _only(table, _given(table) - {*_SWITCH_KEYS}, "a switch")
        switch = Switch(
            table.where,
            _link(table.link),
            _link(table.trained),
            self.ports(table, "switch", table.switch, None, depth + 1),
        )
        return Port(table.where, own, switch)

    def endpoint(self, table: ElementTable, without: Collection[str]) -> Endpoint:
        """A device. without: keys that mean nothing where it stands."""
        _only(table, _given(table) & {"switch", _EMPTY, *without}, "a device here")
        name = table.model or ""
        if name not in self.models:
            error = table.refusal("model", f"one of {', '.join(sorted(self.models))}", name)
            error.hint = did_you_mean(name, self.models).strip() or "describe it under [model.NAME]"
            raise error
        model = self.models[name]
        node = None
        if table.node is not None:
            stated = _node(table, table.node, self.nodes)
            node = -1 if stated is None else stated
        vfs = model.vfs
        if table.vfs is not None:
            vfs = table.bounded("vfs", table.vfs, 0, model.total_vfs or 0)
        if table.divided_by is not None or table.parts is not None:
            parts = check_division(table, model.kind, vfs)
            model = replace(
                model,
                divided_by=table.divided_by,
                parts=parts,
                memory_mode=table.memory_mode,
            )
        return Endpoint(
            where=table.where,
            model=replace(
                model,
                link=model.link if table.link is None else table.link.link,
                trained=_link(table.trained) or model.trained,
                driver=model.driver if table.driver is None else table.driver or None,
                vfs=vfs,
            ),
            functions=tuple(self.models[each] for each in model.functions),
            name=table.name,
            bdf=table.bdf,
            node=node,
            iommu_group=table.iommu_group,
        )


def _given(table: ElementTable) -> set[str]:
    """The keys that an entry has; `empty = false` says nothing."""
    found = {key for key in table.__struct_fields__ if getattr(table, key) is not None}
    return found if table.empty else found - {_EMPTY}


def _only(table: ElementTable, foreign: Collection[str], what: str) -> None:
    """Refuses keys that mean nothing for what an entry is."""
    for key in sorted(foreign):
        raise table.refusal(key, f"no such key on {what}", "one")


def _from_text(text: str) -> dict[str, object]:
    """{ model, bdf } of "h200" or "h200@19:00.0"; { empty } of "empty"."""
    if text == _EMPTY:
        return {"empty": True}
    model, at, bdf = text.partition("@")
    return {"model": model, "bdf": bdf} if at else {"model": model}
