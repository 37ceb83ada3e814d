"""Hostile and damaged files and listings: a result, or an error that says where."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.cluster.slurm.audit import audit
from homenode.cluster.slurm.check import check
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.correction import correct
from homenode.cluster.slurm.gres import list_node_definitions, parse_gres_lines
from homenode.cluster.slurm.job_allocation import build_allocation, node_machine
from homenode.cluster.slurm.record import build_recorded_allocation, parse_record
from homenode.cluster.slurm.scontrol import Job, parse_scontrol_jobs
from homenode.cluster.slurm.slurm_nodes import read_shapes
from homenode.cluster.slurm.squeue import parse_squeue_jobs
from homenode.errors import ParseError
from tests.mutations import MUTATIONS, mutations, survives
from tests.slurm.gpu_nodes import (
    TESTBED,
    Listed,
    machine,
    scontrol_text,
    squeue_2205,
    squeue_2302,
    squeue_2405,
)
from tests.slurm.hostile_jobs import FIELDS, FORGED, PIECES, Said, document, listing
from tests.slurm.test_commands import Run, run  # noqa: F401 - a fixture
from tests.slurm.test_config import GRES
from tests.slurm.test_record import RECORD

NUMBERS = {"2", "3", "4"}
TRUTH = {job.number: job for job in parse_scontrol_jobs(listing(map(Said, (2, 3, 4))))}

WORDS = st.dictionaries(
    st.sampled_from(FIELDS), st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
)


def said(words: dict[str, str], hostile: int = 3) -> list[Said]:
    """Three jobs, of which one has a hostile user."""
    return [Said(number, words if number == hostile else {}) for number in (2, 3, 4)]


def unlike(job: Job) -> bool:
    """True where a job that can be read is not as Slurm knows it."""
    true = TRUTH.get(job.number)
    return job.unreadable is None and (true is None or _told(job) != _told(true))


def _told(job: Job) -> tuple[object, ...]:
    return job.id, job.state, job.user, job.shares


def test_the_listings_of_these_tests_are_read() -> None:
    assert set(TRUTH) == NUMBERS and all(job.unreadable is None for job in TRUTH.values())
    assert {job.queue_wait_s for job in TRUTH.values()} == {1.0}
    assert [job.shares[0].gpus.indices for job in TRUTH.values()] == [(0, 5)] * 3


@given(WORDS, st.sampled_from([2, 3, 4]))
def test_where_squeue_lists_the_jobs_no_text_lies(words: dict[str, str], hostile: int) -> None:
    jobs = parse_scontrol_jobs(listing(said(words, hostile)), listed_jobs=NUMBERS)
    assert not [job for job in jobs if unlike(job)]
    assert {job.number for job in jobs} == NUMBERS


@given(WORDS, st.sampled_from([2, 3, 4]))
def test_a_stored_text_lies_about_no_other_job(words: dict[str, str], hostile: int) -> None:
    jobs = parse_scontrol_jobs(listing(said(words, hostile)))
    others = [job for job in jobs if job.number in NUMBERS - {str(hostile)}]
    assert not [job for job in others if unlike(job)]
    assert {job.number for job in jobs} >= NUMBERS


@given(WORDS, st.sampled_from([2, 3, 4]))
def test_json_lies_about_nothing(words: dict[str, str], hostile: int) -> None:
    jobs = parse_squeue_jobs(document(said(words, hostile)))
    assert [*map(_told, jobs)] == [*map(_told, parse_squeue_jobs(document(said({}))))]


@pytest.mark.parametrize(
    "name",
    [
        "x JobState=COMPLETED",
        "x UserId=root(0) ArrayJobId=3 ArrayTaskId=5",
        "x\nJobId=99 JobName=z",
        "x Nodes=gpu01 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:0)",
        "x\u2028JobId=99 JobName=z\u2028   JobState=COMPLETED",
        "x\x85   JobState=COMPLETED",
        "  ",
        "",
        "x" * 1000,
        "\x1b[31m\u202e",
        "\ufffd",
        '{"jobs": []}',
        "a|b",
    ],
)
@pytest.mark.parametrize("field", FIELDS)
def test_words_that_are_no_line_of_scontrols_change_nothing(field: str, name: str) -> None:
    jobs = parse_scontrol_jobs(listing(said({field: name})))
    assert [job.number for job in jobs] == ["2", "3", "4"]
    assert not [job for job in jobs if job.unreadable is not None or unlike(job)]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "line",
    [
        "   JobState=COMPLETED",
        "   UserId=root(0) GroupId=root(0) MCS_label=N/A",
        "     Nodes=gpu01 CPU_IDs=0-7 Mem=1 GRES=gpu:1(IDX:0)",
        "   NodeList=gpu01",
        "   MinCPUsNode=1",
    ],
)
def test_only_the_job_that_quotes_a_line_of_scontrol_is_omitted(field: str, line: str) -> None:
    jobs = parse_scontrol_jobs(listing(said({field: f"x\n{line}"})))
    assert [job.unreadable is None for job in jobs] == [True, False, True]


@pytest.mark.parametrize("field", FIELDS)
def test_a_forged_record_of_another_job_leaves_both_out(field: str) -> None:
    forged = f"x\n{FORGED}\n   \n\nJobId=4 JobName=z\n{FORGED}"
    jobs = parse_scontrol_jobs(listing(said({field: forged})), listed_jobs=NUMBERS)
    assert {job.number for job in jobs if job.unreadable is None} == {"2"}
    assert {job.number for job in jobs} == NUMBERS


@pytest.mark.parametrize("field", FIELDS)
def test_a_record_of_a_job_that_squeue_does_not_list_counts_for_nothing(field: str) -> None:
    forged = f"x\n{FORGED}\n   \n\nJobId=99 JobName=z\n{FORGED}"
    jobs = parse_scontrol_jobs(listing(said({field: forged})), listed_jobs=NUMBERS)
    assert [job.number for job in jobs] == ["2", "3", "4"]
    assert [job.unreadable is None for job in jobs] == [True, False, True]
    assert "job 99" in str(jobs[1].unreadable)


def test_a_record_that_was_cut_off_is_named() -> None:
    text = listing(map(Said, (2, 3)))
    start = text.index("JobId=3 ")
    for end in range(start + 6, text.index("   MinCPUsNode", start)):
        first, second = parse_scontrol_jobs(text[:end])
        assert first == TRUTH["2"] and second.unreadable is not None


@pytest.mark.parametrize("time", ["Unknown", "2026-13-01T10:00:00", "0000-01-01T10:00:00", "x y"])
def test_a_time_that_is_none_is_not_known(time: str) -> None:
    text = listing([Said(2)]).replace("2026-11-22T22:33:33 End", f"{time} End")
    (job,) = parse_scontrol_jobs(text)
    assert job.unreadable is None and job.queue_wait_s is None


def test_a_job_that_runs_and_shows_no_cpus_is_named() -> None:
    lines = [line for line in listing([Said(2)]).splitlines(True) if "     Nodes=" not in line]
    (job,) = parse_scontrol_jobs("".join(lines))
    assert "-d" in str(job.unreadable)
    entry = Said(2).entry | {"job_resources": None}
    (job,) = parse_squeue_jobs(json.dumps({"jobs": [entry]}))
    assert job.id == "2" and job.unreadable is not None


@pytest.mark.parametrize("state", ["SIGNALING", "RESIZING"])
def test_a_job_that_its_user_signals_runs_all_the_same(state: str) -> None:
    text = listing([Said(2)]).replace("JobState=RUNNING", f"JobState={state}")
    (job,) = parse_scontrol_jobs(text)
    (listed,) = parse_squeue_jobs(json.dumps({"jobs": [Said(2).entry | {"job_state": state}]}))
    assert job.runs and job.shares and listed.runs and listed.shares


def test_one_odd_entry_of_a_document_is_left_out_by_name() -> None:
    odd = [
        Said(2).entry | {"job_state": 7},
        Said(3).entry | {"gres_detail": ["gpu:x:y:z"]},
        Said(5).entry | {"job_resources": {"allocated_nodes": 7}},
        "text",
        {},
    ]
    jobs = parse_squeue_jobs(json.dumps({"jobs": [*odd, Said(4).entry]}))
    assert [job.id for job in jobs] == ["2", "3", "5", "jobs[3]", "jobs[4]", "4"]
    assert [job.unreadable is None for job in jobs] == [False] * 5 + [True]


def test_jobs_left_out_are_a_warning_that_names_each() -> None:
    jobs = [Job(str(number), str(number), "", None, "", (), unreadable="x") for number in range(20)]
    (finding,) = audit((), jobs).findings
    assert finding.id == "job-unreadable" and finding.is_bad
    assert finding.subject == "jobs " + ", ".join(map(str, range(20)))


def test_an_audit_says_which_jobs_it_left_out(run: Run) -> None:  # noqa: F811 - a fixture
    Path("gpu8.toml").write_text(TESTBED)
    Path("odd.txt").write_text(listing(said({"comment": "x\n   JobState=COMPLETED"})))
    code, out, _ = run("audit", "--jobs", "odd.txt", "--host", "gpu8.toml")
    assert code == 1 and "warning   job 3 " in out and "job-unreadable" in out
    assert "jobs that a comment" in " ".join(out.split())
    # Named too where it alone was asked for.
    code, out, _ = run("audit", "3", "--jobs", "odd.txt", "--host", "gpu8.toml")
    assert code == 1 and "job-unreadable" in out
    Path("odd.json").write_text(document(said({"comment": "x\n   JobState=COMPLETED"})))
    code, out, _ = run("audit", "--jobs", "odd.json", "--host", "gpu8.toml")
    assert code == 1 and "job-unreadable" not in out


NODE = """\
NodeName={name} Arch=x86_64 CoresPerSocket=16
   CPUAlloc=16 CPUEfctv=64 CPUTot=64 CPULoad=0.53
   AvailableFeatures={features}
   ActiveFeatures=(null)
   Gres=gpu:h100:8(S:0-1)
   NodeAddr=127.0.0.1 NodeHostName=vm Port=24238 Version=22.05.8
   OS=Linux 6.1 #1 SMP
   RealMemory=512000 AllocMem=800 FreeMem=22518 Sockets=2 Boards=1
   State=MIXED ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=whole,parts
   BootTime=2026-11-22T22:21:45 SlurmdStartTime=2026-11-22T22:33:11
   Comment={comment}

