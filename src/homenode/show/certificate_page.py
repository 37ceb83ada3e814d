"""CertificatePage: a certificate for an auditor or a customer: what this VM had, proved when."""

from collections.abc import Iterator

from homenode.check.certificate import (
    CertificateBody,
    CertifiedClaim,
    CertifiedKind,
    CertifiedState,
    cpus_text,
)
from homenode.cpuset import CpuSet
from homenode.doc import Cell, Doc, Items, Section, Table, Text
from homenode.wording import plural

_LOOKS = {CertifiedState.PROVED: "good", CertifiedState.NOT_KNOWN: "warn"}
_TERMS = (
    "A logical CPU is what the host's kernel runs threads on: a core, or a hardware thread of one. "
    "A node is a part of the host with CPUs and memory of its own. Memory is in use once the VM "
    "has written it; memory that it has never written is on no node yet."
)
_THREADS = ((CertifiedKind.VCPU, "vCPU"), (CertifiedKind.IOTHREAD, "IOThread"))


def certificate_doc(body: CertificateBody, principal: str | None, differs: tuple[str, ...]) -> Doc:
    """The certificate in words. principal: who signed it; None = it is not signed. differs: what
    was given and is not what it was made with."""
    digests = body.digests
    layout = "" if body.layout is None else f", layout {body.layout}"
    claims = (*body.claims, *body.guest_claims)
    proved = sum(one.state is CertifiedState.PROVED for one in claims)
    signed = "not signed" if principal is None else f"signed by {principal}"
    parts: list[Text | Section | Items] = [
        Text(f"VM {body.name} ({body.uuid}) on host {body.host_name}{layout}"),
        Text(f"{proved} of {len(claims)} claims proved at {body.proved_at}; {signed}"),
        Items(tuple(_summary(body.claims)), look="plain"),
        Text(_TERMS),
    ]
    if differs:
        parts.append(
            Section(title="Given now, and different when it was made", parts=(Items(differs),))
        )
    parts.append(
        _claims("Cores, memory and devices, as the host's kernel showed them", body.claims)
    )
    if body.guest_claims:
        parts.append(_claims("What the guest itself reported", body.guest_claims))
    rows = (
        ("plan", digests.plan or "not compared"),
        ("document", digests.document),
        ("host's topology", digests.host),
        ("host's machine-id", digests.machine or "not known"),
        ("live view", digests.live),
        ("guest's view", digests.guest or "not compared"),
    )
    table = Table(heads=("compared with", "sha256"), rows=rows)
    parts.append(Section(title="Digests", parts=(table,)))
    return Doc(title=f"Placement of {body.name}", parts=tuple(parts))


def _summary(claims: tuple[CertifiedClaim, ...]) -> Iterator[str]:
    """Cores, memory and devices, a line each."""
    for kind, name in _THREADS:
        ours = [one for one in claims if one.kind is kind]
        if ours:
            pus = CpuSet.union(one.within for one in ours if one.within is not None)
            yield f"{plural(len(ours), name)} on {cpus_text(pus)}"
    memory = [one for one in claims if one.kind is CertifiedKind.MEMORY]
    if memory:
        nodes = CpuSet.union(one.within for one in memory if one.within is not None)
        yield f"memory on node{'s' if len(nodes) > 1 else ''} {nodes}"
    devices = [one for one in claims if one.kind is CertifiedKind.DEVICE]
    if devices:
        yield f"{plural(len(devices), 'device')}: {', '.join(one.subject for one in devices)}"


def _claims(title: str, claims: tuple[CertifiedClaim, ...]) -> Section:
    rows = tuple(
        (
            one.subject,
            one.expected,
            one.observed,
            Cell((str(one.state),), look=_LOOKS.get(one.state, "bad")),
        )
        for one in claims
    )
    return Section(
        title=title, parts=(Table(heads=("what", "expected", "found", "state"), rows=rows),)
    )
