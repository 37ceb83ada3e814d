"""Check: gres.conf, slurm.conf and cgroup.conf against a node's machine, and set right.

Source: gres.conf(5) of 22.05.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from homenode.catalogue import finding
from homenode.cluster.slurm.check_slurm import (
    NO_LINES,
    NOT_SET,
    SlurmVersion,
    check_cgroup,
    check_includes,
    check_shape,
    check_slurm,
    corrected_gres,
    corrected_slurm,
    without_absence,
)
from homenode.cluster.slurm.config import SlurmConfig
from homenode.cluster.slurm.gres import (
    GresLine,
    RightGpu,
    links_among,
    looks_like_pus,
    members_of,
    placed_files,
    right_gpus,
)
from homenode.cluster.slurm.nodes import NodeClass, defines_nodes, node_classes
from homenode.cluster.slurm.numbering import (
    CoreOrder,
    core_order,
    gpu_memory_nodes,
    gpus_in_order,
    nodes_with_cpus,
)
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import Finding, Findings, Severity, in_order
from homenode.machine.topology import Host
from homenode.wording import nodes_text, plural

_REWRITTEN = {"gres-cores-missing", "gres-cores-wrong", "gres-cores-are-pus"}
_LINKS = {"gres-links-missing", "gres-links-wrong"}


class Checked(Struct, frozen=True):
    """What was found, and both files as they should be; the same text where nothing changes.

    included: (name, text as it is, as it should be) of files that these include.
    """

    findings: Findings
    gres: str
    slurm: str
    included: tuple[tuple[str, str, str], ...] = ()


def check(
    gres: SlurmConfig,
    slurm: SlurmConfig,
    host: Host,
    *,
    cgroup: SlurmConfig | None = None,
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
        shape = tuple(check_shape(of, host, slurm, version))
        own = tuple(without_absence(check_gres(of, host, gres.source), gres))
        shape += tuple(without_absence(check_promised(of, slurm), slurm))
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
            checked=(stated, f"{gres.source} and {slurm.source}: {subjects}", *read),
            findings=in_order(findings),
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


_PAGE = "gres.conf(5)"
_DETECTORS = {0x10DE: ("nvml", "nvidia"), 0x1002: ("rsmi",), 0x8086: ("oneapi",)}
"""What AutoDetect= finds the GPUs of each vendor; "nvidia" since 24.11."""


def check_gres(of: NodeClass, host: Host, source: str) -> Iterator[Finding]:
    """What is wrong in the lines about these nodes. source: the file's name."""
    gpus = right_gpus(host)
    yield from _counts(of, gpus, source)
    yield from _autodetect(of, host, source)
    order = core_order(host)
    placed: dict[GresLine, list[RightGpu]] = {}
    members = members_of(of.lines, gpus, detected=of.autodetect is not None)
    for line, file, number in placed_files(of.lines):
        if 0 <= number < len(gpus) and (file is not None or of.autodetect is None):
            placed.setdefault(line, []).append(gpus[number])
    for line, own in placed.items():
        yield from _cores(of, line, own, order, f"{line.line.source}:{line.line.first}")
        if not of.sliced:
            yield from _links(of, line, own, members, f"{line.line.source}:{line.line.first}")


def check_promised(of: NodeClass, slurm: SlurmConfig) -> Iterator[Finding]:
    """Gres= of slurm.conf against the lines by hand: of these Slurm takes what it promises, by
    type, and ignores the others.

    Seen: `slurmd -G` of 22.05.8, which ends where some GPUs of a file have a type and
    some have not.
    """
    if of.definition is None and (of.names or not defines_nodes(slurm)):
        return  # nodes of another cluster, or dynamic ones
    promised = {} if of.definition is None else of.definition.gpu_types
    listed: dict[str, int] = {}
    for line in of.lines:
        kind = (line.type or "").lower()
        listed[kind] = listed.get(kind, 0) + line.devices
    if not promised and (listed or of.autodetect):
        yield finding(
            "gres-count",
            of.subject,
            expected="Gres=gpu:N on the NodeName= line in slurm.conf",
            observed=NOT_SET,
            case="not promised",
            source=f"{slurm.source}, slurm.conf(5)",
        )
    by_type = [promised] if of.autodetect is not None else [promised, listed]
    is_mixed = any(len(counts) > 1 and "" in counts for counts in by_type)
    # Where the totals differ, gres-count says so.
    by_hand = of.autodetect is None and sum(listed.values()) == sum(promised.values())
    if is_mixed or (by_hand and listed and set(promised) != {""} and listed != promised):
        yield finding(
            "gres-type-differs",
            of.subject,
            expected="a type for all GPUs of Gres= and of gres.conf, or for none"
            if is_mixed
            else f"Gres={_typed(listed)} in slurm.conf, as gres.conf lists",
            observed=f"Gres={_typed(promised)}"
            + (f", and {_typed(listed)} in gres.conf" if is_mixed else ""),
            case="mixed types" if is_mixed else None,
            source=f"{slurm.source}, {_PAGE}",
        )


