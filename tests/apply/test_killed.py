"""Apply and restore on a real daemon, killed at random moments and edited by others in between, and
what libvirt does after Ctrl-C.

On stand-ins every command is killed in tests/change/test_killed.py.
"""

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from homenode.change.apply.definition import apply_definition, restore_definition
from homenode.change.journal import TO_UNDO, DomainStore, lock_host
from homenode.errors import HomenodeError, InputError
from homenode.plan.pipeline import plan_file
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.apply.test_undo_libvirt import DEVICES, Domain
from tests.apply.test_undo_libvirt import NAME as UNDO
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.processes import FAILED, code_of, start_child, wait_for
from tests.two_node_libvirt import two_nodes
from tests.virsh_stand_in import URI, StandIn

KILLS = int(os.environ.get("HOMENODE_KILLS", "2"))
SEED = int(os.environ.get("HOMENODE_SEED", "20240517"))
LAYOUTS = ("pin", "pin-numa", "pin-numa-pci")


def in_child(work: Callable[[], object], kill_after_s: float, *, with_virsh: bool) -> bool:
    """Runs `work` in a process of its own and kills it; True where it had come to its end.

    with_virsh: what it has started dies with it, else that goes on alone.
    """
    child = start_child(work)
    time.sleep(kill_after_s)
    for victim in (*(children_of(child) if with_virsh else ()), child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    code = code_of(child)
    assert code != FAILED, "it failed by itself"
    return code >= 0


def children_of(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]
    return []


def apply(connect: str, domain: str, root: Path, layout: str) -> None:
    virsh = Virsh(connect)
    original = virsh.read_definition(virsh.find_domain(domain).uuid)
    apply_definition(virsh, domain, tuned(layout, original), original, root)


class Operators:
    """One runs homenode, which is killed; the other edits the same definition between two runs."""

    def __init__(self, domain: Domain, choose: random.Random, counts: Counter[str]) -> None:
        self.domain, self.choose, self.counts = domain, choose, counts
        self.host = load_host("hgx-h100")
        self.bare = without_title(domain.definition())  # of all but the title, which others edit
        self.tunings: dict[tuple[bytes, str, int], bytes] = {}
        self.longest_s = 1.0

    def tuned(self, now: bytes) -> bytes:
        """What a plan makes of a definition; the definition itself where it cannot have a plan."""
        key = now, self.choose.choice(LAYOUTS), self.choose.randint(0, 2)
        if key not in self.tunings:
            self.tunings[key] = now
            options = PlanOptions(key[1], gpu_count=key[2] or None)
            with contextlib.suppress(HomenodeError):
                self.tunings[key] = plan_file(now, UNDO, options, self.host).document
        return self.tunings[key]

    def run_and_kill(self) -> None:
        """Run a command in a process of its own, and kill it at any moment."""
        domain, choose = self.domain, self.choose
        now = domain.definition()
        work: Callable[[], object] = partial(domain.restore, keep_edits=choose.random() < 0.5)
        if choose.random() < 0.6:
            document = self.tuned(now)
            work = partial(apply_definition, domain.virsh, UNDO, document, now, domain.root)
        with_virsh = choose.random() < 0.5
        ended = in_child(work, choose.uniform(0, self.longest_s), with_virsh=with_virsh)
        # The machine is shared: what a run takes is learnt as we go, so that one in five is late.
        self.longest_s *= 0.9 if ended else 1.03
        self.counts["late" if ended else "killed"] += 1
        with lock_host(domain.root, domain.virsh.connect, "tests"):  # a virsh that goes on alone
            assert title_of(domain.definition()) == title_of(now), "an edit is lost"
            self.counts["changed"] += domain.definition() != now
        store = DomainStore(domain.root, domain.virsh.connect, domain.virsh.find_domain(UNDO).uuid)
        entry = store.definition()
        if entry is not None and entry.what in TO_UNDO:
            assert without_title(store.read_document(entry.before)) == self.bare, (
                "the original is lost"
            )

    def edit(self) -> None:
        """Edit as others do: with virsh edit, or with virsh define of another text."""
        before, number = self.domain.definition(), self.counts.total()
        title, kind = f"<title>edit {number}</title>", self.choose.choice(("edit", "define", "pin"))
        if kind == "edit":
            command = f"sed -i -e '/<title>/d' -e 's,</uuid>,</uuid>{title},'"
            with patch.dict(os.environ, EDITOR=command, VISUAL=command):
                done = self.domain.daemon.virsh("edit", UNDO)
            assert done.returncode == 0, done.stderr
        elif kind == "define":
            text = without_title(before).replace(b"</uuid>", f"</uuid>{title}".encode())
            self.domain.define(text)
        elif b"<vcpupin" in before:  # which the layout sets as well: whose value is right?
            self.domain.define(re.sub(rb"(<vcpupin vcpu='0' cpuset=')[^']*", rb"\g<1>1", before))
            edited = self.domain.definition()
            for keep_edits in (False, True):
                with pytest.raises(InputError):
                    self.domain.restore(keep_edits=keep_edits)
            assert self.domain.definition() == edited
            self.domain.define(before)
        self.counts[kind] += 1

    def settle(self) -> None:
        """Give the original back with what others edited, whatever the kills have left."""
        domain, now = self.domain, self.domain.definition()
        try:
            domain.restore()
        except InputError:
            assert domain.definition() == now, "a refused restore changed the definition"
            domain.restore(keep_edits=True)
            merged = without_title(domain.definition())
            assert sorted(merged.splitlines()) == sorted(self.bare.splitlines())
            self.bare = merged
            self.counts["merged"] += 1
        assert without_title(domain.definition()) == self.bare
        assert title_of(domain.definition()) == title_of(now), "an edit is lost"


def without_title(definition: bytes) -> bytes:
    return re.sub(rb"  <title>.*\n", b"", definition)


def title_of(definition: bytes) -> bytes:
    return b"".join(re.findall(rb"<title>.*</title>", definition))


@pytest.mark.root
@pytest.mark.libvirt
def test_kills_and_edits_in_between_lose_neither_the_original_nor_an_edit(tmp_path: Path) -> None:
    choose, counts = random.Random(SEED), Counter[str]()
    tunable = sorted(set(DEVICES) - {"i440fx"})
    names = choose.sample(tunable, max(1, min(len(tunable), KILLS // 12)))
    with two_nodes() as daemon:
        for number, name in enumerate(names, start=1):
            (directory := tmp_path / str(number)).mkdir()
            both = Operators(Domain(daemon, directory, *DEVICES[name]), choose, counts)
            assert both.domain.apply("pin", 1, both.host)
            while counts["killed"] < KILLS * number // len(names):
                both.run_and_kill()
                if choose.random() < 0.4:
                    both.edit()
                if choose.random() < 0.3:
                    both.settle()
            daemon.virsh("undefine", UNDO, "--nvram")
    print(f"seed {SEED}:", ", ".join(f"{count} {kind}" for kind, count in counts.items()))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("layouts_before", [(), ("pin",)])
def test_what_libvirt_does_after_ctrl_c_is_known_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layouts_before: tuple[str, ...], again: bool
) -> None:
    daemon = StandIn(tmp_path / "daemon", NAME, ORIGINAL)
    monkeypatch.setenv("PATH", f"{daemon.bin}:/usr/bin:/bin")
    root = tmp_path / "state"
    for layout in layouts_before:
        apply(URI, NAME, root, layout)
    owned = daemon.definition()
    daemon.put("late", "")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(KeyboardInterrupt):
            apply(URI, NAME, root, "pin-numa")
            os._exit(0)
        os._exit(130)
    wait_for(lambda: (daemon.state / "told").exists())
    os.kill(child, signal.SIGINT)
    _, how = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(how) == 130
    assert daemon.definition() == owned
    (daemon.state / "late").unlink()
    wait_for(lambda: daemon.definition() != owned)
    with lock_host(root, URI, "tests"):  # the stand-in has it from its client, as no daemon would
        pass
    if again:
        apply(URI, NAME, root, "pin-numa-pci")
    restore_definition(Virsh(URI), NAME, root)
    assert daemon.definition() == ORIGINAL
