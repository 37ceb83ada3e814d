"""OpenStack: the plan as a flavor's extra specs and an image's properties.

Nova chooses the host, its nodes and its PUs when a server is made: a flavor says how much, in which
shape, and under which policies. Names and values as Nova's validators of extra specs have them
(nova.api.validation.extra_specs).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.json_text import NotJsonError, decode_json
from homenode.plan.gpu_parts import parts_at
from homenode.plan.model import Plan, PlanFinding, plan_finding
from homenode.targets.json_edit import members, with_members
from homenode.targets.script import quoted
from homenode.targets.target import (
    Feature,
    Rendering,
    Target,
    default_machine,
    indirect,
    lost,
    native,
    one_node_each,
    pus_of,
    refuse_unsafe_name,
    whole_units,
)
from homenode.topology import Host
from homenode.units import GIB, KIB, MIB
from homenode.vm.layout import GuestCells, Pinning, Siblings
from homenode.vm.model import GuestHostdev, Vm, VmCell
from homenode.wording import printable

SUPPORT = {
    Feature.VCPU_PINS: indirect(
        "`hw:cpu_policy=dedicated`, `hw:cpu_thread_policy`: a PU for each vCPU, of Nova's choice",
        "which PUs, and near which device, is not said; a whole core for each vCPU of a host with "
        "SMT needs a `cpu_dedicated_set` of one PU of each core",
    ),
    Feature.EMULATOR_PINS: indirect(
        "`hw:emulator_threads_policy=share`: the `cpu_shared_set` of nova.conf",
        "emulators of all servers share it, and it may be far from devices",
    ),
    Feature.IOTHREAD_PINS: lost("Nova gives a server no IOThreads", "disks run on the emulator's"),
    Feature.TOPOLOGY: native("`hw:cpu_sockets`, `hw:cpu_cores`"),
    Feature.THREADS: native("`hw:cpu_threads`"),
    Feature.DIES: lost("Nova has no dies", "the guest takes a package's cores for one LLC"),
    Feature.CACHE: lost("Nova has no property for caches", "the guest believes QEMU's caches"),
    Feature.CELLS: native("`hw:numa_nodes`, `hw:numa_cpus.N`, `hw:numa_mem.N`"),
    Feature.UNEQUAL_CELLS: native("`hw:numa_cpus.N`, `hw:numa_mem.N`"),
    Feature.DISTANCES: lost("Nova writes no distances", "every other cell looks 20 away"),
    Feature.MEMORY_NODES: indirect(
        "each cell on one host node of Nova's choice", "the plan's nodes are one answer of several"
    ),
    Feature.MEMORY_MODE: lost("Nova binds strictly", "memory may not come from other nodes"),
    Feature.HUGE_PAGES: native("`hw:mem_page_size`"),
    Feature.DEVICES: indirect(
        "`pci_passthrough:alias` names a kind of device, set in nova.conf with `device_spec`",
        "which function the server gets is Nova's choice",
    ),
    Feature.DEVICE_CELLS: lost(
        "Nova writes no expander bus: `hw:pci_numa_affinity_policy` only chooses the host's nodes",
        "every device has numa_node -1 in the guest",
    ),
    Feature.DEVICE_TREE: lost("Nova writes no switches", "the guest sees devices on root ports"),
    Feature.INITIATORS: lost("Nova has no generic initiators", "the GPU's memory stays offline"),
    Feature.WINDOW: indirect(
        "`hw:maxphysaddr_mode`; there is no property for the 64-bit PCI window",
        "large BARs need an OVMF of 2023 or newer, which sizes the window itself",
    ),
    Feature.IOMMU: native("`hw:viommu_model=intel`"),
    Feature.VGPUS: indirect(
        "`resources:VGPU=1` for a mediated device, an alias for functions", "which is Nova's choice"
    ),
}

_LISTED = re.compile(r"(?<![^=,\s])([^=,\s]++)='([^']*+)'", re.ASCII)
_OWNED = re.compile(
    r"hw:(cpu_(policy|thread_policy|sockets|cores|threads)|emulator_threads_policy|numa_nodes|"
    r"numa_(cpus|mem)\.[0-9]{1,3})\Z",
    re.ASCII,
)
_PF, _VF, _PCI = "type-PF", "type-VF", "type-PCI"
"""Nova's types of PCI functions (nova.objects.fields.PciDeviceType)."""
_MASK = re.compile(r"[0-9^,-]{1,4000}\Z", re.ASCII)
_SIZE_UNITS = {"": KIB, "kb": KIB, "mb": MIB, "gb": GIB, "kib": KIB, "mib": MIB, "gib": GIB}


