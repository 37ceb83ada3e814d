"""Links: PCIe links that are slower or narrower than both of their ends support, and devices with
unknown links, which must not pass for healthy. Not faults: a card that supports more than its port,
links that do not limit their path, management endpoints, links inside a card, and slots that are
known to be narrow. And transfers of devices: link errors, and measured copies.

The status bits that lspci prints (CESta) stay set after the first training: they are not counters,
and are ignored.
Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats; PCIe 6.0, 6.2 (errors).
"""

from collections.abc import Iterable, Iterator, Mapping

from homenode.bdf import Bdf
from homenode.findings import Finding, GapKind, Severity, finding
from homenode.machine.link_path import (
    JUDGED,
    SPEEDS,
    DevicePath,
    Link,
    LinkRate,
    capable_rate,
    find_current_rate,
    find_lane_sharers,
    find_rates,
    format_rate,
    list_device_paths,
    list_links_above,
)
from homenode.machine.pci import DeviceKind, LinkKind, PciDevice, PciErrors
from homenode.machine.topology import Host
from homenode.text import plural, shorten_list
from homenode.units import parse_whole

IDLE_SPEED = 2.5


def check_links(
    host: Host,
    is_loaded: bool = False,
    known_widths: Mapping[Bdf, int] | None = None,
    reached_bdfs: frozenset[Bdf] | None = None,
) -> Iterator[Finding]:
    """Find each link that limits a device below the rate of its path.

    is_loaded: whether the devices were busy when their links were read; otherwise it is not known.
    known_widths: as for device_paths. reached: GPUs that the load copied to; None = those with a
    driver of the host.
    """
    busy: frozenset[Bdf] = frozenset()
    if is_loaded:
        gpus = host.devices_of_kind(DeviceKind.GPU)
        driven = frozenset(gpu.bdf for gpu in gpus if gpu.has_host_driver)
        busy = driven if reached_bdfs is None else reached_bdfs
    paths_of_link: dict[Bdf, list[DevicePath]] = {}
    link_of: dict[Bdf, Link] = {}
    paths = list_device_paths(host, known_widths)
    for path in paths:
        for link in path.links:
            if path.expected is None or not _is_limiting(link, path.expected):
                continue
            paths_of_link.setdefault(link.lower.bdf, []).append(path)
            link_of[link.lower.bdf] = link
    for bdf, affected in paths_of_link.items():
        yield _make_finding(link_of[bdf], affected, paths, busy, host)
    yield from _check_targets(paths, frozenset(paths_of_link), host)
    yield from _check_idle(host)


def _check_idle(host: Host) -> Iterator[Finding]:
    """Find GPUs at an idle card's speed whose port the source does not show."""
    for gpu in filter(_is_alone, host.devices_of_kind(DeviceKind.GPU)):
        capable, current = capable_rate(gpu.link), find_current_rate(gpu.link)
        if capable and current and current.gt_per_s == IDLE_SPEED < capable.gt_per_s:
            speeds = f"{current.gt_per_s:g} of {capable.gt_per_s:g} GT/s"
            idle = f"{speeds} at full width is what an idle card shows"
            narrow = (
                f"an idle card shows {speeds}, but not {current.width} of {capable.width} lanes: "
                "its slot has fewer, or lanes are lost"
            )
            yield finding(
                "pcie-link-idle",
                f"GPU {gpu.bdf}",
                expected=f"{capable}, which the card can (LnkCap); the port above is not listed",
                observed=f"{current}: {idle if current.width == capable.width else narrow}",
                values={"copied": gpu.bdf, "device": gpu.bdf},
                source=f"{host.name}: LnkCap and LnkSta",
                devices=(gpu.bdf,),
            )


def _is_alone(gpu: PciDevice) -> bool:
    """Return whether no port above the device is listed, as by `lspci -s`; bus 0 needs none."""
    return gpu.parent is None and gpu.bdf.bus != 0 and gpu.physical_function is None


