"""Device state: what is wrong of a device whatever others have: BARs, registers, errors that it has
seen, boards that lack GPUs, NVSwitches or NVLinks that their model has, and what parts say of
themselves, by a table (facts.txt).

Source: PCIe 6.0, 7.5.1 (Command), 7.8.4 (AER), 7.8.6 (Resizable BAR); NVIDIA's data sheets.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from functools import cache
from itertools import combinations

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.input_files import package_text
from homenode.machine.link_path import JUDGED, links_above, peer_links
from homenode.machine.pci import DeviceKind, PciDevice, are_models_known, board_of, model_of
from homenode.machine.topology import Host
from homenode.units import GIB, first_number, format_bytes
from homenode.wording import first_few


class GpuModel(Struct, frozen=True, kw_only=True):
    """What every GPU of a model has. bar_bytes: its largest BAR. nvlinks: None where bridges are
    an option. board: (GPUs, NVSwitches) of boards with NVSwitches that the host sees."""

    name: str
    bar_bytes: int
    nvlinks: int | None = None
    boards: tuple[tuple[int, int], ...] = ()


def _models() -> Iterator[tuple[tuple[int, int], GpuModel]]:
    for line in package_text("check", "doctor", "models.txt").splitlines():
        if line and not line.startswith("#"):
            ids, gib, nvlinks, boards, name = line.split(maxsplit=4)
            vendor, device = (int(part, 16) for part in ids.split(":"))
            pairs = (pair.split(":") for pair in boards.split(",") if pair != "-")
            yield (
                (vendor, device),
                GpuModel(
                    name=name,
                    bar_bytes=int(gib) * GIB,
                    nvlinks=None if nvlinks == "-" else int(nvlinks),
                    boards=tuple((int(gpus), int(switches)) for gpus, switches in pairs),
                ),
            )


MODELS = dict(_models())
_ACCELERATORS = frozenset({0x0302, 0x1200})
"""Classes of GPUs that have no display: whose BAR is small is never meant to be."""

_SERIOUS = frozenset(
    "DLP SDES TLP FCP CmpltTO RxOF MalfTLP ECRC ACSViol UncorrIntErr PoisonTLPBlocked".split()
)
"""Bits of UESta that firmware's search for devices does not set."""


def device_state_findings(host: Host) -> Iterator[Finding]:
    for device in host.pci_devices:
        if device.kind in JUDGED and device.physical_function is None:
            yield from _bars(device, host)
            yield from _switched_off(device, host)
    yield from _seen_errors(host)
    yield from _boards(host)
    yield from _uneven(host)
    yield from _few_links(host)


def _name(device: PciDevice) -> str:
    return f"{JUDGED.get(device.kind, 'port')} {device.bdf}"


def _severity(device: PciDevice) -> Severity:
    return Severity.CRITICAL if device.kind is DeviceKind.GPU else Severity.WARNING


def _bars(device: PciDevice, host: Host) -> Iterator[Finding]:
    unplaced = () if device.registers is None else device.registers.unplaced_bars
    if unplaced:
        sizes = {bar.index: format_bytes(bar.size_bytes) for bar in device.bars}
        yield finding(
            "bar-unassigned",
            _name(device),
            expected="an address for each BAR",
            observed=", ".join(
                f"BAR {index} ({sizes.get(index, 'size unknown')}) has none" for index in unplaced
            ),
            severity=_severity(device),
            source=f"{host.name}: resource of {device.bdf} in sysfs, Region of lspci -vvv",
            devices=(device.bdf,),
        )
        return
    memory = [bar for bar in device.bars if bar.is_memory and bar.index < 6]
    if device.kind is not DeviceKind.GPU or not memory:
        return
    largest = max(memory, key=lambda bar: bar.size_bytes)
    model = MODELS.get((device.vendor_id or 0, device.device_id or 0))
    could = 0 if model is None else model.bar_bytes
    if device.registers is not None and device.class_code >> 8 in _ACCELERATORS:
        could = max((could, *(size for _, size in device.registers.largest_bars)))
    if largest.size_bytes < could:
        yield finding(
            "bar-small",
            _name(device),
            expected=f"{format_bytes(could)}, as "
            + ("its resizable BAR can" if model is None else f"each {model.name} has"),
            observed=f"BAR {largest.index} of {format_bytes(largest.size_bytes)}",
            source=f"{host.name}: resource of {device.bdf} in sysfs, Region of lspci -vvv",
            devices=(device.bdf,),
        )


