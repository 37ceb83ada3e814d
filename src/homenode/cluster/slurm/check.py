"""Check: gres.conf, slurm.conf and cgroup.conf against a node's machine.

The machine is the reference for the number of GPUs and their nearest cores.
Source: gres.conf(5), slurm.conf(5) and cgroup.conf(5) of 22.05.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.slurm.config import (
    CGROUP_KEYS,
    SLURM_KEYS,
    SlurmConfig,
    reject_misspelt_keys,
)
from homenode.cluster.slurm.gres import GresLine, NodeClass, group_nodes, place_files
from homenode.cluster.slurm.job_allocation import (
    CoreOrder,
    build_core_order,
    find_gpu_memory_nodes,
    home_node,
    is_other_model,
    list_cpu_nodes,
)
from homenode.cluster.slurm.slurm_nodes import compress_hostlist
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError
from homenode.findings import Finding, Findings, Severity, finding, sort_findings
from homenode.machine.topology import Host, reject_unshown
from homenode.text import command_line, format_nodes, plural

_GRES_PAGE = "gres.conf(5)"
_SLURM_PAGE = "slurm.conf(5)"
_NOT_SET = "it is not set"
_DETECTORS = {0x10DE: ("nvml", "nvidia"), 0x1002: ("rsmi",), 0x8086: ("oneapi",)}
"""AutoDetect= values that detect the GPUs of each vendor; "nvidia" since 24.11."""


class GpuCores(Struct, frozen=True):
    """A GPU and its nearest cores, in Slurm's numbers."""

    index: int
    bdf: Bdf
    vendor: int | None
    node: NodeIndex | None  # None: the host does not give it
    cores: CpuSet | None  # all of its node
    local_cores: CpuSet | None  # the cores that the firmware calls local, if they are fewer


def gpu_cores(host: Host) -> tuple[GpuCores, ...]:
    """Return the host's GPUs in the order of their addresses."""
    order = build_core_order(host)
    gpus = []
    for index, gpu in enumerate(host.whole_gpus):
        home = home_node(host, gpu)
        node = None if home is None else host.find_node(home)
        cores = None if node is None else order.numbers(node.pus)
        local_cores = order.numbers(gpu.local_pus) if gpu.local_pus else None
        gpus.append(GpuCores(index, gpu.bdf, gpu.vendor_id, home, cores, local_cores))
    return tuple(gpus)


def check(
    gres: SlurmConfig,
    slurm: SlurmConfig,
    host: Host,
    *,
    cgroup: SlurmConfig | None = None,
    nodes: Sequence[str] = (),
    host_source: str | None = None,
) -> Findings:
    """Compare the files with the machine of their GPU nodes. nodes: these only; () = all.
    host_source: what --host named, for commands in fixes.

    Raises ParseError that names a line, InputError for a machine without GPUs and for a node that
    no file names.
    """
    # Long because each comparison of the two files and the machine is a line or two.
    reject_misspelt_keys(slurm.lines, SLURM_KEYS)
    reject_misspelt_keys(cgroup.lines if cgroup else (), CGROUP_KEYS)
    groups = group_nodes(gres, slurm, nodes)
    gpus, order = gpu_cores(host), build_core_order(host)
    if groups and not gpus:
        reject_unshown(host, "PCI")
        raise InputError(
            f"{host.name}: no GPUs on this host, but {groups[0].subject} has them",
            hint="capture one of the nodes (srun -w NODE homenode capture -o NODE.tar.gz) and "
            "name it: --host NODE.tar.gz",
        )
    findings: list[Finding] = []
    words = [gres.source, slurm.source]
    words += [] if host_source is None else ["--host", host_source]
    # A line is corrected only if all of its nodes are checked.
    of_lines = [name for group in groups for line in group.lines for name in line.nodes or ()]
    words += ["--nodes", compress_hostlist([*nodes, *of_lines])] if nodes else []
    arguments = command_line(*words)
    alike = groups_like(groups, host)
    for group in groups:
        findings += _check_shape(group, order, alike)
        source = f"{gres.source}, {_GRES_PAGE}"
        if group not in alike:
            findings += (
                _check_types(group, host, source, arguments) if has_other_model(group, host) else ()
            )
            continue
        is_partial = bool(gres.not_read or slurm.not_read)
        findings += _check_counts(group, len(gpus), source, arguments, is_partial=is_partial)
        findings += _check_types(group, host, source, arguments)
        findings += _check_detector(group, gpus, source)
    by_lines: dict[tuple[object, ...], list[NodeClass]] = {}
    for group in alike:  # nodes of several NodeName= lines may have the same lines of gres.conf
        by_lines.setdefault((group.lines, group.autodetect), []).append(group)
    for same in by_lines.values():
        members = tuple(name for group in same for name in group.names)
        findings += _check_cores(replace(same[0], names=members), gpus, order, arguments)
    findings += _check_settings(slurm, has_core_counts(alike, order))
    findings += [] if cgroup is None else _check_cgroup(cgroup)
    machine = f"{host.name}: {plural(len(gpus), 'GPU')} on "
    machine += f"{plural(len(list_cpu_nodes(host)), 'node')} with CPUs"
    if memory := find_gpu_memory_nodes(host):
        machine += f"; {plural(len(memory), 'node')} of GPU memory, to which no task is bound"
    subjects = ", ".join(group.subject for group in alike)
    checks = [machine, f"{gres.source} and {slurm.source}: {subjects}"] if groups else []
    not_checked = [] if groups else ["no node has GPUs in either file"]
    for file in (gres, slurm, *([cgroup] if cgroup else [])):
        if file.included:
            names = ", ".join(other.source for other in file.included)
            checks.append(f"{file.source} with {names}")
        not_checked += [f"{at}: Include {path}: {reason}" for path, reason, at in file.not_read]
    return Findings(
        checked=tuple(checks),
        findings=sort_findings(findings),
        not_checked=tuple(not_checked),
        unknown=() if cgroup else ("cgroup.conf: not specified (--cgroup FILE)",),
    )


