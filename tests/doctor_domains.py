"""Domains for tests of the doctor: in a few words, on the study's hosts."""

from collections.abc import Sequence
from functools import cache

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import diagnose
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.vm.domain.read import open_domain
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host

NAME = "vm.xml"


@cache
def host(name: str) -> Host:
    return load_host(name)


def gpus(name: str, count: int) -> tuple[Bdf, ...]:
    """The first GPUs of a shipped host."""
    return tuple(gpu.bdf for gpu in host(name).devices_of_kind(DeviceKind.GPU))[:count]


def board(name: str) -> tuple[Bdf, ...]:
    """All GPUs of a shipped host, and its NVSwitches."""
    switches = host(name).devices_of_kind(DeviceKind.NVSWITCH)
    return (*gpus(name, 16), *(one.bdf for one in switches))


def domain(
    vcpus: int,
    devices: Sequence[Bdf] = (),
    *,
    gib: int = 16,
    pins: Sequence[int | str] = (),
    cpu: str = "<cpu mode='host-passthrough'/>",
    more: str = "",
    cputune: str = "",
    machine: str = "q35",
    managed: str = "yes",
) -> bytes:
    """A domain document. pins: CPUs of each vCPU. cputune: more of it. more: other elements."""
    hostdevs = "".join(
        f"<hostdev mode='subsystem' type='pci' managed='{managed}'><source><address "
        f"domain='0x{b.domain:04x}' bus='0x{b.bus:02x}' slot='0x{b.device:02x}' "
        f"function='0x{b.function:x}'/></source></hostdev>"
        for b in devices
    )
    pinned = "".join(f"<vcpupin vcpu='{i}' cpuset='{pus}'/>" for i, pus in enumerate(pins))
    tuned = f"<cputune>{pinned}{cputune}</cputune>" if pinned or cputune else ""
    return (
        f"<domain type='kvm'><name>vm</name><memory unit='GiB'>{gib}</memory>"
        f"<vcpu placement='static'>{vcpus}</vcpu>{tuned}{more}"
        f"<os><type arch='x86_64' machine='{machine}'>hvm</type></os>{cpu}<devices>"
        f"<controller type='pci' index='0' model='pcie-root'/>{hostdevs}</devices></domain>"
    ).encode()


def topology(sockets: int, cores: int, threads: int = 1, inside: str = "") -> str:
    """A <cpu> with a topology, and more elements behind it."""
    return (
        f"<cpu mode='host-passthrough'><topology sockets='{sockets}' dies='1' cores='{cores}' "
        f"threads='{threads}'/>{inside}</cpu>"
    )


def cells(vcpus: Sequence[str], gib: int) -> str:
    """<numa> of cells with these vCPUs; see binding() for their memory."""
    inside = "".join(
        f"<cell id='{i}' cpus='{each}' memory='{gib // len(vcpus)}' unit='GiB'/>"
        for i, each in enumerate(vcpus)
    )
    return f"<numa>{inside}</numa>"


def binding(nodes: Sequence[int], cell_mode: str | None = None) -> str:
    """<numatune> that binds cell i to node i of these; without cell_mode memory as a whole."""
    listed = ",".join(map(str, nodes))
    per_cell = "".join(
        f"<memnode cellid='{i}' mode='{cell_mode}' nodeset='{node}'/>"
        for i, node in enumerate(nodes)
        if cell_mode
    )
    return f"<numatune><memory mode='strict' nodeset='{listed}'/>{per_cell}</numatune>"


def diagnosed(xml: bytes, on: Host | str) -> tuple[Finding, ...]:
    """What the doctor finds in a domain on a host."""
    return diagnose(host(on) if isinstance(on, str) else on, open_domain(xml, NAME)).findings


def planned(xml: bytes, on: str, layout: str) -> bytes:
    """The document as our own planner tunes it."""
    return plan_file(xml, NAME, PlanOptions(layout=layout), host(on)).document


def ids(findings: Sequence[Finding]) -> list[str]:
    return [finding.id for finding in findings]
