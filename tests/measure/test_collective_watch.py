"""The program that runs an all-reduce with NCCL's log on, really run."""

import json
import sys
from pathlib import Path

from homenode.machine.tools import torch_report
from homenode.measure.figures.collective_log import split
from homenode.measure.programs.collective_watch import interrupt_counts, reclaimed_pages
from tests.torch_programs import run_program

TOOL = """
import os, time
path = os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))
with open(path, "w") as log:
    log.write("h:1:1 [0] NCCL INFO CPU/0 (1/1/2)\\n")
    log.write("h:1:1 [0] NCCL INFO Loading topology file " + os.environ["NCCL_TOPO_FILE"] + "\\n")
    log.write("h:1:1 [0] NCCL INFO " + os.environ["NCCL_DEBUG_SUBSYS"] + "\\n")
assert open(os.environ["NCCL_TOPO_FILE"]).read() == "<system/>"
until = time.monotonic() + 0.3
while time.monotonic() < until:
    pass
print("the tool's own output")
"""


def test_the_log_the_memory_and_the_threads_come_behind_the_tools_output() -> None:
    ended = run_program(
        "collective_watch",
        "--gpus",
        "2",
        "--topology",
        "<system/>",
        "--",
        sys.executable,
        "-c",
        TOOL,
    )
    own, watched = split(ended.stdout_or_raise())
    assert own.strip() == "the tool's own output"
    assert watched.facts.cpu_nodes == {0: None}
    (file,) = watched.facts.files
    assert file.endswith("topology.xml")
    assert watched.own.busy and watched.host_numa_ids is None


def test_a_tool_that_is_missing_or_fails_ends_with_its_status() -> None:
    missing = run_program("collective_watch", "--gpus", "2", "--", "no-such-tool-here")
    assert missing.returncode == 127 and "no-such-tool-here" in missing.stderr
    failed = run_program(
        "collective_watch", "--gpus", "2", "--", sys.executable, "-c", "raise SystemExit(3)"
    )
    assert failed.returncode == 3


def test_a_process_for_each_gpu_is_our_own_program() -> None:
    ended = run_program(
        "collective_watch",
        "--gpus",
        "2",
        "--",
        "torch",
        "--gpus",
        "2",
        "--largest",
        "4096",
        "--iterations",
        "5",
        "--warmups",
        "1",
        "--no-peers",
    )
    own, _ = split(ended.stdout_or_raise())
    assert any(run.rows for run in torch_report.parse(own))


def test_a_node_of_thousands_of_digits_is_none() -> None:
    document = {"log": "", "before": {"9" * 5000: 1, "0": 1}, "during": {"0": 3}}
    _, watched = split(f"# homenode collective: {json.dumps(document)}")
    assert watched.own.allocated == ((0, 2),)


def test_interrupts_of_the_gpus_drivers_and_pages_reclaimed_are_read(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/interrupts").write_text(
        "            CPU0       CPU4\n"
        "   8:          1          2   IO-APIC    8-edge      rtc0\n"
        "  53:        100          7   PCI-MSI 524288-edge      nvidia\n"
        "  54:          3        400   PCI-MSI 524289-edge      nvidia\n"
        " NMI:          0          0   Non-maskable interrupts\n"
    )
    (tmp_path / "proc/vmstat").write_text("pgsteal_kswapd 90\npgsteal_direct 12\n")
    assert interrupt_counts(str(tmp_path)) == {0: 103, 4: 407}
    assert reclaimed_pages(str(tmp_path)) == 12
    assert interrupt_counts(str(tmp_path / "none")) == {}
    assert reclaimed_pages(str(tmp_path / "none")) is None
