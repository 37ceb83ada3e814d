"""Stored plans, plans of other VMs (--after), and whose place a VM takes."""

import json
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cli.plan import apply_plans
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.snapshot.redact import Identities, redact
from homenode.machine.topology import Host
from homenode.plan.allocations import find_allocations
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest, request_for
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import add_planned, domain_of_plan, encode_plan, read_plan
from homenode.units import GIB
from homenode.vm.domain.read import read_running_domain
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import MemoryMode, PlanOptions
from homenode.vm.targets.libvirt import rewrite
from tests.guest_shapes import bdfs, hgx_host, placed
from tests.small_hosts import asking, even_host, pinned_domain, small_guest, small_request
from tests.verify.test_single_edits import with_room
from tests.verify_documents import tuned

HOST = even_host(2, 1, 1, 8, 2)


def named(request: GuestRequest, name: str) -> GuestRequest:
    return replace(request, guest=structs.replace(request.guest, name=name))


def plan_of(
    name: str = "vm",
    *,
    layout: str = "pin-numa",
    memory_bytes: int = 8 * GIB,
    page_bytes: int | None = None,
    mode: MemoryMode = MemoryMode.STRICT,
) -> Plan:
    request = named(small_request(4, memory_bytes, layout=layout), name)
    request = asking(request, page_bytes=page_bytes, memory_mode=mode)
    return assemble(HOST, request, placed((2, 2), bound=layout != "pin"))


def test_a_plan_takes_its_pins_memory_and_devices() -> None:
    devices = bdfs("19:00.0", "9b:00.0")
    request = named(small_request(4, 8 * GIB, devices=[str(bdf) for bdf in devices]), "a")
    request = replace(request, guest=structs.replace(request.guest, iothread_ids=(1,)))
    placement = replace(
        placed((2, 2), devices=devices),
        emulator_pus=CpuSet([8]),
        iothread_pus=(CpuSet([9]),),
        cell_memory_bytes=(6 * GIB, 2 * GIB),
    )
    domain = domain_of_plan(assemble(hgx_host(), request, placement))
    assert (domain.name, domain.running, domain.planned) == ("a", False, True)
    assert domain.vcpu_pins == tuple(CpuSet([i]) for i in range(4))
    assert (domain.emulator_pus, domain.iothread_pus) == (CpuSet([8]), (CpuSet([9]),))
    assert (domain.memory_bytes, domain.memory_bound) == (8 * GIB, True)
    assert domain.memory_by_node == ((0, 6 * GIB), (1, 2 * GIB))
    assert domain.devices == devices


def test_huge_pages_count_as_they_are_reserved() -> None:
    domain = domain_of_plan(plan_of(page_bytes=GIB, memory_bytes=7 * GIB))
    assert domain.memory_by_node == ((0, 4 * GIB), (1, 3 * GIB)) and domain.page_bytes == GIB


def test_memory_that_nothing_binds_counts_where_the_vcpus_are() -> None:
    domain = domain_of_plan(plan_of(layout="pin"))
    assert not domain.memory_bound
    assert domain.memory_by_node == ((0, 4 * GIB), (1, 4 * GIB))


def test_preferred_memory_may_spill_and_a_vm_without_pins_may_lie_anywhere() -> None:
    assert not domain_of_plan(plan_of(mode=MemoryMode.PREFERRED)).memory_bound
    request = small_request(4, 8 * GIB, layout="default")
    placement = replace(placed((), bound=False), vcpu_nodes=())
    domain = domain_of_plan(assemble(HOST, request, placement))
    assert domain.vcpu_pins == (None,) * 4 and domain.memory_by_node == ()


def test_each_host_of_several_gets_its_own_plans() -> None:
    other = even_host(2, 1, 1, 4, 1)
    found = add_planned([HOST, other], [("a.json", plan_of("a")), ("b.json", plan_of("b"))])
    assert [[one.name for one in host.domains] for host in found] == [["a", "b"], []]
    twins = [HOST, structs.replace(HOST, name="twin")]
    found = add_planned(twins, [("c.json", structs.replace(plan_of("c"), host_name="twin"))])
    assert [len(host.domains) for host in found] == [0, 1]


