"""The option with what nvidia-smi says of a node's GPUs, which check and bind share. [I/O]"""

from pathlib import Path

from homenode.cluster.slurm.home_nodes import with_affinities
from homenode.input_files import read_input
from homenode.machine.tools.nvidia_smi import parse_topology as parse
from homenode.machine.topology import Host


def with_topo(host: Host, topo: Path | None) -> Host:
    """The host with its GPUs' nodes as the listing has them; as it is without one."""
    if topo is None:
        return host

    text = read_input(topo, "the output of nvidia-smi topo -m").decode("utf-8", "replace")
    return with_affinities(host, parse(text), str(topo))
