"""Features: <acpi/>, by which a guest learns its NUMA nodes, and other children of <features>.

Linux on x86 reads nodes, distances and the nodes of expander buses from ACPI alone (SRAT, SLIT,
_PXM). libvirt takes a domain without <acpi/> and starts QEMU with acpi=off. Seen with QEMU 7.2:
every device's numa_node is -1, and of the cells the guest has what SeaBIOS makes up: nodes without
their distances, or one node. On aarch64 the device tree has the nodes of
vCPUs and memory, but no expander bus.
"""

from collections.abc import Mapping

from homenode.domain.cpu import read_architecture
from homenode.domain.document import DOMAIN_ORDER, FEATURES_ORDER, Document
from homenode.domain.edits import New, apply, insert_in_order, set_attributes
from homenode.plan.model import Plan
from homenode.vm.layout import GuestCells
from homenode.vm.model import PortModel


def has_acpi(document: Document) -> bool:
    """Whether the guest gets ACPI tables."""
    return document.root.at("features", "acpi") is not None


def needs_acpi(plan: Plan) -> bool:
    """Whether the plan shows the guest something that an x86 guest learns by ACPI alone."""
    return plan.layout.cells is GuestCells.MIRRORED or any(
        controller.model == PortModel.EXPANDER_BUS for controller in plan.controllers
    )


def edit_acpi(document: Document, plan: Plan) -> Document:
    """<acpi/> where the plan needs it. Not on aarch64, where libvirt takes it with UEFI alone."""
    if has_acpi(document) or not needs_acpi(plan):
        return document
    if read_architecture(document) != "x86_64":
        return document
    return with_feature(document, "acpi", {})


def with_feature(document: Document, name: str, values: Mapping[str, str]) -> Document:
    """The document with that child of <features> and these attributes of it."""
    features = document.root.child("features")
    new = New(name, tuple(values.items()))
    if features is None:
        whole = New("features", children=(new,))
        return apply(document, insert_in_order(document, document.root, whole, DOMAIN_ORDER))
    there = features.child(name)
    if there is None:
        return apply(document, insert_in_order(document, features, new, FEATURES_ORDER))
    return apply(document, set_attributes(document, there, dict(values)))
