"""KubeVirt calls the hook twice for a VM with few NICs, and loses <target> on the way."""

from itertools import count, product

import pytest

from homenode.cluster.kubevirt.placing import PlacedDefinition, place_devices
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.model import GuestPciController
from homenode.vm.plan_options import PciGranularity
from tests.kubevirt.test_grace import GPUS as GRACE_GPUS
from tests.kubevirt.test_grace import cells, grace_vm, nodesets
from tests.kubevirt_documents import IBM, IBM_GPUS, defined_again, document, ibm_document, shipped
from tests.seeds import part

EXPANDER = "pcie-expander-bus"
PINS = ((4, 5), (64, 65))


def place(
    xml: str, host: str = IBM, granularity: PciGranularity = PciGranularity.CELL
) -> PlacedDefinition:
    return place_devices(xml.encode(), shipped(host), granularity=granularity)


def twice(
    xml: str,
    *,
    knows_targets: bool = False,
    knows_initiators: bool = False,
    host: str = IBM,
    granularity: PciGranularity = PciGranularity.CELL,
) -> tuple[PlacedDefinition, PlacedDefinition]:
    """The answers to KubeVirt's two calls."""
    first = place(xml, host, granularity)
    between = defined_again(
        xml, first.document.decode(), knows_targets=knows_targets, knows_initiators=knows_initiators
    )
    return first, place(between, host, granularity)


def expanders(placed: PlacedDefinition) -> list[GuestPciController]:
    read = build_vm(open_domain(placed.document, "placed"))
    return [controller for controller in read.controllers if controller.model == EXPANDER]


def addresses(placed: PlacedDefinition) -> dict[str, str]:
    read = build_vm(open_domain(placed.document, "placed"))
    return {str(hostdev.bdf): str(hostdev.address) for hostdev in read.hostdevs}


DOCUMENTS = (
    ibm_document(),
    document(IBM_GPUS[:3], pins=PINS),
    document(IBM_GPUS[4:], pins=PINS),
    document(IBM_GPUS[3:5], pins=PINS, nodes=None),
)
"""8 GPUs; those of node 0, and of node 1, alone; one of each, by pins."""


@pytest.mark.parametrize(
    ("xml", "granularity", "knows_targets"),
    part(list(product(DOCUMENTS, PciGranularity, (False, True))), 0),
    ids=count(),
)
def test_the_second_agrees(xml: str, granularity: PciGranularity, knows_targets: bool) -> None:
    first, second = twice(xml, knows_targets=knows_targets, granularity=granularity)
    assert expanders(second) == expanders(first)
    assert addresses(second) == addresses(first)
    assert not [note for note in second.notes if "stays" in note]


@pytest.mark.parametrize("knows_targets", [False, True])
def test_the_second_definition_has_the_distances_of_the_first(knows_targets: bool) -> None:
    first, second = twice(ibm_document(), knows_targets=knows_targets)
    distances = [found[2] for found in cells(first)]
    assert all(distances)
    assert [found[2] for found in cells(second)] == distances
    if knows_targets:
        assert second.notes == ("added the distances of the cells; no device moved",)


@pytest.mark.parametrize("knows_targets", [False, True])
def test_a_third_call_changes_nothing(knows_targets: bool) -> None:
    _, second = twice(ibm_document(), knows_targets=knows_targets)
    assert place(second.document.decode()).document == second.document


@pytest.mark.parametrize(
    ("knows_targets", "knows_initiators"), [(False, False), (True, False), (True, True)]
)
def test_grace_gpus_get_their_cells_again(knows_targets: bool, knows_initiators: bool) -> None:
    first, second = twice(
        grace_vm(), knows_targets=knows_targets, knows_initiators=knows_initiators, host="gh200x4"
    )
    assert expanders(second) == expanders(first)
    assert nodesets(second) == ["2-9", "10-17"]
    assert cells(second) == cells(first)
    assert len(addresses(second)) == len(GRACE_GPUS)


def test_an_expander_bus_with_a_number_of_its_own_is_somebody_elses_and_stays() -> None:
    theirs = (
        '<controller type="pci" index="1" model="pcie-expander-bus"><target busNr="200"/>'
        '<address type="pci" domain="0x0000" bus="0x00" slot="0x08" function="0x0"/></controller>'
        '<controller type="pci" index="2" model="pcie-root-port">'
        '<address type="pci" domain="0x0000" bus="0x01" slot="0x00" function="0x0"/></controller>'
    )
    given = {IBM_GPUS[0]: 'domain="0x0000" bus="0x02" slot="0x00" function="0x0"'}
    xml = document(IBM_GPUS[:1], pins=PINS, addresses=given, controllers=theirs)
    placed = place(xml)
    assert placed.document == xml.encode()
    assert "put there explicitly" in placed.notes[0]


def test_a_bus_whose_devices_are_of_two_cells_stays_without_one() -> None:
    theirs = (
        '<controller type="pci" index="1" model="pcie-expander-bus">'
        '<address type="pci" domain="0x0000" bus="0x00" slot="0x08" function="0x0"/></controller>'
    )
    for index, slot in ((2, 0), (3, 1)):
        theirs += (
            f'<controller type="pci" index="{index}" model="pcie-root-port"><address type="pci" '
            f'domain="0x0000" bus="0x01" slot="0x0{slot}" function="0x0"/></controller>'
        )
    given = {
        bdf: f'domain="0x0000" bus="0x0{index}" slot="0x00" function="0x0"'
        for index, bdf in enumerate(IBM_GPUS[3:5], start=2)
    }
    xml = document(IBM_GPUS[3:5], pins=PINS, addresses=given, controllers=theirs)
    placed = place(xml)
    assert placed.document == xml.encode()
    assert sum("put there explicitly" in note for note in placed.notes) == 2
