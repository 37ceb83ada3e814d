"""Which GPUs a driver gives to us, and what is measured where those are not all."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from homenode.bdf import Bdf
from homenode.errors import ParseError, UsageError
from homenode.machine.tools import rocm_bandwidth_test
from homenode.measure import gpu_tool_samples as amd_figures
from homenode.measure import runner
from homenode.measure.access.machine import LocalMachine
from homenode.measure.model import TORCH, BenchOptions, Suite, SuiteDepth, SuiteGroup, SuiteOptions
from homenode.measure.results.vantage import Vantage
from homenode.measure.step_reading import read_step_results
from homenode.measure.suite import ShownGpus, build_suite, parse_shown
from homenode.measure.tool_setup import read_program
from homenode.process import ProgramResult
from tests.measure import test_gpu_run as gpu_run
from tests.measure.test_gpu_suite import NVIDIA, TWO, by_id, host_with
from tests.measure.test_step_figures import nvbandwidth_text
from tests.mutations import survives
from tests.small_hosts import DeviceSpec
from tests.tools import test_amd as rocm

HOST = host_with(*TWO)
FIRST, SECOND = Bdf.parse("0000:19:00.0"), Bdf.parse("0000:9b:00.0")

DRIVER = """
#include <stdio.h>
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = number + 40; return 0; }
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0001:%02X:00.0", device == 40 ? 0x9B : 0x19);
    return 0;
}
"""


def suite(
    shown: ShownGpus | None, *groups: SuiteGroup, installed: frozenset[str] = NVIDIA
) -> Suite:
    return build_suite(host_with(*TWO), installed | {TORCH}, SuiteOptions(groups), shown)


def test_collectives_and_copies_are_of_the_gpus_that_a_job_has() -> None:
    three = host_with(*TWO, DeviceSpec("0000:9c:00.0", node=1, root=1))
    made = build_suite(three, NVIDIA, SuiteOptions(), ShownGpus((FIRST, SECOND)))
    tests = by_id(made)
    argv = tests["nccl"].argv
    assert argv[argv.index("-g") + 1] == "2"
    assert any("0000:9c:00.0: not shown" in gap.reason for gap in made.omitted)
    asked = by_id(build_suite(three, NVIDIA, SuiteOptions(), None))["nccl"].argv
    assert asked[asked.index("-g") + 1] == "3"


def test_one_gpu_of_a_job_has_no_peers() -> None:
    made = suite(ShownGpus((SECOND,)))
    assert not [test for test in made.tests if test.group in (SuiteGroup.NCCL, SuiteGroup.GPU_PEER)]
    assert {gap.reason for gap in made.omitted if gap.subject == SuiteGroup.NCCL} == {
        "one GPU alone; 1 more of this machine's are not shown to this process"
    }


def test_a_driver_that_gives_none_is_reported_in_its_own_words() -> None:
    with pytest.raises(UsageError) as refused:
        suite(ShownGpus((), "cuInit says no GPU"), SuiteGroup.GPU_BANDWIDTH)
    assert "cuInit says no GPU" in str(refused.value)


def test_a_driver_of_other_gpus_changes_nothing() -> None:
    strange = ShownGpus((Bdf.parse("0000:01:00.0"),))
    assert "gpu-peer" in by_id(suite(strange))


def test_numbers_are_the_drivers_and_not_those_of_the_bus() -> None:
    (test, *_) = suite(ShownGpus((SECOND, FIRST)), SuiteGroup.GPU_BANDWIDTH).tests
    document = json.loads(nvbandwidth_text())
    del document["nvbandwidth"]["GPU Device list"]  # as v0.10
    text = json.dumps(document, indent="\t")
    found = read_step_results(test, text, HOST).samples
    assert [one.device for one in found][:2] == [SECOND, FIRST]


def test_a_bus_of_rocm_bandwidth_test_gets_the_domain_that_the_driver_printed() -> None:
    far = Bdf.parse("0002:0d:00.0")
    found = amd_figures.read_rocm_results(rocm_bandwidth_test.parse(rocm.MATRICES), (far, FIRST))
    assert {one.device for one in found.samples} == {far}
    same_bus = (far, Bdf.parse("0003:0d:00.0"))
    unsure = amd_figures.read_rocm_results(rocm_bandwidth_test.parse(rocm.MATRICES), same_bus)
    assert {one.device for one in unsure.samples} == {Bdf.parse("0000:0d:00.0")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "homenode.gpus/1"),
        ('{"format": "homenode.gpus/2", "addresses": [], "reason": null}', "homenode.gpus/1"),
        ('{"format": "homenode.gpus/1", "addresses": 7, "reason": null}', "a list"),
        ('{"format": "homenode.gpus/1", "addresses": ["x"], "reason": null}', "domain:bus"),
    ],
)
def test_what_is_no_answer_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=says):
        parse_shown(text)


def test_slices_of_one_gpu_count_once() -> None:
    line = json.dumps({"format": "homenode.gpus/1", "addresses": [str(FIRST)] * 2, "reason": None})
    assert parse_shown(f"a warning\n{line}\n") == ShownGpus((FIRST,))


def test_damaged_answers_are_read_or_refused() -> None:
    line = json.dumps({"format": "homenode.gpus/1", "addresses": [str(FIRST)], "reason": "x"})
    assert survives(parse_shown, line, 500) > 0


@pytest.fixture(params=[0, 802])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, to make a driver that distinguishes two GPUs")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER.replace("FAILS", str(request.param)))
    made = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return tmp_path, request.param


def asked_of(driver: str, directory: str) -> ShownGpus | None:
    words, environment = (sys.executable, "-", driver), {"LD_LIBRARY_PATH": directory}
    ended = LocalMachine().run(words, 60, read_program("gpus_shown"), environment=environment)
    return parse_shown(ended.stdout_or_raise())


def test_the_driver_is_asked_itself(driver: tuple[Path, int]) -> None:
    directory, code = driver
    expected = ShownGpus((Bdf.parse("0001:9b:00.0"), Bdf.parse("0001:19:00.0")))
    none = ShownGpus((), "cuInit says error 802")
    assert asked_of("cuda", str(directory)) == (none if code else expected)


def test_without_a_driver_nothing_is_asked() -> None:
    assert asked_of("hip", "") is None


@dataclass
class JobMachine(gpu_run.GpuMachine):
    """A job that was given the second of two GPUs."""

    def run(self, argv: Sequence[str], *rest: Any, **named: Any) -> ProgramResult:
        if tuple(argv[1:]) == ("-", "cuda"):
            assert named["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            document = {"format": "homenode.gpus/1", "addresses": [gpu_run.GPUS[1]], "reason": None}
            return ProgramResult(tuple(argv), 0, json.dumps(document) + "\n", "")
        return super().run(argv, *rest, **named)


def test_a_run_asks_before_it_plans(tmp_path: Path, no_waiting: None) -> None:
    orders = BenchOptions("x", SuiteOptions((), SuiteDepth.QUICK), repeats=1, vantage=Vantage.HOST)
    ready, _ = runner.inspect(JobMachine(), orders)
    assert not [test for test in ready.record.tests if test.group is SuiteGroup.NCCL]
    (own,) = (test for test in ready.record.tests if test.id == "gpu-bandwidth")
    assert own.gpus == (Bdf.parse(gpu_run.GPUS[1]),)
