"""Watched: runs a tool and prints the CPUs of its busy threads. [I/O]

    python3 - nvbandwidth -j -t host_to_device_memcpy_ce   < this

Runs in any Python from 3.6 on, RHEL 8's. The tool's output is its own; behind it comes one line,

    # homenode watched: 3:41 67:2

CPUs with the number of samples, 20 ms apart, in which a thread of the tool ran on them. A tool
that binds itself cannot be queried afterwards.
"""

import os
import sys
import time
from pathlib import Path

LOOK_S = 0.02
_STATE, _PROCESSOR = 0, 36  # of /proc/PID/task/TID/stat, behind the name; proc(5)


def busy_pus(process: int, root: str = "/") -> "list[int]":
    """Return the CPUs of the threads that are running now; [] if the process has ended."""
    pus = []
    try:
        for task in Path(root, f"proc/{process}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            if fields[_STATE] == "R":
                pus.append(int(fields[_PROCESSOR]))
    except (OSError, IndexError):  # a thread that has just ended
        return pus
    return pus


def exit_status(status: int) -> int:
    """Return the exit status of what waitpid returned; 128 + N for a signal."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def main(words: "list[str]") -> int:
    """Run the command and return its exit status, 128 + N for a signal."""
    child = os.fork()
    if child == 0:
        try:
            os.execvp(words[0], words)  # noqa: S606 - an argv list, and no shell is wanted
        except OSError as error:
            sys.stderr.write(f"{words[0]}: cannot be started: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127)
    looks: dict[int, int] = {}
    while True:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            break
        for pu in busy_pus(child):
            looks[pu] = looks.get(pu, 0) + 1
        time.sleep(LOOK_S)
    counts = " ".join(f"{pu}:{count}" for pu, count in sorted(looks.items()))
    sys.stdout.write(f"\n# homenode watched: {counts}\n")
    sys.stdout.flush()
    return exit_status(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
