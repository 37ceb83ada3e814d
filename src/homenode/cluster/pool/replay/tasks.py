"""Tasks: a cluster filled with tasks that take whole GPUs or a part of one, one at a time.

Policies: first fit; best fit and FGD as published (USENIX ATC'23, "Beware of Fragmentation", and
its simulator), and ours. FGD places a task where the expected fragment grows least: what is left of
GPUs that a task of the workload cannot use next. Ours is the policy of `place` (policy.py).

As in that simulator, machines are in an order that the seed draws, and of equal ones the first is
taken: it puts a drawn number before the name of each node, and takes the lowest name.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from homenode.cluster.pool.policy import Workload
from homenode.cluster.pool.replay.trace import MILLI, Replay, Task, TraceNode
from homenode.cluster.pool.solver import optional_module

_Kind = tuple[int, int, int, tuple[str, ...]]
"""Of a task: CPU, GPUs, parts of each, and models of GPUs."""

ARRIVED = 1.3
"""How much of the GPUs' capacity arrives, as published."""

TYPICAL = 0.95
"""Of FGD, as published: the share of the tasks that its workload is made of."""

_MOST = 1 << 62
"""More than a machine can lose."""

_BEST_FIT_CPU_MILLI, _BEST_FIT_GPU_MILLI = 128_000, 8_000
"""What best fit measures by: the largest machine's."""


class TaskPolicy(StrEnum):
    """Where a task goes, among the machines that hold it."""

    FIRST_FIT = "first-fit"
    BEST_FIT = "best-fit"
    FGD = "fgd"
    HOMENODE = "homenode"


def arrivals(tasks: Sequence[Task], capacity_milli: int, seed: int) -> list[Task]:
    """The tasks in random order, drawn again where they are too few, until enough have arrived."""
    numpy = optional_module("numpy", "pool simulate")
    rng = numpy.random.default_rng(seed)
    order = [tasks[i] for i in rng.permutation(len(tasks))]
    total = sum(task.total_gpu_milli for task in order)
    wanted = ARRIVED * capacity_milli
    if not any(task.gpus for task in tasks):
        return order
    while total < wanted:
        task = tasks[int(rng.integers(len(tasks)))]
        order.append(task)
        total += task.total_gpu_milli
    order = [order[i] for i in rng.permutation(len(order))]
    arrived = 0
    for number, task in enumerate(order):
        arrived += task.total_gpu_milli
        if arrived >= wanted:
            return order[: number + 1]
    return order


class TraceCluster:
    """Machines with what is free of them, as arrays. free: parts of each GPU; shape (machines,
    GPUs)."""

    def __init__(self, nodes: Sequence[TraceNode], tasks: Sequence[Task]) -> None:
        numpy = optional_module("numpy", "pool simulate")
        self.numpy = numpy
        self.cpu = numpy.array([node.cpu_milli for node in nodes])
        self.memory = numpy.array([node.memory_mib for node in nodes])
        count = numpy.array([node.gpus for node in nodes])
        most = int(count.max()) if len(nodes) else 0
        self.free = numpy.where(numpy.arange(max(1, most))[None, :] < count[:, None], MILLI, 0)
        self.sums = self.free.sum(1)
        self.whole = (self.free == MILLI).sum(1)
        self.capacity = int(self.sums.sum())
        models = sorted({node.model for node in nodes})
        number = {model: i for i, model in enumerate(models)}
        self.model = numpy.array([number[node.model] for node in nodes])
        self.models = number
        self.kinds = Counter((t.cpu_milli, t.gpus, t.gpu_milli, t.models) for t in tasks)

    def holds(self, task: Task) -> Any:
        """Which machines hold the task."""
        numpy = self.numpy
        fits = (self.cpu >= task.cpu_milli) & (self.memory >= task.memory_mib)
        if task.models:
            wanted = [self.models[model] for model in task.models if model in self.models]
            fits &= numpy.isin(self.model, wanted)
        if task.gpus == 1:
            fits &= self.free.max(1) >= task.gpu_milli
        elif task.gpus:
            fits &= self.whole >= task.gpus
        return numpy.flatnonzero(fits)

    def take(self, machine: int, task: Task, gpu: int | None) -> None:
        """Give the task its part. gpu: which one, of a task that takes a part of one."""
        self.cpu[machine] -= task.cpu_milli
        self.memory[machine] -= task.memory_mib
        if gpu is not None:
            self.free[machine, gpu] -= task.gpu_milli
        elif task.gpus:
            whole = self.numpy.flatnonzero(self.free[machine] == MILLI)[: task.gpus]
            self.free[machine, whole] = 0
        self.sums[machine] = self.free[machine].sum()
        self.whole[machine] = (self.free[machine] == MILLI).sum()

    def after(self, machines: Any, task: Task, gpu: int | None) -> tuple[Any, Any, Any]:
        """(CPU, free parts, whole GPUs) of machines with the task on them."""
        numpy = self.numpy
        free = self.free[machines].copy()
        whole = self.whole[machines]
        if gpu is not None:
            whole = whole - (free[:, gpu] == MILLI)
            free[:, gpu] -= task.gpu_milli
        elif task.gpus:
            full = free == MILLI
            free[full & (numpy.cumsum(full, 1) <= task.gpus)] = 0
            whole = whole - task.gpus
        return self.cpu[machines] - task.cpu_milli, free, whole


