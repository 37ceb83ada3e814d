"""What pool commands print for people: narrow and wide, few hosts and many."""

import subprocess
from pathlib import Path

import pytest
from msgspec import structs

from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.model import Pool, PoolHost, pool_vms
from homenode.cluster.pool.outlook import FlavourFit, Free, HostOutlook, PoolOutlook, outlook
from homenode.cluster.pool.rules import Availability
from homenode.doc import Doc
from homenode.show.pool_text import (
    MOST_ROWS,
    pool_text,
    vms_text,
)
from homenode.show.terminal_text import PrintableConsole, ShellCommand
from tests.pool.pools import filled, pool_of, shipped, sized, with_vm
from tests.pool.test_sources import DOCUMENT, _run

GPU1, GPU2, GPU4, GPU8 = FLAVOURS = default_flavours()
COLUMNS = ("host", "VMs", "GPUs", "cores", "memory", "gpu8", "stranded")


def printed(text: Doc, width: int) -> list[str]:
    console = PrintableConsole(width=width, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(text)
    return capture.get().splitlines()


def _outlook(cores: list[int], fits: list[int] | None = None) -> PoolOutlook:
    """Hosts that differ in free cores, and in VMs that fit where fits are given."""
    hosts = tuple(
        HostOutlook(
            name=f"gpu-{number}",
            free=Free(
                gpus=8,
                free_gpus=8,
                cores=112,
                free_cores=free,
                memory_bytes=1 << 40,
                free_memory_bytes=free << 30,
                vms=1,
            ),
            fits=(
                FlavourFit(
                    flavour="gpu8", local=(fits or cores)[number] if fits else 1, degraded=0
                ),
            ),
            stranded=(),
        )
        for number, free in enumerate(cores)
    )
    free = Free(
        gpus=8 * len(hosts),
        free_gpus=8 * len(hosts),
        cores=112,
        free_cores=sum(cores),
        memory_bytes=None,
        free_memory_bytes=None,
        vms=len(hosts),
    )
    return PoolOutlook(
        hosts=hosts,
        free=free,
        fits=(FlavourFit(flavour="gpu8", local=1, degraded=0),),
        stranded=(),
        shapes=1,
        states=1,
        failures=(),
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_every_host_is_there(width: int) -> None:
    names = ["gpu-1", "a-long-name-of-a-host.rack-17.example.org"]
    pool = pool_of([(name, filled(shipped("hgx-h100"), 5)) for name in names])
    lines = printed(pool_text(outlook(pool, FLAVOURS)), width)
    assert all(len(line) <= width for line in lines)
    for name in names:
        text = "".join(lines)
        assert name in text or (name[:6] in text and name[-6:] in text)


def test_a_narrow_table_leaves_out_the_least_of_its_columns_and_says_so() -> None:
    found = _outlook([100, 50])
    head = {
        width: next(
            line.split() for line in printed(pool_text(found), width) if line.startswith(" host")
        )
        for width in (80, 45)
    }
    assert head[80] == list(COLUMNS)
    assert head[45] == [name for name in COLUMNS if name not in ("cores", "memory")]
    assert any("cores and memory" in line for line in printed(pool_text(found), 45))


def test_hosts_that_take_the_same_vms_are_one_row_with_the_range_of_what_differs() -> None:
    found = _outlook([50 + number % 3 for number in range(MOST_ROWS + 1)])
    rows = [line.split() for line in printed(pool_text(found), 100)]
    assert ["gpu-0", f"+{MOST_ROWS}", "1", "8/8", "50-52", "50-52", "GiB", "1", "0"] in rows


def test_a_host_that_takes_no_vm_says_why() -> None:
    found = _outlook([10, 10])
    closed = structs.replace(found.hosts[1], availability=Availability.DRAINING)
    found = structs.replace(found, hosts=(found.hosts[0], closed))
    rows = [row for row in printed(pool_text(found), 120) if row.startswith(" gpu-")]
    assert ["(draining)" in row for row in rows] == [False, True]


def test_rows_that_are_left_out_are_counted_and_not_added_to_another() -> None:
    found = _outlook([50] * 60, list(range(60)))
    lines = printed(pool_text(found), 100)
    assert sum(line.lstrip().startswith("gpu-") for line in lines) == MOST_ROWS
    assert f"{60 - MOST_ROWS} hosts more: --all" in lines


def test_the_vms_of_a_pool_have_their_nodes_and_gpus_that_are_elsewhere() -> None:
    host = with_vm(shipped("hgx-h100"), GPU1, "vm")
    vm = host.domains[0]
    (home,) = {host.device_at[bdf].node for bdf in vm.devices}
    other = next(
        gpu.bdf
        for gpu in host.pci_devices
        if gpu.name == host.device_at[vm.devices[0]].name and gpu.node != home
    )
    far = structs.replace(vm, name="far", devices=(other,), planned=True, running=False)
    loose = structs.replace(vm, name="loose", vcpu_pins=(None, None), running=False, planned=False)
    found = pool_vms(
        pool_of([("a", structs.replace(host, domains=(vm, far, loose))), ("b", host)]), {"a"}
    )
    assert [(one.name, one.nodes, one.gpus_away) for one in found.vms] == [
        ("far", (home,), 1),
        ("loose", None, None),
        ("vm", (home,), 0),
    ]
    assert [one.state for one in found.vms] == [
        "placed",
        "shut off",
        "running" if vm.running else "placed",
    ]
    assert all(len(line) <= 60 for line in printed(vms_text(found), 60))


def _pool() -> Pool:
    plain = sized("plain", vcpus=4, memory_bytes=8 << 30)
    host = shipped("hgx-h100")
    busy = with_vm(with_vm(host, GPU1, "gpu"), plain, "plain")
    return pool_of([("a", busy), ("b", with_vm(host, GPU1, "other"))])


def test_a_command_with_quoted_words_is_not_continued_within_them() -> None:
    command = "virsh define 'a file with a very long name and spaces in it.xml'"
    for width in range(20, 70):
        text = "".join(ShellCommand(command).lines(width))
        done = subprocess.run(
            ["sh", "-c", f'virsh() {{ echo "$2"; }}\n{text}'], capture_output=True, text=True
        )
        assert done.stdout == "a file with a very long name and spaces in it.xml\n", width


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        ("root@gpu-1", "qemu+ssh://root@gpu-1/system"),
        ("gpu-1:2222", "qemu+ssh://gpu-1:2222/system"),
        ("qemu+ssh://root@gpu-1/system", "qemu+ssh://root@gpu-1/system"),
        ("captures/gpu-1.tar.gz", "qemu+ssh://name/system"),
        ("hgx-h100*3", "qemu+ssh://name/system"),
    ],
)
def test_virsh_reaches_a_host_as_it_was_read(source: str, uri: str) -> None:
    assert PoolHost(name="name", shape=0, nodes=(), domains=(), source=source).libvirt_uri == uri


def test_a_vm_is_placed_on_the_hosts_and_gpus_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vm.xml").write_text(DOCUMENT)
    pools = ["--pool", "hgx-h100*2", "--pool", "h200-xeon8558"]
    place = ["place", "vm.xml", *pools, "--gpus", "1", "--layout", "pin", "-o", "tuned.xml"]

    def code(*arguments: str) -> int:
        return _run([*place, *arguments], monkeypatch, capsys)[0]

    assert code("--on", "hgx-h100-2") == 0
    assert code("--on", "hgx-h100-3") == 2
    assert code("--gpu-model", "H200") == 0
    assert "0x18" in Path("tuned.xml").read_text()
    assert code("--gpu-model", "H200", "--on", "hgx-h100-1") == 4
