"""Incus numbers a guest's cells by a map of Go: a file holds in every order, or there is none."""

import re
from itertools import permutations

import pytest

from homenode.errors import InputError, ParseError
from homenode.plan.vm_file import TargetPlan
from homenode.units import GIB, MIB
from homenode.vm.plan_options import PlanOptions, cell_asked
from homenode.vm.targets.hypervisors import incus
from tests.targets.examples import FILES
from tests.targets.test_edited_files import HOST, plain
from tests.targets.written import edited, host_named, options, written

KEYS = {"limits.cpu", "limits.memory", "limits.memory.hugepages", "raw.qemu.conf"}
"""Of internal/instance/config.go in Incus 6.0.0, which every later release has too."""


def raw(planned: TargetPlan) -> str:
    return planned.rendering.document.decode().partition("raw.qemu.conf")[2]


def distances(text: str) -> dict[tuple[int, int], int]:
    """[numa] sections of type dist, by (src, dst)."""
    found = re.findall(r'src = "(\d+)"\n\s*dst = "(\d+)"\n\s*val = "(\d+)"', text)
    return {(int(src), int(dst)): int(val) for src, dst, val in found}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (HOST, options("pin-numa", vcpus=8, max_nodes=2)),
        ("epyc-nps4-gpu-nic", options("pin-numa", vcpus=96, memory_bytes=96 * GIB)),
        ("epyc-nps4-gpu-nic", options("pin-numa", vcpus=24, memory_bytes=24 * GIB, gpu_count=2)),
        ("hgx-h100", options("pin-numa", vcpus=64, memory_bytes=64 * GIB, gpu_count=8)),
        ("small-2n8c-2gpu", options("pin-numa", gpu_count=2)),
        ("x86-4p4n16c32t-ring", options("pin-numa", vcpus=12, memory_bytes=3 * GIB)),
    ],
)
def test_cells_are_as_planned_in_whichever_order_incus_takes_the_nodes(
    name: str, wanted: PlanOptions
) -> None:
    try:
        planned = written("incus", name, wanted)
    except InputError as refusal:
        assert "random order" in refusal.message
        return
    cells = [cell for cell in planned.plan.cells if cell.vcpus]
    assert "[object " not in raw(planned)
    assert {cell.memory_bytes for cell in cells} == {planned.plan.vm.memory_bytes // len(cells)}
    stated = distances(raw(planned))
    assert len(stated) == (len(cells) ** 2 if len(cells) > 1 else 0)
    for order in permutations(range(len(cells))):
        for (src, dst), value in stated.items():
            assert cells[order[src]].distances[order[dst]] == value


def test_cells_that_a_number_tells_apart_are_refused() -> None:
    unequal = (cell_asked(4, 16 * GIB), cell_asked(8, 48 * GIB))
    wanted = PlanOptions(layout="pin-numa", explicit_cells=unequal, gpu_count=2)
    with pytest.raises(InputError, match="equal memory"):
        written("incus", "epyc-nps4-gpu-nic", wanted)
    with pytest.raises(InputError, match="equally far"):
        written("incus", "x86-4p4n16c32t-ring", options("pin-numa", vcpus=16))


def test_memory_that_incus_cannot_split_evenly_is_refused() -> None:
    """Its shares are whole MiB, and QEMU wants their sum to be the VM's memory."""
    wanted = options("pin", vcpus=8, memory_bytes=4 * GIB + MIB)
    planned = written("qemu", "small-2n8c-2gpu", wanted).plan
    host = host_named("small-2n8c-2gpu")
    pus = {pu for pin in planned.vcpu_pins for pu in pin}
    assert len({pu.node for pu in host.pus if pu.index in pus}) == 2
    with pytest.raises(InputError, match="equal shares"):
        written("incus", "small-2n8c-2gpu", wanted)


def test_a_file_has_no_key_that_a_release_refuses_unless_it_was_there() -> None:
    planned = written("incus", "small-2n8c-2gpu", options("pin-numa", gpu_count=2))
    keys = re.findall(r"^  ([a-z]+\.[a-z.]+):", planned.rendering.document.decode(), re.M)
    assert {key for key in keys if not key.startswith("user.")} <= KEYS
    (left,) = [f for f in planned.findings if f.id == "target-not-carried"]
    assert left.fix is not None and "limits.memory.hotplug=false" in left.fix
    there = FILES["incus"].replace(b"config:\n", b'config:\n  limits.memory.hotplug: "64GiB"\n')
    made = edited(there, HOST, plain("pin-numa"))
    assert re.search(rb"limits.memory.hotplug: .?false", made.rendering.document)
    assert "target-not-carried" not in {f.id for f in made.findings}


@pytest.mark.parametrize("devices", ["gpu0", "{gpu0: {type: gpu}}", "\n  gpu0: physical"])
def test_devices_that_are_no_mapping_are_refused(devices: str) -> None:
    text = f"type: virtual-machine\nconfig:\n  limits.cpu: 0-1\ndevices: {devices}\n"
    with pytest.raises(ParseError, match="as a mapping"):
        incus.CODEC.read_vm(text.encode(), "vm.yaml")
