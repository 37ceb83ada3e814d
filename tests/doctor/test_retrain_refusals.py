"""When a link is not retrained: the device is used, or its port is not what it should be."""

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.change.retrain.plan import (
    FunctionHolders,
    RetrainRefusal,
)
from homenode.errors import HostError, InputError
from homenode.machine.topology import RunningDomain
from tests.doctor.test_retrain import GPU, planned, sick, unused
from tests.doctor_domains import host as shipped
from tests.simulated_config import (
    AT,
    LINK_CONTROL,
    LINK_STATUS,
    SimulatedConfig,
)

RUNNING = RunningDomain(
    name="gpu-vm",
    running=True,
    vcpu_pins=(),
    emulator_pus=None,
    iothread_pus=(),
    memory_bytes=1,
    memory_bound=False,
    memory_by_node=(),
    page_bytes=None,
    devices=(GPU,),
)


AUDIO = Bdf(GPU.domain, GPU.bus, GPU.device, 1)


def test_a_running_domain_with_the_device_refuses() -> None:
    host = replace(sick(), domains=(RUNNING,))
    space = SimulatedConfig(host)
    with pytest.raises(RetrainRefusal, match="running domain 'gpu-vm'"):
        planned(host, space)
    assert space.accesses == []


def test_a_domain_that_is_shut_off_does_not_refuse() -> None:
    host = replace(sick(), domains=(replace(RUNNING, running=False),))
    assert planned(host, SimulatedConfig(host)).is_needed


@pytest.mark.parametrize("driver", ["nvidia", "nouveau", "amdgpu", "snd_hda_intel", "xe"])
def test_a_working_driver_behind_the_port_refuses(driver: str) -> None:
    host = sick(driver=driver)
    space = SimulatedConfig(host)
    with pytest.raises(RetrainRefusal, match=f"driver {driver}"):
        planned(host, space)
    assert space.accesses == []


def test_a_driver_of_the_cards_audio_function_refuses_as_well() -> None:
    host = sick()
    devices = tuple(
        replace(d, driver="snd_hda_intel") if d.bdf == AUDIO else d for d in host.pci_devices
    )
    host = replace(host, pci_devices=devices)
    with pytest.raises(RetrainRefusal, match=str(AUDIO)):
        planned(host, SimulatedConfig(host))


def test_an_open_vfio_group_refuses_and_a_closed_one_does_not() -> None:
    host = sick()
    space = SimulatedConfig(host)
    owned = {**unused(host), AUDIO: FunctionHolders(("qemu-system-x86 (process 4711)",))}
    with pytest.raises(RetrainRefusal, match="process 4711"):
        planned(host, space, uses=owned)
    assert space.accesses == []
    assert planned(host, space).is_needed


def test_who_cannot_see_who_has_the_group_is_refused() -> None:
    host = sick()
    with pytest.raises(RetrainRefusal, match="look as root"):
        planned(host, SimulatedConfig(host), uses={})
    with pytest.raises(RetrainRefusal, match="as root"):
        planned(host, SimulatedConfig(host), uses={**unused(host), GPU: FunctionHolders(None)})


@pytest.mark.parametrize(
    ("at", "bits", "words"),
    [(LINK_CONTROL, 0x10, "disabled"), (LINK_STATUS + 1, 0x08, "training")],
)
def test_a_port_in_another_state_refuses(at: int, bits: int, words: str) -> None:
    space = SimulatedConfig(sick())
    port = planned(space.host, space).port
    space.spaces[port][at] |= bits
    with pytest.raises(RetrainRefusal, match=words):
        planned(space.host, space)
    assert space.writes == []


def test_a_port_without_a_link_refuses() -> None:
    space = SimulatedConfig(sick())
    port = planned(space.host, space).port
    space.spaces[port][LINK_STATUS + 1] &= ~0x20
    with pytest.raises(RetrainRefusal, match="no link") as refused:
        planned(space.host, space)
    assert f"lspci -vvs {port}" in (refused.value.hint or "")  # there is no VM to shut down


def test_ports_virtual_functions_and_unknown_addresses_are_no_devices() -> None:
    host = sick()
    space = SimulatedConfig(host)
    port = planned(host, space).port
    with pytest.raises(InputError, match="found the port above") as error:
        planned(host, space, device=port)
    assert str(GPU) in (error.value.hint or "")
    with pytest.raises(InputError, match="no such PCI function"):
        planned(host, space, device=Bdf.parse("ff:1f.7"))
    sriov = shipped("x86-2p2n8c16t-sriov-nic")
    virtual = next(d.bdf for d in sriov.pci_devices if d.physical_function is not None)
    with pytest.raises(InputError, match="virtual one"):
        planned(sriov, SimulatedConfig(sriov), device=virtual)


def test_functions_without_a_target_register_are_refused() -> None:
    space = SimulatedConfig(sick())
    port = planned(space.host, space).port
    space.spaces[port][AT + 2] = 0x41
    with pytest.raises(HostError, match="version 1"):
        planned(space.host, space)
    space.spaces[port][0:4] = b"\xff\xff\xff\xff"
    with pytest.raises(HostError, match="no answer"):
        planned(space.host, space)
    space.spaces[port][0:4] = b"\x86\x80\x2a\x35"
    space.spaces[port][0x34] = 0
    with pytest.raises(HostError, match="no PCI Express capability"):
        planned(space.host, space)
