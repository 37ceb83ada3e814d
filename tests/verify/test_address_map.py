"""BARs like the devices' own must find room in the stand-in, with the document's firmware."""

import re
from functools import cache

import pytest

from homenode.check.verify.boot.guest_files import find_ovmf
from homenode.check.verify.boot.stand_in import TCG_ADDRESS_BITS, map_addresses
from homenode.check.verify.boot.stand_in_boot import BootOptions, boot_stand_in
from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.units import GIB
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.verify_documents import PLAIN, changed, small_host
from tests.verify_guests import guest_files


@cache
def with_gpus(gpus: int, gib: int) -> PlannedFile:
    plain = changed(
        re.sub(rb" *<hostdev.*</hostdev>\n", b"", PLAIN, flags=re.DOTALL),
        ("<os>", "<os firmware='efi'>"),
        ("mode='host-passthrough'", "mode='host-model'"),
        (">4</memory>", f">{gib}</memory>"),
    )
    options = PlanOptions(layout="pin-numa-pci", gpu_count=gpus)
    return plan_file(plain, "vm.xml", options, load_host("hgx-h100"))


def without_window(xml: bytes) -> bytes:
    bare = re.sub(rb"<pcihole64[^>]*>[^<]*</pcihole64>", b"", xml)
    return re.sub(rb"<qemu:commandline>.*</qemu:commandline>", b"", bare, flags=re.DOTALL)


@pytest.mark.parametrize(("gpus", "gib", "shift"), [(1, 64, 0), (2, 64, 0), (8, 768, 2)])
def test_what_fits_40_bits_keeps_its_size(gpus: int, gib: int, shift: int) -> None:
    document = open_domain(with_gpus(gpus, gib).document, "vm.xml")
    space = map_addresses(document, build_vm(document), load_host("hgx-h100"))
    assert space is not None
    assert space.shift == shift
    assert [size for _, size in space.bars] == [128 * GIB >> shift] * gpus
    assert space.memory_bytes == gib * GIB >> shift
    assert space.memory_bytes + sum(size for _, size in space.bars) < 1 << TCG_ADDRESS_BITS


def test_devices_without_large_bars_need_no_map() -> None:
    no_devices = PLAIN[: PLAIN.index(b"    <hostdev")] + b"</devices></domain>"
    document = open_domain(no_devices, "vm.xml")
    assert map_addresses(document, build_vm(document), small_host()) is None


@pytest.mark.nightly
@pytest.mark.qemu
def test_gpus_that_would_vanish_are_named_before_they_do() -> None:
    if find_ovmf() is None:
        pytest.skip("needs ovmf")
    guest_files()
    document = open_domain(without_window(with_gpus(2, 64).document), "vm.xml")
    options = BootOptions(connect="none", timeout_s=600)
    booted = boot_stand_in(document, build_vm(document), options, load_host("hgx-h100"))
    assert booted.guest is not None
    gone = [one for one in booted.findings if one.id == "guest-bar-unplaced"]
    assert len(gone) == 2, booted.findings
