"""Paths: what this machine's files, devices and sockets answer to the needs of a VM. [I/O]

What is under a path is looked at, and nothing is opened but the heads of disk images.
"""

import errno
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import structs

from homenode.check.start.images import chain_of
from homenode.check.start.machine import StartMachine, by_kind
from homenode.check.start.needs import READY, Need, NeedAnswer, missing, unknown
from homenode.check.start.qemu_user import kernel_text, module, partition, pus, unwritable
from homenode.check.start.rehearsal import refused_image
from homenode.machine.tools.xml_text import parse_xml
from homenode.process import find_program

_OWN_FOLDERS = ("/var/lib/libvirt/qemu/", "/run/libvirt/qemu/", "/var/run/libvirt/qemu/")
"""libvirt makes these and what is below them."""

_NUMERIC = re.compile(r"[0-9a-fA-F:.]{2,45}\Z", re.ASCII)
_SAFE = re.compile(r"[\w.:-]{1,64}\Z", re.ASCII)


def stat_of(path: str) -> os.stat_result | NeedAnswer:
    """What is under a path, or the answer where nothing is."""
    if not path.startswith("/"):
        return missing(f"{path[:200]!r}, which is no absolute path")
    try:
        return Path(path).stat()
    except PermissionError:
        return unknown(f"{path}: this user may not look there")
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        is_gone = isinstance(error, FileNotFoundError)
        link = (
            " (a symbolic link whose target does not exist)"
            if is_gone and Path(path).is_symlink()
            else ""
        )
        return missing(f"{path}: {what.lower()}{link}")


def _kind(
    holds: Callable[[int], bool], expected: str
) -> Callable[[StartMachine, Need], NeedAnswer]:
    def asked(machine: StartMachine, need: Need) -> NeedAnswer:
        found = stat_of(need.value)
        if isinstance(found, NeedAnswer):
            return found
        if not holds(found.st_mode):
            return missing(f"{need.value}: no {expected}")
        return READY

    return asked


def _file(machine: StartMachine, need: Need) -> NeedAnswer:
    found = stat_of(need.detail) if need.kind == "FILE" and need.detail else None
    if isinstance(found, os.stat_result):
        return READY  # a variable store that is there needs no template
    found = stat_of(need.value)
    if isinstance(found, NeedAnswer):
        return found
    if stat.S_ISDIR(found.st_mode):
        return missing(f"{need.value}: a folder")
    return enterable(machine, need.value)


def _backing(machine: StartMachine, need: Need) -> NeedAnswer:
    found = _file(machine, need)
    size = 0 if found is not READY else Path(need.value).stat().st_size
    if not 0 < size < int(need.detail):
        return found
    return missing(f"{need.value}: {size} bytes, less than the {need.detail} of the device")


def _shared(machine: StartMachine, need: Need) -> NeedAnswer:
    """Memory that other VMs share: QEMU makes it, or takes what is there. Source: -device
    ivshmem-plain of QEMU 7.2."""
    path, user = Path("/dev/shm", need.value), machine.user  # noqa: S108  where QEMU looks
    if "/" in need.value or not path.exists():
        return READY
    if path.stat().st_size != int(need.detail):
        return missing(f"{path}: {path.stat().st_size} bytes, expected {need.detail}", "start-file")
    if user is None or (user.may(path, 2) and user.may(path, 4)):
        return READY
    return missing(f"{path}: user {user.name}, as whom QEMU runs, may not write it")


def enterable(machine: StartMachine, path: str) -> NeedAnswer:
    """Whether QEMU's user gets through the folders on the way; the file itself libvirt gives it."""
    user = machine.user
    barred = None if user is None else user.barred(path)
    if barred is None:
        return READY
    return missing(barred, "start-permission")


def _opened(machine: StartMachine, need: Need) -> NeedAnswer:
    """libvirt leaves its owner as it is."""
    found, user = stat_of(need.value), machine.user
    if isinstance(found, NeedAnswer) or user is None or user.may(Path(need.value), 4):
        return READY if isinstance(found, NeedAnswer) else enterable(machine, need.value)
    return missing(f"{need.value}: user {user.name}, as whom QEMU runs, may not read it")


