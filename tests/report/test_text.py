"""What a terminal shows: the host tree, the explanation, the presets, bench."""

import io
import subprocess
from itertools import product
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace
from rich.console import RenderableType

from homenode.cpuset import NodeIndex
from homenode.doc import Commands, Doc
from homenode.findings import Gap, Rejection
from homenode.machine.description.parse import list_shipped_hosts, load_shipped
from homenode.machine.pci import DeviceKind, DeviceLink, LinkKind
from homenode.machine.settings import HostSettings
from homenode.machine.topology import summarise
from homenode.measure import runner
from homenode.measure.model import BenchOptions, BenchOutcome, SuiteDepth, SuiteOptions
from homenode.measure.results.vantage import Vantage
from homenode.show.device_groups import format_address, has_short_addresses
from homenode.show.explain import explain
from homenode.show.host_text import build_host_tree, format_host
from homenode.show.plan_text import format_refusal
from homenode.show.results_text import format_bench, format_steps
from homenode.show.terminal_text import PrintableConsole
from homenode.text import command_line, plural
from homenode.vm.plan import Unplannable
from tests.bench_machines import FakeMachine
from tests.picture_hosts import HOSTS, PLANS, h200_host, picture, planned
from tests.seeds import part

_LINKED = (DeviceKind.GPU, DeviceKind.NVSWITCH)
SCREEN = Path(__file__).with_name("show.txt")


