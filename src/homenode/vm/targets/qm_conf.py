"""QmConf: a VM's configuration in Proxmox: read, the QEMU command that Proxmox makes of it, and the
hook script that is written next to it.

Source: the published pairs of configuration and command, src/test/cfg2cmd of qemu-server 9.2, and
pve-q35-4.0.cfg.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.machine.pci import canonical_uuid
from homenode.machine.topology import Host
from homenode.units import MIB
from homenode.vm.model import GuestAddress, GuestHostdev, Vm
from homenode.vm.plan_model import Plan, with_vm
from homenode.vm.plan_options import MemoryMode
from homenode.vm.targets.qemu_command import escaped, options_of, ranges_text, vm_of_command
from homenode.vm.targets.script import PIN, PREPARE, plan_values

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
"""Of pcie.0: display, vIOMMU, root ports of hostpci4 to 15, ivshmem, USB, sound, root ports of
hostpci0 to 3, the bridge, the chipset."""

POLICIES = {
    MemoryMode.STRICT: "bind",
    MemoryMode.INTERLEAVE: "interleave",
    MemoryMode.PREFERRED: "preferred",
}


@dataclass(frozen=True, slots=True)
class Conf:
    """A qm configuration. lines: with their ends. live: how many of them are before the first
    section (a snapshot, pending changes). values: of the live ones. pending: keys that the next
    start changes or removes."""

    lines: tuple[str, ...]
    live: int
    values: Mapping[str, str]
    pending: tuple[str, ...]


def parse(content: bytes, source: str) -> Conf:
    """Raises ParseError for a line that is none of a configuration, or a key given twice."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ParseError(source, "a qm configuration in UTF-8", "other bytes") from None
    lines = tuple(text.splitlines(keepends=True))
    values: dict[str, str] = {}
    live = len(lines)
    for number, line in enumerate(lines):
        bare = line.strip()
        if bare.startswith("["):
            live = number
            break
        if not bare or bare.startswith("#"):
            continue
        match = KEY.match(bare)
        if match is None:
            raise ParseError(source, "key: value", bare, line=number + 1)
        if match[1] in values:
            raise ParseError(source, f"{match[1]} once", "it again", line=number + 1)
        values[match[1]] = match[2].strip(" \t")
    return Conf(lines, live, values, tuple(_pending(lines[live:])))


def _pending(lines: tuple[str, ...]) -> Iterator[str]:
    """The keys of the section [PENDING]. Source: qm(1), "pending"; PVE::QemuServer."""
    inside = False
    for line in lines:
        bare = line.strip()
        inside = bare == "[PENDING]" if bare.startswith("[") else inside
        match = KEY.match(bare) if inside and not bare.startswith("#") else None
        if match is not None and match[1] == "delete":
            yield from (name.strip(" !") for name in match[2].split(","))
        elif match is not None:
            yield match[1]


def is_conf(content: bytes) -> bool:
    """Whether this is a qm configuration: it has keys that no other format has."""
    text = content[:200_000].decode("utf-8", "replace")
    keys = {m[1] for line in text.splitlines() if (m := KEY.match(line.strip()))}
    return bool(keys & {"memory", "cores", "sockets", "scsihw", "ostype", "vmgenid", "bootdisk"})


def is_short_conf(content: bytes) -> bool:
    """Whether this can be a qm configuration, for one who knows that it should be one: all of its
    keys have defaults, and it may have only keys that other formats have too."""
    try:
        return any(map(_OTHER_KEYS.match, parse(content, "").values))
    except ParseError:
        return False


