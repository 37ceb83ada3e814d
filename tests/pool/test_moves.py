"""Moves and exports: what they promise holds when it is done; nothing else changes."""

import json
import re

import pytest
from msgspec import structs

from homenode.cluster.pool.export import export, unnamed
from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.moves import MovePlan, defragment, drain
from homenode.cluster.pool.outlook import outlook
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.rules import Scheduler
from homenode.errors import UsageError
from homenode.machine.topology import Host
from homenode.units import GIB
from homenode.vm.plan_options import PlanOptions
from tests.pool.pools import filled, pool_of, shipped, sized, with_vm

GPU1, GPU2, GPU4, GPU8 = FLAVOURS = default_flavours()


def _done(pool: Pool, plan: MovePlan) -> Pool:
    """The pool after the moves, with each VM placed anew by the planner on its new host."""
    by_size = {flavour.gpus: flavour for flavour in FLAVOURS}
    hosts: dict[str, Host] = {one.name: pool.host(one) for one in pool.hosts}
    for group in plan.groups:
        for move in group.moves:
            source = hosts[move.from_host]
            left = tuple(vm for vm in source.domains if vm.name != move.vm)
            assert len(left) == len(source.domains) - 1
            hosts[move.from_host] = structs.replace(source, domains=left)
            hosts[move.to_host] = with_vm(hosts[move.to_host], by_size[move.gpus], move.vm)
    return pool_of(list(hosts.items()))


def test_a_drained_host_is_empty_and_every_vm_has_a_place() -> None:
    host = shipped("hgx-h100")
    full = with_vm(with_vm(with_vm(host, GPU4, "four"), GPU2, "two"), GPU1, "one")
    pool = pool_of([("a", full), ("b", with_vm(host, GPU1, "other")), ("c", host)])
    plan = drain(pool, "a", FLAVOURS)
    assert not plan.stuck
    assert sorted(move.vm for group in plan.groups for move in group.moves) == [
        "four",
        "one",
        "two",
    ]
    assert all(move.restart for group in plan.groups for move in group.moves)
    after = _done(pool, plan)
    assert not next(one for one in after.hosts if one.name == "a").domains


def test_a_vm_without_devices_may_migrate_live_and_comes_first() -> None:
    host = shipped("hgx-h100")
    plain = sized("plain", vcpus=4, memory_bytes=8 << 30)
    busy = with_vm(with_vm(host, GPU1, "gpu"), plain, "plain")
    plan = drain(pool_of([("a", busy), ("b", host)]), "a", FLAVOURS)
    assert [group.moves[0].restart for group in plan.groups] == [False, True]


def test_a_vm_that_fits_nowhere_is_named_and_the_rest_goes_on() -> None:
    host = shipped("hgx-h100")
    busy = with_vm(with_vm(host, GPU4, "four"), GPU1, "one")
    other = with_vm(with_vm(host, GPU4, "x"), GPU2, "y")
    plan = drain(pool_of([("a", busy), ("b", other)]), "a", FLAVOURS)
    assert [one.vm for one in plan.stuck] == ["four"]
    assert [group.moves[0].vm for group in plan.groups] == ["one"]


def test_draining_a_host_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError):
        drain(pool_of([("a", shipped("hgx-h100"))]), "b", FLAVOURS)


def test_one_move_brings_back_a_slot_of_eight_gpus() -> None:
    host = shipped("hgx-h100")
    pool = pool_of([(f"h{i}", with_vm(host, GPU1, f"vm{i}")) for i in range(4)])
    before = outlook(pool, FLAVOURS).fits[3].local
    plan = defragment(pool, GPU8, FLAVOURS)
    assert [group.gain for group in plan.groups] == [1, 1, 1]
    # The third host may have been filled with two.
    assert [len(group.moves) for group in plan.groups][:2] == [1, 1]
    assert sum(len(group.moves) for group in plan.groups) <= 4
    assert outlook(_done(pool, plan), FLAVOURS).fits[3].local == before + 3


@pytest.mark.parametrize("seed", range(3))
def test_each_gain_is_there_when_its_moves_are_done(seed: int) -> None:
    host = shipped("hgx-h100")
    pool = pool_of([(f"h{i}", filled(host, 10 * seed + i, 5)) for i in range(3)])
    plan = defragment(pool, GPU8, FLAVOURS, most=2)
    gained = sum(group.gain for group in plan.groups)
    before = outlook(pool, FLAVOURS).fits[3].local
    assert outlook(_done(pool, plan), FLAVOURS).fits[3].local >= before + gained
    assert all(len(group.moves) <= 3 for group in plan.groups)


def test_moves_that_gain_nothing_leave_every_host_to_be_tried() -> None:
    host = shipped("hgx-h100")
    pool = pool_of([(f"h{i}", filled(host, 330 + i, 6)) for i in range(3)])
    assert (
        defragment(pool, GPU1, FLAVOURS, most=1).fits_before
        == outlook(pool, FLAVOURS).fits[0].local
    )


def test_a_vm_moves_to_gpus_of_its_own_model() -> None:
    h100, h200 = shipped("hgx-h100"), shipped("h200-xeon8558")
    pool = pool_of([("a", with_vm(h100, GPU1, "vm")), ("b", h200)])
    assert [one.vm for one in drain(pool, "a", FLAVOURS).stuck] == ["vm"]
    pool = pool_of([("a", with_vm(h100, GPU1, "vm")), ("b", h200), ("c", h100)])
    assert [move.to_host for move in drain(pool, "a", FLAVOURS).moves] == ["c"]


