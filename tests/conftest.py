"""What all tests share: required markers, and where the optional parts of a machine are."""

import gc
import os
import signal
import sys
from collections.abc import Container, Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

# The same examples each time: what a change did not break does not fail next to it. Other ones, and
# many more, are for who asks for them: --hypothesis-profile=thorough.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough", settings.get_profile("default"), derandomize=False, max_examples=5_000
)
settings.load_profile("default")

# Started in the background, or under nohup, we ignore these, and all that tests start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What is printed is as wide as where it is unknown how wide it may be.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Without compiled files every program that a test starts compiles all of homenode again, and pytest
# all tests in each worker: 0.4 s each time, and 15 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Daemons that run as other users read what tests wrote, also where root keeps its files to itself.
os.umask(0o022)

collect_ignore = ["lab", "conformance/programs"]
"""Programs that run inside virtual hosts: importing them here would run them."""

if find_spec("homenode.cluster") is None:  # an installation may be without it
    judges = ("kubevirt", "kubevirt_chain", "slurmd")
    collect_ignore += ["kubevirt", "pool", "slurm", *(f"conformance/{name}.py" for name in judges)]

REQUIRED = frozenset(filter(None, os.environ.get("HOMENODE_REQUIRED_MARKERS", "").split(",")))
"""Markers whose tests must not skip here: continuous integration owns them."""

os.environ["HOMENODE_EMULATED_TRIALS"] = "1"  # what tests boot has no KVM
TIMES = Path(os.environ["HOMENODE_TEST_TIMES"]) if "HOMENODE_TEST_TIMES" in os.environ else None
"""Where the processor time of each test is written, for tests/slow_tests.py."""

LIVE = frozenset({"libvirt", "qemu"})
"""Markers of tests that share one daemon, or boot machines: one after the other, in one process."""

GROUPS = ("live", "slurm", "root", "packages", "pdf", "browser", "source")
"""Tests that run one after the other, in the order in which they begin."""

TESTS = Path(__file__).parent

SLOW = frozenset((TESTS / "slow.txt").read_text().split())
"""Files of tests, and single tests, that take half a second of processor time or more."""


@pytest.fixture(autouse=True)
def own_host_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests at once, and a homenode of this machine, do not wait for each other's hosts: the
    directory that all users lock is not there, but where a test gives it."""
    monkeypatch.setattr("homenode.change.journal.SHARED", Path("/nowhere"))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Examples in docstrings are those of src: no file of tests is imported to look for more."""
    collectors = yield
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and items of 12,000 tests stay: no collection of garbage looks through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.partition("[")[0]
        if not SLOW.isdisjoint((name, name.partition("::")[0])):
            item.add_marker("slow")
        names = {marker.name for marker in item.iter_markers()}
        if "root" in names and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        group = _group(
            item.nodeid, names, vars(item.module) if isinstance(item, pytest.Function) else ()
        )
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    if config.getoption("loadgroup", False):  # what waits most, and in one process, begins first
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    groups = [marker.args[0] for marker in item.iter_markers("xdist_group")]
    return min((GROUPS.index(group) for group in groups if group in GROUPS), default=len(GROUPS))


def _group(name: str, markers: set[str], module_names: Container[str]) -> str | None:
    """The group whose tests run one after the other, in one process. Groups share nothing: each
    Slurm and each sshd has its own directory and ports, each installed package its own mounts."""
    if name.startswith("tests/packaging/"):
        return "packages"  # a wheel takes long to build
    if "slurm" in markers:
        return "slurm"
    if LIVE & markers or "two_nodes" in module_names:
        return "live"  # the pinned VMs of one libvirtd are neighbours to what watches another's
    if "root" in markers:
        return "root"  # daemons, mounts and other users of this machine
    if {"browser", "pdf"} & markers:  # a page or a PDF takes long to make
        return next(iter({"browser", "pdf"} & markers))
    return "source" if "nodes" in module_names else None  # all files of src are parsed once


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Two live tests at once fail for want of the other: a run that would not group them ends."""
    if not session.config.getoption("loadgroup", False):
        return
    for item in session.items:
        groups = [marker.args[0] for marker in item.iter_markers("xdist_group")]
        if groups and not item.nodeid.endswith(f"@{groups[0]}"):
            raise pytest.UsageError(f"pytest-xdist does not group {item.nodeid}: run make setup")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Processor time of each test, of what it started too, where a file for it is named."""
    before = sum(os.times()[:4])
    ended = yield
    if TIMES is not None:
        with TIMES.open("a") as file:
            file.write(f"{sum(os.times()[:4]) - before:.3f} {item.nodeid}\n")
    return ended


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    owned = sorted(REQUIRED & {marker.name for marker in item.iter_markers()})
    if report.skipped and owned:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: marker {', '.join(owned)} is required here, but {reason}"
    return report
