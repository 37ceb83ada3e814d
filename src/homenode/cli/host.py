"""homenode show, capture and list: hosts, layouts and findings. [I/O]"""

import json
from collections.abc import Sequence
from itertools import zip_longest

from homenode.cli.arguments.measure import FindingsArguments, HostsArguments, LayoutsArguments
from homenode.cli.arguments.place import (
    CaptureArguments,
    ShowArguments,
)
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    make_console,
    note,
    note_gaps,
    note_written,
    print_json,
    say,
    working,
    write_bytes,
    write_text,
)
from homenode.doc import Doc, Table, Text
from homenode.errors import exclusive, requires, unknown
from homenode.findings import GROUPS, NO_VMS, catalogue, find_texts, list_unread_vms, page
from homenode.formats import encode
from homenode.machine.description.parse import is_made_up, list_shipped_hosts, load_shipped
from homenode.machine.topology import Host, summarise
from homenode.safe.input_files import read_input
from homenode.text import plural
from homenode.units import format_bytes
from homenode.vm.layout import AUTO_SUMMARY, PRESETS, STUDY_NAMES, SUMMARIES, Layout
from homenode.vm.sources import load_host


def show(arguments: ShowArguments) -> None:
    if arguments.plan is not None and arguments.svg is None:
        raise requires("--plan", "--svg", "--svg FILE")
    if arguments.json and arguments.svg == STANDARD_OUTPUT:
        raise exclusive("--json", "--svg -", "--svg FILE")
    check_can_write(arguments.svg, force=arguments.force)
    host = load_host(arguments.host, lspci=arguments.lspci)
    if arguments.svg is not None:
        write_text(arguments.svg, _draw(host, arguments))
        note_written(arguments.svg)
    if arguments.json:
        print_json(encode("host", host, {"summary": summarise(host)}))
    elif arguments.svg is None:
        from homenode.show.host_text import build_host_tree, format_host

        make_console().print(build_host_tree(host) if arguments.explain else format_host(host))


OVERVIEW = """
homenode show           nodes, cores, GPUs, links and VMs of this machine
homenode doctor         slow links, bad settings and costly pins
homenode plan VM        where a VM goes, and why
homenode apply VM       plan it, show the change, prompt, define it
homenode restore VM     undo that
homenode --help         all 17 commands"""


def print_overview() -> None:
    """Print a summary of this machine, and the first commands to try."""
    host = load_host(None)
    counts = summarise(host)
    memory = "memory unknown"
    if counts.memory_bytes is not None:
        memory = format_bytes(counts.memory_bytes)
    parts = (
        plural(counts.packages, "package"),
        plural(counts.numa_nodes, "node"),
        plural(counts.cores, "core"),
        memory,
        plural(counts.gpus, "GPU"),
    )
    unread = list_unread_vms(host.gaps) or any(gap.subject == NO_VMS for gap in host.gaps)
    vms = "VMs unknown" if unread else plural(len(host.domains), "VM")
    say(f"this machine: {', '.join(parts)}; {vms}\n{OVERVIEW}")


def _draw(host: Host, arguments: ShowArguments) -> str:
    from homenode.plan.stored import read_plan_for
    from homenode.show.topology_map import draw_topology

    if arguments.plan is None:
        return draw_topology(host, None)
    plan_text = read_input(arguments.plan, "a saved plan")
    return draw_topology(host, read_plan_for(host, plan_text, str(arguments.plan)))


def capture(arguments: CaptureArguments) -> None:
    """Write the snapshot, and print its contents."""
    from homenode.machine.snapshot.capture import capture_host

    check_can_write(arguments.output, force=arguments.force)
    with working(f"reading {arguments.ssh or 'this machine'}"):
        captured = capture_host(arguments.ssh, redacted=not arguments.no_redact)
    write_bytes(arguments.output, captured.content, captured.mode)
    manifest = captured.manifest
    note(
        f"wrote {arguments.output} ({format_bytes(len(captured.content))}): "
        f"{plural(manifest.files, 'file')}, {plural(manifest.links, 'link')}, "
        f"tools: {', '.join(manifest.commands) or 'none'}"
    )
    for path, reason in manifest.omitted:
        note(f"  omitted {path}: {reason}")
    if arguments.output != STANDARD_OUTPUT:
        note_gaps(load_host(str(arguments.output)).gaps)
    note(
        "redacted: serials, UUIDs, MACs, addresses, host, user and domain names"
        if manifest.redacted
        else "NOT redacted: do not publish it"
    )
    for noun in manifest.not_everywhere:
        note(
            f"the {noun} is a short or common word and may remain in some files: check the archive "
            "before you publish it"
        )


