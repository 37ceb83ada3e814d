"""The script that binds a rank where it runs, run by a real shell on made-up machines."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from homenode.cluster.slurm.record import rank_wrapper

STATUS = "Cpus_allowed_list:\t{}\n"


class Rank:
    """A rank on a machine of two nodes, with stand-ins for the tools that it finds on its PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shell = [str(shutil.which("sh"))]
        self.root = folder / "root"
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.script = folder / "bind-rank.sh"
        self.script.write_text(rank_wrapper())
        for node, cpus in ((0, "0-3"), (1, "4-7"), (4, "")):
            self._write(f"sys/devices/system/node/node{node}/cpulist", f"{cpus}\n")
        self._write("sys/devices/system/cpu/online", "0-7\n")
        self.allowed("0-7")
        for name in ("awk", "cat", "cut", "env", "grep", "head", "sed", "sh", "sort", "tr", "wc"):
            (self.tools / name).symlink_to(str(shutil.which(name)))

    def _write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def allowed(self, cpus: str) -> None:
        self._write("proc/self/status", STATUS.format(cpus))

    def gpu(self, bdf: str, node: int, local: str) -> None:
        self._write(f"sys/bus/pci/devices/{bdf}/numa_node", f"{node}\n")
        self._write(f"sys/bus/pci/devices/{bdf}/local_cpulist", f"{local}\n")

    def distances(self, online: str, from_node_4: str) -> None:
        self._write("sys/devices/system/node/online", f"{online}\n")
        self._write("sys/devices/system/node/node4/distance", f"{from_node_4}\n")

    def kfd(self, place: int, location: int, domain: int = 0, unique: int = 0) -> None:
        self._write(
            f"sys/class/kfd/kfd/topology/nodes/{place}/properties",
            f"simd_count 4\nlocation_id {location}\ndomain {domain}\nunique_id {unique}\n",
        )

    def tool(self, name: str, body: str) -> None:
        file = self.tools / name
        file.write_text(f"#!{shutil.which('sh')}\n{body}\n")
        file.chmod(0o755)

    def numactl(self, *, refuses: str = "--nothing") -> None:
        """A numactl that runs its command and says how it was called, and refuses one option."""
        self.tool(
            "numactl",
            f'case "$*" in *{refuses}=*) echo "libnuma: denied" >&2; exit 1 ;; esac\n'
            'said=; while [ $# -gt 0 ]; do case $1 in --) shift; break ;; --*) said="$said $1"; '
            'shift ;; *) break ;; esac; done; [ "$1" = true ] || echo "numactl$said"; exec "$@"',
        )
        (self.tools / "true").symlink_to(str(shutil.which("true")))

    def run(self, **environment: str) -> tuple[str, str]:
        """What the command that it runs prints, and what it says itself."""
        (self.tools / "echo").unlink(missing_ok=True)
        (self.tools / "echo").symlink_to(str(shutil.which("echo")))
        done = subprocess.run(
            [*self.shell, str(self.script), "echo", "a b", "*"],
            env={"PATH": str(self.tools), "HOMENODE_ROOT": str(self.root), **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.endswith("a b *\n")
        return done.stdout.removesuffix("a b *\n"), done.stderr


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    one = Rank(tmp_path)
    one.gpu("0000:10:00.0", 0, "0-3")
    one.gpu("0009:80:00.0", 1, "4-7")
    one.tool(
        "nvidia-smi",
        'case "$1" in -L) printf "GPU 0: H100 (UUID: GPU-aa)\\nGPU 1: H100 (UUID: GPU-ab)\\n'
        '  MIG 1g.10gb Device 0: (UUID: MIG-12-34)\\n";; esac\n'
        'case "$4" in 0) echo "00000000:10:00.0" ;; 1 | GPU-ab*) echo "00000009:80:00.0" ;; esac',
    )
    one.tool("taskset", 'echo "taskset $2"; shift 2; exec "$@"')
    return one


@pytest.mark.parametrize("gpu", ["1", "GPU-ab12-cd", "MIG-12-34"])
def test_a_rank_runs_and_has_its_memory_on_its_gpus_node(rank: Rank, gpu: str) -> None:
    rank.numactl()
    assert rank.run(CUDA_VISIBLE_DEVICES=gpu) == ("numactl --physcpubind=4,5,6,7 --membind=1\n", "")


def test_it_keeps_of_its_cpus_those_that_are_near(rank: Rank) -> None:
    rank.numactl()
    rank.allowed("2-5")
    out, _ = rank.run(CUDA_VISIBLE_DEVICES="1")
    assert out == "numactl --physcpubind=4,5 --membind=1\n"


def test_where_none_of_its_cpus_is_near_only_memory_is_bound(rank: Rank) -> None:
    rank.numactl()
    rank.allowed("0-2")
    out, said = rank.run(CUDA_VISIBLE_DEVICES="1", SLURM_PROCID="5")
    assert out == "numactl --membind=1\n"
    assert said.startswith("homenode: rank 5: none of its CPUs (0-2) is on node 1")


def test_where_binding_memory_is_forbidden_it_is_preferred(rank: Rank) -> None:
    rank.numactl(refuses="--membind")
    out, said = rank.run(CUDA_VISIBLE_DEVICES="0")
    assert out == "numactl --physcpubind=0,1,2,3 --preferred=0\n"
    assert "only preferred" in said


def test_where_no_policy_is_allowed_its_cpus_are_bound(rank: Rank) -> None:
    rank.numactl(refuses="--*d")
    out, said = rank.run(CUDA_VISIBLE_DEVICES="0")
    assert out == "taskset 0,1,2,3\n" and "stays as it was" in said


def test_without_numactl_its_cpus_are_bound(rank: Rank) -> None:
    assert rank.run(CUDA_VISIBLE_DEVICES="0") == ("taskset 0,1,2,3\n", "")


def test_its_memory_is_left_where_that_is_asked_for(rank: Rank) -> None:
    rank.numactl()
    out, _ = rank.run(CUDA_VISIBLE_DEVICES="0", HOMENODE_MEMORY="none")
    assert out == "taskset 0,1,2,3\n"


def test_ranks_that_see_all_gpus_take_theirs_by_turns(rank: Rank) -> None:
    rank.numactl()
    for local, node in (("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")):
        out, _ = rank.run(
            CUDA_VISIBLE_DEVICES="0,1", SLURM_LOCALID=local, SLURM_STEP_TASKS_PER_NODE="4(x2)"
        )
        assert out.endswith(f"--membind={node}\n")
    out, _ = rank.run(
        CUDA_VISIBLE_DEVICES="0,1",
        SLURM_LOCALID="1",
        SLURM_STEP_TASKS_PER_NODE="2",
        SLURM_GPUS_PER_TASK="2",
    )
    assert out.endswith("--membind=0\n")


def test_amds_gpus_are_those_that_the_driver_lets_it_see(rank: Rank) -> None:
    rank.numactl()
    rank.kfd(0, 0)
    rank.kfd(1, 0x8000, domain=9)
    rank.kfd(2, 0x1000)
    assert rank.run(ROCR_VISIBLE_DEVICES="0")[0].endswith("--membind=1\n")
    assert rank.run(ROCR_VISIBLE_DEVICES="1")[0].endswith("--membind=0\n")


@pytest.mark.parametrize("shell", ["dash", "bash", "bash --posix", "busybox sh"])
def test_any_shell_that_is_called_sh_will_do(rank: Rank, shell: str) -> None:
    program, *words = shell.split()
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    rank.shell = [str(shutil.which(program)), *words]
    rank.numactl()
    rank.kfd(0, 0)
    rank.kfd(1, 0x8000, domain=9, unique=17_000_000_000_000_000_001)
    bound = "numactl --physcpubind=4,5,6,7 --membind=1\n"
    assert rank.run(CUDA_VISIBLE_DEVICES="1") == (bound, "")
    assert rank.run(CUDA_VISIBLE_DEVICES="MIG-12-34") == (bound, "")
    assert rank.run(ROCR_VISIBLE_DEVICES="0") == (bound, "")
    assert rank.run(ROCR_VISIBLE_DEVICES="GPU-ebec21ee1da40001") == (bound, "")
    both = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert rank.run(**both, SLURM_LOCALID="1") == (bound, "")
    assert rank.run(**both)[0].endswith("--membind=0\n")
    assert rank.run(CUDA_VISIBLE_DEVICES="NoDevFiles")[0] == ""


def test_its_command_runs_whatever_slurm_says(rank: Rank) -> None:
    rank.numactl()
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "2"}
    assert "is no number" in rank.run(CUDA_VISIBLE_DEVICES=",", **tasks)[1]
    out, _ = rank.run(CUDA_VISIBLE_DEVICES="0,1", SLURM_LOCALID="x y", **tasks)
    assert out.endswith("--membind=0\n")
    # Two of its own, whichever way they were asked for.
    out, _ = rank.run(
        CUDA_VISIBLE_DEVICES="0,1", SLURM_LOCALID="1", SLURM_TRES_PER_TASK="gres/gpu=2", **tasks
    )
    assert out.endswith("--membind=0\n")


def test_the_cpus_nearest_to_a_gpus_own_node_are_its_own(rank: Rank) -> None:
    """The kernel calls no CPU local to a node without any."""
    rank.gpu("0009:80:00.0", 4, "")
    rank.numactl()
    rank.distances("0-1,4", "120 80 10")
    assert rank.run(CUDA_VISIBLE_DEVICES="1")[0].endswith("--membind=1\n")
    rank.distances("0-1,4", "80 80 10")
    assert "no node of GPU 1" in rank.run(CUDA_VISIBLE_DEVICES="1")[1]


def test_a_gpus_own_memory_is_never_bound_to(rank: Rank) -> None:
    rank.numactl()
    rank.gpu("0009:80:00.0", 4, "4-7")
    assert rank.run(CUDA_VISIBLE_DEVICES="1")[0].endswith("--membind=1\n")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "no CUDA_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "7"}, "no address of GPU 7"),
        ({"CUDA_VISIBLE_DEVICES": "$(x)"}, "is no number"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1/2/3"}, "no address of GPU MIG-1/2/3"),
    ],
)
def test_what_it_cannot_find_out_is_left_as_it_was_and_said(
    rank: Rank, environment: dict[str, str], said: str
) -> None:
    rank.numactl()
    out, err = rank.run(**environment)
    assert out == "" and said in err and err.strip().endswith("not bound")


