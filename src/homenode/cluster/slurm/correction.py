"""Correction: gres.conf and slurm.conf corrected for the machine of their GPU nodes.

A correct line stays byte for byte; a corrected line keeps its other words and its comment.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from homenode.cluster.slurm.check import (
    GpuCores,
    find_right_cores,
    find_right_type,
    format_gres,
    gpu_cores,
    groups_like,
    has_core_counts,
    has_other_model,
    list_right_settings,
)
from homenode.cluster.slurm.config import ConfigLine, SlurmConfig, config_word, replace_words
from homenode.cluster.slurm.gres import GresLine, NodeClass, group_nodes, place_files
from homenode.cluster.slurm.job_allocation import build_core_order
from homenode.cluster.slurm.slurm_nodes import compress_hostlist
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.topology import Host

_DEVICE_FILES = {0x10DE: ("/dev/nvidia", 0), 0x1002: ("/dev/dri/renderD", 128)}
"""Rows by vendor: prefix of the device file, and the number of GPU 0."""

Edits = dict[ConfigLine, tuple[str, ...]]
"""The physical lines that a logical one becomes."""


def correct(
    gres: SlurmConfig, slurm: SlurmConfig, host: Host, nodes: Sequence[str] = ()
) -> dict[str, str]:
    """Return the text of each file, included ones too, with GPUs, counts and settings set right.

    Lines about other nodes too (`find_shared_lines`) are left alone, and so are MIG slices' counts.
    Raises like `check`, and InputError if all nodes have other cores and other GPUs.
    """
    groups, gpus = groups_like(group_nodes(gres, slurm, nodes), host), gpu_cores(host)
    reject_other_machines(groups, host)
    shared_lines = find_shared_lines(gres, slurm, host, nodes)
    gres_edits: Edits = {}
    words_of: dict[ConfigLine, dict[str, str]] = {}
    added_lines: dict[str, list[str]] = {gres.source: [], slurm.source: []}
    for group in groups:
        types = None
        if not shared_lines.keys() & set(group.lines):
            # A line is written once: the type of one group must be that of all.
            kinds = {find_right_type(other, host) for other in groups if other.lines == group.lines}
            kind = kinds.pop() if len(kinds) == 1 else ""
            types = _correct_lines(gres, group, host, kind, gres_edits)
        # A detector adds the GPUs that no line names.
        if not group.is_sliced and (not group.lines or group.autodetect is not None):
            # Of several types it is unknown which GPUs have which.
            is_one_type = len(group.configured_gpus) < 2
            if is_one_type and group.autodetect is None and not gres.not_read:
                added_lines[gres.source] += _format_new_lines(group, gpus)
            types = {next(iter(group.configured_gpus), ""): len(gpus)} if is_one_type else None
        node = group.definition
        if node is None or set(node.names) != set(group.names) or not types:
            continue
        is_whole = sum(types.values()) == sum(group.configured_gpus.values())
        if not is_whole or (
            set(group.configured_gpus) != {""} and types != dict(group.configured_gpus)
        ):
            other_gres = [
                item for item in (node.gres or "").split(",") if item.partition(":")[0] != "gpu"
            ]
            value = ",".join([format_gres(types), *filter(None, other_gres)])
            words_of.setdefault(node.line, {})["Gres"] = value
    core_counts = has_core_counts(groups, build_core_order(host))
    for key, (_, value) in list_right_settings(slurm, core_counts).items():
        setting = slurm.find_last(key.lower())
        if setting is not None:
            words_of.setdefault(setting[1], {})[key] = value
        elif not slurm.not_read:  # else it may be in a file that is not read
            added_lines[slurm.source].append(f"{key}={value}")
    slurm_edits = {
        line: replace_words(slurm.find_rows(line), words) for line, words in words_of.items()
    }
    return _apply_edits((gres, slurm), {**gres_edits, **slurm_edits}, added_lines)


def reject_other_machines(groups: Sequence[NodeClass], host: Host) -> None:
    """Raise InputError if no group has the machine's cores or a GPU of its model: then the machine
    is not the reference."""
    order, shapes = build_core_order(host), []
    for group in groups:
        shape = None if group.definition is None else group.definition.shape
        if shape is None or order.fits(shape) or not has_other_model(group, host):
            return
        shapes.append(shape)
    if shapes:
        group = groups[0]
        types = ", ".join(kind for kind in group.configured_gpus if kind) or "other GPUs"
        raise InputError(
            f"{host.name}: another machine than {group.subject}, which has {shapes[0]} cores "
            f"(sockets x cores x threads) and {types} in Slurm's files",
            hint="capture one of the nodes (srun -w NODE homenode capture -o NODE.tar.gz) and "
            "name it: --host NODE.tar.gz",
        )


def find_shared_lines(
    gres: SlurmConfig, slurm: SlurmConfig, host: Host, nodes: Sequence[str] = ()
) -> dict[GresLine, tuple[str, ...]]:
    """Return the gres.conf lines that also name nodes of other machines or outside `nodes`."""
    groups = groups_like(group_nodes(gres, slurm, nodes), host)
    names = {name for group in groups for name in group.names}
    every = [name for group in group_nodes(gres, slurm) for name in group.names]
    lines = {line: every if line.nodes is None else line.nodes for g in groups for line in g.lines}
    edits: Edits = {}
    for group in groups:
        _correct_lines(gres, group, host, find_right_type(group, host), edits)
    others = {line: tuple(n for n in of_line if n not in names) for line, of_line in lines.items()}
    return {line: names for line, names in others.items() if names and line.line in edits}


def _correct_lines(
    gres: SlurmConfig, group: NodeClass, host: Host, promised_type: str, edits: Edits
) -> dict[str, int] | None:
    """Add the group's corrected lines to edits, and return the GPUs of each type in them; None if
    lines without files cannot be corrected."""
    file_places = place_files(group.lines)
    if not file_places or any(file is None for _, file, _ in file_places):
        return None
    gpus, order = gpu_cores(host), build_core_order(host)
    is_detected = group.autodetect is not None
    types: dict[str, int] = {}
    rows: tuple[str, ...] = ()
    listed_types: set[str | None] = set()
    line = file_places[0][0]
    for line, members in groupby(file_places, key=lambda place: place[0]):
        files: dict[CpuSet | None, list[str]] = {}
        for _, file, number in members:
            is_first = 0 <= number < len(gpus) and file not in listed_types
            listed_types.add(file)
            if file is not None and (group.is_sliced or is_first):
                gpu = gpus[number] if 0 <= number < len(gpus) else None
                cores = line.cores
                if gpu is not None:
                    cores = find_right_cores(line, gpu, order, is_detected=is_detected)
                files.setdefault(cores, []).append(file)
        rows = ()
        for cores, names in files.items():
            is_all = line.is_multiple or len(names) == len(line.files)
            rows += _format_gpu_line(gres, line, () if is_all else names, cores, promised_type)
        if rows != tuple(gres.find_rows(line.line)):
            edits[line.line] = rows
        count = 1 if line.is_multiple else sum(map(len, files.values()))
        kind = (promised_type or line.type or "").lower()
        types[kind] = types.get(kind, 0) + count
    if not (is_detected or group.is_sliced or line.line.get("links")):
        missing = [gpu for gpu in gpus if gpu.index not in {number for _, _, number in file_places}]
        stem = _find_stem(file_places)
        if missing and stem is not None and all(gpu.cores is not None for gpu in missing):
            for cores, neighbours in groupby(missing, key=lambda gpu: gpu.cores):
                names = [f"{stem[0]}{gpu.index + stem[1]}" for gpu in neighbours]
                rows += _format_gpu_line(gres, line, names, cores, promised_type)
            edits[line.line] = rows
            kind = (promised_type or line.type or "").lower()
            types[kind] = types.get(kind, 0) + len(missing)
    return {kind: count for kind, count in types.items() if count} or None


def _format_gpu_line(
    gres: SlurmConfig, line: GresLine, files: Sequence[str], cores: CpuSet | None, kind: str
) -> tuple[str, ...]:
    """The line's rows with these files, () = its own, these cores and this type, "" = its own."""
    words = {"Type": kind} if kind else {}
    words |= {"File": compress_hostlist(files)} if files else {}
    words |= {"Count": str(len(files))} if files and line.count is not None else {}
    if cores is not None and cores != line.cores:
        words["CPUs" if line.line.get("cores") is None and line.line.get("cpus") else "Cores"] = (
            str(cores)
        )
    rows = tuple(gres.find_rows(line.line))
    return replace_words(rows, words) if words else rows


