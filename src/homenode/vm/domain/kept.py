"""Kept: what of a tuned document the plan leaves as it was, and relies on.

libvirt prints sizes in KiB, sets in its own form, and a machine type with its version: what means
the same reads the same here.
"""

from collections.abc import Iterator

from msgspec import structs
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.vm.domain.cells import cell_elements
from homenode.vm.domain.controllers import QEMU_NAMESPACE
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.fields import size_bytes
from homenode.vm.domain.hostdevs import hostdev_elements, read_hostdevs
from homenode.vm.domain.read import vm_of
from homenode.vm.facts import FACTS
from homenode.vm.plan_model import KEPT, Plan

_FIELDS = tuple(field for fact in FACTS if fact.id in KEPT for field in fact.fields)
"""Of Vm, what no layout sets."""
_SECTIONS = ("memoryBacking", "memtune", "cputune", "features")
_PINS = ("vcpupin", "emulatorpin", "iothreadpin")
_OF_CPU = ("feature", "maxphysaddr")
_SETS = ("vcpus", "nodeset", "cpus")
_SIZES = ("hard_limit", "soft_limit", "swap_hard_limit", "min_guarantee", "maxMemory", "tb-cache")
_WITH_SIZE = ("page", "cache")
_DEFAULTS = {"feature": {"policy": "require"}, "hyperv": {"mode": "custom"}}
_NOT_PRINTED = ("ioapic", "tcg")
"""Elements that libvirt drops where they say nothing."""
_VFIO = (None, "vfio")


def with_kept(plan: Plan, document: Document) -> Plan:
    """The plan with what its document has beyond it. Raises ParseError or InputError."""
    found = vm_of(document)
    left = {name: getattr(found, name) for name in _FIELDS}
    return replace(plan, vm=structs.replace(plan.vm, **left), kept=read_kept(document))


def read_kept(document: Document) -> tuple[str, ...]:
    """A line for each element of a document that layouts share their sections with. Raises
    ParseError or InputError."""
    return tuple(sorted(_settings(document)))


def _settings(document: Document) -> Iterator[str]:
    root = document.root
    shared = [e for name in _SECTIONS for e in root.all(f"{name}/*") if e.name not in _PINS]
    of_cpu = [e for e in root.all("cpu/*") if e.name in _OF_CPU]
    for element in (*shared, *of_cpu, *root.all("maxMemory")[:1]):
        yield from _lines(element)
    for i, cell in enumerate(cell_elements(document)):
        for name in ("memAccess", "discard"):
            if cell.get(name) is not None:
                yield f"cell {i} {name}={cell.get(name)}"
    loader = root.at("os/loader")
    if loader is not None and root.value("os/@firmware") is None:
        # Where the document names the firmware's kind alone, libvirt chooses the loader.
        for name in ("readonly", "secure", "type"):
            if loader.get(name) is not None:
                yield f"loader {name}={loader.get(name)}"
    security = root.child("launchSecurity")
    if security is not None:
        yield f"launchSecurity type={security.get('type')}"
    yield from _of_devices(document)
    for name in ("commandline", "override"):
        passed = root.child(f"{{{QEMU_NAMESPACE}}}{name}")
        # What it does is QEMU's to say, so any change of it counts, and the order of its words.
        if passed is not None:
            words = (" ".join(v for _, v in e.attributes) for e in passed.walk() if e is not passed)
            yield f"qemu:{name} {' '.join(filter(None, words))}"


def _of_devices(document: Document) -> Iterator[str]:
    for element in document.root.all("devices/*"):
        driver = element.child("driver")
        if element.name == "iommu":
            yield f"iommu model={element.get('model')}"
            if driver is not None:
                yield from _lines(driver, "iommu ")
        elif driver is not None and driver.get("iothread") is not None:
            name = element.value("target/@dev") or ""
            yield f"{element.tag} {name} iothread={driver.get('iothread')}"
    pairs = zip(hostdev_elements(document), read_hostdevs(document), strict=True)
    for (element, _), hostdev in pairs:
        program = element.value("driver/@name")
        yield f"hostdev {hostdev.bdf} managed={'yes' if hostdev.managed else 'no'}"
        if program not in _VFIO:
            yield f"hostdev {hostdev.bdf} driver={program}"


def _lines(element: Element, above: str = "") -> Iterator[str]:
    """An element, and each below it, by itself."""
    values = dict(element.attributes)
    text = element.text.strip()
    if element.name in _SIZES:
        text = f"{size_bytes(element, element.text, values.pop('unit', None))} bytes"
    elif element.name == "tseg":
        text = f"{size_bytes(element, element.text, values.pop('unit', 'MiB'))} bytes"
    elif element.name in _WITH_SIZE and values.get("size") is not None:
        size = values.pop("size")
        values["bytes"] = str(size_bytes(element, size, values.pop("unit", None)))
    for name, value in _DEFAULTS.get(element.name, {}).items():
        values.setdefault(name, value)
    if values.get("state") == "on":  # what a feature without a state is
        del values["state"]
    for name in _SETS:
        if name in values:
            values[name] = str(CpuSet.parse(values[name], element.source))
    words = [f"{name}={value}" for name, value in sorted(values.items())]
    if words or text or element.name not in _NOT_PRINTED:
        yield " ".join(filter(None, (f"{above}{element.tag}", *words, text)))
    for child in element.children:
        yield from _lines(child, f"{above}{element.tag} ")