def groups_like(groups: Sequence[NodeClass], host: Host) -> tuple[NodeClass, ...]:
    """Return the groups of the machine's shape, or without one, that have GPUs of its model; all
    groups if there is none."""
    order = build_core_order(host)
    alike = [
        group
        for group in groups
        if (node := group.definition) is None or node.shape is None or order.fits(node.shape)
    ]
    same_model = [group for group in alike if not has_other_model(group, host)]
    return tuple(same_model or alike or groups)


def has_other_model(group: NodeClass, host: Host) -> bool:
    """Return whether every type of its GPUs in the two files is another model than the host's."""
    types = {*count_types(group.lines), *group.configured_gpus} - {""}
    return bool(types) and all(is_other_model(kind, host) for kind in types)


def _may_be_unread(missing: Finding) -> Finding:
    """Return the finding on a missing setting, which a file that was not read may contain."""
    return replace(
        missing,
        severity=Severity.INCONCLUSIVE,
        observed=f"{missing.observed} in what was read",
        fix="copy the included lines into one file, and check that file",
        command="",
    )


def _check_counts(
    group: NodeClass, gpu_count: int, source: str, arguments: str, *, is_partial: bool
) -> Iterator[Finding]:
    """Compare the GPUs in gres.conf and slurm.conf with those of the machine."""
    # Long because each disagreement of the two files and the machine is a few lines.
    by_hand = bool(group.lines) and group.autodetect is None
    listed_count = sum(line.devices for line in group.lines)
    promised = sum(group.configured_gpus.values())
    machine_text = f"{plural(gpu_count, 'GPU')}, as the machine has"

    subject = group.subject

    def count(expected: str, observed: str, case: str | None, fact: str) -> Finding:
        texts = subject, expected, observed, source
        values = {"arguments": arguments, "fact": fact}
        is_agreed = case in ("too few lines", "no files") and promised == listed_count
        severity = Severity.WARNING if is_agreed else Severity.CRITICAL
        result = finding("gres-count", *texts, severity=severity, case=case, values=values)
        is_unknown = is_partial and case in ("no lines", "not defined", "not promised")
        return _may_be_unread(result) if is_unknown else result

    in_gres = f"gres.conf lists {plural(listed_count, 'GPU')} of {subject} instead of {gpu_count}"
    in_slurm = f"slurm.conf assigns {subject} {plural(promised, 'GPU')} instead of"

    if group.is_sliced:
        # How many slices there are is a setting of the driver: the files must agree.
        if by_hand and promised and promised != listed_count:
            expected = f"{listed_count} in Gres= of slurm.conf, as gres.conf lists"
            yield count(expected, f"Gres= with {promised}", None, f"{in_slurm} {listed_count}")
            return
        yield finding(
            "gres-unjudged",
            group.subject,
            "GPUs that are not cut into slices",
            f"MIG slices, {plural(promised or listed_count, 'device')} with them",
            source,
            case="slices",
        )
        return
    file_places = place_files(group.lines)
    numbers = [number for _, _, number in file_places]
    times = Counter(file for _, file, _ in file_places if file is not None)
    if absent := [number for number in numbers if not 0 <= number < gpu_count]:
        fact = f"gres.conf lists GPU {CpuSet(absent)} of {subject}, which the machine does not have"
        yield count(f"at most {machine_text}", f"GPU {CpuSet(absent)}", "too many lines", fact)
    elif duplicates := compress_hostlist(file for file, number in times.items() if number > 1):
        fact = f"gres.conf lists {duplicates} of {subject} twice"
        yield count("each device file once", f"{duplicates} twice", "twice", fact)
    elif by_hand and listed_count < gpu_count:
        yield count(machine_text, f"{listed_count} in gres.conf", "too few lines", in_gres)
    elif by_hand and any(not line.files for line in group.lines):
        fact = f"gres.conf has Count= without File= for GPUs of {subject}"
        expected, observed = "File= with the device files of all GPUs", "lines without File="
        yield count(expected, observed, "no files", fact)
    if not group.lines and group.autodetect is None:
        fact = f"gres.conf has no line for the GPUs of {subject}"
        yield count(f"lines for {machine_text}", "none, and no AutoDetect", "no lines", fact)
    if group.definition is None:
        if group.names:
            fact = f"slurm.conf does not define {subject}"
            expected, observed = "a NodeName= line with Gres=", "no such line in slurm.conf"
            yield count(expected, observed, "not defined", fact)
        return
    types = count_types(group.lines) if by_hand and listed_count == gpu_count else {"": gpu_count}
    expected = f"Gres={format_gres(types)} on the NodeName= line in slurm.conf, as the machine has"
    if not promised:
        yield count(expected, _NOT_SET, "not promised", f"slurm.conf assigns {subject} no GPUs")
    elif promised != gpu_count and not (by_hand and promised == listed_count):
        yield count(expected, f"Gres= with {promised}", None, f"{in_slurm} {gpu_count}")


