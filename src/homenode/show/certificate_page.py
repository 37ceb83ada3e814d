"""CertificatePage: a certificate for an auditor or a customer: what this VM had, proved when."""

from homenode.check.certificate import CertificateBody, CertifiedClaim
from homenode.doc import Doc, Items, Section, Table, Text


def certificate_doc(body: CertificateBody, principal: str, differs: tuple[str, ...]) -> Doc:
    """The certificate in words. principal: who signed it. differs: what was given and is not what
    it was made with."""
    digests = body.digests
    layout = "" if body.layout is None else f", layout {body.layout}"
    parts: list[Text | Section | Items] = [
        Text(f"VM {body.name} ({body.uuid}) on host {body.host_name}{layout}"),
        Text(f"proved at {body.proved_at}; signed by {principal}"),
    ]
    if differs:
        parts.append(Items(tuple(differs), look="plain"))
    parts.append(
        _claims("Cores, memory and devices, as the host's kernel showed them", body.claims)
    )
    if body.guest_claims:
        parts.append(_claims("What the guest itself reported", body.guest_claims))
    rows = (
        ("plan", digests.plan or "none"),
        ("document", digests.document),
        ("host", digests.host),
        ("live view", digests.live),
        ("guest's view", digests.guest or "none"),
    )
    table = Table(heads=("compared with", "sha256"), rows=rows)
    parts.append(Section(title="Digests", parts=(table,)))
    return Doc(title=f"Placement of {body.name}", parts=tuple(parts))


def _claims(title: str, claims: tuple[CertifiedClaim, ...]) -> Section:
    rows = tuple((one.subject, one.expected, one.observed, str(one.state)) for one in claims)
    return Section(
        title=title, parts=(Table(heads=("what", "expected", "found", "state"), rows=rows),)
    )
