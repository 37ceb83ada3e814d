"""CommandOfLibvirt: libvirt is asked which command would start a domain. [I/O]

It checks what it checks at a definition and most of what it checks at a start, and keeps nothing:
no domain is defined, no file is made. It makes a tap device for each interface, and runs the script
of one: a document goes to it without its scripts.

Source: qemuConnectDomainXMLToNative, libvirt 9.0.
"""

import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path

from homenode.catalogue import finding
from homenode.check.start.libvirt_answers import known_kind, options_of, started_by
from homenode.check.start.machine import StartMachine
from homenode.check.start.needs import NeedState, elements
from homenode.check.start.rehearsal import rehearsal
from homenode.errors import ToolError
from homenode.findings import Finding
from homenode.process import run
from homenode.vm.domain.controllers import argument_properties
from homenode.vm.domain.document import Document
from homenode.vm.domain.edits import removed

_ASK_S = 60.0
_NOT_ASKED = "Advice from numad is needed"
"""Of placement='auto': numad is asked at a start alone."""


def refusal(machine: StartMachine, document: Document) -> Iterator[Finding]:
    """A finding where libvirt refuses the domain, or does not answer."""
    ask = ("domxml-to-native", "--format", "qemu-argv", "--xml", "/dev/stdin")
    asked = removed(document, elements(document.root, "devices/interface/script"))
    try:
        done = run(("virsh", "-q", "-c", machine.uri, *ask), _ASK_S, asked.to_bytes())
    except ToolError as error:
        yield finding("start-unknown", "the definition", "an answer of libvirt", error.message)
        return
    if done.returncode == 0:
        try:
            words = shlex.split(done.stdout.replace("\\\n", " "))
        except ValueError:
            return
        yield from _of_qemu(machine, words)
        yield from rehearsal(machine, document, words)
        return
    said = " ".join(done.complaints())
    is_known = "failed to connect" not in said and _NOT_ASKED not in said
    yield finding(
        "refused-by-libvirt" if is_known else "start-unknown",
        "the definition",
        expected=f"libvirt at {machine.uri} to take it",
        observed=said[:400] or "no reason given",
    )


_NO_PROGRAMS = "spawn=deny"  # of -sandbox: seccomp_sandbox of libvirt's qemu.conf


def _of_qemu(machine: StartMachine, words: list[str]) -> Iterator[Finding]:
    """What QEMU would refuse that no rehearsal shows: displays, devices that need one, programs."""
    options = options_of(machine)
    for option in words:
        if options and option[:1] == "-" and option[1:].islower() and option[1:] not in options:
            yield _refused(option, "this QEMU has no such option")
    for option, value in itertools.pairwise(words):
        said = argument_properties(value)
        kind = said.get("driver") or said.get("type") or said.get("") or ""
        is_gl = option == "-device" and kind.rpartition("-gl")[1]
        if is_gl or option in ("-audiodev", "-chardev", "-display"):
            found = known_kind(machine, option, kind)
            if found.state is NeedState.MISSING:
                yield _refused(option, found.why)
        folder = Path(said.get("dir", "/"), "ca-cert.pem")
        if "tls-creds-x509" in (said.get("qom-type"), said.get("")) and not folder.exists():
            yield _refused("tls='yes'", f"{folder}: there is none")
        if (program := started_by(option, value)) is not None and _NO_PROGRAMS in " ".join(words):
            yield _refused(option, f"{program}: QEMU may start no program: spawn=deny")


def _refused(subject: str, why: str) -> Finding:
    return finding("start-argument", subject, "an argument that QEMU takes", why)
