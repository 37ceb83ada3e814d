"""QemuUser: whom libvirt's QEMU runs as, where that user gets to, what the kernel has for it. [I/O]

libvirt gives QEMU's user the files that a domain names, and none of the folders above them.
"""

import fcntl
import grp
import gzip
import os
import pwd
import re
import stat
import struct
from pathlib import Path

from msgspec import Struct

from homenode.check.start.needs import READY, Need, NeedAnswer, missing, unknown
from homenode.cpuset import CpuSet
from homenode.input_files import read_kernel_file
from homenode.trusted_path import on_the_way

_SAFE = re.compile(r"[\w.:-]{1,64}\Z", re.ASCII)
_ACL = "system.posix_acl_access"
_OWNER, _USER, _OWNING_GROUP, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


def user_number(text: str, *, is_group: bool = False) -> int | None:
    """The number of a user in a label of libvirt, "+107" or a name; None where there is none."""
    if text.lstrip("+").isdecimal() and text.isascii():
        return int(text.lstrip("+"))
    try:
        return grp.getgrnam(text).gr_gid if is_group else pwd.getpwnam(text).pw_uid
    except KeyError:
        return None


class QemuUser(Struct, frozen=True):
    """A user other than root, with all groups."""

    number: int
    name: str
    groups: frozenset[int]

    @classmethod
    def of_number(cls, number: int | None) -> "QemuUser | None":
        """None where QEMU runs as root, or as who started libvirt."""
        if not number:
            return None
        try:
            known = pwd.getpwuid(number)
        except KeyError:
            return cls(number, str(number), frozenset())
        groups = os.getgrouplist(known.pw_name, known.pw_gid)
        return cls(number, known.pw_name, frozenset(groups))

    def barred(self, path: str) -> str | None:
        """The folder on the way that this user cannot enter, for a message; None where there is
        none. Raises OSError."""
        for part in on_the_way(Path(path)):
            known = part.stat()
            if stat.S_ISDIR(known.st_mode) and not self._may(part, known, 1):
                return f"{path}: user {self.name}, as whom QEMU runs, cannot enter {part}"
        return None

    def may(self, path: Path, right: int) -> bool:
        """Whether it may write (2) or read (4) what libvirt does not give it. Raises OSError."""
        return self._may(path, path.stat(), right)

    def _may(self, path: Path, known: os.stat_result, right: int) -> bool:
        """Source: acl(5), ACCESS CHECK ALGORITHM; include/uapi/linux/posix_acl_xattr.h."""
        if known.st_uid == self.number:
            return bool(known.st_mode >> 6 & right)
        try:
            content = os.getxattr(path, _ACL)
        except OSError:  # it has none: the mode says all
            shift = 3 if known.st_gid in self.groups else 0
            return bool(known.st_mode >> shift & right)
        entries = [*struct.iter_unpack("<HHI", content[4:])]
        mask = next((rights for tag, rights, _ in entries if tag == _MASK), 7)
        for tag, rights, who in entries:
            if tag == _USER and who == self.number:
                return bool(rights & mask & right)
        ours = [
            rights
            for tag, rights, who in entries
            if (tag == _OWNING_GROUP and known.st_gid in self.groups)
            or (tag == _GROUP and who in self.groups)
        ]
        if ours:
            return any(rights & mask & right for rights in ours)
        return any(tag == _OTHERS and rights & right for tag, rights, _ in entries)


def kernel_text(path: str) -> str:
    content = read_kernel_file(path)
    return "" if content is None else content.decode("utf-8", "replace")


_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS of include/uapi/linux/fs.h
_IMMUTABLE, _APPEND = 0x10, 0x20


def unwritable(path: str, *, appended: bool = False) -> str | None:
    """Why not even root can write what is under a path; None where root can.

    appended: nothing is written but at its end. Source: ioctl_iflags(2).
    """
    found = Path(path).stat()
    if stat.S_ISBLK(found.st_mode):
        place = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
        is_ro = kernel_text(f"/sys/dev/block/{place}/ro").strip() == "1"
        return f"{path}: a block device that is read-only" if is_ro else None
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"{path}: its file system is read-only"
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            flags = int.from_bytes(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8))[:4], "little")
        finally:
            os.close(descriptor)
    except OSError:  # a file system that has no flags, or a user who may not read
        return None
    if flags & _IMMUTABLE or (flags & _APPEND and not appended and stat.S_ISREG(found.st_mode)):
        return f"{path}: immutable or append-only: lsattr shows it"
    return None


def pus(_: object, need: Need) -> NeedAnswer:
    """Whether the kernel has these PUs. Source: cpuset.cpus of cgroups; version 1 takes none that
    is offline."""
    wanted = CpuSet.parse(need.value)
    online, possible = (
        CpuSet.parse(kernel_text(f"/sys/devices/system/cpu/{name}").strip())
        for name in ("online", "possible")
    )
    taken = online if Path("/sys/fs/cgroup/cpuset").is_dir() else possible
    if wanted - taken or not wanted & online:
        return missing(f"PUs {wanted - taken or wanted}: this machine has {online}")
    return READY


def module(_: object, need: Need) -> NeedAnswer:
    """Whether the kernel has a part, or can load it. Source: kbuild's modules.builtin and
    modules.dep; CONFIG_IKCONFIG_PROC."""
    name, folder = need.value, Path("/lib/modules", os.uname().release)
    if Path(f"/sys/module/{name}").is_dir():
        return READY
    prefix = "CONFIG_NET_" if name[:4] in ("sch_", "cls_", "act_") else "CONFIG_"
    config = read_kernel_file("/proc/config.gz")
    lines = gzip.decompress(config).decode("ascii", "replace").split("\n") if config else []
    option = f"{prefix}{name.upper()}"
    if f"{option}=y" in lines:
        return READY
    listed = [folder / one for one in ("modules.builtin", "modules.dep")]
    if any(f"/{name}.ko".encode() in (read_kernel_file(str(one)) or b"") for one in listed):
        return READY
    if f"# {option} is not set" in lines or all(one.exists() for one in listed):
        return missing(f"{name}: not in this kernel")
    return unknown(f"{name}: whether this kernel has it")


def partition(_: object, need: Need) -> NeedAnswer:
    """Whether a cgroup is there."""
    if need.value in ("/machine", "/machine.slice"):
        return READY  # libvirt makes its own
    parts = [part for part in need.value.split("/") if part]
    if not parts or any(not _SAFE.match(part) or part == ".." for part in parts):
        return unknown(f"{need.value}: a name that is not looked up")
    path = "/".join(part if "." in part else f"{part}.partition" for part in parts)
    root = Path("/sys/fs/cgroup")
    if any((one / path).is_dir() for one in (root, *root.glob("*"))):
        return READY
    return missing(f"cgroup {path}: libvirt makes none but its own")
