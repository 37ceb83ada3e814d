"""Proxmox: the plan as lines of a qm configuration, raw QEMU arguments and a hook script.

What Proxmox makes of a configuration is known from its published pairs of configuration and
command (src/test/cfg2cmd of qemu-server). `args:` goes behind everything that Proxmox writes
itself, so that a later -smp there overrides the one before. The root bus of its q35 machine holds
four root ports, two USB controllers and a bridge (pve-q35-4.0.cfg); buses of ours have ids that
begin with "hn".
"""

import re
import shlex
from collections.abc import Iterator, Mapping

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.units import GIB, MIB
from homenode.vm.model import GuestCache, Vm
from homenode.vm.plan_model import Plan, PlanFinding, plan_finding
from homenode.vm.targets.codec import Entry, with_entries
from homenode.vm.targets.qemu_command import (
    QemuPciTree,
    distance_words,
    fields_of,
    options_of,
    size_text,
    slots_shared,
    smp_text,
    uuid_words,
    vfio_text,
)
from homenode.vm.targets.qm_conf import (
    HOSTPCI,
    KEY,
    NUMA,
    OWN_SLOTS,
    POLICIES,
    Conf,
    command,
    count_of,
    function_of,
    hook_script,
    is_conf,
    is_short_conf,
    pairs_of,
    parse,
    read_vm,
    start_timeout_s,
    vmid_of,
    with_whole_cards,
)
from homenode.vm.targets.target import (
    Feature,
    Rendering,
    Target,
    indirect,
    is_vgpu,
    lost,
    native,
    pus_of,
    refuse_arm,
    refuse_unsafe_name,
    whole_units,
)

SUPPORT = {
    Feature.VCPU_PINS: indirect(
        "`affinity` is one set of PUs for all threads; the hook script pins each vCPU after the "
        "start",
        "without the hook script vCPUs float over the VM's PUs",
    ),
    Feature.EMULATOR_PINS: indirect(
        "by the hook script after the start", "without it QEMU's threads run on the vCPUs' PUs"
    ),
    Feature.IOTHREAD_PINS: lost(
        "Proxmox names IOThreads by their disk, and the plan by number",
        "IOThreads run wherever the emulator may",
    ),
    Feature.TOPOLOGY: native("`sockets`, `cores`"),
    Feature.THREADS: indirect(
        "by -smp in `args`", "its web page shows cores where the guest sees threads"
    ),
    Feature.DIES: indirect("by -smp in `args`", "its web page shows cores alone"),
    Feature.CACHE: indirect("by -global in `args`", "nothing checks it on another host"),
    Feature.CELLS: native("`numaN: cpus=,memory=`, at most 8"),
    Feature.UNEQUAL_CELLS: native("`numaN: memory=`"),
    Feature.DISTANCES: indirect("by -numa dist in `args`", "its web page does not show them"),
    Feature.MEMORY_NODES: native("`numaN: hostnodes=,policy=`, a range of nodes"),
    Feature.MEMORY_MODE: native("`numaN: policy=`"),
    Feature.HUGE_PAGES: native("`hugepages: 2` or `1024`"),
    Feature.DEVICES: native("`hostpciN`, at most 16; in `args` where the layout shows PCIe"),
    Feature.DEVICE_CELLS: indirect(
        "an expander bus has to go into `args`, and with it the devices",
        "Proxmox neither binds nor reserves them: the hook script does, in Proxmox's own list",
    ),
    Feature.DEVICE_TREE: indirect("by `args`", "its web page does not show the switches"),
    Feature.INITIATORS: indirect("by acpi-generic-initiator in `args`", "needs QEMU 9.0"),
    Feature.WINDOW: indirect(
        "by -global in `args`", "the window of OVMF before 2023 must be set by hand"
    ),
    Feature.IOMMU: native("`machine: q35,viommu=intel`"),
    Feature.VGPUS: indirect(
        "by vfio-pci and -uuid in `args`: `mdev=` of hostpciN makes another one at each start",
        "its web page does not show it, and another VM can take it",
    ),
}

_HOOK_SUFFIX = ".hook.sh"
_MOST_CELLS = 8
_MOST_DEVICES = 16
_ID = "hn"
"""What ids of ours begin with in `args`."""

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


