"""What every placement has, whatever the host and the options."""

import os
import random
from enum import StrEnum
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from homenode.bdf import Bdf
from homenode.cli.apply import plan_together
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, UsageError
from homenode.machine.description.parse import list_shipped_hosts
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB, MIB
from homenode.vm.layout import PRESETS, GuestCells, Pinning, Siblings
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import (
    AUTO,
    EmulatorPolicy,
    PartialReserve,
    PlanOptions,
    Policy,
    make_cell,
)
from homenode.vm.sources import load_host
from tests.domain_corpus import CORPUS
from tests.plan.test_against_brute_force import small_host, small_wish
from tests.seeds import seeds
from tests.single_edits import users_document
from tests.small_hosts import asking

MANY = settings(max_examples=80, deadline=None, derandomize=True)


def attempt(host: Host, request: GuestRequest) -> Placement | None:
    try:
        return place(host, request)
    except Unplannable as refusal:
        assert refusal.rejections
        assert all(rejection.detail for rejection in refusal.rejections)
        return None


def check_pins(host: Host, request: GuestRequest, placement: Placement) -> None:
    used = [pu for pin in placement.vcpu_pins for pu in pin]
    assert all(len(pin) == 1 for pin in placement.vcpu_pins)
    assert len(used) == len(set(used)) == len(placement.vcpu_nodes)
    assert list(placement.vcpu_nodes) == sorted(placement.vcpu_nodes)
    nodes = {node.index: node.pus for node in host.nodes}
    for pu, cell in zip(used, placement.vcpu_nodes, strict=True):
        assert pu in nodes[placement.nodes[cell]]
    core_of = {pu: core.index for core in host.cores for pu in core.pus}
    if placement.threads_per_core > 1:
        step = placement.threads_per_core
        for first in range(0, len(used), step):
            assert len({core_of[pu] for pu in used[first : first + step]}) == 1
    if request.layout is PRESETS["pin-numa"] and placement.layout is None:
        assert len({core_of[pu] for pu in used}) == len(used)
    mine = CpuSet(used) | (placement.emulator_pus or CpuSet())
    for pins in placement.iothread_pus:
        mine |= pins
    assert mine.isdisjoint(request.options.reserved_pus)
    barred = CpuSet(pu.index for pu in host.pus if not pu.allowed)
    assert mine.isdisjoint(barred)
    cores = {core_of[pu] for pu in mine}
    for domain in host.domains:
        if domain.name in request.options.replaces:
            continue
        if domain.running or domain.planned or request.options.reserve_defined:
            for pin in domain.vcpu_pins:
                online = pin is not None and len(host.cores) > 0
                covers = pin is not None and all(c.pus <= pin for c in host.cores)
                if online and pin is not None and not covers:
                    assert not {core_of[pu] for pu in pin if pu in core_of} & cores
    kept = CpuSet(pu.index for pu in host.pus if pu.isolated or pu.nohz_full)
    finding = {f.id for f in placement.findings}
    if placement.emulator_pus is not None and "emulator-shares-vcpus" not in finding:
        assert placement.emulator_pus.isdisjoint(kept)
        assert placement.emulator_pus.isdisjoint(CpuSet(used))


@given(st.randoms(use_true_random=False))
@MANY
def test_each_vcpu_is_pinned_once_and_no_pu_is_used_twice(draw: random.Random) -> None:
    host = small_host(draw)
    request = asking(
        small_wish(draw, host),
        emulator_policy=draw.choice((EmulatorPolicy.AUTO, EmulatorPolicy.NONE)),
    )
    placement = attempt(host, request)
    if placement is not None:
        check_pins(host, request, placement)


@given(st.randoms(use_true_random=False))
@MANY
def test_freeing_a_pu_never_makes_a_request_unplannable(draw: random.Random) -> None:
    host = small_host(draw)
    request = small_wish(draw, host)
    if attempt(host, request) is None:
        return
    pu = draw.choice([pu.index for pu in host.pus])
    freer = structs.replace(
        host,
        pus=tuple(structs.replace(p, allowed=p.allowed or p.index == pu) for p in host.pus),
        domains=tuple(
            structs.replace(
                domain,
                vcpu_pins=tuple(
                    pin for pin in domain.vcpu_pins if pin is not None and pu not in pin
                ),
            )
            for domain in host.domains
        ),
    )
    asked = asking(request, reserved_pus=request.options.reserved_pus - CpuSet([pu]))
    assert attempt(freer, asked) is not None


@given(st.randoms(use_true_random=False))
@MANY
def test_same_host_and_request_give_the_same_placement(draw: random.Random) -> None:
    host = small_host(draw)
    request = small_wish(draw, host)
    first, second = attempt(host, request), attempt(host, request)
    assert first == second
    assert repr(first) == repr(second)


