"""AsPlanned: whether a document says what its plan says, and what writing it again would change.

A document that has its plan in it is left alone by every step of vm/domain/rewrite.py. So whatever
the program can write is checked here, elements that no fact names included.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from homenode.catalogue import finding
from homenode.errors import InputError
from homenode.findings import Finding
from homenode.vm.domain.codec import ROWS, UNSAID
from homenode.vm.domain.controllers import edit_aperture, edit_controllers
from homenode.vm.domain.cpu import edit_cpu
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.iommu import edit_iommu
from homenode.vm.domain.kept import read_kept
from homenode.vm.domain.metadata import edit_metadata
from homenode.vm.domain.rewrite import STEPS
from homenode.vm.facts import diff
from homenode.vm.model import Vm
from homenode.vm.plan_model import Plan

_CASES: dict[Callable[[Document, Plan], Document], str] = {
    edit_aperture: "aperture",
    edit_cpu: "CPU",
    edit_iommu: "IOMMU",
}
_FIELD_OF_PATH = {f"/domain/{row.path}": row.field for row in ROWS if row.field is not None}
_SHOWN = 4

_Part = tuple[str, str, str]
"""(path of local names, name as written, text) of an element by itself."""


def as_planned(
    document: Document, vm: Vm, plan: Plan, also: frozenset[str] = frozenset()
) -> Iterator[Finding]:
    """A finding for each fact that differs, for each group of other elements that the plan would
    change, and for what else the plan relies on. vm: of the document. also: fields of Vm that
    findings of others name."""
    named = set(also)
    for one in diff(plan.vm, vm, plan.unsaid | UNSAID.keys()):
        named.update(one.fact.fields)
        yield finding(
            f"plan-{one.fact.id}", one.subject, one.expected, one.observed, document.source
        )
    reported = {path for path, field in _FIELD_OF_PATH.items() if field in named}
    known = {path.rpartition("/")[2] for path in reported}
    for step in STEPS:
        wanted, there = _difference(document, plan, step)
        parts = [*wanted, *there]
        new = {path for path, _, _ in parts if not _is_named(path, named)} - reported
        if not new:
            continue
        reported |= new
        tags = {tag for path, tag, _ in parts if path in new}
        known |= tags
        recorded = step is edit_metadata
        yield finding(
            "plan-record" if recorded else "plan-element",
            ", ".join(f"<{tag}>" for tag in sorted(tags)),
            _some([text for *_, text in wanted]),
            _some([text for *_, text in there]),
            document.source,
            case=_CASES.get(step),
        )
    yield from _settings(document, plan, known)


def _is_named(path: str, named: set[str]) -> bool:
    """Whether a difference of these fields is one of the element at a path, or of what it holds. Of
    the whole domain, none is: a step that the document refuses has its own reason."""
    if path == "/domain":
        return False
    if any(row.startswith(f"{path}/") and field in named for row, field in _FIELD_OF_PATH.items()):
        return True
    while path and path not in _FIELD_OF_PATH:
        path = path.rpartition("/")[0]
    return _FIELD_OF_PATH.get(path) in named


def _settings(document: Document, plan: Plan, known: set[str]) -> Iterator[Finding]:
    """A finding for what is not as it was when the plan was made, though no layout sets it.

    known: elements that other findings name.
    """
    if plan.kept is None:
        return
    if plan.aperture is not None and plan.aperture.physical_address_bits is not None:
        known = known | {"maxphysaddr"}  # at least those of the plan, which its step checks
    before, now = Counter(plan.kept), Counter(read_kept(document))
    gone, new = (
        sorted(one for one in lines.elements() if one.partition(" ")[0] not in known)
        for lines in (before - now, now - before)
    )
    if gone or new:
        names = dict.fromkeys(one.partition(" ")[0] for one in (*gone, *new))
        subject = ", ".join(f"<{name}>" for name in names)
        yield finding("plan-setting", subject, _some(gone), _some(new), document.source)


def _difference(
    document: Document, plan: Plan, step: Callable[[Document, Plan], Document]
) -> tuple[list[_Part], list[_Part]]:
    """What the step would put in, and what it would take out."""
    try:
        after = step(document, plan)
    except InputError as error:
        # The facts name every controller, this only the first one in the way.
        path = "/domain/devices/controller" if step is edit_controllers else "/domain"
        tag = path.rpartition("/")[2]
        return [(path, tag, "a document that takes the plan")], [(path, tag, error.message)]
    if after.text == document.text:
        return [], []
    before, later = Counter(_parts(document.root, "")), Counter(_parts(after.root, ""))
    return list((later - before).elements()), list((before - later).elements())


def _parts(element: Element, above: str) -> Iterator[_Part]:
    """Each element of a tree by itself, without those in it."""
    attributes = "".join(f" {name}='{value}'" for name, value in sorted(element.attributes))
    text, name = element.text.strip(), element.tag
    path = f"{above}/{element.name.rpartition('}')[2]}"
    whole = f"<{name}{attributes}>{text}</{name}>" if text else f"<{name}{attributes}/>"
    yield path, name, whole
    for child in element.children:
        yield from _parts(child, path)


def _some(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return (", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")) or "none"
