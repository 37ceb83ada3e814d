"""The same options twice give the same definition: options are drawn from their table."""

import os
import random
from enum import StrEnum
from typing import Any, get_args, get_type_hints

import pytest

from homenode.bdf import Bdf
from homenode.cli.apply import tuned_together
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, UsageError
from homenode.machine.description.parse import shipped_hosts
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.units import GIB, MIB
from homenode.vm.layout import PRESETS, Pinning, Siblings
from homenode.vm.plan_options import AUTO, PartialReserve, PlanOptions, cell_asked
from homenode.vm.sources import load_host
from tests.domain_corpus import CORPUS
from tests.seeds import seeds
from tests.single_edits import users_document

SEED = int(os.environ.get("HOMENODE_SEED", "20261128"))
HOSTS = shipped_hosts()
TOPOLOGY = b"<topology sockets='1' cores='%d' threads='2'/>"


def document(vcpus: int, gib: int, inside: bytes = b"") -> bytes:
    cpu = b"<cpu mode='host-passthrough' check='none' migratable='on'"
    return users_document(vcpus, gib).replace(cpu + b"/>", cpu + b">" + inside + b"</cpu>")


def values(host: Host) -> dict[str, tuple[Any, ...]]:
    """What each option may be on this host: by its type, or as it stands here."""
    gpus = [gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)]
    cells = (cell_asked(4, 8 * GIB), cell_asked(2, 4 * GIB))
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
    (tuning,) = tuned_together({"vm": definition}, options, host, (), ())
    return tuning.document


@pytest.mark.parametrize("number", seeds(1500, every=15))
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
