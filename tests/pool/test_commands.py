"""What the commands of pool print, write and refuse."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.fits import DEFAULT_SIZES, examine_pool
from homenode.cluster.pool.text import MAX_ROWS, format_pool
from homenode.doc import Doc
from homenode.findings import Gap, GapKind
from homenode.show.terminal_text import PrintableConsole
from homenode.vm.domain.read import read_vm
from tests.command_line import homenode
from tests.pool.pools import filled, named, shipped
from tests.tools.test_xl_info import INFO

DOCUMENT = """<domain type='kvm'><name>gpu-vm</name><memory unit='GiB'>256</memory><vcpu>32</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features>
<cpu mode='host-passthrough'/><devices/></domain>"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("vm.xml").write_text(DOCUMENT)

    def run_pool(line: str) -> tuple[int, str, str]:
        done = homenode("pool", *line.split(), whole=True)
        return done.exit_code, done.stdout, done.stderr

    return run_pool


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_show_as_json_has_nodes_and_counts_and_what_was_not_read(run: Run) -> None:
    code, out, err = run(
        "show --pool hgx-h100 --pool nothere --size gpus=2,vcpus=24,memory=256GiB --json"
    )
    pool = json.loads(out)
    assert (code, pool["format"]) == (1, "homenode.pool/1")
    (host,) = pool["hosts"]
    assert [node["free_gpus"] for node in host["nodes"]] == [4, 4]
    (fit,) = host["fits"]
    assert (fit["size"], fit["count"]) == ("2 GPUs, 24 vCPUs, 256 GiB", 4)
    assert (fit["share_vcpus"], fit["share_bytes"]) == (None, None)
    assert pool["unread"][0]["subject"] == "nothere"
    assert "not read  nothere" in err
    assert run("show --pool nothere")[0] == 2
    assert run("show")[0] == 2


def test_a_source_that_is_not_read_has_its_reason_in_a_few_words(run: Run) -> None:
    for name, text in (("notes.txt", "hello"), ("empty", ""), ("key.toml", "nodes_per_packge = 2")):
        Path(name).write_text(text)
    _, out, _ = run("show --pool hgx-h100 --pool notes.txt --pool empty --pool key.toml")
    texts = [line for line in out.splitlines() if line.startswith("not read")]
    assert len(texts) == 3 and max(map(len, texts)) <= 140
    assert "(did you mean nodes_per_package?)" in texts[-1]


def test_sizes_are_the_users_where_no_host_has_gpus(run: Run) -> None:
    _, out, _ = run("show --pool xeon-2p-cpus*2")
    assert "size" not in out
    _, out, _ = run("show --pool xeon-2p-cpus --pool hgx-h100 --size gpus=1")
    assert _rows(out)[3][-1] == "8"
    assert _rows(out)[4][-1] == "-"


@pytest.mark.parametrize(
    ("line", "status", "answer"),
    [
        ("--pool rtx4090-epyc7702 --gpus 4", 1, "; with a fallback: the VM takes its reserve"),
        ("--pool epyc-nps4-gpu-nic --gpus 4 --memory 128GiB", 0, "; 2 of 4 GPUs local"),
        (
            "--pool x86-2p2n8c16t-gpu-node-unknown --gpus 2 --vcpus 2 --memory 1GiB",
            0,
            "; 1 of 2 GPUs local, 1 unknown",
        ),
    ],
)
def test_the_first_line_has_the_fallback_and_the_devices_that_are_local(
    run: Run, line: str, status: int, answer: str
) -> None:
    code, out, _ = run(f"place vm.xml {line}")
    assert code == status
    assert answer in out.splitlines()[0]


def test_the_models_and_the_share_of_a_gpu_are_printed(run: Run) -> None:
    show = "show --pool rtx4090-epyc7702 --pool hgx-h100"
    out = run(show)[1]
    assert "4/4 RTX 4090 " in out
    assert "8/8 H100 " in out
    assert (
        run(show)[1].splitlines()[-1].startswith("for each GPU, a VM has 12 vCPUs and 240 GiB (h")
    )
    assert (
        run(f"{show} --size gpus=1,vcpus=3")[1]
        .splitlines()[-1]
        .startswith("for each GPU, a VM has 240 GiB (hgx-h100)")
    )
    assert "7 H100" in run("place vm.xml --gpus 1 --pool hgx-h100")[1]


