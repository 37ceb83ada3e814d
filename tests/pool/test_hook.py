"""The hook: lines of JSON in, lines of JSON out; nothing that a request says ends it."""

import json

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.hook import Hook
from homenode.cluster.pool.place import PoolPlaces
from homenode.plan.planner import plan
from homenode.units import GIB
from tests.pool.pools import pool_of, shipped, sized


@pytest.fixture
def hook() -> Hook:
    host = shipped("hgx-h100")
    pool = pool_of([("a", host), ("b", host)])
    return Hook(PoolPlaces(pool, default_flavours()), default_flavours())


def _ask(hook: Hook, **request: object) -> dict[str, object]:
    answer: dict[str, object] = json.loads(hook.answer(json.dumps(request).encode()))
    return answer


def test_placed_vms_count_until_they_are_removed(hook: Hook) -> None:
    hosts = [_ask(hook, vm=f"vm{i}", flavour="gpu8")["host"] for i in range(3)]
    assert hosts == ["a", "b", None]
    assert _ask(hook, vm="vm0", op="remove")["removed_from"] == ["a"]
    assert _ask(hook, vm="vm3", flavour="gpu8")["host"] == "a"


def test_what_is_forgotten_between_requests_changes_no_answer(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ask(hook, vm="first", gpus=3, vcpus=5, memory="8GiB")
    request = {"vm": "x", "op": "rank", "gpus": 1, "vcpus": 7, "memory": "9GiB"}
    before = _ask(hook, **request)
    monkeypatch.setattr("homenode.cluster.pool.hook.MOST_PLACEMENTS", 0)
    hook.tidy()
    assert _ask(hook, **request) == before
    assert _ask(hook, vm="first", op="remove")["removed_from"] == ["a"]


def test_a_refused_request_names_its_vm_where_it_could_be_read(hook: Hook) -> None:
    assert _ask(hook, vm="x", flavour="none")["vm"] == "x"
    assert json.loads(hook.answer(b"["))["vm"] is None


def test_ranking_places_nothing(hook: Hook) -> None:
    for _ in range(3):
        assert _ask(hook, vm="x", op="rank", gpus=8)["host"] == "a"


def test_an_answer_has_the_places_and_what_they_cost(hook: Hook) -> None:
    answer = _ask(hook, vm="x", gpus=2)
    places = answer["places"]
    assert isinstance(places, list)
    assert [one["host"] for one in places] == ["a", "b"]
    assert len(places[0]["gpus"]) == 2
    assert {"flavour": "gpu8", "count": 1} in places[0]["lost"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"x",
        b"[]",
        b"{}",
        b'{"vm":1}',
        b'{"vm":""}',
        b'{"vm":"a","gpus":-1}',
        b'{"vm":"a","op":"start"}',
        b'{"vm":"a","flavour":"none"}',
        b'{"vm":"a"}',
        b'{"vm":"a","gpus":1,"memory":"lots"}',
        b'{"vm":"a","gpus":1,"layout":"none"}',
        b'{"vm":"a\\u001b[31m","gpus":1}',
        b"[" * 100_000,
        b"\xff",
        b'{"vm":"' + b"a" * 100_000,
    ],
)
def test_a_request_that_is_none_is_answered_and_does_nothing(hook: Hook, line: bytes) -> None:
    answer = json.loads(hook.answer(line))
    assert answer["error"]
    assert _ask(hook, vm="y", gpus=8)["host"] == "a"


def test_a_name_is_given_once(hook: Hook) -> None:
    _ask(hook, vm="x", gpus=1)
    assert _ask(hook, vm="x", gpus=1)["error"]


def test_the_answer_names_what_the_vm_gets_where_free_memory_decides_between_nodes() -> None:
    """Of equal nodes a VM with GPUs goes to the one with the least free memory, as plan does."""
    host = shipped("rtx4090-epyc7702")
    nodes = tuple(
        replace(
            node, memory_free_bytes=(node.memory_bytes or 0) - (node.index == 2) * (20 * GIB + 1)
        )
        for node in host.nodes
    )
    host = replace(host, nodes=nodes)
    flavour = sized(name="one", gpus=1, vcpus=4, memory_bytes=8 * GIB)
    places = PoolPlaces(pool_of([("a", host)]), (flavour,))
    answer = json.loads(Hook(places, (flavour,)).answer(b'{"vm":"v","flavour":"one"}'))
    (gpu,) = answer["places"][0]["gpus"]
    assert gpu in {str(device.bdf) for device in plan(host, flavour.request(host, "v")).vm.hostdevs}
    assert gpu in {str(bdf) for bdf in places.host("a").domains[-1].devices}
