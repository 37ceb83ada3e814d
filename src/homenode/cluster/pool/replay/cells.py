"""Cells: servers of two NUMA nodes filled with VMs of one or two cells, one at a time.

Every cell has its cores and memory on one node, and two cells of a VM are on two. Policies: first
fit; best fit by node; best fit that sees a server as one pool and pins afterwards; ours, that of
`place` (policy.py), with a rule for groups: how many VMs of each kind still fit on a server is the
closed form of arXiv 2604.15033 for its nodes.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from homenode.cluster.pool.policy import Workload
from homenode.cluster.pool.replay.trace import CellVm, GroupPolicy, Replay, TwoNodeServer
from homenode.cluster.pool.solver import optional_module

_LAST = 1 << 60
"""More than any loss."""


class CellPolicy(StrEnum):
    """Where a VM goes, among the servers that hold it."""

    FIRST_FIT = "first-fit"
    BEST_FIT = "best-fit"
    BLIND_BEST_FIT = "blind-best-fit"
    HOMENODE = "homenode"


class _Servers:
    """Free cores and memory; shape (servers, nodes)."""

    def __init__(self, servers: Sequence[TwoNodeServer], vms: Sequence[CellVm]) -> None:
        numpy = optional_module("numpy", "pool simulate")
        self.numpy = numpy
        self.cores = numpy.array([server.cores for server in servers])
        self.memory = numpy.array([server.memory_gib for server in servers])
        self.total = max(1, int(self.cores.sum()))
        self.used: dict[tuple[GroupPolicy, str], dict[int, set[str]]] = {}
        kinds = Counter((vm.cores, vm.memory_gib, vm.cells) for vm in vms)
        self.need_cores = numpy.array([c // k for c, _, k in kinds])
        self.need_memory = numpy.array([max(1, m // k) for _, m, k in kinds])
        self.two = numpy.array([k == 2 for _, _, k in kinds])
        self.value = numpy.array(list(kinds.values()))
        self.workload = Workload.of(len(vms), ())
        self.has_group = numpy.zeros(len(servers), bool)
        self.now = 0
        self.changed = numpy.zeros(len(servers), int)
        self._losses: dict[tuple[int, int, int], tuple[Any, int]] = {}

    def of_kind(self, vm: CellVm) -> Any:
        """How many VMs of this size each server holds."""
        numpy = self.numpy
        cells = numpy.minimum(
            self.cores // (vm.cores // vm.cells), self.memory // max(1, vm.memory_gib // vm.cells)
        )
        return cells.min(1) if vm.cells == 2 else cells.sum(1)

    def loss(self, vm: CellVm) -> Any:
        """What capacity each server loses by the VM, by the node of its first cell; worked out
        again only for servers that have changed. Shape (servers, nodes)."""
        numpy = self.numpy
        key = (vm.cores, vm.memory_gib, vm.cells)
        if key in self._losses:
            found, at = self._losses[key]
            stale = numpy.flatnonzero(self.changed > at)
        else:
            found = numpy.zeros(self.cores.shape, int)
            stale = numpy.arange(len(self.cores))
        cores, memory = self.cores[stale], self.memory[stale]
        before = self.space(cores, memory)
        for node in range(2):
            nodes = [0, 1] if vm.cells == 2 else [node]
            left_cores, left_memory = cores.copy(), memory.copy()
            left_cores[:, nodes] -= vm.cores // vm.cells
            left_memory[:, nodes] -= vm.memory_gib // vm.cells
            found[stale, node] = before - self.space(left_cores, left_memory)
        self._losses[key] = found, self.now
        return found

    def allowed(self, vm: CellVm) -> Any:
        """Servers that the VM's group allows, as a mask; None = all."""
        if vm.spread is GroupPolicy.NONE or not vm.group:
            return None
        numpy = self.numpy
        used = self.used.get((vm.spread, vm.group), {})
        if vm.spread is GroupPolicy.AFFINITY:
            if not used:
                return None
            mask = numpy.zeros(len(self.cores), bool)
            mask[list(used)] = True
            return mask
        mask = numpy.ones(len(self.cores), bool)
        for server, domains in used.items():
            if vm.spread is GroupPolicy.ANTI_AFFINITY or domains - {vm.domain}:
                mask[server] = False
        return mask

    def fits(self, vm: CellVm) -> Any:
        """Of each server and node, whether it holds a cell; shape (servers, nodes)."""
        cores, memory = vm.cores // vm.cells, vm.memory_gib // vm.cells
        return (self.cores >= cores) & (self.memory >= memory)

    def take(self, server: int, vm: CellVm, nodes: Sequence[int]) -> None:
        for node in nodes:
            self.cores[server, node] -= vm.cores // vm.cells
            self.memory[server, node] -= vm.memory_gib // vm.cells
        self.now += 1
        self.changed[server] = self.now
        if vm.spread is GroupPolicy.AFFINITY:
            self.has_group[server] = True
        if vm.spread is not GroupPolicy.NONE and vm.group:
            servers = self.used.setdefault((vm.spread, vm.group), {})
            servers.setdefault(server, set()).add(vm.domain)

    def space(self, cores: Any, memory: Any) -> Any:
        """What servers with so much free are worth. cores, memory: shape (servers, nodes)."""
        numpy = self.numpy
        whole = numpy.minimum(
            cores[:, :, None] // self.need_cores, memory[:, :, None] // self.need_memory
        )
        both = numpy.where(self.two, whole.min(1), whole.sum(1))
        return self.workload.worth(both @ self.value, 0, cores.sum(1))


