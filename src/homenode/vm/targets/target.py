"""Target: the features of a plan that a hypervisor supports or loses, the writer, and shell text
for hosts, which need bash, coreutils and util-linux."""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from msgspec import Struct, toml
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.findings import Finding, finding, with_fix
from homenode.machine.topology import Host
from homenode.package_data import read_package_text
from homenode.units import MIB
from homenode.vm.model import (
    GuestAddress,
    GuestHostdev,
    GuestTopology,
    MediatedDevice,
    PortModel,
    Vm,
)
from homenode.vm.plan import Plan
from homenode.vm.plan_options import MemoryMode


def _has_distances(plan: Plan) -> bool:
    return plan.is_mirrored and len(plan.cells) > 1 and bool(plan.cells[0].distances)


def _sets_window(plan: Plan) -> bool:
    at = plan.aperture
    sizes = at and (at.pcihole64_bytes, at.physical_address_bits, at.firmware_mmio64_mib)
    return sizes not in (None, (None, None, None))


def _has_switches(plan: Plan) -> bool:
    return any(c.model == PortModel.SWITCH_UPSTREAM for c in plan.vm.controllers)


class Feature(StrEnum):
    """A hypervisor feature that a plan may need."""

    words: str  # for people
    is_planned: Callable[[Plan], object]  # whether a plan needs it
    facts: tuple[str, ...]  # ids of vm/facts.py that a target without it cannot show

    def __new__(
        cls, id: str, words: str, is_planned: Callable[[Plan], object], *facts: str
    ) -> "Feature":
        feature = str.__new__(cls, id)
        feature._value_, feature.words, feature.is_planned, feature.facts = (
            id,
            words,
            is_planned,
            facts,
        )
        return feature

    VCPU_PINS = "vcpu-pins", "each vCPU on its own CPUs", lambda p: p.vcpu_pins, "pins"
    EMULATOR_PINS = (
        "emulator-pins",
        "the emulator's threads on their CPUs",
        lambda p: p.vm.emulator_pus is not None,
        "emulator",
    )
    IOTHREAD_PINS = (
        "iothread-pins",
        "IOThreads on their CPUs",
        lambda p: any(p.iothread_pus),
        "iothreads",
    )
    TOPOLOGY = "topology", "sockets and cores of the guest", lambda p: p.vm.cpu_topology, "topology"
    THREADS = ("threads", "hyper-threads of the guest", lambda p: p.vm.threads_per_core > 1)
    DIES = "dies", "dies of the guest", lambda p: p.vm.cpu_topology and p.vm.cpu_topology.dies > 1
    CACHE = "cache", "shared caches of the guest", lambda p: p.vm.cpu_cache
    CELLS = (
        "cells",
        "guest cells",
        lambda p: p.is_mirrored,
        *("cells", "cell-vcpus", "cell-memory", "distances", "cell-binding"),
    )
    DISTANCES = "distances", "distances between cells", _has_distances, "distances"
    MEMORY_NODES = (
        "memory-nodes",
        "memory on the planned host nodes",
        lambda p: p.memory_mode,
        *("binding", "cell-binding"),
    )
    MEMORY_MODE = (
        "memory-mode",
        "memory mode interleave or preferred",
        lambda p: p.memory_mode not in (None, MemoryMode.STRICT),
    )
    HUGE_PAGES = (
        "huge-pages",
        "huge pages",
        lambda p: p.vm.page_bytes is not None,
        *("pages", "cell-pages"),
    )
    DEVICES = "devices", "passed-through devices", lambda p: p.vm.hostdevs, "device"
    DEVICE_CELLS = (
        "device-cells",
        "each device on its guest cell",
        lambda p: any(device.cell is not None for device in p.vm.hostdevs),
        "device-cell",
    )
    DEVICE_TREE = "device-tree", "PCIe switches of the host in the guest", _has_switches
    INITIATORS = (
        "initiators",
        "cells for a Grace GPU's own memory",
        lambda p: any(device.initiator_cells for device in p.vm.hostdevs),
        "initiators",
    )
    WINDOW = "window", "address space for large BARs", _sets_window
    IOMMU = "iommu", "a guest IOMMU that remaps interrupts", lambda p: p.vm.has_iommu, "iommu"
    VGPUS = (
        "vgpus",
        "vGPUs: mediated devices, and virtual functions with a vGPU type",
        lambda p: any(map(is_vgpu, p.vm.hostdevs)),
    )


class SupportLevel(StrEnum):
    """Support of a target for a feature."""

    NATIVE = "native"  # an option of its own
    INDIRECT = "indirect"  # by raw arguments or a script, with a limitation (`loses`)
    LOST = "lost"  # not at all


class Support(Struct, frozen=True):
    level: SupportLevel
    how: str  # by which option and since which version that has been in use, or why not
    loses: str | None = None  # what the guest or the host then lacks; None for NATIVE