def _is_limiting(link: Link, rate: LinkRate) -> bool:
    current, capable = link.current, link.capable
    if current is None or capable is None:
        return False
    return current.bytes_per_s < rate.bytes_per_s and current.bytes_per_s < capable.bytes_per_s


def _make_finding(
    link: Link,
    affected: list[DevicePath],
    paths: tuple[DevicePath, ...],
    busy: frozenset[Bdf],
    host: Host,
) -> Finding:
    # Long because one finding is chosen and worded from all that is known of a link.
    current, capable = link.current, link.capable
    assert current is not None and capable is not None
    is_slow, is_narrow = current.gt_per_s < capable.gt_per_s, current.width < capable.width
    idle = _find_idle_reason(link, affected, current, busy) if is_slow else None
    port = _find_limiting_port(link, current, capable)
    sharers = () if is_slow else find_lane_sharers(link, host)
    observed = f"{current.format_with_rate()}{_format_current(link, current)}"
    severity: Severity | None = None
    case = _choose_training_case(link, capable) if is_slow else None
    if idle is not None and _is_narrow_next_to_wide(link, affected, paths):
        kind, severity, case = "pcie-link-narrow", Severity.WARNING, "idle"
        observed += f"; {idle}, but cards of this model next to it idle with all their lanes"
    elif idle is not None and port is not None:
        kind = "pcie-target-low"
        # The port's register bounds every training; a card's own may follow its driver's idling.
        severity = Severity.CRITICAL if port is link.upper else Severity.WARNING
        observed += f"; Link Control 2 of the {_end_name(port)} has {port.target_gt_per_s:g} "
        observed += "GT/s at most: no load raises this link"
    elif idle is not None:
        kind = "pcie-link-idle"
        lanes = f"; check the lanes as well: {current.width} of {capable.width}"
        observed += f"; {idle}{lanes if is_narrow else ''}"
    elif sharers:
        kind, severity = "pcie-link-narrow", Severity.INFO
        observed += f"; the slot shares its lanes with {', '.join(map(str, sharers))}"
    else:
        kind = "pcie-link-slow" if is_slow else "pcie-link-narrow"
        severity = _choose_severity(link, affected, paths, slow=is_slow)
    subject = _format_devices(affected)
    if link.lower.bdf not in {path.device.bdf for path in affected}:
        subject += f": link from {link.upper.bdf} to {link.lower.bdf}"
    worst_path = max(affected, key=lambda path: _rank(path.device.kind))
    assert worst_path.expected is not None
    path_rate = worst_path.expected.bytes_per_s
    share = max(1 - current.bytes_per_s / p.expected.bytes_per_s for p in affected if p.expected)
    slot = "" if link.known_width is None else f"; the slot has {plural(link.known_width, 'lane')}"
    return finding(
        kind,
        subject,
        expected=f"{capable.format_with_rate()}: {_format_capability(link)}{slot}",
        observed=observed,
        severity=severity,
        case=case,
        values={
            "share": f"{share * 100:.0f}",
            "reached": f"{(1 - share) * 100:.0f}",
            "most": format_rate(path_rate),
            "lost": f"{(path_rate - current.bytes_per_s) / 1e9:.1f}",
            "lanes": f"{(1 - current.width / capable.width) * 100:.0f}",
            "width": current.width,
            "kind": JUDGED[worst_path.device.kind],
            "copied": worst_path.device.bdf,
            "device": link.lower.bdf,
            "port": link.upper.bdf,
            "target": f"{link.target_gt_per_s or 0:g}",
        },
        source=f"{host.name}: LnkCap and LnkSta (max_link_speed, current_link_speed) of port "
        f"{link.upper.bdf} and of {link.lower.bdf}; path up to {worst_path.links[-1].upper.bdf}; "
        "PCIe 6.0, 7.5.3.6 to 7.5.3.8",
        devices=(link.lower.bdf, *(p.device.bdf for p in affected if p.device != link.lower)),
    )


