"""The __main__ of homenode.pyz: what is done before homenode can be imported.

A Python that is not isolated is started again, isolated: no PYTHON* variable counts, no
site-packages, no .pth file, no sitecustomize, and no module of the current folder. Until then
nothing is imported that is not built into Python or lies in this archive.

The libraries within are unpacked once, to a folder that only root and the user can change. Before
each use every folder on the way to it is looked at, and every file in it; what is not as it was
packed is unpacked again. packaging/one_file.py makes homenode_one_file.py and payload.zip.
"""

import sys

import homenode_one_file as built

if sys.version_info[:2] != built.PYTHON:
    expected, found = (".".join(map(str, one)) for one in (built.PYTHON, sys.version_info[:2]))
    sys.stderr.write(
        f"homenode: expected Python {expected}, for which this file was built, found {found}\n"
        f"  hint: python{expected} -I {ascii(sys.argv[0])[1:-1]}; or build it for this Python: "
        f"make PYTHON=python{found} pyz\n"
    )
    sys.exit(3)

PRIVATE = 0o700
STALE_S = 3600
"""After which what an interrupted start left behind is removed."""


def start() -> None:
    archive = __loader__.archive
    if not (sys.flags.isolated and sys.flags.no_site):
        start_isolated(archive)
    import os

    before = os.umask(0o777 & ~PRIVATE)
    try:
        tree = unpacked(archive)
    except OSError as error:
        sys.stderr.write(f"homenode: {error}\n")
        sys.exit(3)
    os.umask(before)
    # Nothing of the archive, whose name may be relative to the current folder.
    sys.path[:] = [*(path for path in sys.path if path != archive), f"{tree}/lib", *added()]
    sys.dont_write_bytecode = True
    os.environ["PATH"] = f"{tree}/bin:{os.environ.get('PATH', os.defpath)}"
    from homenode.cli.main import main

    main()


def start_isolated(archive):
    """Never returns. The interpreter is the running one: sys.executable is looked up on PATH."""
    import posix

    try:
        program = posix.readlink("/proc/self/exe")
        posix.stat(program)
    except OSError:  # /proc is not mounted, or Python was replaced while it started
        program = sys.executable
    posix.execv(program, [program, "-I", "-S", "--", archive, *sys.argv[1:]])


def unpacked(archive):
    """The folder with what is packed in the archive. Raises OSError where none can be had."""
    import os

    from trusted_path import tree_size

    user = os.geteuid()
    if os.lstat("/").st_uid not in (0, user):
        raise OSError(
            "expected to see which folders are root's, found a user namespace in which root has no "
            "number\n  hint: start it outside, or install the wheel there: docs/install.md"
        )
    refused = []
    for base in places(user):
        tree = base / built.DIGEST[:32]
        try:
            make_folder(base, user)
            if os.statvfs(base).f_flag & os.ST_NOEXEC:
                raise OSError(f"{base}: its file system is mounted noexec")
            try:
                size = tree_size(tree, user=user)
            except OSError:
                size = None  # not there, or not ours
            if size != (built.FILES, built.BYTES):
                unpack(archive, tree, user)
            return tree
        except OSError as error:
            named = f"{error.filename or base}: {error.strerror}" if error.errno else str(error)
            refused.append(ascii(named)[1:-1])
    raise OSError(
        f"expected a folder to unpack to that only user {user} can change, found none:\n  "
        + "\n  ".join(refused)
    )


def places(user):
    """Folders to unpack to, best first. Services have no home, and may not see root's."""
    import os
    from pathlib import Path

    cache = Path("/var/cache")
    if user != 0:
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache.is_absolute():
            cache = Path(os.environ.get("HOME", ""), ".cache")
    kept = [cache / "homenode"] if cache.is_absolute() else []
    return [*kept, Path(f"/var/tmp/homenode-{user}"), Path(f"/tmp/homenode-{user}")]


def added():
    """The folder of further libraries, as docs/install.md has it, where it is there."""
    import os
    from pathlib import Path

    from trusted_path import changeable, tree_size

    python = "python" + ".".join(map(str, built.PYTHON))
    folder = Path(os.environ.get("HOME", ""), ".local/share/homenode", python)
    if not folder.is_absolute() or not os.path.lexists(folder):
        return []
    why = changeable((folder,), user=os.geteuid(), sticky=True)
    try:
        if why is None:
            tree_size(folder, user=os.geteuid())
            return [str(folder)]
    except OSError as error:
        why = str(error)
    sys.stderr.write(f"homenode: libraries not used: {ascii(why)[1:-1]}\n")
    return []


def make_folder(folder, user):
    """Make a folder that only the user can change. Nothing is made below one that others can."""
    import os
    from contextlib import suppress

    from trusted_path import changeable

    if not os.path.lexists(folder):
        make_folder(folder.parent, user)
        with suppress(FileExistsError):  # since just now: it is looked at like any other
            folder.mkdir(PRIVATE)
    why = changeable((folder,), user=user, sticky=True)
    if why is not None:
        raise OSError(why)


def unpack(archive, tree, user):
    """Put what is packed in place as a whole, under a name that no other user can have."""
    import io
    import os
    import shutil
    import time
    import zipfile
    from hashlib import sha256

    try:
        with zipfile.ZipFile(archive) as outer:
            content = outer.read("payload.zip")
    except zipfile.BadZipFile:
        content = b""
    if sha256(content).hexdigest() != built.DIGEST:
        sys.stderr.write(
            f"homenode: {ascii(archive)[1:-1]}: expected libraries with SHA-256 {built.DIGEST}, "
            "found others: the file is damaged\n  hint: copy it again\n"
        )
        sys.exit(3)
    for left in tree.parent.glob(".part-*"):
        if left.lstat().st_mtime < time.time() - STALE_S:
            shutil.rmtree(left, ignore_errors=True)
    part = tree.parent / f".part-{os.urandom(8).hex()}"
    try:
        part.mkdir()
        with zipfile.ZipFile(io.BytesIO(content)) as inner:
            for one in inner.infolist():
                path = part / "new" / one.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(one.external_attr >> 16, exist_ok=False)
                path.write_bytes(inner.read(one))
        put_in_place(part, tree, user)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def put_in_place(part, tree, user):
    """Rename part/new to tree. What was there before goes: it was not as it was packed, unless
    another start has just put it there."""
    from contextlib import suppress

    from trusted_path import tree_size

    with suppress(OSError):
        (part / "new").rename(tree)
        return
    with suppress(OSError):
        if tree_size(tree, user=user) == (built.FILES, built.BYTES):
            return
    tree.rename(part / "old")
    (part / "new").rename(tree)


if __name__ == "__main__":
    start()
