"""Answers of libvirt and of its QEMU to the needs of a VM. [I/O]"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from homenode.check.start.machine import StartMachine
from homenode.check.start.needs import (
    READY,
    Need,
    NeedAnswer,
    NeedKind,
    NeedState,
    missing,
    unknown,
)
from homenode.check.start.paths import enterable, is_link, kernel_text, program, stat_of
from homenode.check.start.qemu_user import user_number
from homenode.check.verify.boot.libvirt import user_of_capabilities
from homenode.machine.tools.xml_text import parse_xml
from homenode.vm.domain.controllers import argument_properties, qemu_arguments

_DRIVER = re.compile(r"[A-Za-z0-9_.+-]{1,64}\Z", re.ASCII)


class _Kind(NamedTuple):
    """What libvirt starts and stops. listing, start: the commands of virsh."""

    what: str
    listing: str
    start: str


_POOL = _Kind("pool", "pool-list", "virsh pool-start")
_NETWORK = _Kind("network", "net-list", "virsh net-start")


def _unless_active(machine: StartMachine, kind: _Kind, name: str) -> NeedAnswer | None:
    """Why a pool or a network is not in use; None where it is."""
    active = machine.names(kind.listing, "--name")
    known = machine.names(kind.listing, "--all", "--name")
    if active is None or known is None:
        return unknown(f"{kind.what} {name}: libvirt at {machine.uri} does not say")
    if name in active:
        return None
    why = f"not active: {kind.start}" if name in known else "there is none of that name"
    return missing(f"{kind.what} {name}: {why}")


def _volume(machine: StartMachine, need: Need) -> NeedAnswer:
    if (inactive := _unless_active(machine, _POOL, need.value)) is not None:
        return inactive
    done = machine.virsh("vol-path", "--pool", need.value, "--vol", need.detail)
    if done is None or done.returncode:
        return missing(f"volume {need.detail} of pool {need.value}: there is none")
    path = done.stdout.strip()
    found = stat_of(path)
    return READY if isinstance(found, NeedAnswer) else enterable(machine, path)


def _firmware(machine: StartMachine, need: Need) -> NeedAnswer:
    known = _values(machine, "os/enum[@name='firmware']/value")
    if known is None:
        return unknown("libvirt does not say which kinds of firmware it has")
    if need.value in known:
        return READY
    return missing(f"{need.value}: this libvirt has {', '.join(sorted(known)) or 'none'}")


def _values(machine: StartMachine, path: str) -> frozenset[str] | None:
    done = machine.domain_capabilities
    if done is None or done.returncode:
        return None
    root = parse_xml(done.stdout, "domainCapabilities", "virsh domcapabilities")
    return frozenset(one.text for one in root.iterfind(path) if one.text)


def _network(machine: StartMachine, need: Need) -> NeedAnswer:
    if (inactive := _unless_active(machine, _NETWORK, need.value)) is not None:
        return inactive
    done = machine.virsh("net-dumpxml", "--network", need.value)
    if done is None or done.returncode:
        return READY
    bridge = parse_xml(done.stdout, "network", "virsh net-dumpxml").find("bridge")
    name = None if bridge is None else bridge.get("name")
    if name is not None and not is_link(name):
        return missing(f"bridge {name} of network {need.value}: there is none")
    return READY


def _listed(*words: str) -> Callable[[StartMachine, Need], NeedAnswer]:
    """A thing that virsh prints the document of."""

    def asked(machine: StartMachine, need: Need) -> NeedAnswer:
        done = machine.virsh(*words, need.value)
        if done is None:
            return unknown(f"{need.value}: libvirt at {machine.uri} does not answer")
        return READY if done.returncode == 0 else missing(f"{need.value}: there is none")

    return asked


def _secret(machine: StartMachine, need: Need) -> NeedAnswer:
    done = machine.virsh("secret-list")
    if done is None or done.returncode:
        return unknown(f"secret {need.value}: libvirt at {machine.uri} does not say")
    rows = [line.split(None, 2) for line in done.stdout.splitlines() if line.strip()]
    uuid = next((row[0] for row in rows if need.value in (row[0], row[-1])), None)
    if uuid is None:
        return missing(f"secret {need.value}: there is none")
    dumped = machine.virsh("secret-dumpxml", uuid)
    kept = dumped is not None and "ephemeral='no'" in dumped.stdout
    folder = "/etc/libvirt/secrets"
    if not kept or not os.access(folder, os.R_OK | os.X_OK):
        return unknown(f"secret {need.value}: whether it has a value; it is not read")
    if Path(f"{folder}/{uuid}.base64").exists():
        return READY
    return missing(f"secret {need.value}: it has no value: virsh secret-set-value")


def _emulator(machine: StartMachine, need: Need) -> NeedAnswer:
    if need.value:
        there = program(machine, need)
        if there.state is not NeedState.READY:
            return NeedAnswer(there.state, there.why, "start-program")
    done = machine.domain_capabilities
    if done is None:
        return unknown(f"libvirt at {machine.uri} does not answer")
    if done.returncode == 0:
        return READY
    said = done.stderr.strip().splitlines()
    why = said[-1].removeprefix("error: ") if said else "no reason given"
    without = machine.virsh("domcapabilities", "--virttype", "qemu")
    is_kvm = (machine.document.root.get("type") or "kvm") == "kvm"
    lacks_kvm = is_kvm and machine.virsh("domcapabilities", "--virttype", "kvm")
    of = None
    if lacks_kvm and lacks_kvm.returncode and without is not None and without.returncode == 0:
        of = "start-kvm"
    return missing(why[:300], of)


def _cpu(machine: StartMachine, need: Need) -> NeedAnswer:
    done = machine.domain_capabilities
    if done is None or done.returncode:
        return READY if done is not None else unknown("libvirt does not answer")
    root = parse_xml(done.stdout, "domainCapabilities", "virsh domcapabilities")
    modes = {one.get("name"): one.get("supported") for one in root.iterfind("cpu/mode")}
    if need.value in ("host-passthrough", "host-model", "maximum"):
        if modes.get(need.value) == "no":
            return missing(f"mode {need.value}: this emulator has none with this accelerator")
        return READY
    models = {one.text: one.get("usable") for one in root.iterfind("cpu/mode/model") if one.text}
    if models and need.value not in models:
        return missing(f"model {need.value}: this emulator has none of that name")
    if models.get(need.value) == "no":
        why = f"model {need.value}: it has features that this machine does not have"
        if need.detail == "full":
            return missing(why)
        return unknown(why) if machine.document.root.get("type") != "qemu" else READY
    if need.detail == "full":
        features = {one.get("name") for one in machine.document.root.all("cpu/feature")}
        if machine.document.root.get("type") == "qemu" and "hypervisor" not in features:
            return missing("check='full': QEMU gives the guest hypervisor, which <cpu> lacks")
        return unknown("check='full': libvirt compares the CPU after the start with what QEMU gave")
    return READY


_RESOURCE, _NICE = 1 << 24, 1 << 23
"""CAP_SYS_RESOURCE: who has it may raise limits. CAP_SYS_NICE: and set schedulers."""


def _capabilities() -> Iterator[tuple[str, int]]:
    """Of each libvirt daemon that can be read: its process, and what it may do."""
    for process in _libvirt_daemons():
        status = kernel_text(f"/proc/{process}/status")
        match = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", status, re.MULTILINE | re.ASCII)
        if match is not None:
            yield process, int(match[1], 16)


def _lock(machine: StartMachine, need: Need) -> NeedAnswer:
    """libvirtd raises QEMU's limit on locked memory; without the right to, its own one counts."""
    for process, may in _capabilities():
        if may & _RESOURCE:
            return READY
        limits = kernel_text(f"/proc/{process}/limits")
        line = next((one for one in limits.splitlines() if one.startswith("Max locked memory")), "")
        if "unlimited" in line:
            return READY
        return missing(f"libvirt's daemon may lock {line.split()[-2] if line else '0'} bytes")
    return unknown("no libvirt daemon is seen among the processes")


