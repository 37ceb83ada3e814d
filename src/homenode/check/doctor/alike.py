"""Alike: devices of one model in one machine, compared with each other; the odd one out is named.

What is right is what most of them have: no register says what it should hold. Devices are alike by
kind, ids, subsystem ids and function; for what drivers set, by their driver too. Switches are alike
by their ids and by what is below them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.check.doctor.device_state import is_spare_port, odd_pair_findings
from homenode.findings import Finding, Severity
from homenode.machine.link_path import (
    JUDGED,
    DevicePath,
    LinkRate,
    device_paths,
    links_above,
    most_of,
    peer_links,
)
from homenode.machine.pci import (
    DeviceKind,
    PciDevice,
    PciRegisters,
    board_of,
    is_viable_driver,
    model_of,
)
from homenode.machine.snapshot.contents import (
    WORSE,
    differs,
    is_odd_one,
    judged_states,
    state_rule,
    usual_of,
)
from homenode.machine.topology import Host
from homenode.units import format_bytes
from homenode.wording import first_few

_MOST_NAMED = 8


class Compared(NamedTuple):
    """One function: a device, with what is above it and its links to others of its kind; or a port
    above devices, which are below. other_end: of its link."""

    device: PciDevice
    other_end: PciDevice | None = None
    above: tuple[Bdf, ...] = ()
    path: DevicePath | None = None
    peer_links: int | None = None
    below: tuple[PciDevice, ...] = ()

    @property
    def registers(self) -> PciRegisters:
        return self.device.registers or PciRegisters()

    @property
    def kinds(self) -> frozenset[DeviceKind]:
        """Of the devices that it is, or that are below it."""
        return frozenset(one.kind for one in self.below or (self.device,))


Read = Callable[[Compared], Any]
States = tuple[tuple[str, str], ...]


def _group(one: Compared) -> str:
    return "none" if one.device.iommu_group is None else "one"


def _user(one: Compared) -> str | None:
    return one.device.driver and ("VFIO", "the host")[one.device.has_host_driver]


_PUS = "PUs next to it (all where numa_node is -1)"


def _near(one: Compared) -> int | None:
    return None if one.device.local_pus is None else len(one.device.local_pus)


_ENOUGH_INTERRUPTS = 8
"""So many are not all elsewhere by chance."""


def _interrupts(one: Compared) -> str | None:
    found, near = one.device.interrupts or (), one.device.local_pus
    if near is None or len(found) < _ENOUGH_INTERRUPTS:
        return None
    return "none" if all(each.pus.isdisjoint(near) for each in found) else "some or all"


def _answer(one: Compared) -> str:
    return "given" if one.device.driver_states else "none"


def _mode(one: Compared) -> str | None:
    return one.device.partition_mode or ("whole" if one.device.driver_states else None)


def _path(one: Compared) -> LinkRate | None:
    return None if one.path is None else one.path.expected


def _bars(one: Compared) -> tuple[tuple[int, int], ...] | None:
    found = ((b.index, b.size_bytes) for b in one.device.bars if b.is_memory and b.index < 6)
    return tuple(found) or None


_FEW = 300
"""Trainings leave a handful of errors, and a sound GPU has 150 replays: fewer count as none."""


def _corrected(one: Compared) -> int | None:
    errors, replays = one.device.errors, one.device.link_replays
    counts = [] if errors is None else [sum(count for _, count in errors.correctable)]
    counts += [] if replays is None else [replays]
    return max((count if count >= _FEW else 0 for count in counts), default=None)


def _on_off(value: Any) -> str:
    return "on" if value else "off"


def _few(value: int) -> str:
    return str(value or f"fewer than {_FEW}")


def _flags(value: Iterable[str]) -> str:
    return "+".join(value) or "none"


def _sizes(value: Any) -> str:
    return ", ".join(f"BAR {index} {format_bytes(size)}" for index, size in value)


def _less(value: Any, usual: Any) -> bool:
    return bool(value < usual)


def _slower(value: LinkRate, usual: LinkRate) -> bool:
    return value.bytes_per_s < usual.bytes_per_s


def _enabled(value: str, usual: str) -> bool:
    return usual == "Disabled"


def _none(value: str, usual: str) -> bool:
    return value == "none"


def _wrong_driver(value: str, usual: str) -> bool:
    """None, or another one of the host: what VFIO has waits for a VM."""
    is_another = usual != "none" and not any(map(is_viable_driver, (value, usual)))
    return value == "none" or is_another


def _smaller(value: Iterable[tuple[int, int]], usual: Iterable[tuple[int, int]]) -> bool:
    return sum(size for _, size in value) < sum(size for _, size in usual)


class Attribute(NamedTuple):
    """What is compared. name: the case of the page's texts. of_driver: a driver sets it. topic: of
    several attributes, of which one finding of a device says all. is_named: a row of the table of
    states says how it is compared."""

    name: str
    label: str
    read: Read
    source: str
    worse: Callable[[Any, Any], bool] = _less
    shown: Callable[[Any], str] = str
    of_driver: bool = False
    severity: Severity | None = None
    topic: str = ""
    is_named: bool = True


_DEVCTL, _LNKCAP = "lspci -vvv: DevCtl", "LnkCap of lspci -vvv"


def _row(
    name: str,
    label: str,
    read: Read | str,
    source: str,
    worse: Callable[[Any, Any], bool] = _less,
    shown: Callable[[Any], str] = str,
    **by: Any,
) -> Attribute:
    """read: also the path of an attribute of Compared. by: other fields, of what is not firmware's:
    _DRIVER's or _USE's."""
    way = attrgetter(read) if isinstance(read, str) else read
    return Attribute(name, label, way, source, worse=worse, shown=shown, **by)


_DRIVER: dict[str, Any] = {"of_driver": True}
_USE: dict[str, Any] = {"severity": Severity.INFO}
"""Columns: what a driver sets, and what differs by what a device is for."""

_BYTES = "{} bytes".format
_AER = "aer_dev_correctable in sysfs, replay_counter of nvidia-smi -q"
_LNKCTL = "LnkCtl of lspci -vvv, link/l1_aspm in sysfs"
_TYPE, _IRQS = "iommu_groups/N/type", "msi_irqs in sysfs, /proc/irq/N"
_VF_COUNT = "device.sriov_num_vfs"
_ATSCTL, _VFS = "ATSCtl of lspci -vvv", "sriov_numvfs in sysfs"
_READS, _RELAXED = "registers.max_read_request_bytes", "registers.relaxed_ordering"
ATTRIBUTES: tuple[Attribute, ...] = (
    _row("link", "link that it can", lambda one: most_of(one.device.link), _LNKCAP, _slower),
    _row("path", "path to the processor", _path, f"{_LNKCAP}, of all ports above", _slower),
    _row("payload", "MaxPayload", "registers.max_payload_bytes", _DEVCTL, differs, _BYTES),
    _row("read request", "MaxReadReq", _READS, _DEVCTL, shown=_BYTES, **_DRIVER),
    _row("tags", "extended tags", "registers.extended_tags", _DEVCTL, shown=_on_off),
    _row("tags", "10-bit tags", "registers.ten_bit_tags", f"{_DEVCTL}2", shown=_on_off),
    _row("ordering", "relaxed ordering", _RELAXED, _DEVCTL, shown=_on_off, **_DRIVER),
    _row("sleep", "power saving of the link (ASPM)", "registers.aspm", _LNKCTL, _enabled),
    _row("bars", "BARs", _bars, "resource in sysfs, Region of lspci -vvv", _smaller, _sizes),
    _row("peer links", "NVLinks or xGMI links", "peer_links", "nvidia-smi topo -m, amd-smi"),
    _row("retries", "corrected errors", _corrected, _AER, lambda count, usual: not usual, _few),
    _row("translation", "ATS", "device.ats_enabled", _ATSCTL, differs, _on_off, **_DRIVER),
    _row("isolation", "ACS", "device.acs", "ACSCtl of lspci -vvv", differs, _flags),
    _row("domain", "IOMMU group", _group, "iommu_group in sysfs", _none),
    _row("domain", "IOMMU domain", "device.iommu_domain", _TYPE, differs, **_DRIVER),
    _row("driver", "driver", lambda o: o.device.driver or "none", "sysfs", _wrong_driver),
    _row("driver", "user", _user, "driver in sysfs", differs, **_USE),
    _row("node", _PUS, _near, "local_cpulist in sysfs", lambda count, usual: count >= 2 * usual),
    _row("interrupts", "interrupts on PUs next to it", _interrupts, _IRQS, _none, **_USE),
    _row("driver", "nvidia-smi", _answer, "nvidia-smi -q", _none, **_DRIVER),
    _row("functions", "virtual functions", _VF_COUNT, _VFS, differs, **_DRIVER, **_USE),
    _row("mode", "partition mode", _mode, "nvidia-smi, current_compute_partition", differs),
    _row("mode", "memory partition mode", "device.memory_partition_mode", "sysfs", differs),
)
"""Of devices and of the ports above them. The path stands behind the links that it follows from."""


def _named(group: Sequence[Compared]) -> Iterator[Attribute]:
    """Every state that a source names, but those that the table says change with use."""
    for source, states in _OF_STATES:
        stated = {one.device.bdf: dict(states(one)) for one in group}
        stated = {
            bdf: {n: value for n, value in of.items() if state_rule("device", n).judged != "use"}
            for bdf, of in stated.items()
        }
        for rule, name, of in judged_states("device", stated):
            yield Attribute(
                name="settings",
                label=name,
                read=partial(_of_device, of),
                source=source,
                worse=WORSE[rule.judged],
                of_driver=True,
                severity=Severity.INFO if rule.is_info else None,
                topic=rule.topic,
                is_named=rule.judged != "unknown",
            )


def _of_device(stated: Mapping[Bdf, str], one: Compared) -> str | None:
    return stated.get(one.device.bdf)


_OF_STATES: tuple[tuple[str, Callable[[Compared], States]], ...] = (
    ("lspci -vvv", lambda one: _settings(one)),
    ("nvidia-smi -q", attrgetter("device.driver_states")),
    ("sysfs, nvidia-smi nvlink, amd-smi", attrgetter("device.states")),
)
_SAID_ALONE = ("Control Mem", "Control BusMaster")
"""What is wrong of a device by itself, and is said so; of a port not."""


def _settings(one: Compared) -> tuple[tuple[str, str], ...]:
    said = () if one.below else _SAID_ALONE
    return tuple(pair for pair in one.registers.settings if pair[0] not in said)


_SAID_BY = {
    "bar-unassigned": "bars",
    "bar-small": "bars",
    "nvlinks-few": "peer links",
    "pcie-errors-corrected": "retries",
}


def odd_findings(host: Host, known: Sequence[Finding] = ()) -> Iterator[Finding]:
    """Devices that differ from most others of their model, with the figure of those.

    known: what is wrong of them by itself; it is not said twice.
    """
    said = {(bdf, _SAID_BY[one.id]) for one in known if one.id in _SAID_BY for bdf in one.devices}
    for each in known:
        state = each.subject.rpartition(": ")[2]
        if each.is_bad and state != each.subject:
            topics = {state, state_rule("device", state).topic or state}
            said |= {(bdf, topic) for bdf in each.devices for topic in topics}
    groups = _groups(host)
    named = [(one, [group]) for group in groups for one in _named(group)]
    boards = _groups(host, by_board=False)
    for attribute, of in (*((one, groups) for one in ATTRIBUTES), *named, (_BOARD, boards)):
        for group in of:
            for members in _by("device.driver", group) if attribute.of_driver else (group,):
                for one, found in _odd(attribute, members, host.name):
                    bdf = one.device.bdf
                    words = (attribute.name, attribute.label, attribute.topic)
                    causes = {(bdf, word) for word in words}
                    if attribute.name == "path":  # it follows from a link that is said
                        causes |= {(each, ATTRIBUTES[0].label) for each in (bdf, *one.above)}
                    if said.isdisjoint(causes):
                        yield found
                        said |= {(bdf, attribute.label), (bdf, attribute.topic or attribute.label)}
    yield from _odd_nodes(host)
    yield from odd_pair_findings(host, {bdf for bdf, name in said if name in _OF_PEERS})


_OF_PEERS = ("peer links", "NVLinks or xGMI links")

_BOARD = Attribute(
    "settings",
    "board",
    lambda one: None if DeviceKind.NIC in one.kinds or one.below else board_of(one.device),
    "Subsystem of lspci -n, subsystem_device in sysfs",
    differs,
    lambda ids: f"subsystem {ids[0]:04x}:{ids[1]:04x}",
)
"""Of NICs only those in the same place are compared: others manage the machine."""


_NODE = Attribute("node", "NUMA node", attrgetter("device.node"), "numa_node in sysfs", differs)
"""Compared with the port above: one host bridge is next to one node, with all that is below it."""


def _odd_nodes(host: Host) -> Iterator[Finding]:
    for device in () if host.nodes_assumed else host.pci_devices:
        port = None if device.parent is None else host.device(device.parent)
        if port is not None and None not in (device.node, port.node) and device.node != port.node:
            yield finding(
                "device-odd",
                _subject(Compared(device), _NODE),
                expected=f"{port.node}, as the port above it: {port.bdf}",
                observed=str(device.node),
                case=_NODE.name,
                values={"device": device.bdf},
                source=f"{host.name}: {_NODE.source}",
                devices=(device.bdf,),
            )


def _subject(one: Compared, attribute: Attribute) -> str:
    return f"{JUDGED.get(one.device.kind, 'port')} {one.device.bdf}: {attribute.label}"


def has_like_devices(host: Host) -> bool:
    """Whether there is anything to compare."""
    return any(len(group) > 1 for group in _groups(host))


def _odd(
    attribute: Attribute, group: Sequence[Compared], name: str
) -> Iterator[tuple[Compared, Finding]]:
    values = [(one, attribute.read(one)) for one in group]
    known = [(one, value) for one, value in values if value is not None]
    may_tie = DeviceKind.GPU in group[0].kinds or attribute.worse is WORSE["count"]
    if len(known) == 2 and known[0][1] != known[1][1]:
        yield from _unlike(attribute, known, name)
        return
    found = usual_of([value for _, value in known], attribute.worse, may_tie=may_tie)
    if found is None:
        return
    usual, count, is_majority = found
    odd = [(o, v) for o, v in known if v != usual and attribute.worse(v, usual)]
    is_chosen = attribute.name == "mode" and len(odd) > 1  # one alone was forgotten
    is_minor = is_chosen or not is_majority
    is_minor = is_minor or not (attribute.is_named or is_odd_one(len(odd), count))
    is_minor = is_minor and attribute.worse is not WORSE["count"]
    values_of_odd = Counter(value for _, value in odd)
    for one, value in odd:
        if _is_built_so(one, attribute) or _is_spare(one, attribute):
            continue
        device = one.device
        is_design = DeviceKind.GPU not in one.kinds and attribute.worse is differs
        is_design = is_design and values_of_odd[value] > 1
        is_design = is_design or _is_narrower(one, attribute, usual)
        names = [str(o.device.bdf) for o, v in known if v == usual]
        yield (
            one,
            finding(
                "device-odd",
                _subject(one, attribute),
                expected=f"{attribute.shown(usual)}, as {count} like it: "
                f"{first_few(names, _MOST_NAMED)}",
                observed=attribute.shown(value),
                severity=Severity.INFO if is_minor or is_design else attribute.severity,
                case=attribute.name,
                values={"device": device.bdf},
                source=f"{name}: {attribute.source}",
                devices=(device.bdf, *(each.bdf for each in one.below)),
            ),
        )


def _unlike(
    attribute: Attribute, known: Sequence[tuple[Compared, Any]], name: str
) -> Iterator[tuple[Compared, Finding]]:
    """Of two that differ: the worse one, else the second, with both values: none is known to be
    right."""
    if not attribute.is_named:
        return
    first = attribute.worse(*(value for _, value in known))
    second = attribute.worse(*(value for _, value in reversed(known)))
    (one, value), (other, usual) = known if first and not second else known[::-1]
    built = _is_narrower(one, attribute, usual) or _is_built_so(one, attribute)
    if built or _is_spare(one, attribute) or not (first or second):
        return
    is_minor = DeviceKind.NVME in one.kinds or attribute.name in _CHOSEN or first == second
    yield (
        one,
        finding(
            "device-odd",
            _subject(one, attribute),
            expected=f"{attribute.shown(usual)}, as the other like it: {other.device.bdf}",
            observed=attribute.shown(value),
            severity=Severity.INFO if is_minor else attribute.severity,
            case=attribute.name,
            values={"device": one.device.bdf},
            source=f"{name}: {attribute.source}",
            devices=tuple(dict.fromkeys(d.bdf for d in (one.device, other.device, *one.below))),
        ),
    )


_CHOSEN = frozenset({"mode", "driver", "functions"})
_OF_PORTS = ("net/", "infiniband/", "ethtool/")


def _is_spare(one: Compared, attribute: Attribute) -> bool:
    """Whether it says that a port has no link, which it never had."""
    return attribute.label.startswith(_OF_PORTS) and is_spare_port(one.device)


def _is_narrower(one: Compared, attribute: Attribute, usual: Any) -> bool:
    """Whether a slot that is not a GPU's has fewer lanes, and as fast ones: it says so itself."""
    if attribute.name not in _WIRED or DeviceKind.GPU in one.kinds:
        return False
    return bool(attribute.read(one).gt_per_s == usual.gt_per_s)


