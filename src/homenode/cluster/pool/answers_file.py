"""The file of answers in a pool's folder. [I/O]

It only saves time. Where it is missing, damaged, written by another version of homenode or cannot
be written, the hosts are planned again.
"""

import contextlib
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import homenode
from homenode import formats
from homenode.change.record_folder import RecordFolder
from homenode.cluster.pool.answers import Answers, StoredAnswers
from homenode.errors import HomenodeError

ANSWERS_FILE = "answers.json"


def read_answers(folder: Path) -> Answers:
    """The answers in the folder that this version of homenode wrote; else none."""
    program = _program()
    with contextlib.suppress(HomenodeError):
        content = RecordFolder(folder).read(ANSWERS_FILE)
        if content is not None:
            stored = formats.decode(content, "pool-answers", StoredAnswers, ANSWERS_FILE)
            if stored.program == program:
                return Answers(stored)
    return Answers(StoredAnswers(program=program))


def write_answers(folder: Path, answers: Answers) -> None:
    """Write the answers, if any was added and this user owns the folder."""
    with contextlib.suppress(HomenodeError, OSError):
        if answers.is_new and folder.stat().st_uid == os.geteuid():
            content = formats.head_line("pool-answers", answers.to_store())
            RecordFolder(folder).write(ANSWERS_FILE, content.encode())


def _program() -> str:
    """The version, and a digest of the program's files: another build may plan otherwise."""
    root = Path(homenode.__file__).parent
    while not root.exists():
        root = root.parent  # inside a zip file: go up to the file itself
    digest = blake2b(digest_size=16)
    for path in _files(root):
        known = path.stat()
        digest.update(f"{path.relative_to(root)}\0{known.st_size}\0{known.st_mtime_ns}\0".encode())
    return f"{homenode.__version__} {digest.hexdigest()}"


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name != "__pycache__")
        yield from (Path(folder, name) for name in sorted(files))