def _libvirt_daemons() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        name = entry.name.isdecimal() and kernel_text(f"/proc/{entry.name}/comm").strip()
        if name in ("libvirtd", "virtqemud"):
            yield entry.name


_SCHEDULED = "cpu/machine/cpu.rt_runtime_us"
"""In cgroups of version 1 a group has real time only where its parent was given some."""


def _scheduler(machine: StartMachine, need: Need) -> NeedAnswer:
    if need.value not in ("fifo", "rr"):
        return READY
    if not need.detail.isdecimal() or not 1 <= int(need.detail) <= 99:
        return missing(
            f"{need.value} with priority {need.detail or 'none'}: no priority of 1 to 99"
        )
    root = Path("/sys/fs/cgroup")
    runtime = kernel_text(str(root / _SCHEDULED)).strip()
    if (root / "cpu/cpu.rt_runtime_us").exists() and runtime in ("", "0"):
        return missing(f"{need.value}: libvirt's cgroup has no real time: {root / _SCHEDULED} is 0")
    rights = [may for _, may in _capabilities()]
    if not rights:
        return unknown("no libvirt daemon is seen among the processes")
    if not any(may & _NICE for may in rights):
        return missing(f"{need.value}: libvirt's daemon has no right to set schedulers")
    return READY


def _weight(machine: StartMachine, need: Need) -> NeedAnswer:
    """Source: Documentation/block/bfq-iosched.rst, Documentation/admin-guide/cgroup-v2.rst."""
    is_first = Path("/sys/fs/cgroup/blkio").is_dir()
    most = 1000 if is_first else 10000
    if not need.value.isdecimal() or not 1 <= int(need.value) <= most:
        return missing(f"weight {need.value[:40]}: the kernel takes 1 to {most}")
    if not is_first and int(need.value) > 1000:
        return unknown(f"weight {need.value}: the BFQ scheduler takes 1 to 1000")
    return READY


