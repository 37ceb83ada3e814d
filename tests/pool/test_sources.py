"""Where a pool comes from: what gives no host is named, and the rest goes on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from homenode.cli import main
from homenode.cluster.pool.model import PoolBuilder
from homenode.cluster.pool.sources import load_pool
from homenode.cluster.pool.stored import POOL_FILE, encode_pool, read_pool
from homenode.errors import InputError, UsageError
from homenode.vm.domain.read import read_vm
from tests.pool.pools import filled, pool_of, shipped

HOST = Path(__file__).parents[2] / "src/homenode/machine/hosts/small-2n8c-2gpu.toml"


def test_a_shipped_host_times_a_number_is_so_many_hosts() -> None:
    pool = load_pool(["hgx-h100*40"])
    assert (len(pool.hosts), len(pool.shapes)) == (40, 1)
    assert [host.name for host in pool.hosts][:3] == ["hgx-h100-1", "hgx-h100-2", "hgx-h100-3"]


def test_a_folder_has_a_host_for_each_file_and_names_those_that_are_broken(tmp_path: Path) -> None:
    for name in ("gpu-1.toml", "gpu-2.toml"):
        (tmp_path / name).write_text(HOST.read_text())
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8bnothing")
    (tmp_path / "empty.toml").write_bytes(b"")
    pool = load_pool([str(tmp_path)])
    assert [host.name for host in pool.hosts] == ["gpu-1", "gpu-2"]
    assert {Path(one.source).name for one in pool.failures} == {"broken.tar.gz", "empty.toml"}


THREADS = """
import sys
from threading import Barrier, Thread
from homenode.machine.description.document import HostDocument
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


def test_of_two_hosts_of_one_name_the_second_is_left_out_by_name(tmp_path: Path) -> None:
    listed = tmp_path / "hosts.txt"
    listed.write_text(
        f"# two alike\n{HOST} name=a fault_domain=rack-1\n{HOST} name=b\n{HOST} name=a\nnothere\n"
    )
    pool = load_pool([str(listed)])
    assert [(host.name, host.fault_domain) for host in pool.hosts] == [("a", "rack-1"), ("b", None)]
    assert len(pool.failures) == 2
    assert "'a'" in pool.failures[0].reason


def test_a_pool_without_any_host_is_refused() -> None:
    with pytest.raises(InputError):
        load_pool(["nothere"])
    with pytest.raises(UsageError):
        load_pool([])


@pytest.mark.parametrize("source", ["qemu+tcp://h/system", "xen:///", "hgx-h100*0", "nothere*3"])
def test_a_source_of_no_known_kind_is_named(source: str) -> None:
    pool = load_pool([source, "small-2n8c-2gpu"])
    assert len(pool.hosts) == 1
    assert [one.source for one in pool.failures] == [source]


def test_a_stored_pool_is_read_as_it_was() -> None:
    host = shipped("hgx-h100")
    pool = pool_of([("a", filled(host, 1)), ("b", filled(host, 2)), ("c", shipped("gh200x4"))])
    builder = PoolBuilder()
    read_pool("".join(encode_pool(pool)).encode(), "p", builder)
    assert builder.pool() == pool


def test_a_stored_pool_that_was_cut_short_or_damaged_is_refused() -> None:
    lines = list(encode_pool(pool_of([("a", shipped("hgx-h100")), ("b", shipped("gh200x4"))])))
    for damaged in (
        lines[:-1],
        [*lines[:1], *lines[3:]],
        [*lines[:-1], lines[-1][:40]],
        [lines[0].replace("hosts/1", "hosts/9"), *lines[1:]],
    ):
        with pytest.raises(InputError):
            read_pool("".join(damaged).encode(), "p", PoolBuilder())


def test_a_host_of_a_pool_is_the_host_that_was_added() -> None:
    host = filled(shipped("hgx-h100"), 4)
    pool = pool_of([("a", host)])
    found = pool.host(pool.hosts[0])
    assert (found.nodes, found.domains, found.cores) == (host.nodes, host.domains, host.cores)


