"""The study of bindings and queues: which jobs, what their scripts say, how far they are."""

import io
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cluster.arguments import SharedJobShape, StudyOptions
from homenode.cluster.slurm.client import will_pass
from homenode.cluster.slurm.slurm_nodes import ClusterNode, parse_nodes
from homenode.cluster.slurm.squeue import JobState, QueuedJob, needs_somebody, parse_states
from homenode.cluster.slurm.study.directory import StudyDirectory
from homenode.cluster.slurm.study.experiments import (
    Experiment,
    NodeSharing,
    Study,
    check_options,
    choose_bound_nodes,
    choose_nodes,
    format_script_name,
    job_name,
    plan_experiments,
    render_script,
)
from homenode.cluster.slurm.study.run import find_unrecorded, list_statuses
from homenode.errors import UsageError
from homenode.measure.experiment import Progress, TaskState, TaskStatus
from homenode.process import run
from homenode.show.terminal_text import PrintableConsole
from homenode.show.trial_text import build_progress_view, format_missing
from homenode.text import format_duration
from homenode.vm.sources import load_host
from tests.command_line import homenode

GH200 = tuple(
    ClusterNode(f"gh{n:02d}", partition, partition == "gh200", "idle", 288, 480_000, 4)
    for n in (1, 2, 3)
    for partition in ("gh200", "gh200_shared")
)
OPTIONS = StudyOptions(partition_shared="gh200_shared", nodes=3, rounds=1)
SLICES = (SharedJobShape(1, 4), SharedJobShape(1, 4, "gpu:1g.10gb"))


def planned(options: StudyOptions = OPTIONS) -> tuple[Experiment, ...]:
    whole, shared = choose_nodes(GH200, options)
    hosts = dict.fromkeys((node.name for node in whole), load_host("gh200x4"))
    return plan_experiments(whole, shared, hosts, options)


def study(options: StudyOptions = OPTIONS) -> Study:
    whole, shared = choose_nodes(GH200, options)
    return Study("abc123", options, whole, shared, "gh200x4", (), planned(options))


def test_a_gh200_node_of_36_numa_nodes_gets_four_exclusive_jobs() -> None:
    found = [one for one in planned() if one.mode is NodeSharing.EXCLUSIVE]
    assert sorted((one.nodes, one.numa) for one in found) == [
        ((f"gh{n:02d}",), numa) for n in (1, 2, 3) for numa in range(4)
    ]
    assert {one.gpus for one in found} == {4}


def test_binding_to_gpu_memory_is_refused_with_the_right_nodes() -> None:
    host = load_host("gh200x4")
    with pytest.raises(UsageError) as refused:
        choose_bound_nodes(host, StudyOptions(numa=(0, 12)))
    assert "--numa 12: gh200x4 has CPUs and memory on nodes 0-3" in refused.value.message
    assert "node 12 is memory of GPU 0019:01:00.0" in refused.value.message
    with pytest.raises(UsageError, match="--numa 99"):
        choose_bound_nodes(host, StudyOptions(numa=(99,)))


def test_shared_jobs_run_alone_and_together_one_after_the_other() -> None:
    of_node = [one for one in planned() if one.nodes == ("gh01",)]
    by_id = {one.id: one for one in of_node}
    ids = [f"shared-{n}gpu-gh01-{mode}-r1" for n in (1, 2) for mode in ("alone", "together")]
    shared = [by_id[name] for name in ids]
    assert by_id.keys() == {*ids, *(f"exclusive-gh01-numa{numa}-r1" for numa in range(4))}
    assert [one.jobs for one in shared] == [1, 4, 1, 2]
    assert [one.cpus for one in shared] == [72, 72, 144, 144]
    for before, one in pairwise(of_node):
        assert one.after == (before.id,)
    assert of_node[0].after == ()


def test_each_round_on_a_node_is_a_block_with_every_job_in_an_order_of_its_own() -> None:
    found = [one for one in planned(replace(OPTIONS, rounds=3)) if one.nodes == ("gh02",)]
    orders = []
    for number in range(3):
        of_round = found[8 * number : 8 * number + 8]
        assert {one.id[-3:] for one in of_round} == {f"-r{number + 1}"}
        # Of three nodes it is the second.
        assert {one.block for one in of_round} == {3 * number + 1}
        orders.append([one.id[:-3] for one in of_round])
    assert len({frozenset(order) for order in orders}) == 1
    assert len({tuple(order) for order in orders}) == 3
    for before, one in pairwise(found):
        assert one.after == (before.id,)