def find_right_type(group: NodeClass, host: Host) -> str:
    """Return the only type in slurm.conf if no manual line has a type, or if only this
    type can be the machine's; else ""."""
    promised_types, listed_types = tuple(group.configured_gpus), count_types(group.lines)
    if not listed_types or len(promised_types) != 1 or group.autodetect is not None:
        return ""
    is_wrong = all(is_other_model(kind, host) for kind in listed_types)
    if set(listed_types) == {""} or (is_wrong and not is_other_model(promised_types[0], host)):
        return promised_types[0]
    return ""


def _check_types(group: NodeClass, host: Host, source: str, arguments: str) -> Iterator[Finding]:
    """Compare the types of GPU in Gres= with those of manual lines, and both with the machine.

    Slurm ignores other types. Seen: `slurmd -G` of 22.05.8, which exits if only some GPUs of a file
    have a type.
    """
    promised, counts = group.configured_gpus, count_types(group.lines)
    by_hand = group.autodetect is None
    is_mixed = any(
        "" in types and len(types) > 1 for types in (promised, counts if by_hand else ())
    )
    # If the totals differ, gres-count reports it.
    is_comparable = by_hand and sum(counts.values()) == sum(promised.values())
    is_other = is_comparable and bool(counts) and set(promised) != {""} and counts != promised
    kind = find_right_type(group, host)
    is_other |= bool(kind) and set(counts) != {""}
    expected = f"Gres={format_gres(counts)} in slurm.conf, as gres.conf lists"
    if is_mixed:
        expected = "a type for all GPUs of both files, or for none"
    elif kind:
        # Jobs may request the type: it stays in slurm.conf.
        expected = f"Type={kind} in gres.conf, as slurm.conf has"
    if is_mixed or is_other:
        yield finding(
            "gres-type-differs",
            group.subject,
            expected,
            f"Gres={format_gres(promised)}, and {format_gres(counts) or 'no line'} in gres.conf",
            source,
            case="mixed types" if is_mixed else None,
            values={"arguments": arguments},
        )
    elif wrong := [kind for kind in {**counts, **promised} if is_other_model(kind, host)]:
        models = dict.fromkeys(gpu.name or "?" for gpu in host.whole_gpus)
        yield finding(
            "gres-type-differs",
            group.subject,
            f"a type of the machine's GPUs, {', '.join(models)}",
            f"type {', '.join(wrong)}",
            source,
            severity=Severity.WARNING,
            case="other model",
        )


