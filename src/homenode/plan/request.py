"""GuestRequest: one VM to be placed, from its definition and the user's options."""

from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError, out_of_range, requires
from homenode.findings import NO_VMS
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import DEFAULT_HOST_RESERVE, Host, HostReserve
from homenode.units import KIB, MIB, format_bytes, parse_bytes
from homenode.vm.gpu_parts import (
    add_mediated,
    find_uuid_function,
    format_profiles,
    is_of_profile,
    reject_second,
    resolve_device,
)
from homenode.vm.layout import (
    GuestCells,
    GuestPcie,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
    add_preset_name,
    expose_siblings,
    find_preset,
    unknown_layout,
)
from homenode.vm.model import GuestHostdev, Vm
from homenode.vm.plan_options import (
    MAX_SPARE_PORTS,
    DefinitionSiblings,
    EmulatorPolicy,
    PlanOptions,
    sum_cells,
)

_X86 = frozenset({"x86_64", "i686"})


class GuestRequest(Struct, frozen=True, kw_only=True):
    """One VM to be placed."""

    guest: Vm  # the facts of the definition
    layout: Layout  # the layout to use; `options` has the requested one
    # options as given; values resolved from the definition, the layout or the host's description
    # are in the fields below and take precedence
    options: PlanOptions
    page_bytes: int | None = None  # huge pages to back the memory; None = ordinary pages
    # host functions that the VM gets, host order: from the definition, or chosen for --gpus
    devices: tuple[Bdf, ...] = ()
    mediated: tuple[tuple[Bdf, str], ...] = ()  # (function, UUID) of mediated devices among them
    # with siblings exposed, keep the vCPUs and halve the cores
    keep_vcpus: bool = False
    # whether siblings as in the definition may replace whole cores
    document_siblings: DefinitionSiblings = DefinitionSiblings.IGNORED
    host_reserve: HostReserve = DEFAULT_HOST_RESERVE  # resources reserved for the host
    # the housekeeping CPUs for emulators of several VMs; empty = none are configured
    housekeeping_pus: CpuSet = CpuSet()
    # maximum siblings per core if siblings are exposed; None = all
    most_threads: int | None = None
    # homenode gave the VM siblings before: the host's memory reserve is relaxed first
    keeps_siblings: bool = False

    @property
    def vcpus(self) -> int:
        """Return the user's vCPU count, else the definition's."""
        return self.options.vcpus or self.guest.vcpus

    @property
    def memory_bytes(self) -> int:
        return self.options.memory_bytes or self.guest.memory_bytes


def set_vcpus(request: GuestRequest, vcpus: int) -> GuestRequest:
    return replace(request, options=replace(request.options, vcpus=vcpus))


def build_layout(options: PlanOptions) -> Layout:
    """Return the layout with every switch applied. Raises UsageError for an unknown preset, for
    `auto`, which plan/planner.py replaces first, and for switches that contradict each other."""
    preset = find_preset(options.layout)
    if preset is None:
        raise unknown_layout(options.layout)
    return _apply_switches(preset, options)


def _apply_switches(layout: Layout, options: PlanOptions) -> Layout:
    new_layout = replace(
        layout,
        pinning=options.pinning or layout.pinning,
        siblings=options.siblings or layout.siblings,
        cells=options.cells or layout.cells,
        pcie=options.pcie or layout.pcie,
        memory=options.memory_binding or layout.memory,
    )
    if new_layout == layout:
        return layout
    _reject_contradictions(new_layout)
    return add_preset_name(new_layout)


def _reject_contradictions(layout: Layout) -> None:
    clashes = (
        (
            layout.pinning is Pinning.NONE and layout.siblings is not Siblings.KEEP,
            "siblings can only be hidden or exposed if vCPUs are pinned",
            "add --pinning one-cpu-per-core or all-cpus",
        ),
        (
            layout.pinning is Pinning.ONE_PER_CORE and layout.siblings is Siblings.EXPOSED,
            "with one CPU per core no siblings can be exposed",
            "use --pinning all-cpus",
        ),
        (
            layout.pinning is Pinning.NONE and layout.cells is GuestCells.HOST,
            "guest NUMA nodes need vCPUs that are pinned to their host nodes",
            "add --pinning one-cpu-per-core",
        ),
        (
            layout.pinning is Pinning.NODE and layout.siblings is Siblings.EXPOSED,
            "vCPUs that float over a node's CPUs have no siblings to expose",
            "use --pinning all-cpus, or hide the siblings",
        ),
        (
            layout.memory is MemoryBinding.BOUND_PER_CELL and layout.cells is not GuestCells.HOST,
            "memory is bound per guest NUMA node, but the guest has one node",
            "use --memory-binding bound, or --guest-nodes host",
        ),
        (
            layout.pcie is GuestPcie.HOST and layout.cells is not GuestCells.HOST,
            "--pcie host puts devices on the buses of guest NUMA nodes, but the guest has one node",
            "add --guest-nodes host",
        ),
    )
    for clash, message, hint in clashes:
        if clash:
            raise UsageError(f"layout: {message}", hint=hint)


