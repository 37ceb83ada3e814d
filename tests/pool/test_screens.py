"""What the commands of the cluster room print, at 80 columns."""

from pathlib import Path

import pytest

from tests.command_line import homenode

ROOT = Path(__file__).parents[2]
SAMPLES = "demo/samples"
GRES, SLURM = f"{SAMPLES}/gres.conf", f"{SAMPLES}/slurm.conf"
JOB = """JobId=7 JobName=train
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=gpu01
     Nodes=gpu01 CPU_IDs=28-55 Mem=1000 GRES=gpu:h100:2(IDX:3-4)
   MinCPUsNode=28 MinMemoryNode=1000M MinTmpDiskNode=0
"""
POOL = tuple(
    word
    for host in ("hgx-h100", "hgx-h200", "mi300x-epyc9654", "h200-xeon8558")
    for word in ("--pool", host)
)
SIZE = ("--gpus", "4", "--vcpus", "32", "--memory", "256GiB")
SCREENS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "kubevirt check": (
        ("kubevirt", "check", f"{SAMPLES}/vmi.json", "--host", "hgx-a100-ibm"),
        1,
        """\
VMI train: 1 critical, 1 warning: its 8 GPUs and 96 CPUs need both nodes

critical  8 GPUs, 96 CPUs                                        gpus-over-nodes
  expected  GPUs and CPUs on the same nodes of hgx-a100-ibm, shown to the guest
  found     4 GPUs on each of nodes 0-1, all CPUs on node 0; no
            guestMappingPassthrough
  fix       set numa.guestMappingPassthrough, and request at least 172 CPUs (132
            with kubelet's distribute-cpus-across-numa); or request 4 GPUs, 48
            CPUs and 128 GiB

warning   8 GPUs have no guest NUMA node                    devices-without-node
  expected  the hook of homenode, or PCINUMAAwareTopology (KubeVirt 1.8)
  found     no hook in the annotations
  cost      H2D 12.6 instead of 15.6 GB/s, 19 % slower (HGX A100)
  fix       homenode kubevirt manifest -o sidecar --vm train --namespace \\
            default --vcpus 172 --memory 256GiB

info     1: emulator-on-vcpu (--explain)
unknown  huge pages of 1 GiB: capture the node with homenode capture; kubelet's
         reserved CPUs and its topology manager's policy; feature gates: not
         specified (--kubevirt FILE)
""",
    ),
    "slurm check": (
        ("slurm", "check", GRES, SLURM, "--host", "gh200x4"),
        1,
        """\
gres.conf: 1 critical: GPU 1 of gh[01-16] has the CPUs of another node

critical  gres.conf:3, GPU 1 (0019:01:00.0, node 1)             gres-cores-wrong
  expected  Cores=72-143
  found     Cores=0-71
  cost      jobs on this GPU get CPUs of node 0
  fix       homenode slurm check demo/samples/gres.conf \\
            demo/samples/slurm.conf --host gh200x4 -o DIR

info     2: gres-autodetect, slurm-binding-optional (--explain)
unknown  cgroup.conf: not specified (--cgroup FILE)

-NodeName=gh[01-16] Name=gpu Type=gh200 File=/dev/nvidia1 Cores=0-71
+NodeName=gh[01-16] Name=gpu Type=gh200 File=/dev/nvidia1 Cores=72-143
""",
    ),
    "slurm audit": (
        ("slurm", "audit", "--jobs", "JOBS", "--host", "hgx-h100"),
        1,
        """\
1 GPU job: 1 warning: job 7 (train) on gpu01 has a GPU on another node

warning   job 7 (train) on gpu01                                     job-gpu-far
  expected  CPUs on node 1, where gpu4 (0000:9b:00.0) is
  found     CPUs 14-27,126-139 on node 0
  cost      distance 21 instead of 10
  fix       correct a wrong Cores= first (homenode slurm check), then sbatch
            --gres-flags=enforce-binding

info         1: job-gpus-spread (--explain)
not checked  jobs that a comment in this text could hide: use squeue --json;
             whether the nodes are as hgx-h100: --nodes FILE with `scontrol show
             node`
""",
    ),
    "pool show": (
        ("pool", "show", *POOL),
        0,
        """\
4 hosts, all free: 32 GPUs, 528 cores, 8.25 TiB; 0 VMs

host             GPUs        cores    memory  VMs  1 GPU  2 GPUs  4 GPUs  8 GPUs
h200-xeon8558    8/8 H200       96     2 TiB    0      8       4       2       1
hgx-h100         8/8 H100      112     2 TiB    0      8       4       2       1
hgx-h200         8/8 H200      128     2 TiB    0      8       4       2       1
mi300x-epyc9654  8/8 MI300X    192  2.25 TiB    0      8       4       2       1
total            32/32         528  8.25 TiB    0     32      16       8       4

free/all GPUs, free cores and memory; how many more VMs of each size fit, local
for each GPU, a VM has 10 vCPUs and 240 GiB (h200-xeon8558), 12 vCPUs and 240
GiB (hgx-h100), 14 vCPUs and 240 GiB (hgx-h200) and 1 more
""",
    ),
    "pool place": (
        ("pool", "place", "demo/gpu-vm.xml", *POOL, *SIZE),
        0,
        """\
gpu-vm fits 4 of 4 hosts; best: hgx-h100, node 0; all GPUs local

rank  host             nodes  LLCs  GPUs left  cores left  memory left  decided
1     hgx-h100         0         1  4 H100             80     1.75 TiB  -
2     hgx-h200         0         1  4 H200             96     1.75 TiB  cores
3     mi300x-epyc9654  0         4  4 MI300X          160        2 TiB  LLCs
4     h200-xeon8558    0-1       2  4 H200             64     1.75 TiB  nodes

guest node  vCPUs      host CPUs  host node   memory  GPUs
single      0-31 (32)  0-31       0          256 GiB  gpu0-3

layout   pin-bound (auto, multi-gpu): all-reduce with pin is 2.1x pin-numa on
         H200, 2.7x on RTX PRO 6000, 1.04x on MI350X (study); a rule, not
         measured on this machine
order    locality, then the fewest free cores (pack, the default with GPUs)
host     24 of 56 cores of node 0 run no vCPU; QEMU on CPUs 32,144; IOThread 1
         on CPU 33
before   reserve 256 huge pages of 1 GiB on node 0; memlock 257 GiB
info     qemu-commandline (--explain)
unknown  free huge pages; whether a Fabric Manager can join the 4 GPUs
         (nvidia-smi -q -x shows no module ids); QEMU's version (6.0 or newer is
         assumed)
next     the same command with -o tuned.xml
""",
    ),
    "slurm audit of an unknown node": (
        ("slurm", "audit", "--jobs", "JOBS", "--host", "other=hgx-h100"),
        5,
        """\
nothing was checked: 1 allocation of GPU jobs with unknown facts
unknown  job 7 on gpu01: no host is specified for this node
next     homenode capture --ssh root@NODE -o NODE.tar.gz
""",
    ),
    "slurm audit of no GPU job": (
        ("slurm", "audit", "--jobs", "NONE", "--host", "hgx-h100"),
        5,
        "nothing was checked: no running job has GPUs\n",
    ),
}


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_the_answer_and_its_reasons(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, code, text = SCREENS[name]
    files = {"JOBS": JOB, "NONE": "No jobs in the system\n"}
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    arguments = [str(tmp_path / word) if word in files else word for word in words]
    monkeypatch.chdir(ROOT)
    done = homenode(*arguments, env={"COLUMNS": "80"})
    assert (done.exit_code, done.stdout) == (code, text)
