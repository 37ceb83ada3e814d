"""Durable: files are written completely or not at all, and synced before work continues. [I/O]

homenode writes files only through this module, and reads them only through `input_files`. Root
writes into directories that other users own: a new file has no name until it is complete; a
replacement gets a random name, which must not exist yet, and is renamed. So a kill leaves no file,
and no link of another user is followed, neither under the file's name nor under a guessed name.

Records that undo a change must survive a crash during it. All functions raise OSError.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from homenode.safe.input_files import open_path

_ACL = "system.posix_acl_access"
_OWN_FD_DIRECTORY = "/proc/self/fd"

PARTS = ".homenode-" + "[0-9a-f]" * 16 + ".part"
"""Names of files that are being written, as a pattern of glob."""

PRIVATE = 0o600
"""Mode of files that may hold a secret: the owner alone."""

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def replace_file(
    path: Path,
    content: bytes,
    mode: int | None = PRIVATE,
    *,
    directory: int | None = None,
    synced: bool = True,
) -> None:
    """Write a file atomically. An existing file of that name is replaced, not modified.

    mode: its permissions; None = 0666 without the umask, and at most those of the replaced file.
    directory: descriptor of the directory of `path`, if it must not be resolved again.
    synced: on the disk when this returns.
    """
    with _open_parent(path, directory) as place:
        _check_replaceable(path, place)
        part = make_part_name()
        permissions = 0o666 if mode is None else mode & PRIVATE
        unnamed = _open_unnamed(place, permissions)
        with contextlib.ExitStack() as undo:
            descriptor = unnamed
            if descriptor is None:
                descriptor = os.open(part, _CREATE_FLAGS, permissions, dir_fd=place)
            lock = os.dup(descriptor)
            undo.callback(os.close, lock)
            undo.callback(_remove, part, place)
            try_lock(lock)
            if mode is None:
                mode = _limit_permissions(path.name, place, descriptor)
            write_and_close(descriptor, content, mode, synced=synced)
            if unnamed is None or not _name(lock, path.name, part, place):
                os.replace(part, path.name, src_dir_fd=place, dst_dir_fd=place)
        if synced:
            sync_directory(".", place)


def _open_unnamed(place: int, permissions: int) -> int | None:
    """Open a new file without a name, which is removed with its writer; None if not supported."""
    if not os.access(_OWN_FD_DIRECTORY, os.X_OK):  # needed to name it
        return None
    with contextlib.suppress(OSError):  # overlayfs and NFS have no O_TMPFILE
        return os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, permissions, dir_fd=place)
    return None


def _name(descriptor: int, name: str, part: str, place: int) -> bool:
    """Name an unnamed file; False if the name exists, and the file keeps its part name."""
    source = f"{_OWN_FD_DIRECTORY}/{descriptor}"
    with contextlib.suppress(FileExistsError):
        os.link(source, name, dst_dir_fd=place)
        return True
    sweep_parts(Path(f"{_OWN_FD_DIRECTORY}/{place}"))
    os.link(source, part, dst_dir_fd=place)
    return False


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory; False if another process holds it. A file being written is
    locked, so that it is not taken for a leftover of a kill."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def sweep_parts(directory: Path) -> None:
    """Remove partial files that killed processes of this user left in a directory."""
    for part in directory.glob(PARTS):
        with contextlib.suppress(OSError):  # gone, or a link
            descriptor = open_existing(part)
            try:
                status = os.fstat(descriptor)
                is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_ours and try_lock(descriptor):
                    part.unlink()
            finally:
                os.close(descriptor)


def make_part_name() -> str:
    """Return an unguessable name for a file being written."""
    return f".homenode-{os.urandom(8).hex()}.part"


def create_file(path: Path, content: bytes) -> None:
    """Write a private file that must not exist yet, without sync: losing it in a crash is harmless.
    Raises FileExistsError, for a link as well."""
    with _open_parent(path, None) as place:
        descriptor = os.open(path.name, _CREATE_FLAGS, PRIVATE, dir_fd=place)
        with contextlib.ExitStack() as undo:
            undo.callback(_remove, path.name, place)
            write_and_close(descriptor, content, synced=False)
            undo.pop_all()


def open_new(path: Path) -> int:
    """Open a file that must not exist yet for reading and writing. Raises as `create_file`."""
    with _open_parent(path, None) as place:
        return os.open(path.name, _CREATE_FLAGS & ~os.O_WRONLY | os.O_RDWR, PRIVATE, dir_fd=place)


def create_like(path: Path, content: bytes, like: int) -> None:
    """Write a file that must not exist yet, with the owner, group, permissions and access control
    list of an open file (SELinux labels are not copied).

    Other users never have access. If this user cannot change the owner, the file stays theirs.
    Raises like `create_file`.
    """
    with _open_parent(path, None) as place:
        descriptor = os.open(path.name, _CREATE_FLAGS, PRIVATE, dir_fd=place)
        with contextlib.ExitStack() as undo:
            undo.callback(_remove, path.name, place)
            mode = _copy_owner(descriptor, like)
            write_and_close(descriptor, content, mode)
            undo.pop_all()


def _copy_owner(descriptor: int, like: int) -> int:
    """Copy owner, group and access control list from another file; return the permissions to set.
    The owner can always read and write it."""
    status = os.fstat(like)
    rights = None
    with contextlib.suppress(OSError):  # no list, or not supported
        rights = os.getxattr(like, _ACL)
    with contextlib.suppress(OSError):  # inherited from its directory
        os.removexattr(descriptor, _ACL)
    try:
        os.fchown(descriptor, status.st_uid, status.st_gid)
        if rights is not None:
            os.setxattr(descriptor, _ACL, rights)
    except OSError:
        return PRIVATE
    return stat.S_IMODE(status.st_mode) & 0o666 | PRIVATE


def remove_file(path: Path) -> None:
    """Remove a file if it exists. Root follows no other user's link. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), _open_parent(path, None) as place:
        os.unlink(path.name, dir_fd=place)