@pytest.mark.parametrize("seed", [53, 665, 1286, 2596])
def test_equal_cells_that_are_also_best_on_their_nodes_are_one_runner_up(seed: int) -> None:
    draw = random.Random(seed)
    host = small_host(draw)
    placement = attempt(host, small_wish(draw, host))
    assert placement is not None
    found = [(other.nodes, other.devices) for other in placement.runners_up]
    assert len(found) == len(set(found)) > 0


@given(st.randoms(use_true_random=False))
@MANY
def test_runners_up_cost_more_and_name_the_term_that_decided(draw: random.Random) -> None:
    host = small_host(draw)
    placement = attempt(host, small_wish(draw, host))
    if placement is None:
        return
    own = [term.value for term in placement.cost]
    seen = {(tuple(dict.fromkeys(placement.nodes)), placement.devices)}
    for other in placement.runners_up:
        theirs = [term.value for term in other.cost]
        assert own < theirs
        differs = next(i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b)
        assert other.decided_by == placement.cost[differs].name
        assert (other.nodes, other.devices) not in seen
        seen.add((other.nodes, other.devices))


SEED = int(os.environ.get("HOMENODE_SEED", "20261128"))
HOSTS = list_shipped_hosts()
TOPOLOGY = b"<topology sockets='1' cores='%d' threads='2'/>"


def document(vcpus: int, gib: int, inside: bytes = b"") -> bytes:
    cpu = b"<cpu mode='host-passthrough' check='none' migratable='on'"
    return users_document(vcpus, gib).replace(cpu + b"/>", cpu + b">" + inside + b"</cpu>")


def values(host: Host) -> dict[str, tuple[Any, ...]]:
    """What each option may be on this host: by its type, or as it stands here."""
    gpus = [gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)]
    cells = (make_cell(4, 8 * GIB), make_cell(2, 4 * GIB))
    choices: dict[str, tuple[Any, ...]] = {
        "layout": (AUTO, AUTO, *PRESETS),
        "vcpus": (1, 2, 6, 8, 24),
        "memory_bytes": (2 * GIB, 16 * GIB, 33 * GIB),
        "page_bytes": (2 * MIB, GIB),
        "devices": tuple((gpu,) for gpu in gpus) or ((Bdf(0, 1, 0, 0),),),
        "gpu_count": (1, 2, 4),
        "gpu_profile": ("1g.10gb",),
        "max_nodes": (1, 2),
        "explicit_cells": (cells, cells[:1] * 2),
        "replaces": (("other",),),
        "memory_nodes_allowed": tuple((node.index,) for node in host.nodes),
        "reserved_pus": (CpuSet([0]), CpuSet([0, 1])),
        "host_reserve": (PartialReserve(2), PartialReserve(None, 4 * GIB)),
        "emulator_pus": (CpuSet([0]),),
        "housekeeping_pus": (CpuSet([0]),),
        "spare_ports": (1, 3),
    }
    for name, hint in get_type_hints(PlanOptions).items():
        (kind, *_) = get_args(hint) or (hint,)
        if kind is bool or (isinstance(kind, type) and issubclass(kind, StrEnum)):
            choices.setdefault(name, (True,) if kind is bool else tuple(kind))
    del choices["document_siblings"]  # is not an option of its own
    return choices


def drawn_options(draw: random.Random, host: Host) -> PlanOptions:
    """The layout, and each other option once in so many times that about three are given."""
    choices = values(host)
    assert {*choices, "document_siblings"} == {*PlanOptions.__struct_fields__}
    own = {name for name in choices if name == "layout" or draw.random() < 0.09}
    return PlanOptions(**{name: draw.choice(choices[name]) for name in choices if name in own})


