"""A tuned document, tuned again with the same options, stays as it is: every host, every layout."""

from pathlib import Path

import pytest

import homenode
from homenode.errors import UsageError
from homenode.plan.tuning import tune
from homenode.vm.layout import PRESETS, Pinning, Siblings
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.seeds import THOROUGH, part

HOSTS = sorted((Path(homenode.__file__).parent / "machine/hosts").glob("*.toml"))


def document(vcpus: int, gib: int, inside: str = "") -> bytes:
    return f"""<domain type='kvm'>
  <name>vm</name>
  <memory unit='GiB'>{gib}</memory>
  <vcpu>{vcpus}</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <cpu mode='host-passthrough'>{inside}</cpu>
</domain>
""".encode()


@pytest.mark.parametrize("path", part(HOSTS, 2), ids=lambda path: path.stem)
def test_tuning_a_tuned_document_changes_nothing(path: Path) -> None:
    host = load_host(str(path))
    architecture = (host.architecture or "x86_64").encode()
    cores = len(host.cores)
    mixed = any(core.kind is not None for core in host.cores)
    changed = []
    counts = {cores // 2, cores * 3 // 4}
    for vcpus in sorted(counts if cores > 32 else {2, *counts, cores}):
        fresh = document(vcpus, 2)
        if architecture != b"x86_64":
            fresh = fresh.replace(b"x86_64", architecture).replace(b"q35", b"virt")
        for number, layout in enumerate(PRESETS):
            if (vcpus + number) % 4 and not THOROUGH:
                continue
            options = PlanOptions(layout, mixed_kinds=mixed)
            try:
                once = tune(fresh, "vm.xml", options, host)
            except Unplannable:
                continue
            twice = tune(once.document, "vm.xml", options, host)
            if twice.document != once.document:
                changed.append((layout, vcpus, once.plan.vm.vcpus, twice.plan.vm.vcpus))
    assert not changed


@pytest.mark.parametrize("layout", PRESETS)
def test_vcpus_is_the_number_that_the_guest_gets_however_often(layout: str) -> None:
    host = load_host("hgx-h100")
    options = PlanOptions(layout, vcpus=8)
    once = tune(document(4, 16), "vm.xml", options, host)
    twice = tune(once.document, "vm.xml", options, host)
    assert once.plan.vm.vcpus == 8
    assert twice.document == once.document


def test_smt_doubles_vcpus_once_and_none_of_a_tuned_definition() -> None:
    host = load_host("hgx-h100")
    doubled = tune(document(8, 16), "vm.xml", PlanOptions("pin-numa-smt"), host)
    assert doubled.plan.vm.vcpus == 16
    pinned = tune(document(8, 16), "vm.xml", PlanOptions("pin"), host)
    again = tune(pinned.document, "vm.xml", PlanOptions("pin-numa-smt"), host)
    assert again.plan.vm.vcpus == 8


def test_an_odd_number_of_vcpus_is_no_pair_of_siblings() -> None:
    with pytest.raises(UsageError, match="--vcpus 7"):
        tune(document(4, 2), "vm.xml", PlanOptions("pin-numa-smt", vcpus=7), load_host("hgx-h100"))


def test_a_document_shows_no_siblings_where_the_host_has_none_to_give() -> None:
    host = load_host("x86-2p2n16c16t-smt-off")
    stated = document(4, 2, "<topology sockets='1' cores='2' threads='2'/>")
    flat = PlanOptions("pin", pinning=Pinning.ALL_PUS, siblings=Siblings.EXPOSED)
    for options in (PlanOptions("pin"), PlanOptions("pin-numa"), PlanOptions("pin-numa-smt"), flat):
        tuned = tune(stated, "vm.xml", options, host)
        assert b"threads='2'" not in tuned.document
        assert tuned.plan.vm.vcpus == 4
