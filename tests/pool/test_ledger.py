"""The ledger: nothing is given twice, and no VM is lost or a ghost, whatever happens meanwhile."""

import errno
import fcntl
import json
import os
import resource
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cli import main
from homenode.cluster.pool import ledger as ledgers
from homenode.cluster.pool.flavour import Flavour, default_flavours
from homenode.cluster.pool.ledger import LEDGER, PLACEMENTS, Ledger
from homenode.cluster.pool.model import Pool, PoolHost, passable_gpus
from homenode.cluster.pool.place import PoolPlaces
from homenode.cluster.pool.reservations import (
    Reservation,
    ReservationState,
    identity_of,
    with_reservations,
)
from homenode.cluster.pool.rules import Rules
from homenode.cluster.pool.sources import load_pool
from homenode.cluster.pool.stored import POOL_FILE, encode_pool
from homenode.errors import HostError
from homenode.formats import line
from homenode.machine.topology import Host, RunningDomain
from homenode.units import GIB
from homenode.vm.domain.read import read_running_domain
from tests.pool import ledger_clients
from tests.pool.pools import pool_of, shipped, sized, with_vm

GPU1, GPU2, GPU4, GPU8 = default_flavours()
TINY = sized(name="tiny", gpus=0, vcpus=1, memory_bytes=GIB)
ONE, TWO = (f"{n}0000000-0000-4000-a000-000000000000" for n in (1, 2))
DOCUMENT = """<domain type='kvm'><name>vm</name><uuid>%s</uuid><memory unit='GiB'>64</memory>
<vcpu>12</vcpu><os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features>
<cpu mode='host-passthrough'/><devices/></domain>"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("pool").mkdir()
    _capture(pool_of([(name, shipped("hgx-h100")) for name in "abc"]))
    for name, uuid in (("one.xml", ONE), ("two.xml", TWO)):
        Path(name).write_text(DOCUMENT % uuid)
    return Path("pool")


def _capture(pool: Pool) -> None:
    Path("pool", POOL_FILE).write_text("".join(encode_pool(pool)))


def _vm(uuid: str | None = ONE, flavour: Flavour = GPU8, name: str = "vm") -> RunningDomain:
    return replace(with_vm(shipped("hgx-h100"), flavour, name).domains[-1], uuid=uuid)


def _shown(running: dict[str, RunningDomain], hosts: str = "abc") -> Pool:
    """A capture that shows these VMs on these hosts."""
    host = shipped("hgx-h100")
    return pool_of(
        [
            (name, replace(host, domains=(running[name],) if name in running else ()))
            for name in hosts
        ]
    )


def _where(pool: Pool) -> dict[str, list[str | None]]:
    return {host.name: [vm.uuid for vm in host.domains] for host in pool.hosts if host.domains}


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        words = [
            "homenode",
            "pool",
            *arguments,
            *(() if "--pool" in arguments else ("--pool", "pool")),
        ]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as end:
            main.main()
        said = capsys.readouterr()
        return int(str(end.value.code or 0)), said.out, said.err

    return run


def _place(run: Run, document: str, gpus: int, *more: str) -> tuple[int, str, str]:
    layout = ("--layout", "pin-numa-pci", "--vcpus", str(6 * gpus), "--memory", f"{60 * gpus}GiB")
    return run("place", document, "--gpus", str(gpus), *layout, "--record", *more)


def test_two_vms_of_one_name_are_two(folder: Path, run: Run) -> None:
    assert _place(run, "one.xml", 8)[0] == _place(run, "two.xml", 8)[0] == 0
    assert _where(load_pool(["pool"])) == {"a": [ONE], "b": [TWO]}
    code, _, said = run("remove", "vm")
    assert (code, "expected a UUID" in said) == (2, True)
    assert run("remove", TWO)[0] == 0
    assert _where(load_pool(["pool"])) == {"a": [ONE]}


def test_a_vm_that_is_placed_again_stays_where_it_is_and_counts_once(
    folder: Path, run: Run
) -> None:
    for _ in range(3):
        assert _place(run, "one.xml", 4)[0] == 0
        assert _where(load_pool(["pool"])) == {"a": [ONE]}
    code, _, said = _place(run, "one.xml", 4, "--on", "c")
    assert (code, "no longer counts on a" in said) == (0, True)
    assert _where(load_pool(["pool"])) == {"c": [ONE]}


def test_owners_tell_vms_of_one_name_apart_that_have_no_uuid(folder: Path, run: Run) -> None:
    Path("none.xml").write_text((DOCUMENT % ONE).replace(f"<uuid>{ONE}</uuid>", ""))
    for owner in ("x", "y", "x"):
        code, _, said = _place(run, "none.xml", 8, "--owner", owner)
        assert code == 0
    assert "has no UUID" in said
    pool = load_pool(["pool"])
    assert [len(host.domains) for host in pool.hosts] == [1, 1, 0]
    assert run("remove", "vm", "--owner", "y")[0] == 0
    assert [len(host.domains) for host in load_pool(["pool"]).hosts] == [1, 0, 0]
    assert identity_of("n", None, "x") != identity_of("n", None, "y")


def _after(one: Reservation, pool: Pool, now_s: float = 0.0) -> tuple[str, str, Pool]:
    """Host and state of the reservation once it has met the capture, and what counts then."""
    view = with_reservations(pool, [one], {}, now_s)
    now = view.changed[0][1] if view.changed else one
    return now.host, now.state, view.pool


def test_a_capture_says_where_a_reserved_vm_is_by_now() -> None:
    planned, running = _vm(), replace(_vm(), running=True, planned=False)
    one = Reservation(host="a", vm=planned)
    seen = replace(one, state=ReservationState.RUNNING)
    defined = replace(running, running=False)
    for reservation, shown, expected, counted in (
        (one, {}, ("a", "planned"), {"a": [ONE]}),
        (one, {"a": running}, ("a", "running"), {"a": [ONE]}),
        (one, {"b": running}, ("b", "running"), {"b": [ONE]}),
        (one, {"a": defined}, ("a", "shut off"), {"a": [ONE]}),
        (one, {"a": defined, "b": running}, ("b", "running"), {"a": [ONE], "b": [ONE]}),
        (one, {"b": replace(running, uuid=TWO)}, ("a", "planned"), {"a": [ONE], "b": [TWO]}),
        (one, {"b": replace(running, uuid=None)}, ("b", "running"), {"b": [None]}),
        (seen, {}, ("a", "gone"), {}),
        (seen, {"b": running}, ("b", "running"), {"b": [ONE]}),
        (seen, {"a": defined}, ("a", "shut off"), {"a": [ONE]}),
    ):
        host, state, pool = _after(reservation, _shown(shown))
        assert (host, state) == expected, shown
        assert _where(pool) == counted
    assert _shown({"a": defined}).hosts[0].domains[0].planned is False


def test_a_host_whose_vms_are_unknown_ends_none_of_them() -> None:
    one = Reservation(host="a", vm=_vm(), state=ReservationState.RUNNING)
    pool = _shown({})
    hosts = tuple(replace(host, lists_domains=False) for host in pool.hosts)
    assert _after(one, replace(pool, hosts=hosts))[1] == "running"


def test_a_planned_vm_counts_no_longer_than_its_time(folder: Path, run: Run) -> None:
    one = Reservation(host="a", vm=_vm(), expires_at_s=100.0)
    assert _where(_after(one, _shown({}), 99.0)[2]) == {"a": [ONE]}
    assert _where(_after(one, _shown({}), 100.0)[2]) == {}
    assert _place(run, "one.xml", 8, "--ttl", "3600")[0] == 0
    with Ledger(folder) as ledger:
        assert len(ledger.reservations()) == 1
        assert ledger.next_expiry_s() < float("inf")


def test_vms_of_hosts_that_left_the_pool_are_named(folder: Path, run: Run) -> None:
    _place(run, "one.xml", 8)
    _capture(_shown({}, "bc"))
    assert "a is not in the pool, and counts nothing: it had vm" in run("show")[2]
    _capture(_shown({"b": replace(_vm(), running=True, planned=False)}, "bc"))
    assert load_pool(["pool"]).lost == ()


def test_devices_that_a_planned_vm_has_are_given_to_no_other(folder: Path) -> None:
    with Ledger(folder) as ledger, ledger.writing():
        ledger.reserve(Reservation(host="a", vm=_vm(ONE)))
    refused = pytest.raises(HostError, match="no other VM has")
    with Ledger(folder) as ledger, refused, ledger.writing():
        ledger.reserve(Reservation(host="b", vm=_vm("3" + TWO[1:], name="x")))
        ledger.reserve(Reservation(host="a", vm=_vm(TWO, GPU1, "y")))
    assert _where(load_pool(["pool"])) == {"a": [ONE]}


@pytest.mark.parametrize("name", ["flock", "fcntl"])
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, None])
def test_a_file_system_without_locks_is_refused_by_name(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str, number: int | None
) -> None:
    def fails(*_: object) -> None:
        if number is not None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, name, fails)
    monkeypatch.setattr(ledgers, "file_system", lambda _: "oldfs")
    code, _, said = _place(run, "one.xml", 8)
    assert (code, "expected a file system with locks, found oldfs" in said) == (3, True)
    assert not (folder / LEDGER).exists()
    assert sorted(path.name for path in folder.iterdir()) == [POOL_FILE]


def test_a_file_system_that_other_machines_write_is_refused(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ledgers.file_system(folder) not in (None, "nfs4")
    monkeypatch.setattr(ledgers, "file_system", lambda _: "nfs4")
    code, _, said = _place(run, "one.xml", 8)
    assert (code, "found nfs4" in said) == (3, True)


def test_a_file_that_is_no_ledger_of_this_version_is_refused(folder: Path, run: Run) -> None:
    path = folder / LEDGER
    path.write_bytes(b"x" * 5000)
    assert run("show")[0] == 2
    path.unlink()
    _place(run, "one.xml", 8)
    for change in (
        "UPDATE ledger SET format = 'homenode.pool-ledger/2'",
        "CREATE TRIGGER t AFTER DELETE ON reservation BEGIN DELETE FROM host; END",
        "UPDATE reservation SET content = '{}'",
    ):
        content = path.read_bytes()
        with sqlite3.connect(path) as connection:
            connection.execute(change)
        connection.close()
        code, _, said = run("show")
        assert (code, LEDGER in said) == (2, True), change
        path.write_bytes(content)
    path.rename("elsewhere")
    path.symlink_to(Path("elsewhere").absolute())
    assert run("show")[0] == 2


def test_what_an_earlier_version_has_recorded_is_read_once(folder: Path, run: Run) -> None:
    def placement(host: str, name: str, *, there: bool = True) -> str:
        vm = json.loads(line(_vm(None, name=name))) if there else None
        return json.dumps({"host": host, "name": name} | ({"vm": vm} if there else {})) + "\n"

    head = '{"format":"homenode.pool-placements/1"}\n'
    lines = (placement("a", "x"), placement("b", "y"), placement("b", "y", there=False))
    (folder / PLACEMENTS).write_text(head + "".join(lines) + '{"host":"c","na')
    for _ in range(2):
        assert [len(host.domains) for host in load_pool(["pool"]).hosts] == [1, 0, 0]
    assert not (folder / PLACEMENTS).exists()
    assert run("remove", "x")[0] == 0
    (folder / "placements.read").rename(folder / PLACEMENTS)  # as a kill may leave it
    assert [len(host.domains) for host in load_pool(["pool"]).hosts] == [0, 0, 0]


def _places(*rules: tuple[str, Rules], domains: tuple[str, ...] = ("r", "r", "s")) -> PoolPlaces:
    pool = pool_of([(name, shipped("hgx-h100")) for name in "abc"])
    hosts: list[PoolHost] = []
    for host, domain in zip(pool.hosts, domains, strict=True):
        hosts.append(replace(host, fault_domain=domain))
    places = PoolPlaces(replace(pool, hosts=tuple(hosts)), ())
    for number, (host_name, one) in enumerate(rules):
        places.add(host_name, _vm(None, TINY, f"vm-{number}"), one)
    return places


def _gpus(host: Host) -> set[Bdf]:
    return {gpu.bdf for gpu in passable_gpus(host)}


def test_nothing_is_given_twice_lost_or_a_ghost_whoever_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    ledger_clients.begin(folder, 3)
    done = ledger_clients.storm(folder, clients=2, operations=15, rounds=1)
    assert done > 10
    assert sum(ledger_clients.check(folder).values())


def test_a_captured_vm_has_its_uuid_unless_it_is_a_pseudonym() -> None:
    text = (DOCUMENT % ONE.upper()).encode()
    assert read_running_domain(text, running=True).uuid == ONE
    hidden = text.replace(b"<name>vm", b"<name>redacted/vm-1")
    assert read_running_domain(hidden, running=True).uuid is None


def test_a_full_disk_is_no_want_of_locks(folder: Path, tmp_path: Path) -> None:
    """What cannot be written was not reserved, and the hint is to free some space."""
    with Ledger(folder) as ledger, ledger.writing():
        ledger.reserve(Reservation(host="a", vm=_vm()))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            with Ledger(folder) as ledger, ledger.writing():
                ledger.release(ledger.reservations()[0])
        except HostError as error:
            code = 0 if "space" in (error.hint or "") else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with Ledger(folder) as ledger:
        assert len(ledger.reservations()) == 1
