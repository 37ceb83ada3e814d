# ruff: noqa: E501
"""Collectives across hosts: what is started, and what is read of it."""

import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.measure.gpu.collectives import ACROSS
from homenode.measure.model import BenchTest, Group, SuiteOptions
from homenode.measure.step_reading import figures_of_step
from homenode.measure.suite import gpu_tests
from homenode.vm.sources import load_host

HOST = load_host("hgx-h100")
OPTIONS = SuiteOptions((Group.COLLECTIVES,), hosts=("n1", "n2"), topology="<system version='1'/>")

LAUNCHER = """#!/bin/bash
# One process on each host, with the variables of -x, as Open MPI's.
while [ "$1" != all_reduce_perf ] && [ "$1" != sh ]; do
  case $1 in -H) hosts=$2; shift 2;; -x) export "$2"; shift 2;; *) shift;; esac
done
HOSTS=${hosts//:1/} exec "$@"
"""
TOOL = """#!/bin/bash
# What nccl-tests prints on the first rank; 190 GB/s by GPUDirect RDMA, 90 without.
rate=190; [ "$NCCL_NET_GDR_LEVEL" = LOC ] && rate=90
[ -n "$NCCL_TOPO_FILE" ] && grep -q system "$NCCL_TOPO_FILE" && rate=195
echo "# nThread 1 nGpus 8 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0"
echo "#"; echo "# Using devices"; rank=0
for host in ${HOSTS//,/ }; do for gpu in 0 1 2 3 4 5 6 7; do
  printf '#  Rank %2d Group  0 Pid   1000 on %10s device  %d [0x%02x] NVIDIA H100 80GB HBM3\\n' $rank $host $gpu $((16 + gpu))
  rank=$((rank + 1))
done; done
echo "#"
echo "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
echo "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"
echo "  1073741824     268435456     float     sum      -1   5900.0  181.99  $rate.00      0   5900.0  181.99  $rate.00      0"
echo "# Out of bounds values : 0 OK"
echo "# Avg bus bandwidth    : $rate.00"
"""


def suite_of(options: SuiteOptions, *installed: str) -> tuple[list[BenchTest], list[Gap]]:
    left_out: list[Gap] = []
    found = gpu_tests(HOST, installed, options, left_out)
    return [one for one in found if one.group is Group.COLLECTIVES], left_out


def output_of(test: BenchTest, folder: Path) -> str:
    for name, text in (("mpirun", LAUNCHER), ("all_reduce_perf", TOOL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        test.argv, capture_output=True, text=True, check=True, env={"PATH": path}
    ).stdout


def test_one_setting_at_a_time_is_measured_across_all_hosts(tmp_path: Path) -> None:
    tests, _ = suite_of(OPTIONS, "mpirun", "all_reduce_perf")
    assert len(tests) == len({one.variant for one in tests}) == len(ACROSS) + 1
    peak = {}
    for test in tests:
        figures = figures_of_step(test, output_of(test, tmp_path), HOST)
        (most,) = [one for one in figures.samples if one.metric == "allreduce-busbw-peak"]
        assert most.variant == test.variant
        peak[test.variant] = most.value
    assert peak["across 2 hosts"] == 190e9
    assert peak["across 2 hosts, GPUDirect RDMA off"] == 90e9
    assert peak["across 2 hosts, NCCL file"] == 195e9


def test_ranks_that_each_ran_alone_give_no_figure(tmp_path: Path) -> None:
    (test, *_), _ = suite_of(OPTIONS, "mpirun", "all_reduce_perf")
    alone = output_of(
        replace(test, argv=tuple(one.replace("n1:1,n2:1", "n1:1") for one in test.argv)), tmp_path
    )
    with pytest.raises(ParseError, match="ranks on 2 hosts"):
        figures_of_step(test, alone, HOST)


def test_a_job_of_slurm_starts_them_with_srun_and_what_is_missing_is_said() -> None:
    (_, test, *_), _ = suite_of(OPTIONS, "srun", "all_reduce_perf")
    assert test.argv[0] == "srun" and "--export=ALL,NCCL_NET_GDR_LEVEL=SYS" in test.argv
    for installed in ((), ("mpirun",), ("all_reduce_perf",)):
        tests, left_out = suite_of(OPTIONS, *installed)
        assert not tests and any("across hosts" in gap.reason for gap in left_out)
    _, left_out = suite_of(replace(OPTIONS, topology=None), "mpirun", "all_reduce_perf")
    assert any("NCCL file" in gap.reason for gap in left_out)
