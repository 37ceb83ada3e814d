"""Certificate: what was proved of a running VM at one moment, to be signed by its operator.

It names the documents that it was compared with by their sha256, and each claim with what was
expected and what was seen. The signed bytes are those of the body, and a file has one form only:
whatever byte of it changes, it is refused.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from homenode import formats
from homenode.check.verify.live.checks import cell_memory, stated_pages
from homenode.check.verify.live.procfs import RunningVm, ThreadKind
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.units import format_bytes
from homenode.vm.model import Vm

KIND = "certificate"
NAMESPACE = "homenode"
"""Of the signature: one made for another purpose is none of this."""

MAX_BYTES = 4 << 20


class CertifiedState(StrEnum):
    """Three answers."""

    PROVED = "proved"
    REFUTED = "refuted"
    NOT_KNOWN = "not known"


class CertifiedClaim(Struct, frozen=True, kw_only=True):
    """One thing that was looked at. how: where it was read."""

    subject: str
    expected: str
    observed: str
    state: CertifiedState
    how: str


class CertificateDigests(Struct, frozen=True, kw_only=True):
    """sha256 of what it was compared with; None = it was not. document: of the running domain, as
    libvirt prints it. host: the fingerprint of its topology. live, guest: of the claims of each."""

    plan: str | None
    document: str
    host: str
    live: str
    guest: str | None


class CertificateBody(Struct, frozen=True, kw_only=True):
    """What is signed. proved_at: UTC, ISO 8601."""

    name: str
    uuid: str
    host_name: str
    proved_at: str
    layout: str | None
    digests: CertificateDigests
    claims: tuple[CertifiedClaim, ...]
    guest_claims: tuple[CertifiedClaim, ...] = ()


class Certificate(Struct, frozen=True, kw_only=True):
    """A body with its signature: the base64 of what ssh-keygen -Y sign makes, without its lines."""

    body: CertificateBody
    signature: str


def signed_bytes(body: CertificateBody) -> bytes:
    """What the signature is over."""
    return formats.encode(KIND, body).encode()


def written(certificate: Certificate) -> str:
    """The one form of the file."""
    return formats.encode(KIND, certificate)


def read_certificate(content: bytes, source: str) -> Certificate:
    """The certificate of a file. Raises InputError for one that is not, byte for byte, as homenode
    writes it: then somebody has changed it."""
    if len(content) > MAX_BYTES:
        raise InputError(f"{source}: expected a certificate of at most {MAX_BYTES} bytes")
    read = formats.decode(content, KIND, Certificate, source)
    if written(read).encode() != content:
        raise InputError(
            f"{source}: expected a certificate as homenode wrote it, found one that was changed",
            hint="ask who issued it for the original file",
        )
    armored(read, source)
    return read


def armored(certificate: Certificate, source: str) -> str:
    """The signature as ssh-keygen reads it. Raises InputError where it is no base64."""
    text = certificate.signature
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not raw or base64.b64encode(raw).decode() != text:
        raise InputError(f"{source}: expected the signature in base64, found another text")
    lines = [text[at : at + 70] for at in range(0, len(text), 70)]
    return "\n".join(("-----BEGIN SSH SIGNATURE-----", *lines, "-----END SSH SIGNATURE-----", ""))


def unarmored(signature: str) -> str:
    """The base64 within ssh-keygen's lines."""
    lines = signature.strip().splitlines()
    return "".join(line.strip() for line in lines if not line.startswith("-----"))


def live_claims(expected: Vm, vm: RunningVm, host: Host | None) -> Iterator[CertifiedClaim]:
    """A claim for each pinned vCPU, IOThread, piece of memory and device.

    Nothing is claimed of unpinned threads and unbound memory.
    """
    where = f"/proc/{vm.process}"
    vcpus = (
        (n, pus) for n, pus in enumerate(expected.vcpu_pins) if n not in expected.offline_vcpus
    )
    for name, kind, pins in (
        ("vCPU", ThreadKind.VCPU, vcpus),
        ("IOThread", ThreadKind.IOTHREAD, expected.iothread_pins),
    ):
        threads = vm.threads_of(kind)
        for number, pus in pins:
            if pus is None:
                continue
            thread = threads.get(number)
            yield CertifiedClaim(
                subject=f"{name} {number}",
                expected=f"PUs {pus}",
                observed="no thread" if thread is None else f"PUs {thread.allowed}",
                state=_state(None if thread is None else thread.allowed <= pus),
                how=f"{where}/task",
            )
    for memory in cell_memory(expected, vm):
        if not memory.piece.nodes:
            continue
        area = memory.area
        nodes = () if area is None else tuple(int(one) for one, _ in area.policy.pages_by_node)
        yield CertifiedClaim(
            subject=memory.piece.subject,
            expected=f"what is touched of {format_bytes(memory.piece.memory_bytes)} on node "
            f"{memory.piece.nodes}",
            observed="no mapping" if area is None else stated_pages(area),
            state=_state(CpuSet(nodes) <= memory.piece.nodes if nodes else None),
            how=f"{where}/numa_maps",
        )
    yield from _devices(expected, vm, host)


def _devices(expected: Vm, vm: RunningVm, host: Host | None) -> Iterator[CertifiedClaim]:
    node_of = dict(vm.node_of_device)
    homes = CpuSet.union(cell.nodes for cell in expected.cells_or_whole)
    for hostdev in expected.hostdevs:
        device = None if host is None else host.device(hostdev.bdf)
        name = "" if device is None or device.name is None else f" ({device.name})"
        node = node_of.get(hostdev.bdf)
        is_near = None if node is None or not homes else CpuSet([node]) <= homes
        yield CertifiedClaim(
            subject=f"{hostdev.bdf}{name}",
            expected="a device on a node of the VM's memory",
            observed="node not known" if node is None else f"node {node}",
            state=_state(is_near),
            how=f"/sys/bus/pci/devices/{hostdev.bdf}/numa_node",
        )


def _state(holds: bool | None) -> CertifiedState:
    if holds is None:
        return CertifiedState.NOT_KNOWN
    return CertifiedState.PROVED if holds else CertifiedState.REFUTED


def digest(content: bytes) -> str:
    """sha256, as it stands in a certificate."""
    return hashlib.sha256(content).hexdigest()


def digest_of_claims(claims: Iterable[CertifiedClaim]) -> str:
    """Of what was seen, in order."""
    return digest("".join(formats.line(claim) for claim in claims).encode())
