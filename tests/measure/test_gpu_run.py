"""Whole runs on described GPU machines: tools replayed, PyTorch really started on a stand-in."""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from homenode.measure import gpu_load_sampling as power
from homenode.measure import runner
from homenode.measure.access.machine import LocalMachine
from homenode.measure.model import BenchOptions, BenchOutcome, SuiteDepth, SuiteGroup, SuiteOptions
from homenode.measure.results.vantage import Vantage
from homenode.process import ProgramResult, ToolTimeoutError
from tests.bench_machines import FakeMachine
from tests.measure.test_runner import measured
from tests.measure.test_step_figures import nvbandwidth_text
from tests.tools import test_nccl_tests as nccl
from tests.torch_programs import STAND_IN

pytestmark = pytest.mark.usefixtures("no_waiting")

GPUS = ("0000:11:00.0", "0000:81:00.0")


@dataclass
class GpuMachine(FakeMachine):
    """A GPU on each of two nodes."""

    host: str = "small-2n8c-2gpu"
    programs: frozenset[str] = frozenset({"numactl", "nvbandwidth", "all_reduce_perf"})
    fails: frozenset[str] = frozenset()  # programs that fail
    hangs: frozenset[str] = frozenset()  # those that never end
    has_torch: bool = True
    environments: list[Mapping[str, str]] = field(default_factory=list)

    def run(
        self, argv: Sequence[str], timeout_s: float, input: str | None = None, **named: Any
    ) -> ProgramResult:
        words = tuple(argv)
        if words[0] in ("cat", "true"):
            return super().run(argv, timeout_s, input, **named)
        self.calls.append(words)
        self.environments.append(named.get("environment") or {})
        program = next(word for word in words if word != "numactl" and not word.startswith("--"))
        is_watched = words[1:3] == ("-", "nvbandwidth")
        program = "nvbandwidth" if is_watched else program
        if "find_spec" in " ".join(words):
            return ProgramResult(words, 0, f"{self.has_torch}\n", "")
        if program in self.hangs:
            raise ToolTimeoutError(f"{program}: no end after {timeout_s:g} s")
        if program in self.fails:
            return ProgramResult(words, 1, "", "CUDA error")
        if program == "nvbandwidth":
            names = tuple(word for word in words if word.startswith(("host_", "device_", "all_")))
            watched = "\n# homenode watched: 0:90 5:60 1:2\n" if is_watched else ""
            return ProgramResult(words, 0, nvbandwidth_text(names) + watched, "")
        if program == "all_reduce_perf":
            return ProgramResult(words, 0, nccl.TEXT, "")
        settings = {"PYTHONPATH": str(STAND_IN), "STAND_IN": json.dumps({"addresses": GPUS})}
        environment = settings | dict(self.environments[-1])
        own = (sys.executable, *words[1:])
        return LocalMachine().run(own, timeout_s, input, environment=environment)


def run(machine: GpuMachine, root: Path, *groups: SuiteGroup, largest: int = 65536) -> BenchOutcome:
    options = SuiteOptions(groups, SuiteDepth.QUICK, largest)
    orders = BenchOptions("x", options, repeats=1, vantage=Vantage.HOST)
    return runner.run_bench(machine, orders, root, lambda progress: None)


def test_pytorch_takes_over_where_the_tool_fails_and_both_are_recorded(tmp_path: Path) -> None:
    machine = GpuMachine(fails=frozenset({"nvbandwidth"}))
    outcome = run(machine, tmp_path, SuiteGroup.GPU_COPY)
    made = measured(outcome)
    assert {str(one.device) for one in made.samples} == set(GPUS)
    assert {one.metric for one in made.samples} == {"d2d-bandwidth"}
    assert any("CUDA error" in str(gap) for gap in outcome.gaps)
    assert not any(gap.subject == "GPU addresses" for gap in outcome.gaps)
    assert "tool PyTorch" in {condition.name for condition in made.head.conditions}


def test_the_matrix_has_a_row_for_each_node_and_one_as_the_tool_binds(tmp_path: Path) -> None:
    made = measured(run(GpuMachine(), tmp_path, SuiteGroup.GPU_BANDWIDTH))
    nodes = {one.node for one in made.samples if one.metric == "h2d-bandwidth"}
    assert nodes == {None, 0, 1}
    conditions = {one.name: one.value for one in made.head.conditions}
    assert conditions["copying thread"] == "nodes 0-1"


