"""OpenStack: the plan as a flavor's extra specs and an image's properties.

Nova chooses the host, its nodes and its PUs when a server is made: a flavor says how much, in which
shape, and under which policies. Names and values as Nova's validators of extra specs have them
(nova.api.validation.extra_specs).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.json_text import NotJsonError, decode_json
from homenode.machine.topology import Host
from homenode.units import GIB, KIB, MIB
from homenode.vm.gpu_parts import parts_at
from homenode.vm.layout import GuestCells, Pinning, Siblings
from homenode.vm.model import GuestHostdev, GuestTopology, Vm, VmCell
from homenode.vm.plan_model import Plan, PlanFinding, plan_finding
from homenode.vm.targets.codec import Codec, Row, Writing, number_of, text_of
from homenode.vm.targets.script import quoted
from homenode.vm.targets.target import (
    Feature,
    indirect,
    indirect_by,
    lost_by,
    native,
    one_node_each,
)
from homenode.vm.targets.text_edit import offset_of, with_members
from homenode.wording import printable

_LISTED = re.compile(r"(?<![^=,\s])([^=,\s]++)='([^']*+)'", re.ASCII)
_OWNED = re.compile(
    r"hw:(cpu_(policy|thread_policy|sockets|cores|threads)|emulator_threads_policy|numa_nodes|"
    r"numa_(cpus|mem)\.[0-9]{1,3})\Z",
    re.ASCII,
)
_PF, _VF, _PCI = "type-PF", "type-VF", "type-PCI"
"""Nova's types of PCI functions (nova.objects.fields.PciDeviceType)."""
_OWN_ALIAS = re.compile(r"pci-[0-9a-f]{4}-[0-9a-f]{4}(-vf)?")
_MASK = re.compile(r"[0-9^,-]{1,4000}\Z", re.ASCII)
_SIZE_UNITS = {"": KIB, "kb": KIB, "mb": MIB, "gb": GIB, "kib": KIB, "mib": MIB, "gib": GIB}


def is_flavor(content: bytes) -> bool:
    """Whether this is a flavor as JSON."""
    text = content[:1_000_000].lstrip()
    return text.startswith(b"{") and b'"vcpus"' in text and b'"ram"' in text


class Flavor(NamedTuple):
    """A flavor, with the properties of its image where there is one. specs: extra specs, as an
    object or as older clients print them: key='value', ..."""

    text: str
    document: Mapping[str, Any]
    fields: Mapping[str, Any]
    specs: Mapping[str, str]
    properties: Mapping[str, Any]
    source: str

    @property
    def specs_key(self) -> str:
        return next((k for k in ("extra_specs", "properties") if k in self.fields), "extra_specs")

    def number(self, key: str) -> int:
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
            raise ParseError(f"{self.source}: {key}", "a number above 0", repr(value))
        return value


def parse(content: bytes, source: str) -> Flavor:
    """Raises ParseError for what is no flavor as JSON."""
    text = text_of(content, source, "a flavor as JSON")
    try:
        document = decode_json(text)
    except NotJsonError as error:
        raise ParseError(source, "a flavor as JSON", str(error)) from None
    fields = document.get("flavor", document) if isinstance(document, dict) else document
    if not isinstance(fields, dict):
        raise ParseError(source, "a flavor as a JSON object", type(fields).__name__)
    image = document.get("image") or {}
    properties = image.get("properties", image) if isinstance(image, dict) else {}
    flavor = Flavor(text, document, fields, {}, properties, source)
    specs = fields.get(flavor.specs_key) or {}
    if isinstance(specs, str):
        specs = dict(_LISTED.findall(specs))
    if not isinstance(specs, dict):
        raise ParseError(f"{source}: extra specs", "an object", type(specs).__name__)
    return flavor._replace(specs={str(key): str(one) for key, one in specs.items()})


def _new(guest: Vm, plan: Plan) -> str:
    flavor = {"name": guest.name, "vcpus": 1, "ram": 1, "extra_specs": {}}
    image: dict[str, Any] = {"properties": {}}
    return json.dumps({"format": "homenode.openstack/1", "flavor": flavor, "image": image})


