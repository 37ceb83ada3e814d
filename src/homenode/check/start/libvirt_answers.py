"""Answers of libvirt and of its QEMU to the needs of a VM. [I/O]"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from homenode.catalogue import finding
from homenode.check.start.machine import StartMachine, by_kind
from homenode.check.start.needs import (
    READY,
    TABLE,
    Need,
    NeedAnswer,
    NeedState,
    missing,
    unknown,
)
from homenode.check.start.paths import enterable, is_link, program, stat_of
from homenode.check.start.qemu_user import QemuUser, kernel_text, user_number
from homenode.check.start.rehearsal import JUDGED, lacks_driver
from homenode.check.verify.boot.libvirt import user_of_capabilities
from homenode.findings import Finding
from homenode.input_files import read_kernel_file
from homenode.machine.tools.xml_text import parse_xml
from homenode.vm.domain.controllers import argument_properties
from homenode.vm.domain.document import Element, parse_document

_DRIVER = re.compile(r"[A-Za-z0-9_.+-]{1,64}\Z", re.ASCII)


def _answered(machine: StartMachine, what: str, *words: str) -> str | NeedAnswer:
    """What virsh prints of a thing; the need's answer where it prints none."""
    done = machine.virsh(*words)
    if done is None:
        return unknown(f"{what}: libvirt at {machine.uri} does not answer")
    if done.returncode == 0:
        return done.stdout
    return missing(f"{what}: {(done.complaints() or ['no reason given'])[-1]}")


def _volume(machine: StartMachine, need: Need) -> NeedAnswer:
    what = f"volume {need.detail} of pool {need.value}"
    path = _answered(machine, what, "vol-path", "--pool", need.value, "--vol", need.detail)
    if isinstance(path, NeedAnswer):
        return path
    found = stat_of(path.strip())
    return READY if isinstance(found, NeedAnswer) else enterable(machine, path.strip())


def _network(machine: StartMachine, need: Need) -> NeedAnswer:
    what = f"network {need.value}"
    dumped = _answered(machine, what, "net-dumpxml", "--network", need.value)
    if isinstance(dumped, NeedAnswer):
        return dumped
    if need.value not in (machine.names("net-list", "--name") or ()):
        return missing(f"{what}: not active")
    bridge = parse_xml(dumped, "network", "virsh net-dumpxml").find("bridge")
    name = None if bridge is None else bridge.get("name")
    if name is not None and not is_link(name):
        return missing(f"bridge {name} of {what}: there is none")
    return READY


def _filter(machine: StartMachine, need: Need) -> NeedAnswer:
    what = f"filter {need.value}"
    found = _answered(machine, what, "nwfilter-dumpxml", "--nwfilter", need.value)
    return found if isinstance(found, NeedAnswer) else READY


def _emulator(machine: StartMachine, need: Need) -> NeedAnswer:
    if need.value:
        there = program(machine, need)
        if there.state is not NeedState.READY:
            return NeedAnswer(there.state, there.why, "start-program")
    done = machine.domain_capabilities
    if done is None:
        return unknown(machine.barred or f"libvirt at {machine.uri} does not answer")
    if done.returncode == 0:
        return READY
    is_kvm = (machine.document.root.get("type") or "kvm") == "kvm"
    without = machine.virsh("domcapabilities", "--virttype", "kvm") if is_kvm else None
    return missing(
        "; ".join(done.complaints())[:300],
        "start-kvm" if without is not None and without.returncode else None,
    )


def _cpu(machine: StartMachine, need: Need) -> NeedAnswer:
    done = machine.domain_capabilities
    if done is None or done.returncode:
        return READY if done else unknown(machine.barred or "libvirt does not answer")
    root = parse_xml(done.stdout, "domainCapabilities", "virsh domcapabilities")
    models = {one.text: one.get("usable") for one in root.iterfind("cpu/mode/model") if one.text}
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
    for entry in Path("/proc").glob("[0-9]*"):
        if kernel_text(f"{entry}/comm").strip() in ("libvirtd", "virtqemud"):
            status = kernel_text(f"{entry}/status")
            match = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", status, re.MULTILINE | re.ASCII)
            if match is not None:
                yield entry.name, int(match[1], 16)


