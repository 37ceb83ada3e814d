"""Restore: keep the original next to the tuned document, and put it back. [I/O]

OUT.xml.orig is the original; OUT.xml.orig.sha256 has its sum and that of OUT.xml, for sha256sum -c,
and those of scripts that were written next to OUT.xml.
A comment there has the sum of a tuned document that is being replaced by another, so that a kill
between the two writes leaves a known file.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from homenode.errors import HostError, InputError, not_found
from homenode.safe.durable import PRIVATE, remove_file, replace_file
from homenode.safe.input_files import MAX_BYTES, read_below, resolve_links
from homenode.text import command_line

_LINE = re.compile(r"(# before: )?([0-9a-f]{64}) [ *](.+)\Z")


class SavedOriginal(Struct, frozen=True):
    """The paths of a tuned document and its original."""

    output: Path
    original: Path
    record: Path


class _Sums(NamedTuple):
    """sha256 of the original, of the tuned document, and of the tuned one before it."""

    original: str
    tuned: str
    before: str | None
    scripts: Mapping[str, str]  # scripts next to the document, by name

    @property
    def of_documents(self) -> tuple[str | None, ...]:
        return self.original, self.tuned, self.before


def write_tuned(
    output: str | Path,
    original: bytes,
    tuned_xml: bytes,
    mode: int = PRIVATE,
    scripts: Mapping[str, bytes] = MappingProxyType({}),
) -> SavedOriginal:
    """Write the tuned document with its original next to it; each file is replaced atomically.
    scripts: content of those that were written next to it, by name; scripts of an earlier layout
    are removed.

    Planning again over a tuned document keeps the first original. mode: permissions of the input
    (PRIVATE if it was no file: it may hold passwords); `output` keeps fewer. Raises InputError if
    another original is saved already, HostError if a file cannot be written.
    """
    try:
        saved = locate_original(output)
        permissions = _read_permissions(saved.output)
        mode = mode if permissions is None else mode & permissions
        keep = _find_kept_original(saved, original)
        if keep is None:
            replace_file(saved.original, original, mode)
            keep = original
        stale = [path for path in _list_scripts(saved) if path.name not in scripts]
        record = _record(saved, keep, tuned_xml, _check_our_scripts(saved), scripts)
        replace_file(saved.record, record, mode)
        replace_file(saved.output, tuned_xml, mode)
        for path in stale:
            remove_file(path)
    except OSError as error:
        raise HostError(f"{output}: cannot write: {error.strerror}") from None
    return saved


def is_tuned_output(output: str | Path) -> bool:
    """Return whether this file is a tuned document by homenode that was not changed since."""
    try:
        return _check_our_scripts(locate_original(output)) is not None
    except (OSError, HostError):
        return False


class RestorableFile(Struct, frozen=True):
    """The content to restore, and the content that it replaces."""

    saved: SavedOriginal
    current: bytes | None  # None: the tuned document is gone
    original: bytes
    scripts: tuple[Path, ...] = ()  # next to it, to be removed: unchanged ones of its layout
    edited_scripts: tuple[Path, ...] = ()  # kept


def preview_restore(output: str | Path) -> RestorableFile:
    """Return what restore would do, and write nothing. Raises the same errors."""
    try:
        saved = locate_original(output)
        sums = _read_record(saved)
        original = _read_content(saved.original)
        current = _read_content(saved.output) if saved.output.exists() else None
    except OSError as error:
        raise _make_error(error, output) from None
    if _sum(original) != sums.original:
        raise InputError(
            f"{saved.original} was edited since it was saved, with sha256 {sums.original}",
            hint="restore it from a backup; nothing was written",
        )
    if current is not None and _sum(current) not in sums.of_documents:
        raise InputError(
            f"{saved.output} was edited since homenode wrote it, with sha256 {sums.tuned}",
            hint="to drop the edits: " + command_line("cp", saved.original, saved.output),
        )
    edited_scripts = _list_scripts(saved, edited=True)
    return RestorableFile(saved, current, original, _list_scripts(saved), edited_scripts)


def restore(output: str | Path) -> Path:
    """Put the original back in place of a tuned document, remove the scripts of its layout, and
    return its path. Raises InputError if no original is saved or a file has changed; nothing is
    written then."""
    restorable = preview_restore(output)
    saved = restorable.saved
    try:
        permissions = _read_permissions(saved.output)
        original_mode = saved.original.lstat().st_mode & 0o777
        replace_file(
            saved.output, restorable.original, original_mode if permissions is None else permissions
        )
        for path in restorable.scripts:
            remove_file(path)
        remove_file(saved.record)
        remove_file(saved.original)
    except OSError as error:
        raise _make_error(error, output) from None
    return saved.output


def _make_error(error: OSError, output: str | Path) -> HostError:
    return HostError(f"{error.filename or output}: cannot restore: {error.strerror}")


def locate_original(output: str | Path) -> SavedOriginal:
    """Return the path of a tuned document's original, whether or not it exists."""
    # A link is kept: the files are next to its target.
    path = resolve_links(Path(output))
    return SavedOriginal(
        path, path.with_name(path.name + ".orig"), path.with_name(path.name + ".orig.sha256")
    )


