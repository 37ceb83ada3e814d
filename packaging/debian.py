"""Builds dist/homenode_VERSION_ARCH.deb from a wheel: programs, manual pages, completion, units.

    python packaging/debian.py WHEEL SITE_PACKAGES MANUAL_PAGES DIST

homenode and the libraries of runtime.lock, taken from SITE_PACKAGES, lie in /usr/lib/homenode,
apart from the distribution's Python modules; /usr/bin/homenode starts the distribution's Python
with them alone. The package is for the Python minor version that builds it. Nothing in it starts or
is enabled by itself.
"""

import gzip
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NEXT_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor + 1}"
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
Maintainer: the homenode authors <maintainers@homenode.invalid>
Installed-Size: {kibibytes}
Depends: python3 (>= {python}), python3 (<< {next_python}), libc6 (>= 2.34)
Recommends: pciutils, numactl, libvirt-clients
Suggests: qemu-system-x86, libpango-1.0-0, libpangoft2-1.0-0, libharfbuzz-subset0
Description: NUMA placement of virtual machines with passed-through GPUs
 Puts every vCPU, every page and every GPU of a virtual machine on its home
 NUMA node, proves that it is there, measures what that is worth, and says
 which layout to run. For libvirt, KubeVirt and GPU nodes under Slurm.
"""

START_AS_INSTALLED = (
    "import sys; sys.argv[:] = ['homenode']; from homenode.cli.main import main; main()"
)
"""The name decides which variable asks for completion."""

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


def contents(wheel: Path, libraries: Path, lock: Path) -> dict[str, bytes]:
    """The files of homenode and its libraries: below lib/ Python's, below bin/ the probes. Raises
    SystemExit where a library of the lock is missing."""
    return {**_libraries(libraries, lock.read_text()), **_homenode(wheel)}


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


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def build(wheel: Path, libraries: Path, manual_pages: Path, dist: Path) -> Path:
    """The package's path. The tree that it is made of is removed again."""
    version = wheel.name.split("-")[1]
    architecture = _output("dpkg", "--print-architecture")
    tree = dist / "deb"
    shutil.rmtree(tree, ignore_errors=True)
    library = tree / "usr/lib/homenode"
    packed = contents(wheel, libraries, HERE / "runtime.lock")
    if missing := [name for name in PROBES if f"bin/{name}" not in packed]:
        raise SystemExit(
            f"{wheel}: expected {missing[0]} in it, found none: build it with a compiler"
        )
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
        architecture=architecture,
        kibibytes=size // 1024,
        python=PYTHON,
        next_python=NEXT_PYTHON,
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
    asked = {"PYTHONPATH": str(library), "_HOMENODE_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-B", "-c", START_AS_INSTALLED],
        env={**os.environ, **asked},
        check=True,
        capture_output=True,
        text=True,
    )
    if "homenode" not in done.stdout:
        raise SystemExit(f"completion for {shell}: expected a script, found {done.stdout!r}")
    return done.stdout


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    if sysconfig.get_platform().startswith("win") or len(sys.argv) != 5:
        raise SystemExit(__doc__)
    print(build(*map(Path, sys.argv[1:])))
