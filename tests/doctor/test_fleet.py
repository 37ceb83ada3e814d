"""Many hosts at once: each is compared with what most of its kind are."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.check.doctor.baseline import compare_fleet, find_drift, find_majority, record_of
from homenode.findings import Severity
from homenode.machine.pci import PciLink
from homenode.machine.topology import Host
from tests.command_line import homenode
from tests.doctor_cases import changed, without
from tests.doctor_domains import gpus, host

HGX = "hgx-h100"
ROOT = Path(__file__).parents[2]


def fleet(count: int, **others: Host) -> list[tuple[str, Host]]:
    return [(f"n{number}", host(HGX)) for number in range(count)] + list(others.items())


def slow(number: int = 0) -> Host:
    bdf = gpus(HGX, 8)[number]
    return changed(host(HGX), lambda d: d.bdf == bdf, link=PciLink(16.0, 16, 32.0, 16))


def test_forty_hosts_that_are_alike_have_no_difference() -> None:
    assert compare_fleet(fleet(40))[0] == []


def test_hosts_with_the_same_difference_are_one_row() -> None:
    found, _, _ = compare_fleet(fleet(37, a=slow(), b=slow(), c=slow(4)))
    assert [(one.finding.id, one.hosts, one.of_hosts) for one in found] == [
        ("drift-link", ("a", "b"), 40),
        ("drift-link", ("c",), 40),
    ]
    assert found[0].finding.severity is Severity.CRITICAL


def test_a_host_that_lost_a_gpu_is_still_of_its_kind() -> None:
    lost = without(host(HGX), lambda device: device.bdf == gpus(HGX, 8)[3])
    found, _, _ = compare_fleet(fleet(4, lost=lost))
    assert {one.finding.id for one in found} == {"drift-device", "drift-topology"}
    assert {one.hosts for one in found} == {("lost",)}


def test_of_two_hosts_that_differ_neither_is_judged() -> None:
    found, _, alone = compare_fleet(fleet(1, other=slow()))
    assert (found, alone) == ([], ["n0", "other"])


@pytest.mark.parametrize("slow_first", [True, False])
def test_without_a_majority_the_faster_link_is_expected(slow_first: bool) -> None:
    hosts = [("a", slow()), ("b", slow())]
    hosts = [*hosts, *fleet(2)] if slow_first else [*fleet(2), *hosts]
    (found,) = compare_fleet(hosts)[0]
    assert (found.hosts, found.is_tie) == (("a", "b"), True)
    assert not any(one.is_tie for one in compare_fleet([*hosts, *fleet(1)])[0])
    settings = [replace(host(HGX).settings, firmware=firmware) for firmware in "abc"]
    three = [(one.firmware or "", replace(host(HGX), settings=one)) for one in settings]
    assert [one.is_tie for one in compare_fleet(three)[0]] == [True, True]


def test_kinds_are_compared_apart() -> None:
    desktop = host("rtx4080-i9-14900k")
    mixed = fleet(3) + [(f"d{number}", desktop) for number in range(3)]
    found, kinds, _ = compare_fleet(mixed)
    assert (found, list(kinds.values())) == ([], [3, 3])


def test_the_majority_is_field_by_field() -> None:
    common = find_majority(record_of(one) for one in (slow(0), slow(1), slow(2)))
    assert list(find_drift(common, host(HGX), "HGX")) == []
    assert [one.id for one in find_drift(common, slow(0), "HGX")] == ["drift-link"]


def test_the_commands_read_a_directory_of_hosts(tmp_path: Path) -> None:
    text = (ROOT / "src/homenode/machine/hosts/hgx-h100.toml").read_text()
    pool = tmp_path / "pool"
    pool.mkdir()
    for number in range(4):
        other = text.replace('"1TiB"', '"768GiB"', 1) if number == 2 else text
        named = other.replace('name = "hgx-h100"', f'name = "node{number}"', 1)
        (pool / f"node{number}.toml").write_text(named)
    done = homenode("doctor", "--pool", pool)
    assert done.exit_code == 1 and "1 of 4" in done.stdout and "node2" in done.stdout