def _choose_training_case(link: Link, capable: LinkRate) -> str | None:
    """The reason why another training would not restore the full link, as a case of the texts."""
    is_low = link.target_gt_per_s is not None and link.target_gt_per_s < capable.gt_per_s
    is_narrow = link.current is not None and link.current.width < capable.width
    if is_low:
        return "low target and narrow" if is_narrow else "low target"
    return "narrow as well" if is_narrow else None


def _find_limiting_port(link: Link, current: LinkRate, capable: LinkRate) -> PciDevice | None:
    """Return the end whose target speed limits the link; the port before the card."""
    for end in (link.upper, link.lower):
        target = end.target_gt_per_s
        if target is not None and target < capable.gt_per_s and target <= current.gt_per_s:
            return end
    return None


def _check_targets(
    paths: tuple[DevicePath, ...], slow: frozenset[Bdf], host: Host
) -> Iterator[Finding]:
    """Find ports of GPUs whose next training would end below the present speed."""
    for path in paths:
        for link in path.links if path.device.kind is DeviceKind.GPU else ():
            target, current = link.target_gt_per_s, link.current
            if target is None or current is None or link.lower.bdf in slow:
                continue
            if target < current.gt_per_s and target in SPEEDS:
                slow |= {link.lower.bdf}
                yield finding(
                    "pcie-target-low",
                    f"GPU {path.device.bdf}",
                    expected=f"a target of {current.gt_per_s:g} GT/s, which the link has",
                    observed=f"Link Control 2 is set to {target:g} GT/s at most",
                    severity=Severity.INFO,
                    case="fast link",
                    values={"device": link.lower.bdf},
                    source=f"{host.name}: LnkCtl2 of {link.upper.bdf}; PCIe 6.0, 7.5.3.19",
                    devices=(link.lower.bdf,),
                )


def _rank(kind: DeviceKind) -> int:
    return (DeviceKind.GPU, DeviceKind.NVSWITCH, DeviceKind.NIC, DeviceKind.NVME)[::-1].index(kind)


def _format_devices(paths: Iterable[DevicePath]) -> str:
    by_kind: dict[DeviceKind, list[str]] = {}
    for path in sorted(paths, key=lambda path: -_rank(path.device.kind)):
        by_kind.setdefault(path.device.kind, []).append(str(path.device.bdf))
    return ", ".join(f"{JUDGED[kind]} {', '.join(bdfs)}" for kind, bdfs in by_kind.items())


def _end_name(device: PciDevice) -> str:
    return JUDGED.get(device.kind, "port")


def _format_capability(link: Link) -> str:
    """ "the port has 16 GT/s, the GPU 32 GT/s": capability of both ends; lanes if they differ."""
    ends = [
        (_end_name(end), end.link)
        for end in (link.upper, link.lower)
        if end.link is not None and end.link.max_gt_per_s is not None
    ]
    with_lanes = len({state.max_width for _, state in ends}) > 1
    texts = (
        f"the {name} {'' if number else 'has '}{state.max_gt_per_s:g} GT/s"
        f"{f' x{state.max_width}' if with_lanes else ''}"
        for number, (name, state) in enumerate(ends)
    )
    return ", ".join(texts)


def _format_current(link: Link, current: LinkRate) -> str:
    """Return the end that reported the current rate, and the other end's rate if it differs."""
    rates = [(_end_name(end), find_current_rate(end.link)) for end in (link.upper, link.lower)]
    equal_ends = [f"at the {name}" for name, rate in rates if rate == current]
    other = [f"{rate} at the {name}" for name, rate in rates if rate not in (current, None)]
    return "".join(f", {text}" for text in (" and ".join(equal_ends), *other) if text)