def test_mig_slices_are_shared_jobs_of_their_own() -> None:
    made = planned(StudyOptions(nodes=1, rounds=1, shapes=SLICES))
    found = [one for one in made if one.gres != "gpu"]
    ids = {f"shared-1slice-1g.10gb-gh01-{mode}-r1" for mode in ("alone", "together")}
    assert {one.id for one in found} == ids
    assert "#SBATCH --gres=gpu:1g.10gb:1" in render_script(found[0], OPTIONS, "x")


def test_nodes_of_both_queues_and_idle_ones_come_first() -> None:
    nodes = (
        ClusterNode("a", "whole", True, "idle", 64, 1000, 8),
        ClusterNode("b", "whole", True, "allocated", 64, 1000, 8),
        ClusterNode("b", "parts", False, "allocated", 64, 1000, 8),
        ClusterNode("c", "whole", True, "down", 64, 1000, 8),
    )
    options = StudyOptions(partition_shared="parts", nodes=2)
    whole, shared = choose_nodes(nodes, options)
    assert [node.name for node in whole] == ["a", "b"]
    assert [node.name for node in shared] == ["b"]
    with pytest.raises(UsageError, match="no node z with GPUs in partition whole"):
        choose_nodes(nodes, StudyOptions(node_list=("z",)))
    apart = StudyOptions(partition_shared="parts", node_list=("a", "b", "a"))
    whole, shared = choose_nodes(nodes, apart)
    assert [node.name for node in whole] == ["a", "b"]
    assert [node.name for node in shared] == ["b"]
    with pytest.raises(UsageError, match=r"--nodes 9: expected as many nodes with GPUs .* found 3"):
        choose_nodes(nodes, StudyOptions(nodes=9))
    with pytest.raises(UsageError, match="no such partition"):
        choose_nodes(nodes, StudyOptions(partition_exclusive="gone"))


@pytest.mark.parametrize(
    "options",
    [
        StudyOptions(partition_exclusive="a b"),
        StudyOptions(account="x\n#SBATCH --uid=0"),
        StudyOptions(partition_shared="$(id)"),
        StudyOptions(node_list=("--help",)),
        StudyOptions(shapes=(SharedJobShape(1, 2, "gpu;rm"),)),
        StudyOptions(shapes=(SharedJobShape(0, 2),)),
        StudyOptions(tests=("stream --force",)),
        StudyOptions(tests=("steram",)),
        StudyOptions(app=("a",)),
        StudyOptions(app=("a",), metric="no group"),
        StudyOptions(between_nodes=True),
        StudyOptions(nodes=2, mpi="pmix"),
        StudyOptions(lower_is_better=True),
    ],
)
def test_what_must_not_stand_in_a_script_is_refused(options: StudyOptions) -> None:
    with pytest.raises(UsageError):
        check_options(options)


def test_a_shared_partition_of_slices_alone_is_studied_by_slice() -> None:
    nodes = (GH200[0], *parse_nodes("m1|slices|idle|64|1000|gpu:1g.10gb:7"))
    options = StudyOptions(partition_shared="slices", rounds=1, shapes=SLICES)
    whole, shared = choose_nodes(nodes, options)
    found = plan_experiments(whole, shared, {"gh01": load_host("gh200x4")}, options)
    ids = {f"shared-1slice-1g.10gb-m1-{mode}-r1" for mode in ("alone", "together")}
    assert {one.id for one in found if one.nodes == ("m1",)} == ids


HOSTILE = StudyOptions(
    partition_shared="gh200_shared",
    nodes=3,
    rounds=1,
    between_nodes=True,
    mpi="pmix",
    app=("./my app", "$(touch pwned)", "it's", "`id`", "a\nb"),
    metric="(x)",
    homenode="/srv/with space/homenode",
    setup="/srv/a'b/setup.sh",
    account="acc",
    qos="high",
)


