"""Flavour: a size of VM, and the planner's request for it on a host."""

from typing import Annotated

from msgspec import Meta, Struct, field, structs

from homenode.cluster.pool.model import passable_gpus
from homenode.errors import InputError
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host, NumaNode
from homenode.plan.memory import LEAST_RESERVE_BYTES
from homenode.plan.request import GuestRequest, request_for
from homenode.toml_text import Size, TomlTable, VmSizeTable, decode_toml
from homenode.units import GIB, MIB
from homenode.vm.gpu_parts import is_divided, parts_at, same_profile
from homenode.vm.layout import PRESETS, Pinning
from homenode.vm.model import Vm
from homenode.vm.plan_options import PlanOptions

DEFAULT_LAYOUT = "pin-numa-pci"
"""Of flavours that name none: the guest sees where each GPU is."""

DEFAULT_GPUS = (1, 2, 4, 8)
_MOST = 1 << 16


class Flavour(Struct, frozen=True, kw_only=True, cache_hash=True):
    """A size of VM.

    options: its size as well; vCPUs or memory that neither they nor the guest's document say are
    the share of the host's that belongs to so many of its GPUs or parts of GPUs. gpu_model: a part
    of the GPUs' name, in any case; None = any. value: what placing one VM is worth; None = its
    number of GPUs, or 1 without GPUs.
    """

    name: str
    gpu_model: str | None = None
    value: int | None = None
    options: PlanOptions = field(default_factory=lambda: PlanOptions(layout=DEFAULT_LAYOUT))
    guest: Vm | None = None

    @property
    def gpus(self) -> int:
        return self.options.gpu_count or 0

    @property
    def worth(self) -> int:
        return self.value if self.value is not None else max(1, self.gpus)

    def request(self, host: Host, name: str | None = None) -> GuestRequest:
        """The request for one VM on this host. name: the VM's; None = the flavour's. Raises
        InputError where the host has no GPUs to take a share of, and as request_for does."""
        options = self.options
        if self.guest is None and (options.vcpus is None or options.memory_bytes is None):
            vcpus, memory_bytes = share_of(host, self.gpus, options.gpu_profile)
            options = structs.replace(
                options,
                vcpus=options.vcpus or vcpus,
                memory_bytes=options.memory_bytes or memory_bytes,
            )
        asked = self.guest or _blank_guest(
            self.name,
            options.vcpus or 1,
            options.memory_bytes or GIB,
            host.architecture or "x86_64",
        )
        if name is not None:
            asked = structs.replace(asked, name=name)
        return request_for(asked, options, host)

    def takes(self, gpu: PciDevice, host: Host) -> bool:
        """Whether a GPU function is of the model and profile asked for."""
        whole = host.device_at.get(gpu.physical_function or gpu.bdf, gpu)
        names = ((gpu.name or "") + (whole.name or "")).casefold()
        if self.gpu_model is not None and self.gpu_model.casefold() not in names:
            return False
        return bool(units_of(gpu, host, self.options.gpu_profile))


def units_of(gpu: PciDevice, host: Host, profile: str | None) -> int:
    """What VMs can get of a GPU function: itself, or so many parts of the profile."""
    parts = parts_at(host.device_at, gpu.bdf)
    if profile is not None:
        return sum(same_profile(part, profile) for part in parts)
    if gpu.physical_function is None and not is_divided(gpu):
        return 1
    return sum(part.profile is None for part in parts)