def choose_huge_page_bytes(host: Host | None) -> int:
    """Return the size of <hugepages/> without a size: default_hugepagesz= of the host, else 2 MiB,
    or the smallest size of a host without 2 MiB pages: the kernel lists its default.

    Source: Documentation/admin-guide/kernel-parameters.txt.
    """
    command_line = (host.settings.kernel_command_line if host else None) or ""
    for word in command_line.split():
        key, _, size = word.partition("=")
        if key == "default_hugepagesz":
            with suppress(InputError):  # the kernel ignores such a size
                return parse_bytes(size)
    sizes = {pool.page_bytes for node in (host.nodes if host else ()) for pool in node.page_pools}
    return 2 * MIB if 2 * MIB in sizes else min(sizes, default=2 * MIB)


def request_for(guest: Vm, options: PlanOptions, host: Host | None) -> GuestRequest:
    """Make the request from a definition and the user's options, on a host (None in manual mode).

    It includes the definition's passed-through devices, and --device adds further devices; --gpus
    replaces the definition's GPUs. Raises UsageError as layout_for does, and for counts below 1;
    InputError for a KVM guest of another architecture.
    """
    # Long because options depend on each other, in this order.
    _reject_other_architecture(guest, host)
    layout = build_layout(options)
    pins = layout.pinning not in (Pinning.NONE, Pinning.NODE)
    keeps = options.siblings is Siblings.KEEP and pins
    as_document = keeps or options.document_siblings is DefinitionSiblings.ALWAYS
    exposed = guest.record is not None and guest.record.layout.siblings is Siblings.EXPOSED
    most_threads = None
    if as_document:
        layout = _copy_siblings(layout, guest, exposed=exposed)
    if guest.threads_per_core > 1 and (as_document or exposed):
        most_threads = guest.threads_per_core
    cores = host.cores if host and layout.siblings is Siblings.EXPOSED else ()
    widest = max((len(core.pus) for core in cores), default=1)
    _check_counts(options, min(widest, most_threads or widest))
    _check_page_size(options, guest)
    _check_pus(options, layout, host)
    _check_replaced(options, host)
    _check_cells(options, layout, host)
    _reject_same_name(guest, host)
    if options.keep_vcpus and layout.pinning is not Pinning.ALL_PUS:
        raise UsageError(
            f"--keep-vcpus: expected a layout that pins all CPUs, found {layout.name}",
            hint="omit it, or use an -smt layout",
        )
    guest = add_mediated(guest, host)
    _check_profile(options, host)
    documented_bdfs = {hostdev.bdf for hostdev in guest.hostdevs}
    if host is not None and options.gpu_count is not None:
        documented_bdfs = _remove_gpus(documented_bdfs, host)
    page_bytes = guest.page_bytes if options.page_bytes is None else options.page_bytes
    if page_bytes == 0:
        page_bytes = choose_huge_page_bytes(host)
    mediated = {device.bdf: device.uuid for device in guest.hostdevs if device.uuid is not None}
    mediated = {bdf: uuid for bdf, uuid in mediated.items() if bdf in documented_bdfs}
    named_devices = [resolve_device(host, name) for name in options.devices]
    named_bdfs = {device for device in named_devices if isinstance(device, Bdf)}
    for uuid in (device for device in named_devices if isinstance(device, str)):
        function = find_uuid_function(host, uuid)
        if mediated.setdefault(function, uuid) != uuid or function in named_bdfs:
            reject_second(function, [GuestHostdev(function, None)])
    devices = tuple(sorted({*documented_bdfs, *named_bdfs, *mediated}))
    _check_brought(options, devices, host)
    is_final = as_document or options.vcpus is not None or _has_final_vcpus(guest)
    keep_vcpus = layout.pinning is Pinning.ALL_PUS and (options.keep_vcpus or is_final)
    siblings = DefinitionSiblings.ALWAYS if as_document else options.document_siblings
    if not _may_weigh_siblings(guest, options, layout):
        siblings = DefinitionSiblings.IGNORED
    if options.explicit_cells:
        vcpus, memory_bytes = sum_cells(options.explicit_cells)
        options = replace(options, vcpus=vcpus, memory_bytes=memory_bytes)
        # The vCPUs of a cell include siblings.
        keep_vcpus = layout.pinning is Pinning.ALL_PUS
    return GuestRequest(
        guest=guest,
        layout=layout,
        options=options,
        page_bytes=page_bytes,
        devices=devices,
        mediated=tuple(sorted(mediated.items())),
        keep_vcpus=keep_vcpus,
        document_siblings=siblings,
        host_reserve=_choose_host_reserve(options, host),
        housekeeping_pus=_choose_housekeeping_pus(options, layout, host),
        most_threads=most_threads,
        keeps_siblings=_has_siblings(guest, layout, host),
    )


