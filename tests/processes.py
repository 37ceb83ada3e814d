"""Whether processes that a test started have ended."""

import time
from pathlib import Path


def wait_for_end(number: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(number) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(number)


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
