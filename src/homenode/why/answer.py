"""Answer: the likeliest cause of what a paste shows, how sure, what to do, and what to send next.

Signs are lines that say a cause; checks are the findings of doctor, verify, nccl-topo and the
kubelet's rules over what the paste holds. Neither is judged here a second time: they are put in an
order, and the first one is the answer.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.catalogue import CatalogueEntry, entry_of, finding
from homenode.check.doctor.diagnosis import diagnose
from homenode.check.domain.diagnosis import domain_findings, located
from homenode.cluster.kubevirt.fit import check_fit
from homenode.cluster.kubevirt.vmi import Vmi
from homenode.cluster.pods.checkpoints import Checkpoints
from homenode.cluster.pods.fit import fit, fit_findings
from homenode.cluster.pods.kubelet import Kubelet, usual_kubelet
from homenode.cluster.pods.machine import node_of_host, with_known_memory
from homenode.cluster.pods.pod import Pod
from homenode.errors import HomenodeError
from homenode.findings import Finding, Severity, merged
from homenode.gap import Gap
from homenode.input_files import package_text
from homenode.machine.topology import Host, host_of_nothing
from homenode.nccl.checks import check_topology
from homenode.nccl.log import read_log
from homenode.why.known import Listing, NcclText, PasteFacts, ReadVm, known_of
from homenode.why.message import Sign, Sure, rows, signs
from homenode.why.outputs import lone_gpu_findings, virtual_switch_findings
from homenode.why.pasted import as_printed
from homenode.why.pieces import TITLES, pieces

FROM_A_MESSAGE = "from a message"
"""The case of a page's texts for a finding of which only a line is known."""