def _find_idle_reason(
    link: Link, paths: list[DevicePath], current: LinkRate, busy: frozenset[Bdf]
) -> str | None:
    """Return why a low speed may not be a fault, else None. Only GPUs slow their links down."""
    if not link.ends_at_gpu or any(path.device.bdf in busy for path in paths):
        return None
    for path in paths:
        state, power = path.device.performance_state, path.device.power_state
        if power is not None and power.startswith("D3"):
            return f"{path.device.bdf} sleeps ({power})"
        if state is not None and (parse_whole(state[1:]) or 0) >= 5:
            return f"nvidia-smi shows {state}: idle"
    if current.gt_per_s > IDLE_SPEED:
        return None
    state_of_load = "a load ran, but not on it" if busy else "the load is unknown"
    return f"{state_of_load}, and idle GPUs slow their links down to 2.5 GT/s"


def _choose_severity(
    link: Link, affected: list[DevicePath], paths: tuple[DevicePath, ...], *, slow: bool
) -> Severity:
    gpus = [path for path in affected if path.device.kind is DeviceKind.GPU]
    if gpus and slow:
        return Severity.CRITICAL
    # A narrow link may be a narrow slot, unless the same card runs wide next to it.
    neighbours = _peer_links(link, gpus or affected, paths)
    has_wide_peer = any(
        o.current.width >= o.capable.width for o in neighbours if o.current and o.capable
    )
    if gpus and has_wide_peer:
        return Severity.CRITICAL
    if gpus:  # if all links are equally narrow, the machine was built so
        equal_links = [
            o for o in neighbours if o.current and link.current and o.current == link.current
        ]
        return (
            Severity.INFO
            if equal_links and len(equal_links) == len(neighbours)
            else Severity.WARNING
        )
    if any(path.device.kind is DeviceKind.NVSWITCH for path in affected):
        return Severity.WARNING
    is_nic = any(path.device.kind is DeviceKind.NIC for path in affected)
    return Severity.WARNING if is_nic and (slow or has_wide_peer) else Severity.INFO


def _is_narrow_next_to_wide(
    link: Link, affected: list[DevicePath], paths: tuple[DevicePath, ...]
) -> bool:
    """Return whether equally idle peers have more lanes. A narrow idle link alone proves nothing:
    some drivers release lanes as well. Source: the help of nvidia-smi on pcie.link.width.current;
    pp_dpm_pcie of amdgpu ("2.5GT/s, x8")."""
    gpus = [path for path in affected if path.device.kind is DeviceKind.GPU]
    now, capable = link.current, link.capable
    if not gpus or now is None or capable is None or now.width >= capable.width:
        return False
    neighbours = [other.current for other in _peer_links(link, gpus, paths)]
    return any(
        other.width >= capable.width and other.gt_per_s <= now.gt_per_s
        for other in neighbours
        if other is not None
    )


def _peer_links(link: Link, cards: list[DevicePath], paths: tuple[DevicePath, ...]) -> list[Link]:
    """Return the corresponding link of each other card of the same model."""
    bdfs = {path.device.bdf for path in cards}
    model = (cards[0].device.vendor_id, cards[0].device.device_id)
    peers: list[Link] = []
    for path in paths:
        if path.device.bdf in bdfs or (path.device.vendor_id, path.device.device_id) != model:
            continue
        equal_ports = (
            other
            for other in path.links
            if other.capable == link.capable
            and other.upper.kind is link.upper.kind
            and other.current is not None
        )
        peers += [other for other in (next(equal_ports, None),) if other is not None]
    return peers


_MAX_NAMED = 8


def cut_listing_findings(host: Host) -> Iterator[Finding]:
    """Find truncated listings: the missing devices may be faulty."""
    for gap in host.gaps:
        if gap.kind is GapKind.LISTING_CUT:
            yield finding(
                "listing-cut",
                host.name,
                expected="the output of lspci to its end",
                observed=f"unknown: {gap.subject}",
                source=gap.reason,
            )


