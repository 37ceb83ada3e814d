"""Baseline: what an operator writes down of a good host, and whether a change of it matters.

One row of FACTS for each: how it is read, and how bad a change is. Each fact is about a device, a
node or the host; its value is a text.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache, partial
from typing import NamedTuple

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.check.doctor.alike import ATTRIBUTES, Compared
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.input_files import package_text
from homenode.machine.link_path import peer_links
from homenode.machine.pci import DeviceKind, PciDevice, is_viable_driver, model_of
from homenode.machine.snapshot.contents import STATES, state_rule, words
from homenode.machine.topology import Host
from homenode.units import GIB, MIB, first_number, format_bytes

HOST = "host"

Facts = Mapping[str, Mapping[str, str]]
"""Values by what they are about, then by the fact's name. Devices by their addresses."""

Read = Callable[[Host], Mapping[str, str]]
Judge = Callable[[str, str, bool], Severity | None]
"""How bad a change is; None = none. The last says whether the kernel is another one."""

_KINDS = (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH, DeviceKind.NVME)

LINE = "kernel's command line"
_KERNEL_WORDS = {
    "command-line": words("placement"),
    "parameters": words("parameters") - words("placement") - words("harmless"),
}
"""Two facts: what is recorded as the first never changes its extent, by which a state that was
recorded before would differ."""


def _follows() -> Iterator[tuple[str, frozenset[str]]]:
    for row in package_text("check", "doctor", "follows.txt").splitlines():
        names, _, facts = row.partition(" | ")
        if not row.startswith("#"):
            yield from dict.fromkeys(names.split(), frozenset(facts.split(", "))).items()


_FOLLOWS = dict(_follows())
"""Of a kernel parameter: the facts that it changes."""


class FactRule(NamedTuple):
    """One row. name: as in the file, and the case of the page's texts. label: for people. topic: of
    several facts that change for one cause."""

    name: str
    label: str
    read: Read
    judge: Judge
    topic: str = ""


def _of_host(value: Callable[[Host], str | None]) -> Read:
    def read(host: Host) -> Mapping[str, str]:
        found = value(host)
        return {} if found is None else {HOST: found}

    return read


def _is_recorded(device: PciDevice) -> bool:
    """What is not known to be the same model is not compared."""
    is_judged = device.kind in _KINDS and device.physical_function is None
    return is_judged and model_of(device) is not None


def _of_devices(value: Callable[[PciDevice], str | None]) -> Read:
    def read(host: Host) -> Mapping[str, str]:
        return {
            str(device.bdf): found
            for device in host.pci_devices
            if _is_recorded(device)
            if (found := value(device)) is not None
        }

    return read


def _is(severity: Severity) -> Judge:
    return lambda was, now, other_kernel: severity


_INFO, _WARNING, _CRITICAL = _is(Severity.INFO), _is(Severity.WARNING), _is(Severity.CRITICAL)


def _less_memory(was: str, now: str, other_kernel: bool) -> Severity | None:
    """Kernels keep other amounts for themselves; the same kernel keeps a few MiB more or less."""
    lost = int(was) - int(now) if was.isdecimal() and now.isdecimal() else 0
    if abs(lost) <= (GIB if other_kernel else 8 * MIB):
        return None
    return Severity.CRITICAL if lost > GIB else Severity.WARNING


def _judge_less(was: str, now: str, other_kernel: bool) -> Severity | None:
    return (
        Severity.WARNING
        if first_number(now) < first_number(was) or _OF_EACH in now
        else Severity.INFO
    )


_OF_EACH = " of "
"""In a fact of PUs: its halves may have changed."""


def _other_driver(was: str, now: str, other_kernel: bool) -> Severity | None:
    """VFIO takes a device when a VM starts, and gives it back."""
    is_taken = now != "none" and any(is_viable_driver(name) for name in (was, now))
    return Severity.INFO if is_taken else Severity.WARNING