def _switched_off(device: PciDevice, host: Host) -> Iterator[Finding]:
    """Memory and transfers of a device that a program of the host uses: of others they are set when
    it is opened."""
    registers = device.registers
    asleep = (device.power_state or "").startswith("D3")
    if registers is None or not device.has_host_driver or asleep:
        return
    off = [
        name
        for name, is_on in (("Mem", registers.memory), ("BusMaster", registers.bus_master))
        if is_on is False
    ]
    if off:
        yield finding(
            "device-switched-off",
            _name(device),
            expected=f"Mem+ BusMaster+ of a device that {device.driver} drives",
            observed=" ".join(f"{name}-" for name in off),
            severity=_severity(device),
            values={"device": device.bdf},
            source=f"{host.name}: Control of lspci -vvv",
            devices=(device.bdf,),
        )


def _seen_errors(host: Host) -> Iterator[Finding]:
    """Of devices and the ports above them, each once."""
    seen: dict[Bdf, PciDevice] = {}
    for device in host.pci_devices:
        if device.kind in JUDGED and device.physical_function is None:
            seen.setdefault(device.bdf, device)
            for link in links_above(device, host.device_at):
                seen.setdefault(link.upper.bdf, link.upper)
                seen.setdefault(link.lower.bdf, link.lower)
    for device in seen.values():
        stated = () if device.registers is None else device.registers.uncorrected or ()
        serious = [name for name in stated if name in _SERIOUS]
        if serious:
            yield finding(
                "pcie-errors-seen",
                _name(device),
                expected="no uncorrected error in the status of its AER capability",
                observed=f"{'+ '.join(serious)}+",
                source=f"{host.name}: UESta of lspci -vvv",
                devices=(device.bdf,),
            )


def _boards(host: Host) -> Iterator[Finding]:
    """Boards of GPUs with NVSwitches of which a part is missing."""
    gpus = [g for g in host.devices_of_kind(DeviceKind.GPU) if g.physical_function is None]
    if not are_models_known(host.pci_devices):
        return
    models = Counter((g.vendor_id or 0, g.device_id or 0) for g in gpus)
    switches = len(host.devices_of_kind(DeviceKind.NVSWITCH))
    for ids, count in models.items():
        model = MODELS.get(ids)
        if model is None or not model.boards or not switches or (count, switches) in model.boards:
            continue
        fitting = [board for board in model.boards if board[0] >= count and board[1] >= switches]
        if fitting:
            most, of_switches = min(fitting)
            yield finding(
                "board-incomplete",
                f"board of {model.name}",
                expected=f"{most} GPUs and {of_switches} NVSwitches",
                observed=f"{count} GPUs and {switches} NVSwitches",
                source=f"{host.name}: /sys/bus/pci/devices",
            )


def _uneven(host: Host) -> Iterator[Finding]:
    """Switches, else nodes, with fewer GPUs or NICs of a model than the others like them. Where a
    switch has another device instead, it is that one."""
    kinds = (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVME)
    found = [d for d in host.pci_devices if d.kind in kinds and d.physical_function is None]
    switch_of = {
        device.bdf: links[-1].lower
        for device in found
        if len(links := links_above(device, host.device_at)) > 1
    }
    for name, key, near in _OF_PLACES:
        alike: dict[Hashable, list[PciDevice]] = {}
        for device in found:
            alike.setdefault(key(device), []).append(device)
        for group in alike.values() if are_models_known(host.pci_devices) else ():
            below = _fewer_below(group, switch_of)
            if group[0].kind is DeviceKind.NVME and len(below) > 1:
                below = []  # bays that were not filled
            for switch, n, usual, _ in below:
                others = [d for d in found if switch_of.get(d.bdf) == switch and d not in group]
                others = [d for d in others if near(d) == near(group[0])]
                strangers = [d for d in others if 2 * len(alike[key(d)]) < len(group)]
                if len(strangers) == usual - n:
                    below = [row for row in below if row[0] != switch]
                    yield from (_stranger(d, group, name, host) for d in strangers)
            places = [(f"switch {row[0].bdf}", *row[1:]) for row in below]
            for place, n, usual, count in (places or _fewer_near(group)) * (name == "model"):
                is_design = count == 1 and (usual - n) % 2 == 0
                if is_design and group[0].kind is DeviceKind.NVME:
                    continue  # drives go where there are bays
                yield finding(
                    "devices-uneven",
                    f"{place}: {JUDGED[group[0].kind]}s like {group[0].bdf}",
                    expected=f"{usual}, as {count} like it",
                    observed=str(n),
                    severity=Severity.INFO if is_design else None,
                    source=f"{host.name}: /sys/bus/pci/devices",
                )