def _shares(task: Task) -> bool:
    return task.gpus == 1 and task.gpu_milli < MILLI


class _FirstFit:
    """The first machine; of its GPUs the first."""

    def __init__(self, cluster: TraceCluster) -> None:
        self.cluster = cluster

    def choose(self, machines: Any, task: Task) -> tuple[int, int | None]:
        machine = int(machines[0])
        if not _shares(task):
            return machine, None
        return machine, int((self.cluster.free[machine] >= task.gpu_milli).argmax())

    def placed(self, machine: int) -> None:
        """Nothing is kept."""


class _BestFit(_FirstFit):
    """The machine with least left of CPUs and GPUs, in whole per cent; of its GPUs the tightest."""

    def choose(self, machines: Any, task: Task) -> tuple[int, int | None]:
        cluster, numpy = self.cluster, self.cluster.numpy
        left = (
            (cluster.cpu[machines] - task.cpu_milli) / _BEST_FIT_CPU_MILLI
            + (cluster.sums[machines] - task.total_gpu_milli) / _BEST_FIT_GPU_MILLI
        ) / 2
        machine = int(machines[int(numpy.floor((1 - left) * 100).argmax())])
        if not _shares(task):
            return machine, None
        free = cluster.free[machine]
        return machine, int(numpy.where(free >= task.gpu_milli, free, 2 * MILLI).argmin())


def _typical(kinds: Counter[_Kind]) -> dict[_Kind, int]:
    """The most frequent kinds of task that are TYPICAL of all together."""
    left = TYPICAL * sum(kinds.values())
    found = {}
    for kind, count in sorted(kinds.items(), key=lambda one: (one[1], one[0]), reverse=True):
        if left <= 0:
            break
        found[kind] = count
        left -= count
    return found


