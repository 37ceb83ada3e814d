"""Stored plans: what is written is read as it was, and a plan that says less is refused."""

import json
from pathlib import Path

import pytest

from homenode.errors import InputError
from homenode.plan.stored import encode_plan, read_plan
from homenode.vm.domain.rewrite import rewrite
from homenode.vm.plan import Plan
from tests.verify.test_single_edits import with_room
from tests.verify_documents import tuned

EARLIER = Path(__file__).parent / "earlier"


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
