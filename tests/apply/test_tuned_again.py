"""A tuned domain keeps its layout on a host that is no longer the one it was planned for."""

import re
import shutil

import pytest

from homenode.change.journal import default_root
from homenode.cli.restore import restore_domains
from homenode.errors import InputError
from homenode.objective import Objective
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.layout import Pinning
from homenode.vm.plan_options import PlanOptions
from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import apply, be_host
from tests.virsh_stand_in import StandIn

HOST = "small-2n8c-2gpu"
OTHER = "x86-2p2n16c32t-isolated-pus"
HOSTDEV = (
    b"<hostdev mode='subsystem' type='pci' managed='yes'>\n      <source>\n        <address "
    b"domain='0x0000' bus='0x11' slot='0x00' function='0x0'/>\n      </source>\n    </hostdev>\n  "
)
WITH_GPU = ORIGINAL.replace(b"</devices>", b"  " + HOSTDEV + b"</devices>")


def test_a_domain_of_another_host_gets_a_plan_for_this_one_and_keeps_its_first_original(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apply([NAME], yes=True, layout="pin-numa", host=HOST, quiet=True)
    before = daemon.definition()
    be_host(monkeypatch, OTHER)
    apply([NAME], yes=True)
    after = daemon.definition()
    hosts = [re.search(rb"host=.([0-9a-f]{16})", one) for one in (before, after)]
    assert hosts[0] and hosts[1] and hosts[0].group(1) != hosts[1].group(1)
    assert b"pin-numa" in after
    restore_domains([NAME], yes=True)
    assert daemon.definition() == ORIGINAL


def test_a_dry_run_changes_nothing_and_the_same_host_has_the_same_plan(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apply([NAME], yes=True, layout="pin-numa", host=HOST, quiet=True)
    before = daemon.definition()
    be_host(monkeypatch, OTHER)
    apply([NAME], dry_run=True)
    be_host(monkeypatch, HOST)
    assert daemon.definition() == before
    apply([NAME], yes=True, host=HOST)
    assert daemon.definition() == before
    assert "has this definition already" in capsys.readouterr().out


def test_a_device_that_the_host_lacks_is_named_with_the_gpus_that_it_has(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.put_definition(WITH_GPU)
    apply([NAME], yes=True, layout="pin-numa-pci", host=HOST, quiet=True)
    before = daemon.definition().replace(b"bus='0x11'", b"bus='0x21'")
    # As it arrives from a host that had the GPU elsewhere, with that host's records left behind.
    daemon.put_definition(before)
    shutil.rmtree(default_root())
    with pytest.raises(InputError) as refused:
        apply([NAME], yes=True, host=HOST)
    assert "0000:21:00.0" in refused.value.message
    assert refused.value.hint is not None and "0000:81:00.0" in refused.value.hint
    assert daemon.definition() == before


def test_another_layout_is_that_of_the_command_and_not_of_the_record(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply([NAME], yes=True, layout="pin-numa", host=HOST, quiet=True)
    tuned = daemon.definition()
    pinning = PlanOptions(pinning=Pinning.ALL_PUS)
    apply([NAME], yes=True, options=pinning, host=HOST, quiet=True)
    assert layout_of(daemon) == "custom"
    apply([NAME], yes=True, layout="pin-numa", host=HOST, quiet=True)
    assert daemon.definition() == tuned
    throughput = PlanOptions(objective=Objective.THROUGHPUT)
    apply([NAME], yes=True, options=throughput, host=HOST, quiet=True)
    assert layout_of(daemon) == "pin-bound"


def layout_of(daemon: StandIn) -> str:
    record = vm_of(open_domain(daemon.definition(), "x")).record
    assert record is not None
    return record.layout.name