class _Fgd(_FirstFit):
    """Least growth of the expected fragment, as the simulator scores it: a sigmoid in whole per
    cent. The workload is that of the most frequent kinds of task, until they are TYPICAL of all."""

    def __init__(self, cluster: TraceCluster) -> None:
        super().__init__(cluster)
        numpy = cluster.numpy
        kinds = _typical(cluster.kinds)
        total = sum(kinds.values())
        self.levels = numpy.array(sorted({cpu for cpu, *_ in kinds}))
        most = cluster.free.shape[1]
        part = numpy.zeros((len(cluster.models), len(self.levels) + 1, MILLI + 1))
        several = numpy.zeros((*part.shape[:2], most + 1))
        for (cpu, gpus, milli, models), count in kinds.items():
            level = int(numpy.searchsorted(self.levels, cpu)) + 1
            for model, number in cluster.models.items():
                if models and model not in models:
                    continue
                if gpus == 1:
                    part[number, level:, milli:] += count / total
                elif 1 < gpus <= most:
                    several[number, level:, gpus:] += count / total
        # What a task of the workload can use of a GPU with so much free, and of so many whole ones.
        self.of_part = part * numpy.arange(MILLI + 1)
        self.of_whole = several * numpy.arange(most + 1) * MILLI
        self.usable = self._usable(cluster.model, cluster.cpu, cluster.free, cluster.whole)

    def _usable(self, model: Any, cpu: Any, free: Any, whole: Any) -> Any:
        level = self.cluster.numpy.searchsorted(self.levels, cpu, side="right")
        parts = self.of_part[model[:, None], level[:, None], free].sum(1)
        return parts + self.of_whole[model, level, whole]

    def choose(self, machines: Any, task: Task) -> tuple[int, int | None]:
        cluster, numpy = self.cluster, self.cluster.numpy
        level = numpy.searchsorted(
            self.levels, cluster.cpu[machines] - task.cpu_milli, side="right"
        )
        free, whole = cluster.free[machines], cluster.whole[machines]
        kind = cluster.model[machines], level
        kinds = kind[0][:, None], level[:, None]
        terms = self.of_part[*kinds, free]
        sums = terms.sum(1)
        if _shares(task):
            fits = free >= task.gpu_milli
            rest = numpy.where(fits, free - task.gpu_milli, 0)
            usable = sums[:, None] - terms + self.of_part[*kinds, rest]
            usable += self.of_whole[*kinds, whole[:, None] - (free == MILLI)]
        else:
            fits = numpy.ones((len(machines), 1), bool)
            usable = sums - task.gpus * self.of_part[*kind, MILLI]
            usable = (usable + self.of_whole[*kind, whole - task.gpus])[:, None]
        gain = usable + task.total_gpu_milli - self.usable[machines][:, None]
        score = numpy.floor(100 / (1 + numpy.exp(-numpy.clip(gain / MILLI, -50, 50))))
        score = numpy.where(fits, score, -1)
        best = score.max(1)
        at = int(best.argmax())
        return int(machines[at]), int(score[at].argmax()) if _shares(task) else None

    def placed(self, machine: int) -> None:
        one = slice(machine, machine + 1)
        cluster = self.cluster
        now = cluster.model[one], cluster.cpu[one], cluster.free[one], cluster.whole[one]
        self.usable[one] = self._usable(*now)


