"""Host setup: files that give plans their pages and PUs, installed, checked and undone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.change.host_setup.check import read_running, unmet
from homenode.change.host_setup.files import (
    HOOK,
    HostNeeds,
    Isolation,
    NodePages,
    SetupFile,
    after_removal,
    kernel_parameters,
    needs_of,
    setup_files,
)
from homenode.change.host_setup.installation import Installation
from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.machine.topology import Host, PagePool
from homenode.plan.stored import read_plan
from homenode.vm.plan_model import Plan
from homenode.vm.sources import load_host
from tests.doctor.test_cli import run

ROOT = Path(__file__).parents[2]
HOST = "hgx-h100"
NEEDS = HostNeeds(
    ("gpu-vm", "it's; rm -rf /"),
    (NodePages(0, 1 << 30, 64), NodePages(0, 1 << 21, 512), NodePages(1, 1 << 30, 64)),
    CpuSet.parse("2-7"),
    CpuSet.parse("0-1"),
)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Plan]:
    folder = tmp_path_factory.mktemp("plans")
    options = (
        "--host",
        HOST,
        "--gpus",
        "2",
        "--vcpus",
        "16",
        "--memory",
        "64GiB",
        "--page-size",
        "1GiB",
        "--layout",
        "pin-numa-pci",
        "-q",
    )
    demo = str(ROOT / "demo/gpu-vm.xml")
    a, b = folder / "a.json", folder / "b.json"
    run("plan", demo, *options, "--save-plan", str(a))
    run("plan", demo, *options, "--after", str(a), "--name", "b", "--save-plan", str(b))
    return read_plan(a.read_bytes(), "a"), read_plan(b.read_bytes(), "b")


def test_needs_are_the_sum_of_all_plans(plans: tuple[Plan, Plan]) -> None:
    host = load_host(HOST)
    needs = needs_of([("a", plans[0]), ("b", plans[1])], host)
    assert sum(one.pages for one in needs.pages) == 128
    assert len(needs.vm_pus) == 32
    assert needs.vm_pus.isdisjoint(needs.host_pus)
    assert len(needs.vm_pus | needs.host_pus) == len(host.pus)


def test_two_plans_with_one_pu_are_refused(plans: tuple[Plan, Plan]) -> None:
    with pytest.raises(UsageError, match="PU 0 in a as well"):
        needs_of([("a", plans[0]), ("b", plans[0])], load_host(HOST))


def _with_pages(host: Host, pages: int, isolated: CpuSet) -> Host:
    nodes = tuple(
        structs.replace(node, page_pools=(PagePool(1 << 30, pages, 0),)) for node in host.nodes
    )
    pus = tuple(
        structs.replace(pu, isolated=int(pu.index) in isolated, nohz_full=int(pu.index) in isolated)
        for pu in host.pus
    )
    return structs.replace(host, nodes=nodes, pus=pus)


def test_a_host_without_the_pages_or_the_isolation_has_findings(plans: tuple[Plan, Plan]) -> None:
    host = load_host(HOST)
    needs = needs_of([("a", plans[0])], host)
    bare = [one.id for one in unmet(needs, host, Isolation.BOOT)]
    assert bare == ["setup-pages-short", "setup-not-isolated", "setup-not-isolated"]
    ready = _with_pages(host, 64, needs.vm_pus)
    assert list(unmet(needs, ready, Isolation.BOOT)) == []
    ticking = structs.replace(
        ready, pus=tuple(structs.replace(pu, nohz_full=False) for pu in ready.pus)
    )
    (finding,) = unmet(needs, ticking, Isolation.BOOT)
    assert (finding.id, finding.observed) == ("setup-not-isolated", "no nohz_full")


def test_what_runs_on_the_host_is_compared_with_what_the_plans_need(
    plans: tuple[Plan, Plan], tmp_path: Path
) -> None:
    needs = needs_of([("a", plans[0])], load_host(HOST))
    host = _with_pages(load_host(HOST), 64, CpuSet())
    hook = next(one for one in setup_files(needs, Isolation.START) if one.path == HOOK)
    installed = tmp_path / HOOK[1:]
    environment = tmp_path / "proc/17/environ"
    for path in (installed, environment):
        path.parent.mkdir(parents=True)

    def lacking(isolation: Isolation = Isolation.START) -> list[tuple[str, str]]:
        wanted = hook if isolation is Isolation.START else None
        found = unmet(needs, host, isolation, wanted, read_running(tmp_path))
        assert not read_running(tmp_path).gaps
        return [(one.subject, one.observed) for one in found if one.id == "setup-not-isolated"]

    assert lacking() == [(HOOK, "none")]
    installed.write_text(hook.text)
    assert lacking() == [(HOOK, "no permission to execute it")]
    installed.chmod(0o755)
    assert lacking() == []
    installed.write_text(hook.text + "exit 1\n")
    assert lacking() == [(HOOK, "one of other plans, or edited since")]
    installed.write_text(hook.text)
    # An irqbalance that runs, first as it was before the file was installed.
    service = tmp_path / "sys/fs/cgroup/system.slice/irqbalance.service/cgroup.procs"
    service.parent.mkdir(parents=True)
    service.write_text("17\n")
    for said, missing in {
        "LANG=C\0": needs.vm_pus,
        "IRQBALANCE_BANNED_CPULIST=0\0": needs.vm_pus - CpuSet((0,)),
        f"LANG=C\0IRQBALANCE_BANNED_CPULIST={needs.vm_pus},900\0": None,
        "IRQBALANCE_BANNED_CPUS=" + ",".join(["ffffffff"] * 32) + "\0": None,
    }.items():
        environment.write_text(said)
        expected = [] if missing is None else [("irqbalance", f"it may move them to PUs {missing}")]
        assert lacking() == expected
        assert lacking(Isolation.NONE) == []
        assert [one for one in lacking(Isolation.BOOT) if one[0] == "irqbalance"] == expected
    # Given no list, it leaves alone what the kernel isolates.
    environment.write_text("LANG=C\0")
    host = _with_pages(host, 64, needs.vm_pus)
    assert lacking() == lacking(Isolation.BOOT) == []


def test_what_cannot_be_read_of_the_running_host_is_a_gap_and_no_finding(tmp_path: Path) -> None:
    environment = tmp_path / "proc/17/environ"
    service = tmp_path / "sys/fs/cgroup/system.slice/irqbalance.service/cgroup.procs"
    for path in (environment, service):
        path.parent.mkdir(parents=True)
    service.write_text("17\n")
    environment.write_text("IRQBALANCE_BANNED_CPULIST=all of them\0")
    (tmp_path / HOOK[1:]).mkdir(parents=True)
    running = read_running(tmp_path)
    assert (running.hook, running.irqbalance_bans, len(running.gaps)) == (None, None, 2)
    hook = next(one for one in setup_files(NEEDS, Isolation.START) if one.path == HOOK)
    found = unmet(replace(NEEDS, pages=()), load_host(HOST), Isolation.START, hook, running)
    assert list(found) == []


def test_files_follow_the_isolation() -> None:
    def paths(isolation: Isolation) -> set[str]:
        return {one.path for one in setup_files(NEEDS, isolation)}

    units = {f"/etc/systemd/system/homenode-huge-pages-node{node}.service" for node in (0, 1)}
    assert paths(Isolation.NONE) == units
    assert paths(Isolation.BOOT) - paths(Isolation.START) == {"/etc/default/grub.d/50-homenode.cfg"}
    assert paths(Isolation.START) > units
    assert "isolcpus=managed_irq,domain,2-7" in kernel_parameters(NEEDS)
    assert "irqaffinity=0-1" in kernel_parameters(NEEDS)


def test_the_largest_pages_are_reserved_first() -> None:
    unit = next(one for one in setup_files(NEEDS, Isolation.NONE))
    assert unit.text.index("1048576kB") < unit.text.index("2048kB")


def _hook(folder: Path) -> SetupFile:
    hook = next(one for one in setup_files(NEEDS, Isolation.START) if "hooks" in one.path)
    text = hook.text.replace("/run/homenode/vms", str(folder / "vms"))
    return replace(hook, text=text)


def test_the_hook_frees_pus_while_a_vm_runs_and_gives_them_back(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    stand_in = tmp_path / "bin/systemctl"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "$4 $5" >> {calls}\n')
    stand_in.chmod(0o755)
    hook = tmp_path / "hook"
    hook.write_text(_hook(tmp_path).text.replace("\nPATH=", f"\nPATH={stand_in.parent}:"))
    planted = tmp_path / "planted"
    planted.mkdir()
    for name in ("systemctl", "mkdir", "ls", "rm"):
        (planted / name).write_text(f"#!/bin/sh\ntouch {planted}/ran\n")
        (planted / name).chmod(0o755)

    def call(*words: str) -> list[str]:
        calls.write_text("")
        environment = {"PATH": f".:{planted}"}
        argv = ["/bin/sh", str(hook), *words]
        done = subprocess.run(argv, cwd=planted, env=environment, check=True)
        assert done.returncode == 0
        assert not (planted / "ran").exists()
        return calls.read_text().splitlines()

    slices = ["system.slice", "user.slice", "init.scope"]
    assert call("other-vm", "prepare", "begin", "-") == []
    begun = call("gpu-vm", "prepare", "begin", "-")
    assert begun == [f"{one} AllowedCPUs=0-1" for one in slices]
    assert call("it's; rm -rf /", "prepare", "begin", "-") == begun
    assert call("gpu-vm", "release", "end", "-") == []
    freed = call("it's; rm -rf /", "release", "end", "-")
    assert freed == [f"{one} AllowedCPUs=0-7" for one in slices]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_accepts_the_hook(tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.write_text(_hook(tmp_path).text)
    done = subprocess.run(["shellcheck", str(hook)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    units = []
    for file in setup_files(NEEDS, Isolation.NONE):
        path = tmp_path / Path(file.path).name
        path.write_text(file.text)
        units.append(str(path))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True
    )
    assert [line for line in done.stderr.splitlines() if "homenode" in line] == []


def _tree(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_what_is_installed_is_undone_whole(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    root.mkdir()
    installation = Installation(state, root)
    files = setup_files(NEEDS, Isolation.BOOT)
    assert {one.action for one in installation.preview(files)} == {"create"}
    assert _tree(root) == {}
    installation.install(files)
    assert len(_tree(root)) == len(files)
    assert {one.action for one in Installation(state, root).install(files)} == {"keep"}
    changes = installation.install(setup_files(NEEDS, Isolation.START))
    assert ("/etc/default/grub.d/50-homenode.cfg", "remove") in {
        (one.path, one.action) for one in changes
    }
    installation.undo()
    assert _tree(root) == {}
    assert installation.undo() == ()


def test_what_a_removed_file_did_is_ended_by_a_command() -> None:
    commands = {
        file.path: after_removal(file.path)
        for isolation in Isolation
        for file in setup_files(NEEDS, isolation)
    }
    assert [path for path, command in commands.items() if command is None] == [
        "/etc/libvirt/hooks/qemu.d/50-homenode"
    ]
    unit = "homenode-huge-pages-node0.service"
    disable = f"systemctl disable {unit} && systemctl daemon-reload"
    assert commands[f"/etc/systemd/system/{unit}"] == disable


def test_files_of_others_and_edited_ones_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    files = setup_files(NEEDS, Isolation.BOOT)
    theirs = root / files[-1].path.lstrip("/")
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine\n")
    with pytest.raises(UsageError, match="did not install"):
        Installation(state, root).install(files)
    assert list(_tree(root).values()) == [b"mine\n"]
    theirs.unlink()
    Installation(state, root).install(files)
    theirs.write_text("edited\n")
    with pytest.raises(UsageError, match="edited since"):
        Installation(state, root).undo()
    assert len(_tree(root)) == len(files)


def test_an_installation_that_was_cut_short_is_undone_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    root.mkdir()
    files = setup_files(NEEDS, Isolation.BOOT)
    for cut in range(len(files)):
        written = 0

        def fails(path: Path, content: bytes, mode: int, part: Path, cut: int = cut) -> None:
            nonlocal written
            if written == cut:
                raise KeyboardInterrupt
            written += 1
            path.write_bytes(content)

        with monkeypatch.context() as patched:
            patched.setattr("homenode.change.host_setup.installation.replace_watched_file", fails)
            with pytest.raises(KeyboardInterrupt):
                Installation(state, root).install(files)
        Installation(state, root).undo()
        assert _tree(root) == {}
    Installation(state, root).install(files)
    assert len(_tree(root)) == len(files)


FILES = setup_files(
    HostNeeds(("gpu-vm",), (NodePages(0, 1 << 30, 64),), CpuSet.parse("2-7"), CpuSet.parse("0-1")),
    Isolation.START,
)


def runnable(folder: Path) -> list[str]:
    """What libvirt would run: every executable file of the folder, whatever its name."""
    return sorted(one.name for one in folder.iterdir() if os.access(one, os.X_OK))


def test_a_file_that_lost_its_permissions_is_installed_again(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "state", tmp_path / "root")
    installation.install(FILES)
    hook = tmp_path / "root" / HOOK[1:]
    hook.chmod(0o600)
    changes = {one.path: one.action for one in installation.install(FILES)}
    assert changes[HOOK] == "replace"
    assert hook.stat().st_mode & 0o777 == 0o755
    assert set(changes.values()) == {"replace", "keep"}