def check_silent_devices(host: Host) -> Iterator[Finding]:
    """Find devices that the kernel still lists but that no longer respond."""
    for device in _find_silent_devices(host):
        yield finding(
            "device-silent",
            f"{JUDGED.get(device.kind, 'port')} {device.bdf}",
            expected="configuration space that answers",
            observed="all ones: lspci shows rev ff and unknown header type 7f",
            source=f"{host.name}: lspci -vvv; PCIe 6.0, 2.3.2 (reads without an answer are "
            "all ones)",
            devices=(device.bdf,),
        )


def _find_silent_devices(host: Host) -> Iterator[PciDevice]:
    """Yield judged devices, and ports above them, that read as all ones and are not asleep."""
    silent = {gap.device for gap in host.gaps if gap.kind is GapKind.DEVICE_SILENT}
    judged_devices = [d for d in host.pci_devices if silent and d.kind in JUDGED]
    port_at = {port.bdf: port for d in judged_devices for port in (d, *host.bridges_above(d.bdf))}
    for device in port_at.values():
        if device.bdf in silent and not (device.power_state or "").startswith("D3"):
            yield device


def check_unknown_links(host: Host) -> Iterator[Finding]:
    """Yield one finding for all GPUs whose link or port has unknown values. Integrated GPUs and
    virtual functions have no link of their own."""
    by_bdf = host.device_at
    silent = {device.bdf for device in _find_silent_devices(host)}
    blind = [
        gpu.bdf
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.physical_function is None and gpu.bdf not in silent and _is_blind(gpu, by_bdf)
    ]
    if not blind:
        return
    no_port = all(_is_alone(gpu) for gpu in host.devices_of_kind(DeviceKind.GPU))
    yield finding(
        "pcie-link-unknown",
        f"GPU {shorten_list(map(str, blind), _MAX_NAMED)}",
        expected="speed and width of both ends of the link, maximum and current",
        observed=f"{host.name} {'lists no port above it' if no_port else 'does not give them'}",
        source="LnkCap and LnkSta of lspci -vvv, which it shows to root only",
        devices=tuple(blind),
    )


def _is_blind(gpu: PciDevice, by_bdf: dict[Bdf, PciDevice]) -> bool:
    """Return whether the link at the GPU's slot, the first outside its card, is unknown. Without
    its port, the link of a card can be known as sound or idle."""
    if gpu.parent is None:
        current = find_current_rate(gpu.link)
        is_judged = current is not None and current in (
            capable_rate(gpu.link),
            LinkRate(IDLE_SPEED, current.width),
        )
        return gpu.link is not None and _is_alone(gpu) and not is_judged
    links = (link for link in list_links_above(gpu, by_bdf) if not link.is_inside_a_card)
    slot = next(links, None)
    return slot is not None and not slot.is_virtual and not _is_known(slot)


def _is_known(link: Link) -> bool:
    """Return whether both capabilities and the present rate are known; 0 lanes mean no link."""
    state = link.lower.link
    has = (
        state is not None and state.current_gt_per_s is not None and state.current_width is not None
    )
    return link.capable is not None and has


def link_health(host: Host) -> tuple[Finding, ...]:
    """Return critical findings on the host's links, which make its results unreliable."""
    findings = (*check_links(host), *check_silent_devices(host))
    return tuple(finding for finding in findings if finding.severity is Severity.CRITICAL)


_OF_THE_WIRE = frozenset({"RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout"})
_OF_RESETS = frozenset({"UnsupReq", "CmpltTO"})
"""Firmware's enumeration and a reset by VFIO or a driver leave these on sound machines: of the
second a few."""

_FEW_TIMEOUTS = 10

_MANY = 1000
"""A training or a reset leaves a handful, a sound GPU has 150 replays; a bad contact makes
thousands a day."""


def check_errors(host: Host) -> Iterator[Finding]:
    """Find lost data, and more retries than resets explain."""
    first_devices: dict[object, PciDevice] = {}
    for path in list_device_paths(host):
        first_devices.setdefault(path.device.bdf, path.device)
        for link in path.links:
            first_devices.setdefault(link.upper.bdf, link.upper)
            first_devices.setdefault(link.lower.bdf, link.lower)
    for device in first_devices.values():
        yield from _judge_function(device)