@pytest.mark.parametrize(
    "one", {one.mode: one for one in planned(HOSTILE)}.values(), ids=lambda one: one.id
)
def test_scripts_pass_bash_and_quote_what_came_from_outside(one: Experiment) -> None:
    text = render_script(one, HOSTILE, "abc123")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert text.startswith("#!/bin/bash\n# " + one.id)
    assert "\nset -u\n" in text
    head = text[: text.index("\n\n")]
    assert f"#SBATCH --job-name=hn-abc123-{one.id}" in head
    assert "#SBATCH --account=acc" in head
    if one.mode in (NodeSharing.EXCLUSIVE, NodeSharing.ALONE):
        # What bash makes of the words is what the user wrote.
        source = text[text.index('"$homenode" bench') : text.index(') >"$here/bench.txt"')]
        given = f"homenode={shlex.quote(HOSTILE.homenode)} name=e-task0-5.0 attempt=5.0"
        shown = run(("bash", "-c", f"results=/r {given}\nprintf '%s\\0' {source}"), 60)
        words = shown.stdout_or_raise().split("\0")[:-1]
        assert words[:4] == [HOSTILE.homenode, "bench", "--name", "e-task0-5.0"]
        assert tuple(shlex.split(words[words.index("--app") + 1])) == HOSTILE.app
        assert words[words.index("--metric") + 1] == HOSTILE.metric
        assert words[words.index("--block") + 1] == str(one.block)


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    directory = StudyDirectory(tmp_path / "study")
    # Not the hostile words: it asks whether those are meant to stay as they are.
    made = directory.create(study(replace(HOSTILE, app=("gmx", "mdrun", "-s", "my input.tpr"))))
    directory.close()
    kinds = {one.mode: format_script_name(one) for one in made.experiments}
    words = ("shellcheck", "-e", "SC1091", *kinds.values())
    subprocess.run(words, cwd=tmp_path / "study", check=True)


def test_the_collective_job_goes_round_a_ring_of_its_nodes() -> None:
    (one,) = [one for one in planned(HOSTILE) if one.mode is NodeSharing.COLLECTIVE]
    text = render_script(one, HOSTILE, "x")
    steps = [line for line in text.splitlines() if line.startswith("all_reduce ")]
    nodes = "gh01 gh02 gh03 gh01,gh02 gh02,gh03 gh03,gh01 gh01,gh02,gh03"
    assert [step.split()[-1] for step in steps] == nodes.split()
    assert "srun --mpi=pmix" in text


SINFO = """\
gpu01|parts|idle|64|512000|gpu:h100:8(S:0-1)
gpu01|whole*|mixed~|64|512000|gpu:h100:8(S:0,1),nic:2
cpu01|cpu|idle*|64|256000+|(null)
mig01|mig|drained|128|1000000|gpu:1g.10gb:7(S:0),gpu:a100:6(S:0-1)
bad name|p|idle|1|1|gpu:1
$(id)|p|idle|1|1|gpu:1
"""


def test_nodes_of_sinfo_are_read_and_odd_names_left_out() -> None:
    nodes = parse_nodes(SINFO)
    assert [(n.name, n.partition, n.is_default, n.state, n.gpus) for n in nodes] == [
        ("gpu01", "parts", False, "idle", 8),
        ("gpu01", "whole", True, "mixed", 8),
        ("cpu01", "cpu", False, "idle", None),
        ("mig01", "mig", False, "drained", 6),
    ]
    # A job that asks that node for any GPU may get a slice: it asks for the type.
    assert [node.gpu_type for node in nodes] == [None, None, None, "a100"]
    shapes = (SharedJobShape(1, 2), SLICES[1])
    options = StudyOptions(partition_exclusive="mig", rounds=1, shapes=shapes)
    whole, shared = choose_nodes(nodes, options)
    planned = plan_experiments(whole, shared, {"mig01": load_host("hgx-h100")}, options)
    texts = [render_script(one, options, "x") for one in planned]
    asked = [line for text in texts for line in text.splitlines() if "--gres=" in line]
    gres = Counter({f"#SBATCH --gres=gpu:{name}": 2 for name in ("a100:6", "a100:1", "1g.10gb:1")})
    assert Counter(asked) == gres


SQUEUE = """\
12|N/A|RUNNING@hn-abc123-a@None@
13|0|COMPLETED@hn-abc123-b@None@
13|1|CANCELLED@hn-abc123-b@None@
14|[0-3%2]|PENDING@hn-abc123-c@ReqNodeNotAvail, UnavailableNodes:gpu[02|03]@
15|N/A|NODE_FAIL@hn-abc123-d@NodeDown@
16|N/A|OUT_OF_MEMORY@hn-abc123-e@OutOfMemory@
not a line
"""


