"""For each finding of a domain one that has it and one that nearly has it, on shipped hosts."""

from collections.abc import Sequence

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, PagePool
from homenode.plan.pipeline import plan_file
from homenode.units import GIB, MIB
from homenode.vm.plan_options import PlanOptions
from tests.doctor_cases import Case, changed, is_gpu, settings
from tests.doctor_domains import binding, cells, diagnosed, domain, gpus, host, topology
from tests.small_hosts import pinned_domain

WINDOWS = (
    "<metadata><o:libosinfo xmlns:o='http://libosinfo.org/xmlns/libvirt/domain/1.0'>"
    "<o:os id='http://microsoft.com/win/2k22'/></o:libosinfo></metadata>"
)
PASSTHROUGH = "<features><hyperv mode='passthrough'/></features>"


def _expander(machine: str) -> bytes:
    bus = (
        "<controller type='pci' index='1' model='pcie-expander-bus'><target busNr='128'>"
        "<node>0</node></target><address type='pci' domain='0' bus='0' slot='0x1f' function='0'/>"
        "</controller></devices>"
    )
    return domain(2, pins=[0, 1], machine=machine).replace(b"</devices>", bus.encode())


def _on_grace(layout: str) -> tuple[Finding, ...]:
    grace = host("gh200x4")
    versions = replace(grace.settings, libvirt_version=(12, 1, 0), qemu_version=(9, 2, 0))
    grace = replace(grace, settings=versions)
    xml = domain(8, gpus("gh200x4", 1), machine="virt").replace(b"x86_64", b"aarch64")
    return diagnosed(plan_file(xml, "vm.xml", PlanOptions(layout=layout), grace).document, grace)


def _planned(*, swapped: bool) -> tuple[Finding, ...]:
    from tests.verify_documents import swapped as exchange
    from tests.verify_documents import tuned

    xml = tuned("pin-numa-pci").document
    if swapped:
        xml = exchange(xml, "<node>0</node>", "<node>1</node>")
    return diagnosed(xml, SMALL)


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
    mode: str = "strict",
    devices: Sequence[Bdf] = (),
    more: str = "",
    on: Host | None = None,
) -> tuple[Finding, ...]:
    """The same with two cells of two vCPUs, bound to the nodes."""
    cpu = topology(2, 2, inside=cells(["0-1", "2-3"], 2))
    more = binding((0, 1), cell_mode=mode) + more
    return small(4, pins, devices=devices, on=on, cpu=cpu, more=more)


def pools(page_bytes: int, pages: int) -> Host:
    """The small host with huge pages on each node."""
    there = host(SMALL)
    pool = PagePool(page_bytes, pages, pages)
    return replace(there, nodes=tuple(replace(n, page_pools=(pool,)) for n in there.nodes))


def in_use(pus: str) -> Host:
    devices = (str(SMALL_GPUS[1]),)
    other = pinned_domain(pus, memory_bytes=GIB, devices=devices)
    return replace(host(SMALL), domains=(other,))


def siblings(pins: Sequence[int]) -> tuple[Finding, ...]:
    """Two guest cores of two threads on the desktop, whose P cores are CPUs 0-1, 2-3, ..."""
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