def _lock(machine: StartMachine, need: Need) -> NeedAnswer:
    """libvirtd raises QEMU's limit on locked memory; without the right to, its own one counts."""
    for process, may in _capabilities():
        if may & _RESOURCE:
            return READY
        limits = kernel_text(f"/proc/{process}/limits")
        line = next((one for one in limits.splitlines() if one.startswith("Max locked memory")), "")
        if "unlimited" in line:
            return READY
        return missing(
            f"libvirt's daemon may lock {line.split()[-2] if line else '0'} bytes of memory"
        )
    return unknown("no libvirt daemon is seen among the processes")


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
    blkio = Path("/sys/fs/cgroup/blkio")
    is_first = blkio.is_dir()
    if need.detail and is_first and not any(blkio.glob("*/blkio.weight_device")):
        return missing(
            f"weight {need.value[:40]} of {need.detail[2:]}: only the scheduler CFQ has it"
        )
    most = 1000 if is_first else 10000
    if not need.value.isdecimal() or not 1 <= int(need.value) <= most:
        return missing(f"weight {need.value[:40]}: the kernel takes 1 to {most}")
    if not is_first and int(need.value) > 1000:
        return unknown(f"weight {need.value}: the BFQ scheduler takes 1 to 1000")
    return READY


def _range(machine: StartMachine, need: Need) -> NeedAnswer:
    least, _, most = need.detail.partition("-")
    value = int(need.value) if need.value.isdecimal() and len(need.value) < 20 else -1
    if int(least) <= value <= int(most or value):
        return READY
    taken = f"{least} to {most}" if most else f"{least} or more"
    return missing(f"{need.value[:40]}: QEMU takes {taken}")


def _driver(machine: StartMachine, need: Need) -> NeedAnswer:
    if machine.emulator is None or not _DRIVER.match(need.value):
        return unknown(f"{need.value[:80]}: this emulator is not asked")
    why = f"{need.value}: this QEMU has no such block driver; distributions have it in a package"
    return missing(why) if lacks_driver(machine, need.value) else READY


_LIBRARY = "/var/lib/libvirt/qemu"
"""Below it libvirt keeps each domain's key, which QEMU reads."""


def _label(machine: StartMachine, need: Need) -> NeedAnswer:
    user, colon, group = need.value.partition(":")
    number = user_number(user)
    if number is None or (colon and user_number(group, is_group=True) is None):
        return missing(f"{need.value[:80]}: this machine has no such user or group")
    barred = QemuUser(number, user, frozenset({number})).barred(f"{_LIBRARY}/x") if number else None
    if barred is not None:
        return missing(barred)
    done = machine.virsh("capabilities")
    if need.detail != "no" or number == 0 or done is None or done.returncode:
        return READY
    own = user_of_capabilities(done.stdout)
    if own is None or own == number:
        return READY
    why = f"{need.value}: with relabel='no' libvirt leaves QEMU's own files to user {own}"
    return missing(why)


def _security(machine: StartMachine, need: Need) -> NeedAnswer:
    said = _answered(machine, "libvirt", "capabilities")
    if isinstance(said, NeedAnswer):
        return said
    root = parse_xml(said, "capabilities", "virsh capabilities")
    models = {one.text for one in root.iterfind("host/secmodel/model")} - {"none"}
    if need.value in models:
        return READY
    return missing(f"{need.value}: this libvirt has {', '.join(sorted(filter(None, models)))}")


_NAME_BYTES = 255 - len(".xml.new")


def _name(machine: StartMachine, need: Need) -> NeedAnswer:
    said = _answered(machine, "libvirt", "list", "--all", "--uuid", "--name")
    if isinstance(said, NeedAnswer):
        return said
    if len(need.value.encode()) > _NAME_BYTES:
        return missing(f"a name of more than {_NAME_BYTES} bytes: libvirt names files by it")
    for line in said.splitlines():
        uuid, _, name = line.strip().partition(" ")
        other = bool(need.detail) and uuid != need.detail.lower()
        if name.strip() == need.value and (other or not need.detail):
            return missing(f"domain {need.value}: there is one with UUID {uuid}")
        if uuid == need.detail.lower() and name.strip() != need.value:
            return missing(f"UUID {uuid}: it is that of domain {name.strip()}")
    return READY


def options_of(machine: StartMachine) -> frozenset[str]:
    """Those of the installed QEMU; () where it is not asked."""
    lines = (machine.ask_qemu("-help") or "").splitlines()
    return frozenset(line.split()[0].lstrip("-") for line in lines if line[:1] == "-")