def _typed(counts: Mapping[str, int]) -> str:
    """
    >>> _typed({"h100": 6, "": 2})
    'gpu:h100:6,gpu:2'
    """
    return ",".join(f"gpu:{kind}:{n}" if kind else f"gpu:{n}" for kind, n in counts.items())


def _counts(of: NodeClass, gpus: Sequence[RightGpu], source: str) -> Iterator[Finding]:
    """The GPUs that gres.conf lists, that slurm.conf promises, and that are there."""
    listed = sum(line.devices for line in of.lines)
    promised = None if of.definition is None else of.definition.gpus
    beyond = [n for _, _, n in placed_files(of.lines) if not 0 <= n < len(gpus)]

    def count(severity: Severity, expected: str, observed: str, case: str | None) -> Finding:
        return finding(
            "gres-count",
            of.subject,
            expected=expected,
            observed=observed,
            severity=severity,
            case=case,
            source=f"{source}, {_PAGE}",
        )

    def differs(expected: str) -> Finding:
        observed = f"Gres= with {promised}"
        return count(Severity.CRITICAL, expected, observed, None)

    if of.sliced:
        # Of slices the machine does not give how many there are; the files must agree.
        if of.lines and of.autodetect is None and promised not in (None, listed):
            yield differs(f"{listed} in Gres= of slurm.conf, as gres.conf lists")
            return
        yield finding(
            "gres-unjudged",
            of.subject,
            expected="GPUs that are not cut into slices",
            observed=f"MIG slices, {promised or listed} devices with them",
            case="slices",
            source=f"{source}, {_PAGE}",
        )
        return
    in_file, there = f"{listed} in gres.conf", plural(len(gpus), "GPU")
    if listed > len(gpus) or beyond:
        expected = f"at most {there}, as the machine has"
        yield count(Severity.CRITICAL, expected, in_file, "too many lines")
    # What a detector finds fills up what lines leave out.
    filled = of.autodetect is not None and listed < (promised or 0)
    by_lines = bool(of.lines) and not filled
    right, who = (listed, "gres.conf lists") if by_lines else (len(gpus), "the machine has")
    if (by_lines or of.autodetect) and promised not in (None, right):
        yield differs(f"Gres=gpu:{right} in slurm.conf, as {who}")
    elif by_lines and listed < len(gpus) and not beyond:
        yield count(Severity.INFO, f"{there}, as the machine has", in_file, "too few lines")
    if not of.lines and of.autodetect is None and promised:
        expected = f"lines for {plural(promised, 'GPU')} in gres.conf"
        yield count(Severity.CRITICAL, expected, NO_LINES, "no lines")


def _autodetect(of: NodeClass, host: Host, source: str) -> Iterator[Finding]:
    vendors = {gpu.vendor_id for gpu in gpus_in_order(host)}
    fitting = next((_DETECTORS[v] for v in sorted(v or 0 for v in vendors) if v in _DETECTORS), ())
    if not fitting:
        return
    if of.autodetect is None:
        if of.lines:
            yield finding(
                "gres-autodetect",
                of.subject,
                expected=f"AutoDetect={fitting[0]}, which reads cores and links from the driver",
                observed="lines by hand alone",
                severity=Severity.INFO,
                case="by hand",
                values={"detector": fitting[0]},
                source=f"{source}, {_PAGE}",
            )
    elif of.autodetect not in (*fitting, "full"):
        yield finding(
            "gres-autodetect",
            of.subject,
            expected=f"AutoDetect={' or '.join(fitting)}, for its GPUs",
            observed=f"AutoDetect={of.autodetect}",
            case="other detector",
            values={"detector": fitting[0]},
            source=f"{source}, {_PAGE}",
        )


