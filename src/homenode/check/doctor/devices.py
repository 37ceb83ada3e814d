"""Devices: features that every GPU of a model has, and differences of devices from their peers:
BARs, links, NVLinks, drivers, and nodes unlike the port above; and the places that
`nvidia-smi topo -m` alone shows.

Source: pci.ids; lspci of such machines for BARs; PCIe 6.0, 7.8.6 (Resizable BAR); NVIDIA's
architecture papers for NVLinks, its HGX and DGX manuals for boards.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Set
from itertools import combinations
from typing import Any, NamedTuple

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity, finding
from homenode.machine.link_path import JUDGED, LinkRate, capable_rate, list_device_paths, peer_links
from homenode.machine.pci import (
    DeviceKind,
    PciDevice,
    are_models_known,
    get_board_ids,
    is_viable_driver,
    make_model_key,
)
from homenode.machine.tools.nvidia_smi import TopoDevice, TopoMatrix
from homenode.machine.topology import Host
from homenode.text import plural, shorten_list
from homenode.units import GIB, format_bytes


class GpuModel(NamedTuple):
    name: str
    bar_gib: int  # its largest BAR
    nvlinks: int | None = None  # None if bridges are an option
    boards: tuple[tuple[int, int], ...] = ()  # (GPUs, NVSwitches that the host sees)


_EIGHT_OR_SIXTEEN = ((8, 6), (16, 12))
MODELS = {
    (0x10DE, 0x1DB8): GpuModel("V100 SXM3 32 GB", 32, 6, _EIGHT_OR_SIXTEEN),
    (0x10DE, 0x20B0): GpuModel("A100 SXM4 40 GB", 64, 12, _EIGHT_OR_SIXTEEN),
    (0x10DE, 0x20B2): GpuModel("A100 SXM4 80 GB", 128, 12, _EIGHT_OR_SIXTEEN),
    (0x10DE, 0x20B5): GpuModel("A100 PCIe 80 GB", 128),
    (0x10DE, 0x20F1): GpuModel("A100 PCIe 40 GB", 64),
    (0x10DE, 0x20B7): GpuModel("A30", 32),
    (0x10DE, 0x2330): GpuModel("H100 SXM5 80 GB", 128, 18, ((8, 4),)),
    (0x10DE, 0x2329): GpuModel("H20", 128, 18, ((8, 4),)),
    (0x10DE, 0x2335): GpuModel("H200 SXM", 256, 18, ((8, 4),)),
    (0x10DE, 0x2331): GpuModel("H100 PCIe", 128),
    (0x10DE, 0x2321): GpuModel("H100 NVL", 128),
    (0x10DE, 0x233B): GpuModel("H200 NVL", 256),
    (0x10DE, 0x2901): GpuModel("B200", 256, 18),
    (0x10DE, 0x26B5): GpuModel("L40", 64),
    (0x10DE, 0x26B9): GpuModel("L40S", 64),
    (0x10DE, 0x27B8): GpuModel("L4", 32),
    (0x10DE, 0x2BB5): GpuModel("RTX PRO 6000 Server", 128),
    (0x1002, 0x74A1): GpuModel("MI300X", 256),
}
_ACCELERATORS = frozenset({0x0302, 0x1200})
"""Classes of GPUs that have no display: whose BAR is small is never meant to be."""


def check_devices(host: Host) -> Iterator[Finding]:
    """Find faults of single devices, then devices that differ from their peers."""
    alone = [
        *(finding for device in list_judged_devices(host) for finding in _check_bars(device, host)),
        *_check_boards(host),
        *_check_few_links(host),
    ]
    yield from alone
    yield from _check_peers(host, {bdf for finding in alone for bdf in finding.devices})
    yield from _check_odd_nodes(host)


def list_judged_devices(host: Host) -> list[PciDevice]:
    return [d for d in host.pci_devices if d.kind in JUDGED and d.physical_function is None]


def _name(device: PciDevice) -> str:
    return f"{JUDGED.get(device.kind, 'port')} {device.bdf}"


def _find_model(gpu: PciDevice) -> GpuModel | None:
    return MODELS.get((gpu.vendor_id or 0, gpu.device_id or 0))


def _check_bars(device: PciDevice, host: Host) -> Iterator[Finding]:
    registers = device.registers
    source = f"{host.name}: resource of {device.bdf} in sysfs, Region of lspci -vvv"
    if registers is not None and registers.unplaced_bars:
        sizes = {bar.index: format_bytes(bar.size_bytes) for bar in device.bars}
        yield finding(
            "bar-unassigned",
            _name(device),
            expected="an address for each BAR",
            observed=", ".join(
                f"BAR {index} ({sizes.get(index, 'size unknown')}) has none"
                for index in registers.unplaced_bars
            ),
            severity=None if device.kind is DeviceKind.GPU else Severity.WARNING,
            source=source,
            devices=(device.bdf,),
        )
        return
    memory = [bar for bar in device.bars if bar.is_memory and bar.index < 6]
    if device.kind is not DeviceKind.GPU or not memory:
        return
    largest = max(memory, key=lambda bar: bar.size_bytes)
    model = _find_model(device)
    possible = 0 if model is None else model.bar_gib * GIB
    if registers is not None and device.class_code >> 8 in _ACCELERATORS:
        possible = max((possible, *(size for _, size in registers.largest_bars)))
    if largest.size_bytes < possible:
        reason = "its resizable BAR can" if model is None else f"each {model.name} has"
        yield finding(
            "bar-small",
            _name(device),
            expected=f"{format_bytes(possible)}, as {reason}",
            observed=f"BAR {largest.index} of {format_bytes(largest.size_bytes)}",
            source=source,
            devices=(device.bdf,),
        )


def _check_boards(host: Host) -> Iterator[Finding]:
    """Find boards with NVSwitches that lack a part."""
    if not are_models_known(host.pci_devices):
        return
    gpus = list(host.whole_gpus)
    switches = len(host.devices_of_kind(DeviceKind.NVSWITCH))
    for model, count in Counter(map(_find_model, gpus)).items():
        if model is None or not switches or (count, switches) in model.boards:
            continue
        fitting = [board for board in model.boards if board[0] >= count and board[1] >= switches]
        if fitting:
            gpu_count, of_switches = min(fitting)
            yield finding(
                "board-incomplete",
                f"board of {model.name}",
                expected=f"{gpu_count} GPUs and {of_switches} NVSwitches",
                observed=f"{plural(count, 'GPU')} and {plural(switches, 'NVSwitch', 'NVSwitches')}",
                source=f"{host.name}: /sys/bus/pci/devices",
            )


def _check_few_links(host: Host) -> Iterator[Finding]:
    for bdf, count in peer_links(host).items():
        model = _find_model(host.device_at[bdf])
        if model is not None and model.nvlinks is not None and count < model.nvlinks:
            yield finding(
                "nvlinks-few",
                _name(host.device_at[bdf]),
                expected=f"{plural(model.nvlinks, 'NVLink')}, as each {model.name} has",
                observed=str(count),
                source=f"{host.name}: nvidia-smi topo -m",
                devices=(bdf,),
            )


class Peer(NamedTuple):
    """A device, the rate of its path to the processor, and its NVLinks or xGMI links."""

    device: PciDevice
    path: LinkRate | None
    links: int | None


class PeerFact(NamedTuple):
    case: str  # case of the finding's page
    label: str
    read: Callable[[Peer], Any]
    is_worse: Callable[[Any, Any], bool]  # whether a value is worse than the usual value
    text: Callable[[Any], str]
    source: str


def _is_slower(value: LinkRate, usual: LinkRate) -> bool:
    return value.bytes_per_s < usual.bytes_per_s


def _read_bar_sizes(peer: Peer) -> tuple[int, ...] | None:
    bars = peer.device.bars
    return tuple(bar.size_bytes for bar in bars if bar.is_memory and bar.index < 6) or None


def _is_wrong_driver(value: str, usual: str) -> bool:
    """Whether the driver is missing or another host driver; devices of VFIO wait for a VM."""
    is_another = usual != "none" and not any(map(is_viable_driver, (value, usual)))
    return value == "none" or is_another


FACTS = (
    PeerFact(
        "link",
        "link that it can",
        lambda peer: capable_rate(peer.device.link),
        _is_slower,
        str,
        "LnkCap of lspci -vvv, max_link_speed in sysfs",
    ),
    PeerFact(
        "path",
        "path to the processor",
        lambda peer: peer.path,
        _is_slower,
        str,
        "LnkCap of all ports above",
    ),
    PeerFact(
        "bars",
        "BARs",
        _read_bar_sizes,
        lambda value, usual: sum(value) < sum(usual),
        lambda sizes: ", ".join(map(format_bytes, sizes)),
        "resource in sysfs, Region of lspci -vvv",
    ),
    PeerFact(
        "peer links",
        "NVLinks or xGMI links",
        lambda peer: peer.links,
        lambda value, usual: bool(value < usual),
        str,
        "nvidia-smi topo -m, amd-smi",
    ),
    PeerFact(
        "driver",
        "driver",
        lambda peer: peer.device.driver or "none",
        _is_wrong_driver,
        str,
        "driver in sysfs",
    ),
)
"""The path follows the link from which it was derived."""

_MIN_PEERS = 3
_MAX_NAMED = 8


def has_peers(host: Host) -> bool:
    return any(len(peers) > 1 for peers in _group_peers(host))


def _group_peers(host: Host) -> list[list[Peer]]:
    """Return the devices of one model and board."""
    paths = {path.device.bdf: path.expected for path in list_device_paths(host)}
    links = peer_links(host)
    groups: dict[object, list[Peer]] = {}
    for device in list_judged_devices(host):
        if (model := make_model_key(device)) is not None:
            peer = Peer(device, paths.get(device.bdf), links.get(device.bdf))
            groups.setdefault((model, get_board_ids(device)), []).append(peer)
    return list(groups.values())


def _check_peers(host: Host, bdfs: Set[Bdf]) -> Iterator[Finding]:
    """Find devices with a worse value than most peers. bdfs: devices with findings already."""
    for peers in _group_peers(host):
        slow: set[Bdf] = set()
        for fact in FACTS:
            values = {p.device: v for p in peers if (v := fact.read(p)) is not None}
            usual, is_known = _find_usual_value(list(values.values()), fact.is_worse)
            usual_devices = [str(device.bdf) for device, value in values.items() if value == usual]
            skipped_bdfs = {"path": slow, "bars": bdfs, "peer links": bdfs}.get(fact.case, ())
            for device, value in values.items():
                if usual is None or value == usual or not fact.is_worse(value, usual):
                    continue
                if fact.case == "link":
                    slow.add(device.bdf)
                # A slot that is not a GPU's may be meant to be narrow.
                is_slot = fact.case in ("link", "path") and device.kind is not DeviceKind.GPU
                if device.bdf not in skipped_bdfs:
                    yield finding(
                        "device-odd",
                        f"{_name(device)}: {fact.label}",
                        expected=f"{fact.text(usual)}, as {len(usual_devices)} like it: "
                        f"{shorten_list(usual_devices, _MAX_NAMED)}",
                        observed=fact.text(value),
                        severity=None if is_known and not is_slot else Severity.INFO,
                        case=fact.case,
                        values={"device": device.bdf},
                        source=f"{host.name}: {fact.source}",
                        devices=(device.bdf,),
                    )


def _find_usual_value(values: list[Any], is_worse: Callable[[Any, Any], bool]) -> tuple[Any, bool]:
    """The majority's value and True, or the better of two and False; None if no value is usual."""
    value, count = Counter(values).most_common(1)[0] if values else (None, 0)
    if len(values) >= _MIN_PEERS and 2 * count > len(values):
        return value, True
    if len(values) == 2:
        return values[1] if is_worse(*values) else values[0], False
    return None, False