def drawn_document(draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return draw.choice(CORPUS).read_bytes()
    vcpus = draw.choice((1, 3, 4, 8, 14))
    shown = TOPOLOGY % (vcpus // 2) if vcpus % 2 == 0 and draw.random() < 0.4 else b""
    return document(vcpus, draw.choice((2, 9, 32)), shown)


def applied(definition: bytes, options: PlanOptions, host: Host) -> bytes:
    """As `homenode apply` makes of a VM of libvirt."""
    (tuning,) = plan_together({"vm": definition}, options, host, (), ())
    return tuning.document


@pytest.mark.parametrize("number", seeds(1500, every=30))
def test_applying_twice_changes_nothing(number: int) -> None:
    print(f"HOMENODE_SEED={SEED}, draw {number}")
    draw = random.Random(SEED * 10_000 + number)
    host = load_host(draw.choice(HOSTS))
    options, before = drawn_options(draw, host), drawn_document(draw)
    if host.architecture == "aarch64":
        before = before.replace(b"x86_64", b"aarch64").replace(b"pc-q35-7.2", b"virt")
    try:
        once = applied(before, options, host)
    except (HomenodeError, SystemExit):
        return  # refused, and nothing is written
    assert applied(once, options, host) == once


@pytest.mark.parametrize("layout", PRESETS)
def test_vcpus_is_the_number_that_the_guest_gets_however_often(layout: str) -> None:
    host = load_host("hgx-h100")
    options = PlanOptions(layout, vcpus=8)
    once = plan_file(document(4, 16), "vm.xml", options, host)
    twice = plan_file(once.document, "vm.xml", options, host)
    assert once.plan.vm.vcpus == 8
    assert twice.document == once.document


def test_smt_doubles_vcpus_once_and_none_of_a_tuned_definition() -> None:
    host = load_host("hgx-h100")
    doubled = plan_file(document(8, 16), "vm.xml", PlanOptions("pin-numa-smt"), host)
    assert doubled.plan.vm.vcpus == 16
    pinned = plan_file(document(8, 16), "vm.xml", PlanOptions("pin"), host)
    again = plan_file(pinned.document, "vm.xml", PlanOptions("pin-numa-smt"), host)
    assert again.plan.vm.vcpus == 8


def test_an_odd_number_of_vcpus_is_no_pair_of_siblings() -> None:
    with pytest.raises(UsageError, match="--vcpus 7"):
        plan_file(
            document(4, 2), "vm.xml", PlanOptions("pin-numa-smt", vcpus=7), load_host("hgx-h100")
        )


def test_a_document_shows_no_siblings_where_the_host_has_none_to_give() -> None:
    host = load_host("x86-2p2n16c16t-smt-off")
    stated = document(4, 2, TOPOLOGY % 2)
    flat = PlanOptions("pin", pinning=Pinning.ALL_PUS, siblings=Siblings.EXPOSED)
    for options in (PlanOptions("pin"), PlanOptions("pin-numa"), PlanOptions("pin-numa-smt"), flat):
        tuned = plan_file(stated, "vm.xml", options, host)
        assert b"threads='2'" not in tuned.document
        assert tuned.plan.vm.vcpus == 4


@pytest.mark.parametrize(
    ("name", "options", "vcpus", "gib"),
    [
        ("x86-2p2n8c32t-smt4", PlanOptions(layout="pin-numa-pci-smt"), 4, 32),
        (
            "x86-2p2n8c16t-node1-no-memory",
            PlanOptions(pinning=Pinning.ONE_PER_CORE, policy=Policy.CORES_FIRST),
            8,
            2,
        ),
        (
            "x86-4p8n32c64t-far-in-package",
            PlanOptions(layout="pin-numa-smt", siblings=Siblings.HIDDEN, max_nodes=1),
            8,
            2,
        ),
        (
            "x86-2p2n8c32t-smt4",
            PlanOptions(layout="pin-numa-smt", siblings=Siblings.HIDDEN, unequal_cells=True),
            14,
            16,
        ),
        (
            "x86-2p2n8c16t-sriov-nic",
            PlanOptions(layout="pin-numa-smt", policy=Policy.MEMORY_FIRST),
            14,
            32,
        ),
        (
            "x86-2p2n8c16t-node1-no-memory",
            PlanOptions(siblings=Siblings.HIDDEN, emulator_policy=EmulatorPolicy.NONE),
            8,
            32,
        ),
        (
            "x86-2p2n8c16t-sriov-nic",
            PlanOptions(layout="pin-numa-smt", reserved_pus=CpuSet([0])),
            2,
            32,
        ),
        ("x86-2p2n8c32t-smt4", PlanOptions(layout="pin-numa", pinning=Pinning.ALL_PUS), 16, 2),
        (
            "x86-2p3n8c16t-node2-no-cpus",
            PlanOptions(layout="default", pinning=Pinning.ALL_PUS, cells=GuestCells.HOST),
            16,
            2,
        ),
        ("x86-2p2n8c16t-offline-pus", PlanOptions(layout="pin-numa", vcpus=6, max_nodes=1), 4, 2),
        ("x86-2p2n8c16t-sriov-nic", PlanOptions("pin-numa-smt", siblings=Siblings.HIDDEN), 1, 32),
        ("x86-2p2n8c16t-pus-interleaved", PlanOptions("pin-numa", pinning=Pinning.ALL_PUS), 2, 32),
        ("x86-1p1n6c8t-hybrid", PlanOptions("pin-numa-pci-smt", siblings=Siblings.KEEP), 8, 2),
    ],
)
def test_applying_again_keeps_vcpus_that_share_cores(
    name: str, options: PlanOptions, vcpus: int, gib: int
) -> None:
    host = load_host(name)
    for shown in (b"", *([TOPOLOGY % (vcpus // 2)] if vcpus > 1 else [])):
        once = applied(document(vcpus, gib, shown), options, host)
        assert applied(once, options, host) == once
