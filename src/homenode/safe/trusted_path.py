"""Trusted path: whether another user can change a path's target; private directories. [I/O]

Programs that root runs, and files that root and its child processes open by name, must not be
writable for other users: the file, every directory above it, and those of every link on the path.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_LINKS = 40
_ACL = "system.posix_acl_access"
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
READ, ENTER = 4, 1
"""Rights of an entry of an access control list."""


def find_other_writer(paths: Iterable[Path], *, user: int = 0, sticky: bool = False) -> str | None:
    """Return which other user could change a path's target, for a message; None if no user could.

    user: whose files and directories are trusted like root's. sticky: directories like /tmp are
    trusted too, where users cannot rename or remove each other's files: for a path whose last part
    belongs to `user`, or is about to be created.

    The path is checked from / downwards, so that checked parts cannot be replaced.
    """
    users = _list_trusted_users(user)
    for path in paths:
        try:
            for part in walk_components(path):
                reason = _find_other_writer(str(part), part.lstat(), users, user, sticky=sticky)
                if reason is not None:
                    return f"{part} {reason}"
        except OSError as error:
            return f"{error.filename or path}: {error.strerror}"
    return None


def _list_trusted_users(user: int) -> frozenset[int]:
    """Return root, the user and the owner of /, who can replace everything (user namespaces)."""
    return frozenset((0, user, os.lstat("/").st_uid))


def _find_other_writer(
    path: str,
    status: os.stat_result,
    trusted_users: frozenset[int],
    user: int,
    *,
    sticky: bool = False,
) -> str | None:
    if status.st_uid not in trusted_users:
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return None  # only its directory's mode counts
    if sticky and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if status.st_mode & stat.S_IWGRP:
        if not _is_group_of_one(status.st_gid, user):
            return f"can be written by group {status.st_gid}"
        with contextlib.suppress(OSError):  # it has no list, or the file system has no lists
            os.getxattr(path, _ACL, follow_symlinks=False)
            return "can be written by other users in its access control list"
    return None


def _is_group_of_one(group: int, user: int) -> bool:
    """Return whether only root and the user are in a group: root's, or the user's private group."""
    if group == 0:
        return True
    try:
        group_entry, user_entry = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    members = set(group_entry.gr_mem) - {user_entry.pw_name}
    return user_entry.pw_gid == group and user_entry.pw_name == group_entry.gr_name and not members


@contextlib.contextmanager
def create_private_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a directory with an unguessable name that only this user can enter; removed
    afterwards.

    parent: its directory; None = the directory of temporary files. Raises HostError if another user
    could replace it.
    """
    import tempfile

    parent = find_temporary_root() if parent is None else parent
    check_private(parent)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as path:
        yield Path(path)


def find_temporary_root() -> Path:
    """Return the parent of private directories: $TMPDIR, else /tmp."""
    import tempfile

    return Path(tempfile.gettempdir())


def check_private(parent: Path) -> None:
    """Raise HostError if another user could rename files created in a directory."""
    reason = find_other_writer((parent,), user=os.geteuid(), sticky=True)
    if reason is not None:
        from homenode.errors import HostError

        raise HostError(
            f"{parent}: other users can replace files in this directory: {reason}",
            hint="TMPDIR=DIR, such as /var/tmp",
        )


def allow_user(descriptor: int, user: int, rights: int) -> None:
    """Give one other user access to a file or directory of this user, and nobody else.

    rights: READ for a file, ENTER for a directory, whose names that user cannot list then. Raises
    OSError if the file system has no access control lists. Source: acl(5);
    include/uapi/linux/posix_acl_xattr.h.
    """
    no_one = 0xFFFFFFFF
    owner_rights = os.fstat(descriptor).st_mode >> 6 & 7
    entries = (
        (_OWNER, owner_rights, no_one),
        (_USER, rights, user),
        (_GROUP, 0, no_one),
        (_MASK, rights, no_one),
        (_OTHERS, 0, no_one),
    )
    packed_entries = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(descriptor, _ACL, struct.pack("<I", 2) + packed_entries)


def walk_components(path: Path) -> Iterator[Path]:
    """Yield the directories above a path, then the path; for a link those of its target instead."""
    directory, links = Path("/"), 0
    pending = [*path.absolute().parts[:0:-1]]
    yield directory
    while pending:
        name = pending.pop()
        if name == "..":  # of a directory without links, as all were followed
            directory = directory.parent
            continue
        part = directory / name
        yield part
        if not part.is_symlink():
            directory = part
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = part.readlink()
        directory = Path("/") if target.is_absolute() else directory
        pending += [name for name in target.parts[::-1] if name != target.anchor]
