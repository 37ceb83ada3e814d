"""For each finding of a device's health a machine that has it and one that nearly has it."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.discover.system import read_parts
from homenode.machine.pci import DeviceKind, LinkKind, PciBar, PciDevice, PciLink, PciRegisters
from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.machine.topology import FrequencyLimit, Host, MachinePart
from homenode.units import GIB, MIB
from tests.doctor_cases import (
    DESKTOP,
    GPU_4080,
    HGX,
    Case,
    case,
    changed,
    of_host,
    settings,
)
from tests.doctor_domains import gpus, host

GPU = gpus(HGX, 8)[5]


def is_one(device: PciDevice) -> bool:
    return device.bdf == GPU


def with_registers(
    there: Host, which: Callable[[PciDevice], bool], fields: dict[str, Any], **others: Any
) -> Host:
    """The host with the registers of a sound GPU everywhere, but for some functions.

    others: fields of those functions themselves."""
    sound = PciRegisters(
        memory=True,
        bus_master=True,
        max_payload_bytes=256,
        max_read_request_bytes=4096,
        relaxed_ordering=True,
        extended_tags=True,
        ten_bit_tags=True,
        aspm="Disabled",
        uncorrected=(),
    )
    all_sound = changed(there, lambda d: True, registers=sound)
    return changed(all_sound, which, registers=replace(sound, **fields), **others)


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


def with_microcode(second: str) -> Host:
    there = host(HGX)
    parts = (
        MachinePart("PU", str(pu), (("cpuinfo/microcode", text),))
        for package, text in zip(there.packages, ("0x2b000603", second), strict=True)
        for pu in package.pus
    )
    return replace(there, parts=tuple(parts))


def with_parts(*parts: MachinePart) -> Host:
    return replace(host(HGX), parts=parts)


def modules(*of_packages: int) -> list[MachinePart]:
    size = (("Size", "64 GB"),)
    return [
        MachinePart("memory module", f"CPU{package}_DIMM_{letter}1", size)
        for package, count in enumerate(of_packages)
        for letter in "ABCDEFGH"[:count]
    ]


def said(xid: str) -> tuple[MachinePart, ...]:
    """What is read of a kernel's log."""
    text = f"[   81.5] NVRM: Xid (PCI:{str(GPU)[:-2]}): {xid}\n"
    log = MemorySnapshot("log", {}, {}, {"dmesg": text})
    return tuple(part for part in read_parts(log) if part.group == "kernel log")


