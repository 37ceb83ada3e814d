"""Users of a real Slurm who write what they like into their jobs: the audit is never misled."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from homenode.cluster.slurm import client
from homenode.cluster.slurm.config import config_word, parse_config
from homenode.cluster.slurm.gres import parse_gres_lines
from tests.command_line import homenode
from tests.processes import write_program
from tests.seeds import part
from tests.slurm.hostile_jobs import FORGED
from tests.slurm.test_audit_live import NODE
from tests.slurm.testbed import Testbed, submit, until_runs

pytestmark = pytest.mark.slurm

Audit = Callable[..., tuple[int, list[dict[str, str]], str]]

WORDS = (
    "x JobState=COMPLETED",
    "x UserId=root(0) ArrayJobId=3 ArrayTaskId=5",
    "x\nJobId=99 JobName=z",
    "x\n\nJobId=99 JobName=z",
    "c\n     Nodes=gpu1 CPU_IDs=0-7 Mem=1 GRES=gpu:1(IDX:0)",
    "x\n   JobState=COMPLETED Reason=None Dependency=(null)",
    f"x\n{FORGED}"[:1023],
    f"x\n{FORGED}\n   \n\nJobId=OTHER JobName=z"[:1023],
    "x\n   \n\nJobId=OTHER JobName=z",
    "No jobs in the system",
    '{"jobs": []}',
    '"}]}',
    "a|b|RUNNING",
    "1" * 1000,
    "\x1b[2J\x1b[31m",
    "\u202e\u2066x",
    "x\u2028JobId=99 JobName=z\x85   JobState=COMPLETED",
    b"\xff\xfe\xc3".decode("utf-8", "surrogateescape"),
    "\r\n   JobState=COMPLETED",
    "\\n\\u000a",
)


@pytest.fixture(scope="module")
def near(slurm: Testbed) -> str:
    """A job of somebody else whose GPU is near its CPUs."""
    job = submit(slurm, "-w", "gpu02", "-n1", "-c2", "--gres=gpu:1")
    until_runs(slurm, job)
    return job


@pytest.fixture
def audit(slurm: Testbed, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """Audits the cluster; exit code, findings, and what was checked."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])

    def audited(*words: str) -> tuple[int, list[dict[str, str]], str]:
        done = homenode("slurm", "audit", *words, "--host", NODE, "--json", whole=True)
        answer = json.loads(done.stdout)
        return done.exit_code, answer["findings"], " ".join(answer["checked"])

    return audited


