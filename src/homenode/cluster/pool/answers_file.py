"""The file of answers in a pool's folder. [I/O]

It only saves time. Where it is missing, damaged, written by another version of homenode or cannot
be written, the hosts are planned again. Its second line is a keyed digest of the first, of a key
that this user alone has: what anybody else has written or altered counts as missing too.
"""

import contextlib
import hmac
import os
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import homenode
from homenode import formats
from homenode.change.record_folder import RecordFolder
from homenode.check.verify.boot.guest_files import cache_folder
from homenode.cluster.pool.answers import Answers, StoredAnswers
from homenode.durable import create_file
from homenode.errors import HomenodeError

ANSWERS_FILE = "answers.json"
KEY_FILE = "pool-answers.key"
_KEY_BYTES = 32


def read_answers(folder: Path) -> Answers:
    """The answers in the folder that this version of homenode wrote; else none."""
    program = _program()
    with contextlib.suppress(HomenodeError):
        content = RecordFolder(folder).read(ANSWERS_FILE)
        first, _, seal = (content or b"").partition(b"\n")
        key = _key()
        if key is not None and hmac.compare_digest(seal.strip(), _seal(key, first)):
            stored = formats.decode(first, "pool-answers", StoredAnswers, ANSWERS_FILE)
            if stored.program == program:
                return Answers(stored)
    return Answers(StoredAnswers(program=program))


def write_answers(folder: Path, answers: Answers) -> None:
    """Write the answers, if any was added and this user owns the folder."""
    with contextlib.suppress(HomenodeError, OSError):
        key = _key() if answers.is_new and folder.stat().st_uid == os.geteuid() else None
        if key is not None:
            first = formats.head_line("pool-answers", answers.to_store()).encode().strip()
            content = first + b"\n" + _seal(key, first) + b"\n"
            RecordFolder(folder).write(ANSWERS_FILE, content)


def _seal(key: bytes, content: bytes) -> bytes:
    return blake2b(content, key=key).hexdigest().encode()


def _key() -> bytes | None:
    """This user's key, which is made where there is none; None where it cannot be kept."""
    folder = RecordFolder(cache_folder(), private=True)
    with contextlib.suppress(HomenodeError, OSError):
        if folder.read(KEY_FILE) is None:
            folder.make()
            with contextlib.suppress(FileExistsError):  # another command has made it
                create_file(folder.path / KEY_FILE, secrets.token_bytes(_KEY_BYTES))
        key = folder.read(KEY_FILE)
        return key if key is not None and len(key) == _KEY_BYTES else None
    return None


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
