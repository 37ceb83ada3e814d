"""CheckSlurm: settings without which GPUs and CPUs part, and files with what is wrong set right.

Lines that are right stay byte for byte.
Source: slurm.conf(5) and cgroup.conf(5) of 22.05; Slurm's release notes of 23.11.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from homenode.catalogue import finding
from homenode.cluster.slurm.config import ConfigLine, SlurmConfig, with_words
from homenode.cluster.slurm.gres import right_gpus, right_lines
from homenode.cluster.slurm.nodes import NodeClass
from homenode.cluster.slurm.numbering import core_order, nodes_with_cpus
from homenode.findings import Finding, Severity
from homenode.machine.tools.slurm_nodes import NodeShape
from homenode.machine.topology import Host
from homenode.units import MIB
from homenode.wording import command_line, plural

_PAGE = "slurm.conf(5)"


class SlurmVersion(NamedTuple):
    major: int
    minor: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor:02}" + (f".{self.micro}" if self.micro else "")


NOT_SET = "it is not set"
NO_LINES = "none, and no AutoDetect"
CONS_TRES_IS_DEFAULT = SlurmVersion(23, 11)
KNOWS_ENFORCE_BINDING = SlurmVersion(23, 11, 2)
KNOWS_NUMA_NODE_AS_SOCKET = SlurmVersion(22, 5)


class Setting(NamedTuple):
    """A key of slurm.conf as it should be. certain: any version takes it."""

    key: str
    value: str
    certain: bool = True


def right_settings(slurm: SlurmConfig, version: SlurmVersion | None) -> tuple[Setting, ...]:
    """Settings that differ from what they should be, with the value that they should have."""
    wanted: list[Setting] = []
    select = _value(slurm, "selecttype")
    if not _is_cons_tres(select, version):
        wanted.append(Setting("SelectType", "select/cons_tres"))
    parameters = _words(slurm, "selecttypeparameters")
    cores = [
        {"CR_CPU": "CR_Core", "CR_CPU_MEMORY": "CR_Core_Memory", "CR_MEMORY": "CR_Core_Memory"}.get(
            word.upper(), word
        )
        for word in parameters
    ]
    if not any(word.upper().startswith(("CR_CORE", "CR_SOCKET")) for word in cores):
        cores.insert(0, "CR_Core_Memory")
    enforced = "ENFORCE_BINDING_GRES" in {word.upper() for word in cores}
    binding = cores if enforced else [*cores, "ENFORCE_BINDING_GRES"]
    if version is not None and version >= KNOWS_ENFORCE_BINDING:
        cores = binding
    if cores != list(parameters):
        wanted.append(Setting("SelectTypeParameters", ",".join(cores)))
    if version is None and not enforced:
        wanted.append(Setting("SelectTypeParameters", ",".join(binding), certain=False))
    plugins = _words(slurm, "taskplugin")
    if not (_has(plugins, "affinity") and _has(plugins, "cgroup")):
        kept = [word for word in plugins if word.lower() not in ("none", "task/none")]
        # task/affinity sets masks within what task/cgroup fences in.
        front = [] if _has(plugins, "affinity") else ["task/affinity"]
        back = [] if _has(plugins, "cgroup") else ["task/cgroup"]
        wanted.append(Setting("TaskPlugin", ",".join([*front, *kept, *back])))
    if _value(slurm, "proctracktype").lower() != "proctrack/cgroup":
        wanted.append(Setting("ProctrackType", "proctrack/cgroup"))
    types = _words(slurm, "grestypes")
    if "gpu" not in types:
        wanted.append(Setting("GresTypes", ",".join([*types, "gpu"])))
    return tuple(wanted)


_FINDING_OF_SETTING = {
    "SelectType": ("slurm-select-type", "SelectType=select/cons_tres"),
    "TaskPlugin": ("slurm-task-plugin", "TaskPlugin=task/affinity,task/cgroup"),
    "ProctrackType": ("slurm-proctrack", "ProctrackType=proctrack/cgroup"),
    "GresTypes": ("slurm-gres-types", "GresTypes=gpu"),
}
"""What is found where a setting is not as it should be, and what is expected."""


def check_slurm(slurm: SlurmConfig, version: SlurmVersion | None) -> Iterator[Finding]:
    """What is wrong with the settings of the whole cluster."""
    source = f"{slurm.source}, {_PAGE}"
    subject = "the cluster"
    wanted = {setting.key: setting.value for setting in right_settings(slurm, version)}
    for key, (named, expected) in _FINDING_OF_SETTING.items():
        if key in wanted:
            yield finding(
                named,
                subject,
                expected=expected,
                observed=_shown(slurm, key.lower()),
                values={"plugins": wanted[key]} if key == "TaskPlugin" else None,
                source=source,
            )
    parameters = {word.upper() for word in _words(slurm, "selecttypeparameters")}
    if any(word.startswith("CR_CPU") for word in parameters):
        yield finding(
            "slurm-cores-shared",
            subject,
            expected="CR_Core or CR_Core_Memory",
            observed=_shown(slurm, "selecttypeparameters"),
            source=source,
        )
    if "ENFORCE_BINDING_GRES" not in parameters:
        knows = version is None or version >= KNOWS_ENFORCE_BINDING
        # A fault only where the version has the setting: else no edit of the file could cure it.
        yield finding(
            "slurm-binding-optional",
            subject,
            expected="GPUs given with cores of their own socket, by default",
            observed=_shown(slurm, "selecttypeparameters"),
            severity=Severity.WARNING if version and knows else Severity.INFO,
            case=None if knows else "old version",
            source=source,
        )


def check_shape(
    of: NodeClass, host: Host, slurm: SlurmConfig, version: SlurmVersion | None = None
) -> Iterator[Finding]:
    """Memory, sockets, cores and threads as slurm.conf has them, against the machine."""
    if of.definition is None:
        return
    source = f"{of.definition.line.source}:{of.definition.line.first}, {_PAGE}"
    overridden = "config_overrides" in _words(slurm, "slurmdparameters")
    promised, there = of.definition.memory_mib, _memory_mib(host)
    if promised is not None and there is not None and promised > there:
        yield finding(
            "slurm-memory-differs",
            of.subject,
            expected=f"RealMemory={there} at most, as the machine has",
            observed=f"RealMemory={promised}",
            case="config_overrides" if overridden else None,
            source=source,
        )
    if of.definition.shape is None:
        return
    shape = of.definition.shape
    order = core_order(host)
    if not order.fits(shape):
        yield finding(
            "slurm-shape-differs",
            of.subject,
            expected=f"{len(order.pus)} cores of {plural(order.threads, 'thread')}, as the "
            "machine has",
            observed=f"{shape} (sockets x cores x threads)",
            case="threads as sockets"
            if shape.sockets == shape.cpus == len(order.pus) * order.threads
            else "config_overrides"
            if overridden
            else None,
            source=source,
        )
        return
    nodes = nodes_with_cpus(host)
    by_cache = "l3cache_as_socket" in _words(slurm, "slurmdparameters")
    counts = {len(host.packages), len(nodes), *([len(host.llcs)] if by_cache else [])}
    is_known = bool(host.packages and nodes) and not host.nodes_assumed
    if is_known and shape.sockets not in counts:
        said = " or ".join(map(str, sorted(counts)))
        yield finding(
            "slurm-shape-differs",
            of.subject,
            expected=f"Sockets={said}, as the machine has packages or NUMA nodes with CPUs",
            observed=f"{shape} (sockets x cores x threads)",
            severity=Severity.WARNING,
            case="other sockets",
            source=source,
        )
        return
    if shape.sockets < len(nodes) and len(host.packages) < len(nodes):
        right = right_shape(of, host)
        assert right is not None
        yield finding(
            "slurm-sockets-span-nodes",
            of.subject,
            expected=f"a socket for each of the {len(nodes)} NUMA nodes with CPUs ({right})",
            observed=f"{plural(shape.sockets, 'socket')} ({shape})",
            severity=Severity.INFO
            if version is not None and version < KNOWS_NUMA_NODE_AS_SOCKET
            else Severity.WARNING,
            values={"sockets": right.sockets, "cores": right.cores_per_socket},
            source=source,
        )


def _memory_mib(host: Host) -> int | None:
    """The memory of all nodes, as slurmd counts it; None where that of a node is unknown."""
    sizes = [node.memory_bytes for node in host.nodes]
    known = [size for size in sizes if size is not None]
    return sum(known) // MIB if known and len(known) == len(sizes) else None


def right_shape(of: NodeClass, host: Host) -> NodeShape | None:
    """A socket for each node with CPUs, where these are equal and finer than packages."""
    nodes = nodes_with_cpus(host)
    order = core_order(host)
    shape = None if of.definition is None else of.definition.shape
    if shape is None or not nodes or len(order.pus) % len(nodes):
        return None
    cores = len(order.pus) // len(nodes)
    return NodeShape(len(nodes), cores, shape.threads_per_core, shape.cpus)


def check_cgroup(cgroup: SlurmConfig | None) -> Iterator[Finding]:
    """What task/cgroup needs to keep a job on its cores and GPUs."""
    if cgroup is None:
        yield finding(
            "cgroup-unjudged",
            "the cluster",
            expected="cgroup.conf, to see whether jobs are kept on their cores and GPUs",
            observed="it was not given",
            source="cgroup.conf(5)",
        )
        return
    disabled = _value(cgroup, "cgroupplugin").lower() == "disabled"
    for key, named in (
        ("ConstrainCores", "cgroup-cores-open"),
        ("ConstrainDevices", "cgroup-devices-open"),
    ):
        if disabled or _value(cgroup, key.lower()).lower() not in ("yes", "true", "1", "y"):
            yield finding(
                named,
                "the cluster",
                expected=f"{key}=yes",
                observed=_shown(cgroup, "cgroupplugin" if disabled else key.lower()),
                case="no plugin" if disabled else None,
                source=f"{cgroup.source}, cgroup.conf(5)",
            )


def without_absence(findings: Iterable[Finding], *files: SlurmConfig) -> Iterator[Finding]:
    """The same, but that what is not set is unknown where it may stand in a file not read."""
    hidden = any(file.not_read for file in files)
    for one in findings:
        if hidden and one.observed in (NOT_SET, NO_LINES):
            yield replace(
                one,
                severity=Severity.INCONCLUSIVE,
                observed=f"{one.observed} in what was read",
                fix="put what is included into one file, and check that",
            )
        else:
            yield one


def check_includes(*files: SlurmConfig | None) -> Iterator[Finding]:
    """Files that belong to these and were not read."""
    for file in files:
        for path, reason, where in () if file is None else file.not_read:
            yield finding(
                "config-include",
                file.source if file else "",
                expected="files next to it alone, which are read with it",
                observed=f"Include {path}, which is not read: {reason}",
                values={"file": command_line(path)},
                source=f"{where}, {_PAGE}",
            )


def _is_cons_tres(select: str, version: SlurmVersion | None) -> bool:
    if select:
        return select.lower().removeprefix("select/") == "cons_tres"
    return version is not None and version >= CONS_TRES_IS_DEFAULT


def _value(config: SlurmConfig, key: str) -> str:
    found = config.last(key)
    return "" if found is None else found[0]


def _words(config: SlurmConfig, key: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in _value(config, key).split(",") if word.strip())


def _has(plugins: tuple[str, ...], name: str) -> bool:
    return any(word.lower().removeprefix("task/") == name for word in plugins)


def _shown(config: SlurmConfig, key: str) -> str:
    """The setting as it stands, with its line."""
    found = config.last(key)
    if found is None:
        return NOT_SET
    value, line = found
    file = "" if line.source == config.source else f"{line.source}, "
    return f"{value} ({file}line {line.first})"


class LineEdit(NamedTuple):
    """Physical lines `first` to `last` of a file, both counted from 1, become these."""

    source: str
    first: int
    last: int
    lines: tuple[str, ...]


def corrected_gres(
    gres: SlurmConfig,
    classes: Sequence[NodeClass],
    host: Host,
    wrong: Iterable[NodeClass],
    *,
    links: bool,
) -> dict[str, str]:
    """The file, and those that it includes, with the GPU lines of these classes rewritten: by name.

    Left as they are: classes whose lines are about other nodes too, and whose machine has no node
    for its GPUs. links: give each GPU a line with its Links=.
    """
    edits: list[LineEdit] = []
    gpus = right_gpus(host)
    for of in wrong:
        alone = len(classes) == 1
        if not of.owns_lines or (not alone and any(line.nodes is None for line in of.lines)):
            continue
        names = of.names if any(line.nodes is not None for line in of.lines) else ()
        detected = of.autodetect is not None
        lines = right_lines(names, of.lines, gpus, links=links, detected=detected)
        if of.autodetect is not None and any(line.autodetect for line in of.lines):
            lines = (f"{lines[0]} AutoDetect={of.autodetect}", *lines[1:]) if lines else ()
        elif any(line.autodetect == "off" for line in of.lines) and lines:
            lines = tuple(f"{line} AutoDetect=off" for line in lines)
        if not lines or not of.lines:
            continue
        places = [line.line for line in of.lines]
        said = _comments(gres, places)
        edits.append(_edit(places[0], (*said, *lines)))
        edits += [_edit(place, ()) for place in places[1:]]
    return _edited(gres, edits)


def corrected_slurm(
    slurm: SlurmConfig, classes: Sequence[NodeClass], host: Host, version: SlurmVersion | None
) -> dict[str, str]:
    """The file, and those that it includes, with wrong settings set right: by name.

    Missing ones are at the file's end.
    A setting that only newer versions know is left as a comment where the version is not known.
    """
    changed: dict[ConfigLine, dict[str, str]] = {}
    added: list[str] = []
    for setting in right_settings(slurm, version):
        found = slurm.last(setting.key.lower())
        if not setting.certain:
            added.append(
                f"# from {KNOWS_ENFORCE_BINDING} on, in place of what is above: "
                f"{setting.key}={setting.value}"
            )
        elif found is None and slurm.not_read:
            continue  # it may stand in a file that is not read
        elif found is None:
            added.append(f"{setting.key}={setting.value}")
        else:
            changed.setdefault(found[1], {})[setting.key] = setting.value
    added += _node_sockets(slurm, classes, host, changed, version)
    edits = [_edit(line, with_words(slurm.rows(line), words)) for line, words in changed.items()]
    texts = _edited(slurm, edits)
    if added:
        text = texts[slurm.source]
        text += ("" if text.endswith("\n") or not text else "\n") + "\n".join(added) + "\n"
        texts[slurm.source] = text
    return texts


def _node_sockets(
    slurm: SlurmConfig,
    classes: Sequence[NodeClass],
    host: Host,
    changed: dict[ConfigLine, dict[str, str]],
    version: SlurmVersion | None,
) -> list[str]:
    """Sockets as NUMA nodes where they span several: words to change, and lines to add."""
    spanned = False
    for of in classes:
        shape = right_shape(of, host)
        found = {one.id for one in check_shape(of, host, slurm, version) if one.is_bad}
        if "slurm-sockets-span-nodes" in found and shape is not None and of.definition is not None:
            spanned = True
            changed.setdefault(of.definition.line, {}).update(
                Sockets=str(shape.sockets), CoresPerSocket=str(shape.cores_per_socket)
            )
    parameters = slurm.last("slurmdparameters")
    if not spanned or (parameters and "numa_node_as_socket" in parameters[0]):
        return []
    if parameters is None:
        return ["SlurmdParameters=numa_node_as_socket"]
    value = f"{parameters[0]},numa_node_as_socket"
    changed.setdefault(parameters[1], {})["SlurmdParameters"] = value
    return []


def _edit(line: ConfigLine, lines: tuple[str, ...]) -> LineEdit:
    return LineEdit(line.source, line.first, line.last, lines)


def _comments(config: SlurmConfig, lines: Iterable[ConfigLine]) -> tuple[str, ...]:
    """What stands behind "#" on lines that go, each as a line of its own."""
    found = (re.search(r"(?<!\\)#.*", row) for at in lines for row in config.rows(at))
    return tuple(match[0] for match in found if match is not None)


def _edited(config: SlurmConfig, edits: Iterable[LineEdit]) -> dict[str, str]:
    """Its files after all edits, whose lines do not overlap: texts by name."""
    rows = {file.source: file.text.split("\n") for file in config.files}
    by_place = {(edit.source, edit.first): edit for edit in edits}
    for source, first in sorted(by_place, reverse=True):
        edit = by_place[source, first]
        rows[source][edit.first - 1 : edit.last] = edit.lines
    return {source: "\n".join(lines) for source, lines in rows.items()}
