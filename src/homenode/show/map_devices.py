"""MapDevices: root complexes, switches and devices, drawn below their node."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import Host
from homenode.show.device_groups import (
    KIND_NAMES,
    DeviceCard,
    NodeDevices,
    RootComplexGroup,
    SwitchGroup,
    find_device_model,
    format_address,
    format_card_extras,
    format_card_title,
    format_link,
    format_peer_links,
    has_short_addresses,
    number_gpus,
)
from homenode.show.host_groups import memory_nodes
from homenode.show.svg_canvas import CELL_COLOURS, SvgCanvas, wrap
from homenode.text import plural, printable
from homenode.vm.model import GuestHostdev
from homenode.vm.plan import Plan

_MIN_CARD, _MAX_CARD = 140.0, 190.0
_GAP, _PAD, _LINE = 8.0, 7.0, 12.5
_TITLE_SIZE, _TEXT_SIZE, _LABEL_SIZE = 11.0, 10.0, 10.0
_TRUNK, _DROP = 22.0, 12.0


class DeviceFacts(Struct, frozen=True):
    """Facts on a host's cards besides the device itself."""

    gpus: Mapping[Bdf, int]
    short: bool
    planned: Mapping[Bdf, GuestHostdev]  # the plan's devices by address
    used_by: Mapping[Bdf, str]  # running domains' names by address
    memory_nodes: Mapping[Bdf, tuple[int, ...]]  # nodes of each GPU's memory
    c2c_nodes: Mapping[Bdf, int]  # node of the CPU that a C2C link leads to
    peers: Mapping[Bdf, str]  # each device's NVLink or xGMI links, in words
    kinds: Mapping[Bdf, DeviceKind]

    def name(self, bdf: Bdf) -> str:
        """Return kind, number and address of a device."""
        number = self.gpus.get(bdf, "")
        kind = KIND_NAMES[self.kinds.get(bdf, DeviceKind.OTHER)]
        return f"{kind}{number} {format_address(bdf, self.short)}"


def collect_device_facts(host: Host, plan: Plan | None) -> DeviceFacts:
    return DeviceFacts(
        gpus=number_gpus(host),
        short=has_short_addresses(host),
        planned={} if plan is None else {device.bdf: device for device in plan.vm.hostdevs},
        used_by={
            bdf: domain.name
            for domain in host.domains
            if domain.has_claim and (plan is None or domain.name != plan.vm.name)
            for bdf in domain.devices
        },
        memory_nodes=memory_nodes(host),
        c2c_nodes={link.a: link.b_node for link in host.links if link.b_node is not None},
        peers=format_peer_links(host),
        kinds={device.bdf: device.kind for device in host.pci_devices},
    )


