"""Plans that earlier versions have stored are read as what they would be now."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.errors import InputError
from homenode.findings import are_bad
from homenode.plan.stored import encode_plan, read_plan
from homenode.vm.domain.rewrite import rewrite
from homenode.vm.plan_model import KEPT, Plan, with_vm
from tests.verify.test_single_edits import with_room
from tests.verify_documents import findings_of, tuned

EARLIER = Path(__file__).parent / "earlier"


def now(layout: str) -> Plan:
    return with_room(layout)[2] if layout == "pin-numa-pci" else tuned(layout).plan


@pytest.mark.parametrize("layout", ["pin-numa-pci", "pin-bound"])
def test_a_plan_of_version_1_is_the_one_of_today(layout: str) -> None:
    name = f"{layout}-1.json"
    earlier = read_plan((EARLIER / name).read_bytes(), name)
    plan = now(layout)
    assert earlier == with_vm(plan, firmware=plan.vm.firmware or "bios")
    assert read_plan(encode_plan(earlier).encode(), name) == earlier


@pytest.mark.parametrize("read", [True, False])
def test_a_plan_that_was_read_writes_what_it_wrote_before(*, read: bool) -> None:
    before, after, plan = with_room("pin-numa-pci")
    stored = (EARLIER / "pin-numa-pci-1.json").read_bytes()
    plan = read_plan(stored if read else encode_plan(plan).encode(), "P.json")
    assert rewrite(before, plan) == after
    assert not are_bad(findings_of(after, plan))


def test_what_version_1_got_later_may_be_missing() -> None:
    old = json.loads((EARLIER / "pin-numa-pci-1.json").read_bytes())
    for name in ("memory_device_bytes", "mediated_removed", "kept", "objective", "iothread_ids"):
        del old[name]
    for device in old["devices"]:
        for name in ("initiator_cells", "uuid", "managed"):
            del device[name]
    plan = read_plan(json.dumps(old).encode(), "P.json")
    known = now("pin-numa-pci")
    assert plan.unsaid == known.unsaid | KEPT
    assert plan == replace(
        with_vm(known, machine=None, firmware=None, cpu_mode=None, cpu_model=None), kept=None
    )


def test_topoext_of_a_plan_that_shows_an_l3_stays_as_it_was() -> None:
    """Before `disable` they said false of it."""
    old = json.loads((EARLIER / "pin-numa-pci-1.json").read_bytes())
    said = {}
    for cache in ("emulate", "disable"):
        document = json.dumps(old | {"topoext": False, "cache": cache}).encode()
        said[cache] = read_plan(document, "P.json").vm.topoext
    assert said == {"emulate": None, "disable": False}


@pytest.mark.parametrize(
    "changed", [{"vcpus": "four"}, {"vcpus": 10**12}, {"cells": [{}]}, {"layout": None}]
)
def test_a_plan_of_version_1_that_is_none_is_refused(changed: dict[str, object]) -> None:
    old = json.loads((EARLIER / "pin-numa-pci-1.json").read_bytes())
    with pytest.raises(InputError, match="not a valid homenode"):
        read_plan(json.dumps(old | changed).encode(), "P.json")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"record": None}, "a layout in vm.record"),
        ({"vcpus": 10**12}, "vm.vcpus from 1 to"),
        ({"vcpus": 0}, "vm.vcpus from 1 to"),
        ({"vcpu_pins": ["0", None]}, "vm.vcpu_pins of each vCPU"),
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
