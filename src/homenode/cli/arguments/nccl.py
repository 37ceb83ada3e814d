"""Arguments of nccl-topo. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import ForceOption, HostOption, JsonOption, LspciOption
from homenode.option import Flag, Opt

MAKE = "Make a file"
JUDGE = "Check a file"


class NcclTopoArguments(Struct, frozen=True, kw_only=True):
    """Write the PCIe topology file for NCCL or RCCL in a guest.

    It gives them the host's PCIe tree. A guest sees neither the host's PCIe switches nor real link
    speeds: NCCL then pairs GPUs with far NICs, and computes bandwidths from virtual ports.

    Options:
      domain: The domain XML that the VM runs with.
      plan: The saved plan, for its pins and guest NUMA nodes; domain XML and host must be those of
        the plan. Default: those of the domain XML.
      guest: The guest's own view, for bus ids and nodes: ssh:HOST or a capture made inside it.
        Default: derived from the domain XML.
      nvidia_smi: The host's nvidia-smi -q -x, to check whether the VM's GPUs are a partition of
        Fabric Manager. Default: as the host's source shows them.
      output: Write the file here, and print the location of each device. Default: standard output.
      rccl: Write the file for AMD's RCCL. Default: for NCCL.
      cloud_init: Write a cloud-init snippet that installs the file.
      check: Check a file; with --domain also against the VM.

    Examples:
      homenode nccl-topo --domain VM.xml --plan plan.json -o topo.xml
      homenode nccl-topo --check topo.xml --domain VM.xml
    """

    host: HostOption = None
    lspci: LspciOption = None
    domain: Annotated[Path | None, Opt("--domain", "FILE", panel=MAKE)] = None
    plan: Annotated[Path | None, Opt("--plan", "PLAN.json", panel=MAKE)] = None
    guest: Annotated[str | None, Opt("--guest", "SOURCE", panel=MAKE)] = None
    nvidia_smi: Annotated[Path | None, Opt("--nvidia-smi", "FILE", panel=MAKE, rare=True)] = None
    output: Annotated[Path | None, Opt("--output -o", "FILE", panel=MAKE)] = None
    rccl: Annotated[bool, Flag("--rccl", rare=True)] = False
    cloud_init: Annotated[Path | None, Opt("--cloud-init", "FILE", panel=MAKE, rare=True)] = None
    check: Annotated[Path | None, Opt("--check", "FILE", panel=JUDGE)] = None
    force: ForceOption = False
    json: JsonOption = False