def _argument(machine: StartMachine, need: Need) -> NeedAnswer:
    """Whether QEMU has the option, and what it names; the values the rehearsal tries."""
    option = need.value.lstrip("-")
    options = options_of(machine)
    if not need.value.startswith("-") or not options:
        return unknown(f"{need.value}: only a start shows what it does")
    if option not in options:
        return missing(f"{need.value}: this QEMU has no such option")
    if need.value in JUDGED:
        return READY
    said = argument_properties(need.detail)
    first = said.get("qom-type") or said.get("type") or said.get("backend") or said.get("") or ""
    if option in ("netdev", "chardev", "object"):
        found = known_kind(machine, need.value, first)
        if (starts := started_by(need.value, need.detail)) is not None:
            return unknown(f"netdev {first}: whether libvirt lets QEMU start {starts}")
        return found
    if option in ("drive", "blockdev") and (driver := said.get("driver")):
        return _driver(machine, structs.replace(need, value=driver))
    if ":" in said.get("file", "").partition("/")[0]:
        return unknown(f"{need.value} {said['file'][:80]}: no connection is made")
    if option in ("fw_cfg", "smbios", "drive", "blockdev"):
        return READY
    return unknown(f"{need.value} {need.detail[:80]}: only a start shows what it does")


_UNLISTED = ("none", "spicevmc", "spiceport", "braille", "dbus")
"""Kinds that QEMU has, or has in a module that it loads when it is asked for one."""


def known_kind(machine: StartMachine, option: str, kind: str) -> NeedAnswer:
    """Whether this QEMU has a kind of device, object or backend."""
    if not _DRIVER.match(kind):
        return unknown(f"{option} {kind[:80]}: this emulator is not asked")
    is_listed = option not in ("-device", "-object")
    listed = machine.ask_qemu(option, "help" if is_listed else f"{kind},help")
    if listed is None:
        return unknown(f"{option} {kind}: this emulator is not asked")
    if listed and (not is_listed or kind in (*listed.split(), *_UNLISTED)):
        return READY
    return missing(f"{option} {kind}: this QEMU has none of that name")


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


def _secret(machine: StartMachine, need: Need) -> NeedAnswer:
    """A value that is kept lies in a file of its own; no value is read."""
    what = f"secret {need.value[:80]}"
    if need.detail:
        listed = _answered(machine, what, "secret-list")
        if isinstance(listed, NeedAnswer) or f"{need.detail} {need.value}\n" in f"{listed}\n":
            return listed if isinstance(listed, NeedAnswer) else READY
        return missing(f"{what}: libvirt has none of this type and usage")
    said = _answered(machine, what, "secret-dumpxml", "--secret", need.value)
    if isinstance(said, NeedAnswer):
        return said
    if parse_xml(said, "secret", "virsh secret-dumpxml").get("ephemeral") == "yes":
        return unknown(f"{what}: whether it has a value: libvirt keeps no ephemeral secret")
    kept = Path("/etc/libvirt/secrets") / f"{need.value}.base64"
    if machine.uri != "qemu:///system" or not os.access(kept.parent, os.X_OK) or kept.exists():
        return READY
    return missing(f"{what}: it has no value")


def _elsewhere(machine: StartMachine, need: Need) -> NeedAnswer:
    return unknown(f"{need.detail} of {need.value or 'another machine'}: no connection is made")


_OWN = ("", "nat", "route", "open")
"""Modes of forwarding of a network with a bridge of libvirt's own."""


def unfit(machine: StartMachine) -> Iterator[Finding]:
    """What an interface, its portgroup or network ask for that their kind of connection has not."""
    nics = machine.document.root.all("devices/interface")
    names = [nic.value("source/@network") for nic in nics]
    for nic, name in zip(nics, names, strict=True):
        network = _resolved(machine, nic)
        if nic.get("type") == "network" and network is None:
            continue  # which its need says
        parts = [nic, *_parts(network, nic.value("source/@portgroup"))]
        kind = _kind(nic, network, parts)
        for feature, kinds in TABLE.connections.items():
            place, _, value = feature.partition("=")
            asked = next((had for part in parts if (had := part.value(place))), None)
            is_asked = asked is not None and value in ("", asked)
            if is_asked and kind not in kinds and kind.partition(":")[0] not in kinds:
                yield _unfit(nic, f"{feature} on a connection of kind {kind.rstrip(':')}")
        why = None if network is None else _lacks(nic, network, kind, names.count(name))
        if why is not None:
            yield _unfit(nic, why)


