"""Builds homenode.pyz: one file that needs Python alone, from a wheel and installed libraries.

    python packaging/one_file.py WHEEL SITE_PACKAGES LOCK FILE

The libraries are those of the lock, in its versions, taken from the site-packages of a Python of
the version that builds. The same input gives the same file, byte for byte.

The file is a shell script of a few lines, which looks for that Python and starts it isolated, with
a zip archive after it, which `python3 FILE` runs as well: one_file_main.py, and the libraries as an
archive within.
"""

import io
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from importlib.metadata import Distribution, distributions
from pathlib import Path

HERE = Path(__file__).parent
VERSION = sys.version_info[:2]
PYTHON = f"python{VERSION[0]}.{VERSION[1]}"
SHELL = """#!/bin/sh
# homenode {version} for Python {python} on {machine}. After these lines comes a zip archive.
set -f
IFS=:
for folder in $PATH /usr/local/bin /usr/bin /bin; do
  case $folder in
    /*) [ -f "$folder/{program}" ] && [ -x "$folder/{program}" ] &&
      exec "$folder/{program}" -I -S -- "$0" "$@" ;;
  esac
done
echo 'homenode: expected {program} on PATH, found none' >&2
echo '  hint: install Python {python}, or build this file for the Python of this host: make pyz' >&2
exit 3
"""
"""A relative or empty part of PATH would be a program of the current folder."""

LEFT_OUT = re.compile(
    r"(.*/)?__pycache__/.*|\.\..*|.*\.(pyi|pyx|pxd|h|c|pth)"
    r"|[^/]*\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)"
)
"""What runs nothing, what is made anew, and programs of libraries. No .pth is read."""

SCRIPT = re.compile(r"[^/]*\.data/scripts/(homenode-probe[^/]*)")
THE_SAME_TIME = (1980, 1, 1, 0, 0, 0)


def contents(wheel: Path, libraries: Path, lock: Path) -> dict[str, bytes]:
    """The files of homenode and its libraries: below lib/ Python's, below bin/ the probes. Raises
    SystemExit where a library of the lock is missing."""
    return {**_libraries(libraries, lock.read_text()), **_homenode(wheel)}


def build(wheel: Path, libraries: Path, lock: Path, file: Path) -> None:
    """Write the file. Raises as `contents` does."""
    packed = contents(wheel, libraries, lock)
    packed |= _compiled(packed)
    payload = _payload(packed)
    built = {
        "PYTHON": VERSION,
        "DIGEST": sha256(payload).hexdigest(),
        "FILES": len(packed),
        "BYTES": sum(map(len, packed.values())),
    }
    head = SHELL.format(
        version=wheel.name.split("-")[1],
        python=PYTHON.removeprefix("python"),
        machine=platform.machine(),
        program=PYTHON,
    )
    content = io.BytesIO()
    content.write(head.encode())
    # Stored, not compressed: nothing need be imported to read them.
    with zipfile.ZipFile(content, "a") as archive:
        for name, text in (
            ("__main__.py", (HERE / "one_file_main.py").read_bytes()),
            (
                "homenode_one_file.py",
                "".join(f"{key} = {one!r}\n" for key, one in built.items()).encode(),
            ),
            ("trusted_path.py", (HERE.parent / "src/homenode/trusted_path.py").read_bytes()),
            ("payload.zip", payload),
        ):
            archive.writestr(zipfile.ZipInfo(name, THE_SAME_TIME), text)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(content.getvalue())
    part.chmod(0o755)
    part.replace(file)


def _libraries(folder: Path, lock: str) -> dict[str, bytes]:
    installed = {_normal(one.name): one for one in distributions(path=[str(folder)])}
    found: dict[str, bytes] = {}
    for name, version, condition in re.findall(r"^([\w.-]+)==([^\s;\\]+) *(;)?", lock, re.M):
        library = installed.get(_normal(name))
        if library is None and condition:
            continue  # for another kind of Python or system
        if library is None or library.version != version:
            there = "none" if library is None else library.version
            raise SystemExit(f"{folder}: expected {name} {version}, as in the lock, found {there}")
        found |= _files(library)
    return found


def _files(library: Distribution) -> dict[str, bytes]:
    return {
        f"lib/{path}": Path(str(library.locate_file(path))).read_bytes()
        for path in library.files or ()
        if not LEFT_OUT.fullmatch(str(path))
    }


def _homenode(wheel: Path) -> dict[str, bytes]:
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            script = SCRIPT.fullmatch(name)
            if script:
                found[f"bin/{script[1]}"] = archive.read(name)
            elif not LEFT_OUT.fullmatch(name) and not name.endswith("/"):
                found[f"lib/{name}"] = archive.read(name)
    return found


def _compiled(packed: dict[str, bytes]) -> dict[str, bytes]:
    """Bytecode that is used as it is, without a look at the time of its source."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name, content in packed.items():
            if name.endswith(".py"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        options = ("-q", "-q", "--invalidation-mode", "unchecked-hash", "-s", text, "lib")
        subprocess.run(
            [sys.executable, "-I", "-m", "compileall", *options],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=False,  # some libraries carry files for other Pythons
        )
        made = sorted(folder.rglob("*.pyc"))
        return {str(path.relative_to(folder)): path.read_bytes() for path in made}


def _payload(packed: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, one in sorted(packed.items()):
            entry = zipfile.ZipInfo(name, THE_SAME_TIME)
            entry.external_attr = (0o700 if name.startswith("bin/") else 0o600) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, one)
    return content.getvalue()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    build(*map(Path, sys.argv[1:]))
