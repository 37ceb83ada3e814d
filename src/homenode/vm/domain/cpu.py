"""CPUs: <vcpu>, <vcpus>, <features>; <topology>, <cache>, topoext and <maxphysaddr> in <cpu>, whose
mode and model stay; and <vcpupin>, <emulatorpin> and <iothreadpin> in <cputune>, whose rest stays.

Of <features> only <acpi/> is edited. Linux on x86 reads nodes, distances and the nodes of expander
buses from ACPI alone (SRAT, SLIT, _PXM). libvirt takes a domain without <acpi/> and starts QEMU
with acpi=off. Seen with QEMU 7.2: every device's numa_node is -1, and of the cells the guest has
what SeaBIOS makes up: nodes without their distances, or one node. On aarch64 the device tree has
the nodes of vCPUs and memory, but no expander bus."""

from collections import Counter

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.text import plural
from homenode.vm.domain.document import Document, Element, format_set, number, parse_decimal, pu_set
from homenode.vm.domain.edits import (
    Attributes,
    Edit,
    NewElement,
    append,
    apply,
    edit_attributes,
    insert_after,
    insert_at,
    insert_before,
    is_bare,
    prune,
    remove,
    remove_all,
    set_attribute,
    set_attributes,
    set_text,
)
from homenode.vm.layout import Siblings
from homenode.vm.model import MAX_VCPUS, GuestCache, GuestTopology, PortModel
from homenode.vm.plan import Plan


def read_topology(document: Document) -> GuestTopology | None:
    """Return the numbers of <topology>, cores times clusters; None without the element."""
    topology = document.root.find("cpu/topology")
    if topology is None:
        return None
    counts = {}
    for name in ("sockets", "dies", "clusters", "cores", "threads"):
        text = topology.get(name)
        counts[name] = 1 if text is None else parse_decimal(topology, text, name)
        if not 1 <= counts[name] <= MAX_VCPUS:
            raise ParseError(
                document.source, f"{name} from 1 to {MAX_VCPUS}", str(text), line=topology.line
            )
    cores = counts["clusters"] * counts["cores"]
    return GuestTopology(counts["sockets"], counts["dies"], cores, counts["threads"])


def read_architecture(document: Document) -> str:
    """Return the architecture of the definition, else of its emulator or machine type."""
    architecture = document.root.value("os/type/@arch")
    if architecture:
        return architecture
    _, separator, suffix = (document.root.value("devices/emulator") or "").rpartition(
        "qemu-system-"
    )
    if separator and suffix.isidentifier():
        return suffix
    machine = document.root.value("os/type/@machine") or ""
    return "aarch64" if machine == "virt" or machine.startswith("virt-") else "x86_64"


def edit_cpu(document: Document, plan: Plan) -> Document:
    """Write the plan's topology, caches and address bits. Raises InputError if the mode forbids it.
    A new <cpu> gets no mode, which would change the CPU model."""
    document = _edit_topology(document, plan)
    if plan.vm.topoext is not None:
        document = _edit_topoext(document) if plan.vm.topoext else _disable_topoext(document)
    if plan.vm.cpu_cache is not None:
        document = _edit_cache(document, plan.vm.cpu_cache)
    if plan.aperture is not None and plan.aperture.physical_address_bits is not None:
        document = _raise_address_bits(document, plan.aperture.physical_address_bits)
    return document


def _edit_topology(document: Document, plan: Plan) -> Document:
    """Write the plan's topology; without one remove that of an earlier layout, if the vCPU count or
    hidden siblings contradict it."""
    present, planned_topology = read_topology(document), plan.vm.cpu_topology
    if planned_topology is not None:
        if present == tuple(planned_topology):
            return document
        values: Attributes = {
            "sockets": str(planned_topology.sockets),
            "dies": str(planned_topology.dies) if planned_topology.dies > 1 else None,
            "cores": str(planned_topology.cores),
            "threads": str(planned_topology.threads),
            "clusters": None,
        }
        return edit_attributes(document, "cpu/topology", values)
    element = document.root.find("cpu/topology")
    if element is None or present is None:
        return document
    sockets, dies, cores, threads = present
    shows_siblings = plan.layout.siblings is Siblings.HIDDEN and threads > 1
    if sockets * dies * cores * threads == plan.vm.vcpus and not shows_siblings:
        return document
    return prune(document, element)


def _find_topoext(document: Document) -> Element | None:
    features = document.root.all("cpu/feature")
    return next((feature for feature in features if feature.get("name") == "topoext"), None)