def test_jobs_of_squeue_are_read() -> None:
    found = [(job.job, job.task, job.state, job.reason) for job in parse_states(SQUEUE, "@")]
    assert found == [
        ("12", None, JobState.RUNNING, ""),
        ("13", 0, JobState.COMPLETED, ""),
        ("13", 1, JobState.CANCELLED, ""),
        ("14", None, JobState.PENDING, "ReqNodeNotAvail, UnavailableNodes:gpu[02|03]"),
        ("15", None, JobState.LOST, "NodeDown"),
        ("16", None, JobState.FAILED, "OutOfMemory"),
    ]


@pytest.mark.parametrize(
    "name", ["a|b", "a\n17|N/A|RUNNING|hn-abc123-a|gpu01|None", "a\n17|N/A|RUNNING", "\u2028|\n"]
)
def test_a_name_adds_no_job_and_moves_no_column(name: str) -> None:
    text = SQUEUE.replace("hn-abc123-a", name)
    first, *others = parse_states(text, "@")
    assert (first.job, first.state, first.name, first.reason) == ("12", JobState.RUNNING, name, "")
    assert tuple(others) == parse_states(SQUEUE, "@")[1:]


def test_reasons_that_need_somebody_are_distinguished_from_those_that_pass() -> None:
    assert needs_somebody("Nodes required for job are DOWN, DRAINED or reserved for jobs")
    assert needs_somebody("JobHeldAdmin")
    assert needs_somebody("Job's QOS not permitted to use this partition (parts allows a not b)")
    assert not needs_somebody("Priority")
    assert will_pass("sbatch: error: Unable to contact slurm controller (connect failure)")
    assert will_pass("Socket timed out on send/recv operation")
    assert not will_pass("Batch job submission failed: Invalid partition name specified")


def queued(
    one: Experiment, job: str, task: int | None, state: JobState, said: str, reason: str = ""
) -> QueuedJob:
    return QueuedJob(job, task, state, said, job_name("abc123", one.id), reason)


def progress_of(
    made: Study,
    rows: tuple[QueuedJob, ...],
    done: Collection[tuple[str, int]] = (),
    exits: Mapping[tuple[str, int], str] | None = None,
) -> Progress:
    return Progress(tuple(list_statuses(made, rows, done, exits or {})))


def test_files_count_more_than_what_the_queue_says() -> None:
    made = study()
    second = next(one for one in made.experiments if one.jobs == 4)
    first, third, fourth, *_ = (one for one in made.experiments if one.jobs == 1)
    jobs = ((first.id, "1"), (second.id, "2"), (third.id, "3"))
    made = replace(made, jobs=jobs)
    rows = (
        queued(first, "1", None, JobState.CANCELLED, "CANCELLED"),
        queued(second, "2", 0, JobState.RUNNING, "RUNNING"),
        queued(second, "2", 2, JobState.CANCELLED, "CANCELLED"),
        queued(second, "2", None, JobState.PENDING, "PENDING", "ReqNodeNotAvail, Unavail"),
        # A number that a controller without a memory has given again, to another job.
        queued(first, "3", None, JobState.RUNNING, "RUNNING"),
    )
    found = progress_of(made, rows, {(first.id, 0)}, {(third.id, 0): "3"})
    by_task = {(task.id, task.part): task for task in found.tasks}
    assert by_task[first.id, 0].state is TaskState.DONE
    assert by_task[second.id, 0].state is TaskState.RUNNING
    assert by_task[second.id, 1].state is TaskState.PENDING
    assert by_task[second.id, 2].state is TaskState.CANCELLED
    lost = by_task[third.id, 0]
    assert (lost.state, lost.reason) == (TaskState.LOST, "its script ended with exit status 3")
    assert by_task[fourth.id, 0].state is TaskState.WAITING
    assert not found.is_blocked
    assert not found.is_settled


def test_a_job_that_slurm_gave_up_on_and_holds_is_lost() -> None:
    made = study()
    one = made.experiments[0]
    made = replace(made, jobs=((one.id, "1"),))
    owned = queued(one, "1", None, JobState.PENDING, "PENDING", "launch failed requeued held")
    first = progress_of(made, (owned,)).tasks[0]
    assert (first.state, first.reason) == (TaskState.LOST, "launch failed requeued held")


