"""BootDirectory: a boot's files, its transient libvirt domain, clean-up of killed boots. [I/O]

A test guest's output counts only if no other user could have written it. So no other user has
access to the directory, except libvirt's QEMU, which runs as another user and may open files by
name. The output files belong to homenode's user at the start, and are checked again when read.

The directory is locked while it is in use. A homenode that is killed leaves it without a lock, and
under libvirt a domain of its name, which is no user's: the next boot removes both.
"""

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from homenode.check.verify.boot.guest_files import refusal_finding, silence_error
from homenode.errors import HostError, InputError, ToolError
from homenode.findings import Finding, finding
from homenode.machine.tools.xml_text import parse_xml
from homenode.process import ToolMissingError, ToolTimeoutError, find_program, run
from homenode.safe.durable import create_file, open_new
from homenode.safe.record_directory import (
    ENTER,
    READ,
    RecordDirectory,
    allow_user,
    check_private,
    create_private_directory,
    find_temporary_root,
)

_PREFIX = "homenode-boot-"
_DOMAIN = "homenode-verify-"
_DOMAIN_MARK = "domain"
"""A file that marks that a domain with the directory's name may exist."""

_NEW_S = 60.0
"""A directory is locked within this time of being made."""

_ELSEWHERE = "TMPDIR=DIR names another directory for it"
_ASK_S = 30
_MAX_BYTES = 64 << 20


class GuestOutput:
    """A file into which QEMU writes what a guest says: only QEMU or homenode can have written it.

    user: QEMU's. It is held open: no other file takes its place. The file keeps its owner if
    libvirt's virtlogd writes it; if QEMU opens it, libvirt first changes the owner to QEMU's user.
    Source: stdio_handler and dynamic_ownership in libvirt's qemu.conf.
    """

    __slots__ = ("_descriptor", "_user", "path")

    def __init__(self, path: Path, user: int) -> None:
        self.path = path
        self._user = user
        self._descriptor = open_new(path)

    def close(self) -> None:
        os.close(self._descriptor)

    def clear(self) -> None:
        """Discard the output before another guest is started."""
        os.ftruncate(self._descriptor, 0)

    def read_output(self) -> bytes:
        """Return the output so far. Raises HostError if another user could have written it."""
        reason = self._reason_for_doubt()
        if reason is not None:
            raise HostError(
                f"{self.path}: expected a file that the test guest alone has written, found "
                f"{reason}: the guest's report is not trusted",
                hint=f"boot again; {_ELSEWHERE}",
            )
        return self.read_unchecked()

    def read_unchecked(self) -> bytes:
        """Return the content without a check of its writer."""
        pieces = []
        at = 0
        while at < _MAX_BYTES and (piece := os.pread(self._descriptor, 1 << 20, at)):
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    def decode_output(self) -> str:
        return self.read_output().decode("utf-8", "replace")

    def _reason_for_doubt(self) -> str | None:
        open_status = os.fstat(self._descriptor)
        try:
            path_status = self.path.lstat()
            directory = self.path.parent.lstat()
        except OSError as error:
            return f"{error.strerror}"
        if stat.S_ISLNK(path_status.st_mode):
            return "a link in its place"
        if (path_status.st_dev, path_status.st_ino) != (open_status.st_dev, open_status.st_ino):
            return "another file in its place"
        if open_status.st_nlink != 1:
            return f"{open_status.st_nlink} names of it"
        # libvirt gives a file back to root that it has not known before.
        if open_status.st_uid not in (0, os.geteuid(), self._user):
            return f"that it belongs to user {open_status.st_uid}"
        if open_status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"that others may write it (mode {stat.S_IMODE(open_status.st_mode):o})"
        if directory.st_uid != os.geteuid() or directory.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
            return f"its directory open to others (mode {stat.S_IMODE(directory.st_mode):o})"
        return None


@contextlib.contextmanager
def boot_directory(uri: str | None = None) -> Iterator[Path]:
    """Create a directory that is removed afterwards. uri: the libvirt whose domains of killed boots
    are ended too. Raises HostError if it cannot be private."""
    check_private(find_temporary_root())
    end_abandoned(find_temporary_root(), uri)
    with (
        create_private_directory(_PREFIX) as directory,
        RecordDirectory(directory).hold_lock("in use by another test guest"),
    ):
        if uri is not None:
            create_file(directory / _DOMAIN_MARK, b"")
        yield directory


def allow_qemu(directory: Path, user: int) -> None:
    """Let QEMU's user enter a boot's directory, but not list it. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        allow_user(descriptor, user, ENTER)
    finally:
        os.close(descriptor)


def copy_for_qemu(path: Path, content: bytes, user: int) -> None:
    """A new file in a boot's directory that QEMU of this user may read. Raises HostError."""
    try:
        with os.fdopen(open_new(path), "wb") as file:
            file.write(content)
            if user != os.geteuid():
                allow_user(file.fileno(), user, READ)
    except OSError as error:
        raise HostError(
            f"{path}: cannot write a file of the test guest: {error.strerror}",
            hint=_ELSEWHERE,
        ) from None


