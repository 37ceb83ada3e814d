"""Rehearsal: QEMU makes the VM's machine without anything of the host's, and ends at once. [I/O]

Its arguments are those that libvirt would give it. Machine, CPU, memory and devices stay as they
are; images, sockets, networks, displays and the host's devices are replaced by what QEMU makes of
nothing. So QEMU itself judges each value that it is given. It runs as libvirt's QEMU user, may
start no program, and no guest instruction runs.

Source: qemu(1) and qapi of QEMU 7.2; what libvirt 9.0 and 11.3 print for qemu-argv.
"""

import os
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from msgspec import json, toml

from homenode.catalogue import finding
from homenode.check.start.images import ImageHead
from homenode.check.start.machine import IDLE_S, StartMachine
from homenode.check.start.qemu_user import QemuUser
from homenode.errors import InputError, ToolError
from homenode.findings import Finding
from homenode.host_files import HostFile
from homenode.input_files import package_text, read_kernel_file
from homenode.json_text import NotJsonError, decode_json
from homenode.process import Completed, run
from homenode.vm.domain.controllers import QEMU_NAMESPACE, argument_properties, qemu_arguments
from homenode.vm.domain.document import Document, Element
from homenode.vm.targets.qemu_command import size_of

_ASK_S = 60.0
_NOBODY = 65534
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_OWN_BYTES, _VCPU_BYTES = 6 << 30, 160 << 20
"""Of QEMU's address space beside the guest's memory. QEMU 7.2 with TCG took 1.3 GiB and 19 MiB a
vCPU on two PUs; where PUs are many, each thread has an arena of 128 MiB."""
_END = '{"execute": "qmp_capabilities"}\n{"execute": "quit"}\n'

_TABLE = toml.decode(package_text("check", "start", "rehearsal.toml"))
JUDGED = frozenset(_TABLE["judged"])
_HOSTS_DEVICES, _OBJECTS = tuple(_TABLE["hosts_devices"]), _TABLE["objects"]
_OF_NODES = ("host-nodes", "policy")
_OF_MEMORY, _OF_A_FILE = ("size", "share"), ("align", "pmem", "readonly")

_FILES = "dumpdtb|dtb|kernel|initrd|firmware|shim|rr|rrfile|splash"
_FILE = re.compile(rf"(?:^|,)(?:{_FILES})=(?:[^,]|,,)*")
_SIZE = 512 << 10  # of an image that is not there yet, or that lies within another
_FLASH = {**dict.fromkeys(("aarch64", "armv7l"), 64 << 20), "riscv64": 32 << 20}
"""Of a firmware's, where the machine takes no other. Source: hw/arm/virt.c, hw/riscv/virt.c."""
_SECTOR = 512
_OF_BLOCK = ("node-name", "read-only", "discard", "detect-zeroes")
_ABSENT = ("romfile", "prealloc", "pcap", "sdrfile", "frudatafile")

_Said = Mapping[str, object]


def rehearsal(machine: StartMachine, document: Document, words: list[str]) -> Iterator[Finding]:
    """A finding where QEMU refuses its arguments, or is not asked. words: of libvirt's command."""
    user = machine.user or QemuUser(_NOBODY, "nobody", frozenset())
    arguments = Rehearsed(document, user, words)
    limit = read_kernel_file("/proc/sys/vm/overcommit_memory")
    why = None
    if machine.emulator is None:
        why = "QEMU is not asked: no emulator that libvirt names, and that only root can change"
    elif arguments.is_confidential or limit is None or limit.strip() == b"2":
        why = "QEMU is not asked: its memory is not to be had without the VM's own backing"
    if why is None:
        try:
            done = _asked(machine, *arguments.kept, most_bytes=arguments.address_bytes())
        except ToolError as error:
            why = f"QEMU is not asked: {error.message}"
        else:
            if done.returncode:
                yield finding(
                    "start-argument",
                    "the machine",
                    expected="a machine that QEMU makes",
                    observed=_reason(machine, done),
                )
            why = ", ".join(arguments.unasked) and f"without {', '.join(arguments.unasked)}"
            why = why and f"QEMU is asked {why}"
    if why:
        yield finding("start-unknown", "the machine", "an answer", f"not known: {why}")


def _asked(
    machine: StartMachine,
    *words: str,
    kept_open: Sequence[int] = (),
    limit_s: float = _ASK_S,
    most_bytes: int = _OWN_BYTES,
) -> Completed:
    """QEMU, as the VM's user, with these arguments and nothing else; it ends at once. most_bytes:
    of its address space."""
    user = machine.user or QemuUser(_NOBODY, "nobody", frozenset())
    ours = ("-qmp", "stdio", "-S", "-display", "none", "-sandbox", _SANDBOX)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    limited = ("prlimit", f"--as={most}", *_as_user(user))
    return run(
        (*limited, machine.emulator or "", *words, *ours), limit_s, _END, kept_open=kept_open
    )


