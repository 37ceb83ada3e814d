"""For each finding of a host a machine that has it and one that nearly has it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.change.retrain.execution import explain_interrupted
from homenode.change.retrain.plan import find_dropped_links, plan_retrain
from homenode.check.doctor.baseline import find_drift, record_of
from homenode.check.doctor.devices import check_matrix
from homenode.check.doctor.diagnosis import MeasuredRates, diagnose
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.link_path import LinkRate
from homenode.machine.pci import (
    DeviceKind,
    LinkKind,
    PciBar,
    PciDevice,
    PciErrors,
    PciInterrupt,
    PciLink,
    PciRegisters,
    PortType,
)
from homenode.machine.settings import FrequencyLimit
from homenode.machine.tools.nvidia_smi import parse_topology
from homenode.machine.topology import Host, PagePool
from homenode.units import GIB, MIB
from tests.doctor_domains import binding, diagnosed, domain, gpus, host, topology
from tests.doctor_domains import diagnosed as found_in
from tests.simulated_config import MemoryJournal, PowerCutError, SimulatedConfig, retrained


class Case(NamedTuple):
    """A machine that has a finding, and one that nearly has it: the second call shows in what."""

    found: Callable[[], Sequence[Finding]]
    silent: Callable[[], Sequence[Finding]]


def of_host(on: Host | str, rates: MeasuredRates | None = None) -> tuple[Finding, ...]:
    return diagnose(host(on) if isinstance(on, str) else on, None, rates).findings


def changed(there: Host, which: Callable[[PciDevice], bool], **fields: Any) -> Host:
    """The host with fields of some functions changed."""
    return replace(
        there, pci_devices=tuple(replace(d, **fields) if which(d) else d for d in there.pci_devices)
    )


def without(there: Host, which: Callable[[PciDevice], bool]) -> Host:
    return replace(there, pci_devices=tuple(d for d in there.pci_devices if not which(d)))


def settings(there: Host, **fields: Any) -> Host:
    return replace(there, settings=replace(there.settings, **fields))


def is_gpu(device: PciDevice) -> bool:
    return device.kind is DeviceKind.GPU


_AFFINITY = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t{}\t3\t\tN/A\n"
DESKTOP, H200, SICK, HGX = "rtx4080-i9-14900k", "h200-xeon8558", "rtx5090-epyc7702", "hgx-h100"
ISOLATED = "x86-2p2n16c32t-isolated-pus"
GPU_4080 = gpus(DESKTOP, 1)[0]
PORT_4080 = host(DESKTOP).bridges_above(GPU_4080)[0].bdf


def link_at(gt_per_s: float, width: int, **fields: Any) -> Host:
    """The desktop with its GPU's link at some speed and width."""
    return changed(
        host(DESKTOP),
        lambda d: d.bdf == GPU_4080,
        link=PciLink(gt_per_s, width, 16.0, 16),
        **fields,
    )


def _errors(correctable: int, fatal: int = 0) -> Host:
    lost = (("DLP", fatal),) if fatal else ()
    return changed(
        host(DESKTOP),
        is_gpu,
        errors=PciErrors((("BadTLP", correctable),) if correctable else (), (), lost),
    )


def _acs(flags: tuple[str, ...]) -> Host:
    def is_port(device: PciDevice) -> bool:
        return device.bridge is not None and device.bridge.port_type is PortType.SWITCH_DOWNSTREAM

    return changed(changed(host(H200), is_port, acs=flags), is_gpu, driver="nvidia")


def _retrained(reaches: int | None = None, cut_at: int | None = None) -> Sequence[Finding]:
    there = changed(host(SICK), lambda d: d.driver not in ("pcieport", None), driver="vfio-pci")
    space, journal = SimulatedConfig(there, cut_at=cut_at), MemoryJournal()
    uses = {device.bdf: () for device in there.pci_devices}
    plan = plan_retrain(there, gpus(SICK, 1)[0], space, uses)
    if reaches is not None:
        space.reaches[plan.port] = reaches
    with suppress(PowerCutError):
        return retrained(plan, space, journal).findings
    entry = journal.open_entry
    return () if entry is None else (explain_interrupted(entry, plan.before),)


def _drifted(now: Host) -> list[Finding]:
    return list(find_drift(record_of(host(DESKTOP)), now, "host.json"))


def _h2d(rate: float) -> MeasuredRates:
    return MeasuredRates(h2d={GPU_4080: rate})


