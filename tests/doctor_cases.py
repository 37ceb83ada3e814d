"""For each finding of a host a machine that has it and one that nearly has it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.change.retrain.execution import explain_interrupted
from homenode.change.retrain.install import dropped_links
from homenode.change.retrain.plan import FunctionHolders, plan_retrain
from homenode.check.doctor.baseline import drift, record_of
from homenode.check.doctor.devices import matrix_findings
from homenode.check.doctor.diagnosis import MeasuredRates, diagnose
from homenode.findings import Finding
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.link_path import LinkRate
from homenode.machine.pci import DeviceKind, PciDevice, PciErrors, PciLink, PortType
from homenode.machine.tools.nvidia_smi import parse_topology
from homenode.machine.topology import Host, PagePool
from tests.doctor_domains import diagnosed as found_in
from tests.doctor_domains import domain, gpus, host
from tests.doctor_listings import arc, port
from tests.simulated_config import MemoryJournal, PowerCutError, SimulatedConfig, retrained


class Case(NamedTuple):
    """A machine that has a finding, and one that nearly has it: the second call shows in what."""

    has: str
    found: Callable[[], Sequence[Finding]]
    silent: Callable[[], Sequence[Finding]]


def of_host(there: Host, circumstances: MeasuredRates | None = None) -> tuple[Finding, ...]:
    return diagnose(there, None, circumstances).findings


def changed(there: Host, which: Callable[[PciDevice], bool], **fields: Any) -> Host:
    """The host with fields of some functions changed."""
    return replace(
        there,
        pci_devices=tuple(replace(d, **fields) if which(d) else d for d in there.pci_devices),
    )


def settings(there: Host, **fields: Any) -> Host:
    return replace(there, settings=replace(there.settings, **fields))


def is_gpu(device: PciDevice) -> bool:
    return device.kind is DeviceKind.GPU


_AFFINITY = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t{}\t3\t\tN/A\n"
DESKTOP, H200, SICK, HGX = "rtx4080-i9-14900k", "h200-xeon8558", "rtx5090-epyc7702", "hgx-h100"
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


def _acs(flags: tuple[str, ...], driver: str | None = "nvidia") -> Host:
    def is_port(device: PciDevice) -> bool:
        return device.bridge is not None and device.bridge.port_type is PortType.SWITCH_DOWNSTREAM

    return changed(changed(host(H200), is_port, acs=flags), is_gpu, driver=driver)


def _retrained(reaches: int | None) -> Sequence[Finding]:
    there = changed(host(SICK), lambda d: d.driver not in ("pcieport", None), driver="vfio-pci")
    gpu = gpus(SICK, 1)[0]
    space = SimulatedConfig(there)
    uses = {device.bdf: FunctionHolders(()) for device in there.pci_devices}
    plan = plan_retrain(there, gpu, space, uses)
    if reaches is not None:
        space.reaches[plan.port] = reaches
    return retrained(plan, space).findings


def _interrupted(cut_at: int | None) -> Sequence[Finding]:
    there = changed(host(SICK), lambda d: d.driver not in ("pcieport", None), driver="vfio-pci")
    space, journal = SimulatedConfig(there, cut_at=cut_at), MemoryJournal()
    uses = {device.bdf: FunctionHolders(()) for device in there.pci_devices}
    plan = plan_retrain(there, gpus(SICK, 1)[0], space, uses)
    with suppress(PowerCutError):
        retrained(plan, space, journal)
    entry = journal.open_entry
    return () if entry is None else (explain_interrupted(entry, plan.before),)


def _drifted(now: Host) -> list[Finding]:
    return list(drift(record_of(host(DESKTOP)), now, "host.json"))


def _h2d(rate: float) -> MeasuredRates:
    return MeasuredRates(h2d={GPU_4080: rate})


def _with_pages(reserved: int, free: int) -> list[Finding]:
    """Drift of a host that was recorded with 64 free pages on each node."""

    def there(total: int, unused: int) -> Host:
        pools = (PagePool(1 << 30, total, unused),)
        made = host(DESKTOP)
        return replace(made, nodes=tuple(replace(node, page_pools=pools) for node in made.nodes))

    return list(drift(record_of(there(64, 64)), there(reserved, free), "host.json"))


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
        "rtx5090-epyc7702: 8 GPUs at 5 GT/s on ports of 16 GT/s",
        lambda: of_host(host(SICK)),
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
        "rtx4080-i9-14900k with its GPU at x8 of x16",
        lambda: of_host(link_at(16.0, 8)),
        # The same in a slot that is known to have 8 lanes
        lambda: of_host(link_at(16.0, 8), MeasuredRates(known_widths={GPU_4080: 8})),
    ),
    "pcie-link-idle": Case(
        "rtx4080-i9-14900k with its GPU at 2.5 GT/s and nothing known of its load",
        lambda: of_host(link_at(2.5, 16)),
        lambda: of_host(link_at(16.0, 16, performance_state="P8")),
    ),
    "pcie-target-low": Case(
        "rtx4080-i9-14900k at 16 GT/s, and its port's target at 5 GT/s",
        lambda: of_host(changed(host(DESKTOP), lambda d: d.bdf == PORT_4080, target_gt_per_s=5.0)),
        # Its target at 32 GT/s, which the card cannot
        lambda: of_host(changed(host(DESKTOP), lambda d: d.bdf == PORT_4080, target_gt_per_s=32.0)),
    ),
    "pcie-link-unknown": Case(
        "rtx4080-i9-14900k as lspci shows it to a user who is not root",
        lambda: of_host(changed(host(DESKTOP), lambda d: True, link=None)),
        # The same with a GPU that is a part of the root complex
        lambda: of_host(
            changed(changed(host(DESKTOP), lambda d: True, link=None), is_gpu, parent=None)
        ),
    ),
    "job-gpu-far": Case(
        "nvidia-smi topo -m of a job without CPUs of its GPU's node",
        lambda: list(matrix_findings(parse_topology(_AFFINITY.format("")), "topo")),
        lambda: list(matrix_findings(parse_topology(_AFFINITY.format("0-3")), "topo")),
    ),
    "device-silent": Case(
        "a listing in which a GPU has revision ff and header type 7f",
        lambda: of_host(host_from_lspci(_silent("VGA compatible controller [0300]"), "pc")),
        # The same of a SATA controller, on which no VM's speed hangs
        lambda: of_host(host_from_lspci(_silent("SATA controller [0106]"), "pc")),
    ),
    "listing-cut": Case(
        "a listing of lspci -vvv that ends within a line",
        lambda: of_host(host_from_lspci(arc()[:-6], "arc")),
        lambda: of_host(host_from_lspci(arc() + "\n", "arc")),
    ),
    "pcie-link-dropped": Case(
        "rtx5090-epyc7702 after the start of a VM with its GPUs",
        lambda: list(dropped_links(host(SICK), gpus(SICK, 8), "vm", {})),
        # rtx4080-i9-14900k with its GPU at x8 before and after the start of a VM
        lambda: list(
            dropped_links(link_at(16.0, 8), (GPU_4080,), "vm", {GPU_4080: LinkRate(16.0, 8)})
        ),
    ),
    "pcie-errors-uncorrected": Case(
        "rtx4080-i9-14900k with one DLP error",
        lambda: of_host(_errors(0, 1)),
        lambda: of_host(_errors(3)),
    ),
    "pcie-errors-corrected": Case(
        "rtx4080-i9-14900k with 1000 BadTLP",
        lambda: of_host(_errors(1000)),
        lambda: of_host(_errors(999)),
    ),
    "h2d-low": Case(
        "5.3 GB/s measured over 16 GT/s x16",
        lambda: of_host(host(DESKTOP), _h2d(5.3e9)),
        lambda: of_host(host(DESKTOP), _h2d(24e9)),
    ),
    "h2d-above-link": Case(
        "40 GB/s measured over 16 GT/s x16",
        lambda: of_host(host(DESKTOP), _h2d(40e9)),
        lambda: of_host(host(DESKTOP), _h2d(31e9)),
    ),
    "node-spans-packages": Case(
        "epyc9654-2p-1node: two packages in one node",
        lambda: of_host(host("epyc9654-2p-1node")),
        lambda: of_host(host(HGX)),
    ),
    "node-spans-llcs": Case(
        "mi350x-epyc9575f: packages in NPS1, 8 caches in a node",
        lambda: of_host(host("mi350x-epyc9575f")),
        # rtx4090-epyc7702: NPS4, 4 caches in a node
        lambda: of_host(host("rtx4090-epyc7702")),
    ),
    "node-without-memory": Case(
        "x86-2p2n8c16t-node1-no-memory",
        lambda: of_host(host("x86-2p2n8c16t-node1-no-memory")),
        # x86-2p3n8c16t-node2-no-cpus: the node without CPUs has memory
        lambda: of_host(host("x86-2p3n8c16t-node2-no-cpus")),
    ),
    "gpu-node-unknown": Case(
        "x86-2p2n8c16t-gpu-node-unknown",
        lambda: of_host(host("x86-2p2n8c16t-gpu-node-unknown")),
        # rtx4080-i9-14900k: no node either, and only one there is
        lambda: of_host(host(DESKTOP)),
    ),
    "p2p-redirected": Case(
        "h200-xeon8558 with ReqRedir on its switches' ports",
        lambda: of_host(_acs(("CmpltRedir", "ReqRedir", "SrcValid"))),
        lambda: of_host(_acs(("SrcValid",))),
    ),
    "iommu-translates": Case(
        "h200-xeon8558 with IOMMU domains of type DMA-FQ",
        lambda: of_host(changed(host(H200), is_gpu, iommu_domain="DMA-FQ", driver="nvidia")),
        lambda: of_host(changed(host(H200), is_gpu, iommu_domain="identity", driver="nvidia")),
    ),
    "governor-powersave": Case(
        "powersave with acpi-cpufreq",
        lambda: of_host(settings(host(DESKTOP), scaling_drivers=("acpi-cpufreq",))),
        lambda: of_host(settings(host(DESKTOP), scaling_drivers=("intel_pstate",))),
    ),
    "idle-deep": Case(
        "idle states of 890 µs under a pinned VM",
        lambda: found_in(domain(2, pins=[0, 2]), settings(host(DESKTOP), idle_exit_latency_us=890)),
        lambda: found_in(domain(2, pins=[0, 2]), settings(host(DESKTOP), idle_exit_latency_us=133)),
    ),
    "retrain-failed": Case(
        "a link that trains to 5 GT/s whatever it is given",
        lambda: _retrained(2),
        lambda: _retrained(None),
    ),
    "retrain-interrupted": Case(
        "a run that is killed at its second write",
        lambda: _interrupted(2),
        lambda: _interrupted(None),
    ),
    "drift-topology": Case(
        "rtx4080-i9-14900k with half of its memory",
        lambda: _drifted(_with_memory(0.5)),
        # With 1 % less, which another kernel takes
        lambda: _drifted(_with_memory(0.99)),
    ),
    "drift-host": Case(
        "rtx4080-i9-14900k whose IOMMU is off now",
        lambda: list(
            drift(
                record_of(settings(host(DESKTOP), iommus=("dmar0",))),
                settings(host(DESKTOP), iommus=()),
                "host.json",
            )
        ),
        lambda: _drifted(_with_memory(1 - 4 / (64 << 10))),
    ),
    "drift-device": Case(
        "rtx4080-i9-14900k without its GPU",
        lambda: _drifted(
            replace(
                host(DESKTOP),
                pci_devices=tuple(
                    d for d in host(DESKTOP).pci_devices if d.bdf.bus != GPU_4080.bus
                ),
            )
        ),
        lambda: _drifted(changed(host(DESKTOP), is_gpu, name="GeForce")),
    ),
    "drift-link": Case(
        "rtx4080-i9-14900k at 8 GT/s",
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
    "drift-huge-pages": Case(
        "a host recorded with 64 pages of 1 GiB on a node that has 8",
        lambda: _with_pages(8, 8),
        lambda: _with_pages(64, 0),
    ),
}
