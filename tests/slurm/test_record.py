"""Records of jobs: what the hooks write on a node, and what is read of it afterwards."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.errors import ParseError, UsageError
from homenode.findings import Finding
from homenode.slurm.audit import audit
from homenode.slurm.hooks import hooks
from homenode.slurm.record import held_of_record, parse_record

RECORD = """\
homenode-slurm-record 1
job 7
node gh01
user ada
name train
start 1700000000
numa 0 0-71
numa 1 72-143
numa 4
numa 12
distances 0 10 40 80 120
distances 1 40 10 120 80
gpumemory 4
gpumemory 12
gpu 0 0009:01:00.0 0
gpu 1 0019:01:00.0 1
held 1
task batch.0 72-79 1 bind:1
end 1700000100
"""


def judged(text: str) -> list[Finding]:
    return list(audit([held_of_record(parse_record(text, "7.rec"))]).findings)


def ids(text: str) -> list[str]:
    return [finding.id for finding in judged(text)]


def test_a_job_bound_to_its_gpu_is_well() -> None:
    assert judged(RECORD) == []


def test_a_job_that_may_use_all_memory_may_fill_a_gpus() -> None:
    text = RECORD.replace("1 bind:1", "0-1,4,12 default")
    assert ids(text) == ["job-memory-on-gpu", "job-memory-open"]
    finding = judged(text)[0]
    assert "nodes 4,12 are memory of GPUs" in finding.observed
    assert finding.fix is not None and "--membind=1" in finding.fix


def test_memory_on_another_node_than_the_gpu_is_far() -> None:
    assert ids(RECORD.replace("1 bind:1", "0-1 bind:0")) == ["job-memory-far"]
    assert ids(RECORD.replace("1 bind:1", "0 default")) == ["job-memory-far"]
    # A policy that only prefers keeps nothing away.
    assert ids(RECORD.replace("1 bind:1", "0-1 prefer:1")) == ["job-memory-open"]


def test_a_policy_counts_where_all_tasks_have_one() -> None:
    both = RECORD.replace("1 bind:1", "0-1 bind:1\ntask 0.1 72-79 0-1 default")
    assert ids(both) == ["job-memory-open"]


def test_cpus_of_recorded_tasks_are_those_of_the_machine() -> None:
    text = RECORD.replace("72-79 1 bind:1", "0-7 0-1 bind:1")
    finding = judged(text)[0]
    assert finding.id == "job-gpu-far" and finding.subject == "job 7 (train) on gh01"
    assert finding.cost == "distance 40 instead of 10"


def test_a_record_without_tasks_or_addresses_is_not_judged() -> None:
    assert ids(RECORD.replace("task batch.0 72-79 1 bind:1\n", "")) == ["job-unjudged"]
    assert ids(RECORD.replace("held 1", "held 5")) == ["job-unjudged"]
    assert ids(RECORD.replace("held 1", "held")) == []


def test_gpus_may_be_called_by_their_render_nodes() -> None:
    held = held_of_record(parse_record(RECORD.replace("held 1", "held 128-129"), "7.rec"))
    assert [gpu.index for gpu in held.gpus] == [0, 1]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("record 1", "record 2", 1), ("homenode", "other", 1), ("gpu 0", "gpu x", 15),
        ("numa 0 0-71", "numa 0 7-", 7), ("held 1", "what 1", 17), ("0009:01:00.0", "0", 15),
    ],
)  # fmt: skip
def test_a_bad_record_is_refused_with_its_line(old: str, new: str, line: int) -> None:
    with pytest.raises(ParseError) as caught:
        parse_record(RECORD.replace(old, new, 1), "7.rec")
    assert caught.value.line == line


@given(st.data())
def test_a_damaged_record_is_read_or_refused(data: st.DataObject) -> None:
    text = list(RECORD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.sampled_from(["", " ", "\n", "-", "9", ":", "x", ","]))
    try:
        record = parse_record("".join(text), "7.rec")
    except ParseError as error:
        assert error.source
    else:
        audit([held_of_record(record)])


def test_hooks_take_only_plain_paths() -> None:
    for path in ("relative", "/a b", "/a;b", "/a$(b)", ""):
        with pytest.raises(UsageError):
            hooks(path)
    assert all("/srv/spool" in text for text in hooks("/srv/spool").values())


def fake_machine(root: Path) -> None:
    """What the hooks read of a machine of two nodes and two GPUs."""
    for node, cpus in enumerate(("0-3", "4-7")):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "distance").write_text("10 21\n" if node == 0 else "21 10\n")
        gpu = f"0000:{node + 1}0:00.0"
        of_gpu = root / "proc/driver/nvidia/gpus" / gpu
        of_gpu.mkdir(parents=True)
        (of_gpu / "information").write_text(f"Model: \t x\nDevice Minor: \t {node}\n")
        device = root / "sys/bus/pci/devices" / gpu
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    (root / "proc/self").mkdir()
    (root / "proc/self/status").write_text("Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0-1\n")
    (root / "proc/self/numa_maps").write_text("5581d000 bind:0 file=/bin/sh mapped=1\n")


def run_hook(name: str, folder: Path, **environment: str) -> str:
    """Run one script as slurmd does; what it prints."""
    script = folder / name
    text = hooks(str(folder / "spool"))[name].replace("\nroot=\n", f"\nroot={folder / 'root'}\n")
    script.write_text(text)
    done = subprocess.run(
        ["/bin/sh", str(script)], capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "SLURMD_NODENAME": "gpu01", **environment},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


def test_the_hooks_record_a_job_that_is_then_audited(tmp_path: Path) -> None:
    fake_machine(tmp_path / "root")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(os.getuid())}
    run_hook("prolog.sh", tmp_path, **job, SLURM_JOB_GPUS="1", SLURM_JOB_USER="ada")
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "a\nheld 0\nb"}
    assert run_hook("task_prolog.sh", tmp_path, **job, **task) == ""
    live = tmp_path / "spool/live/7.gpu01.tasks"
    live.write_text(live.read_text() + "held 0\ntask 0.4 $(x) 0 default\n")
    run_hook("epilog.sh", tmp_path, **job)
    record = parse_record((tmp_path / "spool/done/7.gpu01.rec").read_text(), "7")
    assert [task.task for task in record.tasks] == ["0.3"]
    assert str(record.held) == "1" and record.name == "aheld 0b" and record.end_s is not None
    findings = audit([held_of_record(record)]).findings
    assert [f.id for f in findings] == ["job-gpu-far", "job-memory-far"]
    assert not live.exists()


@pytest.mark.parametrize("name", ["prolog.sh", "task_prolog.sh", "epilog.sh"])
def test_no_hook_ever_fails_or_prints(name: str, tmp_path: Path) -> None:
    for environment in (
        {}, {"SLURM_JOB_ID": "../../x"}, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "a/b"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "no-such-user"},
    ):  # fmt: skip
        assert run_hook(name, tmp_path, **environment) == ""
    assert {p.name for p in tmp_path.iterdir()} <= {"spool", name}


def test_the_hooks_are_plain_posix_shell() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    for name, text in hooks().items():
        if name.endswith(".sh"):
            done = subprocess.run(
                [shellcheck, "-s", "sh", "-"], input=text, text=True, capture_output=True
            )
            assert done.returncode == 0, done.stdout