def make_domain_name(directory: Path) -> str:
    """Return the name of a boot's domain, from which its directory is found again."""
    return f"{_DOMAIN}{directory.name.removeprefix(_PREFIX)}"


def end_abandoned(parent: Path, uri: str | None) -> None:
    """End domains and remove directories of killed runs; without a libvirt a domain's stays."""
    now = time.time()
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            state = directory.lstat()
        except OSError:
            continue
        is_ours = state.st_uid == os.geteuid() and directory.is_dir() and not directory.is_symlink()
        if not is_ours or now - state.st_mtime < _NEW_S or RecordDirectory(directory).is_locked:
            continue
        if (directory / _DOMAIN_MARK).exists():
            if uri is None:
                continue
            run(("virsh", "-q", "-c", uri, "destroy", make_domain_name(directory)), _ASK_S)
        shutil.rmtree(directory, ignore_errors=True)


SYSTEM = "qemu:///system"
_STEP_S = 0.25
_LABEL = re.compile(r"\+(\d{1,10}):\+\d{1,10}\Z", re.ASCII)
_ABOUT_THE_DOCUMENT = ("XML ", "unsupported configuration", "requested operation is not valid")


def find_uri(connect: str | None) -> str | None:
    """Return the URI of a libvirt that answers, else None. connect: URI from the user; raises
    ToolError if that daemon does not answer."""
    uri = connect or SYSTEM
    if find_program("virsh") is None:
        if connect is not None:
            raise ToolMissingError("virsh")
        return None
    try:
        failure = run(("virsh", "-c", uri, "uri"), _ASK_S).failure()
    except ToolTimeoutError as error:
        failure = error.message
    if failure is None:
        return uri
    if connect is not None:
        raise ToolError(
            f"{uri}: libvirt does not answer: {failure}",
            hint="--connect none boots with QEMU directly",
        )
    return None


def offers_kvm(uri: str) -> bool:
    """Return whether this libvirt's QEMU has KVM."""
    words = ("domcapabilities", "--virttype", "kvm", "--arch", "x86_64")
    return run(("virsh", "-c", uri, *words), _ASK_S).returncode == 0


def find_qemu_user(uri: str) -> int | None:
    """Return the number of the user as which this libvirt's QEMU runs; None if unknown."""
    answer = run(("virsh", "-q", "-c", uri, "capabilities"), _ASK_S)
    try:
        return parse_user(answer.stdout) if answer.returncode == 0 else None
    except InputError:
        return None


def parse_user(text: str) -> int | None:
    """Return the user in the base label of libvirt's security driver "dac", "+64055:+64055".

    None for a libvirt of a session, which runs QEMU as the session's user. Raises
    ParseError. Source: docs/formatcaps.html; virSecurityDACGetBaseLabel(), libvirt 9.0.
    """
    for model in parse_xml(text, "capabilities", "virsh capabilities").iterfind("host/secmodel"):
        label = model.findtext("baselabel", "")
        match = _LABEL.match(label.strip())
        if model.findtext("model") == "dac" and match is not None:
            return int(match[1])
    return None


def boot(
    uri: str, document: Path, name: str, console: GuestOutput, limit_s: float, source: str
) -> tuple[Finding, ...]:
    """Start a test guest and wait until it is gone; nothing remains in any case. document: its
    definition. source: for findings. Raises ToolTimeoutError if it has not powered off in time."""
    deadline = time.monotonic() + limit_s
    try:
        result = run(("virsh", "-q", "-c", uri, "create", "--validate", str(document)), limit_s)
        if result.returncode:
            message = " ".join(
                line for line in result.list_messages() if "Failed to create domain" not in line
            )
            return (refusal_finding("libvirt", message, source),)
        while _is_there(uri, name):
            if time.monotonic() > deadline:
                raise silence_error(console.decode_output(), limit_s, source)
            time.sleep(_STEP_S)
        return ()
    finally:
        if _is_there(uri, name):
            run(("virsh", "-q", "-c", uri, "destroy", name), _ASK_S)


def find_daemon_trouble(refusals: tuple[Finding, ...], uri: str) -> tuple[Finding, ...]:
    """Return a finding that replaces an error unrelated to the definition; () if it is.

    libvirt names the part of a document that it rejects. With any other error it cannot start
    guests (no namespaces, no socket), or QEMU failed: then QEMU, run directly, fails too and prints
    more.
    """
    message = next((finding.observed for finding in refusals), None)
    if message is None or message.startswith(_ABOUT_THE_DOCUMENT):
        return ()
    return (could_not_start(message, uri),)


def could_not_start(message: str, uri: str) -> Finding:
    """The finding that the test guest was booted with QEMU directly because libvirt failed."""
    expected = f"libvirt at {uri} to start it"
    return finding("libvirt-could-not-start", "the test guest", expected, message, uri)


def _is_there(uri: str, name: str) -> bool:
    return run(("virsh", "-q", "-c", uri, "domstate", name), _ASK_S).returncode == 0
