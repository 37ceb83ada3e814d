"""Verifier: whether the proof that a stored plan carries is true, by arithmetic of its own.

It shares no code with the search. Format, bounds and their names: docs/formats/proof.md.
"""

from math import gcd

from homenode.plan.proof.family import Family
from homenode.plan.proof.statement import Facts, Goal, PlanDocument, Proof, Search, Step, terms_of

EQUALITY = {"device_class", "packages_spanned", "gpus_away_from_home", "nodes_spanned"}
RULES = "host's reserved memory, host's last core, uneven memory, memory from other nodes"


class FalseProofError(Exception):
    """Says what of a proof is false."""


def expect(is_so: object, what: str) -> None:
    if not is_so:
        raise FalseProofError(what)


def roots(facts: Facts, step: Step, *, equal: bool) -> list[Family]:
    """All placings of a step: a family for each choice of devices, number of nodes and, for equal
    cells and where sockets are counted, divisor of the parts; the first one last."""
    groups, most = step.groups, min(facts.most_nodes, step.groups, len(facts.nodes))
    return [
        Family(facts, step, choice, size, unit, equal=equal)
        for choice in reversed(facts.choices)
        for size in range(most, 0, -1)
        for unit in (range(1, groups // size + 1) if equal or step.sockets else (1,))
        if groups % unit == 0 and (not equal or unit * size == groups)
    ]


def walk(facts: Facts, step: Step, search: Search, goal: Goal, *, ties: bool) -> None:
    """Check a tree: every leaf is impossible or costs more than the goal; with ties, no less."""
    families = roots(facts, step, equal=search.splits == "equal")
    for place, vertex in enumerate(search.tree):
        where = f"{', '.join(step.fallbacks[0]) or step.outcome}, {search.splits}, vertex {place}"
        expect(families, f"{where}: expected the end of the tree, found {vertex!r}")
        family = families.pop()
        if " " in vertex:
            families += reversed(family.branches(vertex))
            continue
        reason = family.rejection()
        standing, found = (1, reason) if reason else family.compare(goal)
        is_so = found == vertex and standing >= 1 - ties
        expect(is_so, f"{where}: expected {vertex!r} to exclude a family, found {found}")
    expect(not families, f"expected a tree of all placings, found {len(families)} left out")


def verify(plan: PlanDocument, proof: Proof) -> None:
    """Raises FalseProofError where the proof does not show what conclusions() says."""
    facts, steps, cost = proof.facts, proof.steps, [(one.name, one.value) for one in plan.cost]
    at = [number for number, step in enumerate(steps) if step.outcome == "chosen"]
    expect(len(at) == 1, f"expected one step that is chosen, found {len(at)}")
    step = steps[at[0]]
    (first, rest), found = terms_of(plan, step), [name for name, _ in cost]
    expect(found == first + rest, f"expected the terms {first + rest}, found {found}")
    expect(0 < proof.terms <= len(cost), f"expected 1 to {len(cost)} terms, found {proof.terms}")
    check_chosen(plan, facts, step, cost)
    main = "equal" if step.equal and len({*plan.value("split")}) == 1 else "any"
    searches: dict[str, Search] = {search.splits: search for search in step.searches}
    wanted = {main, "any", "equal"} if step.equal and not step.reason else {main}
    expect(searches.keys() == wanted, f"expected searches of {sorted(wanted)} splits")
    walk(facts, step, searches.pop(main), cost[: proof.terms], ties=True)
    for search in searches.values():
        check_preference(facts, step, search, cost[: len(first)], main)
    earlier = [one for other in steps[: at[0]] for one in other.fallbacks]
    expect(plan.gave_way in step.fallbacks, f"expected a chosen step for {plan.gave_way}")
    for one in set(RULES.split(", ")).intersection(plan.gave_way):
        left = [other for other in plan.gave_way if other != one]
        expect(left in earlier, f"expected an earlier step {left}, found none")
    near = cost[: first.index("nodes_spanned") if plan.policy == "cores-first" else step.shares]
    for number, other in enumerate(steps):
        if number != at[0]:
            check_step(facts, other, near, "worse" if number < at[0] else "not-better")


def check_chosen(plan: PlanDocument, facts: Facts, step: Step, cost: Goal) -> None:
    """The plan's placing is one of those that are compared, and costs what it says."""
    nodes, split = plan.value("nodes"), plan.value("split")
    expect({*plan.nodes} == {*nodes} <= {*facts.nodes}, f"expected the nodes {nodes}")
    is_so = len({*nodes}) == len(split) and max(split) < 0
    expect(is_so, f"expected a part of each node, found {split}")
    parts, owned = dict(zip(nodes, split, strict=True)), {one.bdf for one in plan.devices}
    named = {facts.devices[one].bdf for one in facts.given} - {""}
    gpus = {n for n, one in enumerate(facts.devices) if one.bdf in owned - named}
    key = len(nodes), gcd(*split) if step.sockets else 1
    ways = [one for one in roots(facts, step, equal=False) if (one.size, one.unit) == key]
    ways = [one for one in ways if gpus <= {*one.own, *one.more}]
    is_so = ways and named <= owned and len({*facts.given, *gpus}) == facts.device_count
    expect(is_so, "expected the GPUs of one choice")
    ways[0].low = [-parts.get(node, 0) for node in facts.nodes]
    ways[0].high = [min(one) for one in zip(ways[0].high, ways[0].low, strict=True)]
    ways[0].own, ways[0].more = sorted({*facts.given, *gpus}), []
    reason = ways[0].settle().rejection()
    expect(reason is None, f"expected a placing that is possible, found {reason}")
    for name, wanted in cost:
        found = ways[0].bound(name)
        expect(found == wanted, f"expected {name} {found}, found {wanted}")


def check_preference(facts: Facts, step: Step, search: Search, cost: Goal, main: str) -> None:
    """Equal cells are chosen where they cost no more of EQUALITY than the best of all splits."""
    goal = [(name, least) for (name, _), least in zip(cost, search.first, strict=False)]
    if search.least is None:
        expect(main == "any", "expected a set of nodes of least first terms, found none")
    else:
        ways = roots(facts, step, equal=search.splits == "equal")
        ways = [one.with_nodes(search.least) for one in ways if one.size == len(search.least)]
        is_so = any(one.rejection() is None and one.compare(goal)[0] == 0 for one in ways)
        expect(is_so and len(goal) == len(cost), f"expected first terms of nodes {search.least}")
        near = [(own, dict(goal)[name]) for name, own in cost if name in EQUALITY]
        costs = [own - least if main == "equal" else least - own for own, least in near]
        expect((max(costs) > 0) == (main == "any"), "expected equal cells where they cost no more")
    walk(facts, step, search, goal, ties=search.least is not None)


def check_step(facts: Facts, step: Step, near: Goal, outcome: str) -> None:
    """A fallback that is not chosen is left out for a reason, as far as its step says one."""
    name = ", ".join(step.fallbacks[0]) or "nothing gives way"
    if step.outcome == "host-core":
        expect(step.cores_left - step.groups < step.cores_kept, f"{name}: expected too few cores")
    elif step.outcome != "unproved":
        goal = [] if step.outcome == "no-set" else near
        is_so = step.outcome == "no-set" or (step.outcome == outcome and goal)
        expect(is_so, f"{name}: found {step.outcome}")
        expect([one.splits for one in step.searches] == ["any"], f"{name}: expected one search")
        walk(facts, step, step.searches[0], goal, ties=step.outcome == "not-better")