def _image(machine: StartMachine, need: Need) -> NeedAnswer:
    found = stat_of(need.value)
    if isinstance(found, NeedAnswer):
        return found
    is_block = need.kind == "BLOCK"  # QEMU's host_device takes a character device as well
    taken = (stat.S_ISBLK, stat.S_ISCHR) if is_block else (stat.S_ISREG, stat.S_ISBLK)
    if not any(holds(found.st_mode) for holds in taken):
        return missing(f"{need.value}: not a {'block device' if is_block else 'regular file'}")
    return _content(machine, need, need.value, found)


def _content(machine: StartMachine, need: Need, path: str, found: os.stat_result) -> NeedAnswer:
    entered = enterable(machine, path)
    if entered is not READY:
        return entered
    judge = partial(refused_image, machine)
    chain = chain_of(path, need.detail or "raw", judge, is_followed=need.is_followed)
    fault = chain.fault
    if chain.is_corrupt and need.is_written:
        fault = f"{path}: a qcow2 that is marked corrupt: qemu-img check -r all"
    if fault is not None:
        return missing(fault, "start-image")
    for below in chain.files:
        read = structs.replace(need, value=below, is_written=False)
        answer = _locked(read, Path(below).stat()) or enterable(machine, below)
        if answer is not READY:
            return answer
    for data in chain.data_files:
        # libvirt knows of no data file or extent, and leaves its owner as it is.
        user = machine.user
        if user is not None and not user.may(Path(data), 2 if need.is_written else 4):
            why = f"{data}, a data file of {path}: user {user.name} may not open it"
            return missing(why, "start-permission")
    locked = _locked(need, found)
    if locked is not None:
        return locked
    if need.is_written and (barred := unwritable(path)) is not None:
        return missing(barred, "start-permission")
    if machine.user is not None and need.is_written and not found.st_mode & 0o222:
        why = f"{path}: mode {stat.S_IMODE(found.st_mode):o}: its owner may not write it"
        return missing(f"{why}, to whom libvirt gives it", "start-permission")
    says_secret = any(
        one.name == "encryption"
        for one in machine.document.root.at("devices").walk()  # type: ignore[union-attr]
    )
    if chain.is_encrypted and not says_secret:
        return missing(f"{path}: encrypted, and the document has no <encryption>", "start-image")
    if chain.is_encrypted:
        return unknown(f"{path}: whether its secret opens it: values of secrets are not read")
    return READY if chain.unknown is None else unknown(chain.unknown)


_WRITE_USED, _WRITE_BARRED, _READ_BARRED = 101, 201, 200
"""Bytes that QEMU locks of an image: what it does with it, and what others may not do. Source:
RAW_LOCK_PERM_BASE and RAW_LOCK_SHARED_BASE, block/file-posix.c of QEMU 7.2."""


def _locked(need: Need, found: os.stat_result) -> NeedAnswer | None:
    """Whether another QEMU has the image in a way that bars this one."""
    own = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    held = set()
    for line in kernel_text("/proc/locks").splitlines():
        words = line.split()
        if len(words) == 8 and words[1] == "OFDLCK" and words[5] == own:
            first, last = int(words[6]), -1 if words[7] == "EOF" else int(words[7])
            held |= {at for at in (_WRITE_USED, _WRITE_BARRED, _READ_BARRED) if first <= at <= last}
    bars_us = (_WRITE_BARRED if need.is_written else _READ_BARRED) in held
    if bars_us or (_WRITE_USED in held and not need.is_shared):
        return missing(f"{need.value}: another process has it open to write", "start-in-use")
    return None


def _parent(machine: StartMachine, need: Need) -> NeedAnswer:
    path = need.value
    if path.startswith(_OWN_FOLDERS):
        return READY
    found = stat_of(path)
    if isinstance(found, os.stat_result) and stat.S_ISDIR(found.st_mode):
        return missing(f"{path}: a folder")
    above = stat_of(str(Path(path).parent))
    if isinstance(above, NeedAnswer):
        return above
    if not stat.S_ISDIR(above.st_mode):
        return missing(f"{path}: not below a folder")
    appended = need.detail == "on" and isinstance(found, os.stat_result)
    written = [path] * isinstance(found, os.stat_result) + [str(Path(path).parent)] * (not appended)
    whys = (unwritable(one, appended=appended) for one in written)
    why = next(filter(None, whys), None)
    return READY if why is None else missing(why, "start-permission")


