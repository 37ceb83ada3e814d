"""Known: what the pieces of a paste come to: hosts, guests, VMs, logs, with what could not be read.

READERS has the reader of each kind of piece; all of them are those of other commands.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct, field

from homenode.cluster.kubevirt.vmi import Vmi, vmi_of
from homenode.cluster.pods.kubelet import Kubelet, read_kubelet
from homenode.cluster.pods.manifest import read_manifest
from homenode.cluster.pods.pod import Pod, read_pod
from homenode.errors import HomenodeError, ParseError
from homenode.gap import Gap
from homenode.machine.discover.hwloc import host_from_hwloc
from homenode.machine.discover.lspci import host_from_lspci, overlay_lspci
from homenode.machine.discover.numactl import host_from_numactl
from homenode.machine.tools.numactl import NumactlHardware, parse_hardware
from homenode.machine.tools.nvidia_smi import parse_query
from homenode.machine.topology import Host
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.model import Vm
from homenode.vm.targets.qemu_command import options_of, vm_of_command
from homenode.vm.targets.registry import target_named
from homenode.why.outputs import (
    copy_findings,
    group_findings,
    matrix_findings,
    p2p_findings,
    resource_findings,
    run_findings,
)
from homenode.why.pieces import TITLES, Piece

_MOST_LISTING = 16 << 20
_VIRTUAL = re.compile(
    r"\b(?:1af4|1b36|1234):[0-9a-f]{4}\b|\bRed Hat, Inc\. (?:QEMU|Virtio)|\bQEMU PCI|Virtio "
)
"""What only a guest of QEMU has. Source: pci.ids, vendors 1af4, 1b36 and 1234."""
_QEMU = re.compile(r"(?:\S*/)?(?:qemu-system-\w+|qemu-kvm|kvm)")
_VM_KINDS = ("VirtualMachineInstance", "VirtualMachine")
_POD_KINDS = ("Pod", "Deployment", "Job", "DaemonSet", "StatefulSet", "ReplicaSet")


_UNJUDGED = "known by its form; its content is not judged here"
_OTHERWISE = dict.fromkeys(
    ("gres", "slurm-conf"), "homenode slurm check gres.conf slurm.conf judges it"
)
"""What of a kind without a reader is said, where another command judges it."""


class Listing(Struct, frozen=True):
    """Output of lspci, of a host or of a guest."""

    text: str
    source: str
    is_guest: bool


class ReadVm(Struct, frozen=True, kw_only=True):
    """A VM of a file. document: of libvirt. line: where it begins in the paste."""

    vm: Vm
    document: Document | None
    source: str
    line: int


class NcclText(Struct, frozen=True):
    """A log or a topology file of NCCL's."""

    text: str
    source: str
    is_file: bool


T = TypeVar("T")


