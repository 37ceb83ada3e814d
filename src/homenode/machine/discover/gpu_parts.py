"""GPU parts: virtual functions, mediated devices, MIG instances and AMD's partitions of each GPU.

Where a part can be known from several sources, sysfs decides what is there and the vendor's tool
what it is called. A virtual function that could carry a vGPU and carries none is no part: nothing
can be passed through of it.

Source: Documentation/driver-api/vfio-mediated-device.rst; NVIDIA vGPU user guide (`nvidia/` below
a virtual function, since vGPU 17); the amdgpu driver's current_compute_partition.
"""

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.discover.device_kinds import AMD
from homenode.machine.discover.readings import read_lines, read_word
from homenode.machine.pci import DeviceKind, GpuPart, PartKind, PciDevice, is_uuid, nominal_bytes
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools import amd_smi, nvidia_smi
from homenode.machine.tools.nvidia_smi import NvidiaGpu
from homenode.units import MIB

_PCI = "/sys/bus/pci/devices"
_MEDIATED = "/sys/bus/mdev/devices"
_MEDIATED_BUS = "/sys/class/mdev_bus"

_FRAMEBUFFER = re.compile(r"framebuffer=(\d{1,7})M(?:,|\Z)", re.ASCII)
_TYPE_NAME = re.compile(r"\s*(\d{1,6})\s*:\s*(\S.{0,79})", re.ASCII)

_PARTITIONS_OF_MODE = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4, "CPX": 8}
_MI300A = 0x74A0
"""Six compute dies; every other GPU with partitions has eight."""


def partition_count(mode: str, device_id: int | None) -> int:
    """Accelerator partitions of an AMD GPU in a mode; 0 for a mode that is not known.

    Source: ROCm documentation, "GPU partitioning".
    """
    return 6 if (mode, device_id) == ("CPX", _MI300A) else _PARTITIONS_OF_MODE.get(mode, 0)


def with_parts(
    snapshot: Snapshot, devices: tuple[PciDevice, ...], queried: Mapping[Bdf, NvidiaGpu]
) -> tuple[tuple[PciDevice, ...], tuple[Gap, ...]]:
    """The functions, GPUs with their parts. queried: GPUs of nvidia-smi in its order."""
    gpus = {
        device.bdf: device
        for device in devices
        if device.kind is DeviceKind.GPU and device.physical_function is None
    }
    if not gpus:
        return devices, ()
    found = _Found({bdf: [] for bdf in gpus}, {}, {})
    _mediated(snapshot, devices, found)
    _virtual_functions(snapshot, devices, found)
    _mig(snapshot, queried, found)
    _amd(snapshot, gpus, found)
    divided = tuple(
        replace(
            device,
            parts=tuple(found.parts[device.bdf]),
            partition_mode=found.mode.get(device.bdf),
            memory_partition_mode=found.memory_mode.get(device.bdf),
        )
        if device.bdf in gpus
        else device
        for device in devices
    )
    return divided, tuple(found.gaps)


class _Found(Struct, frozen=True):
    """Parts and modes by the address of the GPU; carriers: functions with mediated devices."""

    parts: dict[Bdf, list[GpuPart]]
    mode: dict[Bdf, str]
    memory_mode: dict[Bdf, str]
    carriers: set[Bdf] = field(default_factory=set)
    gaps: list[Gap] = field(default_factory=list)


def _mediated(snapshot: Snapshot, devices: tuple[PciDevice, ...], found: _Found) -> None:
    physical_of = {device.bdf: device.physical_function or device.bdf for device in devices}
    for name in snapshot.list(_MEDIATED_BUS) or ():
        bdf = _bdf(name)
        if bdf is not None:
            found.carriers.add(bdf)
    for uuid in snapshot.list(_MEDIATED) or ():
        real = snapshot.real_path(f"{_MEDIATED}/{uuid}")
        function = None if real is None else _bdf(real.rpartition("/")[0].rpartition("/")[2])
        if not is_uuid(uuid) or function is None:
            reason = f"{_MEDIATED} gives no PCI function that it is on"
            found.gaps.append(Gap(f"mediated device {uuid[:60]!r}", reason))
            continue
        found.carriers.add(function)
        parts = found.parts.get(physical_of.get(function, function))
        if parts is None:
            continue  # of no GPU: a crypto adapter, say
        kind = f"{_MEDIATED}/{uuid}/mdev_type"
        profile = read_word(snapshot, f"{kind}/name") or _link_name(snapshot, kind)
        size = _FRAMEBUFFER.search(read_word(snapshot, f"{kind}/description") or "")
        memory = nominal_bytes(profile) if size is None else int(size[1]) * MIB
        parts.append(GpuPart(PartKind.MEDIATED, profile, memory, function, uuid))


def _virtual_functions(snapshot: Snapshot, devices: tuple[PciDevice, ...], found: _Found) -> None:
    virtual = [device for device in devices if device.physical_function in found.parts]
    names: dict[tuple[Bdf | None, str], str] = {}
    for device in virtual:
        for line in read_lines(snapshot, f"{_PCI}/{device.bdf}/nvidia/creatable_vgpu_types"):
            match = _TYPE_NAME.fullmatch(line)
            if match is not None:
                names[device.physical_function, match[1]] = match[2].strip()
    for device in virtual:
        if device.bdf in found.carriers or device.physical_function is None:
            continue
        number = read_word(snapshot, f"{_PCI}/{device.bdf}/nvidia/current_vgpu_type")
        if number == "0":
            continue
        profile = None
        if number is not None:
            profile = names.get((device.physical_function, number), f"nvidia-{number[:6]}")
        part = GpuPart(PartKind.VIRTUAL_FUNCTION, profile, nominal_bytes(profile), device.bdf)
        found.parts[device.physical_function].append(part)


