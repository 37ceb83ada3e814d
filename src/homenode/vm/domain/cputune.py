"""CPU tuning: <vcpupin>, <emulatorpin> and <iothreadpin> in <cputune>; the rest of it stays."""

from collections import Counter

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.vm.domain.cpu import read_vcpus
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.edits import (
    Edit,
    New,
    append,
    apply,
    insert_after,
    insert_before,
    is_bare,
    put,
    remove,
    removed,
    set_attribute,
)
from homenode.vm.domain.fields import decimal, format_set, number, pu_set
from homenode.vm.model import MAX_VCPUS
from homenode.vm.plan_model import Plan

Key = tuple[str, int]
"""An element of ours: its name, and the vCPU or IOThread that it pins (0 for the emulator)."""

_NUMBER_OF = {"vcpupin": "vcpu", "iothreadpin": "iothread"}
_LISTS_OF_VCPUS = ("vcpusched", "cachetune", "memorytune", "monitor")


def iothread_ids(document: Document) -> tuple[int, ...]:
    """The numbers of the IOThreads, ascending; those that <iothreadids> lacks are filled from 1.

    Source: libvirt's formatdomain, IOThreads Allocation.
    """
    listed = document.root.all("iothreadids/iothread")
    ids = {number(e, "id", "an IOThread id") for e in listed}
    stated = document.root.child("iothreads")
    count = 0 if stated is None else decimal(stated, stated.text, "the number of IOThreads")
    if count > MAX_VCPUS or 0 in ids:
        raise InputError(
            f"{document.source}: expected at most {MAX_VCPUS} IOThreads with ids from 1, "
            f"found {count} and ids {sorted(ids)[:8]}"
        )
    spare = 1
    while len(ids) < count:
        ids.add(spare)
        spare += 1
    return tuple(sorted(ids))


def edit_cputune(document: Document, plan: Plan) -> Document:
    """The pins of the plan: emulator, then vCPUs in order, then IOThreads, as the study prints.

    Pins that say the same in another order or spelling stay as they are. Pins of an earlier layout
    are changed in place where their order is ours, and replaced as a block where it is not.
    """
    document = _with_vcpus_that_are(document, plan.vcpus)
    wanted = _wanted(document, plan)
    found = _found(document)
    if {key: pus for key, _, pus in found} == wanted and len(found) == len(wanted):
        return document
    positions = {key: i for i, key in enumerate(wanted)}
    kept = [positions[key] for key, _, _ in found if key in positions]
    if kept == sorted(set(kept)) and kept:
        document = _change_in_place(document, wanted, found)
    else:
        document = _replace(document, wanted, found)
    cputune = document.root.child("cputune")
    if cputune is not None and not cputune.attributes and is_bare(document, cputune):
        return removed(document, [cputune])
    return document


def read_pins(document: Document) -> dict[Key, CpuSet]:
    """The pins of a document by what they pin; the last one counts where there are two."""
    return {key: pus for key, _, pus in _found(document)}


def read_vcpu_pins(document: Document) -> tuple[CpuSet | None, ...]:
    """PUs of each vCPU; None where it floats. Those of <vcpu> are everyone's without a pin."""
    pins, everywhere = read_pins(document), _everywhere(document)
    return tuple(pins.get(("vcpupin", i), everywhere) for i in range(read_vcpus(document)[0]))


def read_emulator(document: Document) -> CpuSet | None:
    """PUs of QEMU's own threads; None = not pinned."""
    return read_pins(document).get(("emulatorpin", 0), _everywhere(document))


def read_iothread_pins(document: Document) -> tuple[tuple[int, CpuSet], ...]:
    """(IOThread, its PUs) of those that are pinned, ascending."""
    pins = read_pins(document).items()
    return tuple(sorted((number, pus) for (name, number), pus in pins if name == "iothreadpin"))


def _everywhere(document: Document) -> CpuSet | None:
    vcpu = document.root.child("vcpu")
    return None if vcpu is None else pu_set(vcpu, "cpuset")


def pin_counts(document: Document) -> dict[Key, int]:
    """How often each vCPU, IOThread and the emulator is pinned."""
    return dict(Counter(key for key, _, _ in _found(document)))