def is_flavor(content: bytes) -> bool:
    """Whether this is a flavor as JSON."""
    text = content[:1_000_000].lstrip()
    return text.startswith(b"{") and b'"vcpus"' in text and b'"ram"' in text


def _document(content: bytes, source: str) -> tuple[str, dict[str, Any]]:
    try:
        text = content.decode()
        document = decode_json(text)
    except (UnicodeDecodeError, NotJsonError) as error:
        raise ParseError(source, "a flavor as JSON", str(error)) from None
    if not isinstance(document, dict):
        raise ParseError(source, "a flavor as a JSON object", type(document).__name__)
    return text, document


def _flavor(document: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    flavor = document.get("flavor", document)
    if not isinstance(flavor, dict):
        raise ParseError(f"{source}: flavor", "an object", type(flavor).__name__)
    return flavor


def _specs_key(flavor: Mapping[str, Any]) -> str:
    return (
        "extra_specs"
        if "extra_specs" in flavor
        else ("properties" if "properties" in flavor else "extra_specs")
    )


def _specs(flavor: Mapping[str, Any], source: str) -> dict[str, str]:
    """Extra specs, as an object or as older clients print them: key='value', ..."""
    value = flavor.get(_specs_key(flavor)) or {}
    if isinstance(value, str):
        return dict(_LISTED.findall(value))
    if not isinstance(value, dict):
        raise ParseError(f"{source}: extra specs", "an object", type(value).__name__)
    return {str(key): str(one) for key, one in value.items()}


def _number(flavor: Mapping[str, Any], key: str, source: str) -> int:
    value = flavor.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
        raise ParseError(f"{source}: {key}", "a number above 0", repr(value))
    return value


def read_vm(content: bytes, source: str) -> Vm:
    """The VM of a flavor, with its image where there is one. Which PUs and which functions it gets,
    a flavor does not say."""
    _, document = _document(content, source)
    flavor = _flavor(document, source)
    specs = _specs(flavor, source)
    image = document.get("image") or {}
    properties = image.get("properties", image) if isinstance(image, dict) else {}
    architecture = str(properties.get("hw_architecture", properties.get("architecture", "x86_64")))
    encrypted = specs.get("hw:mem_encryption", "").lower() in ("true", "1", "yes")
    vcpus = _number(flavor, "vcpus", source)
    shape = [specs.get(f"hw:cpu_{name}") for name in ("sockets", "cores", "threads")]
    topology = None
    if all(one is not None and one.isascii() and one.isdigit() for one in shape):
        sockets, cores, threads = (int(one) for one in shape if one is not None)
        topology = (sockets, 1, cores, threads)
    memory = _number(flavor, "ram", source) * MIB
    page = _page_bytes(specs.get("hw:mem_page_size"))
    return Vm(
        name=str(flavor.get("name") or "server"),
        source=source,
        architecture=architecture,
        machine=default_machine(architecture),
        firmware="efi" if properties.get("hw_firmware_type") == "uefi" else None,
        launch_security="sev" if encrypted else None,
        cpu_mode="host-passthrough",
        vcpus=vcpus,
        memory_bytes=memory,
        page_bytes=page,
        cpu_topology=topology,
        vcpu_pins=(None,) * vcpus,
        cells=_cells(specs, vcpus, memory, page, source),
        has_iommu="hw:viommu_model" in specs,
    )


def _cells(
    specs: Mapping[str, str], vcpus: int, memory_bytes: int, page_bytes: int | None, source: str
) -> tuple[VmCell, ...]:
    text = specs.get("hw:numa_nodes", "0")
    count = int(text) if text.isdigit() and len(text) < 4 else 0
    cells = []
    for i in range(count):
        mask, size = specs.get(f"hw:numa_cpus.{i}"), specs.get(f"hw:numa_mem.{i}")
        if mask is not None and not _MASK.match(mask):
            raise ParseError(f"{source}: hw:numa_cpus.{i}", "vCPUs", mask)
        if size is not None and not (size.isdigit() and len(size) < 12):
            raise ParseError(f"{source}: hw:numa_mem.{i}", "MiB", size)
        share = vcpus // count
        cells.append(
            VmCell(
                id=i,
                vcpus=CpuSet.parse(mask, source)
                if mask
                else CpuSet(range(i * share, (i + 1) * share)),
                memory_bytes=memory_bytes // count if size is None else int(size) * MIB,
                page_bytes=page_bytes,
            )
        )
    return tuple(cells)


def _page_bytes(text: str | None) -> int | None:
    match = re.match(r"([0-9]{1,9})([kKMG]i?[bB])?\Z", text or "", re.ASCII)
    if match is None:
        return 0 if text == "large" else None
    return int(match[1]) * _SIZE_UNITS[(match[2] or "").lower()]


def render(plan: Plan, guest: Vm, host: Host | None, given: bytes | None, source: str) -> Rendering:
    """The flavor with the plan in it, and the commands that set it.

    Raises InputError for a plan that Nova would place elsewhere, or not at all.
    """
    name = refuse_unsafe_name(guest.name, source)
    _refuse(plan)
    memory = whole_units(plan.memory_bytes, MIB, "memory", "openstack")
    specs: dict[str, str | None] = {}
    text, document = _document(given, source) if given is not None else ("", {})
    before = _specs(_flavor(document, source), source) if given is not None else {}
    if plan.vcpu_pins:
        specs |= dict.fromkeys((key for key in before if _OWNED.match(key)), None)
    specs |= _wanted(plan, host)
    findings = [*_nova_conf(plan, host), *_aliases(plan, host, before, specs)]
    findings += _vgpu(plan, host, specs)
    properties = _image(plan, guest)
    if given is None:
        content = {
            "format": "homenode.openstack/1",
            "flavor": {
                "name": name,
                "vcpus": plan.vcpus,
                "ram": memory,
                "extra_specs": {k: v for k, v in sorted(specs.items()) if v is not None},
            },
            "image": {"properties": properties},
        }
        rendered = json.dumps(content, indent=2) + "\n"
    else:
        rendered = _edited(text, document, plan.vcpus, memory, specs, properties, source)
    script = _script(name, plan.vcpus, memory, specs, properties)
    return Rendering(rendered.encode(), ((".commands.sh", script.encode()),), tuple(findings))


def _refuse(plan: Plan) -> None:
    if plan.layout.pinning is Pinning.NODE:
        raise InputError(
            "openstack: expected vCPUs that float or have a PU each, found a layout in which they "
            "float over their nodes",
            hint="choose --layout pin or pin-numa",
        )
    nodes = one_node_each(plan, "openstack") if plan.memory_mode is not None else ()
    homes = (
        [node for cell, node in zip(plan.cells, nodes, strict=True) if cell.vcpus] if nodes else []
    )
    if plan.layout.cells is GuestCells.MIRRORED and len(set(homes)) < len(homes):
        raise InputError(
            "openstack: expected each guest cell on a host node of its own, as Nova places them, "
            "found two on one node",
            hint="choose fewer cells, or --max-nodes 1",
        )
    if plan.layout.cells is GuestCells.FLAT and plan.vcpu_pins and len(plan.nodes) > 1:
        raise InputError(
            f"openstack: expected one host node for pinned vCPUs of a flat guest, found "
            f"{len(plan.nodes)}: Nova gives dedicated vCPUs one cell, on one node",
            hint="choose --layout pin-numa, or --max-nodes 1",
        )


def _wanted(plan: Plan, host: Host | None) -> dict[str, str | None]:
    specs: dict[str, str | None] = {}
    if plan.vcpu_pins:
        exposed = plan.layout.siblings is Siblings.EXPOSED
        smt = host is None or any(len(core.pus) > 1 for core in host.cores)
        specs["hw:cpu_policy"] = "dedicated"
        specs["hw:cpu_thread_policy"] = "require" if exposed and smt else "prefer"
        if plan.layout.pinning is Pinning.ONE_PER_CORE and not smt:
            # Nova takes it for "a host without SMT", so that one with SMT would be passed over.
            specs["hw:cpu_thread_policy"] = "isolate"
        if _emulator_set(plan) is not None:
            specs["hw:emulator_threads_policy"] = "share"
    shape = plan.topology
    if shape is not None:
        specs["hw:cpu_sockets"] = str(shape.sockets)
        specs["hw:cpu_cores"] = str(shape.dies * shape.cores)
        specs["hw:cpu_threads"] = str(shape.threads)
    if plan.layout.cells is GuestCells.MIRRORED:
        cells = [cell for cell in plan.cells if cell.vcpus]
        specs["hw:numa_nodes"] = str(len(cells))
        for number, cell in enumerate(cells):
            size = whole_units(cell.memory_bytes, MIB, f"memory of cell {cell.id}", "openstack")
            specs[f"hw:numa_cpus.{number}"] = str(cell.vcpus)
            specs[f"hw:numa_mem.{number}"] = str(size)
    elif plan.memory_mode is not None:
        specs["hw:numa_nodes"] = "1"
    if plan.page_bytes is not None:
        size_text = str(plan.page_bytes // KIB) if plan.page_bytes else "large"
        specs["hw:mem_page_size"] = size_text
    if plan.devices:
        # Nova goes by numa_node of sysfs, and takes no device without one for a "required" node.
        reported = {} if host is None else {d.bdf: d.reported_node for d in host.pci_devices}
        homes = {reported.get(device.bdf, device.host_node) for device in plan.devices}
        local = homes <= set(plan.nodes)
        specs["hw:pci_numa_affinity_policy"] = "required" if local else "preferred"
    window = plan.aperture
    if window is not None and window.physical_address_bits is not None:
        specs["hw:maxphysaddr_mode"] = "emulate"
        specs["hw:maxphysaddr_bits"] = str(window.physical_address_bits)
    if plan.iommu_needed:
        specs["hw:viommu_model"] = "intel"
    return specs


def _emulator_set(plan: Plan) -> CpuSet | None:
    """The plan's emulator PUs where no vCPU has them; Nova's sets of PUs may not overlap."""
    pus = plan.emulator_pus
    return pus if pus is not None and pus.isdisjoint(pus_of(plan.vcpu_pins)) else None


def _nova_conf(plan: Plan, host: Host | None) -> list[PlanFinding]:
    """The PUs that Nova may use as the plan does, which are the host's to say."""
    if not plan.vcpu_pins or host is None:
        return []
    shared = _emulator_set(plan) or CpuSet()
    whole = plan.layout.pinning is Pinning.ONE_PER_CORE
    in_use = pus_of(plan.vcpu_pins)
    # Of a core that the emulator shares with a vCPU, the vCPU's PU alone: the plan needs it.
    free = [
        core.pus if core.pus.isdisjoint(shared) else core.pus & in_use
        for core in host.cores
        if core.pus.isdisjoint(shared) or core.pus & in_use
    ]
    dedicated = CpuSet(
        pu for pus in free for pu in (sorted(pus & in_use or pus)[:1] if whole else pus)
    )
    lines = [f"cpu_dedicated_set = {dedicated}"]
    lines += [f"cpu_shared_set = {shared}"] if shared else []
    return [
        plan_finding(
            "target-nova-conf",
            "OpenStack: nova.conf of the host",
            "which PUs servers get is said there"
            + (": one of each core, so that no two vCPUs share one" if whole else ""),
            values={"settings": "; ".join(lines)},
        )
    ]


def _aliases(
    plan: Plan, host: Host | None, before: Mapping[str, str], specs: dict[str, str | None]
) -> list[PlanFinding]:
    """An alias for each kind of device; those of the flavor stay where their number is right.

    Source: nova.pci.request (get_alias_from_config), nova.pci.devspec, nova.pci.stats.
    """
    kinds: dict[tuple[str | None, str | None, str | None], list[GuestHostdev]] = {}
    functions = [device for device in plan.devices if device.uuid is None]
    for device in functions:
        kinds.setdefault(_kind(device.bdf, host), []).append(device)
    if not kinds:
        return []
    there = before.get("pci_passthrough:alias", "")
    given = [word.strip().rpartition(":") for word in there.split(",")]
    total = sum(int(one) for _, _, one in given if one.isdigit() and len(one) < 6)
    is_kept = bool(there) and total == len(functions)
    words, findings = [], []
    for (vendor, product, kind), devices in sorted(kinds.items(), key=str):
        known = vendor is not None and product is not None
        name = f"pci-{vendor}-{product}" + ("-vf" if kind == _VF else "") if known else "gpu"
        words.append(f"{name}:{len(devices)}")
        if is_kept:  # which of several the operator means for this kind is not said
            name = given[0][0] if len(given) == len(kinds) == 1 else ""
        alias = {"vendor_id": vendor, "product_id": product, "device_type": kind, "name": name}
        alias = {key: value for key, value in alias.items() if value}
        offered = [
            {"address": str(one.bdf)} | ({} if one.managed else {"managed": "no"})
            for one in devices
        ]
        text = f"stands for {', '.join(str(one.bdf) for one in devices)} and devices of their kind"
        if kind == _PCI:
            text += f"; where sysfs has sriov_totalvfs of them, Nova needs device_type {_PF}"
        if not all(one.managed for one in devices):
            text += "; the host's driver must stay, or the vGPU is lost"
        findings.append(
            plan_finding(
                "target-alias",
                f"OpenStack: alias {name or f'of {vendor}:{product}'}",
                text,
                values={"alias": json.dumps(alias), "device_spec": json.dumps(offered)},
            )
        )
    if not is_kept:
        specs["pci_passthrough:alias"] = ",".join(words)
    return findings


def _kind(bdf: Bdf, host: Host | None) -> tuple[str | None, str | None, str | None]:
    """Vendor, product and Nova's type of a function; None where unknown.

    Nova takes the type from libvirt, which calls every function with an SR-IOV capability a PF,
    also one without VFs; and it keeps PFs from aliases that do not name the type.
    """
    known = None if host is None else host.device(bdf)
    if known is None or known.vendor_id is None or known.device_id is None:
        return (None, None, None)
    kind = _PCI
    if known.physical_function is not None:
        kind = _VF
    elif known.sriov_total_vfs:
        kind = _PF
    return (f"{known.vendor_id:04x}", f"{known.device_id:04x}", kind)


def _vgpu(plan: Plan, host: Host | None, specs: dict[str, str | None]) -> list[PlanFinding]:
    """The resource of a mediated device, and what nova.conf says of vGPUs.

    Source: doc/source/admin/virtual-gpu.rst and pci-passthrough.rst of Nova.
    """
    findings = []
    mediated = [device for device in plan.devices if device.uuid is not None]
    if len(mediated) > 1:
        raise InputError(
            f"openstack: expected one mediated device, found {len(mediated)}: hypervisors of Nova "
            "take one for each server",
            hint="choose one of a larger type",
        )
    for device in mediated:
        parts = () if host is None else parts_at(host.device_at, device.bdf)
        profile = next((p.profile for p in parts if p.uuid == device.uuid), None)
        specs["resources:VGPU"] = "1"
        findings.append(
            plan_finding(
                "target-nova-conf",
                f"OpenStack: vGPU {device.uuid}",
                f"Nova takes a free one of the enabled types, and {printable(profile or '')}"
                f" of {device.bdf} only where no other is enabled",
                case="vGPU",
                values={"device": device.bdf},
            )
        )
    return findings


def _image(plan: Plan, guest: Vm) -> dict[str, str]:
    properties = {"hw_machine_type": "virt" if guest.is_virt else "q35"}
    if guest.firmware == "efi" or guest.is_virt:
        properties["hw_firmware_type"] = "uefi"
    return properties


def _edited(
    text: str,
    document: Mapping[str, Any],
    vcpus: int,
    memory: int,
    specs: dict[str, str | None],
    properties: dict[str, str],
    source: str,
) -> str:
    def flavor_at() -> int:
        if "flavor" not in document:
            return 0
        return members(text, 0, source)[0]["flavor"].start

    flavor = _flavor(document, source)
    text = with_members(text, flavor_at(), {"vcpus": vcpus, "ram": memory}, source)
    key = _specs_key(flavor)
    if isinstance(flavor.get(key), str):
        merged = {**_specs(flavor, source), **specs}
        listed = ", ".join(f"{k}='{v}'" for k, v in merged.items() if v is not None)
        return with_members(text, flavor_at(), {key: listed}, source)
    if not isinstance(flavor.get(key), dict):
        text = with_members(text, flavor_at(), {key: {}}, source)
    at = members(text, flavor_at(), source)[0][key].start
    text = with_members(text, at, dict(specs), source)
    image = document.get("image")
    if isinstance(image, dict):
        at = members(text, 0, source)[0]["image"].start
        if isinstance(image.get("properties"), dict):
            at = members(text, at, source)[0]["properties"].start
        text = with_members(text, at, dict(properties), source)
    return text


def _script(
    name: str,
    vcpus: int,
    memory: int,
    specs: Mapping[str, str | None],
    properties: Mapping[str, str],
) -> str:
    if name.startswith("-"):
        raise InputError(
            f"openstack: expected a name that is no option, found {name!r}",
            hint="rename the VM; nothing was written",
        )
    lines = [
        "#!/usr/bin/env bash",
        "# homenode: make the flavor, and set the properties of an image: SCRIPT IMAGE",
        "set -euo pipefail",
        f"flavor={quoted(name)}",
        'openstack flavor show "$flavor" >/dev/null 2>&1 ||',
        f'  openstack flavor create "$flavor" --vcpus {vcpus} --ram {memory} --disk 0',
    ]
    for key, value in sorted(specs.items()):
        if value is None:
            lines.append(f'openstack flavor unset "$flavor" --property {quoted(key)}')
        else:
            lines.append(f'openstack flavor set "$flavor" --property {quoted(f"{key}={value}")}')
    for key, value in sorted(properties.items()):
        lines.append(
            f'openstack image set "${{1:?an image}}" --property {quoted(f"{key}={value}")}'
        )
    return "\n".join(lines) + "\n"


TARGET = Target(
    title="OpenStack",
    source="Nova 34.0 (2026.1): nova.api.validation.extra_specs, nova.virt.hardware",
    support=SUPPORT,
    unread=frozenset(
        ("pins", "emulator", "iothreads", "binding", "cell-binding", "device", "device-cell")
    ),
    render=render,
    read_vm=read_vm,
    recognises=is_flavor,
    architecture_of_host=True,
    needs_host=True,
)
