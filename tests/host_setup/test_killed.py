"""host-setup killed at random moments: nothing is left that another program would run or read."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from homenode.cpuset import CpuSet
from homenode.host_setup.files import HOOK, Isolation, setup_files
from homenode.host_setup.installation import Installation
from homenode.host_setup.needs import HostNeeds, NodePages
from tests.memory_folder import memory_folder

KILLS = int(os.environ.get("HOMENODE_KILLS", "30"))
SEED = 20240518
FILES = setup_files(
    HostNeeds(("gpu-vm",), (NodePages(0, 1 << 30, 64),), CpuSet.parse("2-7"), CpuSet.parse("0-1")),
    Isolation.START,
)


def in_child(
    work: Callable[[], object], kill_after_s: float | None, look: Callable[[], None]
) -> bool:
    """Does it in a process that is killed, looking all the while; True where it came to its end."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    end = None if kill_after_s is None else time.monotonic() + kill_after_s
    while True:
        ended, how = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        look()
        if end is not None and time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            end = None
    assert os.WIFSIGNALED(how) or os.WEXITSTATUS(how) == 0, "it failed by itself"
    return os.WIFEXITED(how)


def runnable(folder: Path) -> list[str]:
    """What libvirt would run: every executable file of the folder, whatever its name."""
    try:
        return sorted(one.name for one in folder.iterdir() if os.access(one, os.X_OK))
    except FileNotFoundError:
        return []


@pytest.fixture(params=["own folder", "another file system"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Tree"]:
    with memory_folder() as folder:
        if request.param == "own folder":
            yield Tree(folder, None)
        elif folder.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two file systems")
        else:
            yield Tree(folder, tmp_path)


class Tree:
    """A host's root, and homenode's state. elsewhere: on another file system, where /etc/homenode
    leads to."""

    def __init__(self, folder: Path, elsewhere: Path | None) -> None:
        self.state, self.root, self.elsewhere = folder / "state", folder / "root", elsewhere
        (self.root / "etc").mkdir(parents=True)
        if elsewhere is not None:
            (self.root / "etc/homenode").symlink_to(elsewhere)
        self.hooks = (self.root / HOOK[1:]).parent

    def install(self) -> None:
        Installation(self.state, self.root).install(FILES)

    def look(self) -> None:
        assert runnable(self.hooks) in ([], [Path(HOOK).name])

    def check_after_kill(self, *, again: bool) -> bool:
        """What is left, before and after the next command; whether it was a part."""
        self.look()
        parts = [one for one in self.root.rglob("*.part") if one.is_file()]
        if self.elsewhere is None:
            assert {one.parent for one in parts} <= {self.root / "etc/homenode/parts"}
        assert not any(os.access(one, os.X_OK) for one in parts if one.parent == self.hooks)
        if again:
            self.install()
            assert runnable(self.hooks) == [Path(HOOK).name]
            assert list(self.root.rglob("*.part")) == []
        Installation(self.state, self.root).undo()
        left = {str(one.relative_to(self.root)) for one in self.root.rglob("*")}
        assert left == ({"etc"} if self.elsewhere is None else {"etc", "etc/homenode"})
        assert self.elsewhere is None or list(self.elsewhere.iterdir()) == []
        return bool(parts)


def test_an_install_that_is_killed_at_random_moments_is_undone_whole(tree: Tree) -> None:
    choose = random.Random(SEED)
    longest_s, killed = 0.0, 0
    for number in range(KILLS + 1):
        started = time.monotonic()
        after_s = choose.uniform(0, longest_s) if number else None
        killed += not in_child(tree.install, after_s, tree.look)
        longest_s = longest_s or time.monotonic() - started
        tree.check_after_kill(again=number % 2 == 1)
    assert killed > KILLS // 4


@pytest.mark.parametrize("again", [False, True])
def test_an_install_that_is_killed_before_any_of_its_calls_is_undone_whole(
    tree: Tree, again: bool
) -> None:
    """Each call that changes the file system is once the one that never happens."""
    parts = 0
    for number in range(1000):

        def dies(left: int = number) -> None:
            count = itertools.count()

            def dying(call: Callable[..., object]) -> Callable[..., object]:
                def instead(*words: Any, **options: Any) -> object:
                    if next(count) == left:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*words, **options)

                return instead

            for name in ("mkdir", "open", "fchmod", "fsync", "replace", "unlink", "rmdir"):
                setattr(os, name, dying(getattr(os, name)))
            tree.install()

        ended = in_child(dies, None, tree.look)
        parts += tree.check_after_kill(again=again)
        if ended:
            break
    print(f"{number} kills, {parts} left a part")
    assert ended
    assert number > 30
    assert parts >= len(FILES)


def test_parts_that_an_earlier_homenode_left_next_to_the_files_go(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "state", tmp_path / "root")
    installation.install(FILES)
    hooks = (tmp_path / "root" / HOOK[1:]).parent
    left = hooks / ".homenode-0123456789abcdef.part"
    left.write_text("#!/bin/sh\n")
    left.chmod(0o755)
    theirs = hooks / ".homenode-mine.part"
    theirs.write_text("")
    installation.install(FILES)
    assert runnable(hooks) == [Path(HOOK).name]
    installation.undo()
    assert list(hooks.iterdir()) == [theirs]


def test_a_file_that_lost_its_permissions_is_installed_again(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "state", tmp_path / "root")
    installation.install(FILES)
    hook = tmp_path / "root" / HOOK[1:]
    hook.chmod(0o600)
    changes = {one.path: one.action for one in installation.install(FILES)}
    assert changes[HOOK] == "replace"
    assert hook.stat().st_mode & 0o777 == 0o755
    assert set(changes.values()) == {"replace", "keep"}
