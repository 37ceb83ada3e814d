"""Diagnosis: every finding about a host, and about a domain on it if a domain is given."""

from collections.abc import Mapping, Sequence
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
from homenode.check.doctor.peer_paths import check_peers
from homenode.findings import Finding, Findings, Severity, sort_findings
from homenode.machine.link_path import describe_paths
from homenode.machine.pci import DeviceKind
from homenode.machine.settings import HostSettings
from homenode.machine.topology import Host

if TYPE_CHECKING:
    from homenode.vm.domain.document import Document
    from homenode.vm.model import Vm


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
