"""CheckGres: what gres.conf says of the GPUs of some nodes, compared with the nodes' machine.

Source: gres.conf(5) of 22.05.
"""

from collections.abc import Iterator, Sequence

from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.slurm.cpu_ids import CoreOrder, core_order
from homenode.slurm.gpu_lines import (
    RightGpu,
    links_among,
    looks_like_pus,
    members_of,
    placed_files,
    right_gpus,
)
from homenode.slurm.gres import GresLine
from homenode.slurm.home_nodes import gpus_in_order
from homenode.slurm.nodes import NodeClass
from homenode.topology import Host
from homenode.wording import nodes_text, plural

NO_LINES = "none, and no AutoDetect"
_PAGE = "gres.conf(5)"
_DRAINED = "AutoDetect finds other cores than these, and the node is drained"
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


def _counts(of: NodeClass, gpus: Sequence[RightGpu], source: str) -> Iterator[Finding]:
    """The GPUs that gres.conf lists, that slurm.conf promises, and that are there."""
    listed = sum(line.devices for line in of.lines)
    promised = None if of.definition is None else of.definition.gpus
    beyond = [n for _, _, n in placed_files(of.lines) if not 0 <= n < len(gpus)]
    if of.sliced:
        yield from _slices(of, listed, promised, source)
        return
    if listed > len(gpus) or beyond:
        yield _count(
            of, Severity.CRITICAL, f"at most {plural(len(gpus), 'GPU')}, as the machine has",
            f"{listed} in gres.conf", "slurmd refuses a device file that is not there",
            "take the lines of the others out", source,
        )  # fmt: skip
    # What a detector finds fills up what lines leave out.
    filled = of.autodetect is not None and listed < (promised or 0)
    if of.lines and promised is not None and promised != listed and not filled:
        yield _count(
            of, Severity.CRITICAL, f"Gres=gpu:{listed} in slurm.conf, as gres.conf lists",
            f"Gres= with {promised}",
            "a node that has fewer than it promises is drained; more are not used",
            "make both the same", source,
        )  # fmt: skip
    elif of.lines and listed < len(gpus) and not beyond and not filled:
        yield _count(
            of, Severity.INFO, f"{plural(len(gpus), 'GPU')}, as the machine has",
            f"{listed} in gres.conf", "the others are given to no job", None, source,
        )  # fmt: skip
    if (not of.lines or filled) and of.autodetect and promised not in (None, len(gpus)):
        yield _count(
            of, Severity.CRITICAL, f"Gres=gpu:{len(gpus)} in slurm.conf, as the machine has",
            f"Gres= with {promised}",
            "a node that has fewer than it promises is drained; more are not used",
            "make both the same", source,
        )  # fmt: skip
    if not of.lines and of.autodetect is None and promised:
        yield _count(
            of, Severity.CRITICAL, f"lines for {plural(promised, 'GPU')} in gres.conf",
            NO_LINES, "jobs get numbers without devices and without a place",
            "AutoDetect, or a line with File= and Cores= for the GPUs of each node", source,
        )  # fmt: skip


def _slices(of: NodeClass, listed: int, promised: int | None, source: str) -> Iterator[Finding]:
    """Of slices the machine does not give how many there are; the files must agree."""
    if of.lines and of.autodetect is None and promised not in (None, listed):
        yield _count(
            of, Severity.CRITICAL, f"{listed} in Gres= of slurm.conf, as gres.conf lists",
            f"Gres= with {promised}",
            "a node that has fewer than it promises is drained; more are not used",
            "make both the same", source,
        )  # fmt: skip
        return
    yield Finding(
        "gres-unjudged", Severity.INCONCLUSIVE, of.subject, "GPUs that are not cut into slices",
        f"MIG slices, {promised or listed} devices with them",
        None, "`nvidia-smi -L` on the node: count its slices", f"{source}, {_PAGE}",
    )  # fmt: skip


def _count(
    of: NodeClass, severity: Severity, expected: str, observed: str, cost: str, fix: str | None,
    source: str,
) -> Finding:  # fmt: skip
    return Finding(
        "gres-count", severity, of.subject, expected, observed, cost, fix, f"{source}, {_PAGE}"
    )