def read_topoext(document: Document) -> bool | None:
    """Return whether the definition requires topoext (True) or disables it (False); else None."""
    feature = _find_topoext(document)
    policy = None if feature is None else feature.get("policy") or "require"
    return {"require": True, "force": True, "disable": False, "forbid": False}.get(policy or "")


def _edit_topoext(document: Document) -> Document:
    cpu = document.root.child("cpu")
    if cpu is None or (cpu.get("mode") in (None, "custom") and cpu.child("model") is None):
        raise InputError(
            f"{document.source}: missing <cpu> with a mode or a model for topoext",
            hint="add <cpu mode='host-passthrough'/> to the domain",
        )
    if read_topoext(document):
        return document
    return _edit_policy(document, "require")


def _edit_policy(document: Document, policy: str) -> Document:
    feature = _find_topoext(document)
    if feature is not None:
        return apply(document, set_attribute(document, feature, "policy", policy))
    return insert_at(document, "cpu", NewElement("feature", {"policy": policy, "name": "topoext"}))


def _disable_topoext(document: Document) -> Document:
    """Disable topoext if the document requires it or its CPU model may bring it along. Source:
    no_autoenable_flags of FEAT_8000_0001_ECX in target/i386/cpu.c: never host-passthrough."""
    root = document.root
    brings = root.find("cpu/model") is not None or root.value("cpu/@mode") == "host-model"
    is_named = _find_topoext(document) is not None
    if read_topoext(document) is False or not (brings or is_named):
        return document
    return _edit_policy(document, "disable")


def _edit_cache(document: Document, mode: str) -> Document:
    cpu = document.root.child("cpu")
    if mode == GuestCache.PASSTHROUGH and (
        cpu is None or cpu.get("mode") not in ("host-passthrough", "maximum")
    ):
        raise InputError(
            f"{document.source}: expected <cpu mode='host-passthrough'> for the host's caches, "
            f"found {'no <cpu>' if cpu is None else 'mode ' + repr(cpu.get('mode') or 'custom')}",
            hint="libvirt passes caches through with this mode alone",
        )
    level = "3" if mode == GuestCache.EMULATED else None
    return edit_attributes(document, "cpu/cache", {"level": level, "mode": str(mode)})


def _raise_address_bits(document: Document, bits: int) -> Document:
    """Raise the address bits; the host's own (mode passthrough) are the maximum."""
    element = document.root.find("cpu/maxphysaddr")
    if element is None:
        return insert_at(
            document, "cpu", NewElement("maxphysaddr", {"mode": "emulate", "bits": str(bits)})
        )
    present_bits = element.get("bits")
    if element.get("mode") == "passthrough" or (
        present_bits is not None and parse_decimal(element, present_bits, "address bits") >= bits
    ):
        return document
    return apply(document, set_attribute(document, element, "bits", str(bits)))


def read_vcpus(document: Document) -> tuple[int, int]:
    """Return (maximum vCPUs, vCPUs online at boot). Raises ParseError, InputError."""
    element = document.root.child("vcpu")
    if element is None:
        raise InputError(
            f"{document.source}: missing <vcpu> with the number of vCPUs",
            hint="libvirt defaults to 1; set the number: <vcpu>8</vcpu>",
        )
    vcpus = parse_decimal(element, element.text, "the number of vCPUs")
    current = element.get("current")
    online = vcpus if current is None else parse_decimal(element, current, "current vCPUs")
    if not 1 <= vcpus <= MAX_VCPUS or not 1 <= online <= vcpus:
        raise InputError(
            f"{document.source}:{element.line}: expected 1 to {MAX_VCPUS} vCPUs and no more "
            f"current ones than these, found {vcpus}, current {online}"
        )
    return vcpus, online


def read_offline_vcpus(document: Document) -> CpuSet:
    """Return vCPUs that are offline at the start: by <vcpus>, else all from `current` on. Raises
    ParseError or InputError."""
    vcpus, online = read_vcpus(document)
    if document.root.child("vcpus") is None:
        return CpuSet(range(online, vcpus))
    states = document.root.all("vcpus/vcpu")
    state_of = {number(state, "id", "a vCPU"): state.get("enabled") for state in states}
    return CpuSet(i for i in range(vcpus) if state_of.get(i) == "no")


