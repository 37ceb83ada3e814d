"""Starting programs: each way to end is distinguished."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from homenode import process
from homenode.errors import ToolError
from homenode.process import ToolMissingError, ToolTimeoutError, run
from tests.processes import wait_for_end


def test_a_program_that_is_not_installed_is_missing() -> None:
    with pytest.raises(ToolMissingError, match="no-such-program: command not found"):
        run(["no-such-program"], 60)


def test_output_error_and_exit_status_are_kept() -> None:
    done = run(["sh", "-c", "echo out; echo error >&2; exit 3"], 60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "error\n")
    assert done.signal is None
    assert done.failure() == "sh: exit status 3: error"
    with pytest.raises(ToolError, match="sh: exit status 3: error"):
        done.stdout_or_raise()


def test_a_death_by_signal_is_named() -> None:
    done = run(["sh", "-c", "kill -TERM $$"], 60)
    assert done.signal == "SIGTERM"
    assert done.failure() == "sh: killed by SIGTERM"


@pytest.mark.parametrize("script", ["sleep 60", "sleep 60 & sleep 60", "exec >&- 2>&-; sleep 60"])
def test_a_program_that_does_not_end_is_stopped_with_what_it_started(script: str) -> None:
    with pytest.raises(ToolTimeoutError, match=r"no end after 0\.2 s"):
        run(["sh", "-c", script], 0.2)


def test_what_a_program_left_behind_is_stopped_too(tmp_path: Path) -> None:
    """The program has ended; what it started holds its output open, and the clock runs out."""
    with pytest.raises(ToolTimeoutError):
        run(["sh", "-c", f"sleep 600 & echo $! >'{tmp_path}/number'"], 4)
    wait_for_end(int((tmp_path / "number").read_text()))


def test_output_is_kept_where_what_was_left_behind_holds_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LEFT_BEHIND_S", 0.1)
    script = f"sleep 600 & echo $! >'{tmp_path}/number'; echo measured; exit 3"
    done = run(["sh", "-c", script], 500)
    assert (done.stdout, done.returncode) == ("measured\n", 3)
    wait_for_end(int((tmp_path / "number").read_text()))


def test_a_killed_program_that_stays_in_a_driver_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal does not reach a process that waits within the kernel."""
    monkeypatch.setattr(process, "KILLED_S", 0.2)
    left = []

    def spared(number: int, _: int) -> None:
        left.append(number)

    monkeypatch.setattr(os, "killpg", spared)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    with pytest.raises(ToolTimeoutError):
        run(["sleep", "600"], 0.2)
    monkeypatch.undo()
    os.kill(left[0], 0)  # there still: its end was not waited for
    os.kill(left[0], signal.SIGKILL)
    os.waitpid(left[0], 0)


def test_standard_input_is_closed_or_given() -> None:
    assert run(["cat"], 60).stdout == ""
    text = "line\n" * 100_000
    assert run(["cat"], 60, text).stdout == text
    assert run(["true"], 60, text).returncode == 0


def test_too_much_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_OUTPUT_BYTES", 1000)
    with pytest.raises(ToolError, match="at most 1000 bytes of output"):
        run(["yes"], 60)


def test_the_environment_is_built_and_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # a job must not reach for others' GPUs
    said = run(["env"], 60, environment={"EXTRA": "1"}).stdout.splitlines()
    assert "LC_ALL=C" in said and "EXTRA=1" in said
    assert "CUDA_VISIBLE_DEVICES=3" in said
    assert not [line for line in said if line.startswith(("SECRET", "LANG="))]


def test_a_relative_directory_on_path_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "planted"
    program.write_text("#!/bin/sh\necho planted\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".::{tmp_path.name}")
    with pytest.raises(ToolMissingError):
        run(["planted"], 60)
    monkeypatch.setenv("PATH", f".:{tmp_path}")
    assert run(["planted"], 60).stdout == "planted\n"


def test_arguments_are_never_a_shells() -> None:
    assert run(["echo", "$(id); rm -rf *"], 60).stdout == "$(id); rm -rf *\n"
    with pytest.raises(ToolError, match="cannot be started"):
        run(["echo", "a\0b"], 60)


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert run(["printf", r"a\377b"], 60).stdout == "a\ufffdb"


def test_ctrl_c_while_a_program_starts_does_not_leave_it_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []

    class Starting(subprocess.Popen[bytes]):
        def __init__(self, argv: list[str], **options: Any) -> None:
            super().__init__(argv, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)  # no one has the program in hand yet

    monkeypatch.setattr(subprocess, "Popen", Starting)
    with pytest.raises(KeyboardInterrupt):
        run(("sleep", "600"), 60)
    assert started
    assert not Path(f"/proc/{started[0]}").exists()


def test_empty_and_relative_directories_of_libraries_are_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They mean the current directory, in which somebody may have put a libcuda.so.1."""
    monkeypatch.setenv("LD_LIBRARY_PATH", ":/opt/cuda/lib64:.:lib::")
    assert run(["printenv", "LD_LIBRARY_PATH"], 10).stdout == "/opt/cuda/lib64\n"


def test_a_program_stands_where_it_is_asked_to(tmp_path: Path) -> None:
    assert run(["pwd"], 10, directory=tmp_path).stdout.strip() == str(tmp_path)