def test_gpus_that_a_source_does_not_show_are_unknown(run: Run) -> None:
    Path("x.txt").write_text(INFO)
    _, out, _ = run("show --pool x.txt")
    assert [row[1] for row in _rows(out)[3:5]] == ["unknown", "unknown"]
    (host,) = json.loads(run("show --pool x.txt --json")[1])["hosts"]
    assert {node["gpus"] for node in host["nodes"]} == {None}


def test_a_vm_that_takes_the_hosts_memory_does_not_count_as_fitting(run: Run) -> None:
    _, out, _ = run("show --pool rtx4090-epyc7702 --size gpus=4,vcpus=48,memory=256GiB")
    assert _rows(out)[3][-1] == "0"


def test_an_address_that_is_a_gpu_of_one_host_and_a_nic_of_another_is_refused_first(
    run: Run,
) -> None:
    run("place vm.xml --gpus 2 --pool hgx-h100 -o vm2.xml --layout pin")
    _, out, err = run("place vm2.xml --pool hgx-h100 --pool h200-xeon8558 --on h200-xeon8558")
    assert out.splitlines()[0].endswith("; all NICs local")
    assert "whether the definition means NIC 0000:19:00.0" in out and "warning" not in err
    assert "definition means" not in run("place vm2.xml --pool hgx-h100")[1]
    for more in ("", " --gpus 8"):
        code, out, err = run(f"place vm2.xml --pool hgx-h100 --pool h200-xeon8558{more}")
        assert (code, out) == (2, "")
        assert "NIC of h200-xeon8558 and GPU of hgx-h100" in err


def test_place_has_a_row_for_each_guest_node_with_its_gpus(run: Run) -> None:
    _, out, _ = run("place vm.xml --gpus 8 --pool hgx-h100 --layout pin-numa-pci")
    rows = [row for row in _rows(out) if row and row[-1].startswith("gpu")]
    assert rows == [
        "0 0-15 (16) 0-15 0 128 GiB gpu0-3".split(),
        "1 16-31 (16) 56-71 1 128 GiB gpu4-7".split(),
    ]
    _, out, _ = run("place vm.xml --gpus 4 --pool hgx-h100 --layout pin-bound")
    assert "single 0-31 (32) 0-31 0 256 GiB gpu0-3".split() in _rows(out)
    assert len(out.splitlines()) <= 25
    assert "Why there" not in out
    assert "Why there" in run("place vm.xml --gpus 4 --pool hgx-h100 --explain")[1]


def test_a_saved_plan_counts_on_the_host_that_it_is_for(run: Run) -> None:
    place = "place vm.xml --gpus 8 --pool hgx-h100*2"
    assert run(f"{place} --save-plan first.json")[0] == 0
    Path("vm.xml").write_text(DOCUMENT.replace("gpu-vm", "other"))
    code, out, _ = run(f"{place} --after first.json --save-plan second.json --explain")
    assert code == 0
    assert "other fits 1 of 2 hosts; best: hgx-h100-2" in out
    assert "hgx-h100-1: 8 GPUs needed" in out
    brief = run(f"{place} --after first.json")[1]
    assert "it does not fit hgx-h100-1: 8 GPUs needed" in " ".join(brief.split())
    Path("vm.xml").write_text(DOCUMENT.replace("gpu-vm", "third"))
    code, _, err = run(f"{place} --after first.json --after second.json")
    assert (code, "third fits none of 2 hosts" in err) == (4, True)
    _, out, _ = run("show --pool hgx-h100*2 --after first.json --after second.json")
    assert out.startswith("2 hosts, 2 busy: 0 of 16 GPUs")


def test_equal_hosts_are_one_row_and_the_owner_of_devices_is_of_the_named_host(run: Run) -> None:
    _, out, _ = run("place vm.xml --gpus 4 --pool hgx-h100*5 --pool hgx-h200*2")
    ranks = [row for row in _rows(out) if row[:1] in (["1"], ["6"])]
    assert [row[:5] for row in ranks[:2]] == [
        "1 hgx-h100-1 and 4 more".split(),
        "6 hgx-h200-1 and 1 more".split(),
    ]
    _, out, _ = run("place vm.xml --gpus 8 --pool hgx-h100 --pool rtx4090-epyc7702*2")
    assert "rtx4090-epyc7702-1, rtx4090-epyc7702-2; on rtx4090-epyc7702-1: 8 GPUs needed" in out