def make_native(how: str) -> Support:
    return Support(SupportLevel.NATIVE, how)


def indirect_support(how: str, loses: str) -> Support:
    return Support(SupportLevel.INDIRECT, how, loses)


def lost_feature(how: str, loses: str) -> Support:
    return Support(SupportLevel.LOST, how, loses)


_TEXTS: Mapping[str, Any] = toml.decode(read_package_text("vm", "targets", "support.toml"))


def list_lost(target: str) -> dict[Feature, Support]:
    """Return the features that a target lacks."""
    return {Feature[name]: lost_feature(*texts) for name, texts in _TEXTS["lost"][target].items()}


def list_indirect(target: str) -> dict[Feature, Support]:
    """Return the features that a target provides at a price."""
    texts = _TEXTS["indirect"][target]
    return {Feature[name]: indirect_support(how, loses) for name, (how, loses) in texts.items()}


def way_to_add(target: str, kind: str) -> str:
    """Return how a user adds disks, network, firmware or other settings to a target's VM."""
    way: str = _TEXTS["add"][target][kind]
    return way


def findings_for(target: str, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings on a VM of a target, without those that do not hold there, with the target's
    fixes, and with keys of its file in place of libvirt's elements."""
    fixes, key_of = _TEXTS["fix"][target], _TEXTS["key"][target]

    def put_keys(text: str) -> str:
        return re.sub(r"<([A-Za-z]{1,20})>", lambda match: key_of.get(match[1], match[1]), text)

    held_findings = (f for f in findings if f.id not in _TEXTS["omit"][target])
    fixed_findings = (with_fix(f, fixes[f.id]) if f.id in fixes else f for f in held_findings)
    return tuple(
        replace(
            f,
            subject=put_keys(f.subject),
            expected=put_keys(f.expected),
            observed=put_keys(f.observed),
            headline=put_keys(f.headline),
            fix=f.fix and put_keys(f.fix),
        )
        for f in fixed_findings
    )


class Rendering(Struct, frozen=True):
    """The files of a plan for a target."""

    document: bytes  # the file of -o
    # (suffix, content) of files next to it, such as a hook script
    companions: tuple[tuple[str, bytes], ...] = ()
    # findings of this plan or file alone; `check_target` adds features that the target lacks
    findings: tuple[Finding, ...] = ()


class Target(Struct, frozen=True, kw_only=True):
    """A hypervisor that a plan is written for: TARGET of the module of its name.

    render raises InputError if the target cannot take the plan safely; of plan, VM, host, the
    target's own file that is edited (None = a new one) and that file's name. read_vm raises
    ParseError or InputError. The defaults are for a target whose file contains all facts.
    """

    title: str  # For people
    source: str  # The documentation, with its version
    support: Mapping[Feature, Support]
    render: Callable[[Plan, Vm, Host | None, bytes | None, str], Rendering]
    read_vm: Callable[[bytes, str], Vm]
    recognises: Callable[[bytes], bool]  # Whether a file is one of this target, by its content
    other_keys: Callable[[bytes, str], tuple[str, ...]] = lambda *_: ()
    """Keys of a file that a plan does not have."""
    may_be: Callable[[bytes], bool] = lambda content: False
    """Whether a file can be of this target, if the user named the target."""
    unread: frozenset[str] = frozenset()
    """Facts of vm/facts.py that its file does not contain, although the target may set them."""
    one_socket: bool = False
    """vCPUs are cores of one socket unless the file says otherwise; libvirt makes each a socket."""
    runs_qemu: bool = False  # The limits of the host's QEMU hold
    keeps_addresses: bool = False  # A VM of another hypervisor keeps its PCI addresses
    own_slots: tuple[GuestAddress, ...] = ()  # Those that it occupies itself
    architecture_of_host: bool = False
    """A file that does not name x86_64 leaves the architecture to the host."""
    on_host: Callable[[Vm, bytes, str, Host], Vm] = lambda vm, *_: vm
    """The VM with the devices that the file names by something that is on the host."""
    says_emulator: bool = False  # A file without CPUs for the emulator means that it is not pinned
    hook_suffix: str | None = None  # Of the script with the pins that is written next to the file
    users_own: str = (
        ""  # Pattern of lines that a plan does not rely on, as `list_settings` has them
    )
    words_of: Callable[[bytes, str], Sequence[str]] | None = None
    """The command of QEMU that the file starts; None if no test guest can be made of it."""


def list_settings(target: Target, content: bytes) -> tuple[str, ...]:
    """Return the settings of a file that are homenode's: lines without blanks, quotes, comments,
    sections and `users_own`, each behind the less indented ones above it, in a script behind the
    one before."""
    settings, parents, section = [], list[tuple[int, str]](), ""
    for line in content.decode("utf-8", "replace").splitlines():
        text = "".join(line.split()).rstrip(",\\").translate(_NO_QUOTES)
        section = line.strip() if line.startswith("[") else section
        if section or not text or (text.startswith("#") and not text.startswith("#!")):
            continue
        depth = len(line) - len(line.lstrip())
        parents = [line_above for line_above in parents if line_above[0] < depth] + [(depth, text)]
        path = " ".join(line_above for _, line_above in parents)
        if not (target.users_own and re.match(target.users_own, path)):
            settings.append(path)
    if content.startswith(b"#!"):
        settings = [f"{before} / {line_above}" for before, line_above in pairwise(("", *settings))]
    return tuple(settings)


_NO_QUOTES = str.maketrans("", "", "'\"")


def is_vgpu(device: GuestHostdev) -> bool:
    """A device that binding to vfio-pci would end."""
    return device.uuid is not None or not device.managed


def list_features(plan: Plan) -> frozenset[Feature]:
    return frozenset(feature for feature in Feature if feature.is_planned(plan))


def lost_features(target: Target, plan: Plan) -> frozenset[Feature]:
    """Return the features that the plan needs and the target lacks."""
    return frozenset(f for f in list_features(plan) if target.support[f].level is SupportLevel.LOST)


def visible_vm(vm: Vm, missing_features: Collection[Feature]) -> Vm:
    """Return the VM as a file without these features can show it: cores for dies, no cells of a
    GPU's own memory without initiators, strict binding without modes."""
    if Feature.TOPOLOGY in missing_features:
        vm = replace(vm, cpu_topology=None)
    if Feature.DIES in missing_features and vm.cpu_topology is not None:
        sockets, dies, cores, threads = vm.cpu_topology
        vm = replace(vm, cpu_topology=GuestTopology(sockets, 1, dies * cores, threads))
    if Feature.CACHE in missing_features:
        vm = replace(vm, cpu_cache=None)
    if Feature.INITIATORS in missing_features:
        cells = [cell for cell in vm.cells if cell.vcpus or cell.memory_bytes]
        cut = (replace(cell, distances=cell.distances[: len(cells)]) for cell in cells)
        vm = replace(vm, cells=tuple(cut))
    if Feature.MEMORY_MODE in missing_features and vm.binding is not None:
        strict = str(MemoryMode.STRICT)
        bound = tuple(replace(cell, mode=strict) for cell in vm.cells)
        vm = replace(vm, binding=(strict, vm.binding[1]), cells=bound)
    if Feature.DEVICE_CELLS in missing_features:
        hostdevs = tuple(replace(device, address=None, cell=None) for device in vm.hostdevs)
        vm = replace(vm, hostdevs=hostdevs, controllers=())
    return vm


def check_target(target: Target, plan: Plan) -> tuple[Finding, ...]:
    """Return the features of the plan that the target lacks, or has at a price."""
    planned_features = list_features(plan)
    findings = []
    for feature in Feature:
        support = target.support[feature]
        if feature not in planned_features or support.level is SupportLevel.NATIVE:
            continue
        is_lost = support.level is SupportLevel.LOST
        findings.append(
            finding(
                "target-lost" if is_lost else "target-indirect",
                f"{target.title}: {feature.words}",
                observed=f"{support.how}; {support.loses}",
            )
        )
    return tuple(findings)


def get_default_machine(architecture: str) -> str:
    """Return the machine type that has a PCIe tree."""
    return "virt" if architecture == "aarch64" else "q35"


def split_devices(
    devices: Iterable[tuple[Bdf | str, int | None]],
    initiators: Mapping[Bdf, CpuSet] = MappingProxyType({}),
) -> tuple[tuple[GuestHostdev, ...], tuple[MediatedDevice, ...]]:
    """Functions and mediated devices of a file that names them with their guest cells."""
    functions, mediated_devices = [], []
    for name, cell in devices:
        if isinstance(name, str):
            mediated_devices.append(MediatedDevice(name, None, cell))
        else:
            cells = initiators.get(name, CpuSet())
            functions.append(GuestHostdev(name, None, cell=cell, initiator_cells=cells))
    return tuple(functions), tuple(mediated_devices)


def reject_arm(guest: Vm, target: str, purpose: str) -> None:
    """Raise InputError for a guest that is not an x86_64 guest."""
    if guest.architecture != "x86_64":
        raise InputError(
            f"{target}: expected a guest of x86_64 for {purpose}, found {guest.architecture}",
            hint="choose the target qemu, which supports aarch64",
        )


def shows_siblings(plan: Plan) -> bool:
    """Return whether the guest's vCPUs are sibling pairs."""
    return plan.vm.threads_per_core > 1


def shape_of_siblings(vcpus: int) -> GuestTopology:
    """Return the topology of a guest whose file only records that it shows siblings."""
    return GuestTopology(1, 1, max(1, vcpus // 2), 2)


def reject_unsafe_name(name: str, source: str) -> str:
    """Return the name. Raises InputError for letters that are unsafe in files and command lines."""
    if not name.isprintable() or not name.strip():
        raise InputError(
            f"{source}: expected a VM name of printable characters, found {name!r}",
            hint="rename the VM; nothing was written",
        )
    return name


def whole_mib(size_bytes: int, meaning: str, target: str) -> int:
    """Return a size in MiB, in which targets count. Raises InputError if it is not whole."""
    count, remainder = divmod(size_bytes, MIB)
    if remainder:
        raise InputError(
            f"{target}: expected {meaning} in whole MiB, found {size_bytes} bytes",
            hint=f"the next size is {count + 1}MiB",
        )
    return count


def one_node_each(plan: Plan, target: str) -> tuple[int, ...]:
    """Return the one host node of each cell. Raises InputError if a cell's memory spans several."""
    for cell in plan.cells:
        if len(cell.host_nodes) > 1 and cell.memory_bytes:
            raise InputError(
                f"{target}: expected one host node for each guest cell, found cell {cell.id} on "
                f"nodes {', '.join(map(str, cell.host_nodes))}",
                hint="choose a layout with a cell per node, or --max-nodes 1",
            )
    return tuple(cell.host_nodes[0] if cell.host_nodes else -1 for cell in plan.cells)


def quote_word(word: str) -> str:
    """Quote one word of a shell. Raises InputError for control characters."""
    if not word.isprintable():
        raise InputError(
            f"script: expected printable words, found {word!r}",
            hint="rename the VM or the file that holds it",
        )
    # A comma outside quotes seems an error to checkers of bash arrays.
    return shlex.quote(word) if "," not in word else "'" + word.replace("'", "'\"'\"'") + "'"


def format_array(name: str, words: Iterable[str]) -> str:
    """Return an array of bash, a line for each element."""
    lines = "".join(f"  {quote_word(word)}\n" for word in words)
    return f"{name}=(\n{lines})\n" if lines else f"{name}=()\n"


def assign_word(name: str, word: str) -> str:
    return f"{name}={quote_word(word)}\n"


def plan_values(plan: Plan) -> str:
    """Return the variables of `PIN` and `PREPARE`: pins, devices, huge pages."""
    return "".join(
        (
            assign_word(
                "emulator_pus", "" if plan.vm.emulator_pus is None else str(plan.vm.emulator_pus)
            ),
            format_array("vcpu_pus", map(str, plan.vcpu_pins)),
            format_array("iothread_pus", (str(pus) for pus in plan.iothread_pus)),
            format_array(
                "devices", (str(device.bdf) for device in plan.vm.hostdevs if not is_vgpu(device))
            ),
            "# host node, page size in kB, pages\n",
            format_array(
                "huge_pages",
                (f"{r.node} {r.page_bytes // 1024} {r.pages}" for r in plan.page_reservations),
            ),
        )
    )


PREPARE, PIN = (
    read_package_text("vm", "targets", "scripts", f"{n}.sh") for n in ("prepare", "pin")
)
"""Functions of bash."""


def split_words(text: str, place: str) -> tuple[str, ...]:
    """Return the words of a shell. Raises ParseError for a quote that does not end."""
    try:
        return tuple(shlex.split(text))
    except ValueError:
        raise ParseError(place, "words of a shell", text.strip()[:60]) from None


def find_array(text: str, name: str) -> tuple[str, ...] | None:
    """The words of an array in a script of homenode; None if it has none. Raises ParseError."""
    start = f"\n{name}=("
    at = text.find(start)
    if at < 0:
        return None
    end = text.find("\n)", at) if not text.startswith(")", at + len(start)) else at + len(start)
    return split_words(text[at + len(start) : end], name) if end >= 0 else None


def find_value(text: str, name: str) -> str | None:
    """The word of a variable in a script of homenode; None if it has none. Raises ParseError."""
    at = text.find(f"\n{name}=")
    if at < 0:
        return None
    line = text[at + len(name) + 2 :].partition("\n")[0]
    words = split_words(line, name)
    return words[0] if words else ""


def parse_pins(text: str) -> tuple[tuple[CpuSet, ...], CpuSet | None, tuple[CpuSet, ...]]:
    """Return the vCPU, emulator and IOThread pins of a script's values."""
    emulator = find_value(text, "emulator_pus")
    return (
        tuple(CpuSet.parse(pus, "vcpu_pus") for pus in find_array(text, "vcpu_pus") or ()),
        CpuSet.parse(emulator, "emulator_pus") if emulator else None,
        tuple(CpuSet.parse(pus, "iothread_pus") for pus in find_array(text, "iothread_pus") or ()),
    )
