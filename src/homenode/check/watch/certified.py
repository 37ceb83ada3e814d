"""Certified: each claim of the certificate in a running VM's metadata, proved again. [I/O]"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from homenode.catalogue import finding
from homenode.check.certificate import sight_of
from homenode.check.certificate_signature import (
    SignedBy,
    check_signature,
    document_digest,
    is_of_another_machine,
)
from homenode.check.verify.live.procfs import RunningVm
from homenode.errors import InputError
from homenode.findings import Finding
from homenode.machine.topology import Host
from homenode.vm.domain.document import Document
from homenode.vm.domain.metadata import certificate_of
from homenode.vm.fingerprint import host_fingerprint
from homenode.vm.model import Vm

SIGNATURE = "certificate"
_SOURCE = "the certificate in the domain's <metadata>"


class CertifiedLook(Struct, frozen=True, kw_only=True):
    """What came of the claims. judged: of each that is not refuted, why it is stale; None = it is
    proved."""

    findings: tuple[Finding, ...] = ()
    judged: Mapping[str, str | None] = {}


def prove_again(
    document: Document,
    found: Vm,
    vm: RunningVm | str,
    host: Host,
    *,
    was_kept: bool,
    signers: Path | None,
) -> CertifiedLook:
    """The claims of the certificate that a running domain carries. found: what its document says.
    vm: what its host shows, or why that is not known. was_kept: homenode put one there.

    A domain without one has no claims, but where it had one.
    """
    text = certificate_of(document)
    if text is None:
        gone = "none, although one was kept there"
        return CertifiedLook(findings=(_changed(found, gone),)) if was_kept else CertifiedLook()
    try:
        known = check_signature(f"{text.strip()}\n".encode(), f"domain {found.name}", signers)
    except InputError as error:
        return CertifiedLook(findings=(_changed(found, error.message),))
    body = known.certificate.body
    if body.uuid != (found.uuid or "").lower():
        return CertifiedLook(findings=(_changed(found, f"one of domain {body.name}"),))
    return CertifiedLook(
        findings=tuple(_refuted(known, found, vm, host)),
        judged=dict(_judged(known, document, found, vm, host)),
    )


def _changed(found: Vm, observed: str) -> Finding:
    return finding(
        "certificate-changed",
        found.name,
        expected="the certificate as it was signed, of this domain",
        observed=observed,
        source=_SOURCE,
    )


def _other_host(known: SignedBy, host: Host) -> str | None:
    """What this host is, where it is not that of the certificate, as far as is known."""
    if is_of_another_machine(known.certificate):
        return "another machine"
    digests = known.certificate.body.digests
    return "another topology" if host.nodes and host_fingerprint(host) != digests.host else None


def _refuted(known: SignedBy, found: Vm, vm: RunningVm | str, host: Host) -> Iterator[Finding]:
    body = known.certificate.body
    other = _other_host(known, host)
    if other is not None:
        yield finding(
            "certificate-refuted",
            "host",
            expected=f"{body.host_name} as it was certified",
            observed=other,
            source=_SOURCE,
        )
    if isinstance(vm, str):
        return
    for claim in body.claims:
        seen = sight_of(claim, found, vm)
        if seen.holds is False:
            yield finding(
                "certificate-refuted",
                claim.subject,
                expected=claim.expected,
                observed=seen.observed,
                source=f"{_SOURCE}, proved at {body.proved_at}",
            )


def _judged(
    known: SignedBy, document: Document, found: Vm, vm: RunningVm | str, host: Host
) -> Iterator[tuple[str, str | None]]:
    body = known.certificate.body
    yield SIGNATURE, None
    if not host.nodes:
        yield "host", "the nodes are not read"
    elif _other_host(known, host) is None:
        yield "host", None
    same = document_digest(document.to_bytes(), found.name) == body.digests.document
    yield "document", None if same else "it is another one: its pins and devices are looked at"
    for claim in (*body.claims, *body.guest_claims):
        if isinstance(vm, str):
            yield claim.subject, vm
            continue
        seen = sight_of(claim, found, vm)
        if seen.holds is not False:
            yield claim.subject, None if seen.holds else seen.observed
