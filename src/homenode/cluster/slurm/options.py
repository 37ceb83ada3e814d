"""Options: what slurm's commands are asked for, with how each is typed on a command line."""

from typing import Annotated

from msgspec import Struct

from homenode.option import Flag, Opt

SPOOL = "/var/spool/homenode-slurm"
"""Where the hooks of a node keep what they saw of jobs."""

MAX_NODES = 4096
MAX_ROUNDS = 100
MAX_CPUS = 65536
MAX_TIME = 1e6


class Shape(Struct, frozen=True):
    """A job of the shared queue."""

    gpus: int  # of one job
    jobs: int  # at once on a node
    gres: str = "gpu"

    @property
    def name(self) -> str:
        """As files are called.

        >>> Shape(2, 2).name, Shape(1, 4, "gpu:1g.10gb").name
        ('shared-2gpu', 'shared-1slice-1g.10gb')
        """
        if self.gres == "gpu":
            return f"shared-{self.gpus}gpu"
        return f"shared-{self.gpus}slice-{self.gres.rpartition(':')[2]}"


class StudyOptions(Struct, frozen=True):
    """What the user asks of a study. None: the cluster's or the host's own.

    Options:
      partition_exclusive: Partition for whole-node jobs. Default: the cluster's default.
      partition_shared: Partition for shared jobs. Default: as for whole-node jobs.
      nodes: Number of cluster nodes to study: nodes of both partitions first, idle before busy;
        more nodes than the cluster has are rejected.
      rounds: Number of jobs of each kind on each node.
      cpus_per_gpu: CPUs per GPU of shared jobs. Default: an even share of the node's.
      minutes: Time limit of each job.
      account: Account that sbatch is given. Default: SBATCH_ACCOUNT; other variables of sbatch do
        not reach the jobs.
      qos: Quality of service that sbatch is given.
      reservation: Reservation that sbatch is given.
      tests: Tests of homenode bench besides the copies; none omits them; may be repeated. Default:
        stream, mem-latency.
      metric: Regular expression that finds the program's result: the group of the last match.
      lower_is_better: The result is a time in seconds. Default: a rate.
      between_nodes: Measure also all-reduce on and between the nodes (all_reduce_perf on the PATH,
        built with MPI).
      mpi: MPI plugin of srun for jobs between nodes: pmix, pmi2. Default: the cluster's.
      setup: A shell file that each job reads first, with lines such as module load cuda.
    """

    partition_exclusive: Annotated[str | None, Opt("--partition-exclusive", "P")] = None
    partition_shared: Annotated[str | None, Opt("--partition-shared", "Q")] = None
    nodes: Annotated[int, Opt("--nodes", "N", ge=1, le=MAX_NODES)] = 1
    # a recommendation is measured from three on
    rounds: Annotated[int, Opt("--rounds", "N", ge=1, le=MAX_ROUNDS)] = 3
    node_list: tuple[str, ...] = ()
    numa: tuple[int, ...] | None = None  # NUMA nodes to bind to
    shapes: tuple[Shape, ...] = (Shape(1, 4), Shape(2, 2))
    cpus_per_gpu: Annotated[
        int | None, Opt("--cpus-per-gpu", "N", ge=1, le=MAX_CPUS, rare=True)
    ] = None
    minutes: Annotated[int, Opt("--minutes", "M", ge=1, le=MAX_TIME, rare=True)] = 30
    account: Annotated[str | None, Opt("--account", "A", rare=True)] = None
    qos: Annotated[str | None, Opt("--qos", "Q", rare=True)] = None
    reservation: Annotated[str | None, Opt("--reservation", "R", rare=True)] = None
    tests: Annotated[tuple[str, ...], Opt("--tests", "TEST")] = ("stream", "mem-latency")
    app: tuple[str, ...] = ()  # words of a command, which runs in app_folder
    app_folder: str = "."
    metric: Annotated[str | None, Opt("--metric", "REGEX", rare=True)] = None
    lower_is_better: Annotated[bool, Flag("--lower-is-better", rare=True)] = False
    between_nodes: Annotated[bool, Flag("--between-nodes")] = False
    mpi: Annotated[str | None, Opt("--mpi", "TYPE", rare=True)] = None
    homenode: str = "homenode"  # as the nodes find it
    setup: Annotated[str | None, Opt("--setup", "FILE", rare=True)] = None