def _parted(wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The flavor's own entries; extra specs, with a colon; the image's properties, hw_*."""
    specs = {key: value for key, value in sorted(wanted.items()) if ":" in key}
    image = {key: value for key, value in sorted(wanted.items()) if key.startswith("hw_")}
    return {key: wanted[key] for key in ("vcpus", "ram")}, specs, image


def _edited(writing: Writing[Flavor], wanted: Mapping[str, Any]) -> str:
    own, specs, image = _parted(wanted)
    flavor = writing.file
    text, key, source = flavor.text, flavor.specs_key, flavor.source
    inside = ["flavor"] if "flavor" in flavor.document else []
    there, image_there = flavor.fields.get(key), flavor.document.get("image")
    if isinstance(there, str):
        merged = {**flavor.specs, **specs}
        own[key] = ", ".join(f"{k}='{v}'" for k, v in merged.items() if v is not None)
    elif not isinstance(there, dict):
        own[key] = {}
    text = with_members(text, offset_of(text, inside, source), own, source)
    if not isinstance(there, str):
        text = with_members(text, offset_of(text, [*inside, key], source), specs, source)
    if isinstance(image_there, dict):
        is_nested = isinstance(image_there.get("properties"), dict)
        path = ["image", "properties"] if is_nested else ["image"]
        text = with_members(text, offset_of(text, path, source), image, source)
    return json.dumps(json.loads(text), indent=2) + "\n" if writing.is_new else text


def _read_size(flavor: Flavor) -> Mapping[str, Any]:
    properties = flavor.properties
    encrypted = flavor.specs.get("hw:mem_encryption", "").lower() in ("true", "1", "yes")
    architecture = properties.get("hw_architecture", properties.get("architecture", "x86_64"))
    return {
        "name": str(flavor.fields.get("name") or "server"),
        "architecture": str(architecture),
        "firmware": "efi" if properties.get("hw_firmware_type") == "uefi" else None,
        "launch_security": "sev" if encrypted else None,
        "vcpus": flavor.number("vcpus"),
        "memory_bytes": flavor.number("ram") * MIB,
    }


def _write_size(writing: Writing[Flavor]) -> Mapping[str, Any]:
    is_virt = writing.guest.is_virt
    image = {"hw_machine_type": "virt" if is_virt else "q35"}
    if writing.guest.firmware == "efi" or is_virt:
        image["hw_firmware_type"] = "uefi"
    return {"vcpus": writing.plan.vm.vcpus, "ram": writing.memory_mib, **image}


def _write_pins(writing: Writing[Flavor]) -> Mapping[str, str | None]:
    """Policies. Shapes and cells that the flavor had go with the layout that had them."""
    plan, host = writing.plan, writing.host
    if not plan.vcpu_pins:
        return {}
    exposed = plan.layout.siblings is Siblings.EXPOSED
    smt = host is None or any(len(core.pus) > 1 for core in host.cores)
    specs: dict[str, str | None] = dict.fromkeys(filter(_OWNED.match, writing.file.specs), None)
    specs["hw:cpu_policy"] = "dedicated"
    used = CpuSet.union(plan.vcpu_pins)
    are_paired = host is None or all(len(c.pus) > 1 for c in host.cores if c.pus & used)
    specs["hw:cpu_thread_policy"] = "require" if exposed and are_paired else "prefer"
    if plan.layout.pinning is Pinning.ONE_PER_CORE and not smt:
        # Nova takes it for "a host without SMT", so that one with SMT would be passed over.
        specs["hw:cpu_thread_policy"] = "isolate"
    if _emulator_set(plan) is not None:
        specs["hw:emulator_threads_policy"] = "share"
    return specs


_SHAPE = ("hw:cpu_sockets", "hw:cpu_cores", "hw:cpu_threads")


def _read_topology(flavor: Flavor) -> Mapping[str, Any]:
    shape = [flavor.specs.get(key, "") for key in _SHAPE]
    if not all(one.isascii() and one.isdigit() for one in shape):
        return {}
    sockets, cores, threads = map(int, shape)
    return {"cpu_topology": GuestTopology(sockets, 1, cores, threads)}


def _write_topology(writing: Writing[Flavor]) -> Mapping[str, str]:
    shape = writing.plan.vm.cpu_topology
    if shape is None:
        return {}
    numbers = (shape.sockets, shape.dies * shape.cores, shape.threads)
    return dict(zip(_SHAPE, map(str, numbers), strict=True))


def _read_pages(flavor: Flavor) -> Mapping[str, Any]:
    text = flavor.specs.get("hw:mem_page_size", "")
    match = re.match(r"([0-9]{1,9})([kKMG]i?[bB])?\Z", text, re.ASCII)
    if match is None:
        return {"page_bytes": 0 if text == "large" else None}
    return {"page_bytes": int(match[1]) * _SIZE_UNITS[(match[2] or "").lower()]}


def _write_pages(writing: Writing[Flavor]) -> Mapping[str, str]:
    page = writing.plan.vm.page_bytes
    return {} if page is None else {"hw:mem_page_size": str(page // KIB) if page else "large"}


def _read_cells(flavor: Flavor) -> Mapping[str, Any]:
    specs, text = flavor.specs, flavor.specs.get("hw:numa_nodes", "0")
    count = int(text) if text.isdigit() and len(text) < 4 else 0
    cells = []
    for i in range(count):
        mask, size = specs.get(f"hw:numa_cpus.{i}"), specs.get(f"hw:numa_mem.{i}")
        if mask is not None and not _MASK.match(mask):
            raise ParseError(f"{flavor.source}: hw:numa_cpus.{i}", "vCPUs", mask)
        share = flavor.number("vcpus") // count
        whole = CpuSet(range(i * share, (i + 1) * share))
        even = flavor.number("ram") * MIB // count
        where = f"{flavor.source}: hw:numa_mem.{i}"
        cells.append(
            VmCell(
                id=i,
                vcpus=CpuSet.parse(mask, flavor.source) if mask else whole,
                memory_bytes=even if size is None else number_of(size, where) * MIB,
                page_bytes=_read_pages(flavor)["page_bytes"],
            )
        )
    return {"cells": tuple(cells)}


def _write_cells(writing: Writing[Flavor]) -> Mapping[str, str]:
    if not writing.is_mirrored:
        return {"hw:numa_nodes": "1"} if writing.plan.memory_mode is not None else {}
    cells = [cell for cell in writing.plan.cells if cell.vcpus]
    specs = {"hw:numa_nodes": str(len(cells))}
    for number, cell in enumerate(cells):
        specs[f"hw:numa_cpus.{number}"] = str(cell.vcpus)
        specs[f"hw:numa_mem.{number}"] = str(writing.mib_of(cell))
    return specs


def _write_devices(writing: Writing[Flavor]) -> Mapping[str, str]:
    plan, host = writing.plan, writing.host
    specs: dict[str, str] = {}
    if plan.vm.hostdevs:
        # Nova goes by numa_node of sysfs, and takes no device without one for a "required" node.
        reported = {} if host is None else {d.bdf: d.reported_node for d in host.pci_devices}
        homes = {reported.get(device.bdf, device.host_node) for device in plan.vm.hostdevs}
        local = homes <= set(plan.nodes)
        specs["hw:pci_numa_affinity_policy"] = "required" if local else "preferred"
    if not _keeps_aliases(writing):
        kinds = _kinds(plan, host)
        named = ",".join(f"{_alias(kind)}:{len(devices)}" for kind, devices in kinds.items())
        specs |= {"pci_passthrough:alias": named} if kinds else {}
    if any(device.uuid is not None for device in plan.vm.hostdevs):
        specs["resources:VGPU"] = "1"
    return specs


def _write_machine(writing: Writing[Flavor]) -> Mapping[str, str]:
    """Address space and IOMMU."""
    window = writing.plan.aperture
    bits = None if window is None else window.physical_address_bits
    wide = {"hw:maxphysaddr_mode": "emulate", "hw:maxphysaddr_bits": str(bits)} if bits else {}
    return wide | ({"hw:viommu_model": "intel"} if writing.plan.vm.has_iommu else {})


def _emulator_set(plan: Plan) -> CpuSet | None:
    """The plan's emulator PUs where no vCPU has them; Nova's sets of PUs may not overlap."""
    pus = plan.vm.emulator_pus
    return pus if pus is not None and pus.isdisjoint(plan.vm.pinned_pus) else None


Kind = tuple[str | None, str | None, str | None]
"""Vendor, product and Nova's type of a function; None where unknown."""


def _kinds(plan: Plan, host: Host | None) -> dict[Kind, list[GuestHostdev]]:
    """Functions by their kinds, for each of which Nova wants an alias.

    Source: nova.pci.request (get_alias_from_config), nova.pci.devspec, nova.pci.stats.
    """
    kinds: dict[Kind, list[GuestHostdev]] = {}
    for device in plan.vm.hostdevs:
        if device.uuid is None:
            kinds.setdefault(_kind(device.bdf, host), []).append(device)
    return dict(sorted(kinds.items(), key=str))


def _kind(bdf: Bdf, host: Host | None) -> Kind:
    """The kind of a function.

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


def _alias(kind: Kind) -> str:
    vendor, product, of = kind
    return "gpu" if vendor is None else f"pci-{vendor}-{product}" + ("-vf" if of == _VF else "")


def _given_aliases(flavor: Flavor) -> list[tuple[str, str, str]]:
    there = flavor.specs.get("pci_passthrough:alias", "")
    return [word.strip().rpartition(":") for word in there.split(",") if there]


def _keeps_aliases(writing: Writing[Flavor]) -> bool:
    """Whether those of the flavor are for as many functions, and none has homenode's name for
    another kind."""
    given = _given_aliases(writing.file)
    if writing.host is not None:
        own = set(map(_alias, _kinds(writing.plan, writing.host)))
        if any(_OWN_ALIAS.fullmatch(name) and name not in own for name, *_ in given):
            return False
    total = sum(int(one) for _, _, one in given if one.isdigit() and len(one) < 6)
    return bool(given) and total == sum(one.uuid is None for one in writing.plan.vm.hostdevs)


def _nova_conf(plan: Plan, host: Host) -> PlanFinding:
    """The PUs that Nova may use as the plan does, which are the host's to say."""
    shared = _emulator_set(plan) or CpuSet()
    whole = plan.layout.pinning is Pinning.ONE_PER_CORE
    in_use = plan.vm.pinned_pus
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
    return plan_finding(
        "target-nova-conf",
        "OpenStack: nova.conf of the host",
        "which PUs servers get is said there"
        + (": one of each core, so that no two vCPUs share one" if whole else ""),
        values={"settings": "; ".join(lines)},
    )


def _findings(writing: Writing[Flavor], _: object) -> Iterator[PlanFinding]:
    plan, host = writing.plan, writing.host
    if plan.vcpu_pins and host is not None:
        yield _nova_conf(plan, host)
    kinds = _kinds(plan, host)
    for (vendor, product, kind), devices in kinds.items():
        name = _alias((vendor, product, kind))
        if _keeps_aliases(writing):  # which of several the operator means is not said
            given = _given_aliases(writing.file)
            name = given[0][0] if len(given) == len(kinds) == 1 else ""
        alias = {"vendor_id": vendor, "product_id": product, "device_type": kind, "name": name}
        alias = {key: value for key, value in alias.items() if value}
        offered = [
            {"address": str(one.bdf)} | ({} if one.managed else {"managed": "no"})
            for one in devices
        ]
        text = (
            f"stands for {', '.join(one['address'] for one in offered)} and devices of their kind"
        )
        if kind == _PCI:
            text += f"; where sysfs has sriov_totalvfs of them, Nova needs device_type {_PF}"
        if not all(one.managed for one in devices):
            text += "; the host's driver must stay, or the vGPU is lost"
        yield plan_finding(
            "target-alias",
            f"OpenStack: alias {name or f'of {vendor}:{product}'}",
            text,
            values={"alias": json.dumps(alias), "device_spec": json.dumps(offered)},
        )
    for device in plan.vm.hostdevs:
        if device.uuid is not None:
            yield _vgpu(device, host)


def _vgpu(device: GuestHostdev, host: Host | None) -> PlanFinding:
    """What nova.conf says of vGPUs.

    Source: doc/source/admin/virtual-gpu.rst and pci-passthrough.rst of Nova.
    """
    parts = () if host is None else parts_at(host.device_at, device.bdf)
    profile = next((p.profile for p in parts if p.uuid == device.uuid), None)
    return plan_finding(
        "target-nova-conf",
        f"OpenStack: vGPU {device.uuid}",
        f"Nova takes a free one of the enabled types, and {printable(profile or '')}"
        f" of {device.bdf} only where no other is enabled",
        case="vGPU",
        values={"device": device.bdf},
    )


def _refuse(writing: Writing[Flavor]) -> None:
    plan = writing.plan
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
    if plan.is_mirrored and len(set(homes)) < len(homes):
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
    mediated = sum(device.uuid is not None for device in plan.vm.hostdevs)
    if mediated > 1:
        raise InputError(
            f"openstack: expected one mediated device, found {mediated}: hypervisors of Nova take "
            "one for each server",
            hint="choose one of a larger type",
        )
    if writing.guest.name.startswith("-"):
        raise InputError(
            f"openstack: expected a name that is no option, found {writing.guest.name!r}",
            hint="rename the VM; nothing was written",
        )


def _commands(writing: Writing[Flavor], wanted: Mapping[str, Any]) -> tuple[tuple[str, bytes], ...]:
    """A script that makes the same by the client."""
    own, specs, image = _parted(wanted)
    lines = [
        "#!/usr/bin/env bash",
        "# homenode: make the flavor, and set the properties of an image: SCRIPT IMAGE",
        "set -euo pipefail",
        f"flavor={quoted(writing.guest.name)}",
        'openstack flavor show "$flavor" >/dev/null 2>&1 ||',
        f'  openstack flavor create "$flavor" --vcpus {own["vcpus"]} --ram {own["ram"]} --disk 0',
    ]
    for key, value in specs.items():
        if value is None:
            lines.append(f'openstack flavor unset "$flavor" --property {quoted(key)}')
        else:
            lines.append(f'openstack flavor set "$flavor" --property {quoted(f"{key}={value}")}')
    for key, value in image.items():
        lines.append(
            f'openstack image set "${{1:?an image}}" --property {quoted(f"{key}={value}")}'
        )
    return ((".commands.sh", ("\n".join(lines) + "\n").encode()),)


ROWS = (
    Row(read=_read_size, write=_write_size),
    Row(says=indirect_by("openstack"), write=_write_pins),
    Row(
        says={
            Feature.TOPOLOGY: native("`hw:cpu_sockets`, `hw:cpu_cores`"),
            Feature.THREADS: native("`hw:cpu_threads`"),
        },
        read=_read_topology,
        write=_write_topology,
    ),
    Row(
        says={
            Feature.CELLS: native("`hw:numa_nodes`, `hw:numa_cpus.N`, `hw:numa_mem.N`"),
            Feature.UNEQUAL_CELLS: native("`hw:numa_cpus.N`, `hw:numa_mem.N`"),
        },
        read=_read_cells,
        write=_write_cells,
    ),
    Row(
        says={Feature.HUGE_PAGES: native("`hw:mem_page_size`")},
        read=_read_pages,
        write=_write_pages,
    ),
    Row(write=_write_devices),
    Row(
        says={
            Feature.WINDOW: indirect(
                "`hw:maxphysaddr_mode`; there is no property for the 64-bit PCI window",
                "large BARs need an OVMF of 2023 or newer, which sizes the window itself",
            ),
            Feature.IOMMU: native("`hw:viommu_model=intel`", (26, 0, 0)),
        },
        read=lambda flavor: {"has_iommu": "hw:viommu_model" in flavor.specs},
        write=_write_machine,
    ),
    Row(says=lost_by("openstack")),
)

CODEC = Codec(
    name="openstack",
    rows=ROWS,
    parse=parse,
    new=_new,
    edited=_edited,
    refuse=_refuse,
    most_vcpus=None,
    findings=_findings,
    companions=_commands,
)
TARGET = CODEC.target(
    title="OpenStack",
    source="Nova 34.0 (2026.1): nova.api.validation.extra_specs, nova.virt.hardware; release notes",
    recognises=is_flavor,
    users_own=r".* (name|description|id|links|rxtx_factor|[\w-]+:is_public):",
    architecture_of_host=True,
    needs_host=True,
)
