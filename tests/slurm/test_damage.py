"""Damaged files and listings: a result, or an error that says where; never anything else."""

from collections.abc import Callable

import pytest

from homenode.cluster.slurm.audit import audit
from homenode.cluster.slurm.check import check
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.correction import correct
from homenode.cluster.slurm.gres import gres_lines
from homenode.cluster.slurm.job_allocation import allocation_on, node_machine
from homenode.cluster.slurm.nodes import node_definitions
from homenode.cluster.slurm.record import parse_record, recorded_allocation
from homenode.cluster.slurm.tools.scontrol import Job, parse_scontrol_jobs
from homenode.cluster.slurm.tools.slurm_nodes import shown_shapes
from homenode.cluster.slurm.tools.squeue import parse_squeue_jobs
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
from tests.slurm.test_config import GRES
from tests.slurm.test_record import RECORD

JOBS = (
    Listed(7, ["gpu01"], range(16, 20), (0, 1, 4)),
    Listed(8, ["gpu01", "gpu02"], range(4), (2,), task=3),
)
NODES = (
    "NodeName=gpu01 Arch=x86_64 CoresPerSocket=16 \n   CPUAlloc=32 CPUTot=64\n"
    "   RealMemory=512000 Sockets=2 Boards=1\n   State=MIXED ThreadsPerCore=2\n"
)
SLURM = (
    "SelectType=select/cons_tres SelectTypeParameters=CR_Core  # here\nTaskPlugin=none\n"
    "NodeName=DEFAULT Sockets=2 CoresPerSocket=16 \\\n  ThreadsPerCore=2\n"
    "NodeName=node[01-03] Gres=gpu:h100:8(S:0-1) State=UNKNOWN\nInclude other.conf\n"
)


def audited(parse: Callable[[str], tuple[Job, ...]]) -> Callable[[str], object]:
    there = node_machine(machine(TESTBED))

    def run(text: str) -> object:
        shapes = shown_shapes(NODES, "nodes")
        return audit(
            allocation_on(job, share, there, shapes.get(share.node))
            for job in parse(text)
            for share in job.shares
        )

    return run


LISTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "scontrol": (scontrol_text(JOBS), audited(parse_scontrol_jobs)),
    "squeue of 22.05": (squeue_2205(JOBS), audited(parse_squeue_jobs)),
    "squeue of 23.02": (squeue_2302(JOBS), audited(parse_squeue_jobs)),
    "squeue of 24.05": (squeue_2405(JOBS), audited(parse_squeue_jobs)),
    "show node": (NODES, lambda text: shown_shapes(text, "nodes")),
    "record": (RECORD, lambda text: audit([recorded_allocation(parse_record(text, "r"))])),
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
            gres_lines(config)
            node_definitions(config)
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
