"""homenode on a cluster node that is a description: gpu-node.toml, with what Slurm gave the job.

    gpu_node_program.py WORDS…

All of homenode is real but the machine below it: its snapshot is rendered, and programs of the
suite are looked for on the PATH and run without being bound, as this machine has no such nodes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a program, not by pytest

from homenode.cli import bench, main
from homenode.cluster.slurm.job_allocation import build_allocation, node_machine
from homenode.cluster.slurm.scontrol import parse_scontrol_jobs
from homenode.cluster.slurm.study import commands as slurm_study
from homenode.machine.description.parse import parse_description
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.measure.access.machine import LocalMachine
from homenode.process import ProgramResult, ToolMissingError, find_program, run
from homenode.vm.sources import load_host
from tests.rendered.machine import render

HERE = Path(__file__).parent
DESCRIPTION = HERE / "gpu-node.toml"
_BINDING = re.compile(r"--(?:cpunodebind|membind|physcpubind)=(\S+)")


class GpuNode(LocalMachine):
    """The described node."""

    __slots__ = ()

    def snapshot(self) -> Snapshot:
        made = render(parse_description(DESCRIPTION.read_text(), "gpu-node.toml"))
        files = dict(made.files)
        files["/proc/self/status"] = (
            f"Cpus_allowed_list:\t{allowed_pus()}\nMems_allowed_list:\t0-1\n"
        )
        return MemorySnapshot(made.name, files, made.links, made.commands, made.directories)

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        there = {"numactl", "taskset"} | {name for name in names if find_program(name) is not None}
        return frozenset(names) & there

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        # What else this machine does is nothing of the described node.
        has_python = not argv[0].startswith("python") or "STAND_IN_PYTHON" in os.environ
        if not has_python or argv[-1] == "/proc/stat":
            raise ToolMissingError(argv[0])
        words = list(argv)
        node = "0" if allowed_pus().startswith("0") else "1"
        while words[0] in ("numactl", "taskset"):
            is_taskset = words.pop(0) == "taskset"
            while words[0].startswith("-"):
                found = _BINDING.fullmatch(words.pop(0))
                node = node if found is None else found[1]
            if is_taskset:
                words.pop(0)
        own = {name: value for name, value in os.environ.items() if name != "PATH"}
        bound = {**own, **(environment or {}), "STAND_IN_NODE": node}
        return run(words, timeout_s, input, environment=bound)


def allowed_pus() -> str:
    """The CPUs that Slurm gave the job, which a cgroup would keep it to; all outside of one."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID")
    try:
        said = subprocess.run(
            ["scontrol", "show", "job", "-d", str(job)], capture_output=True, text=True, check=True
        ).stdout
        (one,) = parse_scontrol_jobs(said, "scontrol")
        machine = node_machine(load_host(str(DESCRIPTION)))
        pus = build_allocation(one, one.shares[0], machine, None).pus
        return "0-63" if pus is None else str(pus)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return "0-63"


if __name__ == "__main__":
    vars(bench)["LocalMachine"] = GpuNode
    slurm_study._find_program = lambda: os.environ["STAND_IN_HOMENODE"]
    main.main()
