"""What `make dist` builds, installed, upgraded and removed on bare Debian 12 and 13, and by uv."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.wheels import build_wheel, copied

ROOT = Path(__file__).parents[2]
OLD = "0.0.9"
MAX_BYTES = 1_510_000
PLAN = "plan demo/gpu-vm.xml --host hgx-h100 --gpus 4 --vcpus 48 --memory 256GiB -o tuned.xml"
COMMANDS = (
    PLAN,
    "doctor tuned.xml --host hgx-h100",
    "list hosts",
    "report demo/published -o p.html",
)
"""README's commands that need no libvirt; what doctor finds gives it exit code 1."""

pytestmark = [
    pytest.mark.lab,
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="needs debootstrap"),
]


def _run(*argv: str | Path, **options: object) -> str:
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that is released, and old/: a wheel and a Debian package of version 0.0.9."""
    _run("make", "dist", cwd=ROOT)
    directory = tmp_path_factory.mktemp("dist")
    for path in (ROOT / "dist").glob("homenode*"):
        shutil.copy(path, directory)
    source = directory / "source"
    source.mkdir()
    for name in copied():
        shutil.copytree(ROOT / name, source / name) if (ROOT / name).is_dir() else shutil.copy(
            ROOT / name, source
        )
    init = source / "src/homenode/__init__.py"
    init.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{OLD}"', init.read_text()))
    old = directory / "old"
    build_wheel(source, old)
    for probe in directory.glob("homenode_probe*"):
        shutil.copy(probe, old)
    _run(sys.executable, "packaging/debian.py", old, "build/runtime", "build/man", old, cwd=ROOT)
    return directory


@pytest.fixture(params=["bookworm", "trixie"])
def system(request: pytest.FixtureRequest, tmp_path: Path, dist: Path) -> Iterator[Path]:
    """The root directory of a bare Debian with pipx, /dist in it, and a user op."""
    stored = Path(os.environ.get("HOMENODE_ROOTS", Path.home() / ".cache/homenode/roots"))
    stored /= request.param
    if not (stored / "complete").exists():
        shutil.rmtree(stored, ignore_errors=True)
        packages = "--include=python3,python3-venv,pipx,ca-certificates"
        mirror = os.environ.get("HOMENODE_LAB_MIRROR", "http://deb.debian.org/debian")
        _run("debootstrap", "--variant=minbase", packages, request.param, stored, mirror)
        (stored / "complete").touch()
    root = tmp_path / "root"
    _run("cp", "-a", stored, root)
    shutil.copytree(dist, root / "dist", ignore=shutil.ignore_patterns("source"))
    shutil.copytree(ROOT / "demo", root / "srv/demo", ignore=shutil.ignore_patterns("__pycache__"))
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    for path in (Path("/etc/resolv.conf"), certificates):
        if path.exists():
            (root / path.relative_to("/")).write_bytes(path.read_bytes())
    _run("chroot", root, "useradd", "--create-home", "op")
    _run("chroot", root, "chown", "-R", "op", "/srv", "/dist")
    _run("mount", "-t", "proc", "proc", root / "proc")
    yield root
    _run("umount", root / "proc")


def _in(root: Path, script: str, user: str = "root") -> str:
    words = (
        "env",
        "-i",
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL=C.UTF-8",
        "sh",
        "-ec",
        script,
    )
    home = {"root": "/root", "op": "/home/op"}[user]
    variables = [f"HOME={home}", "PIP_CERT=/etc/ssl/certs/ca-certificates.crt"]
    return _run("chroot", f"--userspec={user}", root, *words[:2], *variables, *words[2:])


def _files(root: Path) -> set[str]:
    """Paths below etc, home, opt, root and usr, without compiled Python."""
    lasting = [root / name for name in ("etc", "home", "opt", "root", "usr")]
    paths = {str(path.relative_to(root)) for top in lasting for path in top.rglob("*")}
    return {path for path in paths if "__pycache__" not in path}


def _use(root: Path, program: str) -> None:
    for command in COMMANDS:
        assert _in(root, f"cd /srv; {program} {command} || test $? = 1", "op"), command


def test_the_debian_package_is_installed_upgraded_and_removed(system: Path, dist: Path) -> None:
    before = _files(system)
    (old,), (new,) = (dist / "old").glob("*.deb"), dist.glob("*.deb")
    _in(
        system,
        f"apt-get -qq update; apt-get -qq install -y --no-install-recommends /dist/old/{old.name}",
    )
    assert OLD in _in(system, "homenode --version", "op")
    _in(system, f"apt-get -qq install -y --no-install-recommends /dist/{new.name}")
    assert "0.1.0" in _in(system, "homenode --version; homenode-probe --version", "op")
    _use(system, "homenode")
    assert (system / "usr/share/bash-completion/completions/homenode").exists()
    assert (system / "usr/share/man/man1/homenode-plan.1.gz").exists() or "man" in _in(
        system, "cat /etc/dpkg/dpkg.cfg.d/* 2>/dev/null || true"
    )
    _in(system, "apt-get -qq purge -y homenode; apt-get -qq autoremove -y --purge")
    assert {path for path in _files(system) - before if "homenode" in path} == set()


def test_pipx_installs_upgrades_and_removes_the_wheels(system: Path, dist: Path) -> None:
    before = _files(system)
    (old,) = (dist / "old").glob("homenode-*.whl")
    (new,), (probe,) = dist.glob("homenode-*.whl"), dist.glob("homenode_probe-*.whl")
    _in(system, f"pipx install /dist/old/{old.name}", "op")
    assert OLD in _in(system, "~/.local/bin/homenode --version", "op")
    _in(
        system,
        f"pipx install --force /dist/{new.name}; pipx inject homenode /dist/{probe.name}",
        "op",
    )
    _use(system, "~/.local/bin/homenode")
    _in(system, "~/.local/*/pipx/venvs/homenode/bin/homenode-probe --version || "
        "~/.local/pipx/venvs/homenode/bin/homenode-probe --version", "op")  # fmt: skip
    _in(system, "pipx uninstall homenode", "op")
    assert {path for path in _files(system) - before if "homenode" in path} == set()


def test_uv_installs_the_wheel_as_a_tool(dist: Path, tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    _run(sys.executable, "-m", "pip", "install", "-q", "--target", uv, "uv")
    (wheel,), (probe,) = dist.glob("homenode-*.whl"), dist.glob("homenode_probe-*.whl")
    environment = {**os.environ, "HOME": str(tmp_path), "UV_TOOL_DIR": str(tmp_path / "tools")}
    environment["UV_TOOL_BIN_DIR"] = str(tmp_path / "bin")
    _run(uv / "bin/uv", "tool", "install", "-q", wheel, "--with", probe, env=environment)
    assert "0.1.0" in _run(tmp_path / "bin/homenode", "--version", env=environment)
    assert _run(tmp_path / "tools/homenode/bin/homenode-probe", "--version", env=environment)


def test_the_wheel_is_small_and_indexes_accept_both(dist: Path) -> None:
    (wheel,), (probe,) = dist.glob("homenode-*.whl"), dist.glob("homenode_probe-*.whl")
    size, count = wheel.stat().st_size, len(zipfile.ZipFile(wheel).namelist())
    print(f"{wheel.name}: {size:,} bytes, {count} files")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", probe.name)
    assert size <= MAX_BYTES
