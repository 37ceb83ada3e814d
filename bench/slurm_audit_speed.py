"""Speed of auditing a cluster: 1,000 nodes of 8 GPUs, by records and by Slurm's own listings. [I/O]

Run by `make bench`, or `python bench/slurm_audit_speed.py [NODES]`. Timed: from process start to
its end, reading included. Each node runs 4 jobs of 2 GPUs, of which one in 50 is misplaced.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.slurm.gpu_nodes import TESTBED, Listed, scontrol_text, squeue_2405

GOAL_S = 10.0
HEAD = """\
homenode-slurm-record 1
job {job}
node {node}
user ada
start 1700000000
numa 0 0-15,32-47
numa 1 16-31,48-63
distances 0 10 21
distances 1 21 10
{gpus}
held {held}
name train
task batch.0 {pus} 0-1 default
end 1700003600
"""
GPUS = "\n".join(
    f"gpu {index} 0000:{bus}:00.0 {index // 4}"
    for index, bus in enumerate((11, 12, 13, 14, 81, 82, 83, 84))
)


def main(nodes: int) -> None:
    jobs = tuple(_jobs(nodes))
    audit = [sys.executable, "-m", "homenode.cli.main", "slurm", "audit", "--json"]
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        (base / "host.toml").write_text(TESTBED)
        (base / "jobs.txt").write_text(scontrol_text(jobs))
        (base / "jobs.json").write_text(squeue_2405(jobs))
        _write_records(base / "records", jobs)
        host = ["--host", str(base / "host.toml")]
        cases = {
            "records": ["--records", str(base / "records")],
            "scontrol show job -d": ["--jobs", str(base / "jobs.txt"), *host],
            "squeue --json": ["--jobs", str(base / "jobs.json"), *host],
        }
        print(f"{len(jobs)} jobs on {nodes} nodes of 8 GPUs; goal: about {GOAL_S:g} s")
        for name, options in cases.items():
            start = time.perf_counter()
            done = subprocess.run([*audit, *options], capture_output=True, text=True)
            seconds = time.perf_counter() - start
            if done.returncode not in (0, 1):  # 1: it has findings
                raise SystemExit(done.stderr)
            far = done.stdout.count('"job-gpu-far"')
            print(f"{name:24}{seconds:8.2f} s  {far} misplaced")


def _jobs(nodes: int) -> Iterator[Listed]:
    """Four jobs on each node; of every 50th the first has its CPUs on the other socket."""
    for number in range(4 * nodes):
        quarter = number % 4
        first = 8 * quarter if number % 50 else (8 * quarter + 16) % 32
        yield Listed(
            number + 1,
            [f"gpu{number // 4:04}"],
            range(first, first + 8),
            (2 * quarter, 2 * quarter + 1),
        )


def _write_records(directory: Path, jobs: tuple[Listed, ...]) -> None:
    for job in jobs:
        own = directory / job.nodes[0]
        own.mkdir(parents=True, exist_ok=True)
        first = job.cores[0]
        (own / f"{job.id}.{job.nodes[0]}.rec").write_text(
            HEAD.format(
                job=job.id,
                node=job.nodes[0],
                gpus=GPUS,
                held=",".join(map(str, job.gpus)),
                pus=f"{first}-{first + 7}",
            )
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
