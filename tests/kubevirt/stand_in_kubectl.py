"""A stand-in for kubectl: one node, which is this machine; jobs and their pods in one file.

    stand_in_kubectl.py FOLDER -n NAMESPACE create|get|exec|delete WORDS…

A pod is pending at the first look at it, then runs. FOLDER/why: it stays pending, for this reason.
FOLDER/ends: what runs ends at the next look, as at its deadline.
"""

import fcntl
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each call is a process: with pytest it takes ten times as long
    import pytest

Jobs = dict[str, dict[str, Any]]


@contextmanager
def kubectl_on_path(
    folder: Path, monkeypatch: "pytest.MonkeyPatch"
) -> Iterator[Callable[[], list[str]]]:
    """Names of the jobs that there are, with the stand-in in this folder first on PATH."""
    words = (sys.executable, "-I", "-S", __file__, str(folder))
    program = folder / "kube" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    file = folder / "jobs.json"
    yield lambda: sorted(json.loads(file.read_text())) if file.exists() else []


def main() -> int:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    assert words[0] == "-n", words
    verb, rest = words[2], words[3:]
    if verb == "exec":
        return execute(folder, rest)
    with (folder / "jobs.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        jobs: Jobs = json.loads(file.read() or "{}")
        code, said = answer(folder, jobs, verb, rest)
        file.seek(0)
        file.truncate()
        json.dump(jobs, file)
    print(said, file=sys.stderr if code else sys.stdout)
    return code


def answer(folder: Path, jobs: Jobs, verb: str, words: list[str]) -> tuple[int, str]:
    """The exit code, and what is printed."""
    if verb == "create":
        manifest = json.load(sys.stdin)
        name = manifest["metadata"]["name"]
        if name in jobs:
            return 1, f'Error from server (AlreadyExists): jobs.batch "{name}" already exists'
        jobs[name] = {"manifest": manifest, "phase": "New"}
        return 0, f"job.batch/{name} created"
    if verb == "delete":
        jobs.pop(words[1], None)
        return 0, ""
    assert words[:2] == ["pods", "-l"], words
    name = words[2].removeprefix("job-name=")
    job = jobs.get(name)
    if job is None:
        return 0, '{"items": []}'
    moved_on(folder, job)
    status: dict[str, Any] = {"phase": job["phase"]}
    why = folder / "why"
    if why.exists():
        status["conditions"] = [
            {"type": "PodScheduled", "status": "False", "message": why.read_text()}
        ]
    status["containerStatuses"] = [{"ready": job["phase"] == "Running", "state": {"running": {}}}]
    pod = {"metadata": {"name": f"{name}-pod"}, "status": status}
    return 0, json.dumps({"items": [pod]})


def moved_on(folder: Path, job: dict[str, Any]) -> None:
    following = {"New": "Pending", "Pending": "Running"}
    if job["phase"] == "Running" and (folder / "ends").exists():
        (folder / "ends").unlink()
        job["phase"] = "Failed"
    elif not (folder / "why").exists() or job["phase"] == "New":
        job["phase"] = following.get(job["phase"], job["phase"])


def execute(folder: Path, words: list[str]) -> int:
    """Run it here; as of kubectl, its exit status is the program's."""
    pod = next(word for word in words if word.endswith("-pod"))
    jobs = json.loads((folder / "jobs.json").read_text())
    job = jobs.get(pod.removesuffix("-pod"))
    if job is None or job["phase"] != "Running":
        print(f'Error from server (NotFound): pods "{pod}" not found', file=sys.stderr)
        return 1
    argv = words[words.index("--") + 1 :]
    return subprocess.run(argv, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
