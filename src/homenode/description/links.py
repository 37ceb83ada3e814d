"""The links part of a host.toml: NVLink, xGMI and C2C, which are not PCIe."""

from itertools import combinations

from homenode.bdf import Bdf
from homenode.description.buses import PciTree
from homenode.description.models import NVIDIA_DRIVER
from homenode.description.table import Table
from homenode.discover.device_kinds import AMD, NVIDIA
from homenode.pci import DeviceKind, DeviceLink, LinkKind, PciDevice

LINK_KEYS = ("kind", "between", "count")

_VENDOR_OF_KIND = {LinkKind.NVLINK: NVIDIA, LinkKind.C2C: NVIDIA, LinkKind.XGMI: AMD}


def parse_links(file: Table, tree: PciTree) -> tuple[DeviceLink, ...]:
    """Every link of [[link]], each pair once, ascending by address.

    between: a model (each of its devices with each other) or names of devices; C2C joins each of
    them with the CPU of its own node. Only what the tools of the GPUs' maker tell may be
    described: NVLinks are counted, the others are not.
    """
    links: dict[tuple[LinkKind, Bdf, Bdf | None], DeviceLink] = {}
    for table in file.tables("link", LINK_KEYS):
        kind = LinkKind(table.choice("kind", tuple(LinkKind), "nvlink"))
        count = table.optional_integer("count", least=1, most=999)
        if (count is None) is (kind is LinkKind.NVLINK):
            raise table.refusal("count", "a number with nvlink, and with nothing else", count)
        devices = _devices(table, tree)
        for device in devices:
            _check(table, kind, device)
        if kind is LinkKind.C2C:
            found = [DeviceLink(kind, device.bdf, None, device.node) for device in devices]
        elif len(devices) < 2:
            raise table.refusal("between", "two devices or more", [str(d.bdf) for d in devices])
        else:
            found = [
                DeviceLink(kind, a.bdf, b.bdf, None, count) for a, b in combinations(devices, 2)
            ]
        for link in found:
            key = (kind, link.a, link.b)
            if key in links:
                raise table.refusal("between", "each pair once", f"{link.a} and {link.b} again")
            links[key] = link
    return tuple(sorted(links.values(), key=lambda link: (link.a, link.kind, link.b or link.a)))


def _check(table: Table, kind: LinkKind, device: PciDevice) -> None:
    """Refuses a device that cannot have such a link, or that the maker's tools do not see."""
    vendor = _VENDOR_OF_KIND[kind]
    is_gpu = device.kind is DeviceKind.GPU and device.physical_function is None
    if not is_gpu or device.vendor_id != vendor:
        raise table.refusal("between", f"GPUs of vendor {vendor:#06x} with {kind}", str(device.bdf))
    if vendor == NVIDIA and device.driver not in (None, NVIDIA_DRIVER):
        expected = f"GPUs that the driver {NVIDIA_DRIVER} has: it shows their links"
        raise table.refusal("between", expected, f"{device.bdf} with {device.driver}")
    if kind is LinkKind.C2C and device.node is None:
        raise table.refusal("between", "GPUs with a node, whose CPU they join", str(device.bdf))


def _devices(table: Table, tree: PciTree) -> tuple[PciDevice, ...]:
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
    device_of = {device.bdf: device for device in tree.devices}
    return tuple(device_of[bdf] for bdf in sorted(found))
