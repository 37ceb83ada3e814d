"""Device checks: each passed-through device's node and link in the guest, next to the plan's."""

from collections import Counter
from collections.abc import Iterator

from homenode.findings import Severity
from homenode.pci import PciLink
from homenode.topology import Host
from homenode.verify.guest.checks import Check, check, match_nodes
from homenode.verify.guest.expectation import Expectation, ExpectedDevice
from homenode.verify.guest.observation import Observation, ObservedDevice, ObservedNode


def compare_devices(
    expected: Expectation, observed: Observation, host: Host | None = None, *, links: bool
) -> tuple[Check, ...]:
    """A line for each device's node, and where `links` is set one for its link.

    A device is found by its path in the guest's PCI tree, which is exact. Where the path is not
    known, all functions with the device's ids are looked at: whether they are as many as planned,
    and on the nodes that were planned for them.
    """
    node_of_cell = match_nodes(expected, observed)
    lines: list[Check] = []
    for device in expected.devices:
        if device.path is None:
            lines.append(_by_ids(device, expected, observed, node_of_cell))
        else:
            lines += _device(device, expected, observed, node_of_cell)
        if links and host is not None:
            lines += _link(device, observed, host)
    return tuple(lines)


def _device(
    device: ExpectedDevice,
    expected: Expectation,
    observed: Observation,
    node_of_cell: dict[int, ObservedNode],
) -> Iterator[Check]:
    subject, wanted = f"device {device.bdf}", _wanted(device, expected, node_of_cell)
    assert device.path is not None, "compare_devices finds the others by their ids"
    found = observed.device_at(device.path)
    if found is None:
        yield check(
            "device-missing",
            subject,
            f"{wanted}, at {device.path}",
            "no function there",
            False,
            observed.source,
        )
        return
    if _is_other(device, found):
        yield check(
            "device-other",
            subject,
            f"{device.vendor_id:04x}:{device.device_id:04x} at {device.path}",
            f"{found.vendor_id:04x}:{found.device_id:04x}",
            False,
            observed.source,
        )
        return
    yield check(
        "device-node",
        subject,
        wanted,
        f"{_node(found.node)}, as {found.address}",
        not expected.has_device_cells or _agrees(device, node_of_cell, found.node),
        observed.source,
    )


def _wanted(
    device: ExpectedDevice, expected: Expectation, node_of_cell: dict[int, ObservedNode]
) -> str:
    if not expected.has_device_cells:
        return "there, on any node"
    if device.cell is None:
        return "no node"
    home = node_of_cell.get(device.cell)
    return f"the node of cell {device.cell}" + ("" if home is None else f" (node {home.index})")


def _is_other(device: ExpectedDevice, found: ObservedDevice) -> bool:
    known = None not in (device.vendor_id, device.device_id, found.vendor_id, found.device_id)
    return known and (device.vendor_id, device.device_id) != (found.vendor_id, found.device_id)


def _agrees(
    device: ExpectedDevice, node_of_cell: dict[int, ObservedNode], node: int | None
) -> bool:
    """Whether the guest's node of a device is its cell's. A cell that the guest lacks is no node's,
    which is not the "none" that a device without a cell is to have."""
    home = None if device.cell is None else node_of_cell.get(device.cell)
    return node is None if device.cell is None else home is not None and node == home.index


def _node(node: int | None) -> str:
    return "numa_node -1" if node is None else f"numa_node {node}"


def _by_ids(
    device: ExpectedDevice,
    expected: Expectation,
    observed: Observation,
    node_of_cell: dict[int, ObservedNode],
) -> Check:
    """Where the address is not known. Of several of a kind it is not known which is which."""
    subject, wanted = f"device {device.bdf}", _wanted(device, expected, node_of_cell)
    ids = (device.vendor_id, device.device_id)
    kind = [one for one in expected.devices if (one.vendor_id, one.device_id) == ids]
    alike = [one for one in observed.devices if (one.vendor_id, one.device_id) == ids]
    if None in ids:
        return _unknown(device, expected, observed, wanted, "its guest address is not known")
    if kind.index(device) >= len(alike):
        stated = f"{len(alike)} of its kind, where {len(kind)} are planned"
        return check("device-missing", subject, wanted, stated, False, observed.source)
    nodes = Counter(one.node for one in alike)
    stated = f"{_node(alike[0].node)}, as all {len(alike)} of its kind"
    if not expected.has_device_cells:
        stated = stated if len(nodes) == 1 else f"one of {len(alike)} of its kind"
        return check("device-node", subject, wanted, stated, True, observed.source)
    if len(nodes) == 1:
        agree = _agrees(device, node_of_cell, alike[0].node)
        return check("device-node", subject, wanted, stated, agree, observed.source)
    there = sum(_agrees(device, node_of_cell, one.node) for one in alike)
    planned = sum(one.cell == device.cell for one in kind)
    if there < planned:
        stated = f"{there} of its kind there, where {planned} are planned"
        return check("device-node", subject, wanted, stated, False, observed.source)
    why = f"its guest address is not known, and {len(alike)} of its kind differ"
    return _unknown(device, expected, observed, wanted, why)


def _unknown(
    device: ExpectedDevice, expected: Expectation, observed: Observation, wanted: str, why: str
) -> Check:
    fix = "name the running domain's document too: virsh dumpxml NAME > VM.xml"
    if expected.addresses_by is not None:
        fix = f"{expected.addresses_by} chose it: compare serial numbers, as of nvidia-smi -q"
        fix = "name the plan's host: --host" if device.vendor_id is None else fix
    return check(
        "device-node",
        f"device {device.bdf}",
        wanted,
        why,
        False,
        observed.source,
        severity=Severity.INCONCLUSIVE,
        cost=None,
        fix=fix,
    )


def _link(device: ExpectedDevice, observed: Observation, host: Host) -> Iterator[Check]:
    real = host.device(device.bdf)
    found = None if device.path is None else observed.device_at(device.path)
    if real is None or real.link is None or found is None or _is_other(device, found):
        return
    wanted = _rate(real.link.max_gt_per_s, real.link.max_width)
    stated = [_rate(found.link.max_gt_per_s, found.link.max_width)] if found.link else []
    # NCCL and others take the slowest link on the way for the device's.
    stated += [_rate(port.current_gt_per_s, port.current_width) for port in found.port_links]
    known = [rate for rate in stated if rate is not None]
    if wanted is None or not known:
        return
    slowest = min(known)
    yield check(
        "device-link",
        f"link of {device.bdf}",
        f"{_link_text(real.link)}, as on the host",
        f"{slowest:g} GT/s in all lanes on the slowest part of its path",
        slowest >= wanted,
        observed.source,
    )


def _rate(gt_per_s: float | None, width: int | None) -> float | None:
    return None if gt_per_s is None or width is None else gt_per_s * width


def _link_text(link: PciLink) -> str:
    return f"{link.max_gt_per_s:g} GT/s x{link.max_width}"
