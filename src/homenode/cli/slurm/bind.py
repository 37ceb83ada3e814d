"""homenode slurm bind: srun's flags, or a wrapper, that put ranks where their GPUs are. [I/O]"""

from pathlib import Path

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cli.arguments.slurm import SlurmBindArguments
from homenode.cli.slurm.topo import with_topo
from homenode.cli.terminal import console, note, print_json, say, write_text
from homenode.cluster.slurm.config_files import read_config
from homenode.cluster.slurm.gres import device_order
from homenode.cluster.slurm.home_nodes import gpus_in_order
from homenode.cluster.slurm.ranks import Rank, RankOptions, bind_ranks, sbatch_lines, srun_flags
from homenode.cluster.slurm.wrapper import WRAPPER
from homenode.cpuset import CpuSet
from homenode.errors import ParseError, UsageError
from homenode.findings import Finding
from homenode.formats import encode
from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.show.findings_text import finding_text
from homenode.show.fit_text import ranks_text
from homenode.vm.sources import load_host
from homenode.wording import command_line


class SlurmBind(Struct, frozen=True, kw_only=True):
    """What --json prints. flags: of srun; sbatch: lines of the script."""

    ranks: tuple[Rank, ...]
    flags: tuple[str, ...]
    sbatch: tuple[str, ...]
    findings: tuple[Finding, ...]


def bind(asked: SlurmBindArguments) -> None:
    """Print the flags, or write the wrapper."""
    if asked.wrapper is not None:
        _write_wrapper(asked.wrapper)
        return
    if asked.tasks is None:
        raise UsageError("--tasks: expected the number of tasks on each node, found none")
    machine = with_topo(load_host(asked.host), asked.topo)
    options = RankOptions(
        asked.tasks,
        None if asked.gpus is None else _gpus(asked.gpus, machine),
        asked.cores,
        asked.siblings,
        None if asked.node is None else NodeIndex(asked.node),
    )
    binding = bind_ranks(machine, options)
    words = srun_flags(
        binding, asked.memory, None if asked.gres is None else _places(asked.gres, machine)
    )
    if asked.json:
        if asked.flags or asked.explain:
            raise UsageError("--json: expected neither --flags nor --explain with it, found one")
        told = SlurmBind(
            ranks=binding.ranks,
            flags=tuple(words),
            sbatch=tuple(sbatch_lines(binding)),
            findings=binding.findings,
        )
        print_json(encode("slurm-bind", told))
        return
    if asked.flags:
        say(" ".join(words))
        return
    if asked.explain:
        console().print(ranks_text(binding, machine))
    say("\n".join(sbatch_lines(binding)))
    say("\nsrun \\")
    for flag in words:
        say(f"  {flag} \\")
    say("  COMMAND")
    if binding.findings:
        for finding in binding.findings:
            say("")
            console().print(finding_text(finding))


def _places(gres: Path, host: Host) -> dict[int, int]:
    return device_order(read_config(gres)).places(len(gpus_in_order(host)))


def _gpus(text: str, host: Host) -> tuple[int, ...]:
    """Numbers of GPUs: a list of numbers, or of addresses. Raises UsageError."""
    if ":" not in text:
        try:
            numbers = tuple(number for part in text.split(",") for number in CpuSet.parse(part))
        except ParseError as error:
            raise UsageError(
                f"--gpus: expected numbers such as 0-3, found {error.found!r}"
            ) from None
        if not numbers:
            raise UsageError("--gpus: expected numbers such as 0-3, found none")
        return numbers
    by_bdf = {gpu.bdf: index for index, gpu in enumerate(gpus_in_order(host))}
    found = []
    for part in text.split(","):
        try:
            bdf = Bdf.parse(part)
        except ParseError:
            raise UsageError(
                f"--gpus: expected an address such as 3b:00.0, found {part!r}"
            ) from None
        if bdf not in by_bdf:
            known = ", ".join(map(str, by_bdf))
            raise UsageError(f"--gpus: expected a GPU of {host.name} ({known}), found {bdf}")
        found.append(by_bdf[bdf])
    return tuple(found)


def _write_wrapper(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{path}: expected nothing there yet, found a file")
    write_text(path, WRAPPER, 0o755)
    note(f"wrote {path}")
    wrapper = str(path) if "/" in str(path) else f"./{path}"
    note(f"srun --gpus-per-task=1 --cpus-per-task=N {command_line(wrapper)} COMMAND")