def _pipe(machine: StartMachine, need: Need) -> NeedAnswer:
    ends = [stat_of(need.value + end) for end in (".in", ".out")]
    if all(isinstance(one, os.stat_result) for one in ends):
        return READY
    return _kind(stat.S_ISFIFO, "named pipe")(machine, need)


_SOCKET_BYTES = 107
"""Of a path: sun_path of unix(7) less its end."""


def _long(path: str) -> NeedAnswer | None:
    count = len(path.encode())
    if count <= _SOCKET_BYTES:
        return None
    return missing(f"{path[:60]}...: {count} bytes, more than the {_SOCKET_BYTES} of a socket")


def _bound(machine: StartMachine, need: Need) -> NeedAnswer:
    return _long(need.value) or _parent(machine, need)


def _made(machine: StartMachine, need: Need) -> NeedAnswer:
    """Of a display or an argument: libvirt makes what other devices have itself."""
    path, user = Path(need.value), machine.user
    written = path if path.is_file() else path.parent
    found = _bound(machine, need)
    if found is READY and user is not None and not user.may(written, 2):
        why = f"{need.value}: user {user.name}, as whom QEMU runs, may not write {written}"
        return missing(why, "start-permission")
    return found


def _socket(machine: StartMachine, need: Need) -> NeedAnswer:
    if (long := _long(need.value)) is not None:
        return long
    found = _kind(stat.S_ISSOCK, "socket")(machine, need)
    if found is not READY:
        return found
    # To ask for another type makes no connection: the kernel looks for a socket first, then at
    # its type. Source: unix_find_bsd of net/unix/af_unix.c.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        try:
            asked.connect(need.value)
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                return missing(f"{need.value}: nothing listens on it")
            if error.errno != errno.EPROTOTYPE:
                return unknown(f"{need.value}: {(error.strerror or '').lower()}")
    return READY


def program(machine: StartMachine, need: Need) -> NeedAnswer:
    if not need.value.startswith("/"):
        found = find_program(need.value)
        return missing(f"{need.value}: not installed") if found is None else READY
    there = stat_of(need.value)
    if isinstance(there, NeedAnswer):
        return there
    if not stat.S_ISREG(there.st_mode) or not there.st_mode & 0o111:
        return missing(f"{need.value}: not executable")
    return READY


def _variables(machine: StartMachine, need: Need) -> NeedAnswer:
    """libvirt makes it from the template of a loader that it lists."""
    there = stat_of(need.detail) if need.detail else None
    if isinstance(there, os.stat_result) or isinstance(stat_of(need.value), NeedAnswer):
        return READY  # or that the loader is not there is said already
    done = machine.domain_capabilities
    if done is None or done.returncode:
        return unknown(f"{need.value}: libvirt at {machine.uri} does not answer")
    listed = parse_xml(done.stdout, "domainCapabilities", "virsh").iterfind("os/loader/value")
    why = f"{need.value}: libvirt knows no template of its variable store"
    return READY if need.value in (one.text for one in listed) else missing(why)


def is_link(name: str, inside: str = "") -> bool:
    return bool(_SAFE.match(name)) and Path(f"/sys/class/net/{name}/{inside}").is_dir()


def _bridge(machine: StartMachine, need: Need) -> NeedAnswer:
    if not is_link(need.value):
        return missing(f"bridge {need.value}: there is no interface of that name")
    if is_link(need.value, "bridge") or find_program("ovs-vsctl") is not None:
        return READY
    return missing(f"{need.value}: an interface, and no bridge")


def _link(machine: StartMachine, need: Need) -> NeedAnswer:
    if is_link(need.value):
        kind = kernel_text(f"/sys/class/net/{need.value}/type").strip()
        is_direct = need.detail == "direct"
        if is_direct and Path(f"/sys/class/net/{need.value}/master").exists():
            return missing(
                f"{need.value}: it is a port of a bridge or bond, which cannot have a macvtap"
            )
        is_other = is_direct and kind not in ("", _ETHERNET)
        return (
            missing(f"{need.value}: not an Ethernet interface, which macvtap needs")
            if is_other
            else READY
        )
    return missing(f"{need.value}: there is no interface of that name")


_ETHERNET = "1"  # ARPHRD_ETHER
_NAME_BYTES = 15
"""Of an interface: IFNAMSIZ of include/uapi/linux/if.h less its end."""