def test_a_study_is_blocked_where_all_that_is_left_waits_for_somebody() -> None:
    options = replace(OPTIONS, nodes=1, shapes=(SharedJobShape(1, 1),), numa=(0,))
    made = study(options)
    alone, whole = made.experiments
    jobs = ((alone.id, "0"), (whole.id, "1"))
    made = replace(made, jobs=jobs)
    drained = queued(alone, "0", None, JobState.PENDING, "PENDING", "ReqNodeNotAvail, Unavail")
    behind = queued(whole, "1", None, JobState.PENDING, "PENDING", "Dependency")
    assert progress_of(made, (drained, behind)).is_blocked
    no_room = replace(made, jobs=jobs[:1])
    assert progress_of(no_room, (drained,)).is_blocked
    waits = queued(alone, "0", None, JobState.PENDING, "PENDING", "Priority")
    assert not progress_of(made, (waits, behind)).is_blocked


def test_a_job_that_was_submitted_and_not_written_down_is_found_by_its_name() -> None:
    made = study()
    one = made.experiments[0]
    row = QueuedJob("77", None, JobState.PENDING, "PENDING", job_name("abc123", one.id), "")
    other = QueuedJob("78", None, JobState.PENDING, "PENDING", "hn-zzz-x", "")
    assert list(find_unrecorded(made, (row, other))) == [(one.id, "77")]
    assert format_script_name(one) == f"jobs/{one.id}.sbatch"


def test_the_view_of_a_large_study_shows_what_needs_a_look_and_counts_the_rest() -> None:
    tasks = [TaskStatus(f"e{n}", 0, TaskState.DONE, str(n), "") for n in range(90)]
    tasks.append(TaskStatus("bad", 0, TaskState.FAILED, "99", "NonZeroExitCode"))
    out = io.StringIO()
    PrintableConsole(file=out, width=80).print(build_progress_view(Progress(tuple(tasks))))
    lines = out.getvalue().splitlines()
    assert len(lines) < 40
    assert "NonZeroExitCode" in lines[1], "below the heads"
    assert "61 more" in lines[-2]
    assert lines[-1] == "90 of 91 jobs done, 1 failed"
    (only,) = format_missing(Progress(tuple(tasks)).list_missing())
    assert only == "1 failed: NonZeroExitCode: bad (job 99)"


def test_a_dry_run_needs_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("-o", tmp_path / "study", "--host", "gh200x4", "--nodelist", "a1,a2", "--dry-run")
    done = homenode("slurm", "study", *words, whole=True)
    assert done.exit_code == 0
    scripts = list((tmp_path / "study/jobs").iterdir())
    jobs = f"{len(scripts)} jobs of up to 30 minutes each"
    assert done.stdout == f"wrote {tmp_path}/study/jobs: {jobs}, none submitted\n"
    time = format_duration(30 * 60 * len(scripts) / 2)  # two nodes, a job at a time on each
    assert f"takes at most {time}, if no job waits" in done.stderr
    text = min(path for path in scripts if "-a1-" in path.name).read_text()
    assert "--gres=gpu:4" in text and "--nodelist=a1" in text
    assert "--partition=PARTITION" in text and "replace PARTITION by" in done.stderr
    assert not (tmp_path / "study/study.jsonl").exists(), "no study has begun"
    assert (tmp_path / "study/log").is_dir(), "sbatch by hand writes there"
    reported = homenode("slurm", "report", tmp_path / "study", whole=True)
    assert reported.exit_code == 2 and "scripts of a dry run" in reported.stderr
    assert homenode("slurm", "study", *words, whole=True).exit_code == 0
    fewer = homenode("slurm", "study", *words, "--shared", "2x4", whole=True)
    assert fewer.exit_code == 3 and "a script of another study" in fewer.stderr
    words = ("-o", tmp_path / "other", *words[2:])
    fewer = homenode("slurm", "study", *words, "--shared", "2x4", whole=True)
    assert "warning: --shared 2x4: a2 runs 2 jobs of that size at once" in fewer.stderr
    cpus = homenode("slurm", "study", *words, "--cpus-per-gpu", "73", whole=True)
    assert cpus.exit_code == 2 and "(1 to 72)" in cpus.stderr, "four jobs do not fit at once"
    more = homenode("slurm", "study", *words, "--nodes", "5", whole=True)
    assert more.exit_code == 2 and "--nodelist names 2 nodes" in more.stderr