def _range(machine: StartMachine, need: Need) -> NeedAnswer:
    least, _, most = need.detail.partition("-")
    is_number = need.value.isdecimal() and need.value.isascii() and len(need.value) < 20
    value = int(need.value) if is_number else -1
    is_power = need.kind is not NeedKind.POWER or value & (value - 1) == 0
    if int(least) <= value <= int(most or value) and is_power:
        return READY
    taken = f"{least} to {most}" if most else f"{least} or more"
    return missing(f"{need.value[:40]}: QEMU takes {taken}")


def _label(machine: StartMachine, need: Need) -> NeedAnswer:
    user, colon, group = need.value.partition(":")
    number = user_number(user)
    if number is None or (colon and user_number(group, is_group=True) is None):
        return missing(f"{need.value[:80]}: this machine has no such user or group")
    done = machine.virsh("capabilities")
    if need.detail != "no" or number == 0 or done is None or done.returncode:
        return READY
    own = user_of_capabilities(done.stdout)
    if own is None or own == number:
        return READY
    why = f"{need.value}: with relabel='no' libvirt leaves QEMU's own files to user {own}"
    return missing(why)


def _keymap(machine: StartMachine, need: Need) -> NeedAnswer:
    folders = (machine.ask_qemu("-L", "help") or "").split("\n")
    known = [Path(folder, "keymaps") for folder in folders if folder.startswith("/")]
    if not any(folder.is_dir() for folder in known) or not _DRIVER.match(need.value):
        return unknown(f"keymap {need.value[:80]}: QEMU's folder of keymaps is not known")
    if any((folder / need.value).exists() for folder in known):
        return READY
    return missing(f"keymap {need.value}: this QEMU has none of that name")


def _security(machine: StartMachine, need: Need) -> NeedAnswer:
    done = machine.virsh("capabilities")
    if done is None or done.returncode:
        return unknown(f"libvirt at {machine.uri} does not answer")
    root = parse_xml(done.stdout, "capabilities", "virsh capabilities")
    models = {one.text for one in root.iterfind("host/secmodel/model")} - {"none"}
    if need.value in models:
        return READY
    return missing(f"{need.value}: this libvirt has {', '.join(sorted(filter(None, models)))}")