def _judge_function(device: PciDevice) -> Iterator[Finding]:
    errors = device.errors or PciErrors(())
    directory = f"/sys/bus/pci/devices/{device.bdf}"
    serious_errors = (*errors.fatal, *errors.nonfatal)
    if serious_errors:
        harmless = {name for name, _ in errors.nonfatal} <= _OF_RESETS and not errors.fatal
        harmless = harmless and dict(errors.nonfatal).get("CmpltTO", 0) < _FEW_TIMEOUTS
        yield finding(
            "pcie-errors-uncorrected",
            str(device.bdf),
            expected="no uncorrected errors",
            observed=_format_counts(serious_errors),
            severity=Severity.INFO if harmless else None,
            source=f"{directory}/aer_dev_nonfatal, aer_dev_fatal",
            devices=(device.bdf,),
            count=sum(count for _, count in serious_errors),
        )
    retries = sum(count for name, count in errors.correctable if name in _OF_THE_WIRE)
    replays = device.link_replays or 0
    if max(retries, replays) >= _MANY:
        counts = (*errors.correctable, *([("replays", replays)] if replays else []))
        yield finding(
            "pcie-errors-corrected",
            str(device.bdf),
            expected=f"fewer than {_MANY} retries since boot",
            observed=_format_counts(counts),
            source=f"{directory}/aer_dev_correctable; replay_counter of nvidia-smi -q",
            devices=(device.bdf,),
            count=max(retries, replays),
        )


def _format_counts(counts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts)


_SOUND = 0.7
"""Copies of large pinned buffers reach more of a sound path: 0.72 to 0.9 were measured."""


def copy_findings(
    host: Host,
    rates: Mapping[Bdf, float],
    everyone: float | None = None,
    known_widths: Mapping[Bdf, int] | None = None,
) -> Iterator[Finding]:
    """Find GPUs whose copies are slower than their path. rates: bytes/s by GPU; everyone: of any
    GPU. known_widths: as for device_paths. Unknown links of the path are not judged. Copies to a
    GPU that is attached to its CPU by C2C use C2C."""
    over_c2c = {link.a for link in host.links if link.kind is LinkKind.C2C}
    for path in list_device_paths(host, known_widths):
        if path.device.kind is not DeviceKind.GPU or path.device.bdf in over_c2c:
            continue
        rate = rates.get(path.device.bdf, everyone)
        if rate is None or path.expected is None:
            continue
        if rate > path.expected.bytes_per_s:
            yield finding(
                "h2d-above-link",
                f"GPU {path.device.bdf}",
                expected=f"at most {path.expected.format_with_rate()}",
                observed=f"{format_rate(rate)} measured, above its path's rate of {path.expected}",
                source="the result of --h2d, or of the copy that ran",
            )
        elif rate < _SOUND * path.expected.bytes_per_s:
            yield _make_slow_copy(path.device.bdf, rate, path.expected)


def _make_slow_copy(gpu: Bdf, rate: float, expected_rate: LinkRate) -> Finding:
    fits = find_rates(rate, expected_rate)
    excluded = LinkRate(2.5, expected_rate.width)
    not_one = f"; excludes {excluded.as_generation}" if excluded.bytes_per_s < rate else ""
    return finding(
        "h2d-low",
        f"GPU {gpu}",
        expected=f"{format_rate(_SOUND * expected_rate.bytes_per_s)} or more over "
        f"{expected_rate.format_with_rate()}",
        observed=f"{format_rate(rate)}, which fits "
        f"{', '.join(fit.as_generation for fit in fits) or 'no link at all'}{not_one}",
        severity=Severity.WARNING,
        values={"share": f"{(1 - rate / expected_rate.bytes_per_s) * 100:.0f}"},
        source="the result of --h2d, or of the copy that ran",
    )
