"""CommandOfLibvirt: libvirt is asked which command would start a domain. [I/O]

It checks what it checks at a definition and most of what it checks at a start, and keeps nothing:
no domain is defined, no file is made.

Source: qemuConnectDomainXMLToNative, libvirt 9.0.
"""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.check.start.machine import StartMachine
from homenode.errors import ToolError
from homenode.findings import Finding
from homenode.process import run
from homenode.vm.domain.document import Document

_ASK_S = 60.0
_NOT_ASKED = "Advice from numad is needed"
"""Of placement='auto': numad is asked at a start alone."""


def refusal(machine: StartMachine, document: Document) -> Iterator[Finding]:
    """A finding where libvirt refuses the domain, or does not answer."""
    words = ("domxml-to-native", "--format", "qemu-argv", "--xml", "/dev/stdin")
    try:
        done = run(("virsh", "-q", "-c", machine.uri, *words), _ASK_S, document.to_bytes())
    except ToolError as error:
        yield finding("start-unknown", "the definition", "an answer of libvirt", error.message)
        return
    if done.returncode == 0:
        return
    lines = [line.removeprefix("error: ").strip() for line in done.stderr.splitlines()]
    said = " ".join(line for line in lines if line)
    is_known = "failed to connect" not in said and _NOT_ASKED not in said
    yield finding(
        "refused-by-libvirt" if is_known else "start-unknown",
        "the definition",
        expected=f"libvirt at {machine.uri} to take it",
        observed=said[:400] or "no reason given",
    )