def _has_final_vcpus(guest: Vm) -> bool:
    """Return whether an -smt layout keeps the vCPUs of a definition: if they are hyper-threads
    already, shown or hidden, or homenode has tuned it, unless siblings did not fit."""
    record = guest.record
    return guest.threads_per_core > 1 or (record is not None and record.multiplied is not False)


def _has_siblings(guest: Vm, layout: Layout, host: Host | None) -> bool:
    """Return whether homenode has given a VM siblings: exposed, or hidden as they are again."""
    record = guest.record
    if record is None or record.layout.siblings is Siblings.KEEP:
        return False
    if record.layout.siblings is Siblings.EXPOSED:
        return guest.threads_per_core > 1
    is_same = record.layout.pinning is layout.pinning is Pinning.ALL_PUS
    hides = is_same and layout.siblings is Siblings.HIDDEN and record.multiplied is not False
    cores, used = () if host is None else host.cores, guest.pinned_pus
    return hides and sum(bool(core.pus & used) for core in cores) < guest.vcpus


def _copy_siblings(layout: Layout, guest: Vm, *, exposed: bool) -> Layout:
    """Return the layout with the definition's siblings, or without siblings. exposed: the
    definition had siblings before homenode tuned it."""
    if layout.pinning in (Pinning.NONE, Pinning.NODE):
        raise UsageError(
            f"--siblings keep: expected a layout that pins each vCPU, found {layout.name}",
            hint="use pin-bound, or --pinning all-cpus",
        )
    if exposed or guest.threads_per_core > 1:
        return expose_siblings(layout)
    record = guest.record
    pinning = Pinning.ONE_PER_CORE
    if record and record.multiplied is not False and record.layout.pinning is Pinning.ALL_PUS:
        pinning = Pinning.ALL_PUS  # for siblings that it could not expose
    return add_preset_name(replace(layout, pinning=pinning, siblings=Siblings.HIDDEN))


def _may_weigh_siblings(guest: Vm, options: PlanOptions, layout: Layout) -> bool:
    """Return whether siblings as in the definition may replace whole cores."""
    hides_siblings = layout.pinning is Pinning.ONE_PER_CORE
    vcpus = options.vcpus or guest.vcpus
    threads = guest.threads_per_core
    return hides_siblings and threads > 1 and vcpus % threads == 0 and not options.explicit_cells


def _check_profile(options: PlanOptions, host: Host | None) -> None:
    profile = options.gpu_profile
    if profile is None:
        return
    if options.gpu_count is None:
        raise requires("--gpu-profile", "--gpus N", "--gpus 1")
    parts = [
        part
        for gpu in (host.devices_of_kind(DeviceKind.GPU) if host else ())
        for part in gpu.parts
        if is_of_profile(part, profile)
    ]
    if any(part.is_for_vms for part in parts):
        return
    raise InputError(
        f"--gpu-profile {profile}: expected a profile of parts that VFIO can assign to a VM, found "
        f"{'parts that only serve processes of the host' if parts else 'no such part'}; the host "
        f"has {format_profiles(host) if host else 'none'}",
        hint="create vGPUs: a MIG instance or an accelerator partition goes to a VM by a vGPU only",
    )