def _name(machine: StartMachine, need: Need) -> NeedAnswer:
    if "/" in need.value or not need.value.isprintable():
        return missing(f"{need.value[:80]!r}: a name has no / and no line feed", "start-argument")
    done = machine.virsh("list", "--all", "--uuid", "--name")
    if done is None or done.returncode:
        return unknown(f"libvirt at {machine.uri} does not answer")
    for line in done.stdout.splitlines():
        uuid, _, name = line.strip().partition(" ")
        other = bool(need.detail) and uuid != need.detail.lower()
        if name.strip() == need.value and (other or not need.detail):
            return missing(f"domain {need.value}: there is one with UUID {uuid}")
        if uuid == need.detail.lower() and name.strip() != need.value:
            return missing(f"UUID {uuid}: it is that of domain {name.strip()}")
    return READY


def _argument(machine: StartMachine, need: Need) -> NeedAnswer:
    option = need.value.lstrip("-")
    known = machine.ask_qemu("-help")
    if not need.value.startswith("-") or not known:
        return unknown(f"{need.value}: only a start shows what it does")
    options = {line.split()[0].lstrip("-") for line in known.splitlines() if line[:1] == "-"}
    if option not in options:
        return missing(f"{need.value}: this QEMU has no such option")
    said = argument_properties(need.detail)
    first = said.get("driver") or said.get("qom-type") or said.get("")
    if (lost := _undefined(machine, said)) is not None:
        return missing(lost)
    if option == "netdev" and first is not None and _DRIVER.match(first):
        kinds = (machine.ask_qemu("-netdev", "help") or "").split()
        if kinds and first not in kinds:
            return missing(f"netdev {first}: QEMU has none")
        if (starts := started_by(need.value, need.detail)) is not None:
            return unknown(f"netdev {first}: whether libvirt lets QEMU start {starts}")
        opens = first in ("tap", "bridge") and not said.keys() & {"fd", "fds"}
        return unknown(f"netdev {first}: whether libvirt lets QEMU open it") if opens else READY
    if option in ("device", "object") and first is not None and _DRIVER.match(first):
        listed = machine.ask_qemu(f"-{option}", f"{first},help")
        found = properties(listed, first, said)
        is_placed = "" not in said or "bus" in said or "addr" in said
        if found is READY and not is_placed and " addr=" in (listed or ""):
            # Those in JSON come after libvirt's own, the others before them.
            return unknown(f"{first}: QEMU places it before libvirt's devices: name bus= and addr=")
        return found
    if option == "machine":
        kind = machine.document.root.value("os/type/@machine") or ""
        listed = machine.ask_qemu("-machine", f"{kind},help") if _DRIVER.match(kind) else None
        return properties(listed, "the machine", said)
    if option == "cpu" and first is not None and _DRIVER.match(first):
        models = machine.ask_qemu("-cpu", "help") or ""
        names = {word.replace("_", "-") for word in models.split()}
        for word in (first, *(one[1:] for one in said if one[:1] in ("+", "-"))):
            if models and word.replace("_", "-") not in names:
                return missing(f"CPU {word}: QEMU has none")
        return READY
    if option == "global" and (driver := need.detail.partition(".")[0]) and _DRIVER.match(driver):
        name = need.detail.partition(".")[2].partition("=")[0]
        return properties(machine.ask_qemu("-device", f"{driver},help"), driver, {name: ""})
    if option in ("fw_cfg", "drive", "blockdev"):
        return READY
    return unknown(f"{need.value} {need.detail[:80]}: only a start shows what it does")


def started_by(option: str, value: str) -> str | None:
    """The program that QEMU itself would start for an argument. Source: -netdev of qemu(1)."""
    said = argument_properties(value)
    kind = said.get("", "")
    if option == "-incoming" and kind.startswith("exec:"):
        return kind.removeprefix("exec:")
    if option != "-netdev" or said.keys() & {"fd", "fds"} or kind not in ("bridge", "tap"):
        return None
    own = said.get("helper") or (said.get("script", "/etc/qemu-ifup") if kind == "tap" else None)
    return None if own == "no" else own or "qemu-bridge-helper"


