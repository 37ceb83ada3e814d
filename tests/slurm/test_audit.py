"""The audit of jobs, and which of a job's processes count."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product

import pytest

from homenode.cluster.slurm.audit import audit
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.gres import read_device_order
from homenode.cluster.slurm.job_allocation import (
    JobAllocation,
    build_allocation,
    build_core_order,
    build_gres_allocation,
    node_machine,
)
from homenode.cluster.slurm.record import add_tasks, look_command, parse_look
from homenode.cluster.slurm.scontrol import Job, is_asked_for, parse_scontrol_jobs
from homenode.cluster.slurm.slurm_nodes import NodeShape
from homenode.cluster.slurm.squeue import parse_squeue_jobs
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.findings import Finding, Severity
from homenode.machine.topology import Host
from homenode.vm.sources import load_host
from tests.slurm.gpu_nodes import (
    MI250X,
    TESTBED,
    Listed,
    machine,
    scontrol_text,
    squeue_2205,
    squeue_2302,
    squeue_2405,
)

SHAPE = NodeShape(2, 16, 2, 64)
FILL = Listed(6, ["gpu01"], range(16))
PLANTED = Listed(7, ["gpu01"], range(16, 20), (0, 1, 4, 5, 6, 7))
"""The misplacement of a scheduler whose socket 0 is full: GPUs 0 and 1 are there, no CPU is."""
GOOD = Listed(8, ["gpu02"], range(4), (0, 1))
BOTH = Listed(9, ["gpu01", "gpu02"], range(20, 22), (5,))
TASK = Listed(11, ["gpu02"], range(4, 6), (2,), task=1)
JOBS = (FILL, PLANTED, GOOD, BOTH, TASK)

LAYOUTS: dict[str, Callable[[Iterable[Listed]], tuple[Job, ...]]] = {
    "scontrol": lambda jobs: parse_scontrol_jobs(scontrol_text(jobs)),
    "squeue of 22.05": lambda jobs: parse_squeue_jobs(squeue_2205(jobs)),
    "squeue of 23.02": lambda jobs: parse_squeue_jobs(squeue_2302(jobs)),
    "squeue of 24.05": lambda jobs: parse_squeue_jobs(squeue_2405(jobs)),
}


def owned(jobs: Iterable[Job], host: Host, shape: NodeShape | None = SHAPE) -> list[JobAllocation]:
    there = node_machine(host)
    return [build_allocation(job, share, there, shape) for job in jobs for share in job.shares]


def found(*listed: Listed, host: str = TESTBED, shape: NodeShape | None = SHAPE) -> list[Finding]:
    jobs = LAYOUTS["scontrol"](listed)
    return list(audit(owned(jobs, machine(host), shape)).findings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_tells_the_same_places(layout: str) -> None:
    jobs = LAYOUTS[layout](JOBS)
    assert [job.id for job in jobs] == ["6", "7", "8", "9", "11_1"]
    assert {job.state for job in jobs} == {"RUNNING"} and {job.user for job in jobs} == {"ada"}
    places = owned(jobs, machine(TESTBED))
    pus = "16-19,48-51 0-3,32-35 20-21,52-53 20-21,52-53 4-5,36-37"
    assert [str(place.pus) for place in places if place.gpus] == pus.split()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_planted_misplacement_is_named(layout: str) -> None:
    findings = audit(owned(LAYOUTS[layout](JOBS), machine(TESTBED)))
    bad = [f for f in findings.findings if f.severity is Severity.WARNING]
    assert [f.id for f in bad] == ["job-gpu-far"]
    assert bad[0].subject == "job 7 (train it) on gpu01"
    assert "gpu0 (0000:11:00.0), gpu1 (0000:12:00.0) are" in bad[0].expected
    assert bad[0].observed == "CPUs 16-19,48-51 on node 1"
    assert bad[0].cost == "distance 21 instead of 10"
    assert findings.checked[0].startswith("5 allocations of GPU jobs on 2 nodes: 4 local")


E0 = '[[root]]\nbus = 0xe0\nports = ["gpu"]\n'
"""A GPU on a node that is not known."""


@pytest.mark.parametrize(
    ("cores", "gpus", "host", "shape", "ids"),
    [
        # GPUs on both sides of a job that fits on one
        ([0, 16], (3, 4), TESTBED, SHAPE, ["job-gpus-spread"]),
        ([0, 16], range(6), TESTBED, SHAPE, []),
        ([0, 16], (0,), TESTBED, SHAPE, ["job-cpus-far"]),
        # The order of GPUs is not that of nodes.
        (range(24, 28), (0, 1), MI250X, NodeShape(4, 8, 2, 64), []),
        (range(4), (0, 1), MI250X, NodeShape(4, 8, 2, 64), ["job-gpu-far"]),
        ([0, 16], range(9), TESTBED + E0, SHAPE, ["job-unjudged"]),
        ([99], (0,), TESTBED, None, ["job-unjudged"]),
        ([0], (9,), TESTBED, SHAPE, ["job-unjudged"]),
    ],
)
def test_cores_and_gpus_of_a_job_are_judged_together(
    cores: Sequence[int], gpus: Sequence[int], host: str, shape: NodeShape | None, ids: list[str]
) -> None:
    job = Listed(1, ["gpu01"], cores, gpus)
    assert [finding.id for finding in found(job, host=host, shape=shape)] == ids


@pytest.mark.parametrize(
    ("host", "gpus", "words"),
    [("hgx-a100-80gb", "0,2", "numa_node_as_socket"), ("hgx-h100", "0,4", "one socket")],
)
def test_gpus_on_nodes_of_one_package_have_another_fix(host: str, gpus: str, words: str) -> None:
    text = scontrol_text([Listed(1, ["gpu01"], range(4), (0,))]).replace("IDX:0", f"IDX:{gpus}")
    text = text.replace("h100", host.split("-")[1])
    findings = audit(owned(parse_scontrol_jobs(text), load_host(host), None)).findings
    (spread,) = (f for f in findings if f.id == "job-gpus-spread")
    assert words in str(spread.fix)


def test_gpus_of_another_model_than_the_hosts_are_not_judged() -> None:
    text = scontrol_text([Listed(1, ["gpu01"], range(4), (0,))])
    for host, ids in (("hgx-a100-ibm", ["job-unjudged"]), ("hgx-h100", [])):
        findings = audit(owned(parse_scontrol_jobs(text), load_host(host), None)).findings
        assert [f.id for f in findings] == ids


def test_a_machine_unlike_its_node_is_not_judged() -> None:
    findings = found(PLANTED, FILL, shape=NodeShape(2, 32, 2, 128))
    assert [(f.id, f.severity) for f in findings] == [("job-unjudged", Severity.INCONCLUSIVE)]
    assert "2 x 32 x 2" in findings[0].observed


def test_a_gpu_without_a_node_is_not_judged() -> None:
    host = load_host("x86-2p2n8c16t-gpu-node-unknown")
    job = LAYOUTS["scontrol"]([Listed(1, ["n"], [0], (1,))])
    allocations = owned(job, host, NodeShape(2, 4, 2, 16))
    answer = audit(allocations)
    assert [f.id for f in answer.findings] == ["job-unjudged"]
    assert answer.checked[0].endswith("0 local to all of their GPUs, 0 not, 1 unknown")


def test_a_job_without_listed_cpus_is_not_local() -> None:
    document = json.loads(squeue_2205([GOOD]))
    for node in document["jobs"][0]["job_resources"]["allocated_nodes"]:
        node["sockets"] = {}
    answer = audit(owned(parse_squeue_jobs(json.dumps(document)), machine(TESTBED)))
    assert [(f.id, f.observed) for f in answer.findings] == [("job-unjudged", "Slurm lists none")]
    assert answer.checked[0].endswith("0 local to all of their GPUs, 0 not, 1 unknown")


def test_on_gh200_the_node_of_a_gpu_is_the_one_with_cpus() -> None:
    shape = NodeShape(4, 72, 1, 288)
    host = load_host("gh200x4")
    there = LAYOUTS["scontrol"]([Listed(1, ["n"], range(72, 80), (1,), threads=1)])
    assert audit(owned(there, host, shape)).findings == ()
    away = LAYOUTS["scontrol"]([Listed(1, ["n"], range(8), (1,), threads=1)])
    finding = audit(owned(away, host, shape)).findings[0]
    assert finding.id == "job-gpu-far" and finding.cost == "distance 40 instead of 10"


@pytest.mark.parametrize(
    ("host", "cores"),
    [
        ("x86-2p2n8c16t-pus-interleaved", ["0,8", "2,10", "4,12", "6,14", "1,9"]),
        ("xapi-2n16c2t", ["0-1", "2-3", "4-5"]),
        ("x86-2p2n8c8t-nodes-0-and-8", ["0", "1", "2", "3", "4"]),
    ],
)
def test_slurm_counts_socket_by_socket_on_any_numbering(host: str, cores: list[str]) -> None:
    order = build_core_order(load_host(host))
    assert [str(pus) for pus in order.pus[: len(cores)]] == cores


@pytest.mark.parametrize("host", ["x86-2p2n8c16t-pus-interleaved", "gh200x4", "hgx-h100"])
def test_all_ids_are_all_pus_once(host: str) -> None:
    there = load_host(host)
    order = build_core_order(there)
    ids = CpuSet(range(len(order.pus) * order.threads))
    assert order.pus_of_ids(ids, order.threads) == CpuSet(pu.index for pu in there.pus)
    assert len({order.pus_of_ids(CpuSet([i]), order.threads).bits for i in ids}) == len(ids)


def test_one_id_per_core_is_the_whole_core() -> None:
    order = build_core_order(machine(TESTBED))
    assert str(order.pus_of_ids(CpuSet([1]), 1)) == "1,33"


def test_a_node_that_schedules_cores_has_the_ids_of_their_threads_all_the_same() -> None:
    # As Slurm 22.05.8 told it of CPUs=32 Sockets=2 CoresPerSocket=16 ThreadsPerCore=2.
    text = scontrol_text([Listed(2, ["gpu01"], range(16, 20), (4,))])
    assert "CPU_IDs=32-33,34-35,36-37,38-39 " in text
    shape = NodeShape(2, 16, 2, 32)
    (place,) = owned(parse_scontrol_jobs(text), machine(TESTBED), shape)
    assert str(place.pus) == "16-19,48-51" and audit([place]).findings == ()


def test_jobs_are_found_by_their_number_their_task_and_their_array() -> None:
    job = LAYOUTS["squeue of 22.05"]([TASK])[0]
    assert is_asked_for(job, ()) and is_asked_for(job, ("11",)) and is_asked_for(job, ("11_1",))
    assert not is_asked_for(job, ("1",))


def test_parts_of_a_heterogeneous_job_are_found_by_its_number() -> None:
    text = scontrol_text([GOOD, FILL]).replace("JobId=6 ", "JobId=9 HetJobId=8 HetJobOffset=1 ")
    text = text.replace("JobId=8 JobN", "JobId=8 HetJobId=8 HetJobOffset=0 JobN")
    jobs = parse_scontrol_jobs(text)
    assert [job.id for job in jobs] == ["8+0", "8+1"]
    assert all(is_asked_for(job, ("8",)) for job in jobs)
    assert [is_asked_for(job, ("8+1",)) for job in jobs] == [False, True]


def test_one_line_a_job_is_refused() -> None:
    text = "\n".join(" ".join(block.split()) for block in scontrol_text(JOBS).split("\n\n"))
    with pytest.raises(ParseError, match="each field on its own line") as refused:
        parse_scontrol_jobs(text)
    assert "squeue --json" in str(refused.value.hint)


def test_no_jobs_and_no_listing_are_distinguished() -> None:
    assert parse_scontrol_jobs("No jobs in the system\n") == ()
    with pytest.raises(ParseError):
        parse_scontrol_jobs("scontrol: error\n")
    with pytest.raises(ParseError):
        parse_squeue_jobs('{"errors": []}')


def test_a_cancelled_array_is_called_by_its_number() -> None:
    text = scontrol_text([TASK]).replace("ArrayTaskId=1", "ArrayTaskId=4294967294")
    assert parse_scontrol_jobs(text)[0].id == "11"


def test_what_newer_parsers_add_is_no_harm() -> None:
    document = json.loads(squeue_2405([GOOD]))
    document["jobs"][0] |= {"job_state": ["RUNNING", "COMPLETING"], "new": {"set": False}}
    assert parse_squeue_jobs(json.dumps(document))[0].state == "COMPLETING"
    document["jobs"][0] |= {"job_state": ["RUNNING", "SIGNALING"]}
    assert parse_squeue_jobs(json.dumps(document))[0].runs


def test_a_whole_cluster_is_audited_job_by_job() -> None:
    jobs = []
    for node, quarter in product(range(1000), range(4)):
        cores = range(8 * quarter, 8 * quarter + 8) if node % 100 else range(16, 24)
        gpus = (2 * quarter, 2 * quarter + 1)
        jobs.append(Listed(4 * node + quarter, [f"n{node}"], cores, gpus))
    findings = audit(owned(parse_scontrol_jobs(scontrol_text(jobs)), machine(TESTBED)))
    far = [f for f in findings.findings if f.id == "job-gpu-far"]
    assert len(far) == 20 and len(findings.findings) == 20
    assert findings.checked[0].startswith("4000 allocations of GPU jobs on 1000 nodes: 3980 local")


ORDERED = """\
NodeName=gpu01 Name=gpu File=/dev/nvidia[7,5,6,4] Cores=16-31
NodeName=gpu01 Name=gpu File=/dev/nvidia[3,2] Cores=0-15
NodeName=gpu01 Name=gpu File=/dev/nvidia[0-1] Cores=0-15
"""


def placed(listed: Listed, gres: str) -> list[Finding]:
    order = read_device_order(parse_config(gres, "gres.conf"))
    there = node_machine(machine(TESTBED))
    (job,) = LAYOUTS["scontrol"]([listed])
    found = [build_allocation(job, s, there, SHAPE, order.list_numbers(s.node)) for s in job.shares]
    return list(audit(found).findings)


def test_numbers_are_places_in_gres_conf() -> None:
    # As a real Slurm gave them with these lines: CPU_IDs=0-7, IDX:4-6.
    job = Listed(1, ["gpu01"], range(4), (4, 5, 6))
    assert [f.id for f in found(job)] == ["job-gpu-far"]
    assert placed(job, ORDERED) == []
    assert [f.id for f in placed(replace(job, gpus=(0,)), ORDERED)] == ["job-gpu-far"]
    assert "4 (" not in str(placed(replace(job, gpus=(0,)), ORDERED)[0].expected)
    detected = "AutoDetect=nvml\n" + ORDERED
    assert [f.id for f in placed(job, detected)] == ["job-gpu-far"]
    for other in (ORDERED.replace("nvidia[0-1]", "nvidia[8-9]"), ORDERED.rpartition("NodeName")[0]):
        assert placed(replace(job, gpus=(7,)), other)[0].id == "job-unjudged"


def test_cores_of_gres_conf_decide_where_no_machine_is_given() -> None:
    text = "Name=gpu File=/dev/nvidia[0-3] Cores=0-15\nName=gpu File=/dev/nvidia[4-7] Cores=16-31\n"
    gres = read_device_order(parse_config(text, "gres.conf"))
    for layout, jobs in LAYOUTS.items():
        shares = [(job, share) for job in jobs((FILL, PLANTED, GOOD)) for share in job.shares]
        places = [build_gres_allocation(job, share, SHAPE, gres) for job, share in shares]
        answer = audit([place for place in places if place is not None])
        assert "Cores= of gres.conf" in answer.not_checked[0], "another file may be wrong, too"
        (finding,) = answer.findings
        assert finding.id == "job-gpu-far" and "job 7" in finding.subject, layout
        assert finding.expected == "CPUs on cores 0-15, where gpu0, gpu1 are"
        assert finding.observed == "cores 16-19"
    (job,) = LAYOUTS["scontrol"]([PLANTED])
    beyond = read_device_order(parse_config(text.replace("-31", "-99"), "gres.conf"))
    place = build_gres_allocation(job, job.shares[0], SHAPE, beyond)
    assert place is not None and "core 99" in str(place.unknown)
    (other,) = LAYOUTS["scontrol"]([replace(PLANTED, gpus=())])
    without = build_allocation(other, other.shares[0], None, SHAPE)
    assert "unknown facts" in audit([without, place]).not_checked[0], "the first is the reason"
    detected = read_device_order(parse_config(f"AutoDetect=nvml\n{text}", "gres.conf"))
    assert build_gres_allocation(job, job.shares[0], SHAPE, detected) is None


def test_a_file_that_says_nothing_of_gpus_orders_none() -> None:
    for text in ("", "NodeName=n Gres=gpu:8\n", "Include gpus.conf\n"):
        with pytest.raises(InputError, match="no line with Name=gpu"):
            read_device_order(parse_config(text, "gres.conf"))
    detected = read_device_order(parse_config("AutoDetect=nvml\n", "gres.conf"))
    assert detected.list_numbers("n") is None


def test_a_slice_is_judged_where_gres_conf_lists_its_gpus_file() -> None:
    slices = "".join(
        f"NodeName=gpu01 Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia{gpu},"
        f"/dev/nvidia-caps/nvidia-cap{9 * gpu + part}\n"
        for gpu in (0, 7)
        for part in (1, 2)
    )
    text = scontrol_text([Listed(1, ["gpu01"], range(4), (2,))]).replace("h100", "1g.10gb")
    (job,) = parse_scontrol_jobs(text)
    there = node_machine(machine(TESTBED))
    alone = build_allocation(job, job.shares[0], there, SHAPE)
    (finding,) = audit([alone]).findings
    assert finding.id == "job-unjudged" and "--gres" in str(finding.fix)
    order = read_device_order(parse_config(slices, "gres.conf")).list_numbers("gpu01")
    assert order == (0, 0, 7, 7)
    (finding,) = audit([build_allocation(job, job.shares[0], there, SHAPE, order)]).findings
    assert finding.id == "job-gpu-far" and "7 (" in finding.expected
    whole = read_device_order(parse_config("Name=gpu File=/dev/nvidia[0-7]\n", "gres.conf"))
    assert whole.list_numbers("gpu01", sliced=True) is None


def test_gpus_of_several_types_have_the_order_of_slurm_conf() -> None:
    """Seen on 22.05.8: Gres=gpu:1g.10gb:1,gpu:h100:2 gives the first line's GPU number 1. Of two
    types of whole GPUs SLURM_JOB_GPUS is counted so too."""
    lines = (
        "Name=gpu Type=h100 File=/dev/nvidia[0-1] Cores=0-15\n"
        "Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia7,/dev/nvidia-caps/nvidia-cap64\n"
    )
    order = read_device_order(parse_config(lines, "gres.conf"))
    (job,) = parse_scontrol_jobs(scontrol_text([Listed(1, ["gpu01"], range(4), (2,))]))
    there = node_machine(machine(TESTBED))
    alone = build_allocation(job, job.shares[0], there, SHAPE, order.list_numbers("gpu01"))
    assert "slurm.conf" in str(alone.unknown) and order.list_cores("gpu01") == ()


def test_sockets_of_a_listing_alone_may_be_packages_or_nodes() -> None:
    job = Listed(1, ["n"], range(24, 28), (0, 1), cores_per_socket=8)
    host = machine(MI250X)
    (alone,) = owned(LAYOUTS["squeue of 24.05"]([job]), host, None)
    assert alone.unknown is not None and "--nodes" in str(alone.fix)
    (stated,) = owned(LAYOUTS["squeue of 24.05"]([job]), host, NodeShape(4, 8, 2, 64))
    assert audit([stated]).findings == ()


ANSWER = """\
task batch.100 0-3 0-1 default 90
task batch.101 0-3 0-1 bind:0 100
task 0.200 0-3 0-1 bind:0 150
"""


def findings(answer: str, unknown: bool = False) -> list[str]:
    job = parse_scontrol_jobs(scontrol_text([Listed(7, ["n"], range(4), (0, 1))]))[0]
    there = None if unknown else node_machine(machine(TESTBED))
    owned = build_allocation(job, job.shares[0], there, None)
    return [f.id for f in audit([add_tasks(owned, parse_look(answer, "job 7"))]).findings]


def test_a_shell_that_starts_what_is_bound_does_not_count() -> None:
    assert [task.task for task in parse_look(ANSWER, "job 7")] == ["batch.101", "0.200"]
    assert findings(ANSWER) == []
    assert findings(ANSWER.splitlines()[0]) == ["job-memory-open"]


def test_a_policy_that_binds_elsewhere_is_found() -> None:
    assert findings(ANSWER.replace("bind:0", "bind:1")) == ["job-memory-far"]


def test_a_job_that_shows_no_process_is_judged_without_them() -> None:
    assert findings("") == []
    assert findings(ANSWER, unknown=True) == ["job-unjudged"]


@pytest.mark.parametrize("line", ["srun: error", "task 0.1 0-3 0", "task 0.1 x 0-1 default 1"])
def test_an_answer_that_is_none_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_look(f"\n{line}\n", "job 7")
    assert caught.value.line == 2


def test_the_step_takes_nothing_of_the_job() -> None:
    command = look_command("7", "gpu01")
    assert command[0] == "srun" and "--overlap" in command and "--jobid=7" in command
    assert "gpu01" not in command[-1] and "--nodelist=gpu01" in command
