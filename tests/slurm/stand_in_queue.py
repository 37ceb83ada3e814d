"""A stand-in for Slurm's client programs, with the queue in one file: what is asked is recorded.

    stand_in_queue.py DIRECTORY PROGRAM WORDS…

Each look at the queue moves it on by one: a job whose dependencies have ended runs, one that ran
ends and leaves its last file. DIRECTORY/kill says when the program that asks is killed: "sbatch
before 1" is the first time that it asks sbatch, before the job is taken; "any after 3" the third
time that it asks anything, when it was done and not yet answered.
"""

import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

SINFO = "n1|whole*|idle|64|512000|gpu:h100:8\nn2|whole*|idle|64|512000|gpu:h100:8\n"

HEAD = {
    "format": "homenode.results/1",
    "system": "nvidia-h100",
    "origin": "measured",
    "vantage": "job",
    "switches": dict.fromkeys(("pinning", "siblings", "cells", "pcie", "memory")),
    "experiment": "study",
}
SAMPLE = {
    "metric": "h2d-bandwidth",
    "unit": "bytes_per_s",
    "value": 55.31e9,
    "device": "0000:19:00.0",
}
"""What each job measures."""

LIMIT = """\
sbatch: error: AssocMaxSubmitJobLimit
sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, \
user's size and/or time limits)
"""


def main() -> int:
    """Answer one question, holding the queue's file meanwhile."""
    directory, program, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    order = kill_order(directory, program)
    if order == "before":
        kill(program)
    with (directory / "queue.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        jobs: list[dict[str, Any]] = json.loads(file.read() or "[]")
        code, said = answer(directory, jobs, program, words)
        file.seek(0)
        file.truncate()
        json.dump(jobs, file)
    if order == "after":
        kill(program)
    print(said, end="", file=sys.stderr if code else sys.stdout)
    return code


def kill_order(directory: Path, program: str) -> str | None:
    """Whether to kill who asked: "before" or "after" doing it; None = not now."""
    file = directory / "kill"
    if not file.exists():
        return None
    which, when, count = file.read_text().split()
    if which not in (program, "any"):
        return None
    if int(count) > 1:
        file.write_text(f"{which} {when} {int(count) - 1}")
        return None
    file.unlink()
    return when


def kill(program: str) -> None:
    """Kill who asked; sbatch takes a while then, as with a busy controller."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.5 if program == "sbatch" else 0)


def answer(
    directory: Path, jobs: list[dict[str, Any]], program: str, words: list[str]
) -> tuple[int, str]:
    """The exit code, and what is printed."""
    if program == "sinfo":
        own = directory / "sinfo"
        return 0, own.read_text() if own.exists() else SINFO
    if program == "sbatch":
        return submit(directory, jobs, words)
    if program == "squeue":
        move_on(jobs)
        columns = next(word for word in words if word.startswith("--format="))[9:] + "\n"
        return 0, "".join(
            columns.replace("%F", str(job["id"]))
            .replace("%K", str(task) if job["is_array"] else "N/A")
            .replace("%T", job["state"])
            .replace("%j", job["name"])
            .replace("%r", "")
            for job in jobs
            for task in range(job["tasks"])
        )
    for job in jobs:
        if str(job["id"]) == words[0] and job["state"] != "COMPLETED":
            job["state"] = "CANCELLED"
    return 0, ""


def submit(directory: Path, jobs: list[dict[str, Any]], words: list[str]) -> tuple[int, str]:
    most = directory / "most"
    alive = [job for job in jobs if job["state"] in ("PENDING", "RUNNING")]
    if most.exists() and len(alive) >= int(most.read_text()):
        return 1, LIMIT
    text = Path(words[-1]).read_text()
    found = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))
    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    after = options.get("dependency", "").removeprefix("afterany:")
    tasks = int(found.get("array", "0-0").partition("-")[2]) + 1
    jobs.append(
        {
            "id": 100 + len(jobs),
            "name": found["job-name"],
            "tasks": tasks,
            "is_array": "array" in found,
            "state": "PENDING",
            "after": [int(job) for job in after.split(":") if job],
            "study": options["chdir"],
            "experiment": Path(words[-1]).stem,
            "environment": sorted(name for name in os.environ if name.startswith("SBATCH_")),
        }
    )
    return 0, f"{jobs[-1]['id']}\n"


def move_on(jobs: list[dict[str, Any]]) -> None:
    ended = {job["id"] for job in jobs if job["state"] not in ("PENDING", "RUNNING")}
    for job in jobs:
        if job["state"] == "RUNNING":
            leave_files(job)
            job["state"] = "COMPLETED"
        elif job["state"] == "PENDING" and ended.issuperset(job["after"]):
            job["state"] = "RUNNING"


def leave_files(job: dict[str, Any]) -> None:
    for task in range(job["tasks"]):
        attempt = f"{job['id'] + task}.0"
        here = Path(job["study"], f"raw/{job['experiment']}/task-{task}/{attempt}")
        here.mkdir(parents=True, exist_ok=True)
        errors = Path(sys.argv[1]) / "errors"
        if errors.exists():
            (here / "bench.txt.err").write_text(errors.read_text())
            (here / "exit").write_text("2\n")
            continue
        name = f"{job['experiment']}-task{task}-{attempt}"
        run = Path(job["study"], "results/nvidia-h100", name)
        run.mkdir(parents=True, exist_ok=True)
        lines = ({**HEAD, "name": name, "block": 0}, SAMPLE, {"end": 1})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "results.jsonl").write_text(text)
        (here / "done").touch()


if __name__ == "__main__":
    raise SystemExit(main())
