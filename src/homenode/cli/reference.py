"""homenode list: what layouts, shipped hosts and findings are. [I/O]"""

import json

from homenode.catalogue import catalogue
from homenode.cli.arguments.conclude import FindingsArguments, HostsArguments, LayoutsArguments
from homenode.cli.terminal import console, print_json, say
from homenode.doc import Doc, Table
from homenode.errors import InputError
from homenode.machine.description.shipped import load_shipped, shipped_hosts
from homenode.vm.layout import AUTO_SUMMARY, PRESETS, STUDY_NAMES, SUMMARIES, Layout
from homenode.wording import did_you_mean


def layouts(asked: LayoutsArguments) -> None:
    """Print each layout with its switches."""
    if asked.json:
        _print_rows([_layout_row(preset) for preset in PRESETS.values()])
        return
    say("auto: what the evidence recommends for the VM (the default)\n")
    for name, summary in SUMMARIES.items():
        also = ", ".join(_study_names(name))
        say(f"{name}: {summary}" + (f" (study: {also})" if also else ""))
    rows = tuple(
        (
            preset.name,
            preset.pinning.replace("-", " ").replace("pu", "PU"),
            *(
                "-" if switch in ("as-it-was", "as-they-were") else switch.replace("bound-", "")
                for switch in (preset.siblings, preset.cells, preset.pcie, preset.memory)
            ),
        )
        for preset in PRESETS.values()
    )
    say("")
    columns = ("layout", "pinning", "siblings", "cells", "PCIe", "memory")
    console().print(Doc("", (Table(heads=columns, rows=rows),)))
    say("-: as the domain has it; per-cell: each guest cell's memory on its own host node")
    say("-smt layouts double the vCPUs on the same cores; --keep-vcpus halves the cores.")


def _layout_row(preset: Layout) -> dict[str, object]:
    return {
        "name": preset.name,
        "about": SUMMARIES.get(preset.name, AUTO_SUMMARY),
        "study_names": _study_names(preset.name),
        "pinning": preset.pinning,
        "siblings": preset.siblings,
        "cells": preset.cells,
        "pcie": preset.pcie,
        "memory": preset.memory,
    }


def _study_names(name: str) -> list[str]:
    return [study for study, preset in STUDY_NAMES.items() if preset == name]


def hosts(asked: HostsArguments) -> None:
    """Print the names of shipped hosts, and what each is."""
    rows = tuple((name, load_shipped(name).about) for name in shipped_hosts())
    if asked.json:
        _print_rows([{"name": name, "about": about} for name, about in rows])
    else:
        heads = ("name", "what it is")
        console().print(Doc("", (Table(heads=heads, rows=rows, folds=heads[-1:]),)))


def findings(asked: FindingsArguments) -> None:
    """Print the page of a finding, or the ids of all."""
    known = catalogue()
    if asked.finding is None:
        if asked.json:
            _print_rows([{"id": name, "text": known[name].text} for name in sorted(known)])
        else:
            say("\n".join(sorted(known)))
        return
    if asked.finding not in known:
        raise InputError(
            f"{asked.finding}: expected the id of a finding, found none of that name",
            hint=f"{did_you_mean(asked.finding, known)}each finding ends with its id in brackets",
        )
    text = known[asked.finding].text
    if asked.json:
        _print_rows([{"id": asked.finding, "text": text}])
    elif console().is_terminal:
        from rich.markdown import Markdown

        console().print(Markdown(text))
    else:
        say(text.rstrip())


def _print_rows(rows: list[dict[str, object]]) -> None:
    print_json(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
