"""homenode plan, show, restore and capture, as a user runs them."""

import json
import stat
from pathlib import Path

import pytest
from lxml import etree

from homenode.cli.apply import plan_together
from homenode.units import GIB
from homenode.vm.plan import is_critical
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.command_line import Result
from tests.command_line import homenode as called

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "demo" / "gpu-vm.xml"


def homenode(*words: str | Path, input: bytes = b"") -> Result:
    return called(*words, input=input, whole=True)


def plan_of(host: str, words: str, *more: str | Path) -> Result:
    """A plan of the demo's VM."""
    return homenode("plan", DOCUMENT, "--host", host, *words.split(), *more)


def test_a_tuned_document_is_written_and_undone(tmp_path: Path) -> None:
    out, plan = tmp_path / "vm.xml", tmp_path / "plan.json"
    out.write_bytes(DOCUMENT.read_bytes())
    words = ("plan", out, "--host", "hgx-h100", "--gpus", "8", "--layout", "pin-numa-pci")
    refused = homenode(*words, "-o", out)
    assert refused.exit_code == 2 and "--force" in refused.stderr
    assert out.read_bytes() == DOCUMENT.read_bytes()
    done = homenode(*words, "-o", out, "--save-plan", plan, "--force")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("gpu-vm fits hgx-h100: ")
    assert out.read_bytes() != DOCUMENT.read_bytes()
    assert json.loads(plan.read_text())["format"] == "homenode.plan/1"
    assert homenode("restore", out, "--yes").exit_code == 0
    assert out.read_bytes() == DOCUMENT.read_bytes()


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o640, 0o640), (None, 0o600)])
def test_a_tuned_document_is_as_private_as_the_one_that_was_read(
    tmp_path: Path, mode: int | None, expected: int
) -> None:
    """mode: of the input; None = it comes on standard input."""
    secret = DOCUMENT.read_bytes().replace(
        b"</devices>", b"<graphics type='vnc' passwd='hunter2'/></devices>"
    )
    read, out = tmp_path / "vm.xml", tmp_path / "out.xml"
    read.write_bytes(secret)
    read.chmod(mode or 0o644)
    words = "--host hgx-h100 --gpus 8 --layout pin-numa -o".split()
    done = homenode("plan", "-" if mode is None else read, *words, out, input=secret)
    assert done.exit_code == 0, done.stderr
    written = sorted(tmp_path.glob("out.xml*"))
    assert [path.name for path in written] == ["out.xml", "out.xml.orig", "out.xml.orig.sha256"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {expected}


def test_the_diff_shows_what_changes() -> None:
    words = "--host xapi-2n16c2t --layout pin --vcpus 8 --memory 8GiB --page-size 2MiB".split()
    done = homenode("plan", "-", *words, "--diff", "--quiet", input=DOCUMENT.read_bytes())
    assert done.exit_code == 0, done.stderr
    assert "+    <vcpupin vcpu='0'" in done.stdout
    assert not done.stdout.startswith("\x1b")


@pytest.mark.parametrize(
    ("layout", "emulator", "vcpus", "topology", "cells"),
    [
        ("pin", "28,29", 56, None, []),
        ("pin-numa", "28,29", 56, ("2", "28", "1"), ["0-27", "28-55"]),
        ("pin-numa-smt", "28,29,92,93", 112, ("2", "28", "2"), ["0-55", "56-111"]),
    ],
)
def test_explicit_pu_lists_give_the_studys_listings(
    tmp_path: Path,
    layout: str,
    emulator: str,
    vcpus: int,
    topology: tuple[str, str, str] | None,
    cells: list[str],
) -> None:
    out = tmp_path / "out.xml"
    vm = tmp_path / "vm.xml"
    vm.write_text(
        "<domain type='kvm'>\n  <name>vm</name>\n  <memory unit='KiB'>4194304</memory>\n"
        "  <vcpu placement='static'>4</vcpu>\n  <os><type arch='x86_64'>hvm</type></os>\n"
        "  <cpu mode='host-passthrough' check='none' migratable='on'/>\n</domain>\n"
    )
    lists = "--node-cpus 0-27 --node-cpus 32-59 --sibling-cpus 64-91 --sibling-cpus 96-123".split()
    words = f"--emulator-cpus {emulator} --memory 1572864MiB --layout {layout} --quiet -o".split()
    done = homenode("plan", vm, *lists, *words, out)
    assert done.exit_code == 0, done.stderr
    root = etree.parse(out).getroot()
    cores = [*range(28), *range(32, 60)]
    pus = [pu for core in cores for pu in ((core, core + 64) if vcpus == 112 else (core,))]
    expected = [("emulatorpin", {"cpuset": emulator})]
    expected += [("vcpupin", {"vcpu": str(i), "cpuset": str(pu)}) for i, pu in enumerate(pus)]
    assert _rows(root, "cputune/*") == expected
    assert _rows(root, "vcpu") == [("vcpu", {"placement": "static"})]
    assert root.findtext("vcpu") == str(vcpus)
    mode = {"mode": "host-passthrough", "check": "none", "migratable": "on"}
    assert _rows(root, "cpu") == [("cpu", mode)]
    if topology is None:
        assert _rows(root, "cpu/*") == _rows(root, "numatune") == []
        return
    stated = dict(zip(("sockets", "cores", "threads"), topology, strict=True))
    assert _rows(root, "cpu/*") == [("topology", stated), ("numa", {})]
    assert _rows(root, "cpu/numa/*") == [
        ("cell", {"id": str(i), "cpus": numbers, "memory": "786432", "unit": "MiB"})
        for i, numbers in enumerate(cells)
    ]
    assert _rows(root, "numatune/*") == [
        ("memory", {"mode": "strict", "nodeset": "0,1"}),
        ("memnode", {"cellid": "0", "mode": "strict", "nodeset": "0"}),
        ("memnode", {"cellid": "1", "mode": "strict", "nodeset": "1"}),
    ]


def _rows(root: etree._Element, path: str) -> list[tuple[str, dict[str, str]]]:
    found = root.findall(path)
    return [(str(e.tag), {str(k): str(v) for k, v in e.attrib.items()}) for e in found]


def test_what_cannot_be_planned_exits_with_4_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.xml"
    done = plan_of("xapi-2n16c2t", "--layout pin-numa -o", out)
    assert done.exit_code == 4
    assert "88" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_94_vcpus_of_the_study_are_planned_with_unequal_cells_and_no_flag() -> None:
    done = plan_of("h200-xeon8558", "--layout pin-numa --vcpus 94")
    assert done.exit_code == 0
    assert "guest nodes of 24, 24, 23 and 23 vCPUs" in done.stdout
    too_many = plan_of("h200-xeon8558", "--layout pin-numa --vcpus 200")
    assert too_many.exit_code == 4 and "192" in too_many.stderr


@pytest.mark.parametrize("layout", ["--layout auto --objective multi-gpu", ""])
def test_auto_prints_the_figures_it_follows(layout: str) -> None:
    done = plan_of("h200-xeon8558", f"--gpus 8 {layout}")
    assert done.exit_code == 0, done.stderr
    assert "pin-bound (auto, multi-gpu): all-reduce with pin is 2.1x" in done.stdout


def test_a_saved_plan_is_refused_on_another_host(tmp_path: Path) -> None:
    plan = tmp_path / "p.json"
    plan_of("hgx-h100", "--layout pin --save-plan", plan)
    drawn = homenode("show", "--host", "hgx-h100", "--plan", plan, "--svg", tmp_path / "a.svg")
    assert drawn.exit_code == 0, drawn.stderr
    other = homenode("show", "--host", "gh200x4", "--plan", plan, "--svg", tmp_path / "b.svg")
    assert other.exit_code == 2
    assert "hgx-h100" in other.stderr
    assert not (tmp_path / "b.svg").exists()


def test_capture_and_show_agree(tmp_path: Path) -> None:
    archive = tmp_path / "host.tar.gz"
    assert homenode("capture", "-o", archive).exit_code == 0
    captured = json.loads(homenode("show", "--host", archive, "--json").stdout)
    live = json.loads(homenode("show", "--json").stdout)
    assert captured["summary"] == live["summary"]


def test_a_host_is_filled_by_saved_plans(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    words = "--layout pin-numa-pci --gpus 4 --vcpus 40 --memory 512GiB -q"
    assert plan_of("hgx-h100", words, "--save-plan", first).exit_code == 0
    again = plan_of("hgx-h100", words, "--after", first)
    assert again.exit_code == 2 and "--name" in again.stderr
    named = f"{words} --after {first} --name"
    done = plan_of("hgx-h100", named, "second", "--save-plan", second)
    assert done.exit_code == 0, done.stderr
    plans = [json.loads(path.read_text()) for path in (first, second)]
    assert [plan["nodes"] for plan in plans] == [[0], [1]]
    mine, theirs = ({d["bdf"] for d in plan["vm"]["hostdevs"]} for plan in plans)
    assert not mine & theirs
    third = plan_of("hgx-h100", named, "third", "--after", second)
    assert third.exit_code == 4 and "gpu" in third.stderr.lower()
    other = plan_of("h200-xeon8558", "--layout pin --after", first)
    assert other.exit_code == 2 and "hgx-h100" in other.stderr


def test_a_critical_plan_is_written_and_exits_with_1(tmp_path: Path) -> None:
    out = tmp_path / "vm.xml"
    words = "--layout pin-numa-pci --gpus 8 --vcpus 104 --memory 2040GiB -o"
    done = plan_of("hgx-h100", words, out)
    assert done.exit_code == 1, done.stderr
    assert out.exists() and "critical  hgx-h100" in done.stdout


SHORT_OF_MEMORY = ("--host", "small-2n8c-2gpu", "--layout", "default", "--memory", "900GiB", "-q")


@pytest.mark.parametrize("target", ["libvirt", "qemu", "proxmox"])
def test_quiet_leaves_what_makes_the_exit_code_1(target: str) -> None:
    done = homenode("plan", "--vcpus", "2", "--target", target, *SHORT_OF_MEMORY)
    assert (done.exit_code, done.stdout) == (1, ""), done.stderr
    assert "critical: small-2n8c-2gpu" in done.stderr


def test_quiet_of_apply_leaves_what_makes_the_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = PlanOptions(layout="default", vcpus=2, memory_bytes=900 * GIB, gpu_count=1)
    given = Path(DOCUMENT).read_bytes()
    host = load_host("small-2n8c-2gpu")
    made = plan_together({"gpu-vm": given}, wanted, host, (), ())[0]
    assert is_critical(made.plan)
    shown = capsys.readouterr()
    assert shown.out == "" and "critical: small-2n8c-2gpu" in shown.err


def test_slow_links_of_equal_gpus_are_one_warning() -> None:
    done = plan_of("rtx5090-epyc7702", "--vcpus 24 --memory 48GiB --gpus 1")
    (warning,) = [line for line in done.stderr.splitlines() if "pcie-link-slow" in line]
    assert done.exit_code == 0 and warning.startswith("warning: 8 GPUs: 0000:41:00.0 and 7 more")
