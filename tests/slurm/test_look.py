"""A job's processes while it runs: which of them count, and what their policies say."""

import pytest

from homenode.cluster.slurm.audit import audit
from homenode.cluster.slurm.job_allocation import allocation_on, node_machine
from homenode.cluster.slurm.record import look_command, parse_look, with_tasks
from homenode.cluster.slurm.tools.scontrol import parse_scontrol_jobs
from homenode.errors import ParseError
from tests.slurm.gpu_nodes import TESTBED, Listed, machine, scontrol_text

ANSWER = """\
task batch.100 0-3 0-1 default 90
task batch.101 0-3 0-1 bind:0 100
task 0.200 0-3 0-1 bind:0 150
"""


def findings(answer: str, unknown: bool = False) -> list[str]:
    job = parse_scontrol_jobs(scontrol_text([Listed(7, ["n"], range(4), (0, 1))]))[0]
    owned = allocation_on(
        job, job.shares[0], None if unknown else node_machine(machine(TESTBED)), None
    )
    return [f.id for f in audit([with_tasks(owned, parse_look(answer, "job 7"))]).findings]


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
