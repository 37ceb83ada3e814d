"""StartCheck: whether a VM would start on this machine, each need by itself. [I/O]

libvirt is asked last, for the command that would start the domain: its own refusal stands where no
need has named the reason already.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct

from homenode.catalogue import finding
from homenode.check.start.command_of_libvirt import refusal
from homenode.check.start.libvirt_answers import ASKED_OF_LIBVIRT, unfit
from homenode.check.start.machine import StartMachine
from homenode.check.start.needs import (
    TABLE,
    Need,
    NeedAnswer,
    NeedState,
    in_words,
    needs_of,
    unknown,
)
from homenode.check.start.paths import GENERATED, LOOKED_AT, endpoint
from homenode.errors import HomenodeError
from homenode.findings import Finding, Findings, merged, sourced
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import vm_of
from homenode.vm.hypervisor.connection import is_local

ANSWERS = {**LOOKED_AT, **ASKED_OF_LIBVIRT}
_SAYS_WHY = ("start-program", "start-kvm", "start-emulator", "start-memory")
"""What is said of these is why libvirt refuses the domain as well."""


class _Asked(Struct, frozen=True, kw_only=True):
    """A need with its answer."""

    need: Need
    answer: NeedAnswer


def check_start(document: Document, uri: str) -> Findings:
    """Whether the domain of a document would start on this machine with this libvirt.

    Never raises for what the machine lacks. Of a libvirt on another machine, only what that libvirt
    itself knows is asked.
    """
    machine = StartMachine(uri, document)
    needs = needs_of(document)
    asked = [_Asked(need=need, answer=_answer(machine, need)) for need in dict.fromkeys(needs)]
    found = [*_missing(asked), *_given_twice(asked), *_unknown(asked)]
    found += [*_in_one_document(needs), *unfit(machine), *_ends_daemon(machine)]
    named = {one.id for one in found}
    # A missing function of an SR-IOV network card with a VLAN ends the daemon of libvirt 9.0.
    if named.isdisjoint((*_SAYS_WHY, "start-device")) and is_local(uri):
        if machine.barred is not None:
            found.append(_not_known("the definition", machine.barred))
        else:
            found += refusal(machine, document)
    return Findings(
        checked=(_ready_text(asked, uri),), findings=sourced(found, f"this machine, {uri}")
    )


def _answer(machine: StartMachine, need: Need) -> NeedAnswer:
    if need.kind in LOOKED_AT and not is_local(machine.uri):
        return unknown(f"{need.value}: a path of another machine")
    try:
        return ANSWERS[need.kind](machine, need)
    except HomenodeError as error:
        return unknown(error.message)
    except (OSError, ValueError) as error:
        return unknown(f"{need.value}: {getattr(error, 'strerror', None) or error}")


def _missing(asked: list[_Asked]) -> list[Finding]:
    return [
        finding(
            one.answer.of or TABLE.kinds[one.need.kind].finding,
            one.need.subject,
            expected=TABLE.kinds[one.need.kind].words,
            observed=one.answer.why,
            case=in_words(one.need.kind),
        )
        for one in asked
        if one.answer.state is NeedState.MISSING
    ]


def _given_twice(asked: list[_Asked]) -> Iterator[Finding]:
    """Disks of one image, of which one is written: QEMU's own locks bar the second."""
    disks: dict[str, Need] = {}
    for one in asked:
        need = one.need
        if need.kind not in ("IMAGE", "BLOCK") or not need.value:
            continue
        first = disks.setdefault(os.path.realpath(need.value), need)
        same = first is not need and first.subject != need.subject
        if same and (first.is_written or need.is_written) and not need.is_shared:
            yield finding(
                "start-in-use",
                need.subject,
                expected="an image that no other disk writes",
                observed=f"{need.value}: {first.subject} has it too",
                case="document",
            )


def _ends_daemon(machine: StartMachine) -> Iterator[Finding]:
    """A cell without vCPUs before one that has some: libvirtd 9.0 ends when it gives the threads of
    vCPUs their cgroups, as the daemon of the system does. Seen on 9.0.0 with QEMU 7.2 and TCG."""
    try:
        vm = vm_of(machine.document)
    except HomenodeError:
        return  # what cannot be read is said where the VM is read
    filled = [bool(cell.vcpus) for cell in vm.cells]
    if sum(len(cell.vcpus) for cell in vm.cells) < vm.vcpus:
        filled[:1] = [True]  # libvirt puts what is in no cell in the first
    empty = filled.index(False) if False in filled else len(filled)
    done = machine.virsh("version", "--daemon") if any(filled[empty:]) else None
    if done is not None and "daemon: 9.0." in done.stdout and "/system" in machine.uri:
        yield finding(
            "start-ends-libvirtd",
            f"cell {empty}",
            expected="vCPUs in each guest cell before the last that has some",
            observed="none, with libvirtd 9.0",
        )


_ANY_HOST = ("", "0.0.0.0", "::")  # noqa: S104  what a document says


def _in_one_document(needs: Sequence[Need]) -> Iterator[Finding]:
    """Ports, names of interfaces and places in an order that a document gives twice."""
    had: dict[tuple[str, str], list[str]] = {}
    for need in needs:
        host, name = endpoint(need) if need.kind == "PORT" else ("", need.value)
        is_port = need.kind == "PORT" and name.isdecimal() and name.strip("0") != ""
        is_port = is_port or need.kind == "ORDER"
        if is_port or (need.kind == "TAP" and not name.startswith(GENERATED)):
            before = had.setdefault((need.kind, name), [])
            if any(host == one or {host, one} & {*_ANY_HOST} for one in before):
                why, words = f"{name}: given twice in the document", TABLE.kinds[need.kind].words
                yield finding("start-in-use", need.subject, words, why, case="document")
            before.append(host)


def _unknown(asked: list[_Asked]) -> list[Finding]:
    """What is not known, one finding for each reason."""
    found = [
        _not_known(one.need.subject, one.answer.why)
        for one in asked
        if one.answer.state is NeedState.UNKNOWN
    ]
    return list(merged(found))


def _not_known(subject: str, why: str) -> Finding:
    return finding("start-unknown", subject, expected="an answer", observed=f"not known: {why}")


def _ready_text(asked: list[_Asked], uri: str) -> str:
    """What is ready, by its kind, and how much is not."""
    ready = [one.need for one in asked if one.answer.state is NeedState.READY]
    counts = Counter(in_words(need.kind) for need in ready)
    parts = [name if count == 1 else f"{name} x {count}" for name, count in counts.items()]
    return (
        f"would it start here ({uri}): {len(ready)} of {len(asked)} needs are ready: "
        f"{', '.join(parts)}"
    )
