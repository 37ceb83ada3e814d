"""QmConf: a VM's configuration in Proxmox: read, the QEMU command that Proxmox makes of it, and the
hook script that is written next to it.

Source: the published pairs of configuration and command, src/test/cfg2cmd of qemu-server 9.2, and
pve-q35-4.0.cfg.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.machine.topology import Host
from homenode.package_data import read_package_text
from homenode.text import command_line
from homenode.units import MIB, parse_whole
from homenode.vm.model import GuestAddress, GuestHostdev, GuestTopology, Vm
from homenode.vm.plan import Plan, with_vm
from homenode.vm.targets.codec import ConfigEntry, decode_text, replace_entries
from homenode.vm.targets.qemu_command import (
    escape_commas,
    format_ranges,
    parse_options,
    read_command,
)
from homenode.vm.targets.target import PIN, PREPARE, plan_values, split_words

KEY = re.compile(r"([a-z][a-z0-9_-]{0,40}):(.*+)\Z", re.ASCII)
NUMA = re.compile(r"numa[0-9]{1,2}\Z", re.ASCII)
HOSTPCI = re.compile(r"hostpci([0-9]{1,2})\Z", re.ASCII)
_NET = re.compile(r"net[0-9]+\Z", re.ASCII)
_VMID = re.compile(r"([1-9][0-9]{2,8})\.conf\Z", re.ASCII)

_OTHER_KEYS = re.compile(
    r"(acpi|affinity|agent|amd-sev|arch|args|autostart|balloon|bios|boot|cpu|description|hookscript"
    r"|hotplug|hugepages|intel-tdx|kvm|localtime|lock|machine|meta|name|numa|onboot|parent"
    r"|protection|rng0|smbios1|startup|tags|template|vcpus|vga"
    r"|(efidisk|hostpci|ide|ipconfig|net|numa|sata|scsi|serial|tpmstate|unused|usb|virtio)[0-9]+)\Z",
    re.ASCII,
)
"""Keys of qm(1) next to those of `is_conf`."""

OWN_SLOTS = (
    *(GuestAddress(0, 0, slot, 0) for slot in (0x1, 0x2, 0x10, 0x11, 0x14, 0x1A, 0x1B)),
    *(GuestAddress(0, 0, 0x1C, function) for function in range(4)),
    *(GuestAddress(0, 0, slot, 0) for slot in (0x1D, 0x1E, 0x1F)),
)
"""Slots in use on pcie.0: display, vIOMMU, root ports of hostpci4 to 15, ivshmem, USB, sound, root
ports of hostpci0 to 3, the bridge, the chipset."""


class QmConf(Struct, frozen=True, dict=True):
    lines: tuple[str, ...]  # with their ends
    live: int  # how many of them are before the first section, such as [special:cloudinit]
    values: Mapping[str, str]  # values before the first section
    source: str  # its name, which may contain the VM's number

    @property
    def shape(self) -> tuple[int, int]:
        """Sockets and cores. Raises ParseError."""
        return count_of(self.values, "sockets", self.source), count_of(
            self.values, "cores", self.source
        )

    @property
    def machine(self) -> str:
        return (self.values.get("machine") or "pc").partition(",")[0].removeprefix("type=")

    @property
    def vmid(self) -> str | None:
        return find_vmid(self.source)

    @cached_property
    def vm_fields(self) -> Mapping[str, Any]:
        """Return fields of a Vm from the command that Proxmox generates, and from its keys. Raises
        ParseError or InputError."""
        values, source, (sockets, cores) = self.values, self.source, self.shape
        vm = read_command(parse_options(build_conf_command(self)[1:], source), source)
        names = [
            *(device.bdf for device in vm["hostdevs"]),
            *(device.uuid for device in vm["mediated"]),
        ]
        if len(set(names)) < len(names):
            raise InputError(f"{source}: a host device is listed twice")
        is_shaped = "cores" in values or "sockets" in values
        pages = parse_page_bytes(values, source)
        return vm | {
            "vcpus": sockets * cores,
            "cpu_topology": (vm["cpu_topology"] or GuestTopology(sockets, 1, cores, 1))
            if is_shaped
            else None,
            "page_bytes": pages if vm["page_bytes"] is None else vm["page_bytes"],
            "has_iommu": vm["has_iommu"] or "viommu" in values.get("machine", ""),
        }

    def keys_like(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the keys that a pattern takes, in the order of their numbers."""
        keys = filter(pattern.match, self.values)
        return sorted(keys, key=lambda key: int(key.lstrip("abcdefghijklmnopqrstuvwxyz")))


