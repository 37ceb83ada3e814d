"""[[vm]] and [reserve] of a host.toml: what VMs have of a described host."""

from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.formats import decode, encode
from homenode.machine.topology import Host, HostReserve, RunningDomain
from homenode.units import GIB
from homenode.vm.sources import load_host

HOST = """
name = "host"
packages = 2
cores_per_package = 4
threads_per_core = 2
memory_per_node = "64GiB"
[[root]]
node = [0, 1]
ports = ["gpu"]
"""


def host_of(tmp_path: Path, text: str) -> Host:
    path = tmp_path / "host.toml"
    path.write_text(HOST + text)
    return load_host(str(path))


def vm_of(tmp_path: Path, text: str) -> RunningDomain:
    (vm,) = host_of(tmp_path, f'[[vm]]\nname = "a"\n{text}').domains
    return vm


def test_a_vm_has_pins_memory_and_devices(tmp_path: Path) -> None:
    vm = vm_of(
        tmp_path,
        'pins = ["0,8", "1,9"]\nmemory = { 1 = "8GiB", 0 = "4GiB" }\npage_size = "1GiB"\n'
        'emulator = "2"\niothreads = ["3", "10-11"]\ndevices = ["gpu.1"]',
    )
    assert vm.vcpu_pins == (CpuSet([0, 8]), CpuSet([1, 9]))
    assert vm.memory_by_node == ((0, 4 * GIB), (1, 8 * GIB))
    assert (vm.memory_bytes, vm.memory_bound, vm.page_bytes) == (12 * GIB, True, GIB)
    assert vm.emulator_pus == CpuSet([2])
    assert vm.iothread_pus == (CpuSet([3]), CpuSet([10, 11]))
    assert vm.planned and not vm.running and len(vm.devices) == 1


def test_memory_without_nodes_lies_where_the_vcpus_are(tmp_path: Path) -> None:
    vm = vm_of(tmp_path, 'pins = "0-5"\nmemory = "9GiB"')
    assert vm.vcpu_pins == tuple(CpuSet([pu]) for pu in range(6))
    assert vm.memory_by_node == ((0, 9 * GIB // 2), (1, 9 * GIB // 2))
    floating = vm_of(tmp_path, 'nodes = 1\nvcpus = 3\nmemory = "4GiB"')
    assert floating.vcpu_pins == (CpuSet.parse("4-7,12-15"),) * 3
    assert floating.memory_by_node == ((1, 4 * GIB),)
    anywhere = vm_of(tmp_path, 'vcpus = 2\nmemory = "4GiB"')
    assert anywhere.vcpu_pins == (None, None) and not anywhere.memory_bound
    assert (anywhere.memory_bytes, anywhere.memory_by_node) == (4 * GIB, ())


@pytest.mark.parametrize(
    ("state", "running", "planned"),
    [("planned", False, True), ("running", True, False), ("shut-off", False, False)],
)
def test_a_vm_is_planned_running_or_shut_off(
    tmp_path: Path, state: str, running: bool, planned: bool
) -> None:
    vm = vm_of(tmp_path, f'vcpus = 1\nstate = "{state}"')
    assert (vm.running, vm.planned) == (running, planned)


def test_devices_are_named_or_addressed(tmp_path: Path) -> None:
    by_name = vm_of(tmp_path, 'vcpus = 1\ndevices = ["gpu.0"]')
    address = by_name.devices[0]
    assert vm_of(tmp_path, f'vcpus = 1\ndevices = ["{address}"]').devices == (address,)
    assert isinstance(address, Bdf)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "vm[0].vcpus: expected a number of vCPUs, or pins"),
        ('pins = ""', "vm[0].pins: expected the CPUs of each of its vCPUs"),
        ('pins = "0-3"\nvcpus = 3', "vm[0].pins: expected the CPUs of each of 3 vCPUs"),
        ('pins = "0-99"', "vm[0].pins: expected some of the online CPUs 0-15"),
        ('pins = ["0", ""]', "a list of nonempty CPU lists"),
        ("vcpus = 0", "vm[0].vcpus: expected int >= 1, found 0"),
        ("vcpus = 1\nnodes = 7", "vm[0].nodes: expected nodes of the host (0-1), found 7"),
        ('vcpus = 1\nmemory = { 7 = "1GiB" }', "vm[0].memory: expected nodes of the host (0-1)"),
        ("vcpus = 1\nmemory = 5", "with its unit"),
        ('vcpus = 1\nstate = "paused"', "vm[0].state: Invalid enum value 'paused'"),
        ('vcpus = 1\ndevices = ["gpu.7"]', "addresses or names of devices (gpu.0, gpu.1)"),
        ('vcpus = 1\ndevices = ["ff:00.0"]', "addresses or names of devices"),
        ('vcpus = 1\nemulators = "0"', "did you mean emulator"),
        ('vcpus = 1\n[[vm]]\nname = "a"\nvcpus = 1', "a name that no other [[vm]] has"),
        (
            'vcpus = 1\ndevices = ["gpu.0"]\n[[vm]]\nname = "b"\nvcpus = 1\ndevices = ["gpu.0"]',
            "vm[1].devices: expected devices that [[vm]] a does not have",
        ),
    ],
)
def test_a_vm_that_cannot_be_is_refused_with_its_key(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(InputError) as error:
        vm_of(tmp_path, text)
    assert message in str(error.value) or message in str(error.value.hint), error.value


def test_the_operator_keeps_cores_memory_and_housekeeping_pus(tmp_path: Path) -> None:
    host = host_of(tmp_path, '[reserve]\ncores = 2\nhousekeeping_pus = "0,8"')
    assert host.reserve == HostReserve(2, None)
    assert host.housekeeping_pus == CpuSet([0, 8])
    assert host_of(tmp_path, '[reserve]\nmemory = "8GiB"').reserve == HostReserve(1, 8 * GIB)
    assert host_of(tmp_path, '[reserve]\nhousekeeping_pus = "0"').reserve is None
    assert host_of(tmp_path, "").reserve is None
    with pytest.raises(InputError, match=r"reserve\.housekeeping_pus: expected some of the online"):
        host_of(tmp_path, '[reserve]\nhousekeeping_pus = "99"')


def test_a_stored_host_keeps_them(tmp_path: Path) -> None:
    host = host_of(tmp_path, '[reserve]\ncores = 2\n[[vm]]\nname = "a"\nvcpus = 1')
    text = encode("host", host)
    assert decode(text, "host", Host, "h") == host
