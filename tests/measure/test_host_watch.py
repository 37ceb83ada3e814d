"""What a guest's host shows while the guest runs an all-reduce."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from homenode.measure.figures.collective_log import split
from homenode.measure.layouts import host_watch
from homenode.measure.layouts.host_watch import HostWatch
from homenode.measure.programs.collective_watch import SAID
from homenode.process import Completed
from tests.bench_machines import FakeMachine
from tests.proc_trees import MIB, PID, UUID, ProcTree

RUN = ("python3", "-", "--gpus", "2", "--", "all_reduce_perf")


class Guest(FakeMachine):
    """Allocates on node 1 of its host while it runs."""

    tree: ProcTree
    said = f"{SAID}{json.dumps({'log': '', 'before': {}, 'during': {}})}\n"

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        use(self.tree, 64, 256)
        task = f"proc/{PID}/task/{PID}/stat"
        self.tree.put(task, f"{PID} (CPU 0/KVM) R " + " ".join(["0"] * 35 + ["5"] + ["0"] * 13))
        time.sleep(0.05)
        use(self.tree, 64, 64)
        return Completed(tuple(argv), 0, f"the tool's own\n{self.said}", "")


def use(tree: ProcTree, *mib: int) -> None:
    for node, size in enumerate(mib):
        path = f"sys/devices/system/node/node{node}/meminfo"
        # Whole at once: it is read meanwhile.
        tree.put(f"{path}.new", f"Node {node} MemUsed: {size * 1024} kB\n")
        (tree.root / f"{path}.new").rename(tree.root / path)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcTree:
    monkeypatch.setattr(host_watch, "LOOK_S", 0.005)
    found = ProcTree(tmp_path)
    use(found, 64, 64)
    return found


def watched(tree: ProcTree, machine: Guest, argv: tuple[str, ...] = RUN) -> str:
    machine.tree = tree
    return HostWatch(machine, UUID, (512 * MIB,) * 2, str(tree.root)).run(argv, 60).stdout


def test_memory_of_the_host_and_of_the_guest_on_it_come_behind_what_the_guest_says(
    tree: ProcTree,
) -> None:
    tree.qemu({"CPU 0/KVM": "0-3", "CPU 1/KVM": "4-7"}, ((512, "0"), (512, "1")))
    tree.memory(((512, "bind:0 anon=4 N0=3 N1=1"), (512, "bind:1 anon=256 N1=256")))
    own, found = split(watched(tree, Guest()))
    assert own.strip() == "the tool's own"
    assert found.host is not None
    assert dict(found.host.allocated) == {0: 0, 1: 192 * MIB}
    assert dict(found.host.guest) == {0: 3 * 4096, 1: 257 * 4096}
    assert 5 in found.host.busy


def test_a_guest_whose_qemu_is_not_to_be_seen_still_has_its_hosts_memory(tree: ProcTree) -> None:
    _, found = split(watched(tree, Guest()))
    assert found.host is not None and found.host.guest == () and found.host.busy == ()
    assert dict(found.host.allocated)[1] == 192 * MIB


def test_what_is_no_all_reduce_of_the_experiment_is_left_as_it_is(tree: ProcTree) -> None:
    machine = Guest()
    machine.said = ""
    assert watched(tree, machine) == "the tool's own\n"
    assert watched(tree, machine, ("nproc",)) == "the tool's own\n"


def test_a_guest_that_cannot_be_reached_ends_the_look_as_well(tree: ProcTree) -> None:
    machine = Guest()
    machine.tree = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        HostWatch(machine, UUID, (), str(tree.root)).run(RUN, 60)
