"""Proxmox: the plan as lines of a qm configuration, raw QEMU arguments and a hook script.

qemu-server's published pairs of configuration and command (src/test/cfg2cmd) show what Proxmox
makes of a line. `args:` goes behind its own options, so a -smp there overrides the first. The root
bus of its q35 holds four root ports, two USB controllers and a bridge (pve-q35-4.0.cfg); ids of
homenode's buses begin with "hn".
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError
from homenode.findings import Finding, finding
from homenode.machine.pci import normalize_uuid
from homenode.units import GIB, MIB
from homenode.vm.plan import Plan
from homenode.vm.targets.codec import Codec, FormatRow, TargetEdit, check_changed_keys
from homenode.vm.targets.qemu_command import (
    CACHE_WORDS,
    POLICY_OF_MODE,
    QemuPciTree,
    format_size,
    format_smp,
    format_vfio,
    has_backend,
    list_device_words,
    list_distance_words,
    list_shared_slots,
    list_uuid_words,
    parse_options,
    split_fields,
)
from homenode.vm.targets.qm_conf import (
    HOSTPCI,
    NUMA,
    OWN_SLOTS,
    QmConf,
    add_whole_cards,
    build_command,
    edit_conf,
    is_conf,
    is_short_conf,
    list_functions,
    parse,
    parse_function,
    render_hook_script,
    replace_default,
    split_pairs,
    start_timeout_s,
    strip_function,
)
from homenode.vm.targets.target import (
    Feature,
    indirect_support,
    is_vgpu,
    list_indirect,
    lost_feature,
    make_native,
    reject_arm,
    split_words,
)

_HOOK_SUFFIX = ".hook.sh"
_MAX_CELLS = 8
_MAX_DEVICES = 16
_ID = "hn"
"""Prefix of the ids that homenode writes in `args`."""

_OUR_ID = re.compile(_ID + r"(\.|dev|gi)[0-9]", re.ASCII)

_HOOK_KEY = "hookscript"
_OUR_HOOK = "local:snippets/homenode-"

_CHASSIS_BASE = 64
"""Proxmox numbers the chassis of its own root ports 1 to 16."""

_GLOBALS = (
    "q35-pcihost.pci-hole64-size",
    "x86_64-cpu.l3-cache",
    "x86_64-cpu.host-cache-info",
    "x86_64-cpu.topoext",
)


def _reject_unsupported(edit: TargetEdit[QmConf]) -> None:
    plan, conf, source = edit.plan, edit.file, edit.source
    reject_arm(edit.guest, "proxmox", "its q35 machine")
    machine = conf.values.get("machine", "q35" if not conf.values else "pc")
    if plan.vm.controllers and "q35" not in machine:
        raise InputError(
            f"{source}: expected machine q35 for expander buses, found {machine}",
            hint="set machine: q35, or choose a layout without -pci",
        )
    if conf.values.get("arch", "x86_64") != "x86_64":
        raise InputError(f"{source}: expected arch x86_64, found {conf.values['arch']}")
    if len(plan.cells) > _MAX_CELLS:
        raise InputError(
            f"proxmox: expected at most {_MAX_CELLS} guest cells, found {len(plan.cells)}",
            hint="choose fewer nodes with --max-nodes, or a flat layout",
        )
    if any("memory" in word for word in conf.values.get("hotplug", "").split(",")):
        raise InputError(
            f"{source}: expected no memory hotplug: Proxmox rejects it next to numaN lines",
            hint="remove memory from hotplug:",
        )
    if plan.vm.page_bytes not in (None, 0, 2 * MIB, GIB):
        raise InputError(
            f"proxmox: expected huge pages of 2 MiB or 1 GiB, found {plan.vm.page_bytes} bytes"
        )
    bound = [CpuSet(cell.host_nodes) for cell in plan.cells] if plan.is_mirrored else []
    bound = [] if plan.memory_mode is None else bound or [CpuSet(plan.memory_nodes)]
    for nodes in bound:
        if "," in str(nodes):
            raise InputError(
                f"proxmox: expected the memory of a cell on a range of host nodes, found {nodes}",
                hint="choose a layout with a cell per node, or --max-nodes 1",
            )
    if plan.vm.page_bytes is not None and any(len(nodes) > 1 for nodes in bound):
        raise InputError(
            "proxmox: expected one host node for huge pages of a cell, found several",
            hint="choose a layout with a cell per node, or plan without --page-size",
        )
    if any(cell.memory_bytes and not cell.vcpus for cell in plan.cells):
        raise InputError("proxmox: a guest NUMA node with memory has no vCPUs")


def _read_head(conf: QmConf) -> Mapping[str, Any]:
    values = conf.values
    cpu = dict(split_pairs(values.get("cpu", "")))
    model = cpu.get("", cpu.get("cputype", "kvm64"))
    return {
        "name": values.get("name") or f"VM {conf.vmid or ''}".strip(),
        "uuid": normalize_uuid(dict(split_pairs(values.get("smbios1", ""))).get("uuid", "")),
        "domain_type": "qemu" if values.get("kvm") == "0" else "kvm",
        "architecture": values.get("arch", "x86_64"),
        "machine": "q35" if "q35" in conf.machine else conf.machine,
        "firmware": "efi" if values.get("bios") == "ovmf" else None,
        "launch_security": "sev" if values.get("amd-sev") else None,
        "cpu_mode": {"host": "host-passthrough", "max": "maximum"}.get(model, "custom"),
        "addresses": OWN_SLOTS if "q35" in conf.machine else (),
    }


def _write_head(edit: TargetEdit[QmConf]) -> Mapping[str, str]:
    if not edit.is_new:
        return {}
    is_kvm = edit.guest.domain_type == "kvm"
    head = {
        "name": _format_name(edit),
        "machine": "q35",
        "cpu": "host" if is_kvm else "max",
        "scsihw": "virtio-scsi-single",
    }
    return head if is_kvm else {**head, "kvm": "0"}


def _read_fields(*fields: str) -> Callable[[QmConf], Mapping[str, Any]]:
    """Return a reader of fields from the QEMU command that Proxmox makes of the configuration."""
    return lambda conf: {field: conf.vm_fields[field] for field in fields}


def _write_size(edit: TargetEdit[QmConf]) -> Mapping[str, str | None]:
    plan, values = edit.plan, edit.file.values
    shape, (sockets, _) = plan.vm.cpu_topology, edit.file.shape
    if shape is not None:
        sockets = shape.sockets
    elif plan.vm.vcpus % sockets:
        sockets = 1
    lines = {"sockets": str(sockets)}
    if not edit.is_new and sockets == 1 and "sockets" not in values:
        lines = {}
    memory = replace_default(values.get("memory"), "current", str(edit.memory_mib))
    lines |= {"cores": str(plan.vm.vcpus // sockets), "memory": memory}
    return lines | ({"vcpus": str(plan.vm.vcpus)} if "vcpus" in values else {})


def _format_numa_lines(edit: TargetEdit[QmConf]) -> dict[str, str | None]:
    plan, host = edit.plan, edit.host
    lines: dict[str, str | None] = {}
    for cell in plan.cells if plan.is_mirrored or has_backend(plan) else ():
        if not cell.vcpus:
            continue  # Proxmox requires vCPUs in each: cells of initiators are in args
        bound = ""
        if plan.memory_mode is not None:
            nodes = CpuSet(cell.host_nodes if plan.is_mirrored else plan.memory_nodes)
            node_text, policy = str(nodes).replace(",", ";"), POLICY_OF_MODE[plan.memory_mode]
            bound = f",hostnodes={node_text},policy={policy}"
        elif plan.vm.page_bytes is not None:
            # Proxmox requires nodes for huge pages, also for an unbound VM; with `preferred` it may
            # use other nodes.
            host_nodes = () if host is None else host.nodes
            usable = (node.index for node in host_nodes if node.memory_bytes and node.pus)
            first = (*plan.nodes, *usable, NodeIndex(0))[0]
            bound = f",hostnodes={first},policy=preferred"
        vcpus, size = str(cell.vcpus).replace(",", ";"), edit.count_mib(cell)
        lines[f"numa{cell.id}"] = f"cpus={vcpus}{bound},memory={size}"
    return lines


def _keeps_cell(edit: TargetEdit[QmConf]) -> bool:
    """Return whether the file has one cell, which the layout does not change."""
    hook = edit.file.values.get(_HOOK_KEY, "")
    of_user = not edit.plan.vcpu_pins and not _format_numa_lines(edit) and _OUR_HOOK not in hook
    return of_user and len(edit.file.keys_like(NUMA)) == 1


def _write_numa(edit: TargetEdit[QmConf]) -> Mapping[str, str | None]:
    plan, present = edit.plan, edit.file.values.get("numa")
    has_nodes = plan.is_mirrored or has_backend(plan)
    return {} if _keeps_cell(edit) else {"numa": "1" if has_nodes else "0" if present else None}


def _write_cells(edit: TargetEdit[QmConf]) -> Mapping[str, str | None]:
    page = edit.plan.vm.page_bytes
    pages = {} if page is None else {"hugepages": str(page // MIB) if page else "any"}
    if _keeps_cell(edit):
        return pages
    return {**pages, **dict.fromkeys(edit.file.keys_like(NUMA), None), **_format_numa_lines(edit)}


def _write_affinity(edit: TargetEdit[QmConf]) -> Mapping[str, str | None]:
    plan = edit.plan
    pus = CpuSet.union((*plan.vcpu_pins, plan.vm.emulator_pus))
    return {"affinity": str(pus) if plan.vcpu_pins else None}


def _write_hook(edit: TargetEdit[QmConf]) -> Mapping[str, str | None]:
    present = edit.file.values.get(_HOOK_KEY)
    if _format_hook(edit) is not None:
        return {_HOOK_KEY: present or _own_hook(edit)}
    return {_HOOK_KEY: None} if (present or "").startswith(_OUR_HOOK) else {}


def _read_pins(conf: QmConf) -> Mapping[str, Any]:
    """Read `affinity`: Proxmox starts QEMU under taskset, so it holds for all threads."""
    affinity = conf.values.get("affinity")
    if affinity is None:
        return {"emulator_pus": None}
    pus = CpuSet.parse(affinity, f"{conf.source}: affinity")
    return {"emulator_pus": pus, "vcpu_pins": (pus,) * conf.vm_fields["vcpus"]}


def _needs_args(plan: Plan) -> bool:
    """Return whether devices are on expander buses, which only `args` can describe."""
    return any(device.cell is not None for device in plan.vm.hostdevs) and bool(plan.vm.controllers)


def _format_hook(edit: TargetEdit[QmConf]) -> str | None:
    return render_hook_script(edit.plan, mirrored=_needs_args(edit.plan))


def _own_hook(edit: TargetEdit[QmConf]) -> str:
    return f"{_OUR_HOOK}{edit.file.vmid or _format_name(edit)}.sh"


def _format_name(edit: TargetEdit[QmConf]) -> str:
    """Return the VM's name as Proxmox accepts it: a DNS name."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", edit.guest.name)[:63].strip("-.") or "vm"