def _nodes(value: Callable[[Host, int], str | None]) -> Read:
    def read(host: Host) -> Mapping[str, str]:
        if host.nodes_assumed:
            return {}
        found = ((f"node {node.index}", value(host, int(node.index))) for node in host.nodes)
        return {name: text for name, text in found if text is not None}

    return read


def _memory(host: Host, index: int) -> str | None:
    node = host.node(index)
    return None if node is None or node.memory_bytes is None else str(node.memory_bytes)


def _siblings(host: Host, index: int) -> str | None:
    """PUs of each core, the first cores first: "0,64 1,65"."""
    node = host.node(index)
    if node is None or not host.cores or not node.pus:
        return None
    cores = (core.pus for core in host.cores if not core.pus.isdisjoint(node.pus))
    return " ".join(map(str, sorted(cores, key=tuple)))


def _subsystem(device: PciDevice) -> str | None:
    if device.subsystem_vendor_id is None or device.subsystem_device_id is None:
        return None
    return f"{device.subsystem_vendor_id:04x}:{device.subsystem_device_id:04x}"


def _bars(device: PciDevice) -> str | None:
    found = [f"{b.index} {format_bytes(b.size_bytes)}" for b in device.bars if b.index < 6]
    return ", ".join(found) or None


def _partition(device: PciDevice) -> str | None:
    """NVIDIA's driver says of a GPU that is not divided only that MIG is off."""
    modes = (device.partition_mode, device.memory_partition_mode)
    found = " ".join(mode for mode in modes if mode is not None)
    return found or ("whole" if device.driver_states else None)


def _text(value: object) -> str | None:
    """Versions are tuples."""
    numbers = value if isinstance(value, tuple) else (value,)
    return None if value is None else ".".join(map(str, numbers))


def _setting(field: str, host: Host) -> str | None:
    return _text(getattr(host.settings, field))


def _words(names: Set[str], host: Host) -> str | None:
    line = host.settings.kernel_command_line
    if line is None:
        return None
    given = (word for word in line.split() if word.partition("=")[0] in names)
    return " ".join(given) or "none of those that matter"


def _iommu(host: Host) -> str | None:
    if host.settings.iommus is None:
        return None
    return "on" if host.settings.iommus else "off"


def _drivers(host: Host) -> Mapping[str, str]:
    """None is a driver's absence only where the source gives those of other functions."""
    is_given = any(device.driver is not None for device in host.pci_devices)
    return _of_devices(lambda one: one.driver or "none")(host) if is_given else {}


def _governors(host: Host) -> str | None:
    found = host.settings.pus_of_governor
    return None if found is None else ", ".join(f"{name} of {pus}" for name, pus in found)


def _frequencies(host: Host) -> str | None:
    found = host.settings.frequency_limits
    return None if found is None else ", ".join(f"{f.limit_khz} kHz of {f.pus}" for f in found)


def _nvlinks(host: Host) -> Mapping[Bdf, int]:
    """Also where no GPU has any: 0 of those that nvidia-smi answers for, if it gave the links."""
    gpus = host.devices_of_kind(DeviceKind.GPU)
    is_given = len(gpus) > 1 and all(gap.subject != "NVLinks" for gap in host.gaps)
    shown = [g.bdf for g in gpus if g.driver_states and g.driver == "nvidia"]
    whole = [bdf for bdf in shown if host.device_at[bdf].partition_mode != "mig"]
    return peer_links(host) or (dict.fromkeys(whole, 0) if is_given else {})


