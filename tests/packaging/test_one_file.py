"""homenode.pyz runs nothing and writes nothing where another user could have put something.

Root starts the real file in a folder like /tmp, in a mount namespace of its own; the attacker is
another user. What the attacker put there leaves a mark when it is run.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

ATTACKER, VICTIM = 12345, 23456
"""User numbers; root is a victim too."""

NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = Path(os.path.realpath(sys.executable))
"""Not that of the virtual environment: it would have the libraries."""

WAYS: Mapping[str, Sequence[str]] = {
    "by itself": ("./homenode.pyz",),
    "by the shell": ("/bin/sh", "homenode.pyz"),
    "by Python": (str(PYTHON), "homenode.pyz"),
    "by Python, isolated": (str(PYTHON), "-I", "homenode.pyz"),
}
MODULES = sorted(
    {*sys.stdlib_module_names, "sitecustomize", "usercustomize", "homenode_one_file"}
    | {"homenode", "trusted_path", "lxml", "msgspec", "rich", "yaml", "pex", "zstandard"}
)
PROGRAMS = ("env", "gcc", "id", "ld", "lspci", "ps", "python", "python3", NAME, "sh", "uname")

_NAMESPACE = """
for folder in /srv /var/cache /var/tmp; do mount -t tmpfs none $folder; done
touch /srv/homenode.pyz
mount --bind "$1" /srv/homenode.pyz
mount -t tmpfs none /tmp
mkdir /srv/marks
chmod 1777 /srv /srv/marks /var/tmp /tmp
chmod 755 /var/cache
echo ready
exec sleep infinity
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A machine whose /srv is what /tmp is elsewhere. root: its files, for the test itself."""

    process: int

    @property
    def root(self) -> Path:
        return Path(f"/proc/{self.process}/root")

    def run(
        self, *argv: str, user: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Started in /srv. The first part of PATH is empty, the second is the folder itself."""
        given = {"PATH": f":.:{PYTHON.parent}:/usr/bin:/bin", "HOME": "/root", **environment}
        changed = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
        program, *words = changed if user else ("env",)
        argv = (
            "/usr/bin/nsenter",
            f"--mount=/proc/{self.process}/ns/mnt",
            f"--wd={self.root}/srv",
            f"/usr/bin/{program}",
            *words,
            *argv,
        )
        return subprocess.run(
            argv, env=given, capture_output=True, text=True, timeout=120, check=False
        )

    def attack(self, script: str) -> None:
        """Run by the attacker, in /srv."""
        done = self.run("/bin/sh", "-euc", script, user=ATTACKER, PATH="/usr/bin:/bin")
        assert done.returncode == 0, done.stderr

    @property
    def marks(self) -> dict[str, str]:
        """What was run of the attacker's, and by which user."""
        return {one.name: one.read_text().strip() for one in (self.root / "srv/marks").iterdir()}