def _format_hostpci(edit: TargetEdit[QmConf]) -> tuple[dict[str, str | None], list[Finding]]:
    """Return hostpciN lines of devices that `args` lacks, and findings on the others."""
    plan, conf = edit.plan, edit.file
    planned_bdfs = {device.bdf for device in plan.vm.hostdevs if not is_vgpu(device)}
    lines: dict[str, str | None] = {}
    reason_of_key: dict[str, str] = {}
    present: set[Bdf] = set()
    for key in filter(HOSTPCI.match, conf.values):
        keys, names = dict(split_pairs(conf.values[key])), list_functions(conf.values[key])
        functions = {parse_function(name, f"{edit.source}: {key}") for name in names}
        if not functions or "mdev" in keys:
            reason_of_key[key] = "names a mapping or a mediated device: it stays as it is"
        elif not functions & planned_bdfs:
            lines[key] = None  # other GPUs were chosen in its place
        elif _needs_args(plan):
            lines[key] = None
            dropped_keys = ", ".join(name for name in keys if name not in ("", "host", "pcie"))
            reason_of_key |= (
                {key: f"its {dropped_keys} is not carried over into args"} if dropped_keys else {}
            )
        else:
            cards = {strip_function(f) for f in functions if any("." not in name for name in names)}
            present |= functions | {bdf for bdf in planned_bdfs if strip_function(bdf) in cards}
    findings = [
        finding("target-line-unchanged", f"Proxmox: {key}", observed=reason)
        for key, reason in reason_of_key.items()
    ]
    if _needs_args(plan):
        return lines, findings
    in_use = {key for key in conf.values if key not in lines}
    free = iter(f"hostpci{i}" for i in range(_MAX_DEVICES) if f"hostpci{i}" not in in_use)
    groups: dict[Bdf, list[Bdf]] = {}
    for device in plan.vm.hostdevs:
        if device.bdf not in present and not is_vgpu(device):
            groups.setdefault(device.group or device.bdf, []).append(device.bdf)
    pcie = ",pcie=1" if "q35" in conf.values.get("machine", "" if conf.values else "q35") else ""
    for members in groups.values():
        key = next(free, "")
        if not key:
            raise InputError(f"proxmox: expected at most {_MAX_DEVICES} devices, found more")
        lines[key] = ";".join(map(str, members)) + pcie
    return lines, findings