def _unfit(nic: Element, why: str) -> Finding:
    subject = f"interface {nic.value('target/@dev') or nic.get('type')}"
    expected = "what this kind of connection has"
    return finding("start-network", subject, expected, why, case="connection")


def _resolved(machine: StartMachine, nic: Element) -> Element | None:
    name = nic.value("source/@network")
    done = machine.virsh("net-dumpxml", "--network", name) if name else None
    if done is None or done.returncode or nic.get("type") != "network":
        return None
    return parse_document(done.stdout.encode(), "virsh net-dumpxml").root


def _parts(network: Element | None, wanted: str | None) -> Iterator[Element]:
    """The portgroup, of which one may be the default, and the network."""
    if network is not None:
        for group in network.all("portgroup"):
            if wanted == group.get("name") or (not wanted and group.get("default") == "yes"):
                yield group
        yield network


def _kind(nic: Element, network: Element | None, parts: list[Element]) -> str:
    """A type of interface, with the mode of a direct one or the virtualport of a bridge."""
    kind, mode = nic.get("type") or "", nic.value("source/@mode") or "vepa"
    if network is not None:
        mode = network.value("forward/@mode") or ""
        of_mode = {**dict.fromkeys(_OWN, "network"), "hostdev": "hostdev"}
        is_bridge = mode == "bridge" and network.value("bridge/@name") is not None
        kind = "bridge" if is_bridge else of_mode.get(mode, "direct")
    port = next((said for part in parts if (said := part.value("virtualport/@type"))), "")
    more = {"direct": f":{mode}", "bridge": f":{port}"}
    return kind + more.get(kind, "")


def _lacks(nic: Element, network: Element, kind: str, wanted: int) -> str | None:
    """Why a network has nothing for one more interface. wanted: of the domain."""
    name = network.value("name")
    if nic.value("bandwidth/inbound/@floor") and not network.value("bandwidth/inbound/@average"):
        return f"floor: network {name} has no bandwidth of its own to share"
    devices = network.all("forward/interface")
    if kind.startswith("direct"):
        gone = [one.get("dev") or "" for one in devices if not is_link(one.get("dev") or "")]
        if gone:
            return f"{', '.join(gone)} of network {name}: there is no interface of that name"
    free = [one for one in devices if one.get("connections") is None]
    if kind == "direct:passthrough" and devices and len(free) < wanted:
        return f"network {name}: {wanted} of its interfaces are needed, and {len(free)} are free"
    for physical in network.all("forward/pf"):
        dev = physical.get("dev") or ""
        if not is_link(dev) or not any(Path(f"/sys/class/net/{dev}/device").glob("virtfn*")):
            return f"{dev} of network {name}: it has no virtual functions"
    return None


def _refused(machine: StartMachine, need: Need) -> NeedAnswer:
    return missing(need.detail)


def _order(machine: StartMachine, need: Need) -> NeedAnswer:
    return READY  # whether another has it is looked for in the document


def _config(machine: StartMachine, need: Need) -> NeedAnswer:
    """Of libvirtd as it is packaged: a line of the file that is no comment has the words."""
    path = "/etc/libvirt/qemu.conf"
    content = read_kernel_file(path) if machine.uri == "qemu:///system" else None
    if content is None:
        return unknown(f"whether libvirt's qemu.conf has {need.value}")
    lines = map(str.strip, content.decode("utf-8", "replace").splitlines())
    has = any(need.value in " ".join(one.split()) for one in lines if not one.startswith("#"))
    return READY if has else missing(f"{path}: it has no {need.value}")


def _one_of(machine: StartMachine, need: Need) -> NeedAnswer:
    why = f"{need.value[:40]}: none of {need.detail}"
    return READY if need.value.lower() in need.detail.split() else missing(why)


ASKED_OF_LIBVIRT = by_kind(
    _volume,
    _network,
    _filter,
    _emulator,
    _cpu,
    _lock,
    _security,
    _scheduler,
    _weight,
    _label,
    _range,
    _name,
    _driver,
    _argument,
    _elsewhere,
    _refused,
    _secret,
    _config,
    _order,
    _one_of,
)