@pytest.fixture
def place(one_file: Path) -> Iterator[Place]:
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", _NAMESPACE, "sh"]
    with subprocess.Popen([*argv, str(one_file)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            yield Place(process.pid)
        finally:
            process.kill()


@pytest.fixture
def digest(one_file: Path) -> str:
    text = zipfile.ZipFile(one_file).read("homenode_one_file.py").decode()
    found = re.search(r"DIGEST = '(\w{32})", text)
    assert found is not None
    return found[1]


def module(name: str) -> str:
    return f"import os\nopen('/srv/marks/{name}', 'w').write(str(os.getuid()))\n"


def give(path: Path, text: str, mode: int = 0o644) -> None:
    """Put a file of the attacker's in place, with its folders."""
    for folder in (*reversed(path.parents[:-1]), path):
        if folder.exists():
            continue
        if folder == path:
            path.write_text(text)
            path.chmod(mode)
        else:
            folder.mkdir(0o755)
        os.chown(folder, ATTACKER, ATTACKER)


def plant(folder: Path) -> None:
    """Everything that anybody might look up in a folder."""
    for name in MODULES:
        give(folder / f"{name}.py", module(name))
    for name in ("homenode", "pex", "lxml"):
        give(folder / name / "__init__.py", module(f"{name}-package"))
    give(folder / "evil.pth", "import os; " + module("pth").split("\n")[1] + "\n")
    give(folder / "__main__.py", module("main"))
    for name in PROGRAMS:
        script = f"#!/bin/sh\n/usr/bin/id -u > /srv/marks/program-{name}\n"
        give(folder / name, script, 0o755)
    pex = ("PYTHON_PATH", "PYTHON", "ROOT", "PATH", "EXTRA_SYS_PATH")
    lines = [f"PEX_{name}=/srv" for name in pex] + ["PEX_INHERIT_PATH=prefer"]
    give(folder / ".pexrc", "\n".join(lines) + "\n")
    give(folder / "pyvenv.cfg", f"home = {folder}\ninclude-system-site-packages = true\n")


def test_nothing_in_the_current_folder_is_run(place: Place) -> None:
    plant(place.root / "srv")
    for way in WAYS.values():
        for command in (("--version",), ("show", "--json")):
            done = place.run(*way, *command)
            assert done.returncode == 0, done.stderr
            assert "homenode" in done.stdout
            assert place.marks == {}, way


def home_of_the_attacker(place: Place, digest: str) -> dict[str, str]:
    """Variables that name a home with all that a start might look up there."""
    home = place.root / "srv/home"
    plant(home)
    for folder in (
        f"home/.local/lib/{NAME}/site-packages",
        f"home/.local/share/homenode/{NAME}",
        f"home/.cache/homenode/{digest}/lib",
        "home/.cache/pex",
        "home/.config",
    ):
        plant(place.root / "srv" / folder)
    give(home / f".cache/homenode/{digest}/lib/homenode/cli/main.py", module("cached"))
    names = ("HOME", "XDG_CONFIG_HOME", "TMPDIR", "PEX_ROOT", "PEX_PYTHON_PATH", "PEX_PATH")
    return {
        **dict.fromkeys(names, "/srv/home"),
        "XDG_CACHE_HOME": "/srv/home/.cache",
        "XDG_DATA_HOME": "/srv/home/.local/share",
    }


@pytest.mark.parametrize("user", [0, VICTIM])
def test_no_variable_that_names_another_users_folder_changes_what_is_run(
    place: Place, digest: str, user: int
) -> None:
    variables = home_of_the_attacker(place, digest)
    python = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE"), "/srv/home")
    more = {"PYTHONSTARTUP": "/srv/home/os.py", "PYTHONINSPECT": "1", "PYTHONWARNINGS": "error"}
    before = _files(place.root / "srv/home")
    for way in ("by itself", "by the shell", "by Python, isolated"):
        argv = _of_all_users(WAYS[way]) if user else WAYS[way]
        done = place.run(*argv, "--version", user=user, **variables, **python, **more)
        assert done.stdout.startswith("homenode "), done.stderr
        assert place.marks == {}
        assert _files(place.root / "srv/home") == before
        # The libraries there are not used, and that is said.
        assert f"/srv/home belongs to user {ATTACKER}" in done.stderr


def _of_all_users(argv: Sequence[str]) -> list[str]:
    """With a Python that users other than root can start."""
    found = next(
        (path for path in map(Path, ("/usr/bin", "/usr/local/bin")) if (path / NAME).exists()), None
    )
    if found is None:
        pytest.skip(f"{NAME} is not in /usr/bin: root's own cannot be started by other users")
    return [word.replace(str(PYTHON), str(found / NAME)) for word in argv]


def _files(folder: Path) -> set[tuple[str, int]]:
    return {(str(one), one.lstat().st_uid) for one in folder.rglob("*")}


def test_modules_of_the_users_own_pythonpath_are_not_those_of_homenode(place: Place) -> None:
    """Python reads the variable before the first line of the file; then it no longer counts."""
    for name in ("homenode", "homenode_one_file", "json", "lxml", "trusted_path", "yaml"):
        give(place.root / f"srv/own/{name}.py", module(name))
    done = place.run(*WAYS["by Python"], "hosts", PYTHONPATH="/srv/own")
    assert done.returncode == 0, done.stderr
    assert place.marks == {}


def _without_var_cache(place: Place, option: str) -> None:
    done = place.run("/bin/mount", "-o", f"remount,{option}", "/var/cache", PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr


PLANTED = """
mkdir -p /srv/evil/$1/lib/homenode/cli
: > /srv/evil/$1/lib/homenode/__init__.py
: > /srv/evil/$1/lib/homenode/cli/__init__.py
echo "open('/srv/marks/cached', 'w').write('ran')
def main(): pass" > /srv/evil/$1/lib/homenode/cli/main.py
chmod -R go+rX /srv/evil
"""


PLANTS = (
    "cp -r /srv/evil $1",
    "ln -s /srv/evil $1",
    "ln -s /srv/roots $1",
    "ln -s /nowhere $1",
    "mkfifo $1",
    "touch $1",
)


@pytest.mark.parametrize("option", ["noexec", "ro"])
def test_a_planted_folder_is_neither_used_nor_written_to(
    place: Place, digest: str, option: str
) -> None:
    """Root's first choice cannot be used, and the names of the others are known."""
    place.attack(PLANTED.replace("$1", digest))
    shutil.copytree(place.root / "srv/evil", place.root / "srv/roots")  # as from an archive
    _without_var_cache(place, option)
    for planted in PLANTS:
        place.attack(planted.replace("$1", "/var/tmp/homenode-0"))
        before = _files(place.root / "srv"), _files(place.root / "var/tmp")
        assert place.run("./homenode.pyz", "--version").stdout.startswith("homenode ")
        assert place.marks == {}
        assert (_files(place.root / "srv"), _files(place.root / "var/tmp")) == before
        place.attack("rm -rf /var/tmp/homenode-0")
    shutil.rmtree(place.root / "tmp/homenode-0")
    for planted in PLANTS:
        for folder in ("/var/tmp", "/tmp"):
            place.attack(planted.replace("$1", f"{folder}/homenode-0"))
        done = place.run("./homenode.pyz", "--version")
        assert done.returncode == 3
        for folder in ("/var/tmp", "/tmp"):
            assert f"{folder}/homenode-0 belongs to user {ATTACKER}" in done.stderr
            place.attack(f"rm -rf {folder}/homenode-0")
        assert "Traceback" not in done.stderr and place.marks == {}


SWAPS = """
end=$(($(date +%s) + 60))
while [ $(date +%s) -lt $end ]; do
  ln -s /srv/evil /var/tmp/homenode-0 2>/dev/null; rm -f /var/tmp/homenode-0 2>/dev/null
  cp -r /srv/evil /var/tmp/homenode-0 2>/dev/null; mv /var/tmp/homenode-0 /var/tmp/x 2>/dev/null
  rm -rf /var/tmp/x
done
"""


def test_a_folder_that_is_swapped_all_the_time_is_not_used_either(
    place: Place, digest: str
) -> None:
    place.attack(PLANTED.replace("$1", digest))
    _without_var_cache(place, "noexec")
    enter = ["/usr/bin/nsenter", f"--mount=/proc/{place.process}/ns/mnt", "/usr/bin/setpriv"]
    who = [f"--reuid={ATTACKER}", "--clear-groups", "/bin/sh", "-c", SWAPS]
    with subprocess.Popen([*enter, *who], start_new_session=True) as swapper:
        try:
            for _ in range(4):
                done = place.run("./homenode.pyz", "--version")
                assert done.stdout.startswith("homenode "), done.stderr
        finally:
            os.killpg(swapper.pid, signal.SIGKILL)
    assert place.marks == {}
    made = [one for one in (place.root / "srv/evil").rglob("*") if one.lstat().st_uid == 0]
    assert not made


def test_what_is_unpacked_is_its_users_alone_at_any_umask(place: Place, digest: str) -> None:
    for umask in ("000", "777"):
        shutil.rmtree(place.root / "var/cache/homenode", ignore_errors=True)
        done = place.run("/bin/sh", "-c", f"umask {umask}; exec ./homenode.pyz --version")
        assert done.returncode == 0, done.stderr
        tree = place.root / "var/cache/homenode" / digest
        modes = {stat.S_IMODE(one.lstat().st_mode) for one in (tree.parent, *tree.rglob("*"))}
        assert modes <= {0o700, 0o600}
        assert [one.name for one in tree.parent.iterdir()] == [digest]


def _shortened(tree: Path) -> None:
    (tree / "lib/homenode/cli/main.py").write_text("")


def _anothers(tree: Path) -> None:
    os.chown(tree / "lib/homenode", ATTACKER, 0)


def test_what_is_not_as_it_was_packed_is_unpacked_again(place: Place, digest: str) -> None:
    tree = place.root / "var/cache/homenode" / digest
    assert place.run("./homenode.pyz", "--version").returncode == 0
    whole = _sizes(tree)
    left = tree.parent / ".part-of-an-interrupted-start"
    left.mkdir()
    os.utime(left, (0, 0))
    for damage in (_shortened, _anothers):
        damage(tree)
        assert _sizes(tree) != whole
        done = place.run("./homenode.pyz", "hosts")
        assert done.returncode == 0, done.stderr
        assert _sizes(tree) == whole
    assert not left.exists()


def _sizes(tree: Path) -> set[tuple[str, int, int, int]]:
    found = {(str(one.relative_to(tree)), one.lstat()) for one in tree.rglob("*")}
    return {
        (name, known.st_mode, known.st_uid, 0 if stat.S_ISDIR(known.st_mode) else known.st_size)
        for name, known in found
    }


def test_several_first_starts_at_once_all_work(place: Place, digest: str) -> None:
    script = "for n in 1 2 3; do ./homenode.pyz --version & done; wait"
    done = place.run("/bin/sh", "-c", script)
    assert done.stdout.count("homenode ") == 3, done.stderr
    assert [one.name for one in (place.root / "var/cache/homenode").iterdir()] == [digest]


def test_an_ordinary_user_unpacks_into_a_cache_that_is_not_shared(place: Place) -> None:
    home = place.root / "srv/victim"
    home.mkdir(0o755)
    os.chown(home, VICTIM, VICTIM)
    argv = _of_all_users(WAYS["by itself"])
    at = {"HOME": "/srv/victim"}
    assert place.run(*argv, "--version", user=VICTIM, **at).returncode == 0
    assert len(list((home / ".cache/homenode").iterdir())) == 1
    home.chmod(0o775)  # and another group's: who is in it is not known
    os.chown(home, VICTIM, 100)
    assert place.run(*argv, "--version", user=VICTIM, **at).returncode == 0
    assert len(list((place.root / f"var/tmp/homenode-{VICTIM}").iterdir())) == 1


def test_where_all_other_users_look_alike_nothing_is_unpacked(place: Place, digest: str) -> None:
    """In a user namespace of one user, the folders of all others have the overflow user."""
    unshare = ("/usr/bin/unshare", "--user", "--map-current-user")
    if place.run(*unshare, "/bin/true", user=VICTIM).returncode:
        pytest.skip("this kernel lets ordinary users make no user namespaces")
    place.attack(PLANTED.replace("$1", digest))
    place.attack(f"cp -r /srv/evil /var/tmp/homenode-{VICTIM}")
    argv = _of_all_users(WAYS["by itself"])
    done = place.run(*unshare, *argv, "--version", user=VICTIM, XDG_CACHE_HOME="/srv/evil")
    assert done.returncode == 3
    assert "found a user namespace" in done.stderr
    assert place.marks == {}


def test_libraries_that_the_user_added_are_found(place: Place) -> None:
    added = place.root / f"srv/roots/.local/share/homenode/{NAME}"
    added.mkdir(parents=True)
    (added / "weasyprint.py").write_text("raise SystemExit('added by the user')")
    words = ("report", "--published", "-o", "/srv/roots/report.pdf")
    assert "added by the user" in place.run("./homenode.pyz", *words, HOME="/srv/roots").stderr
    added.chmod(0o777)
    done = place.run("./homenode.pyz", *words, HOME="/srv/roots")
    assert "added by the user" not in done.stderr
    assert "can be written by everybody" in done.stderr


def test_a_damaged_file_and_another_python_are_named(place: Place, one_file: Path) -> None:
    content = one_file.read_bytes()
    middle = len(content) // 2
    version = f"PYTHON = {sys.version_info[:2]}".encode()
    assert content.count(version) == 1
    for changed, expected in (
        (content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :], "damaged"),
        (content[:-100], "changed.pyz"),
        (content.replace(version, version[:-2] + b"0)"), "expected Python 3."),
    ):
        for way in WAYS.values():
            done = _run_changed(place, changed, way)
            assert done.returncode != 0
            assert expected in done.stderr
    assert place.marks == {}


def _run_changed(
    place: Place, content: bytes, way: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    path = place.root / "srv/changed.pyz"
    path.write_bytes(content)
    path.chmod(0o755)
    return place.run(*(word.replace("homenode.pyz", "changed.pyz") for word in way), "--version")


def test_the_debian_packages_program_runs_nothing_of_others_either(
    place: Place, digest: str
) -> None:
    text = (Path(__file__).parents[2] / "packaging/debian.py").read_text()
    launcher = re.search(r'LAUNCHER = """(#!/usr/bin/python3 .*?)"""', text, re.DOTALL)
    assert launcher is not None
    assert place.run("./homenode.pyz", "--version").returncode == 0
    program = place.root / "var/cache/program"
    library = f"/var/cache/homenode/{digest}/lib"
    text = (
        launcher[1].replace("/usr/lib/homenode", library).replace("/usr/bin/python3", str(PYTHON))
    )
    program.write_text(text)
    program.chmod(0o755)
    plant(place.root / "srv")
    named = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE")
    variables = home_of_the_attacker(place, digest) | dict.fromkeys(named, "/srv/home")
    for command in (("--version",), ("show", "--json")):
        done = place.run("/var/cache/program", *command, user=0, **variables)
        assert done.returncode == 0, done.stderr
        assert place.marks == {}
