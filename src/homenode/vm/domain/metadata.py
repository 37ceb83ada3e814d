"""Metadata: the record of a layout in <metadata>, which marks a <numatune> as homenode's own."""

from msgspec.structs import asdict

from homenode.machine.pci import normalize_uuid
from homenode.machine.topology import LAYOUT_NAMESPACE, DomainMark
from homenode.objective import Objective
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.edits import NewElement, apply, insert_at, prune, set_attributes
from homenode.vm.layout import (
    GuestCells,
    GuestPcie,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
    add_preset_name,
)
from homenode.vm.model import LayoutRecord
from homenode.vm.plan import RECORDED_DIGITS, Plan

_RECORD = f"{{{LAYOUT_NAMESPACE}}}layout"


def _find_element(document: Document) -> Element | None:
    return next((e for e in document.root.all("metadata/*") if e.name == _RECORD), None)


def read_record(document: Document) -> LayoutRecord | None:
    """Return the record of a definition, None if it is missing or unreadable."""
    element = _find_element(document)
    if element is None:
        return None
    try:
        layout = Layout(
            name=element.get("name") or "custom",
            pinning=Pinning(element.get("pinning") or ""),
            siblings=Siblings(element.get("siblings") or ""),
            cells=GuestCells(element.get("cells") or ""),
            pcie=GuestPcie(element.get("pcie") or ""),
            memory=MemoryBinding(element.get("memory") or ""),
        )
    except ValueError:
        return None
    objective = next(
        (candidate for candidate in Objective if candidate == element.get("objective")), None
    )
    multiplied = False if element.get("multiplied") == "no" else None
    return LayoutRecord(
        layout=layout, host=element.get("host"), objective=objective, multiplied=multiplied
    )


def read_mark(document: Document) -> DomainMark | None:
    """Return whether a definition's mark is its own or of the VM that it copies; None without."""
    element = _find_element(document)
    if element is None:
        return None
    marked_uuid, uuid = element.get("uuid"), _find_uuid(document)
    is_own = marked_uuid is None or (uuid is not None and normalize_uuid(marked_uuid) == uuid)
    return DomainMark.OWN if is_own else DomainMark.COPY


def _find_uuid(document: Document) -> str | None:
    return normalize_uuid(document.root.value("uuid") or "")


def edit_metadata(document: Document, plan: Plan) -> Document:
    """Write the record of the plan's layout; a layout that changes nothing has no record."""
    element = _find_element(document)
    if add_preset_name(plan.layout).name == "default":
        return document if element is None else prune(document, element)
    record = plan.vm.record
    values: dict[str, str | None] = {
        **{name: str(value) for name, value in asdict(plan.layout).items()},
        "host": plan.host_fingerprint[:RECORDED_DIGITS] or None,
        "objective": None if plan.objective is None else str(plan.objective),
        "multiplied": "no" if record and record.multiplied is False else None,
        # A mark from before the domain had a UUID belongs to it, and stays.
        "uuid": None if element is not None and not element.get("uuid") else _find_uuid(document),
    }
    if element is not None:
        return apply(document, set_attributes(document, element, values))
    mark = NewElement("homenode:layout", {"xmlns:homenode": LAYOUT_NAMESPACE, **values})
    return insert_at(document, "metadata", mark)