FACTS: tuple[FactRule, ...] = (
    FactRule("memory", "memory", _nodes(_memory), _less_memory),
    FactRule("siblings", "PUs of cores", _nodes(_siblings), _CRITICAL),
    *(
        FactRule(name, LINE, _of_host(partial(_words, names)), _WARNING)
        for name, names in _KERNEL_WORDS.items()
    ),
    FactRule("iommu", "IOMMU", _of_host(_iommu), _CRITICAL),
    FactRule("governor", "governor", _of_host(_governors), _WARNING, "energy preference"),
    FactRule("frequencies", "frequency limits", _of_host(_frequencies), _WARNING),
    *(
        FactRule(name, label, _of_host(partial(_setting, field)), judge)
        for name, label, field, judge in (
            ("kernel", "kernel", "kernel_release", _WARNING),
            ("firmware", "firmware", "firmware", _WARNING),
            ("thp", "huge pages", "transparent_hugepages", _WARNING),
            ("numa-balancing", "NUMA balancing", "numa_balancing", _WARNING),
            ("turbo", "turbo", "turbo", _WARNING),
            ("smt", "SMT control", "smt_control", _WARNING),
            ("libvirt", "libvirt", "libvirt_version", _INFO),
        )
    ),
    FactRule("bars", "BARs", _of_devices(_bars), _WARNING),
    FactRule("subsystem", "subsystem ids", _of_devices(_subsystem), _WARNING),
    FactRule("driver", "driver", _drivers, _other_driver),
    FactRule("partition", "partition mode", _of_devices(_partition), _WARNING),
    FactRule("iommu-mode", "IOMMU mode", _of_devices(lambda one: one.iommu_domain), _WARNING),
    FactRule(
        "nvlinks",
        "NVLinks",
        lambda host: {str(bdf): str(count) for bdf, count in _nvlinks(host).items()},
        _judge_less,
    ),
)
"""What is recorded, and how bad a change is: an info is printed by `doctor --expect` alone."""

RULES = {rule.name: rule for rule in FACTS}

_REGISTERS = (
    "payload, tags, sleep, isolation, translation, read request, ordering, interrupts".split(", ")
)
"""Rows of what like devices are compared by, that are recorded of them and of the ports above."""


def facts_of(host: Host) -> dict[str, dict[str, str]]:
    """What the host is like now; what its source does not say is left out."""
    found: dict[str, dict[str, str]] = {}
    for rule in FACTS:
        for about, value in rule.read(host).items():
            found.setdefault(about, {})[rule.name] = value
    for about, name, value in (*_registers(host), *_states(host)):
        found.setdefault(about, {})[name] = value
    return found


def _registers(host: Host) -> Iterator[tuple[str, str, str]]:
    for device in host.pci_devices:
        is_port = device.kind is DeviceKind.BRIDGE and device.link is not None
        if _is_recorded(device) or is_port:
            for row in ATTRIBUTES:
                value = row.read(Compared(device)) if row.name in _REGISTERS else None
                if value is not None:
                    yield str(device.bdf), row.label, row.shown(value)


OF_PUS = "PU "


def _states(host: Host) -> Iterator[tuple[str, str, str]]:
    """By the table of states; those of PUs are the host's, each value with the PUs that have it."""
    of_pus: dict[str, dict[str, list[int]]] = {}
    for part in host.parts:
        for name, value in part.states:
            if not state_rule(part.group, name).is_recorded:
                continue
            if part.group == "PU":
                of_pus.setdefault(name, {}).setdefault(value, []).append(int(part.name))
            else:
                yield f"{part.group} {part.name}", name, value
    for name, pus in of_pus.items():
        shown = (f"{value} of {CpuSet(numbers)}" for value, numbers in pus.items())
        yield HOST, f"{OF_PUS}{name}", ", ".join(shown)
    for device in host.pci_devices:
        if _is_recorded(device):
            for name, value in (*device.driver_states, *device.states):
                if state_rule("device", name).is_recorded:
                    yield str(device.bdf), name, value