def parse(content: bytes, source: str) -> QmConf:
    """Raises ParseError for a line that a configuration cannot have or a key given twice,
    InputError for pending changes and snapshots."""
    lines = tuple(decode_text(content, source, "a qm configuration").splitlines(keepends=True))
    values: dict[str, str] = {}
    live = len(lines)
    for number, line in enumerate(lines):
        bare = line.strip()
        if bare.startswith("["):
            live = min(live, number)
            _reject_section(bare.strip("[]"), source)
        if number >= live:
            continue
        if not bare or bare.startswith("#"):
            continue
        match = KEY.match(bare)
        if match is None:
            raise ParseError(source, "key: value", bare, line=number + 1)
        if match[1] in values:
            raise ParseError(source, f"{match[1]} once", "it again", line=number + 1)
        values[match[1]] = match[2].strip(" \t")
    return QmConf(lines, live, values, source)


def find_vmid(path: str) -> str | None:
    """Return the VM's number from its file's name, as in /etc/pve/qemu-server; None without one.

    >>> find_vmid("old/101.conf"), find_vmid("tuned.conf")
    ('101', None)
    """
    match = _VMID.search(path)
    return None if match is None else match[1]


def _reject_section(name: str, source: str) -> None:
    """Raise InputError for pending changes and snapshots; other sections stay as they are."""
    vmid = find_vmid(source) or "VMID"
    if name == "PENDING":
        raise InputError(
            f"{source} has pending changes, which the next start would make",
            hint=f"qm pending {vmid} shows them: start the VM once, or revert them",
        )
    if not name.startswith("special:"):
        raise InputError(
            f"{source} has the snapshot {name!r}: a rollback would undo the plan",
            hint=command_line("qm", "delsnapshot", vmid, name),
        )


def is_conf(content: bytes) -> bool:
    """Return whether this is a qm configuration: it has keys that no other format has."""
    text = content[:200_000].decode("utf-8", "replace")
    keys = {m[1] for line in text.splitlines() if (m := KEY.match(line.strip()))}
    return bool(keys & {"memory", "cores", "sockets", "scsihw", "ostype", "vmgenid", "bootdisk"})


def is_short_conf(content: bytes) -> bool:
    """Whether this may be a qm configuration that consists of keys other formats have, too."""
    try:
        return any(map(_OTHER_KEYS.match, parse(content, "").values))
    except ParseError:
        return False
    except InputError:
        return True  # with a section that is rejected by name


def start_timeout_s(keys: Collection[str], memory_bytes: int) -> int:
    """Return the seconds after which Proxmox ends the start of a VM with these keys. Source:
    config_aware_timeout of PVE::QemuServer::Helpers, qemu-server 9.2."""
    memory_mib = memory_bytes // MIB
    seconds = memory_mib // 1024 if memory_mib > 30720 else 30
    if any(map(HOSTPCI.match, keys)):
        seconds *= 4
    if "hugepages" in keys:
        seconds = max(seconds, 150)
    return seconds + 5 * sum(_NET.match(key) is not None for key in keys)


def count_of(values: Mapping[str, str], key: str, source: str) -> int:
    text = values.get(key, "1")
    count = parse_whole(text, digits=5)
    if not count:
        raise ParseError(f"{source}: {key}", "a number above 0", text)
    return count


def _read_memory_mib(values: Mapping[str, str], source: str) -> int:
    text = dict(split_pairs(values.get("memory", "512")))
    size = text.get("", text.get("current", ""))
    mib = parse_whole(size, digits=11)
    if not mib:
        raise ParseError(f"{source}: memory", "MiB above 0", values.get("memory", ""))
    return mib


def parse_page_bytes(values: Mapping[str, str], source: str) -> int | None:
    pages = values.get("hugepages")
    if pages is None:
        return None
    if pages not in ("2", "1024", "any"):
        raise ParseError(f"{source}: hugepages", "any, 2 or 1024", pages)
    return 0 if pages == "any" else int(pages) * MIB


