"""Builds dist/homenode_VERSION_ARCH.deb from a wheel: programs, manual pages, completion, units.

    python packaging/debian.py WHEELS LIBRARIES MANUAL_PAGES DIST

homenode and the libraries of runtime.lock are installed in /usr/lib/homenode, apart from the
distribution's Python modules, with the compiled modules for each Python that has a directory in
LIBRARIES (3.11, 3.12 ...). Nothing in the package is started or enabled by itself.
"""

import gzip
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

HERE = Path(__file__).parent
PROBES = ("homenode-probe", "homenode-probe-static")

LAUNCHER = """#!/usr/bin/python3 -I
import sys

sys.path.insert(1, "/usr/lib/homenode")
from homenode.cli.main import main

sys.exit(main())
"""

CONTROL = """Package: homenode
Version: {version}
Architecture: {architecture}
Section: admin
Priority: optional
Maintainer: {maintainer}
Installed-Size: {kibibytes}
Depends: python3 (>= {python}), python3 (<< {next_python}), libc6 (>= 2.34), libstdc++6
Recommends: pciutils, numactl, libvirt-clients
Suggests: qemu-system-x86, weasyprint
Description: NUMA placement of virtual machines with passed-through GPUs
 Puts every vCPU, every page and every GPU of a virtual machine on its home
 NUMA node, proves that it is there, measures what that is worth, and says
 which layout to run. For libvirt, KubeVirt and GPU nodes under Slurm.
"""

START = "from homenode.cli.main import main; main()"

COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/homenode",
    "zsh": "usr/share/zsh/vendor-completions/_homenode",
    "fish": "usr/share/fish/vendor_completions.d/homenode.fish",
}

LEFT_OUT = re.compile(
    r"(.*/)?__pycache__/.*|\.\..*|.*\.(pyi|pyx|pxd|h|c|pth)"
    r"|[^/]*\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)"
)
"""What runs nothing, what is made anew, and programs of libraries."""

SCRIPT = re.compile(r"[^/]*\.data/scripts/(homenode-probe[^/]*)")


def find_maintainer() -> str:
    """Who answers for the package: DEBFULLNAME and DEBEMAIL, as Debian's tools have it, else the
    author of the last commit. Raises SystemExit where there is neither."""
    name, address = os.environ.get("DEBFULLNAME"), os.environ.get("DEBEMAIL")
    if name and address:
        return f"{name} <{address}>"
    argv = ["git", "-C", str(HERE.parent), "log", "-1", "--format=%an <%ae>"]
    author = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    if not author:
        raise SystemExit("no maintainer of the package: set DEBFULLNAME and DEBEMAIL")
    return author


def contents(wheels: Iterable[Path], libraries: Iterable[Path], lock: Path) -> dict[str, bytes]:
    """Return the files of homenode and its libraries: below lib/ Python's, below bin/ the probes.

    Raises SystemExit if a library of the lock is missing, or if a file differs between Pythons.
    """
    files: dict[str, bytes] = {}
    for wheel in wheels:
        files |= _homenode(wheel)
    for directory in libraries:
        for path, content in _libraries(directory, lock.read_text()).items():
            if files.setdefault(path, content) != content and not path.endswith("/WHEEL"):
                raise SystemExit(f"{directory}: {path} differs from that of another Python")
    return files


def _libraries(directory: Path, lock: str) -> dict[str, bytes]:
    installed = {_normal(library.name): library for library in distributions(path=[str(directory)])}
    files: dict[str, bytes] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", lock, re.M):
        library = installed.get(_normal(name))
        if library is None or library.version != version:
            present = "not installed" if library is None else library.version
            raise SystemExit(f"{directory}: {name}: expected {version}, found {present}")
        files |= _files(library)
    return files


def _files(library: Distribution) -> dict[str, bytes]:
    return {
        f"lib/{path}": Path(str(library.locate_file(path))).read_bytes()
        for path in library.files or ()
        if not LEFT_OUT.fullmatch(str(path))
    }


def _homenode(wheel: Path) -> dict[str, bytes]:
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            script = SCRIPT.fullmatch(name)
            if script:
                files[f"bin/{script[1]}"] = archive.read(name)
            elif not LEFT_OUT.fullmatch(name) and not name.endswith("/"):
                files[f"lib/{name}"] = archive.read(name)
    return files


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def build(wheels: Path, libraries: Path, manual_pages: Path, dist: Path) -> Path:
    """Return the package's path. The tree that it is made of is removed again."""
    (wheel,) = wheels.glob("homenode-*.whl")
    version = wheel.name.split("-")[1]
    pythons = sorted(libraries.iterdir(), key=lambda directory: int(directory.name.split(".")[1]))
    major, newest = map(int, pythons[-1].name.split("."))
    architecture = _output("dpkg", "--print-architecture")
    tree = dist / "deb"
    shutil.rmtree(tree, ignore_errors=True)
    library = tree / "usr/lib/homenode"
    packed = contents(sorted(wheels.glob("*.whl")), pythons, HERE / "runtime.lock")
    if missing := [name for name in PROBES if f"bin/{name}" not in packed]:
        raise SystemExit(f"{wheels}: {missing[0]} is in no wheel")
    for name, content in packed.items():
        place, _, path = name.partition("/")
        target = (tree / "usr/bin" if place == "bin" else library) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o755 if place == "bin" else 0o644)
    binaries = tree / "usr/bin"
    _write(binaries / "homenode", LAUNCHER, 0o755)
    for page in sorted(manual_pages.glob("homenode*.1")):
        target = tree / "usr/share/man/man1" / f"{page.name}.gz"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(page.read_bytes(), mtime=0))
    for shell, path in COMPLETIONS.items():
        _write(tree / path, _completion(library, shell))
    _write(tree / "usr/share/doc/homenode/copyright", (HERE.parent / "LICENSE").read_text())
    size = sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file())
    control = CONTROL.format(
        version=version,
        maintainer=find_maintainer(),
        architecture=architecture,
        kibibytes=size // 1024,
        python=pythons[0].name,
        next_python=f"{major}.{newest + 1}",
    )
    _write(tree / "DEBIAN/control", control)
    # Bytecode is made at installation, as Debian's own packages do, and goes before removal.
    _write(
        tree / "DEBIAN/postinst",
        "#!/bin/sh\nset -e\npython3 -I -m compileall -qq /usr/lib/homenode || true\n",
        0o755,
    )
    _write(
        tree / "DEBIAN/prerm",
        "#!/bin/sh\nset -e\nfind /usr/lib/homenode -name __pycache__ "
        "-type d -prune -exec rm -rf {} +\n",
        0o755,
    )
    package = dist / f"homenode_{version}_{architecture}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(tree), str(package)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    shutil.rmtree(tree)
    return package


def _completion(library: Path, shell: str) -> str:
    """What homenode itself prints for a shell to read."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", START, "--show-completion", shell],
        env={**os.environ, "PYTHONPATH": str(library)},
        check=True,
        capture_output=True,
        text=True,
    )
    if "homenode" not in done.stdout:
        raise SystemExit(f"completion for {shell}: no script: {done.stdout!r}")
    return done.stdout


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    print(build(*map(Path, sys.argv[1:])))
