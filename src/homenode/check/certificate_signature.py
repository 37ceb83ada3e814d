"""CertificateSignature: a certificate is issued for a running VM, signed, and checked. [I/O]

The keys are those of ssh: `ssh-keygen -Y sign` and `-Y verify`, OpenSSH 8.2 and newer, with an
allowed-signers file as ssh-keygen(1) has it.
"""

import os
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct, json

from homenode.check.certificate import (
    MAX_BYTES,
    NAMESPACE,
    Certificate,
    CertificateBody,
    CertificateDigests,
    CertifiedClaim,
    CertifiedKind,
    CertifiedState,
    armored,
    digest,
    digest_of_claims,
    live_claims,
    read_certificate,
    signed_bytes,
    unarmored,
)
from homenode.check.verify.guest.view import GuestView
from homenode.check.verify.live.capture import observe_running_domain
from homenode.durable import create_file
from homenode.errors import InputError
from homenode.input_files import read_input, read_kernel_file
from homenode.machine.topology import Host
from homenode.process import run
from homenode.trusted_path import private_folder
from homenode.vm.domain.merge import tree_of
from homenode.vm.domain.read import open_domain
from homenode.vm.fingerprint import host_fingerprint
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan_model import Plan

_ASK_S = 120.0


class SignedBy(Struct, frozen=True, kw_only=True):
    """Who signed a certificate, as the allowed-signers file names them."""

    certificate: Certificate
    principal: str


def body_of_running(
    name: str, connect: str, host: Host, plan: Plan | None, plan_bytes: bytes | None
) -> CertificateBody:
    """What is proved now of a domain that runs. Raises as observe_running_domain, and InputError
    where a claim is refuted or nothing can be claimed."""
    virsh = Virsh(connect)
    state = virsh.domain(name)
    expected, running = observe_running_domain(name, connect, plan)
    claims = tuple(live_claims(expected, running, host))
    _check_proved(state.name, claims)
    return CertificateBody(
        name=state.name,
        uuid=state.uuid,
        host_name=os.uname().nodename,
        proved_at=datetime.now(UTC).replace(microsecond=0).isoformat(),
        layout=None if plan is None else plan.layout.name,
        digests=CertificateDigests(
            plan=None if plan_bytes is None else digest(plan_bytes),
            document=document_digest(virsh.live_document(state.uuid), state.name),
            host=host_fingerprint(host),
            live=digest_of_claims(claims),
            guest=None,
            machine=this_machine(),
        ),
        claims=claims,
    )


def this_machine() -> str | None:
    """A digest of this machine's own id, from which that cannot be had; None where it has none.

    Source: machine-id(5).
    """
    own = (read_kernel_file("/etc/machine-id") or b"").strip()
    return digest(b"homenode certificate " + own) if len(own) == 32 else None


def is_of_another_machine(certificate: Certificate) -> bool:
    """Whether it is of another machine than this one, where the ids of both are known."""
    here, there = this_machine(), certificate.body.digests.machine
    return None not in (here, there) and here != there


def guest_claims(view: GuestView) -> tuple[CertifiedClaim, ...]:
    """What the guest itself reports, line by line. Raises InputError where one is refuted."""
    claims = tuple(
        CertifiedClaim(
            kind=CertifiedKind.GUEST,
            subject=f"guest: {one.subject}",
            expected=one.expected,
            observed=one.observed,
            state=_state_of(one.finding is None, one.finding is not None and one.finding.is_bad),
            how=view.title,
        )
        for one in view.checks
    )
    _check_proved(view.title, claims)
    return claims


def _state_of(agrees: bool, is_bad: bool) -> CertifiedState:
    if agrees:
        return CertifiedState.PROVED
    return CertifiedState.REFUTED if is_bad else CertifiedState.NOT_KNOWN


def _check_proved(name: str, claims: tuple[CertifiedClaim, ...]) -> None:
    wrong = [one for one in claims if one.state is CertifiedState.REFUTED]
    if wrong:
        first = wrong[0]
        raise InputError(
            f"{name}: expected every claim to hold, found {len(wrong)} that do not: "
            f"{first.subject}: expected {first.expected}, found {first.observed}",
            hint="homenode verify --live, or --guest, names each of them",
        )
    if not any(one.state is CertifiedState.PROVED for one in claims):
        raise InputError(
            f"{name}: expected pins, bound memory or devices to certify, found none",
            hint="homenode apply places the VM; huge pages or prealloc put its memory on its nodes",
        )


