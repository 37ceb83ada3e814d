"""The elements that the study prints for its listings A, B and C are in the tuned document."""

import re

import pytest

from homenode.cpuset import CpuSet
from homenode.units import MIB
from homenode.vm.domain.read import read_vm
from homenode.vm.plan import Plan
from homenode.vm.targets.libvirt import rewrite
from tests.domain_corpus import sample
from tests.domain_plans import hand_plan
from tests.shared_data import SHARED

LAYOUTS = {"A": "pin", "B": "pin-numa", "C": "pin-numa-smt"}


def study_plan(listing: str) -> Plan:
    guest = read_vm(sample("study"), "vm.xml")
    emulator = CpuSet.parse("28,29,92,93" if listing == "C" else "28,29")
    return hand_plan(
        guest,
        LAYOUTS[listing],
        vcpus=112 if listing == "C" else 56,
        memory_bytes=1572864 * MIB,
        emulator_pus=emulator,
        distances=False,
    )


@pytest.mark.parametrize("listing", LAYOUTS)
def test_every_element_that_the_study_prints_is_in_the_document(listing: str) -> None:
    directory = SHARED / "seeds"
    texts = sorted(directory.glob("000_*.txt")) if directory.is_dir() else []
    if not texts:
        pytest.skip(f"the study's text is not in {directory}")
    text = texts[0].read_text()
    part = re.split(r"\nConfig ([ABC]) — ", text)
    block = dict(zip(part[1::2], part[2::2], strict=True))[listing].split("Issues Found")[0]
    printed = re.findall(
        r"<(?:vcpu|emulatorpin|vcpupin|topology|cell|memory|memnode)\b[^>]*/?>", block
    )
    assert len(printed) > 4
    after = rewrite(sample("study"), study_plan(listing)).decode()
    assert [tag for tag in printed if tag not in after] == []


def test_a_document_that_breaks_the_studys_script_works_too() -> None:
    xml = (
        sample("study")
        .replace(b"<vcpu placement='static'>56</vcpu>", b"<vcpu cpuset='0-3' current='2'>94</vcpu>")
        .replace(
            b"<cpu mode='host-passthrough' check='none' migratable='on'/>",
            b"<cpu mode='host-passthrough' check='none' migratable='on'>"
            b"<topology sockets='1' cores='94' threads='1'/>"
            b"<feature policy='require' name='pdpe1gb'/></cpu>",
        )
    )
    after = rewrite(xml, study_plan("A"))
    assert b"<vcpu placement='static'>56</vcpu>" in after
    assert b"migratable='on'><feature policy='require' name='pdpe1gb'/></cpu>" in after
