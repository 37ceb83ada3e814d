"""What is asked of the commands of pool. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import (
    JsonOption,
    PoolOption,
    ResultsOption,
)
from homenode.cli.command import Without
from homenode.cluster.pool.rules import Availability, Rules
from homenode.opt import Arg, Flag, Opt
from homenode.vm.plan_options import PlanOptions

PoolArgument = Annotated[tuple[str, ...], Arg("POOL...", hidden=True)]

FlavoursOption = Annotated[Path | None, Opt("--flavours", "FILE")]


class PoolShowArguments(Struct, frozen=True, kw_only=True):
    """Show what is free, which VMs still fit, which GPUs are stranded.

    Examples:
      homenode pool show --pool 'hgx-h100*40'
      homenode pool show --pool captures/ --flavours flavours.toml --json
    """

    pool: PoolOption = ()
    sources: PoolArgument = ()
    flavours: FlavoursOption = None
    everything: Annotated[bool, Flag("--all")] = False
    csv: Annotated[bool, Flag("--csv")] = False
    prometheus: Annotated[bool, Flag("--prometheus")] = False
    json: JsonOption = False


class PoolVmsArguments(Struct, frozen=True, kw_only=True):
    """List the VMs: host and nodes of each, and its GPUs elsewhere.

    Examples:
      homenode pool vms --pool pool/
      homenode pool vms --pool pool/ --on gpu-7 --json
    """

    pool: PoolOption = ()
    sources: PoolArgument = ()
    among: Annotated[tuple[str, ...], Opt("--on", "HOST")] = ()
    json: JsonOption = False


class PoolCaptureArguments(Struct, frozen=True, kw_only=True):
    """Read many hosts over ssh at once into a folder.

    Nothing is installed on the hosts. A host that fails is named and left out; the same command
    later reads those that are missing. SOURCE: hosts of captures, host.toml files and libvirt URIs,
    which are read once instead of by every command.

    Examples:
      homenode pool capture --hosts hosts.txt -o pool/
      homenode pool capture captures/ qemu+ssh://gpu-9/system -o pool/
    """

    output: Annotated[Path, Opt("--output -o", "POOL/")]
    sources: Annotated[tuple[str, ...], Arg("SOURCE...")] = ()
    hosts: Annotated[Path | None, Opt("--hosts", "FILE")] = None
    jobs: Annotated[int, Opt("--jobs", "N", ge=1, le=256)] = 16
    timeout: Annotated[float, Opt("--timeout", "SECONDS", ge=1)] = 120.0
    again: Annotated[bool, Flag("--again")] = False


class PoolPlaceArguments(Struct, frozen=True, kw_only=True):
    """Rank the hosts for a VM by its locality; plan for the best.

    Examples:
      homenode pool place gpu-vm.xml --pool pool/ --gpus 2 -o tuned.xml
      homenode pool place gpu-vm.xml --pool 'hgx-h100*40' --count 3
    """

    document: Annotated[str, Arg("VM.xml")]
    pool: PoolOption
    options: Annotated[PlanOptions, Without("replaces")] = PlanOptions()
    results: ResultsOption = ()
    flavours: FlavoursOption = None
    among: Annotated[tuple[str, ...], Opt("--on", "HOST")] = ()
    gpu_model: Annotated[str | None, Opt("--gpu-model", "NAME")] = None
    count: Annotated[int, Opt("--count", "N", ge=1, le=10000)] = 1
    output: Annotated[Path | None, Opt("--output -o", "OUT")] = None
    rules: Rules = Rules()
    record: Annotated[bool, Flag("--record")] = False
    owner: Annotated[str, Opt("--owner", "NAME", rare=True)] = ""
    ttl_s: Annotated[float | None, Opt("--ttl", "SECONDS", rare=True, ge=1)] = None
    json: JsonOption = False


class PoolRemoveArguments(Struct, frozen=True, kw_only=True):
    """Remove what pool place has reserved.

    Examples:
      homenode pool remove gpu-vm-1 gpu-vm-2 --pool pool/
      homenode pool remove gpu-vm-3 --owner team-a --pool pool/
    """

    pool: Annotated[Path, Opt("--pool", "POOL/")]
    vms: Annotated[tuple[str, ...], Arg("VM...")] = ()
    owner: Annotated[str, Opt("--owner", "NAME")] = ""


class PoolHostArguments(Struct, frozen=True, kw_only=True):
    """Say whether hosts take VMs: open, cordoned, draining, or gone.

    Examples:
      homenode pool host gpu-7 gpu-8 --state cordoned --pool pool/
      homenode pool host gpu-7 --state open --pool pool/
    """

    hosts: Annotated[tuple[str, ...], Arg("HOST...")]
    pool: Annotated[Path, Opt("--pool", "POOL/")]
    state: Annotated[Availability, Opt("--state", "STATE")]
