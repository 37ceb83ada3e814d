"""homenode plan of a VM that has no file yet, and what it writes when."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lxml import etree

from homenode.errors import HomenodeError
from homenode.vm.targets.registry import TARGETS
from tests.command_line import NEEDS_CLUSTER, Result, homenode
from tests.tools.test_xl_info import INFO

DOCUMENT = Path(__file__).parents[2] / "demo" / "gpu-vm.xml"
VM = ("--gpus", "2", "--vcpus", "16", "--memory", "64GiB")


def planned(*arguments: str | Path, host: str = "hgx-h100") -> Result:
    return homenode("plan", "--host", host, *arguments)


def refused(*arguments: str | Path) -> HomenodeError:
    """The error that a call ends with."""
    error = planned(*arguments).exception
    assert isinstance(error, HomenodeError), error
    return error


def text(path: Path, place: str) -> str | None:
    return etree.fromstring(path.read_bytes()).findtext(place)


def test_a_plan_needs_no_file_and_writes_none_unless_asked() -> None:
    done = planned(*VM)
    assert done.exit_code == 0, done.output
    assert "vm fits hgx-h100: 16 vCPUs" in done.output
    assert "instead of" not in done.output  # nothing changes for a VM that there was not


def test_a_new_domain_is_written_as_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "vm.xml"
    done = planned(*VM, "--name", "trainer", "-o", path)
    assert done.exit_code == 0, done.output
    assert (text(path, "name"), text(path, "vcpu"), text(path, "memory")) == ("trainer", "16", "64")
    root = etree.fromstring(path.read_bytes())
    assert len(root.findall("devices/hostdev")) == 2 and root.find("devices/disk") is None
    kind = root.find("os/type")
    assert kind is not None and (kind.get("arch"), kind.get("machine")) == ("x86_64", "q35")
    assert not path.with_name("vm.xml.orig").exists()
    # The plan of what was written is the same.
    again = planned(path, "--diff", "--quiet")
    assert (again.exit_code, again.stdout) == (0, "")


def test_a_file_that_is_there_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "vm.xml"
    assert planned(*VM, "-o", path).exit_code == 0
    before = path.read_bytes()
    error = refused("--vcpus", "4", "--memory", "4GiB", "-o", path)
    assert "a new domain would overwrite it" in error.message and "--force" in str(error.hint)
    assert path.read_bytes() == before
    assert planned("--vcpus", "4", "--memory", "4GiB", "-o", path, "--force").exit_code == 0
    assert text(path, "vcpu") == "4"


@pytest.mark.parametrize("target", ["libvirt", *TARGETS])
def test_options_alone_are_written_for_every_target(target: str, tmp_path: Path) -> None:
    path = tmp_path / "vm"
    done = planned(*VM, "--target", target, "--name", "trainer", "-o", path, "--quiet")
    assert done.exit_code == 0, (done.output, done.exception)
    assert b"trainer" in path.read_bytes()


@pytest.mark.parametrize(
    ("words", "start"), [((), b"# homenode: written for xl"), (("--target", "libvirt"), b"<domain")]
)
def test_a_vm_for_a_xen_host_is_written_for_xen(
    words: tuple[str, ...], start: bytes, tmp_path: Path
) -> None:
    (tmp_path / "xl.txt").write_text(INFO)
    path = tmp_path / "vm"
    size = ("--vcpus", "1", "--memory", "1GiB")
    done = planned(*size, *words, "-o", path, host=str(tmp_path / "xl.txt"))
    assert (done.exit_code, path.read_bytes().startswith(start)) == (0, True)
    assert done.stderr.startswith("target xen") is not bool(words)


def test_cells_say_the_size_too() -> None:
    cells = ("vcpus=8,memory=8GiB,node=0", "vcpus=4,memory=4GiB,node=1")
    words = [word for cell in cells for word in ("--guest-node", cell)]
    done = planned("--layout", "pin-numa", *words, "--json")
    assert done.exit_code == 0, done.exception
    made = json.loads(done.stdout)["vm"]
    assert (made["vcpus"], made["memory_bytes"]) == (12, 12 << 30)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--vcpus", "16"), "--vcpus requires --memory"),
        (("--memory", "64GiB", "--target", "libvirt"), "--memory requires --vcpus"),
        (("--memory", "64GiB", "--target", "qemu"), "--memory requires --vcpus"),
        ((*VM, "--name", "a/b"), "without / and line breaks"),
        ((*VM, "--name", "a/b", "--target", "xen"), "without / and line breaks"),
        ((*VM, "--node-cpus", "0-3"), "missing argument VM"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(arguments: tuple[str, ...], found: str) -> None:
    error = refused(*arguments)
    assert error.exit_code == 2
    assert found in error.message


# What is written, and when.


PLACED: tuple[str | Path, ...] = (DOCUMENT, *"--gpus 2 --vcpus 8 --memory 8GiB".split())


@pytest.mark.parametrize(
    "outputs",
    """\
-o same --save-plan same
-o same --svg ./same
--save-plan same --svg same
-o a.xml --save-plan a.xml.orig
-o a.xml --svg a.xml.orig.sha256
-o a.xml --save-plan link
-o vm --save-plan vm.hook.sh --target proxmox --layout pin""".splitlines(),
)
def test_two_outputs_in_one_file_are_refused_and_nothing_is_written(
    outputs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a.xml")
    assert "two outputs for one file" in refused(*PLACED, *outputs.split()).message
    assert [one.name for one in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize(
    "words",
    [
        ("plan", *PLACED, "--host", "small-2n8c-2gpu", "--save-plan", "plan.json"),
        ("plan", *PLACED, "--host", "small-2n8c-2gpu", "--target", "qemu"),
        pytest.param(("pool", "place", *PLACED, "--pool", "small-2n8c-2gpu"), marks=NEEDS_CLUSTER),
    ],
)
def test_files_are_written_where_nobody_reads_what_is_printed(
    words: tuple[str | Path, ...], tmp_path: Path
) -> None:
    """As with `| head`: the reader of standard output is gone before anything is printed."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        argv = [sys.executable, "-m", "homenode.cli.main", *map(str, words), "-o", "vm"]
        subprocess.run(argv, cwd=tmp_path, stdout=writer, stderr=writer, timeout=120)
    finally:
        os.close(writer)
    assert (tmp_path / "vm").stat().st_size
    assert ("plan.json" in words) is (tmp_path / "plan.json").exists()
