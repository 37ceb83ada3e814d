"""homenode slurm audit and check as a user types them."""

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import homenode
from tests.processes import write_program
from tests.slurm.gpu_nodes import TESTBED, Listed, scontrol_text, squeue_2405
from tests.slurm.test_record import RECORD

Run = Callable[..., tuple[int, str, str]]

JOBS = (
    Listed(7, ["gpu01"], range(16, 20), (0, 1, 4, 5, 6, 7)),
    Listed(8, ["gpu02"], range(4), (0, 1)),
    Listed(9, ["gpu02"], [], state="PENDING"),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a directory with a machine and jobs; exit code, output, notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("gpu8.toml").write_text(TESTBED)
    Path("empty.txt").write_text("\n")
    Path("jobs.txt").write_text(scontrol_text(JOBS))
    Path("jobs.json").write_text(squeue_2405(JOBS))

    def command(*words: str) -> tuple[int, str, str]:
        done = homenode("slurm", *words, whole=True)
        return done.exit_code, done.stdout, done.stderr

    return command


@pytest.mark.parametrize("jobs", ["jobs.txt", "jobs.json"])
def test_a_stored_listing_is_audited(run: Run, jobs: str) -> None:
    code, out, err = run("audit", "--jobs", jobs, "--host", "gpu8.toml")
    assert code == 1 and err == ""
    assert out.startswith("2 GPU jobs: 1 warning: ") and "job-gpu-far" in out
    assert "warning   job 7 (train it) on gpu01" in out
    assert "whether the nodes are as gpu8: --nodes FILE" in " ".join(out.split())


def test_a_host_may_be_that_of_some_nodes(run: Run) -> None:
    code, out, _ = run("audit", "--jobs", "jobs.txt", "--host", "gpu0[2-9]=gpu8.toml", "--json")
    found = json.loads(out)["findings"]
    assert code == 0 and [f["id"] for f in found] == ["job-unjudged"]
    assert found[0]["observed"] == "no host is specified for this node"
    # Of two hosts a node's own counts.
    both = ("--host", "small-2n8c-2gpu", "--host", "gpu[01-02]=gpu8.toml")
    assert run("audit", "--jobs", "jobs.txt", *both)[0] == 1


def test_a_whole_gpu_beside_slices_of_another_job_is_not_counted_by_address(run: Run) -> None:
    whole = scontrol_text([Listed(1, ["gpu01"], range(4), (4,))])
    cut = scontrol_text([Listed(2, ["gpu01"], range(32, 36), (0,))]).replace("h100", "1g.10gb")
    Path("jobs.txt").write_text(f"{whole}\n{cut}")
    _, out, _ = run("audit", "--jobs", "jobs.txt", "--host", "gpu8.toml", "--json")
    assert {finding["id"] for finding in json.loads(out)["findings"]} == {"job-unjudged"}


def test_a_whole_gpu_of_a_node_with_slices_is_not_counted_by_address(run: Run) -> None:
    Path("nodes.txt").write_text(
        "NodeName=gpu01 CoresPerSocket=16\n   CPUTot=64\n   Gres=gpu:1g.10gb:7(S:0),gpu:h100:7\n"
        "   Sockets=2\n   ThreadsPerCore=2\n"
    )
    Path("jobs.txt").write_text(scontrol_text([Listed(1, ["gpu01"], range(4), (4,))]))
    words = ("--jobs", "jobs.txt", "--nodes", "nodes.txt", "--host", "gpu8.toml", "--json")
    _, out, _ = run("audit", *words)
    assert {finding["id"] for finding in json.loads(out)["findings"]} == {"job-unjudged"}


def test_one_job_is_audited(run: Run) -> None:
    assert run("audit", "8", "--jobs", "jobs.json", "--host", "gpu8.toml")[0] == 0
    code, _, err = run("audit", "9", "--jobs", "jobs.txt", "--host", "gpu8.toml")
    assert code == 2 and "job 9: not running (PENDING)" in err and "records" not in err
    array = scontrol_text(JOBS[1:]).replace("JobId=9 ", "JobId=9 ArrayJobId=8 ArrayTaskId=2 ")
    array = array.replace("JobId=8 JobN", "JobId=8 ArrayJobId=8 ArrayTaskId=1 JobN")
    Path("array.txt").write_text(array)
    code, out, _ = run("audit", "8", "--jobs", "array.txt", "--host", "gpu8.toml")
    assert code == 0 and "1 allocation of GPU jobs" in out
    assert run("audit", "8_2", "--jobs", "array.txt", "--host", "gpu8.toml")[0] == 2
    code, _, err = run("audit", "77", "--jobs", "jobs.txt", "--host", "gpu8.toml")
    assert code == 2 and "no job 77 in it" in err


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "--jobs", "none.txt"),
        ("audit", "--records", "none"),
        ("audit", "--records", ".", "--jobs", "jobs.txt"),
        ("audit", "--records", ".", "--host", "gpu8.toml"),
        ("audit", "--jobs", "jobs.txt", "--host", "gpu01="),
        ("audit", "--jobs", "jobs.txt", "--host", "gpu[1-=gpu8.toml"),
        ("audit", "--jobs", "jobs.txt", "--host", "gpu8.toml", "--host", "gh200x4"),
        ("audit", "--jobs", "jobs.txt", "--nodes", "gres.conf", "--host", "gpu8.toml"),
        ("audit", "--hooks", "h", "--records", "."),
        ("audit", "--hooks", "jobs.txt"),
        ("audit", "--hooks", "h", "--spool", "a b"),
        ("audit", "--jobs", "jobs.txt", "--spool", "/srv/spool"),
        ("check", "-", "-"),
        ("audit", "--jobs", "jobs.txt", "--host", "=gpu8.toml"),
        ("check", "gres.conf", "none.conf"),
        ("check", "gres.conf", "gres.conf", "--host", "gpu8.toml"),
        ("check", "gres.conf", "slurm.conf", "--host", "gpu8.toml", "--cgroup", "gres.conf"),
    ],
)
def test_what_cannot_be_read_is_bad_input(run: Run, words: tuple[str, ...]) -> None:
    code, _, err = run(*words)
    said = "no such (file|directory)|a file, not|cannot be used together|requires|expected"
    assert code == 2 and re.match(f"homenode: .*({said})", err, re.DOTALL)