def _tap(machine: StartMachine, need: Need) -> NeedAnswer:
    """Source: the kernel's tun_show_flags; libvirt makes the device unless it is one already."""
    if len(need.value.encode()) > _NAME_BYTES:
        return missing(f"{need.value}: more than the {_NAME_BYTES} bytes of a name")
    if set(need.value) & set("/: \t"):  # dev_valid_name of net/core/dev.c
        return missing(f"{need.value}: the kernel accepts no such name")
    is_tap = Path(f"/sys/class/net/{need.value}/tun_flags").exists() and need.detail != "new"
    if not is_link(need.value) or is_tap or need.value.startswith(GENERATED):
        return READY
    return missing(f"{need.value}: an interface of that name exists, and is not a tap device")


GENERATED = ("vnet", "macvtap", "macvlan")
"""What names begin with that libvirt gives itself: it leaves those of a document out."""


def _address(machine: StartMachine, need: Need) -> NeedAnswer:
    """An address is this machine's where a socket can be bound to it; the port is the kernel's."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            need.value, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (OSError, UnicodeError):
        known = need.value in ("localhost", socket.gethostname())
        return READY if known else unknown(f"{need.value}: a name, which is not looked up")
    if need.detail == "multicast":
        is_one = ipaddress.ip_address(need.value).is_multicast
        return READY if is_one else missing(f"{need.value}: not a multicast address")
    try:
        with socket.socket(family, kind, protocol) as one:
            one.bind(place)
    except OSError as error:
        return missing(f"{need.value}: {(error.strerror or '').lower()}")
    return READY


def _bind_error(address: str, port: str) -> int | None:
    """Why no socket can be bound to it as QEMU does, as errno; None where one can."""
    if not 0 < int(port) < 1 << 16:  # 0 is libvirt's to choose
        return errno.EADDRNOTAVAIL
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((address if _NUMERIC.match(address) else "", int(port)))
        except OSError as error:
            return error.errno
    return None


def endpoint(need: Need) -> tuple[str, str]:
    """The host and the port of "5900", "127.0.0.1:5900" or "tcp:127.0.0.1:5900-:22"."""
    is_rule = need.value.startswith(("tcp:", "udp:"))
    listens = need.value[4:].partition("-")[0] if is_rule else need.value
    host, _, port = listens.rpartition(":")
    return host.strip("[]") or need.detail, port


def _port(machine: StartMachine, need: Need) -> NeedAnswer:
    host, port = endpoint(need)
    if need.value.startswith("udp:"):
        return READY
    if not port.isdecimal():
        try:
            port = str(socket.getservbyname(port, "tcp"))
        except (OSError, UnicodeError):
            return missing(f"{port[:40]}: neither a port number nor a service of /etc/services")
    number = _bind_error(host, port)
    if number == errno.EADDRINUSE:
        return missing(f"port {port}: in use")
    least = kernel_text("/proc/sys/net/ipv4/ip_unprivileged_port_start").strip() or "1024"
    if 0 < int(port) < int(least) and machine.user is not None:
        why = f"port {port}: user {machine.user.name}, as whom QEMU runs, needs {least} or more"
        return missing(why, "start-permission")
    if number in (None, errno.EADDRNOTAVAIL):  # which the need of the address says
        return READY
    return unknown(f"port {port}: {os.strerror(number).lower()}")


def _display(machine: StartMachine, need: Need) -> NeedAnswer:
    host, display = endpoint(need)
    if not display.isdecimal():
        return READY
    # Display 0 has port 5900.
    return _port(machine, structs.replace(need, value=f"{host}:{5900 + int(display)}"))


def _listener(machine: StartMachine, need: Need) -> NeedAnswer:
    host, port = endpoint(need)
    here = host in ("", "127.0.0.1", "::1", "localhost")
    if not here or not port.isdecimal():
        return unknown(f"{host}:{port}: no connection is made to another machine")
    number = _bind_error(host, port)
    if number == errno.EADDRINUSE:
        return READY
    why = f"{host}:{port}: nothing listens there"
    return missing(why) if number is None else unknown(why)


def _usb(machine: StartMachine, need: Need) -> NeedAnswer:
    folder = Path("/sys/bus/usb/devices")
    if not folder.is_dir():
        return missing(f"USB device {need.value}: this machine has no USB")
    names = need.detail.split()
    base = 10 if "busnum" in names else 16
    wanted = [int(one, 0 if one[:2] == "0x" else base) for one in need.value.split()]
    for device in folder.iterdir():
        read = [kernel_text(str(device / name)).strip() for name in names]
        if all(read) and [int(one, base) for one in read] == wanted:
            return READY
    return missing(f"USB device {need.value}: there is none")


def _scsi(machine: StartMachine, need: Need) -> NeedAnswer:
    place = need.value.removeprefix("scsi_host").replace(" ", ":")
    if _SAFE.match(place) and Path(f"/sys/bus/scsi/devices/{place}").is_dir():
        return READY
    return missing(f"SCSI device {need.value}: there is none")


def _pci(machine: StartMachine, need: Need) -> NeedAnswer:
    words = [int(word, 0) for word in need.value.split()]
    bdf = "{:04x}:{:02x}:{:02x}.{:x}".format(*words)
    device = Path("/sys/bus/pci/devices") / bdf
    if not device.is_dir():
        return missing(f"{bdf}: there is no PCI function of that address")
    if not (device / "iommu_group").exists():
        return missing(f"{bdf}: in no IOMMU group: is the IOMMU on?")
    if not Path("/dev/vfio/vfio").exists() and not Path("/dev/iommu").exists():
        return missing(f"{bdf}: no /dev/vfio/vfio: is the module vfio-pci there?")
    return READY


def _mediated(machine: StartMachine, need: Need) -> NeedAnswer:
    if _SAFE.match(need.value) and Path(f"/sys/bus/mdev/devices/{need.value}").is_dir():
        return READY
    return missing(f"mediated device {need.value}: there is none")


def _scsi_disk(machine: StartMachine, need: Need) -> NeedAnswer:
    found = stat_of(need.value)
    if isinstance(found, NeedAnswer) or not stat.S_ISBLK(found.st_mode):
        return READY  # which the need of the disk says
    place = f"/sys/dev/block/{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    if Path(f"{place}/dm").is_dir():
        return unknown(
            f"{need.value}: a device-mapper device: whether the disk below takes SCSI commands"
        )
    if Path(f"{place}/device/scsi_device").is_dir() or Path(f"{place}/partition").exists():
        return READY
    return missing(f"{need.value}: not a SCSI device, which device='lun' needs")


def _node(machine: StartMachine, need: Need) -> NeedAnswer:
    """detail: the majors of devices that are of the kind; "" = any."""
    found = stat_of(need.value)
    if isinstance(found, NeedAnswer):
        return found
    majors = need.detail.split() if need.detail.replace(" ", "").isdecimal() else []
    is_one = str(os.major(found.st_rdev)) in majors if majors else not stat.S_ISDIR(found.st_mode)
    return READY if is_one else missing(f"{need.value}: not a device of this kind")


def _vhost(machine: StartMachine, need: Need) -> NeedAnswer:
    """libvirt opens it for KVM alone. Source: qemuInterfaceOpenVhostNet of libvirt 9.0."""
    is_kvm = (machine.document.root.get("type") or "kvm") == "kvm"
    return _node(machine, need) if is_kvm else READY


def _tpm(machine: StartMachine, need: Need) -> NeedAnswer:
    found = _node(machine, need)
    is_one = Path("/sys/class/tpm", Path(os.path.realpath(need.value)).name).exists()
    return found if found is not READY or is_one else missing(f"{need.value}: not a TPM")


_disk, _folder = _kind(stat.S_ISBLK, "block device"), _kind(stat.S_ISDIR, "folder")
_block, _program = _image, program
LOOKED_AT = by_kind(
    _file,
    _backing,
    _node,
    _opened,
    _parent,
    _bound,
    _made,
    _pipe,
    _socket,
    _image,
    _variables,
    _bridge,
    _link,
    _address,
    _port,
    _display,
    _tap,
    _listener,
    _usb,
    _scsi,
    _scsi_disk,
    _pci,
    _mediated,
    _shared,
    _vhost,
    _tpm,
    DISK=_disk,
    BLOCK=_block,
    FOLDER=_folder,
    PROGRAM=_program,
    PARTITION=partition,
    MODULE=module,
    PUS=pus,
)