def _check_brought(options: PlanOptions, devices: Sequence[Bdf], host: Host | None) -> None:
    """Reject options for companion NICs or NVSwitches without GPUs, or with parts of GPUs."""
    gpus = {gpu.bdf for gpu in (() if host is None else host.devices_of_kind(DeviceKind.GPU))}
    for option, is_set in (
        ("--with-nics", options.with_nics),
        ("--with-nvswitches", options.with_nvswitches),
    ):
        if is_set and options.gpu_count is None and gpus.isdisjoint(devices):
            raise UsageError(
                f"{option} requires GPUs",
                hint="--gpus N, or a definition that has GPUs",
            )
    if options.with_nvswitches and options.gpu_profile is not None:
        raise UsageError(
            "--with-nvswitches and --gpu-profile cannot be used together",
            hint="vGPUs are joined by Fabric Manager on the host, which keeps the NVSwitches",
        )


def _choose_host_reserve(options: PlanOptions, host: Host | None) -> HostReserve:
    """Return each setting from the user, else from the host's description, else the default."""
    described_reserve = (host and host.reserve) or DEFAULT_HOST_RESERVE
    reserve = options.host_reserve
    return HostReserve(
        described_reserve.cores if reserve.cores is None else reserve.cores,
        described_reserve.memory_bytes if reserve.memory_bytes is None else reserve.memory_bytes,
    )


def _choose_housekeeping_pus(options: PlanOptions, layout: Layout, host: Host | None) -> CpuSet:
    named_pus = options.housekeeping_pus | (CpuSet() if host is None else host.housekeeping_pus)
    if options.emulator_policy is EmulatorPolicy.HOUSEKEEPING:
        if not named_pus:
            raise UsageError(
                "--emulator housekeeping requires housekeeping CPUs",
                hint="--housekeeping-cpus 0,64, or housekeeping_pus under [reserve] of a host.toml",
            )
        if layout.pinning is Pinning.NONE:
            raise UsageError(f"--emulator housekeeping: layout {layout.name} pins nothing")
    return named_pus


def _check_cells(options: PlanOptions, layout: Layout, host: Host | None) -> None:
    """Reject explicit cells for flat layouts, with wrong sums, or on unknown nodes."""
    cells = options.explicit_cells
    if not cells:
        return
    if layout.cells is not GuestCells.HOST:
        raise UsageError(
            "--guest-node: expected a layout with guest NUMA nodes, found "
            f"{layout.name}, which is flat",
            hint="use pin-numa or pin-numa-pci, or add --guest-nodes host",
        )
    sums = sum_cells(cells)
    for option, value, total in (
        ("--vcpus", options.vcpus, sums[0]),
        ("--memory", options.memory_bytes, sums[1]),
    ):
        if value is not None and value != total:
            amount, value_text = (
                (str(total), str(value))
                if option == "--vcpus"
                else (format_bytes(total), format_bytes(value))
            )
            raise UsageError(
                f"{option}: expected the sum of the guest NUMA nodes, {amount}, found {value_text}",
                hint=f"omit {option}: the guest NUMA nodes set it",
            )
    named_nodes = [node for cell in cells for node in cell.host_nodes]
    duplicates = sorted({node for node in named_nodes if named_nodes.count(node) > 1})
    if duplicates:
        raise UsageError(f"--guest-node: expected each node once, found node {duplicates[0]} twice")
    if host is None:
        return
    node_indices = [node.index for node in host.nodes if node.pus]
    for node in named_nodes:
        if node not in node_indices:
            raise UsageError(
                f"--guest-node: expected a node of {host.name} with CPUs "
                f"({CpuSet(node_indices)}), found {node}"
            )
    if len(cells) > len(node_indices):
        raise UsageError(
            f"--guest-node: expected at most {len(node_indices)} guest NUMA nodes, one for each "
            f"node of {host.name} with CPUs, found {len(cells)}"
        )


def _reject_same_name(guest: Vm, host: Host | None) -> None:
    """Reject the name of a planned VM: that VM would not count, and libvirt names are unique."""
    for domain in () if host is None else host.domains:
        if domain.planned and domain.name == guest.name:
            raise UsageError(
                f"a VM named {guest.name} is planned already (--after)",
                hint="give the VM another <name> (homenode plan: --name), or omit its plan",
            )


