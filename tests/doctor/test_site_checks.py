"""A distribution adds findings by an entry point: the doctor makes and explain prints them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.catalogue import catalogue, entry_of, finding
from homenode.check.doctor.diagnosis import site_findings
from homenode.check.watch.observation import look
from homenode.errors import InputError
from homenode.findings import Severity
from tests.cli.test_plan import homenode
from tests.targets.written import host_named
from tests.watch.test_watch import snapshot

HOST = "small-2n8c-2gpu"
PAGE = """# Racks

## rack-too-warm

**Warning, info.** The rack is warm.

**Cost.** {watts} W are lost.

**Fix.** Open the door of rack `{rack}`.

**Fix, at night.** Wait.
"""
CHECK = """
from homenode.catalogue import finding

def check(host):
    for case, rack in ((None, "7"), ("at night", "8")):
        yield finding(
            "rack-too-warm", f"rack {rack}", "30 degrees", "40", source=host.name,
            case=case, values={"rack": rack, "watts": 5},
        )
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with a package of a check and a page onto Python's path."""

    def installed(name: str, check: str = CHECK, page: str = PAGE) -> Path:
        folder = tmp_path / name
        info, package = folder / f"{name}-1.0.dist-info", folder / name
        info.mkdir(parents=True)
        package.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[homenode.findings]\nracks = {name}:check\n")
        (package / "__init__.py").write_text(check)
        (package / "racks.md").write_text(page)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        entry_of.cache_clear()
        return folder

    return installed


def test_a_check_of_another_distribution_makes_findings_from_its_own_page(install: Install) -> None:
    install("racks")
    day, night = site_findings(replace(host_named(HOST), name="node1"))
    assert (day.severity, day.cost, day.fix) == (
        Severity.WARNING,
        "5 W are lost",
        "open the door of rack 7",
    )
    assert (night.cost, night.fix, night.source) == ("5 W are lost", "wait", "node1")
    assert "rack-too-warm" in catalogue()


def test_the_doctor_runs_it_and_explain_prints_its_page(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install("racks_program")))
    done = homenode("doctor", "--host", HOST)
    assert done.exit_code == 1
    assert done.stdout.count("rack-too-warm") == 2
    done = homenode("explain", "rack-too-warm")
    assert done.exit_code == 0
    assert "Open the door of rack `RACK`." in done.stdout


def test_the_watch_alerts_of_it_and_of_the_rest_where_it_fails(install: Install) -> None:
    machine = snapshot()
    folder = install("racks_watched")
    assert {"rack 7", "rack 8"} <= {one.subject for one in look(machine, None, None).state.alerts}
    sys.path.remove(str(folder))
    install("racks_failing", "def check(host): raise OSError('no sensor')")
    (gap,) = (one for one in look(machine, None, None).state.not_read if "checks" in one.subject)
    assert "no sensor" in gap.reason


def test_pages_of_others_are_not_looked_for_where_homenode_has_the_id(install: Install) -> None:
    install("racks_unread", check="raise RuntimeError")
    assert finding("core-taken", "PU 3", "1 vCPU", "2", "x.xml").fix
    assert "racks_unread" not in sys.modules


@pytest.mark.parametrize(
    ("name", "check", "found"),
    [
        ("racks_broken", "import no_such_module_at_all", "no_such_module_at_all"),
        ("racks_raise", "def check(host): raise OSError('no sensor')", "OSError: no sensor"),
        ("racks_other", "def check(host): return [7]", "found int"),
    ],
)
def test_a_check_that_fails_is_named(install: Install, name: str, check: str, found: str) -> None:
    install(name, check)
    with pytest.raises(InputError, match=f"{name}:check of {name}: .*{found}"):
        list(site_findings(host_named(HOST)))


def test_an_id_of_homenode_is_not_given_to_another(install: Install) -> None:
    install("racks_taken", page=PAGE.replace("rack-too-warm", "core-taken"))
    with pytest.raises(InputError, match="ids that no other page has, found core-taken"):
        catalogue()
