"""A plan is defined on the host that it is for alone, and a tuned domain keeps its layout."""

import json
import re
import shutil
from itertools import cycle
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.change.journal import default_root
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.topology import Host, RunningDomain
from homenode.objective import Objective
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.host_sources import load_daemon_host
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.layout import Pinning
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.apply.test_undo_libvirt import GPU as GPU_WITH_ADDRESS
from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import apply, be_host, homenode, restore
from tests.virsh_stand_in import URI, StandIn

HERE = "small-2n8c-2gpu"
GPU = GPU_WITH_ADDRESS.format(address="")
OTHERS = ("hgx-h100", "h200-xeon8558", "rtx4090-epyc7702")
BOOTS = ("create", "define", "start")
CALLS: dict[str, tuple[str, ...]] = {
    "apply": ("apply", "--layout", "pin", "--yes", "--host", "OTHER", "--", NAME),
    "apply --dry-run": ("apply", "--layout", "pin", "--dry-run", "--host", "OTHER", "--", NAME),
    "apply --domain": ("apply", "--yes", "--domain", "TUNED", "--", NAME),
    "trial": ("trial", "--in-place", "--yes", "--host", "OTHER", "--", NAME),
    "trial --dry-run": ("trial", "--in-place", "--dry-run", "--host", "OTHER", "--", NAME),
    "verify --live": ("verify", f"--live={NAME}", "--host", "OTHER"),
    "verify --live --plan": ("verify", f"--live={NAME}", "--plan", "PLAN"),
    "verify --start": ("verify", "--start", "--yes", "--host", "OTHER", "--", NAME),
    "verify --start --plan": ("verify", "--start", "--yes", "--plan", "PLAN", "--", NAME),
}


@pytest.mark.parametrize(("call", "other"), list(zip(CALLS, cycle(OTHERS), strict=False)))
def test_a_plan_for_another_host_is_refused_and_nothing_defined_or_started(
    daemon: StandIn, tmp_path: Path, other: str, call: str
) -> None:
    files = {"OTHER": other, "PLAN": str(tmp_path / "p.json"), "TUNED": str(tmp_path / "t.xml")}
    (tmp_path / "vm.xml").write_bytes(ORIGINAL)
    planned = homenode(
        *("plan", tmp_path / "vm.xml", "--layout", "pin", "--host", other, "-q"),
        *("-o", files["TUNED"], "--save-plan", files["PLAN"]),
    )
    assert planned.exit_code == 0, planned.output
    daemon.put("log", "")
    refused = homenode(*(files.get(word, word) for word in CALLS[call]))
    assert isinstance(refused.exception, InputError), refused.output
    assert HERE in refused.exception.message
    assert other in refused.exception.message or call == "apply --domain"  # which has no name
    assert daemon.definition() == ORIGINAL
    assert not any(line.startswith(BOOTS) for line in daemon.commands())


@pytest.mark.parametrize("call", ["apply --domain", "verify --start"])
def test_a_device_that_the_host_lacks_is_refused_by_name(
    daemon: StandIn, tmp_path: Path, call: str
) -> None:
    daemon.put_definition(ORIGINAL.replace(b"</devices>", f"{GPU}</devices>".encode()))
    (tmp_path / "t.xml").write_bytes(daemon.definition())
    daemon.put("log", "")
    files = {"TUNED": str(tmp_path / "t.xml"), "OTHER": HERE}
    refused = homenode(*(files.get(word, word) for word in CALLS[call]))
    assert isinstance(refused.exception, InputError), refused.output
    assert "0000:19:00.0" in refused.exception.message
    assert not any(line.startswith(BOOTS) for line in daemon.commands())


def test_a_capture_of_the_same_machine_is_accepted(daemon: StandIn, tmp_path: Path) -> None:
    copy = tmp_path / "host.json"
    shown = homenode("show", "--host", HERE, "--json")
    copy.write_text(shown.stdout)
    assert json.loads(shown.stdout)
    apply([NAME], host=str(copy), layout="pin", yes=True, quiet=True)
    assert b"<vcpupin" in daemon.definition()


