"""Diagnosis: every finding about a host, and about a domain on it if a domain is given.

Peer paths are transfers between GPUs, or GPUs and NICs, that leave the switch above both;
machine.peer_route models the routes. For a VM, isolation requires the redirect, which is harmless
if DirectTrans and ATS are on and reads are relaxed; on a bare host it has no benefit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field, structs

from homenode.bdf import Bdf
from homenode.check.doctor.devices import check_devices, has_peers
from homenode.check.doctor.host_settings import check_layout, check_settings
from homenode.check.doctor.links import (
    check_errors,
    check_links,
    check_silent_devices,
    check_unknown_links,
    copy_findings,
    cut_listing_findings,
)
from homenode.findings import Finding, Findings, Severity, finding, sort_findings
from homenode.machine.link_path import describe_paths, format_rate
from homenode.machine.pci import DeviceKind
from homenode.machine.peer_route import (
    DIRECT_TRANSLATED,
    DIRECT_TRANSLATED_BIT,
    THROUGH_ROOT,
    AddressType,
    PeerRoute,
    RouteCause,
    RouteLeg,
    RouteWay,
    expect_bytes_per_s,
    is_passed,
    list_peer_routes,
)
from homenode.machine.settings import HostSettings
from homenode.machine.topology import Host
from homenode.text import plural, shorten_list

if TYPE_CHECKING:
    from homenode.vm.domain.document import Document
    from homenode.vm.model import Vm


_OWN_DRIVERS = {"nvidia", "amdgpu", "xe", "i915"}
"""Drivers of GPUs that the host itself uses. A GPU without a driver counts as reserved for a VM."""
_SOURCE = "ACSCtl of the ports, ATSCtl and DevCtl of the devices (lspci -vvv); PCIe 6.0, 6.12"
_MAX_NAMED = 4
_MELLANOX = 0x15B3
_OF_THE_NIC = ("in a VM", "ATS off")
"""Cases whose fix is a setting of the NIC's firmware, which each maker has its own program for."""


class PeerFault(Struct, frozen=True, kw_only=True):
    """Reason why a route is not direct; see p2p-redirected."""

    case: str | None  # None = a bare host
    meaning: str
    is_vm: bool
    at: Bdf


_MEANINGS = {
    RouteCause.REDIRECT: "its ports redirect requests (ACS ReqRedir)",
    RouteCause.NO_DIRECT_TRANSLATED: "ATS is on, but its ports redirect "
    "translated requests as well: ACS DirectTrans is off",
    RouteCause.NOT_TRANSLATED: "ATS is off on the requester, so the IOMMU has to "
    "translate each request",
    RouteCause.TRANSLATION_BLOCKED: "its ports block the translated requests of ATS (ACS TransBlk)",
    RouteCause.COMPLETIONS: "data that is read goes up: completions without relaxed ordering "
    "are redirected (ACS CmpltRedir)",
    RouteCause.NOT_FORWARDED: "its ports redirect requests, and a port above does not forward them "
    "(ACS UpstreamFwd)",
}
"""First sentence of the finding, by cause."""

_CASES = {
    RouteCause.NO_DIRECT_TRANSLATED: "without DirectTrans",
    RouteCause.TRANSLATION_BLOCKED: "blocked",
    RouteCause.COMPLETIONS: "completions",
    RouteCause.NOT_FORWARDED: "not forwarded",
}


def find_fault(host: Host, route: PeerRoute) -> PeerFault | None:
    """Return the fault of a route; None if it is direct, unknown, or has no switch."""
    leg = _find_faulty_leg(route)
    if leg is None or leg.at is None:
        return None
    is_vm = AddressType.IOVA in route.addresses or not _is_own(route)
    meaning, case = _MEANINGS[leg.cause], _CASES.get(leg.cause)
    if leg.cause is RouteCause.REDIRECT and is_vm:
        case = "in a VM"
    if leg.cause is RouteCause.NOT_TRANSLATED:
        acs = port.acs or () if (port := host.find_device(leg.at)) is not None else ()
        case = "ATS off" if DIRECT_TRANSLATED in acs or "ReqRedir" not in acs else "in a VM"
        if case == "in a VM":
            meaning += ", and ACS DirectTrans is off"
    return PeerFault(case=case, meaning=meaning, is_vm=is_vm, at=leg.at)