def read_vm(content: bytes, source: str) -> Vm:
    """The VM of a configuration; the pins of single vCPUs are in the hook script.

    Raises ParseError or InputError.
    """
    values = parse(content, source).values
    sockets, cores = count_of(values, "sockets", source), count_of(values, "cores", source)
    machine = (values.get("machine") or "pc").partition(",")[0].removeprefix("type=")
    vm = vm_of_command(options_of(command(content, source)[1:], source), source)
    names = [*(one.bdf for one in vm.hostdevs), *(one.uuid for one in vm.mediated)]
    if len(set(names)) < len(names):
        raise InputError(f"{source}: expected each host device once, found one twice")
    cpu = dict(pairs_of(values.get("cpu", "")))
    model = cpu.get("", cpu.get("cputype", "kvm64"))
    affinity = values.get("affinity")
    pages = _page_bytes(values, source)
    return structs.replace(
        vm,
        name=values.get("name") or f"VM {vmid_of(source) or ''}".strip(),
        uuid=canonical_uuid(dict(pairs_of(values.get("smbios1", ""))).get("uuid", "")),
        domain_type="qemu" if values.get("kvm") == "0" else "kvm",
        architecture=values.get("arch", "x86_64"),
        machine="q35" if "q35" in machine else machine,
        firmware="efi" if values.get("bios") == "ovmf" else None,
        launch_security="sev" if values.get("amd-sev") else None,
        cpu_mode={"host": "host-passthrough", "max": "maximum"}.get(model, "custom"),
        vcpus=sockets * cores,
        cpu_topology=vm.cpu_topology or (sockets, 1, cores, 1)
        if "cores" in values or "sockets" in values
        else None,
        page_bytes=pages if vm.page_bytes is None else vm.page_bytes,
        emulator_pus=None if affinity is None else CpuSet.parse(affinity, f"{source}: affinity"),
        addresses=OWN_SLOTS if "q35" in machine else (),
        has_iommu=vm.has_iommu or "viommu" in values.get("machine", ""),
    )


def vmid_of(source: str) -> str | None:
    match = _VMID.search(source)
    return None if match is None else match[1]


def start_timeout_s(keys: Collection[str], memory_bytes: int) -> int:
    """After how many seconds Proxmox ends the start of a VM whose configuration has these keys.

    Source: config_aware_timeout of PVE::QemuServer::Helpers, qemu-server 9.2.
    """
    memory_mib = memory_bytes // MIB
    seconds = memory_mib // 1024 if memory_mib > 30720 else 30
    if any(map(HOSTPCI.match, keys)):
        seconds *= 4
    if "hugepages" in keys:
        seconds = max(seconds, 150)
    return seconds + 5 * sum(_NET.match(key) is not None for key in keys)


def count_of(values: Mapping[str, str], key: str, source: str) -> int:
    text = values.get(key, "1")
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 6 and int(text)):
        raise ParseError(f"{source}: {key}", "a number above 0", text)
    return int(text)


def _memory_mib(values: Mapping[str, str], source: str) -> int:
    text = dict(pairs_of(values.get("memory", "512")))
    size = text.get("", text.get("current", ""))
    if not (size.isascii() and size.isdigit() and 0 < len(size) < 12 and int(size)):
        raise ParseError(f"{source}: memory", "MiB above 0", values.get("memory", ""))
    return int(size)


def _page_bytes(values: Mapping[str, str], source: str) -> int | None:
    pages = values.get("hugepages")
    if pages is None:
        return None
    if pages not in ("2", "1024", "any"):
        raise ParseError(f"{source}: hugepages", "any, 2 or 1024", pages)
    return 0 if pages == "any" else int(pages) * MIB


def pairs_of(value: str) -> tuple[tuple[str, str], ...]:
    """Keys of a property string; the default key is ""."""
    found = []
    for word in value.split(","):
        key, equals, text = word.partition("=")
        found.append((key, text) if equals else ("", key))
    return tuple(found)


def whole_cards(content: bytes, source: str) -> tuple[Bdf, ...]:
    """The first function of each card that hostpciN names without a function."""
    values = parse(content, source).values
    found = []
    for key in filter(HOSTPCI.match, values):
        keys = dict(pairs_of(values[key]))
        for name in (keys.get("", "") or keys.get("host", "")).split(";"):
            if name and "." not in name and "mdev" not in keys:
                found.append(function_of(name, f"{source}: {key}"))
    return tuple(found)


