"""For each finding of a device's health a machine that has it and one that nearly has it."""

from collections.abc import Callable

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.pci import DeviceKind, LinkKind, PciBar, PciDevice, PciLink, PciRegisters
from homenode.machine.topology import FrequencyLimit, Host
from homenode.units import GIB, MIB
from tests.doctor_cases import (
    DESKTOP,
    GPU_4080,
    HGX,
    Case,
    changed,
    of_host,
    settings,
)
from tests.doctor_domains import gpus, host

GPU = gpus(HGX, 8)[5]


def is_one(device: PciDevice) -> bool:
    return device.bdf == GPU


def with_port(there: Host, of: tuple[Bdf, ...], link: PciLink) -> Host:
    """The host with another link on the ports right above some functions, and on those."""
    ports = {there.bridges_above(bdf)[0].bdf for bdf in of}
    current = replace(link, max_gt_per_s=32.0, max_width=16)
    return changed(
        changed(there, lambda d: d.bdf in ports, link=link), lambda d: d.bdf in of, link=current
    )


def with_bars(there: Host, which: Callable[[PciDevice], bool], size: int) -> Host:
    bars = (PciBar(0, 16 * MIB, True, True), PciBar(2, size, True, True))
    return changed(there, which, bars=bars)


def without_one(kind: DeviceKind) -> Host:
    there = host(HGX)
    gone = there.devices_of_kind(kind)[1].bdf
    return replace(there, pci_devices=tuple(d for d in there.pci_devices if d.bdf != gone))


def with_nvlinks(there: Host, gpu: Bdf, count: int) -> Host:
    return replace(
        there,
        links=tuple(
            replace(link, count=count)
            if link.kind is LinkKind.NVLINK and gpu in (link.a, link.b)
            else link
            for link in there.links
        ),
    )


def with_node_memory(share: float) -> Host:
    there = host(HGX)
    first, *others = there.nodes
    less = replace(first, memory_bytes=int((first.memory_bytes or 0) * share))
    return replace(there, nodes=(less, *others))


def with_half_a_cache(there: Host) -> Host:
    first, *others = there.llcs
    return replace(there, llcs=(replace(first, size_bytes=(first.size_bytes or 0) // 2), *others))


def _clocks(*khz: int) -> Host:
    there = host(HGX)
    limits = [FrequencyLimit(k, k, p.pus) for k, p in zip(khz, there.packages, strict=True)]
    return settings(there, frequency_limits=tuple(limits))


def _capped(khz: int) -> Host:
    limit = FrequencyLimit(khz, 6_000_000, CpuSet(range(32)))
    return settings(host(DESKTOP), frequency_limits=(limit,))


_X8 = PciLink(32.0, 8, 32.0, 8)

HEALTH_CASES: dict[str, Case] = {
    "device-odd": Case(
        "hgx-h100 with one GPU on a port for x8",
        lambda: of_host(with_port(host(HGX), (GPU,), _X8)),
        lambda: of_host(with_port(host(HGX), tuple(gpus(HGX, 8)), _X8)),
    ),
    "bar-unassigned": Case(
        "hgx-h100 with BAR 2 of one GPU without an address",
        lambda: of_host(changed(host(HGX), is_one, registers=PciRegisters(unplaced_bars=(2,)))),
        # The same of a BAR of its virtual functions
        lambda: of_host(changed(host(HGX), is_one, registers=PciRegisters())),
    ),
    "bar-small": Case(
        "hgx-h100 with a BAR of 256 MiB on one GPU",
        lambda: of_host(with_bars(host(HGX), is_one, 256 * MIB)),
        # rtx4080-i9-14900k with a BAR of 256 MiB, which such cards have without Resizable BAR
        lambda: of_host(
            changed(
                with_bars(host(DESKTOP), lambda d: d.bdf == GPU_4080, 256 * MIB),
                lambda d: d.bdf == GPU_4080,
                class_code=0x030000,
                registers=PciRegisters(largest_bars=((1, 16 * GIB),)),
            )
        ),
    ),
    "board-incomplete": Case(
        "hgx-h100 with 3 of its NVSwitches",
        lambda: of_host(without_one(DeviceKind.NVSWITCH)),
        lambda: of_host(host(HGX)),
    ),
    "clock-unequal": Case(
        "hgx-h100 with 2 GHz at most on package 1",
        lambda: of_host(_clocks(3_800_000, 2_000_000)),
        lambda: of_host(_clocks(3_800_000, 3_800_000)),
    ),
    "llc-unequal": Case(
        "hgx-h100 with half a cache on package 0",
        lambda: of_host(with_half_a_cache(host(HGX))),
        lambda: of_host(host(HGX)),
    ),
    "distances-asymmetric": Case(
        "hgx-h100 with 32 one way",
        lambda: of_host(replace(host(HGX), distances=((10, 32), (21, 10)))),
        lambda: of_host(host(HGX)),
    ),
    "nvlinks-few": Case(
        "hgx-h100 with 12 NVLinks of one GPU",
        lambda: of_host(with_nvlinks(host(HGX), GPU, 12)),
        lambda: of_host(with_nvlinks(host(HGX), GPU, 18)),
    ),
    "node-memory-unequal": Case(
        "hgx-h100 with one sixteenth less on node 0",
        lambda: of_host(with_node_memory(15 / 16)),
        lambda: of_host(with_node_memory(0.98)),
    ),
    "frequency-capped": Case(
        "rtx4080-i9-14900k with all PUs capped at 2000 MHz of 6000",
        lambda: of_host(_capped(2_000_000)),
        lambda: of_host(_capped(6_000_000)),
    ),
    "turbo-off": Case(
        "hgx-h100 with no_turbo 1",
        lambda: of_host(settings(host(HGX), turbo="off")),
        lambda: of_host(settings(host(HGX), turbo="on")),
    ),
    "pus-offline": Case(
        "x86-2p2n8c16t-offline-pus",
        lambda: of_host(host("x86-2p2n8c16t-offline-pus")),
        lambda: of_host(host("x86-2p2n16c16t-smt-off")),
    ),
}