def _find_faulty_leg(route: PeerRoute) -> RouteLeg | None:
    for leg in (route.write, route.completion):
        is_sure = (
            leg.way in (RouteWay.ROOT, RouteWay.BLOCKED) or leg.cause is RouteCause.NOT_FORWARDED
        )
        if is_sure and leg.cause in _MEANINGS:
            return leg
    return None


def _is_own(route: PeerRoute) -> bool:
    return route.target.driver in _OWN_DRIVERS and not is_passed(route.requester)


def check_peers(host: Host, passed_gpus: frozenset[Bdf] = frozenset()) -> Iterator[Finding]:
    """Find routes that leave their switch, and GPUs behind a translating IOMMU."""
    faults_of: dict[
        tuple[str | None, str, bool, int | None], list[tuple[PeerRoute, PeerFault]]
    ] = {}
    for route in list_peer_routes(host, passed_gpus):
        fault = find_fault(host, route)
        if fault is not None:
            maker = route.requester.vendor_id if fault.case in _OF_THE_NIC else None
            is_rdma = route.requester.kind is DeviceKind.NIC
            faults_of.setdefault((fault.case, fault.meaning, is_rdma, maker), []).append(
                (route, fault)
            )
    for faults in faults_of.values():
        yield _make_finding(host, faults, passed_gpus)
    yield from _find_translated(host)


def _make_finding(
    host: Host, faults: list[tuple[PeerRoute, PeerFault]], passed_gpus: frozenset[Bdf]
) -> Finding:
    route, fault = faults[0]
    is_rdma = route.requester.kind is DeviceKind.NIC
    devices = "NIC and GPU" if is_rdma else "GPUs"
    pairs = [f"{peer.requester.bdf} to {peer.target.bdf}" for peer, _ in faults]
    ports = sorted({peer.at for _, peer in faults})
    physical = sorted(
        {peer.requester.physical_function or peer.requester.bdf for peer, _ in faults}
    )
    certain = is_rdma and (is_passed(route.requester) or route.target.bdf in passed_gpus)
    harms = certain or not fault.is_vm
    rate = expect_bytes_per_s(host, route)
    observed = f"{fault.meaning}; port {shorten_list(map(str, ports), _MAX_NAMED)}"
    if rate is not None and fault.case != "blocked":
        observed += f"; about {format_rate(rate)} of {format_rate(rate / THROUGH_ROOT)}"
    return finding(
        "p2p-redirected",
        f"{plural(len(pairs), 'pair')} of {devices} below one switch: "
        f"{shorten_list(pairs, _MAX_NAMED)}",
        expected="transfers between them that stay below their switch"
        if harms
        else "isolation by ACS for VMs, at this price",
        observed=observed,
        severity=None if harms else Severity.INFO,
        case=fault.case
        if fault.case not in _OF_THE_NIC or route.requester.vendor_id == _MELLANOX
        else f"{fault.case}, other NIC",
        values={
            "port": ports[0],
            "requester": route.requester.bdf,
            "physical": physical[0],
            "others": f" (and {shorten_list(map(str, physical[1:]), 2)})" if physical[1:] else "",
            "bits": f"{DIRECT_TRANSLATED_BIT:04x}",
        },
        source=_SOURCE,
    )


def _find_translated(host: Host) -> Iterator[Finding]:
    """Find GPUs with a host driver whose transfers the IOMMU translates."""
    gpus = [
        gpu
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.driver in _OWN_DRIVERS and (gpu.iommu_domain or "").startswith("DMA")
    ]
    if len(gpus) > 1:
        yield finding(
            "iommu-translates",
            f"{len(gpus)} GPUs that {gpus[0].driver} drives",
            expected="IOMMU domains of type identity (iommu=pt)",
            observed=f"type {gpus[0].iommu_domain}",
            source="/sys/kernel/iommu_groups/N/type; intel/compute-runtime#942",
        )