def with_half_a_cache(there: Host) -> Host:
    first, *others = there.llcs
    return replace(there, llcs=(replace(first, size_bytes=(first.size_bytes or 0) // 2), *others))


def _clocks(*khz: int) -> Host:
    there = host(HGX)
    limits = [FrequencyLimit(k, k, p.pus) for k, p in zip(khz, there.packages, strict=True)]
    return settings(there, frequency_limits=tuple(limits))


def stating(kind: DeviceKind, **states: str) -> Host:
    """A host with one device of a kind, which says this of itself; "__" is a slash."""
    there = host(HGX)
    one = there.devices_of_kind(kind)[0]
    pairs = tuple((name.replace("__", "/"), value) for name, value in states.items())
    stated = replace(one, driver_states=(), states=pairs)
    return replace(there, pci_devices=(stated,), links=())


GPUS, NICS, DRIVES = DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVME
REMAPPED, SLOWED = (
    "remapped_rows__remapped_row_failure",
    "clocks_event_reasons__clocks_event_reason",
)
LIMIT, DEFAULT = (
    "gpu_power_readings__current_power_limit",
    "gpu_power_readings__default_power_limit",
)
MODES = "ethtool__settings__Supported link modes"
SPARE = "nvme__smart log__available_spare"


def _capped(khz: int) -> Host:
    limit = FrequencyLimit(khz, 6_000_000, CpuSet(range(32)))
    return settings(host(DESKTOP), frequency_limits=(limit,))


_X8 = PciLink(32.0, 8, 32.0, 8)

HEALTH_CASES: dict[str, Case] = {
    "device-odd": case(
        "hgx-h100 with one GPU on a port for x8",
        lambda: of_host(with_port(host(HGX), (GPU,), _X8)),
        "hgx-h100 with all GPUs on ports for x8",
        lambda: of_host(with_port(host(HGX), tuple(gpus(HGX, 8)), _X8)),
    ),
    "part-odd": case(
        "hgx-h100 with another microcode on its second package",
        lambda: of_host(with_microcode("0x2b000590")),
        "hgx-h100 with the same on both",
        lambda: of_host(with_microcode("0x2b000603")),
    ),
    "parts-uneven": case(
        "hgx-h100 with 15 memory modules of 16",
        lambda: of_host(with_parts(*modules(7, 8))),
        "hgx-h100 with 16",
        lambda: of_host(with_parts(*modules(8, 8))),
    ),
    "kernel-error": case(
        "hgx-h100 with Xid 79 of one GPU in its kernel's log",
        lambda: of_host(with_parts(*said("79, pid=4411, GPU has fallen off the bus."))),
        "the same with Xid 31, a program's",
        lambda: of_host(with_parts(*said("31, pid=4411, name=python3, MMU Fault"))),
    ),
    "bar-unassigned": case(
        "hgx-h100 with BAR 2 of one GPU without an address",
        lambda: of_host(with_registers(host(HGX), is_one, {"unplaced_bars": (2,)})),
        "the same of a BAR of its virtual functions",
        lambda: of_host(with_registers(host(HGX), is_one, {})),
    ),
    "bar-small": case(
        "hgx-h100 with a BAR of 256 MiB on one GPU",
        lambda: of_host(with_bars(host(HGX), is_one, 256 * MIB)),
        "rtx4080-i9-14900k with a BAR of 256 MiB, which such cards have without Resizable BAR",
        lambda: of_host(
            changed(
                with_bars(host(DESKTOP), lambda d: d.bdf == GPU_4080, 256 * MIB),
                lambda d: d.bdf == GPU_4080,
                class_code=0x030000,
                registers=PciRegisters(largest_bars=((1, 16 * GIB),)),
            )
        ),
    ),
    "device-switched-off": case(
        "hgx-h100 with BusMaster- on a GPU that nvidia drives",
        lambda: of_host(with_registers(host(HGX), is_one, {"bus_master": False}, driver="nvidia")),
        "the same with vfio-pci",
        lambda: of_host(
            with_registers(host(HGX), is_one, {"bus_master": False}, driver="vfio-pci")
        ),
    ),
    "pcie-errors-seen": case(
        "hgx-h100 with MalfTLP+ on one GPU",
        lambda: of_host(with_registers(host(HGX), is_one, {"uncorrected": ("MalfTLP",)})),
        "the same with UnsupReq+",
        lambda: of_host(with_registers(host(HGX), is_one, {"uncorrected": ("UnsupReq",)})),
    ),
    "board-incomplete": case(
        "hgx-h100 with 3 of its NVSwitches",
        lambda: of_host(without_one(DeviceKind.NVSWITCH)),
        "hgx-h100",
        lambda: of_host(host(HGX)),
    ),
    "devices-uneven": case(
        "hgx-h100 without one GPU",
        lambda: of_host(without_one(DeviceKind.GPU)),
        "hgx-h100",
        lambda: of_host(host(HGX)),
    ),
    "memory-failed": case(
        "one GPU whose row remapping failed",
        lambda: of_host(stating(GPUS, **{REMAPPED: "Yes"})),
        "the same with one remapped row and nothing pending",
        lambda: of_host(stating(GPUS, **{REMAPPED: "No", "remapped_rows__remapped_row_corr": "1"})),
    ),
    "device-slowed": case(
        "one GPU with HW thermal slowdown active",
        lambda: of_host(stating(GPUS, **{f"{SLOWED}_hw_thermal_slowdown": "Active"})),
        "the same with SW power cap active",
        lambda: of_host(stating(GPUS, **{f"{SLOWED}_sw_power_cap": "Active"})),
    ),
    "limit-lowered": case(
        "one GPU with 400 W of 700",
        lambda: of_host(stating(GPUS, **{LIMIT: "400.00 W", DEFAULT: "700.00 W"})),
        "the same with 700",
        lambda: of_host(stating(GPUS, **{LIMIT: "700.00 W", DEFAULT: "700.00 W"})),
    ),
    "setting-unusual": case(
        "one GPU without ECC",
        lambda: of_host(stating(GPUS, product_brand="NVIDIA", ecc_mode__current_ecc="Disabled")),
        "the same with ECC",
        lambda: of_host(stating(GPUS, product_brand="NVIDIA", ecc_mode__current_ecc="Enabled")),
    ),
    "port-impaired": case(
        "one NIC at 100 of 400 Gb/s",
        lambda: of_host(stating(NICS, **{MODES: "400000baseCR4/Full", "net__speed": "100000"})),
        "the same at 400",
        lambda: of_host(stating(NICS, **{MODES: "400000baseCR4/Full", "net__speed": "400000"})),
    ),
    "link-impaired": case(
        "one GPU with one NVLink of two inactive",
        lambda: of_host(stating(GPUS, **{"nvlink__Link 0": "<inactive>", "nvlink__Link 1": "25"})),
        "the same with both inactive, as with MIG or without a bridge",
        lambda: of_host(
            stating(GPUS, **{"nvlink__Link 0": "<inactive>", "nvlink__Link 1": "<inactive>"})
        ),
    ),
    "drive-failing": case(
        "a drive with 5 % of spare where 10 % is the threshold",
        lambda: of_host(stating(DRIVES, **{SPARE: "5%", f"{SPARE}_threshold": "10%"})),
        "the same with 100 %",
        lambda: of_host(stating(DRIVES, **{SPARE: "100%", f"{SPARE}_threshold": "10%"})),
    ),
    "clock-unequal": case(
        "hgx-h100 with 2 GHz at most on package 1",
        lambda: of_host(_clocks(3_800_000, 2_000_000)),
        "hgx-h100 with one clock on both",
        lambda: of_host(_clocks(3_800_000, 3_800_000)),
    ),
    "llc-unequal": case(
        "hgx-h100 with half a cache on package 0",
        lambda: of_host(with_half_a_cache(host(HGX))),
        "hgx-h100",
        lambda: of_host(host(HGX)),
    ),
    "distances-asymmetric": case(
        "hgx-h100 with 32 one way",
        lambda: of_host(replace(host(HGX), distances=((10, 32), (21, 10)))),
        "hgx-h100",
        lambda: of_host(host(HGX)),
    ),
    "nvlinks-few": case(
        "hgx-h100 with 12 NVLinks of one GPU",
        lambda: of_host(with_nvlinks(host(HGX), GPU, 12)),
        "hgx-h100 with 18",
        lambda: of_host(with_nvlinks(host(HGX), GPU, 18)),
    ),
    "node-memory-unequal": case(
        "hgx-h100 with one sixteenth less on node 0",
        lambda: of_host(with_node_memory(15 / 16)),
        "hgx-h100 with 2 % less on node 0",
        lambda: of_host(with_node_memory(0.98)),
    ),
    "frequency-capped": case(
        "rtx4080-i9-14900k with all PUs capped at 2000 MHz of 6000",
        lambda: of_host(_capped(2_000_000)),
        "the same at 6000",
        lambda: of_host(_capped(6_000_000)),
    ),
    "turbo-off": case(
        "hgx-h100 with no_turbo 1",
        lambda: of_host(settings(host(HGX), turbo="off")),
        "hgx-h100 with no_turbo 0",
        lambda: of_host(settings(host(HGX), turbo="on")),
    ),
    "pus-offline": case(
        "x86-2p2n8c16t-offline-pus",
        lambda: of_host(host("x86-2p2n8c16t-offline-pus")),
        "x86-2p2n16c16t-smt-off",
        lambda: of_host(host("x86-2p2n16c16t-smt-off")),
    ),
}
