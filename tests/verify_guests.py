"""Guests as their own kernels would show themselves, for tests of verification."""

import json
import shutil
from typing import Any

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.verify.boot.guest_files import GuestFiles, find_guest_files
from homenode.errors import HomenodeError
from homenode.machine.description.parse import parse_description
from homenode.machine.discover.host import discover
from homenode.machine.topology import Host
from tests.rendered.machine import render

_GUEST = """
format = 1
name = "guest"
packages = 2
cores_per_package = {cores}
threads_per_core = {threads}
numbering = "siblings-adjacent"
llc_size = "16MiB"
memory_per_node = "{memory}"
distances = {{ other_package = {distance} }}

[model.gpu]
class = "gpu"
vendor = 0x10de
device = 0x2684
bars = ["16MiB", "256MiB prefetchable"]
{link}

[[root]]
node = {nodes}
bus = [0xf0, 0xf8]
ports = ["gpu"]
"""


def guest_files(*, fake_qemu: bool = False) -> GuestFiles:
    """What is booted; the test skips where it, or QEMU, is missing. fake_qemu: the test has one."""
    if not fake_qemu and shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no qemu-system-x86_64 here")
    try:
        return find_guest_files()
    except HomenodeError as error:
        pytest.skip(str(error))


def guest_description(
    *,
    distance: int = 20,
    memory: str = "1960MiB",
    nodes: tuple[int | str, int | str] = (0, 1),
    cores: int = 2,
    threads: int = 1,
    link: str = "",
) -> str:
    """The same guest as a host.toml."""
    sizes = {"distance": distance, "memory": memory, "cores": cores, "threads": threads}
    return _GUEST.format(**sizes, nodes=json.dumps(nodes), link=link)


def guest_host(**fields: Any) -> Host:
    """The guest of the tuned document of verify_documents, unless an argument changes it.

    2 nodes of 2 vCPUs, and a GPU behind the first root port of each expander bus.
    """
    text = guest_description(**fields)
    return _with_ports_at_0(discover(render(parse_description(text, "guest"))))


def _with_ports_at_0(host: Host) -> Host:
    """libvirt's first port on an expander bus is device 0; a described host's is device 1."""

    def moved(bdf: Bdf) -> Bdf:
        return Bdf(bdf.domain, bdf.bus, 0, 0) if bdf.device == 1 else bdf

    devices = (
        replace(device, bdf=moved(device.bdf), parent=device.parent and moved(device.parent))
        for device in host.pci_devices
    )
    return replace(host, pci_devices=tuple(sorted(devices, key=lambda device: device.bdf)))
