"""What is wrong in a document is seen by the judge's own reader of it, and named."""

import re

import pytest

from homenode.plan.pipeline import plan_file
from homenode.units import GIB, MIB
from homenode.vm.domain.copy import make_domain
from tests.conformance.libvirt import planned_of_document, read_document
from tests.targets.written import host_named, options

PLANTED = [
    (r"\A", "", set()),
    (r"<vcpupin vcpu='0' cpuset='0'", "<vcpupin vcpu='0' cpuset='3'", {"pins"}),
    (r"(<emulatorpin cpuset=)'[^']*'", r"\1'7'", {"emulator"}),
    (r"cpus='0,1' memory='2097152'", "cpus='0,1' memory='1048576'", {"cells"}),
    (r"(<sibling id='1' value=)'20'", r"\1'21'", {"cells"}),
    (r"(cellid='0' mode='strict' nodeset=)'0'", r"\1'1'", {"memory of cells"}),
    (r"<memory mode='strict' nodeset='0,1'", "<memory mode='preferred' nodeset='0,1'", {"binding"}),
    (r"<page size='2048'", "<page size='1048576'", {"huge pages"}),
    (r"<node>0</node>", "<node>1</node>", {"devices"}),
    (r"sockets='2'( dies='1')? cores='2'", r"sockets='1'\1 cores='4'", {"topology"}),
]


def as_printed(text: str) -> str:
    """Sizes in KiB, as libvirt prints them."""
    text = text.replace("<memory unit='GiB'>4<", "<memory unit='KiB'>4194304<")
    text = text.replace("memory='2048' unit='MiB'", "memory='2097152' unit='KiB'")
    return text.replace("size='2' unit='MiB'", "size='2048' unit='KiB'")


@pytest.mark.parametrize(("found", "slip", "facts"), PLANTED)
def test_a_planted_slip_is_a_difference_of_its_fact(found: str, slip: str, facts: set[str]) -> None:
    given = make_domain(4, 4 * GIB, architecture="x86_64")
    wanted = options("pin-numa-pci", gpu_count=2, page_bytes=2 * MIB)
    tuning = plan_file(given, "vm.xml", wanted, host_named("small-2n8c-2gpu"))
    text = as_printed(tuning.document.decode())
    wrong = re.sub(found, slip, text, count=1)
    assert wrong != text or not facts, text
    planned, read = planned_of_document(tuning.plan, given), read_document(wrong)
    assert {name for name in planned if planned[name] != read[name]} == facts
