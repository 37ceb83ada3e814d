"""Claims: what is to be so of a host and its VMs. Each look proves a claim, refutes it, or neither:
then it is stale, and what an earlier look found of it stands.

A claim is known again by its finding's id, the device or VM that it is about, and its aspect.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from operator import attrgetter

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.check.doctor.alike import unread_attribute
from homenode.check.doctor.baseline import facts_of, rule_of, subject_of, unread_facts
from homenode.check.doctor.device_state import stated_ids, states_of
from homenode.check.doctor.expectation import (
    Accepted,
    CertifiedHost,
    DeviceChange,
    about,
    pages_of,
    unproved_links,
    unread_topology,
)
from homenode.check.doctor.host_state import uneven_places, unread_state
from homenode.errors import ParseError
from homenode.findings import Finding
from homenode.input_files import package_text
from homenode.machine.pci import PciDevice, PciRegisters, are_models_known, board_of, model_of
from homenode.machine.topology import BOOT_LOG, Host

HOST = "host"
LINKS = frozenset({"pcie-link-slow", "pcie-link-narrow", "pcie-target-low", "pcie-link-dropped"})
"""What the doctor says of links; a drift of a link says the same with what was certified."""


class ClaimState(StrEnum):
    """What a look came to."""

    PROVED = "proved"
    REFUTED = "refuted"
    STALE = "stale"  # it was refuted, or never judged, and this look could not tell


class WatchClaim(Struct, frozen=True, kw_only=True):
    """One claim. about: a device's address, the subject of a finding about none, or "host".

    aspect: which of several things of it. vm: the running VM that it is of. reason: why it is
    stale.
    """

    id: str
    about: str
    aspect: str = ""
    vm: str | None = None
    state: ClaimState = ClaimState.REFUTED
    reason: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str | None]:
        """What makes it the same claim in the next look."""
        return self.id, self.about, self.aspect, self.vm

    def __str__(self) -> str:
        place = (
            self.about if self.vm is None or self.vm in self.about else f"{self.vm}, {self.about}"
        )
        return f"{self.id}: {place}{f' ({self.aspect})' if self.aspect else ''}"


_PROCESS = " (process "
"""What follows in a neighbour's subject is another number after its next start."""


def claim_of(found: Finding, aspect: str = "", vm: str | None = None) -> WatchClaim:
    """The claim that a finding refutes."""
    place = about(found).partition(_PROCESS)[0]
    return WatchClaim(id=found.id, about=place, aspect=aspect or _label(found), vm=vm)


def _label(found: Finding) -> str:
    """Of a device that differs from others in several things, which one."""
    is_one_of_several = found.id == "device-odd" or (found.id in stated_ids() and found.devices)
    return found.subject if is_one_of_several else ""


class Sight(Struct, frozen=True, kw_only=True):
    """What one look could see. is_certified: there is a recorded state, with what it has
    accepted. running: tuned VMs; None = not known. unread_vms, unread_live: VMs
    whose document, or whose threads and pages, could not be read, with the reason. links: of
    unproved_links. topology: of unread_topology.
    facts: subjects and names of facts that are not given. pages: nodes whose huge pages are not.
    devices: refuted presence."""

    host: Host
    is_certified: bool = True
    accepted: tuple[Accepted, ...] = ()
    running: frozenset[str] | None = None
    unread_vms: Mapping[str, str] = field(default_factory=dict)
    unread_live: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[Bdf, str] = field(default_factory=dict)
    topology: Mapping[str, str] = field(default_factory=dict)
    facts: frozenset[tuple[str, str]] = frozenset()
    pages: frozenset[str] = frozenset()

    @classmethod
    def of(cls, host: Host, expected: CertifiedHost | None) -> "Sight":
        topology = {} if expected is None else unread_topology(expected, host)
        facts = {} if expected is None else expected.facts
        unread = unread_facts(facts, facts_of(host))
        return cls(
            host=host,
            is_certified=expected is not None,
            accepted=() if expected is None else expected.accepted,
            links=unproved_links(host),
            topology=topology,
            pages=frozenset(
                f"node {node}"
                for node, size in ({} if expected is None else expected.huge_pages)
                if pages_of(host, node, size) is None
            ),
            facts=frozenset((_about_fact(about, name), name) for about, name in unread),
        )


def _about_fact(about: str, name: str) -> str:
    """What the claim of a fact is about: a function, there or not, or its finding's subject."""
    try:
        return str(Bdf.parse(about))
    except ParseError:
        return subject_of(rule_of(about, name), about)


