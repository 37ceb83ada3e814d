"""homenode verify --certify and --certificate: a placement that was proved, signed. [I/O]"""

from pathlib import Path

from msgspec import structs

from homenode.check.certificate import digest_of_claims, written
from homenode.check.certificate_signature import (
    body_of_running,
    check_signature,
    differences,
    guest_claims,
    signed,
)
from homenode.check.verify.guest.expectation import expectation_of
from homenode.check.verify.guest.view import view_of_guest
from homenode.check.verify.verification import load_guest
from homenode.cli.arguments.check import VerifyArguments
from homenode.cli.terminal import (
    check_can_write,
    console,
    note_written,
    print_json,
    working,
    write_text,
)
from homenode.errors import FINDINGS, UsageError
from homenode.input_files import read_input
from homenode.show.certificate_page import certificate_doc
from homenode.show.html import html_page
from homenode.show.terminal_text import shown
from homenode.vm.domain.read import read_vm
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan_model import vm_as_it_runs
from homenode.vm.sources import load_host

_MOST_BYTES = 16 << 20


def certify(asked: VerifyArguments) -> None:
    """Write the signed certificate of a domain that runs here."""
    key, name, output = asked.certify, asked.live, asked.output
    assert key is not None
    others = (asked.document, asked.host, asked.lspci, asked.target, asked.svg, asked.certificate)
    if name is None or asked.boot or asked.start or any(one is not None for one in others):
        raise UsageError(
            "--certify: expected --live NAME, and --plan and --guest alone with it",
            hint="homenode verify --live NAME --plan P.json --certify KEY -o NAME.certificate.json",
        )
    if output is None:
        raise UsageError("--certify: expected -o FILE for the certificate, found none")
    check_can_write(output)
    connect, plan, content = asked.connect or DEFAULT, None, None
    host = load_host(None)
    if asked.plan is not None:
        from homenode.plan.stored import read_plan_for

        content = read_input(asked.plan, "a saved plan")
        plan = read_plan_for(host, content, str(asked.plan))
    with working("reading the VM, its host and its guest"):
        body = body_of_running(name, connect, host, plan, content)
        if asked.guest is not None:
            virsh = Virsh(connect)
            found = read_vm(virsh.live_document(virsh.domain(name).uuid), f"domain {name}")
            expected = found if plan is None else vm_as_it_runs(plan, found)
            guest = load_guest(asked.guest)
            expectation = expectation_of(expected, host=host, document=found)
            claims = guest_claims(view_of_guest(expectation, guest, host))
            digests = structs.replace(body.digests, guest=digest_of_claims(claims))
            body = structs.replace(body, guest_claims=claims, digests=digests)
    certificate = signed(body, key)
    write_text(output, written(certificate))
    note_written(output)


def check_certificate(asked: VerifyArguments) -> None:
    """Print what a certificate says, and who signed it; exit 1 where it is not of what was given.

    Raises InputError where it was changed, or is signed by nobody of the allowed signers.
    """
    path, signers = asked.certificate, asked.allowed_signers
    assert path is not None
    others = (asked.live, asked.guest, asked.lspci, asked.target, asked.svg)
    if signers is None or asked.boot or asked.start or any(one is not None for one in others):
        raise UsageError(
            "--certificate: expected --allowed-signers FILE, and --plan, --host, a document and -o "
            "alone with it",
            hint="ssh-keygen(1), ALLOWED SIGNERS: a line is PRINCIPAL KEYTYPE KEY",
        )
    check_can_write(asked.output)
    known = check_signature(_content(path, "a certificate") or b"", str(path), signers)
    differs = differences(
        known.certificate,
        plan=_content(asked.plan, "a saved plan"),
        host=None if asked.host is None else load_host(asked.host),
        document=_content(asked.document, "a domain document"),
    )
    if asked.json:
        print_json(written(known.certificate))
    else:
        doc = certificate_doc(known.certificate.body, known.principal, differs)
        console().print(shown(doc))
        if asked.output is not None:
            write_text(asked.output, html_page(doc))
            note_written(asked.output)
    if differs:
        raise SystemExit(FINDINGS)


def _content(path: Path | None, expected: str) -> bytes | None:
    return None if path is None else read_input(path, expected, most=_MOST_BYTES)