def _write_devices(edit: TargetEdit[QmConf]) -> Mapping[str, str | None]:
    plan, lines = edit.plan, _format_hostpci(edit)[0]
    balloon = bool(plan.vm.hostdevs) and (bool(plan.vcpu_pins) or edit.is_new)
    return {"balloon": "0", **lines} if balloon else lines


def _write_iommu(edit: TargetEdit[QmConf]) -> Mapping[str, str]:
    machine = edit.file.values.get("machine", "q35")
    lacks = edit.plan.vm.has_iommu and "viommu" not in machine
    return {"machine": f"{machine},viommu=intel"} if lacks else {}


def _write_args(edit: TargetEdit[QmConf]) -> Mapping[str, str | None]:
    plan, args = edit.plan, edit.file.values.get("args")
    if "-uuid" not in (args or "").split():  # before homenode's words, as the next plan reads it
        uuid = (word for pair in list_uuid_words(plan, edit.guest) for word in pair)
        args = " ".join((*filter(None, [args]), *uuid))
    before = None if edit.is_new else edit.file.vm_fields["pcihole64_bytes"]
    own_words = " ".join(f"{option} {value}" for option, value in _list_args_words(plan, before))
    return {"args": _edit_args(args, own_words, edit.source)}


def _list_args_words(plan: Plan, before: int | None) -> Iterator[tuple[str, str]]:
    """Yield homenode's words in `args`. before: the present window for BARs."""
    shape = plan.vm.cpu_topology
    if shape is not None and (shape.threads > 1 or shape.dies > 1):
        yield "-smp", f"{format_smp(plan)},maxcpus={plan.vm.vcpus}"
    if plan.is_mirrored:
        for cell in plan.cells:
            if not cell.vcpus:
                yield "-numa", f"node,nodeid={cell.id}"
        yield from list_distance_words(plan.cells)
    if plan.vm.topoext is not None:
        yield "-global", f"x86_64-cpu.topoext={'on' if plan.vm.topoext else 'off'}"
    for switch in CACHE_WORDS.get(plan.vm.cpu_cache, ()):
        yield "-global", f"x86_64-cpu.{switch}"
    window = plan.aperture
    hole = before if window is None else window.pcihole64_bytes or before
    if hole is not None:
        yield "-global", f"q35-pcihost.pci-hole64-size={format_size(hole)}"
    if not _needs_args(plan):
        for number, device in enumerate(plan.vm.hostdevs):
            if is_vgpu(device):
                yield "-device", f"{format_vfio(device)},id={_ID}dev{number}"
        return
    places = {device.bdf: device.address for device in plan.vm.hostdevs}
    used = (*places.values(), *(controller.address for controller in plan.vm.controllers))
    shared_slots = list_shared_slots(address for address in used if address is not None)
    tree = QemuPciTree("pcie.0", f"{_ID}.", shared_slots, _CHASSIS_BASE)
    for controller in plan.vm.controllers:
        yield "-device", tree.format_controller(controller)
    yield from list_device_words(plan, tree, places, device_id=f"{_ID}dev", initiator_id=f"{_ID}gi")


