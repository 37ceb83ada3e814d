"""BootFolder: a folder for the files of one boot, and the end of what killed boots left. [I/O]

The folder is locked while it is in use. A homenode that is killed leaves it without a lock, and
under libvirt a domain of its name: the next boot removes both.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from homenode.process import run
from homenode.record_folder import RecordFolder

_PREFIX = "homenode-boot-"
_DOMAIN = "homenode-verify-"
_OF_LIBVIRT = "domain"
"""A file that says that a domain of this folder's name may be there."""

_NEW_S = 60.0
"""A folder is locked within this time of being made."""

_ASK_S = 30


@contextlib.contextmanager
def boot_folder(uri: str | None = None) -> Iterator[Path]:
    """A new folder, gone afterwards. uri: the libvirt whose domains of killed boots end too."""
    end_abandoned(Path(tempfile.gettempdir()), uri)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as text:
        folder = Path(text)
        with RecordFolder(folder).locked("a folder of its own"):
            # QEMU runs as another user under libvirt and must get in.
            folder.chmod(0o711)
            if uri is not None:
                (folder / _OF_LIBVIRT).touch()
            yield folder


def domain_name(folder: Path) -> str:
    """The name of a boot's domain, from which its folder is found again."""
    return f"{_DOMAIN}{folder.name.removeprefix(_PREFIX)}"


def end_abandoned(parent: Path, uri: str | None) -> None:
    """Ends and removes what homenodes left that were killed. Folders whose domain cannot be asked
    for, as no libvirt is given, stay."""
    now = time.time()
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            stated = folder.lstat()
        except OSError:
            continue
        is_ours = stated.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
        if not is_ours or now - stated.st_mtime < _NEW_S or RecordFolder(folder).is_locked:
            continue
        if (folder / _OF_LIBVIRT).exists():
            if uri is None:
                continue
            for action in (("destroy",), ("undefine", "--keep-nvram")):
                run(("virsh", "-q", "-c", uri, *action, domain_name(folder)), _ASK_S)
        shutil.rmtree(folder, ignore_errors=True)