def count_types(lines: Iterable[GresLine]) -> dict[str, int]:
    """Count the devices of each type, in lower case; "" = no type."""
    counts: dict[str, int] = {}
    for line in lines:
        kind = (line.type or "").lower()
        counts[kind] = counts.get(kind, 0) + line.devices
    return counts


def format_gres(counts: Mapping[str, int]) -> str:
    """
    >>> format_gres({"h100": 6, "": 2})
    'gpu:h100:6,gpu:2'
    """
    return ",".join(
        f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in counts.items()
    )


def _check_detector(group: NodeClass, gpus: Sequence[GpuCores], source: str) -> Iterator[Finding]:
    vendors = {gpu.vendor for gpu in gpus}
    fitting = next((names for vendor, names in _DETECTORS.items() if vendor in vendors), ())
    by_hand = group.autodetect is None
    if not fitting or group.autodetect in (*fitting, "full") or (by_hand and not group.lines):
        return
    yield finding(
        "gres-autodetect",
        group.subject,
        f"AutoDetect={fitting[0]}, which reads cores and links from the driver",
        "manually written lines alone" if by_hand else f"AutoDetect={group.autodetect}",
        source,
        severity=Severity.INFO if by_hand else Severity.CRITICAL,
        case="by hand" if by_hand else "other detector",
        values={"detector": fitting[0]},
    )


def find_right_cores(
    line: GresLine, gpu: GpuCores, order: CoreOrder, *, is_detected: bool
) -> CpuSet | None:
    """The correct Cores= of this GPU: the line's own if they are near or cannot be judged."""
    if gpu.cores is None or line.cores in (gpu.cores, gpu.local_cores):
        return line.cores
    if line.cores is None:
        is_missing = not is_detected and len(order.pus) > len(gpu.cores)
        return gpu.cores if is_missing else None
    is_part = bool(line.cores) and line.cores <= gpu.cores
    return line.cores if is_part and not is_detected else gpu.cores


def _check_cores(
    group: NodeClass, gpus: Sequence[GpuCores], order: CoreOrder, arguments: str
) -> Iterator[Finding]:
    is_detected = group.autodetect is not None
    for line, places in groupby(place_files(group.lines), key=lambda place: place[0]):
        members = [
            gpus[number]
            for _, file, number in places
            if 0 <= number < len(gpus) and file is not None
        ]
        place = f"{line.line.source.rpartition('/')[2]}:{line.line.first}"
        unknown = [gpu for gpu in members if gpu.cores is None]
        if unknown:
            expected, observed = "a GPU whose node is known", "the host reports no node"
            yield finding("gres-unjudged", _name_gpus(group, unknown), expected, observed, place)
        wrong = [
            gpu
            for gpu in members
            if find_right_cores(line, gpu, order, is_detected=is_detected) != line.cores
        ]
        if not wrong:
            yield from _check_omitted_cores(line, members, place)
            continue
        right, severity = wrong[0].cores or CpuSet(), Severity.WARNING
        name, observed = "gres-cores-wrong", f"Cores={line.cores}"
        if line.cores is None:
            name, observed = "gres-cores-missing", "no Cores="
        elif missing := line.cores - CpuSet(range(len(order.pus))):
            name, severity = "gres-cores-are-cpus", Severity.CRITICAL
            observed += f": the node has no cores {missing}; Cores= counts cores, not CPUs"
        elif order.numbers(line.cores) == right:
            name, severity = "gres-cores-are-cpus", Severity.CRITICAL
            observed += ", which are the kernel's numbers of these CPUs"
        elif is_detected or line.cores.isdisjoint(right):
            severity = Severity.CRITICAL
        if len(nodes := {gpu.node for gpu in members}) > 1 and name == "gres-cores-wrong":
            observed += f", and the line's GPUs are on {plural(len(nodes), 'node')}"
        homes = {gpu.node: gpu for gpu in wrong if gpu.node is not None}
        cores = [f"Cores={gpu.cores} for {format_nodes([node])}" for node, gpu in homes.items()]
        stated_cores = line.cores or CpuSet()
        others = {g.node for g in gpus if g.cores and not g.cores.isdisjoint(stated_cores)} - {None}
        yield finding(
            name,
            f"{place}, {_format_gpus(wrong)}",
            f"Cores={right}" if len(cores) == 1 else "; ".join(cores),
            observed,
            f"{place}, {_GRES_PAGE}",
            severity=severity,
            case="AutoDetect" if is_detected else None,
            values={
                "gpus": _name_gpus(group, wrong),
                "has": "has" if len(wrong) == 1 else "have",
                "those": "this GPU" if len(wrong) == 1 else "these GPUs",
                "nodes": format_nodes(sorted(n for n in others if n is not None)) or "other nodes",
                "arguments": arguments,
            },
        )