def with_whole_cards(vm: Vm, content: bytes, source: str, host: Host) -> Vm:
    """The VM with every function that the host has of cards named without one."""
    cards = {(bdf.domain, bdf.bus, bdf.device) for bdf in whole_cards(content, source)}
    there = {hostdev.bdf for hostdev in vm.hostdevs}
    more = tuple(
        GuestHostdev(device.bdf, None)
        for device in host.pci_devices
        if (device.bdf.domain, device.bdf.bus, device.bdf.device) in cards
        and device.bdf not in there
    )
    return structs.replace(vm, hostdevs=(*vm.hostdevs, *more))


def function_of(name: str, source: str) -> Bdf:
    return Bdf.parse(name if "." in name else f"{name}.0", source)


def _arg_words(values: Mapping[str, str], source: str) -> list[str]:
    try:
        return shlex.split(values.get("args", ""))
    except ValueError as error:
        raise ParseError(f"{source}: args", "words of a shell", str(error)) from None


def command(content: bytes, source: str) -> tuple[str, ...]:
    """What Proxmox makes of a configuration, as far as it says where parts of the guest are."""
    values = parse(content, source).values
    sockets, cores = count_of(values, "sockets", source), count_of(values, "cores", source)
    total = sockets * cores
    online = count_of(values, "vcpus", source) if "vcpus" in values else total
    memory = _memory_mib(values, source)
    machine = (values.get("machine") or "pc").partition(",")[0].removeprefix("type=")
    is_q35 = "q35" in machine
    words = ["qemu-system-x86_64", "-name", escaped(values.get("name") or "vm")]
    words += ["-machine", f"type={machine}"]
    words += ["-smp", f"{online},sockets={sockets},cores={cores},maxcpus={total}"]
    words += ["-m", str(memory)]
    words += [word for pair in _numa_words(values, sockets, cores, memory, source) for word in pair]
    if "viommu=intel" in values.get("machine", ""):
        words += ["-device", "intel-iommu,intremap=on,caching-mode=on"]
    words += [
        word for value in _own_devices(values, source, is_q35=is_q35) for word in ("-device", value)
    ]
    return (*words, *_arg_words(values, source))