def _find_kept_original(saved: SavedOriginal, content: bytes) -> bytes | None:
    """The original that is saved already, if `content` is that original or its tuned document."""
    if not saved.original.exists():
        return None
    saved_content = _read_content(saved.original)
    if saved_content == content:
        return saved_content
    if saved.record.exists():
        sums = _read_record(saved)
        if _sum(content) in (sums.tuned, sums.before) and _sum(saved_content) == sums.original:
            return saved_content  # planned again in place: keep the first original
    undo = command_line("homenode", "restore", saved.output)
    if saved.output.exists() and _check_our_scripts(saved) is None:  # edited: no other way back
        undo = command_line("cp", saved.original, saved.output)
    raise InputError(
        f"{saved.original} is the original of another definition",
        hint=f"{undo} first, or choose another -o",
    )


def _check_our_scripts(saved_original: SavedOriginal) -> str | None:
    """Return the sha256 of the output, if homenode wrote it, or it equals the original."""
    if not saved_original.record.exists() or not saved_original.output.exists():
        return None
    try:
        sums = _read_record(saved_original)
    except InputError:
        return None  # damaged: it is about to be written again
    digest = _sum(_read_content(saved_original.output))
    return digest if digest in sums.of_documents else None


def _list_scripts(saved_original: SavedOriginal, *, edited: bool = False) -> tuple[Path, ...]:
    """Return the unchanged, or edited, scripts that homenode wrote next to a document."""
    if not saved_original.record.exists():
        return ()
    try:
        scripts = _read_record(saved_original).scripts
    except InputError:
        return ()  # damaged
    paths = {saved_original.output.with_name(name): digest for name, digest in scripts.items()}
    return tuple(
        p
        for p, digest in paths.items()
        if p.exists() and (_sum(_read_content(p)) != digest) is edited
    )


def _record(
    saved: SavedOriginal,
    original: bytes,
    tuned: bytes,
    before: str | None,
    scripts: Mapping[str, bytes],
) -> bytes:
    lines = [f"{_sum(original)}  {saved.original.name}\n", f"{_sum(tuned)}  {saved.output.name}\n"]
    lines += [f"{_sum(content)}  {name}\n" for name, content in scripts.items()]
    if before not in (None, _sum(tuned)):
        lines.append(f"# before: {before}  {saved.output.name}\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


def _read_record(saved: SavedOriginal) -> _Sums:
    if not saved.record.exists() or not saved.original.exists():
        if not saved.output.exists():
            raise not_found(str(saved.output), "file", "homenode restore NAME, for a VM of libvirt")
        raise InputError(
            f"{saved.output} has no saved original: {saved.original.name} and {saved.record.name}",
            hint="only what homenode plan VM -o FILE wrote can be restored, once",
        )
    sums: dict[str, str] = {}
    before = None
    text = _read_content(saved.record).decode("utf-8", "surrogateescape")
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None and match[1]:
            before = match[2]
        elif match is not None:
            sums[match[3]] = match[2]
    scripts = {name: digest for name, digest in sums.items() if Path(name).name == name != ".."}
    try:
        original, tuned = (scripts.pop(path.name) for path in (saved.original, saved.output))
        return _Sums(original, tuned, before, scripts)
    except KeyError:
        raise InputError(
            f"{saved.record}: expected the sha256 of {saved.original.name} and of "
            f"{saved.output.name}, found {sorted(sums) or 'none'}"
        ) from None


def _read_content(path: Path) -> bytes:
    """A file's content. Links are not followed: the directory's owner may point them anywhere."""
    return read_below(path.parent, path.name, MAX_BYTES)


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_permissions(path: Path) -> int | None:
    return path.stat().st_mode & 0o777 if path.exists() else None
