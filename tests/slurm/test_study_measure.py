"""jobs/measure.sh, run as a job would: the files that it leaves, and what is read from them.

Slurm's and NVIDIA's programs are stand-ins of a few lines; everything else is this machine's.
"""

import os
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from homenode.measure.bindings.evidence import evidence_of
from homenode.measure.bindings.experiments import Experiment, Mode
from homenode.measure.bindings.record import parse_record

PCI = Path("/sys/bus/pci/devices")
JOB = """\
JobId=5 JobName=hn-x
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   SubmitTime=2026-01-01T10:00:00 EligibleTime=2026-01-01T10:00:00
   StartTime=2026-01-01T10:00:07 EndTime=2026-01-01T12:00:00 Deadline=N/A
   NodeList=n1
     Nodes=n1 CPU_IDs=0-3 Mem=100 GRES=gpu:h100:1(IDX:0)
"""
NVIDIA_SMI = """\
#!/bin/bash
case "$*" in
*power.draw*) while :; do echo "0000{address}, 321.50"; sleep 0.05; done ;;
*pci.bus_id*) echo "0000{upper}" ;;
-L) echo "GPU 0: NVIDIA H100 (UUID: GPU-c0ffee)"; echo "  MIG 1g.10gb  Device  0: (UUID: MIG-c0)" ;;
esac
"""
NVBANDWIDTH = """\
#!/bin/bash
# It copies until its power was read, however long that takes: of two new lines one is of now.
lines() {{ cat raw/x/task-0/*/power.csv 2>/dev/null | wc -l; }}
before=$(lines)
until (($(lines) > before + 1)); do sleep 0.05; done
[ "$3" = host_to_device_memcpy_ce ] || {{ echo "ERROR: not here" >&2; exit 1; }}
cat <<TEXT
nvbandwidth Version: v0.6

Device 0: NVIDIA H100 (0000{address})

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0
 0     50.00

TEXT
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def run_job(
    tmp_path: Path, settings: str, programs: dict[str, str], **variables: str
) -> dict[str, str]:
    """The files of a job with these settings; it runs in a folder of its own."""
    study = tmp_path / "study"
    (study / "jobs").mkdir(parents=True, exist_ok=True)
    measure = resources.files("homenode.measure.bindings").joinpath("measure.sh").read_text()
    (study / "jobs/measure.sh").write_text(measure)
    for name, text in programs.items():
        program(tmp_path / "bin", name, text)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}:/usr/sbin",
        "SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n1", "HOME": str(tmp_path), **variables,
    }  # fmt: skip
    script = f"experiment=x homenode=homenode arrangement=a\n{settings}\n. jobs/measure.sh\n"
    subprocess.run(["bash", "-c", script], cwd=study, env=environment, check=True, timeout=300)
    folder = study / f"raw/x/task-0/5.{variables.get('SLURM_RESTART_COUNT', '0')}"
    return {path.name: path.read_text() for path in folder.iterdir()}


NOTHING = "together=1 bind=() tests=() app=()"
SLURM = {"scontrol": f"#!/bin/bash\ncat <<X\n{JOB}X\n", "squeue": "#!/bin/bash\necho '5|4|gpu:1'\n"}


def a_pci_function() -> str:
    found = sorted(PCI.iterdir()) if PCI.is_dir() else []
    if not found or shutil.which("numactl") is None:
        pytest.skip("no PCI function, or no numactl")
    return found[0].name


def test_a_job_writes_down_its_gpus_before_it_measures(tmp_path: Path) -> None:
    address = a_pci_function()
    values = {"address": address, "upper": address.upper()}
    programs = {
        **SLURM,
        "nvidia-smi": NVIDIA_SMI.format(**values),
        "nvbandwidth": NVBANDWIDTH.format(**values),
    }
    files = run_job(tmp_path, NOTHING, programs)
    assert "UUID" not in files["gpu-list.txt"]
    record = parse_record(files, "n1", 1)
    assert [str(gpu.bdf) for gpu in record.gpus] == [address]
    assert record.gpus[0].path[-1] == address
    assert (record.queue_wait_s, record.slices, record.others) == (7.0, ("1g.10gb",), 0)
    assert record.pus is not None
    assert len(record.pus) == len(os.sched_getaffinity(0))

    one = evidence_of(Experiment("x", Mode.ALONE, ("n1",), "p", 1), "x", files, None)
    assert [(s.metric, s.value, str(s.device)) for s in one.samples] == [
        ("h2d-bandwidth", 50e9, address)
    ]
    (power,) = [power for power in one.power if power.device is not None]
    assert (power.watts, power.joules_per_gb) == (321.5, 6.43)
    assert any("ERROR: not here" in str(gap) for gap in one.gaps)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left


def test_a_bash_before_5_and_a_node_without_pkill_measure_too(tmp_path: Path) -> None:
    address = a_pci_function()
    values = {"address": address, "upper": address.upper()}
    programs = {
        **SLURM,
        "nvidia-smi": NVIDIA_SMI.format(**values),
        "nvbandwidth": NVBANDWIDTH.format(**values),
        "pkill": "#!/bin/sh\nexit 127\n",
    }
    # Without its special meaning the variable is what it is there: unset.
    files = run_job(tmp_path, f"unset EPOCHREALTIME; {NOTHING}", programs)
    assert "done" in files
    assert files["times.txt"].count("\n") == 5
    assert re.fullmatch(rf"(\d{{10,}}\.5, 0000{address}, 321\.50\n)+", files["power.csv"])


def test_a_node_without_any_tool_still_leaves_a_record(tmp_path: Path) -> None:
    files = run_job(tmp_path, NOTHING.replace("app=()", "app=(false) app_folder=/"), SLURM)
    assert {"done", "ended", "exit", "job.txt", "allowed.txt"} <= set(files)
    gaps = [str(gap) for gap in parse_record(files, "n1", 1).gaps]
    assert "nvbandwidth.txt: nvbandwidth is not on the PATH" in gaps
    assert "app.txt: exit status 1" in gaps


def test_how_far_a_benchmark_came_is_no_open_point_and_how_it_ended_is() -> None:
    progress = "".join(f"{n} of 12 steps done: stream, {60 - n} s left\n" for n in range(2, 9))
    well = {"bench.txt.err": f"{progress}wrote results/cpu-only/x-cpus\n"}
    assert [gap for gap in parse_record(well, "n1", 1).gaps if gap.subject == "bench.txt"] == []
    badly = {
        "bench.txt.err": f"warning: busy\n{progress}homenode: no room\nhint: x\nexit status 3\n"
    }
    (gap,) = (gap for gap in parse_record(badly, "n1", 1).gaps if gap.subject == "bench.txt")
    assert gap.reason == "warning: busy; homenode: no room; exit status 3"


def test_the_own_program_runs_where_the_study_was_started(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    settings = NOTHING.replace("app=()", f"app=(pwd) app_folder='{tmp_path}/work'")
    files = run_job(tmp_path, settings, SLURM)
    assert files["app.txt"] == f"{tmp_path}/work\n"
    assert "done" in files


def test_jobs_wait_for_each_other_before_they_measure(tmp_path: Path) -> None:
    meeting = tmp_path / "study/raw/x/meeting-5.0"
    meeting.mkdir(parents=True)
    (meeting / "1").touch()
    files = run_job(tmp_path, NOTHING.replace("together=1", "together=2"), SLURM)
    assert files["met"] == "2 of 2\n"


def test_a_job_whose_company_never_comes_goes_on_and_says_so(tmp_path: Path) -> None:
    settings = NOTHING.replace("together=1", "together=3") + " meet_seconds=1"
    assert run_job(tmp_path, settings, SLURM)["met"] == "1 of 3\n"
    # Who comes when it has gone on does not take it for company, nor does a job started again.
    meeting = tmp_path / "study/raw/x/meeting-5.0"
    assert [path.name for path in meeting.iterdir()] == ["0.gone"]
    (meeting / "1").touch()
    (meeting / "2").touch()
    again = run_job(tmp_path, settings, SLURM, SLURM_RESTART_COUNT="1")
    assert again["met"] == "1 of 3\n"