class PasteFacts(Struct, kw_only=True):
    """All that was read. read: (what, where, lines) of each piece, for people. gaps: pieces that
    are of a kind and could not be read."""

    facts: list[object] = field(default_factory=list)
    read: list[tuple[str, str, int]] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    def of(self, kind: type[T]) -> list[T]:
        """The facts of a kind, in their order."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def add(self, piece: Piece) -> None:
        """What a piece says, or why it cannot be read."""
        where = f"{piece.source}:{piece.line}"
        self.read.append((TITLES[piece.kind], where, piece.lines))
        reader = READERS.get(piece.kind)
        if reader is None:
            self.gaps.append(
                Gap(f"{TITLES[piece.kind]} at {where}", _OTHERWISE.get(piece.kind, _UNJUDGED))
            )
            return
        try:
            fact = reader(piece, where)
        except HomenodeError as error:
            self.gaps.append(Gap(f"{TITLES[piece.kind]} at {where}", error.message))
            return
        if isinstance(fact, NumactlHardware):
            fact = host_from_numactl(fact, where)
        if fact is not None:
            self.facts += fact if isinstance(fact, list) else [fact]

    def host(self) -> Host | None:
        """The machine that VMs and pods are judged on: the first with nodes, or the first, with the
        listing of lspci laid over it."""
        hosts = self.of(Host)
        with_nodes = [host for host in hosts if host.nodes]
        found = next(iter(with_nodes or hosts), None)
        for listing in self.of(Listing):
            if listing.is_guest:
                continue
            try:
                if found is None:
                    found = host_from_lspci(listing.text, listing.source)
                elif not found.pci_devices:
                    found = overlay_lspci(found, listing.text, listing.source)
            except HomenodeError as error:
                self.gaps.append(Gap(listing.source, error.message))
        return found


def _listing(piece: Piece, where: str) -> Listing:
    if len(piece.text) > _MOST_LISTING:
        raise ParseError(where, f"at most {_MOST_LISTING} letters", str(len(piece.text)))
    return Listing(f"{piece.text}\n", where, _VIRTUAL.search(piece.text) is not None)


def _domain(piece: Piece, where: str) -> ReadVm:
    text = piece.text[piece.text.index("<domain") :]
    text = text[: text.rfind("</domain>") + len("</domain>")] if "</domain>" in text else text
    # Lines count as in the paste.
    document = open_domain(("\n" * (piece.line - 1) + text).encode(errors="replace"), piece.source)
    return ReadVm(vm=vm_of(document), document=document, source=piece.source, line=piece.line)


def _of_target(name: str) -> "Reader":
    def read(piece: Piece, where: str) -> ReadVm:
        vm = target_named(name).read_vm(piece.text.encode(errors="replace"), where)
        return ReadVm(vm=vm, document=None, source=piece.source, line=piece.line)

    return read


def _qemu(piece: Piece, where: str) -> ReadVm:
    try:
        words = shlex.split(piece.text.replace("\\\n", " "))
    except ValueError as error:
        raise ParseError(where, "words of a shell", str(error)) from None
    at = next((n for n, word in enumerate(words) if _QEMU.fullmatch(word)), None)
    if at is None:
        raise ParseError(where, "a command of QEMU", "none")
    vm = vm_of_command(options_of(words[at + 1 :], where), where)
    return ReadVm(vm=vm, document=None, source=piece.source, line=piece.line)


def _manifest(piece: Piece, where: str) -> "Pod | Vmi | None":
    document = read_manifest(piece.text.encode(errors="replace"), where, "an object")
    kind = document.get("kind")
    if kind in _VM_KINDS:
        return vmi_of(document, where)
    return read_pod(document, where) if kind in _POD_KINDS else None


def _json_document(piece: Piece, where: str) -> "Kubelet | Pod | Vmi | None":
    """What kubectl prints with -o json, or the kubelet's configz."""
    if "kubeletconfig" in piece.text or '"KubeletConfiguration"' in piece.text:
        return read_kubelet(piece.text, where)
    return _manifest(piece, where)


def _nccl_log(piece: Piece, _: str) -> NcclText:
    # Lines count as in the paste.
    return NcclText("\n" * (piece.line - 1) + piece.text, piece.source, is_file=False)


Reader = Callable[[Piece, str], object]

READERS: Mapping[str, Reader] = {
    "domain": _domain,
    "nccl-file": lambda piece, where: NcclText(
        piece.text[piece.text.index("<system") :], where, is_file=True
    ),
    "nccl-log": _nccl_log,
    "hwloc": lambda one, where: host_from_hwloc(one.text[one.text.index("<topology") :], where),
    "smi-xml": lambda piece, _: parse_query(piece.text[piece.text.index("<nvidia_smi_log") :]),
    "lspci": _listing,
    "numactl": lambda piece, _: parse_hardware(piece.text),
    "topo": lambda piece, where: [*matrix_findings(piece.text, where)],
    "nccl-tests": lambda piece, where: [*run_findings(piece.text, where)],
    "resources": lambda piece, where: [*resource_findings(piece.text, where)],
    "copies": lambda piece, where: [*copy_findings(piece.text, where)],
    "p2p-test": lambda piece, where: [*p2p_findings(piece.text, where)],
    "iommu-groups": lambda piece, where: [*group_findings(piece.text, where)],
    **dict.fromkeys(("kernel", "smi-text", "traceback"), lambda *_: None),  # lines are messages
    "qm": _of_target("proxmox"),
    "ch": _of_target("cloud-hypervisor"),
    "qemu": _qemu,
    "json": _json_document,
    "manifest": _manifest,
}


def known_of(found: Sequence[Piece]) -> PasteFacts:
    """All pieces together."""
    known = PasteFacts()
    for piece in found:
        known.add(piece)
    return known
