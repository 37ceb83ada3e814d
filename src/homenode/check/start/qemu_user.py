"""QemuUser: who libvirt's QEMU runs as, and which paths that user gets to. [I/O]

libvirt gives QEMU's user the files that a domain names, and none of the folders above them. Access
control lists are not read: where a folder has one, it is not known who may enter.
"""

import contextlib
import os
import pwd
import stat
from pathlib import Path

from msgspec import Struct

from homenode.check.verify.boot.libvirt import user_of_capabilities
from homenode.trusted_path import on_the_way

_ACL = "system.posix_acl_access"


class QemuUser(Struct, frozen=True):
    """A user other than root, with all groups."""

    number: int
    name: str
    groups: frozenset[int]

    @classmethod
    def of_capabilities(cls, text: str) -> "QemuUser | None":
        """None where QEMU runs as root, or as who started libvirt."""
        number = user_of_capabilities(text)
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
        none, or a list decides. Raises OSError."""
        for part in on_the_way(Path(path)):
            known = part.stat()
            if stat.S_ISDIR(known.st_mode) and not self._may(part, known, 1):
                return f"{path}: user {self.name}, as whom QEMU runs, cannot enter {part}"
        return None

    def may_write(self, path: str) -> bool:
        """Whether it may write a file that libvirt does not give it. Raises OSError."""
        return self._may(Path(path), Path(path).stat(), 2)

    def _may(self, path: Path, known: os.stat_result, right: int) -> bool:
        with contextlib.suppress(OSError):  # it has none
            os.getxattr(path, _ACL)
            return True
        if known.st_uid == self.number:
            return bool(known.st_mode >> 6 & right)
        if known.st_gid in self.groups:
            return bool(known.st_mode >> 3 & right)
        return bool(known.st_mode & right)
