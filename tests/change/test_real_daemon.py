"""Ten homenodes at once on a real libvirtd, and a libvirtd that is killed under them."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from homenode.change.apply.definition import apply_definition, restore_definition
from homenode.change.journal import default_root, journals_of_domains, open_changes
from homenode.errors import HomenodeError
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import ORIGINAL, tuned
from tests.change.test_host_lock import SmallHost
from tests.command_line import restore
from tests.processes import code_of, start_child
from tests.two_node_libvirt import TwoNodes, two_nodes

pytestmark = [pytest.mark.libvirt, pytest.mark.root]

KILLS = int(os.environ.get("HOMENODE_KILLS", "3"))
APPLIES = min(KILLS, 10)
SEED = int(os.environ.get("HOMENODE_SEED", "20261123"))
LAYOUTS = ("pin", "pin-numa", "pin-numa-pci")


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    with two_nodes() as found:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "records"))
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        yield found


def define(daemon: TwoNodes, document: Path) -> None:
    """And again from its own print: only then are the controllers that it added in their order."""
    uuid = document.read_text().partition("<uuid>")[2].partition("</uuid>")[0]
    for _ in range(2):
        defined = daemon.virsh("define", str(document))
        assert defined.returncode == 0, defined.stderr
        document.write_text(daemon.virsh("dumpxml", "--inactive", "--security-info", uuid).stdout)


class RealHost(SmallHost):
    """The described host, on which a real daemon runs that is not the system's."""

    def __init__(self, directory: Path, daemon: TwoNodes) -> None:
        super().__init__(directory)
        self.connect = daemon.uri
        for document in sorted(self.state.glob("*.xml")):
            define(daemon, document)

    def definitions(self) -> dict[str, bytes]:
        virsh = Virsh(self.connect)
        uuids = sorted(path.stem for path in self.state.glob("*.xml"))
        return {uuid: virsh.read_definition(uuid) for uuid in uuids}


@pytest.mark.parametrize(
    "is_at_once",
    [pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["in a row", "at once"],
)
def test_applies_on_a_real_daemon_give_no_core_gpu_or_page_twice(
    daemon: TwoNodes, tmp_path: Path, is_at_once: bool
) -> None:
    host = RealHost(tmp_path, daemon)
    before = host.definitions()
    works = [partial(host.apply, number) for number in range(APPLIES)]
    if is_at_once:
        children = [start_child(work) for work in works]
        assert [code_of(child) for child in children] == [0] * APPLIES
    else:
        assert [code_of(start_child(work)) for work in works] == [0] * APPLIES
    host.check_alone(APPLIES)
    changed = [uuid for uuid, now in host.definitions().items() if before[uuid] != now]
    assert len(changed) == APPLIES
    restore([f"vm{number}" for number in range(APPLIES)], connect=daemon.uri)
    assert host.definitions() == before


def test_a_daemon_killed_at_any_moment_loses_nothing(daemon: TwoNodes, tmp_path: Path) -> None:
    document = tmp_path / "domain.xml"
    document.write_bytes(ORIGINAL)
    define(daemon, document)
    virsh = Virsh(daemon.uri)
    (uuid,) = daemon.virsh("list", "--all", "--uuid").stdout.split()
    original, root = virsh.read_definition(uuid), default_root()
    name = virsh.find_domain(uuid).name

    def apply(layout: str) -> None:
        now = virsh.read_definition(uuid)
        apply_definition(virsh, name, tuned(layout, now), now, root)

    choose = random.Random(SEED)
    started = time.monotonic()
    apply("pin")
    longest_s = time.monotonic() - started
    interrupted = 0
    for _ in range(KILLS):
        works: tuple[Callable[[], object], ...] = (
            *(partial(apply, layout) for layout in LAYOUTS),
            partial(restore_definition, virsh, name, root),
        )
        child = start_child(choose.choice(works))
        killer = threading.Timer(choose.uniform(0, longest_s), daemon.kill)
        killer.start()
        interrupted += code_of(child) != 0
        killer.join()
        daemon.start()
        if choose.random() < 0.5:
            restore_definition(virsh, name, root)
            assert virsh.read_definition(uuid) == original
            apply(choose.choice(LAYOUTS))
    restore_definition(virsh, name, root)
    assert virsh.read_definition(uuid) == original
    left = [
        one for one in open_changes(journals_of_domains(root)) if isinstance(one, HomenodeError)
    ]
    assert not left
    print(f"{KILLS} kills of libvirtd, {interrupted} while a command ran")
