"""homenode verify --certify and --certificate: a placement that was proved, signed. [I/O]"""

from pathlib import Path

from msgspec import structs

from homenode.change.certificate_step import CertificateStep, certificate_journal
from homenode.change.journal import default_root
from homenode.check.certificate import CertificateBody, digest_of_claims, written
from homenode.check.certificate_signature import (
    body_of_running,
    check_signature,
    differences,
    guest_claims,
    is_of_another_machine,
    signed,
)
from homenode.check.verify.guest.expectation import expectation_of
from homenode.check.verify.guest.view import view_of_guest
from homenode.check.verify.verification import load_guest
from homenode.cli.arguments.check import VerifyArguments
from homenode.cli.restore import changing_host
from homenode.cli.terminal import (
    check_can_write,
    console,
    note,
    note_written,
    print_json,
    working,
    write_text,
)
from homenode.errors import FINDINGS, InputError, UsageError
from homenode.input_files import read_input
from homenode.show.certificate_page import certificate_doc
from homenode.show.html import html_page
from homenode.show.terminal_text import shown
from homenode.vm.domain.read import read_vm
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan_model import vm_as_it_runs
from homenode.vm.sources import load_host, names_domain

_MOST_BYTES = 16 << 20


def certify(asked: VerifyArguments) -> None:
    """Write the signed certificate of a domain that runs here, to a file or into its metadata."""
    key, name, output = asked.certify, asked.live, asked.output
    assert key is not None
    others = (asked.document, asked.host, asked.lspci, asked.target, asked.svg, asked.certificate)
    if name is None or asked.boot or asked.start or any(one is not None for one in others):
        raise UsageError(
            "--certify: expected --live NAME, and --plan and --guest alone with it",
            hint="homenode verify --live NAME --plan P.json --certify KEY -o NAME.certificate.json",
        )
    if output is None and not (asked.in_domain or asked.dry_run):
        raise UsageError("--certify: expected -o FILE, or --in-domain, found neither")
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
    if asked.dry_run:
        console().print(shown(certificate_doc(body, None, ())))
        where = [f"in {output}"] if output is not None else []
        where += [f"in the metadata of {body.name}"] if asked.in_domain else []
        note(f"would be signed and kept {' and '.join(where) or 'nowhere'}")
        return
    text = written(signed(body, key))
    if output is not None:
        write_text(output, text)
        note_written(output)
    if asked.in_domain:
        _keep(Virsh(connect), body, text)


def _keep(virsh: Virsh, body: CertificateBody, text: str) -> None:
    step = CertificateStep(virsh=virsh, uuid=body.uuid, name=body.name, text=text)
    journal = certificate_journal(default_root(), virsh, body.uuid, body.name)
    with changing_host("verify", ("--live", body.name, "--certify"), virsh.connect):
        step.do(journal.write)
    back = journal.head.undo
    note(f"{body.name}: kept in its metadata; homenode watch proves it again; undo: {back}")


def check_certificate(asked: VerifyArguments) -> None:
    """Print what a certificate says, and who signed it; exit 1 where it is not of what was given.

    Raises InputError where it was changed, or is signed by nobody of the allowed signers.
    """
    path, signers = asked.certificate, asked.allowed_signers
    assert path is not None
    others = (asked.live, asked.guest, asked.lspci, asked.target, asked.svg)
    if asked.boot or asked.start or any(one is not None for one in others):
        raise UsageError(
            "--certificate: expected --allowed-signers, --plan, --host, a document and -o alone "
            "with it"
        )
    check_can_write(asked.output)
    source, held = str(path), _of_domain(path, asked.connect or DEFAULT)
    content = (_content(path, "a certificate") or b"") if held is None else held[0]
    known = check_signature(content, source, signers)
    if held is not None and known.certificate.body.uuid != held[1]:
        raise InputError(
            f"{source}: expected a certificate of this domain, found one of "
            f"{known.certificate.body.name} ({known.certificate.body.uuid})"
        )
    body = known.certificate.body
    differs = differences(
        known.certificate,
        plan=_content(asked.plan, "a saved plan"),
        host=None if asked.host is None else load_host(asked.host),
        document=_content(asked.document, "a domain document"),
    )
    if held is not None and is_of_another_machine(known.certificate):
        differs = (*differs, f"the machine: expected {body.host_name}, found another one")
    if asked.json:
        print_json(written(known.certificate))
    else:
        doc = certificate_doc(body, known.principal, differs)
        console().print(shown(doc))
        if asked.output is not None:
            write_text(asked.output, html_page(doc))
            note_written(asked.output)
    if differs:
        raise SystemExit(FINDINGS)


def _of_domain(path: Path, connect: str) -> tuple[bytes, str] | None:
    """The certificate in a domain's metadata, and the domain's UUID; None for a file."""
    if not names_domain(str(path)):
        return None
    virsh = Virsh(connect)
    state = virsh.domain(str(path))
    step = CertificateStep(virsh=virsh, uuid=state.uuid, name=state.name)
    if (text := step.kept()) is None:
        raise InputError(f"domain {state.name}: expected a certificate in its metadata, found none")
    return f"{text.strip()}\n".encode(), state.uuid


def _content(path: Path | None, expected: str) -> bytes | None:
    return None if path is None else read_input(path, expected, most=_MOST_BYTES)
