"""Alike: devices of one model in one machine, compared with each other; the odd one out is named.

What is right is what most of them have: no register says what it should hold. Devices are alike by
kind, ids, subsystem ids and function; for what drivers set, by their driver too. Switches are alike
by their ids and by what is below them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.check.doctor.transfers import OF_THE_WIRE
from homenode.findings import Finding, Severity
from homenode.machine.link_path import (
    JUDGED,
    DevicePath,
    LinkRate,
    device_paths,
    links_above,
    peer_links,
)
from homenode.machine.pci import (
    DeviceKind,
    PciDevice,
    PciRegisters,
    is_viable_driver,
)
from homenode.machine.topology import Host
from homenode.units import format_bytes
from homenode.wording import first_few

_MOST_NAMED = 8
_LEAST = 3
"""Of two that differ neither is known to be right."""


class Compared(NamedTuple):
    """One device, what is above it, and its links to others of its kind."""

    device: PciDevice
    ports: tuple[PciDevice, ...]
    path: DevicePath | None
    peer_links: int | None

    @property
    def registers(self) -> PciRegisters:
        return self.device.registers or PciRegisters()

    @property
    def port(self) -> PciDevice | None:
        return self.ports[0] if self.ports else None


Read = Callable[[Compared], Any]


def _register(name: str) -> Read:
    return lambda one: getattr(one.registers, name)


def _of_port(read: Callable[[PciDevice], Any]) -> Read:
    return lambda one: None if one.port is None else read(one.port)


def _most(device: PciDevice) -> LinkRate | None:
    link = device.link
    if link is None or link.max_gt_per_s is None or link.max_width is None:
        return None
    return LinkRate(link.max_gt_per_s, link.max_width)


def _ports_payload(one: Compared) -> int | None:
    found = [p.registers.max_payload_bytes for p in one.ports if p.registers is not None]
    return min((size for size in found if size is not None), default=None)


def _bars(one: Compared) -> tuple[tuple[int, int], ...] | None:
    found = ((b.index, b.size_bytes) for b in one.device.bars if b.is_memory and b.index < 6)
    return tuple(found) or None


_FEW_RETRIES, _FEW_REPLAYS = 100, 500
"""Trainings leave a handful of errors, and a sound GPU has 150 replays: as many count as none."""


def _retries(one: Compared) -> int | None:
    device = one.device
    if device.errors is None and device.link_replays is None:
        return None
    errors = () if device.errors is None else device.errors.correctable
    retries = sum(count for name, count in errors if name in OF_THE_WIRE)
    replays = device.link_replays or 0
    return max(retries if retries >= _FEW_RETRIES else 0, replays if replays >= _FEW_REPLAYS else 0)


def _isolation(one: Compared) -> tuple[str, ...] | None:
    return None if one.port is None else one.port.acs


def _on_off(value: Any) -> str:
    return "on" if value else "off"


def _bytes_of(value: Any) -> str:
    return f"{value} bytes"


def _sizes(value: Any) -> str:
    return ", ".join(f"BAR {index} {format_bytes(size)}" for index, size in value)


def _less(value: Any, usual: Any) -> bool:
    return bool(value < usual)


def _slower(value: LinkRate, usual: LinkRate) -> bool:
    return value.bytes_per_s < usual.bytes_per_s


def _other(value: Any, usual: Any) -> bool:
    return True


def _wrong_driver(value: str, usual: str) -> bool:
    """None, or another one of the host: what VFIO has waits for a VM."""
    is_another = usual != "none" and not any(map(is_viable_driver, (value, usual)))
    return value == "none" or is_another


def _smaller(value: Any, usual: Any) -> bool:
    return _total(value) < _total(usual)


def _total(bars: Iterable[tuple[int, int]]) -> int:
    return sum(size for _, size in bars)


class Attribute(NamedTuple):
    """What is compared. name: the case of the page's texts. of_driver: a driver sets it. covers:
    attributes that follow from this one, and are not said as well."""

    name: str
    label: str
    read: Read
    source: str
    shown: Callable[[Any], str] = str
    worse: Callable[[Any, Any], bool] = _less
    of_driver: bool = False
    severity: Severity | None = None
    covers: tuple[str, ...] = ()


_DEVCTL, _LNKCTL, _LNKCAP = "DevCtl of lspci -vvv", "LnkCtl of lspci -vvv", "LnkCap of lspci -vvv"

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "link",
        "link that it can",
        lambda one: _most(one.device),
        f"{_LNKCAP}, max_link_speed and max_link_width in sysfs",
        worse=_slower,
        covers=("path",),
    ),
    Attribute(
        "port",
        "link that its port can",
        _of_port(_most),
        f"{_LNKCAP}, of the port above",
        worse=_slower,
        covers=("path",),
    ),
    Attribute(
        "path",
        "path to the processor",
        lambda one: None if one.path is None else one.path.expected,
        f"{_LNKCAP}, of all ports above",
        worse=_slower,
    ),
    Attribute(
        "payload",
        "MaxPayload",
        _register("max_payload_bytes"),
        _DEVCTL,
        _bytes_of,
        covers=("port payload",),
    ),
    Attribute("port payload", "MaxPayload of the ports above", _ports_payload, _DEVCTL, _bytes_of),
    Attribute(
        "read request",
        "MaxReadReq",
        _register("max_read_request_bytes"),
        _DEVCTL,
        _bytes_of,
        of_driver=True,
    ),
    Attribute("tags", "extended tags", _register("extended_tags"), _DEVCTL, _on_off),
    Attribute("tags", "10-bit tags", _register("ten_bit_tags"), "DevCtl2 of lspci -vvv", _on_off),
    Attribute(
        "ordering",
        "relaxed ordering",
        _register("relaxed_ordering"),
        _DEVCTL,
        _on_off,
        of_driver=True,
    ),
    Attribute(
        "sleep",
        "power saving of the link (ASPM)",
        _register("aspm"),
        f"{_LNKCTL}, link/l1_aspm in sysfs",
        worse=lambda value, usual: usual == "Disabled",
        covers=("port sleep",),
    ),
    Attribute(
        "port sleep",
        "power saving of its port's link (ASPM)",
        _of_port(lambda port: None if port.registers is None else port.registers.aspm),
        f"{_LNKCTL}, of the port above",
        worse=lambda value, usual: usual == "Disabled",
    ),
    Attribute("bars", "BARs", _bars, "resource in sysfs, Region of lspci -vvv", _sizes, _smaller),
    Attribute(
        "peer links",
        "NVLinks or xGMI links",
        lambda one: one.peer_links,
        "nvidia-smi topo -m, amd-smi topology",
    ),
    Attribute(
        "retries",
        "retries on its link",
        _retries,
        "aer_dev_correctable in sysfs, replay_counter of nvidia-smi -q",
        lambda count: str(count or f"fewer than {_FEW_RETRIES}"),
        lambda value, usual: not usual,
    ),
    Attribute(
        "translation",
        "ATS",
        lambda one: one.device.ats_enabled,
        "ATSCtl of lspci -vvv",
        _on_off,
        of_driver=True,
    ),
    Attribute(
        "isolation",
        "ACS of its port",
        _isolation,
        "ACSCtl of lspci -vvv",
        lambda flags: "+".join(flags) or "none",
        _other,
    ),
    Attribute(
        "domain",
        "IOMMU domain",
        lambda one: one.device.iommu_domain,
        "/sys/kernel/iommu_groups/N/type",
        worse=_other,
        of_driver=True,
        severity=Severity.INFO,
    ),
    Attribute(
        "driver",
        "driver",
        lambda one: one.device.driver or "none",
        "driver in sysfs",
        worse=_wrong_driver,
    ),
    Attribute(
        "driver",
        "user",
        lambda one: one.device.driver and ("VFIO", "the host")[one.device.has_host_driver],
        "driver in sysfs",
        worse=_other,
        severity=Severity.INFO,
    ),
    Attribute(
        "node",
        "PUs next to it (all where numa_node is -1)",
        lambda one: None if one.device.local_pus is None else len(one.device.local_pus),
        "local_cpulist in sysfs",
        worse=lambda count, usual: count >= 2 * usual,
    ),
    Attribute(
        "driver",
        "answer to nvidia-smi",
        lambda one: "given" if one.device.driver_states else "none",
        "nvidia-smi -q",
        worse=lambda value, usual: value == "none",
        of_driver=True,
    ),
    Attribute(
        "functions",
        "virtual functions",
        lambda one: one.device.sriov_num_vfs,
        "sriov_numvfs in sysfs",
        of_driver=True,
        severity=Severity.INFO,
    ),
    Attribute(
        "mode",
        "partition mode",
        lambda one: one.device.partition_mode,
        "nvidia-smi, current_compute_partition in sysfs",
        worse=_other,
        severity=Severity.INFO,
    ),
    Attribute(
        "mode",
        "memory partition mode",
        lambda one: one.device.memory_partition_mode,
        "current_memory_partition in sysfs",
        worse=_other,
    ),
)
"""Each is compared in this order: what covers stands before what it covers."""


def _named(group: Sequence[Compared]) -> Iterator[Attribute]:
    """Each setting that a source names, of the devices and of the ports above them."""
    may_sleep = group[0].device.kind is not DeviceKind.NVSWITCH  # when idle, by their drivers
    for label, source, states in (
        ("{}", "lspci -vvv", _settings_of_device),
        ("{} of its port", "lspci -vvv", _settings_of_port),
        ("{}", "nvidia-smi -q", lambda one: one.device.driver_states),
    ):
        names = dict.fromkeys(name for one in group for name, _ in states(one))
        for name in names:
            yield Attribute(
                "settings",
                label.format(name),
                _of_states(states, name),
                source,
                worse=_other,
                of_driver=True,
                severity=Severity.INFO if name == "power state" and may_sleep else None,
            )


_SAID_ALONE = ("Control Mem", "Control BusMaster")
"""What is wrong of a device by itself, and is said so; of a port not."""


def _settings_of_device(one: Compared) -> tuple[tuple[str, str], ...]:
    said = _SAID_ALONE if one.device.kind in JUDGED else ()
    return tuple(pair for pair in one.registers.settings if pair[0] not in said)


_States = Callable[[Compared], tuple[tuple[str, str], ...]]


def _settings_of_port(one: Compared) -> tuple[tuple[str, str], ...]:
    found = None if one.port is None else one.port.registers
    return () if found is None else found.settings


def _of_states(states: _States, name: str) -> Read:
    return lambda one: dict(states(one)).get(name)


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
    groups = _groups(host)
    named = [(one, [group]) for group in groups for one in _named(group)]
    boards = _groups(host, by_board=False)
    whole = [(one, groups) for one in ATTRIBUTES]
    for attribute, of in (*whole, *named, (_BOARD, boards), (_NODE, _of_root_complexes(host))):
        for group in of:
            for members in _same_driver(group) if attribute.of_driver else (group,):
                for one in _odd(attribute, members, host.name):
                    (bdf,) = one.devices
                    if (bdf, attribute.name) not in said:
                        yield one
                        said |= {(bdf, name) for name in attribute.covers}


_BOARD = Attribute(
    "settings",
    "board",
    lambda one: (
        None
        if one.device.kind not in (DeviceKind.GPU, DeviceKind.NVSWITCH)
        or one.device.subsystem_device_id is None
        else (one.device.subsystem_vendor_id or 0, one.device.subsystem_device_id)
    ),
    "Subsystem of lspci -n, subsystem_device in sysfs",
    lambda ids: f"subsystem {ids[0]:04x}:{ids[1]:04x}",
    _other,
)


_NODE = Attribute(
    "node", "NUMA node", lambda one: one.device.node, "numa_node in sysfs", worse=_other
)
"""Compared with all that is below the same root complex: one host bridge is next to one node."""


def unread_attribute(host: Host, bdf: Bdf, subject: str) -> bool:
    """Whether the host does not show now what a finding of that subject compared of a device."""
    of_device = [one for group in _groups(host) for one in group if one.device.bdf == bdf]
    rows = [
        row
        for row in (*ATTRIBUTES, *_named(of_device), _BOARD, _NODE)
        if of_device and _subject(of_device[0].device, row) == subject
    ]
    return not rows or rows[0].read(of_device[0]) is None


def odd_attributes(name: str) -> tuple[str, ...]:
    """What ``odd_attribute`` says of the rows of that name."""
    rows = [_BOARD] if name == "board" else [one for one in ATTRIBUTES if one.name == name]
    return tuple(f"device-odd: {one.label}" for one in rows)


def odd_attribute(found: Finding) -> str:
    """A finding's id; of a device that differs from others also in what."""
    if found.id != "device-odd":
        return found.id
    return f"{found.id}: {found.subject.rpartition(': ')[2]}"