def _with_pages(reserved: int, free: int) -> list[Finding]:
    """Drift of a host that was recorded with 64 free pages on each node."""

    def there(total: int, unused: int) -> Host:
        pools = (PagePool(1 << 30, total, unused),)
        made = host(DESKTOP)
        return replace(made, nodes=tuple(replace(node, page_pools=pools) for node in made.nodes))

    return list(find_drift(record_of(there(64, 64)), there(reserved, free), "host.json"))


def _with_memory(factor: float) -> Host:
    there = host(DESKTOP)
    return replace(
        there,
        nodes=tuple(
            replace(n, memory_bytes=int((n.memory_bytes or 0) * factor)) for n in there.nodes
        ),
    )


def _silent(kind: str) -> str:
    """A listing with one function below a port that answers nothing."""
    return (
        port("00:01.0", "8086:a70d", "Root Port (Slot+)", "00", "01", "01", 16, 16, 2.5, 16)
        + f"\n\n01:00.0 {kind}: A maker's device [10de:2684] (rev ff) (prog-if ff)\n"
        "\t!!! Unknown header type 7f\n"
    )


HOST_CASES: dict[str, Case] = {
    "pcie-link-slow": Case(
        lambda: of_host(SICK),
        # A card for 16 GT/s on a port for 8 GT/s, at 8 GT/s
        lambda: of_host(
            changed(
                link_at(8.0, 16),
                lambda d: d.bdf != GPU_4080 and d.link is not None,
                link=PciLink(8.0, 16, 8.0, 16),
            )
        ),
    ),
    "pcie-link-narrow": Case(
        lambda: of_host(link_at(16.0, 8)),
        # The same in a slot that is known to have 8 lanes
        lambda: of_host(link_at(16.0, 8), MeasuredRates(known_widths={GPU_4080: 8})),
    ),
    "pcie-link-idle": Case(
        lambda: of_host(link_at(2.5, 16)),
        lambda: of_host(link_at(16.0, 16, performance_state="P8")),
    ),
    "pcie-target-low": Case(
        lambda: of_host(changed(host(DESKTOP), lambda d: d.bdf == PORT_4080, target_gt_per_s=5.0)),
        # Its target at 32 GT/s, which the card cannot
        lambda: of_host(changed(host(DESKTOP), lambda d: d.bdf == PORT_4080, target_gt_per_s=32.0)),
    ),
    # rtx4080-i9-14900k as lspci shows it to a user who is not root
    "pcie-link-unknown": Case(
        lambda: of_host(changed(host(DESKTOP), lambda d: True, link=None)),
        # The same with a GPU that is a part of the root complex
        lambda: of_host(
            changed(changed(host(DESKTOP), lambda d: True, link=None), is_gpu, parent=None)
        ),
    ),
    # nvidia-smi topo -m of a job without CPUs of its GPU's node
    "job-gpu-far": Case(
        lambda: list(check_matrix(parse_topology(_AFFINITY.format("")), "topo")),
        lambda: list(check_matrix(parse_topology(_AFFINITY.format("0-3")), "topo")),
    ),
    # a listing in which a GPU has revision ff and header type 7f
    "device-silent": Case(
        lambda: of_host(host_from_lspci(_silent("VGA compatible controller [0300]"), "pc")),
        # The same of a SATA controller, on which no VM's speed hangs
        lambda: of_host(host_from_lspci(_silent("SATA controller [0106]"), "pc")),
    ),
    # a listing of lspci -vvv that ends within a line
    "listing-cut": Case(
        lambda: of_host(host_from_lspci(arc()[:-6], "arc")),
        lambda: of_host(host_from_lspci(arc() + "\n", "arc")),
    ),
    "pcie-link-dropped": Case(
        lambda: list(find_dropped_links(host(SICK), gpus(SICK, 8), "vm", {})),
        # rtx4080-i9-14900k with its GPU at x8 before and after the start of a VM
        lambda: list(
            find_dropped_links(link_at(16.0, 8), (GPU_4080,), "vm", {GPU_4080: LinkRate(16.0, 8)})
        ),
    ),
    "pcie-errors-uncorrected": Case(lambda: of_host(_errors(0, 1)), lambda: of_host(_errors(3))),
    "pcie-errors-corrected": Case(lambda: of_host(_errors(1000)), lambda: of_host(_errors(999))),
    # 5.3 GB/s measured over 16 GT/s x16
    "h2d-low": Case(
        lambda: of_host(DESKTOP, _h2d(5.3e9)), lambda: of_host(host(DESKTOP), _h2d(24e9))
    ),
    # 40 GB/s measured over 16 GT/s x16
    "h2d-above-link": Case(
        lambda: of_host(DESKTOP, _h2d(40e9)), lambda: of_host(host(DESKTOP), _h2d(31e9))
    ),
    "node-spans-packages": Case(lambda: of_host("epyc9654-2p-1node"), lambda: of_host(host(HGX))),
    "node-spans-llcs": Case(
        lambda: of_host("mi350x-epyc9575f"),
        # rtx4090-epyc7702: NPS4, 4 caches in a node
        lambda: of_host("rtx4090-epyc7702"),
    ),
    "node-without-memory": Case(
        lambda: of_host("x86-2p2n8c16t-node1-no-memory"),
        # x86-2p3n8c16t-node2-no-cpus: the node without CPUs has memory
        lambda: of_host("x86-2p3n8c16t-node2-no-cpus"),
    ),
    "gpu-node-unknown": Case(
        lambda: of_host("x86-2p2n8c16t-gpu-node-unknown"),
        # rtx4080-i9-14900k: no node either, and only one there is
        lambda: of_host(DESKTOP),
    ),
    # h200-xeon8558 with ReqRedir on its switches' ports
    "p2p-redirected": Case(
        lambda: of_host(_acs(("CmpltRedir", "ReqRedir", "SrcValid"))),
        lambda: of_host(_acs(("SrcValid",))),
    ),
    "iommu-translates": Case(
        lambda: of_host(changed(host(H200), is_gpu, iommu_domain="DMA-FQ", driver="nvidia")),
        lambda: of_host(changed(host(H200), is_gpu, iommu_domain="identity", driver="nvidia")),
    ),
    "governor-powersave": Case(
        lambda: of_host(settings(host(DESKTOP), scaling_drivers=("acpi-cpufreq",))),
        lambda: of_host(settings(host(DESKTOP), scaling_drivers=("intel_pstate",))),
    ),
    "idle-deep": Case(
        lambda: found_in(domain(2, pins=[0, 2]), _idling(890)),
        lambda: found_in(domain(2, pins=[0, 2]), _idling(133)),
    ),
    "retrain-failed": Case(lambda: _retrained(2), lambda: _retrained()),
    "retrain-interrupted": Case(lambda: _retrained(cut_at=2), lambda: _retrained()),
    # rtx4080-i9-14900k with half of its memory
    "drift-topology": Case(
        lambda: _drifted(_with_memory(0.5)),
        # With 1 % less, which another kernel takes
        lambda: _drifted(_with_memory(0.99)),
    ),
    "drift-host": Case(
        lambda: list(
            find_drift(
                record_of(settings(host(DESKTOP), iommus=("dmar0",))),
                settings(host(DESKTOP), iommus=()),
                "host.json",
            )
        ),
        lambda: _drifted(_with_memory(1 - 4 / (64 << 10))),
    ),
    "drift-device": Case(
        lambda: _drifted(without(host(DESKTOP), lambda d: d.bdf.bus == GPU_4080.bus)),
        lambda: _drifted(changed(host(DESKTOP), is_gpu, name="GeForce")),
    ),
    "drift-link": Case(
        lambda: _drifted(link_at(8.0, 16)),
        # Idle at 2.5 GT/s, recorded at 16
        lambda: _drifted(
            changed(
                link_at(2.5, 16),
                lambda d: d.bdf == Bdf.parse("00:01.0"),
                link=PciLink(2.5, 16, 32.0, 16),
            )
        ),
    ),
    "drift-huge-pages": Case(lambda: _with_pages(8, 8), lambda: _with_pages(64, 0)),
}


