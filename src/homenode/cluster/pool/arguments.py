"""Arguments of the commands of pool. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import AfterOption, ExplainOption, JsonOption, PoolOption, ResultsOption
from homenode.cli.command import IncludeFields
from homenode.option import Arg, Flag, Opt
from homenode.vm.plan_options import PlanOptions

_OF_PLAN = (
    "layout objective vcpus memory_bytes page_bytes gpu_count with_nics policy balance max_nodes "
    "device_locality"
).split()


class PoolShowArguments(Struct, frozen=True, kw_only=True):
    """Show the free resources of each host, and the VMs that still fit.

    Options:
      sizes: Count how many VMs of this size fit; may be repeated. Without GPUs it needs vcpus and
        memory. Default: 1, 2, 4, 8 GPUs if a host has GPUs.

    Examples:
      homenode pool show --pool 'hgx-h100*40'
      homenode pool show --pool pool/ --size gpus=2,vcpus=24,memory=256GiB --json
    """

    pool: PoolOption
    sizes: Annotated[tuple[str, ...], Opt("--size", "gpus=N,vcpus=N,memory=SIZE")] = ()
    after: AfterOption = ()
    explain: ExplainOption = False
    json: JsonOption = False


class PoolPlaceArguments(Struct, frozen=True, kw_only=True):
    """Rank the hosts for a VM by its placement on each; plan for the best.

    Options:
      document: Definition of the VM (domain XML), or a file of qm or xl; - for standard input.
      among: Choose this host of the pool only; may be repeated, to choose among several. Default:
        all.
      output: Write the tuned definition to this file.
      save_plan: Write the plan to this file.

    Examples:
      homenode pool place gpu-vm.xml --pool pool/ --gpus 2 -o tuned.xml
      homenode pool place gpu-vm.xml --pool 'hgx-h100*40' --gpus 4 --after other-vm.json
    """

    document: Annotated[str, Arg("VM.xml")]
    pool: PoolOption
    options: Annotated[PlanOptions, IncludeFields(*_OF_PLAN)] = PlanOptions()
    results: ResultsOption = ()
    among: Annotated[tuple[str, ...], Opt("--on", "HOST")] = ()
    after: AfterOption = ()
    output: Annotated[Path | None, Opt("--output -o", "FILE")] = None
    save_plan: Annotated[Path | None, Opt("--save-plan", "PLAN.json")] = None
    explain: ExplainOption = False
    json: JsonOption = False


class PoolCaptureArguments(Struct, frozen=True, kw_only=True):
    """Read many hosts over ssh at once into a directory.

    Nothing is installed on the hosts. A host that fails is named; the same command later reads the
    missing hosts.

    Options:
      servers: Hosts to capture: [USER@]HOST[:PORT].
      hosts: A list: on each line [USER@]HOST[:PORT], then optionally name=NAME; # begins a comment.
        Other lines, and a second host with the same name, are reported and skipped.
      output: The directory to write captures to.
      jobs: Number of hosts read at the same time.
      timeout: Time limit for one host.
      again: Also read hosts that the directory already has.

    Examples:
      homenode pool capture gpu-1 root@gpu-2:2222 -o pool/
      homenode pool capture --hosts hosts.txt -o pool/ --again
    """

    servers: Annotated[tuple[str, ...], Arg("HOST...")] = ()
    hosts: Annotated[Path | None, Opt("--hosts", "FILE")] = None
    output: Annotated[Path, Opt("--output -o", "POOL/")]
    jobs: Annotated[int, Opt("--jobs", "N", ge=1, le=256)] = 16
    timeout: Annotated[float, Opt("--timeout", "SECONDS", ge=1)] = 120.0
    again: Annotated[bool, Flag("--again")] = False