def draw_devices(
    canvas: SvgCanvas,
    devices: NodeDevices,
    facts: DeviceFacts,
    place: tuple[float, float, float],
    hangs: bool,
) -> float:
    """Draw one node's devices from (x, y) within a width; returns the height that they take. hangs:
    draw the wire from what is above (x, y) to each root complex."""
    x, y, width = place
    start = _TRUNK if hangs else 0.0
    space = width - start
    # Root complexes of one card are side by side; a complex of several cards has several columns.
    neighbours = max(1, int((space + _GAP) // (_MIN_CARD + 4 * _PAD + _GAP)))
    card_width = min((space + _GAP) / neighbours - _GAP - 4 * _PAD, _MAX_CARD)
    columns = max(1, int((space - 4 * _PAD + _GAP) // (card_width + _GAP)))
    at_x, at_y, row_height = x + start, y + _DROP, 0.0
    trunk_end = y
    for group in devices.complexes:
        box_width, box_height = _compute_complex_size(group, facts, card_width, columns)
        if at_x > x + start and at_x + box_width > x + width + 0.01:
            at_x, at_y, row_height = x + start, at_y + row_height + _GAP + _DROP, 0.0
        if hangs:
            # Every root complex hangs on a rail of its row, and the rails on one trunk.
            trunk_end = at_y - _DROP / 2
            drop = at_x + 14
            canvas.draw_line((x + _TRUNK / 2, trunk_end), (drop, trunk_end), (drop, at_y))
        _draw_complex(canvas, group, facts, card_width, columns, (at_x, at_y))
        at_x += box_width + _GAP
        row_height = max(row_height, box_height)
    bottom = at_y + row_height if devices.complexes else y
    if hangs and devices.complexes:
        canvas.draw_line((x + _TRUNK / 2, y), (x + _TRUNK / 2, trunk_end))
    if devices.quiet_complexes:
        text = (
            f"{plural(devices.quiet_complexes, 'other root complex', 'other root complexes')} with "
            f"no GPU, NIC, NVSwitch or NVMe ({plural(devices.quiet_functions, 'function')})"
        )
        for line in wrap(text, _LABEL_SIZE, space):
            bottom += _LINE + 3
            canvas.draw_text(x + start, bottom, line, _LABEL_SIZE, "dim")
        bottom += 4
    return bottom - y


def _compute_complex_size(
    group: RootComplexGroup, facts: DeviceFacts, card_width: float, columns: int
) -> tuple[float, float]:
    width, height, _ = _switch_places(group, facts, card_width, columns)
    label = len(_format_complex_label(group, width)) * _LINE + 5
    return width + 2 * _PAD, label + height + _PAD


def _switch_places(
    group: RootComplexGroup, facts: DeviceFacts, card_width: float, columns: int
) -> tuple[float, float, list[tuple[float, float]]]:
    """Return width and height of a root complex's switches side by side, and their corners."""
    space = columns * (card_width + _GAP) - _GAP + 2 * _PAD
    places: list[tuple[float, float]] = []
    x, y, row, widest = 0.0, 0.0, 0.0, 0.0
    for switch in group.groups:
        width, height = _switch_size(switch, facts, card_width, columns)
        if x > 0 and x + width > space + 0.01:
            x, y, row = 0.0, y + row + _GAP, 0.0
        places.append((x, y))
        x += width + _GAP
        row, widest = max(row, height), max(widest, x - _GAP)
    return widest, y + row, places


def _switch_size(
    group: SwitchGroup, facts: DeviceFacts, card_width: float, columns: int
) -> tuple[float, float]:
    across = min(columns, len(group.cards))
    rows = [group.cards[i : i + across] for i in range(0, len(group.cards), across)]
    width = across * (card_width + _GAP) - _GAP
    height = sum(_compute_row_height(row, facts, card_width) + _GAP for row in rows) - _GAP
    if group.switch is None:
        return width, height
    label = len(_switch_label(group, facts, width)) * _LINE + 5
    return width + 2 * _PAD, label + height + _PAD


def _compute_row_height(
    cards: Sequence[DeviceCard], facts: DeviceFacts, card_width: float
) -> float:
    return max(_card_height(card, facts, card_width) for card in cards)


def _card_height(card: DeviceCard, facts: DeviceFacts, card_width: float) -> float:
    lines = len(_format_cards(card, facts, card_width))
    return _compute_band_height(card, facts, card_width) + _LINE * lines + 9


def _compute_band_height(card: DeviceCard, facts: DeviceFacts, card_width: float) -> float:
    return 6 + 13 * len(_format_titles(card, facts, card_width))


def _format_titles(card: DeviceCard, facts: DeviceFacts, card_width: float) -> tuple[str, ...]:
    title = format_card_title(card, facts.gpus.get(card.device.bdf), facts.short)
    return wrap(title, _TITLE_SIZE, card_width - 12, bold=True)


def _format_complex_label(group: RootComplexGroup, width: float) -> tuple[str, ...]:
    text = printable(group.name)
    if group.other_functions:
        text += f" · +{plural(group.other_functions, 'other function')}"
    return wrap(text, _LABEL_SIZE, width)


def _switch_label(group: SwitchGroup, facts: DeviceFacts, width: float) -> tuple[str, ...]:
    if group.switch is None:
        return ()
    text = f"switch {format_address(group.switch.bdf, facts.short)}"
    for switch in group.above:
        text += f" under {format_address(switch.bdf, facts.short)}"
    link = format_link(group.switch.link)
    return wrap(f"{text} · {link}" if link else text, _LABEL_SIZE, width)


def _format_cards(
    card: DeviceCard, facts: DeviceFacts, card_width: float
) -> tuple[tuple[str, bool], ...]:
    """Return the lines below a card's title, each with whether it is about the guest."""
    device = card.device
    texts: list[tuple[str, bool]] = [(text, True) for text in _format_guests(card, facts)]
    model = find_device_model(device)
    if model:
        texts.append((model, False))
    link = format_link(device.link)
    if link:
        texts.append((link, False))
    texts += [(text, False) for text in format_card_extras(card)]
    if device.bdf in facts.peers:
        texts.append((facts.peers[device.bdf], False))
    if device.bdf in facts.c2c_nodes:
        texts.append((f"C2C to node {facts.c2c_nodes[device.bdf]}", False))
    for node in facts.memory_nodes.get(device.bdf, ()):
        texts.append((f"its memory: node {node}", False))
    for function in card.functions:
        if function.bdf in facts.used_by:
            texts.append((f"in use by {facts.used_by[function.bdf]}", False))
            break
    return tuple(
        (line, about_guest)
        for text, about_guest in texts
        for line in wrap(printable(text), _TEXT_SIZE, card_width - 12, bold=about_guest)
    )


def _format_guests(card: DeviceCard, facts: DeviceFacts) -> list[str]:
    texts: list[str] = []
    planned_hostdevs = [facts.planned[f.bdf] for f in card.functions if f.bdf in facts.planned]
    for device in planned_hostdevs[:1]:
        texts.append(
            "in the guest, no node" if device.cell is None else f"guest cell {device.cell}"
        )
    for device in planned_hostdevs:
        if device.address is not None:
            # libvirt's numbers; the guest's kernel counts its buses differently.
            texts.append(f"guest {device.address}")
    return texts


def _draw_complex(
    canvas: SvgCanvas,
    group: RootComplexGroup,
    facts: DeviceFacts,
    card_width: float,
    columns: int,
    corner: tuple[float, float],
) -> None:
    x, y = corner
    width, height = _compute_complex_size(group, facts, card_width, columns)
    canvas.draw_rect(x, y, width, height, "complex", radius=5)
    at_y = y + 5
    for line in _format_complex_label(group, width - 2 * _PAD):
        at_y += _LINE
        canvas.draw_text(x + _PAD, at_y - 2.5, line, _LABEL_SIZE, "dim")
    _, _, places = _switch_places(group, facts, card_width, columns)
    for switch, (right, down) in zip(group.groups, places, strict=True):
        corner = (x + _PAD + right, at_y + down)
        _draw_switch(canvas, switch, facts, card_width, columns, corner)


def _draw_switch(
    canvas: SvgCanvas,
    switch: SwitchGroup,
    facts: DeviceFacts,
    card_width: float,
    columns: int,
    corner: tuple[float, float],
) -> None:
    card_x, card_y = corner
    if switch.switch is not None:
        width, height = _switch_size(switch, facts, card_width, columns)
        canvas.draw_rect(card_x, card_y, width, height, "switch", radius=4)
        card_x, card_y = card_x + _PAD, card_y + 5
        for line in _switch_label(switch, facts, width - 2 * _PAD):
            card_y += _LINE
            canvas.draw_text(card_x, card_y - 2.5, line, _LABEL_SIZE, "dim")
    across = min(columns, len(switch.cards))
    for start in range(0, len(switch.cards), across):
        row = switch.cards[start : start + across]
        row_height = _compute_row_height(row, facts, card_width)
        for position, card in enumerate(row):
            box = (card_x + position * (card_width + _GAP), card_y, card_width, row_height)
            _draw_card(canvas, card, facts, box)
        card_y += row_height + _GAP


def _draw_card(
    canvas: SvgCanvas,
    card: DeviceCard,
    facts: DeviceFacts,
    box: tuple[float, float, float, float],
) -> None:
    x, y, width, height = box
    device = card.device
    hostdev = next((facts.planned[f.bdf] for f in card.functions if f.bdf in facts.planned), None)
    band, ink = "switch", "ink"
    if device.kind is DeviceKind.GPU:
        band, ink = "tag", "on-tag"
    canvas.draw_rect(x, y, width, height, "card", radius=4, title=_format_card_title(device))
    if hostdev is not None:
        if hostdev.cell is not None:
            colour = hostdev.cell % CELL_COLOURS
            band, ink = f"cell{colour}", f"on-cell{colour}"
            canvas.draw_rect(x, y, width, height, f"tint{colour}", radius=4)
        else:
            band, ink = "host-thread", "on-host-thread"
    elif any(function.bdf in facts.used_by for function in card.functions):
        canvas.draw_rect(x, y + height - 6, width, 6, "card", radius=2, fill="taken")
    band_height = _compute_band_height(card, facts, width)
    canvas.draw_rect(x, y, width, band_height, band, radius=4)
    for number, line in enumerate(_format_titles(card, facts, width)):
        canvas.draw_text(x + 6, y + 13.5 + 13 * number, line, _TITLE_SIZE, ink, bold=True)
    for number, (line, about_guest) in enumerate(_format_cards(card, facts, width)):
        baseline = y + band_height + 11 + _LINE * number
        canvas.draw_text(x + 6, baseline, line, _TEXT_SIZE, "ink", bold=about_guest)


def _format_card_title(device: PciDevice) -> str:
    parts = [str(device.bdf)]
    if device.name:
        parts.append(device.name)
    if device.driver:
        parts.append(f"driver {device.driver}")
    if device.iommu_group is not None:
        parts.append(f"IOMMU group {device.iommu_group}")
    return ", ".join(parts)
