"""Check: gres.conf, slurm.conf and cgroup.conf against a node's machine, and set right."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.errors import InputError
from homenode.findings import Finding, Findings, Severity, in_order
from homenode.slurm.check_gres import check_gres
from homenode.slurm.check_slurm import (
    SlurmVersion,
    check_cgroup,
    check_includes,
    check_shape,
    check_slurm,
    without_absence,
)
from homenode.slurm.config import Config
from homenode.slurm.corrected import corrected_gres, corrected_slurm
from homenode.slurm.home_nodes import gpu_memory_nodes, gpus_in_order, nodes_with_cpus
from homenode.slurm.nodes import node_classes
from homenode.topology import Host
from homenode.wording import plural

_REWRITTEN = {"gres-cores-missing", "gres-cores-wrong", "gres-cores-are-pus"}
_LINKS = {"gres-links-missing", "gres-links-wrong"}


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found, and both files as they should be; the same text where nothing changes.

    included: (name, text as it is, as it should be) of files that these include.
    """

    findings: Findings
    gres: str
    slurm: str
    included: tuple[tuple[str, str, str], ...] = ()


def check(
    gres: Config,
    slurm: Config,
    host: Host,
    *,
    cgroup: Config | None = None,
    nodes: Sequence[str] = (),
    version: SlurmVersion | None = None,
) -> Checked:
    """The files compared with the machine of their GPU nodes.

    nodes: only these; () = every node with GPUs. Raises ParseError that names a line,
    InputError for a machine without GPUs and for a node that no file names.
    """
    classes = node_classes(gres, slurm, nodes)
    if classes and not gpus_in_order(host):
        raise InputError(
            f"{host.name}: expected a machine with GPUs, as {classes[0].subject} is, found none",
            hint="capture one of the nodes (srun -w NODE homenode capture -o NODE.tar.gz) and "
            "name it: --host NODE.tar.gz",
        )
    findings: list[Finding] = []
    wrong = []
    with_links = False
    for of in classes:
        shape = tuple(check_shape(of, host, slurm))
        own = tuple(without_absence(check_gres(of, host, gres.source), gres))
        findings += [*own, *shape]
        ids = {f.id for f in own if f.id in _LINKS or f.severity is not Severity.INFO}
        if ids & (_REWRITTEN | _LINKS) and "gres-count" not in _critical(own):
            wrong.append(of)
            with_links = with_links or bool(ids & _LINKS)
    findings += without_absence(check_slurm(slurm, version), slurm)
    cgroups = check_cgroup(cgroup)
    findings += cgroups if cgroup is None else without_absence(cgroups, cgroup)
    findings += check_includes(gres, slurm, cgroup)
    with_cpus = nodes_with_cpus(host)
    memory = gpu_memory_nodes(host)
    stated = f"{host.name}: {plural(len(gpus_in_order(host)), 'GPU')} on "
    stated += f"{plural(len(with_cpus), 'node')} with CPUs"
    if memory:
        stated += f"; {plural(len(memory), 'node')} of GPU memory, to which nothing is bound"
    subjects = ", ".join(of.subject for of in classes) or "no node with GPUs"
    files = [gres, slurm, *([cgroup] if cgroup else [])]
    read = tuple(
        f"{file.source} with {', '.join(other.source for other in file.included)}"
        for file in files
        if file.included
    )
    right_gres = corrected_gres(gres, classes, host, wrong, links=with_links)
    right_slurm = corrected_slurm(slurm, classes, host, version)
    return Checked(
        Findings(
            (stated, f"{gres.source} and {slurm.source}: {subjects}", *read), in_order(findings)
        ),
        right_gres[gres.source],
        right_slurm[slurm.source],
        (
            *((source, text, right_gres[source]) for source, text in gres.included),
            *((source, text, right_slurm[source]) for source, text in slurm.included),
        ),
    )


def _critical(findings: Sequence[Finding]) -> set[str]:
    return {finding.id for finding in findings if finding.severity is Severity.CRITICAL}
