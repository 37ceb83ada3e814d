"""Trees: how a proof splits the placings of a step into families that the verifier excludes."""

from msgspec import Struct

from homenode.plan.proof.statement import Facts, Goal, Splits, Step
from homenode.plan.proof.verifier import AWAY, Placings, roots

FEW_NODES = 8
"""With more nodes a tree splits by packages before it does by nodes."""

MOST_WORK = 150_000
"""Of one tree, as `work_of` counts: some tenths of a second; of a host of at most
twice as many nodes as those four times as much. Beyond, the proof is of fewer terms, or there is
none."""


class NotProvedError(Exception):
    """Says why there is no proof."""


class BranchOrder(Struct, frozen=True):
    """What to branch on first: nodes, GPUs and groups of the nodes, of the facts."""

    nodes: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()


def deepest(
    facts: Facts, step: Step, splits: Splits, cost: Goal, first: int, placing: BranchOrder
) -> tuple[int, list[str]]:
    """(so many terms, their tree): as many as can be proved. first: how many the nodes decide."""
    terms = len(cost)
    while terms:
        families = roots(facts, step, equal=splits == "equal")
        found = tree_of(families, cost[:terms], placing, ties=True)
        if not isinstance(found, int):
            return terms, found
        terms = found if found < terms else first if first < terms else 0
    raise NotProvedError("the first terms are not proved within the budget")


def tree_of(
    families: list[Placings], goal: Goal, placing: BranchOrder, *, ties: bool
) -> list[str] | int:
    """The tree; where there is none, so many terms as there might be one for: where these are
    those of the goal, it is the number of nodes that makes it too large."""
    names = [name for name, _ in goal]
    tree: list[str] = []
    likely, work = len(goal), 0
    most = MOST_WORK * (4 if families and len(families[0].low) <= 2 * FEW_NODES else 1)
    while families:
        family = families.pop()
        work += work_of(family)
        if work > most:
            return likely
        leaf = family.rejection()
        if leaf is None:
            standing, leaf = family.compare(goal)
            if standing < 1 - ties:
                branch = _branch(family, placing, leaf)
                term = names.index(leaf) if standing else len(names)
                if branch is None:
                    return term
                if not branch.startswith("node"):
                    likely = min(likely, term)
                tree.append(branch)
                families += reversed(family.branches(branch))
                continue
        tree.append(leaf)
    return tree


def work_of(family: Placings) -> int:
    """Roughly, what it takes to compare a family."""
    return 20 + len(family.inside) * (1 + len(family.more) // 8)


def _branch(family: Placings, placing: BranchOrder, term: str) -> str | None:
    """What to tell apart in a family that may cost less in a term; None where it is one placing."""
    packages = family.facts.packages
    known = {*family.packages, *(packages[node] for node in family.must)}
    nodes = [node for node in placing.nodes if node in family.may]
    if family.must or not nodes:
        nodes = sorted(family.may, key=lambda node: _cost(family, node, term)) or nodes
    if len(packages) > FEW_NODES or term == "packages_spanned":
        for node in nodes:
            if packages[node] not in known:
                return f"package {packages[node]}"
    for node in nodes:
        return f"node {node}"
    cut = _cut(family, placing)
    if cut is not None:
        return cut
    for gpu in (*placing.gpus, *family.more):
        if gpu in family.more:
            return f"gpu {gpu}"
    wanted = dict(zip(placing.nodes, placing.groups, strict=False))
    for node in family.must:
        low, high = family.low[node], family.high[node]
        if low < high:
            middle = wanted.get(node, low - 1)
            middle = middle if low <= middle <= high else (low + high) // 2
            return f"groups {node} {middle if middle < high else middle - 1}"
    return None


def _cut(family: Placings, placing: BranchOrder) -> str | None:
    """What leaves out numbers of groups that no split of the least unevenness has, or none that
    shares cores as late as it can."""
    step, must = family.step, family.must
    if step.shares:
        own = {node: max(1, family.step.cores[node]) for node in must}
        beyond = max(family.low[node] - own[node] for node in must)
        for node in must:
            fewest = min(step.room[node], own[node] + beyond - 1)
            if beyond > 0 and family.low[node] < fewest:
                return f"groups {node} {fewest - 1}"
        open_nodes = [node for node in must if family.high[node] < step.room[node]]
        least = min((family.high[node] - own[node] for node in open_nodes), default=step.groups)
        for node in must:
            most = own[node] + max(0, least + 1)
            if family.high[node] > most:
                return f"groups {node} {most}"
        left = step.groups - sum(own.values())
        room = {node: step.room[node] - own[node] for node in must}
        levels = [n for n in range(left + 1) if sum(min(n, one) for one in room.values()) <= left]
        level = max(levels, default=0)
        for node in must:
            most = own[node] + min(level + 1, room[node])
            if family.low[node] <= most < family.high[node]:
                return f"groups {node} {most}"
            fewest = own[node] + min(level, room[node])
            if left >= 0 and family.low[node] < fewest <= family.high[node]:
                return f"groups {node} {fewest - 1}"
    less = len(must) - 1
    if step.even and less and placing.groups:
        squares = less * sum(part * part for part in placing.groups)
        every = range(1, step.groups + 1)
        fits = [x for x in every if less * x * x + (step.groups - x) ** 2 <= squares]
        for node in must if fits else ():
            low, high = family.low[node], family.high[node]
            if low <= fits[-1] < high:
                return f"groups {node} {fits[-1]}"
            if low < fits[0] <= high:
                return f"groups {node} {fits[0] - 1}"
    return None


def _cost(family: Placings, node: int, term: str) -> int:
    """What a node adds to a term, or so: the least first are those that make a bound too low."""
    facts, step = family.facts, family.step
    if term in step.costs:
        return min(family.of_row(node, step.costs[term][node]))
    if term in (AWAY, "device_class"):
        return -sum(facts.devices[one].node == node for one in (*family.own, *family.more))
    if term == "device_distance":
        return sum(facts.devices[one].distances[node] for one in family.own)
    if term == "node_distance":
        return sum(facts.distances[node])
    if term == "vcpus_beyond_cores":
        return -family.step.cores[node]
    return 0
