"""Link registers of QEMU's own root port and endpoint are read, and written in two fields only."""

import shutil

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.change.retrain.config_registers import SPEED_OF_CODE, find_express, read_registers
from homenode.change.retrain.plan import RetrainError, RetrainPlan, plan_retrain
from homenode.errors import HostError
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.topology import Host
from tests.doctor_cases import port
from tests.qemu_config import QEMU, QemuConfig, qemu_config
from tests.simulated_config import retrained

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"{QEMU} is not installed"),
]

PORT, DEVICE = Bdf.parse("00:03.0"), Bdf.parse("01:00.0")
DEVICES = (
    "pcie-root-port,id=rp,addr=3.0,chassis=1,x-speed=16,x-width=16",
    "nvme,bus=rp,serial=1",
    "virtio-rng-pci,addr=4.0",
    "e1000,addr=5.0",
)


def with_buses(space: QemuConfig) -> None:
    """What firmware would do: bus 1 is behind the root port."""
    space.write(PORT, 0x18, 4, 0x00010100)


def described() -> Host:
    text = port("00:03.0", "1b36:000c", "Root Port (Slot+)", "00", "01", "01", 16, 16, 2.5, 1)
    text += "\n\n01:00.0 Non-Volatile memory controller [0108]: Red Hat [1b36:0010]"
    return host_from_lspci(text, "q35")


def test_registers_of_qemus_port_and_device_are_read() -> None:
    with qemu_config(DEVICES) as space:
        with_buses(space)
        space.accesses.clear()
        above, below = read_registers(space, PORT), read_registers(space, DEVICE)
        assert SPEED_OF_CODE[above.max_code] == 16.0 and above.current_width >= 1
        assert below.max_code in SPEED_OF_CODE
        assert {access.kind for access in space.accesses} == {"read"}


def test_functions_without_links_are_said_to_have_none() -> None:
    with qemu_config(DEVICES) as space:
        for address, words in (("00:05.0", "no PCI Express capability"), ("00:1e.0", "no answer")):
            with pytest.raises(HostError, match=words):
                find_express(space, Bdf.parse(address))


def test_a_port_that_reports_no_link_is_refused_and_not_written() -> None:
    """Before any firmware ran, QEMU's port says that it reports links and that it has none."""
    with qemu_config(DEVICES) as space:
        with_buses(space)
        host = described()
        space.accesses.clear()
        with pytest.raises(RetrainError, match="no link"):
            plan_retrain(host, DEVICE, space, {d.bdf: () for d in host.pci_devices})
        assert {access.kind for access in space.accesses} == {"read"}


def test_only_two_fields_of_qemus_port_are_written() -> None:
    """QEMU's target speed is read-only, so the training fails, and everything is as it was."""
    with qemu_config(DEVICES) as space:
        with_buses(space)
        before = {bdf: space.image(bdf) for bdf in (PORT, DEVICE)}
        registers = read_registers(space, PORT)
        plan = RetrainPlan(PORT, DEVICE, replace(registers, status=0x2011), 3, 1)
        space.accesses.clear()
        result = retrained(plan, space)
        assert [finding.id for finding in result.findings] == ["retrain-failed"]
        writes = [access for access in space.accesses if access.kind == "write"]
        assert {(a.bdf, a.offset, a.size) for a in writes} == {
            (PORT, registers.at + 0x30, 2),
            (PORT, registers.at + 0x10, 2),
        }
        assert {bdf: space.image(bdf) for bdf in (PORT, DEVICE)} == before