def test_an_odd_line_of_a_list_is_named_and_the_other_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text(
        "\ufeff# racks\n"
        "hgx-h100*2 name=gpu fault_domain=rack-1 # two of them\n"
        "hgx-h100 colour=red\n"
        "hgx-h100 name=\n"
        "gh200x4 name=gh\n"
    )
    pool = load_pool([str(path)])
    assert [(host.name, host.fault_domain) for host in pool.hosts] == [
        ("gh", None),
        ("gpu-1", "rack-1"),
        ("gpu-2", "rack-1"),
    ]
    assert [one.source for one in pool.failures] == [f"{path}:3", f"{path}:4"]


def test_a_list_of_comments_only_names_no_source(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("# none yet\n\n")
    with pytest.raises(InputError, match="source of a host on each line"):
        load_pool([str(path)])


def _run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["homenode", "pool", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(str(end.value.code or 0)), capsys.readouterr().out


def test_each_form_of_show_has_each_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = ["show", "hgx-h100*2"]
    assert json.loads(_run([*shown, "--json"], monkeypatch, capsys)[1])["free"]["gpus"] == 16
    assert len(_run([*shown, "--csv"], monkeypatch, capsys)[1].splitlines()) == 3
    metrics = _run([*shown, "--prometheus"], monkeypatch, capsys)[1]
    assert 'homenode_pool_free_gpus{host="hgx-h100-2"} 8' in metrics
    page = tmp_path / "page.html"
    code, _ = _run([*shown, "-o", str(page)], monkeypatch, capsys)
    assert code == 0
    assert page.read_text().count(", free</title>") == 16
    assert _run([*shown, "--page", str(page)], monkeypatch, capsys)[0] == 0


def test_hosts_that_were_left_out_end_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["show", "small-2n8c-2gpu", "nothere"], monkeypatch, capsys)[0] == 1
    assert _run(["show", "nothere"], monkeypatch, capsys)[0] == 2


DOCUMENT = """<domain type='kvm'><name>vm</name><memory unit='GiB'>64</memory><vcpu>12</vcpu><os>
<type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features>
<cpu mode='host-passthrough'/><devices/></domain>"""


def test_a_document_goes_to_standard_output_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vm.xml").write_text(DOCUMENT)
    place = ["place", "vm.xml", "--pool", "hgx-h100*2", "--gpus", "1", "--layout", "pin-numa-pci"]
    code, out = _run([*place, "-o", "-"], monkeypatch, capsys)
    assert (code, read_vm(out.encode(), "-").vcpus) == (0, 12)
    assert [path.name for path in tmp_path.iterdir()] == ["vm.xml"]
    assert _run([*place, "-o", "-", "--json"], monkeypatch, capsys)[0] == 2


def test_a_recorded_vm_is_placed_again_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pool").mkdir()
    stored = "".join(encode_pool(pool_of([("a", shipped("hgx-h100"))])))
    Path("pool", POOL_FILE).write_text(stored)
    Path("vm.xml").write_text(DOCUMENT)
    place = ["place", "vm.xml", "--pool", "pool", "--layout", "pin-numa-pci", "--record"]
    for gpus in (8, 6):
        assert _run([*place, "--gpus", str(gpus)], monkeypatch, capsys)[0] == 0
        (vm,) = load_pool(["pool"]).hosts[0].domains
        assert len(vm.devices) == gpus
    monkeypatch.setattr("sys.argv", ["homenode", "pool", *place, "--vcpus", "500"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 4
    assert "500 free PUs" in capsys.readouterr().err


def test_pool_place_offers_no_option_that_it_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    help_text = _run(["place", "--help"], monkeypatch, capsys)[1]
    assert "--record" in help_text
    assert not any(name in help_text for name in ("--after", "--replaces"))


def test_a_failure_names_its_source_once(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text("format = 1")
    (tmp_path / "empty.toml").write_text("")
    pool = load_pool([str(tmp_path), "hgx-h100"])
    assert pool.failures
    for one in pool.failures:
        assert Path(one.source).name not in one.reason
