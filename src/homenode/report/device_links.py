"""DeviceLinks: NVLink, xGMI and C2C links in a few sentences instead of a matrix."""

from homenode.bdf import Bdf
from homenode.pci import DeviceKind, LinkKind
from homenode.report.device_groups import KIND_NAMES, gpu_numbers, short_addresses
from homenode.report.device_text import address_text
from homenode.topology import Host
from homenode.wording import number_list, plural

LINK_NAMES = {LinkKind.NVLINK: "NVLink", LinkKind.XGMI: "xGMI", LinkKind.C2C: "NVLink-C2C"}


def link_lines(host: Host) -> tuple[str, ...]:
    """Each kind of link and count with the devices that it joins; nothing is left out.

    A set of devices of which every pair is linked is said once.
    """
    naming = _Naming(host)
    lines: list[str] = []
    by_kind: dict[tuple[LinkKind, int | None], set[frozenset[Bdf]]] = {}
    for link in host.links:
        if link.b is not None and link.a != link.b:
            pairs = by_kind.setdefault((link.kind, link.count), set())
            pairs.add(frozenset((link.a, link.b)))
    for (kind, count), pairs in sorted(by_kind.items(), key=lambda item: str(item[0])):
        each = f", {plural(count, 'link')} each" if count else ", number of links unknown"
        remaining = set(pairs)
        for members in _components(pairs):
            inside = {pair for pair in remaining if pair <= members}
            said = naming.set(members)
            if len(members) > 2 and len(inside) == len(members) * (len(members) - 1) // 2:
                lines.append(f"{LINK_NAMES[kind]}: {said}, every pair{each}")
                continue
            for ends, mates in _stars(inside):
                lines.append(f"{LINK_NAMES[kind]}: {naming.set(ends)} to {naming.set(mates)}{each}")
    to_cpus = [
        f"{naming.set(frozenset([link.a]))} to the CPU of node {link.b_node}"
        for link in host.links
        if link.b_node is not None
    ]
    if to_cpus:
        lines.append(f"{LINK_NAMES[LinkKind.C2C]}: {', '.join(to_cpus)}")
    return tuple(lines)


def peer_links(host: Host) -> dict[Bdf, str]:
    """Each device's links to others, in a few words: "NVLink x18 to 7".

    The counts of all peers are not added up: links through NVSwitches serve every peer in turn.
    """
    counts: dict[tuple[Bdf, LinkKind], list[int | None]] = {}
    for link in host.links:
        if link.b is not None and link.a != link.b:
            for end in (link.a, link.b):
                counts.setdefault((end, link.kind), []).append(link.count)
    found: dict[Bdf, str] = {}
    for (bdf, kind), each in counts.items():
        known = {count for count in each if count}
        width = f" x{min(known)}" if len(known) == 1 and None not in each else ""
        said = f"{LINK_NAMES[kind]}{width} to {len(each)}"
        found[bdf] = f"{found[bdf]}, {said}" if bdf in found else said
    return found


class _Naming:
    """Names of devices in links: GPUs by number, others by kind and address."""

    def __init__(self, host: Host) -> None:
        self.gpus = gpu_numbers(host)
        self.kinds = {device.bdf: device.kind for device in host.pci_devices}
        self.short = short_addresses(host)

    def set(self, members: frozenset[Bdf]) -> str:
        gpus = [self.gpus[bdf] for bdf in members if bdf in self.gpus]
        parts = [f"GPU{'s ' if len(gpus) > 1 else ''}{number_list(gpus)}"] if gpus else []
        others: dict[DeviceKind, list[Bdf]] = {}
        for bdf in sorted(members - self.gpus.keys()):
            others.setdefault(self.kinds.get(bdf, DeviceKind.OTHER), []).append(bdf)
        for kind, bdfs in others.items():
            parts.append(
                f"{KIND_NAMES[kind]} {', '.join(address_text(b, self.short) for b in bdfs)}"
            )
        return " and ".join(parts)


def _stars(pairs: set[frozenset[Bdf]]) -> list[tuple[frozenset[Bdf], frozenset[Bdf]]]:
    """Pairs as (these, each linked to all of those): every pair once, in few sentences."""
    mates: dict[Bdf, set[Bdf]] = {}
    for pair in pairs:
        for bdf in pair:
            mates.setdefault(bdf, set()).update(pair - {bdf})
    said: list[tuple[frozenset[Bdf], frozenset[Bdf]]] = []
    while any(mates.values()):
        first = min(bdf for bdf, others in mates.items() if others)
        those = frozenset(mates[first])
        # No link inside `these`, as they would have each other as mates.
        these = frozenset(bdf for bdf, others in mates.items() if frozenset(others) == those)
        said.append((these, those))
        for bdf in these:
            mates[bdf] = set()
        for bdf in those:
            mates[bdf] -= these
    return said


def _components(pairs: set[frozenset[Bdf]]) -> list[frozenset[Bdf]]:
    """Connected sets of devices, ascending by their first."""
    owner: dict[Bdf, set[Bdf]] = {}
    for pair in pairs:
        merged: set[Bdf] = set(pair)
        for bdf in pair:
            merged |= owner.get(bdf, set())
        for bdf in merged:
            owner[bdf] = merged
    return sorted({frozenset(group) for group in owner.values()}, key=min)