def _wanted(document: Document, plan: Plan) -> dict[Key, CpuSet]:
    wanted: dict[Key, CpuSet] = {}
    if plan.emulator_pus is not None:
        wanted["emulatorpin", 0] = plan.emulator_pus
    wanted |= {("vcpupin", vcpu): pus for vcpu, pus in enumerate(plan.vcpu_pins)}
    threads = iothread_ids(document)
    if plan.iothread_pus and len(plan.iothread_pus) != len(threads):
        raise InputError(
            f"{document.source}: expected {len(plan.iothread_pus)} IOThreads as in the plan, "
            f"found {len(threads)}",
            hint="plan again for this document",
        )
    pairs = zip(threads, plan.iothread_pus, strict=False)
    return wanted | {("iothreadpin", thread): pus for thread, pus in pairs if pus}


def _found(document: Document) -> list[tuple[Key, Element, CpuSet]]:
    found = []
    for element in document.root.all("cputune/*"):
        if element.name not in ("emulatorpin", "vcpupin", "iothreadpin"):
            continue
        attribute = _NUMBER_OF.get(element.name)
        which = 0 if attribute is None else number(element, attribute)
        found.append(((element.name, which), element, pu_set(element, "cpuset") or CpuSet()))
    return found


def _new(key: Key, pus: CpuSet) -> New:
    name, which = key
    of = {_NUMBER_OF[name]: str(which)} if name in _NUMBER_OF else {}
    return New(name, {**of, "cpuset": format_set(pus)})


def _change_in_place(
    document: Document, wanted: dict[Key, CpuSet], found: list[tuple[Key, Element, CpuSet]]
) -> Document:
    edits: list[Edit] = []
    element_of = {}
    for key, element, pus in found:
        if key not in wanted:
            edits += remove(document, element)
            continue
        element_of[key] = element
        if pus != wanted[key]:
            edits += set_attribute(document, element, "cpuset", format_set(wanted[key]))
    last: Element | None = None
    leading: list[New] = []
    behind: dict[int, tuple[Element, list[New]]] = {}
    for key, pus in wanted.items():
        if key in element_of:
            last = element_of[key]
        elif last is None:
            leading.append(_new(key, pus))
        else:
            behind.setdefault(last.start, (last, []))[1].append(_new(key, pus))
    first = next(element_of[key] for key in wanted if key in element_of)
    edits += insert_before(document, first, leading)
    for element, news in behind.values():
        edits += insert_after(document, element, news)
    return apply(document, edits)


def _replace(
    document: Document, wanted: dict[Key, CpuSet], found: list[tuple[Key, Element, CpuSet]]
) -> Document:
    """All old pins go; the new ones stand where the first of them stood, else at the front."""
    ours = {element.start for _, element, _ in found}
    # How many other elements come before the first pin.
    children = document.root.all("cputune/*")
    ahead = next((i for i, e in enumerate(children) if e.start in ours), 0)
    document = removed(document, [element for _, element, _ in found])
    news = [_new(key, pus) for key, pus in wanted.items()]
    cputune = document.root.child("cputune")
    if not news:
        return document
    if cputune is None:
        return put(document, "", New("cputune", children=tuple(news)))
    if ahead:
        return apply(document, insert_after(document, cputune.children[ahead - 1], news))
    if cputune.children:
        return apply(document, insert_before(document, cputune.children[0], news))
    return apply(document, append(document, cputune, news))


def _with_vcpus_that_are(document: Document, vcpus: int) -> Document:
    """Schedulers, cache and bandwidth shares lose vCPUs that are no more, and go with the last."""
    present = CpuSet(range(vcpus))
    edits: list[Edit] = []
    gone_until = -1
    for element in (one for part in document.root.all("cputune/*") for one in part.walk()):
        if element.name not in _LISTS_OF_VCPUS or element.start < gone_until:
            continue
        named = pu_set(element, "vcpus")
        if named is None or named <= present:
            continue
        if named.isdisjoint(present):
            edits += remove(document, element)
            gone_until = element.end
        else:
            edits += set_attribute(document, element, "vcpus", format_set(named & present))
    return apply(document, edits)
