"""The doctor says what NCCL will not know of a domain's GPUs, or of a guest's own."""

import pytest

from homenode.check.doctor.diagnosis import diagnose
from homenode.findings import Severity
from homenode.machine.discover import discover
from homenode.plan.tuning import tune
from homenode.vm.domain.read import open_domain
from homenode.vm.plan_options import PlanOptions, Policy
from homenode.vm.sources import load_host
from tests.measure.gpu_trial import HOST, ORIGINAL, shown_by

ID = "nccl-gpus-without-node"


def tuned(layout: str) -> bytes:
    options = PlanOptions(layout=layout, policy=Policy.SPREAD)
    return tune(ORIGINAL, "vm", options, load_host(HOST)).document


@pytest.mark.parametrize(
    ("layout", "found"), [("pin", []), ("pin-numa", [Severity.INFO]), ("pin-numa-pci", [])]
)
def test_cells_without_the_gpus_places_are_named(layout: str, found: list[Severity]) -> None:
    document = tuned(layout)
    of_domain = diagnose(load_host(HOST), open_domain(document, "vm.xml")).findings
    assert [one.severity for one in of_domain if one.id == ID] == found
    # The same in the guest that this document boots.
    of_guest = diagnose(discover(shown_by(document))).findings
    assert [one.severity for one in of_guest if one.id == ID] == found