def test_collectives_run_under_each_binding(tmp_path: Path) -> None:
    """GPUs on two nodes have ranks of their own for each of them."""
    machine = GpuMachine()
    outcome = run(machine, tmp_path, SuiteGroup.NCCL, largest=1024)
    samples = measured(outcome).samples
    peaks = {one.variant for one in samples if one.metric == "allreduce-busbw-peak"}
    assert {None, "P2P off", "a process for each GPU"} < peaks
    assert any(env.get("NCCL_P2P_DISABLE") == "1" for env in machine.environments)
    # The stand-in's GPUs are not in this machine's /sys: their node is unknown, and so is said.
    assert any("has no node here" in str(gap) for gap in outcome.gaps)


def test_peer_access_that_hangs_is_stopped_and_said(tmp_path: Path) -> None:
    machine = GpuMachine(hangs=frozenset({"nvbandwidth"}), has_torch=False)
    outcome = run(machine, tmp_path, SuiteGroup.GPU_PEER)
    assert outcome.run is None or not outcome.run.samples
    assert any("NCCL_P2P_DISABLE=1" in str(gap) for gap in outcome.gaps)


def test_products_are_a_control_around_the_round(tmp_path: Path) -> None:
    outcome = run(GpuMachine(), tmp_path, SuiteGroup.MATMUL)
    assert {one.variant for one in measured(outcome).samples} == {"fp32", "tf32", "bf16", "fp16"}
    assert not any(finding.id == "bench-control-moved" for finding in outcome.findings)


@dataclass
class PoweredMachine(GpuMachine):
    """Copies go on until the power was asked for twice: 300 W, and nothing of the second GPU."""

    programs: frozenset[str] = frozenset({"numactl", "nvbandwidth", "nvidia-smi"})
    asked: int = 0
    enough: threading.Event = field(default_factory=threading.Event)

    def run(self, argv: Sequence[str], timeout_s: float, *rest: Any, **named: Any) -> ProgramResult:
        if argv[0] == "nvidia-smi":
            self.asked += 1
            if self.asked > 1:
                self.enough.set()
            text = f"pci.bus_id, power.draw [W]\n0000{GPUS[0]}, 300.00\n0000{GPUS[1]}, [N/A]\n"
            return ProgramResult(tuple(argv), 0, text, "")
        if "nvbandwidth" in argv:
            assert self.enough.wait(timeout_s)
            self.asked = 0
            self.enough.clear()
        return super().run(argv, timeout_s, *rest, **named)


def test_power_is_stored_with_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "POWER_EVERY_S", 0.001)
    samples = measured(run(PoweredMachine(), tmp_path, SuiteGroup.GPU_BANDWIDTH)).samples
    drawn = [one for one in samples if one.metric == "gpu-power"]
    assert {(one.unit, one.value, str(one.device)) for one in drawn} == {("watts", 300.0, GPUS[0])}
    assert len({one.variant for one in drawn}) > 1, "each test has its own"


def test_amd_tools_are_read_by_the_heads_of_their_tables() -> None:
    rocm = "device,PCI Bus,Current Socket Graphics Package Power (W)\ncard0,0000:C1:00.0,141.0\n"
    (read,) = power.parse_power(rocm)
    assert (str(read.device), read.watts) == ("0000:c1:00.0", 141.0)
    # metric_gpu and flatten_dict of ROCm/amdsmi's amdsmi_cli; another order is none of ours.
    head = "gpu,socket_power,gfx_voltage,soc_voltage,mem_voltage,throttle_status,power_management"
    amd = f"{head}\n0,120,N/A,N/A,N/A,UNTHROTTLED,ENABLED\n1,N/A,N/A,N/A,N/A,N/A,N/A\n"
    assert [(one.index, one.watts) for one in power.parse_power(amd)] == [(0, 120.0)]
    node = "gpu,ubb_power,socket_power\n0,5600,120\n"
    assert [(one.index, one.watts) for one in power.parse_power(node)] == [(0, 120.0)]
    assert not list(power.parse_power("WARNING: no permission, ask the administrator\n"))
