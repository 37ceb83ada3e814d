"""The PyTorch programs on a real GPU, next to plain copies and next to nvbandwidth."""

import shutil
import subprocess

import pytest

from homenode.machine.tools import torch_report
from homenode.measure.access.machine import LocalMachine
from homenode.measure.model import SuiteDepth, SuiteGroup, SuiteOptions
from homenode.measure.programs.torch_place import nodes_to_bind
from homenode.measure.step_reading import read_step_results
from homenode.measure.suite import build_suite, parse_shown
from homenode.measure.tool_setup import read_program
from homenode.vm.sources import load_host

pytestmark = pytest.mark.gpu

PLAIN = """
import time, torch
host = torch.empty(1 << 26, dtype=torch.int32, pin_memory=True)
gpu = torch.empty_like(host, device="cuda")
a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in "ab")
big = [torch.zeros(1 << 28, dtype=torch.int32, device="cuda") for _ in "ab"]
works = {
    "h2d": (lambda: gpu.copy_(host, non_blocking=True), 1 << 28),
    "d2h": (lambda: host.copy_(gpu, non_blocking=True), 1 << 28),
    "d2d": (lambda: big[0].copy_(big[1]), 1 << 30),
    "matmul": (lambda: torch.mm(a, b), 2 * 8192 ** 3),
}
for name, (work, amount) in works.items():
    rates = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            work()
        torch.cuda.synchronize()
        rates.append(20 * amount / (time.perf_counter() - begin))
    print(name, sorted(rates[2:])[5])
"""


@pytest.fixture(scope="module")
def python() -> str:
    found = shutil.which("python3", path="/opt/torch/.venv/bin:/usr/local/bin:/usr/bin:/bin")
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    for program in (found, shutil.which("python3"), shutil.which("python")):
        if program and subprocess.run([program, "-c", code], check=False).returncode == 0:
            return program
    pytest.skip("no Python here has PyTorch that can use a GPU")


def copied(python: str, words: str) -> torch_report.TorchRun:
    program, order = read_program("torch_copies"), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    ended = LocalMachine().run((python, "-", *words.split()), 300, program, environment=order)
    (run,) = torch_report.parse(ended.stdout_or_raise())
    return run


def medians(python: str, command: str) -> dict[tuple[str, str | None], float]:
    """Medians of the first GPU."""
    first = (one for one in copied(python, f"{command} --seconds 0.5").results if one.device == 0)
    return {(one.metric, one.variant): sorted(one.samples)[len(one.samples) // 2] for one in first}


def test_figures_are_those_of_plain_pytorch(python: str) -> None:
    plain = LocalMachine().run((python, "-c", PLAIN), 300).stdout_or_raise()
    expected = {line.split()[0]: float(line.split()[1]) for line in plain.splitlines()}
    copies, local = medians(python, "host-copies"), medians(python, "local-copy")
    products = medians(python, "matmul")
    assert copies["h2d-bandwidth", None] == pytest.approx(expected["h2d"], rel=0.05)
    assert copies["d2h-bandwidth", None] == pytest.approx(expected["d2h"], rel=0.05)
    assert local["d2d-bandwidth", None] == pytest.approx(expected["d2d"], rel=0.05)
    assert products["matmul-rate", "bf16"] == pytest.approx(expected["matmul"], rel=0.05)


def test_every_gpu_has_an_address_that_this_machine_shows(python: str) -> None:
    run = copied(python, "small-copies --seconds 0.1")
    known = {str(device.bdf) for device in load_host(None).pci_devices}
    assert {device.address for device in run.devices} <= known


def test_the_driver_shows_the_gpus_that_pytorch_sees_in_its_order(python: str) -> None:
    code = "import torch; print(torch.version.hip or '')"
    driver = "hip" if LocalMachine().run((python, "-c", code), 60).stdout.strip() else "cuda"
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    program = read_program("gpus_shown")
    said = LocalMachine().run((python, "-", driver), 60, program, environment=order)
    shown = parse_shown(said.stdout_or_raise())
    run = copied(python, "small-copies --seconds 0.1")
    assert shown is not None
    assert [str(one) for one in shown.addresses] == [device.address for device in run.devices]


def test_host_memory_of_a_bound_run_is_seen_on_its_node(python: str) -> None:
    node = nodes_to_bind()[0]
    run = copied(python, f"host-copies --seconds 0.1 --node {node}")
    assert {one.memory_node for one in run.results} == {node}


def test_figures_are_those_of_nvbandwidth(python: str) -> None:
    if shutil.which("nvbandwidth") is None:
        pytest.skip("nvbandwidth is not installed")
    host = load_host(None)
    groups = (SuiteGroup.GPU_BANDWIDTH, SuiteGroup.GPU_COPY)
    options = SuiteOptions(groups, SuiteDepth.QUICK, python=python)
    suite = build_suite(host, {"nvbandwidth", "torch"}, options)
    for test in suite.tests:
        if test.node is not None:
            continue
        found = []
        for attempt in test.attempts:
            program = None if attempt.program is None else read_program(attempt.program)
            ended = LocalMachine().run(
                attempt.argv, attempt.timeout_s, program, environment=dict(attempt.environment)
            )
            samples = read_step_results(attempt, ended.stdout_or_raise(), host).samples
            first = min(one.device for one in samples if one.device is not None)
            own = (one for one in samples if (one.device, one.variant) == (first, None))
            found.append({one.metric: one.value for one in own})
        for metric in found[0].keys() & found[1].keys():
            assert found[1][metric] == pytest.approx(found[0][metric], rel=0.05), metric
