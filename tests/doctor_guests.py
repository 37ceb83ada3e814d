"""Guests on shipped hosts that the doctor's cases change in one thing each."""

from collections.abc import Sequence

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, PagePool, RunningDomain
from homenode.units import GIB
from tests.doctor_cases import changed, is_gpu
from tests.doctor_domains import binding, cells, diagnosed, domain, gpus, host, topology

SMALL, DESKTOP, ISOLATED = "small-2n8c-2gpu", "rtx4080-i9-14900k", "x86-2p2n16c32t-isolated-pus"
SMALL_GPUS = gpus(SMALL, 2)
H200 = "h200-xeon8558"
BIG = gpus(H200, 7)


def small(
    vcpus: int,
    pins: Sequence[int | str],
    *,
    devices: Sequence[Bdf] = (),
    more: str = "",
    cpu: str = "<cpu mode='host-passthrough'/>",
    cputune: str = "",
    gib: int = 2,
    on: Host | None = None,
) -> tuple[Finding, ...]:
    """What is found of a domain on the small host: nodes 0-3 and 4-7, a GPU on each."""
    xml = domain(vcpus, devices, gib=gib, pins=pins, more=more, cpu=cpu, cputune=cputune)
    return diagnosed(xml, host(SMALL) if on is None else on)


def two_cells(
    pins: Sequence[int | str] = (0, 1, 4, 5),
    *,
    nodes: Sequence[int] = (0, 1),
    mode: str = "strict",
    devices: Sequence[Bdf] = (),
    bound: bool = True,
    more: str = "",
    on: Host | None = None,
    shape: tuple[int, int, int] = (2, 2, 1),
    split: Sequence[str] = ("0-1", "2-3"),
) -> tuple[Finding, ...]:
    """The same with two cells of two vCPUs, bound to the nodes."""
    return small(
        4,
        pins,
        devices=devices,
        on=on,
        gib=2,
        cpu=topology(*shape, inside=cells(split, 2, nodes)),
        more=(binding(nodes, cell_mode=mode) if bound else "") + more,
    )


def pools(page_bytes: int, pages: int) -> Host:
    """The small host with huge pages on each node."""
    there = host(SMALL)
    pool = PagePool(page_bytes, pages, pages)
    return replace(there, nodes=tuple(replace(n, page_pools=(pool,)) for n in there.nodes))


def in_use(pus: str) -> Host:
    from homenode.cpuset import CpuSet

    other = RunningDomain(
        name="other",
        running=True,
        vcpu_pins=(CpuSet.parse(pus),),
        emulator_pus=None,
        iothread_pus=(),
        memory_bytes=GIB,
        memory_bound=False,
        memory_by_node=(),
        page_bytes=None,
        devices=(SMALL_GPUS[1],),
    )
    return replace(host(SMALL), domains=(other,))


def siblings(pins: Sequence[int]) -> tuple[Finding, ...]:
    """Two guest cores of two threads on the desktop, whose P cores are PUs 0-1, 2-3, ..."""
    return diagnosed(domain(4, pins=pins, cpu=topology(1, 2, 2)), DESKTOP)


def snp(gib: int, on: Host | None = None, *, iommufd: bool = False) -> tuple[Finding, ...]:
    launch = "<launchSecurity type='sev-snp'><policy>0x30000</policy></launchSecurity>"
    xml = domain(2, BIG[:1], gib=gib, pins=[0, 1], more=launch)
    if iommufd:
        xml = xml.replace(b"<source><address", b"<driver iommufd='yes'/><source><address")
    return diagnosed(xml, H200 if on is None else on)


def hugepages(size_mib: int) -> str:
    return (
        f"<memoryBacking><hugepages><page size='{size_mib}' unit='MiB'/></hugepages>"
        "</memoryBacking>"
    )


def grouped(driver: str | None) -> Host:
    """The desktop with the GPU's audio function driven by the host."""
    there = changed(host(DESKTOP), lambda d: d.kind is DeviceKind.AUDIO, driver=driver)
    return changed(there, lambda d: d.kind in (DeviceKind.AUDIO, DeviceKind.GPU), iommu_group=9)


def companion(group: int) -> Host:
    there = changed(host(DESKTOP), is_gpu, iommu_group=9)
    return changed(there, lambda d: d.kind is DeviceKind.NVME, iommu_group=group, driver="vfio-pci")


def passthrough_cache(pins: Sequence[int]) -> tuple[Finding, ...]:
    """One socket of 8 vCPUs that sees the host's cache of 16 threads, on 2x EPYC 9654."""
    cpu = topology(1, 8, inside="<cache mode='passthrough'/>")
    return diagnosed(domain(8, pins=pins, cpu=cpu), "epyc9654-2p-1node")


def one_socket(cache: str) -> tuple[Finding, ...]:
    """One socket of 8 vCPUs on two LLCs of 2x EPYC 9654, with this <cache>."""
    cpu = topology(1, 8, inside=cache)
    return diagnosed(domain(8, pins=[0, 1, 2, 3, 8, 9, 10, 11], cpu=cpu), "epyc9654-2p-1node")


def custom_cpu(devices: Sequence[Bdf], cpu: str, firmware: str = "") -> tuple[Finding, ...]:
    xml = domain(4, devices, gib=64, pins=[0, 1, 2, 3], cpu=cpu)
    if firmware:
        xml = xml.replace(b"<os>", firmware.encode())
    return diagnosed(xml, H200)


DESKTOP_GPU = gpus(DESKTOP, 1)
