"""The program that runs an all-reduce with NCCL's log on, really run."""

import json
import sys

from homenode.machine.tools import torch_report
from homenode.measure.figures.collective_log import split
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
    assert watched.facts.cpu_nodes == (0,)
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
