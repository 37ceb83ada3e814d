"""homenode slurm check: gres.conf and slurm.conf against a node's machine. [I/O]"""

import re
from pathlib import Path

from homenode.cli.arguments.slurm import SlurmCheckArguments
from homenode.cli.slurm.topo import with_topo
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
from homenode.cluster.slurm.check import check as judge
from homenode.cluster.slurm.check_slurm import SlurmVersion
from homenode.cluster.slurm.config_files import read_config
from homenode.errors import HostError, UsageError
from homenode.machine.tools.slurm_nodes import expand_hostlist
from homenode.vm.sources import load_host

_VERSION = re.compile(r"(\d\d)\.(\d\d?)(?:\.(\d{1,3}))?", re.ASCII)


def check(asked: SlurmCheckArguments) -> None:
    """Print what is wrong with the files, and what they should say."""
    of_gres, of_slurm = read_config(asked.gres), read_config(asked.slurm)
    checked = judge(
        of_gres,
        of_slurm,
        with_topo(load_host(asked.host), asked.topo),
        cgroup=None if asked.cgroup is None else read_config(asked.cgroup),
        nodes=() if asked.nodes is None else expand_hostlist(asked.nodes, "--nodes"),
        version=None if asked.slurm_version is None else _version(asked.slurm_version),
    )
    files = (
        (asked.gres, of_gres.text, checked.gres),
        (asked.slurm, of_slurm.text, checked.slurm),
        *((Path(name), before, after) for name, before, after in checked.included),
    )
    if asked.show and not asked.json:
        for path, _, after in files:
            print_file(f"# {path.name}\n{after}" + ("" if after.endswith("\n") else "\n"))
    else:
        print_findings(checked.findings, as_json=asked.json)
        for path, before, after in files if asked.diff and not asked.json else ():
            if before != after:
                say("")
                print_diff(before.encode(), after.encode(), str(path), f"{path} as it should be")
    if asked.output is not None:
        _write(asked.output, files, (asked.gres.parent, asked.slurm.parent))
    exit_if_bad(checked.findings.findings)


def _version(text: str) -> SlurmVersion:
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