def render(plan: Plan, guest: Vm, host: Host | None, given: bytes | None, source: str) -> Rendering:
    """The configuration with the plan in it, and its hook script. What is not ours stays.

    Raises InputError where Proxmox cannot take the plan.
    """
    conf = parse(given or b"", source)
    name = refuse_unsafe_name(guest.name, source)
    refuse_arm(guest, "proxmox", "its q35 machine")
    _refuse(plan, conf, source)
    memory = whole_units(plan.memory_bytes, MIB, "memory", "proxmox")
    sockets, cores = _sockets_and_cores(plan, conf)
    wanted: dict[str, str | None] = {
        "sockets": str(sockets),
        "cores": str(cores),
        "memory": _with_default(conf.values.get("memory"), "current", str(memory)),
        "numa": "1" if _has_nodes(plan) else ("0" if conf.values.get("numa") else None),
        "affinity": _affinity(plan),
    }
    if given is not None and sockets == 1 and "sockets" not in conf.values:
        del wanted["sockets"]
    if "vcpus" in conf.values:
        wanted["vcpus"] = str(plan.vcpus)
    if plan.page_bytes is not None:
        wanted["hugepages"] = str(plan.page_bytes // MIB) if plan.page_bytes else "any"
    lines = _numa_lines(plan, host)
    of_user = not plan.vcpu_pins and not lines and _OUR_HOOK not in conf.values.get(_HOOK_KEY, "")
    if of_user and sum(bool(NUMA.match(key)) for key in conf.values) == 1:
        del wanted["numa"]  # one cell, which the layout leaves as it was
    else:
        wanted |= dict.fromkeys(filter(NUMA.match, conf.values), None)
    wanted |= lines
    if given is None:
        wanted |= {"name": re.sub(r"[^A-Za-z0-9.-]", "-", name)[:63].strip("-.") or "vm"}
        wanted |= {"machine": "q35", "cpu": "host", "scsihw": "virtio-scsi-single"}
        if guest.domain_type != "kvm":
            wanted |= {"kvm": "0", "cpu": "max"}
    if plan.devices and (plan.vcpu_pins or given is None):
        wanted["balloon"] = "0"
    if plan.vm.has_iommu and "viommu" not in conf.values.get("machine", ""):
        wanted["machine"] = f"{conf.values.get('machine', 'q35')},viommu=intel"
    findings: list[PlanFinding] = []
    mirrored = any(device.cell is not None for device in plan.devices) and bool(plan.vm.controllers)
    wanted |= _hostpci(plan, conf, source, findings, mirrored=mirrored)
    args = conf.values.get("args")
    if "-uuid" not in (args or "").split():  # in front of ours, as the next plan finds it
        args = " ".join(
            (*filter(None, [args]), *(w for pair in uuid_words(plan, guest) for w in pair))
        )
    hole = None if given is None else read_vm(given, source).pcihole64_bytes
    wanted["args"] = _with_args(args, _args_of(plan, hole, mirrored=mirrored), source)
    findings += _timeout({**conf.values, **wanted}, plan, vmid_of(source) or "VMID")
    hook = hook_script(plan, mirrored=mirrored)
    suffix = _HOOK_SUFFIX
    if hook is not None:
        wanted[_HOOK_KEY] = _hookscript(conf, source, findings)
    elif conf.values.get(_HOOK_KEY, "").startswith(_OUR_HOOK):
        wanted[_HOOK_KEY] = None
    undone = sorted(set(conf.pending) & {key for key, value in wanted.items() if value is not None})
    if undone:
        findings.append(
            plan_finding(
                "target-left",
                "Proxmox: [PENDING]",
                f"the next start changes {', '.join(undone)} again, which the plan sets",
                case="pending",
            )
        )
    head = "" if given is not None else f"# homenode: layout {plan.layout.name}\n"
    text = head + _edited(conf, wanted)
    companions = () if hook is None else ((suffix, hook.encode()),)
    return Rendering(text.encode(), companions, tuple(findings))


def _refuse(plan: Plan, conf: Conf, source: str) -> None:
    machine = conf.values.get("machine", "q35" if not conf.values else "pc")
    if plan.vm.controllers and "q35" not in machine:
        raise InputError(
            f"{source}: expected machine q35 for expander buses, found {machine}",
            hint="set machine: q35, or choose a layout without -pci",
        )
    if conf.values.get("arch", "x86_64") != "x86_64":
        raise InputError(f"{source}: expected arch x86_64, found {conf.values['arch']}")
    if len(plan.cells) > _MOST_CELLS:
        raise InputError(
            f"proxmox: expected at most {_MOST_CELLS} guest cells, found {len(plan.cells)}",
            hint="choose fewer nodes with --max-nodes, or a flat layout",
        )
    if any("memory" in word for word in conf.values.get("hotplug", "").split(",")):
        raise InputError(
            f"{source}: expected no memory hotplug: Proxmox refuses it next to numaN lines",
            hint="take memory out of hotplug:",
        )
    if plan.page_bytes not in (None, 0, 2 * MIB, GIB):
        raise InputError(
            f"proxmox: expected huge pages of 2 MiB or 1 GiB, found {plan.page_bytes} bytes"
        )
    mirrored = plan.is_mirrored
    bound = [CpuSet(cell.host_nodes) for cell in plan.cells] if mirrored else []
    bound = [] if plan.memory_mode is None else bound or [CpuSet(plan.memory_nodes)]
    for nodes in bound:
        if "," in str(nodes):
            raise InputError(
                f"proxmox: expected the memory of a cell on a range of host nodes, found {nodes}: "
                "QEMU refuses what Proxmox makes of others",
                hint="choose a layout with a cell per node, or --max-nodes 1",
            )
    if plan.page_bytes is not None and any(len(nodes) > 1 for nodes in bound):
        raise InputError(
            "proxmox: expected one host node for huge pages of a cell, found several",
            hint="choose a layout with a cell per node, or plan without --page-size",
        )
    if any(cell.memory_bytes and not cell.vcpus for cell in plan.cells):
        raise InputError("proxmox: expected vCPUs in every guest cell with memory, found none")


def _has_nodes(plan: Plan) -> bool:
    mirrored = plan.is_mirrored
    return mirrored or plan.memory_mode is not None or plan.page_bytes is not None


def _sockets_and_cores(plan: Plan, conf: Conf) -> tuple[int, int]:
    shape = plan.topology
    if shape is not None:
        return shape.sockets, plan.vcpus // shape.sockets
    sockets = count_of(conf.values, "sockets", "proxmox")
    return (sockets, plan.vcpus // sockets) if not plan.vcpus % sockets else (1, plan.vcpus)


def _with_default(value: str | None, key: str, text: str) -> str:
    """A property string with the value of its default key replaced."""
    if value is None:
        return text
    words = value.split(",")
    kept = [word for word in words if "=" in word and word.partition("=")[0] != key]
    return ",".join([text, *kept])


def _affinity(plan: Plan) -> str | None:
    if not plan.vcpu_pins:
        return None
    pus = pus_of(plan.vcpu_pins)
    return str(pus if plan.emulator_pus is None else pus | plan.emulator_pus)


def _semicolons(numbers: CpuSet) -> str:
    return str(numbers).replace(",", ";")


def _memory_nodes(host: Host) -> tuple[NodeIndex, ...]:
    return tuple(node.index for node in host.nodes if node.memory_bytes and node.pus)


def _numa_lines(plan: Plan, host: Host | None) -> dict[str, str | None]:
    if not _has_nodes(plan):
        return {}
    lines: dict[str, str | None] = {}
    mirrored = plan.is_mirrored
    for cell in plan.cells:
        if not cell.vcpus:
            continue  # Proxmox wants vCPUs in each: those of initiators are in args
        size = whole_units(cell.memory_bytes, MIB, f"memory of cell {cell.id}", "proxmox")
        bound = ""
        if plan.memory_mode is not None:
            nodes = CpuSet(cell.host_nodes if mirrored else plan.memory_nodes)
            bound = f",hostnodes={_semicolons(nodes)},policy={POLICIES[plan.memory_mode]}"
        elif plan.page_bytes is not None:
            # Proxmox asks for the nodes of huge pages, of a VM that is bound to none as well;
            # preferred leaves the others to it.
            first = (*plan.nodes, *(() if host is None else _memory_nodes(host)), NodeIndex(0))[0]
            bound = f",hostnodes={first},policy=preferred"
        lines[f"numa{cell.id}"] = f"cpus={_semicolons(cell.vcpus)}{bound},memory={size}"
    return lines


def _hostpci(
    plan: Plan, conf: Conf, source: str, findings: list[PlanFinding], *, mirrored: bool
) -> dict[str, str | None]:
    """hostpciN lines: as they are where their devices stay, gone where args has them."""
    planned = {device.bdf for device in plan.devices if not is_vgpu(device)}
    lines: dict[str, str | None] = {}
    there: set[Bdf] = set()
    for key in filter(HOSTPCI.match, conf.values):
        pairs = pairs_of(conf.values[key])
        keys = dict(pairs)
        names = [n for n in (keys.get("", "") or keys.get("host", "")).split(";") if n]
        functions = {function_of(name, f"{source}: {key}") for name in names}
        if not functions or "mdev" in keys:
            findings.append(_left(key, "names a mapping or a mediated device: it stays as it is"))
        elif mirrored and functions & planned:
            lines[key] = None
            dropped = [name for name in keys if name not in ("", "host", "pcie")]
            if dropped:
                findings.append(
                    _left(key, f"its {', '.join(dropped)} is not carried over into args")
                )
        elif functions & planned:
            cards = {_card(f) for f in functions if any("." not in name for name in names)}
            there |= functions | {bdf for bdf in planned if _card(bdf) in cards}
        else:
            lines[key] = None  # other GPUs were chosen in its place
    if mirrored:
        return lines
    in_use = {key for key in conf.values if HOSTPCI.match(key)} - {
        key for key, value in lines.items() if value is None
    }
    free = iter(f"hostpci{i}" for i in range(_MOST_DEVICES) if f"hostpci{i}" not in in_use)
    groups: dict[Bdf, list[Bdf]] = {}
    for device in plan.devices:
        if device.bdf not in there and not is_vgpu(device):
            groups.setdefault(device.group or device.bdf, []).append(device.bdf)
    pcie = ",pcie=1" if "q35" in conf.values.get("machine", "" if conf.values else "q35") else ""
    for members in groups.values():
        key = next(free, "")
        if not key:
            raise InputError(f"proxmox: expected at most {_MOST_DEVICES} devices, found more")
        lines[key] = ";".join(map(str, members)) + pcie
    return lines


def _card(bdf: Bdf) -> tuple[int, int, int]:
    return bdf.domain, bdf.bus, bdf.device


def _left(key: str, detail: str) -> PlanFinding:
    return plan_finding("target-left", f"Proxmox: {key}", detail)


def _args_of(plan: Plan, before: int | None, *, mirrored: bool) -> str:
    """before: the window for BARs that is there."""
    words: list[tuple[str, str]] = []
    shape = plan.topology
    if shape is not None and (shape.threads > 1 or shape.dies > 1):
        words.append(("-smp", f"{smp_text(plan)},maxcpus={plan.vcpus}"))
    words += [
        ("-numa", f"node,nodeid={cell.id}")
        for cell in plan.cells
        if not cell.vcpus and plan.is_mirrored
    ]
    words += distance_words(plan)
    if plan.vm.topoext is not None:
        words.append(("-global", f"x86_64-cpu.topoext={'on' if plan.vm.topoext else 'off'}"))
    if plan.cache is GuestCache.PASSTHROUGH:
        words.append(("-global", "x86_64-cpu.host-cache-info=on"))
        words.append(("-global", "x86_64-cpu.l3-cache=off"))
    elif plan.cache is GuestCache.EMULATED:
        words.append(("-global", "x86_64-cpu.l3-cache=on"))
    elif plan.cache is GuestCache.DISABLED:
        words.append(("-global", "x86_64-cpu.l3-cache=off"))
    window = plan.aperture
    hole = before if window is None else window.pcihole64_bytes or before
    if hole is not None:
        words.append(("-global", f"q35-pcihost.pci-hole64-size={size_text(hole)}"))
    if mirrored:
        words += _tree_words(plan)
    else:
        words += [
            ("-device", f"{vfio_text(device)},id={_ID}dev{number}")
            for number, device in enumerate(plan.devices)
            if is_vgpu(device)
        ]
    return " ".join(f"{option} {value}" for option, value in words)


def _tree_words(plan: Plan) -> list[tuple[str, str]]:
    controllers = plan.vm.controllers
    places = [d.address for d in plan.devices if d.address is not None]
    places += [c.address for c in controllers if c.address is not None]
    tree = QemuPciTree("pcie.0", f"{_ID}.", slots_shared(places), _CHASSIS_BASE)
    words = [("-device", tree.controller(controller)) for controller in controllers]
    for number, device in enumerate(plan.devices):
        at = "" if device.address is None else tree.at(device.address)
        words.append(("-device", f"{vfio_text(device)},id={_ID}dev{number}{at}"))
        words += [
            (
                "-object",
                f"acpi-generic-initiator,id={_ID}gi{cell},pci-dev={_ID}dev{number},node={cell}",
            )
            for cell in device.initiator_cells
        ]
    return words


_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*+"|'[^']*+')++""")


def _with_args(value: str | None, ours: str, source: str) -> str | None:
    """`args` with our words at its end in place of those of an earlier plan."""
    text = value or ""
    spans = [(m.start(), m.end()) for m in _WORD.finditer(text)]
    kept, at, index = "", 0, 0
    while index < len(spans):
        start, end = spans[index]
        option = text[start:end]
        following = text[slice(*spans[index + 1])] if index + 1 < len(spans) else ""
        if _is_ours(option, following):
            kept += text[at:start]
            at = spans[index + 1][1]
            at += len(text[at:]) - len(text[at:].lstrip())
            index += 1
        index += 1
    kept = (kept + text[at:]).rstrip()
    options_of(shlex.split(kept), f"{source}: args")
    return " ".join(filter(None, (kept, ours))) or None


def _is_ours(option: str, value: str) -> bool:
    if not option.startswith("-"):
        return False
    first, pairs = fields_of(value)
    keys = dict(pairs)
    return (
        (option in ("-device", "-object") and bool(_OUR_ID.match(keys.get("id", ""))))
        or (option == "-numa" and (first == "dist" or (first == "node" and "cpus" not in keys)))
        or option == "-smp"
        or (option == "-global" and value.startswith(_GLOBALS))
    )


def _timeout(values: Mapping[str, str | None], plan: Plan, vmid: str) -> Iterator[PlanFinding]:
    """What a start with these devices may take by Proxmox's own rule, where it gives less."""
    keys = {key for key, value in values.items() if value is not None}
    needed = start_timeout_s(keys | {"hostpci0"}, plan.memory_bytes)
    given = start_timeout_s(keys, plan.memory_bytes)
    if plan.devices and given < needed:
        yield plan_finding(
            "target-start-timeout",
            "Proxmox: time-out of the start",
            f"Proxmox does not see devices in args: it ends a start after {given} s, "
            f"and with hostpciN after {needed} s, since VFIO pins all memory",
            values={"vmid": vmid, "seconds": needed},
        )


def _hookscript(conf: Conf, source: str, findings: list[PlanFinding]) -> str | None:
    there = conf.values.get(_HOOK_KEY)
    ours = f"{_OUR_HOOK}{vmid_of(source) or 'vm'}.sh"
    if there is None or there == ours:
        findings.append(
            plan_finding(
                "target-hook",
                "Proxmox: hookscript",
                f"{ours} does not start the VM until the hook script is there: Proxmox refuses",
                case="to be copied",
                values={"name": ours[15:]},
            )
        )
        return ours
    findings.append(
        plan_finding(
            "target-hook",
            "Proxmox: hookscript",
            f"{there} is there already and stays: vCPUs are not pinned and devices not bound",
        )
    )
    return there


def _edited(conf: Conf, wanted: Mapping[str, str | None]) -> str:
    """The configuration with these values; sections and the blank lines before them stay last."""
    live, at = "".join(conf.lines[: conf.live]), 0
    entries = []
    for line in conf.lines[: conf.live]:
        match = KEY.match(line.strip())
        if match is not None and not line.lstrip().startswith("#"):
            start = at + len(line) - len(line.lstrip())
            value = match[2].strip(" \t")
            first = start + match.start(2) + len(match[2]) - len(match[2].lstrip(" \t"))
            entries.append(Entry(match[1], value, start, first, first + len(value)))
        at += len(line)
    end = len(live.rstrip("\r\n")) if live.strip() else 0
    end = live.find("\n", end) + 1 or len(live)
    values = {key: [] if text is None else [(text, text)] for key, text in wanted.items()}
    text = with_entries(live[:end], entries, values, joint=": ")
    return text + live[end:] + "".join(conf.lines[conf.live :])


TARGET = Target(
    title="Proxmox",
    source="qm(1) and src/test/cfg2cmd of qemu-server 9.2",
    support=SUPPORT,
    unread=frozenset(("pins", "emulator", "iothreads")),
    render=render,
    read_vm=read_vm,
    recognises=is_conf,
    may_be=is_short_conf,
    one_socket=True,
    runs_qemu=True,
    own_slots=OWN_SLOTS,
    on_host=with_whole_cards,
    hook_suffix=_HOOK_SUFFIX,
    words_of=command,
)