Unproved = Callable[[WatchClaim, Sight], str | None]
_NOT_READ = "the host does not give it now"


def _device(claim: WatchClaim, sight: Sight) -> Bdf | None:
    known = (device.bdf for device in sight.host.pci_devices if str(device.bdf) == claim.about)
    return next(known, None)


def _topology(claim: WatchClaim, sight: Sight) -> str | None:
    return _NOT_READ if claim.aspect in sight.topology else None


def _presence(claim: WatchClaim, sight: Sight) -> str | None:
    if not sight.host.pci_devices:
        return "no PCI function is read"
    bdf = _device(claim, sight)
    if bdf is None or claim.aspect == DeviceChange.PRESENCE:
        return None
    if claim.aspect == DeviceChange.NODE:
        is_read = not sight.host.nodes_assumed and sight.host.device_at[bdf].node is not None
        return None if is_read else "its node is not read"
    return _NOT_READ if sight.host.device_at[bdf].device_id is None else None


def _link(claim: WatchClaim, sight: Sight) -> str | None:
    bdf = _device(claim, sight)
    if bdf is None:
        return _present(claim, sight)
    below = [b for b in sight.links if b == bdf or _is_below(sight.host, b, bdf)]
    return sight.links[below[0]] if below else None


def _is_below(host: Host, device: Bdf, port: Bdf) -> bool:
    return any(above.bdf == port for above in host.bridges_above(device))


def _present(claim: WatchClaim, sight: Sight) -> str | None:
    return "the device is not there" if _device(claim, sight) is None else None


def _of_device(
    read: Callable[[PciDevice, WatchClaim, Host], bool], reason: str = _NOT_READ
) -> Unproved:
    """A claim about a device that is there and shows what it is about."""

    def unproved(claim: WatchClaim, sight: Sight) -> str | None:
        bdf = _device(claim, sight)
        if bdf is None:
            return _present(claim, sight)
        return None if read(sight.host.device_at[bdf], claim, sight.host) else reason

    return unproved


def _has_counters(device: PciDevice, claim: WatchClaim, _: Host) -> bool:
    replays = device.link_replays if claim.id == "pcie-errors-corrected" else None
    return device.errors is not None or replays is not None


def _has_registers(device: PciDevice, claim: WatchClaim, _: Host) -> bool:
    found = device.registers or PciRegisters()
    is_status = claim.id == "pcie-errors-seen"
    return (found.uncorrected if is_status else found.bus_master) is not None


_counters = _of_device(_has_counters, "its error counters are not read")
_registers = _of_device(_has_registers)
_bars = _of_device(
    lambda device, *_: bool(device.bars) and model_of(device) is not None, "its BARs are not read"
)
_peers = _of_device(lambda device, _, host: model_of(device) is not None and bool(host.links))
_IDENTITIES: Mapping[str, Callable[[PciDevice], object]] = {"model": model_of, "board": board_of}


def _shows(device: PciDevice, claim: WatchClaim, host: Host) -> bool:
    name = claim.aspect.rpartition(": ")[2]
    if name in _IDENTITIES:
        return _IDENTITIES[name](device) is not None
    return _has_left(device, name) or not unread_attribute(host, device.bdf, claim.aspect)


_attribute = _of_device(_shows)


def _has_left(device: PciDevice, name: str) -> bool:
    """Whether an entry is gone of a list that is given."""
    shown = states_of(device)
    return name not in shown and any(name.startswith(f"{state}/") for state in shown)


def _says(device: PciDevice, claim: WatchClaim, _: Host) -> bool:
    name = claim.aspect.rpartition(": ")[2]
    return name in states_of(device) or _has_left(device, name)


_state = _of_device(_says)


def _stated(claim: WatchClaim, sight: Sight) -> str | None:
    """Of a device or a part, whether it still says what it said."""
    if claim.aspect:
        return _state(claim, sight)
    return _NOT_READ if unread_state(sight.host, claim.about) else None


def _given(read: Callable[[Host], object], reason: str = _NOT_READ) -> Unproved:
    """A claim about the host, where this is what shows it: None, () and False do not."""
    return lambda claim, sight: None if read(sight.host) else reason