def _asked_idly(machine: StartMachine, *words: str, kept_open: Sequence[int] = ()) -> Completed:
    """QEMU without a machine. All that is asked of it so for one VM shares one limit of time."""
    left_s = machine.idle_until_s - time.monotonic()
    if left_s <= 0:
        raise ToolError(f"{words[-1][:200]}: QEMU was asked about others for {IDLE_S:.0f} s")
    return _asked(machine, *_IDLE, *words, kept_open=kept_open, limit_s=left_s)


def _reason(machine: StartMachine, done: Completed) -> str:
    own = f"{Path(machine.emulator or '').name}: "
    lines = [line for line in done.stderr.splitlines() if "warning: " not in line]
    errors = [line.removeprefix(own) for line in lines if line.startswith(own)]
    said = " ".join(errors or lines)
    return said[:400] or done.failure() or "no reason given"


_IDLE = ("-machine", "none", "-nodefaults")
_NO_DRIVER = "none-such"


def lacks_driver(machine: StartMachine, name: str) -> bool:
    """Whether QEMU says the same of a block driver as of one that cannot be."""
    said = []
    for one in (name, _NO_DRIVER):
        done = _asked_idly(machine, "-drive", f"driver={one},if=none")
        said.append(done.stderr.strip().rpartition("\n")[2].replace(one, ""))
    return said[0] == said[1]


_BACKED = ("qcow2", "qcow", "qed")
_ALONE = (*_BACKED, "vdi", "vpc", "dmg", "bochs", "cloop")
"""Formats whose images name no other file but a backing one, which is not opened. A vmdk does."""


def refused_image(
    machine: StartMachine, file: HostFile, format: str, head: ImageHead
) -> str | None:
    """Why QEMU does not open an image, of which it gets a descriptor to read from; None where it
    does, or is not asked."""
    if format not in _ALONE or head.data_files or head.is_encrypted or machine.emulator is None:
        return None
    kind = "host_device" if file.is_block else "file"
    given = {"driver": kind, "filename": "/dev/fdset/1", "locking": "off"}
    below = {"backing": None} if format in _BACKED else {}
    node = _json({"driver": format, "node-name": "i", "read-only": True, **below, "file": given})
    words = ("-add-fd", f"fd={file.descriptor},set=1", "-blockdev", node)
    done = _asked_idly(machine, *words, kept_open=(file.descriptor,))
    said = _reason(machine, done).removeprefix(f"-blockdev {node}: ")
    return f"no {format} that QEMU opens: {said}" if done.returncode else None