GPU, NVSWITCH = gpus(HGX, 8)[5], host(HGX).devices_of_kind(DeviceKind.NVSWITCH)[1].bdf


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


def _clocks(*khz: int | None) -> Host:
    there = host(HGX)
    limits = [FrequencyLimit(k or 0, k, p.pus) for k, p in zip(khz, there.packages, strict=True)]
    return settings(there, frequency_limits=tuple(limits))


def _capped(khz: int) -> Host:
    limit = FrequencyLimit(khz, 6_000_000, CpuSet(range(32)))
    return settings(host(DESKTOP), frequency_limits=(limit,))


_X8 = PciLink(32.0, 8, 32.0, 8)

HEALTH_CASES: dict[str, Case] = {
    "device-odd": Case(
        lambda: of_host(with_port(host(HGX), (GPU,), _X8)),
        lambda: of_host(with_port(host(HGX), tuple(gpus(HGX, 8)), _X8)),
    ),
    "bar-unassigned": Case(
        lambda: of_host(changed(host(HGX), is_one, registers=PciRegisters(unplaced_bars=(2,)))),
        # The same of a BAR of its virtual functions
        lambda: of_host(changed(host(HGX), is_one, registers=PciRegisters())),
    ),
    "bar-small": Case(
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
        lambda: of_host(without(host(HGX), lambda d: d.bdf == NVSWITCH)), lambda: of_host(HGX)
    ),
    "clock-unequal": Case(
        lambda: of_host(_clocks(3_800_000, 2_000_000)), lambda: of_host(_clocks(3_800_000, None))
    ),
    "llc-unequal": Case(lambda: of_host(with_half_a_cache(host(HGX))), lambda: of_host(HGX)),
    "distances-asymmetric": Case(
        lambda: of_host(replace(host(HGX), distances=((10, 32), (21, 10)))),
        lambda: of_host(HGX),
    ),
    "nvlinks-few": Case(
        lambda: of_host(with_nvlinks(host(HGX), GPU, 12)),
        lambda: of_host(with_nvlinks(host(HGX), GPU, 18)),
    ),
    "node-memory-unequal": Case(
        lambda: of_host(with_node_memory(15 / 16)), lambda: of_host(with_node_memory(0.98))
    ),
    "frequency-capped": Case(
        lambda: of_host(_capped(2_000_000)), lambda: of_host(_capped(6_000_000))
    ),
    "turbo-off": Case(
        lambda: of_host(settings(host(HGX), turbo="off")),
        lambda: of_host(settings(host(HGX), turbo="on")),
    ),
    "cpus-offline": Case(
        lambda: of_host("x86-2p2n8c16t-offline-pus"),
        lambda: of_host("x86-2p2n16c16t-smt-off"),
    ),
}