def _check_counts(options: PlanOptions, threads: int) -> None:
    """threads: siblings per core that the guest sees, 1 = none."""
    for option, count in (
        ("--vcpus", options.vcpus),
        ("--memory", options.memory_bytes),
        ("--gpus", options.gpu_count),
        ("--max-nodes", options.max_nodes),
    ):
        if count is not None and count < 1:
            raise out_of_range(option, str(count), 1, None)
    if options.vcpus is not None and options.vcpus % threads:
        raise UsageError(
            f"--vcpus {options.vcpus}: not a multiple of the {threads} siblings of a core, which "
            "the layout exposes",
            hint=f"--vcpus {options.vcpus + -options.vcpus % threads}",
        )
    for number, cell in enumerate(options.explicit_cells):
        if not cell.vcpus or cell.memory_bytes < 1:
            raise UsageError(
                f"--guest-node: missing vCPUs or memory in cell {number}",
                hint="--guest-node vcpus=8,memory=32GiB",
            )
    cores = options.host_reserve.cores
    if cores is not None and cores < 0:
        raise out_of_range("--host-reserve cores", str(cores), 0, None)
    if not 0 <= options.spare_ports <= MAX_SPARE_PORTS:
        raise out_of_range("--spare-ports", str(options.spare_ports), 0, MAX_SPARE_PORTS)


def _check_page_size(options: PlanOptions, guest: Vm) -> None:
    """Raise UsageError for a huge page size that the guest's architecture lacks. Source:
    Documentation/admin-guide/mm/hugetlbpage.rst; on arm64 64 KiB is the smallest."""
    pages = options.page_bytes
    if pages is None:
        return
    if guest.architecture in _X86:
        is_known, sizes = pages in (2 * MIB, 1024 * MIB), "2MiB or 1GiB"
    else:
        is_known, sizes = pages >= 64 * KIB and pages.bit_count() == 1, "64KiB, 2MiB, 1GiB, ..."
    if not is_known:
        raise UsageError(
            f"--page-size: expected a size of huge pages on {guest.architecture}: {sizes}; found "
            f"{format_bytes(pages)}",
            hint="without the option memory stays backed as the definition has it",
        )


def _check_pus(options: PlanOptions, layout: Layout, host: Host | None) -> None:
    """Reject CPUs that are not online: libvirt accepts them, but the VM fails to start."""
    if options.emulator_pus is not None:
        if not options.emulator_pus:
            raise UsageError("--emulator-cpus: missing CPUS", hint="--emulator-cpus 0,64")
        if options.emulator_policy is not EmulatorPolicy.AUTO:
            raise UsageError(
                f"--emulator-cpus and --emulator {options.emulator_policy} cannot be used together"
            )
        if layout.pinning is Pinning.NONE:
            raise UsageError(f"--emulator-cpus: layout {layout.name} pins nothing")
    if host is None:
        return
    online = host.online_pus
    for option, pus in (
        ("--emulator-cpus", options.emulator_pus or CpuSet()),
        ("--reserved-cpus", options.reserved_pus),
        ("--housekeeping-cpus", options.housekeeping_pus),
    ):
        if not pus <= online:
            raise UsageError(
                f"{option}: expected online CPUs of {host.name} ({online}), found {pus - online}"
            )


def _check_replaced(options: PlanOptions, host: Host | None) -> None:
    """Reject names of unknown VMs: they would have no effect."""
    names = () if host is None else tuple(domain.name for domain in host.domains)
    unshown = [] if host is None else [gap for gap in host.gaps if gap.subject == NO_VMS]
    if options.reserve_defined and unshown:
        raise UsageError(
            f"--reserve-defined: the host's source lists no VMs: {unshown[0].reason}",
            hint="omit it, or name a capture of the host: homenode capture -o host.tar.gz",
        )
    for name in options.replaces:
        if name not in names:
            raise UsageError(
                f"--ignore-domain: expected a domain of the host "
                f"({', '.join(names) or 'no domains'}), found {name!r}"
            )


def _remove_gpus(functions: set[Bdf], host: Host) -> set[Bdf]:
    """Remove GPUs and the other functions of their cards (audio, USB-C)."""
    cards = {
        (gpu.bdf.domain, gpu.bdf.bus, gpu.bdf.device)
        for gpu in host.devices_of_kind(DeviceKind.GPU)
    }
    return {bdf for bdf in functions if (bdf.domain, bdf.bus, bdf.device) not in cards}


_RUNS_ON = {"i686": {"x86_64"}, "armv7l": {"aarch64"}}
"""Guest architectures that KVM runs on hosts of another architecture."""


def _reject_other_architecture(guest: Vm, host: Host | None) -> None:
    if host is None or host.architecture is None or guest.domain_type != "kvm":
        return
    if host.architecture not in {guest.architecture} | _RUNS_ON.get(guest.architecture, set()):
        raise InputError(
            f"domain {guest.name}: expected a guest that KVM runs on {host.name}, found "
            f"architecture {guest.architecture} on a host of {host.architecture}",
            hint="name the right host with --host, or use domain type='qemu'",
        )
