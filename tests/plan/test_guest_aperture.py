"""Address space, locked memory, IOMMU entries, and the vIOMMU."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.machine.pci import PciBar
from homenode.machine.settings import HostSettings
from homenode.machine.topology import Host
from homenode.plan.shape.aperture import compute_window_bytes
from homenode.plan.shape.assemble import assemble
from homenode.units import GIB, MIB, TIB
from homenode.vm.layout import PRESETS
from homenode.vm.model import Vm
from homenode.vm.plan import Plan
from tests.guest_shapes import HGX_GPUS, hgx_host, placed
from tests.small_hosts import small_request

QEMU_8 = HostSettings(qemu_version=(8, 2, 0))


def with_bars(host: Host, *sizes: int) -> Host:
    """The host whose GPUs have these 64-bit prefetchable BARs, and 16 MiB of another kind."""
    bars = tuple(PciBar(2 * i, size, True, True) for i, size in enumerate(sizes))
    bars += (PciBar(5, 16 * MIB, False, False), PciBar(6, TIB, True, True))
    return structs.replace(
        host,
        settings=QEMU_8,
        pci_devices=tuple(
            structs.replace(device, bars=bars) if device.bdf in HGX_GPUS else device
            for device in host.pci_devices
        ),
    )


def planned(host: Host, guest: dict[str, object] | None = None, **changes: object) -> Plan:
    request = small_request(4, 64 * GIB, layout="pin-numa-pci", devices=[str(b) for b in HGX_GPUS])
    document: Vm = structs.replace(request.guest, **(guest or {}))
    request = replace(request, guest=document, **changes)
    return assemble(host, request, placed((2, 2), devices=HGX_GPUS))


def test_eight_bars_of_128_gib_need_a_tebibyte() -> None:
    plan = planned(with_bars(hgx_host(), 128 * GIB), {"firmware": "efi"})
    assert plan.aperture is not None
    assert plan.aperture.pcihole64_bytes == TIB
    assert plan.aperture.firmware_mmio64_mib == TIB // MIB


def test_small_bars_next_to_a_large_one_cost_its_alignment() -> None:
    devices = [d for d in with_bars(hgx_host(), 128 * GIB, 32 * MIB).pci_devices if d.bars]
    assert compute_window_bytes(devices) == 2 * TIB
    assert compute_window_bytes(devices[:3]) == TIB
    assert compute_window_bytes([]) == 0
    plain = structs.replace(devices[0], bars=(PciBar(0, GIB, True, False),))
    assert compute_window_bytes([plain]) == 0


@pytest.mark.parametrize("bar_bytes", [256 * MIB, 4 * GIB])
def test_nothing_is_set_where_the_default_window_suffices(bar_bytes: int) -> None:
    guest: dict[str, object] = {"cpu_mode": "custom", "max_memory_bytes": TIB}
    plan = planned(with_bars(hgx_host(), bar_bytes), guest)
    assert plan.aperture is not None
    assert plan.aperture.pcihole64_bytes is None
    assert plan.aperture.firmware_mmio64_mib is None
    assert plan.aperture.physical_address_bits is None


def test_a_window_that_is_there_already_is_left() -> None:
    plan = planned(with_bars(hgx_host(), 128 * GIB), {"pcihole64_bytes": 2 * TIB})
    assert plan.aperture is not None and plan.aperture.pcihole64_bytes is None


def test_seabios_needs_no_firmware_window() -> None:
    for firmware in (None, "bios"):
        plan = planned(with_bars(hgx_host(), 128 * GIB), {"firmware": firmware})
        assert plan.aperture is not None and plan.aperture.firmware_mmio64_mib is None


@pytest.mark.parametrize(
    ("guest", "qemu", "bits"),
    [
        ({}, (8, 2, 0), None),  # the guest has the host's
        ({}, (5, 2, 0), 41),
        ({"cpu_mode": "custom"}, (8, 2, 0), 41),
        ({"cpu_mode": "host-model", "physical_address_bits": 39}, (8, 2, 0), 41),
        ({"cpu_mode": "custom", "physical_address_bits": 46}, (8, 2, 0), None),
        ({"domain_type": "qemu"}, (8, 2, 0), 41),
        ({"cpu_mode": "custom", "max_memory_bytes": 3 * TIB}, (8, 2, 0), 43),
    ],
)
def test_address_bits_are_set_where_the_guest_has_too_few(
    guest: dict[str, object], qemu: tuple[int, int, int], bits: int | None
) -> None:
    host = structs.replace(
        with_bars(hgx_host(), 128 * GIB), settings=HostSettings(qemu_version=qemu)
    )
    plan = planned(host, guest)
    assert plan.aperture is not None and plan.aperture.physical_address_bits == bits


def test_40_bits_hold_512_gib_of_bars_above_as_much_memory_and_4_gib_of_low_space() -> None:
    for memory_gib, bits in ((508, None), (509, 41)):
        guest = {"cpu_mode": "custom", "max_memory_bytes": memory_gib * GIB}
        plan = planned(with_bars(hgx_host(), 64 * GIB), guest)
        assert plan.aperture is not None and plan.aperture.pcihole64_bytes == 512 * GIB
        assert plan.aperture.physical_address_bits == bits


def test_an_unknown_qemu_is_a_gap_where_it_matters() -> None:
    host = structs.replace(with_bars(hgx_host(), 128 * GIB), settings=HostSettings())
    assert any(gap.subject == "QEMU's version" for gap in planned(host).gaps)


def test_locked_memory_is_the_guest_and_a_gibibyte_once_a_device_with_an_iommu() -> None:
    host = with_bars(hgx_host(), 128 * GIB)
    plain, with_iommu = planned(host), planned(host, {"has_iommu": True})
    assert plain.aperture is not None and plain.aperture.memlock_bytes == 65 * GIB
    assert with_iommu.aperture is not None
    assert with_iommu.aperture.memlock_bytes == 8 * 65 * GIB


def test_iommu_entries_count_memory_and_bars_in_pages() -> None:
    host = with_bars(hgx_host(), 128 * GIB)
    plan = planned(host, page_bytes=GIB)
    # 64 of memory, 8 x 128 of BARs, one for the small BARs; nothing for virtual functions
    assert plan.aperture is not None
    assert plan.aperture.dma_map_entries == 64 + 8 * 128 + 1
    small = planned(host)
    assert small.aperture is not None
    assert small.aperture.dma_map_entries == (64 * GIB + 8 * (128 * GIB + 16 * MIB)) // 4096


def test_unknown_bars_are_a_gap_and_no_value_is_invented() -> None:
    plan = planned(structs.replace(hgx_host(), settings=QEMU_8))
    assert plan.aperture is not None and plan.aperture.pcihole64_bytes is None
    assert any(
        "BAR sizes of 0000:19:00.0" in gap.reason and "4 more" in gap.reason for gap in plan.gaps
    )
    known = planned(with_bars(hgx_host(), 256 * MIB))
    assert "64-bit PCI window" not in {gap.subject for gap in known.gaps}


def test_layouts_that_leave_pcie_as_it_was_leave_its_window_too_and_say_so() -> None:
    host = with_bars(hgx_host(), 128 * GIB)
    plan = planned(host, layout=PRESETS["pin-numa"])
    assert plan.aperture is not None and plan.aperture.pcihole64_bytes is None
    assert plan.aperture.memlock_bytes == 65 * GIB
    (finding,) = [f for f in plan.findings if f.id == "pci-window-small"]
    assert finding.severity == "info"
    assert "1 TiB" in finding.expected and "32 GiB" in finding.observed
    assert "<pcihole64 unit='KiB'>1073741824</pcihole64>" in (finding.fix or "")
    for bits, id_and_severity in (
        (None, ("address-bits-small", "critical")),
        (42, ("pci-window-small", "warning")),
    ):
        model: dict[str, object] = {"cpu_mode": "custom", "physical_address_bits": bits}
        of_model = planned(host, model, layout=PRESETS["pin-numa"])
        small = [(f.id, f.severity) for f in of_model.findings if f.id.endswith("-small")]
        assert small == [id_and_severity]
    for space in ({"pcihole64_bytes": TIB}, {"has_qemu_commandline": True}):
        roomy = planned(host, dict(space), layout=PRESETS["pin-numa"])
        assert not [f for f in roomy.findings if f.id == "pci-window-small"]


@pytest.mark.parametrize("name", ["default", "pin", "pin-numa"])
def test_devices_that_the_document_lacks_get_their_window_in_any_layout(name: str) -> None:
    host = with_bars(hgx_host(), 128 * GIB)
    plan = planned(host, {"hostdevs": (), "firmware": "efi"}, layout=PRESETS[name])
    assert plan.aperture is not None and plan.aperture.pcihole64_bytes == TIB
    assert plan.aperture.firmware_mmio64_mib == TIB // MIB
    assert "pci-window-small" not in [finding.id for finding in plan.findings]


def test_a_machine_without_a_pcie_root_gets_no_window_and_is_reported() -> None:
    i440fx: dict[str, object] = {"hostdevs": (), "machine": "pc-i440fx-7.2"}
    plan = planned(with_bars(hgx_host(), 128 * GIB), i440fx, layout=PRESETS["pin-numa"])
    assert plan.aperture is not None and plan.aperture.pcihole64_bytes is None
    (finding,) = [f for f in plan.findings if f.id == "pci-window-small"]
    assert "q35" in (finding.fix or "")


def test_the_virt_machines_window_has_a_limit() -> None:
    arm: dict[str, object] = {"architecture": "aarch64", "machine": "virt-8.0"}
    plan = planned(with_bars(hgx_host(), 128 * GIB), arm)
    assert plan.aperture is not None and plan.aperture.pcihole64_bytes is None
    assert "virt-window-small" in [finding.id for finding in plan.findings]


def test_a_guest_without_devices_has_no_aperture() -> None:
    plan = assemble(hgx_host(), small_request(4), placed((2, 2)))
    assert plan.aperture is None and not plan.vm.has_iommu


@pytest.mark.parametrize(("vcpus", "needed"), [(255, False), (256, True)])
def test_a_viommu_is_needed_above_255_vcpus(vcpus: int, needed: bool) -> None:
    plan = assemble(None, small_request(vcpus, 512 * GIB), placed((vcpus - 128, 128)))
    assert plan.vm.has_iommu is needed
    request = small_request(4)
    request = replace(request, guest=structs.replace(request.guest, has_iommu=True))
    assert assemble(None, request, placed((2, 2))).vm.has_iommu
