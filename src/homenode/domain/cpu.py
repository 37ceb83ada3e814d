"""CPU: <topology>, <cache>, topoext and <maxphysaddr> in <cpu>; its mode and model stay."""

from homenode.domain.document import CPU_ORDER, DOMAIN_ORDER, Document, Element
from homenode.domain.edits import (
    New,
    apply,
    close_up,
    insert_in_order,
    remove,
    set_attribute,
    set_attributes,
)
from homenode.domain.fields import decimal
from homenode.domain.vcpu import MAX_VCPUS
from homenode.errors import InputError, ParseError
from homenode.plan.model import Plan
from homenode.vm.layout import Siblings
from homenode.vm.model import GuestCache, GuestTopology


def read_topology(document: Document, topology: Element) -> tuple[int, int, int, int]:
    """(sockets, dies, cores, threads) of a <topology>; clusters are counted into the cores."""

    def part(name: str) -> int:
        text = topology.get(name)
        value = 1 if text is None else decimal(document, topology, text, name)
        if not 1 <= value <= MAX_VCPUS:
            raise ParseError(
                document.source, f"{name} from 1 to {MAX_VCPUS}", str(text), line=topology.line
            )
        return value

    return part("sockets"), part("dies"), part("clusters") * part("cores"), part("threads")


def read_architecture(document: Document) -> str:
    """As the document names it, else that of its emulator or its machine type."""
    type_ = document.root.at("os", "type")
    named = type_.get("arch") if type_ is not None else None
    if named:
        return named
    emulator = document.root.at("devices", "emulator")
    path = emulator.text.strip() if emulator is not None else ""
    _, found, suffix = path.rpartition("qemu-system-")
    if found and suffix.isidentifier():
        return suffix
    machine = (type_.get("machine") if type_ is not None else None) or ""
    return "aarch64" if machine == "virt" or machine.startswith("virt-") else "x86_64"


def edit_cpu(document: Document, plan: Plan) -> Document:
    """What the plan shows the guest of its CPUs. Raises InputError where the mode forbids it."""
    if plan.topology is not None:
        document = _with_topology(document, plan.topology)
    else:
        document = _without_stale_topology(document, plan)
    if plan.topoext:
        document = _with_topoext(document)
    elif plan.topoext is False:
        document = _without_topoext(document)
    if plan.cache is not None:
        document = _with_cache(document, plan.cache)
    if plan.aperture is not None and plan.aperture.physical_address_bits is not None:
        document = _with_address_bits(document, plan.aperture.physical_address_bits)
    return document


def _put(document: Document, new: New) -> Document:
    """A new child of <cpu>. A <cpu> that has to be made has no mode: it changes no CPU model."""
    cpu = document.root.child("cpu")
    if cpu is None:
        whole = New("cpu", children=(new,))
        return apply(document, insert_in_order(document, document.root, whole, DOMAIN_ORDER))
    return apply(document, insert_in_order(document, cpu, new, CPU_ORDER))


def _with_topology(document: Document, wanted: GuestTopology) -> Document:
    element = document.root.at("cpu", "topology")
    values: dict[str, str | None] = {
        "sockets": str(wanted.sockets),
        "dies": str(wanted.dies) if wanted.dies > 1 else None,
        "cores": str(wanted.cores),
        "threads": str(wanted.threads),
    }
    if element is None:
        given = tuple((name, value) for name, value in values.items() if value is not None)
        return _put(document, New("topology", given))
    if read_topology(document, element) == tuple(wanted):
        return document
    return apply(document, set_attributes(document, element, values | {"clusters": None}))


