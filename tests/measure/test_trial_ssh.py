"""A trial that reaches its guest by ssh: a real sshd, with this machine in the guest's place."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.measure.access.ssh import SshChannel
from homenode.measure.experiment import Progress
from homenode.measure.trial import guest
from homenode.measure.trial.guest import GuestReach
from homenode.measure.trial.journal import EntryKind
from homenode.vm.hypervisor.connection import GuestAccess, Transport
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import ORIGINAL
from tests.simulated_trial import SimulatedReach, new_trial, run_whole
from tests.ssh_targets import new_key, ssh_target
from tests.virsh_stand_in import URI, UUID, StandIn

pytestmark = pytest.mark.root
DAEMON_S = guest.DAEMON_S


@pytest.fixture(autouse=True)
def patient(daemon: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "DAEMON_S", DAEMON_S)


def access_to(guest: SshChannel) -> GuestAccess:
    return GuestAccess(Transport.SSH, guest.address, guest.user, guest.port, str(guest.key))


@pytest.mark.nightly
def test_a_guest_is_equipped_and_a_wrong_key_is_named(daemon: StandIn, tmp_path: Path) -> None:
    """This machine is not what any layout plans: it is given, and not measured."""
    trial = new_trial(tmp_path, SimulatedReach(daemon, {}), boots=1, layouts=("pin-numa",))
    journal = trial.journal
    with ssh_target(tmp_path) as target:
        reaching = access_to(target)
        known_hosts = journal.path / "known_hosts"
        reach = GuestReach(Virsh(URI), reaching, known_hosts, b"#!/bin/sh\necho probe\n")
        run_whole(replace(trial, reach=reach))
        assert known_hosts.exists()
        wrong = replace(reaching, key=str(tmp_path / "other_key"))
        hurried = replace(trial.config, measuring=replace(trial.config.measuring, answer_s=0.1))
        reach = GuestReach(Virsh(URI), wrong, known_hosts, b"")
        run_whole(replace(trial, reach=reach, config=hurried))
    whats = [entry.what for entry in journal.load().entries]
    assert whats.count(EntryKind.MISMATCHED) == 1
    failed = [entry for entry in journal.load().entries if entry.what == EntryKind.FAILED]
    assert len(failed) == 1
    assert "Permission denied" in failed[0].detail
    assert "--ssh-key" in failed[0].detail
    assert daemon.definition() == ORIGINAL


@pytest.mark.nightly
def test_another_host_key_at_a_later_boot_is_refused(daemon: StandIn, tmp_path: Path) -> None:
    """This machine is not what any layout plans: its boots are given, and not measured."""
    trial = new_trial(tmp_path, SimulatedReach(daemon, {}), boots=2, layouts=("pin-numa",))
    journal = trial.journal
    with ssh_target(tmp_path) as target:
        reaching = access_to(target)
        reach = GuestReach(Virsh(URI), reaching, journal.path / "known_hosts", b"#!/bin/sh\n")

        def at_the_second(progress: Progress) -> None:
            if progress.ended_count == 1:
                new_key(tmp_path / "host_key")

        run_whole(replace(trial, reach=reach, on_boot=at_the_second))
    entries = journal.load().entries
    outcomes = [one for one in entries if one.what in (EntryKind.MISMATCHED, EntryKind.FAILED)]
    assert [one.what for one in outcomes] == [EntryKind.MISMATCHED, EntryKind.FAILED]
    assert "expected the host key of the first login" in outcomes[1].detail
    assert "ssh-keygen -R" in outcomes[1].detail
    assert daemon.definition() == ORIGINAL


def test_a_guest_is_reached_at_the_address_that_answers(daemon: StandIn, tmp_path: Path) -> None:
    class Leases(Virsh):
        def list_addresses(self, uuid: str) -> tuple[str, ...]:
            return ("127.0.0.7", target.address)

    with ssh_target(tmp_path) as target:
        reaching = GuestAccess(Transport.SSH, None, target.user, target.port, str(target.key))
        known_hosts = tmp_path / "trial_hosts"
        reach = GuestReach(Leases(URI), reaching, known_hosts, b"")
        assert reach.machine(UUID).name == f"{target.user}@{target.address} over ssh"
        assert "127.0.0.7" not in known_hosts.read_text()


LO = " lo         00:00:00:00:00:00    ipv4         127.0.0.1/8\n -  -  ipv6  ::1/128"
ETH = " eth0       52:54:00:0b:65:29    ipv6         fd00::7/64\n -  -  ipv4  192.0.2.7/24"
BARE = (
    " vnet0      52:54:00:0b:65:29    ipv6         fe80::7/64\n vnet1  52:54:00:0b:65:2a  N/A  N/A"
)
"""Lines of `virsh domifaddr` of libvirt 9.0."""


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ({"lease": ETH, "agent": LO}, ("192.0.2.7", "fd00::7")),
        ({"lease": "", "agent": f"{LO}\n{ETH}"}, ("192.0.2.7", "fd00::7")),
        ({"lease": f" eth0  -  ipv4  x/24\n{ETH}"}, ("192.0.2.7", "fd00::7")),
        ({"lease": BARE, "arp": ETH}, ("192.0.2.7", "fd00::7")),  # no agent answers
        ({"lease": "", "agent": LO, "arp": ""}, ()),
    ],
)
def test_addresses_are_those_of_the_first_source_that_has_any(
    daemon: StandIn, listed: dict[str, str], expected: tuple[str, ...]
) -> None:
    for source, lines in listed.items():
        daemon.put(f"addresses-{source}", lines)
    assert Virsh(URI).list_addresses(UUID) == expected