def _check_omitted_cores(line: GresLine, gpus: Sequence[GpuCores], place: str) -> Iterator[Finding]:
    """Find a line with some of its GPUs' cores."""
    cut = [gpu for gpu in gpus if gpu.cores and line.cores not in (gpu.cores, gpu.local_cores)]
    if line.cores is not None and cut:
        yield finding(
            "gres-cores-wrong",
            f"{place}, {_format_gpus(cut)}",
            f"Cores={cut[0].cores}",
            f"Cores={line.cores}, a part of the node",
            f"{place}, {_GRES_PAGE}",
            severity=Severity.INFO,
            case="a part",
        )


def _format_gpus(gpus: Sequence[GpuCores]) -> str:
    """Return numbers, address and nodes of GPUs: "GPUs 4-7 (0000:9b:00.0 and 3 more, node 1)"."""
    more = f" and {len(gpus) - 1} more" if len(gpus) > 1 else ""
    nodes = format_nodes(sorted({gpu.node for gpu in gpus if gpu.node is not None}))
    numbers = CpuSet(gpu.index for gpu in gpus)
    return f"{'GPU' if len(gpus) == 1 else 'GPUs'} {numbers} ({gpus[0].bdf}{more}, {nodes})"


def _name_gpus(group: NodeClass, gpus: Sequence[GpuCores]) -> str:
    numbers = CpuSet(gpu.index for gpu in gpus)
    return f"{'GPU' if len(gpus) == 1 else 'GPUs'} {numbers} of {group.subject}"


def _check_shape(
    group: NodeClass, order: CoreOrder, same_shape_classes: Sequence[NodeClass]
) -> Iterator[Finding]:
    """Compare the number of cores in slurm.conf, which Cores= counts, with the machine's."""
    node = group.definition
    if node is None or node.shape is None or not order.pus or order.fits(node.shape):
        return
    yield finding(
        "slurm-shape-differs",
        group.subject,
        f"{plural(len(order.pus), 'core')} of {plural(order.threads, 'thread')}, "
        "as the machine has",
        f"{node.shape} (sockets x cores x threads)",
        f"{node.line.source}:{node.line.first}, {_SLURM_PAGE}",
        severity=None if group in same_shape_classes else Severity.WARNING,
        case=None if group in same_shape_classes else "other machine",
        values={
            "nodes": compress_hostlist(name for other in same_shape_classes for name in other.names)
        },
    )


def has_core_counts(groups: Sequence[NodeClass], order: CoreOrder) -> bool:
    """Return whether Slurm knows the cores of all groups: then CR_CPU, too, shares no core."""
    shapes = [None if group.definition is None else group.definition.shape for group in groups]
    return all(shape is not None and order.fits(shape) for shape in shapes)


