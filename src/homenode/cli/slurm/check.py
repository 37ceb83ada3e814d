"""homenode slurm check: gres.conf and slurm.conf against a node's machine. [I/O]"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.options import HostOption, JsonOption
from homenode.cli.slurm.topo import TopoOption, with_topo
from homenode.cli.terminal import (
    check_can_write,
    exit_if_bad,
    note,
    print_diff,
    print_file,
    print_findings,
    say,
    write_text,
)
from homenode.errors import HostError, UsageError

if TYPE_CHECKING:
    from homenode.slurm.check_slurm import SlurmVersion

_VERSION = re.compile(r"(\d\d)\.(\d\d?)(?:\.(\d{1,3}))?", re.ASCII)


def check(
    gres: Annotated[Path, typer.Argument(metavar="gres.conf", help="As the nodes have it.")],
    slurm: Annotated[Path, typer.Argument(metavar="slurm.conf", help="As the cluster has it.")],
    host: HostOption = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NODES",
            help="Only these nodes (gpu[01-36]). Default: all with GPUs. The host stands for each.",
        ),
    ] = None,
    topo: TopoOption = None,
    cgroup: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also the cluster's cgroup.conf.")
    ] = None,
    slurm_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Slurm's version (22.05.8), so that only what it knows is set. Default: unknown.",
        ),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff/--no-diff", help="What would change in both files.")
    ] = True,
    show: Annotated[
        bool, typer.Option("--print", help="Print both files as they should be, and no findings.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="Write both files as they should be to here."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check gres.conf and slurm.conf against a node's GPUs, and show what they should say.

    Examples:
      homenode slurm check gres.conf slurm.conf --host node.tar.gz
      homenode slurm check gres.conf slurm.conf -o corrected
    """
    from homenode.slurm.check import check as judge
    from homenode.slurm.config_files import read_config
    from homenode.sources import load_host
    from homenode.tools.slurm_hostlist import expand_hostlist

    of_gres, of_slurm = read_config(gres), read_config(slurm)
    checked = judge(
        of_gres,
        of_slurm,
        with_topo(load_host(host), topo),
        cgroup=None if cgroup is None else read_config(cgroup),
        nodes=() if nodes is None else expand_hostlist(nodes, "--nodes"),
        version=None if slurm_version is None else _version(slurm_version),
    )
    files = (
        (gres, of_gres.text, checked.gres),
        (slurm, of_slurm.text, checked.slurm),
        *((Path(name), before, after) for name, before, after in checked.included),
    )
    if show and not json:
        for path, _, after in files:
            print_file(f"# {path.name}\n{after}" + ("" if after.endswith("\n") else "\n"))
    else:
        print_findings(checked.findings, as_json=json)
        for path, before, after in files if diff and not json else ():
            if before != after:
                say("")
                print_diff(before.encode(), after.encode(), str(path), f"{path} as it should be")
    if output is not None:
        _write(output, files, (gres.parent, slurm.parent))
    exit_if_bad(checked.findings.findings)


def _version(text: str) -> "SlurmVersion":
    from homenode.slurm.check_slurm import SlurmVersion

    match = _VERSION.search(text)
    if match is None:
        raise UsageError(f"--slurm-version: expected a version such as 22.05.8, found {text!r}")
    return SlurmVersion(int(match[1]), int(match[2]), int(match[3] or 0))


def _write(
    folder: Path, files: tuple[tuple[Path, str, str], ...], parents: tuple[Path, ...]
) -> None:
    """All files, over nothing; included ones where they are next to the others.

    parents: of the two files that the user named.
    """
    paths = [folder / _below(path, parents) for path, _, _ in files]
    if len(set(paths)) < len(paths):
        raise UsageError(f"{paths[0]}: expected files of different names, found one")
    for path in paths:
        if path.exists():
            raise UsageError(
                f"{path}: expected nothing there yet, found a file",
                hint="name another folder; the files in use are not overwritten",
            )
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{folder}: expected to write there, found: {error.strerror}") from None
    check_can_write(*paths)
    for path, (_, _, after) in zip(paths, files, strict=True):
        write_text(path, after)
        note(f"wrote {path}")


def _below(path: Path, parents: tuple[Path, ...]) -> Path:
    """The path as it lies in the folder of the file that includes it; never one outside."""
    for parent in parents:
        if path.resolve().is_relative_to(parent.resolve()):
            return path.resolve().relative_to(parent.resolve())
    return Path(path.name)