def edit_vcpus(document: Document, plan: Plan) -> Document:
    """Write the plan's vCPU count and remove the cpuset, which pins replace. `current` and <vcpus>
    belong to the old count: they are removed when it changes."""
    element = document.root.child("vcpu")
    assert element is not None, "read_vcpus rejects a domain without <vcpu>"
    vcpus, _ = read_vcpus(document)
    edits = []
    values: dict[str, str | None] = {"cpuset": None}
    if plan.vcpu_pins:
        values["placement"] = "static"
    if vcpus != plan.vm.vcpus:
        values["current"] = None
        edits += set_text(document, element, str(plan.vm.vcpus))
        for states in document.root.all("vcpus"):
            edits += remove(document, states)
    return apply(document, edits + set_attributes(document, element, values))


def needs_acpi(plan: Plan) -> bool:
    """Return whether the plan has features that an x86 guest reads only from ACPI."""
    return plan.is_mirrored or any(
        controller.model == PortModel.EXPANDER_BUS for controller in plan.vm.controllers
    )


def edit_acpi(document: Document, plan: Plan) -> Document:
    """Add <acpi/> if the plan needs it; not on aarch64, where libvirt accepts it only with UEFI."""
    if not needs_acpi(plan) or read_architecture(document) != "x86_64":
        return document
    return edit_attributes(document, "features/acpi", {})


Key = tuple[str, int]
"""An element of homenode: name, and the vCPU or IOThread that it pins (0 for the emulator)."""

_NUMBER_OF = {"vcpupin": "vcpu", "iothreadpin": "iothread"}
_LISTS_OF_VCPUS = ("vcpusched", "cachetune", "memorytune", "monitor")


def list_iothread_ids(document: Document) -> tuple[int, ...]:
    """Return the ids of the IOThreads, ascending; ids missing in <iothreadids> are filled from 1.
    Source: libvirt's formatdomain, IOThreads Allocation."""
    elements = document.root.all("iothreadids/iothread")
    ids = {number(e, "id", "an IOThread id") for e in elements}
    element = document.root.child("iothreads")
    count = (
        0 if element is None else parse_decimal(element, element.text, "the number of IOThreads")
    )
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
    """Write the plan's pins: emulator, vCPUs in order, IOThreads, as the study does.

    Equal pins in another order or spelling stay. Pins in homenode's order are changed in place,
    others are replaced as a block.
    """
    document = _limit_vcpus(document, plan.vm.vcpus)
    planned_pins = _list_planned_pins(document, plan)
    present = _list_present_pins(document)
    if {key: pus for key, _, pus in present} == planned_pins and len(present) == len(planned_pins):
        return document
    positions = {key: i for i, key in enumerate(planned_pins)}
    order = [positions[key] for key, _, _ in present if key in positions]
    if order == sorted(set(order)) and order:
        document = _change_in_place(document, planned_pins, present)
    else:
        document = _replace(document, planned_pins, present)
    cputune = document.root.child("cputune")
    if cputune is not None and not cputune.attributes and is_bare(document, cputune):
        return remove_all(document, [cputune])
    return document


def read_pins(document: Document) -> dict[Key, CpuSet]:
    """Return the pins of a definition by thread; of duplicates the last counts."""
    return {key: pus for key, _, pus in _list_present_pins(document)}


def read_vcpu_pins(document: Document) -> tuple[CpuSet | None, ...]:
    """Return the CPUs of each vCPU, without a pin those of <vcpu>; None if it floats."""
    pins, everywhere = read_pins(document), _read_vcpu_pus(document)
    return tuple(pins.get(("vcpupin", i), everywhere) for i in range(read_vcpus(document)[0]))


def read_emulator(document: Document) -> CpuSet | None:
    """Return the CPUs of QEMU's own threads; None = not pinned."""
    return read_pins(document).get(("emulatorpin", 0), _read_vcpu_pus(document))


def read_iothread_pins(document: Document) -> tuple[tuple[int, CpuSet], ...]:
    """Return (IOThread, CPUs) of pinned IOThreads, ascending."""
    pins = read_pins(document).items()
    return tuple(sorted((number, pus) for (name, number), pus in pins if name == "iothreadpin"))


def _read_vcpu_pus(document: Document) -> CpuSet | None:
    vcpu = document.root.child("vcpu")
    return None if vcpu is None else pu_set(vcpu, "cpuset")


def pin_counts(document: Document) -> dict[Key, int]:
    """Count the pins of each vCPU, each IOThread and the emulator."""
    return dict(Counter(key for key, _, _ in _list_present_pins(document)))