def _autodetect(of: NodeClass, host: Host, source: str) -> Iterator[Finding]:
    vendors = {gpu.vendor_id for gpu in gpus_in_order(host)}
    fitting = next((_DETECTORS[v] for v in sorted(v or 0 for v in vendors) if v in _DETECTORS), ())
    if not fitting:
        return
    if of.autodetect is None:
        if of.lines:
            yield Finding(
                "gres-autodetect", Severity.INFO, of.subject,
                f"AutoDetect={fitting[0]}, which reads cores and links from the driver",
                "lines by hand alone",
                "nothing shows when the lines and the machine part",
                f"build slurmd with the library and set AutoDetect={fitting[0]}; lines by hand "
                "are then checked against it", f"{source}, {_PAGE}",
            )  # fmt: skip
    elif of.autodetect not in (*fitting, "full"):
        yield Finding(
            "gres-autodetect", Severity.CRITICAL, of.subject,
            f"AutoDetect={' or '.join(fitting)}, for its GPUs", f"AutoDetect={of.autodetect}",
            "none of its GPUs are found", f"AutoDetect={fitting[0]}", f"{source}, {_PAGE}",
        )  # fmt: skip


def _cores(
    of: NodeClass, line: GresLine, gpus: Sequence[RightGpu], order: CoreOrder, source: str
) -> Iterator[Finding]:
    """Cores= of one line against those of the nodes of its GPUs."""
    blind = [gpu for gpu in gpus if gpu.cores is None]
    if blind:
        yield Finding(
            "gres-unjudged", Severity.INCONCLUSIVE, _named(of, blind), "a GPU whose node is known",
            "the host gives no node", None,
            "`homenode doctor` on the node: gpu-node-unknown", source,
        )  # fmt: skip
    known = [gpu for gpu in gpus if gpu.cores is not None]
    nodes = sorted({gpu.node for gpu in known if gpu.node is not None})
    if line.cores is None:
        if known and of.autodetect is None and len(order.pus) > len(known[0].cores or ()):
            yield Finding(
                "gres-cores-missing", Severity.WARNING, _named(of, known),
                "; ".join(_right(gpu) for gpu in _one_a_node(known)), "no Cores=",
                "Slurm takes any core for these GPUs to be as good as any other",
                "give a line with Cores= to the GPUs of each node", f"{source}, {_PAGE}",
            )  # fmt: skip
        return
    wrong = [gpu for gpu in known if line.cores not in (gpu.cores, gpu.near)]
    if not wrong:
        return
    first = wrong[0]
    assert first.cores is not None
    expected = "; ".join(_right(gpu) for gpu in _one_a_node(wrong))
    drained = of.autodetect is not None
    if looks_like_pus(line.cores, first.cores, order):
        yield Finding(
            "gres-cores-are-pus", Severity.CRITICAL, _named(of, wrong), expected,
            f"Cores={line.cores}, which are the kernel's numbers of these PUs",
            _DRAINED if drained else "Slurm counts cores, without siblings, socket by socket",
            "take Slurm's core numbers", f"{source}, {_PAGE}",
        )  # fmt: skip
        return
    if line.cores and all(gpu.cores and line.cores <= gpu.cores for gpu in wrong) and not drained:
        yield Finding(
            "gres-cores-wrong", Severity.INFO, _named(of, wrong), expected,
            f"Cores={line.cores}, some of them", "enforce-binding keeps jobs off the others",
            "take all cores of the GPU's node", f"{source}, {_PAGE}",
        )  # fmt: skip
        return
    far = not (line.cores & first.cores) or max(line.cores, default=0) >= len(order.pus)
    yield Finding(
        "gres-cores-wrong", Severity.CRITICAL if far or drained else Severity.WARNING,
        _named(of, wrong), expected,
        f"Cores={line.cores}{_where(line.cores, order, len(nodes))}",
        _DRAINED if drained else
        "enforce-binding ties these GPUs to the wrong cores, and without it they are preferred",
        "take the cores of the GPU's own node", f"{source}, {_PAGE}",
    )  # fmt: skip


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
            yield Finding(
                "gres-links-missing", Severity.INFO, _named(of, gpus),
                f"Links={_listed(links)} for GPU {own.index}, and so on", "no Links=",
                "jobs of several GPUs may get some that no link joins, while others are joined",
                "a line for each GPU with its Links=, or AutoDetect", f"{source}, {_PAGE}",
            )  # fmt: skip
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
    yield Finding(
        "gres-links-wrong", Severity.CRITICAL if refused else Severity.WARNING, _named(of, gpus),
        problem, observed,
        "slurmd refuses the line" if refused else "Slurm puts GPUs together that are not joined",
        "correct it, or leave it out: AutoDetect finds links", f"{source}, {_PAGE}",
    )  # fmt: skip


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
