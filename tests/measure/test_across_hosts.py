# ruff: noqa: E501
"""Collectives across hosts: what is started, and what is read of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.topology import Host
from homenode.measure.gpu.collectives import ACROSS
from homenode.measure.model import TORCH, BenchTest, Depth, Group, SuiteOptions
from homenode.measure.step_reading import figures_of_step
from homenode.measure.suite import gpu_tests
from homenode.measure.tools_installed import program_text
from homenode.vm.sources import load_host
from tests.small_hosts import DeviceSpec, even_host
from tests.torch_programs import STAND_IN

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
SSH = """#!/bin/bash
# A host's login shell.
while [ "$1" = -o ]; do shift 2; done
echo "$1" >>"$STAND_IN_SHARED/hosts"; shift; exec sh -c "$*"
"""
IB_WRITE_BW = """#!/bin/bash
# A server waits for its client; perftest's figures on both.
at=$STAND_IN_SHARED/listens
case "${!#}" in n*) [ -e "$at" ] || exit 1; touch "$at.done";;
  *) touch "$at"; until [ -e "$at.done" ]; do sleep 0.1; done;; esac
echo "                    RDMA_Write BW Test"
echo " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"
echo " 65536      1837600          0.00               392.40                0.748"
"""


def suite_of(
    options: SuiteOptions, *installed: str, host: Host = HOST
) -> tuple[list[BenchTest], list[Gap]]:
    left_out: list[Gap] = []
    found = gpu_tests(host, installed, options, left_out)
    return [one for one in found if one.group is Group.COLLECTIVES], left_out


def output_of(test: BenchTest, folder: Path) -> str:
    tools = (LAUNCHER, TOOL, SSH, IB_WRITE_BW)
    names = ("mpirun", "all_reduce_perf", "ssh", "ib_write_bw")
    for name, script in zip(names, tools, strict=True):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    environment = {"PATH": path, "STAND_IN_SHARED": str(folder), "PYTHONPATH": str(STAND_IN)}
    text = None if test.program is None else program_text(test.program)
    run = subprocess.run(
        test.argv, input=text, capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


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


TWO = even_host(devices=(DeviceSpec("0000:19:00.0"), DeviceSpec("0000:9b:00.0", node=1, root=1)))
BY_SSH = replace(OPTIONS, depth=Depth.QUICK, largest_message_bytes=1 << 14, python=sys.executable)


def test_without_mpi_our_program_is_started_on_each_host_by_ssh(tmp_path: Path) -> None:
    tests, _ = suite_of(BY_SSH, "ssh", TORCH, host=TWO)
    assert len(tests) == len({one.variant for one in tests}) == len(ACROSS) + 1
    for test in (tests[0], tests[-1]):
        for old in tmp_path.glob("*.stand-in"):
            old.rename(old.with_suffix(f".{test.variant}"))
        figures = figures_of_step(test, output_of(test, tmp_path), TWO)
        (most,) = [one for one in figures.samples if one.metric == "allreduce-busbw-peak"]
        assert most.variant == test.variant
        # The bus rate of four ranks is three halves of the plain one.
        assert 0 < most.value <= 1.5 * (1 << 14) / 20e-6
    assert (tmp_path / "hosts").read_text().split() == ["n2", "n2"]
    assert len(list(tmp_path.glob("n1:29500.stand-in/*.3"))) > 0


def test_a_pair_of_hosts_is_measured_by_ib_write_bw(tmp_path: Path) -> None:
    options = replace(OPTIONS, hosts=("n1", "n2", "n3"))
    tests, _ = suite_of(options, "mpirun", "all_reduce_perf", "ssh", "ib_write_bw")
    pairs = [one for one in tests if one.reads == "perftest"]
    assert [one.variant for one in pairs] == ["n2 to n1", "n3 to n1", "n3 to n2"]
    (figure,) = figures_of_step(pairs[0], output_of(pairs[0], tmp_path), HOST).samples
    assert (figure.value, figure.size_bytes, figure.variant) == (49.05e9, 65536, "n2 to n1")
    assert (tmp_path / "hosts").read_text().split() == ["n1", "n2"]


def test_hosts_of_one_gpu_each_are_measured_together() -> None:
    one = even_host(devices=(DeviceSpec("0000:19:00.0"),))
    tests, _ = suite_of(OPTIONS, "mpirun", "all_reduce_perf", host=one)
    assert len(tests) == len(ACROSS) + 1
