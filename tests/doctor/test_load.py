"""Links are read while a copy runs, and only GPUs that it reached count as busy."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import MeasuredRates, diagnose
from homenode.cli import doctor as doctor_command
from homenode.errors import ToolError, UsageError
from homenode.findings import Severity
from homenode.machine.pci import PciLink
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.topology import Host
from homenode.measure.gpu_load_sampling import (
    LoadCopies,
    LoadProgram,
    load_program,
    parse_load_report,
    sample_under_load,
)
from tests.doctor_cases import GPU_4080, link_at
from tests.doctor_domains import host
from tests.torch_programs import GPUS, STAND_IN, copies

SOUND = "rtx4080-i9-14900k"
TORCH = LoadProgram(("python3", "-", "host-copies"), is_torch=True)


class _Waking(MemorySnapshot):
    """A snapshot of /sys in which the GPU's link wakes up after a few readings: then a file is
    there."""

    def __init__(self, awake: Path) -> None:
        super().__init__("waking", {})
        self.readings = 0
        self._awake = awake

    def read_text(self, path: str) -> str | None:
        if path.endswith("current_link_speed") and str(GPU_4080) in path:
            self.readings += 1
            if self.readings < 3:
                return "2.5 GT/s PCIe\n"
            self._awake.touch()
            return "16.0 GT/s PCIe\n"
        return "16\n" if path.endswith("current_link_width") else None


def idle() -> Host:
    """The desktop, its GPU at 2.5 GT/s and driven by the host."""
    return link_at(2.5, 16, driver="nvidia")


def test_links_are_taken_at_their_fastest_while_the_load_runs(tmp_path: Path) -> None:
    awake = tmp_path / "awake"
    load = load_program(["sh", "-c", f"until [ -e '{awake}' ]; do sleep 0.05; done"])
    busy, reached = sample_under_load(idle(), _Waking(awake), load)
    assert busy.device_at[GPU_4080].link == PciLink(16.0, 16, 16.0, 16)
    assert reached.gpus is None and reached.h2d == {}


def test_a_load_that_fails_or_is_missing_is_no_load(tmp_path: Path) -> None:
    with pytest.raises(ToolError):
        sample_under_load(host(SOUND), _Waking(tmp_path / "awake"), LoadProgram(("false",)))
    with pytest.raises(UsageError, match="load-command"):
        load_program(["no-such-program"])


def test_an_interrupt_ends_the_load(tmp_path: Path) -> None:
    """It copies to GPUs in a session of its own: the terminal's Ctrl-C does not reach it."""
    started = tmp_path / "pid"
    load = f"sh -c 'echo $$ > {started}.part; mv {started}.part {started}; exec sleep 3600'"
    words = ["doctor", "--under-load", "--load-command", load]
    argv, pipe = [sys.executable, "-m", "homenode.cli.main", *words], subprocess.PIPE
    child = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)
    deadline = time.monotonic() + 300
    while not started.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=300)
    assert child.returncode == 130, said
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_our_own_program_is_the_load_where_pytorch_is_and_else_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_IN} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = load_program(None)
    assert program.is_torch and program.argv[0] == "python3"
    python.write_text("#!/bin/sh\necho False\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="PyTorch"):
        load_program(None)


def test_the_copys_own_report_tells_its_gpus_and_rates() -> None:
    reached = parse_load_report(TORCH, copies("host-copies", addresses=GPUS, rates={"h2d": 20e9}))
    assert reached.gpus == frozenset(Bdf.parse(gpu) for gpu in GPUS)
    # A busy machine is late with calls, so that rates may be lower; never higher.
    assert all(0 < rate < 25e9 for rate in reached.h2d.values())


def test_a_copy_that_reached_no_gpu_is_no_load() -> None:
    document = '{"format":"homenode.torch/1","command":"host-copies","torch":"2","devices":[]}'
    with pytest.raises(ToolError, match="copied nothing to a GPU"):
        parse_load_report(TORCH, document)


def test_only_gpus_that_the_copy_reached_are_faulty_when_slow() -> None:
    def judged(*reached: Bdf) -> list[Severity]:
        known = MeasuredRates(is_loaded=True, reached=frozenset(reached))
        return [f.severity for f in diagnose(idle(), None, known).findings]

    assert judged(GPU_4080) == [Severity.CRITICAL]
    assert judged(Bdf.parse("02:00.0")) == [Severity.INCONCLUSIVE]


def test_rates_of_the_copy_are_judged_unless_the_user_gave_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached = LoadCopies(frozenset({GPU_4080}), {GPU_4080: 5.3e9})
    sampled = "homenode.measure.gpu_load_sampling.sample_under_load"
    monkeypatch.setattr(sampled, lambda host, *_: (host, reached))
    _, known = doctor_command._measure_under_load(host(SOUND), MeasuredRates(), "sleep 0")
    assert known.h2d == {GPU_4080: 5.3e9} and known.is_loaded
    assert [f.id for f in diagnose(host(SOUND), None, known).findings] == ["h2d-low"]
    given = MeasuredRates(h2d_all=24e9)
    _, known = doctor_command._measure_under_load(host(SOUND), given, "sleep 0")
    assert known.h2d == {} and known.h2d_all == 24e9