def _check_odd_nodes(host: Host) -> Iterator[Finding]:
    """Find devices that report another node than the port above them."""
    for device in () if host.nodes_assumed else host.pci_devices:
        port = None if device.parent is None else host.find_device(device.parent)
        if port is not None and None not in (device.node, port.node) and device.node != port.node:
            yield finding(
                "device-odd",
                f"{_name(device)}: NUMA node",
                expected=f"{port.node}, as the port above it: {port.bdf}",
                observed=str(device.node),
                source=f"{host.name}: numa_node in sysfs",
                devices=(device.bdf,),
            )


def check_matrix(matrix: TopoMatrix, source: str) -> Iterator[Finding]:
    """Find GPUs on nodes whose CPUs the caller of nvidia-smi may not use."""
    far_gpus = [gpu for _, gpu in _list_gpus(matrix) if gpu.nodes and not gpu.cpus]
    if far_gpus:
        nodes = CpuSet(node for gpu in far_gpus for node in gpu.nodes or ())
        yield finding(
            "job-gpu-far",
            shorten_list((gpu.name for gpu in far_gpus), _MAX_NAMED),
            expected=f"CPUs of node {nodes}, where they are (NUMA Affinity)",
            observed=f"the job, or whoever ran nvidia-smi, has no CPU of node {nodes}: CPU "
            "Affinity is empty",
            source=source,
        )