GUEST_CASES: dict[str, Case] = {
    "llc-straddled": Case(
        lambda: diagnosed(domain(8, pins=range(0, 64, 8)), "epyc9654-2p-1node"),
        lambda: diagnosed(domain(8, pins=range(8)), "epyc9654-2p-1node"),
    ),
    "core-kinds-mixed": Case(
        lambda: diagnosed(domain(4, pins=[0, 2, 16, 17]), DESKTOP),
        lambda: diagnosed(
            domain(4, pins=[0, 2, 4, 6], cputune="<emulatorpin cpuset='16-17'/>"), DESKTOP
        ),
    ),
    "host-core-taken": Case(lambda: small(8, range(8)), lambda: small(7, range(7))),
    "flat-over-nodes": Case(lambda: small(4, [0, 1, 4, 5]), two_cells),
    "iothread-on-vcpu": Case(
        lambda: small(
            2,
            [0, 1],
            more="<iothreadids><iothread id='4294967295'/></iothreadids>",
            cputune="<iothreadpin iothread='4294967295' cpuset='1'/>",
        ),
        lambda: small(
            2,
            [0, 1],
            more="<iothreads>1</iothreads>",
            cputune="<iothreadpin iothread='1' cpuset='2'/>",
        ),
    ),
    "emulator-floats": Case(
        lambda: small(2, [0, 1]), lambda: small(2, [0, 1], cputune="<emulatorpin cpuset='2-3'/>")
    ),
    "emulator-on-vcpu": Case(
        lambda: small(2, [0, 1], cputune="<emulatorpin cpuset='1-2'/>"),
        lambda: small(2, [0, 1], cputune="<emulatorpin cpuset='2-3'/>"),
    ),
    "floats-on-isolated": Case(
        lambda: diagnosed(domain(2, pins=["4-7", "4-7"]), ISOLATED),
        lambda: diagnosed(domain(2, pins=[4, 5]), ISOLATED),
    ),
    "emulator-on-isolated": Case(
        lambda: diagnosed(domain(2, pins=[4, 5], cputune="<emulatorpin cpuset='6-7'/>"), ISOLATED),
        lambda: diagnosed(domain(2, pins=[4, 5], cputune="<emulatorpin cpuset='0-1'/>"), ISOLATED),
    ),
    "isolated-unused": Case(
        lambda: diagnosed(domain(2, pins=[0, 1]), ISOLATED),
        lambda: diagnosed(domain(2, pins=[4, 5]), ISOLATED),
    ),
    "windows-enlightenments": Case(
        lambda: small(65, [], cpu=topology(1, 65), more=WINDOWS),
        lambda: small(65, [], cpu=topology(1, 65), more=f"{WINDOWS}{PASSTHROUGH}"),
    ),
    "sockets-implicit": Case(
        lambda: small(3, [0, 1, 2]), lambda: small(3, [0, 1, 2], cpu=topology(1, 3))
    ),
    "socket-cut-by-cell": Case(
        lambda: small(
            6,
            [0, 1, 4, 5, 6, 7],
            more=binding([0, 1], cell_mode="strict"),
            cpu=topology(2, 3, inside=cells(["0-1", "2-5"], 2)),
        ),
        two_cells,
    ),
    "threads-not-siblings": Case(lambda: siblings([0, 2, 4, 6]), lambda: siblings([0, 1, 2, 3])),
    "topoext-missing": Case(
        lambda: diagnosed(
            domain(4, pins=[0, 64, 1, 65], cpu=topology(1, 2, 2)), "rtx5090-epyc7702"
        ),
        lambda: diagnosed(
            domain(
                4,
                pins=[0, 64, 1, 65],
                cpu=topology(1, 2, 2, "<feature policy='require' name='topoext'/>"),
            ),
            "rtx5090-epyc7702",
        ),
    ),
    "cache-passthrough-false": Case(
        lambda: passthrough_cache([0, 1, 2, 3, 8, 9, 10, 11]), lambda: passthrough_cache(range(8))
    ),
    "guest-l3-false": Case(lambda: one_socket(""), lambda: one_socket("<cache mode='disable'/>")),
    "memory-unbound": Case(lambda: small(2, [0, 1]), lambda: small(2, [0, 1], more=binding([0]))),
    "memory-elsewhere": Case(
        lambda: small(2, [0, 1], more=binding([1])), lambda: small(2, [0, 1], more=binding([0]))
    ),
    "memnode-not-strict": Case(lambda: two_cells(mode="preferred"), two_cells),
    # memory bound to node 4 of gh200x4, which is a GPU's
    "memory-on-gpu": Case(
        lambda: diagnosed(domain(2, gib=8, pins=[0, 1], more=binding([4])), "gh200x4"),
        lambda: diagnosed(domain(2, gib=8, pins=[0, 1], more=binding([0])), "gh200x4"),
    ),
    "device-far": Case(
        lambda: small(2, [0, 1], devices=SMALL_GPUS[1:], more=binding([0])),
        lambda: small(2, [0, 1], devices=SMALL_GPUS[:1], more=binding([0])),
    ),
    "pages-small": Case(
        lambda: diagnosed(domain(2, gib=16), settings(host(H200), transparent_hugepages="never")),
        lambda: diagnosed(domain(2, gib=16), settings(host(H200), transparent_hugepages="madvise")),
    ),
    "ksm-on": Case(
        lambda: small(2, [], on=settings(host(SMALL), ksm_run=1)),
        lambda: small(2, [], on=settings(host(SMALL), ksm_run=0)),
    ),
    "numa-balancing": Case(
        lambda: small(2, [0, 1], on=settings(host(SMALL), numa_balancing=1)),
        lambda: small(2, [0, 1], more=binding([0]), on=settings(host(SMALL), numa_balancing=1)),
    ),
    "iommu-off": Case(
        lambda: diagnosed(
            domain(2, DESKTOP_GPU),
            changed(settings(host(DESKTOP), iommus=()), lambda d: True, iommu_group=None),
        ),
        # Where nothing shows whether it has one
        lambda: diagnosed(
            domain(2, DESKTOP_GPU), changed(host(DESKTOP), lambda d: True, iommu_group=None)
        ),
    ),
    "not-bound-to-vfio": Case(
        lambda: diagnosed(
            domain(2, DESKTOP_GPU, managed="no"), changed(host(DESKTOP), is_gpu, driver="nvidia")
        ),
        lambda: diagnosed(
            domain(2, DESKTOP_GPU, managed="no"),
            changed(host(DESKTOP), is_gpu, driver="mlx5_vfio_pci"),
        ),
    ),
    "iommu-group-companions": Case(
        lambda: diagnosed(domain(2, DESKTOP_GPU), companion(9)),
        lambda: diagnosed(domain(2, DESKTOP_GPU), companion(8)),
    ),
    "dma-map-limit": Case(lambda: snp(256), lambda: snp(64)),
    "address-bits-small": Case(
        lambda: custom_cpu(BIG, "<cpu mode='custom'><model>Cascadelake-Server</model></cpu>"),
        lambda: custom_cpu(BIG, "<cpu mode='host-passthrough'/>"),
    ),
    "pci-window-small": Case(
        lambda: custom_cpu(
            BIG[:1],
            "<cpu mode='custom'><model>Cascadelake-Server</model>"
            "<maxphysaddr mode='emulate' bits='46'/></cpu>",
            "<os firmware='efi'>",
        ),
        lambda: custom_cpu(BIG[:1], "<cpu mode='host-passthrough'/>", "<os firmware='efi'>"),
    ),
    # What homenode verify finds too.
    "unpinned": Case(lambda: small(2, []), lambda: small(2, [0, 1])),
    "vcpu-not-pinned": Case(lambda: small(3, [0, 1]), lambda: small(3, [0, 1, 2])),
    "cpu-shared": Case(lambda: small(2, [1, 1]), lambda: small(2, ["0-1", "0-1"])),
    "core-shared": Case(
        lambda: diagnosed(domain(2, pins=[0, 1]), DESKTOP),
        lambda: diagnosed(domain(2, pins=[0, 1], cpu=topology(1, 1, 2)), DESKTOP),
    ),
    "core-taken": Case(
        lambda: small(2, [0, 1], on=in_use("1")), lambda: small(2, [0, 1], on=in_use("2"))
    ),
    "pin-unknown-cpu": Case(lambda: small(2, [0, 8]), lambda: small(2, [0, 7])),
    "pin-offline-cpu": Case(
        lambda: diagnosed(domain(1, pins=[3]), "x86-2p2n8c16t-offline-pus"),
        lambda: diagnosed(domain(1, pins=[2]), "x86-2p2n8c16t-offline-pus"),
    ),
    "pin-disallowed-cpu": Case(
        lambda: diagnosed(domain(1, pins=[0]), "x86-2p2n8c16t-disallowed-pus"),
        lambda: diagnosed(domain(1, pins=[2]), "x86-2p2n8c16t-disallowed-pus"),
    ),
    "pin-off-node": Case(lambda: two_cells((0, 4, 1, 5)), two_cells),
    "memlock-low": Case(
        lambda: small(
            2,
            [0, 1],
            devices=SMALL_GPUS[:1],
            more="<memtune><hard_limit unit='GiB'>2</hard_limit></memtune>",
        ),
        lambda: small(
            2,
            [0, 1],
            devices=SMALL_GPUS[:1],
            more="<memtune><hard_limit unit='GiB'>3</hard_limit></memtune>",
        ),
    ),
    "acpi-missing": Case(two_cells, lambda: two_cells(more="<features><acpi/></features>")),
    "vcpus-above-cpus": Case(lambda: small(9, []), lambda: small(8, [])),
    "memory-unknown-node": Case(
        lambda: small(2, [0, 1], more=binding([2])), lambda: small(2, [0, 1], more=binding([1]))
    ),
    "memory-on-empty-node": Case(
        lambda: diagnosed(
            domain(2, gib=2, pins=[4, 5], more=binding([1])), "x86-2p2n8c16t-node1-no-memory"
        ),
        lambda: diagnosed(
            domain(2, gib=2, pins=[0, 1], more=binding([0])), "x86-2p2n8c16t-node1-no-memory"
        ),
    ),
    "memory-short": Case(
        lambda: small(2, [0, 1], gib=5, more=binding([0])),
        lambda: small(2, [0, 1], gib=3, more=binding([0])),
    ),
    "huge-pages-unknown": Case(
        lambda: small(2, [0, 1], more=binding([0]) + hugepages(2)),
        lambda: small(2, [0, 1], more=binding([0]) + hugepages(2), on=pools(2 * MIB, 4096)),
    ),
    "huge-page-size": Case(
        lambda: small(2, [0, 1], more=binding([0]) + hugepages(1024), on=pools(2 * MIB, 4096)),
        lambda: small(2, [0, 1], more=binding([0]) + hugepages(2), on=pools(2 * MIB, 4096)),
    ),
    "huge-pages-short": Case(
        lambda: small(2, [0, 1], more=binding([0]) + hugepages(2), on=pools(2 * MIB, 512)),
        lambda: small(2, [0, 1], more=binding([0]) + hugepages(2), on=pools(2 * MIB, 1024)),
    ),
    "huge-pages-not-whole": Case(
        lambda: small(
            4,
            [0, 1, 4, 5],
            gib=3,
            on=pools(GIB, 4),
            cpu=topology(
                2,
                2,
                inside=cells(["0-1", "2-3"], 3).replace(
                    "memory='1' unit='GiB'", "memory='1536' unit='MiB'"
                ),
            ),
            more=binding([0, 1], cell_mode="strict") + hugepages(1024),
        ),
        lambda: two_cells(more=hugepages(1024), on=pools(GIB, 4)),
    ),
    # two GPUs of each node of hgx-h100, whose nodes have four
    "gpus-split": Case(
        lambda: diagnosed(domain(8, [*gpus("hgx-h100", 8)[2:6]]), "hgx-h100"),
        lambda: diagnosed(domain(8, gpus("hgx-h100", 8)[:4]), "hgx-h100"),
    ),
    "expander-on-other-machine": Case(
        lambda: diagnosed(_expander("pc"), SMALL), lambda: diagnosed(_expander("q35"), SMALL)
    ),
    "devices-unknown": Case(
        lambda: small(2, [0, 1], devices=SMALL_GPUS[:1], on=replace(host(SMALL), pci_devices=())),
        lambda: small(2, [0, 1], on=replace(host(SMALL), pci_devices=())),
    ),
    # a device at 91:00.0, where small-2n8c-2gpu has none
    "device-not-on-host": Case(
        lambda: small(2, [0, 1], devices=[Bdf.parse("91:00.0")]),
        lambda: small(2, [0, 1], devices=SMALL_GPUS[1:]),
    ),
    "device-in-use": Case(
        lambda: small(1, [5], devices=SMALL_GPUS[1:], on=in_use("2")),
        lambda: small(1, [0], devices=SMALL_GPUS[:1], on=in_use("2")),
    ),
    "nvswitches-omitted": Case(
        lambda: diagnosed(domain(8, gpus(H200, 8)), H200),
        lambda: diagnosed(domain(8, gpus(H200, 4)), H200),
    ),
    "initiators-missing": Case(lambda: _on_grace("pin-bound"), lambda: _on_grace("pin-numa-pci")),
    "iommu-group-shared": Case(
        lambda: diagnosed(domain(2, DESKTOP_GPU), grouped("snd_hda_intel")),
        lambda: diagnosed(domain(2, DESKTOP_GPU), grouped("vfio-pci")),
    ),
    "device-without-cell": Case(
        lambda: two_cells(devices=SMALL_GPUS),
        lambda: small(2, [0, 1], devices=SMALL_GPUS[:1], more=binding([0])),
    ),
    "device-on-other-cell": Case(lambda: _planned(swapped=True), lambda: _planned(swapped=False)),
}
