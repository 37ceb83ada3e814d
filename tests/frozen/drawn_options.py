"""Drawn answers: plans for the options of users, on hosts with GPUs, NICs and NVSwitches."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace as respec
from typing import TypeVar

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import NodeIndex
from homenode.errors import HomenodeError
from homenode.machine.pci import (
    DeviceKind,
    DeviceLink,
    GpuPart,
    LinkKind,
    PartKind,
    PciDevice,
    PciLink,
)
from homenode.machine.topology import DomainMark, Host, HostReserve, PagePool, RunningDomain
from homenode.objective import Objective
from homenode.plan.planner import plan, resolve_layout
from homenode.plan.request import request_for
from homenode.plan.stored import domain_of_plan
from homenode.units import GIB, MIB
from homenode.vm.layout import (
    PRESETS,
    GuestCells,
    GuestPcie,
    MemoryBinding,
    Pinning,
    Siblings,
)
from homenode.vm.model import GuestHostdev, GuestTopology, LayoutRecord, Vm, VmCell
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import (
    AUTO,
    Balance,
    DeviceLocality,
    EmulatorPolicy,
    MemoryMode,
    PartialReserve,
    PciGranularity,
    PlanOptions,
    Policy,
    make_cell,
)
from tests.frozen.drawn import values_text
from tests.plan.test_fabric import H100, MODULES
from tests.plan.test_many_gpus import HGX
from tests.small_hosts import DeviceSpec, NodeSpec, host_of, pinned_domain, small_guest

PROFILE = "A40-12Q"
DRIVERS = (None, "nvidia", "vfio-pci", "mlx5_core")
_T = TypeVar("_T")


def _specs(draw: random.Random) -> list[DeviceSpec]:
    """GPUs on switches of two packages, of some the NICs, and sometimes NVSwitches."""
    gpus = HGX if draw.random() < 0.4 else draw.sample(HGX, draw.randint(1, 5))
    specs = [respec(gpu, node=draw.choice((gpu.node,) * 9 + (None,))) for gpu in gpus]
    for gpu in gpus:
        bus = int(gpu.bdf[5:7], 16)
        for distance in draw.sample((-1, 1, 2, -2), draw.choice((0, 0, 1, 2))):
            switch = draw.choice((gpu.switch, gpu.switch, None))
            name = f"0000:{bus + distance:02x}:00.0"
            specs.append(DeviceSpec(name, gpu.node, DeviceKind.NIC, gpu.root, switch))
        if draw.random() < 0.2:
            audio = f"{gpu.bdf[:-1]}1"
            specs.append(DeviceSpec(audio, gpu.node, DeviceKind.AUDIO, gpu.root, gpu.switch))
    if draw.random() < 0.3:
        buses = (1, 2)[: draw.randint(1, 2)]
        specs += [DeviceSpec(f"0000:{bus:02x}:00.0", 1, DeviceKind.NVSWITCH, 9) for bus in buses]
    return list({spec.bdf: spec for spec in specs}.values())


def _devices(draw: random.Random, host: Host) -> Iterator[PciDevice]:
    """The host's functions with drivers, links, models and parts; a NIC may have functions."""
    has_drivers, has_names = draw.random() < 0.5, draw.random() < 0.5
    is_divided, model = draw.random() < 0.1, draw.choice((None, 0x2330, 0x20B2))
    modules = list(MODULES)
    for device in host.pci_devices:
        if device.kind is DeviceKind.BRIDGE:
            yield device
            continue
        driver = draw.choice(DRIVERS) if has_drivers else None
        group = draw.choice((None, device.bdf.bus, device.bdf.bus >> 1))
        device = replace(device, driver=driver, device_id=model, iommu_group=group)
        if device.kind is DeviceKind.GPU:
            module = modules.pop() if has_names and draw.random() < 0.95 else None
            parts = tuple(
                GpuPart(
                    PartKind.MEDIATED,
                    PROFILE,
                    bdf=device.bdf,
                    uuid=f"{device.bdf.bus:08x}-0000-4000-8000-{number:012x}",
                )
                for number in range(is_divided * draw.randint(0, 2))
            )
            name = H100 if has_names else None
            yield replace(device, name=name, module_id=module, parts=parts)
            continue
        if device.kind is DeviceKind.NIC:
            rate = draw.choice((16.0, 32.0, 32.0))
            link = draw.choice((None, PciLink(rate, 16, rate, 16)))
            device = replace(device, link=link)
            functions = draw.choice((0, 0, 0, 1, 3))
            for number in range(functions):
                bdf = Bdf(device.bdf.domain, device.bdf.bus, 0, number + 1)
                yield replace(device, bdf=bdf, physical_function=device.bdf)
        yield device