def test_a_vm_of_another_hypervisor_is_placed_for_it(run: Run) -> None:
    Path("vm.cfg").write_text("name = 'a'\nvcpus = 8\nmemory = 8192\ntype = 'hvm'\n")
    place = "place vm.cfg --pool hgx-h100*2 --gpus 2"
    code, out, _ = run(place)
    assert (code, "a fits 2 of 2 hosts" in out, "-o FILE" in out) == (0, True, True)
    assert "memlock" not in out
    assert run(f"{place} -o tuned.cfg")[0] == 0
    assert "cpus" in Path("tuned.cfg").read_text()


def test_a_vm_is_placed_on_the_hosts_that_are_named(run: Run) -> None:
    place = "place vm.xml --gpus 1 --pool hgx-h100*3 --layout pin"
    code, out, _ = run(f"{place} --on hgx-h100-2")
    assert (code, "best: hgx-h100-2" in out) == (0, True)
    assert run(f"{place} --on hgx-h100-4")[0] == 2


def test_a_document_goes_to_standard_output_alone(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("place vm.xml --gpus 1 --pool hgx-h100 --layout pin -o -")
    assert (code, read_vm(out.encode(), "-").vcpus) == (0, 32)
    assert [path.name for path in tmp_path.iterdir()] == ["vm.xml"]
    assert run("place vm.xml --pool hgx-h100 -o - --json")[0] == 2
    code, out, _ = run("place vm.xml --gpus 1 --pool hgx-h100 --layout pin --json")
    assert json.loads(out)["host_name"] == "hgx-h100"


def test_a_vm_that_fits_nowhere_has_a_reason_for_each_kind(run: Run) -> None:
    code, out, err = run("place vm.xml --gpus 1 --vcpus 300 --pool hgx-h100*3 --pool gh200x4")
    assert (code, out) == (4, "")
    assert "gpu-vm fits none of 4 hosts" in err
    assert "300 CPUs needed, 224 free" in " ".join(err.split())
    assert "aarch64" in err


def test_what_a_source_does_not_show_is_unknown_and_not_none(run: Run) -> None:
    Path("xen.txt").write_text(INFO)
    code, _, err = run("place vm.xml --gpus 1 --vcpus 1 --memory 1GiB --pool xen.txt")
    assert (code, "xl info -n does not show" in err, "--lspci" in err) == (5, True, True)
    _, out, _ = run("show --pool xen.txt")
    assert (out.splitlines()[0].startswith("1 host, the VMs of 1 not read"), _rows(out)[3][-1]) == (
        True,
        "unknown",
    )
    assert json.loads(run("show --pool xen.txt --json")[1])["hosts"][0]["vms"] is None


def test_capture_reads_named_hosts_or_a_list(run: Run) -> None:
    assert run("capture -o pool")[0] == 2
    Path("hosts.txt").write_text("root@127.0.0.1:1 name=c\n")
    assert run("capture gpu-1 --hosts hosts.txt -o pool")[0] == 2
    code, _, err = run("capture --hosts hosts.txt -o pool")
    assert (code, "root@127.0.0.1:1" in err) == (1, True)


def _printed(text: Doc, width: int) -> list[str]:
    console = PrintableConsole(width=width, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(text)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_every_host_is_there(width: int) -> None:
    names = ["gpu-1", "a-long-name-of-a-host.rack-17.example.org"]
    hosts = named(**{name: filled(shipped("hgx-h100"), 5) for name in names})
    lines = _printed(format_pool(examine_pool(hosts, DEFAULT_SIZES)), width)
    assert all(len(line) <= width for line in lines)
    text = "".join(lines)
    for name in names:
        assert name in text or (name[:6] in text and name[-6:] in text)


def test_of_many_hosts_those_with_equal_figures_are_one_row() -> None:
    hosts = {f"gpu-{number}": shipped("hgx-h100") for number in range(MAX_ROWS)}
    hosts["busy"] = filled(shipped("hgx-h100"), 1)
    pool = examine_pool(named(**hosts), DEFAULT_SIZES)
    rows = _printed(format_pool(pool), 100)
    assert sum("gpu-" in row for row in rows if "unknown" not in row) == 1
    assert any(f"gpu-0 and {MAX_ROWS - 1} more" in row for row in rows)
    bare = examine_pool(named(a=replace(shipped("hgx-h100"), pci_devices=())), ())
    assert _printed(format_pool(bare), 100)[0] == "1 host, all free: 112 cores, 2 TiB; 0 VMs"
    unread = replace(shipped("hgx-h100"), gaps=(Gap("VMs", "no virsh", GapKind.VMS),))
    rows = _printed(format_pool(examine_pool(named(a=unread, b=hosts["busy"]), ())), 100)
    assert next(row for row in rows if row.lstrip().startswith("total")).split()[-1] == "unknown"
