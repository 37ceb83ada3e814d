"""A rendered command boots with stand-ins for its devices; its guest shows the planned nodes."""

import subprocess
from pathlib import Path

import pytest
from msgspec import structs

from homenode.check.verify.boot.stand_in_boot import BootOptions, boot_command
from homenode.check.verify.expectation import build_expectation
from homenode.check.verify.guest_checks import GuestView, compare_test_guest, view_of_guest
from homenode.check.verify.verification import build_target_expectation
from homenode.machine.pci import DeviceKind
from homenode.plan.pipeline import plan_for_target
from homenode.units import MIB
from homenode.vm.plan import Plan
from homenode.vm.plan_options import PlanOptions, Policy
from homenode.vm.sources import load_host
from homenode.vm.targets import qm_conf
from homenode.vm.targets.hypervisors import qemu
from homenode.vm.targets.registry import read_vm
from tests.targets.written import host_named, options, written
from tests.verify_guests import guest_files

pytestmark = pytest.mark.qemu

ROOT = Path(__file__).parents[2]
SMALL = "small-2n8c-2gpu"


@pytest.fixture(scope="module", autouse=True)
def _bootable() -> None:
    guest_files()


def seen(words: tuple[str, ...], plan: Plan) -> GuestView:
    booted = boot_command(words, "vm", BootOptions(timeout_s=500))
    assert booted.guest is not None, booted.findings
    return compare_test_guest(build_expectation(plan.vm), booted.stand_in, booted.guest)


def wrong(view: GuestView) -> list[str]:
    return [f.subject for f in view.findings if f.severity in ("critical", "warning")]


def node_of_device(view: GuestView) -> dict[str, str]:
    return {
        line.subject.removeprefix("device "): line.observed.partition(",")[0]
        for line in view.checks
        if line.subject.startswith("device ")
    }


def readme_command(vcpus: int | None) -> tuple[tuple[str, ...], Plan]:
    """README's example, eight GPUs of an HGX H100, as QEMU's command line. None = its 88 vCPUs."""
    path = ROOT / "demo" / "gpu-vm.xml"
    host = load_host("hgx-h100")
    wanted = PlanOptions(layout="pin-numa-pci", gpu_count=8, vcpus=vcpus)
    planned = plan_for_target(read_vm(path.read_bytes(), str(path)), wanted, host, "qemu")
    return qemu.parse_script(planned.rendering.document, "vm.sh"), planned.plan


@pytest.mark.nightly
@pytest.mark.parametrize("vcpus", [4, pytest.param(None, marks=pytest.mark.lab)])
def test_the_command_of_the_readme_boots_and_every_gpu_has_its_node(vcpus: int | None) -> None:
    words, plan = readme_command(vcpus)
    view = seen(words, plan)
    assert wrong(view) == []
    assert node_of_device(view) == {str(d.bdf): f"numa_node {d.cell}" for d in plan.vm.hostdevs}
    assert len(plan.vm.hostdevs) == 8


@pytest.mark.nightly
def test_a_configuration_of_proxmox_boots_and_shows_its_nodes_and_a_wrong_distance() -> None:
    planned = written("proxmox", SMALL, options("pin-numa-pci", gpu_count=2))
    conf = planned.rendering.document.replace(b"src=0,dst=1,val=20", b"src=0,dst=1,val=42")
    assert conf != planned.rendering.document
    view = seen(qm_conf.build_command(conf, "101.conf"), planned.plan)
    assert wrong(view) == ["distances from cell 0"]
    assert list(node_of_device(view).values()) == ["numa_node 0", "numa_node 1"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "targets"), [("pin-numa", ("xen",)), ("pin-numa-pci", ("qemu", "proxmox"))]
)
def test_a_booted_guest_is_compared_with_a_plan_alone(
    layout: str, targets: tuple[str, ...]
) -> None:
    """A plan for another hypervisor too: that one puts devices on root ports, as a layout without
    their tree does. They are found by their ids, here those of the functions that stand in."""
    wanted = structs.replace(
        options(layout, gpu_count=2, policy=Policy.SPREAD), memory_bytes=512 * MIB
    )
    words = qemu.parse_script(written("qemu", SMALL, wanted).rendering.document, "vm.sh")
    booted = boot_command(words, "vm", BootOptions(timeout_s=500))
    assert booted.guest is not None, booted.findings
    ids = {(d.vendor_id, d.device_id) for d in booted.guest.pci_devices if d.vendor_id == 0x1AF4}
    ((vendor, device),) = ids
    host = host_named(SMALL)
    host = structs.replace(
        host,
        pci_devices=tuple(
            structs.replace(one, vendor_id=vendor, device_id=device, link=None)
            if one.kind is DeviceKind.GPU
            else one
            for one in host.pci_devices
        ),
    )

    def against(target: str) -> list[str]:
        plan = written(target, SMALL, structs.replace(wanted, layout="pin-numa-pci")).plan
        expected = build_target_expectation(plan, target, host)
        assert booted.guest is not None
        return [one.id for one in view_of_guest(expected, booted.guest, host).findings]

    assert [against(target) for target in targets] == [[]] * len(targets)


def test_the_vcpus_of_a_started_command_are_pinned_by_its_script(tmp_path: Path) -> None:
    """The script itself, with QEMU under TCG and pins that this machine has."""
    planned = written("qemu", SMALL, options("pin"))
    text = planned.rendering.document.decode()
    start, end = text.index("vcpu_pus=("), text.index("iothread_pus=")
    text = text[:start] + "vcpu_pus=(0 0 0 0)\n" + text[end:]
    text = text.replace("-accel kvm", "-accel tcg,thread=multi").replace("-cpu host", "-cpu max")
    text = text.replace(
        next(line for line in text.splitlines() if line.startswith("emulator_pus")),
        "emulator_pus=0",
    )
    text = text.replace("size=4G", "size=64M").replace("case ${1:-} in", "case ${1:-} in\n  x) ;;")
    text = text.replace(
        '  wait "$pid"',
        '  for task in /proc/"$pid"/task/*; do '
        'echo "$(<"$task/comm") $(taskset -pc "${task##*/}")"; done; kill "$pid"\n  wait "$pid"',
    )
    script = tmp_path / "vm.sh"
    script.write_text(text)
    done = subprocess.run(
        ["bash", script, "start", "-S"], capture_output=True, check=False, text=True, timeout=100
    )
    pinned = [line for line in done.stdout.splitlines() if line.startswith("CPU ")]
    assert len(pinned) == 4, done.stdout + done.stderr
    assert all(line.endswith("list: 0") for line in pinned)
