"""TrialDefinition: libvirt is asked to define a copy of a domain, and to forget it at once. [I/O]

The copy has a name and a UUID of its own. One virsh does both, so that where homenode is killed it
still ends its list; what a killed virsh or a lost daemon left is removed by the next check.
"""

import os
import re
import uuid
from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.check.start.machine import StartMachine
from homenode.errors import HomenodeError, ToolError
from homenode.findings import Finding
from homenode.process import run
from homenode.vm.domain.copy import copy_domain
from homenode.vm.domain.document import Document

_NAME = "homenode-start-"
_OURS = re.compile(rf"{_NAME}(\d{{1,10}})-[0-9a-f]{{12}}\Z", re.ASCII)
_ASK_S = 60.0
_OF_VIRSH = ("Failed to define domain", "Failed to undefine domain", "failed to get domain")


def refusal(machine: StartMachine, document: Document) -> Iterator[Finding]:
    """A finding where libvirt refuses the definition, or does not answer."""
    forget_abandoned(machine)
    name = f"{_NAME}{os.getpid()}-{uuid.uuid4().hex[:12]}"
    try:
        copy = copy_domain(document.to_bytes(), name)
    except HomenodeError as error:
        yield finding("start-unknown", "the definition", "a copy of it", str(error))
        return
    script = f"define --file /dev/stdin; undefine --keep-nvram {name}"
    try:
        done = run(("virsh", "-q", "-c", machine.uri, script), _ASK_S, copy)
    except ToolError as error:
        yield finding("start-unknown", "the definition", "an answer of libvirt", error.message)
        return
    finally:
        _forget(machine, name)
    if done.returncode == 0:
        return
    lines = [line.removeprefix("error: ").strip() for line in done.stderr.splitlines()]
    said = " ".join(line for line in lines if line and not line.startswith(_OF_VIRSH))
    known = not any("failed to connect" in line for line in lines)
    yield finding(
        "refused-by-libvirt" if known else "start-unknown",
        "the definition",
        expected=f"libvirt at {machine.uri} to take it",
        observed=said[:400] or "no reason given",
    )


def forget_abandoned(machine: StartMachine) -> None:
    """Remove copies of processes that have ended."""
    done = machine.virsh("list", "--all", "--name")
    for line in "" if done is None else done.stdout.splitlines():
        match = _OURS.match(line.strip())
        if match is not None and not os.path.isdir(f"/proc/{match[1]}"):  # noqa: PTH112
            _forget(machine, line.strip())


def _forget(machine: StartMachine, name: str) -> None:
    """Where it is still there."""
    try:
        if run(("virsh", "-q", "-c", machine.uri, "domuuid", name), _ASK_S).returncode == 0:
            run(("virsh", "-q", "-c", machine.uri, "undefine", "--keep-nvram", name), _ASK_S)
    except ToolError:
        return
