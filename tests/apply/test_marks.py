"""A VM that homenode placed keeps what it was given while it is shut off."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.change.journal import default_root
from homenode.check.domain.verification import verify_document
from homenode.errors import InputError
from homenode.formats import encode
from homenode.machine.snapshot.pseudonyms import Pseudonyms
from homenode.machine.snapshot.redact import redact_domains
from homenode.machine.topology import DomainMark, Host, RunningDomain
from homenode.plan.allocations import find_allocations
from homenode.plan.pipeline import plan_file
from homenode.plan.request import request_for
from homenode.vm.domain.copy import copy_domain
from homenode.vm.domain.read import open_domain, read_running_domain, read_vm
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.command_line import NEEDS_CLUSTER, apply, homenode, restore
from tests.virsh_stand_in import UUID, StandIn

HOST = "small-2n8c-2gpu"
PLACED = tuned("pin")
KEPT = PLACED.replace(NAME.encode(), b"kept")
COPY = copy_domain(PLACED, "copy")
WITHOUT_UUID = PLACED.replace(f" uuid='{UUID}'".encode(), b"")


def domain_of(definition: bytes) -> RunningDomain:
    return read_running_domain(definition, running=False)


def captured(definition: bytes) -> RunningDomain:
    """As a redacted capture has it."""
    text = redact_domains(f"<domains>{definition.decode()}</domains>", Pseudonyms())
    assert UUID not in text
    return domain_of(text.removeprefix("<domains>").rpartition("</domains>")[0].encode())


def taken(domain: RunningDomain, **options: object) -> tuple[bool, int]:
    """Whether another VM finds CPUs of a domain taken, and the number of gaps."""
    host = replace(load_host(HOST), domains=(domain,), gaps=())
    other = read_vm(ORIGINAL.replace(UUID.encode(), UUID[:-1].encode() + b"0"), "other")
    other = replace(other, name="other")
    request = request_for(other, PlanOptions("pin", **options), host)  # type: ignore[arg-type]
    found = find_allocations(host, request)
    return bool(found.vcpu_cores), len(found.gaps)


@pytest.mark.parametrize(
    ("definition", "mark"),
    [
        (ORIGINAL, None),
        (PLACED, DomainMark.OWN),
        (WITHOUT_UUID, DomainMark.OWN),
        (COPY, DomainMark.COPY),
    ],
    ids=["as it was", "placed", "mark without a UUID", "copy"],
)
def test_a_mark_counts_with_its_uuid_in_a_capture_too(
    definition: bytes, mark: DomainMark | None
) -> None:
    assert captured(definition).uuid is None  # it is a pseudonym
    for domain in (domain_of(definition), captured(definition)):
        assert domain.mark is mark
        assert domain.has_claim == (mark is DomainMark.OWN)
        assert taken(domain)[0] == (mark is DomainMark.OWN)


def test_a_file_without_a_uuid_matches_its_plan_after_libvirt_gave_it_one() -> None:
    identity = f"  <uuid>{UUID}</uuid>\n".encode()
    planned = plan_file(ORIGINAL.replace(identity, b""), "vm", PlanOptions("pin"), load_host(HOST))
    defined = planned.document.replace(b"  <memory ", identity + b"  <memory ", 1)
    document = open_domain(defined, "vm")
    found = verify_document(document, plan=planned.plan, host=load_host(HOST)).findings
    assert not found and domain_of(defined).mark is DomainMark.OWN


def test_a_copy_is_named_and_counts_where_the_user_says_so() -> None:
    (_, gaps), (is_taken, fewer) = taken(domain_of(COPY)), taken(domain_of(ORIGINAL))
    assert gaps == fewer + 1 and not is_taken
    assert taken(domain_of(COPY), reserve_defined=True)[0]
    assert taken(domain_of(COPY), replaces=("copy",)) == (False, fewer)


def test_a_vm_that_is_planned_again_does_not_count_itself() -> None:
    host = replace(load_host(HOST), domains=(domain_of(PLACED),))
    for name in (NAME, "renamed"):
        vm = replace(read_vm(ORIGINAL, "vm"), name=name)
        found = find_allocations(host, request_for(vm, PlanOptions("pin"), host))
        assert not found.vcpu_cores, name
    assert not taken(domain_of(PLACED), replaces=(NAME,))[0]


def full_host() -> Host:
    """Every core but two is kept by a VM that is shut off."""
    host = load_host(HOST)
    pins = tuple(core.pus for core in host.cores[2:])
    gpu = next(device.bdf for device in host.pci_devices if device.class_code >> 8 == 0x0302)
    kept = replace(domain_of(KEPT), vcpu_pins=pins, devices=(gpu,), uuid=None)
    return replace(host, domains=(kept,), gaps=())


def test_reserving_what_is_defined_is_refused_where_the_host_shows_no_vms(tmp_path: Path) -> None:
    for source, code in ((HOST, 2), (str(tmp_path / "host.json"), 0)):
        (tmp_path / "host.json").write_text(encode("host", full_host()))
        (tmp_path / "vm.xml").write_bytes(ORIGINAL)
        words = ("--layout", "pin", "--vcpus", "1", "--reserve-defined", "--host", source)
        assert homenode("plan", str(tmp_path / "vm.xml"), *words).exit_code == code


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("show",), "placed by homenode"),
        (("plan", "VM", "--layout", "pin", "--vcpus", "1"), "--ignore-domain kept"),
        (("plan", "VM", "--layout", "pin", "--vcpus", "4"), "--ignore-domain kept"),
        (("plan", "VM", "--layout", "pin", "--vcpus", "1", "--gpus", "2"), "--ignore-domain kept"),
        pytest.param(("pool", "show"), "1 busy", marks=NEEDS_CLUSTER),
        pytest.param(
            ("pool", "place", "VM", "--layout", "pin", "--gpus", "2", "--vcpus", "1"),
            "--ignore-domain kept",
            marks=NEEDS_CLUSTER,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_whoever_plans_counts_the_vm_that_keeps_what_is_missing(
    words: Sequence[str], expected: str, tmp_path: Path
) -> None:
    vm, host = tmp_path / "vm.xml", tmp_path / "host.json"
    vm.write_bytes(ORIGINAL.replace(UUID.encode(), UUID[:-1].encode() + b"0"))
    host.write_text(encode("host", full_host()))
    given = [str(vm) if word == "VM" else word for word in words]
    result = homenode(*given, "--pool" if words[0] == "pool" else "--host", str(host), whole=True)
    assert expected in result.output


def test_what_an_ignored_vm_has_is_not_listed_as_kept(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("homenode.vm.host_sources._read_this_machine", full_host)
    for ignored in ((), ("kept",)):
        apply([NAME], options=PlanOptions("pin", vcpus=1, replaces=ignored), dry_run=True)
        assert ("(--ignore-domain kept frees" in capsys.readouterr().out) is not bool(ignored)


def test_a_placed_definition_is_an_original_only_where_no_record_exists(
    daemon: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    apply([NAME], layout="pin", yes=True, quiet=True)
    placed = daemon.definition()
    restore([NAME])
    daemon.put_definition(placed)  # as from the file of homenode plan -o
    apply([NAME], layout="pin", yes=True, quiet=True)
    assert "no saved original" not in capsys.readouterr().err
    restore([NAME])
    assert daemon.definition() == ORIGINAL

    daemon.put_definition(placed.replace(b"<vcpu ", b"<title>mine</title>\n  <vcpu "))
    with pytest.raises(InputError, match="edited after homenode apply: title"):
        apply([NAME], layout="pin", yes=True, quiet=True)
    restore([NAME], forget=True)
    apply([NAME], layout="pin", yes=True, quiet=True)

    daemon.put_definition(placed)
    shutil.rmtree(default_root())
    capsys.readouterr()
    for is_dry in (True, False):
        apply([NAME], layout="pin-numa", dry_run=is_dry, yes=not is_dry, quiet=True)
        assert "no saved original" in capsys.readouterr().err
    restore([NAME])
    assert daemon.definition() == placed
    edited = placed.replace(b"<vcpu ", b"<title>mine</title>\n  <vcpu ")
    daemon.put_definition(edited)
    apply([NAME], layout="pin-numa", yes=True, quiet=True)
    restore([NAME])
    assert daemon.definition() == edited
