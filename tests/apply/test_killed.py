"""Apply and restore of a real daemon killed at random moments, and what libvirt does after Ctrl-C.

On stand-ins every command is killed in tests/change/test_killed.py.
"""

import contextlib
import fcntl
import os
import random
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from homenode.change.apply.definition import apply_definition, restore_definition
from homenode.errors import HomenodeError, HostError
from homenode.process import run
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.virsh_stand_in import URI, UUID, StandIn

REAL_KILLS = int(os.environ.get("HOMENODE_KILLS", "12"))
SEED = int(os.environ.get("HOMENODE_SEED", "20240517"))
LAYOUTS = ("pin", "pin-numa", "pin-numa-pci")


def in_child(work: Callable[[], object], kill_after_s: float | None, *, with_virsh: bool) -> bool:
    """Runs `work` in a process of its own and kills it; True where it had come to its end.

    with_virsh: what it has started dies with it, else that goes on alone.
    """
    child = os.fork()
    if child == 0:
        status = 3
        try:
            work()
            status = 0
        except HomenodeError:
            status = 4  # refused: it had nothing to do, or another is at work
        finally:
            os._exit(status)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        victims = [*(children_of(child) if with_virsh else ()), child]
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
    _, how = os.waitpid(child, 0)
    assert not (os.WIFEXITED(how) and os.WEXITSTATUS(how) == 3), "it failed by itself"
    return os.WIFEXITED(how)


def children_of(process: int) -> list[int]:
    try:
        listed = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in listed]


def apply(connect: str, domain: str, root: Path, layout: str) -> None:
    virsh = Virsh(connect)
    original = virsh.definition(virsh.domain(domain).uuid)
    apply_definition(virsh, domain, tuned(layout, original), original, root)


def restore(connect: str, domain: str, root: Path) -> None:
    restore_definition(Virsh(connect), domain, root)


def finish(work: Callable[[], object]) -> None:
    """To the end, past a virsh that a killed homenode left behind."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            work()
        except HostError as error:
            assert "no other homenode at work" in error.message
            time.sleep(0.01)
        else:
            return
    pytest.fail("a lock was never given back")


def duration_s(work: Callable[[], object]) -> float:
    started = time.monotonic()
    assert in_child(work, None, with_virsh=False)
    return time.monotonic() - started


def rounds(
    work: dict[str, Callable[[], object]],
    definition: Callable[[], bytes],
    known: set[bytes],
    original: bytes,
    kills: int,
) -> tuple[int, int]:
    """Kills so often, then looks; gives how many came too late, and found a new definition."""
    choose = random.Random(SEED)
    longest_s = {name: duration_s(work[name]) for name in (*LAYOUTS, "restore")}
    late = changed = 0
    for _ in range(kills):
        before = definition()
        name = choose.choice(sorted(work))
        ended = in_child(
            work[name], choose.uniform(0, longest_s[name]), with_virsh=choose.random() < 0.5
        )
        late += ended
        # The machine is shared: what a run takes is learnt as we go, so that one in five is late.
        longest_s[name] *= 0.9 if ended else 1.03
        now = definition()
        assert now in known, f"half-written after {name}"
        changed += now != before
        if choose.random() < 0.2:
            # Whatever the kill left, restore finds the original.
            finish(work["restore"])
            assert definition() == original
            finish(work[choose.choice(LAYOUTS)])
    finish(work["restore"])
    assert definition() == original
    return late, changed


@pytest.fixture
def real_domain(tmp_path: Path) -> Iterator[str]:
    if shutil.which("virsh") is None:
        pytest.skip("no virsh here")
    if run(("virsh", "-c", URI, "uri"), 180).returncode:
        pytest.skip(f"no libvirtd answers at {URI}")
    domain = str(uuid.uuid4())
    name = f"-homenode-test {domain[:8]}"
    document = ORIGINAL.replace(UUID.encode(), domain.encode()).replace(
        NAME.encode(), name.encode()
    )
    path = tmp_path / "domain.xml"
    path.write_bytes(document)
    virsh = Virsh(URI)
    virsh.define(str(path))
    # Once more, from its own print: then the controllers that libvirt added are in their order.
    path.write_bytes(virsh.definition(domain))
    virsh.define(str(path))
    yield domain
    run(("virsh", "-c", URI, "undefine", "--domain", domain), 60)


@pytest.mark.libvirt
def test_kills_on_a_real_daemon_lose_nothing(real_domain: str, tmp_path: Path) -> None:
    virsh = Virsh(URI)
    original = virsh.definition(real_domain)
    root = tmp_path / "state"
    work: dict[str, Callable[[], object]] = {
        layout: partial(apply, URI, real_domain, root, layout) for layout in LAYOUTS
    }
    work["restore"] = partial(restore, URI, real_domain, root)
    known, new = {original}, [original]
    while new:
        here = new.pop()
        for layout in LAYOUTS:
            path = tmp_path / "known.xml"
            path.write_bytes(tuned(layout, here))
            virsh.define(str(path))
            there = virsh.definition(real_domain)
            if there not in known:
                known.add(there)
                new.append(there)
    path.write_bytes(original)
    virsh.define(str(path))
    rounds(work, lambda: virsh.definition(real_domain), known, original, REAL_KILLS)


@pytest.mark.libvirt
def test_a_real_daemon_gives_the_original_back_byte_for_byte(
    real_domain: str, tmp_path: Path
) -> None:
    virsh = Virsh(URI)
    original = virsh.definition(real_domain)
    assert b"passwd='kept'" in original
    for layout in LAYOUTS:
        apply(URI, real_domain, tmp_path, layout)
        assert b"<vcpupin" in virsh.definition(real_domain)
    done = restore_definition(virsh, real_domain, tmp_path)
    assert done.changed
    assert done.exact
    assert virsh.definition(real_domain) == original


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
    (lock,) = root.rglob(".host.lock")
    wait_for(lambda: is_free(lock))  # the stand-in has it from its client, as no daemon would
    if again:
        apply(URI, NAME, root, "pin-numa-pci")
    restore(URI, NAME, root)
    assert daemon.definition() == ORIGINAL


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def wait_for(what: Callable[[], bool]) -> None:
    for _ in range(3000):
        if what():
            return
        time.sleep(0.02)
    pytest.fail("it never happened")
