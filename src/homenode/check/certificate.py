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

from msgspec import Struct, structs

from homenode import formats
from homenode.check.verify.live.checks import stated_pages, vm_shown
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


class CertifiedKind(StrEnum):
    """What a claim is about, by which it is proved again."""

    VCPU = "vcpu"
    IOTHREAD = "iothread"
    EMULATOR = "emulator"
    MEMORY = "memory"
    DEVICE = "device"
    GUEST = "guest"


class CertifiedClaim(Struct, frozen=True, kw_only=True):
    """One thing that was looked at. how: where it was read. of: the number of a vCPU or an
    IOThread, the address of a device. within: the PUs of a thread, the nodes of memory or of a
    device; None = of what only the guest sees."""

    kind: CertifiedKind
    of: str = ""
    within: CpuSet | None = None
    subject: str
    expected: str
    observed: str
    state: CertifiedState
    how: str


class CertificateDigests(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """sha256 of what it was compared with; None = it was not. document: of the running domain, as
    libvirt prints it. host: the fingerprint of its topology. live, guest: of the claims of each.
    machine: of the host's machine-id, which differs between hosts of one model."""

    plan: str | None
    document: str
    host: str
    live: str
    guest: str | None
    machine: str | None = None


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


def cpus_text(pus: CpuSet) -> str:
    """PUs as those call them who do not know homenode.

    >>> cpus_text(CpuSet([4])), cpus_text(CpuSet.parse("0-3"))
    ('logical CPU 4', 'logical CPUs 0-3')
    """
    return f"logical CPU{'s' if len(pus) > 1 else ''} {pus}"


_THREADS = {
    CertifiedKind.VCPU: ThreadKind.VCPU,
    CertifiedKind.IOTHREAD: ThreadKind.IOTHREAD,
}


class Sighting(Struct, frozen=True, kw_only=True):
    """What a look shows of a claim. holds: None = it does not say."""

    observed: str
    holds: bool | None

    @property
    def state(self) -> CertifiedState:
        if self.holds is None:
            return CertifiedState.NOT_KNOWN
        return CertifiedState.PROVED if self.holds else CertifiedState.REFUTED


def live_claims(expected: Vm, vm: RunningVm, host: Host | None) -> Iterator[CertifiedClaim]:
    """A claim for each pinned thread, piece of memory and device.

    Nothing is claimed of unpinned threads and unbound memory.
    """
    where = f"/proc/{vm.process}"

    def seen(
        kind: CertifiedKind, of: str, within: CpuSet, subject: str, wanted: str, how: str
    ) -> CertifiedClaim:
        claim = CertifiedClaim(
            kind=kind,
            of=of,
            within=within,
            subject=subject,
            expected=wanted,
            observed="",
            state=CertifiedState.NOT_KNOWN,
            how=how,
        )
        sighting = sight_of(claim, expected, vm)
        return structs.replace(claim, observed=sighting.observed, state=sighting.state)

    vcpus = (
        (n, pus) for n, pus in enumerate(expected.vcpu_pins) if n not in expected.offline_vcpus
    )
    for kind, name, pins in (
        (CertifiedKind.VCPU, "vCPU", vcpus),
        (CertifiedKind.IOTHREAD, "IOThread", expected.iothread_pins),
        (CertifiedKind.EMULATOR, "emulator", (("", expected.emulator_pus),)),
    ):
        for number, pus in pins:
            if pus is not None:
                subject, wanted = f"{name} {number}".rstrip(), cpus_text(pus)
                yield seen(kind, str(number), pus, subject, wanted, f"{where}/task")
    for subject, piece in expected.memory_pieces.items():
        if piece.nodes:
            size = format_bytes(piece.memory_bytes)
            wanted = f"{size}, of which all that is in use is on node {piece.nodes}"
            how = f"{where}/numa_maps"
            yield seen(CertifiedKind.MEMORY, subject, piece.nodes, subject, wanted, how)
    homes = CpuSet.union(cell.nodes for cell in expected.cells_or_whole)
    for bdf in (hostdev.bdf for hostdev in expected.hostdevs):
        device = None if host is None else host.device(bdf)
        name = "" if device is None or device.name is None else f" ({device.name})"
        wanted = "a device on a node of the VM's memory"
        how = f"/sys/bus/pci/devices/{bdf}/numa_node"
        yield seen(CertifiedKind.DEVICE, str(bdf), homes, f"{bdf}{name}", wanted, how)


def sight_of(claim: CertifiedClaim, found: Vm, vm: RunningVm) -> Sighting:
    """What the running VM shows of a claim now. found: what its document says."""
    within = claim.within
    if within is None or claim.kind is CertifiedKind.GUEST:
        return Sighting(observed="the guest is not asked", holds=None)
    if claim.kind is CertifiedKind.EMULATOR:
        return _of_emulator(vm, within)
    if claim.kind in _THREADS:
        number = int(claim.of) if claim.of.isdecimal() else -1
        thread = vm.threads_of(_THREADS[claim.kind]).get(number)
        if thread is None:
            is_read = bool(vm.threads) and not vm.threads_of(ThreadKind.ALL_VCPUS)
            return Sighting(observed="no thread", holds=False if is_read else None)
        return Sighting(observed=cpus_text(thread.allowed), holds=thread.allowed <= within)
    if claim.kind is CertifiedKind.MEMORY:
        piece = vm_shown(found, vm).memory_pieces.get(claim.of)
        pages = None if piece is None else piece.bytes_by_node
        return Sighting(
            observed="no mapping" if pages is None else stated_pages(pages),
            holds=CpuSet(node for node, _ in pages) <= within if pages else None,
        )
    if all(str(one.bdf) != claim.of for one in found.hostdevs):
        return Sighting(observed="the VM does not have it", holds=False)
    node = next((node for bdf, node in vm.node_of_device if str(bdf) == claim.of), None)
    return Sighting(
        observed="node not known" if node is None else f"node {node}",
        holds=None if node is None or not within else CpuSet([node]) <= within,
    )


def _of_emulator(vm: RunningVm, within: CpuSet) -> Sighting:
    """Of the process's own thread: what it starts besides may be moved by the kernel or QEMU."""
    main = next((one for one in vm.threads if one.id == vm.process), None)
    if main is None:
        return Sighting(observed="no thread", holds=None)
    return Sighting(observed=cpus_text(main.allowed), holds=main.allowed <= within)


def digest(content: bytes) -> str:
    """sha256, as it stands in a certificate."""
    return hashlib.sha256(content).hexdigest()


def digest_of_claims(claims: Iterable[CertifiedClaim]) -> str:
    """Of what was seen, in order."""
    return digest("".join(formats.line(claim) for claim in claims).encode())
