"""The Ansible role, over two hosts of its own: sshd in mount and UTS namespaces."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from homenode.measure.access.ssh import SshChannel
from tests.ssh_targets import ssh_target

pytestmark = pytest.mark.ansible
PROJECT = Path(__file__).parents[2]
ROLE = PROJECT / "packaging/ansible"
_IN_NAMESPACES = """
hostname "$1"
mount --bind "$2/bin" /usr/local/bin
mount -t tmpfs none /var/lib/dpkg/info  # a package of this machine is none of theirs
mount -t tmpfs none /var/cache
shift 2
exec "$@"
"""


_OVERLAY = """
directory=$1
mount -t tmpfs none "$directory"
mkdir "$directory/upper" "$directory/work" "$directory/root"
options="lowerdir=/,upperdir=$directory/upper,workdir=$directory/work"
mount -t overlay -o "$options" none "$directory/root"
for each in proc sys dev dev/pts tmp; do
  mount --bind "/$each" "$directory/root/$each"
done
mount -t tmpfs none "$directory/root/run"
mkdir "$directory/root/run/sshd"
echo ready
exec sleep infinity
"""


def program(name: str) -> str:
    directory = os.environ.get("HOMENODE_ANSIBLE_BIN")
    if directory is None:
        pytest.skip(
            "HOMENODE_ANSIBLE_BIN names no directory with ansible-playbook and ansible-lint"
        )
    return f"{directory}/{name}"


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(words[0]).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "HOME": str(directory),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_CONFIG": str(ROLE / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_LOCAL_TEMP": str(directory / "tmp"),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": f"/tmp/homenode-{os.getpid()}",  # sockets: a short path
    }
    return subprocess.run(
        words, cwd=ROLE, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.nightly
def test_ansible_lint_passes(tmp_path: Path) -> None:
    lint = program("ansible-lint")
    done = run(tmp_path, lint, "--offline", "--nocolor", "--profile", "production", str(ROLE))
    assert done.returncode == 0, done.stdout + done.stderr


def address(target: SshChannel, directory: Path) -> dict[str, object]:
    """A host of an inventory."""
    return {
        "ansible_host": target.address,
        "ansible_port": target.port,
        "ansible_user": target.user,
        "ansible_ssh_private_key_file": str(target.key),
        "ansible_ssh_common_args": "-F none -o StrictHostKeyChecking=no "
        f"-o UserKnownHostsFile={directory}/known",
        "ansible_python_interpreter": "/usr/bin/python3",
    }


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """An inventory of gpu-a and gpu-b, each with programs and a host name of its own."""
    launcher = tmp_path / "homenode"
    launcher.write_text(f'#!/bin/sh\nexec {Path(sys.executable).parent}/homenode "$@"\n')
    inventory: dict[str, dict[str, object]] = {}
    with ExitStack() as daemons:
        for name in ("gpu-a", "gpu-b"):
            directory = tmp_path / name
            (directory / "bin").mkdir(parents=True)
            inside = (
                "unshare",
                "--mount",
                "--uts",
                "--propagation",
                "private",
                "sh",
                "-ec",
                _IN_NAMESPACES,
                "sh",
                name,
                str(directory),
            )
            target = daemons.enter_context(ssh_target(directory, inside))
            inventory[name] = address(target, directory)
        path = tmp_path / "inventory.yml"
        both = {
            "ansible_become": False,
            "homenode_program": str(launcher),
            "homenode_captures": str(tmp_path / "captures"),
            "homenode_report": str(tmp_path / "report.txt"),
            "homenode_controller_program": str(launcher),
        }
        path.write_text(yaml.safe_dump({"all": {"hosts": inventory, "vars": both}}))
        launcher.chmod(0o755)
        yield path


def checked_by_the_role(
    directory: Path, inventory: str, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    play = directory / "play.yml"
    play.write_text(
        yaml.safe_dump([{"hosts": "all", "gather_facts": False, "roles": ["homenode"]}])
    )
    words = ("-c", "local", "--tags", "never", "-e", json.dumps(variables))
    return run(
        directory, program("ansible-playbook"), f"--inventory={inventory}", str(play), *words
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("inventory", "variable"),
    [
        ("gpu-a,", {"homenode_program": "bin/homenode"}),
        ("gpu-a,", {"homenode_program": "/usr/bin/homenode\n"}),
        ("../gpu-a,", {}),
        ("--all,", {}),
    ],
)
def test_the_role_refuses_what_paths_would_take_for_more(
    inventory: str, variable: dict[str, str], tmp_path: Path
) -> None:
    done = checked_by_the_role(tmp_path, inventory, variable)
    assert done.returncode == 2 and "expected an absolute path, and a name" in done.stdout


def test_the_role_takes_a_sound_name_and_its_default_paths(tmp_path: Path) -> None:
    sound = checked_by_the_role(tmp_path, "gpu-a,", {})
    assert sound.returncode == 0, sound.stdout


@pytest.mark.lab
@pytest.mark.root
def test_two_hosts_are_captured_and_reported_on(hosts: Path, tmp_path: Path) -> None:
    playbook = (program("ansible-playbook"), "-i", str(hosts), "site.yml")
    first = run(tmp_path, *playbook, "--tags", "capture,report")
    assert first.returncode == 0, first.stdout + first.stderr
    for name in ("gpu-a", "gpu-b"):
        assert (tmp_path / "captures" / f"{name}.tar.gz").stat().st_size > 1000
    report = (tmp_path / "report.txt").read_text()
    assert "gpu-a" in report and "gpu-b" in report
    wrong = run(tmp_path, *playbook, "-e", "homenode_state=gone")
    assert wrong.returncode != 0
    assert "expected present or absent, found gone" in wrong.stdout


def package(directory: Path) -> Path:
    """A Debian package named homenode, with this checkout's program."""
    tree = directory / "package"
    launcher = tree / "usr/bin/homenode"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f'#!/bin/sh\nexec {Path(sys.executable).parent}/homenode "$@"\n')
    launcher.chmod(0o755)
    control = tree / "DEBIAN/control"
    control.parent.mkdir()
    control.write_text(
        "Package: homenode\nVersion: 0.1\nArchitecture: all\nDescription: a test\n"
        "Maintainer: the homenode authors <maintainers@homenode.invalid>\n"
    )
    path = directory / "homenode.deb"
    subprocess.run(["dpkg-deb", "--build", str(tree), str(path)], check=True, capture_output=True)
    return path


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """Words that start a command in a root of its own: this machine's, on which what is written
    stays in memory."""
    upper = tmp_path / "overlay"
    upper.mkdir()
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _OVERLAY, "sh"]
    with subprocess.Popen([*argv, str(upper)], stdout=subprocess.PIPE) as root:
        try:
            assert root.stdout is not None and root.stdout.readline() == b"ready\n"
            where = f"--root=/proc/{root.pid}/root{upper}/root"
            yield "nsenter", f"--mount=/proc/{root.pid}/ns/mnt", where, f"--wd={where[7:]}"
        finally:
            root.kill()


