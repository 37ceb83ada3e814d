"""vGPUs on the targets: the file names the mediated device itself, or the target refuses it."""

import pytest

from homenode.check.verify.verification import verify_target
from homenode.errors import InputError
from homenode.findings import Severity
from homenode.machine.pci import DeviceKind, PartKind
from homenode.plan.pipeline import PlannedFile, plan_for_target
from homenode.vm.targets.registry import read_vm
from homenode.vm.targets.target import find_array
from tests.targets.written import again, host_named, options, written

HOST = "x86-2p2n8c8t-divided-gpus"
PARTS = [p for gpu in host_named(HOST).devices_of_kind(DeviceKind.GPU) for p in gpu.parts]
UUIDS = [part.uuid or "" for part in PARTS if part.kind is PartKind.MEDIATED]


def of_target(target: str, layout: str = "pin-numa-pci", *uuids: str) -> PlannedFile:
    wanted = options(layout, vcpus=2, devices=uuids or (UUIDS[0],))
    return written(target, HOST, wanted)


@pytest.mark.parametrize("layout", ["pin", "pin-numa-pci"])
@pytest.mark.parametrize("target", ["qemu", "proxmox"])
def test_a_mediated_device_is_passed_by_its_uuid_and_never_bound_to_vfio(
    target: str, layout: str
) -> None:
    made = of_target(target, layout)
    text = made.rendering.document.decode()
    assert f"sysfsdev=/sys/bus/mdev/devices/{UUIDS[0]}" in text
    assert "-uuid" in text
    assert str(made.plan.vm.hostdevs[0].bdf) not in text
    hook = dict(made.rendering.companions).get(".hook.sh")
    script = text if hook is None else hook.decode()
    assert find_array(script, "devices") == ()
    found = verify_target(
        made.rendering.document, "vm", target, made.plan, host=host_named(HOST), hook=hook
    )
    assert {f.id for f in found.findings if f.severity is not Severity.INFO} == set()
    twice = again(made.rendering.document, HOST, options(layout, vcpus=2))
    assert twice.rendering.document == made.rendering.document
    other = made.rendering.document.replace(UUIDS[0].encode(), UUIDS[1].encode())
    wrong = verify_target(other, "vm", target, made.plan, host=host_named(HOST), hook=hook)
    assert {f.subject for f in wrong.findings} >= {UUIDS[0], UUIDS[1]}


def test_a_target_that_cannot_be_given_a_vgpu_refuses_it_by_name() -> None:
    with pytest.raises(InputError, match=f"found the vGPU {UUIDS[0]}: "):
        of_target("xen")


def test_a_virtual_function_with_a_vgpu_type_keeps_its_driver() -> None:
    wanted = options("pin-numa-pci", vcpus=2, gpu_count=1, gpu_profile="H200X-1-18C")
    made = written("qemu", HOST, wanted)
    (device,) = made.plan.vm.hostdevs
    text = made.rendering.document.decode()
    assert f"vfio-pci,host={device.bdf}" in text
    assert find_array(text, "devices") == ()


def test_a_vgpu_that_proxmox_makes_itself_stays_and_is_no_whole_gpu() -> None:
    conf = b"cores: 2\nmachine: q35\nmemory: 4096\nhostpci0: 0000:81:00.0,mdev=nvidia-558,pcie=1\n"
    vm = read_vm(conf, "101.conf")
    assert vm.guest.hostdevs == ()
    wanted = options("pin-numa-pci", vcpus=None, memory_bytes=None)
    made = plan_for_target(vm, wanted, host_named(HOST), "proxmox")
    assert b"hostpci0: 0000:81:00.0,mdev=nvidia-558,pcie=1\n" in made.rendering.document
    assert "target-line-unchanged" in {found.id for found in made.findings}
