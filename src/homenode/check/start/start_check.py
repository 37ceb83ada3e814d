"""StartCheck: whether a VM would start on this machine, each need by itself. [I/O]

libvirt is asked last, for the command that would start the domain: its own refusal stands where no
need has named the reason already.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from homenode.catalogue import finding
from homenode.check.start.command_of_libvirt import refusal
from homenode.check.start.libvirt_answers import ASKED_OF_LIBVIRT
from homenode.check.start.machine import StartMachine
from homenode.check.start.needs import Need, NeedAnswer, NeedKind, NeedState, needs_of, unknown
from homenode.check.start.paths import LOOKED_AT
from homenode.errors import HomenodeError
from homenode.findings import Finding, Findings, merged, sourced
from homenode.trusted_path import changeable
from homenode.vm.domain.document import Document
from homenode.vm.hypervisor.connection import is_local

_IDS = {
    "start-file": "IMAGE",
    "start-argument": "RANGE ARGUMENT DRIVER",
    "start-cgroup": "SCHEDULER WEIGHT PARTITION",
    "start-permission": "LABEL OPENED",
    "start-storage": "VOLUME",
    "start-emulator": "EMULATOR CPU SECURITY",
    "start-program": "PROGRAM",
    "start-network": "NETWORK BRIDGE LINK FILTER ADDRESS LISTENER",
    "start-in-use": "PORT TAP NAME",
    "start-memory": "LOCK",
    "start-device": "USB SCSI PCI MEDIATED",
}
FINDING_OF = {NeedKind[name]: found for found, names in _IDS.items() for name in names.split()}
"""The id of what is missing; of paths, start-file."""

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
    asked = [_Asked(need=need, answer=_answer(machine, need)) for need in needs_of(document)]
    found = [*_missing(asked), *_given_twice(asked), *_unknown(asked)]
    emulator = document.root.value("devices/emulator")
    why = None if emulator is None else changeable([Path(emulator)])
    named = {one.id for one in found}
    # A missing function of an SR-IOV network card with a VLAN ends the daemon of libvirt 9.0.
    if named.isdisjoint((*_SAYS_WHY, "start-device")) and is_local(uri):
        if why is not None:
            found.append(_not_known("the definition", f"not tried: {why}, and libvirt runs it"))
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
            one.answer.of or FINDING_OF.get(one.need.kind, "start-file"),
            one.need.subject,
            expected=one.need.kind,
            observed=one.answer.why,
        )
        for one in asked
        if one.answer.state is NeedState.MISSING
    ]


def _given_twice(asked: list[_Asked]) -> Iterator[Finding]:
    """Disks of one image, of which one is written: QEMU's own locks bar the second."""
    disks: dict[str, Need] = {}
    for one in asked:
        need = one.need
        if need.kind not in (NeedKind.IMAGE, NeedKind.BLOCK) or not need.value:
            continue
        first = disks.setdefault(os.path.realpath(need.value), need)
        same = first is not need and first.subject != need.subject
        if same and (first.is_written or need.is_written) and not need.is_shared:
            yield finding(
                "start-in-use",
                need.subject,
                expected="an image that no other disk writes",
                observed=f"{need.value}: {first.subject} has it too",
            )


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
    counts = Counter(need.kind.words for need in ready)
    parts = [name if count == 1 else f"{name} x {count}" for name, count in counts.items()]
    return (
        f"would it start here ({uri}): {len(ready)} of {len(asked)} needs are ready: "
        f"{', '.join(parts)}"
    )
