"""NcclText: where each device is in a topology file, on a terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homenode.nccl.assemble import Assembled
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.wording import printable


def topology_text(made: Assembled) -> RenderableType:
    """The cpus with their vCPUs, and every device with its two addresses and its switch."""
    cpus = _table("cpu", "vCPUs", "devices")
    for cpu in made.topology.cpus:
        count = sum(not pci.children for child in cpu.children for pci in child.walk())
        cpus.add_row(str(cpu.numa_id), str(cpu.affinity), str(count))
    devices = _table("host BDF", "kind", "host node", "guest bus id", "switch")
    for device in made.devices:
        devices.add_row(
            str(device.bdf),
            str(device.kind),
            str(device.node),
            device.bus_id,
            device.switch or "none",
        )
    return AsciiWhereNeeded(Group(cpus, devices))


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(Text(printable(heading)), no_wrap=heading != "vCPUs", overflow="fold")
    return table