_WIRED = frozenset({"link", "path"})


def _is_built_so(one: Compared, attribute: Attribute) -> bool:
    """Whether card and slot can the same: another card with the ids of the others, as the NICs that
    manage the NVSwitches of a B200 board. No fault lowers what both ends can."""
    if attribute.name not in _WIRED:
        return False
    own, of_other = most_of(one.device.link), one.other_end and most_of(one.other_end.link)
    narrower_above = attribute.name == "path" and attribute.read(one) != own
    is_alike = own is not None and own == of_other and not narrower_above
    return is_alike and DeviceKind.GPU not in one.kinds


def _by(path: str, group: Sequence[Compared]) -> list[list[Compared]]:
    """Those of a group that have the same there."""
    found: dict[object, list[Compared]] = {}
    for one in group:
        found.setdefault(attrgetter(path)(one), []).append(one)
    return list(found.values())


def _groups(host: Host, *, by_board: bool = True) -> list[list[Compared]]:
    """Like devices; then, of each such group, the ports in the same place above them."""
    paths = {path.device.bdf: path for path in device_paths(host)}
    counts = peer_links(host)
    groups: dict[Hashable, list[Compared]] = {}
    ports: dict[Hashable, dict[Bdf, Compared]] = {}
    for device in sorted(host.pci_devices, key=lambda one: one.kind is DeviceKind.NVME):
        if device.kind not in JUDGED or device.physical_function is not None:
            continue
        model = model_of(device)
        if model is None:
            continue
        key: Hashable = (model, board_of(device) if by_board else None)
        links = links_above(device, host.device_at)
        wires = [link for link in links if not (link.is_inside_a_card or link.is_virtual)]
        ends = [(link.lower, link.upper) for link in wires]
        above = [bdf for lower, upper in ends for bdf in (lower.bdf, upper.bdf)]
        one = Compared(
            device,
            ends[0][1] if ends else None,
            tuple(bdf for bdf in above if bdf != device.bdf),
            paths.get(device.bdf),
            counts.get(device.bdf),
        )
        groups.setdefault(key, []).append(one)
        for depth, (lower, upper) in enumerate(ends):
            for end, other in ((lower, upper), (upper, lower)):
                if end.bridge is not None:
                    place = (key, depth, end.bridge.port_type, end.vendor_id, end.device_id)
                    known = ports.setdefault(place, {}).get(end.bdf)
                    below = (*(() if known is None else known.below), device)
                    ports[place][end.bdf] = Compared(end, other, below=below)
    alike = [by_use for group in groups.values() for by_use in _by_use(group)]
    return [*alike, *(list(group.values()) for group in ports.values())]


def _by_use(group: list[Compared]) -> list[list[Compared]]:
    """The group, or its parts where two or more of each class are set so: adapters for both
    InfiniBand and Ethernet."""
    parts = _by("device.class_code", group)
    return parts if all(len(part) > 1 for part in parts) else [group]