_nodes = _given(lambda host: not host.nodes_assumed, "the nodes are not read")
_models = _given(
    lambda host: bool(host.pci_devices) and are_models_known(host.pci_devices),
    "not all devices' ids are read",
)
_log = _given(
    lambda host: any(part.group == BOOT_LOG for part in host.parts),
    "the kernel's log since boot is not read",
)


def _uneven(claim: WatchClaim, sight: Sight) -> str | None:
    place, _, parts = claim.about.rpartition(": ")
    counted = uneven_places(sight.host).get(parts.removesuffix("s"))
    return None if counted and place in counted and len(counted) > 1 else _NOT_READ


_rows = package_text("check", "watch", "shown.txt").splitlines()
_shown = dict(row.split(" | ") for row in _rows if not row.startswith("#"))


def _fact(claim: WatchClaim, sight: Sight) -> str | None:
    return _NOT_READ if (claim.about, claim.aspect) in sight.facts else None


UNPROVED: Mapping[str, Unproved] = {
    "drift-baseline": _fact,
    "drift-topology": _topology,
    "drift-huge-pages": lambda claim, sight: (
        _NOT_READ if "huge_pages" in sight.topology or claim.about in sight.pages else None
    ),
    "drift-device": _presence,
    **dict.fromkeys(("drift-link", *LINKS, "pcie-link-idle"), _link),
    **dict.fromkeys(("pcie-errors-corrected", "pcie-errors-uncorrected"), _counters),
    **dict.fromkeys(("device-switched-off", "pcie-errors-seen"), _registers),
    **dict.fromkeys(("bar-unassigned", "bar-small"), _bars),
    "device-odd": _attribute,
    **dict.fromkeys(stated_ids(), _stated),
    "device-silent": _present,
    "nvlinks-few": _peers,
    "kernel-error": _log,
    "parts-uneven": _uneven,
    **dict.fromkeys(("board-incomplete", "devices-uneven"), _models),
    "part-odd": lambda claim, sight: _NOT_READ if unread_state(sight.host, claim.about) else None,
    **dict.fromkeys(("node-memory-unequal", "node-without-memory", "node-spans-packages"), _nodes),
    **dict.fromkeys(("gpu-node-unknown",), _nodes),
    **{name: _given(attrgetter(field)) for name, field in _shown.items()},
    "p2p-redirected": _given(lambda host: any(d.acs is not None for d in host.pci_devices)),
    "iommu-translates": _given(lambda host: any(d.iommu_domain for d in host.pci_devices)),
}
"""Of claims about the host: why what refutes it may be there, and this look does not see it; None
where the look proves it. What is not here is proved by any look that reads the host."""


def unproved(claim: WatchClaim, sight: Sight) -> str | None:
    """Why a claim that this look does not refute is not proved either."""
    if claim.vm is not None:
        return _of_vm(claim, claim.vm, sight)
    if claim.id.startswith("drift-") and not sight.is_certified:
        return "no recorded state is given"
    judge = UNPROVED.get(claim.id)
    return None if judge is None else judge(claim, sight)


def _of_vm(claim: WatchClaim, vm: str, sight: Sight) -> str | None:
    """A VM that no longer runs is nowhere else than planned."""
    if sight.running is None:
        return "running VMs are not known"
    if vm not in sight.running and vm not in sight.unread_vms:
        return None
    if vm in sight.unread_vms:
        return sight.unread_vms[vm]
    return sight.unread_live.get(vm) if claim.id.startswith("live-") else None


def certified_claims(expected: CertifiedHost) -> Iterator[WatchClaim]:
    """Every claim of a certified state."""
    names = [*expected.counts]
    names += ["memory"] if expected.memory_bytes is not None else []
    names += ["distances"] if expected.distances is not None else []
    for name in names:
        yield WatchClaim(id="drift-topology", about=name.replace("_", " "), aspect=name)
    for device in expected.devices:
        for change in (DeviceChange.PRESENCE, DeviceChange.IDENTITY, DeviceChange.NODE):
            if change is not DeviceChange.NODE or device.node is not None:
                yield WatchClaim(id="drift-device", about=str(device.bdf), aspect=change)
        if device.link is not None:
            yield WatchClaim(id="drift-link", about=str(device.bdf), aspect=DeviceChange.LINK)
    for place, facts in expected.facts.items():
        for name in facts:
            yield WatchClaim(id="drift-baseline", about=_about_fact(place, name), aspect=name)
    for node, _ in expected.huge_pages:
        yield WatchClaim(id="drift-huge-pages", about=f"node {node}")
