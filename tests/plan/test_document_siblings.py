"""Siblings as the document shows them: whole cores until these cost the host its last core."""

import json
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.machine.topology import CoreKind, Host, HostReserve
from homenode.plan.placement import Placement
from homenode.plan.planner import plan, resolve_layout
from homenode.plan.request import GuestRequest, request_for
from homenode.plan.search.place import place
from homenode.units import GIB, MIB
from homenode.vm.layout import PRESETS, Siblings
from homenode.vm.model import GuestTopology, LayoutRecord, Vm
from homenode.vm.plan import Plan, Relaxation, Unplannable
from homenode.vm.plan_options import AUTO, DefinitionSiblings, PlanOptions
from homenode.vm.sources import load_host
from tests.command_line import homenode
from tests.figures import numbers
from tests.small_hosts import NodeSpec, asking, even_host, host_of, pinned_domain, small_request

R7950X3D = even_host(1, 1, 2, 8, 2, name="7950X3D")
R5900X = even_host(1, 2, 1, 6, 2, name="5900X")
R1900X = even_host(1, 2, 1, 4, 2, name="1900X")
I9_14900K = load_host("rtx4080-i9-14900k")
EPYC = load_host("rtx4090-epyc7702")


def guest(vcpus: int, threads: int = 2) -> Vm:
    shown = GuestTopology(1, 1, vcpus // threads, threads) if threads else None
    return structs.replace(small_request(vcpus, 4 * GIB).guest, cpu_topology=shown)


def request(vcpus: int, threads: int = 2, layout: str = "pin-numa") -> GuestRequest:
    """As auto asks for it."""
    wanted = replace(small_request(vcpus, 4 * GIB), layout=PRESETS[layout])
    rule = DefinitionSiblings.WHEN_SHORT
    return replace(wanted, guest=guest(vcpus, threads), document_siblings=rule)


def auto(shown: Vm, host: Host, options: PlanOptions | None = None) -> Plan:
    asked = resolve_layout(shown, options or PlanOptions(AUTO), host).options
    return plan(host, request_for(shown, asked, host))


def cores_of(host: Host, found: Placement | Plan) -> list[CpuSet]:
    used = CpuSet.union(found.vcpu_pins)
    return [core.pus for core in host.cores if not core.pus.isdisjoint(used)]


@pytest.mark.parametrize(
    ("vcpus", "host", "cores"),
    [
        (16, R7950X3D, 8),
        (12, R5900X, 6),
        (8, R1900X, 4),
        (16, I9_14900K, 8),
        (32, R7950X3D, 16),
        (24, R7950X3D, 12),
    ],
    ids=["7950X3D", "5900X", "1900X", "14900K", "all of it", "more than cores"],
)
def test_desktops_get_siblings_on_as_few_cores_and_llcs_as_hold_them(
    vcpus: int, host: Host, cores: int
) -> None:
    made = auto(guest(vcpus), host)
    used = cores_of(host, made)
    assert len(used) == cores
    assert made.vm.cpu_topology is not None
    assert (made.vm.cpu_topology.threads, made.vm.cpu_topology.vcpus) == (2, vcpus)
    # Siblings that the guest is shown are siblings.
    pins = made.vcpu_pins
    assert all(pins[i] | pins[i + 1] in used for i in range(0, vcpus, 2))
    assert len(made.llcs) == (1 if cores <= 8 else 2)
    kinds = {core.kind for core in host.cores if core.pus in used}
    assert CoreKind.EFFICIENCY not in kinds
    (said,) = (f for f in made.findings if f.id == "document-siblings")
    enough = vcpus <= len(host.cores)
    assert said.observed.endswith("whole cores would not suffice") is not enough
    assert ("--siblings hidden" if enough else "at most 14 vCPUs") in (said.fix or "")


@pytest.mark.parametrize(
    ("vcpus", "host"),
    [(8, EPYC), (16, EPYC), (8, R7950X3D), (14, R7950X3D), (8, I9_14900K), (4, R1900X)],
    ids=lambda one: one.name if isinstance(one, Host) else str(one),
)
def test_where_the_host_keeps_more_than_its_core_each_vcpu_gets_a_whole_core(
    vcpus: int, host: Host
) -> None:
    made = auto(guest(vcpus), host)
    assert len(cores_of(host, made)) == vcpus
    assert made.vm.cpu_topology is not None
    assert made.vm.cpu_topology.threads == 1
    (said,) = (f for f in made.findings if f.id == "document-siblings")
    assert "--siblings keep" in (said.fix or "")


@pytest.mark.parametrize(
    ("vcpus", "host", "words"),
    [
        (16, R7950X3D, "on 2 last-level caches instead of 1"),
        (12, R7950X3D, "on 2 last-level caches instead of 1"),
        (12, R5900X, "on 2 last-level caches instead of 1 and on 2 nodes instead of 1"),
        (6, R7950X3D, None),
        (12, I9_14900K, None),
    ],
)
def test_the_plan_says_what_whole_cores_span_more_than_siblings(
    vcpus: int, host: Host, words: str | None
) -> None:
    (said,) = (f for f in auto(guest(vcpus), host).findings if f.id == "document-siblings")
    text = f"{said.observed} {said.fix}"
    assert "instead of" not in text if words is None else words in text


@pytest.mark.parametrize("larger", [0, 1])
@pytest.mark.parametrize("vcpus", [4, 6, 8, 16])
def test_of_two_llcs_the_larger_is_taken_also_where_the_other_is_tighter(
    vcpus: int, larger: int
) -> None:
    sizes = [96 * MIB if number == larger else 32 * MIB for number in range(2)]
    llcs = (structs.replace(llc, size_bytes=s) for llc, s in zip(R7950X3D.llcs, sizes, strict=True))
    host = structs.replace(R7950X3D, llcs=tuple(llcs))
    assert auto(guest(vcpus), host).llcs == (larger,)
    free = structs.replace(host, domains=(pinned_domain("0" if larger else "8"),))
    assert auto(guest(4), free).llcs == (larger,)


def test_a_vm_that_takes_the_last_core_by_siblings_hears_how_many_would_leave_it() -> None:
    (said,) = (f for f in auto(guest(16), R1900X).findings if f.id == "host-core-taken")
    assert numbers(said.fix or "")[0] == 14


@pytest.mark.parametrize(("reserved", "most"), [("", 6), ("0-2", 5), ("0-1", 6)])
def test_of_whole_cores_those_that_are_reserved_do_not_count(reserved: str, most: int) -> None:
    wanted = asking(request(8 if reserved else 12), reserved_pus=CpuSet.parse(reserved))
    findings = place(R1900X, wanted).findings
    (finding,) = (finding for finding in findings if finding.id == "document-siblings")
    assert numbers(str(finding.fix)) == [most]


@pytest.mark.parametrize(
    ("reserve", "cores"), [(0, 14), (1, 14), (2, 7), (3, 7)], ids=lambda one: str(one)
)
def test_the_boundary_is_a_core_beyond_the_hosts_reserve(reserve: int, cores: int) -> None:
    wanted = replace(request(14), host_reserve=HostReserve(reserve, None))
    assert len(cores_of(R7950X3D, place(R7950X3D, wanted))) == cores


def test_siblings_leave_the_cores_that_they_do_not_take() -> None:
    findings = place(even_host(1, 1, 1, 16, 4), request(8, 4)).findings
    (finding,) = (finding for finding in findings if finding.id == "document-siblings")
    assert numbers(str(finding.fix)) == [2, 6]


def test_no_reserve_does_not_make_a_vm_take_every_core() -> None:
    wanted = replace(request(16), host_reserve=HostReserve(0, None))
    placement = place(R7950X3D, wanted)
    assert len(cores_of(R7950X3D, placement)) == 8
    assert placement.relaxations == ()


def test_what_other_vms_hold_counts() -> None:
    busy = even_host(1, 1, 2, 8, 2, domains=[pinned_domain("0-7")])
    assert len(cores_of(busy, place(busy, request(6)))) == 6
    assert len(cores_of(busy, place(busy, request(8)))) == 4


def test_whole_cores_may_take_more_nodes_than_siblings() -> None:
    host = even_host(2, 1, 1, 16, 2)
    placement = place(host, request(24))
    assert placement.nodes == (0, 1) and not placement.takes_siblings
    assert len(cores_of(host, placement)) == 24


def test_mixed_kinds_that_are_wanted_cost_nothing() -> None:
    host = host_of([NodeSpec(((2,) * 8 + (1,) * 16,), efficiency_cores=16)])
    wanted = request(12)
    assert len(cores_of(host, place(host, wanted))) == 6
    mixed = place(host, asking(wanted, mixed_kinds=True))
    assert len(cores_of(host, mixed)) == 12


@pytest.mark.parametrize(("threads", "cores"), [(2, 4), (4, 2)])
def test_a_guest_core_has_no_more_threads_than_the_document_shows(threads: int, cores: int) -> None:
    host = even_host(1, 1, 1, 8, 4)
    placement = place(host, request(8, threads))
    assert placement.takes_siblings and placement.threads_per_core == threads
    assert len(cores_of(host, placement)) == cores


def test_without_siblings_on_the_host_or_in_the_document_nothing_changes() -> None:
    single = even_host(1, 1, 1, 8, 1)
    plain = replace(request(8), document_siblings=DefinitionSiblings.IGNORED)
    whole = place(single, request(8))
    assert whole.lacks_siblings  # so that a host with siblings is better
    assert replace(whole, lacks_siblings=False) == place(single, plain)
    plain = replace(request(4), document_siblings=DefinitionSiblings.IGNORED)
    assert place(single, request(4)) == place(single, plain)
    made = auto(guest(16, 0), R7950X3D)
    assert len(cores_of(R7950X3D, made)) == 16
    assert Relaxation.HOST_CORE in made.fallback


def test_a_refusal_is_that_of_whole_cores() -> None:
    with pytest.raises(Unplannable, match="34 CPUs needed"):
        place(R7950X3D, request(34))


def test_the_option_keeps_siblings_always_and_hidden_never() -> None:
    for asked, cores in (("always", 4), ("hidden", 8)):
        options = (
            PlanOptions(AUTO, document_siblings=DefinitionSiblings.ALWAYS)
            if asked == "always"
            else PlanOptions(AUTO, siblings=Siblings.HIDDEN)
        )
        assert len(cores_of(EPYC, auto(guest(8), EPYC, options))) == cores
    hidden = PlanOptions(AUTO, siblings=Siblings.HIDDEN)
    assert len(cores_of(R7950X3D, auto(guest(16), R7950X3D, hidden))) == 16
    always = PlanOptions("default", document_siblings=DefinitionSiblings.ALWAYS)
    with pytest.raises(UsageError, match="--siblings keep"):
        request_for(guest(8), always, EPYC)
    as_shown = PlanOptions("pin-numa-smt", document_siblings=DefinitionSiblings.ALWAYS)
    assert request_for(guest(8, 0), as_shown, EPYC).layout.name == "pin-numa"
    # Of four siblings on the host the guest sees two.
    kept = PlanOptions("pin", vcpus=6, siblings=Siblings.KEEP)
    assert request_for(guest(4), kept, even_host(1, 1, 1, 8, 4)).vcpus == 6


@pytest.mark.parametrize(("threads", "vcpus"), [(2, 16), (1, 32), (0, 32)])
def test_smt_layouts_keep_the_vcpus_of_a_document_that_shows_siblings(
    threads: int, vcpus: int
) -> None:
    shown = guest(16, threads)
    made = plan(EPYC, request_for(shown, PlanOptions("pin-numa-smt"), EPYC))
    assert made.vm.vcpus == vcpus


@pytest.mark.parametrize(("multiplied", "vcpus"), [(None, 16), (False, 32)])
def test_smt_layouts_keep_the_vcpus_of_a_tuned_definition(
    multiplied: bool | None, vcpus: int
) -> None:
    """A layout of siblings that the host had none for did not double them."""
    layout = PRESETS["pin-numa-smt"]
    record = LayoutRecord(layout=layout, host=EPYC.fingerprint, multiplied=multiplied)
    tuned = structs.replace(guest(16, 1), record=record)
    assert plan(EPYC, request_for(tuned, PlanOptions("pin-numa-smt"), EPYC)).vm.vcpus == vcpus


def test_a_core_of_the_last_node_alone_is_not_filled() -> None:
    request = asking(small_request(11, layout="pin-numa-smt"), keep_vcpus=True)
    assert place(even_host(2), request).vcpu_nodes == (0,) * 6 + (1,) * 5
    of_four = asking(request, vcpus=5)
    assert len(place(even_host(1, threads=4), of_four).vcpu_pins) == 5


def test_more_vcpus_in_the_command_are_threads_too() -> None:
    asked = PlanOptions("pin-numa-smt", vcpus=24)
    made = plan(EPYC, request_for(guest(16), asked, EPYC))
    assert (made.vm.vcpus, len(cores_of(EPYC, made))) == (24, 12)


DESKTOP = b"""<domain type='kvm'><name>win11</name><memory unit='GiB'>16</memory><vcpu>16</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features>
<cpu mode='host-passthrough'><topology sockets='1' dies='1' cores='8' threads='2'/></cpu>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator></devices></domain>
"""
RYZEN = """name = "ryzen"
cores_per_package = 16
threads_per_core = 2
llcs_per_package = 2
memory_per_node = "64GiB"
cpu = { vendor = "AuthenticAMD", name = "AMD Ryzen 9 7950X", family = 25, model = 97 }
"""


def test_plan_and_doctor_agree_and_the_doctor_finds_what_was_planned_before(tmp_path: Path) -> None:
    given, host, bad, again, out = (
        tmp_path / name for name in ("vm.xml", "host.toml", "bad.xml", "again.xml", "out.xml")
    )
    given.write_bytes(DESKTOP)
    host.write_text(RYZEN)
    homenode("plan", given, "--host", host, "-q", "-l", "pin", "-o", bad)
    assert homenode("doctor", bad, "--host", host).exit_code == 1
    homenode("plan", given, "--host", host, "-q", "-o", out)
    done = homenode("doctor", out, "--host", host, "--json")
    assert (done.exit_code, json.loads(done.stdout)["findings"]) == (0, [])
    homenode("plan", out, "--host", host, "-q", "--force", "-o", again)
    assert again.read_bytes() == out.read_bytes()
