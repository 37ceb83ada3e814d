"""CPUs: <vcpu>, <vcpus>, <features>, and <topology>, <cache>, topoext and <maxphysaddr> in <cpu>;
its mode and model stay.

Of <features> there is <acpi/>. Linux on x86 reads nodes, distances and the nodes of expander buses
from ACPI alone (SRAT, SLIT, _PXM). libvirt takes a domain without <acpi/> and starts QEMU with
acpi=off. Seen with QEMU 7.2: every device's numa_node is -1, and of the cells the guest has what
SeaBIOS makes up: nodes without their distances, or one node. On aarch64 the device tree has the
nodes of vCPUs and memory, but no expander bus.
"""

from collections.abc import Mapping

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.vm.domain.document import CPU_ORDER, DOMAIN_ORDER, FEATURES_ORDER, Document, Element
from homenode.vm.domain.edits import (
    Edit,
    New,
    apply,
    close_up,
    insert_in_order,
    remove,
    set_attribute,
    set_attributes,
    set_text,
)
from homenode.vm.domain.fields import decimal, needed
from homenode.vm.layout import Siblings
from homenode.vm.model import MAX_VCPUS, GuestCache, GuestTopology, PortModel
from homenode.vm.plan_model import Plan


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
    if plan.vm.topoext:
        document = _with_topoext(document)
    elif plan.vm.topoext is False:
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


def read_vcpus(document: Document) -> tuple[int, int]:
    """(maximum, online at boot). Raises ParseError, InputError."""
    element = document.root.child("vcpu")
    if element is None:
        raise InputError(
            f"{document.source}: expected <vcpu> with the number of vCPUs, found none",
            hint="libvirt would take 1; say how many the VM has: <vcpu>8</vcpu>",
        )
    vcpus = decimal(document, element, element.text, "the number of vCPUs")
    current = element.get("current")
    online = vcpus if current is None else decimal(document, element, current, "current vCPUs")
    if not 1 <= vcpus <= MAX_VCPUS or not 1 <= online <= vcpus:
        raise InputError(
            f"{document.source}:{element.line}: expected 1 to {MAX_VCPUS} vCPUs and no more "
            f"current ones than these, found {vcpus}, current {online}"
        )
    return vcpus, online


def read_offline_vcpus(document: Document) -> CpuSet:
    """Those not there at the start: as <vcpus> gives them one by one, else all from the `current`
    one on. Raises ParseError, InputError."""
    vcpus, online = read_vcpus(document)
    states = document.root.child("vcpus")
    if states is None:
        return CpuSet(range(online, vcpus))
    stated = {
        decimal(document, state, needed(document, state, "id"), "a vCPU"): state.get("enabled")
        for state in states.all("vcpu")
    }
    return CpuSet(i for i in range(vcpus) if stated.get(i) == "no")


def edit_vcpus(document: Document, plan: Plan) -> Document:
    """The count of the plan, and no PU set next to the pins.

    cpuset goes under every layout: pins replace it, and a layout without pins has none. `current`
    and <vcpus>, the state of single vCPUs, speak of the old count: they go when it changes.
    """
    element = document.root.child("vcpu")
    assert element is not None, "read_guest refuses a domain without <vcpu>"
    vcpus, _ = read_vcpus(document)
    edits: list[Edit] = []
    values: dict[str, str | None] = {"cpuset": None}
    if plan.vcpu_pins:
        values["placement"] = "static"
    if vcpus != plan.vcpus:
        values["current"] = None
        edits += set_text(document, element, str(plan.vcpus))
        for states in document.root.all("vcpus"):
            edits += remove(document, states)
    return apply(document, edits + set_attributes(document, element, values))


def has_acpi(document: Document) -> bool:
    """Whether the guest gets ACPI tables."""
    return document.root.at("features", "acpi") is not None


def needs_acpi(plan: Plan) -> bool:
    """Whether the plan shows the guest something that an x86 guest learns by ACPI alone."""
    return plan.is_mirrored or any(
        controller.model == PortModel.EXPANDER_BUS for controller in plan.vm.controllers
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