def share_of(host: Host, gpus: int, profile: str | None = None) -> tuple[int, int]:
    """(vCPUs, bytes) that belong to so many GPUs, or parts of a profile, of a host: what each GPU's
    share is on the node with the least for each, without the host's share and a core for each VM's
    emulator. Whole GiB from 1 GiB.

    Raises InputError for a host without GPUs or too small to share out.
    """
    by_node: dict[object, int] = {}
    for gpu in passable_gpus(host):
        if units := units_of(gpu, host, profile):
            by_node[gpu.node] = by_node.get(gpu.node, 0) + units
    every = sum(by_node.values())
    if not every:
        raise InputError("the host has no GPUs, so that no share of it belongs to one")
    if None in by_node or any(host.node(node) is None for node in by_node):  # type: ignore[arg-type]
        cores = len(host.cores) - 1
        memory = sum(_for_vms(node) for node in host.nodes if node.pus)
        shares = [(cores // every, memory // every)]
    else:
        shares = []
        for node in host.nodes:
            count = by_node.get(node.index, 0)
            if count:
                own = sum(core.pus <= node.pus for core in host.cores)
                shares.append(((own - 1) // count, _for_vms(node) // count))
    cores = min(one for one, _ in shares)
    cores -= cores > 2
    memory = min(size for _, size in shares) * 63 // 64 - (256 + 16 * max(1, cores)) * MIB
    step = 8 * GIB if memory > 64 * GIB else GIB if memory > 4 * GIB else 128 * MIB
    if cores < 1 or memory < step:
        raise InputError("the host has too few cores or too little memory for each of its GPUs")
    return cores * max(1, gpus), memory // step * step * max(1, gpus)


def _for_vms(node: NumaNode) -> int:
    """Bytes of a node without what the host keeps."""
    size = node.memory_bytes or 0
    return max(0, size - max(LEAST_RESERVE_BYTES, size // 50))


def default_flavours() -> tuple[Flavour, ...]:
    """1, 2, 4 and 8 GPUs, each with its share of the host."""
    return tuple(
        Flavour(name=f"gpu{count}", options=PlanOptions(DEFAULT_LAYOUT, gpu_count=count))
        for count in DEFAULT_GPUS
    )


def _blank_guest(name: str, vcpus: int, memory_bytes: int, architecture: str) -> Vm:
    return Vm(
        name=name,
        architecture=architecture,
        machine="virt" if architecture == "aarch64" else "q35",
        vcpus=vcpus,
        memory_bytes=memory_bytes,
        cpu_mode="host-passthrough",
    )


Text = Annotated[
    str,
    Meta(
        pattern=r"\A(?=.*\S)[^\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]{1,256}\Z",
        extra={"expected": "a text of one line"},
    ),
]


class SizeTable(VmSizeTable, kw_only=True):
    """A size of VM, but for its name."""

    gpus: Annotated[int, Meta(ge=0, le=_MOST)] = 0
    memory: Size | None = None
    gpu_model: Text | None = None
    gpu_profile: Text | None = None
    value: Annotated[int, Meta(ge=0, le=_MOST)] | None = None
    layout: Text = DEFAULT_LAYOUT

    def named(self, name: str, guest: Vm | None = None) -> Flavour:
        """The flavour. guest: the VM of the document that the table names; it has the sizes where
        the table has none. Raises InputError."""
        page, profile = self.page_size, self.gpu_profile
        if self.layout not in PRESETS:
            raise self.refusal("layout", f"one of {', '.join(PRESETS)}", self.layout)
        if self.memory == 0:
            raise self.refusal("memory", Size.EXPECTED, 0)
        if guest is None and not self.gpus and (self.vcpus is None or self.memory is None):
            missing = "memory" if self.memory is None else "vcpus"
            raise self.refusal(missing, "a value: a VM without GPUs has no share of a host", None)
        if profile is not None and not self.gpus:
            raise self.refusal("gpus", "how many parts of the profile", self.gpus)
        if page is not None and (page < 4096 or page.bit_count() != 1):
            raise self.refusal("page_size", "a power of two, such as 2MiB or 1GiB", int(page))
        return Flavour(
            name=name,
            gpu_model=self.gpu_model,
            value=self.value,
            options=PlanOptions(
                layout=self.layout,
                vcpus=self.vcpus,
                memory_bytes=None if self.memory is None else int(self.memory),
                page_bytes=None if page is None else int(page),
                gpu_count=self.gpus or None,
                gpu_profile=profile,
            ),
            guest=guest,
        )


class FlavourTable(SizeTable, kw_only=True):
    name: Text


Format = Annotated[int, Meta(ge=1, le=1, extra={"expected": "1 (see docs/formats/pool.md)"})]


class _FlavoursFile(TomlTable, kw_only=True):
    format: Format
    flavour: Annotated[
        tuple[FlavourTable, ...],
        Meta(min_length=1, max_length=64, extra={"expected": "1 to 64 tables [[flavour]]"}),
    ]


def parse_flavours(text: str, source: str) -> tuple[Flavour, ...]:
    """The flavours of a flavours.toml, in its order. Raises InputError with file, table and key."""
    tables = decode_toml(text, _FlavoursFile, source).flavour
    names: set[str] = set()
    for table in tables:
        if table.name in names:
            raise table.refusal("name", "a name that no other flavour has", table.name)
        names.add(table.name)
    flavours = tuple(table.named(table.name) for table in tables)
    for table in tables:
        if not table.gpus and PRESETS[table.layout].pinning is Pinning.NONE:
            # Nothing of a host is allocated to such a VM, so no number of them is the last to fit.
            expected = "a layout that pins vCPUs, for a flavour without GPUs"
            raise table.refusal("layout", expected, table.layout)
    return flavours
