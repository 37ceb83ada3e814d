"""Corrected: configuration files with wrong lines set right and all others byte for byte."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from homenode.slurm.check_slurm import (
    KNOWS_ENFORCE_BINDING,
    SlurmVersion,
    check_shape,
    right_settings,
    right_shape,
)
from homenode.slurm.config import Config, ConfigLine
from homenode.slurm.gpu_lines import right_gpus, right_lines
from homenode.slurm.node_class import NodeClass
from homenode.topology import Host


class Edit(NamedTuple):
    """Physical lines `first` to `last`, both counted from 1, become these."""

    first: int
    last: int
    lines: tuple[str, ...]


def corrected_gres(
    gres: Config, classes: Sequence[NodeClass], host: Host, wrong: Iterable[NodeClass], *,
    links: bool,
) -> str:  # fmt: skip
    """The file with the GPU lines of these classes rewritten.

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
        edits.append(Edit(places[0].first, places[0].last, (*said, *lines)))
        edits += [Edit(place.first, place.last, ()) for place in places[1:]]
    return _edited(gres.text, edits)


def corrected_slurm(
    slurm: Config, classes: Sequence[NodeClass], host: Host, version: SlurmVersion | None
) -> str:
    """The file with wrong settings set right, and missing ones at its end.

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
        elif found is None and slurm.includes:
            continue  # it may stand in a file that is not read
        elif found is None:
            added.append(f"{setting.key}={setting.value}")
        else:
            changed.setdefault(found[1], {})[setting.key] = setting.value
    added += _node_sockets(slurm, classes, host, changed)
    edits = [_with_words(slurm, line, words) for line, words in changed.items()]
    text = _edited(slurm.text, edits)
    if added:
        text += ("" if text.endswith("\n") or not text else "\n") + "\n".join(added) + "\n"
    return text


def _node_sockets(
    slurm: Config,
    classes: Sequence[NodeClass],
    host: Host,
    changed: dict[ConfigLine, dict[str, str]],
) -> list[str]:
    """Sockets as NUMA nodes where they span several: words to change, and lines to add."""
    spanned = False
    for of in classes:
        shape = right_shape(of, host)
        found = {finding.id for finding in check_shape(of, host, slurm)}
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


def _with_words(config: Config, line: ConfigLine, words: Mapping[str, str]) -> Edit:
    """The line with these words' values replaced, all else as it is written."""
    text = "\n".join(config.text.split("\n")[line.first - 1 : line.last])
    for key, value in words.items():
        pattern = re.compile(rf'\b({re.escape(key)})\s*[-+]?=\s*("[^"]*"|\S+)', re.IGNORECASE)
        match = pattern.search(text)
        if match is None:
            text = f"{text} {key}={value}"
        else:
            text = f"{text[: match.start()]}{match[1]}={value}{text[match.end() :]}"
    return Edit(line.first, line.last, tuple(text.split("\n")))


def _comments(config: Config, lines: Iterable[ConfigLine]) -> tuple[str, ...]:
    """What stands behind "#" on lines that go, each as a line of its own."""
    rows = config.text.split("\n")
    found = (re.search(r"(?<!\\)#.*", row) for at in lines for row in rows[at.first - 1 : at.last])
    return tuple(match[0] for match in found if match is not None)


def _edited(text: str, edits: Iterable[Edit]) -> str:
    """The text after all edits, whose lines do not overlap."""
    lines = text.split("\n")
    by_first = {edit.first: edit for edit in edits}
    for first in sorted(by_first, reverse=True):
        edit = by_first[first]
        lines[edit.first - 1 : edit.last] = edit.lines
    return "\n".join(lines)