@pytest.fixture
def without_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue as of versions before 21.08."""
    text = '#!/bin/sh\ncase "$*" in *--json*)\n'
    text += "  echo \"squeue: unrecognized option '--json'\" >&2; exit 1 ;;\nesac\n"
    write_program(tmp_path / "squeue", f'{text}exec {shutil.which("squeue")} "$@"\n')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize("key", ["JobName", pytest.param("Comment", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("words", part(WORDS, 0), ids=lambda words: ascii(words)[:40])
def test_no_words_of_a_user_hide_or_move_a_job(
    slurm: Testbed, audit: Audit, far: str, near: str, key: str, words: str
) -> None:
    _say(slurm, far, key, words.replace("OTHER", near))
    code, findings, checked = audit()
    assert code == 1 and [f["id"] for f in findings] == ["job-gpu-far"]
    assert findings[0]["subject"].startswith(f"job {far} (")
    assert checked.startswith("2 allocations of GPU jobs on 2 nodes: 1 local to all of their GPUs")


@pytest.mark.parametrize("key", ["JobName", pytest.param("Comment", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("words", part(WORDS, 1), ids=lambda words: ascii(words)[:40])
def test_without_json_an_odd_job_is_named_and_the_others_are_audited(
    slurm: Testbed, audit: Audit, far: str, near: str, without_json: None, key: str, words: str
) -> None:
    _say(slurm, far, key, words.replace("OTHER", near))
    code, findings, _ = audit()
    far_or_odd = {"job-gpu-far": f"job {far} (", "job-unreadable": f"job {far}"}
    is_forged_for_the_other = "OTHER" in words
    assert code == 1 and findings
    for finding in findings:
        if finding["id"] == "job-unreadable" and is_forged_for_the_other:
            jobs = finding["subject"].removeprefix("jobs ").removeprefix("job ")
            assert set(jobs.split(", ")) <= {far, near}
        else:
            assert finding["subject"].startswith(far_or_odd[finding["id"]])
    assert not any("99" in finding["subject"].partition("(")[0] for finding in findings)


def _say(slurm: Testbed, job: str, key: str, words: str) -> None:
    """As its user does it, also while it runs."""
    for one in ("JobName", "Comment"):
        slurm.client("scontrol", "update", f"JobId={job}", f"{one}={words if one == key else 'x'}")


def test_submitted_fields_change_nothing(slurm: Testbed, audit: Audit, tmp_path: Path) -> None:
    line = "x\n   JobState=COMPLETED Reason=None Dependency=(null)"
    directory = tmp_path / line
    directory.mkdir()
    tmp_path.chmod(0o755)
    script = tmp_path / f"{line}.sh"
    script.write_text("#!/bin/sh\nsleep 300\n")
    common = ("--parsable", "-p", "parts", "--mem=10", "-w", "gpu03", "-n1", "-c2", "--gres=gpu:1")
    names = ("--account", "--mcs-label", "--network", "--wckey", "--container")
    given: list[tuple[str, ...]] = [(name, line, "--wrap=sleep 300") for name in names]
    own = ("--chdir", str(directory), "-e", line, "-i", "/dev/null", "--wrap=sleep 300")
    jobs = [
        slurm.client("sbatch", *common, "-o", "/dev/null", *options).strip()
        for options in (*given, own, (str(script),))
    ]
    for job in jobs:
        until_runs(slurm, job)
    code, findings, _ = audit(*jobs)
    assert code == 0 and findings == []
    stored = tmp_path / "jobs.txt"
    stored.write_text(slurm.client("scontrol", "show", "job", "-d"))
    code, findings, _ = audit(*jobs, "--jobs", str(stored))
    assert code == 1 and {f["id"] for f in findings} == {"job-unreadable"}
    named = " ".join(finding["subject"] for finding in findings).replace(",", "").split()
    shown = {job: slurm.client("scontrol", "show", "job", "-d", job) for job in jobs}
    forged = {job for job, text in shown.items() if "\n   JobState=COMPLETED" in text}
    assert len(forged) >= 4 and set(named) - {"job", "jobs"} == forged
    slurm.client("scancel", *jobs)


def test_a_nodes_comment_gives_it_no_other_shape(slurm: Testbed, audit: Audit, near: str) -> None:
    words = "c Sockets=9\n   State=IDLE ThreadsPerCore=1\n\nNodeName=gpu02 CoresPerSocket=1"
    slurm.client("scontrol", "update", "NodeName=gpu02", f"Comment={words}")
    code, findings, _ = audit(near)
    assert (code, findings) == (0, [])
    slurm.client("scontrol", "update", "NodeName=gpu02", "Comment=")


def test_a_study_knows_its_jobs_by_their_names_alone(
    slurm: Testbed, far: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    name = f"a|b\n{near}|N/A|CANCELLED|hn-abc-x|gpu01|None"
    _say(slurm, far, "JobName", name)
    found = {(job.job, job.name, job.state_name) for job in client.ask_queue()}
    assert (far, name, "RUNNING") in found
    assert not [one for one in found if one[0] == near and one[2] != "RUNNING"]


@pytest.mark.parametrize("job", ["--help", "-d", "1,2", "1 2", "", "1;id", "\u0663"])
def test_what_is_no_id_is_asked_of_no_program(slurm: Testbed, job: str) -> None:
    conf = {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    done = homenode("slurm", "audit", "--host", NODE, "--", job, env=conf, whole=True)
    assert done.exit_code == 2 and "expected an id such as 4711" in done.stderr


@pytest.mark.parametrize("kind", ["h#100", "h\\100", "h\\", "h=1", "h'1", "$(id)", "#", "h\\#"])
def test_slurmd_reads_a_written_word_as_we_do(slurm: Testbed, kind: str, tmp_path: Path) -> None:
    words = config_word("Type", kind)
    for name in ("slurm.conf", "gres.conf", "cgroup.conf"):
        text = (slurm.base / name).read_text()
        (tmp_path / name).write_text(text.replace("Type=h100", words))
    files = {**slurm.environment, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    done = subprocess.run(
        ["slurmd", "-N", "gpu01", "-G"], env=files, capture_output=True, text=True, timeout=180
    )
    assert f"for GRES gpu:{kind} has" in done.stdout + done.stderr
    config = parse_config(f"Name=gpu {words} File=/dev/nvidia0\n", "gres.conf")
    (line, *_) = parse_gres_lines(config)
    assert line.type == kind