def _find_stem(file_places: Sequence[tuple[GresLine, str | None, int]]) -> tuple[str, int] | None:
    """Return a device file's name before its number, and the number of GPU 0, if all agree."""
    stems = set()
    for _, file, number in file_places:
        stem = (file or "").rstrip("0123456789")
        digits = (file or "")[len(stem) :]
        stems.add((stem, int(digits) - number) if digits else None)
    return next(iter(stems)) if len(stems) == 1 else None


def _format_new_lines(group: NodeClass, gpus: Sequence[GpuCores]) -> list[str]:
    """Return lines for GPUs that no line names; none if a vendor's device files are unknown."""
    lines = []
    kind = next(iter(group.configured_gpus), "")
    for (vendor, cores), neighbours in groupby(gpus, key=lambda gpu: (gpu.vendor, gpu.cores)):
        if vendor not in _DEVICE_FILES:
            return []
        stem, first = _DEVICE_FILES[vendor]
        files = compress_hostlist(f"{stem}{first + gpu.index}" for gpu in neighbours)
        names = [config_word("NodeName", compress_hostlist(group.names))] if group.names else []
        types = [config_word("Type", kind)] if kind else []
        words = [*names, "Name=gpu", *types, config_word("File", files)]
        lines.append(" ".join([*words, *([] if cores is None else [f"Cores={cores}"])]))
    return lines


def _apply_edits(
    configs: Sequence[SlurmConfig], edits: Edits, added_lines: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the texts of the files after the edits, added lines at the end of each."""
    rows = {file.source: file.text.split("\n") for config in configs for file in config.files}
    for line in sorted(edits, key=lambda line: -line.first):
        rows[line.source][line.first - 1 : line.last] = edits[line]
    for source, lines in added_lines.items():
        if lines:
            if not rows[source][-1]:
                rows[source].pop()
            rows[source] += [*lines, ""]
    return {source: "\n".join(lines) for source, lines in rows.items()}