def _numa_words(
    values: Mapping[str, str], sockets: int, cores: int, memory: int, source: str
) -> Iterator[tuple[str, str]]:
    """Cells of numaN lines; without those, one for each socket."""
    if values.get("numa") not in ("1", "yes", "on", "true"):
        return
    keys = sorted((key for key in values if NUMA.match(key)), key=lambda key: int(key[4:]))
    for number, key in enumerate(keys or [""] * sockets):
        given = dict(pairs_of(values[key])) if key else {}
        size = given.get("memory", "0") if key else str(memory // sockets)
        if not (size.isascii() and size.isdigit() and len(size) < 12):
            raise ParseError(f"{source}: {key}", "memory in MiB", size)
        first = number * cores
        where = f"{source}: {key}"
        vcpus = (
            CpuSet.parse(given.get("cpus", "").replace(";", ","), where)
            if key
            else CpuSet(range(first, first + cores))
        )
        node = key[4:] if key else str(number)
        bound = ""
        if "hostnodes" in given:
            nodes = CpuSet.parse(given["hostnodes"].replace(";", ","), where)
            bound = f"{ranges_text('host-nodes', nodes)},policy={given.get('policy', '')}"
        pages = _page_bytes(values, source)
        kind = "memory-backend-ram"
        path = ""
        if pages is not None:
            kind = "memory-backend-file"
            path = (
                f",mem-path=/run/hugepages/kvm/{(pages or 2 * MIB) // 1024}kB,share=on,prealloc=yes"
            )
        yield "-object", f"{kind},id=ram-node{node},size={size}M{path}{bound}"
        yield "-numa", f"node,nodeid={node}{ranges_text('cpus', vcpus)},memdev=ram-node{node}"


def _own_devices(values: Mapping[str, str], source: str, *, is_q35: bool) -> Iterator[str]:
    """Root ports of its q35 machine, and the functions of hostpciN."""
    keys = sorted(filter(HOSTPCI.match, values), key=lambda key: int(key[7:]))
    if is_q35:
        more = [int(key[7:]) for key in keys if int(key[7:]) > 3]
        for port in (*range(4), *more):
            slot = f"0x1c.{port}" if port < 4 else f"{0x10 + (port - 4) // 8:#x}.{(port - 4) % 8}"
            yield (
                f"pcie-root-port,id=ich9-pcie-port-{port + 1},bus=pcie.0,addr={slot},"
                f"chassis={port + 1},multifunction=on"
            )
    for key in keys:
        number = int(key[7:])
        given = dict(pairs_of(values[key]))
        if "mdev" in given:
            continue  # a vGPU that Proxmox makes, of the GPU that is named
        names = [n for n in (given.get("", "") or given.get("host", "")).split(";") if n]
        for index, name in enumerate(names):
            bdf = function_of(name, f"{source}: {key}")
            sub = f".{index}" if len(names) > 1 else ""
            at = ""
            if is_q35 and given.get("pcie") in ("1", "on", "yes", "true"):
                shared = ",multifunction=on" if len(names) > 1 and not index else ""
                at = f",bus=ich9-pcie-port-{number + 1},addr=0x0{sub}{shared}"
            yield f"vfio-pci,host={bdf},id={key}{sub}{at}"


_HOOK = r"""#!/usr/bin/env bash
# homenode: hook script for a VM of Proxmox, layout {layout}.
# Copy it to a storage with snippets, such as /var/lib/vz/snippets, and make it executable.
set -euo pipefail

"""

_HOOK_TAIL = r"""
# In Proxmox's own list, so that no other VM starts with these devices.
reserve() {
  perl -MPVE::QemuServer::PCI -e \
    'my ($seconds, $vmid, $pid, @ids) = @ARGV;
     my @until = $pid ? (undef, $pid) : ($seconds, undef);
     PVE::QemuServer::PCI::reserve_pci_usage(\@ids, $vmid, @until)' \
    "$reserved_s" "$@"
}

release() {
  perl -MPVE::QemuServer::PCI -e 'PVE::QemuServer::PCI::remove_pci_reservation($ARGV[0])' "$1"
}

vmid=${1:?the id of the VM}
case ${2:?the phase} in
  pre-start)
    if ((${#devices[@]})); then reserve "$vmid" 0 "${devices[@]}"; fi
    prepare
    ;;
  post-start)
    pid=$(</run/qemu-server/"$vmid".pid)
    if ((${#devices[@]})); then reserve "$vmid" "$pid" "${devices[@]}"; fi
    pin "$pid"
    ;;
  post-stop)
    if ((${#devices[@]})); then release "$vmid"; fi
    ;;
  *) ;;
esac
"""


def hook_script(plan: Plan, *, mirrored: bool) -> str | None:
    """The script; None where nothing is left for it to do."""
    if not plan.vcpu_pins and not mirrored:
        return None
    # Proxmox reserves huge pages itself, and devices of hostpciN.
    own = replace(plan, page_reservations=())
    if not mirrored:
        own = with_vm(own, hostdevs=())
    head = _HOOK.replace("{layout}", plan.layout.name)
    # From before `prepare` until the VM runs, with as many NICs as Proxmox takes.
    start_s = start_timeout_s(("hostpci0", "hugepages"), plan.memory_bytes) + 5 * 32
    reserved = f"reserved_s={start_s + 60}\n"
    return head + plan_values(own) + reserved + PREPARE + PIN + _HOOK_TAIL
