"""A guest of any hypervisor is compared with its plan, as far as that hypervisor can say it."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from homenode import formats
from homenode.check.verify.guest_checks import GuestView, view_of_guest
from homenode.check.verify.verification import build_target_expectation, list_guest_losses
from homenode.errors import InputError
from homenode.findings import Severity
from homenode.machine.topology import Host
from homenode.plan.shape.guest_numa import merge_devices
from homenode.plan.stored import encode_plan
from homenode.units import GIB
from homenode.vm.plan import Plan, with_vm
from homenode.vm.plan_options import Policy
from homenode.vm.targets.registry import TARGETS, find_target
from homenode.vm.targets.target import Feature, SupportLevel
from tests.command_line import homenode
from tests.targets.written import options, written
from tests.verify.test_command import ends
from tests.verify_documents import DEVICES, SMALL, small_host
from tests.verify_guests import guest_host

NO_NODES: tuple[str, str] = ("unknown", "unknown")
"""Devices on root ports of the hypervisor's own, as Xen plugs them in."""


def plan_for(target: str, layout: str = "pin-numa-pci") -> Plan:
    """4 vCPUs, 4 GiB and a GPU on each of both nodes of the small host."""
    wanted = options(layout, gpu_count=2, policy=Policy.SPREAD)
    return written(target, SMALL, wanted).plan


def seen(target: str, guest: Host, plan: Plan | None = None) -> GuestView:
    expected = build_target_expectation(plan or plan_for(target), target, small_host())
    return view_of_guest(expected, guest, small_host())


def found(view: GuestView) -> list[tuple[str, str]]:
    return [(one.id, one.subject) for one in view.findings]


def saying(feature: Feature) -> tuple[str, ...]:
    """The targets that can say a feature."""
    supports = {target: find_target(target).support[feature] for target in TARGETS}
    return tuple(target for target, one in supports.items() if one.level is not SupportLevel.LOST)


def guest_of(target: str) -> Host:
    """What the guest of a plan for that target is, if it is as planned."""
    return guest_host(nodes=(0, 1) if target in saying(Feature.DEVICE_CELLS) else NO_NODES)


@pytest.mark.parametrize("target", TARGETS)
def test_a_guest_as_planned_has_nothing_wrong_on_any_hypervisor(target: str) -> None:
    view = seen(target, guest_of(target))
    assert [one for one in view.findings if one.severity is not Severity.INCONCLUSIVE] == []
    assert {f"device {bdf}" for bdf in DEVICES} <= {line.subject for line in view.checks}


WRONG: Sequence[tuple[str, dict[str, object], tuple[str, ...]]] = (
    ("guest-vcpus", {"cores": 1}, TARGETS),
    ("guest-distances", {"distance": 42}, saying(Feature.DISTANCES)),
    ("guest-node-memory", {"memory": "700MiB"}, TARGETS),
    ("guest-siblings", {"cores": 1, "threads": 2}, saying(Feature.THREADS)),
    ("guest-device-node", {"nodes": (1, 0)}, saying(Feature.DEVICE_TREE)),
    ("guest-device-node", {"nodes": (0, 0)}, saying(Feature.DEVICE_CELLS)),
)


@pytest.mark.parametrize(("id", "change", "sayers"), WRONG)
@pytest.mark.parametrize("target", TARGETS)
def test_what_a_target_can_say_is_compared_and_nothing_else(
    target: str, id: str, change: dict[str, object], sayers: tuple[str, ...]
) -> None:
    """Two GPUs that swapped cells differ in nothing that a guest shows of them but their bus."""
    guest = guest_host(**change)
    bad = [one for one in seen(target, guest).findings if one.severity is not Severity.INCONCLUSIVE]
    assert (id in {one.id for one in bad}) == (target in sayers)


@pytest.mark.parametrize("target", TARGETS)
def test_a_device_that_the_guest_lacks_is_missing(target: str) -> None:
    guest = guest_of(target)
    last = max(device.bdf for device in guest.pci_devices if device.vendor_id == 0x10DE)
    less = tuple(device for device in guest.pci_devices if device.bdf != last)
    view = seen(target, structs.replace(guest, pci_devices=less))
    assert ("guest-device-missing", f"device {DEVICES[1]}") in found(view)


