"""Metadata: the record in <metadata> of the layout that homenode has put on a document.

It shows a later run which numatune is homenode's own, and a reader where the pins come from.
"""

from homenode.objective import Objective
from homenode.vm.domain.document import DOMAIN_ORDER, Document, Element
from homenode.vm.domain.edits import (
    New,
    append,
    apply,
    insert_in_order,
    is_bare,
    remove,
    set_attributes,
)
from homenode.vm.fingerprint import RECORDED
from homenode.vm.layout import (
    GuestCells,
    GuestPcie,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
)
from homenode.vm.model import LayoutRecord
from homenode.vm.plan_model import Plan

NAMESPACE = "urn:homenode:layout:1"
_RECORD = f"{{{NAMESPACE}}}layout"


def read_record(document: Document) -> LayoutRecord | None:
    """The record of a document, None where homenode has not written it or one cannot read it."""
    element = document.root.at("metadata", _RECORD)
    if element is None:
        return None
    try:
        layout = Layout(
            element.get("name") or "custom",
            Pinning(element.get("pinning") or ""),
            Siblings(element.get("siblings") or ""),
            GuestCells(element.get("cells") or ""),
            GuestPcie(element.get("pcie") or ""),
            MemoryBinding(element.get("memory") or ""),
        )
    except ValueError:
        return None
    objective = next((one for one in Objective if one == element.get("objective")), None)
    return LayoutRecord(layout=layout, host=element.get("host"), objective=objective)


def edit_metadata(document: Document, plan: Plan) -> Document:
    """The record of the plan's layout. A layout that leaves everything as it was has none."""
    metadata = document.root.child("metadata")
    element = None if metadata is None else metadata.child(_RECORD)
    if _leaves_all(plan.layout):
        return document if element is None else _without(document, element)
    values: dict[str, str | None] = {
        "name": plan.layout.name,
        "pinning": str(plan.layout.pinning),
        "siblings": str(plan.layout.siblings),
        "cells": str(plan.layout.cells),
        "pcie": str(plan.layout.pcie),
        "memory": str(plan.layout.memory),
        "host": plan.host_fingerprint[:RECORDED] or None,
        "objective": None if plan.objective is None else str(plan.objective),
    }
    if element is not None:
        return apply(document, set_attributes(document, element, values))
    given = tuple((name, value) for name, value in values.items() if value is not None)
    record = New("homenode:layout", (("xmlns:homenode", NAMESPACE), *given))
    if metadata is not None:
        return apply(document, append(document, metadata, [record]))
    whole = New("metadata", children=(record,))
    return apply(document, insert_in_order(document, document.root, whole, DOMAIN_ORDER))


def _leaves_all(layout: Layout) -> bool:
    return (
        layout.pinning is Pinning.NONE
        and layout.siblings is Siblings.AS_THEY_WERE
        and layout.cells is GuestCells.FLAT
        and layout.pcie is GuestPcie.AS_IT_WAS
        and layout.memory is MemoryBinding.AS_IT_WAS
    )


def _without(document: Document, element: Element) -> Document:
    document = apply(document, remove(document, element))
    metadata = document.root.child("metadata")
    if metadata is not None and not metadata.attributes and is_bare(document, metadata):
        return apply(document, remove(document, metadata))
    return document
