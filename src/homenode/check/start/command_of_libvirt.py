"""CommandOfLibvirt: libvirt is asked which command would start a domain. [I/O]

It checks what it checks at a definition and most of what it checks at a start, and keeps nothing:
no domain is defined, no file is made.

Source: qemuConnectDomainXMLToNative, libvirt 9.0.
"""

import itertools
import shlex
from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.check.start.libvirt_answers import properties, started_by
from homenode.check.start.machine import StartMachine
from homenode.check.start.needs import NeedState
from homenode.errors import ToolError
from homenode.findings import Finding
from homenode.process import run
from homenode.vm.domain.controllers import QEMU_NAMESPACE, argument_properties, qemu_arguments
from homenode.vm.domain.document import Document

_ASK_S = 60.0
_NOT_ASKED = "Advice from numad is needed"
"""Of placement='auto': numad is asked at a start alone."""


def refusal(machine: StartMachine, document: Document) -> Iterator[Finding]:
    """A finding where libvirt refuses the domain, or does not answer."""
    ask = ("domxml-to-native", "--format", "qemu-argv", "--xml", "/dev/stdin")
    try:
        done = run(("virsh", "-q", "-c", machine.uri, *ask), _ASK_S, document.to_bytes())
    except ToolError as error:
        yield finding("start-unknown", "the definition", "an answer of libvirt", error.message)
        return
    if done.returncode == 0:
        try:
            words = shlex.split(done.stdout.replace("\\\n", " "))
        except ValueError:
            return
        yield from _collisions(document, words)
        yield from _of_qemu(machine, document, words)
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


_OF_MACHINE = frozenset({"isa", "sata", "ide", "usb-bus", "i2c", "sysbus"})
"""Buses that a machine has without a device."""

_OF_Q35 = {("pcie.0", "0"), ("pcie.0", "1f"), ("pcie.0", "1f.2"), ("pcie.0", "1f.3")}


def _of_qemu(machine: StartMachine, document: Document, words: list[str]) -> Iterator[Finding]:
    """What QEMU would refuse of libvirt's command: it says itself which devices with which
    properties and which displays it has."""
    known = (machine.ask_qemu("-display", "help") or "").split()
    for option, value in itertools.pairwise(words):
        said = argument_properties(value)
        if option == "-display" and known and said.get("") not in (*known, "none"):
            yield _refused(f"-display {said.get('')}", "this QEMU has no such display")
        driver = said.get("driver", "")
        is_plain = option == "-device" and driver.isascii() and not driver.startswith("-")
        changed = _overridden(document, said.get("id", "")) if is_plain else {}
        if is_plain and (changed or driver.rpartition("-gl")[1]):
            found = properties(machine.ask_qemu("-device", f"{driver},help"), driver, changed)
            if found.state is NeedState.MISSING:
                yield _refused(f"-device {driver}", found.why)
            elif changed:
                why = "not known: only a start shows whether QEMU takes the values"
                yield finding("start-unknown", "<qemu:override>", "an answer", why)
        if (program := started_by(option, value)) is not None and _NO_PROGRAMS in " ".join(words):
            yield _refused(option, f"{program}: QEMU may start no program: spawn=deny")
    if "-initrd" in words and "-kernel" not in words:
        yield _refused("<initrd>", "there is no <kernel>")


_NO_PROGRAMS = "spawn=deny"  # of -sandbox: seccomp_sandbox of libvirt's qemu.conf


def _refused(subject: str, why: str) -> Finding:
    return finding("start-argument", subject, "an argument that QEMU takes", why)


_NAMES = {"interface": "net", "hostdev": "hostdev", "video": "video", "sound": "sound"}


def _overridden(document: Document, name: str) -> dict[str, str]:
    """Properties that <qemu:override> sets of a device. name: libvirt's own of it, which stands in
    its command in place of a user's."""
    space, aliases = f"{{{QEMU_NAMESPACE}}}", {name}
    for tag, start in _NAMES.items():
        devices = document.root.all(f"devices/{tag}")
        named = {f"{start}{at}": one.value("alias/@name") for at, one in enumerate(devices)}
        aliases.add(named.get(name) or name)
    for one in document.root.all("devices/controller"):
        if name == f"pci.{one.get('index')}" and one.get("type") == "pci":
            aliases.add(one.value("alias/@name") or "")
    override = document.root.child(f"{space}override")
    return {
        one.get("name") or "": one.get("value") or ""
        for device in (() if override is None else override.children)
        if device.get("alias") in aliases
        for one in device.walk()
        if one.name == f"{space}property" and one.get("type") != "remove"
    }


def _collisions(document: Document, words: list[str]) -> Iterator[Finding]:
    """What devices of <qemu:commandline> share with those that libvirt makes."""
    own = [one.get("value") or "" for one in qemu_arguments(document) if one.name.endswith("arg")]
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
        elif bus and not {bus, place[0]} & {*ids, *_OF_MACHINE, "pcie.0", "pci.0"}:
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