"""


@pytest.mark.parametrize(
    "comment",
    [
        "c Sockets=1",
        "c Gres=gpu:1g.10gb:7",
        "c\n   State=IDLE ThreadsPerCore=1",
        "c\nNodeName=gpu02 CoresPerSocket=1 CPUTot=1 Sockets=1 ThreadsPerCore=1",
        "c\n\nNodeName=gpu01 CoresPerSocket=1 CPUTot=1 Sockets=1 ThreadsPerCore=1",
    ],
)
def test_a_nodes_comment_gives_no_node_another_shape(comment: str) -> None:
    true = read_shapes(NODE.format(name="gpu01", features="a", comment="c"), "nodes")["gpu01"]
    assert true is not None
    text = NODE.format(name="gpu01", features="a", comment=comment)
    text += NODE.format(name="gpu02", features="a", comment="c")
    for stored in (text, text.replace("\n   ", " ")):
        shapes = read_shapes(stored, "nodes")
        assert set(shapes.values()) <= {true, None} and None in shapes.values()
        assert shapes.keys() == {"gpu01", "gpu02"}


def test_jobs_of_a_node_that_cannot_be_read_are_not_judged(run: Run) -> None:  # noqa: F811 - a fixture
    Path("jobs.json").write_text(document([Said(2)]))
    Path("nodes.txt").write_text(2 * NODE.format(name="gpu02", features="a", comment="c"))
    words = ("--jobs", "jobs.json", "--host", "gpu8.toml", "--nodes", "nodes.txt")
    code, out, _ = run("audit", *words)
    assert code == 5 and out.startswith("nothing was checked: ") and "twice" in out


def test_nodes_are_read_from_json_too() -> None:
    node = {"name": "gpu01", "sockets": 2, "cores": 16, "threads": 2, "cpus": 64}
    wrapped = {"set": True, "infinite": False, "number": 64}
    text = NODE.format(name="gpu01", features="a", comment="c")
    for given_node in (node, node | {"cpus": wrapped, "comment": "Sockets=9"}):
        assert read_shapes(json.dumps({"nodes": [given_node]}), "n") == read_shapes(text, "n")
    assert read_shapes(json.dumps({"nodes": [{"name": "a"}]}), "n") == {"a": None}


JOBS = (
    Listed(7, ["gpu01"], range(16, 20), (0, 1, 4)),
    Listed(8, ["gpu01", "gpu02"], range(4), (2,), task=3),
)
NODES = (
    "NodeName=gpu01 Arch=x86_64 CoresPerSocket=16 \n   CPUAlloc=32 CPUTot=64\n"
    "   Gres=gpu:8\n   RealMemory=512000 Sockets=2 Boards=1\n   State=MIXED ThreadsPerCore=2\n"
)
SLURM = (
    "SelectType=select/cons_tres SelectTypeParameters=CR_Core  # here\nTaskPlugin=none\n"
    "NodeName=DEFAULT Sockets=2 CoresPerSocket=16 \\\n  ThreadsPerCore=2\n"
    "NodeName=node[01-03] Gres=gpu:h100:8(S:0-1) State=UNKNOWN\nInclude other.conf\n"
)


def audited(parse: Callable[[str], tuple[Job, ...]]) -> Callable[[str], object]:
    there = node_machine(machine(TESTBED))

    def audit_of(text: str) -> object:
        shapes = read_shapes(NODES, "nodes")
        return audit(
            build_allocation(job, share, there, shapes.get(share.node))
            for job in parse(text)
            for share in job.shares
        )

    return audit_of


LISTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "scontrol": (scontrol_text(JOBS), audited(parse_scontrol_jobs)),
    "squeue of 22.05": (squeue_2205(JOBS), audited(parse_squeue_jobs)),
    "squeue of 23.02": (squeue_2302(JOBS), audited(parse_squeue_jobs)),
    "squeue of 24.05": (squeue_2405(JOBS), audited(parse_squeue_jobs)),
    "show node": (NODES, lambda text: read_shapes(text, "nodes")),
    "record": (RECORD, lambda text: audit([build_recorded_allocation(parse_record(text, "r"))])),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_a_damaged_listing_is_audited_or_refused(name: str) -> None:
    text, parse = LISTINGS[name]
    assert survives(parse, text, MUTATIONS) > 0


def test_a_damaged_configuration_is_read_or_refused_with_its_line() -> None:
    read = 0
    for damaged in mutations(GRES + SLURM, MUTATIONS):
        try:
            config = parse_config(damaged, "file")
            parse_gres_lines(config)
            list_node_definitions(config)
        except ParseError as error:
            assert error.line is not None and 1 <= error.line <= damaged.count("\n") + 1, damaged
        else:
            read += 1
    assert read > 0


def test_damaged_files_are_checked_and_set_right_or_refused_with_a_line() -> None:
    host = machine(TESTBED)
    for damaged in mutations(GRES + SLURM, MUTATIONS // 5):
        try:
            files = parse_config(damaged, "gres.conf"), parse_config(damaged, "slurm.conf")
            check(*files, host)
            corrected = correct(*files, host)
            for source, text in corrected.items():
                parse_config(text, source)
        except ParseError as error:
            assert error.line is not None, damaged
