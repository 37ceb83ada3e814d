"""The proof of a plan: true ones are accepted, and whatever is false in one is refused."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from math import gcd
from typing import Any

import pytest

from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.proof import trees
from homenode.plan.proof.build import proof_of
from homenode.plan.proof.facts import wrong_facts
from homenode.plan.proof.statement import FalseProofError, NotProved, Proof, decode_plan
from homenode.plan.proof.verifier import roots, verify
from homenode.plan.request import GuestRequest
from homenode.plan.stored import encode_plan, read_plan
from homenode.units import GIB
from homenode.vm.plan_model import Plan, Unplannable
from homenode.vm.sources import load_host
from tests.plan.test_against_brute_force import (
    chiplet_host,
    chiplet_wish,
    crowded_host,
    crowded_wish,
    small_host,
    small_wish,
    wide_host,
    wide_wish,
)
from tests.small_hosts import asking, small_request

Document = dict[str, Any]
KINDS: tuple[tuple[Callable[..., Host], Callable[..., GuestRequest]], ...] = (
    (small_host, small_wish),
    (wide_host, wide_wish),
    (crowded_host, crowded_wish),
    (chiplet_host, chiplet_wish),
)
SEEDS = range(120)


def planned(seed: int) -> tuple[Host, GuestRequest, Plan] | None:
    draw = random.Random(seed)
    make_host, make_request = KINDS[seed % len(KINDS)]
    host = make_host(draw)
    request = make_request(draw, host)
    try:
        return host, request, plan(host, request)
    except Unplannable:
        return None


def proved(seeds: range = SEEDS) -> Iterator[tuple[int, Host, Plan, Proof, Document]]:
    for seed in seeds:
        made = planned(seed)
        if made is not None:
            proof = proof_of(*made)
            assert isinstance(proof, Proof), (seed, proof)
            yield seed, made[0], made[2], proof, json.loads(encode_plan(made[2], proof))


def verdict(document: Document) -> str:
    """ "true", "false", or "malformed"."""
    try:
        made, proof = decode_plan(json.dumps(document).encode(), "p.json")
        assert isinstance(proof, Proof)
        verify(made, proof)
    except FalseProofError:
        return "false"
    except InputError:
        return "malformed"
    return "true"


def test_plans_of_small_hosts_are_proved_in_all_terms() -> None:
    accepted = 0
    for seed, host, made, proof, document in proved():
        assert verdict(document) == "true", seed
        assert not wrong_facts(host, proof), seed
        assert proof.terms == len(made.cost) or not made.optimal, seed
        accepted += 1
    assert accepted > len(SEEDS) // 2


@pytest.mark.parametrize("name", ["h200-xeon8558", "hgx-h100", "epyc-nps4-gpu-nic"])
@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_plans_of_shipped_hosts_are_proved_in_all_terms(name: str, gpus: int) -> None:
    host = load_host(name)
    request = asking(small_request(gpus * 6, 64 * GIB, layout="pin-numa-pci"), gpu_count=gpus)
    made = plan(host, request)
    proof = proof_of(host, request, made)
    assert isinstance(proof, Proof) and proof.terms == len(made.cost)
    text = encode_plan(made, proof)
    assert verdict(json.loads(text)) == "true" and not wrong_facts(host, proof)
    assert len(text) - len(encode_plan(made)) < 40_000


def other_placings(draw: random.Random, given: Document, proof: Proof) -> Iterator[Document]:
    """The document with another placing as if it had been chosen, at what that one costs."""
    step = next(step for step in proof.steps if step.outcome == "chosen")
    facts = proof.facts
    for _ in range(3):
        family = draw.choice(roots(facts, step, equal=False))
        gpus = facts.device_count - len(facts.given)
        if len(family.may) < family.size or len(family.more) < gpus:
            continue
        for node in draw.sample(family.may, family.size):
            family = family.branches(f"node {node}")[0]
        for gpu in draw.sample(family.more, gpus):
            family = family.branches(f"gpu {gpu}")[0]
        for node in family.must:
            part = draw.randint(family.low[node], max(family.low[node], family.high[node]))
            family = family.branches(f"groups {node} {part - 1}")[0]
            family = family.branches(f"groups {node} {part}")[1]
        parts = [family.low[node] for node in family.must]
        if family.rejection() or (step.sockets and gcd(*parts) != family.unit):
            continue
        document = deepcopy(given)
        for term in document["cost"]:
            value = family.bound(term["name"])
            term["value"] = list(value) if isinstance(value, tuple) else int(value)
        if document["cost"] == given["cost"]:
            continue
        document["nodes"] = [facts.nodes[node] for node in family.must]
        owned = [{"bdf": facts.devices[one].bdf} for one in sorted(family.own)]
        document["vm"]["hostdevs"] = owned
        yield document


def test_another_placing_is_refused_with_any_proof_of_the_best() -> None:
    draw, planted = random.Random(1), 0
    for seed, _, made, proof, document in proved():
        if proof.terms < len(made.cost):
            continue
        for other in other_placings(draw, document, proof):
            assert verdict(other) == "false", seed
            planted += 1
    assert planted > len(SEEDS) // 2


def test_trees_that_split_by_packages_prove_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "FEW_NODES", 0)
    draw, splits = random.Random(5), 0
    for seed, _, made, proof, document in proved(range(60)):
        found = [search.tree for step in proof.steps for search in step.searches]
        splits += any(vertex.startswith("package") for tree in found for vertex in tree)
        assert verdict(document) == "true" and proof.terms == len(made.cost), seed
        for other in other_placings(draw, document, proof):
            assert verdict(other) == "false", seed
    assert splits > 10


def test_a_cost_that_is_not_the_placings_is_refused() -> None:
    draw = random.Random(2)
    for seed, _, _, _, document in proved(range(40)):
        for term in document["cost"]:
            value = term["value"]
            more = draw.choice((-1, 1))
            term["value"] = value + more if isinstance(value, int) else [*value, 99]
            assert verdict(document) != "true", (seed, term)
            term["value"] = value


def test_a_family_left_out_or_said_twice_is_refused() -> None:
    draw = random.Random(3)
    for seed, _, _, _, document in proved(range(60)):
        for step in list(document["proof"]["steps"]):
            document["proof"]["steps"].append(step)
            assert verdict(document) != "true", (seed, step)
            document["proof"]["steps"].pop()
            for search in step.get("searches", []):
                tree = search["tree"]
                place = draw.randrange(len(tree))
                search["tree"] = tree[:place] + tree[place + 1 :]
                assert verdict(document) != "true", (seed, place)
                search["tree"] = [*tree, "capacity"]
                assert verdict(document) != "true", (seed, place)
                search["tree"] = tree


def test_equal_cells_are_left_out_only_where_they_cost_more() -> None:
    """A tree that excludes them by a term that may not be compared, or not at all, is false."""
    planted = 0
    for seed, _, _, proof, document in proved():
        for number, step in enumerate(proof.steps):
            for place, search in enumerate(step.searches):
                if step.outcome != "chosen" or search.splits != "equal" or len(step.searches) < 2:
                    continue
                families = roots(proof.facts, step, equal=True)
                for leaf in ("tie", "node_distance", "unevenness", document["cost"][0]["name"]):
                    tree = [family.rejection() or leaf for family in reversed(families)]
                    if leaf not in tree or tree == search.tree:
                        continue
                    other = deepcopy(document)
                    false = {"splits": "equal", "tree": tree}
                    other["proof"]["steps"][number]["searches"][place] = false
                    assert verdict(other) == "false", (seed, leaf)
                    planted += 1
    assert planted


@pytest.mark.parametrize(
    ("seed", "make_host", "make_request"),
    [(710169, small_host, small_wish), (710226, wide_host, wide_wish)],
)
def test_equal_cells_are_proved_where_unequal_ones_are_nearer_on_nodes_farther_apart(
    seed: int, make_host: Callable[..., Host], make_request: Callable[..., GuestRequest]
) -> None:
    draw = random.Random(seed)
    host = make_host(draw)
    request = make_request(draw, host)
    made = plan(host, request)
    proof = proof_of(host, request, made)
    assert isinstance(proof, Proof) and not proof.chosen.reason
    document = json.loads(encode_plan(made, proof))
    assert verdict(document) == "true"
    (step,) = [one for one in document["proof"]["steps"] if one["outcome"] == "chosen"]
    (second,) = [one for one in step["searches"] if one["splits"] == "any"]
    assert "node_distance" in second["tree"]
    second["tree"] = ["tie" if one == "node_distance" else one for one in second["tree"]]
    assert verdict(document) == "false"


def test_facts_that_are_not_the_hosts_are_found() -> None:
    for seed, host, _, _, document in proved(range(60)):
        facts = document["proof"]["facts"]
        if len(facts["nodes"]) < 2:
            continue
        facts["distances"][0][-1] = facts["distances"][-1][0] = facts["distances"][0][-1] + 1
        _, proof = decode_plan(json.dumps(document).encode(), "p.json")
        assert isinstance(proof, Proof) and wrong_facts(host, proof), seed


@pytest.mark.parametrize(
    "change",
    [
        {"terms": "all"},
        {"facts": {}},
        {"steps": [{"fallbacks": [], "outcome": "better", "groups": 1}]},
        {"steps": [{"fallbacks": [[]], "outcome": "chosen", "groups": 0}]},
    ],
)
def test_a_malformed_proof_is_refused_by_name(change: Document) -> None:
    *_, document = next(proved())
    document["proof"].update(change)
    assert verdict(document) == "malformed"


def test_a_tree_of_unknown_words_or_too_many_is_malformed() -> None:
    *_, document = next(proved())
    search = document["proof"]["steps"][-1]["searches"][0]
    for tree in (["node x"], ["gpu -1"], ["groups 1"], ["capacity"] * 100_001):
        search["tree"] = tree
        assert verdict(document) == "malformed", tree[0]


def test_a_proof_that_would_take_long_to_check_is_malformed() -> None:
    *_, document = next(proved())
    document["proof"]["steps"][-1]["searches"][0]["tree"] = ["capacity"] * 90_000
    document["proof"]["facts"]["gpu_sets"] = [[]] * 1_000_000
    assert verdict(document) == "malformed"


def test_whatever_is_changed_a_proof_is_true_false_or_malformed() -> None:
    draw = random.Random(4)
    odd: tuple[Any, ...] = (0, -1, 255, 2**70, None, "x", "node 0", [], [0], {}, True, 1.5)
    for _, host, _, _, document in proved(range(12)):
        for _ in range(40):
            changed = {name: deepcopy(document[name]) for name in ("cost", "proof")}
            place: Any = changed
            while isinstance(place, dict | list) and place:
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                key = draw.choice(keys)
                if draw.random() < 0.2 or not isinstance(place[key], dict | list):
                    place[key] = draw.choice(odd)
                    break
                place = place[key]
            if verdict(document | changed) == "true":
                content = json.dumps(document | changed).encode()
                _, proof = decode_plan(content, "p.json")
                assert isinstance(proof, Proof)
                wrong_facts(host, proof)


def test_a_capacity_that_is_not_the_hosts_is_found() -> None:
    for seed, host, _, _, document in proved(range(40)):
        step = next(one for one in document["proof"]["steps"] if one["outcome"] == "chosen")
        if step["supply"][0] > step["room"][0]:
            step["supply"][0] -= 1
            _, proof = decode_plan(json.dumps(document).encode(), "p.json")
            assert isinstance(proof, Proof) and wrong_facts(host, proof), seed


def test_a_room_that_is_not_that_of_its_cores_and_pages_is_found() -> None:
    found = 0
    for seed, host, _, _, document in proved(range(40)):
        step = next(one for one in document["proof"]["steps"] if one["outcome"] == "chosen")
        if step["room"][0]:
            step["room"][0] -= 1
            step["cores"][0] = min(step["cores"][0], step["room"][0])
            for row in (*step["costs"].values(), step["llc_parts"]):
                row[0] = row[0][: step["room"][0]]
            _, proof = decode_plan(json.dumps(document).encode(), "p.json")
            assert isinstance(proof, Proof) and wrong_facts(host, proof), seed
            found += 1
    assert found > 10


def test_a_proof_of_an_earlier_version_is_refused_by_name() -> None:
    *_, document = next(proved())
    del document["proof"]["version"]
    with pytest.raises(InputError, match="version 3, found version 1"):
        decode_plan(json.dumps(document).encode(), "p.json")


def test_plans_with_and_without_a_proof_are_read_alike() -> None:
    _, _, made, proof, _ = next(proved())
    assert read_plan(encode_plan(made, proof).encode(), "p") == made
    with pytest.raises(InputError, match="found none"):
        decode_plan(encode_plan(made).encode(), "p")
    none = NotProved(not_proved="the cells were given one by one")
    assert decode_plan(encode_plan(made, none).encode(), "p")[1] == none
