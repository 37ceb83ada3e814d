"""Testbed: a real Slurm of one's own on one machine: munged, slurmctld and a slurmd for each node.

Three nodes of 2 sockets x 16 cores x 2 threads with 8 GPUs are declared; the machine has what it
has (`config_overrides`). GPUs are device files that no one opens. Nothing of
an installed Slurm is touched: sockets, keys, states and logs lie in one directory, and every daemon
is stopped by its own process id.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NODES = ("gpu01", "gpu02", "gpu03")
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "numactl")

_CONF = """\
ClusterName=homenode
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd.%n.pid
SlurmdSpoolDir={base}/spool/%n
StateSaveLocation={base}/state
SlurmctldPort={port}
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
InactiveLimit=0
KillWait=2
MinJobAge=300
SlurmdTimeout=600
MessageTimeout=60
BatchStartTimeout=180
{nodes}
PartitionName=whole Nodes={names} Default=YES MaxTime=60 OverSubscribe=EXCLUSIVE State=UP
PartitionName=parts Nodes={names} MaxTime=60 State=UP
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets=2 "
    "CoresPerSocket=16 ThreadsPerCore=2 RealMemory=512000 Gres=gpu:h100:8 State=UNKNOWN"
)
_GRES = """\
AutoDetect=off
NodeName={names} Name=gpu Type=h100 File={base}/gpu/gpu[0-3] Cores=0-15
NodeName={names} Name=gpu Type=h100 File={base}/gpu/gpu[4-7] Cores=16-31
"""


class Testbed:
    """A running Slurm. environment: what its clients need."""

    __test__ = False

    def __init__(self, base: Path) -> None:
        self.base = base
        self.environment = {**os.environ, "SLURM_CONF": str(base / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controller: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start every daemon, and wait until all nodes are idle."""
        for name in ("state", "spool", "log", "run", "gpu", "munge"):
            (self.base / name).mkdir(parents=True)
        for gpu in range(8):
            # Character devices: only of these does Slurm give a job its GPUs' numbers.
            for name in (f"gpu{gpu}", f"cap{gpu}1", f"cap{gpu}2"):  # caps: of slices
                os.mknod(self.base / "gpu" / name, stat.S_IFCHR | 0o600, os.makedev(4, 70 + gpu))
        self._write_configuration()
        self._start_munged()
        self.start_controller()
        for node in NODES:
            (self.base / "spool" / node).mkdir()
            self._start_node(node)
        self._until_idle()

    def start_controller(self) -> None:
        assert self._controller is None
        self._controller = self._daemon("slurmctld", "-D")

    def stop_controller(self) -> None:
        """As an administrator does it: the state is saved.

        One that is killed knows the state of seconds ago, and asks nodes for the truth only after
        minutes: too long for a test.
        """
        assert self._controller is not None
        self._controller.terminate()
        self._controller.wait(180)
        self._controller = None

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd, and start it again: its jobs' steps go on meanwhile."""
        slurmd = self._nodes[node]
        slurmd.kill()
        slurmd.wait()
        self._processes.remove(slurmd)
        self._start_node(node)

    def _start_node(self, node: str) -> None:
        self._nodes[node] = self._daemon("slurmd", "-D", "-N", node)
        self._processes.append(self._nodes[node])

    def stop(self) -> None:
        """Cancel what runs, then end our own daemons."""
        if self._controller is not None:
            # None of the jobs outlives the testbed: they are slurmstepd's, not ours to wait for.
            with contextlib.suppress(subprocess.SubprocessError):
                self.client("scancel", "--full", "--signal=KILL", "--state=RUNNING", "-u", "root")
                self.client("scancel", "-u", "root")
                time.sleep(1)
        running = [*self._processes, *([self._controller] if self._controller else [])]
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._end_steps()

    def _end_steps(self) -> None:
        """End what slurmd left behind: a step whose controller went away asks for it for ever.

        A step has no parent of ours and no name of ours; it has our log open.
        """
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_step = (process / "comm").read_text().strip() == "slurmstepd"
                if is_step and any(self._is_ours(fd) for fd in (process / "fd").iterdir()):
                    os.kill(int(process.name), signal.SIGKILL)

    def _is_ours(self, path: Path) -> bool:
        return str(path.readlink()).startswith(f"{self.base}/log/")

    def client(self, *argv: str, timeout: float = 180) -> str:
        """Output of a client program. Raises CalledProcessError."""
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=timeout, check=True
        )
        return done.stdout

    def _daemon(self, *argv: str) -> "subprocess.Popen[bytes]":
        with (self.base / "log" / f"{argv[0]}.start.log").open("ab") as log:
            return subprocess.Popen(
                argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _write_configuration(self) -> None:
        host = socket.gethostname().partition(".")[0]
        names = ",".join(NODES)
        controller, *ports = free_ports(1 + len(NODES))
        named = zip(NODES, ports, strict=True)
        nodes = "\n".join(_NODE.format(name=name, host=host, port=port) for name, port in named)
        known = {"host": host, "base": self.base, "nodes": nodes, "names": names}
        texts = {
            "slurm.conf": _CONF.format(port=controller, **known),
            "gres.conf": _GRES.format(**known),
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
        }
        for name, text in texts.items():
            (self.base / name).write_text(text)

    def _start_munged(self) -> None:
        base = self.base / "munge"
        key = base / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        # munged trusts no directory that others may write to, and its clients must reach the
        # socket.
        base.chmod(0o755)
        files = f"--key-file={key} --socket={base}/socket --pid-file={base}/munged.pid"
        files += f" --seed-file={base}/seed --log-file={base}/munged.log"
        munged = self._daemon("munged", "--foreground", "--force", *files.split())
        self._processes.append(munged)
        until(lambda: (base / "socket").exists(), "munged")

    def _until_idle(self) -> None:
        def all_idle() -> bool:
            try:
                states = self.client("sinfo", "-h", "-N", "-p", "parts", "-o", "%T").split()
            except subprocess.SubprocessError:
                return False
            return states == ["idle"] * len(NODES)

        until(all_idle, "the nodes to be idle")


def missing() -> str | None:
    """Why no testbed can run here; None where one can."""
    absent = [name for name in DAEMONS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return None if os.geteuid() == 0 else "slurmd needs root"


@contextlib.contextmanager
def running(base: Path) -> Iterator[Testbed]:
    """A testbed below a directory; skips the test where none can run."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    testbed = Testbed(base)
    try:
        testbed.start()
        yield testbed
    finally:
        testbed.stop()


def submit(slurm: Testbed, *options: str) -> str:
    words = ("sbatch", "--parsable", "-p", "parts", "-o", "/dev/null", "--mem=100", *options)
    return slurm.client(*words, "--wrap=sleep 300").strip()


def until_runs(slurm: Testbed, job: str) -> None:
    end = time.monotonic() + 180
    while slurm.client("squeue", "-h", "-j", job, "-o", "%T").strip() != "RUNNING":
        assert time.monotonic() < end, slurm.client("squeue")
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to whoever asks for any: no daemon finds its port taken."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(1024, first_given), 200):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"expected {count} free ports, found {len(found)}")


def until(condition: Callable[[], object], what: str, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"expected {what} within {seconds:g} s"
        time.sleep(0.1)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
