"""CommandOfLibvirt: libvirt is asked which command would start a domain. [I/O]

It checks what it checks at a definition and most of what it checks at a start, and keeps nothing:
no domain is defined, no file is made.

Source: qemuConnectDomainXMLToNative, libvirt 9.0.
"""

import itertools
import shlex
from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.check.start.machine import StartMachine
from homenode.check.start.needs import argument_properties
from homenode.errors import ToolError
from homenode.findings import Finding
from homenode.process import run
from homenode.vm.domain.controllers import qemu_arguments
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
        yield from _collisions(document, done.stdout)
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


_OF_MACHINE = frozenset({"pcie", "pci", "isa", "sata", "ide", "usb-bus", "i2c", "sysbus"})
"""Buses that a machine has without a device."""

_OF_Q35 = {("pcie.0", "0"), ("pcie.0", "1f"), ("pcie.0", "1f.2"), ("pcie.0", "1f.3")}


def _collisions(document: Document, command: str) -> Iterator[Finding]:
    """What devices of <qemu:commandline> share with those that libvirt makes."""
    own = [one.get("value") or "" for one in qemu_arguments(document) if one.name.endswith("arg")]
    if not own:
        return
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError:
        return
    devices = [argument_properties(b) for a, b in itertools.pairwise(words) if a == "-device"]
    ids = [one["id"] for one in devices if "id" in one]
    places = [(one["bus"], _slot(one["addr"])) for one in devices if "addr" in one and "bus" in one]
    if "q35" in (document.root.value("os/type/@machine") or ""):
        places += _OF_Q35
    for option, value in itertools.pairwise(own):
        said = argument_properties(value) if option == "-device" else {}
        place = (said.get("bus", ""), _slot(said.get("addr", "")))
        bus = place[0].partition(".")[0]
        why = None
        if ids.count(said.get("id", "")) > 1:
            why = f"id={said['id']}: another device has it"
        elif place[1] and places.count(place) > 1:
            why = f"{place[0]}, {place[1]}: another device is there"
        elif bus and bus not in _OF_MACHINE and bus not in ids:
            why = f"bus={place[0]}: there is none"
        if why is not None:
            yield finding("start-argument", option, "a device of its own", why)


def _slot(text: str) -> str:
    """An address as QEMU counts it: "0x1f.0" is "1f".

    >>> _slot("0x1f.0"), _slot("1f.2"), _slot("")
    ('1f', '1f.2', '')
    """
    slot, _, function = text.removeprefix("0x").partition(".")
    function = function.removeprefix("0x")
    return f"{slot}.{function}" if function not in ("", "0") else slot