def remove_tree(path: Path) -> None:
    """Remove a directory and its content. Root follows no other user's link. Raises OSError."""
    import shutil  # imports archive modules

    with _open_parent(path, None) as place:
        shutil.rmtree(path.name, dir_fd=place)


def _remove(name: str, directory: int) -> None:
    with contextlib.suppress(OSError):  # the first error is raised
        os.unlink(name, dir_fd=directory)


def open_lock(path: Path, mode: int = PRIVATE, *, directory: int | None = None) -> int:
    """Open a file to lock or append to, created if missing; a link is not followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _open_parent(path, directory) as place:
        return os.open(path.name, flags, mode, dir_fd=place)


def open_to_lock(directory: str | Path, parent: int | None = None) -> int:
    """Open a directory for locking, which needs only read permission; `parent` contains it."""
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)


def open_existing(path: str | Path, *, directory: int | None = None) -> int:
    """Open an existing file for reading and writing; a link is not followed."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, dir_fd=directory)


def open_directory(root: Path, *names: str) -> int:
    """Open root/names…, created if missing. `root` may be a link; links below it are not followed.
    The descriptor stays valid if the directory is renamed."""
    root.mkdir(parents=True, exist_ok=True)
    descriptor = open_path(root)
    for name in names:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=descriptor)
            child = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = child
    return descriptor


def check_links(path: Path) -> None:
    """Raise OSError if root would follow another user's link."""
    try:
        os.close(open_path(path))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise  # other errors are reported when it is opened


def write_and_close(
    descriptor: int, content: bytes, mode: int | None = None, *, synced: bool = True
) -> None:
    """Write to an open file, sync and close it. mode: its final permissions."""
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        if synced:
            os.fsync(file.fileno())


def sync_directory(directory: str | Path, parent: int | None = None) -> None:
    """Sync a directory's names to disk; `parent` contains the directory."""
    descriptor = open_to_lock(directory, parent)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _open_parent(path: Path, directory: int | None) -> Iterator[int]:
    if directory is not None:
        yield directory
        return
    place = open_path(path.parent)
    try:
        yield place
    finally:
        os.close(place)


def _check_replaceable(path: Path, place: int) -> None:
    """Raise OSError for a device or a pipe: /dev/null must not become a regular file."""
    try:
        status = os.stat(path.name, dir_fd=place)
    except OSError:  # missing, or a dangling link
        return
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "a device or a pipe, not a regular file", str(path))


def _limit_permissions(name: str, place: int, descriptor: int) -> int | None:
    """Return permissions limited to those of the replaced file; None without one."""
    try:
        status = os.stat(name, dir_fd=place, follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return stat.S_IMODE(status.st_mode & os.fstat(descriptor).st_mode)
