"""Two readings of this machine, which tests compare."""

from msgspec.structs import replace

from homenode.machine.topology import Host, summarise


def check_same_machine(there: Host, here: Host) -> None:
    """Equal counts; memory that a hypervisor plugs in between the readings is no fault."""
    counts = summarise(there), summarise(here)
    assert all(count.memory_bytes for count in counts)
    first, second = (replace(count, memory_bytes=None) for count in counts)
    assert first == second