def _first(servers: _Servers, vm: CellVm, choices: Any) -> int:
    return 0


def _best(servers: _Servers, vm: CellVm, choices: Any) -> int:
    """Least left on the nodes that the VM gets, of cores and of memory."""
    numpy = servers.numpy
    machines, nodes = choices
    cores, memory = vm.cores // vm.cells, vm.memory_gib // vm.cells
    if vm.cells == 2:
        left = (servers.cores[machines] - cores).sum(1) / servers.cores.max()
        left = left + (servers.memory[machines] - memory).sum(1) / servers.memory.max()
    else:
        left = (servers.cores[machines, nodes] - cores) / servers.cores.max()
        left = left + (servers.memory[machines, nodes] - memory) / servers.memory.max()
    return int(numpy.argmin(left))


def _ours(servers: _Servers, vm: CellVm, choices: Any) -> int:
    """Least loss of capacity; of equal ones the least left.

    The first VM of a group that must stay on one server goes where most of its kind fit, and
    servers that have such a group are the last choice for all others: they are its only place.
    """
    numpy = servers.numpy
    machines, nodes = choices
    if vm.spread is GroupPolicy.AFFINITY and (vm.spread, vm.group) not in servers.used:
        fits = servers.of_kind(vm)[machines] - 1e6 * servers.has_group[machines]
        equal = numpy.flatnonzero(fits >= fits.max())
    else:
        loss = servers.loss(vm)[machines, nodes]
        if vm.spread is not GroupPolicy.AFFINITY:
            loss = loss + _LAST * servers.has_group[machines]
        equal = numpy.flatnonzero(loss <= loss.min())
    left = servers.cores[machines[equal]].sum(1) / servers.cores.max()
    left = left + servers.memory[machines[equal]].sum(1) / servers.memory.max()
    return int(equal[int(left.argmin())])


_CHOOSE = {
    CellPolicy.FIRST_FIT: _first,
    CellPolicy.BEST_FIT: _best,
    CellPolicy.HOMENODE: _ours,
}


def _placed(
    servers: _Servers, vm: CellVm, policy: CellPolicy
) -> tuple[int, tuple[int, ...]] | None:
    """(server, nodes) for the VM, or None where the policy refuses it."""
    numpy = servers.numpy
    allowed = servers.allowed(vm)
    fits = servers.fits(vm)
    if policy is CellPolicy.BLIND_BEST_FIT:
        cores, memory = servers.cores.sum(1), servers.memory.sum(1)
        mask = (cores >= vm.cores) & (memory >= vm.memory_gib)
        mask = mask if allowed is None else mask & allowed
        # The next in its order is tried until one can pin the VM, as a scheduler would retry.
        machines = numpy.flatnonzero(mask & (fits.sum(1) >= vm.cells))
        if not len(machines):
            return None
        left = (cores[machines] - vm.cores) / cores.max()
        left = left + (memory[machines] - vm.memory_gib) / max(1, memory.max())
        server = int(machines[int(left.argmin())])
        return server, tuple(int(node) for node in numpy.flatnonzero(fits[server])[: vm.cells])
    if allowed is not None:
        fits = fits & allowed[:, None]
    if vm.cells == 2:
        machines = numpy.flatnonzero(fits.all(1))
        nodes_of = numpy.zeros(len(machines), int)
    else:
        machines, nodes_of = numpy.nonzero(fits)
    if not len(machines):
        return None
    at = _CHOOSE[policy](servers, vm, (machines, nodes_of))
    return int(machines[at]), (0, 1) if vm.cells == 2 else (int(nodes_of[at]),)


def replay_cells(
    servers: Sequence[TwoNodeServer], vms: Sequence[CellVm], policy: CellPolicy
) -> Replay:
    """VMs in the order given, one decision at a time; none departs.

    before_first_refusal: VMs placed before the first one was refused. cores_percent: share of the
    cores that VMs have at the end. curve: VMs.
    """
    state = _Servers(servers, vms)
    placed, first, cores = 0, len(vms), 0
    curve: list[tuple[float, float]] = []
    for number, vm in enumerate(vms):
        found = _placed(state, vm, policy)
        if found is None:
            first = min(first, placed)
        else:
            state.take(found[0], vm, found[1])
            placed += 1
            cores += vm.cores
        if number % 50 == 0:
            curve.append((number, placed))
    figures = {
        "placed": placed,
        "before_first_refusal": min(first, placed),
        "cores_percent": cores / state.total * 100,
    }
    return Replay(figures=figures, curve=tuple(curve))