SMT_OFF = "x86-2p2n16c16t-smt-off"
NIC = host(HGX).devices_of_kind(DeviceKind.NIC)[0].bdf


def set_apart(there: Host, pus: Iterable[int], *, nohz: bool = True) -> Host:
    """The host with just these CPUs in isolcpus=, and in nohz_full= too."""
    wanted = CpuSet(pus)
    return replace(
        there,
        pus=tuple(
            replace(pu, isolated=pu.index in wanted, nohz_full=nohz and pu.index in wanted)
            for pu in there.pus
        ),
    )


def interrupting(there: Host, bdf: Bdf, pus: Sequence[str], driver: str = "mlx5_core") -> Host:
    """The host with a device that has an interrupt on each of these sets of CPUs."""
    interrupts = tuple(PciInterrupt(100 + i, CpuSet.parse(each)) for i, each in enumerate(pus))
    return changed(there, lambda d: d.bdf == bdf, driver=driver, interrupts=interrupts)


def quiet(there: Host) -> tuple[Finding, ...]:
    """A VM on 4 CPUs of the HGX host, with a GPU of node 0."""
    cpu, memory, emulator = topology(1, 4), binding([0]), "<emulatorpin cpuset='0-1'/>"
    pins = range(8, 12)
    xml = domain(4, gpus(HGX, 1), gib=8, pins=pins, cpu=cpu, more=memory, cputune=emulator)
    return diagnosed(xml, there)