_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*+"|'[^']*+')++""")


def _edit_args(value: str | None, own_words: str, source: str) -> str | None:
    """Return `args` with homenode's words at the end, in place of those of an earlier plan."""
    text = value or ""
    spans = [(m.start(), m.end()) for m in _WORD.finditer(text)]
    words, at, index = "", 0, 0
    while index < len(spans):
        start, end = spans[index]
        option = text[start:end]
        following = text[slice(*spans[index + 1])] if index + 1 < len(spans) else ""
        if _is_ours(option, following):
            words += text[at:start]
            at = spans[index + 1][1]
            at += len(text[at:]) - len(text[at:].lstrip())
            index += 1
        index += 1
    words = (words + text[at:]).rstrip()
    parse_options(split_words(words, f"{source}: args"), f"{source}: args")
    return " ".join(filter(None, (words, own_words))) or None


def _is_ours(option: str, value: str) -> bool:
    if not option.startswith("-"):
        return False
    first, pairs = split_fields(value)
    keys = dict(pairs)
    return (
        (option in ("-device", "-object") and bool(_OUR_ID.match(keys.get("id", ""))))
        or (option == "-numa" and (first == "dist" or (first == "node" and "cpus" not in keys)))
        or option == "-smp"
        or (option == "-global" and value.startswith(_GLOBALS))
    )


