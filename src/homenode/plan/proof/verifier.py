"""Verifier: whether the proof that a stored plan carries is true, by arithmetic of its own.

It shares no code with the search. Format, bounds and their names: docs/formats/proof.md.
"""

from copy import copy

from homenode.plan.proof.family import EVENNESS, HOME, Family, Goal, expect
from homenode.plan.proof.statement import Facts, PlanDocument, Proof, Search, Step

REST = """device_distance gpu_link_groups gpu_sets_lost unisolated_cores llcs_spanned unequal_llcs
pages_to_reserve balance_cores balance_memory gpus_without_nic unevenness gpu_nodes_used
nodes split gpus""".split()
SPANS = {"memory-first": "nodes_spanned", "spread": "minus_nodes_spanned"}
EQUALITY = ("device_class", "packages_spanned", *HOME, "nodes_spanned")
GIVES_WAY = "host's reserved memory, host's last core, uneven memory, memory from other nodes"


def terms_of(plan: PlanDocument, step: Step) -> tuple[list[str], list[str]]:
    """The terms in the order of comparison: those that a set of nodes decides, and the rest."""
    shows_pcie, rest = plan.layout.pcie == "mirrored", list(REST)
    first = ["device_class", "packages_spanned", *HOME * shows_pcie]
    first = [SPANS[plan.policy], *first] if plan.policy in SPANS else [*first, "nodes_spanned"]
    first += ["node_distance", *HOME * (not shows_pcie)]
    if plan.policy == "any":
        first, rest = ["nodes_spanned"], rest[1:]
    if step.even:
        rest = EVENNESS + [name for name in rest if name not in EVENNESS]
    return ["vcpus_beyond_cores"] * step.shares + first, rest


def roots(facts: Facts, step: Step, *, equal: bool) -> list[Family]:
    """All placings of a step: a family for each group of GPUs, the first one last."""
    groups = facts.gpu_groups if facts.gpu_count else [[]]
    return [Family(facts, step, group, equal=equal) for group in reversed(groups)]


def walk(facts: Facts, step: Step, search: Search, goal: Goal, *, ties: bool) -> None:
    """Check a tree: every leaf is impossible or costs more than the goal; with ties, no less."""
    families, names = roots(facts, step, equal=search.splits == "equal"), [name for name, _ in goal]
    for place, vertex in enumerate(search.tree):
        where = f"{', '.join(step.fallbacks[0]) or step.outcome}, {search.splits}, vertex {place}"
        expect(families, f"{where}: expected the end of the tree, found {vertex!r}")
        family = families.pop()
        if " " in vertex:
            families += reversed(family.branches(vertex))
            continue
        until = names.index(vertex) + 1 if vertex in names else len(names)
        standing, _ = copy(family).compare(goal[:until])
        is_so = family.rejection() == vertex or (standing == 1 and vertex in names)
        expect(
            is_so or (ties and vertex == "tie" and standing >= 0),
            f"{where}: expected {vertex!r} to exclude {family}, found that it does not",
        )
    expect(
        not families, f"expected a tree of all placings, found {len(families)} families left out"
    )


def verify(plan: PlanDocument, proof: Proof) -> list[str]:
    """What is proved of a plan, in sentences. Raises FalseProofError."""
    facts, steps, cost = proof.facts, proof.steps, [(one.name, one.value) for one in plan.cost]
    at = [number for number, step in enumerate(steps) if step.outcome == "chosen"]
    expect(len(at) == 1, f"expected one step that is chosen, found {len(at)}")
    step, value = steps[at[0]], dict(cost)
    given = [one for one in plan.rung.split(", ")[1:] if one != "unequal cells"]
    expect(given in step.fallbacks, f"expected a chosen step for {given}, found {step.fallbacks}")
    first, rest = terms_of(plan, step)
    found = [name for name, _ in cost]
    expect(found == first + rest, f"expected the terms {first + rest}, found {found}")
    lists = [name for name, one in cost if isinstance(one, tuple)]
    expect(lists == ["nodes", "split", "gpus"], f"expected lists for the last terms, found {lists}")
    expect(0 < proof.terms <= len(cost), f"expected 1 to {len(cost)} terms, found {proof.terms}")
    split = value["split"]
    main = "equal" if step.equal and isinstance(split, tuple) and len({*split}) == 1 else "any"
    check_chosen(plan, facts, step, main)
    searches: dict[str, Search] = {search.splits: search for search in step.searches}
    wanted = {main, "any", "equal"} if step.equal and not step.reason else {main}
    expect(searches.keys() == wanted, f"expected searches of {sorted(wanted)} splits")
    walk(facts, step, searches.pop(main), cost[: proof.terms], ties=True)
    for search in searches.values():
        check_preference(facts, step, search, cost[: len(first)], main)
    earlier = [one for other in steps[: at[0]] for one in other.fallbacks]
    for one in filter(GIVES_WAY.split(", ").__contains__, given):
        left = [other for other in given if other != one]
        expect(left in earlier, f"expected an earlier step {left}, found none")
    near = first.index("nodes_spanned") if plan.policy == "cores-first" else int(step.shares)
    of_kind = f" with {main} cells" if step.reason and main == "equal" else ""
    terms = (
        f"the first {proof.terms} of {len(cost)}" if proof.terms < len(cost) else f"all {len(cost)}"
    )
    said = [f"proved: no placement{of_kind} costs less, in {terms} terms of the cost"]
    said += [f"not proved: {step.reason}"] * bool(step.reason)
    said += [f"not proved: {', '.join(found[proof.terms :])}"] * (proof.terms < len(found))
    for number, other in enumerate(steps):
        if number != at[0]:
            said.append(check_step(facts, other, cost[:near], is_earlier=number < at[0]))
    return said


