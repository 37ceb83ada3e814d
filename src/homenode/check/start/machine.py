"""StartMachine: this machine's libvirt, and the QEMU that it names, asked about a domain. [I/O]"""

import time
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import cast

from homenode.check.start.needs import Need, NeedAnswer
from homenode.check.start.qemu_user import QemuUser, user_number
from homenode.check.verify.boot.libvirt import user_of_capabilities
from homenode.errors import ToolError
from homenode.machine.tools.xml_text import parse_xml
from homenode.process import Completed, run
from homenode.trusted_path import changeable
from homenode.vm.domain.document import Document
from homenode.vm.hypervisor.connection import is_local

_ASK_S = 30.0
IDLE_S = 60.0
"""For all that QEMU is asked without a machine, as about each image of a VM."""


class StartMachine:
    """This machine and one libvirt of it. What is asked twice is asked once."""

    def __init__(self, uri: str, document: Document) -> None:
        self.uri = uri
        self.document = document
        self.said: dict[tuple[str, ...], Completed | None] = {}

    def virsh(self, *words: str) -> Completed | None:
        """None where no libvirt answers."""
        if words not in self.said:
            try:
                self.said[words] = run(("virsh", "-q", "-c", self.uri, *words), _ASK_S)
            except ToolError:
                self.said[words] = None
        done = self.said[words]
        if done is not None and done.returncode and "failed to connect" in done.stderr:
            return None
        return done

    def names(self, *words: str) -> frozenset[str] | None:
        """The lines of a list of names."""
        done = self.virsh(*words)
        if done is None or done.returncode:
            return None
        return frozenset(line.strip() for line in done.stdout.splitlines() if line.strip())

    @cached_property
    def idle_until_s(self) -> float:
        """Of time.monotonic(): when IDLE_S are over, from the first question on."""
        return time.monotonic() + IDLE_S

    @property
    def arch(self) -> str:
        return self.document.root.value("os/type/@arch") or "x86_64"

    @cached_property
    def user(self) -> QemuUser | None:
        """The user of this VM's QEMU, where that is known and another than root."""
        done = self.virsh("capabilities")
        if done is None or done.returncode:
            return None
        for label in self.document.root.all("seclabel"):
            if label.get("model") == "dac" and label.get("type") == "static":
                number = user_number((label.value("label") or "").partition(":")[0])
                return QemuUser.of_number(number)
        return QemuUser.of_number(user_of_capabilities(done.stdout))

    @cached_property
    def emulators(self) -> frozenset[str]:
        """Those that libvirt itself names; no other program of a document is run."""
        done = self.virsh("capabilities")
        if done is None or done.returncode:
            return frozenset()
        root = parse_xml(done.stdout, "capabilities", "virsh capabilities")
        return frozenset(one.text for one in root.iterfind("guest/arch/emulator") if one.text)

    @cached_property
    def barred(self) -> str | None:
        """Why libvirt is asked nothing of the document's emulator, which it would run; None = it is
        asked."""
        given = self.document.root.at("devices/emulator")
        if given is None or not is_local(self.uri):
            return None
        # libvirt reads the text of elements inside as well.
        why = (
            "not a path alone" if given.children else changeable([Path(given.text.strip() or "/")])
        )
        return None if why is None else f"not tried: {why}, and libvirt runs it"

    @cached_property
    def domain_capabilities(self) -> Completed | None:
        """What the document's emulator can do with its accelerator and machine type."""
        root = self.document.root
        if self.barred is not None:
            return None
        words = ["--virttype", root.get("type") or "kvm"]
        for option, value in (
            ("--emulatorbin", root.value("devices/emulator")),
            ("--arch", root.value("os/type/@arch")),
            ("--machine", root.value("os/type/@machine")),
        ):
            if value is not None:
                words += [option, value]
        return self.virsh("domcapabilities", *words)

    @cached_property
    def emulator(self) -> str | None:
        """The document's; None where it is none of libvirt's own, or others can change it."""
        done = self.domain_capabilities
        if done is None or done.returncode:
            return None
        path = parse_xml(done.stdout, "domainCapabilities", "virsh").findtext("path") or ""
        return path if path in self.emulators and changeable([Path(path)]) is None else None

    def ask_qemu(self, *words: str) -> str | None:
        """What the emulator prints of itself; None where it is not asked."""
        return None if self.emulator is None else _printed(self.emulator, words)


@cache
def _printed(path: str, words: tuple[str, ...]) -> str:
    idle = () if words == ("-help",) else ("-machine", "none", "-nodefaults", "-display", "none")
    asked = run((path, *idle, *words), _ASK_S)
    return asked.stdout if asked.returncode == 0 else ""


Answer = Callable[[StartMachine, Need], NeedAnswer]
"""What the machine says of a need of one kind."""


def by_kind(*named: Answer, **others: Answer) -> dict[str, Answer]:
    """Functions by the kind of need that they answer: `_image` answers IMAGE."""
    return {cast(FunctionType, one).__name__[1:].upper(): one for one in named} | others