def _cores(
    of: NodeClass, line: GresLine, gpus: Sequence[RightGpu], order: CoreOrder, source: str
) -> Iterator[Finding]:
    """Cores= of one line against those of the nodes of its GPUs."""
    blind = [gpu for gpu in gpus if gpu.cores is None]
    if blind:
        yield finding(
            "gres-unjudged",
            _named(of, blind),
            expected="a GPU whose node is known",
            observed="the host gives no node",
            source=source,
        )
    known = [gpu for gpu in gpus if gpu.cores is not None]
    nodes = sorted({gpu.node for gpu in known if gpu.node is not None})
    if line.cores is None:
        if known and of.autodetect is None and len(order.pus) > len(known[0].cores or ()):
            yield finding(
                "gres-cores-missing",
                _named(of, known),
                expected="; ".join(_right(gpu) for gpu in _one_a_node(known)),
                observed="no Cores=",
                source=f"{source}, {_PAGE}",
            )
        return
    wrong = [gpu for gpu in known if line.cores not in (gpu.cores, gpu.near)]
    if not wrong:
        return
    first = wrong[0]
    assert first.cores is not None
    expected = "; ".join(_right(gpu) for gpu in _one_a_node(wrong))
    drained = of.autodetect is not None
    if looks_like_pus(line.cores, first.cores, order):
        yield finding(
            "gres-cores-are-pus",
            _named(of, wrong),
            expected=expected,
            observed=f"Cores={line.cores}, which are the kernel's numbers of these PUs",
            case="AutoDetect" if drained else None,
            source=f"{source}, {_PAGE}",
        )
        return
    if line.cores and all(gpu.cores and line.cores <= gpu.cores for gpu in wrong) and not drained:
        yield finding(
            "gres-cores-wrong",
            _named(of, wrong),
            expected=expected,
            observed=f"Cores={line.cores}, some of them",
            severity=Severity.INFO,
            case="some of them",
            source=f"{source}, {_PAGE}",
        )
        return
    far = not (line.cores & first.cores) or max(line.cores, default=0) >= len(order.pus)
    yield finding(
        "gres-cores-wrong",
        _named(of, wrong),
        expected=expected,
        observed=f"Cores={line.cores}{_where(line.cores, order, len(nodes))}",
        severity=Severity.CRITICAL if far or drained else Severity.WARNING,
        case="AutoDetect" if drained else None,
        source=f"{source}, {_PAGE}",
    )


def _links(
    of: NodeClass, line: GresLine, gpus: Sequence[RightGpu], members: Sequence[int], source: str
) -> Iterator[Finding]:
    """Links= of one line against the links that the host shows. members: the node's GPUs."""
    own, count = gpus[0], len(members)
    links = links_among(own, members)
    # Of a longer list Slurm takes as many numbers as the node has GPUs, and logs the others.
    given = line.links if line.links is None else line.links[:count]
    if line.links is None:
        if links is not None and of.autodetect is None and len(set(links)) > 2:
            yield finding(
                "gres-links-missing",
                _named(of, gpus),
                expected=f"Links={_listed(links)} for GPU {own.index}, and so on",
                observed="no Links=",
                source=f"{source}, {_PAGE}",
            )
        return
    if line.devices > 1:
        problem = "one GPU on a line with Links="
        observed = f"{line.devices} GPUs on it"
    elif given is None or len(given) != count:
        problem = f"Links= with {count} numbers, one for each GPU"
        observed = f"{len(line.links)} numbers"
    elif links is not None and given != links:
        problem, observed = f"Links={_listed(links)}", f"Links={_listed(line.links)}"
    elif links is None and [members[n] for n, v in enumerate(given) if v == -1] != [own.index]:
        problem = f"-1 for GPU {own.index} itself and for no other"
        observed = f"Links={_listed(line.links)}"
    else:
        return
    refused = line.devices > 1
    yield finding(
        "gres-links-wrong",
        _named(of, gpus),
        expected=problem,
        observed=observed,
        severity=Severity.CRITICAL if refused else Severity.WARNING,
        case="several GPUs" if refused else None,
        source=f"{source}, {_PAGE}",
    )


def _named(of: NodeClass, gpus: Sequence[RightGpu]) -> str:
    numbers = CpuSet(gpu.index for gpu in gpus)
    return f"{'GPU' if len(gpus) == 1 else 'GPUs'} {numbers} of {of.subject}"


def _one_a_node(gpus: Sequence[RightGpu]) -> tuple[RightGpu, ...]:
    """The first GPU of each node."""
    first: dict[object, RightGpu] = {}
    for gpu in gpus:
        first.setdefault(gpu.node, gpu)
    return tuple(first.values())


def _right(gpu: RightGpu) -> str:
    assert gpu.node is not None
    return f"Cores={gpu.cores} for GPU {gpu.index} ({gpu.bdf}) on {nodes_text([gpu.node])}"


def _where(cores: CpuSet, order: CoreOrder, nodes: int) -> str:
    beyond = max(cores, default=0)
    if beyond >= len(order.pus):
        return f", of {len(order.pus)} cores, which are 0-{len(order.pus) - 1}"
    return f", and the line's GPUs are on {nodes} nodes" if nodes > 1 else ""


def _listed(links: Sequence[int]) -> str:
    return ",".join(map(str, links))