def _mig(snapshot: Snapshot, queried: Mapping[Bdf, NvidiaGpu], found: _Found) -> None:
    """GPU instances: their numbers and profiles by `mig -lgi`; without it (it needs root) those
    that hold a compute instance, which `-q -x` and `-L` list."""
    divided = {n: bdf for n, bdf in enumerate(queried) if queried[bdf].mig and bdf in found.parts}
    for bdf in divided.values():
        found.mode[bdf] = "mig"
    if not divided:
        return
    try:
        instances = nvidia_smi.parse_instances(snapshot.command_output("nvidia-smi-mig") or "")
        listed = nvidia_smi.parse_list(snapshot.command_output("nvidia-smi-list") or "")
    except ParseError as error:
        found.gaps.append(Gap("MIG instances", str(error)))
        return
    by_number = {(one.gpu, one.device): one for one in listed}
    for gpu, bdf in divided.items():
        profiles = {one.number: one.profile for one in instances if one.gpu == gpu}
        rows = queried[bdf].mig_devices
        memory = {row.instance: row.memory_bytes for row in rows}
        uuids: dict[int, str | None] = {}
        for row in rows:
            device = by_number.get((gpu, row.index))
            if device is not None:
                # "1c.3g.40gb" is one compute slice of a GPU instance 3g.40gb.
                profiles.setdefault(row.instance, device.profile.rpartition("c.")[2])
                uuids[row.instance] = None if row.instance in uuids else device.uuid
        for number in sorted({*profiles, *memory}):
            profile = profiles.get(number)
            size = memory.get(number) or nominal_bytes(profile)
            uuid = uuids.get(number)
            found.parts[bdf].append(GpuPart(PartKind.MIG, profile, size, uuid=uuid, number=number))


def _amd(snapshot: Snapshot, gpus: Mapping[Bdf, PciDevice], found: _Found) -> None:
    amd = [gpu for gpu in gpus.values() if gpu.vendor_id == AMD]
    counts = dict(_amd_counts(snapshot, amd, found)) if amd else {}
    for gpu in amd:
        mode = _word(snapshot, gpu.bdf, "current_compute_partition") or found.mode.get(gpu.bdf)
        memory = _word(snapshot, gpu.bdf, "current_memory_partition")
        if memory is not None:
            found.memory_mode[gpu.bdf] = memory
        if mode is None:
            continue
        found.mode[gpu.bdf] = mode
        count = counts.get(gpu.bdf) or partition_count(mode, gpu.device_id)
        if not count:
            reason = f"mode {mode!r} is not known here, and amd-smi partition lists none"
            found.gaps.append(Gap(f"partitions of {gpu.bdf}", reason))
        if count > 1:
            found.parts[gpu.bdf] += [
                GpuPart(PartKind.PARTITION, mode, number=number) for number in range(count)
            ]


def _amd_counts(
    snapshot: Snapshot, gpus: list[PciDevice], found: _Found
) -> Iterator[tuple[Bdf, int]]:
    """Partitions of each GPU as amd-smi counts them; modes that it prints are kept."""
    text = snapshot.command_output("amd-smi-partition")
    if text is None:
        return
    try:
        rows = amd_smi.parse_partitions(text)
        topology = snapshot.command_output("amd-smi-topology")
        addresses = () if topology is None else amd_smi.parse_topology(topology).bdf_of_gpu
    except ParseError as error:
        found.gaps.append(Gap("partitions of AMD GPUs", str(error)))
        return
    known = {gpu.bdf for gpu in gpus}
    by_number = {
        number: Bdf(bdf.domain, bdf.bus, bdf.device, 0) if bdf not in known else bdf
        for number, bdf in addresses
    }
    if not by_number and len(rows) == len(gpus):
        by_number = {row.number: gpu.bdf for row, gpu in zip(rows, gpus, strict=True)}
    for row in rows:
        bdf = by_number.get(row.number)
        if bdf not in known or bdf is None:
            reason = f"amd-smi partition has GPU {row.number}, whose address is not known"
            found.gaps.append(Gap("partitions of AMD GPUs", reason))
            continue
        if row.compute is not None:
            found.mode.setdefault(bdf, row.compute)
            yield bdf, row.count
        if row.memory is not None:
            found.memory_mode.setdefault(bdf, row.memory)


def _word(snapshot: Snapshot, bdf: Bdf, file: str) -> str | None:
    word = read_word(snapshot, f"{_PCI}/{bdf}/{file}")
    return word if word and word.isascii() and word.isalnum() and word != "UNKNOWN" else None


def _link_name(snapshot: Snapshot, path: str) -> str | None:
    target = snapshot.read_link(path)
    return None if target is None else target.rstrip("/").rpartition("/")[2] or None


def _bdf(name: str) -> Bdf | None:
    try:
        return Bdf.parse(name)
    except ParseError:
        return None