def _domains(draw: random.Random, host: Host, devices: Sequence[Bdf]) -> Iterator[RunningDomain]:
    """VMs that run, are shut off, copied or about to run, and have some of the devices."""
    free = draw.sample(devices, len(devices))
    for number in range(draw.choice((0, 0, 1, 2, 3))):
        first = draw.randrange(len(host.pus) - 2)
        size, node = draw.choice((0, GIB, 8 * GIB)), draw.randrange(2)
        domain = pinned_domain(
            f"{first}-{first + draw.randint(0, 1)}",
            name=draw.choice(("vm", "train", "domain/1", f"other{number}")),
            running=draw.random() < 0.8,
            memory_bytes=size,
            memory_by_node=draw.choice(((), ((node, size),))),
            emulator=draw.choice((None, "0", f"0-{len(host.pus) - 1}")),
            devices=tuple(map(str, free[number : number + draw.randint(0, 1)])),
            page_bytes=draw.choice((None, 2 * MIB)),
        )
        yield replace(
            domain,
            planned=draw.random() < 0.1,
            mark=draw.choice((None, None, DomainMark.OWN, DomainMark.COPY)),
        )


def _host(draw: random.Random) -> Host:
    cores, threads = draw.choice((2, 3, 4)), draw.choice((1, 2, 2, 2, 4))
    pools = draw.choice(((), (PagePool(2 * MIB, 4096, 4096),), (PagePool(GIB, 6, 5),)))
    nodes = [
        NodeSpec(
            ((threads,) * cores,) * draw.choice((1, 1, 2)),
            package,
            memory_bytes=draw.choice((16, 32)) * GIB,
            free_bytes=draw.choice((None, 12 * GIB)),
            pools=pools,
        )
        for package in range(2)
        for _ in range(draw.choice((1, 1, 2)))
    ]
    host = host_of(nodes, devices=_specs(draw))
    host = replace(host, pci_devices=tuple(sorted(_devices(draw, host), key=lambda d: d.bdf)))
    gpus = [device.bdf for device in host.devices_of_kind(DeviceKind.GPU)]
    switches = [device.bdf for device in host.devices_of_kind(DeviceKind.NVSWITCH)]
    if switches and draw.random() < 0.5:
        pairs = [(gpu, switches[i * len(switches) // len(gpus)]) for i, gpu in enumerate(gpus)]
        host = replace(host, links=tuple(DeviceLink(LinkKind.NVLINK, a, b) for a, b in pairs))
    elif len(gpus) > 1 and draw.random() < 0.2:
        pairs = list(zip(gpus[::2], gpus[1::2], strict=False))
        host = replace(host, links=tuple(DeviceLink(LinkKind.NVLINK, a, b) for a, b in pairs))
    passed = [d.bdf for d in host.pci_devices if d.kind is not DeviceKind.BRIDGE]
    reserve = draw.choice((host.reserve, host.reserve, HostReserve(2, GIB)))
    return replace(host, domains=tuple(_domains(draw, host, passed)), reserve=reserve)


def _guest(draw: random.Random, host: Host) -> Vm:
    vcpus = draw.choice((1, 2, 3, 4, 4, 6, 8))
    shown = [None, *(GuestTopology(1, 1, vcpus // n, n) for n in (1, 2, 2) if vcpus % n == 0)]
    devices = [d.bdf for d in host.pci_devices if d.kind is not DeviceKind.BRIDGE]
    own = draw.sample(devices, min(len(devices), draw.choice((0, 0, 0, 1, 2))))
    layout = PRESETS[draw.choice(sorted(PRESETS))]
    return replace(
        small_guest(vcpus, draw.choice((2, 4, 8)) * GIB),
        cpu_topology=draw.choice(shown),
        hostdevs=tuple(GuestHostdev(bdf, None) for bdf in sorted(own)),
        page_bytes=draw.choice((None, None, None, GIB)),
        machine=draw.choice(("q35", "q35", "q35", "pc")),
        launch_security=draw.choice((None,) * 9 + ("tdx",)),
        record=draw.choice((None, None, LayoutRecord(layout=layout, host=None))),
        iothread_ids=draw.choice(((), (1,))),
    )


def _options(draw: random.Random, host: Host, guest: Vm) -> PlanOptions:
    """A few options, of which one in ten is a switch of the layout."""
    gpus = len(host.devices_of_kind(DeviceKind.GPU))
    switches = host.devices_of_kind(DeviceKind.NVSWITCH)
    count = draw.choice((None, 1, 2, gpus, gpus)) if draw.random() < 0.7 else None
    has_gpus = count is not None
    is_divided = any(device.parts for device in host.pci_devices)
    layout = draw.choice((AUTO, AUTO, *sorted(PRESETS)))

    def rarely(*values: _T) -> _T | None:
        return draw.choice(values) if draw.random() < 0.1 else None

    cells: tuple[VmCell, ...] = ()
    if layout.startswith("pin-numa") and draw.random() < 0.1:
        node = draw.choice((None, NodeIndex(0)))
        cells = (make_cell(2, GIB, node), make_cell(2, GIB, None))
    return PlanOptions(
        layout=layout,
        objective=rarely(*Objective) if layout == AUTO else None,
        vcpus=None if cells else rarely(2, 4, 12),
        page_bytes=rarely(2 * MIB, GIB),
        devices=("gpu0",) if draw.random() < 0.1 and not has_gpus else (),
        gpu_count=count,
        gpu_profile=PROFILE if has_gpus and is_divided and draw.random() < 0.6 else None,
        with_nics=has_gpus and draw.random() < 0.5,
        with_nvswitches=has_gpus and draw.random() < (0.6 if switches else 0.01),
        policy=rarely(*Policy) or Policy.CORES_FIRST,
        balance=rarely(*Balance),
        max_nodes=rarely(1, 2),
        device_locality=rarely(*DeviceLocality) or DeviceLocality.PREFER,
        explicit_cells=cells,
        replaces=("train",) if any(d.name == "train" for d in host.domains) else (),
        keep_vcpus="smt" in layout and draw.random() < 0.3,
        without_nvlink=draw.random() < 0.1,
        unequal_cells=draw.random() < 0.2,
        memory_mode=rarely(*MemoryMode) or MemoryMode.STRICT,
        reserve_defined=draw.random() < 0.2,
        host_reserve=PartialReserve(rarely(0, 1, 2), rarely(0, GIB)),
        emulator_policy=rarely(*EmulatorPolicy) or EmulatorPolicy.AUTO,
        pinning=rarely(*Pinning),
        siblings=rarely(*Siblings),
        cells=rarely(*GuestCells),
        pcie=rarely(*GuestPcie),
        memory_binding=rarely(*MemoryBinding),
        pci_granularity=rarely(*PciGranularity),
        spare_ports=rarely(1, 3, 17) or 0,
    )


def asked(number: int) -> str:
    """The layout, the plan or the error that options lead to."""
    draw = random.Random(number)
    host = _host(draw)
    guest = _guest(draw, host)
    try:
        resolved = resolve_layout(guest, _options(draw, host, guest), host)
        answer = plan(host, request_for(guest, resolved.options, host))
    except Unplannable as error:
        return values_text([error.message, error.hint, error.rejections])
    except HomenodeError as error:
        return values_text([str(error.exit_code), error.message, error.hint])
    return values_text([resolved, replace(answer, host_fingerprint=""), domain_of_plan(answer)])