def _subject(device: PciDevice, attribute: Attribute) -> str:
    return f"{JUDGED.get(device.kind, 'switch')} {device.bdf}: {attribute.label}"


def has_like_devices(host: Host) -> bool:
    """Whether there is anything to compare."""
    return any(len(group) > 1 for group in _groups(host))


def _odd(attribute: Attribute, group: Sequence[Compared], name: str) -> Iterator[Finding]:
    values = [(one, attribute.read(one)) for one in group]
    known = [(one, value) for one, value in values if value is not None]
    counts = Counter(value for _, value in known)
    if len(known) < 2 or len(counts) < 2:
        return
    usual, count = counts.most_common(1)[0]
    is_majority = len(known) >= _LEAST and 2 * count > len(known)
    is_gpu = group[0].device.kind is DeviceKind.GPU
    if not is_majority and not is_gpu:
        return
    if not is_majority:  # as many have one as another: the better one could be had by all
        best = [v for v in counts if not any(attribute.worse(v, other) for other in counts)]
        if len(best) != 1:
            return
        usual, count = best[0], counts[best[0]]
    severity = attribute.severity if is_majority else Severity.INFO
    if group[0].device.kind is DeviceKind.NVME and severity is None:
        severity = Severity.INFO
    for one, value in known:
        if value == usual or not attribute.worse(value, usual):
            continue
        if attribute.name in _WIRED and _is_built_so(one, attribute):
            continue
        device = one.device
        names = [str(o.device.bdf) for o, v in known if v == usual]
        yield finding(
            "device-odd",
            _subject(device, attribute),
            expected=f"{attribute.shown(usual)}, as {count} like it: "
            f"{first_few(names, _MOST_NAMED)}",
            observed=attribute.shown(value),
            severity=severity,
            case=attribute.name,
            values={"device": device.bdf, "port": one.port.bdf if one.port else "none"},
            source=f"{name}: {attribute.source}",
            devices=(device.bdf,),
        )