def layouts(arguments: LayoutsArguments) -> None:
    if arguments.json:
        _print_rows([_make_layout_row(preset) for preset in PRESETS.values()])
        return
    rows = tuple(
        (
            preset.name,
            next(iter(_list_study_names(preset.name)), "-"),
            preset.pinning.replace("-", " ").replace("cpu", "CPU"),
            *(preset.siblings, preset.cells, preset.pcie),
            preset.memory.removeprefix("bound-").replace("-", " "),
        )
        for preset in PRESETS.values()
    )
    heads = ("layout", "study", "pinning", "siblings", "guest nodes", "PCIe", "memory")
    title = f"{len(rows)} layouts; auto (the default) chooses by objective and machine"
    make_console().print(Doc(title, (Table(heads=heads, rows=rows), Text(_SWITCH_VALUES))))


_SWITCH_VALUES = (
    "keep: as the definition has it; host: as the chosen host nodes are; -smt doubles the vCPUs "
    "on the same cores (--keep-vcpus: half the cores)"
)


def _make_layout_row(preset: Layout) -> dict[str, object]:
    return {
        "name": preset.name,
        "about": SUMMARIES.get(preset.name, AUTO_SUMMARY),
        "study_names": _list_study_names(preset.name),
        "pinning": preset.pinning,
        "siblings": preset.siblings,
        "cells": preset.cells,
        "pcie": preset.pcie,
        "memory": preset.memory,
    }


def _list_study_names(name: str) -> list[str]:
    return [study for study, preset in STUDY_NAMES.items() if preset == name]


def hosts(arguments: HostsArguments) -> None:
    """Print the names of shipped hosts with their descriptions."""
    shown_names = [name for name in list_shipped_hosts() if not is_made_up(name)]
    title = f"{plural(len(shown_names), 'host')} for --host"
    if not (arguments.json or arguments.explain):
        say(f"{title}; --explain describes each\n\n{_format_columns(shown_names)}")
        return
    rows = tuple((name, load_shipped(name).about) for name in shown_names)
    if arguments.json:
        _print_rows([{"name": name, "about": about} for name, about in rows])
        return
    heads = ("name", "what it is")
    make_console().print(Doc(title, (Table(heads=heads, rows=rows, folds=heads[-1:]),)))


def findings(arguments: FindingsArguments) -> None:
    """Print the page of a finding, the findings of a group, or the groups."""
    texts_by_id = catalogue()
    group = GROUPS.get(arguments.finding or "")
    if arguments.finding is None or group is not None:
        ids = page(arguments.finding) if arguments.finding else sorted(texts_by_id)
        if arguments.json:
            _print_rows([{"id": key, "text": _format_page(key)} for key in ids])
        elif arguments.finding is None:
            title = f"{len(texts_by_id)} findings; homenode list findings GROUP lists their ids"
            rows = [(name, str(len(page(name))), about) for name, about in GROUPS.items()]
            heads = ("group", "findings", "about")
            make_console().print(
                Doc(title, (Table(heads=heads, rows=tuple(rows), numeric=heads[1:2]),))
            )
        else:
            title = f"{plural(len(ids), 'finding')}; homenode list findings ID explains one"
            say(f"{title}\n\n{_format_columns(list(ids))}")
        return
    if arguments.finding not in texts_by_id:
        raise unknown("finding", arguments.finding, texts_by_id, "homenode list findings")
    text = _format_page(arguments.finding)
    if arguments.json:
        _print_rows([{"id": arguments.finding, "text": text}])
    elif make_console().is_terminal:
        from rich.markdown import Markdown

        make_console().print(Markdown(text))
    else:
        say(text.rstrip())


_MAX_WIDTH = 120
"""Width of a list of names, also if it is piped."""


def _format_columns(names: Sequence[str]) -> str:
    """Format names in columns that are read downwards."""
    for line_count in range(1, len(names) + 1):
        columns = [names[at : at + line_count] for at in range(0, len(names), line_count)]
        widths = [max(map(len, column)) + 2 for column in columns]
        if sum(widths) - 2 <= min(_MAX_WIDTH, make_console().width):
            break
    lines = zip_longest(*columns, fillvalue="")
    return "\n".join(
        "".join(f"{name:{width}}" for name, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _format_page(id: str) -> str:
    return find_texts(id).format_markdown(f"# {id}")


def _print_rows(rows: list[dict[str, object]]) -> None:
    print_json(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