class _Homenode(_FirstFit):
    """The policy of `place`, with the kinds of task as its workload: least loss, then fewest GPUs
    left, then fewest CPUs. What a machine loses by a kind of task is kept until it changes."""

    def __init__(self, cluster: TraceCluster) -> None:
        super().__init__(cluster)
        numpy = cluster.numpy
        kinds = [
            (cpu, gpus, milli, n) for (cpu, gpus, milli, _), n in cluster.kinds.items() if gpus
        ]
        most = cluster.free.shape[1]
        self.cpu_of, gpus_of, milli_of, number = numpy.array(kinds or [(1, 1, 1, 0)]).T
        parts = numpy.arange(MILLI + 1)[:, None] // milli_of[None, :]
        self.of_part = parts * (gpus_of == 1)
        several = numpy.arange(most + 1)[:, None] // gpus_of[None, :]
        self.of_whole = several * (gpus_of > 1)
        self.value = gpus_of * milli_of * number
        self.workload = Workload.of(
            int(number.sum()), [(n * gpus * milli, n * cpu) for cpu, gpus, milli, n in kinds]
        )
        self.worth = self._worth(cluster.cpu, cluster.free, cluster.whole)
        self.now = 1
        self.changed = numpy.zeros(len(cluster.cpu), int)
        self.losses: dict[tuple[int, int, int], tuple[Any, Any, int]] = {}

    def _worth(self, cpu: Any, free: Any, whole: Any) -> Any:
        numpy = self.cluster.numpy
        by_gpu = self.of_part[free].sum(1) + self.of_whole[whole]
        by_cpu = cpu[:, None] // numpy.maximum(1, self.cpu_of)
        filled = numpy.minimum(by_gpu, by_cpu) @ self.value
        return self.workload.worth(filled, free.sum(1), cpu)

    def choose(self, machines: Any, task: Task) -> tuple[int, int | None]:
        cluster = self.cluster
        loss, gpu = self._losses(task)
        order = cluster.numpy.lexsort(
            (cluster.cpu[machines], cluster.sums[machines], loss[machines])
        )
        machine = int(machines[order[0]])
        return machine, int(gpu[machine]) if _shares(task) else None

    def _losses(self, task: Task) -> tuple[Any, Any]:
        """Of each machine what it loses by the task, and on which GPU least."""
        cluster, numpy = self.cluster, self.cluster.numpy
        key = (task.cpu_milli, task.gpus, task.gpu_milli)
        if key in self.losses:
            loss, gpu, at = self.losses[key]
            stale = numpy.flatnonzero(self.changed >= at)
        else:
            stale = numpy.arange(len(cluster.cpu))
            loss, gpu = numpy.zeros(len(stale), int), numpy.zeros(len(stale), int)
        loss[stale] = _MOST
        stale = stale[cluster.cpu[stale] >= task.cpu_milli]
        if _shares(task):
            for number in range(cluster.free.shape[1]):
                own = cluster.free[stale, number]
                fits = own >= task.gpu_milli
                for before in range(number):  # GPUs alike are tried once
                    fits &= cluster.free[stale, before] != own
                some = stale[fits]
                if len(some):
                    lost = self.worth[some] - self._worth(*cluster.after(some, task, number))
                    less = lost < loss[some]
                    loss[some[less]], gpu[some[less]] = lost[less], number
        else:
            some = stale[cluster.whole[stale] >= task.gpus]
            if len(some):
                loss[some] = self.worth[some] - self._worth(*cluster.after(some, task, None))
        self.losses[key] = (loss, gpu, self.now)
        return loss, gpu

    def placed(self, machine: int) -> None:
        one, cluster = slice(machine, machine + 1), self.cluster
        self.worth[one] = self._worth(cluster.cpu[one], cluster.free[one], cluster.whole[one])
        self.changed[machine] = self.now
        self.now += 1


_POLICIES: dict[TaskPolicy, Callable[[TraceCluster], _FirstFit]] = {
    TaskPolicy.FIRST_FIT: _FirstFit,
    TaskPolicy.BEST_FIT: _BestFit,
    TaskPolicy.FGD: _Fgd,
    TaskPolicy.HOMENODE: _Homenode,
}


def replay_tasks(
    nodes: Sequence[TraceNode], tasks: Sequence[Task], policy: TaskPolicy, seed: int
) -> Replay:
    """Tasks in the order of a seed, one decision at a time; none departs. A task that no machine
    holds is refused.

    allocated_percent: of the GPUs, at the end. curve: shares of them that have arrived and are
    allocated, at every per cent arrived.
    """
    numpy = optional_module("numpy", "pool simulate")
    drawn = numpy.random.default_rng((seed, 1)).permutation(len(nodes))
    cluster = TraceCluster([nodes[i] for i in drawn], tasks)
    chooser = _POLICIES[policy](cluster)
    arrived, allocated, refused = 0, 0, 0
    order = arrivals(tasks, cluster.capacity, seed)
    curve: list[tuple[float, float]] = []
    capacity = max(1, cluster.capacity)
    for task in order:
        arrived += task.total_gpu_milli
        machines = cluster.holds(task)
        if len(machines):
            machine, gpu = chooser.choose(machines, task)
            cluster.take(machine, task, gpu)
            chooser.placed(machine)
            allocated += task.total_gpu_milli
        else:
            refused += 1
        if arrived * 100 // capacity > len(curve):
            curve.append((arrived / capacity, allocated / capacity))
    figures = {
        "allocated_percent": allocated / capacity * 100,
        "refused_percent": refused / max(1, len(order)) * 100,
    }
    return Replay(figures=figures, curve=tuple(curve))