def test_a_host_that_shows_too_little_is_refused(daemon: StandIn, tmp_path: Path) -> None:
    listing = tmp_path / "host.toml"
    listing.write_text(
        "name = 'bare'\npackages = 1\ncores_per_package = 8\nmemory_per_node = '8GiB'\n"
    )
    with pytest.raises(
        InputError, match=r"bare \(8 CPUs, GPUs unknown\), which cannot be compared"
    ):
        apply([NAME], host=str(listing), layout="pin", yes=True, quiet=True)
    assert daemon.definition() == ORIGINAL


def test_allocations_are_those_of_now(daemon: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    now = RunningDomain(
        name="now",
        running=True,
        vcpu_pins=(CpuSet([1]),),
        emulator_pus=None,
        iothread_pus=(),
        memory_bytes=1 << 30,
        memory_bound=False,
        memory_by_node=(),
        page_bytes=None,
        devices=(),
    )
    busy = replace(load_host(HERE), domains=(now,))
    monkeypatch.setattr("homenode.vm.host_sources._read_this_machine", lambda: busy)
    assert load_daemon_host(HERE, Virsh(URI)).domains == (now,)


class ElsewhereVirsh(Virsh):
    """A daemon on another machine, which is described."""

    def __init__(self, source: str) -> None:
        super().__init__("qemu+ssh://gpu7/system")
        self.host: Host = load_host(source)

    def read_capabilities(self) -> str:
        cells = "".join(
            f"<cell id='{node.index}'><cpus>"
            + "".join(f"<cpu id='{pu}' siblings='{pu}'/>" for pu in node.pus)
            + "</cpus></cell>"
            for node in self.host.nodes
        )
        return (
            f"<capabilities><host><topology><cells>{cells}</cells></topology></host></capabilities>"
        )

    def node_devices(self, capability: str) -> tuple[str, ...]:
        addresses = (str(device.bdf) for device in self.host.pci_devices)
        return tuple(f"pci_{address.replace(':', '_').replace('.', '_')}" for address in addresses)

    def list_domains(self, *, running: bool = False) -> dict[str, str]:
        return {}


def test_a_daemon_elsewhere_is_asked_for_its_nodes_and_functions() -> None:
    there = ElsewhereVirsh(HERE)
    assert load_daemon_host(HERE, there).name == HERE
    for other in OTHERS:
        with pytest.raises(InputError, match=f"{other}.*gpu7"):
            load_daemon_host(other, there)


HOST = "small-2n8c-2gpu"
OTHER = "x86-2p2n16c32t-isolated-pus"
HOSTDEV = (
    b"<hostdev mode='subsystem' type='pci' managed='yes'>\n      <source>\n        <address "
    b"domain='0x0000' bus='0x11' slot='0x00' function='0x0'/>\n      </source>\n    </hostdev>\n  "
)
WITH_GPU = ORIGINAL.replace(b"</devices>", b"  " + HOSTDEV + b"</devices>")


def test_a_domain_of_another_host_gets_a_plan_for_this_one_and_keeps_its_first_original(
    daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply([NAME], yes=True, layout="pin-numa", host=HOST, quiet=True)
    before = daemon.definition()
    be_host(monkeypatch, OTHER)
    apply([NAME], yes=True)
    after = daemon.definition()
    hosts = [re.search(rb"host=.([0-9a-f]{16})", one) for one in (before, after)]
    assert hosts[0] and hosts[1] and hosts[0].group(1) != hosts[1].group(1)
    assert b"pin-numa" in after
    restore([NAME])
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


def test_a_device_that_the_host_lacks_is_named_with_the_gpus_that_it_has(daemon: StandIn) -> None:
    daemon.put_definition(WITH_GPU)
    apply([NAME], yes=True, layout="pin-numa-pci", host=HOST, quiet=True)
    before = daemon.definition().replace(b"bus='0x11'", b"bus='0x21'")
    # As it arrives from a host that had the GPU elsewhere, with that host's records left behind.
    daemon.put_definition(before)
    shutil.rmtree(default_root())
    with pytest.raises(InputError) as refused:
        apply([NAME], yes=True, host=HOST)
    device, _, others = refused.value.message.partition("; nearest: ")
    assert "0000:21:00.0" in device and "0000:81:00.0" in others
    assert refused.value.hint == "remove its <hostdev> and add --gpus 1"
    assert daemon.definition() == before


def test_another_layout_is_that_of_the_command_and_not_of_the_record(daemon: StandIn) -> None:
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
    record = build_vm(open_domain(daemon.definition(), "x")).record
    assert record is not None
    return record.layout.name