_WIRED = frozenset({"link", "port", "path"})


def _is_built_so(one: Compared, attribute: Attribute) -> bool:
    """Whether card and slot can the same: another card with the ids of the others, as the NICs that
    manage the NVSwitches of a B200 board. No fault lowers what both ends can. What switches can is
    said of the devices below them."""
    if one.device.kind is DeviceKind.BRIDGE:
        return True
    own, is_gpu = _most(one.device), one.device.kind is DeviceKind.GPU
    of_port = None if one.port is None else _most(one.port)
    narrower_above = attribute.name == "path" and attribute.read(one) != own
    return not is_gpu and own is not None and own == of_port and not narrower_above


def _same_driver(group: Sequence[Compared]) -> list[list[Compared]]:
    found: dict[str | None, list[Compared]] = {}
    for one in group:
        found.setdefault(one.device.driver, []).append(one)
    return list(found.values())


def _groups(host: Host, *, by_board: bool = True) -> list[list[Compared]]:
    paths = {path.device.bdf: path for path in device_paths(host)}
    counts = peer_links(host)
    groups: dict[Hashable, list[Compared]] = {}
    below: dict[Bdf, tuple[tuple[PciDevice, ...], set[DeviceKind]]] = {}
    for device in host.pci_devices:
        if device.kind not in JUDGED or device.physical_function is not None:
            continue
        # Listings without -n give names in place of ids.
        ids = (device.vendor_id, device.name if device.device_id is None else device.device_id)
        subsystem = (device.subsystem_vendor_id, device.subsystem_device_id)
        if None in ids:
            continue
        key: Hashable = (device.kind, ids, subsystem if by_board else None, device.bdf.function)
        links = links_above(device, host.device_at)
        outside = [link for link in links if not (link.is_inside_a_card or link.is_virtual)]
        ports = tuple(link.upper for link in outside)
        one = Compared(device, ports, paths.get(device.bdf), counts.get(device.bdf))
        groups.setdefault(key, []).append(one)
        for index, link in enumerate(outside[1:], 1):
            below.setdefault(link.lower.bdf, (ports[index:], set()))[1].add(device.kind)
    for bdf, (ports, kinds) in below.items():
        switch = host.device_at[bdf]
        key = (switch.kind, switch.vendor_id, switch.device_id, frozenset(kinds))
        groups.setdefault(key, []).append(Compared(switch, ports, None, None))
    return list(groups.values())


def _of_root_complexes(host: Host) -> list[list[Compared]]:
    """All that is below each, ports too."""
    found: dict[str, list[Compared]] = {}
    for device in () if host.nodes_assumed else host.pci_devices:
        if device.physical_function is None:
            one = Compared(device, (), None, None)
            found.setdefault(device.root_complex, []).append(one)
    return list(found.values())