def _without_stale_topology(document: Document, plan: Plan) -> Document:
    """A topology of an earlier layout, which another vCPU count or hidden siblings contradict."""
    element = document.root.at("cpu", "topology")
    if element is None:
        return document
    sockets, dies, cores, threads = read_topology(document, element)
    shows_siblings = plan.layout.siblings is Siblings.HIDDEN and threads > 1
    if sockets * dies * cores * threads == plan.vcpus and not shows_siblings:
        return document
    document = apply(document, remove(document, element))
    cpu = document.root.child("cpu")
    assert cpu is not None, "the topology was in it"
    if not cpu.attributes and not cpu.children:
        return apply(document, remove(document, cpu))
    return apply(document, close_up(document, cpu))


def _cpu_that_takes(document: Document, what: str) -> Element:
    cpu = document.root.child("cpu")
    if cpu is None or (cpu.get("mode") in (None, "custom") and cpu.child("model") is None):
        raise InputError(
            f"{document.source}: expected a <cpu> with a mode or a model for {what}, found none: "
            "libvirt takes no features without one",
            hint="add <cpu mode='host-passthrough'/> to the domain",
        )
    return cpu


def _topoext(document: Document) -> Element | None:
    cpu = document.root.child("cpu")
    features = () if cpu is None else cpu.all("feature")
    return next((one for one in features if one.get("name") == "topoext"), None)


def read_topoext(document: Document) -> bool | None:
    """Whether the document asks for the feature topoext or switches it off; None = neither."""
    feature = _topoext(document)
    policy = None if feature is None else feature.get("policy") or "require"
    return {"require": True, "force": True, "disable": False, "forbid": False}.get(policy or "")


def _with_topoext(document: Document) -> Document:
    _cpu_that_takes(document, "the feature topoext")
    if read_topoext(document):
        return document
    feature = _topoext(document)
    if feature is not None:
        return apply(document, set_attribute(document, feature, "policy", "require"))
    return _put(document, New("feature", (("policy", "require"), ("name", "topoext"))))


def _without_topoext(document: Document) -> Document:
    """Switched off where the document asks for it or its CPU model may bring it along; QEMU adds it
    to no host-passthrough or maximum model. Source: no_autoenable_flags of FEAT_8000_0001_ECX in
    target/i386/cpu.c."""
    feature = _topoext(document)
    if feature is not None:
        if read_topoext(document) is False:
            return document
        return apply(document, set_attribute(document, feature, "policy", "disable"))
    cpu = document.root.child("cpu")
    model = None if cpu is None else cpu.child("model")
    if cpu is None or (cpu.get("mode") != "host-model" and model is None):
        return document
    return _put(document, New("feature", (("policy", "disable"), ("name", "topoext"))))


def _with_cache(document: Document, wanted: GuestCache) -> Document:
    cpu = document.root.child("cpu")
    if wanted is GuestCache.PASSTHROUGH and (
        cpu is None or cpu.get("mode") not in ("host-passthrough", "maximum")
    ):
        raise InputError(
            f"{document.source}: expected <cpu mode='host-passthrough'> for the host's caches, "
            f"found {'no <cpu>' if cpu is None else 'mode ' + repr(cpu.get('mode') or 'custom')}",
            hint="libvirt passes caches through with this mode alone",
        )
    values: dict[str, str | None] = {"level": None, "mode": str(wanted)}
    if wanted is GuestCache.EMULATED:
        values = {"level": "3", "mode": "emulate"}
    element = document.root.at("cpu", "cache")
    if element is not None:
        return apply(document, set_attributes(document, element, values))
    given = tuple((name, value) for name, value in values.items() if value is not None)
    return _put(document, New("cache", given))


def _with_address_bits(document: Document, bits: int) -> Document:
    """At least so many bits; the host's own (mode passthrough) are as many as there can be."""
    element = document.root.at("cpu", "maxphysaddr")
    if element is None:
        return _put(document, New("maxphysaddr", (("mode", "emulate"), ("bits", str(bits)))))
    given = element.get("bits")
    if element.get("mode") == "passthrough":
        return document
    if given is not None and decimal(document, element, given, "address bits") >= bits:
        return document
    return apply(document, set_attribute(document, element, "bits", str(bits)))