def _find_losses(edit: TargetEdit[QmConf], lines: Mapping[str, str | None]) -> Iterator[Finding]:
    plan, conf, guest = edit.plan, edit.file, edit.guest
    yield from check_changed_keys(
        edit,
        lines,
        {
            "balloon": (guest.memory_bytes // MIB, "VFIO locks all memory"),
            "vcpus": (guest.vcpus, "every vCPU has its place from the start"),
        },
    )
    yield from _format_hostpci(edit)[1]
    # Proxmox sets a shorter start timeout if the devices are not in `hostpci` lines.
    keys = {key for key, value in {**conf.values, **lines}.items() if value is not None}
    needed = start_timeout_s(keys | {"hostpci0"}, plan.vm.memory_bytes)
    timeout_s = start_timeout_s(keys, plan.vm.memory_bytes)
    if plan.vm.hostdevs and timeout_s < needed:
        yield finding(
            "target-start-timeout",
            "Proxmox: start",
            observed=f"ends after {timeout_s} s, as the devices are in args; after {needed} s with "
            "hostpciN",
            values={"vmid": conf.vmid or "VMID", "seconds": needed},
        )
    hook = lines.get(_HOOK_KEY)
    if hook is not None and hook == _own_hook(edit):
        yield finding(
            "target-hook",
            "Proxmox: hookscript",
            observed=f"Proxmox does not start the VM before {hook} exists",
            case="to be copied",
            values={"name": hook[15:]},
        )
    elif hook is not None:
        yield finding(
            "target-hook",
            "Proxmox: hookscript",
            observed=f"{hook} is there already and stays: vCPUs are not pinned, devices not bound",
        )


def _list_companions(edit: TargetEdit[QmConf], _: object) -> tuple[tuple[str, bytes], ...]:
    hook = _format_hook(edit)
    return () if hook is None else ((_HOOK_SUFFIX, hook.encode()),)


ROWS = (
    FormatRow(
        says={Feature.TOPOLOGY: make_native("`sockets`, `cores`")},
        read=_read_fields("vcpus", "memory_bytes", "cpu_topology"),
        write=_write_size,
    ),
    FormatRow(
        says={Feature.CELLS: make_native("`numaN: cpus=,memory=`, at most 8; since 3.3.7")},
        read=_read_fields("cells"),
        write=_write_numa,
    ),
    FormatRow(
        says={
            Feature.VCPU_PINS: indirect_support(
                "`affinity` is one set of CPUs for all threads; the hook script pins each vCPU; "
                "since 7.2.7",
                "without the hook script vCPUs float over the VM's CPUs",
            ),
            Feature.EMULATOR_PINS: indirect_support(
                "by the hook script after the start",
                "without it QEMU's threads run on the vCPUs' CPUs",
            ),
        },
        read=_read_pins,
        write=_write_affinity,
        is_compared=False,
    ),
    FormatRow(
        says={
            Feature.MEMORY_NODES: make_native("`numaN: hostnodes=,policy=`: a range; since 3.3.7"),
            Feature.MEMORY_MODE: make_native("`numaN: policy=`; since 3.3.7"),
            Feature.HUGE_PAGES: make_native("`hugepages: 2` or `1024`; since 4.0.83"),
        },
        read=_read_fields("binding", "page_bytes"),
        write=_write_cells,
    ),
    FormatRow(read=_read_head, write=_write_head),
    FormatRow(
        says={
            Feature.DEVICES: make_native(
                "`hostpciN`, at most 16; in `args` if the layout shows PCIe"
            )
        },
        read=_read_fields("hostdevs", "mediated"),
        write=_write_devices,
    ),
    FormatRow(
        says={Feature.IOMMU: make_native("`machine: q35,viommu=intel`; since 8.1.2")},
        read=_read_fields("has_iommu"),
        write=_write_iommu,
    ),
    FormatRow(
        says=list_indirect("proxmox"), read=_read_fields("pcihole64_bytes"), write=_write_args
    ),
    FormatRow(
        says={
            Feature.IOTHREAD_PINS: lost_feature(
                "Proxmox names IOThreads by their disk, and the plan by number",
                "IOThreads run on the CPUs of the emulator",
            )
        },
        write=_write_hook,
    ),
)

CODEC = Codec(
    name="proxmox",
    rows=ROWS,
    parse=parse,
    new=lambda guest, plan: f"# homenode: layout {plan.layout.name}\n",
    edited=lambda writing, lines: edit_conf(writing.file, lines),
    refuse=_reject_unsupported,
    findings=_find_losses,
    companions=_list_companions,
    placed=re.compile(
        r"(name|sockets|cores|vcpus|memory|numa\d*|affinity|hugepages|hostpci\d+|hookscript|machine"
        r"|bios|kvm|arch|cpu|numa|balloon|digest)"
    ),
)
TARGET = CODEC.build_target(
    title="Proxmox",
    source="qm(1), src/test/cfg2cmd and debian/changelog of qemu-server 9.2",
    recognises=is_conf,
    users_own=r"(name|description|tags|onboot|startup|boot|bootdisk|unused\d|(net|ide|sata|scsi|virtio|usb|serial"
    r"|parallel|audio|virtiofs|ipconfig)\d+|scsihw|efidisk0|tpmstate0|vga|rng0|agent|smbios1|vmgenid|meta"
    r"|parent|snaptime|keyboard|localtime|tablet|protection|ci\w+|sshkeys|nameserver|searchdomain"
    r"|autostart|watchdog|spice_enhancements|running\w+|digest):",
    may_be=is_short_conf,
    one_socket=True,
    runs_qemu=True,
    own_slots=OWN_SLOTS,
    on_host=add_whole_cards,
    hook_suffix=_HOOK_SUFFIX,
    words_of=build_command,
)