_Key = Callable[[PciDevice], Hashable]
_OF_PLACES: tuple[tuple[str, _Key, _Key], ...] = (
    ("model", model_of, lambda d: (d.kind, d.vendor_id, d.bdf.function)),
    # Boards of GPUs are compared in all places.
    ("board", lambda d: (model_of(d), d.kind is DeviceKind.NIC and board_of(d)), model_of),
)
"""Of devices in the same place, what differs; what makes them alike; what they share if not."""


def _fewer_below(
    group: list[PciDevice], switch_of: Mapping[Bdf, PciDevice]
) -> list[tuple[PciDevice, int, int, int]]:
    """Switches, of the models that a group is below, with fewer of it; how many, and what how many
    others have."""
    switches = [switch_of[d.bdf] for d in group if d.bdf in switch_of]
    ids = {(one.vendor_id, one.device_id) for one in switches}
    below = {s.bdf: s for s in switch_of.values() if (s.vendor_id, s.device_id) in ids}
    counts = {bdf: switches.count(one) for bdf, one in below.items()}
    usual, count = Counter(counts.values()).most_common(1)[0] if counts else (0, 0)
    if count < _LEAST_ALIKE or 2 * count <= len(counts):
        return []
    near = Counter(device.node for device in group)
    is_uneven = len(set(near.values())) > 1  # else a switch for other devices only is built so
    fewer = {bdf: n for bdf, n in counts.items() if n < usual and (n or is_uneven)}
    return [(below[bdf], n, usual, count) for bdf, n in fewer.items()]


def _fewer_near(group: list[PciDevice]) -> list[tuple[str, int, int, int]]:
    """The node next to fewer of a group than all others."""
    near = Counter(device.node for device in group)
    usual = max(near.values())
    fewer = [(f"node {node}", n) for node, n in near.items() if n < usual]
    count = len(near) - len(fewer)
    if None in near or len(fewer) != 1 or usual * count <= _LEAST_ALIKE:
        return []
    return [(node, n, usual, count) for node, n in fewer]


def _stranger(device: PciDevice, group: list[PciDevice], name: str, host: Host) -> Finding:
    def shown(one: PciDevice) -> str:
        ids = board_of(one) if name == "board" else (one.vendor_id or 0, one.device_id)
        return str(one.name) if ids is None or ids[1] is None else f"{ids[0]:04x}:{ids[1]:04x}"

    return finding(
        "device-odd",
        f"{JUDGED[device.kind]} {device.bdf}: {name}",
        expected=f"{shown(group[0])}, as {len(group)} in the same place below other switches",
        observed=shown(device),
        values={"device": device.bdf},
        source=f"{host.name}: /sys/bus/pci/devices",
        devices=(device.bdf,),
    )


_LEAST_ALIKE = 3
"""Of fewer places or devices, an uneven number is as likely meant."""


def _few_links(host: Host) -> Iterator[Finding]:
    for bdf, count in peer_links(host).items():
        gpu = host.device_at[bdf]
        model = MODELS.get((gpu.vendor_id or 0, gpu.device_id or 0))
        if model is not None and model.nvlinks is not None and count < model.nvlinks:
            yield finding(
                "nvlinks-few",
                _name(gpu),
                expected=f"{model.nvlinks} NVLinks, as each {model.name} has",
                observed=str(count),
                source=f"{host.name}: nvidia-smi topo -m",
                devices=(bdf,),
            )


BETWEEN = ": NVLinks between them"