def test_without_slurm_there_is_no_one_to_ask(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homenode.process._SYSTEM_PATH", ())
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = run("audit", "--host", "gpu8.toml")
    assert code == 3 and "scontrol" in err


@pytest.mark.parametrize(
    ("said", "exit_code", "stated"),
    [
        ("slurm_load_jobs error: Invalid job id specified", 2, "job 77: unknown to Slurm"),
        ("slurm_load_jobs error: Unable to contact slurm controller", 3, "Unable to contact"),
    ],
)
def test_a_job_that_slurm_does_not_know_is_not_slurms_fault(
    run: Run, monkeypatch: pytest.MonkeyPatch, said: str, exit_code: int, stated: str
) -> None:
    write_program(Path("bin/scontrol"), f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", str(Path("bin").resolve()), prepend=":")
    code, _, err = run("audit", "77", "--host", "gpu8.toml")
    assert code == exit_code and stated in err


def test_records_of_a_directory_are_audited(run: Run) -> None:
    directory = Path("collected/node1")
    directory.mkdir(parents=True)
    (directory / "7.gh01.rec").write_text(RECORD)
    other = RECORD.replace("job 7", "job 8").replace("1 bind:1", "0-1,4 default")
    (directory / "8.gh01.rec").write_text(other)
    code, out, err = run("audit", "--records", "collected")
    assert code == 1 and "job 8 (train) on gh01 " in out and "job-memory-on-gpu" in out
    assert "info  1: job-memory-open" in out
    assert run("audit", "7", "--records", "collected")[0] == 0
    assert "job-memory-open" in run("audit", "--records", "collected", "--explain")[1]
    (directory / "9.gh01.rec").write_text("homenode-slurm-record 9\n")
    (directory / "10.gh01.rec").write_text(RECORD.replace("72-79", "9-1"))
    code, out, _ = run("audit", "--records", "collected", "--explain")
    assert code == 1 and "job 8 (train)" in out
    assert "9.gh01.rec:1: expected homenode-slurm-record up to version 1" in " ".join(out.split())
    assert "job 10 on gh01" in out and "update this homenode" in out
    code, _, err = run("audit", "4711", "--records", "collected")
    assert code == 2 and "no records of job 4711" in err


def test_hooks_are_written_once(run: Run) -> None:
    code, _, err = run("audit", "--hooks", "hooks", "--spool", "/srv/spool")
    assert code == 0 and err.startswith("wrote hooks: 4 files: prolog.sh, ")
    prolog = Path("hooks/prolog.sh")
    assert prolog.stat().st_mode & stat.S_IXUSR and "spool=/srv/spool" in prolog.read_text()
    assert run("audit", "--hooks", "hooks")[0] == 2


def test_files_are_checked_shown_and_written(run: Run) -> None:
    gres = "Name=gpu File=/dev/nvidia[0-7] Cores=0-15\n"
    Path("gres.conf").write_text(gres)
    Path("slurm.conf").write_text(
        "SelectType=select/cons_tres\nGresTypes=gpu\n"
        "NodeName=n[1-2] Sockets=2 CoresPerSocket=16 ThreadsPerCore=2 Gres=gpu:8\n"
    )
    files = ("check", "gres.conf", "slurm.conf", "--host", "gpu8.toml")
    code, out, _ = run(*files, "--nodes", "n[1-2]")
    assert code == 1 and "gres-cores-wrong" in out
    assert "+Name=gpu File=/dev/nvidia[4-7] Cores=16-31" in out
    assert run("check", "slurm.conf", "gres.conf", *files[3:], "--nodes", "n[1-2]")[1] == out
    assert json.loads(run(*files, "--json")[1])["format"] == "homenode.findings/1"
    piped = ("slurm", "check", "-", *files[2:], "-o", "piped")
    done = homenode(*piped, input=gres, whole=True)
    assert done.exit_code == 1 and "gres-cores-wrong" in done.stdout
    assert sorted(path.name for path in Path("piped").iterdir()) == ["gres.conf", "slurm.conf"]
    assert run(*files, "-o", "right")[0] == 1
    assert Path("gres.conf").read_text() == gres
    again = ("check", "right/gres.conf", "right/slurm.conf", "--host", "gpu8.toml")
    assert "gres-cores-wrong" not in run(*again)[1]
    assert run(*files, "-o", "right")[0] == 1
    Path("right/gres.conf").write_text("")
    code, out, err = run(*files, "-o", "right")
    assert code == 2 and "file exists" in err and "hint: -o right/new" in err and not out
    code, _, err = run(*files, "--nodes", "other[1-2]")
    assert code == 2 and "no node other[1-2]" in err and "hint: --nodes n[1-2]" in err
    Path("cgroup.conf").write_text("ConstrainCores=no\n")
    words = ("right/gres.conf", "right/slurm.conf", "--host", "gpu8.toml")
    Path("right/gres.conf").write_text(Path("gres.conf").read_text().replace("0-15", "0-31"))
    assert run("check", *files[1:], "--cgroup", "cgroup.conf")[1].startswith("Slurm's files: ")
    Path("gres.conf").write_text(
        "Name=gpu File=/dev/nvidia[0-3] Cores=0-15\nName=gpu File=/dev/nvidia[4-7] Cores=16-31\n"
    )
    out = run("check", "gres.conf", *words[1:], "--cgroup", "cgroup.conf")[1]
    assert out.startswith("cgroup.conf: ")
    assert run("check", "gres.conf", *words[1:], "-o", "both")[0] == 0
    assert sorted(path.name for path in Path("both").iterdir()) == ["gres.conf", "slurm.conf"]


def test_lines_are_corrected_for_their_own_machine_only(run: Run) -> None:
    Path("gres.conf").write_text(
        "NodeName=n[1-9] Name=gpu Type=a100 File=/dev/nvidia[0-3] Cores=0-15\n"
        "NodeName=n[1-9] Name=gpu Type=a100 File=/dev/nvidia[4-7] Cores=0-15\n"
    )
    Path("slurm.conf").write_text(
        "SelectType=select/cons_tres\nGresTypes=gpu\n"
        "NodeName=n[1-9] Sockets=2 CoresPerSocket=16 ThreadsPerCore=2 Gres=gpu:a100:8\n"
    )
    files = ("check", "gres.conf", "slurm.conf", "--host")
    code, out, err = run(*files, "mi300x-epyc9654", "-o", "other")
    assert (code, out) == (2, "") and "another machine than n[1-9]" in err
    assert not Path("other").exists()
    _, out, err = run(*files, "gpu8.toml", "--nodes", "n1")
    assert err.splitlines() == ["gres.conf:2: not corrected, since it is also about n[2-9]"]
    assert "--nodes 'n[1-9]' -o DIR" in " ".join(out.split())
    assert "-o DIR" not in (out := run(*files, "gpu8.toml", "-o", "right")[1])
    assert "install the files in right" in out


def cluster_in_parts(directory: Path) -> tuple[str, ...]:
    """Files of a cluster whose GPU lines and nodes stand in included files; the command."""
    (directory / "conf.d").mkdir(parents=True)
    (directory / "gres.conf").write_text("Include conf.d/gpus.conf\n")
    (directory / "conf.d/gpus.conf").write_text("Name=gpu File=/dev/nvidia[0-7] Cores=0-15\n")
    (directory / "slurm.conf").write_text("ClusterName=hpc\nInclude conf.d/%c-nodes.conf\n")
    (directory / "conf.d/hpc-nodes.conf").write_text(
        "SelectType=select/linear\nGresTypes=gpu\n"
        "NodeName=n[1-2] Sockets=2 CoresPerSocket=16 ThreadsPerCore=2 Gres=gpu:8\n"
    )
    return ("check", f"{directory}/gres.conf", f"{directory}/slurm.conf", "--host", "gpu8.toml")


def test_included_files_are_checked_with_their_names_and_written(run: Run) -> None:
    files = cluster_in_parts(Path("etc"))
    code, out, _ = run(*files)
    assert code == 1 and "not checked: etc" not in out
    assert "select/linear (etc/conf.d/hpc-nodes.conf, line 1)" in out
    whole = run(*files, "--explain")[1]
    assert "--- etc/conf.d/gpus.conf\n" in whole and "--- etc/gres.conf\n" not in whole
    assert "+Name=gpu File=/dev/nvidia[4-7] Cores=16-31" in out
    assert run(*files, "-o", "right")[0] == 1
    assert Path("right/gres.conf").read_text() == "Include conf.d/gpus.conf\n"
    fixed = Path("right/conf.d/hpc-nodes.conf").read_text()
    assert "SelectType=select/cons_tres\n" in fixed
    again = run("check", "right/gres.conf", "right/slurm.conf", "--host", "gpu8.toml")[1]
    assert "gres-cores-wrong" not in again and "slurm-select-type" not in again


def test_files_outside_the_directory_are_not_read(run: Run) -> None:
    files = cluster_in_parts(Path("etc"))
    Path("secret").write_text("no line of Slurm's\n")
    Path("etc/link.conf").symlink_to(Path("secret").resolve())
    for name in ("../secret", str(Path("secret").resolve()), "link.conf"):
        with Path("etc/slurm.conf").open("a") as file:
            file.write(f"Include {name}\n")
    Path("etc/slurm.conf").write_text(Path("etc/slurm.conf").read_text() + "Include gone.conf\n")
    code, out, _ = run(*files)
    out = " ".join(out.split())
    assert code == 1 and out.count(": it is outside the directory of") == 3
    assert "Include gone.conf: no such file" in out
    Path("etc/gres.conf").write_text("Include ../s*t\nInclude conf.d/none*\n")
    stated = " ".join(run(*files)[1].split())
    assert "Include ../s*t: it is outside" in stated
    assert "Include conf.d/none*: no such file" in stated
    Path("etc/gres.conf").write_text("Include conf.d/gp*.conf\n")
    assert "gres-cores-wrong" in run(*files)[1]
    # A whole path into the directory is one of the directory.
    absolute = Path("etc/conf.d/gpus.conf").resolve()
    Path("etc/gres.conf").write_text(f"Include {absolute}\n")
    assert "gres-cores-wrong" in run(*files)[1]


def test_a_damaged_file_names_its_line(run: Run) -> None:
    Path("gres.conf").write_text("\nName=gpu Cores=x\n")
    Path("slurm.conf").write_text("GresTypes=gpu\n")
    code, _, err = run("check", "gres.conf", "slurm.conf", "--host", "gpu8.toml")
    assert code == 2 and "gres.conf:2: expected core numbers" in err
