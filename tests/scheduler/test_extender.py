"""What kube-scheduler is answered, without a cluster."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import json

from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.sources import load_pool
from homenode.cluster.scheduler.claims import allocated, asked, bdfs_on, claim_names, read_slice
from homenode.cluster.scheduler.extender import (
    ExtenderRequest,
    filter_nodes,
    prioritize,
    read_request,
)
from homenode.cluster.scheduler.nodes import ClusterNodes, read_bound_pod
from homenode.cluster.scheduler.serve import ListenAddress, SchedulerService
from homenode.errors import InputError
from homenode.machine.pci import DeviceKind
from tests.pool.pools import shipped
from tests.scheduler.kube_cluster import GPU
from tests.scheduler.kube_stream import kubelet, pod

HOST = "hgx-h100"
NAMES = tuple(f"{HOST}-{number}" for number in range(1, 5))
BDFS = [str(gpu.bdf) for gpu in shipped(HOST).devices_of_kind(DeviceKind.GPU)]


def cluster(ids: Mapping[str, str] | None = None) -> ClusterNodes:
    pool = load_pool([f"{HOST}*4"], reserved=False)
    settings = {one.name: kubelet() for one in pool.hosts}
    return ClusterNodes(pool, settings, default_flavours(), ids or {}, {})


def bound(name: str, gpus: int, node: str, devices: list[str] | None = None) -> dict[str, Any]:
    """A pod on a node. devices: as its status says them."""
    document = pod(name, gpus)
    document["metadata"]["uid"] = name
    document["spec"]["nodeName"] = node
    listed = [{"name": GPU, "resources": [{"resourceID": one} for one in devices or ()]}]
    statuses = [{"name": "c", "allocatedResourcesStatus": listed}]
    document["status"] = {
        "phase": "Running",
        **({"containerStatuses": statuses} if devices else {}),
    }
    return document


def put(nodes: ClusterNodes, document: dict[str, Any]) -> None:
    found = read_bound_pod(document)
    assert found is not None
    nodes.put(found)


def request(gpus: int, names: tuple[str, ...] = NAMES) -> ExtenderRequest:
    return read_request(json.encode({"Pod": pod("new", gpus), "NodeNames": names}))


def scores(nodes: ClusterNodes, gpus: int) -> dict[str, int]:
    return {one["Host"]: one["Score"] for one in prioritize(nodes, request(gpus))}


def test_a_node_whose_free_gpus_are_on_two_numa_nodes_is_refused_four() -> None:
    nodes = cluster()
    put(nodes, bound("a", 2, NAMES[0], [BDFS[0], BDFS[1]]))
    put(nodes, bound("b", 2, NAMES[0], [BDFS[4], BDFS[5]]))
    found = filter_nodes(nodes, request(4))
    assert found.nodes == NAMES[1:]
    assert found.refused[NAMES[0]].startswith("TopologyAffinityError")
    assert filter_nodes(nodes, request(2)).nodes == NAMES


def test_the_devices_of_the_status_count_not_those_of_the_model() -> None:
    """Without a status both pods would be on the first NUMA node: one has left since."""
    there, here = cluster(), cluster()
    put(there, bound("a", 2, NAMES[0]))
    put(here, bound("a", 2, NAMES[0], [BDFS[4], BDFS[5]]))
    assert there.state(NAMES[0]).estimated == 1
    assert here.state(NAMES[0]).estimated == 0
    busy = here.state(NAMES[0]).host.domains[0]
    assert sorted(map(str, busy.devices)) == sorted([BDFS[4], BDFS[5]])
    cpus = {pu for pin in busy.vcpu_pins for pu in pin or ()}
    assert cpus < {*shipped(HOST).nodes[1].pus}


def test_a_pod_whose_devices_are_not_known_keeps_what_it_got_as_it_arrived() -> None:
    """Kubelets before 1.36 do not say them: others that leave move nobody."""
    nodes = cluster()
    for name, gpus in (("a", 4), ("b", 2), ("c", 1)):
        put(nodes, bound(name, gpus, NAMES[0]))
        filter_nodes(nodes, request(1))
    nodes.remove("a")
    put(nodes, {**bound("b", 2, NAMES[0]), "spec": {**bound("b", 2, NAMES[0])["spec"], "x": 1}})
    free = nodes.state(NAMES[0]).node.available_devices(GPU)
    assert {*BDFS[:4]} <= {*free}
    assert len(free) == 5
    put(nodes, bound("d", 1, NAMES[0], [BDFS[4]]))  # known, and of what "b" was thought to have
    assert len(nodes.state(NAMES[0]).node.available_devices(GPU)) == 4


def test_names_of_a_plugin_stand_for_addresses() -> None:
    nodes = cluster({"GPU-1": BDFS[4], "GPU-2": BDFS[5]})
    put(nodes, bound("a", 2, NAMES[0], ["GPU-1", "GPU-2"]))
    assert nodes.state(NAMES[0]).estimated == 0
    other = cluster()
    put(other, bound("a", 2, NAMES[0], ["GPU-1", "GPU-2"]))
    assert other.state(NAMES[0]).estimated == 1


def test_small_pods_go_where_they_cost_no_large_one() -> None:
    nodes = cluster()
    put(nodes, bound("a", 1, NAMES[2], [BDFS[0]]))
    found = scores(nodes, 1)
    assert found[NAMES[2]] == 10
    assert all(found[name] < 10 for name in NAMES if name != NAMES[2])


def test_pods_that_ended_or_left_count_no_more() -> None:
    nodes = cluster()
    put(nodes, bound("a", 8, NAMES[0], BDFS))
    assert NAMES[0] in filter_nodes(nodes, request(1)).refused
    assert read_bound_pod({**bound("a", 8, NAMES[0]), "status": {"phase": "Failed"}}) is None
    nodes.remove("a")
    assert filter_nodes(nodes, request(8)).refused == {}


def test_a_restart_knows_what_was_known() -> None:
    """In any order of arrival."""
    pods = [
        bound("a", 2, NAMES[0], BDFS[4:6]),
        bound("b", 1, NAMES[0], BDFS[:1]),
        bound("c", 4, NAMES[1], BDFS[4:]),
    ]
    first, again = cluster(), cluster()
    for one in pods:
        put(first, one)
    for one in reversed(pods):
        put(again, one)
    for gpus in (1, 2, 4, 8):
        assert filter_nodes(first, request(gpus)) == filter_nodes(again, request(gpus))
        assert scores(first, gpus) == scores(again, gpus)


def test_nodes_without_a_capture_are_not_refused() -> None:
    found = filter_nodes(cluster(), request(4, (*NAMES, "elsewhere")))
    assert found.nodes[-1] == "elsewhere"
    assert found.unknown == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"Pod": {}}',
        b'{"Pod": {"spec": 3}, "NodeNames": ["a"]}',
        b'{"Pod": {"spec": {"containers": [1]}}, "NodeNames": ["a"]}',
        b'{"Pod": {"status": {"conditions": [1]}}, "NodeNames": ["a"]}',
        b'{"Pod": {"metadata": 5}, "NodeNames": ["a"]}',
        b'{"Pod": {}, "NodeNames": [1]}',
        b"[" * 100_000,
        json.encode({"Pod": pod("a", 1), "NodeNames": ["n"] * 10_001}),
    ],
)
def test_requests_of_another_form_are_refused_with_words(content: bytes) -> None:
    with pytest.raises(InputError, match="expected"):
        read_request(content)


# Claims


SLICE = {
    "metadata": {"uid": "s"},
    "spec": {
        "driver": "gpu.example.com",
        "nodeName": NAMES[0],
        "pool": {"name": NAMES[0]},
        "devices": [
            {
                "name": f"gpu-{number}",
                "attributes": {
                    "resource.kubernetes.io/pciBusID": {"string": bdf},
                    "numaNode": {"int": number // 4},
                },
            }
            for number, bdf in enumerate(BDFS)
        ]
        + [{"name": "by-node", "attributes": {"numaNode": {"int": 1}}}, {"name": "dark"}],
    },
}


def claim(name: str, devices: list[str]) -> dict[str, Any]:
    results = [
        {"driver": "gpu.example.com", "pool": NAMES[0], "device": device} for device in devices
    ]
    return {
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"count": len(devices)}}]}},
        "status": {"allocation": {"devices": {"results": results}}},
    }


def test_devices_of_slices_are_the_hosts_own() -> None:
    found = {one.key[2]: one for one in read_slice(SLICE)}
    assert found["gpu-5"].numa_node == 1
    assert found["gpu-5"].numa_attribute == "gpu.example.com/numaNode"
    here = bdfs_on(shipped(HOST), [found["gpu-5"], found["by-node"], found["dark"]])
    assert [str(bdf) for bdf in here] == [BDFS[5], BDFS[4]]
    assert asked(claim("c", ["gpu-0", "gpu-1"])) == 2
    assert allocated(claim("c", ["gpu-0"])) == (("gpu.example.com", NAMES[0], "gpu-0"),)


def test_a_pod_with_claims_has_their_devices() -> None:
    service = SchedulerService(cluster())
    service.change("slices", "ADDED", SLICE)
    service.change("claims", "ADDED", claim("c", ["gpu-4", "gpu-5"]))
    document = bound("a", 0, NAMES[0])
    document["spec"]["containers"][0]["resources"] = {}
    document["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimName": "c"}]
    assert list(claim_names(document)) == ["c"]
    service.change("pods", "ADDED", document)
    state = service.nodes.state(NAMES[0])
    assert sorted(map(str, state.host.domains[0].devices)) == sorted(BDFS[4:6])
    asks = {"Pod": document | {"status": {}}, "NodeNames": NAMES}
    ranked = prioritize(
        service.nodes, read_request(json.encode(asks)), [claim("c", ["gpu-4", "gpu-5"])]
    )
    assert max(ranked, key=lambda one: one["Score"])["Host"] == NAMES[0]
    service.change("claims", "DELETED", claim("c", []))
    assert service.nodes.state(NAMES[0]).host.domains[0].devices == ()


# The service


def synced() -> SchedulerService:
    service = SchedulerService(cluster())
    for kind in ("pods", "claims", "slices"):
        service.change(kind, "SYNCED", {"uids": frozenset()})
    return service


def body(name: str, gpus: int) -> bytes:
    document = pod(name, gpus)
    document["metadata"]["uid"] = name
    return json.encode({"Pod": document, "NodeNames": NAMES})


def test_nothing_is_answered_before_all_is_listed() -> None:
    service = SchedulerService(cluster())
    assert asyncio.run(service.reply("POST", "/filter", body("a", 1))).status == 503
    assert service.health().status == 503
    assert synced().health().status == 200


def test_an_answer_waits_for_what_became_of_the_pod_before() -> None:
    async def two() -> list[str]:
        service, done = synced(), []

        async def ask(name: str) -> None:
            found = await service.reply("POST", "/filter", body(name, 8))
            done.append(f"{name} {len(json.decode(found.content)['NodeNames'])}")

        await ask("a")
        waiting = asyncio.create_task(ask("b"))
        await asyncio.sleep(0.05)
        done.append("a is bound")
        service.change("pods", "MODIFIED", bound("a", 8, NAMES[0]))
        await waiting
        return done

    assert asyncio.run(two()) == ["a 4", "a is bound", "b 3"]


def test_a_pod_of_which_nothing_is_heard_delays_others_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("homenode.cluster.scheduler.serve._SETTLED_S", 0.05)

    async def two() -> int:
        service = synced()
        await service.reply("POST", "/filter", body("a", 8))
        found = await service.reply("POST", "/filter", body("b", 8))
        assert "homenode_extender_pods_unsettled_total 1" in service.metrics()
        return found.status

    assert asyncio.run(two()) == 200


def test_a_failed_watch_is_unhealthy_until_it_is_back() -> None:
    service = synced()
    service.change("pods", "FAILED", {"reason": "no route"})
    assert service.health().status == 503
    service.change("pods", "SYNCED", {"uids": frozenset()})
    assert service.health().status == 200


def test_callers_show_a_certificate_or_the_token() -> None:
    place = {"address": "127.0.0.1", "port": 1, "certificate": None, "key": None}
    guarded = ListenAddress(**place, client_authority=None, token="0123456789abcdef")  # type: ignore[arg-type]
    assert guarded.admits("Bearer 0123456789abcdef", False)
    assert guarded.admits("Basic aG9tZW5vZGU6MDEyMzQ1Njc4OWFiY2RlZg==", False)
    for wrong in ("", "Bearer", "Bearer 0123456789abcdeg", "Basic ::", "Basic aG9tZW5vZGU6", "x y"):
        assert not guarded.admits(wrong, False)
        assert not guarded.admits(wrong, True)
