"""From a HostDescription to the files and tool outputs of such a machine. Pure."""

from homenode.machine.description.model import HostDescription
from homenode.machine.description.render_devices import PCI, render_devices
from homenode.machine.description.render_system import (
    render_cpus,
    render_memory,
    render_policy_links,
    render_system,
)
from homenode.machine.description.render_tools import render_tools
from homenode.machine.snapshot.memory import MemorySnapshot


def render(description: HostDescription) -> MemorySnapshot:
    """A snapshot that discovery reads as it reads a captured machine."""
    host = description.host
    devices = render_devices(host)
    return MemorySnapshot(
        host.name,
        {
            **render_cpus(host, description.caches),
            **render_memory(host),
            **render_system(host),
            **devices.files,
        },
        {**devices.links, **render_policy_links(host)},
        render_tools(host),
        folders=(f"{PCI}/devices",),
    )