def odd_pair_findings(host: Host, said: Set[Bdf]) -> Iterator[Finding]:
    """Pairs of GPUs with fewer NVLinks than most pairs have, of GPUs that have all of theirs."""
    gpus = sorted(bdf for bdf in peer_links(host) if bdf not in said)
    joined = {frozenset((link.a, link.b)): link.count or 0 for link in host.links if link.b in gpus}
    pairs = {pair: joined.get(frozenset(pair), 0) for pair in combinations(gpus, 2)}
    usual, count = Counter(pairs.values()).most_common(1)[0] if pairs else (0, 0)
    for (a, b), links in pairs.items():
        if links < usual and 2 * count > len(pairs) and len(gpus) >= _LEAST_ALIKE:
            yield finding(
                "device-odd",
                f"GPU {a} and GPU {b}{BETWEEN}",
                expected=f"{usual}, as {count} pairs like it",
                observed=str(links),
                source=f"{host.name}: nvidia-smi topo -m",
                devices=(a, b),
            )


class StateFact(Struct, frozen=True, kw_only=True):
    """A row of facts.txt. mark: "?" or "+" behind the severity. test: how the value is judged, and
    by what. when: the same of other states, by their names."""

    finding: str
    case: str
    severity: Severity
    mark: str
    part: str
    pattern: "re.Pattern[str]"
    test: tuple[str, str]
    when: tuple[tuple[str, str, str], ...]
    expected: str


@cache
def _facts() -> tuple[StateFact, ...]:
    found: list[StateFact] = []
    name = case = ""
    for row in package_text("check", "doctor", "facts.txt").splitlines():
        if row.startswith("["):
            name, _, case = row[1:].partition("]")
        elif row and not row.startswith("#"):
            severity, part, pattern, test, expected = row.split(" | ")
            of, _, conditions = test.partition(" when ")
            found.append(
                StateFact(
                    finding=name,
                    case=case.strip(),
                    severity=Severity(severity.rstrip("?+")),
                    mark=severity[-1],
                    part=part,
                    pattern=re.compile(pattern, re.ASCII),
                    test=(of.partition(" ")[0], of.partition(" ")[2]),
                    when=tuple(_condition(one) for one in conditions.split(" and ") if one),
                    expected=expected,
                )
            )
    return tuple(found)


def _condition(text: str) -> tuple[str, str, str]:
    """Name, test and words of a condition. Raises ValueError for what is none."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"facts.txt: expected NAME is/not/has/over WORDS, found {text!r}")
    return found["name"], found["by"], found["words"]


def stated_ids() -> frozenset[str]:
    """The findings of the table."""
    return frozenset(fact.finding for fact in _facts())


_CONDITION = re.compile(r"(?P<name>[^| ]+(?: [^| ]+)?) (?P<by>is|not|has|over) (?P<words>[^ ].*)")
_SAYS_NOTHING = frozenset({"N/A", "[N/A]", "Not Supported", "[Not Supported]", "Unknown", ""})


def _is_wrong(test: tuple[str, str], name: str, states: Mapping[str, str]) -> bool:
    """Whether a test says that the state of that name is not as it should be."""
    (by, words), value = test, states.get(name, "none")
    if value in _SAYS_NOTHING:
        return False
    if by in ("is", "not", "some"):
        return (value in words.split("|")) is (by != "not")
    if by == "has":
        return any(word in value for word in words.split("|"))
    if by == "over":
        return value[:1].isdecimal() and first_number(value) > int(words)
    other = states.get(_reference(test, name), "N/A")
    if other in _SAYS_NOTHING or by == "unlike":
        return other not in _SAYS_NOTHING and other != value
    is_rates = words.startswith("most:")
    most = max(map(int, _RATE.findall(other)), default=0) if is_rates else first_number(other)
    return value[:1].isdecimal() and 0 < first_number(value) < most


_RATE = re.compile(r"\b(\d{1,7})base", re.ASCII)
"""Mb/s of a link mode, as ethtool names it."""


def _wrong(fact: StateFact, states: Mapping[str, str]) -> list[str]:
    """The names of the states that a row says are wrong."""
    if not all(_is_wrong((by, words), name, states) for name, by, words in fact.when):
        return []
    named = [name for name in states if fact.pattern.fullmatch(name)]
    wrong = [name for name in named if _is_wrong(fact.test, name, states)]
    if fact.test[0] == "over":
        wrong.sort(key=lambda name: first_number(states[name]), reverse=True)
    return [] if fact.test[0] == "some" and len(wrong) == len(named) else wrong


def _reference(test: tuple[str, str], name: str) -> str:
    """The name of the state that a state of that name is compared with; "" of words and numbers."""
    by, words = test
    if by not in ("below", "unlike"):
        return ""
    folder, _, own = name.rpartition("/")
    of = words.removeprefix("most:")
    return of.replace("./", f"{folder}/", 1) if of.startswith("./") else of.replace("~", own)


def _shows(fact: StateFact, states: Mapping[str, str]) -> bool:
    """Whether a row can be judged: a rate of -1 of a port without a link says nothing."""
    named = [name for name in states if fact.pattern.fullmatch(name)]
    known = [name for name in named if _reference(fact.test, name) in ("", *states)]
    return any(fact.test[0] != "below" or states[name][:1].isdecimal() for name in known)


def states_of(device: PciDevice) -> dict[str, str]:
    """What programs and sysfs say of a device, and whether the port above it is known."""
    above = "no" if device.parent is None else "yes"
    return dict((*device.driver_states, *device.states, ("link above", above)))


def is_spare_port(device: PciDevice) -> bool:
    """Whether it is an Ethernet port that never had a link."""
    states = dict(device.states)
    changes = states.get("net/carrier_changes", "")
    is_down = states.get("net/operstate") == "down" and changes.isdecimal()
    return is_down and device.class_code >> 8 == _ETHERNET and int(changes) < _LEAST_CHANGES


_ETHERNET = 0x0200
_LEAST_CHANGES = 2
"""Of a port's carrier: it had a link once."""