def describe_matrix(matrix: TopoMatrix) -> str | None:
    """Return which nodes the GPUs are on and what SYS means, or None if no node is shown."""
    if not any(gpu.nodes for _, gpu in _list_gpus(matrix)):
        return None
    numbers_on: dict[str, list[int]] = {}
    for _, gpu in _list_gpus(matrix):
        numbers_on.setdefault(str(CpuSet(gpu.nodes or ())), []).append(int(gpu.name[3:]))
    places = ", ".join(
        f"{'GPU' if len(numbers) == 1 else 'GPUs'} {CpuSet(numbers)} on "
        f"{f'node {nodes}' if nodes else 'a node that is not shown'}"
        for nodes, numbers in numbers_on.items()
    )
    is_no_hint = any(
        matrix.links[row][other] == "SYS" and first.nodes and first.nodes == second.nodes
        for (row, first), (other, second) in combinations(_list_gpus(matrix), 2)
    )
    hint = "; nvidia-smi prints SYS between GPUs of one node too, so SYS does not distinguish nodes"
    return f"{places}, by NUMA Affinity{hint if is_no_hint else ''}"


def _list_gpus(matrix: TopoMatrix) -> list[tuple[int, TopoDevice]]:
    rows = enumerate(matrix.devices)
    return [(row, device) for row, device in rows if device.name.startswith("GPU")]