_BDF = re.compile(r"\b(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
_CHECK = re.compile(r"Check: ([^\n]+(?:\n[^\n]+)*)")
_DEVICE = re.compile(r"^(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] ", re.MULTILINE)
_FEW_DEVICES = 2
_MOST_OTHERS = 4

_OF_HOSTS = ("unpinned", "memory-unbound", "emulator-floats", "sockets-implicit")
"""What costs something on hosts of several nodes or with other VMs alone."""

_WEIGHTY = package_text("why", "weighty.txt").split()
"""Beginnings of ids of warnings: those that cost most first, all others behind them."""


_SURE_OF_OUTPUTS = {
    **dict.fromkeys(
        ("nccl-wrong-values", "nccl-tests-alone", "p2p-slower", "node-offers-none"), Sure.CERTAIN
    ),
    **dict.fromkeys(("nccl-virtual-switch", "pcie-link-narrow"), Sure.POSSIBLE),
    "pcie-link-unknown": Sure.NOT_ENOUGH,
}
"""How sure what the outputs of tools show is; all else is likely."""


class LikelyCause(Struct, frozen=True, kw_only=True):
    """A cause, and how sure it is. cause: in a sentence. shown_by: the line of the paste, with its
    place; None where no one line shows it. confirm: what would confirm it. send: the next file."""

    finding: Finding
    sure: Sure
    cause: str
    shown_by: str | None = None
    confirm: str | None = None
    send: str | None = None


class PieceRead(Struct, frozen=True, kw_only=True):
    """A part of the paste: what it is, and where it begins."""

    what: str
    where: str
    lines: int


class PasteAnswer(Struct, frozen=True, kw_only=True):
    """What is said of a paste. causes: the likeliest first; () where nothing is wrong in it, or
    where it is not enough. sure: of the first. send: what to send next, whatever was found. gaps:
    parts that are of a kind and could not be read."""

    read: tuple[PieceRead, ...]
    sure: Sure | None
    causes: tuple[LikelyCause, ...]
    worth_knowing: tuple[LikelyCause, ...]
    send: str
    gaps: tuple[Gap, ...]


def answer(texts: Sequence[tuple[str, str]], hosts: Sequence[Host] = ()) -> PasteAnswer:
    """The answer to a paste. texts: (where it is from, the text). hosts: read from other sources,
    such as a capture."""
    texts = [(source, as_printed(text)) for source, text in texts]
    parts = {source: pieces(text, source) for source, text in texts}
    known = known_of([piece for source, _ in texts for piece in parts[source]])
    known.facts[:0] = hosts
    known.read[:0] = [("host", host.name, 0) for host in hosts]
    seen = [sign for source, text in texts for sign in signs(text, source, rows(), parts[source])]
    lines = dict(texts)
    causes = sorted(_causes(known, seen, lines), key=_order)
    distinct = tuple({cause.finding.id: cause for cause in reversed(causes)}.values())[::-1]
    bad = tuple(one for one in distinct if one.finding.is_bad)
    open_ones = tuple(one for one in distinct if one.sure is Sure.NOT_ENOUGH)
    chosen = bad or open_ones
    first = chosen[0] if chosen else None
    return PasteAnswer(
        read=tuple(PieceRead(what=w, where=where, lines=n) for w, where, n in known.read),
        sure=first.sure if first else None if known.read or distinct else Sure.NOT_ENOUGH,
        causes=chosen[: _MOST_OTHERS + 1],
        worth_knowing=tuple(
            one for one in distinct if one not in bad and one.sure is not Sure.NOT_ENOUGH
        )[:_MOST_OTHERS],
        send=(first.send if first else None) or _next_file(known),
        gaps=tuple(known.gaps),
    )


def _order(cause: LikelyCause) -> tuple[object, ...]:
    severities = tuple(Severity)
    found = cause.finding
    weight = next(
        (n for n, name in enumerate(_WEIGHTY) if found.id.startswith(name)), len(_WEIGHTY)
    )
    sures = tuple(Sure)
    return not found.is_bad, sures.index(cause.sure), severities.index(found.severity), weight


def _causes(
    known: PasteFacts, seen: Sequence[Sign], lines: dict[str, str]
) -> Iterator[LikelyCause]:
    ids = {sign.id for sign in seen if sign.sure is not Sure.POSSIBLE}
    # Findings of NCCL's log name lines of their own.
    whole = {w for what, w, n in known.read if n > 1 and what != TITLES["nccl-log"]}
    # A listing with all that lspci says, of more than one port, is judged by the doctor.
    is_whole = any(
        "Capabilities:" in one.text and len(_DEVICE.findall(one.text)) > _FEW_DEVICES
        for one in known.of(Listing)
    )
    over = {"p2p-redirected", "nic-ats-off"} if is_whole else set()
    # What NCCL writes is no file that it was given, unless the paste says so.
    is_dump = not any("TOPO_FILE" in line for line in lines.values())
    over |= {"pcie-link-narrow", "pcie-link-idle"} if known.of(Listing) else set()
    named = {(one.source, one.line) for one in seen if one.sure is not Sure.NOT_ENOUGH}
    for sign in seen:
        is_named = sign.sure is Sure.NOT_ENOUGH and (sign.source, sign.line) in named
        if sign.id not in over and not is_named:
            yield _of_sign(sign)
    for found in _of_outputs(known):
        yield _cause(found, _SURE_OF_OUTPUTS.get(found.id, Sure.LIKELY), None)
    unfit = {"nccl-of-a-dump", "nccl-link-speed", "nccl-link-width"} if is_dump else set()
    if known.of(Listing) and not any("Host bridge" in one.text for one in known.of(Listing)):
        unfit.add("device-of-no-host")  # lines of lspci, and not the whole of it
    for found in merged(_checked(known)):
        if found.severity is Severity.INCONCLUSIVE or found.id in unfit:
            continue
        # A line and a check that say the same are one cause, and certain.
        is_sure = found.severity is Severity.CRITICAL or found.id in ids
        yield _cause(
            found,
            Sure.CERTAIN if is_sure else Sure.LIKELY,
            # A piece is named by its first line, which shows nothing of a finding in all of it.
            None if found.source in whole else _line_shown(found, lines),
        )


def _of_sign(sign: Sign) -> LikelyCause:
    entry = entry_of(sign.id)
    named = _BDF.search(sign.text.lower())
    more = f" ({sign.count} lines like it)" if sign.count > 1 else ""
    found = finding(
        sign.id,
        named[0] if named else sign.source,
        expected="no such line",
        observed=sign.text[:400],
        source=f"{sign.source}:{sign.line}",
        case=FROM_A_MESSAGE if FROM_A_MESSAGE in entry.texts("Fix") else None,
    )
    return _cause(found, sign.sure, f"{found.source}: {sign.text[:400]}{more}")


def _cause(found: Finding, sure: Sure, shown_by: str | None) -> LikelyCause:
    entry = entry_of(found.id)
    own = entry.texts("Cause").get(FROM_A_MESSAGE)
    is_message = found.expected == "no such line"
    meaning = own if own and is_message else " ".join(entry.meaning.split()).replace("`", "")
    return LikelyCause(
        finding=found,
        sure=sure,
        cause=meaning,
        shown_by=shown_by,
        confirm=_confirm(entry),
        send=entry.printed("Send"),
    )


def _confirm(entry: CatalogueEntry) -> str | None:
    said = entry.printed("Confirm")
    check = _CHECK.search(entry.text)
    return said or (" ".join(check[1].split()).replace("`", "") if check else None)


def _line_shown(found: Finding, lines: dict[str, str]) -> str | None:
    """The line that a finding's source names, "file:line"."""
    source, _, number = found.source.rpartition(":")
    if source not in lines or not number.isdecimal():
        return None
    text = lines[source].split("\n")
    at = int(number) - 1
    return f"{found.source}: {text[at].strip()[:400]}" if at < len(text) else None


def _checked(known: PasteFacts) -> Iterator[Finding]:
    """The findings of the other commands' checks."""
    host = known.host()
    vms = known.of(ReadVm)
    for vm in vms:
        yield from _guarded(known, vm.source, _of_vm(vm, host))
    if host is not None and not vms:
        yield from _guarded(known, host.name, diagnose(host).findings)
    for one in known.of(NcclText):
        data = one.text.encode(errors="replace")
        if one.is_file:
            yield from _guarded(known, one.source, check_topology(data, one.source))
        else:
            yield from _guarded(known, one.source, read_log(one.text, one.source).findings)
    kubelet = next(iter(known.of(Kubelet)), None)
    for vmi in known.of(Vmi):
        found = check_fit(vmi, kubelet, host, None).findings
        yield from _guarded(known, vmi.name, found)
    pods: list[Pod] = known.of(Pod)
    if host is not None and host.nodes:
        for pod in pods:
            yield from _guarded(known, pod.name, _of_pod(pod, kubelet, host))


def _of_outputs(known: PasteFacts) -> Iterator[Finding]:
    """What the outputs of tools show that no other command judges."""
    yield from known.of(Finding)
    for listing in known.of(Listing):
        yield from virtual_switch_findings(listing.text, listing.source, is_guest=listing.is_guest)
        if not listing.is_guest:
            yield from lone_gpu_findings(listing.text, listing.source)


def _guarded(known: PasteFacts, source: str, found: Iterable[Finding]) -> Iterator[Finding]:
    try:
        yield from found
    except HomenodeError as error:
        known.gaps.append(Gap(source, error.message))


def _of_vm(read: ReadVm, host: Host | None) -> Iterator[Finding]:
    if host is not None:
        yield from diagnose(host, read.document, vm=read.vm).findings
        return
    nothing = host_of_nothing("a host that is not in the paste")
    found = [_without_host(one) for one in domain_findings(read.vm, read.document, nothing)]
    yield from found if read.document is None else located(found, read.document)


def _without_host(found: Finding) -> Finding:
    """What costs something only on some hosts is worth knowing, and no cause."""
    return replace(found, severity=Severity.INFO) if found.id in _OF_HOSTS else found


def _of_pod(pod: Pod, kubelet: Kubelet | None, host: Host) -> Iterator[Finding]:
    whole, unknown = with_known_memory(pod, host)
    node, gaps = node_of_host(
        host, kubelet or usual_kubelet(host), whole.devices, {}, Checkpoints()
    )
    yield from fit_findings(fit(whole, node, (*unknown, *gaps)), host.name).findings


def _next_file(known: PasteFacts) -> str:
    """What would say most that the paste does not."""
    has_host = known.host() is not None
    if any((known.of(Vmi), known.of(Pod))):
        if not known.of(Kubelet):
            return "the node's configz (kubectl get --raw /api/v1/nodes/NODE/proxy/configz)"
    elif known.of(NcclText) and not known.of(ReadVm):
        return "nvidia-smi topo -m, lspci -vvv (root), the logs of all ranks; of a VM its file too"
    if not known.of(ReadVm) and not known.of(Vmi):
        return "the whole error message, dmesg; of a VM its file (virsh dumpxml NAME, qm config ID)"
    if not has_host:
        return (
            "homenode capture -o host.tar.gz of the host, or its lspci -vvv (root) and numactl -H"
        )
    if not any(listing.is_guest for listing in known.of(Listing)):
        return "the log of what is slow or fails, and lspci -vvv and numactl -H of the guest"
    return "the whole log of what is slow or fails"