def test_a_vm_moves_to_hosts_of_its_own_architecture_only() -> None:
    arm = with_vm(
        shipped("gh200x4"), sized(name="small", gpus=0, vcpus=4, memory_bytes=8 * GIB), "vm"
    )
    pool = pool_of([("a", arm), ("b", shipped("hgx-h100"))])
    assert [one.vm for one in drain(pool, "a", FLAVOURS).stuck] == ["vm"]


def test_a_vm_on_siblings_moves_to_a_host_that_has_its_cores_and_no_more() -> None:
    smt = structs.replace(PlanOptions(layout="pin-numa-pci-smt"), keep_vcpus=True)
    wide = sized(name="wide", gpus=0, vcpus=160, memory_bytes=64 * GIB, options=smt)
    empty = shipped("hgx-h100")
    assert len(empty.cores) < 160
    pool = pool_of([("a", with_vm(empty, wide, "vm")), ("b", empty)])
    assert [move.to_host for move in drain(pool, "a", FLAVOURS).moves] == ["b"]


def test_memory_of_a_running_vm_is_free_once_it_has_moved() -> None:
    host = with_vm(shipped("hgx-h100"), GPU1, "vm")
    (vm,) = host.domains
    used = dict(vm.memory_by_node)
    running = structs.replace(
        host,
        domains=(structs.replace(vm, running=True, planned=False),),
        nodes=tuple(
            structs.replace(
                node, memory_free_bytes=(node.memory_bytes or 0) - used.get(node.index, 0)
            )
            for node in host.nodes
        ),
    )
    other = with_vm(shipped("hgx-h100"), GPU4, "other")
    found = defragment(pool_of([("a", running), ("b", other)]), GPU8, FLAVOURS)
    assert [(move.vm, move.to_host) for move in found.moves] == [("vm", "b")]


def test_a_pool_that_is_not_broken_up_needs_no_moves() -> None:
    assert defragment(pool_of([("a", shipped("hgx-h100"))]), GPU8, FLAVOURS).groups == ()


def test_each_scheduler_gets_what_still_fits_in_its_own_words() -> None:
    host = shipped("hgx-h100")
    names = [("gpu-1", host), ("gpu-2", with_vm(host, GPU1, "vm")), ("Bad Name", host)]
    found = outlook(pool_of(names), FLAVOURS, Planner(pool_of(names)))
    nodes = json.loads(export(found, Scheduler.KUBERNETES))["items"]
    assert [node["metadata"]["name"] for node in nodes] == ["gpu-1", "gpu-2"]
    assert nodes[1]["metadata"]["labels"]["homenode.io/fits-gpu8"] == "0"
    for node in nodes:
        for key, value in node["metadata"]["labels"].items():
            assert re.fullmatch(r"[a-z.]+/[a-z0-9-]{1,63}", key)
            assert re.fullmatch(r"[0-9]{1,63}", value)
    nova = json.loads(export(found, Scheduler.NOVA))
    eight = next(one for one in nova["aggregates"] if one["name"] == "homenode-fits-gpu8")
    assert eight["hosts"] == ["Bad Name", "gpu-1"]
    assert all(
        re.fullmatch(r"CUSTOM_[A-Z0-9_]+", trait)
        for own in nova["traits"].values()
        for trait in own
    )
    lines = export(found, Scheduler.SLURM).splitlines()
    weight = [int(line.rpartition("Weight=")[2]) for line in lines]
    assert weight[1] < weight[0]
    assert unnamed(found, Scheduler.SLURM) == ("Bad Name",)


def test_names_that_a_scheduler_would_take_for_one_are_kept_apart() -> None:
    names = ["GPU 8", "gpu-8", "日本", "中国", "a" * 39 + "-b", *(f"z{i}" for i in range(40))]
    flavours = [sized(name=name, gpus=1) for name in names]
    hosts = [(name, shipped("hgx-h100")) for name in ("ok-1", "a..b", "a.-b", "A")]
    found = outlook(pool_of(hosts), flavours)
    assert set(unnamed(found, Scheduler.KUBERNETES)) == {"a..b", "a.-b", "A"}
    (node,) = json.loads(export(found, Scheduler.KUBERNETES))["items"]
    labels = [key.partition("/")[2] for key in node["metadata"]["labels"]]
    assert len(labels) == len(names) + 1
    assert all(label[0].isalnum() and label[-1].isalnum() and len(label) < 64 for label in labels)
    nova = json.loads(export(found, Scheduler.NOVA))
    assert len({one["name"] for one in nova["aggregates"]}) == len(names)
    line = export(found, Scheduler.SLURM).splitlines()[0]
    features = line.partition("AvailableFeatures=")[2].partition(" ")[0].split(",")
    assert len(set(features)) == len(names)
    assert int(line.rpartition("Weight=")[2]) < 2**32


def test_a_vm_does_not_move_to_a_host_that_has_one_of_its_name() -> None:
    host = with_vm(
        shipped("hgx-h100"), sized(name="web", gpus=1, vcpus=8, memory_bytes=8 * GIB), "web"
    )
    plan = drain(pool_of([("a", host), ("b", host)]), "a", default_flavours())
    assert plan.moves == ()
    assert [one.vm for one in plan.stuck] == ["web"]
    assert "no VM of this name" in plan.stuck[0].reason
