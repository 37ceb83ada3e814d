"""The links part of a host.toml: NVLink, xGMI and C2C, which are not PCIe."""

from collections.abc import Sequence
from itertools import combinations

from homenode.bdf import Bdf
from homenode.description.buses import PciTree
from homenode.description.table import Table
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind, DeviceLink, LinkKind

LINK_KEYS = ("kind", "between", "to_node", "count")

_VENDOR_OF_KIND = {LinkKind.NVLINK: 0x10DE, LinkKind.C2C: 0x10DE, LinkKind.XGMI: 0x1002}


def parse_links(file: Table, tree: PciTree, nodes: Sequence[int]) -> tuple[DeviceLink, ...]:
    """Every link of [[link]], each pair once, ascending.

    between: a model (each of its devices with each other) or names of devices; with to_node,
    "own" or a number, each of them with a node's CPUs. Only what the tools of the GPUs' maker can
    tell may be described: NVLinks are counted, the others are not.
    """
    links: dict[tuple[LinkKind, Bdf, Bdf | None], DeviceLink] = {}
    device_of = {device.bdf: device for device in tree.devices}
    for table in file.tables("link", LINK_KEYS):
        kind = LinkKind(table.choice("kind", tuple(LinkKind), "nvlink"))
        count = table.optional_integer("count", least=1, most=1024)
        if (count is None) is (kind is LinkKind.NVLINK):
            raise table.refusal("count", "a number with nvlink, and with nothing else", count)
        if ("to_node" in table) is not (kind is LinkKind.C2C):
            found_node = table.values.get("to_node")
            raise table.refusal("to_node", "a node with c2c, and with nothing else", found_node)
        devices = _devices(table, tree)
        for bdf in devices:
            device = device_of[bdf]
            if device.kind is not DeviceKind.GPU or device.vendor_id != _VENDOR_OF_KIND[kind]:
                vendor = f"{_VENDOR_OF_KIND[kind]:#06x}"
                raise table.refusal("between", f"GPUs of vendor {vendor} with {kind}", str(bdf))
        if kind is LinkKind.C2C:
            found = [
                DeviceLink(kind, device, None, _node(table, device_of[device].node, nodes), count)
                for device in devices
            ]
        else:
            if len(devices) < 2:
                raise table.refusal("between", "two devices or more", [str(d) for d in devices])
            found = [DeviceLink(kind, a, b, None, count) for a, b in combinations(devices, 2)]
        for link in found:
            key = (kind, link.a, link.b)
            if key in links:
                raise table.refusal("between", "each pair once", f"{link.a} and {link.b} again")
            links[key] = link
    return tuple(sorted(links.values(), key=lambda link: (link.kind, link.a, str(link.b))))


def _devices(table: Table, tree: PciTree) -> tuple[Bdf, ...]:
    value = table.values.get("between")
    names = value if isinstance(value, list) else [value]
    found: list[Bdf] = []
    for name in names:
        if isinstance(name, str) and name in tree.bdfs_of_model and name is value:
            found += tree.bdfs_of_model[name]
        elif isinstance(name, str) and name in tree.bdf_of_name:
            found.append(tree.bdf_of_name[name])
        else:
            known = sorted(tree.bdfs_of_model.keys() | tree.bdf_of_name.keys())[:20]
            raise table.refusal(
                "between", f"a model or names of devices, of {', '.join(known) or 'none'}", name
            )
    if len(set(found)) != len(found):
        raise table.refusal("between", "each device once", value)
    return tuple(sorted(found))


def _node(table: Table, own: NodeIndex | None, nodes: Sequence[int]) -> NodeIndex:
    value = table.values["to_node"]
    if value == "own" and own is not None:
        return own
    if not isinstance(value, int) or isinstance(value, bool) or value not in nodes:
        raise table.refusal("to_node", '"own" for devices with a node, or a node\'s number', value)
    return NodeIndex(value)
