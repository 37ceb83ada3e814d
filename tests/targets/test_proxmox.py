"""What Proxmox does with a file beyond the placement: its time-out, and keys that have defaults."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from homenode.check.verify.verification import verify_target
from homenode.errors import InputError
from homenode.findings import Finding, are_bad
from homenode.plan.pipeline import PlannedFile, plan_for_target
from homenode.units import GIB, MIB
from homenode.vm.targets.qm_conf import start_timeout_s
from homenode.vm.targets.registry import read_vm, recognize_kind
from tests.cli.test_plan import homenode
from tests.targets.test_edited_files import HOST, plain
from tests.targets.written import edited, host_named, options, written


@pytest.mark.parametrize(
    ("keys", "memory_bytes", "seconds"),
    [
        # By PVE::QemuServer::Helpers of qemu-server 9.2.6 itself.
        ({"net0"}, 16 * GIB, 35),
        ({"net0", "hostpci0"}, 16 * GIB, 125),
        ({"net0"}, 256 * GIB, 261),
        ({"net0", "hostpci0"}, 256 * GIB, 1029),
        ({"hugepages"}, 64 * GIB, 150),
        ({"hugepages", "hostpci15"}, 64 * GIB, 256),
        (set(), 30720 * MIB, 30),
        (set(), 30721 * MIB, 30),
    ],
)
def test_the_time_of_a_start_is_proxmoxs(keys: set[str], memory_bytes: int, seconds: int) -> None:
    assert start_timeout_s(keys, memory_bytes) == seconds


def test_a_vm_with_huge_pages_that_is_bound_to_no_node_names_one() -> None:
    """Proxmox wants hostnodes with huge pages."""
    planned = written("proxmox", HOST, options("default", page_bytes=2 * MIB))
    assert b"hostnodes=0,policy=preferred" in planned.rendering.document


def test_memory_on_nodes_that_are_no_range_is_refused() -> None:
    """Proxmox makes host-nodes=0,8 of them, which QEMU takes for an option named 8."""
    name = "x86-2p2n8c8t-nodes-0-and-8"
    wanted = options("pin-bound", vcpus=6, memory_bytes=2 * GIB)
    with pytest.raises(InputError, match="a range of host nodes, found 0,8"):
        written("proxmox", name, wanted)
    assert (
        b"hostnodes=8" in written("proxmox", name, options("pin-numa", vcpus=6)).rendering.document
    )


def timeouts(planned: PlannedFile) -> list[Finding]:
    return [found for found in planned.findings if found.id == "target-start-timeout"]


def test_a_start_with_devices_in_args_is_given_the_time_of_hostpci() -> None:
    conf = b"cores: 8\nhostpci0: 0000:19:00,pcie=1\nmachine: q35\nmemory: 262144\nnet0: virtio\n"
    planned = edited(conf, "hgx-h100", plain("pin-numa-pci"), "101.conf")
    (found,) = timeouts(planned)
    assert found.fix == "qm start 101 --timeout 1029" and "261 s" in found.observed
    assert b"reserved_s=1244" in dict(planned.rendering.companions)[".hook.sh"]
    assert timeouts(edited(conf, "hgx-h100", plain("pin-numa"), "101.conf")) == []
    assert timeouts(written("proxmox", HOST, options("pin-numa-pci"))) == []


def test_the_hook_script_gives_proxmox_the_seconds(tmp_path: Path) -> None:
    """With a perl that prints what it is given, and nothing to prepare."""
    planned = written("proxmox", "small-2n8c-2gpu", options("pin-numa-pci", gpu_count=1))
    text = dict(planned.rendering.companions)[".hook.sh"].decode()
    (tmp_path / "hook").write_text(text.replace("\nprepare() {", "\nprepare() {\n  return 0"))
    perl = tmp_path / "perl"
    perl.write_text('#!/bin/sh\nshift 3\necho "$@"\n')
    perl.chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / "hook", "101", "pre-start"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.stdout.split() == ["370", "101", "0", str(planned.plan.vm.hostdevs[0].bdf)]


def test_a_device_without_a_cell_is_put_on_the_root_bus_beside_expander_buses() -> None:
    name = "x86-2p2n8c16t-gpu-node-unknown"
    wanted = options("pin-numa-pci", vcpus=1, memory_bytes=1 << 30, gpu_count=2)
    planned = written("proxmox", name, wanted)
    assert {device.cell for device in planned.plan.vm.hostdevs} == {0, None}
    buses = re.findall(r"vfio-pci,\S*?,bus=([\w.]+)", planned.rendering.document.decode())
    assert len(buses) == 2 and "pcie.0" in buses
    hook = dict(planned.rendering.companions)[".hook.sh"]
    content, host = planned.rendering.document, host_named(name)
    found = verify_target(content, "vm", "proxmox", planned.plan, host=host, hook=hook)
    assert not are_bad(found.findings)


SHORT = [
    b"machine: q35,viommu=intel\n",
    b"name: simple\nscsi0: local:8006/base.qcow2,size=1G\n",
    b"smbios1: uuid=7b10d7af-b932-4c66-b2c3-3996152ec465\n",
    b"# a VM of defaults\nagent: 1\n",
]
"""As in Proxmox's own tests (cfg2cmd): every key has a default."""


@pytest.mark.parametrize("content", SHORT)
def test_a_short_configuration_is_read_where_its_target_is_named(
    content: bytes, tmp_path: Path
) -> None:
    with pytest.raises(InputError):
        recognize_kind(content, "101.conf")
    vm = read_vm(content, "101.conf", "proxmox")
    assert (vm.kind, vm.guest.vcpus, vm.guest.memory_bytes) == ("proxmox", 1, 512 * MIB)
    wanted = plain("pin-numa")
    made = plan_for_target(vm, wanted, host_named(HOST), "proxmox").rendering.document
    assert recognize_kind(made, "101.conf") == "proxmox"
    for line in content.partition(b"[")[0].splitlines():
        assert line in made


def test_the_command_reads_a_short_configuration_for_its_target_alone(tmp_path: Path) -> None:
    conf, out = tmp_path / "101.conf", tmp_path / "out.conf"
    conf.write_bytes(SHORT[0])
    command = ("plan", conf, "--host", HOST, "--layout", "pin-numa", "-o", out)
    done = homenode(*command, "--target", "proxmox")
    assert done.exit_code == 0 and b"machine: q35,viommu=intel" in out.read_bytes(), done.stderr
    assert homenode(*command, "--target", "xen", "--force").exit_code == 2
    refused = homenode(*command, "--force")
    assert refused.exit_code == 2 and "--target proxmox" in refused.stderr
    assert homenode("doctor", conf, "--host", HOST).exit_code == 0
    assert json.loads(homenode(*command, "--target", "proxmox", "--json").stdout)["vm"]["record"]


@pytest.mark.parametrize("content", [b"", b"hello\n", b"a: b\n", b"services:\n  x: y\n", b"{}"])
def test_what_is_no_configuration_is_refused_where_the_target_is_named(content: bytes) -> None:
    with pytest.raises(InputError):
        read_vm(content, "101.conf", "proxmox")
