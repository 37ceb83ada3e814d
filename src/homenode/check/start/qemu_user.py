"""QemuUser: who libvirt's QEMU runs as, and which paths that user gets to. [I/O]

libvirt gives QEMU's user the files that a domain names, and none of the folders above them.
"""

import grp
import os
import pwd
import stat
import struct
from pathlib import Path

from msgspec import Struct

from homenode.trusted_path import on_the_way

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