def test_the_plan_of_another_host_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"a\.json: .*even"):
        add_planned([even_host(2, 1, 1, 4, 1)], [("a.json", plan_of("a"))])
    equals = [structs.replace(HOST, name=name) for name in ("hgx1", "hgx2")]
    with pytest.raises(InputError, match="hgx1, hgx2"):
        add_planned(equals, [("a.json", plan_of("a"))])
    (found, _) = add_planned([HOST, *equals[1:]], [("a.json", plan_of("a"))])
    assert [domain.name for domain in found.domains] == ["a"]


def test_a_vm_that_runs_already_counts_once_and_as_it_runs() -> None:
    running = pinned_domain("4-7", name="a")
    shut_off = pinned_domain("8-9", name="b", running=False)
    host = structs.replace(HOST, domains=(running, shut_off))
    (found,) = add_planned([host], [("a", plan_of("a")), ("b", plan_of("b"))])
    assert found.domains == (running, domain_of_plan(plan_of("b")))


def test_two_plans_of_one_vm_or_of_one_device_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^2: .* a "):
        add_planned([HOST], [("1", plan_of("a")), ("2", plan_of("a"))])
    host = hgx_host()
    request = small_request(4, 8 * GIB)
    plans = [
        (name, assemble(host, named(request, name), placed((2, 2), devices=devices)))
        for name, devices in (("a", ["3b:00.0"]), ("b", ["19:00.0", "3b:00.0"]))
    ]
    with pytest.raises(UsageError, match=r"0000:3b:00\.0 in the plans of a and b"):
        add_planned([host], plans)
    of_vgpu = [
        (name, structs.replace(plan, vm=structs.replace(plan.vm, hostdevs=(vgpu,))))
        for name, plan in plans
        for vgpu in [structs.replace(plan.vm.hostdevs[0], uuid="the same")]
    ]
    with pytest.raises(UsageError, match="the same in the plans of a and b"):
        add_planned([host], of_vgpu)


def test_plans_are_read_from_their_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(encode_plan(plan_of("a")))
    (found,) = apply_plans((HOST,), [path])
    assert [one.name for one in found.domains] == ["a"]
    assert apply_plans((HOST,), ()) == (HOST,)
    path.write_text("{}")
    with pytest.raises(InputError, match=r"not a homenode\.plan"):
        apply_plans((HOST,), [path])


WISHES = PlanOptions(layout="pin-bound")


def _captured(names: tuple[str, ...]) -> Host:
    """A host whose domains, of four CPUs each, went through a redacted capture."""
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
    in_use = find_allocations(host, request)
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
    with pytest.raises(UsageError, match="no domains"):
        _planned(even_host(1, 1, 1, 8, 1), replaces=("old",))


def now(layout: str) -> Plan:
    return with_room(layout)[2] if layout == "pin-numa-pci" else tuned(layout).plan


@pytest.mark.parametrize("layout", ["pin-numa-pci", "pin-bound"])
def test_a_stored_plan_is_the_one_that_was_written(layout: str) -> None:
    plan = now(layout)
    assert read_plan(encode_plan(plan).encode(), "P.json") == plan


def test_a_plan_that_was_read_writes_what_it_wrote_before() -> None:
    before, after, plan = with_room("pin-numa-pci")
    assert rewrite(before, read_plan(encode_plan(plan).encode(), "P.json")) == after


def test_a_plan_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"expected homenode\.plan/1, found version 2"):
        read_plan(b'{"format": "homenode.plan/2"}', "P.json")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"record": None}, "a layout in vm.record"),
        ({"vcpus": 10**12}, "vm.vcpus from 1 to"),
        ({"vcpus": 0}, "vm.vcpus from 1 to"),
        ({"vcpu_pins": ["0", None]}, "vm.vcpu_pins of each vCPU"),
        ({"vcpu_pins": ["0"]}, "vm.vcpu_pins of each vCPU"),
        ({"binding": ["anywhere", "0"]}, "a mode in vm.binding"),
        ({"cpu_cache": "shared"}, "vm.cpu_cache of"),
        ({"controllers": [{"index": 1, "model": "pci-bridge"}]}, "models in vm.controllers"),
        ({"controllers": [{"index": 1, "model": "pcie-root-port"}]}, "an address of each"),
    ],
)
def test_a_plan_that_says_less_than_a_plan_says_is_refused(
    changed: dict[str, object], expected: str
) -> None:
    document = json.loads(encode_plan(now("pin-numa-pci")))
    text = json.dumps(document | {"vm": document["vm"] | changed}).encode()
    with pytest.raises(InputError, match=expected):
        read_plan(text, "P.json")