@pytest.mark.lab
@pytest.mark.root
def test_a_debian_package_is_installed_and_removed(
    overlay: tuple[str, ...], tmp_path: Path
) -> None:
    deb = package(tmp_path)
    with ssh_target(tmp_path, overlay) as target:
        inventory = tmp_path / "inventory.yml"
        host = {**address(target, tmp_path), "ansible_become": False, "homenode_deb": str(deb)}
        inventory.write_text(yaml.safe_dump({"all": {"hosts": {"gpu-a": host}}}))
        playbook = (program("ansible-playbook"), "-i", str(inventory), "site.yml")
        tags = ("--tags", "install")
        done = run(tmp_path, *playbook, *tags)
        assert done.returncode == 0, done.stdout + done.stderr
        subprocess.run([*overlay, "test", "-x", "/usr/bin/homenode"], check=True)
        again = run(tmp_path, *playbook, *tags)
        assert again.stdout.rpartition("PLAY RECAP")[2].count("changed=0") == 1, again.stdout
        done = run(tmp_path, *playbook, "-e", "homenode_state=absent")
        assert done.returncode == 0, done.stdout + done.stderr
        gone = "! test -e /usr/bin/homenode && ! dpkg -s homenode"
        subprocess.run([*overlay, "sh", "-c", gone], check=True, capture_output=True)
