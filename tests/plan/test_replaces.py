"""Whose place a VM takes: its own on a host that names domains, that of the one named elsewhere."""

from pathlib import Path

import pytest

from homenode.errors import UsageError
from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.machine.snapshot.redact import Identities, redact
from homenode.machine.topology import Host
from homenode.plan.allocations import allocations
from homenode.plan.planner import plan
from homenode.plan.request import request_for
from homenode.units import GIB
from homenode.vm.domain.read import read_running_domain
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import PlanOptions
from tests.cli.test_plan import DOCUMENT, homenode
from tests.small_hosts import even_host, pinned_domain, small_guest

WISHES = PlanOptions(layout="pin-bound")
GPU = "0000:3b:00.0"


def _captured(names: tuple[str, ...]) -> Host:
    """A host whose domains, of four PUs each, went through a redacted capture."""
    texts = [
        f"<domain type='kvm' id='{i}'><name>{name}</name><memory unit='GiB'>4</memory>"
        "<vcpu>4</vcpu><cputune>"
        + "".join(f"<vcpupin vcpu='{vcpu}' cpuset='{4 * i + vcpu}'/>" for vcpu in range(4))
        + "</cputune><devices><hostdev mode='subsystem' type='pci'><source>"
        f"<address domain='0' bus='{0x3B + i:#x}' slot='0' function='0'/></source></hostdev>"
        "</devices></domain>"
        for i, name in enumerate(names)
    ]
    snapshot = MemorySnapshot(
        "h", {}, {}, {"virsh-domains": f"<domains>{''.join(texts)}</domains>"}
    )
    redacted = redact(snapshot, Identities()).snapshot.commands["virsh-domains"]
    parts = redacted.split("<domain ")[1:]
    domains = tuple(
        read_running_domain(f"<domain {part.partition('</domain>')[0]}</domain>".encode(), True)
        for part in parts
    )
    return even_host(1, 1, 1, 8, 1, domains=domains)


def _planned(host: Host, name: str = "vm", vcpus: int = 4, **options: tuple[str, ...]) -> Plan:
    guest = small_guest(vcpus, name=name)
    asked = PlanOptions(layout="pin-bound", replaces=options.get("replaces", ()))
    return plan(host, request_for(guest, asked, host))


def test_a_running_vm_on_its_own_redacted_capture_gets_a_hint_how_to_get_its_place_back() -> None:
    host = _captured(("train",))
    made = _planned(host, "train")
    (gap,) = (gap for gap in made.gaps if "--ignore-domain" in gap.reason)
    assert "redacted/vm-1" in gap.reason
    with pytest.raises(Unplannable) as refused:
        _planned(host, "train", vcpus=8)
    assert "--ignore-domain" in (refused.value.hint or "")


def test_a_vm_that_replaces_a_domain_gets_its_pus_and_devices() -> None:
    host = _captured(("train", "serve"))
    request = request_for(
        small_guest(name="train"), PlanOptions(layout="pin", replaces=("redacted/vm-1",)), host
    )
    in_use = allocations(host, request)
    assert {holder for _, holder in in_use.devices} == {"redacted/vm-2"}
    assert [one.domain for one in in_use.by_domain] == ["redacted/vm-2"]
    assert not any("--ignore-domain" in gap.reason for gap in in_use.gaps)
    made = _planned(host, "train", replaces=("redacted/vm-1",))
    assert {pu for pins in made.vcpu_pins for pu in pins} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["vm-1", "redacted/vm-1"])
def test_no_document_is_mistaken_for_a_domain_by_its_pseudonym(name: str) -> None:
    made = _planned(_captured(("train",)), name)
    assert {pu for pins in made.vcpu_pins for pu in pins} == {4, 5, 6, 7}


def test_where_names_are_known_a_vm_has_its_own_and_what_it_replaces() -> None:
    own = pinned_domain("0-3", name="vm")
    host = even_host(1, 1, 1, 8, 1, domains=[own, pinned_domain("4-7", name="old")])
    assert {pu for pins in _planned(host).vcpu_pins for pu in pins} == {0, 1, 2, 3}
    assert len(_planned(host, vcpus=8, replaces=("old",)).vcpu_pins) == 8
    assert not any("--ignore-domain" in gap.reason for gap in _planned(host).gaps)


def test_memory_of_a_replaced_domain_is_free() -> None:
    old = pinned_domain("0-3", name="old", memory_bytes=60 * GIB, memory_by_node=((0, 60 * GIB),))
    host = even_host(1, 1, 1, 8, 1, domains=[old])
    guest = small_guest(4, 60 * GIB)
    for options in (WISHES, PlanOptions(layout="pin-bound", replaces=("old",))):
        request = request_for(guest, options, host)
        if options is WISHES:
            with pytest.raises(Unplannable):
                plan(host, request)
        else:
            assert plan(host, request).layout == PRESETS["pin-bound"]


def test_a_name_that_is_none_of_the_hosts_is_refused_with_those_there() -> None:
    host = even_host(1, 1, 1, 8, 1, domains=[pinned_domain("0", name="old")])
    with pytest.raises(UsageError, match=r"--ignore-domain.*old.*odl"):
        _planned(host, replaces=("odl",))
    with pytest.raises(UsageError, match="it has none"):
        _planned(even_host(1, 1, 1, 8, 1), replaces=("old",))


def test_the_command_takes_it_and_refuses_it_where_it_means_nothing(tmp_path: Path) -> None:
    done = homenode(
        "plan", DOCUMENT, "--layout", "pin", "--host", "hgx-h100", "--ignore-domain", "x", "--json"
    )
    assert done.exit_code == 2 and "--ignore-domain" in done.stderr
    for rest in (("--node-cpus", "0-3"), ("--host", "hgx-h100", "--host", "gh200x4")):
        done = homenode("plan", DOCUMENT, "--layout", "pin", "--ignore-domain", "x", *rest)
        assert done.exit_code == 2 and "--ignore-domain" in done.stderr, done.stderr