def split_pairs(value: str) -> tuple[tuple[str, str], ...]:
    """Return the keys of a property string; the default key is ""."""
    pairs = []
    for word in value.split(","):
        key, equals, text = word.partition("=")
        pairs.append((key, text) if equals else ("", key))
    return tuple(pairs)


def add_whole_cards(vm: Vm, content: bytes, source: str, host: Host) -> Vm:
    """The VM with every function that the host has of cards that hostpciN names without one."""
    conf = parse(content, source)
    cards = {
        strip_function(parse_function(name, f"{source}: {key}"))
        for key in conf.keys_like(HOSTPCI)
        for name in list_functions(conf.values[key])
        if "." not in name and "mdev" not in dict(split_pairs(conf.values[key]))
    }
    present = {hostdev.bdf for hostdev in vm.hostdevs}
    added_hostdevs = tuple(
        GuestHostdev(device.bdf, None)
        for device in host.pci_devices
        if strip_function(device.bdf) in cards and device.bdf not in present
    )
    return structs.replace(vm, hostdevs=(*vm.hostdevs, *added_hostdevs))


def list_functions(value: str) -> list[str]:
    """Return the functions that a hostpciN names."""
    keys = dict(split_pairs(value))
    return [name for name in (keys.get("", "") or keys.get("host", "")).split(";") if name]


def strip_function(bdf: Bdf) -> tuple[int, int, int]:
    return bdf.domain, bdf.bus, bdf.device


def parse_function(name: str, source: str) -> Bdf:
    return Bdf.parse(name if "." in name else f"{name}.0", source)


def build_command(content: bytes, source: str) -> tuple[str, ...]:
    """Return the QEMU options that Proxmox makes of a configuration for the parts of the guest."""
    return build_conf_command(parse(content, source))


def build_conf_command(conf: QmConf) -> tuple[str, ...]:
    """Return `build_command` of a parsed configuration."""
    values, source, (sockets, cores) = conf.values, conf.source, conf.shape
    total = sockets * cores
    online = count_of(values, "vcpus", source) if "vcpus" in values else total
    memory = _read_memory_mib(values, source)
    pairs = [
        ("-name", escape_commas(values.get("name") or "vm")),
        ("-machine", f"type={conf.machine}"),
        ("-smp", f"{online},sockets={sockets},cores={cores},maxcpus={total}"),
        ("-m", str(memory)),
        *_list_numa_words(conf, memory),
    ]
    if "viommu=intel" in values.get("machine", ""):
        pairs.append(("-device", "intel-iommu,intremap=on,caching-mode=on"))
    pairs += [("-device", value) for value in _own_devices(conf)]
    args = split_words(values.get("args", ""), f"{source}: args")
    return ("qemu-system-x86_64", *(word for pair in pairs for word in pair), *args)


