"""LibvirtBoot: test guests as transient domains with separate names. [I/O]

No command of this module names a domain of the user.
"""

import re
import time
from pathlib import Path

from homenode.check.verify.boot.boot_directory import GuestOutput
from homenode.check.verify.boot.initramfs import refusal_finding, silence_error
from homenode.errors import InputError, ToolError
from homenode.findings import Finding, finding
from homenode.machine.tools.xml_text import parse_xml
from homenode.process import ToolMissingError, ToolTimeoutError, find_program, run

SYSTEM = "qemu:///system"
_ASK_S = 30
_STEP_S = 0.25
_LABEL = re.compile(r"\+(\d{1,10}):\+\d{1,10}\Z", re.ASCII)
_ABOUT_THE_DOCUMENT = ("XML ", "unsupported configuration", "requested operation is not valid")


def find_uri(connect: str | None) -> str | None:
    """Return the URI of a libvirt that answers, else None. connect: URI from the user; raises
    ToolError if that daemon does not answer."""
    uri = connect or SYSTEM
    if find_program("virsh") is None:
        if connect is not None:
            raise ToolMissingError("virsh")
        return None
    try:
        failure = run(("virsh", "-c", uri, "uri"), _ASK_S).failure()
    except ToolTimeoutError as error:
        failure = error.message
    if failure is None:
        return uri
    if connect is not None:
        raise ToolError(
            f"{uri}: libvirt does not answer: {failure}",
            hint="--connect none boots with QEMU directly",
        )
    return None


def offers_kvm(uri: str) -> bool:
    """Return whether this libvirt's QEMU has KVM."""
    words = ("domcapabilities", "--virttype", "kvm", "--arch", "x86_64")
    return run(("virsh", "-c", uri, *words), _ASK_S).returncode == 0


def find_qemu_user(uri: str) -> int | None:
    """Return the number of the user as which this libvirt's QEMU runs; None if unknown."""
    answer = run(("virsh", "-q", "-c", uri, "capabilities"), _ASK_S)
    try:
        return parse_user(answer.stdout) if answer.returncode == 0 else None
    except InputError:
        return None


def parse_user(text: str) -> int | None:
    """Return the user in the base label of libvirt's security driver "dac", "+64055:+64055".

    None for a libvirt of a session, which runs QEMU as the session's user. Raises
    ParseError. Source: docs/formatcaps.html; virSecurityDACGetBaseLabel(), libvirt 9.0.
    """
    for model in parse_xml(text, "capabilities", "virsh capabilities").iterfind("host/secmodel"):
        label = model.findtext("baselabel", "")
        match = _LABEL.match(label.strip())
        if model.findtext("model") == "dac" and match is not None:
            return int(match[1])
    return None


def boot(
    uri: str, document: Path, name: str, console: GuestOutput, limit_s: float, source: str
) -> tuple[Finding, ...]:
    """Start a test guest and wait until it is gone; nothing remains in any case. document: its
    definition. source: for findings. Raises ToolTimeoutError if it has not powered off in time."""
    deadline = time.monotonic() + limit_s
    try:
        result = run(("virsh", "-q", "-c", uri, "create", "--validate", str(document)), limit_s)
        if result.returncode:
            message = " ".join(
                line for line in result.list_messages() if "Failed to create domain" not in line
            )
            return (refusal_finding("libvirt", message, source),)
        while _is_there(uri, name):
            if time.monotonic() > deadline:
                raise silence_error(console.decode_output(), limit_s, source)
            time.sleep(_STEP_S)
        return ()
    finally:
        if _is_there(uri, name):
            run(("virsh", "-q", "-c", uri, "destroy", name), _ASK_S)


def find_daemon_trouble(refusals: tuple[Finding, ...], uri: str) -> tuple[Finding, ...]:
    """Return a finding that replaces an error unrelated to the definition; () if it is.

    libvirt names the part of a document that it rejects. With any other error it cannot start
    guests (no namespaces, no socket), or QEMU failed: then QEMU, run directly, fails too and prints
    more.
    """
    message = next((finding.observed for finding in refusals), None)
    if message is None or message.startswith(_ABOUT_THE_DOCUMENT):
        return ()
    return (could_not_start(message, uri),)


def could_not_start(message: str, uri: str) -> Finding:
    """The finding that the test guest was booted with QEMU directly because libvirt failed."""
    expected = f"libvirt at {uri} to start it"
    return finding("libvirt-could-not-start", "the test guest", expected, message, uri)


def _is_there(uri: str, name: str) -> bool:
    return run(("virsh", "-q", "-c", uri, "domstate", name), _ASK_S).returncode == 0