def list_right_settings(slurm: SlurmConfig, core_counts: bool) -> dict[str, tuple[str, str]]:
    """Settings that let Slurm allocate CPUs and GPUs of two nodes: key -> (finding, value)."""
    settings: dict[str, tuple[str, str]] = {}
    if _find_value(slurm, "SelectType").lower().removeprefix("select/") != "cons_tres":
        settings["SelectType"] = ("slurm-select-type", "select/cons_tres")
    words = _split_value(slurm, "SelectTypeParameters")
    units = {"CR_MEMORY": "CR_Core_Memory"}
    if not core_counts:
        units |= {"CR_CPU": "CR_Core", "CR_CPU_MEMORY": "CR_Core_Memory"}
    right = [units.get(word.upper(), word) for word in words]
    if right != words:
        settings["SelectTypeParameters"] = ("slurm-cores-shared", ",".join(right))
    plugins = _split_value(slurm, "TaskPlugin")
    present = {word.lower().removeprefix("task/") for word in plugins}
    if not {"affinity", "cgroup"} <= present:
        # task/affinity sets masks within what task/cgroup fences in.
        front = [] if "affinity" in present else ["task/affinity"]
        other_plugins = [word for word in plugins if word.lower() not in ("none", "task/none")]
        back = [] if "cgroup" in present else ["task/cgroup"]
        settings["TaskPlugin"] = ("slurm-task-plugin", ",".join([*front, *other_plugins, *back]))
    types = _split_value(slurm, "GresTypes")
    if "gpu" not in types:
        settings["GresTypes"] = ("slurm-gres-types", ",".join([*types, "gpu"]))
    return settings


def _check_settings(slurm: SlurmConfig, core_counts: bool) -> Iterator[Finding]:
    source = f"{slurm.source}, {_SLURM_PAGE}"
    for key, (name, value) in list_right_settings(slurm, core_counts).items():
        expected, observed = f"{key}={value}", _format_setting(slurm, key)
        values = {"value": value}
        case = "CR_Memory" if "CR_MEMORY" in map(str.upper, _split_value(slurm, key)) else None
        result = finding(name, "the cluster", expected, observed, source, case=case, values=values)
        yield _may_be_unread(result) if _is_unknown(slurm, key) else result
    key = "SelectTypeParameters"
    if "ENFORCE_BINDING_GRES" not in {word.upper() for word in _split_value(slurm, key)}:
        expected = "GPUs assigned with cores of their own socket, by default"
        observed = _format_setting(slurm, key)
        name, severity = "slurm-binding-optional", Severity.INFO
        result = finding(name, "the cluster", expected, observed, source, severity=severity)
        yield _may_be_unread(result) if _is_unknown(slurm, key) else result


def _check_cgroup(cgroup: SlurmConfig) -> Iterator[Finding]:
    """Check the settings with which task/cgroup confines a job to its cores and GPUs."""
    is_disabled = _find_value(cgroup, "CgroupPlugin").lower() == "disabled"
    for key, name in (
        ("ConstrainCores", "cgroup-cores-open"),
        ("ConstrainDevices", "cgroup-devices-open"),
    ):
        if is_disabled or _find_value(cgroup, key).lower() not in ("yes", "true", "1", "y"):
            result = finding(
                name,
                "the cluster",
                f"{key}=yes",
                _format_setting(cgroup, "CgroupPlugin" if is_disabled else key),
                f"{cgroup.source}, cgroup.conf(5)",
                case="no plugin" if is_disabled else None,
            )
            is_unknown = not is_disabled and _is_unknown(cgroup, key)
            yield _may_be_unread(result) if is_unknown else result


def _is_unknown(config: SlurmConfig, key: str) -> bool:
    """Return whether a setting is missing, and may be in a file that was not read."""
    return bool(config.not_read) and config.find_last(key.lower()) is None


def _find_value(config: SlurmConfig, key: str) -> str:
    setting = config.find_last(key.lower())
    return "" if setting is None else setting[0]


def _split_value(config: SlurmConfig, key: str) -> list[str]:
    return [word.strip() for word in _find_value(config, key).split(",") if word.strip()]


def _format_setting(config: SlurmConfig, key: str) -> str:
    """Return the present setting with its line."""
    setting = config.find_last(key.lower())
    if setting is None:
        return _NOT_SET
    value, line = setting
    file = "" if line.source == config.source else f"{line.source}, "
    return f"{value} ({file}line {line.first})"