def _list_planned_pins(document: Document, plan: Plan) -> dict[Key, CpuSet]:
    planned_pins: dict[Key, CpuSet] = {}
    if plan.vm.emulator_pus is not None:
        planned_pins["emulatorpin", 0] = plan.vm.emulator_pus
    planned_pins |= {("vcpupin", vcpu): pus for vcpu, pus in enumerate(plan.vcpu_pins)}
    threads = list_iothread_ids(document)
    if plan.iothread_pus and len(plan.iothread_pus) != len(threads):
        raise InputError(
            f"{document.source}: expected {plural(len(plan.iothread_pus), 'IOThread')} "
            f"as in the plan, found {len(threads)}",
            hint="plan again for this definition",
        )
    pairs = zip(threads, plan.iothread_pus, strict=False)
    return planned_pins | {("iothreadpin", thread): pus for thread, pus in pairs if pus}


def _list_present_pins(document: Document) -> list[tuple[Key, Element, CpuSet]]:
    present = []
    for element in document.root.all("cputune/*"):
        if element.name not in ("emulatorpin", "vcpupin", "iothreadpin"):
            continue
        attribute = _NUMBER_OF.get(element.name)
        which = 0 if attribute is None else number(element, attribute)
        present.append(((element.name, which), element, pu_set(element, "cpuset") or CpuSet()))
    return present


def _make_pin(key: Key, pus: CpuSet) -> NewElement:
    name, which = key
    numbering = {_NUMBER_OF[name]: str(which)} if name in _NUMBER_OF else {}
    return NewElement(name, {**numbering, "cpuset": format_set(pus)})


def _change_in_place(
    document: Document, planned_pins: dict[Key, CpuSet], present: list[tuple[Key, Element, CpuSet]]
) -> Document:
    edits: list[Edit] = []
    element_of = {}
    for key, element, pus in present:
        if key not in planned_pins:
            edits += remove(document, element)
            continue
        element_of[key] = element
        if pus != planned_pins[key]:
            edits += set_attribute(document, element, "cpuset", format_set(planned_pins[key]))
    last: Element | None = None
    leading: list[NewElement] = []
    insertions: dict[int, tuple[Element, list[NewElement]]] = {}
    for key, pus in planned_pins.items():
        if key in element_of:
            last = element_of[key]
        elif last is None:
            leading.append(_make_pin(key, pus))
        else:
            insertions.setdefault(last.start, (last, []))[1].append(_make_pin(key, pus))
    first = next(element_of[key] for key in planned_pins if key in element_of)
    edits += insert_before(document, first, leading)
    for element, news in insertions.values():
        edits += insert_after(document, element, news)
    return apply(document, edits)


def _replace(
    document: Document, planned_pins: dict[Key, CpuSet], present: list[tuple[Key, Element, CpuSet]]
) -> Document:
    """Replace all pins; the new pins are at the place of the first old pin, else at the front."""
    starts = {element.start for _, element, _ in present}
    # Number of other elements before the first pin.
    children = document.root.all("cputune/*")
    ahead = next((i for i, e in enumerate(children) if e.start in starts), 0)
    document = remove_all(document, [element for _, element, _ in present])
    news = [_make_pin(key, pus) for key, pus in planned_pins.items()]
    cputune = document.root.child("cputune")
    if not news:
        return document
    if cputune is None:
        return insert_at(document, "", NewElement("cputune", children=tuple(news)))
    if ahead:
        return apply(document, insert_after(document, cputune.children[ahead - 1], news))
    if cputune.children:
        return apply(document, insert_before(document, cputune.children[0], news))
    return apply(document, append(document, cputune, news))


def _limit_vcpus(document: Document, vcpus: int) -> Document:
    """Remove vCPUs that no longer exist from schedulers, cache and bandwidth shares."""
    present = CpuSet(range(vcpus))
    edits: list[Edit] = []
    gone_until = -1
    for element in (
        descendant for part in document.root.all("cputune/*") for descendant in part.walk()
    ):
        if element.name not in _LISTS_OF_VCPUS or element.start < gone_until:
            continue
        named_pus = pu_set(element, "vcpus")
        if named_pus is None or named_pus <= present:
            continue
        if named_pus.isdisjoint(present):
            edits += remove(document, element)
            gone_until = element.end
        else:
            edits += set_attribute(document, element, "vcpus", format_set(named_pus & present))
    return apply(document, edits)