def on_isolated(there: Host, pins: Sequence[int] = (4, 5)) -> tuple[Finding, ...]:
    threads = 2 if 20 in pins else 1
    return diagnosed(
        domain(len(pins), pins=pins, cpu=topology(1, len(pins) // threads, threads)), there
    )


def _mixed(second: str) -> tuple[Finding, ...]:
    """The desktop, CPUs 4 and 6 with another governor."""
    by_governor: dict[str, list[int]] = {"performance": [0, 2]}
    by_governor.setdefault(second, []).extend((4, 6))
    there = settings(
        host(DESKTOP),
        scaling_drivers=("intel_pstate",),
        pus_of_governor=tuple((name, CpuSet(pus)) for name, pus in by_governor.items()),
    )
    return diagnosed(domain(4, pins=[0, 2, 4, 6]), there)


def _idling(exit_latency_us: int) -> Host:
    there = host(DESKTOP)
    return settings(there, pus_of_idle_latency_us=((exit_latency_us, there.online_pus),))


def _every_pu(there: Host) -> list[str]:
    return [str(pu.index) for pu in there.pus]


QUIET_CASES: dict[str, Case] = {
    "isolated-with-tick": Case(
        lambda: on_isolated(set_apart(host(ISOLATED), [*range(4, 8), *range(20, 24)], nohz=False)),
        lambda: on_isolated(host(ISOLATED)),
    ),
    "sibling-not-isolated": Case(
        lambda: on_isolated(set_apart(host(ISOLATED), range(4, 8))),
        lambda: on_isolated(set_apart(host(ISOLATED), range(4, 8)), (4, 20)),
    ),
    "irq-on-isolated": Case(
        lambda: quiet(interrupting(set_apart(host(HGX), range(8, 12)), NIC, ["9", "0"])),
        lambda: quiet(interrupting(set_apart(host(HGX), range(8, 12)), NIC, _every_pu(host(HGX)))),
    ),
    "irqbalance-on-vcpus": Case(
        lambda: quiet(settings(interrupting(host(HGX), NIC, ["9", "0"]), irqbalance=True)),
        lambda: quiet(settings(interrupting(host(HGX), NIC, ["0", "1"]), irqbalance=True)),
    ),
    # the GPU's interrupts on CPU 60, in the package without vCPUs
    "irq-far": Case(
        lambda: quiet(interrupting(host(HGX), gpus(HGX, 1)[0], ["60"], "vfio-pci")),
        lambda: quiet(interrupting(host(HGX), gpus(HGX, 1)[0], ["60", "2"], "vfio-pci")),
    ),
    "smt-off": Case(
        lambda: diagnosed(
            domain(2, pins=[0, 1], cpu=topology(1, 1, 2)),
            settings(host(SMT_OFF), smt_control="off"),
        ),
        lambda: diagnosed(
            domain(2, pins=[0, 1], cpu=topology(1, 2)), settings(host(SMT_OFF), smt_control="off")
        ),
    ),
    "emulator-on-sibling": Case(
        lambda: diagnosed(domain(2, pins=[0, 2], cputune="<emulatorpin cpuset='1'/>"), DESKTOP),
        lambda: diagnosed(domain(2, pins=[0, 2], cputune="<emulatorpin cpuset='16'/>"), DESKTOP),
    ),
    "governor-mixed": Case(lambda: _mixed("powersave"), lambda: _mixed("performance")),
}


def port(
    bdf: str,
    ids: str,
    kind: str,
    primary: str,
    secondary: str,
    subordinate: str,
    most: float,
    lanes: int,
    speed: float,
    width: int,
) -> str:
    """A bridge with its buses, what its link can and what it has."""
    return (
        f"{bdf} PCI bridge [0604]: A maker's bridge [{ids}]\n"
        f"\tBus: primary={primary}, secondary={secondary}, "
        f"subordinate={subordinate}, sec-latency=0\n"
        f"\tCapabilities: [40] Express (v2) {kind}, MSI 00\n"
        f"\t\tLnkCap:\tPort #1, Speed {most}GT/s, Width x{lanes}\n"
        f"\t\tLnkSta:\tSpeed {speed}GT/s (ok), Width x{width} (ok)"
    )


def arc() -> str:
    """Intel's Arc: a GPU that says 2.5 GT/s x1 behind a switch of its own, whose uplink is real."""
    return "\n\n".join(
        (
            port("00:01.0", "8086:a70d", "Root Port (Slot+)", "00", "01", "04", 16, 8, 16, 8),
            port("01:00.0", "8086:4fa1", "Upstream Port", "01", "02", "04", 16, 8, 16, 8),
            port(
                "02:01.0", "8086:4fa4", "Downstream Port (Slot-)", "02", "03", "03", 2.5, 1, 2.5, 1
            ),
            "03:00.0 VGA compatible controller [0300]: Intel Corporation DG2 [8086:56a0]\n"
            "\tCapabilities: [70] Express (v2) Endpoint, MSI 00\n"
            "\t\tLnkCap:\tPort #0, Speed 2.5GT/s, Width x1\n"
            "\t\tLnkSta:\tSpeed 2.5GT/s (ok), Width x1 (ok)",
        )
    )
