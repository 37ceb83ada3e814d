"""Random VMs on random hosts, the whole way: planned, written, checked, booted.

`make nightly` gives it minutes; here it is a handful. A failure prints the seed of its case:
HOMENODE_FUZZ_SEED=THAT repeats it alone.
"""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from homenode.check.domain.verification import verify_document
from homenode.check.verify.boot.stand_in_boot import BootOptions, boot_stand_in
from homenode.check.verify.expectation import build_expectation
from homenode.check.verify.guest_checks import compare_test_guest
from homenode.findings import are_bad
from homenode.machine.topology import Host
from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.domain.schema import validate
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Unplannable, vm_as_it_runs
from homenode.vm.plan_options import PciGranularity, PlanOptions
from homenode.vm.sources import load_host
from tests.verify_guests import guest_files

HOSTS = ("small-2n8c-2gpu", "hgx-h100", "h200-xeon8558", "x86-2p2n16c32t-isolated-pus")
CASES = 12
SECONDS = float(os.environ.get("HOMENODE_FUZZ_SECONDS", "0"))
SEED = os.environ.get("HOMENODE_FUZZ_SEED")
MAX_BOOTED_VCPUS = 16


@dataclass(frozen=True, slots=True)
class Case:
    seed: str
    host: Host
    tuning: PlannedFile

    @property
    def document(self) -> Document:
        return open_domain(self.tuning.document, "vm.xml")


def case_of(seed: str) -> Case | None:
    """The case of a seed; None where nothing fits."""
    choose = random.Random(seed)
    host = load_host(choose.choice(HOSTS))
    gpus = sum(str(device.kind) == "gpu" for device in host.pci_devices)
    most = sum(pu.online for pu in host.pus) // 2
    vcpus = choose.choice([1, 2, 3, 4, 6, 8, choose.randint(1, max(1, most))])
    gib = choose.choice([1, 2, 4, choose.randint(1, 64)])
    firmware = choose.choice(["", " firmware='efi'"])
    mode = choose.choice(["host-passthrough", "host-model"])
    more = choose.choice(["", "<iothreads>2</iothreads>"])
    features = choose.choice(["<acpi/><apic/>", "<acpi/>" if firmware else "", "<acpi/>"])
    document = (
        f"<domain type='kvm'><name>vm</name><uuid>6e1f6d5e-4a35-4c9c-8f2e-5a0d1c2b3a49</uuid>"
        f"<memory unit='GiB'>{gib}</memory><vcpu>{vcpus}</vcpu>{more}<os{firmware}>"
        f"<type arch='x86_64' machine='q35'>hvm</type></os>"
        f"<features>{features}</features><cpu mode='{mode}'/>"
        "<devices><controller type='pci' index='0' model='pcie-root'/></devices></domain>"
    )
    options = PlanOptions(
        layout=choose.choice([name for name in PRESETS if name != "default"]),
        gpu_count=choose.choice([None, *range(1, gpus + 1)]) if gpus else None,
        unequal_cells=choose.random() < 0.3,
        without_nvlink=True,
        spare_ports=choose.choice([0, 0, 1]),
        pci_granularity=choose.choice(list(PciGranularity)),
    )
    try:
        return Case(seed, host, plan_file(document.encode(), "vm.xml", options, host))
    except Unplannable:
        return None


def seeds() -> Iterator[str]:
    """For so many cases, or so long; the first one is the same on each run here, in CI."""
    if SEED is not None:
        yield SEED
        return
    start = os.environ.get("HOMENODE_SEED", "17")
    ends = time.monotonic() + SECONDS
    number = 0
    while number < CASES or time.monotonic() < ends:
        yield f"{start}-{number}"
        number += 1


def checked(case: Case) -> None:
    """The document says what its plan says, and its schema and host have nothing against it."""
    document = case.document
    assert not validate(case.tuning.document)[0], f"seed {case.seed}"
    answer = verify_document(document, plan=case.tuning.plan, host=case.host)
    known = {"huge-pages-unknown", "core-shared", "pin-off-node", "emulator-on-vcpu"}
    if any(one.id == "host-memory-taken" for one in case.tuning.plan.findings):
        known.add("memory-short")  # the plan says it
    bad = [one for one in answer.findings if are_bad([one]) and one.id not in known]
    assert not bad, f"seed {case.seed}: {bad}"


def booted(case: Case) -> None:
    """A guest of its shape sees what was planned."""
    document = case.document
    facts = build_vm(document)
    outcome = boot_stand_in(document, facts, BootOptions("none", timeout_s=900), case.host)
    assert outcome.guest is not None, f"seed {case.seed}: {outcome.findings}"
    guest = vm_as_it_runs(case.tuning.plan, facts)
    expected = build_expectation(guest, document=facts, host=case.host)
    seen = compare_test_guest(expected, outcome.stand_in, outcome.guest)
    found = [one for one in (*outcome.findings, *seen.findings) if are_bad([one])]
    assert not found, f"seed {case.seed}: {found}"


def test_fuzz_random_vms_on_random_hosts_check_clean() -> None:
    planned = [case for seed in seeds() if (case := case_of(seed)) is not None]
    for case in planned:
        checked(case)
    print(f"{len(planned)} planned; first seed {planned[0].seed}")
    assert len(planned) > CASES // 3 or SEED is not None


@pytest.mark.lab
@pytest.mark.qemu
def test_fuzz_random_vms_boot_as_planned() -> None:
    guest_files()
    for seed in seeds():
        case = case_of(seed)
        if case is not None and case.tuning.plan.vm.vcpus <= MAX_BOOTED_VCPUS:
            print(f"seed {seed}: {case.host.name}, {case.tuning.plan.layout.name}")
            booted(case)
