"""CPUs: <vcpu>, <vcpus>, <features>, and <topology>, <cache>, topoext and <maxphysaddr> in <cpu>;
its mode and model stay.

Of <features> there is <acpi/>. Linux on x86 reads nodes, distances and the nodes of expander buses
from ACPI alone (SRAT, SLIT, _PXM). libvirt takes a domain without <acpi/> and starts QEMU with
acpi=off. Seen with QEMU 7.2: every device's numa_node is -1, and of the cells the guest has what
SeaBIOS makes up: nodes without their distances, or one node. On aarch64 the device tree has the
nodes of vCPUs and memory, but no expander bus.
"""

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.edits import (
    Attributes,
    New,
    apply,
    put,
    remove,
    set_attribute,
    set_attributes,
    set_text,
    with_attributes,
    without,
)
from homenode.vm.domain.fields import decimal, number
from homenode.vm.layout import Siblings
from homenode.vm.model import MAX_VCPUS, GuestCache, PortModel
from homenode.vm.plan_model import Plan


def read_topology(document: Document) -> tuple[int, int, int, int] | None:
    """(sockets, dies, cores, threads) of <topology>; clusters are counted into the cores. None
    where there is none."""
    topology = document.root.at("cpu/topology")
    if topology is None:
        return None
    counts = {}
    for name in ("sockets", "dies", "clusters", "cores", "threads"):
        text = topology.get(name)
        counts[name] = 1 if text is None else decimal(topology, text, name)
        if not 1 <= counts[name] <= MAX_VCPUS:
            raise ParseError(
                document.source, f"{name} from 1 to {MAX_VCPUS}", str(text), line=topology.line
            )
    cores = counts["clusters"] * counts["cores"]
    return counts["sockets"], counts["dies"], cores, counts["threads"]


def read_architecture(document: Document) -> str:
    """As the document names it, else that of its emulator or its machine type."""
    named = document.root.value("os/type/@arch")
    if named:
        return named
    _, found, suffix = (document.root.value("devices/emulator") or "").rpartition("qemu-system-")
    if found and suffix.isidentifier():
        return suffix
    machine = document.root.value("os/type/@machine") or ""
    return "aarch64" if machine == "virt" or machine.startswith("virt-") else "x86_64"


def edit_cpu(document: Document, plan: Plan) -> Document:
    """What the plan shows the guest of its CPUs. Raises InputError where the mode forbids it.

    A <cpu> that has to be made has no mode: it changes no CPU model.
    """
    document = _with_topology(document, plan)
    if plan.vm.topoext is not None:
        document = _with_topoext(document) if plan.vm.topoext else _without_topoext(document)
    if plan.cache is not None:
        document = _with_cache(document, plan.cache)
    if plan.aperture is not None and plan.aperture.physical_address_bits is not None:
        document = _with_address_bits(document, plan.aperture.physical_address_bits)
    return document


def _with_topology(document: Document, plan: Plan) -> Document:
    """The plan's topology; without one that of an earlier layout goes, which another vCPU count or
    hidden siblings contradict."""
    there, wanted = read_topology(document), plan.topology
    if wanted is not None:
        if there == tuple(wanted):
            return document
        values: Attributes = {
            "sockets": str(wanted.sockets),
            "dies": str(wanted.dies) if wanted.dies > 1 else None,
            "cores": str(wanted.cores),
            "threads": str(wanted.threads),
            "clusters": None,
        }
        return with_attributes(document, "cpu/topology", values)
    element = document.root.at("cpu/topology")
    if element is None or there is None:
        return document
    sockets, dies, cores, threads = there
    shows_siblings = plan.layout.siblings is Siblings.HIDDEN and threads > 1
    if sockets * dies * cores * threads == plan.vcpus and not shows_siblings:
        return document
    return without(document, element)


def _topoext(document: Document) -> Element | None:
    features = document.root.all("cpu/feature")
    return next((one for one in features if one.get("name") == "topoext"), None)


def read_topoext(document: Document) -> bool | None:
    """Whether the document asks for the feature topoext or switches it off; None = neither."""
    feature = _topoext(document)
    policy = None if feature is None else feature.get("policy") or "require"
    return {"require": True, "force": True, "disable": False, "forbid": False}.get(policy or "")


def _with_topoext(document: Document) -> Document:
    cpu = document.root.child("cpu")
    if cpu is None or (cpu.get("mode") in (None, "custom") and cpu.child("model") is None):
        raise InputError(
            f"{document.source}: expected a <cpu> with a mode or a model for the feature topoext, "
            "found none: libvirt takes no features without one",
            hint="add <cpu mode='host-passthrough'/> to the domain",
        )
    if read_topoext(document):
        return document
    return _with_policy(document, "require")


def _with_policy(document: Document, policy: str) -> Document:
    feature = _topoext(document)
    if feature is not None:
        return apply(document, set_attribute(document, feature, "policy", policy))
    return put(document, "cpu", New("feature", {"policy": policy, "name": "topoext"}))


def _without_topoext(document: Document) -> Document:
    """Switched off where the document asks for it or its CPU model may bring it along; QEMU adds it
    to no host-passthrough or maximum model. Source: no_autoenable_flags of FEAT_8000_0001_ECX in
    target/i386/cpu.c."""
    root = document.root
    brings = root.at("cpu/model") is not None or root.value("cpu/@mode") == "host-model"
    is_named = _topoext(document) is not None
    if read_topoext(document) is False or not (brings or is_named):
        return document
    return _with_policy(document, "disable")


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
    level = "3" if wanted is GuestCache.EMULATED else None
    return with_attributes(document, "cpu/cache", {"level": level, "mode": str(wanted)})


def _with_address_bits(document: Document, bits: int) -> Document:
    """At least so many bits; the host's own (mode passthrough) are as many as there can be."""
    element = document.root.at("cpu/maxphysaddr")
    if element is None:
        return put(document, "cpu", New("maxphysaddr", {"mode": "emulate", "bits": str(bits)}))
    given = element.get("bits")
    if element.get("mode") == "passthrough" or (
        given is not None and decimal(element, given, "address bits") >= bits
    ):
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
    vcpus = decimal(element, element.text, "the number of vCPUs")
    current = element.get("current")
    online = vcpus if current is None else decimal(element, current, "current vCPUs")
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
    if document.root.child("vcpus") is None:
        return CpuSet(range(online, vcpus))
    states = document.root.all("vcpus/vcpu")
    stated = {number(state, "id", "a vCPU"): state.get("enabled") for state in states}
    return CpuSet(i for i in range(vcpus) if stated.get(i) == "no")


def edit_vcpus(document: Document, plan: Plan) -> Document:
    """The count of the plan, and no PU set next to the pins.

    cpuset goes under every layout: pins replace it, and a layout without pins has none. `current`
    and <vcpus>, the state of single vCPUs, speak of the old count: they go when it changes.
    """
    element = document.root.child("vcpu")
    assert element is not None, "read_guest refuses a domain without <vcpu>"
    vcpus, _ = read_vcpus(document)
    edits = []
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
    return document.root.at("features/acpi") is not None


def needs_acpi(plan: Plan) -> bool:
    """Whether the plan shows the guest something that an x86 guest learns by ACPI alone."""
    return plan.is_mirrored or any(
        controller.model == PortModel.EXPANDER_BUS for controller in plan.vm.controllers
    )


def edit_acpi(document: Document, plan: Plan) -> Document:
    """<acpi/> where the plan needs it. Not on aarch64, where libvirt takes it with UEFI alone."""
    if not needs_acpi(plan) or read_architecture(document) != "x86_64":
        return document
    return with_attributes(document, "features/acpi", {})