_REFERS = ("netdev", "drive", "chardev", "memdev", "iothread", "fsdev", "rng")
_OF_LIBVIRT = (
    "hostnet",
    "libvirt-",
    "iothread",
    "char",
    "mem",
    "ram-",
    "pc.",
    "obj",
    "drive-",
    "ua-",
)
"""How libvirt calls what it makes."""


def _undefined(machine: StartMachine, said: Mapping[str, str]) -> str | None:
    """What an argument refers to that neither another one nor libvirt makes."""
    words = [one.get("value") or "" for one in qemu_arguments(machine.document)]
    made = {argument_properties(word).get(key) for word in words for key in ("id", "node-name")}
    for name in _REFERS:
        value = said.get(name)
        if value is not None and value not in made and not value.startswith(_OF_LIBVIRT):
            return f"{name}={value}: nothing of that id is made"
    return None


_WORDS = re.compile(r"<\w{1,40}> +- (\w{1,20}(?:/\w{1,20})+) ", re.ASCII)
_BOOLEANS = ("yes", "no", "true", "false", "y", "n")
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]{1,16}|\d{1,20})\Z", re.ASCII)
_OF_ALL = frozenset(("", "id", "bus", "driver", "qom-type", "type", "accel"))


def properties(listed: str | None, what: str, said: Mapping[str, str]) -> NeedAnswer:
    """Whether a device, object or machine has these properties."""
    if listed is None:
        return unknown(f"{what}: this emulator is not asked")
    if not listed:
        return missing(f"{what}: this QEMU has none of that name")
    known: dict[str, str] = {}
    for line in listed.splitlines():
        stated, _, form = line.strip().partition("=")
        known[stated.replace("_", "-")] = form
    for name in said.keys() - _OF_ALL:
        kind = known.get(name.partition(".")[0].replace("_", "-"))
        if kind is None:
            return missing(f"{what}: it has no property {name}")
        value = said[name][:40]
        if kind.startswith("<uint") and value and not _INTEGER.match(value):
            return missing(f"{what}: {name}={value}: no integer")
        if (words := _WORDS.match(kind)) is not None and value:
            taken = words[1].lower().split("/") + [*_BOOLEANS] * kind.startswith("<bool>")
            if value.lower() not in taken:
                return missing(f"{what}: {name}={value}: it takes {words[1]}")
    return READY


def _model(machine: StartMachine, need: Need) -> NeedAnswer:
    """libvirt hands on every model that it does not know as the name of a device."""
    if need.value.startswith("virtio") or not _DRIVER.match(need.value):
        return READY
    listed = machine.ask_qemu("-device", f"{need.value},help")
    if listed is None:
        return unknown(f"model {need.value}: this emulator is not asked")
    return READY if listed else missing(f"model {need.value}: this QEMU has none of that name")


def _elsewhere(machine: StartMachine, need: Need) -> NeedAnswer:
    return unknown(f"{need.detail} of {need.value or 'another machine'}: no connection is made")


ASKED_OF_LIBVIRT: Mapping[NeedKind, Callable[[StartMachine, Need], NeedAnswer]] = {
    NeedKind.VOLUME: _volume,
    NeedKind.FIRMWARE: _firmware,
    NeedKind.NETWORK: _network,
    NeedKind.FILTER: _listed("nwfilter-dumpxml", "--nwfilter"),
    NeedKind.SECRET: _secret,
    NeedKind.EMULATOR: _emulator,
    NeedKind.CPU: _cpu,
    NeedKind.LOCK: _lock,
    NeedKind.SECURITY: _security,
    NeedKind.MODEL: _model,
    NeedKind.NAME: _name,
    NeedKind.ARGUMENT: _argument,
    NeedKind.ELSEWHERE: _elsewhere,
    NeedKind.SCHEDULER: _scheduler,
    NeedKind.WEIGHT: _weight,
    NeedKind.RANGE: _range,
    NeedKind.POWER: _range,
    NeedKind.LABEL: _label,
    NeedKind.KEYMAP: _keymap,
}