@cache
def rule_of(about: str, name: str) -> FactRule:
    """The row of a fact: of FACTS, of what like devices are compared by, or of states."""
    if (known := RULES.get(name)) is not None:
        return known
    row = next((row for row in ATTRIBUTES if row.label == name), None)
    if row is not None:
        return FactRule(name, row.label, _nowhere, _INFO if row.of_driver else _WARNING)
    groups = ("PU", *dict.fromkeys(one.group for one in STATES))
    place = name if name.startswith(OF_PUS) else about
    group = next((one for one in groups if place.startswith(f"{one} ")), "device")
    state = state_rule(group, name.removeprefix(OF_PUS) if place is name else name)
    judge = _INFO if state.is_info else _judge_less if state.judged == "less" else _WARNING
    return FactRule(name, name, _nowhere, judge, state.topic)


def _nowhere(host: Host) -> Mapping[str, str]:
    return {}


def subject_of(rule: FactRule, about: str) -> str:
    return rule.label if about == HOST else f"{about}: {rule.label}"


class FactDrift(NamedTuple):
    """A fact that is another one now."""

    rule: FactRule
    about: str
    finding: Finding


def fact_drift(
    expected: Facts, host: Host, source: str, now: Facts | None = None
) -> Iterator[FactDrift]:
    """Every fact that changed, and whether it matters. What the host does not say now, and what is
    about devices and nodes that are gone, is not here."""
    known = facts_of(host) if now is None else now
    unread = unread_facts(expected, known)
    there = known.get(HOST, {})
    was = expected.get(HOST, {})
    other_kernel = was.get("kernel") != there.get("kernel")
    for about, facts in expected.items():
        for name, before in facts.items():
            if (about, name) in unread or known[about][name] == before:
                continue
            rule, after = rule_of(about, name), known[about][name]
            severity = rule.judge(before, after, other_kernel)
            if severity is not None:
                yield FactDrift(
                    rule, about, _finding(rule, about, before, after, severity, source, host)
                )


def following(expected: Facts, host: Host) -> frozenset[str]:
    """The facts that the kernel parameters which changed have changed."""
    changed: set[str] = set()
    for name in _KERNEL_WORDS:
        was = expected.get(HOST, {}).get(name)
        now = None if was is None else RULES[name].read(host).get(HOST)
        if was is not None and now is not None:
            changed |= {word.partition("=")[0] for word in {*was.split()} ^ {*now.split()}}
    return frozenset().union(*(_FOLLOWS.get(name, frozenset()) for name in changed))


def _finding(
    rule: FactRule, about: str, was: str, now: str, severity: Severity, source: str, host: Host
) -> Finding:
    devices = tuple(bdf for bdf in host.device_at if str(bdf) == about)
    before, after = (_size(was), _size(now)) if rule.name == "memory" else (was, now)
    if rule.name == "siblings":
        before, after = _from_difference(was, now), _from_difference(now, was)
    if rule.label == LINE:
        before, after = _other_words(was, now), _other_words(now, was)
    kind = "".join(f"{host.device_at[bdf].kind} " for bdf in devices)
    return finding(
        "drift-baseline",
        f"{kind}{subject_of(rule, about)}",
        expected=before,
        observed=after,
        severity=severity,
        case=rule.name,
        source=source,
        devices=devices,
    )


def _size(text: str) -> str:
    return f"{int(text) / GIB:.3f} GiB" if text.isdecimal() else text


def _other_words(text: str, other: str) -> str:
    """Those that the other has not."""
    return " ".join(word for word in text.split() if word not in other.split()) or "not given"


def _from_difference(text: str, other: str) -> str:
    """Four words of a long list, from where it differs from another."""
    words, others = text.split(), other.split()
    at = next((i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), 0)
    return " ".join(["..." if at else "", *words[at : at + 4], "..."]).strip()


def unread_facts(expected: Facts, now: Facts) -> frozenset[tuple[str, str]]:
    """(about, name) of what was recorded and is not given now, or not all of it."""
    return frozenset(
        (about, name)
        for about, facts in expected.items()
        for name, before in facts.items()
        if (after := now.get(about, {}).get(name)) is None
        or (name == "partition" and set(after.split()) < set(before.split()))
    )
