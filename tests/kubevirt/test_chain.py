"""KubeVirt's converter, hook manager, gRPC, shim, the image's hook, libvirt, at each definition."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from homenode.machine.discover.host import discover
from homenode.process import run
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.model import Vm
from tests.domain.test_libvirt import URI, libvirt, virsh
from tests.kubevirt.kubevirt_code import build
from tests.kubevirt_documents import IBM, IBM_GPUS, shipped
from tests.processes import write_program
from tests.tree_writer import write_tree

__all__ = ["libvirt"]
VERSIONS = ("v1.6.1", "v1.8.4", "v1.9.0")
"""v1.6.1 is the newest v1.6 that the Go module proxy gives."""
_SHIM = """
mount --bind "$1" /var/run/kubevirt-hooks
export PATH="$2:$PATH"
exec "$3" --version v1alpha3
"""
Definition = dict[str, str]
NAME = f"gpu-vm-{os.getpid()}"
UID, GPU = "6f2d1c4e-9d3b-4b53-8f11-6a2f0a6d4c11", "nvidia.com/A100"


def build_chain(directory: Path, version: str) -> Path:
    """virt-launcher's way to a domain as `chain`, its sidecar's shim as `shim`."""
    build(directory, version, chain="./chain", shim="kubevirt.io/kubevirt/cmd/sidecars")
    (directory / "version").write_text(version)
    return directory


@pytest.fixture(scope="module", params=VERSIONS)
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_chain(tmp_path_factory.mktemp("programs"), request.param)


@contextmanager
def sidecar(programs: Path, directory: Path, log: int | None = None) -> Iterator[None]:
    """A sidecar with the image's hook: its shim, with the socket where virt-launcher looks for it.
    log: where the shim's go, as subprocess has it; None = to standard error."""
    sockets = Path("/var/run/kubevirt-hooks/hook-sidecar-0")
    sockets.mkdir(parents=True, exist_ok=True)
    tree, hook = directory / "tree", directory / "bin"
    write_tree(shipped(IBM), tree)
    program = f"{sys.executable} -Im homenode kubevirt on-define-domain"
    write_program(hook / "onDefineDomain", f'#!/bin/sh\nexec {program} --root {tree} "$@"\n')
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _SHIM, "sh"]
    shim = subprocess.Popen([*argv, str(sockets), str(hook), str(programs / "shim")], stderr=log)
    try:
        yield
    finally:
        shim.terminate()
        shim.wait(30)
        virsh("undefine", "--nvram", f"default_{NAME}")
        for socket in sockets.glob("*.sock"):
            socket.unlink()


@pytest.fixture
def chain(programs: Path, tmp_path: Path) -> Iterator[Path]:
    with sidecar(programs, tmp_path):
        yield programs


def vmi(gpus: int, vcpus: int, interfaces: int) -> dict[str, Any]:
    names = [f"net{i}" for i in range(interfaces)]
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": NAME, "namespace": "default", "uid": UID},
        "spec": {
            "architecture": "amd64",
            "domain": {
                "machine": {"type": "q35"},
                "firmware": {"uuid": UID},
                "cpu": {
                    **{"cores": vcpus, "sockets": 1, "threads": 1, "model": "qemu64"},
                    **dict.fromkeys(("dedicatedCpuPlacement", "isolateEmulatorThread"), True),
                    "numa": {"guestMappingPassthrough": {}},
                },
                "memory": {"guest": "8Gi", "hugepages": {"pageSize": "2Mi"}},
                "resources": {"requests": {"memory": "8Gi"}, "limits": {"memory": "8Gi"}},
                "devices": {
                    "gpus": [{"name": f"gpu{i}", "deviceName": GPU} for i in range(gpus)],
                    "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                    "interfaces": [{"name": name, "masquerade": {}} for name in names],
                },
            },
            "networks": [{"name": name, "pod": {}} for name in names],
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "root"}}],
        },
    }


def definitions(
    chain: Path, pus: list[int], gpus: tuple[str, ...], interfaces: int = 1
) -> list[Definition]:
    """Every definition of the VM with those CPUs of the node and those GPUs."""
    host = discover(shipped(IBM))
    assert host.distances is not None
    siblings = {pu: list(map(int, core.pus)) for core in host.cores for pu in core.pus}
    cells = [
        {
            "id": int(node.index),
            "distances": [{"id": to, "value": far} for to, far in enumerate(row)],
            "cpus": [{"id": int(pu), "siblings": siblings[pu]} for pu in node.pus],
        }
        for node, row in zip(host.nodes, host.distances, strict=True)
    ]
    version = (chain / "version").read_text()
    call = {
        "VMI": vmi(len(gpus), len(pus) - 1, interfaces),
        "CPUSet": pus,
        "Topology": {"numa_cells": cells},
        "Placeholders": 6 if version.startswith("v1.6.") else 3 if interfaces else 0,
        "RootPorts": 0 if version.startswith("v1.6.") else 3 if interfaces else 6,
    }
    addresses = ",".join(f"0000:{gpu}" for gpu in gpus)
    given = {"LIBVIRT_URI": URI, "PCI_RESOURCE_NVIDIA_COM_A100": addresses}
    done = run((str(chain / "chain"),), 600, json.dumps(call), environment=given)
    found: list[Definition] = json.loads(done.stdout_or_raise().splitlines()[-1])
    return found


def read(xml: str) -> Vm:
    return build_vm(open_domain(xml.encode(), "vm.xml"))


def distances(xml: str) -> list[str | None]:
    root = ElementTree.fromstring(xml)
    return [s.get("value") for s in root.iterfind("cpu/numa/cell/distances/sibling")]


@pytest.mark.lab
@pytest.mark.root
@pytest.mark.libvirt
@pytest.mark.parametrize(
    ("gpus", "pus", "interfaces"),
    [
        (IBM_GPUS, [4, 5, 6, 64, 65], 1),
        (IBM_GPUS, [*range(4, 36), *range(64, 96), 164], 0),
        (IBM_GPUS[3:5], [*range(4, 36), *range(64, 96), 164], 1),
    ],
    ids=["small", "large", "two GPUs"],
)
def test_the_last_definition_has_cells_distances_and_addresses_of_the_first(
    libvirt: None, chain: Path, gpus: tuple[str, ...], pus: list[int], interfaces: int
) -> None:
    done = definitions(chain, pus, gpus, interfaces)
    first, last = done[0]["Printed"], done[-1]["Printed"]
    assert len(done) >= 2 or not interfaces
    host = discover(shipped(IBM))
    node_of = {str(d.bdf)[5:]: d.node for d in host.pci_devices}
    cells = sorted({int(node_of[gpu] or 0) for gpu in gpus})
    for one in done:
        controllers = read(one["Printed"]).controllers
        assert sorted(c.cell for c in controllers if c.cell is not None) == cells
        assert distances(one["Printed"]) == distances(first) != []
        assert read(one["Printed"]).hostdevs == read(first).hostdevs
    placed = [c for c in read(first).controllers if c.model != "pcie-root-port" or c.bus_nr]
    assert {c.index for c in placed} <= {c.index for c in read(last).controllers}