def check_chosen(plan: PlanDocument, facts: Facts, step: Step, splits: str) -> None:
    """The plan's placing is one of those that are compared, and costs what it says."""
    value = {one.name: one.value for one in plan.cost}
    nodes, split, positions = value["nodes"], value["split"], value["gpus"]
    assert isinstance(nodes, tuple) and isinstance(split, tuple) and isinstance(positions, tuple)
    expect(set(plan.nodes) == set(nodes) <= set(facts.nodes), f"expected the nodes {nodes}")
    owned = {one.bdf for one in plan.devices}
    chosen = [number for number, gpu in enumerate(facts.gpus) if gpu.position in positions]
    of_plan = [number for number, gpu in enumerate(facts.gpus) if gpu.bdf in owned]
    expect(
        chosen == of_plan, f"expected the GPUs of positions {positions} among the plan's devices"
    )
    given = set(facts.named_positions)
    gpus = [number for number in chosen if facts.gpus[number].position not in given]
    ways = [one for one in roots(facts, step, equal=splits == "equal") if {*gpus} <= {*one.more}]
    expect(ways and len(gpus) == facts.gpu_count, f"expected {facts.gpu_count} GPUs to choose")
    family = ways[0]
    family.must, family.gpus, family.may, family.more = (
        list(map(facts.nodes.index, nodes)),
        gpus,
        [],
        [],
    )
    ranges = [(family.low[node], family.high[node]) for node in family.must]
    expect(
        len(split) == len(nodes)
        and all(low <= -part <= high for (low, high), part in zip(ranges, split, strict=True)),
        f"expected parts within {ranges}, found {split}",
    )
    family.low, family.high = list(family.low), list(family.high)
    for node, part in zip(family.must, split, strict=True):
        family.low[node] = family.high[node] = -part
    reason = family.rejection()
    expect(reason is None, f"expected a placing that is possible, found {reason}")
    family.narrow()
    for name, wanted in value.items():
        found = family.bound(name)
        expect(found == wanted, f"expected {name} {found}, found {wanted}")


def check_preference(facts: Facts, step: Step, search: Search, cost: Goal, main: str) -> None:
    """Equal cells are chosen where they cost no more of EQUALITY than the best of all splits."""
    if search.least is None:
        expect(main == "any", "expected a set of nodes of least first terms, found none")
        walk(facts, step, search, [], ties=False)
        return
    goal = [(name, least) for (name, _), least in zip(cost, search.first, strict=False)]
    own, least = dict(cost), dict(goal)
    ways = roots(facts, step, equal=search.splits == "equal")
    for one in ways:
        one.must, one.may = sorted(search.least), []
    is_least = any(one.rejection() is None and one.compare(goal)[0] == 0 for one in ways)
    expect(is_least and len(least) == len(own), f"expected the first terms of nodes {search.least}")
    near = [name for name in EQUALITY if name in own]
    if main == "equal":
        is_so = all(own[name] <= least[name] for name in near)
    else:
        is_so = any(own[name] < least[name] for name in near)
    expect(is_so, "expected equal cells where they cost no more, and unequal ones where they do")
    walk(facts, step, search, goal, ties=True)


def check_step(facts: Facts, step: Step, near: Goal, *, is_earlier: bool) -> str:
    """What is proved of a fallback that is not chosen."""
    names = (f'"{", ".join(one) or "nothing gives way"}"' for one in step.fallbacks)
    name = f"fallback {' or '.join(names)}"
    if step.outcome == "unproved":
        return f"{name}: not proved: {step.reason}"
    if step.outcome == "host-core":
        expect(step.cores_left - step.groups < step.cores_kept, f"{name}: expected too few cores")
        return f"{name}: the host would keep too few cores"
    is_near = step.outcome == ("worse" if is_earlier else "not-better")
    expect(step.outcome == "no-set" or (is_near and near), f"{name}: found {step.outcome}")
    expect([one.splits for one in step.searches] == ["any"], f"{name}: expected one search")
    walk(facts, step, step.searches[0], near if is_near else [], ties=step.outcome == "not-better")
    said = {"worse": "each placement is farther away", "not-better": "no placement is nearer"}
    return f"{name}: {said.get(step.outcome, 'no set of nodes holds the VM')}"