CACHES, NODES = "shared caches", "each device on its guest cell"


@pytest.mark.parametrize(
    ("target", "lost"), [("qemu", set()), ("xen", {"sockets and cores", CACHES, NODES})]
)
def test_what_is_not_compared_is_named(target: str, lost: set[str]) -> None:
    named = list(list_guest_losses(plan_for(target), target, "guest"))
    assert {one.subject.removesuffix(" of the guest") for one in named} == lost
    assert {(one.id, one.severity) for one in named} <= {("target-lost", Severity.INFO)}


def test_nodes_that_a_flat_plan_does_not_have_are_named() -> None:
    other = seen("xen", guest_of("xen"), plan_for("xen", "pin"))
    assert ("guest-nodes", "NUMA nodes") in found(other)


def test_a_device_of_unknown_kind_needs_the_plans_host() -> None:
    expected = build_target_expectation(plan_for("xen"), "xen")
    view = view_of_guest(expected, guest_of("xen"), None)
    assert {(one.severity, one.fix) for one in view.findings} == {
        (Severity.INCONCLUSIVE, "name the plan's host: --host")
    }


def test_a_plan_that_the_target_never_has_is_refused() -> None:
    plan = plan_for("xen")
    devices = tuple(structs.replace(device, managed=False) for device in plan.vm.hostdevs)
    vgpu = with_vm(plan, hostdevs=devices)
    with pytest.raises(InputError, match=r"the vGPU 0000:11:00\.0, 0000:81:00\.0"):
        build_target_expectation(vgpu, "xen")
    with pytest.raises(InputError, match="memory devices"):
        build_target_expectation(with_vm(plan, memory_devices=merge_devices(GIB)), "xen")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, str]:
    """The plan for Xen and a capture in its guest, on disk."""
    plan, guest = tmp_path / "p.json", tmp_path / "guest.json"
    plan.write_text(encode_plan(plan_for("xen")))
    guest.write_text(formats.encode("host", guest_of("xen")))
    return str(plan), str(guest)


def test_the_command_takes_a_plan_alone(saved: tuple[str, str]) -> None:
    plan, guest = saved
    words = ("--plan", plan, "--guest", guest, "--host", SMALL)
    code, said = ends(*words, "--target", "xen")
    assert code == 0, said
    assert "target-lost" in said
    code, said = ends(*words)  # as of libvirt, which shows a node for each device
    assert code == 1 and "guest-device-node" in said


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--target zen", "did you mean"),
        ("--target xen", "missing argument VM"),
        ("--target xen --live vm", "--live and --target cannot be used together"),
        ("--target xen --guest GUEST", "--guest requires VM or --plan"),
        ("vm.xml --target xen", "--target and VM cannot be used together"),
        ("vm.xml --target xen --guest GUEST --plan PLAN", "--target and VM cannot be used"),
    ],
)
def test_bad_targets_refused(saved: tuple[str, str], words: str, refused: str) -> None:
    names = dict(zip(("PLAN", "GUEST"), saved, strict=True))
    code, said = ends(*(names.get(word, word) for word in words.split()))
    assert code == 2 and refused in said, said


@pytest.mark.parametrize("target", TARGETS)
def test_the_next_command_of_a_verified_file_is_taken(target: str, tmp_path: Path) -> None:
    file, plan = str(tmp_path / "vm"), str(tmp_path / "p.json")
    size = ("--vcpus", "4", "--memory", "4GiB", "--host", SMALL)
    homenode("plan", *size, "--target", target, "-o", file, "--save-plan", plan)
    output = homenode("verify", file, "--plan", plan, "--host", SMALL).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("next"))
    words = shlex.split(line)[2:]
    boots = "--boot" in words
    assert boots is (find_target(target).words_of is not None)
    if not boots:
        assert homenode(*(SMALL if word == "ssh:HOST" else word for word in words)).exit_code < 2