def _as_user(user: QemuUser) -> tuple[str, ...]:
    """What makes a program run as another user, where we are root."""
    if os.geteuid() != 0:
        return ()
    groups = ",".join(map(str, sorted(user.groups)))
    ids = (f"--reuid={user.number}", f"--regid={user.number}")
    listed = f"--groups={groups}" if groups else "--clear-groups"
    return ("setpriv", *ids, listed, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs")


class Rehearsed:
    """kept: what QEMU is given. unasked: arguments of the document's own that it is not."""

    def __init__(self, document: Document, user: QemuUser, words: list[str]) -> None:
        self.document, self.user = document, user
        self.kept: list[str] = []
        self.is_confidential = False
        self.unasked: list[str] = []
        self._own = {one.get("value") for one in qemu_arguments(document)}
        self._left_out: set[str] = set()
        self._hubs = 0
        nics = (n for n in document.root.all("devices/interface") if n.get("type") != "hostdev")
        self._nics = {f"net{at}": _of_nic(nic) for at, nic in enumerate(nics)}
        for at, option in enumerate(words):
            if not option.startswith("-"):
                continue
            value = words[at + 1] if at + 1 < len(words) else ""
            value = "" if value.startswith("-") else value
            if option in _REPLACED:
                said = {"file": value} if option in _WHOLE else _said(value)
                text = _REPLACED[option](self, said, value)
                self._left_out |= set() if text else {option}
                self.kept += [option, text] if text else []
            elif option in JUDGED or (option == "-append" and not self._left_out & {"-kernel"}):
                # A value too many is an image to QEMU; one too few, the next option is the value.
                value = "" if option.startswith("-no") else _without_files(value)
                self.kept += [option, value] if value else [option] * option.startswith("-no")
        self.kept += self._limits()

    def _leave_out(self, option: str, value: str, id: object = None) -> str:
        self._left_out |= set() if id is None else {str(id)}
        if value in self._own:
            self.unasked.append(f"{option} {value[:120]}")
        return ""

    def _global(self, said: _Said, value: str) -> str:
        return self._leave_out("-global", value) if _names_file(value) else value

    def _set(self, said: _Said, value: str) -> str:
        """Only of a device that QEMU is given: of others it could make files of what stands for
        them."""
        group, _, rest = value.partition(".")
        device, _, name = rest.partition(".")
        is_asked = group == "device" and device not in self._left_out and name[:6] != "driver"
        return value if is_asked and not _names_file(name) else self._leave_out("-set", value)

    def address_bytes(self) -> int:
        """The most of its address space that QEMU can need."""
        total = _OWN_BYTES
        for option, value in pairwise(self.kept):
            said = argument_properties(value)
            if option == "-smp":
                counts = [int(one) for one in said.values() if _INT.match(one)]
                total += _VCPU_BYTES * max((0, *counts))
            elif option == "-device":  # of video memory
                sizes = (str(one) for name, one in said.items() if name.endswith("_mb"))
                total += sum(int(one) << 20 for one in sizes if _INT.match(one))
            elif option in ("-m", "-object"):
                size = said.get("size") or (said.get("", "") if option == "-m" else "0")
                with suppress(InputError):  # which QEMU refuses itself
                    total += size_of(size, option, default_unit=1 << 20 if option == "-m" else 1)
        return total

    def _machine(self, said: _Said, value: str) -> str:
        used = {str(one) for one in said.values()}
        self.is_confidential = not used.isdisjoint(self._left_out) or "memory-encryption" in said
        return _without_files(value)

    def _block(self, said: _Said, value: str) -> str:
        """An image is a disk of its file's size: that of a firmware's must fit. What is raw lies
        upon it as it is."""
        if said.get("driver") == "raw" and isinstance(said.get("file"), str):
            return value
        is_flash = "pflash" in str(said.get("node-name"))
        root = self.document.root
        arch = root.value("os/type/@arch") if is_flash else None
        size, path = _FLASH.get(arch or "", _SIZE), Path(str(said.get("filename", "")))
        if str(path) == root.value("os/nvram") and not path.exists():
            path = Path(root.value("os/nvram/@template") or path)  # of which libvirt makes it
        with suppress(OSError):
            size = path.stat().st_size if path.is_file() else size
        made = {name: said[name] for name in _OF_BLOCK if name in said}
        whole = -(-size // _SECTOR) * _SECTOR
        return _json({**made, "driver": "null-co", "size": whole, "read-zeroes": True})

    def _drive(self, said: _Said, value: str) -> str:
        wanted = (name for name in ("if", "id", "index", "unit") if name in said)
        named = (f"{name}={_text(said[name])}" for name in wanted)
        return ",".join(("driver=null-co", f"size={_SIZE}", *named))

    def _object(self, said: _Said, value: str) -> str:
        kind = str(said.get("qom-type") or said.get(""))
        made = _OBJECTS.get(kind)
        if made is None:
            return self._leave_out("-object", value, said.get("id"))
        if not made:
            return value
        is_file = made == "memory-backend-file"
        by_user = () if value.startswith("{") else _OF_NODES  # libvirt has looked at its own
        wanted = ("id", *_OF_MEMORY, *by_user, *(_OF_A_FILE if is_file else ()))
        parts = [f"{name}={_text(said[name])}" for name in wanted if name in said]
        return ",".join((made, *parts, *(("mem-path=/dev/zero",) if is_file else ())))

    def _netdev(self, said: _Said, value: str) -> str:
        self._hubs += 1
        return f"hubport,hubid={self._hubs}{_id(said)}"

    def _device(self, said: _Said, value: str) -> str:
        driver = str(said.get("driver") or said.get(""))
        used = {str(one) for one in said.values()}
        is_hosts = driver.startswith(_HOSTS_DEVICES) or driver.rpartition("-gl")[1]
        is_plain = value[:1] != "{"
        if is_hosts or not used.isdisjoint(self._left_out) or (is_plain and _names_file(value)):
            return self._leave_out("-device", value, said.get("id"))
        if is_plain:
            return value
        name = str(said.get("id", ""))
        changed = {**self._nics.get(name, {}), **overridden(self.document, name)}
        made = {**said, **{name: one for name, one in changed.items() if one is not None}}
        gone = {*_ABSENT, *(name for name, one in changed.items() if one is None)}
        if self._may_read(made.get("romfile")):
            gone.discard("romfile")
        return _json({name: one for name, one in made.items() if name not in gone})

    def _readable(self, said: _Said, value: str) -> str:
        """libvirt gives QEMU's user the files of a domain: those that it cannot read until then are
        left out."""
        read = (said[name] for name in ("file", "data", "path") if name in said)
        return value if all(map(self._may_read, read)) else ""

    def _may_read(self, file: object) -> bool:
        path = Path(str(file))
        try:
            is_ours = self.user.may(path, 4) and self.user.barred(str(path)) is None
        except OSError:
            return False
        return is_ours and path.is_file()

    def _limits(self) -> Iterator[str]:
        """The limits of each disk, which libvirt sets by QMP, as groups that QEMU judges."""
        for at, tune in enumerate(self.document.root.all("devices/disk/iotune")):
            matches = ((_LIMIT.match(one.name), one.text.strip()) for one in tune.children)
            limits = {
                f"{_RATE[m[2]]}-{m[1]}{m[3].replace('_', '-')}": int(text)
                for m, text in matches
                if m is not None and _INT.match(text)
            }
            yield "-object"
            yield _json({"qom-type": "throttle-group", "id": f"limits{at}", "limits": limits})


def _names_file(text: str) -> bool:
    return any(name in text for name in _ABSENT)


_LIMIT = re.compile(r"(total|read|write)_(bytes|iops)_sec(|_max|_max_length)\Z", re.ASCII)
_RATE = {"bytes": "bps", "iops": "iops"}
_OF_NIC: dict[str, str] = _TABLE["of_nic"]


def _of_nic(nic: Element) -> dict[str, int]:
    """What qemu-argv leaves out: it makes each interface one of type ethernet."""
    said = {name: nic.value(path) or "" for name, path in _OF_NIC.items()}
    is_virtio = (nic.value("model/@type") or "").startswith("virtio")
    names = _OF_NIC if is_virtio else ("acpi-index",)
    return {name: int(said[name]) for name in names if _INT.match(said[name])}


def _said(value: str) -> _Said:
    """The properties of an argument, as JSON has them where it is JSON."""
    if not value.startswith("{"):
        return argument_properties(value)
    try:
        return decode_json(value, dict[str, object])
    except NotJsonError:
        return {}


def _without_files(value: str) -> str:
    """Without the properties of a machine and of -icount that QEMU reads from files or writes.

    >>> _without_files("q35,dumpdtb=/x,usb=off")
    'q35,usb=off'
    """
    return _FILE.sub("", value).removeprefix(",")


def _json(value: object) -> str:
    return json.encode(value).decode()


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value).replace(",", ",,")


def _id(said: _Said) -> str:
    return f",id={_text(said['id'])}" if "id" in said else ""


_WHOLE = ("-kernel", "-initrd", "-dtb", "-bios")
_REPLACED: dict[str, Callable[[Rehearsed, _Said, str], str]] = {
    "-machine": Rehearsed._machine,
    "-blockdev": Rehearsed._block,
    "-drive": Rehearsed._drive,
    "-object": Rehearsed._object,
    "-netdev": Rehearsed._netdev,
    "-device": Rehearsed._device,
    "-global": Rehearsed._global,
    "-set": Rehearsed._set,
    "-chardev": lambda _, said, value: f"null{_id(said)}",
    "-fsdev": lambda _, said, value: f"synth{_id(said)}",
    "-vnc": lambda _, said, value: "none",
    "-audiodev": lambda _, said, value: f"none{_id(said)}",
    **dict.fromkeys((*_WHOLE, "-acpitable", "-smbios", "-fw_cfg"), Rehearsed._readable),
}

_NAMES = {"interface": "net", "hostdev": "hostdev", "video": "video", "sound": "sound"}
_INT = re.compile(r"-?\d{1,20}\Z", re.ASCII)
_TYPES: dict[str, Callable[[str], object]] = {
    "bool": lambda text: text == "true",
    **dict.fromkeys(("signed", "unsigned"), lambda text: int(text) if _INT.match(text) else text),
}


def overridden(document: Document, name: str) -> dict[str, object]:
    """Properties that <qemu:override> sets of a device, which qemu-argv has not; None = it takes
    them out. name: libvirt's own of the device, which stands there in place of a user's."""
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
        one.get("name") or "": None
        if one.get("type") == "remove"
        else _TYPES.get(one.get("type") or "", str)(one.get("value") or "0")
        for device in (() if override is None else override.children)
        if device.get("alias") in aliases
        for one in device.walk()
        if one.name == f"{space}property"
    }
