"""A certificate is signed, checked anywhere, and refused where one byte of it was changed."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.check.certificate import (
    Certificate,
    CertificateBody,
    CertificateDigests,
    CertifiedClaim,
    CertifiedKind,
    CertifiedState,
    digest,
    digest_of_claims,
    read_certificate,
    written,
)
from homenode.check.certificate_signature import (
    check_signature,
    differences,
    is_of_another_machine,
    signed,
    this_machine,
)
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.show.certificate_page import certificate_doc
from homenode.show.html import html_page

CLAIMS = tuple(
    CertifiedClaim(
        kind=CertifiedKind.VCPU,
        of=str(number),
        within=CpuSet([number]),
        subject=f"vCPU {number}",
        expected=f"PUs {number}",
        observed=f"PUs {number}",
        state=CertifiedState.PROVED,
        how="/proc/7/task",
    )
    for number in range(2)
)
PLAN = b'{"format": "homenode.plan/2"}'
BODY = CertificateBody(
    name="gpu-vm",
    uuid="5c2e0f3c-0000-4000-8000-000000000001",
    host_name="h",
    proved_at="2026-11-23T20:15:00+00:00",
    layout="pin",
    digests=CertificateDigests(
        plan=digest(PLAN), document="d", host="f", live=digest_of_claims(CLAIMS), guest=None
    ),
    claims=CLAIMS,
)


def key(folder: Path, name: str) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen here")
    path = folder / name
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)]
    subprocess.run(words, check=True)
    return path


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificate, Path]:
    """A signed certificate and the allowed signers."""
    folder = tmp_path_factory.mktemp("certificate")
    own = key(folder, "own")
    signers = folder / "signers"
    signers.write_text(f"ops@example.org {own.with_suffix('.pub').read_text()}")
    return signed(BODY, own), signers


def test_who_signed_it_is_named_from_the_allowed_signers(issued: tuple[Certificate, Path]) -> None:
    certificate, signers = issued
    found = check_signature(written(certificate).encode(), "c.json", signers)
    assert (found.principal, found.certificate) == ("ops@example.org", certificate)


def test_a_public_key_is_a_signer_and_a_private_one_is_refused_by_name(
    issued: tuple[Certificate, Path],
) -> None:
    certificate, signers = issued
    content, own = written(certificate).encode(), signers.parent / "own"
    assert check_signature(content, "c.json", own.with_suffix(".pub")).principal == "own"
    assert "SHA256:" in check_signature(content, "c.json", None).principal
    with pytest.raises(InputError, match="private key"):
        check_signature(content, "c.json", own)


def test_without_signers_a_changed_claim_is_refused(issued: tuple[Certificate, Path]) -> None:
    certificate, _ = issued
    forged = replace(certificate, body=replace(BODY, layout="other"))
    with pytest.raises(InputError):
        check_signature(written(forged).encode(), "c.json", None)


def test_a_changed_byte_is_refused_wherever_it_is(issued: tuple[Certificate, Path]) -> None:
    """Either the file is no more what homenode writes, or what is signed is something else."""
    certificate, signers = issued
    content = written(certificate).encode()
    passed = []
    for at in range(len(content)):
        for bit in (1, 4, 32):
            changed = bytearray(content)
            changed[at] ^= bit
            try:
                read = read_certificate(bytes(changed), "c.json")
            except InputError:
                continue
            assert read != certificate
            passed.append(bytes(changed))
    for changed_whole in random.Random(24).sample(passed, 12):
        with pytest.raises(InputError):
            check_signature(changed_whole, "c.json", signers)
    for more in (content + b"\n", content[:-1], b" " + content):
        with pytest.raises(InputError):
            read_certificate(more, "c.json")


def test_a_signature_of_another_key_or_for_another_purpose_is_refused(
    issued: tuple[Certificate, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, signers = issued
    with pytest.raises(InputError):
        check_signature(written(signed(BODY, key(tmp_path, "other"))).encode(), "c", signers)
    monkeypatch.setattr("homenode.check.certificate_signature.NAMESPACE", "git")
    of_git = written(signed(BODY, signers.parent / "own")).encode()
    monkeypatch.undo()
    with pytest.raises(InputError):
        check_signature(of_git, "c", signers)


def test_the_command_refuses_what_another_key_signed_again(
    issued: tuple[Certificate, Path], tmp_path: Path
) -> None:
    """Whoever has another key can sign the same words: the operator's list counts."""
    certificate, signers = issued
    for name, made in (("own", certificate), ("again", signed(BODY, key(tmp_path, "mallory")))):
        (tmp_path / f"{name}.json").write_text(written(made))
    program = [sys.executable, "-m", "homenode", "verify", "--certificate"]
    done = {
        name: subprocess.run(
            [*program, str(tmp_path / f"{name}.json"), "--allowed-signers", str(signers)],
            capture_output=True,
            text=True,
            check=False,
        )
        for name in ("own", "again")
    }
    assert {name: one.returncode for name, one in done.items()} == {"own": 0, "again": 2}
    assert "ops@example.org" in done["own"].stdout
    assert done["again"].stdout == ""


def test_a_host_of_the_same_model_is_another_machine_where_both_ids_are_known() -> None:
    here = this_machine()

    def of(machine: str | None) -> bool:
        digests = replace(BODY.digests, machine=machine)
        body = replace(BODY, digests=digests)
        return is_of_another_machine(Certificate(body=body, signature=""))

    assert not of(here)
    assert not of(None)
    assert of("0" * 64) is (here is not None)


def test_a_certificate_from_before_machines_were_named_is_still_one(
    issued: tuple[Certificate, Path],
) -> None:
    assert '"machine"' not in written(issued[0])


@pytest.mark.parametrize("option", ['valid-before="20200101"', 'namespaces="git"'])
def test_a_key_that_is_not_for_now_or_for_this_is_named_and_the_certificate_is_whole(
    option: str, issued: tuple[Certificate, Path], tmp_path: Path
) -> None:
    certificate, signers = issued
    principal, rest = signers.read_text().split(" ", 1)
    expired = tmp_path / "expired"
    expired.write_text(f"{principal} {option} {rest}")
    with pytest.raises(InputError, match="one of key SHA256:"):
        check_signature(written(certificate).encode(), "c.json", expired)


def test_what_it_was_not_made_with_is_named(issued: tuple[Certificate, Path]) -> None:
    certificate, _ = issued
    assert differences(certificate, plan=PLAN) == ()
    assert differences(certificate, plan=PLAN + b" ")[0].startswith("the plan")
    forged = replace(BODY, claims=CLAIMS[:1])
    assert differences(replace(certificate, body=forged))[0].startswith("the claims")


def test_names_from_outside_are_escaped_on_its_page() -> None:
    page = html_page(certificate_doc(replace(BODY, name="<script>x</script>"), "ops", ()))
    assert "<script>x" not in page and "vCPU 1" in page
