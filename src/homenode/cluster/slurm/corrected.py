"""Corrected: configuration files with wrong lines set right and all others byte for byte."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from homenode.cluster.slurm.check_slurm import (
    KNOWS_ENFORCE_BINDING,
    SlurmVersion,
    check_shape,
    right_settings,
    right_shape,
)
from homenode.cluster.slurm.config import Config, ConfigLine, with_words
from homenode.cluster.slurm.gres import right_gpus, right_lines
from homenode.cluster.slurm.nodes import NodeClass
from homenode.machine.topology import Host


class Edit(NamedTuple):
    """Physical lines `first` to `last` of a file, both counted from 1, become these."""

    source: str
    first: int
    last: int
    lines: tuple[str, ...]


def corrected_gres(
    gres: Config,
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
    edits: list[Edit] = []
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
    slurm: Config, classes: Sequence[NodeClass], host: Host, version: SlurmVersion | None
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
    slurm: Config,
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


def _edit(line: ConfigLine, lines: tuple[str, ...]) -> Edit:
    return Edit(line.source, line.first, line.last, lines)


def _comments(config: Config, lines: Iterable[ConfigLine]) -> tuple[str, ...]:
    """What stands behind "#" on lines that go, each as a line of its own."""
    found = (re.search(r"(?<!\\)#.*", row) for at in lines for row in config.rows(at))
    return tuple(match[0] for match in found if match is not None)


def _edited(config: Config, edits: Iterable[Edit]) -> dict[str, str]:
    """Its files after all edits, whose lines do not overlap: texts by name."""
    rows = {file.source: file.text.split("\n") for file in config.files}
    by_place = {(edit.source, edit.first): edit for edit in edits}
    for source, first in sorted(by_place, reverse=True):
        edit = by_place[source, first]
        rows[source][edit.first - 1 : edit.last] = edit.lines
    return {source: "\n".join(lines) for source, lines in rows.items()}