def signed(body: CertificateBody, key: Path) -> Certificate:
    """The certificate, signed with a private key of ssh, or a public one whose private half the
    agent has. Raises ToolError where ssh-keygen does not sign."""
    words = ("ssh-keygen", "-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key.absolute()))
    done = run(words, _ASK_S, signed_bytes(body), on_terminal=True)
    return Certificate(body=body, signature=unarmored(done.stdout_or_raise()))


def check_signature(content: bytes, source: str, signers: Path | None) -> SignedBy:
    """Who signed the certificate in a file. signers: an allowed-signers file, or one of public
    keys; None = only that it is as the owner of its key signed it, whom the key then names.

    Raises InputError where the file was changed, or its signature is none of theirs.
    """
    certificate = read_certificate(content, source)
    text = signed_bytes(certificate.body)
    with private_folder("homenode-certificate-") as folder:
        signature, allowed = folder / "certificate.sig", folder / "signers"
        create_file(signature, armored(certificate, source).encode(), synced=False)
        start = ("ssh-keygen", "-Y")
        own = (*start, "check-novalidate", "-n", NAMESPACE, "-s", str(signature))
        done = run(own, _ASK_S, text)
        if done.returncode:
            raise InputError(
                f"{source}: expected the content that its key signed, found other content"
            )
        key = done.stdout.strip().rpartition(" ")[2]
        if signers is None:
            return SignedBy(certificate=certificate, principal=f"the owner of key {key}")
        create_file(allowed, _allowed(signers), synced=False)
        common = ("-f", str(allowed), "-s", str(signature))
        found = run((*start, "find-principals", *common), _ASK_S)
        for principal in found.stdout.splitlines() if found.returncode == 0 else ():
            words = ("verify", "-q", "-n", NAMESPACE, "-I", principal, *common)
            if run((*start, *words), _ASK_S, text).returncode == 0:
                return SignedBy(certificate=certificate, principal=principal)
    raise InputError(
        f"{source}: expected a signature of somebody in {signers}, found one of key {key}, which "
        "is not in it, or is not valid now or for this purpose",
        hint=_SIGNERS,
    )


_SIGNERS = "a public key (KEY.pub), or lines PRINCIPAL KEYTYPE KEY: ssh-keygen(1), ALLOWED SIGNERS"
_KEY_TYPES = ("ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-")


def _allowed(path: Path) -> bytes:
    """The lines of an allowed-signers file; one of a public key gets its comment as the name, or
    that of its file. Raises InputError where it is neither."""
    text = read_input(path, "an allowed-signers file, or a public key", most=MAX_BYTES)
    lines = []
    for line in text.decode(errors="replace").splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if "PRIVATE" in words:
            raise InputError(
                f"{path}: expected its public half, found a private key", hint=_SIGNERS
            )
        if words[0].startswith(_KEY_TYPES) and len(words) > 1:
            name = "-".join(words[2:]).replace(",", "-").replace('"', "") or path.name
            line = f'{name} namespaces="{NAMESPACE}" {words[0]} {words[1]}'
        elif len(words) < 3:
            raise InputError(
                f"{path}: expected an allowed-signers file, or a public key, found {line[:60]!r}",
                hint=_SIGNERS,
            )
        lines.append(line)
    if not lines:
        raise InputError(f"{path}: expected a signer, found none", hint=_SIGNERS)
    return "".join(f"{line}\n" for line in lines).encode()


def document_digest(document: bytes, source: str) -> str:
    """sha256 of what a domain's document says, without the certificate that it carries: in whatever
    white space and order of attributes it is written."""
    return digest(json.encode(tree_of(open_domain(document, source).root)))


def differences(
    certificate: Certificate,
    *,
    plan: bytes | None = None,
    host: Host | None = None,
    document: bytes | None = None,
) -> tuple[str, ...]:
    """Which of these are not what the certificate was made with."""
    digests = certificate.body.digests
    given = (
        ("the plan", digests.plan, None if plan is None else digest(plan)),
        ("the host", digests.host, None if host is None else host_fingerprint(host)),
        (
            "the document",
            digests.document,
            None if document is None else document_digest(document, "the document"),
        ),
        ("the claims", digests.live, digest_of_claims(certificate.body.claims)),
    )
    return tuple(
        f"{what}: expected {wanted or 'none'}, found {found}"
        for what, wanted, found in given
        if found is not None and found != wanted
    )