class MeasuredRates(Struct, frozen=True, kw_only=True):
    """Rates and widths from the user or a load, besides host and domain."""

    is_loaded: bool = False
    # the GPUs that the load copied to; None if that is not known
    reached: frozenset[Bdf] | None = None
    # lanes of narrow slots, by device
    known_widths: Mapping[Bdf, int] = field(default_factory=dict)
    # measured bytes/s by GPU, h2d_all for any
    h2d: Mapping[Bdf, float] = field(default_factory=dict)
    h2d_all: float | None = None


CHECKS = (
    check_unknown_links,
    cut_listing_findings,
    check_silent_devices,
    check_errors,
    check_devices,
)
"""Checks of a host that depend neither on its VMs nor on options of the user."""


def diagnose(
    host: Host,
    document: "Document | None" = None,
    rates: MeasuredRates | None = None,
    vm: "Vm | None" = None,
    target: str = "qemu",
) -> Findings:
    """Return the findings, worst first, and the checked areas. document: a domain of this host; all
    links of the host are judged. vm: a VM from the file of another hypervisor, target. Raises
    ParseError or InputError if the document cannot be read."""
    rates = rates or MeasuredRates()
    findings = [
        *check_links(host, rates.is_loaded, rates.known_widths, rates.reached),
        *copy_findings(host, rates.h2d, rates.h2d_all, rates.known_widths),
        *(finding for check in CHECKS for finding in check(host)),
        *check_layout(host, with_advice=document is None and vm is None),
    ]
    areas = [*filter(None, (", ".join(list_judged_areas(host)),)), *describe_paths(host)]
    if document is None and vm is None:
        findings += [*check_peers(host), *check_settings(host, None)]
        return Findings(checked=tuple(areas), findings=sort_findings(findings))
    # Imported only here, because a check of a host alone does not need it.
    from homenode.check.domain.memory import is_bound_by_numad
    from homenode.check.domain.verification import check_domain, list_domain_checks, locate
    from homenode.vm.domain.read import build_vm
    from homenode.vm.targets.target import findings_for

    facts = build_vm(document) if document is not None else vm
    assert facts is not None
    of_vm = check_domain(facts, document, host)
    of_vm += check_settings(host, facts, memory_is_bound=is_bound_by_numad(document))
    findings += of_vm if document is not None else findings_for(target, _weigh(of_vm, facts, host))
    findings += check_peers(host, frozenset(hostdev.bdf for hostdev in facts.hostdevs))
    areas[1:1] = list_domain_checks(facts, host)
    answer = findings if document is None else locate(findings, document)
    return Findings(checked=tuple(areas), findings=sort_findings(answer))


def _weigh(findings: Sequence[Finding], facts: "Vm", host: Host) -> list[Finding]:
    """Return the findings on a file without a record of its layout: with several GPUs, `auto` plans
    a flat guest over nodes as well."""
    gpus = {gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)}
    is_multi_gpu = sum(device.bdf in gpus for device in facts.hostdevs) > 1
    return [
        structs.replace(f, severity=Severity.INFO)
        if is_multi_gpu and f.id == "flat-over-nodes"
        else f
        for f in findings
    ]


def list_judged_areas(host: Host) -> tuple[str, ...]:
    """Return the areas that the host's source shows sufficiently; () = none."""
    devices = host.pci_devices
    is_known = {
        "links": any(device.link is not None for device in devices),
        "errors": any(d.errors is not None or d.link_replays is not None for d in devices),
        "devices of one model": has_peers(host),
        "nodes": bool(host.nodes) and not host.nodes_assumed,
        "peer-to-peer": any(device.acs is not None for device in devices),
        "settings": host.settings != HostSettings(),
    }
    return tuple(area for area, is_shown in is_known.items() if is_shown)