def stated_findings(host: Host) -> Iterator[Finding]:
    """What devices and parts say of themselves that the table says is wrong."""
    yield from _stated_of_devices(host)
    yield from _stated_of_parts(host)


def _stated_of_devices(host: Host) -> Iterator[Finding]:
    """Of several states of one row, the first is named, and all are shown."""
    alike: dict[Hashable, list[tuple[PciDevice, dict[str, str]]]] = {}
    for device in host.pci_devices:
        if device.kind in JUDGED and device.physical_function is None:
            model = (device.kind, device.vendor_id, device.device_id)
            alike.setdefault(model, []).append((device, states_of(device)))
    for group in alike.values():
        for fact in _facts():
            if fact.part != JUDGED[group[0][0].kind]:
                continue
            found = [(d, states, _wrong(fact, states)) for d, states in group]
            shown = [s for _, s, _ in found if _shows(fact, s)]
            wrong = [row for row in found if row[2]]
            for device, states, names in wrong:
                others = [one for one in shown if one is not states]
                are_equal = all(one.get(n) == states[n] for one in others for n in names)
                severity = fact.severity
                if fact.mark == "?" and others and are_equal:
                    severity = Severity.INFO
                elif fact.mark == "+" and len(wrong) < len(shown):
                    severity = Severity.WARNING
                yield _stated(fact, _name(device), names, states, host, severity, (device.bdf,))


def _stated_of_parts(host: Host) -> Iterator[Finding]:
    """One for each state and value, of all parts that have it."""
    of_parts: dict[tuple[int, str, str], list[str]] = {}
    facts = [(at, fact) for at, fact in enumerate(_facts()) if fact.part not in JUDGED.values()]
    for part in host.parts:
        states = dict(part.states)
        for at, fact in facts:
            if fact.part == part.group:
                for name in _wrong(fact, states):
                    of_parts.setdefault((at, name, states[name]), []).append(part.name)
    for (at, name, value), parts in of_parts.items():
        fact = _facts()[at]
        which = str(CpuSet(map(int, parts))) if fact.part == "PU" else first_few(parts, 8)
        place = f"{fact.part} {which}"
        yield _stated(fact, place, [name], {name: value}, host, fact.severity, ())


def _stated(
    fact: StateFact,
    place: str,
    names: Iterable[str],
    states: Mapping[str, str],
    host: Host,
    severity: Severity,
    devices: tuple[Bdf, ...],
) -> Finding:
    first, *_ = names
    reference = states.get(_reference(fact.test, first), "")
    return finding(
        fact.finding,
        f"{place}: {first}",
        expected=f"{fact.expected}{reference and f': {reference[:80]}'}",
        observed=", ".join(f"{name} {states[name]}" for name in names),
        severity=severity,
        case=fact.case,
        source=f"{host.name}: {_SOURCES.get(fact.part, 'sysfs, dmidecode -t 17')}",
        devices=devices,
    )


_SOURCES = {
    "GPU": "nvidia-smi -q -x, nvidia-smi nvlink, amd-smi, sysfs",
    "NIC": "sysfs, ethtool, devlink",
    "NVMe drive": "nvme smart-log, sysfs",
}