def _list_numa_words(conf: QmConf, memory: int) -> Iterator[tuple[str, str]]:
    """Return the cells of numaN lines, else one cell for each socket."""
    values, (sockets, cores) = conf.values, conf.shape
    if values.get("numa") not in ("1", "yes", "on", "true"):
        return
    pages = parse_page_bytes(values, conf.source)
    kind, path = "memory-backend-ram", ""
    if pages is not None:
        kind, directory = "memory-backend-file", (pages or 2 * MIB) // 1024
        path = f",mem-path=/run/hugepages/kvm/{directory}kB,share=on,prealloc=yes"
    for number, key in enumerate(conf.keys_like(NUMA) or [""] * sockets):
        properties = dict(split_pairs(values[key])) if key else {}
        size = properties.get("memory", "0") if key else str(memory // sockets)
        place = f"{conf.source}: {key}"
        if parse_whole(size, digits=11) is None:
            raise ParseError(place, "memory in MiB", size[:60])
        vcpus = CpuSet(range(number * cores, number * cores + cores))
        if key:
            vcpus = CpuSet.parse(properties.get("cpus", "").replace(";", ","), place)
        node = key[4:] or str(number)
        bound = ""
        if "hostnodes" in properties:
            nodes = CpuSet.parse(properties["hostnodes"].replace(";", ","), place)
            bound = f"{format_ranges('host-nodes', nodes)},policy={properties.get('policy', '')}"
        yield "-object", f"{kind},id=ram-node{node},size={size}M{path}{bound}"
        yield "-numa", f"node,nodeid={node}{format_ranges('cpus', vcpus)},memdev=ram-node{node}"


def _own_devices(conf: QmConf) -> Iterator[str]:
    """Yield the root ports of its q35 machine, and the functions of hostpciN."""
    keys = conf.keys_like(HOSTPCI)
    is_q35 = "q35" in conf.machine
    if is_q35:
        for port in (*range(4), *(number for key in keys if (number := int(key[7:])) > 3)):
            slot = f"0x1c.{port}" if port < 4 else f"{0x10 + (port - 4) // 8:#x}.{(port - 4) % 8}"
            yield (
                f"pcie-root-port,id=ich9-pcie-port-{port + 1},bus=pcie.0,addr={slot},"
                f"chassis={port + 1},multifunction=on"
            )
    for key in keys:
        properties = dict(split_pairs(conf.values[key]))
        names = list_functions(conf.values[key])
        # A vGPU that Proxmox makes of the named GPU does not count.
        for index, name in enumerate(names if "mdev" not in properties else ()):
            bdf = parse_function(name, f"{conf.source}: {key}")
            sub = f".{index}" if len(names) > 1 else ""
            at = ""
            if is_q35 and properties.get("pcie") in ("1", "on", "yes", "true"):
                suffix = ",multifunction=on" if len(names) > 1 and not index else ""
                at = f",bus=ich9-pcie-port-{int(key[7:]) + 1},addr=0x0{sub}{suffix}"
            yield f"vfio-pci,host={bdf},id={key}{sub}{at}"


def replace_default(value: str | None, key: str, text: str) -> str:
    """Return a property string with the value of its default key replaced."""
    if value is None:
        return text
    words = value.split(",")
    other_words = [word for word in words if "=" in word and word.partition("=")[0] != key]
    return ",".join([text, *other_words])


def edit_conf(conf: QmConf, changes: Mapping[str, str | None]) -> str:
    """The configuration with these values; sections and the blank lines before them stay last."""
    live, at = "".join(conf.lines[: conf.live]), 0
    entries = []
    for line in conf.lines[: conf.live]:
        match = KEY.match(line.strip())
        if match is not None and not line.lstrip().startswith("#"):
            start = at + len(line) - len(line.lstrip())
            value = match[2].strip(" \t")
            first = start + match.start(2) + len(match[2]) - len(match[2].lstrip(" \t"))
            entries.append(ConfigEntry(match[1], value, start, first, first + len(value)))
        at += len(line)
    end = len(live.rstrip("\r\n")) if live.strip() else 0
    end = live.find("\n", end) + 1 or len(live)
    values = {key: [] if text is None else [(text, text)] for key, text in changes.items()}
    text = replace_entries(live[:end], entries, values, joint=": ")
    return text + live[end:] + "".join(conf.lines[conf.live :])


_HOOK = r"""#!/usr/bin/env bash
# homenode: hook script for a VM of Proxmox, layout {layout}.
# Copy it to a storage with snippets, such as /var/lib/vz/snippets, and make it executable.
set -euo pipefail

"""

_HOOK_TAIL = read_package_text("vm", "targets", "scripts", "proxmox_hook.sh")


def render_hook_script(plan: Plan, *, mirrored: bool) -> str | None:
    """Return the script; None if nothing is left for it to do."""
    if not plan.vcpu_pins and not mirrored:
        return None
    # Proxmox reserves huge pages itself, and devices of hostpciN.
    hook_plan = replace(plan, page_reservations=())
    if not mirrored:
        hook_plan = with_vm(hook_plan, hostdevs=())
    head = _HOOK.replace("{layout}", plan.layout.name)
    # From before `prepare` until the VM runs, with as many NICs as Proxmox takes.
    start_s = start_timeout_s(("hostpci0", "hugepages"), plan.vm.memory_bytes) + 5 * 32
    reserve_line = f"reserved_s={start_s + 60}\n"
    return head + plan_values(hook_plan) + reserve_line + PREPARE + PIN + _HOOK_TAIL