def _printed(what: RenderableType | Doc, width: int = 100, encoding: str = "utf-8") -> str:
    """What a pipe of that width gets; an output in ASCII refuses every other letter."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = PrintableConsole(
        file=file, width=width, highlight=False, emoji=False, markup=False, legacy_windows=False
    )
    console.print(what)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [60, 200])
@pytest.mark.parametrize("name", HOSTS)
def test_the_tree_fits_the_terminal_without_colour_codes_in_a_pipe(name: str, width: int) -> None:
    text = _printed(build_host_tree(picture(name)[0]), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


@pytest.mark.parametrize("name", HOSTS)
def test_the_tree_needs_no_unicode(name: str) -> None:
    text = _printed(build_host_tree(picture(name)[0]), encoding="ascii")
    assert "`-- " in text or "+-- " in text


@pytest.mark.parametrize("name", HOSTS)
def test_every_gpu_nic_and_nvswitch_is_in_the_tree(name: str) -> None:
    host = picture(name)[0]
    text = _printed(build_host_tree(host), 300)
    for device in host.pci_devices:
        if device.kind in (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH):
            assert format_address(device.bdf, has_short_addresses(host)) in text


def test_a_host_is_one_screen() -> None:
    lines = _printed(format_host(load_shipped("hgx-h100").host), 80).splitlines()
    assert [line.rstrip() for line in lines] == SCREEN.read_text().splitlines()


@pytest.mark.parametrize("name", list_shipped_hosts())
def test_the_screen_of_every_host_has_its_counts_in_line_1_and_fits_40_lines(name: str) -> None:
    host = load_shipped(name).host
    lines = _printed(format_host(host), 80).splitlines()
    assert len(lines) <= 40 and all(len(line) <= 80 for line in lines)
    assert f"{name}: {plural(summarise(host).packages, 'package')}, " in lines[0]
    assert f"{summarise(host).cores} core" in lines[0] and not lines[1].strip()


def test_memory_that_the_source_does_not_show_is_not_called_absent() -> None:
    host = load_shipped("gh200x4").host
    nodes = tuple(replace(node, memory_bytes=None) for node in host.nodes)
    assert "nodes 4-35 without CPUs: memory unknown" in _printed(
        format_host(replace(host, nodes=nodes))
    )


def test_the_tree_groups_what_is_alike() -> None:
    text = _printed(build_host_tree(load_shipped("gh200x4").host), 300)
    assert "nodes 5-11,13-19,21-27,29-35: no memory, generic initiator" in text
    assert "NVLink: GPUs 0-3, every pair, 6 links each" in text
    hgx = load_shipped("hgx-h100").host
    ends = ([d.bdf for d in hgx.devices_of_kind(kind)] for kind in _LINKED)
    links = tuple(DeviceLink(LinkKind.NVLINK, a, b, count=4) for a, b in product(*ends))
    switched = _printed(build_host_tree(replace(hgx, links=links)), 300)
    assert switched.count("NVLink:") == 1 and "GPUs 0-7 to NVSwitch 83:00.0" in switched
    cores = _printed(build_host_tree(h200_host()), 200)
    assert "LLC 0, L3 260 MiB: 24 cores of its 48 (0-23), CPUs 0-23,96-119" in cores


def test_names_cannot_steer_the_terminal_or_the_markup() -> None:
    text = _printed(build_host_tree(picture("odd")[0]), 120)
    assert "\x1b" not in text and "\x07" not in text and "\x00" not in text
    assert "<vm>&\"'?[31m?" in text


@pytest.mark.parametrize(("name", "width"), part(list(product(PLANS, (60, 140))), 0))
def test_the_explanation_fits_narrow_and_wide_terminals(name: str, width: int) -> None:
    host, plan = picture(name)
    assert plan is not None
    text = _printed(explain(plan, host), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text and "…" not in text
    for device in plan.vm.hostdevs:
        assert str(device.bdf) in text
    if width == 60:
        _printed(explain(plan, host), width, "ascii")


def test_commands_survive_a_narrow_terminal() -> None:
    host = h200_host()
    plan = planned(host, "pin-numa", 88, memory_bytes=1920 << 30)
    text = _printed(explain(plan, host), 60)
    # A shell joins what ends in a backslash.
    joined = text.replace("\\\n", "")
    assert (
        "echo 508 > /sys/devices/system/node/node3/hugepages/hugepages-1048576kB/nr_hugepages\n"
        in joined
    )


def test_no_command_is_continued_within_quotes() -> None:
    words = ("virsh", "define", "/srv/bob's own/gpu-vm of the second rack.xml")
    for width in range(20, 60):
        text = _printed(Doc("", (Commands((command_line(*words),)),)), width)
        printf = ("sh", "-c", f"printf '%s|' {text}")
        shell = subprocess.run(printf, capture_output=True, text=True, check=True)
        assert shell.stdout == "".join(f"{word}|" for word in words), width


def test_an_unplannable_request_lists_its_rejections_and_the_hint() -> None:
    rejections = tuple(
        Rejection("cores", (NodeIndex(node),), "needs 48, 40 free", "lower vcpus to 40")
        for node in range(25)
    )
    error = Unplannable("no node set fits", rejections, hint="allow two nodes")
    text = _printed(format_refusal(error), 80)
    assert [line.rstrip() for line in text.splitlines()] == [
        "no node set fits",
        "  each of nodes 0-24    needs 48, 40 free",
        "  hint: allow two nodes",
    ]


def test_only_what_placement_depends_on_is_shown_of_the_kernel_command_line() -> None:
    line = "root=UUID=77 isolcpus=0-3 token=secret vfio-pci.ids=10de:2330 quiet"
    host = replace(h200_host(), settings=HostSettings(kernel_command_line=line, smt_control="on"))
    text = _printed(build_host_tree(host), 120)
    assert "on the kernel command line: isolcpus=0-3 vfio-pci.ids=10de:2330\n" in text
    assert "secret" not in text and "SMT control: on" in text


ORDERS = BenchOptions("x", SuiteOptions(depth=SuiteDepth.QUICK), repeats=1, vantage=Vantage.HOST)


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchOutcome:
    monkeypatch.setattr(runner, "IDLE_S", 0.0)
    return runner.run_bench(FakeMachine(), ORDERS, tmp_path, lambda progress: None)


def shown(text: Doc, width: int) -> str:
    stream = io.StringIO()
    PrintableConsole(file=stream, width=width, highlight=False).print(text)
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_figure_has_its_median_and_its_range(outcome: BenchOutcome, width: int) -> None:
    text = " ".join(shown(format_bench(outcome), width).split())
    for words in ("memory bandwidth", "27 ns apart", "36 GB/s", "93.5 ns", "4,600 events/s"):
        assert words in text, words


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_step_is_shown_with_its_command(width: int) -> None:
    record = runner.inspect(FakeMachine(), ORDERS)[0].record
    text = " ".join(shown(format_steps(record), width).split())
    assert text.count("cpu-single (control)") == 2
    assert "homenode-probe placement" in text
    assert "not measured: nccl: no GPU" in text


def test_why_a_run_is_marked_is_shown_and_nothing_steers_the_terminal(
    outcome: BenchOutcome,
) -> None:
    assert outcome.run is not None
    head = structs.replace(outcome.run.head, unusable=("\x1b[2Jevil",))
    gaps = tuple(Gap(f"test {number}", "\x1b]0;evil") for number in range(40))
    text = shown(
        format_bench(replace(outcome, run=structs.replace(outcome.run, head=head), gaps=gaps)), 80
    )
    assert "\x1b" not in text
    assert "marked: ?[2Jevil" in text
    assert "not measured: 28 more" in text
