"""Where hosts come from: what gives none is named, and the rest goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

from homenode.errors import InputError, UsageError
from homenode.vm.host_sources import NamedHost, read_hosts
from homenode.vm.sources import load_host

HOST = Path(__file__).parents[2] / "src/homenode/machine/hosts/small-2n8c-2gpu.toml"


def test_a_host_times_a_number_is_so_many_hosts() -> None:
    hosts = read_hosts(["hgx-h100*12"]).hosts
    names = [one.name for one in hosts]
    assert (len(hosts), names[1], names[-1]) == (12, "hgx-h100-2", "hgx-h100-12")
    assert all(one.host.name == one.name for one in hosts)


def test_a_directory_has_a_host_for_each_file_and_names_those_that_are_broken(
    tmp_path: Path,
) -> None:
    for name in ("gpu-10.toml", "gpu-2.toml"):
        (tmp_path / name).write_text(HOST.read_text())
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8bnothing")
    (tmp_path / "empty.toml").write_bytes(b"")
    read = read_hosts([str(tmp_path)])
    assert [one.name for one in read.hosts] == ["gpu-2", "gpu-10"]
    assert {Path(one.subject).name for one in read.unread} == {"broken.tar.gz", "empty.toml"}
    assert all(Path(one.subject).name not in one.reason for one in read.unread)


THREADS = """
import sys
from threading import Barrier, Thread
from homenode.machine.description.tables import HostDocument
from homenode.toml_text import decode_value

VALUE = {"name": "one", "node": [{"index": 0}], "root": [{"ports": [{"switch": ["gpu"]}]}]}
sys.setswitchinterval(1e-6)
start = Barrier(8)

def read():
    start.wait()
    decode_value(VALUE, HostDocument, "host.toml", "")

threads = [Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_first_hosts_may_be_read_by_several_threads_at_once() -> None:
    """msgspec 0.22 without a lock: SIGSEGV, in each of 8 runs."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_of_two_hosts_of_one_name_the_second_is_named_and_not_read(tmp_path: Path) -> None:
    read = read_hosts([str(HOST), "small-2n8c-2gpu"])
    assert len(read.hosts) == len(read.unread) == 1
    assert repr(read.hosts[0].name) in read.unread[0].reason


def test_a_pool_without_any_host_is_refused(tmp_path: Path) -> None:
    for source in ("nothere", str(tmp_path)):
        with pytest.raises(InputError):
            read_hosts([source])
    with pytest.raises(InputError) as refused:
        read_hosts(["hgx-h10*4"])
    assert "hgx-h100" in str(refused.value.hint)
    with pytest.raises(UsageError):
        read_hosts([])


@pytest.mark.parametrize("source", ["qemu+tcp://h/system", "xen:///", "hgx-h100*0", "nothere*3"])
def test_a_source_of_no_known_kind_is_named(source: str) -> None:
    read = read_hosts([source, "small-2n8c-2gpu"])
    assert [one.subject for one in read.unread] == [source]
    assert len(read.hosts) == 1


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        ("qemu+ssh://root@gpu-1/system", "qemu+ssh://root@gpu-1/system"),
        ("captures/gpu-1.tar.gz", "qemu+ssh://name/system"),
        ("hgx-h100*3", "qemu+ssh://name/system"),
    ],
)
def test_virsh_reaches_a_host_as_it_was_read(source: str, uri: str) -> None:
    host = NamedHost(name="name", source=source, host=load_host("small-2n8c-2gpu"))
    assert host.libvirt_uri == uri