def test_where_the_firmware_tells_no_node_nothing_is_guessed(rank: Rank) -> None:
    rank.numactl()
    rank.gpu("0009:80:00.0", -1, "0-7")
    out, err = rank.run(CUDA_VISIBLE_DEVICES="1")
    assert out == "" and "no node of GPU 1" in err


def test_it_says_what_it_did_when_asked(rank: Rank) -> None:
    rank.numactl()
    _, err = rank.run(CUDA_VISIBLE_DEVICES="1", HOMENODE_VERBOSE="1")
    assert "GPU 1 (0009:80:00.0) is on node 1: CPUs 4,5,6,7, memory --membind=1" in err


def test_the_commands_own_exit_is_the_wrappers(rank: Rank) -> None:
    done = subprocess.run(
        [str(shutil.which("sh")), str(rank.script), "sh", "-c", "exit 7"],
        env={"PATH": str(rank.tools)},
        capture_output=True,
    )
    assert done.returncode == 7
    bare = subprocess.run([str(shutil.which("sh")), str(rank.script)], capture_output=True)
    assert bare.returncode == 2 and b"usage" in bare.stderr


def test_it_is_plain_posix_shell() -> None:
    shellcheck = shutil.which("shellcheck", path=os.environ["PATH"])
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        [shellcheck, "-s", "sh", "-"], input=rank_wrapper(), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout
