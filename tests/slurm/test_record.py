"""Records of jobs: what the hooks write on a node, and what is read of it afterwards."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from homenode.cluster.slurm.audit import audit
from homenode.cluster.slurm.client import read_records
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.gres import read_device_order
from homenode.cluster.slurm.job_allocation import SEVERAL_TYPES
from homenode.cluster.slurm.record import build_recorded_allocation, parse_record, render_hooks
from homenode.errors import ParseError, UsageError
from homenode.findings import Finding

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
    return list(audit([build_recorded_allocation(parse_record(text, "7.rec"))]).findings)


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


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("1 bind:1", "0-1 bind:0", ["job-memory-far"]),
        ("1 bind:1", "0 default", ["job-memory-far"]),
        ("1 bind:1", "0-1 prefer:1", ["job-memory-open"]),  # preferring keeps nothing away
        ("1 bind:1", "0-1 bind:1\ntask 0.1 72-79 0-1 default", ["job-memory-open"]),
        ("bind:1", "bind:9-1", []),  # a user's own line stops no audit
        ("task batch.0 72-79 1 bind:1\n", "", ["job-unjudged"]),
        ("held 1", "held 5", ["job-unjudged"]),
        ("held 1", "held", []),
    ],
)
def test_a_record_is_judged_by_its_memory_and_gpus(old: str, new: str, expected: list[str]) -> None:
    assert ids(RECORD.replace(old, new)) == expected


def test_cpus_of_recorded_tasks_are_those_of_the_machine() -> None:
    text = RECORD.replace("72-79 1 bind:1", "0-7 0-1 bind:1")
    finding = judged(text)[0]
    assert finding.id == "job-gpu-far" and finding.subject == "job 7 (train) on gh01"
    assert finding.cost == "distance 40 instead of 10"


def test_gpus_of_several_types_are_not_counted_by_address(tmp_path: Path) -> None:
    (tmp_path / "7.gh01.rec").write_text(RECORD)
    gres = "Name=gpu Type=a File=/dev/nvidia1\nName=gpu Type=b File=/dev/nvidia0\n"
    order = read_device_order(parse_config(gres, "gres.conf"))
    (allocation,) = read_records(tmp_path, (), order)
    assert allocation.unknown == SEVERAL_TYPES[0]


def test_gpus_may_be_called_by_their_render_nodes() -> None:
    owned = build_recorded_allocation(parse_record(RECORD.replace("held 1", "held 128-129"), "r"))
    assert [gpu.index for gpu in owned.gpus] == [0, 1]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("record 1", "record 3", 1),
        ("homenode", "other", 1),
        ("gpu 0", "gpu x", 15),
        ("numa 0 0-71", "numa 0 7-", 7),
        ("held 1", "what 1", 17),
        ("0009:01:00.0", "0", 15),
    ],
)
def test_a_bad_record_is_refused_with_its_line(old: str, new: str, line: int) -> None:
    with pytest.raises(ParseError) as caught:
        parse_record(RECORD.replace(old, new, 1), "7.rec")
    assert caught.value.line == line


def test_hooks_take_only_plain_paths() -> None:
    for path in ("relative", "/a b", "/a;b", "/a$(b)", ""):
        with pytest.raises(UsageError):
            render_hooks(path)
    assert all("/srv/spool" in text for text in render_hooks("/srv/spool").values())


def fake_machine(root: Path) -> None:
    """What the hooks read of a machine of two nodes and two GPUs."""
    for node, cpus in enumerate(("0-3", "4-7")):
        directory = root / f"sys/devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cpus}\n")
        (directory / "distance").write_text("10 21\n" if node == 0 else "21 10\n")
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


def run_hook(
    name: str, directory: Path, shell: str = "/bin/sh", waits_s: str = "200", **environment: str
) -> str:
    """Run one script as slurmd does; what it prints.

    waits_s: instead of its own limit, within which a busy machine may not get it done.
    """
    script = directory / name
    text = render_hooks(str(directory / "spool"))[name]
    text = text.replace("\nroot=\n", f"\nroot={directory / 'root'}\n")
    assert name == "task_prolog.sh" or text.count("    sleep 5 &\n") == 1
    script.write_text(text.replace("    sleep 5 &\n", f"    sleep {waits_s} &\n"))
    done = subprocess.run(
        [*shell.split(), str(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={"PATH": os.environ["PATH"], "SLURMD_NODENAME": "gpu01", **environment},
    )
    assert done.stderr == ""
    return done.stdout


def test_the_hooks_record_a_job_that_is_then_audited(tmp_path: Path) -> None:
    fake_machine(tmp_path / "root")
    job = JOB
    run_hook("prolog.sh", tmp_path, **job, SLURM_JOB_GPUS="1", SLURM_JOB_USER="ada")
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "a\nheld 0\nb"}
    assert run_hook("task_prolog.sh", tmp_path, **job, **task) == ""
    live = tmp_path / "spool/live/7.gpu01.tasks"
    live.write_text(live.read_text() + "held 0\ntask 0.4 $(x) 0 default\n")
    run_hook("epilog.sh", tmp_path, **job)
    record = parse_record((tmp_path / "spool/done/7.gpu01.rec").read_text(), "7")
    assert [task.task for task in record.tasks] == ["0.3"]
    assert str(record.owned) == "1" and record.name == "aheld 0b"
    findings = audit([build_recorded_allocation(record)]).findings
    assert [f.id for f in findings] == ["job-gpu-far", "job-memory-far"]
    assert not live.exists()


def test_unreadable_nodes_of_gpus_are_not_those_of_the_gpu_before(tmp_path: Path) -> None:
    fake_machine(tmp_path / "root")
    (tmp_path / "root/sys/bus/pci/devices/0000:20:00.0/numa_node").unlink()
    numa_status = tmp_path / "root/proc/driver/nvidia/gpus/0000:10:00.0/numa_status"
    numa_status.write_text("Node: \t -1\nStatus: offline\n")
    run_hook("prolog.sh", tmp_path, **JOB, SLURM_JOB_GPUS="1")
    record = parse_record((tmp_path / "spool/live/7.gpu01.job").read_text(), "7")
    assert [(gpu.index, gpu.node) for gpu in record.gpus] == [(0, 0)] and record.gpu_memory == ()


@pytest.mark.parametrize("words", [b"\0", b"\xff\xfe", b"name a\0b\ntask 0.9 \0\n", b"held 0\r"])
def test_a_task_that_writes_other_letters_hides_no_task(tmp_path: Path, words: bytes) -> None:
    fake_machine(tmp_path / "root")
    run_hook("prolog.sh", tmp_path, **JOB, SLURM_JOB_GPUS="1")
    live = tmp_path / "spool/live/7.gpu01.tasks"
    live.write_bytes(words + b"\n")
    run_hook("task_prolog.sh", tmp_path, **JOB, SLURM_STEP_ID="0", SLURM_PROCID="3")
    run_hook("epilog.sh", tmp_path, **JOB)
    record = parse_record((tmp_path / "spool/done/7.gpu01.rec").read_text(), "7")
    assert [task.task for task in record.tasks] == ["0.3"]


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(os.getuid())}


def done(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "spool/done").iterdir())


@pytest.mark.parametrize("shell", ["dash", "bash --posix", "busybox sh"])
def test_a_job_that_is_started_again_keeps_both_records(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    fake_machine(tmp_path / "root")
    for restart, gpu in (("0", "0"), ("1", "1")):
        start = {"SLURM_JOB_GPUS": gpu, "SLURM_JOB_RESTART_COUNT": restart}
        run_hook("prolog.sh", tmp_path, shell, **JOB, **start)
        run_hook("task_prolog.sh", tmp_path, shell, **JOB)
        run_hook("epilog.sh", tmp_path, shell, **JOB)
    assert done(tmp_path) == ["7.gpu01.1.rec", "7.gpu01.rec"]
    both = [read_records(tmp_path / "spool/done", asked) for asked in ([], ["7"])]
    for owned in both:
        first, second = sorted(owned, key=lambda one: one.restart)
        assert [gpu.index for gpu in first.gpus + second.gpus] == [0, 1]
        assert second.subject == "job 7 (no name), restart 1, on gpu01"


def test_a_start_that_no_epilog_ended_is_kept_as_it_was(tmp_path: Path) -> None:
    fake_machine(tmp_path / "root")
    run_hook("prolog.sh", tmp_path, **JOB, SLURM_JOB_GPUS="0")
    run_hook("task_prolog.sh", tmp_path, **JOB)
    run_hook("prolog.sh", tmp_path, **JOB, SLURM_JOB_GPUS="1")
    live = parse_record((tmp_path / "spool/live/7.gpu01.job").read_text(), "live")
    lost = parse_record((tmp_path / "spool/done/7.gpu01.rec").read_text(), "lost")
    assert (str(live.owned), str(lost.owned)) == ("1", "0") and lost.tasks


def test_names_of_jobs_are_for_root_alone(tmp_path: Path) -> None:
    fake_machine(tmp_path / "root")
    run_hook("prolog.sh", tmp_path, **JOB)
    spool = tmp_path / "spool"
    assert (spool / "live/7.gpu01.job").stat().st_mode & 0o077 == 0
    assert (spool / "done").stat().st_mode & 0o777 == 0o700
    # A task needs to reach its own file, and to list no others.
    assert (spool / "live").stat().st_mode & 0o777 == 0o711


@pytest.mark.parametrize("directory", ["spool", "spool/live", "spool/done"])
def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, directory: str) -> None:
    fake_machine(tmp_path / "root")
    (tmp_path / directory).mkdir(parents=True)
    (tmp_path / directory).chmod(0o777)
    run_hook("prolog.sh", tmp_path, **JOB)
    assert not list((tmp_path / "spool").rglob("7.*"))


@pytest.mark.parametrize("directory", ["spool", "spool/live", "spool/done"])
def test_a_link_in_the_directories_place_leads_nowhere(tmp_path: Path, directory: str) -> None:
    fake_machine(tmp_path / "root")
    (tmp_path / "etc").mkdir()
    (tmp_path / directory).parent.mkdir(exist_ok=True)
    (tmp_path / directory).symlink_to(tmp_path / "etc")
    for name in ("prolog.sh", "epilog.sh"):
        run_hook(name, tmp_path, **JOB)
    assert list((tmp_path / "etc").iterdir()) == []


def test_no_job_waits_for_a_driver_that_hangs(tmp_path: Path) -> None:
    fake_machine(tmp_path / "root")
    hung = tmp_path / "root/sys/devices/system/node/node0/cpulist"
    hung.unlink()
    os.mkfifo(hung)
    run_hook("prolog.sh", tmp_path, waits_s="1", **JOB)  # would wait for ever
    os.close(os.open(hung, os.O_WRONLY | os.O_NONBLOCK))


def test_a_task_never_wipes_what_another_wrote(tmp_path: Path) -> None:
    assert '>"$tasks"' not in render_hooks()["task_prolog.sh"].replace('>>"$tasks"', "")


def test_a_mig_slice_is_on_the_node_of_its_gpu(tmp_path: Path) -> None:
    root = tmp_path / "root"
    fake_machine(root)
    for place in ("gpu0/mig/gi7/ci0", "gpu0/mig/gi8/ci0", "gpu0/mig/gi8/ci1", "gpu1/mig/gi1/ci0"):
        directory = root / "proc/driver/nvidia/capabilities" / place
        directory.mkdir(parents=True)
        (directory / "access").write_text("DeviceFileMinor: 12\n")
    run_hook("prolog.sh", tmp_path, **JOB, SLURM_JOB_GPUS="2,3")
    run_hook("task_prolog.sh", tmp_path, **JOB)
    run_hook("epilog.sh", tmp_path, **JOB)
    record = parse_record((tmp_path / "spool/done/7.gpu01.rec").read_text(), "7")
    assert record.slices == ((0, 3), (1, 1))
    owned = build_recorded_allocation(record)
    assert [gpu.index for gpu in owned.gpus] == [0, 1] and owned.unknown is None


def test_where_only_some_gpus_are_cut_both_orders_must_agree() -> None:
    text = RECORD.replace("held 1", "slices 0 7\nheld 7")
    # By address place 7 is GPU 1; with whole GPUs first it is a slice of GPU 0.
    assert ids(text) == ["job-unjudged"]
    agreeing = text.replace("0019:01:00.0 1", "0019:01:00.0 0").replace("72-79", "0-7")
    assert ids(agreeing) != ["job-unjudged"]


def test_a_driver_that_counts_in_another_order_is_asked_about() -> None:
    swapped = RECORD.replace("gpu 0 ", "gpu x ").replace("gpu 1 ", "gpu 0 ").replace(" x ", " 1 ")
    (finding,) = judged(swapped)
    assert finding.id == "job-unjudged" and "--gres" in str(finding.fix)
    record = parse_record(swapped, "7.rec")
    assert [g.index for g in build_recorded_allocation(record, (1, 0)).gpus] == [0]


def test_a_gpu_of_one_node_or_of_its_own_memory_is_at_the_cpus() -> None:
    own = RECORD.replace("gpu 1 0019:01:00.0 1", "gpu 1 0019:01:00.0 12")
    rows = "distances 4 80 120 10 120\ndistances 12 120 80 120 10\n"
    record = parse_record(own.replace("gpumemory", rows + "gpumemory", 1), "7.rec")
    assert [gpu.node for gpu in build_recorded_allocation(record).gpus] == [1]
    one = "homenode-slurm-record 1\njob 1\nnode n\nnuma 0 0-7\ngpu 0 0000:01:00.0 -1\nheld 0\n"
    assert ids(one + "task 0.0 0 0 bind:0\n") == []


@pytest.mark.parametrize("name", ["prolog.sh", "task_prolog.sh", "epilog.sh"])
def test_no_hook_ever_fails_or_prints(name: str, tmp_path: Path) -> None:
    for environment in (
        {},
        {"SLURM_JOB_ID": "../../x"},
        {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "a/b"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "no-such-user"},
    ):
        assert run_hook(name, tmp_path, **environment) == ""
    assert {p.name for p in tmp_path.iterdir()} <= {"spool", name}


def test_the_hooks_are_plain_posix_shell() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    for name, text in render_hooks().items():
        if name.endswith(".sh"):
            done = subprocess.run(
                [shellcheck, "-s", "sh", "-"], input=text, text=True, capture_output=True
            )
            assert done.returncode == 0, done.stdout
