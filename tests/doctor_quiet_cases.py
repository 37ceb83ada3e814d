"""For each finding of isolation, interrupts and threads a machine that has it and one that nearly
has it."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind, PciInterrupt
from homenode.machine.topology import Host
from tests.doctor_cases import Case, changed, settings
from tests.doctor_domains import binding, diagnosed, domain, gpus, host, topology

ISOLATED, HGX, DESKTOP = "x86-2p2n16c32t-isolated-pus", "hgx-h100", "rtx4080-i9-14900k"
SMT_OFF = "x86-2p2n16c16t-smt-off"
NIC = host(HGX).devices_of_kind(DeviceKind.NIC)[0].bdf


def set_apart(there: Host, pus: Iterable[int], *, nohz: bool = True) -> Host:
    """The host with just these PUs in isolcpus=, and in nohz_full= too."""
    wanted = CpuSet(pus)
    return replace(
        there,
        pus=tuple(
            replace(pu, isolated=pu.index in wanted, nohz_full=nohz and pu.index in wanted)
            for pu in there.pus
        ),
    )


def interrupting(there: Host, bdf: Bdf, pus: Sequence[str], driver: str = "mlx5_core") -> Host:
    """The host with a device that has an interrupt on each of these sets of PUs."""
    interrupts = tuple(PciInterrupt(100 + i, CpuSet.parse(each)) for i, each in enumerate(pus))
    return changed(there, lambda d: d.bdf == bdf, driver=driver, interrupts=interrupts)


def quiet(there: Host, *, node: int = 0, first: int = 8, **more: str) -> tuple[Finding, ...]:
    """A VM on 4 PUs of the HGX host, with a GPU of node 0."""
    xml = domain(
        4,
        gpus(HGX, 1),
        gib=8,
        pins=range(first, first + 4),
        cpu=topology(1, 4),
        more=binding([node]),
        cputune="<emulatorpin cpuset='0-1'/>",
    )
    return diagnosed(xml, there)


def on_isolated(there: Host, pins: Sequence[int] = (4, 5)) -> tuple[Finding, ...]:
    threads = 2 if 20 in pins else 1
    return diagnosed(
        domain(len(pins), pins=pins, cpu=topology(1, len(pins) // threads, threads)), there
    )


def _mixed(second: str) -> tuple[Finding, ...]:
    """The desktop, PUs 4 and 6 with another governor."""
    by_governor: dict[str, list[int]] = {"performance": [0, 2]}
    by_governor.setdefault(second, []).extend((4, 6))
    there = settings(
        host(DESKTOP),
        scaling_drivers=("intel_pstate",),
        governors=tuple(by_governor),
        pus_of_governor=tuple((name, CpuSet(pus)) for name, pus in by_governor.items()),
    )
    return diagnosed(domain(4, pins=[0, 2, 4, 6]), there)


def _every_pu(there: Host) -> list[str]:
    return [str(pu.index) for pu in there.pus]


QUIET_CASES: dict[str, Case] = {
    "isolated-with-tick": Case(
        "x86-2p2n16c32t-isolated-pus with isolcpus= alone",
        lambda: on_isolated(set_apart(host(ISOLATED), [*range(4, 8), *range(20, 24)], nohz=False)),
        lambda: on_isolated(host(ISOLATED)),
    ),
    "sibling-not-isolated": Case(
        "PUs 4-7 isolated without their siblings 20-23",
        lambda: on_isolated(set_apart(host(ISOLATED), range(4, 8))),
        lambda: on_isolated(set_apart(host(ISOLATED), range(4, 8)), (4, 20)),
    ),
    "irq-on-isolated": Case(
        "a NIC of hgx-h100 that interrupts isolated PU 9, where a vCPU is",
        lambda: quiet(interrupting(set_apart(host(HGX), range(8, 12)), NIC, ["9", "0"])),
        lambda: quiet(interrupting(set_apart(host(HGX), range(8, 12)), NIC, _every_pu(host(HGX)))),
    ),
    "irqbalance-on-vcpus": Case(
        "irqbalance running, and an interrupt of a NIC on a vCPU's PU",
        lambda: quiet(settings(interrupting(host(HGX), NIC, ["9", "0"]), irqbalance=True)),
        lambda: quiet(settings(interrupting(host(HGX), NIC, ["0", "1"]), irqbalance=True)),
    ),
    "irq-far": Case(
        "the GPU's interrupts on PU 60, in the package without vCPUs",
        lambda: quiet(interrupting(host(HGX), gpus(HGX, 1)[0], ["60"], "vfio-pci")),
        lambda: quiet(interrupting(host(HGX), gpus(HGX, 1)[0], ["60", "2"], "vfio-pci")),
    ),
    "smt-off": Case(
        "threads='2' where SMT control says off",
        lambda: diagnosed(
            domain(2, pins=[0, 1], cpu=topology(1, 1, 2)),
            settings(host(SMT_OFF), smt_control="off"),
        ),
        lambda: diagnosed(
            domain(2, pins=[0, 1], cpu=topology(1, 2)), settings(host(SMT_OFF), smt_control="off")
        ),
    ),
    "emulator-on-sibling": Case(
        "the emulator on PU 1 of rtx4080-i9-14900k, sibling of a vCPU's PU 0",
        lambda: diagnosed(domain(2, pins=[0, 2], cputune="<emulatorpin cpuset='1'/>"), DESKTOP),
        lambda: diagnosed(domain(2, pins=[0, 2], cputune="<emulatorpin cpuset='16'/>"), DESKTOP),
    ),
    "governor-mixed": Case(
        "two vCPUs with governor performance and two with powersave of intel_pstate",
        lambda: _mixed("powersave"),
        lambda: _mixed("performance"),
    ),
}
